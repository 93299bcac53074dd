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
from shmserve.ipc.transport import frames
from shmserve.ipc.transport.records import MalformedMessage
from shmserve.ipc.transport.router import Listener, open_listening_socket, socket_error

logger = logging.getLogger(__name__)


_MESSAGE = 64 * 1024
_MOST = 253  # SCM_MAX_FD; the kernel would close further descriptors, which may block
_MOST_TAKEN = 4
_CREDENTIALS = 12
_NO_LINGER = struct.pack("ii", 0, 0)

_MOST_CLIENTS = 1024
# Maximum number of clients that have not sent Hello; then the oldest is disconnected.
_MOST_UNWELCOMED = 256
_BACKLOG = 128
_AT_ONCE = 64  # maximum number of connections accepted before open connections are read
_MOST_UNREAD = 4096  # maximum number of unread messages before a local client is disconnected
_OVERHEAD = 32  # bytes of a socket's buffer that a packet cannot use


def receive(link: socket.socket) -> tuple[bytes, list[int]]:
    """Receive a packet and its descriptors; b"" at the end, or if the packet is too large.

    Raises:
        OSError: Nothing can be received.
    """
    received = _received(link, _MESSAGE)
    if not received.complete or len(received.fds) > _MOST_TAKEN:
        close_all(received.fds)
        return b"", []
    return received.data, received.fds


class _Received(NamedTuple):
    data: bytes
    fds: list[int]
    complete: bool
    any: bool  # whether the packet has data or ancillary data


def _received(link: socket.socket, size: int) -> _Received:
    ancillary_size = socket.CMSG_SPACE(_MOST * 4) + socket.CMSG_SPACE(_CREDENTIALS)
    data, ancillary, flags, _ = link.recvmsg(size, ancillary_size, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    complete = not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)
    return _Received(data, list(fds), complete, bool(data or ancillary))


def close_all(fds: Iterable[int]) -> None:
    """Close received descriptors."""
    slow = []
    for fd in fds:
        if is_memory(fd):
            os.close(fd)
        else:
            slow.append(fd)
    if slow:
        _in_thread(partial(_close, slow))


def is_memory(fd: int) -> bool:
    """Return whether a descriptor is a memfd, so that no file system or program can block it."""
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
        # Credentials distinguish an empty message from the end of the connection.
        link.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        while (received := _received(link, 1)).any:
            close_all(received.fds)
    link.close()


def _close(fds: Iterable[int]) -> None:
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


def _in_thread(action: Callable[[], None]) -> None:
    try:
        threading.Thread(target=action, name="close", daemon=True).start()
    except RuntimeError:  # no further thread can be started
        action()


@dataclass(slots=True, eq=False)
class LocalClient:
    """A connected program; it is `welcomed` after its Hello."""

    number: int
    pid: int  # the process id; 0 if the process is in another namespace
    uid: int
    link: socket.socket
    process: int  # a pidfd of the process, or -1
    welcomed: bool = False
    unsent: deque[bytes] = field(default_factory=deque)


class LocalClientConnections:
    """The listener, and the connected clients by number.

    `on_message(client, message, fds)` handles a message, and removes the descriptors that it keeps
    from the list. `on_disconnect(number)` is called when a welcomed client has disconnected.
    """

    def __init__(
        self,
        run_dir: Path,
        group: int,
        on_message: Callable[[LocalClient, Any, list[int]], None],
        on_disconnect: Callable[[int], None],
        shared: Iterable[socket.socket],
        door: socket.socket | None,
    ) -> None:
        """Open the listener for programs of this user, and of a group if there is one.

        Clients wait at the `shared` listeners, and at the `door` of a predecessor, until `accept`.

        Raises:
            Unavailable: The run directory has no space for the listener.
        """
        self._on_message = on_message
        self._on_disconnect = on_disconnect
        self._clients: dict[int, LocalClient] = {}
        self._numbers = itertools.count(FIRST_LOCAL_CLIENT)
        self._loop = asyncio.get_running_loop()
        self._most = min(_MOST_CLIENTS, fd_limits.for_local_clients())
        path = endpoints.listener(run_dir)
        try:
            path.parent.mkdir(mode=0o700)
        except OSError as error:
            raise socket_error(error) from None
        if group != NO_GROUP:
            admit_group(path.parent, group)
        self._door = Listener(door or _opened(path, group))
        buffer = self._door.sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        self.largest_packet = buffer - _OVERHEAD
        self._shared = list(map(Listener, shared))
        self._own = [] if door else [self._door]
        self._predecessors = [self._door] if door else []
        self._accept_at(self._own)

    def __contains__(self, number: int) -> bool:
        return number in self._clients

    def welcomed(self) -> list[LocalClient]:
        """Return the welcomed clients."""
        return [client for client in self._clients.values() if client.welcomed]

    # --- connections

    def _accept_at(self, listeners: list[Listener]) -> None:
        for listener in listeners:
            self._loop.add_reader(listener.fileno(), self._accept, listener)

    def accept(self) -> None:
        """Accept the clients that wait at shared listeners."""
        for listener in self._predecessors:
            listener.sock.listen(
                _BACKLOG
            )  # peers read the credentials of the process that called listen last
        self._accept_at([*self._predecessors, *self._shared])
        self._own, self._predecessors = [*self._own, *self._predecessors], []

    @property
    def door(self) -> socket.socket:
        """Return the listener."""
        return self._door.sock

    def shared(self) -> list[socket.socket]:
        """Return the listeners that another server uses, too."""
        return [each.sock for each in self._shared]

    def share(self) -> None:
        """Leave all listeners to a successor when `refuse` is called next."""
        self._shared, self._own = [*self._shared, *self._own], []

    def refuse(self) -> bool:
        """Close the listeners that another server uses, too; return whether there are any."""
        shared, self._shared = self._shared, []
        self._close(shared)
        return bool(shared)

    def _close(self, listeners: list[Listener]) -> None:
        for listener in listeners:
            self._loop.remove_reader(listener.fileno())
            listener.close()

    def _accept(self, listener: Listener) -> None:
        for _ in range(_AT_ONCE):
            link = listener.accept()
            if link is None:
                return
            pid, uid, _ = credentials(link)
            unwelcomed = [each for each in self._clients.values() if not each.welcomed]
            if len(unwelcomed) >= _MOST_UNWELCOMED:
                self.disconnect(unwelcomed[0])
            if not self._has_capacity(uid):
                disconnect(link)
                continue
            try:
                process = os.pidfd_open(pid) if pid else -1
            except OSError:  # the program has exited, or no descriptor is free
                disconnect(link)
                continue
            client = LocalClient(next(self._numbers), pid, uid, link, process)
            self._clients[client.number] = client
            self._loop.add_reader(link.fileno(), self._read, client)
            if process >= 0:
                self._loop.add_reader(process, self.disconnect, client)

    def _has_capacity(self, uid: int) -> bool:
        """Return whether a user may open another connection; one user cannot use all."""
        of_one = sum(client.uid == uid for client in self._clients.values())
        return len(self._clients) < self._most and of_one < fd_limits.share_of(self._most)

    def disconnect(self, client: LocalClient) -> None:
        """Close a connection, unless it is closed."""
        if self._clients.pop(client.number, None) is None:
            return
        self._loop.remove_reader(client.link.fileno())
        self._loop.remove_writer(client.link.fileno())
        if client.process >= 0:
            self._loop.remove_reader(client.process)
            os.close(client.process)
        # Before the schedulers close its links, so that the client detects the reason first.
        disconnect(client.link)
        if client.welcomed:
            self._on_disconnect(client.number)

    def close(self) -> None:
        """Disconnect all clients and close the listeners."""
        self._close([*self._own, *self._predecessors, *self._shared])
        for client in list(self._clients.values()):
            self.disconnect(client)

    # --- out

    def send(self, client: LocalClient, data: bytes) -> None:
        """Send a packet now or when the client reads; disconnect it if too many are unread."""
        client.unsent.append(data)
        if len(client.unsent) > _MOST_UNREAD:
            logger.warning("a client program does not read its messages: disconnected")
            self.disconnect(client)
        elif len(client.unsent) == 1:
            self._flush(client)

    def _flush(self, client: LocalClient) -> None:
        while client.unsent:
            try:
                client.link.send(client.unsent[0], socket.MSG_NOSIGNAL)
            except BlockingIOError:
                self._loop.add_writer(client.link.fileno(), self._flush, client)
                return
            except OSError:
                self.disconnect(client)
                return
            client.unsent.popleft()
        self._loop.remove_writer(client.link.fileno())

    # --- in

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
            logger.warning("a client program sent an invalid message: %s", error)
            if isinstance(error, frames.VersionMismatch):
                refused = Refused(0, Unsupported.code, str(error))
                self.send(client, frames.pack([refused]))
            self.disconnect(client)
        finally:
            close_all(fds)


def _opened(path: Path, group: int) -> socket.socket:
    door = open_listening_socket(socket.SOCK_SEQPACKET, str(path), _BACKLOG)
    if group != NO_GROUP:
        admit_group(path, group)
    return door
