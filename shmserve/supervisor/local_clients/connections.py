"""The connections of local clients, which end with the process that opened them.

A child process that inherited a connection does not keep it open.

Untrusted programs can send descriptors (SCM_RIGHTS). Closing the last descriptor of a lingering
socket, or of a file in a hanging file system, can block for any time. Descriptors that are no
memory are therefore closed in a thread, including unread ones of a connection.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import itertools
import logging
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from shmserve.common import fd_limits
from shmserve.common.peers import NO_GROUP, admit_group, credentials
from shmserve.errors import Unsupported
from shmserve.ipc import endpoints
from shmserve.ipc.endpoints import FIRST_LOCAL_CLIENT
from shmserve.ipc.messages.control_requests import Refused
from shmserve.ipc.processes import MAX_PASSED_FDS
from shmserve.ipc.transport import frames
from shmserve.ipc.transport.frames import MalformedMessage
from shmserve.ipc.transport.router import Listener, open_listening_socket, socket_error

logger = logging.getLogger(__name__)


_MAX_PACKET_BYTES = 64 * 1024
_MAX_ACCEPTED_DESCRIPTORS = 4  # packets with more descriptors are rejected
_CREDENTIALS_BYTES = 12  # size of struct ucred
_NO_LINGER = struct.pack("ii", 0, 0)  # a struct linger, with which close() does not block

_MAX_CLIENTS = 1024
# Maximum clients that have not sent Hello. A further client disconnects the oldest of them.
_MAX_CLIENTS_BEFORE_HELLO = 256
_BACKLOG = 128
_MAX_ACCEPTED_AT_ONCE = 64  # connections that are accepted before open ones are read
_MAX_UNREAD_MESSAGES = 4096  # a client with more unread messages is disconnected
_PACKET_OVERHEAD_BYTES = 32  # bytes of a socket's buffer that a packet cannot use


def receive(link: socket.socket) -> tuple[bytes, list[int]]:
    """Receive a packet and its descriptors; b"" at the connection's end, or if it is too large.

    Raises:
        OSError: Nothing can be received.
    """
    packet = _receive_packet(link, _MAX_PACKET_BYTES)
    if not packet.is_complete or len(packet.fds) > _MAX_ACCEPTED_DESCRIPTORS:
        close_all(packet.fds)
        return b"", []
    return packet.data, packet.fds


class _Packet(NamedTuple):
    data: bytes
    fds: list[int]
    is_complete: bool
    has_content: bool  # whether the packet has data or ancillary data


def _receive_packet(link: socket.socket, size: int) -> _Packet:
    # In a smaller buffer, some descriptors would have no space: the kernel would close them, which
    # may block.
    ancillary_size = socket.CMSG_SPACE(MAX_PASSED_FDS * 4) + socket.CMSG_SPACE(_CREDENTIALS_BYTES)
    data, ancillary, flags, _ = link.recvmsg(size, ancillary_size, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    is_complete = not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)
    return _Packet(data, list(fds), is_complete, bool(data or ancillary))


def close_all(fds: Iterable[int]) -> None:
    """Close received descriptors."""
    slow_fds = []
    for fd in fds:
        if is_memory(fd):
            os.close(fd)
        else:
            slow_fds.append(fd)
    if slow_fds:
        _run_in_thread(partial(_close_slow, slow_fds))


def is_memory(fd: int) -> bool:
    """Return whether a descriptor is shared memory; closing any other file may block (FUSE)."""
    try:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return False
    return True


def disconnect(link: socket.socket) -> None:
    """Close a link and its unread descriptors."""
    with contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(OSError):
        # Only a message has credentials, which distinguish an empty one from the connection's end.
        link.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        while (packet := _receive_packet(link, 1)).has_content:
            close_all(packet.fds)
    link.close()


def _close_slow(fds: Iterable[int]) -> None:
    for fd in fds:
        try:
            sock = socket.socket(fileno=fd)
        except OSError:  # the descriptor is not a socket
            with contextlib.suppress(OSError):  # the descriptor is closed anyway
                os.close(fd)
            continue
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        with contextlib.suppress(OSError):
            sock.close()


def _run_in_thread(action: Callable[[], None]) -> None:
    try:
        threading.Thread(target=action, name="close", daemon=True).start()
    except RuntimeError:  # no further thread can be started
        action()


@dataclass(slots=True, eq=False)
class LocalClient:
    """A connected program. Until it `has_sent_hello`, other messages are errors."""

    number: int
    pid: int  # 0 if the process is in another namespace
    uid: int
    link: socket.socket
    pidfd: int  # the descriptor that polls the process; -1 if it is in another namespace
    has_sent_hello: bool = False
    unsent_packets: deque[bytes] = field(default_factory=deque)


class LocalClientConnections:
    """The listener, and the connected clients by number.

    `on_message(client, message, fds)` handles a message, and removes the descriptors that it keeps
    from the list. `on_disconnect(number)` is called when a client that had sent Hello disconnects.
    """

    def __init__(
        self,
        run_dir: Path,
        group: int,
        on_message: Callable[[LocalClient, Any, list[int]], None],
        on_disconnect: Callable[[int], None],
        shared_listeners: Iterable[socket.socket],  # other servers use them, too
        predecessor_listener: socket.socket | None,
    ) -> None:
        """Open the listener for programs of this user, and of a group if there is one.

        Clients wait at `shared_listeners` and at `predecessor_listener` until `accept`.

        Raises:
            Unavailable: The run directory has no space for the listener.
        """
        self._on_message = on_message
        self._on_disconnect = on_disconnect
        self._clients: dict[int, LocalClient] = {}
        self._client_numbers = itertools.count(FIRST_LOCAL_CLIENT)
        self._loop = asyncio.get_running_loop()
        self._max_clients = min(_MAX_CLIENTS, fd_limits.local_clients_share())
        path = endpoints.listener(run_dir)
        try:
            path.parent.mkdir(mode=0o700)
        except OSError as error:
            raise socket_error(error) from None
        if group != NO_GROUP:
            admit_group(path.parent, group)
        self._client_listener = Listener(predecessor_listener or _open_listener(path, group))
        buffer_bytes = self._client_listener.sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        self.largest_packet = buffer_bytes - _PACKET_OVERHEAD_BYTES
        self._shared_listeners = list(map(Listener, shared_listeners))
        self._own_listeners = [] if predecessor_listener else [self._client_listener]
        self._predecessor_listeners = [self._client_listener] if predecessor_listener else []
        self._start_accepting(self._own_listeners)

    def __contains__(self, number: int) -> bool:
        return number in self._clients

    def clients_after_hello(self) -> list[LocalClient]:
        """Return the clients that have sent Hello."""
        return [client for client in self._clients.values() if client.has_sent_hello]

    # --- connections

    def _start_accepting(self, listeners: list[Listener]) -> None:
        for listener in listeners:
            self._loop.add_reader(listener.fileno(), self._accept, listener)

    def accept(self) -> None:
        """Accept the clients that wait at shared listeners."""
        for listener in self._predecessor_listeners:
            # Peers read the credentials of the process that called listen last, so call it again.
            listener.sock.listen(_BACKLOG)
        self._start_accepting([*self._predecessor_listeners, *self._shared_listeners])
        self._own_listeners += self._predecessor_listeners
        self._predecessor_listeners = []

    @property
    def client_listener(self) -> socket.socket:
        """Return the listener whose path is in the run directory."""
        return self._client_listener.sock

    def shared_sockets(self) -> list[socket.socket]:
        """Return the listeners that another server uses, too."""
        return [listener.sock for listener in self._shared_listeners]

    def share_listeners(self) -> None:
        """Mark all listeners as used by a successor."""
        self._shared_listeners += self._own_listeners
        self._own_listeners = []

    def close_shared(self) -> bool:
        """Close the listeners shared with another server; return whether there were any."""
        shared_listeners, self._shared_listeners = self._shared_listeners, []
        self._close_listeners(shared_listeners)
        return bool(shared_listeners)

    def _close_listeners(self, listeners: list[Listener]) -> None:
        for listener in listeners:
            self._loop.remove_reader(listener.fileno())
            listener.close()

    def _accept(self, listener: Listener) -> None:
        for _ in range(_MAX_ACCEPTED_AT_ONCE):
            link = listener.accept()
            if link is None:
                return
            pid, uid, _ = credentials(link)
            new_clients = [c for c in self._clients.values() if not c.has_sent_hello]
            if len(new_clients) >= _MAX_CLIENTS_BEFORE_HELLO:
                self.disconnect(new_clients[0])
            if not self._has_capacity(uid):
                disconnect(link)
                continue
            try:
                pidfd = os.pidfd_open(pid) if pid else -1
            except OSError:  # the program has exited, or no descriptor is free
                disconnect(link)
                continue
            client = LocalClient(next(self._client_numbers), pid, uid, link, pidfd)
            self._clients[client.number] = client
            self._loop.add_reader(link.fileno(), self._read, client)
            if pidfd >= 0:
                self._loop.add_reader(pidfd, self.disconnect, client)

    def _has_capacity(self, uid: int) -> bool:
        """Return whether a user may open another connection; each user has a limit of its own."""
        user_client_count = sum(client.uid == uid for client in self._clients.values())
        if len(self._clients) >= self._max_clients:
            return False
        return user_client_count < fd_limits.max_connections_per_peer(self._max_clients)

    def disconnect(self, client: LocalClient) -> None:
        """Close a connection, unless it is closed."""
        if self._clients.pop(client.number, None) is None:
            return
        self._loop.remove_reader(client.link.fileno())
        self._loop.remove_writer(client.link.fileno())
        if client.pidfd >= 0:
            self._loop.remove_reader(client.pidfd)
            os.close(client.pidfd)
        # This link is closed before the schedulers close theirs, so that the client detects that
        # the server, not a scheduler, has disconnected it.
        disconnect(client.link)
        if client.has_sent_hello:
            self._on_disconnect(client.number)

    def close(self) -> None:
        """Disconnect all clients and close the listeners."""
        own_listeners, predecessor_listeners = self._own_listeners, self._predecessor_listeners
        self._close_listeners([*own_listeners, *predecessor_listeners, *self._shared_listeners])
        for client in list(self._clients.values()):
            self.disconnect(client)

    # --- sent packets

    def send(self, client: LocalClient, data: bytes) -> None:
        """Send a packet now or when the client reads; disconnect it if too many are unread."""
        client.unsent_packets.append(data)
        if len(client.unsent_packets) > _MAX_UNREAD_MESSAGES:
            logger.warning(
                "disconnected a client program (pid %d) that does not read its messages", client.pid
            )
            self.disconnect(client)
        elif len(client.unsent_packets) == 1:
            self._flush(client)

    def _flush(self, client: LocalClient) -> None:
        while client.unsent_packets:
            try:
                client.link.send(client.unsent_packets[0], socket.MSG_NOSIGNAL)
            except BlockingIOError:
                self._loop.add_writer(client.link.fileno(), self._flush, client)
                return
            except OSError:
                self.disconnect(client)
                return
            client.unsent_packets.popleft()
        self._loop.remove_writer(client.link.fileno())

    # --- received packets

    def _read(self, client: LocalClient) -> None:
        try:
            data, fds = receive(client.link)
        except BlockingIOError:
            return
        except OSError:
            self.disconnect(client)
            return
        try:
            if not data:
                self.disconnect(client)
                return
            for message in frames.unpack(data):
                if client.number not in self._clients:
                    # The client disconnected meanwhile, so nothing would release the memory that it
                    # shares.
                    return
                self._on_message(client, message, fds)
        except MalformedMessage as error:
            logger.warning("client program (pid %d): invalid message: %s", client.pid, error)
            if isinstance(error, frames.VersionMismatch):
                self.send(client, frames.pack([Refused(0, Unsupported.code, str(error))]))
            self.disconnect(client)
        finally:
            close_all(fds)


def _open_listener(path: Path, group: int) -> socket.socket:
    listener = open_listening_socket(socket.SOCK_SEQPACKET, str(path), _BACKLOG)
    if group != NO_GROUP:
        admit_group(path, group)
    return listener
