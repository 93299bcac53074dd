"""The links of a worker to the supervisor and to the scheduler of its instance (thread-safe).

The loop waits in `SupervisorLink.wait`: for the sockets of supervisor and scheduler, and for
threads that wake it. Models use `SupervisorLink` for requests to the control API.

    Execute, ... ──> commands (for the loop)     CancelExecution, CreditExecution ──> WorkerRequest

The scheduler's socket (`InstanceLink`) is read by the thread that needs a message: the loop while
it waits, or a model's thread that checks for cancellation or waits for credit. A thread that reads
a message for the loop or for another thread wakes the recipient.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from shmserve import logs
from shmserve.errors import Unavailable, from_code
from shmserve.ipc.credit import SendWindow
from shmserve.ipc.messages.control_requests import Answer, Answered, Refused
from shmserve.ipc.messages.inference import (
    CancelExecution,
    CreditExecution,
    InstanceReady,
    ReaderExited,
    ReleaseOutputs,
    Work,
)
from shmserve.ipc.messages.publications import Loss, ModelWithdrawn, ProcessExited, SchedulerLost
from shmserve.ipc.messages.supervision import SetLogging
from shmserve.ipc.processes import reset_eventfd
from shmserve.ipc.transport.zmtp import Dealer

logger = logging.getLogger(__name__)

# A message that may be delayed is sent together with the next message. This saves a wake-up of the
# scheduler, which would compete with the gateway for few cores. Only a message that follows another
# one within `HOLD_NS` (about the time that a message needs to reach the client) is delayed, for at
# most `_MAX_HOLD_NS`.
HOLD_NS = 200_000
_MAX_HOLD_NS = 400_000

# PyDLL keeps the GIL during a call, which is cheaper. The calls below never block.
_libc = ctypes.PyDLL(None, use_errno=True)


class Follower(Protocol):
    """An object that also waits for the link's descriptors while the model calls other models."""

    def add(self, fd: int) -> None:
        """Wait for this descriptor, too."""

    def remove(self, fd: int) -> None:
        """Stop waiting for this descriptor, which is about to be closed."""

    def on_cancelled(self) -> None:
        """Cancel the calls that the model makes for cancelled requests, after a cancellation."""


class SupervisorLink:
    """The link to the supervisor, which dispatches received messages.

    Messages are responses, changes of other models, and messages that the loop handles. A model may
    send requests from its own threads, so a lock guards each use of the socket. A thread that reads
    a message for the loop wakes the loop.
    """

    def __init__(self, dealer: Dealer) -> None:
        self.dealer = dealer
        self.inbox: deque[Any] = deque()  # received messages for the loop
        self._on_models_changed: Callable[[Loss], None] = _ignore
        self._follower: Follower | None = None
        # The functions that read the messages of a descriptor, by descriptor.
        self._readers: dict[int, Callable[[], None]] = {}
        self._lock = threading.RLock()
        self._next_number = 1
        # The eventfd that the response to a request signals, by the number of the request.
        self._eventfds: dict[int, int] = {}
        self._responses: dict[int, Answer] = {}  # by number of the request
        self._loop_thread = threading.get_ident()
        self._wake_eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.epoll()
        self.watch(dealer.fd)
        self.watch(self._wake_eventfd)

    def send(self, message: Any) -> None:
        """Send a message to the supervisor immediately."""
        with self._lock:
            self.dealer.send(message)

    def wake(self, includes_loop_thread: bool = False) -> None:
        """Wake the loop; in its own thread, only if `includes_loop_thread` is set."""
        if includes_loop_thread or threading.get_ident() != self._loop_thread:
            os.eventfd_write(self._wake_eventfd, 1)

    def watch(self, fd: int, read: Callable[[], None] | None = None) -> None:
        """Add a descriptor for which `wait` returns.

        Threads that wait for calls of other models call `read`, if given, when it is readable.
        """
        self._poll.register(fd, select.EPOLLIN)
        if read is not None:
            self._readers[fd] = read
            if self._follower is not None:
                self._follower.add(fd)

    def unwatch(self, fd: int) -> None:
        """Remove a descriptor. Must be called before the descriptor is closed."""
        self._poll.unregister(fd)
        if self._readers.pop(fd, None) is not None and self._follower is not None:
            self._follower.remove(fd)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until there is work or the time has expired; only for the loop's thread.

        Returns:
            True if a watched descriptor is readable or another thread has woken the loop. Messages
            are in `inbox`.
        """
        if self.inbox:
            # The message was read while the model waited in this thread for another response.
            timeout_s = 0.0
        is_readable = False
        for fd, _ in self._poll.poll(timeout_s):
            if fd == self.dealer.fd:
                self.pump()
            else:
                is_readable = True
                if fd == self._wake_eventfd:
                    os.eventfd_read(fd)
        return is_readable

    def follow_models(
        self, on_change: Callable[[Loss], None] | None, follower: Follower | None = None
    ) -> None:
        """Set the callback for changes of other models, or remove it with None.

        The callback runs in the thread that reads the message, with the lock held. The `follower`
        polls the descriptors of this link, and is notified of cancelled requests.
        """
        self._on_models_changed = on_change or _ignore
        self._follower = follower
        if follower is not None:
            for fd in (self.dealer.fd, *self._readers):
                follower.add(fd)

    def on_cancelled(self) -> None:
        """Notify the `Follower`, if there is one, that a request of this instance was cancelled."""
        if self._follower is not None:
            self._follower.on_cancelled()

    def pump_all(self) -> None:
        """Handle all received messages, including the scheduler's."""
        self.pump()
        for read in tuple(self._readers.values()):
            read()

    def close(self, linger_s: float) -> None:
        """Close the socket after at most `linger_s` for the delivery of sent messages."""
        self._poll.close()
        self.dealer.close(linger_s)

    def pump(self) -> None:
        """Handle all received messages. Messages for the loop are appended to `inbox`."""
        with self._lock:
            for message in self.dealer.receive():
                match message:
                    case Answered() | Refused():
                        if message.id in self._eventfds:
                            self._responses[message.id] = message
                            os.eventfd_write(self._eventfds[message.id], 1)
                    case SetLogging(settings):
                        logs.apply(logs.LogSettings(**settings))
                    case ModelWithdrawn() | SchedulerLost():
                        self._on_models_changed(message)
                    case _:
                        if isinstance(message, ProcessExited):
                            self._on_models_changed(message)
                        self.inbox.append(message)
                        self.wake()

    def ask(self, message_type: Callable[..., Any], *fields: Any) -> dict[str, Any]:
        """Send `message_type(number, *fields)` and wait for the payload of its response.

        Raises:
            ShmserveError: The supervisor has rejected the request with this error.
            Unavailable: The supervisor has exited.
        """
        eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        with self._lock:
            number = self._next_number
            self._next_number += 1
            self._eventfds[number] = eventfd
        try:
            self.send(message_type(number, *fields))
            while (response := self._take_response(number)) is None:
                if not self.dealer.connected:
                    raise Unavailable("the server has exited")
                # If another thread reads the response, it signals `eventfd`.
                wait_readable(self.dealer.fd, eventfd)
        finally:
            with self._lock:
                del self._eventfds[number]
                self._responses.pop(number, None)
            os.close(eventfd)
        if isinstance(response, Refused):
            raise from_code(response.code, response.message)
        return response.payload

    def _take_response(self, request_number: int) -> Answer | None:
        with self._lock:
            self.pump()
            return self._responses.pop(request_number, None)


def _ignore(change: Loss) -> None:
    """Ignore a change, because no model of this process calls other models."""


def wait_readable(*fds: int, timeout_s: float | None = None) -> bool:
    """Wait until one of the descriptors is readable; return False if the time expires."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))


class Timer:
    """A kernel timer with a thread that waits for it; starting the timer wakes no thread.

    The thread calls `on_expiry` when `delay_ns` (less than a second) has passed since the last
    `start`. The first `start` creates the thread. See timerfd_create(2).
    """

    def __init__(self, delay_ns: int, on_expiry: Callable[[], object]) -> None:
        self._on_expiry = on_expiry
        self._fd = -1
        # struct itimerspec: no interval, then the first expiration, in s and ns
        self._expiration = (ctypes.c_long * 4)(0, 0, 0, delay_ns)
        self._is_closed = False

    def start(self) -> None:
        """Set or reset the timer to expire in `delay_ns`.

        Raises:
            OSError: The timer cannot be created or set.
        """
        if self._fd < 0:
            self._create()
        if _libc.timerfd_settime(self._fd, 0, self._expiration, None) < 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def close(self) -> None:
        """Stop the timer and its thread."""
        self._is_closed = True
        if self._fd >= 0:
            self.start()

    def _create(self) -> None:
        self._fd = _libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        threading.Thread(target=self._run, name="timer", daemon=True).start()

    def _run(self) -> None:
        while os.read(self._fd, 8) and not self._is_closed:
            self._on_expiry()
        os.close(self._fd)


class WorkerRequest:
    """A request that this worker executes, with its cancellation and its flow control.

    Attributes:
        key: The id of the request at the scheduler.
        work: The scheduler's message with the request.
        cancelled: Whether the model should end the request.
        reader_gone: Whether the client reads no further responses, even if the model sends some.
        on_cancel: Called when the request is cancelled.
        on_credit: Called when its `window` may have grown.
    """

    __slots__ = ("_window", "cancelled", "key", "on_cancel", "on_credit", "reader_gone", "work")

    def __init__(self, work: Work) -> None:
        self.key = work.key
        self.work = work
        self.cancelled = False  # the model should end the request
        self.reader_gone = False  # the client reads no further responses
        self.on_cancel: Callable[[], object] | None = None
        self.on_credit: Callable[[], object] | None = None
        self._window: SendWindow | None = None

    @property
    def window(self) -> SendWindow:
        """Return the send window of the responses; the first use creates the window.

        A request with a single response never uses the window.
        """
        if self._window is None:
            self._window = SendWindow()
        return self._window

    def open_window(self, in_client_memory: bool) -> None:
        """Create the send window before the first response.

        Args:
            in_client_memory: Whether outputs are written to the client's memory.
        """
        self._window = SendWindow(in_client_memory)

    def cancel(self, keeps_reading: bool = False) -> None:
        """Cancel the request and call `on_cancel`, once.

        With `keeps_reading`, the client still reads the remaining responses.
        """
        if not keeps_reading:
            self.reader_gone = True
        if not self.cancelled:
            self.cancelled = True
            if self.on_cancel is not None:
                self.on_cancel()


# A message for the loop, and the open requests that it contains.
Command = tuple[Any, list[WorkerRequest]]

# The handlers of messages by type, called in the instance's loop with a message and its requests.
# The result, unless None, is sent to the scheduler.
HandlerTable = Mapping[type[Any], Callable[[Any, list[WorkerRequest]], Any]]


@dataclass(eq=False)
class InstanceLink:
    """The link to the scheduler, through one `Dealer` at a time.

    A request is open from the arrival of its message, so that a later cancellation finds it.

    Attributes:
        lock: Guards the link and other state that a model's threads share with the loop.
        commands: The received messages for the loop, in order.
        loop_messages: The message types that are passed to the loop, which has handlers for them.
        loop_reads: Whether the loop waits and reads the socket; `loop_stops_reading` clears it.
        _on_released: Called for outputs that readers have released.
        _waiting_by_eventfd: The requests for whose credit a thread waits, by its eventfd.
        _reader_eventfd: The eventfd of the thread that reads the socket; 0 for none.
    """

    _control: SupervisorLink  # to the supervisor
    _index: int  # of the instance
    _pid: int  # of this process
    _on_released: Callable[[ReleaseOutputs | ReaderExited], None]
    commands: deque[Command] = field(default_factory=deque)
    loop_messages: Collection[type[Any]] = ()
    _dealer: Dealer | None = None  # socket to the scheduler
    _last_flush_ns: int = 0
    _holds_messages: bool = False  # whether unsent messages wait for the timer
    _open_requests: dict[int, WorkerRequest] = field(default_factory=dict)  # by key
    _waiting_by_eventfd: dict[int, WorkerRequest] = field(default_factory=dict)
    _reader_eventfd: int = 0
    loop_reads: bool = False

    def __post_init__(self) -> None:
        self.lock = threading.RLock()
        self._timer = Timer(_MAX_HOLD_NS, self._flush_held_messages)

    # --- the socket

    def attach(self, endpoint: str) -> None:
        """Connect the instance to the scheduler at `endpoint` instead of the current one."""
        with self.lock:
            if self._dealer is not None:
                # The old connection is read first, because it may contain releases of outputs.
                self.pump()
                self._control.unwatch(self._dealer.fd)
                self.flush()
                dealer, self._dealer = self._dealer, None
                dealer.close()
                self._disconnect()
            self._dealer = Dealer(endpoint, f"{self._index}.{self._pid}")
            self._control.watch(self._dealer.fd, self.pump)
            self._dealer.post(InstanceReady(self._index, self._pid))

    @property
    def connected(self) -> bool:
        """Return whether the link is known to be connected to a scheduler."""
        return self._dealer is not None and self._dealer.connected

    def is_connected_to(self, endpoint: str) -> bool:
        """Check whether the instance is known to be connected to the scheduler at `endpoint`."""
        dealer = self._dealer
        return dealer is not None and dealer.connected and dealer.endpoint == endpoint

    def post(self, message: Any) -> None:
        """Queue a message to the scheduler for the next `flush`."""
        with self.lock:
            assert self._dealer is not None
            self._dealer.post(message)

    def flush(self) -> bool:
        """Send the queued messages; return False if the link is disconnected."""
        with self.lock:
            self._holds_messages = False
            self._last_flush_ns = time.monotonic_ns()
            return self._dealer is not None and self._dealer.flush()

    def flush_soon(self) -> bool:
        """Call `flush` now, or with a delay if another flush has just been called.

        A delayed message is sent with the next one, or when the timer expires.

        Returns:
            False if the link is known to be disconnected.
        """
        with self.lock:
            if time.monotonic_ns() - self._last_flush_ns >= HOLD_NS:
                return self.flush()
            if not self._holds_messages:
                self._holds_messages = True
                self._timer.start()
            return self.connected

    def _flush_held_messages(self) -> None:
        with self.lock:
            if self._holds_messages:
                self.flush()

    def send(self, message: Any) -> bool:
        """Queue a message and flush the queue; return False if the link is disconnected."""
        with self.lock:
            self._holds_messages = False
            self._last_flush_ns = time.monotonic_ns()
            return self._dealer is not None and self._dealer.send(message)

    def pump(self) -> None:
        """Handle all received messages, and wake the loop if there are commands for it."""
        with self.lock:
            while self._dealer is not None and self._dealer.wait(0):
                self.receive()
                if self.commands:
                    self._control.wake()

    def receive(self) -> None:
        """Handle the received messages; unlike `pump`, this method does not wake the loop."""
        with self.lock:
            dealer = self._dealer
            if dealer is None:
                return
            for message in dealer.receive():
                self._dispatch(message)
            if not dealer.connected:
                # The scheduler's requests are retried elsewhere or have failed. The memory of their
                # clients may be in use for other data, so this worker must not write to it.
                self._disconnect()

    def _dispatch(self, message: Any) -> None:
        match message:
            case _ if type(message) in self.loop_messages:
                self.commands.append(self.register_requests(message))
            case CancelExecution(key=key, keeps_reading=keeps_reading):
                request = self._open_requests.get(key)
                if request is not None:
                    request.cancel(keeps_reading)
                    self._wake(request)
                    self._control.on_cancelled()
            case CreditExecution(key=key, responses=responses):
                request = self._open_requests.get(key)
                if request is not None:
                    request.window.record_credit(responses)
                    if request.on_credit is not None:
                        request.on_credit()
                    self._wake(request)
            case ReleaseOutputs() | ReaderExited():
                self._on_released(message)
            case _:
                logger.warning("unexpected %s message from the scheduler", type(message).__name__)

    def _disconnect(self) -> None:
        """Cancel all requests of a scheduler that has disconnected."""
        self.commands.clear()
        # Replaced before `cancel`, whose listener may end a request and so change the table.
        requests, self._open_requests = self._open_requests, {}
        for request in requests.values():
            request.cancel()
        self._control.on_cancelled()
        for eventfd in self._waiting_by_eventfd:
            os.eventfd_write(eventfd, 1)

    # --- requests

    @property
    def has_open_requests(self) -> bool:
        """Return whether a received request has not ended."""
        return bool(self._open_requests)

    def register_requests(self, message: Any) -> Command:
        """Record the requests of a message as open until `close_requests`; return both.

        Must be called with the lock held.
        """
        requests = list(map(WorkerRequest, getattr(message, "requests", ())))
        for request in requests:
            self._open_requests[request.key] = request
        return message, requests

    def close_requests(self, *requests: WorkerRequest) -> None:
        """Remove requests that have ended; their keys may be reused."""
        with self.lock:
            open_requests = self._open_requests
            for request in requests:
                if request.key in open_requests and open_requests[request.key] is request:
                    del open_requests[request.key]

    def is_open(self, request: WorkerRequest) -> bool:
        """Check whether the request's scheduler still expects its final response."""
        return self._open_requests.get(request.key) is request

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
        eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        with self.lock:
            self._waiting_by_eventfd[eventfd] = request
        try:
            while True:
                with self.lock:
                    if not self.loop_reads:
                        self.pump()
                    if request.window.is_open or request.reader_gone:
                        return True
                    self.flush()
                    self._appoint_reader()
                    fds = [eventfd]
                    if self._reader_eventfd == eventfd and self._dealer is not None:
                        fds.append(self._dealer.fd)
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    return False
                wait_readable(*fds, timeout_s=remaining_s)
                reset_eventfd(eventfd)
        finally:
            with self.lock:
                del self._waiting_by_eventfd[eventfd]
                if self._reader_eventfd == eventfd:
                    self._reader_eventfd = 0
                    self._appoint_reader()
            os.close(eventfd)

    def loop_stops_reading(self) -> None:
        """Record that the loop no longer reads the socket; a waiting thread then reads it."""
        self.loop_reads = False
        if self._waiting_by_eventfd:
            with self.lock:
                self._appoint_reader()

    def _appoint_reader(self) -> None:
        """Wake a waiting thread to read the socket, if no thread reads it."""
        if not self.loop_reads and not self._reader_eventfd and self._waiting_by_eventfd:
            self._reader_eventfd = next(iter(self._waiting_by_eventfd))
            os.eventfd_write(self._reader_eventfd, 1)

    def _wake(self, request: WorkerRequest) -> None:
        for eventfd, waiting_request in self._waiting_by_eventfd.items():
            if waiting_request is request:
                os.eventfd_write(eventfd, 1)
