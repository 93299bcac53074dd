"""A connection to one server, from its welcome to its end.

A thread of its own reads the link to the listener: which models there are, which schedulers were
lost. It has a channel too, for requests whose responses nobody waits for in a loop (`infer_async`).
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shmserve.client.errors import Disconnected
from shmserve.client.inflight.channel import RequestChannel
from shmserve.client.memory.segments import AnySegment
from shmserve.client.memory.views import nothing
from shmserve.client.server.state import ServerState
from shmserve.errors import ShmserveError, from_code
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
from shmserve.ipc.messages.publications import HealthChanged, OwnerExited, ServerEnding
from shmserve.ipc.messages.supervision import Acknowledged
from shmserve.ipc.transport import frames
from shmserve.ipc.transport.records import MalformedMessage

_LARGEST = 4 * 1024 * 1024  # bytes of a packet
# What the kernel takes for a time to wait: 0 would be for ever, and it is counted in an int.
_SHORTEST_S, _LONGEST_S = 1e-3, 2e6
GONE = "there is no server any more"
_MOST_OVER = 1024  # requests that have ended, remembered until their time has come


class ControlRequest:
    """Something that the server was asked, and its response.

    `pending` is locked until that is there: not an Event, in which a thread that waits holds a lock
    of its own, and whoever responds would wait for a signal's handler in it that asks, too.
    """

    __slots__ = ("number", "pending", "response")

    def __init__(self, number: int) -> None:
        self.number = number
        self.pending = threading.Lock()
        self.pending.acquire()
        self.response: Any = None

    def wait(self) -> Any:
        """The response, when it is there: the payload, or an error to be raised."""
        with self.pending:
            return self.response


class ListenerLink:
    """A unix socket, SOCK_SEQPACKET, to a server's listener. Raises OSError where this program has
    no descriptor left for it."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._numbers = itertools.count(1)
        self._asked: dict[int, ControlRequest] = {}

    def connect(self, run_dir: Path, timeout_s: float) -> None:
        """Say hello to the server there. From now on nothing waits for longer than this, until
        `settled`. Raises OSError when nobody lets us in within this time."""
        timeout_s = min(max(timeout_s, _SHORTEST_S), _LONGEST_S)
        path = run_dir if run_dir.is_socket() else endpoints.listener(run_dir)
        _connect(self._socket, str(path), timeout_s)
        self._socket.settimeout(timeout_s)
        self._socket.send(frames.pack([Hello(frames.VERSION)]))

    def settled(self) -> None:
        """The server has let us in: `receive` waits for as long as it takes."""
        self._socket.settimeout(None)

    def fileno(self) -> int:
        """The descriptor, to wait for."""
        return self._socket.fileno()

    def receive(self) -> list[Any]:
        """The server's next messages. Raises OSError when it has ended, MalformedMessage when it is
        none that we understand."""
        data = self._socket.recv(_LARGEST)
        if not data:
            raise ConnectionResetError(GONE)
        return frames.unpack(data)

    def tell(self, message: Any, fds: tuple[int, ...] = ()) -> None:
        """Tell the server something, and pass descriptors. Raises Disconnected."""
        # Without a lock: a signal's handler may find its thread in that, and wait for another one
        # that has something to tell. A packet goes as a whole.
        try:
            socket.send_fds(self._socket, [frames.pack([message])], fds)
        except OSError as error:
            raise Disconnected(GONE) from error

    def ended(self) -> bool:
        """Whether it has, though nobody may have read that yet; for any thread."""
        poll = select.poll()
        try:
            poll.register(self._socket, 0)  # a hang-up is told anyway
            return bool(poll.poll(0))
        except (OSError, ValueError):  # closed meanwhile
            return True

    # --- requests of ours

    def request(self) -> ControlRequest:
        """A request with a number of its own, whose response is awaited from now on."""
        request = ControlRequest(next(self._numbers))
        self._asked[request.number] = request
        return request

    def respond(self, number: int, response: Any) -> None:
        """Give a request its response."""
        request = self._asked.pop(number, None)
        if request is not None:
            request.response = response
            request.pending.release()

    # --- its end

    def shut_down(self) -> None:
        """End it, so that `receive` returns; for any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close it; what was asked fails."""
        for number in list(self._asked):
            self.respond(number, Disconnected(GONE))
        self._socket.close()


def _connect(listener: socket.socket, path: str, timeout_s: float) -> None:
    """Connect within a time, waiting for a place where many want to come in: a socket with a
    timeout of Python's is told at once that there is none."""
    seconds, rest = divmod(timeout_s, 1)
    limit = struct.pack("ll", int(seconds), int(rest * 1e6))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    listener.connect(path)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, bytes(len(limit)))


class Timeouts:
    """A heap of the deadlines of a channel's requests, by number; for one thread."""

    def __init__(self, channel: RequestChannel) -> None:
        self._channel = channel
        self._heap: list[tuple[int, int]] = []

    def add(self, time_ns: int, number: int) -> None:
        """Have a request expire at a (monotonic) time."""
        waiting = self._channel.waiting
        if len(self._heap) > 2 * len(waiting) + _MOST_OVER:
            # Most end long before that, and are not to be kept until then.
            self._heap = [timed for timed in self._heap if timed[1] in waiting]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (time_ns, number))

    def run(self) -> float | None:
        """Expire those whose time is over; the seconds until the next one, None: there is none."""
        while self._heap:
            left_ns = self._heap[0][0] - time.monotonic_ns()
            if left_ns > 0:
                return left_ns / 1e9
            self._channel.expire(heapq.heappop(self._heap)[1])
        return None


class ServerConnection(ServerState):
    """A local client's connection: the link to the listener, and the thread that reads it."""

    def __init__(
        self, run_dir: Path, timeout_s: float, on_nudge: Callable[[], None] = nothing
    ) -> None:
        """Connect. Raises Disconnected when no server is there or none lets us in in time, OSError
        where no descriptor is left."""
        super().__init__()
        self.pid = os.getpid()
        self._outlived = run_dir.is_socket()  # by its listener
        self._on_nudge = on_nudge
        self._tasks: deque[Callable[[RequestChannel], None]] = deque()
        self._link = ListenerLink()
        try:
            self._link.connect(run_dir, timeout_s)
            while not self._informed():
                pass
        except (OSError, MalformedMessage) as error:
            self._link.close()
            raise Disconnected(f"{_why_not(error)} in {run_dir}") from error
        self._link.settled()
        self._poll = select.epoll()
        self._poll.register(self._link, select.EPOLLIN)
        self._own = RequestChannel(self, self._watch, self._poll.unregister)
        self._timeouts = Timeouts(self._own)
        self._thread = threading.Thread(target=self._run, name="shmserve-client", daemon=True)
        self._thread.start()

    def _watch(self, fd: int) -> None:
        self._poll.register(fd, select.EPOLLIN)

    # --- the listener

    def _informed(self) -> bool:
        """Take what the server says next; True when that ends what it says at first."""
        informed = False
        for message in self._link.receive():
            match message:
                case Welcome(number, token):
                    self.identity = f"{number}.{token}"
                case m.ModelPublished():
                    self.models.publish(message)
                    self._acknowledge(message.acknowledge)
                case m.ModelOnDemand(name, acknowledge):
                    self.models.on_demand.add(name)
                    self._acknowledge(acknowledge)
                case m.ModelWithdrawn(name, version, acknowledge):
                    self.models.withdraw(name, version)
                    self._acknowledge(acknowledge)
                case m.SchedulerLost(endpoint, successor):
                    self.lose(endpoint, successor)
                case OwnerExited(pid):
                    self.mappings.drop_process(pid)
                case ServerEnding(acknowledge):
                    self.leaving = True
                    self._acknowledge(acknowledge)
                case HealthChanged(ready=ready):
                    self.models.ready = ready
                    informed = True
                case Answered(number, payload):
                    self._link.respond(number, payload)
                case Refused(number, code, text):
                    self._link.respond(number, from_code(code, text))
        return informed

    def has_successor(self) -> bool:
        """Whether it is over, or will be, and another server is, or will be, where this one was."""
        return self.leaving or (self._outlived and self.is_over())

    def is_over(self) -> bool:
        """Whether it has ended, though its thread may not have seen that yet; for any thread."""
        return self._link.ended() or not self.alive

    def _acknowledge(self, number: int) -> None:
        if number > 0:
            self._link.tell(Acknowledged(number))

    # --- requests of ours

    def _ask(self, asking: Callable[[int], tuple[Any, tuple[int, ...]]]) -> dict[str, Any]:
        """Send what `asking` makes of a number, and wait for the response. Raises what that is."""
        with self._lock:
            if not self.alive:
                raise Disconnected(GONE)
            request = self._link.request()
        self._link.tell(*asking(request.number))
        if self.is_current_thread():  # a future's callback asks
            self._read_until(request)
        response = request.wait()
        if isinstance(response, ShmserveError):
            raise response
        payload: dict[str, Any] = response
        return payload

    def want(self, model: str, patience_s: float) -> None:
        """Have a model on demand loaded; returns once it is. Raises what the load fails with, and
        Unavailable after so many seconds, 0: any time."""
        self._ask(lambda number: (WantModel(number, model, patience_s), ()))

    def share(self, segment: AnySegment) -> None:
        """Make a segment known to the server; returns when it is."""
        segment.shared(self._ask(segment.sharing)["memory"])

    def _read_until(self, request: ControlRequest) -> None:
        try:
            while request.pending.locked():
                self._informed()
        except (OSError, MalformedMessage) as error:
            raise Disconnected(GONE) from error

    def withdraw(self, segment: AnySegment) -> None:
        """Make it unknown. In a forked child it is the parent's, who may go on with it."""
        if segment.memory is not None and self.alive and self.pid == os.getpid():
            with contextlib.suppress(Disconnected):
                self._link.tell(WithdrawMemory(segment.memory.id))

    # --- its channel

    def call(self, task: Callable[[RequestChannel], None]) -> None:
        """Run something in the connection's own thread, with its channel. Raises Disconnected."""
        with self._lock:
            if not self.alive:
                raise Disconnected(GONE)
            self._tasks.append(task)
            self._own.wake()

    def is_current_thread(self) -> bool:
        """Whether the caller is the connection's own thread, as a future's callback is."""
        return threading.current_thread() is self._thread

    def expire_at(self, time_ns: int, number: int) -> None:
        """Have a request of its own channel expire at a (monotonic) time; only in its thread."""
        self._timeouts.add(time_ns, number)

    def nudge(self) -> None:
        """Have `on_nudge` called in the connection's thread; at any moment, in any thread."""
        if self.pid == os.getpid():
            with self._lock:
                if self.alive:
                    self._own.wake()

    # --- its thread

    def _run(self) -> None:
        listener, own = self._link.fileno(), self._own
        try:
            while self.alive:
                timeout_s = self._timeouts.run()
                own.flush()
                events = dict(self._poll.poll(timeout_s))
                if listener in events:
                    self._informed()
                # First, because it forgets that we were woken: a task that comes while it does is
                # run below, and one that comes later wakes us again.
                own.take(events)
                while self._tasks:
                    self._tasks.popleft()(self._own)
                if own.waker in events:
                    self._on_nudge()
        except (OSError, MalformedMessage):
            pass  # the server has ended, or it is none that we understand
        finally:
            self._end()

    def _end(self) -> None:
        with self._lock:
            self.alive = False
        self.wake_all()
        while self._tasks:
            self._tasks.popleft()(self._own)
        self._own.close()
        self.models.close()
        self._poll.close()
        self._link.close()

    def close(self) -> None:
        """End it: the server forgets this client. Owners of channels are woken, to close them."""
        if self.pid != os.getpid():
            return  # a forked child: all of it is its parent's
        self.alive = False  # first: the schedulers cut off who is gone, and that is seen at once
        self._link.shut_down()
        if self.is_current_thread():  # a future's callback has had enough
            self.wake_all()
        else:
            self._thread.join()


def _why_not(error: Exception) -> str:
    if isinstance(error, PermissionError):
        return "this user may not connect to the server"
    if isinstance(error, frames.OtherVersion):
        return f"the server cannot be used: {error},"
    if isinstance(error, ConnectionResetError | BrokenPipeError | MalformedMessage):
        return (
            "this client, perhaps of another version or one too many, was not let in by the server"
        )
    return "no server answers"
