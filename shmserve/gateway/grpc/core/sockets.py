"""gRPC's own sockets, of which it tells nobody, found among this process's descriptors.

They stay gRPC's: each is borrowed for a question, and only if it is still the same connection.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote

from shmserve.common.access.peer_credentials import Address

T = TypeVar("T")

_INTERNET = (socket.AF_INET, socket.AF_INET6)
# In struct tcp_info of linux/tcp.h: tcpi_last_data_sent, ..., tcpi_last_data_recv (ms ago), and
# tcpi_bytes_acked, tcpi_bytes_received.
_LAST_DATA, _LAST_DATA_AT = struct.Struct("=I4xI"), 44
_MOVED, _MOVED_AT = struct.Struct("=QQ"), 120
_INFO_SIZE = 256


class GrpcConnection(NamedTuple):
    """A descriptor that was the socket `inode`, from the address `here` to `client`.

    An inode's number is one socket's for as long as it lives.
    """

    fd: int
    inode: int
    here: Address
    client: Address


def connections() -> Iterator[GrpcConnection]:
    """All that this process has over TCP, whichever end it is."""
    for fd in _descriptors():
        with contextlib.suppress(OSError), _socket(fd) as sock:
            if sock is not None:
                here, client = _plain(sock.getsockname()), _plain(sock.getpeername())
                yield GrpcConnection(fd, os.fstat(fd).st_ino, here, client)


def count() -> int:
    """The number of descriptors of any kind this process has."""
    return len(os.listdir("/proc/self/fd"))


def find(client: Address) -> GrpcConnection | None:
    """The one to this address."""
    return next((found for found in connections() if found.client == client), None)


def listeners(ports: set[int]) -> list[int]:
    """The descriptors that wait for connections to one of these ports."""
    found: list[int] = []
    for fd in _descriptors():
        with contextlib.suppress(OSError), _socket(fd) as sock:
            if sock is None or not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                continue
            if sock.getsockname()[1] in ports:
                found.append(fd)
    return found


def is_open(connection: GrpcConnection) -> bool:
    """Whether it has not ended."""
    return _ask(connection, lambda _: True) is not None


def moved(connection: GrpcConnection, *, inwards: bool) -> int:
    """The number of bytes that have come on it, or have been taken by the other end; 0 if it
    has ended."""
    info = _ask(connection, _tcp_info)
    return 0 if info is None else int(_MOVED.unpack_from(info, _MOVED_AT)[inwards])


def silent_ms(connection: GrpcConnection) -> int | None:
    """For how long no data went either way; None if it has ended."""
    info = _ask(connection, _tcp_info)
    return None if info is None else int(min(_LAST_DATA.unpack_from(info, _LAST_DATA_AT)))


def shut(connection: GrpcConnection) -> None:
    """End it; gRPC sees that and clears up."""
    _ask(connection, lambda sock: sock.shutdown(socket.SHUT_RDWR))


def refuse(listener: int) -> None:
    """Have connections to a listening socket refused: gRPC's descriptor becomes one at which
    nothing ever comes. Of a socket that were only shut, it would say that it is broken."""
    with socket.socket(type=socket.SOCK_DGRAM) as deaf:
        os.dup2(deaf.fileno(), listener, inheritable=False)


def send(connection: GrpcConnection, frame: bytes) -> None:
    """Send a frame between gRPC's own: a connection without calls has none under way."""
    _ask(connection, lambda sock: sock.send(frame, socket.MSG_DONTWAIT))


def address_of(peer: str) -> Address | None:
    """The address that gRPC calls "ipv4:HOST:PORT" or "ipv6:[HOST]:PORT" (escaped); None for
    anything else."""
    family, _, rest = unquote(peer).partition(":")
    host, _, port = rest.rpartition(":")
    if family not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    return host.strip("[]"), int(port)


def _descriptors() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/fd")]


@contextlib.contextmanager
def _socket(fd: int) -> Iterator[socket.socket | None]:
    """The TCP socket that a descriptor is; None for anything else. Raises OSError if it is gone."""
    try:
        sock = socket.socket(fileno=fd)
    except OSError:
        yield None
        return
    try:
        is_tcp = sock.family in _INTERNET and sock.type == socket.SOCK_STREAM
        yield sock if is_tcp else None
    finally:
        sock.detach()


def _ask(connection: GrpcConnection, question: Callable[[socket.socket], T]) -> T | None:
    fd, inode, _, client = connection
    try:
        with _socket(fd) as sock:
            if sock is None or os.fstat(fd).st_ino != inode or _plain(sock.getpeername()) != client:
                return None
            return question(sock)
    except OSError:
        return None


def _tcp_info(sock: socket.socket) -> bytes:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_SIZE)


def _plain(name: tuple[Any, ...]) -> Address:
    # gRPC's sockets are of the newer family even where their addresses are of the older.
    return str(name[0]).removeprefix("::ffff:"), int(name[1])
