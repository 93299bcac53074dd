"""A wait of several threads and event loops at the same sockets (leader and followers)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from shmserve.workers.links.supervisor import readable


class SharedWait:
    """The shared wait of the threads and event loops that call other models.

    One thread sleeps on the epoll descriptor, and the other threads wait for a condition. The
    thread that wakes up handles all received messages. Event loops watch the epoll descriptor, too.

    Attributes:
        lock: Guards the state that `done` of `until` examines.
    """

    def __init__(self, take: Callable[[], None]) -> None:
        """Create the descriptors.

        Args:
            take: Called without `lock` to handle all received messages.
        """
        self.lock = threading.Lock()
        self._take = take
        self._turn = threading.Condition(self.lock)
        self._asleep = False
        self._epoll = select.epoll()
        # Not in the epoll set: an event loop that read it would take the sleeping thread's wake-up.
        self._recheck = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._notification = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._notified = False
        self._loops: Counter[asyncio.AbstractEventLoop] = Counter()
        self.add(self._notification)

    def add(self, fd: int) -> None:
        """Add a descriptor. Threads that are waiting already are woken by it, too."""
        self._epoll.register(fd, select.EPOLLIN)

    def remove(self, fd: int) -> None:
        """Remove a descriptor. Must be called before the descriptor is closed."""
        self._epoll.unregister(fd)

    def close(self) -> None:
        """Close the descriptors. No thread may be waiting."""
        self._epoll.close()
        os.close(self._recheck)
        os.close(self._notification)

    # --- waiting

    def until(self, done: Callable[[], bool]) -> None:
        """Block this thread until `done()` is true.

        Code that changes the result of `done` must call `wake` afterwards.
        """
        while True:
            self._handle_messages()
            with self._turn:
                while self._asleep and not done():
                    self._turn.wait()
                if done():
                    return
                self._asleep = True
            try:
                readable(self._epoll.fileno(), self._recheck)
                _reset(self._recheck)
            finally:
                with self._turn:
                    self._asleep = False
                    self._turn.notify_all()

    def serve(self, future: asyncio.Future[Any]) -> None:
        """Handle received messages in the event loop of this thread until its `future` is done."""
        loop = future.get_loop()
        if not self._loops[loop]:
            loop.add_reader(self._epoll.fileno(), self._handle_messages)
        self._loops[loop] += 1
        future.add_done_callback(self._stop_serving)

    def _stop_serving(self, future: asyncio.Future[Any]) -> None:
        loop = future.get_loop()
        self._loops[loop] -= 1
        if not self._loops[loop]:
            del self._loops[loop]
            loop.remove_reader(self._epoll.fileno())

    def _handle_messages(self) -> None:
        if self._notified:
            self._notified = False
            _reset(self._notification)
        self._take()

    # --- waking

    def wake(self) -> None:
        """Wake up every waiting thread to check its condition. Must be called with `lock` held."""
        self._turn.notify_all()
        if self._asleep:
            os.eventfd_write(self._recheck, 1)

    def notify(self) -> None:
        """Make a waiting thread or event loop, or the next one to wait, call `take`."""
        os.eventfd_write(self._notification, 1)
        self._notified = True  # set after the write: otherwise the eventfd could remain unread


def _reset(eventfd: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.eventfd_read(eventfd)


def settle_soon(future: asyncio.Future[Any], outcome: object) -> None:
    """Set the result or exception of a future, in the future's loop, unless it is done by then."""
    # The loop is closed if the model did not wait for the call.
    with contextlib.suppress(RuntimeError):
        future.get_loop().call_soon_threadsafe(_settle, future, outcome)


def _settle(future: asyncio.Future[Any], outcome: object) -> None:
    if future.done():
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
