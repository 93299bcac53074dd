"""A worker's link to the supervisor, for the loop and for requests of models to the control API.

The loop waits in `SupervisorLink.wait`: for this socket, the scheduler's, and threads that wake it.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from shmserve import logs
from shmserve.errors import Unavailable, from_code
from shmserve.ipc.messages.control_requests import Answer, Answered, Refused
from shmserve.ipc.messages.publications import Loss, ModelWithdrawn, ProcessExited, SchedulerLost
from shmserve.ipc.messages.supervision import SetLogging
from shmserve.ipc.transport.zmtp import Dealer


class Follower(Protocol):
    """An object that waits for this link's descriptors while the model calls other models."""

    def add(self, fd: int) -> None:
        """Add a descriptor."""

    def remove(self, fd: int) -> None:
        """Remove a descriptor."""

    def cancelled(self) -> None:
        """Check for calls to cancel, after a request of this instance was cancelled."""


class SupervisorLink:
    """The link to the supervisor, which dispatches received messages.

    Messages are responses, changes of other models, and messages for the loop's inbox. A model may
    send requests from its own threads, so a lock guards each use of the socket. A thread that reads
    a message for the loop wakes the loop.
    """

    def __init__(self, dealer: Dealer) -> None:
        self.dealer = dealer
        self.inbox: deque[Any] = deque()
        self._on_models_changed: Callable[[Loss], None] = _ignore
        self._follower: Follower | None = None
        self._readers: dict[int, Callable[[], None]] = {}  # readers by descriptor
        self._lock = threading.RLock()
        self._next_number = 1
        # The eventfd that the response to a request signals, by the number of the request.
        self._eventfds: dict[int, int] = {}
        self._responses: dict[int, Answer] = {}
        self._loop_thread = threading.get_ident()
        self._wake_eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.epoll()
        self.watch(dealer.fd)
        self.watch(self._wake_eventfd)

    def send(self, message: Any) -> None:
        """Send a message to the supervisor immediately."""
        with self._lock:
            self.dealer.send(message)

    def wake(self, always: bool = False) -> None:
        """Wake the loop. The loop's own thread does so only with `always`."""
        if always or threading.get_ident() != self._loop_thread:
            os.eventfd_write(self._wake_eventfd, 1)

    def watch(self, fd: int, read: Callable[[], None] | None = None) -> None:
        """Add a descriptor for which `wait` returns.

        Threads that wait for calls of other models read it with `read`, if that is given.
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
            # A request that the model sent in this thread has already read a message.
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
        waits for the descriptors of this link and is notified of cancelled requests.
        """
        self._on_models_changed = on_change or _ignore
        self._follower = follower
        if follower is not None:
            for fd in (self.dealer.fd, *self._readers):
                follower.add(fd)

    def cancelled(self) -> None:
        """Notify the follower that a request of this instance was cancelled."""
        if self._follower is not None:
            self._follower.cancelled()

    def pump_all(self) -> None:
        """Handle all received messages, including those of the scheduler."""
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
                # If another thread reads the response, it signals `arrived`.
                readable(self.dealer.fd, eventfd)
        finally:
            with self._lock:
                del self._eventfds[number]
                self._responses.pop(number, None)
            os.close(eventfd)
        if isinstance(response, Refused):
            raise from_code(response.code, response.message)
        return response.payload

    def _take_response(self, number: int) -> Answer | None:
        with self._lock:
            self.pump()
            return self._responses.pop(number, None)


def _ignore(change: Loss) -> None:
    """Ignore a change, because no model of this process calls other models."""


def readable(*fds: int, timeout_s: float | None = None) -> bool:
    """Wait until one of the descriptors is readable; return False if the time expires."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))
