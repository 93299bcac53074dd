"""TLS settings of the gRPC listener: validation with one message that names the flag."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shmserve.errors import InvalidArgument

if TYPE_CHECKING:
    import ssl

_PROTOCOL = "h2"


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files; with `root_cert`, clients must present a certificate signed by it."""

    server_cert: str
    server_key: str
    root_cert: str | None = None

    def context(self) -> ssl.SSLContext:
        """Return the SSL context for server connections.

        Raises:
            InvalidArgument: A file cannot be read or is invalid; the message names the flag.
        """
        import ssl  # imported only if TLS is used

        check_file("grpc-server-cert", self.server_cert)
        check_file("grpc-server-key", self.server_key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols([_PROTOCOL])
        pair = (
            f"--grpc-server-cert, --grpc-server-key: '{self.server_cert}' and '{self.server_key}'"
        )
        try:
            context.load_cert_chain(self.server_cert, self.server_key, password=str)
        except OSError:
            raise InvalidArgument(
                f"{pair} are not a certificate and its private key in PEM"
            ) from None
        if not _can_shake_hands(context):
            raise InvalidArgument(
                f"{pair} are of a kind that clients do not take (RSA, P-256 and P-384 are taken)"
            )
        if self.root_cert is not None:
            check_file("grpc-root-cert", self.root_cert)
            try:
                context.load_verify_locations(self.root_cert)
            except OSError:
                raise InvalidArgument(
                    f"--grpc-root-cert: '{self.root_cert}' holds no certificate in PEM"
                ) from None
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def _can_shake_hands(context: ssl.SSLContext) -> bool:
    """Check whether the context completes a handshake with a client that has default settings."""
    import ssl

    theirs = ssl.create_default_context()
    theirs.check_hostname = False
    theirs.verify_mode = ssl.CERT_NONE
    theirs.set_alpn_protocols([_PROTOCOL])
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = context.wrap_bio(to_server, to_client, server_side=True)
    client = theirs.wrap_bio(to_client, to_server)
    done: set[ssl.SSLObject] = set()
    for _ in range(4):
        for end in (client, server):
            try:
                end.do_handshake()
                done.add(end)
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError:
                return False
    return len(done) == 2


def check_file(flag: str, path: str) -> None:
    """Raise InvalidArgument, naming the flag, if `path` is no file or cannot be read."""
    if not path:
        raise InvalidArgument(f"--{flag}: a file is needed for TLS")
    if not os.access(path, os.R_OK) or not os.path.isfile(path):
        raise InvalidArgument(f"--{flag}: '{path}' is not a file that can be read")
