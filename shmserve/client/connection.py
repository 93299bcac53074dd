"""A connection to one server, from its welcome to its end.

A thread of its own reads the control connection: which models there are, which schedulers were
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
from shmserve.client.server_state import ServerState
from shmserve.errors import ShmserveError, from_code
from shmserve.ipc import endpoints
from shmserve.ipc import messages as m
from shmserve.ipc.transport import frames
from shmserve.ipc.transport.records import MalformedMessage

_MESSAGE = 4 * 1024 * 1024
# What the kernel takes for a time to wait: 0 would be for ever, and it is counted in an int.
_SHORTEST_S, _LONGEST_S = 1e-3, 2e6
_GONE = "there is no server any more"
_MOST_ANSWERED = 1024  # requests with a timeout, remembered until it is over


class Connection(ServerState):
    """A local client's: a socket to the listener, and the thread that reads it."""

    def __init__(self, run_dir: Path, timeout_s: float) -> None:
        """Connect. Raises Disconnected when no server is there, or none answers in time."""
        timeout_s = min(max(timeout_s, _SHORTEST_S), _LONGEST_S)
        super().__init__()
        self.pid = os.getpid()
        self._numbers = itertools.count(1)
        self._answers: dict[int, _Answer] = {}
        self.on_nudge: Callable[[], None] = nothing
        self._tasks: deque[Callable[[], None]] = deque()
        self._timed: list[tuple[int, int]] = []
        self._control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            _connect(self._control, str(endpoints.listener(run_dir)), timeout_s)
            self._control.settimeout(timeout_s)
            self._control.send(frames.pack([m.Hello(frames.VERSION)]))
            while not self._informed(self._receive()):
                pass
        except (OSError, MalformedMessage) as error:
            self._control.close()
            raise Disconnected(f"{_why_not(error)} in {run_dir}") from error
        self._control.settimeout(None)
        self._poll = select.epoll()
        self._poll.register(self._control, select.EPOLLIN)
        self._own = RequestChannel(self, self._watch, self._poll.unregister)
        self._thread = threading.Thread(target=self._run, name="shmserve-client", daemon=True)
        self._thread.start()

    def _watch(self, fd: int) -> None:
        self._poll.register(fd, select.EPOLLIN)

    # --- the control connection

    def _receive(self) -> bytes:
        data = self._control.recv(_MESSAGE)
        if not data:
            raise ConnectionResetError(_GONE)
        return data

    def _informed(self, data: bytes) -> bool:
        """Take what the server says; True when that ends what it says at first."""
        informed = False
        for message in frames.unpack(data):
            match message:
                case m.Welcome(number, token):
                    self.identity = f"{number}.{token}"
                case m.ModelPublished():
                    self.models.publish(message)
                    self._acknowledge(message.acknowledge)
                case m.ModelWithdrawn(name, version, acknowledge):
                    self.models.withdraw(name, version)
                    self._acknowledge(acknowledge)
                case m.SchedulerLost(endpoint, successor):
                    self.lose(endpoint, successor)
                case m.ProcessExited(pid):
                    self.mappings.drop_process(pid)
                case m.HealthChanged(ready=ready):
                    self.models.ready = ready
                    informed = True
                case m.Answered(number, payload):
                    self._answered(number, payload)
                case m.Refused(number, code, text):
                    self._answered(number, from_code(code, text))
        return informed

    def is_over(self) -> bool:
        """Whether it has ended, though its thread may not have seen that yet; for any thread."""
        ended = select.poll()
        try:
            ended.register(self._control, 0)  # a hang-up is told anyway
            over = bool(ended.poll(0))
        except (OSError, ValueError):  # closed meanwhile
            over = True
        return over or not self.alive

    def _acknowledge(self, number: int) -> None:
        if number > 0:
            self._tell(m.Acknowledged(number))

    def _tell(self, message: Any, fds: tuple[int, ...] = ()) -> None:
        # Without the lock: a signal's handler may find its thread in that, and wait for another one
        # that has something to tell. A packet goes as a whole.
        try:
            socket.send_fds(self._control, [frames.pack([message])], fds)
        except OSError as error:
            raise Disconnected(_GONE) from error

    # --- memory

    def share(self, segment: AnySegment) -> None:
        """Make a segment known to the server; returns when it is."""
        answer = _Answer()
        number = next(self._numbers)
        with self._lock:
            if not self.alive:
                raise Disconnected(_GONE)
            self._answers[number] = answer
        self._tell(*segment.sharing(number))
        if threading.current_thread() is self._thread:  # a future's callback wants memory
            self._read_until(answer)
        with answer.pending:
            pass
        if isinstance(answer.payload, ShmserveError):
            raise answer.payload
        segment.shared(answer.payload["memory"])

    def _read_until(self, answer: _Answer) -> None:
        try:
            while answer.pending.locked():
                self._informed(self._receive())
        except (OSError, MalformedMessage) as error:
            raise Disconnected(_GONE) from error

    def withdraw(self, segment: AnySegment) -> None:
        """Make it unknown. In a forked child it is the parent's, who may go on with it."""
        if segment.memory is not None and self.alive and self.pid == os.getpid():
            with contextlib.suppress(Disconnected):
                self._tell(m.WithdrawMemory(segment.memory.id))

    def _answered(self, number: int, payload: Any) -> None:
        answer = self._answers.pop(number, None)
        if answer is not None:
            answer.payload = payload
            answer.pending.release()

    # --- its channel

    def call(self, task: Callable[[RequestChannel], None]) -> None:
        """Run something in the connection's own thread, with its channel. Raises Disconnected."""
        with self._lock:
            if not self.alive:
                raise Disconnected(_GONE)
            self._tasks.append(lambda: task(self._own))
            self._own.wake()

    def expire_at(self, time_ns: int, number: int) -> None:
        """Have a request of its own channel expire at a (monotonic) time; only in its thread."""
        waiting = self._own.waiting
        if len(self._timed) > 2 * len(waiting) + _MOST_ANSWERED:
            # Most are answered long before that, and are not to be kept until then.
            self._timed = [timed for timed in self._timed if timed[1] in waiting]
            heapq.heapify(self._timed)
        heapq.heappush(self._timed, (time_ns, number))

    def _timeout_s(self) -> float | None:
        while self._timed:
            left_ns = self._timed[0][0] - time.monotonic_ns()
            if left_ns > 0:
                return left_ns / 1e9
            self._own.expire(heapq.heappop(self._timed)[1])
        return None

    def nudge(self) -> None:
        """Have `on_nudge` called in the connection's thread; at any moment, in any thread."""
        if self.pid == os.getpid():
            with self._lock:
                if self.alive:
                    self._own.wake()

    # --- its thread

    def _run(self) -> None:
        listener, own = self._control.fileno(), self._own
        try:
            while self.alive:
                timeout_s = self._timeout_s()
                own.flush()
                events = dict(self._poll.poll(timeout_s))
                if listener in events:
                    self._informed(self._receive())
                # First, because it forgets that we were woken: a task that comes while it does is
                # run below, and one that comes later wakes us again.
                own.take(events)
                while self._tasks:
                    self._tasks.popleft()()
                if own.waker in events:
                    self.on_nudge()
        except (OSError, MalformedMessage):
            pass  # the server has ended, or it is none that we understand
        finally:
            self._end()

    def _end(self) -> None:
        with self._lock:
            self.alive = False
        self.wake_all()
        while self._tasks:
            self._tasks.popleft()()
        own = self._own
        own.close()
        self.models.close()
        for number in list(self._answers):
            self._answered(number, Disconnected(_GONE))
        self._poll.close()
        self._control.close()

    def close(self) -> None:
        """End it: the server forgets this client. Owners of channels are woken, to close them."""
        if self.pid != os.getpid():
            return  # a forked child: all of it is its parent's
        self.alive = False  # first: the schedulers cut off who is gone, and that is seen at once
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is self._thread:  # a future's callback has had enough
            self.wake_all()
        else:
            self._thread.join()


def _connect(listener: socket.socket, path: str, timeout_s: float) -> None:
    """Connect within a time, waiting for a place where many want to come in: a socket with a
    timeout of Python's is told at once that there is none."""
    seconds, rest = divmod(timeout_s, 1)
    limit = struct.pack("ll", int(seconds), int(rest * 1e6))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    listener.connect(path)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, bytes(len(limit)))


def _why_not(error: Exception) -> str:
    if isinstance(error, PermissionError):
        return "this user may not connect to the server"
    if isinstance(error, ConnectionResetError | BrokenPipeError | MalformedMessage):
        return (
            "this client, perhaps of another version or one too many, was not let in by the server"
        )
    return "no server answers"


class _Answer:
    """Room for the server's answer to something that was asked there. `pending` is locked
    until it is there: not an Event, in which a thread that waits holds a lock of its own, and
    whoever answers would wait for a signal's handler in it that asks, too."""

    __slots__ = ("payload", "pending")

    def __init__(self) -> None:
        self.pending = threading.Lock()
        self.pending.acquire()
        self.payload: Any = None
