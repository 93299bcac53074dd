"""TLS of a server's connection, without IO: ciphertext in, plaintext out, and back."""

from __future__ import annotations

import contextlib
import ssl

_READ = 64 * 1024


class BrokenTls(Exception):
    """The client speaks no TLS, or not the one that is asked for."""


class TlsLayer:
    """TLS of one connection. `ready` once the client has shown what it must, and speaks HTTP/2."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self.ready = False
        self._closed = False

    def receive(self, data: bytes | memoryview) -> bytes:
        """The plaintext in these bytes; `outgoing` has what is to be sent, in any case. Raises
        BrokenTls."""
        self._incoming.write(data)
        pieces: list[bytes] = []
        try:
            if not self.ready:
                self._tls.do_handshake()
                if self._tls.selected_alpn_protocol() != "h2":
                    raise BrokenTls("a client that does not speak HTTP/2")
                self.ready = True
            while piece := self._tls.read(_READ):
                pieces.append(piece)
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            pass  # the client says that it is done; the socket's end follows
        except ssl.SSLError as error:
            raise BrokenTls(str(error)) from None
        return b"".join(pieces)

    def send(self, data: bytes | memoryview) -> None:
        """Encrypt these; `outgoing` has them, unless all was said to have been sent."""
        if not self._closed:
            self._tls.write(data)

    def close(self) -> None:
        """Say that nothing more comes."""
        self._closed = True
        with contextlib.suppress(ssl.SSLError):  # the client has not said so yet
            self._tls.unwrap()

    def outgoing(self) -> bytes:
        """The ciphertext that is to be sent."""
        return self._outgoing.read()
