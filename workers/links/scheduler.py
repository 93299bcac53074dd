"""A worker's link to the scheduler that feeds its instance: thread-safe, with credit for responses.

    Execute, ... ──> commands (for the loop)     CancelExecution, CreditExecution ──> WorkerRequest

Whoever needs to know something reads the socket: the loop when it waits, a model's thread when it
asks whether its request was cancelled, or waits for credit. What a thread takes that is the loop's
wakes the loop; what anyone takes that another thread waits for wakes that.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from shmserve.ipc.credit import SendWindow
from shmserve.ipc.messages.inference import (
    CancelExecution,
    CreditExecution,
    InstanceReady,
    ReaderExited,
    ReleaseOutputs,
    Work,
)
from shmserve.ipc.transport.dealer import Dealer
from shmserve.workers.links.supervisor import SupervisorLink, readable

logger = logging.getLogger(__name__)

# What may wait is sent with what else comes: that is one wake-up of the scheduler, which on few
# cores takes one from the gateway. After a time like that of a hop it does not, so that what is
# sent first is on its way to the client meanwhile; and it never waits longer than `_MOST_HELD_NS`.
HOLD_NS = 200_000
_MOST_HELD_NS = 400_000

# With the interpreter held: they never wait, and are called as often as responses are sent.
_libc = ctypes.PyDLL(None, use_errno=True)


class Timer:
    """A timer of the kernel's, with the thread that waits for it: to start it wakes nobody. Calls
    `due` in a thread of its own, `delay_ns` after the last `start` (less than a second).

    The thread begins with the first `start`. See timerfd_create(2).
    """

    def __init__(self, delay_ns: int, due: Callable[[], object]) -> None:
        self._due = due
        self._fd = -1
        # struct itimerspec: no interval, then the first expiration, in s and ns
        self._expiration = (ctypes.c_long * 4)(0, 0, 0, delay_ns)
        self._closed = False

    def start(self) -> None:
        """Be due in `delay_ns`, and at no time that was set before. Raises OSError."""
        if self._fd < 0:
            self._begin()
        if _libc.timerfd_settime(self._fd, 0, self._expiration, None) < 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def close(self) -> None:
        """Be never due again, and have the thread end."""
        self._closed = True
        if self._fd >= 0:
            self.start()

    def _begin(self) -> None:
        self._fd = _libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        threading.Thread(target=self._run, name="timer", daemon=True).start()

    def _run(self) -> None:
        while os.read(self._fd, 8) and not self._closed:
            self._due()
        os.close(self._fd)


class WorkerRequest:
    """A request that this worker has, its `work`, and what its scheduler has said of it since.

    `cancelled`: its model should end it; `dropped`: nobody takes what it sends, either. `on_credit`
    is called when its `window` may have become larger.
    """

    __slots__ = ("_window", "cancelled", "dropped", "key", "on_cancel", "on_credit", "work")

    def __init__(self, work: Work) -> None:
        self.key = work.key
        self.work = work
        self.cancelled = False
        self.dropped = False
        self.on_cancel: Callable[[], object] | None = None
        self.on_credit: Callable[[], object] | None = None
        self._window: SendWindow | None = None

    @property
    def window(self) -> SendWindow:
        """The responses that its client takes now. Where there is one response, nobody asks."""
        if self._window is None:
            self._window = SendWindow()
        return self._window

    def open_window(self, placed: bool) -> None:
        """Before its first response: these go to places of its client's, or not."""
        self._window = SendWindow(placed)

    def cancel(self, listening: bool = False) -> None:
        """Cancel it: nobody waits any more, unless somebody is `listening` for what comes yet;
        `on_cancel` is called, once."""
        if not listening:
            self.dropped = True
        if not self.cancelled:
            self.cancelled = True
            if self.on_cancel is not None:
                self.on_cancel()


# A message for the loop, with its requests opened.
Command = tuple[Any, list[WorkerRequest]]

# By type of message what serves it, in the instance's loop: called with the message and its
# requests. What it returns is sent to the scheduler; None: nothing.
MessageTable = Mapping[type[Any], Callable[[Any, list[WorkerRequest]], Any]]


@dataclass(eq=False)
class InstanceLink:
    """The link, through one `Dealer` at a time; `lock` guards it, and what else a model's threads
    share with the loop.

    `on_read` hears of outputs that nobody reads any more.

    Besides what concerns one request, it takes the messages whose types are `served` (see
    `MessageTable`), in their order. What starts work has `requests`, and says in `live` how many
    requests the scheduler has under way: the former are open from the arrival of the message, so
    that a cancel behind it finds them.
    """

    _control: SupervisorLink
    _index: int
    _pid: int
    _on_read: Callable[[ReleaseOutputs | ReaderExited], None]
    commands: deque[Command] = field(default_factory=deque)
    served: Collection[type[Any]] = ()
    _dealer: Dealer | None = None
    _flushed_ns: int = 0
    _held: bool = False
    _open: dict[int, WorkerRequest] = field(default_factory=dict)
    # Eventfd of a thread -> whose credit it needs.
    _waiting: dict[int, WorkerRequest] = field(default_factory=dict)
    _reader: int = 0  # that of the one that reads the socket meanwhile
    loop_reads: bool = False  # it waits for what comes, and reads it

    def __post_init__(self) -> None:
        self.lock = threading.RLock()
        self._timer = Timer(_MOST_HELD_NS, self._flush_held)

    # --- the socket

    def attach(self, endpoint: str) -> None:
        """Offer the instance to the scheduler at `endpoint`, and to no other any more."""
        with self.lock:
            if self._dealer is not None:
                self.pump()  # outputs that were read are released by way of the old one
                self._control.unwatch(self._dealer.fd)
                self.flush()
                self._dealer.close()
                self._disconnect()
            self._dealer = Dealer(endpoint, f"{self._index}.{self._pid}")
            self._control.watch(self._dealer.fd)
            self._dealer.post(InstanceReady(self._index, self._pid))

    @property
    def connected(self) -> bool:
        """Whether there is a scheduler, as far as is known."""
        return self._dealer is not None and self._dealer.connected

    def is_at(self, endpoint: str) -> bool:
        """Whether the instance has been offered to the scheduler at `endpoint`, as far as known."""
        dealer = self._dealer
        return dealer is not None and dealer.connected and dealer.endpoint == endpoint

    def post(self, message: Any) -> None:
        """Queue a message for the next that is sent."""
        with self.lock:
            assert self._dealer is not None
            self._dealer.post(message)

    def flush(self) -> bool:
        """Send what is queued; False: the scheduler has gone, and will not have it."""
        with self.lock:
            self._held = False
            self._flushed_ns = time.monotonic_ns()
            return self._dealer is not None and self._dealer.flush()

    def flush_soon(self) -> bool:
        """`flush`, but not so soon after the last one: then with what is sent next, or by a timer;
        False: the scheduler is known to have gone."""
        with self.lock:
            if time.monotonic_ns() - self._flushed_ns >= HOLD_NS:
                return self.flush()
            if not self._held:
                self._held = True
                self._timer.start()
            return self.connected

    def _flush_held(self) -> None:
        with self.lock:
            if self._held:
                self.flush()

    def send(self, message: Any) -> bool:
        """`post` and `flush`."""
        with self.lock:
            self._held = False
            self._flushed_ns = time.monotonic_ns()
            return self._dealer is not None and self._dealer.send(message)

    def pump(self) -> None:
        """Take all that has arrived; most often nothing has, which `wait` finds sooner."""
        with self.lock:
            while self._dealer is not None and self._dealer.wait(0):
                self.receive()
                if self.commands:
                    self._control.wake()

    def receive(self) -> None:
        """Take what has arrived, where something has; for the loop, which is not woken."""
        with self.lock:
            dealer = self._dealer
            if dealer is None:
                return
            for message in dealer.receive():
                self._take(message)
            if not dealer.connected:
                # What it had given us is run again elsewhere, or refused: its clients' memory may
                # be in use for something else by the time that we would write to it.
                self._disconnect()

    def _take(self, message: Any) -> None:
        match message:
            case _ if type(message) in self.served:
                self.commands.append(self.opened(message))
            case CancelExecution(key=key, listening=listening):
                request = self._open.get(key)
                if request is not None:
                    request.cancel(listening)
                    self._wake(request)
            case CreditExecution(key=key, responses=responses):
                request = self._open.get(key)
                if request is not None:
                    request.window.read(responses)
                    if request.on_credit is not None:
                        request.on_credit()
                    self._wake(request)
            case ReleaseOutputs() | ReaderExited():
                self._on_read(message)
            case _:
                logger.warning("unexpected %s", type(message).__name__)

    def _disconnect(self) -> None:
        """The scheduler is gone: nobody waits for what it gave us."""
        self.commands.clear()
        for request in self._open.values():
            request.cancel()
        self._open.clear()
        for waiting in self._waiting:
            os.eventfd_write(waiting, 1)

    # --- requests

    @property
    def has_open(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._open)

    def opened(self, message: Any) -> Command:
        """A message, its requests open until `close`; with the lock held."""
        requests = list(map(WorkerRequest, getattr(message, "requests", ())))
        for request in requests:
            self._open[request.key] = request
        return message, requests

    def close(self, *requests: WorkerRequest) -> None:
        """Forget requests that have ended: others may get their keys."""
        with self.lock:
            known = self._open
            for request in requests:
                if request.key in known and known[request.key] is request:
                    del known[request.key]

    def is_open(self, request: WorkerRequest) -> bool:
        """Whether the scheduler that gave us the request waits for its end."""
        return self._open.get(request.key) is request

    def is_cancelled(self, request: WorkerRequest) -> bool:
        """Whether nobody waits for a request any more; looks at what has arrived until now."""
        if not request.cancelled:
            self.pump()
        return request.cancelled

    def wait_for_credit(self, request: WorkerRequest, timeout_s: float) -> bool:
        """Wait until the client takes another response, or none any more; False: neither in time.

        One of those who wait reads the socket, unless the loop does (leader and followers).
        """
        deadline = time.monotonic() + timeout_s
        awaited = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        with self.lock:
            self._waiting[awaited] = request
        try:
            while True:
                with self.lock:
                    if not self.loop_reads:
                        self.pump()
                    if request.window.is_open or request.dropped:
                        return True
                    self.flush()
                    self._appoint()
                    fds = [awaited]
                    if self._reader == awaited and self._dealer is not None:
                        fds.append(self._dealer.fd)
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return False
                readable(*fds, timeout_s=left_s)
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(awaited)
        finally:
            with self.lock:
                del self._waiting[awaited]
                if self._reader == awaited:
                    self._reader = 0
                    self._appoint()
            os.close(awaited)

    def loop_stops_reading(self) -> None:
        """The loop has something else to do: another thread reads, where one waits."""
        self.loop_reads = False
        if self._waiting:
            with self.lock:
                self._appoint()

    def _appoint(self) -> None:
        """Have one of those who wait read the socket, if nobody does."""
        if not self.loop_reads and not self._reader and self._waiting:
            self._reader = next(iter(self._waiting))
            os.eventfd_write(self._reader, 1)

    def _wake(self, request: WorkerRequest) -> None:
        for waiting, awaited in self._waiting.items():
            if awaited is request:
                os.eventfd_write(waiting, 1)
