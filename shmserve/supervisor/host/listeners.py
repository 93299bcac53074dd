"""Listening sockets: bound once, by the supervisor, and inherited by gateways, so that no death of
a gateway refuses a connection; and who else has a port that is wanted."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shmserve.common.peers import NO_GROUP, is_loopback
from shmserve.errors import InvalidArgument, refused
from shmserve.ipc.transport.router import refuse_descriptors
from shmserve.supervisor.host.handover_link import Offer

# Of the addresses that a name has, those of a family that this host does without.
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


_BACKLOG = 1024


def resolve(address: str, port: int, flag: str, guarded: bool) -> list[Any]:
    """The socket addresses of `address`, as getaddrinfo has them.

    Raises InvalidArgument naming `flag` when nobody knows it, or when other hosts reach it and it
    is not `guarded`.
    """
    with refused(f"{flag}: cannot resolve '{address}'", "not a host's name"):
        found = socket.getaddrinfo(
            address or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    if not guarded and not all(is_loopback(str(where[0])) for *_, where in found):
        raise InvalidArgument(
            f"{flag}: other hosts reach '{address}', so clients must show a token "
            "(--auth-token-file FILE), or everybody may do everything (--insecure)"
        )
    return found


def listen(address: str, port: int, flag: str, guarded: bool) -> list[socket.socket]:
    """Listening TCP sockets on every address that `address` names; port 0 picks one.

    Raises InvalidArgument naming `flag` when the address cannot be had, or other hosts reach it and
    it is not `guarded`.
    """
    made: list[socket.socket] = []
    missing: OSError | None = None
    for family, _, _, _, where in resolve(address, port, flag, guarded):
        try:
            made.append(_bound_to(family, where))
        except OSError as error:
            missing = error
            if error.errno not in _NOT_HERE:
                break
    if missing is not None and (not made or missing.errno not in _NOT_HERE):
        for opened in made:
            opened.close()
        named = flag if missing.errno in _NOT_HERE else flag.replace("-address", "-port")
        reason = f"{missing.strerror}{_holder(missing, port)}"
        raise InvalidArgument(f"{named}: cannot listen on {address}:{port}: {reason}") from None
    return made


def _holder(error: OSError, port: int) -> str:
    holders = port_holders(port) if error.errno == errno.EADDRINUSE else []
    return f" (by {holders[0][1]}, pid {holders[0][0]})" if holders else ""


def _bound_to(family: int, where: Any) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(where)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def lend(sock: socket.socket, guarded: bool, by: str = "LISTEN_FDS") -> socket.socket:
    """A socket that listens already, of the service manager's, or a server's before; raises
    InvalidArgument where other hosts reach it and it is not `guarded`."""
    if sock.family == socket.AF_UNIX:
        if sock.type == socket.SOCK_STREAM:  # descriptors are for shmserve.client's alone
            refuse_descriptors(sock)
        return sock
    host, port = sock.getsockname()[:2]
    if not guarded and not is_loopback(host):
        raise InvalidArgument(
            f"{by}: other hosts reach {host}:{port}, so clients must show a token "
            "(--auth-token-file FILE), or everybody may do everything (--insecure)"
        )
    return sock


def listen_unix(path: Path, group: int, flag: str) -> socket.socket:
    """A listening unix socket at `path` for this process's user, and for `group` if there is one.

    What a server that was killed left at `path` is removed. Raises InvalidArgument naming `flag`
    when the path cannot be had.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_left_behind(path):
            path.unlink()
        mask = os.umask(0o177)
        try:
            sock.bind(os.fspath(path))
        finally:
            os.umask(mask)
        if group != NO_GROUP:
            os.chown(path, -1, group)
            path.chmod(0o660)
        refuse_descriptors(sock)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        reason = error.strerror or str(error)
        raise InvalidArgument(f"{flag}: cannot listen on '{path}': {reason}") from None
    return sock


def _is_left_behind(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(path.lstat().st_mode):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                return probe.connect_ex(os.fspath(path)) == errno.ECONNREFUSED
    return False


def close(sock: socket.socket) -> None:
    """Close a socket, if it is open. Of a unix socket the path goes first: while it is listened on,
    no other server has taken it."""
    if sock.family == socket.AF_UNIX and sock.fileno() >= 0:
        with contextlib.suppress(OSError):
            os.unlink(sock.getsockname())
    sock.close()


@dataclass(slots=True)
class Listeners:
    """The listening sockets of a server."""

    http: list[socket.socket] = field(default_factory=list)
    metrics: list[socket.socket] = field(default_factory=list)
    grpc: list[socket.socket] = field(default_factory=list)
    local: list[socket.socket] = field(default_factory=list)  # closed by who accepts there
    lent: list[socket.socket] = field(default_factory=list)  # of them: others go on with these
    kept: dict[str, list[int]] = field(default_factory=dict)  # registrations of a server before
    offer: Offer | None = None  # of a server that runs, whose place this one takes

    def have(self, path: Path) -> bool:
        """Whether one listens at a path."""
        return any(sock.getsockname() == os.fspath(path) for sock in (*self.http, *self.grpc))

    @property
    def door(self) -> socket.socket | None:
        """Where local clients come in at a server before."""
        return None if self.offer is None else self.offer.door

    def lend_all(self) -> None:
        """Others go on with all of them."""
        self.lent = [*self.http, *self.metrics, *self.grpc]

    def close(self) -> None:
        """Close every one, again if need be."""
        for sock in (*self.http, *self.metrics, *self.grpc):
            if sock in self.lent:
                sock.close()
            else:
                close(sock)

    def addresses(self) -> Iterator[str]:
        """A line for the log for each."""
        for name, sockets, start, path in (
            ("HTTP", self.http, "http://", ""),
            ("gRPC", self.grpc, "", ""),
            ("metrics", self.metrics, "http://", "/metrics"),
        ):
            for sock in sockets:
                yield f"{name} service at {_address(sock, start, 'unix socket ')}{path}"

    def publish(self, file: Path, *, tls: bool) -> None:
        """Write the URLs of HTTP, and those of gRPC, which may have TLS, for programs on this host;
        where there is no room for them, these find none."""
        urls = [_address(sock, "http://") for sock in self.http]
        start = "grpcs://" if tls else "grpc://"
        urls += [_address(sock, start) for sock in self.grpc if sock.family != socket.AF_UNIX]
        with contextlib.suppress(OSError):
            file.write_text("".join(f"{url}\n" for url in urls))


def _address(sock: socket.socket, start: str, unix: str = "unix:") -> str:
    if sock.family == socket.AF_UNIX:
        return f"{unix}{sock.getsockname()}"
    host, port = sock.getsockname()[:2]
    return f"{start}[{host}]:{port}" if ":" in host else f"{start}{host}:{port}"


_LISTENS = "0A"


def port_holders(port: int) -> list[tuple[int, str]]:
    """The processes (pid, name) that listen at a TCP port, those that can be seen, the eldest
    first; a listening socket may be several processes'."""
    sockets = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split(None, 10)
                if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                    sockets.add(f"socket:[{fields[9]}]")
    pids = sorted(int(name) for name in os.listdir("/proc") if name.isdecimal())
    return [(pid, _name(pid)) for pid in pids if sockets and _has(pid, sockets)]


def _has(pid: int, sockets: set[str]) -> bool:
    folder = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):
        for fd in os.listdir(folder):
            with contextlib.suppress(OSError):
                if os.readlink(f"{folder}/{fd}") in sockets:
                    return True
    return False


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return "?"
