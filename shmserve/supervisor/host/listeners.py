"""Listening sockets, which the supervisor binds and gateways inherit.

Therefore no connection is refused when a gateway dies.
"""

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
from shmserve.errors import InvalidArgument, convert_os_errors
from shmserve.ipc.transport.router import refuse_descriptors
from shmserve.supervisor.host.handover_link import Offer

# The errors of bind() on a host that does not support an address family, such as IPv6.
_NO_SUCH_FAMILY = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


_BACKLOG = 1024  # connections that wait to be accepted at each socket
_LONGEST_PATH = 107  # bytes of a unix socket's path (sockaddr_un)


def resolve(address: str, port: int, flag: str, allows_remote: bool) -> list[Any]:
    """Return the socket addresses of `address`, as getaddrinfo returns them.

    Raises:
        InvalidArgument: The address is unknown, or other hosts reach it and `allows_remote` is
            false (neither tokens nor --insecure are set). The message names `flag`.
    """
    with convert_os_errors(f"{flag}: cannot resolve '{address}'", "it is not a host name"):
        addresses = socket.getaddrinfo(
            address or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    if not allows_remote and not all(is_loopback(str(address[0])) for *_, address in addresses):
        raise _unguarded_error(flag, f"'{address}'")
    return addresses


def _unguarded_error(flag: str, address: str) -> InvalidArgument:
    return InvalidArgument(
        f"{flag}: other hosts reach {address}, so clients must send a token "
        "(--auth-token-file FILE); --insecure gives every client full access instead"
    )


def listen(address: str, port: int, flag: str, allows_remote: bool) -> list[socket.socket]:
    """Open listening TCP sockets on every address of a name; port 0 selects a free port.

    Raises:
        InvalidArgument: An address is not available, or other hosts reach it and `allows_remote`
            is false. The message names `flag`.
    """
    sockets: list[socket.socket] = []
    failure: OSError | None = None
    for family, _, _, _, socket_address in resolve(address, port, flag, allows_remote):
        try:
            sockets.append(_bind(family, socket_address))
        except OSError as error:
            failure = error
            if error.errno not in _NO_SUCH_FAMILY:
                break
    if failure is not None and (not sockets or failure.errno not in _NO_SUCH_FAMILY):
        for sock in sockets:
            sock.close()
        if failure.errno not in _NO_SUCH_FAMILY:
            flag = flag.replace("-address", "-port")
        users = port_users(port) if failure.errno == errno.EADDRINUSE else []
        if users and users[0][0] == os.getpid():
            reason = f"another flag of this server has this port; set another {flag}"
        else:
            user_text = f" (by {users[0][1]}, pid {users[0][0]})" if users else ""
            reason = f"{failure.strerror}{user_text}{_remedy(failure, flag)}"
        raise InvalidArgument(f"{flag}: cannot listen on {address}:{port}: {reason}") from None
    return sockets


def _remedy(error: OSError, flag: str) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"; stop the program that listens there, or set another {flag}"
    if error.errno == errno.EACCES and flag.endswith("-port"):
        return "; ports below 1024 require root or CAP_NET_BIND_SERVICE"
    return ""


def _bind(family: int, socket_address: Any) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(socket_address)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def adopt(sock: socket.socket, allows_remote: bool, source: str = "LISTEN_FDS") -> socket.socket:
    """Prepare an inherited listening socket.

    Raises:
        InvalidArgument: Other hosts reach the socket, and `allows_remote` is false.
    """
    if sock.family == socket.AF_UNIX:
        if sock.type == socket.SOCK_STREAM:  # only sockets of local clients receive descriptors
            refuse_descriptors(sock)
        return sock
    host, port = sock.getsockname()[:2]
    if not allows_remote and not is_loopback(host):
        raise _unguarded_error(source, f"{host}:{port}")
    return sock


def listen_unix(path: Path, group: int, flag: str) -> socket.socket:
    """Open a listening unix socket at `path` for this user, and for `group` if there is one.

    The socket of a killed server at `path` is removed.

    Raises:
        InvalidArgument: The path is not available. The message names `flag`.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_abandoned(path):
            path.unlink()
        old_mask = os.umask(0o177)
        try:
            sock.bind(os.fspath(path))
        finally:
            os.umask(old_mask)
        if group != NO_GROUP:
            os.chown(path, -1, group)
            path.chmod(0o660)
        refuse_descriptors(sock)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE and not path.is_socket():
            reason = "the path exists, and is not a socket"
        elif error.errno is None:
            reason = f"a socket's path may have at most {_LONGEST_PATH} bytes"
        else:
            reason = f"{error.strerror or error}{_remedy(error, flag)}"
        raise InvalidArgument(f"{flag}: cannot listen on '{path}': {reason}") from None
    return sock


def _is_abandoned(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(path.lstat().st_mode):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                return probe.connect_ex(os.fspath(path)) == errno.ECONNREFUSED
    return False


def close(sock: socket.socket) -> None:
    """Close a socket if it is open.

    The path of a unix socket is removed before the close, because no other server can use the path
    while this socket listens.
    """
    if sock.family == socket.AF_UNIX and sock.fileno() >= 0:
        with contextlib.suppress(OSError):
            os.unlink(sock.getsockname())
    sock.close()


@dataclass(slots=True)
class Listeners:
    """The listening sockets of a server."""

    offer: Offer | None = None  # the offer of the predecessor in a handover
    http: list[socket.socket] = field(default_factory=list)
    metrics: list[socket.socket] = field(default_factory=list)
    grpc: list[socket.socket] = field(default_factory=list)
    # Listeners for local clients, which `LocalClientConnections` closes.
    local: list[socket.socket] = field(default_factory=list)
    # Sockets that other servers use, too.
    shared_sockets: list[socket.socket] = field(default_factory=list)
    # The descriptors of the regions of a previous server, by the names of their registrations.
    stored_fds: dict[str, list[int]] = field(default_factory=dict)

    def has_path(self, path: Path) -> bool:
        """Return whether a socket listens at a path."""
        return any(sock.getsockname() == os.fspath(path) for sock in (*self.http, *self.grpc))

    @property
    def predecessor_listener(self) -> socket.socket | None:
        """Return the predecessor's listener for local clients, or None."""
        return None if self.offer is None else self.offer.client_listener

    def share_all(self) -> None:
        """Mark all sockets as used by a successor."""
        self.shared_sockets = [*self.http, *self.metrics, *self.grpc]

    def close(self, *, grpc_only: bool = False) -> None:
        """Close all open sockets, or only the gRPC sockets."""
        for sock in self.grpc if grpc_only else (*self.http, *self.metrics, *self.grpc):
            if sock in self.shared_sockets:
                sock.close()
            else:
                close(sock)

    def addresses(self) -> Iterator[str]:
        """Yield a line for the log for each socket."""
        for name, sockets, url_prefix, path in (
            ("HTTP", self.http, "http://", ""),
            ("gRPC", self.grpc, "", ""),
            ("metrics", self.metrics, "http://", "/metrics"),
        ):
            for sock in sockets:
                yield f"{name} service at {_address(sock, url_prefix, 'unix socket ')}{path}"

    @property
    def metrics_port(self) -> int:
        """Return the TCP port of metrics, or 0."""
        return _tcp_port(self.metrics)

    @property
    def grpc_port(self) -> int:
        """Return the TCP port of gRPC, or 0."""
        return _tcp_port(self.grpc)

    def urls(self) -> tuple[str, str]:
        """Return the URLs of HTTP and of metrics; "" without a listener."""
        http_urls = [_address(sock, "http://") for sock in self.http]
        metrics_urls = [_address(sock, "http://") for sock in self.metrics]
        return (*http_urls, "")[0], (*metrics_urls, "")[0]

    def publish(self, file: Path, *, tls: bool) -> None:
        """Write the URLs of HTTP and gRPC to a file for programs on this host, if possible."""
        urls = [_address(sock, "http://") for sock in self.http]
        url_prefix = "grpcs://" if tls else "grpc://"
        urls += [_address(sock, url_prefix) for sock in self.grpc if sock.family != socket.AF_UNIX]
        with contextlib.suppress(OSError):
            file.write_text("".join(f"{url}\n" for url in urls))


def _tcp_port(sockets: list[socket.socket]) -> int:
    tcp_sockets = (sock for sock in sockets if sock.family != socket.AF_UNIX)
    return next((sock.getsockname()[1] for sock in tcp_sockets), 0)


def _address(sock: socket.socket, url_prefix: str, unix_prefix: str = "unix:") -> str:
    if sock.family == socket.AF_UNIX:
        return f"{unix_prefix}{sock.getsockname()}"
    host, port = sock.getsockname()[:2]
    return f"{url_prefix}[{host}]:{port}" if ":" in host else f"{url_prefix}{host}:{port}"


_LISTEN_STATE = "0A"  # TCP_LISTEN in /proc/net/tcp


def port_users(port: int) -> list[tuple[int, str]]:
    """Return the visible processes (pid, name) that listen at a TCP port, by pid."""
    links = set()  # the sockets, as the links in /proc/PID/fd name them
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split(None, 10)
                if fields[3] == _LISTEN_STATE and int(fields[1].rpartition(":")[2], 16) == port:
                    links.add(f"socket:[{fields[9]}]")
    pids = sorted(int(name) for name in os.listdir("/proc") if name.isdecimal())
    return [(pid, _process_name(pid)) for pid in pids if links and _has_socket(pid, links)]


def _has_socket(pid: int, socket_links: set[str]) -> bool:
    folder = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):
        for fd in os.listdir(folder):
            with contextlib.suppress(OSError):
                if os.readlink(f"{folder}/{fd}") in socket_links:
                    return True
    return False


def _process_name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return "?"
