"""A worker's link to the scheduler of its instance, with flow control of responses (thread-safe).

    Execute, ... ──> commands (for the loop)     CancelExecution, CreditExecution ──> WorkerRequest

The socket is read by the thread that needs a message: the loop while it waits, or a model's thread
that checks for cancellation or waits for credit. A thread that reads a message for the loop or for
another thread wakes the recipient.
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

# A message that may be delayed is sent together with the next one. This saves a wake-up of the
# scheduler, which on few cores preempts the gateway. After HOLD_NS, about the duration of a hop,
# messages are sent immediately: the first one has reached the client by then. No message is delayed
# longer than `_MOST_HELD_NS`.
HOLD_NS = 200_000
_MOST_HELD_NS = 400_000

# PyDLL keeps the GIL: these calls never block, and are made for every response.
_libc = ctypes.PyDLL(None, use_errno=True)


class Timer:
    """A kernel timer with a thread that waits for it, so that starting it wakes no thread.

    The thread calls `due` `delay_ns` (less than a second) after the last `start`. The first `start`
    creates the thread. See timerfd_create(2).
    """

    def __init__(self, delay_ns: int, due: Callable[[], object]) -> None:
        self._due = due
        self._fd = -1
        # struct itimerspec: no interval, then the first expiration, in s and ns
        self._expiration = (ctypes.c_long * 4)(0, 0, 0, delay_ns)
        self._closed = False

    def start(self) -> None:
        """Set or reset the timer to expire in `delay_ns`.

        Raises:
            OSError: The timer cannot be created or set.
        """
        if self._fd < 0:
            self._begin()
        if _libc.timerfd_settime(self._fd, 0, self._expiration, None) < 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def close(self) -> None:
        """Stop the timer and its thread."""
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
    """A request of this worker, its `work`, and its state at the scheduler.

    Attributes:
        cancelled: Whether the model should end the request.
        dropped: Whether the client does not read further responses, either.
        on_credit: Called when its `window` may have grown.
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
        """Return the send window of its responses, created at the first use.

        A request with a single response never uses it.
        """
        if self._window is None:
            self._window = SendWindow()
        return self._window

    def open_window(self, placed: bool) -> None:
        """Create the send window before the first response.

        Args:
            placed: Whether outputs are written to the client's memory.
        """
        self._window = SendWindow(placed)

    def cancel(self, listening: bool = False) -> None:
        """Cancel the request and call `on_cancel`, once.

        With `listening`, the client still reads the remaining responses.
        """
        if not listening:
            self.dropped = True
        if not self.cancelled:
            self.cancelled = True
            if self.on_cancel is not None:
                self.on_cancel()


# A message for the loop, with its requests opened.
Command = tuple[Any, list[WorkerRequest]]

# The handlers of further messages by type, called in the instance's loop with the message and its
# requests. The result, unless None, is sent to the scheduler.
MessageTable = Mapping[type[Any], Callable[[Any, list[WorkerRequest]], Any]]


@dataclass(eq=False)
class InstanceLink:
    """The link to the scheduler, through one `Dealer` at a time.

    Requests are open from the arrival of their message, so that a following cancellation finds
    them.

    Attributes:
        lock: Guards the link and other state that a model's threads share with the loop.
        commands: The received messages for the loop, in order.
        served: The message types that are passed to the loop (see `MessageTable`).
        loop_reads: Whether the loop waits and reads the socket.
        _on_read: Called for outputs that readers have released.
        _waiting: The requests whose credit threads wait for, by the eventfd of the thread.
        _reader: The eventfd of the thread that reads the socket; 0 for none.
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
    _waiting: dict[int, WorkerRequest] = field(default_factory=dict)
    _reader: int = 0
    loop_reads: bool = False

    def __post_init__(self) -> None:
        self.lock = threading.RLock()
        self._timer = Timer(_MOST_HELD_NS, self._flush_held)

    # --- the socket

    def attach(self, endpoint: str) -> None:
        """Connect the instance to the scheduler at `endpoint` instead of the current one."""
        with self.lock:
            if self._dealer is not None:
                # Before the change, to read releases of outputs from the old connection.
                self.pump()
                self._control.unwatch(self._dealer.fd)
                self.flush()
                self._dealer.close()
                self._disconnect()
            self._dealer = Dealer(endpoint, f"{self._index}.{self._pid}")
            self._control.watch(self._dealer.fd, self.pump)
            self._dealer.post(InstanceReady(self._index, self._pid))

    @property
    def connected(self) -> bool:
        """Return whether the link is known to be connected to a scheduler."""
        return self._dealer is not None and self._dealer.connected

    def is_at(self, endpoint: str) -> bool:
        """Check whether the instance is known to be connected to the scheduler at `endpoint`."""
        dealer = self._dealer
        return dealer is not None and dealer.connected and dealer.endpoint == endpoint

    def post(self, message: Any) -> None:
        """Queue a message for the next `flush`."""
        with self.lock:
            assert self._dealer is not None
            self._dealer.post(message)

    def flush(self) -> bool:
        """Send the queued messages; return False if the link is disconnected."""
        with self.lock:
            self._held = False
            self._flushed_ns = time.monotonic_ns()
            return self._dealer is not None and self._dealer.flush()

    def flush_soon(self) -> bool:
        """Call `flush`, or delay it to the next message or a timer shortly after another flush.

        Returns:
            False if the link is known to be disconnected.
        """
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
        """Call `post` and `flush`."""
        with self.lock:
            self._held = False
            self._flushed_ns = time.monotonic_ns()
            return self._dealer is not None and self._dealer.send(message)

    def pump(self) -> None:
        """Handle all received messages. `wait` returns early in the common case of no message."""
        with self.lock:
            while self._dealer is not None and self._dealer.wait(0):
                self.receive()
                if self.commands:
                    self._control.wake()

    def receive(self) -> None:
        """Handle the received messages. For the loop: unlike `pump`, it does not wake the loop."""
        with self.lock:
            dealer = self._dealer
            if dealer is None:
                return
            for message in dealer.receive():
                self._take(message)
            if not dealer.connected:
                # Its requests are retried elsewhere or have failed. The memory of their clients may
                # be in use for other data, so this worker must not write to it.
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
                    self._control.cancelled()
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
        """Cancel all requests of a scheduler that has disconnected."""
        self.commands.clear()
        for request in self._open.values():
            request.cancel()
        self._open.clear()
        self._control.cancelled()
        for waiting in self._waiting:
            os.eventfd_write(waiting, 1)

    # --- requests

    @property
    def has_open(self) -> bool:
        """Return whether a request has not ended."""
        return bool(self._open)

    def opened(self, message: Any) -> Command:
        """Return a message together with its requests, which are open until `close`.

        Must be called with the lock.
        """
        requests = list(map(WorkerRequest, getattr(message, "requests", ())))
        for request in requests:
            self._open[request.key] = request
        return message, requests

    def close(self, *requests: WorkerRequest) -> None:
        """Remove requests that have ended, whose keys may be reused."""
        with self.lock:
            opened = self._open
            for request in requests:
                if request.key in opened and opened[request.key] is request:
                    del opened[request.key]

    def is_open(self, request: WorkerRequest) -> bool:
        """Check whether the request's scheduler still expects its final response."""
        return self._open.get(request.key) is request

    def is_cancelled(self, request: WorkerRequest) -> bool:
        """Check whether a request was cancelled, including by unprocessed messages."""
        if not request.cancelled:
            self.pump()
        return request.cancelled

    def wait_for_credit(self, request: WorkerRequest, timeout_s: float) -> bool:
        """Wait until the client accepts another response or stops reading responses.

        One of the waiting threads reads the socket, unless the loop does (leader and followers).

        Returns:
            False if the timeout has expired.
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
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    return False
                readable(*fds, timeout_s=remaining_s)
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
        """Record that the loop no longer reads the socket; a waiting thread then reads it."""
        self.loop_reads = False
        if self._waiting:
            with self.lock:
                self._appoint()

    def _appoint(self) -> None:
        """Wake a waiting thread to read the socket, if no thread reads it."""
        if not self.loop_reads and not self._reader and self._waiting:
            self._reader = next(iter(self._waiting))
            os.eventfd_write(self._reader, 1)

    def _wake(self, request: WorkerRequest) -> None:
        for waiting, awaited in self._waiting.items():
            if awaited is request:
                os.eventfd_write(waiting, 1)
