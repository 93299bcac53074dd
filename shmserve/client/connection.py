"""The connection to one server, from the server's `Welcome` message until disconnection.

A dedicated thread reads the socket of the server's listener, which publishes models and lost
schedulers. This thread also has a channel for requests that no thread or event loop awaits
(`infer_async`).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from shmserve.client.memory.segments import AnySegment
from shmserve.client.memory.views import noop
from shmserve.client.request.channel import RequestChannel
from shmserve.client.server_state import SERVER_EXITED, ServerState
from shmserve.errors import Disconnected, ShmserveError, from_code
from shmserve.ipc import endpoints
from shmserve.ipc.messages import publications as m
from shmserve.ipc.messages.control_requests import (
    Answered,
    Hello,
    Refused,
    WantModel,
    Welcome,
    WithdrawMemory,
)
from shmserve.ipc.messages.publications import (
    Acknowledged,
    HealthChanged,
    OwnerExited,
    ServerEnding,
)
from shmserve.ipc.timers import NEVER, Timers
from shmserve.ipc.transport import frames
from shmserve.ipc.transport.frames import MalformedMessage

_MAX_PACKET_BYTES = 4 * 1024 * 1024  # maximum size of a packet in bytes
# The bounds of SO_SNDTIMEO in seconds: the kernel reads 0 as unlimited, and stores an int.
_MIN_SEND_TIMEOUT_S, _MAX_SEND_TIMEOUT_S = 1e-3, 2e6


def _namespace_depth(pid: int) -> int:
    """Return the number of PID namespaces that contain a process, or 0 if it has exited."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", encoding="utf-8") as status:
        return next((len(line.split()) - 1 for line in status if line.startswith("NSpid:")), 0)
    return 0


class ListenerLink:
    """A SOCK_SEQPACKET unix socket to a server's listener.

    Raises:
        OSError: The process has no free descriptor.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._request_numbers = itertools.count(1)
        self._futures: dict[int, Future[Any]] = {}

    def connect(self, run_dir: Path, timeout_s: float) -> None:
        """Connect to the server at `run_dir` and send `Hello`.

        The timeout limits every operation until `remove_timeout`. Raises OSError if it expires.
        """
        timeout_s = min(max(timeout_s, _MIN_SEND_TIMEOUT_S), _MAX_SEND_TIMEOUT_S)
        path = run_dir if run_dir.is_socket() else endpoints.listener(run_dir)
        _connect(self._socket, str(path), timeout_s)
        self._socket.settimeout(timeout_s)
        self._socket.send(frames.pack([Hello(frames.VERSION)]))

    def remove_timeout(self) -> None:
        """Remove the timeout, once the server's initial state was received."""
        self._socket.settimeout(None)

    def is_in_other_pid_namespace(self) -> bool:
        """Check whether the server is in another PID namespace, so that its pids are invalid here.

        SO_PEERCRED returns pid 0 for a server that is not visible in this program's namespace. A
        server in a container on this host is visible, but is in more nested namespaces.
        """
        peer_credentials = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid = int.from_bytes(peer_credentials[:4], sys.byteorder)
        return not pid or _namespace_depth(pid) > _namespace_depth(os.getpid())

    def fileno(self) -> int:
        """Return the descriptor, for polling."""
        return self._socket.fileno()

    def receive(self) -> list[Any]:
        """Receive the server's next messages.

        Raises:
            OSError: The server has closed the connection.
            MalformedMessage: The server sent an unknown message.
        """
        data = self._socket.recv(_MAX_PACKET_BYTES)
        if not data:
            raise ConnectionResetError(SERVER_EXITED)
        return frames.unpack(data)

    def send_message(self, message: Any, fds: tuple[int, ...] = ()) -> None:
        """Send a message and descriptors to the server.

        Raises:
            Disconnected: The server has closed the connection.
        """
        # No lock: the kernel sends each packet atomically.
        try:
            socket.send_fds(self._socket, [frames.pack([message])], fds)
        except OSError as error:
            raise Disconnected(SERVER_EXITED) from error

    def is_closed(self) -> bool:
        """Check whether the server has closed the connection; safe in any thread."""
        poll = select.poll()
        try:
            # POLLHUP is always reported, so no other event is requested.
            poll.register(self._socket, 0)
            return bool(poll.poll(0))
        except (OSError, ValueError):  # the socket was closed by another thread
            return True

    # --- control requests

    def request(self) -> tuple[int, Future[Any]]:
        """Register a control request; return its number, and a future of its response's payload."""
        number, future = next(self._request_numbers), Future[Any]()
        self._futures[number] = future
        return number, future

    def respond(self, request_number: int, response: Any) -> None:
        """Complete the future of a control request with its response: a payload or an error."""
        future = self._futures.pop(request_number, None)
        if future is None:
            return
        if isinstance(response, ShmserveError):
            future.set_exception(response)
        else:
            future.set_result(response)

    # --- closing

    def shut_down(self) -> None:
        """Shut the connection down, so that `receive` returns; safe in any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the link; requests in flight fail."""
        for request_number in list(self._futures):
            self.respond(request_number, Disconnected(SERVER_EXITED))
        self._socket.close()


def _connect(client_socket: socket.socket, path: str, timeout_s: float) -> None:
    """Connect within a timeout, waiting if the listener's backlog is full.

    SO_SNDTIMEO is used because connect() fails immediately with EAGAIN on a socket with a Python
    timeout.
    """
    seconds, fraction = divmod(timeout_s, 1)
    packed_timeout = struct.pack("ll", int(seconds), int(fraction * 1e6))
    client_socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, packed_timeout)
    client_socket.connect(path)
    client_socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, bytes(len(packed_timeout)))


class ServerConnection(ServerState):
    """A local client's connection: the socket to the listener, and the thread that reads it."""

    def __init__(self, run_dir: Path, timeout_s: float, on_wake: Callable[[], None] = noop) -> None:
        """Connect to the server at `run_dir`. `wake_thread` causes a call of `on_wake`.

        Raises:
            Disconnected: There is no server, or it sends no initial state within the timeout.
            OSError: The process has no free descriptor.
        """
        super().__init__()
        self.pid = os.getpid()
        # Whether the listener's socket remains when the server exits: systemd keeps its sockets.
        self._socket_persists = run_dir.is_socket()
        self._on_wake = on_wake
        self._tasks: deque[Callable[[RequestChannel], None]] = deque()
        self._link = ListenerLink()
        try:
            self._link.connect(run_dir, timeout_s)
            self.is_in_other_pid_namespace = self._link.is_in_other_pid_namespace()
            while not self._handle_messages():
                pass
        except (OSError, MalformedMessage) as error:
            self._link.close()
            raise Disconnected(f"{_describe_failure(error)} in {run_dir}") from error
        self._link.remove_timeout()
        self._poll = select.epoll()
        self._poll.register(self._link, select.EPOLLIN)
        self._channel = RequestChannel(self, self._watch, self._poll.unregister)
        # The deadlines of the channel's requests, by request id; only the thread uses them.
        self.timers: Timers[int] = Timers(lambda number: number not in self._channel.pending_ids)
        self._thread = threading.Thread(target=self._run, name="shmserve-client", daemon=True)
        self._thread.start()

    def _watch(self, fd: int) -> None:
        self._poll.register(fd, select.EPOLLIN)

    # --- messages of the listener

    def _handle_messages(self) -> bool:
        """Process the server's next messages; return whether the initial state is complete."""
        is_complete = False
        for message in self._link.receive():
            match message:
                case Welcome(number, token):
                    self.identity = f"{number}.{token}"
                case m.ModelPublished():
                    self.models.publish(message)
                case m.ModelOnDemand(name):
                    self.models.on_demand_names.add(name)
                case m.ModelWithdrawn(name, version):
                    self.models.withdraw(name, version)
                case m.SchedulerLost(endpoint, successor):
                    self.record_lost_scheduler(endpoint, successor)
                case OwnerExited(pid):
                    self.mappings.unmap_process(pid)
                case ServerEnding():
                    self.is_draining = True
                    self.start_ended.set()
                case HealthChanged(ready=ready, started=started):
                    self.models.ready, self.models.started = ready, started
                    is_complete = True
                    if started:
                        self.start_ended.set()
                case Answered(number, payload):
                    self._link.respond(number, payload)
                case Refused(number, code, text):
                    self._link.respond(number, from_code(code, text))
            if number := getattr(message, "ack_number", 0):
                self._link.send_message(Acknowledged(number))
        return is_complete

    def has_successor(self) -> bool:
        """Check whether a successor serves, or will serve, at the same run directory."""
        return self.is_draining or (self._socket_persists and self.is_closed())

    def is_closed(self) -> bool:
        """Check whether the server has closed the connection; safe in any thread."""
        return self._link.is_closed() or not self.alive

    # --- control requests

    def _send_request(self, build: Callable[[int], tuple[Any, tuple[int, ...]]]) -> dict[str, Any]:
        """Send a control request and wait for its response.

        Args:
            build: A function that returns the message with this request number, and the
                descriptors to pass.
        """
        with self._lock:
            if not self.alive:
                raise Disconnected(SERVER_EXITED)
            number, response_future = self._link.request()
        self._link.send_message(*build(number))
        # In a future's callback, the caller is the connection's thread, so no other thread would
        # read the response.
        if self.is_current_thread():
            self._read_until(response_future)
        payload: dict[str, Any] = response_future.result()
        return payload

    def load_on_demand(self, model: str, timeout_s: float) -> None:
        """Load an on-demand model and wait until it is available.

        Raises:
            Unavailable: The load takes longer than `timeout_s` seconds (0: unlimited).
            ShmserveError: The load failed.
        """
        self._send_request(lambda number: (WantModel(number, model, timeout_s), ()))

    def share(self, segment: AnySegment) -> None:
        """Share a segment with the server and wait for its confirmation."""
        segment.set_memory(self._send_request(segment.make_share_request)["memory"])

    def _read_until(self, response_future: Future[Any]) -> None:
        try:
            while not response_future.done():
                self._handle_messages()
        except (OSError, MalformedMessage) as error:
            raise Disconnected(SERVER_EXITED) from error

    def withdraw(self, segment: AnySegment) -> None:
        """Withdraw a segment from the server, except in a forked child, whose parent owns it."""
        if segment.memory is not None and self.alive and self.pid == os.getpid():
            with contextlib.suppress(Disconnected):
                self._link.send_message(WithdrawMemory(segment.memory.id))

    # --- the connection's own channel

    def call(self, task: Callable[[RequestChannel], None]) -> None:
        """Run a task in the connection's thread, with its channel.

        Raises:
            Disconnected: The connection has ended.
        """
        with self._lock:
            if not self.alive:
                raise Disconnected(SERVER_EXITED)
            self._tasks.append(task)
            self._channel.wake()

    def is_current_thread(self) -> bool:
        """Check whether the caller runs in the connection's thread, as a future's callback does."""
        return threading.current_thread() is self._thread

    def wake_thread(self) -> None:
        """Schedule `on_wake` in the connection's thread; safe in any thread and at any time."""
        if self.pid == os.getpid():
            with self._lock:
                if self.alive:
                    self._channel.wake()

    # --- the thread

    def _run(self) -> None:
        listener_fd, channel = self._link.fileno(), self._channel
        try:
            while self.alive:
                for number in self.timers.take_expired(time.monotonic_ns()):
                    channel.expire(number)
                channel.flush()
                timeout_s = None
                if (due_ns := self.timers.due_ns) != NEVER:
                    timeout_s = max(due_ns - time.monotonic_ns(), 0) / 1e9
                events = dict(self._poll.poll(timeout_s))
                if listener_fd in events:
                    self._handle_messages()
                # `process_events` resets the wakeup. It precedes the tasks, so that a task that is
                # added after the loop below wakes the thread again.
                channel.process_events(events)
                while self._tasks:
                    self._tasks.popleft()(self._channel)
                if channel.waker in events:
                    self._on_wake()
        except (OSError, MalformedMessage):
            pass  # the server exited or sent an unknown message
        finally:
            self._end()

    def _end(self) -> None:
        with self._lock:
            self.alive = False
        self.start_ended.set()
        self.wake_all()
        while self._tasks:
            self._tasks.popleft()(self._channel)
        self._channel.close()
        self.models.close()
        self._poll.close()
        self._link.close()

    def close(self) -> None:
        """Disconnect; the server frees this client's resources.

        All channels are woken, so that the requests in flight fail.
        """
        if self.pid != os.getpid():
            return  # a forked child; the parent owns the connection
        # `alive` is reset first: schedulers disconnect this client's links, and a channel must not
        # replace these links.
        self.alive = False
        self._link.shut_down()
        # A future's callback runs in the connection's thread, which cannot join itself.
        if self.is_current_thread():
            self.wake_all()
        else:
            self._thread.join()


def _describe_failure(error: Exception) -> str:
    if isinstance(error, PermissionError):
        return "this user may not connect to the server (see its flag --shm-group)"
    if isinstance(error, frames.VersionMismatch):
        return f"the server cannot be used: {error},"
    if isinstance(error, ConnectionResetError | BrokenPipeError | MalformedMessage):
        return (
            "the server rejected this client: its version may differ, or the limit of clients "
            "is reached"
        )
    return "no server answers"
