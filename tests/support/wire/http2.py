"""Hand-made HTTP/2 frames that client libraries would not send, and floods of them."""

import contextlib
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator

SERVICE = "/inference.GRPCInferenceService/"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

# Numbers of the frame types, and of some flags.
DATA, HEADERS, PRIORITY, RESET, SETTINGS = range(5)
PING, GO_AWAY, WINDOW, CONTINUATION = range(6, 10)
END_STREAM, END_HEADERS, ACK = 1, 4, 1

_MAX_AHEAD = 65536


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    head = struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream)
    return head + payload


def window(stream: int, increment: int) -> bytes:
    return frame(WINDOW, 0, stream, struct.pack(">I", increment))


def block(*headers: tuple[bytes, bytes]) -> bytes:
    """Return literal headers without indexing, each shorter than 127 bytes."""
    return b"".join(
        b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value for name, value in headers
    )


def post(path: str, *headers: tuple[bytes, bytes]) -> bytes:
    return block(
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path.encode()),
        (b":authority", b"localhost"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
        *headers,
    )


def message(data: bytes) -> bytes:
    return b"\0" + struct.pack(">I", len(data)) + data


CLIENT_OPENING = PREFACE + frame(SETTINGS, 0, 0)


@contextlib.contextmanager
def flood(port: int, make: Callable[[int], bytes]) -> Iterator[None]:
    """Send `make(stream)` for successive streams, on further connections if necessary."""
    has_finished = threading.Event()

    def flood_until_finished() -> None:
        while not has_finished.is_set():
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", port)) as sock,
            ):
                sock.setblocking(False)
                _flood(sock, make, has_finished)

    thread = threading.Thread(target=flood_until_finished)
    thread.start()
    try:
        yield
    finally:
        has_finished.set()
        thread.join()


def _flood(sock: socket.socket, make: Callable[[int], bytes], finished: threading.Event) -> None:
    ahead, behind, stream = bytearray(CLIENT_OPENING), b"", 1
    while not finished.is_set():
        while len(ahead) < _MAX_AHEAD:
            ahead += make(stream)
            stream += 2
        readable, writable, _ = select.select([sock], [sock], [], 0.1)
        if readable:
            data = sock.recv(1 << 20)
            if not data:
                return
            behind = _acknowledge(behind + data, ahead)
        if writable:
            del ahead[: sock.send(ahead)]


def _acknowledge(data: bytes, replies: bytearray) -> bytes:
    """Acknowledge the frames in `data` that require it; return the incomplete frame at its end."""
    offset = 0
    while len(data) >= offset + 9:
        end = offset + 9 + int.from_bytes(data[offset : offset + 3], "big")
        if len(data) < end:
            break
        kind, flags = data[offset + 3], data[offset + 4]
        if kind in (SETTINGS, PING) and not flags & ACK:
            replies += frame(kind, ACK, 0, data[offset + 9 : end] if kind == PING else b"")
        offset = end
    return data[offset:]
