"""A shared wait (leader and followers): threads and event loops on the same sockets; whoever wakes
takes all that came."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import threading
from collections.abc import Callable

from shmserve.workers.links.supervisor import readable


class SharedWait:
    """One epoll descriptor over all sockets, one thread at a time asleep on it, the others behind.

    `take` is called without `lock`.
    """

    def __init__(self, take: Callable[[], None]) -> None:
        self.lock = threading.Lock()
        self._take = take
        self._turn = threading.Condition(self.lock)
        self._asleep = False
        self._epoll = select.epoll()
        # Not in the epoll set: an event loop that read it would take the sleeping thread's wake-up.
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._loops: dict[asyncio.AbstractEventLoop, int] = {}

    def add(self, fd: int) -> None:
        """Wait for this descriptor too; also for those that wait already."""
        self._epoll.register(fd, select.EPOLLIN)

    def remove(self, fd: int) -> None:
        """Wait for it no more; before it is closed."""
        self._epoll.unregister(fd)

    def until(self, done: Callable[[], bool]) -> None:
        """Block this thread until `done()`, which whoever changes it follows with `wake`."""
        while True:
            self._take()
            with self._turn:
                while self._asleep and not done():
                    self._turn.wait()
                if done():
                    return
                self._asleep = True
            try:
                self._sleep()
            finally:
                with self._turn:
                    self._asleep = False
                    self._turn.notify_all()

    def _sleep(self) -> None:
        readable(self._epoll.fileno(), self._wake)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def wake(self) -> None:
        """Let every waiting thread look again; with `lock` held."""
        self._turn.notify_all()
        if self._asleep:
            os.eventfd_write(self._wake, 1)

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have `loop`, which runs in this thread, take what comes, until as many `unwatch`."""
        if not self._loops.get(loop):
            loop.add_reader(self._epoll.fileno(), self._take)
        self._loops[loop] = self._loops.get(loop, 0) + 1

    def unwatch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Undo one `watch`."""
        self._loops[loop] -= 1
        if not self._loops[loop]:
            del self._loops[loop]
            loop.remove_reader(self._epoll.fileno())

    def close(self) -> None:
        """Close the descriptors; nobody may wait."""
        self._epoll.close()
        os.close(self._wake)
