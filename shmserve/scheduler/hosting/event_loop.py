"""The parts of a host's event loop: waiting, and messages between its schedulers."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Hashable
from typing import Any

from shmserve.ipc.processes import SPIN_NS, BusyPoll, PreciseWait

# A sleeping thread wakes up late. Timers are set earlier by the measured delay, at most this.
_MAX_LATE_NS = 60_000

# A client's deadline may be any number; no timer is longer than this.
_MAX_WAIT_NS = 3_600_000_000_000

_NS_PER_MS = 1_000_000
# epoll_wait(2) counts in whole ms: shorter waits use ppoll(2) on the epoll(7) descriptor.
_SHORT_WAIT_NS = 5 * _NS_PER_MS

ReadableHandler = Callable[[], None]
ReadyEvents = list[tuple[int, int]]
Handler = Callable[[Any, Any], None]  # the arguments are the sender's address and its message


class DescriptorWaiter:
    """A waiter for readable descriptors, which sleeps in the kernel, or polls while polling pays.

    `handlers` has the handler of each watched descriptor.
    """

    def __init__(self) -> None:
        self.handlers: dict[int, ReadableHandler] = {}
        self._epoll = select.epoll()
        self._short_wait = PreciseWait(self._epoll.fileno())
        self._mean_late_ns = 0
        self._busy_poll = BusyPoll()

    def watch(self, fd: int, handler: ReadableHandler) -> None:
        """Watch a descriptor; it is handled after the descriptors watched before."""
        self.handlers[fd] = handler
        self._epoll.register(fd, select.EPOLLIN)

    def unwatch(self, fd: int) -> None:
        """Remove a descriptor."""
        del self.handlers[fd]
        self._epoll.unregister(fd)

    def wait(self, wake_ns: int, requests: int) -> ReadyEvents:
        """Wait until about `wake_ns` for readable descriptors while `requests` are in flight.

        Returns:
            The descriptors in order, with epoll(7)'s events; none after a timeout.
        """
        began_ns = now_ns = time.monotonic_ns()
        ready_events: ReadyEvents = []
        if self._busy_poll.should_spin[requests > 0]:
            ready_events = self._spin_until(min(wake_ns, began_ns + SPIN_NS))
            now_ns = time.monotonic_ns()
        if not ready_events:
            left_ns = wake_ns - now_ns
            if left_ns < _SHORT_WAIT_NS:
                ready_events = self._wait_until(wake_ns)
            else:
                if left_ns > _MAX_WAIT_NS:
                    left_ns = _MAX_WAIT_NS
                # The timeout is rounded down; the caller then waits for the rest.
                ready_events = self._epoll.poll((left_ns // _NS_PER_MS - 1) / 1000)
        self._busy_poll.observe(requests, time.monotonic_ns() - began_ns)
        if len(ready_events) > 1:
            order = list(self.handlers)
            ready_events.sort(key=lambda event: order.index(event[0]))
        return ready_events

    def _spin_until(self, until_ns: int) -> ReadyEvents:
        while time.monotonic_ns() < until_ns:
            ready_events = self._epoll.poll(0)
            if ready_events:
                return ready_events
            os.sched_yield()
        return []

    def _wait_until(self, wake_ns: int) -> ReadyEvents:
        aim_ns = wake_ns - self._mean_late_ns
        timeout_ns = max(0, aim_ns - time.monotonic_ns())
        readable = self._short_wait.wait(timeout_ns)
        if timeout_ns and not readable:
            late_ns = min(max(0, time.monotonic_ns() - aim_ns), _MAX_LATE_NS)
            self._mean_late_ns += (late_ns - self._mean_late_ns) // 8
        return self._epoll.poll(0) if readable else []


class InProcessLinks:
    """Links between the schedulers of one process.

    A message is a call of the handler registered for its address, and nothing is packed. The
    address of a scheduler is its endpoint; as a client, its identity. A client's message is
    delivered immediately. Responses are delivered later, in the order of posting, so that no
    handler of a scheduler is called within another one of that scheduler.
    """

    def __init__(self) -> None:
        self._handlers: dict[Hashable, Handler] = {}
        self.queued_messages: list[tuple[Handler, Any, Any]] = []

    def register(self, address: Hashable, handler: Handler) -> None:
        """Register the message handler of an address."""
        self._handlers[address] = handler

    def remove(self, address: Hashable) -> None:
        """Remove an address; messages that were posted to it are still delivered."""
        del self._handlers[address]

    def is_registered(self, address: Hashable) -> bool:
        """Check whether an address is registered."""
        return address in self._handlers

    def call(self, address: Hashable, sender: Any, message: Any) -> bool:
        """Deliver a client's message now; return False if the address is not registered."""
        handler = self._handlers.get(address)
        if handler is None:
            return False
        handler(sender, message)
        return True

    def post(self, address: Hashable, sender: Any, message: Any) -> bool:
        """Queue a response; return False if the address is not registered."""
        handler = self._handlers.get(address)
        if handler is None:
            return False
        self.queued_messages.append((handler, sender, message))
        return True

    def deliver(self) -> None:
        """Deliver the queued responses."""
        queued, self.queued_messages = self.queued_messages, []
        for handler, sender, message in queued:
            handler(sender, message)
