"""The host of schedulers, a process.

Its loop waits, receives, ticks and sends for all of them; the supervisor opens and closes them.

One model is one scheduler in a process of its own, except that the steps of an ensemble are
scheduled in the ensemble's process: a message to a step is then a call (event_loop.py).
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import time
from typing import assert_never, get_args

from shmserve import logs
from shmserve.errors import ShmserveError
from shmserve.ipc import endpoints, processes
from shmserve.ipc.messages.publications import Acknowledged
from shmserve.ipc.messages.supervision import (
    HostStart,
    OpenScheduler,
    Ping,
    SchedulerClosed,
    SchedulerStart,
    SetLogging,
    Started,
    Stop,
    decode_start,
)
from shmserve.ipc.messages.unions import SupervisorToHost
from shmserve.ipc.transport.dealer import Dealer
from shmserve.scheduler.hosting.event_loop import InProcessLinks, Waiter
from shmserve.scheduler.hosting.hosted import KINDS, HostedScheduler
from shmserve.scheduler.requests.request import NEVER

logger = logging.getLogger(__name__)

_FROM_SUPERVISOR = frozenset(get_args(SupervisorToHost))


def run(data: bytes) -> None:
    """Host schedulers until the supervisor sends `Stop`; `data` is an encoded `HostStart`."""
    start = decode_start(HostStart, data)
    logs.configure(start.title, start.log)
    processes.name_process(start.title)
    # A terminal's Ctrl-C reaches every process, but only the supervisor decides when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    processes.exact_timers()
    processes.keep_no_large_memory()
    Host(start).run()


class Host:
    """The event loop of schedulers."""

    def __init__(self, start: HostStart) -> None:
        self._waiter = Waiter()
        self._neighbours = InProcessLinks()
        self._schedulers: list[HostedScheduler] = []
        self._touched: dict[HostedScheduler, None] = {}  # in the order of their next turns
        self._stopped = False
        self._control = Dealer(endpoints.control(start.run_dir), f"host.{os.getpid()}")
        self._waiter.watch(self._control.fd, self._from_supervisor)
        self._control.send(Started())

    def run(self) -> None:
        """Run until the supervisor sends `Stop`."""
        waiter, schedulers = self._waiter, self._schedulers
        wake_ns = NEVER
        try:
            while not self._stopped:
                # A request of an ensemble is also a request of its step; it counts once.
                live = max([scheduler.live for scheduler in schedulers], default=0)
                for fd, _ in waiter.wait(wake_ns, live):
                    take = waiter.takers.get(fd)
                    if take is not None:
                        take()
                self._turn(wake_ns)
                wake_ns = min([scheduler.wake_ns for scheduler in schedulers], default=NEVER)
        finally:
            for scheduler in schedulers:
                scheduler.close()
            self._control.close()

    def _turn(self, wake_ns: int) -> None:
        """Do what is due and send the resulting messages.

        A scheduler asked for a turn at `wake_ns`.
        """
        touched, neighbours = self._touched, self._neighbours
        now_ns = time.monotonic_ns()
        if now_ns >= wake_ns:
            touched.update({each: None for each in self._schedulers if now_ns >= each.wake_ns})
        turned: list[HostedScheduler] = []  # may repeat
        while touched:
            schedulers = list(touched)
            touched.clear()
            turned += schedulers
            for scheduler in schedulers:
                scheduler.tick(now_ns)
            if neighbours.posted:
                neighbours.deliver()
            if touched:
                now_ns = time.monotonic_ns()
        # All together, because a receiver that wakes up may occupy this core before the other
        # flushes.
        for scheduler in turned:
            scheduler.flush()
        for scheduler in turned:
            if scheduler.stopped and scheduler in self._schedulers:
                self._schedulers.remove(scheduler)
                scheduler.close()
                self._control.send(SchedulerClosed(scheduler.number, ""))

    def _from_supervisor(self) -> None:
        for message in self._control.receive():
            if type(message) in _FROM_SUPERVISOR:
                self._handle(message)
            else:
                logger.warning("unexpected %s", type(message).__name__)

    def _handle(self, message: SupervisorToHost) -> None:
        match message:
            case OpenScheduler():
                self._open(decode_start(SchedulerStart, message.start))
            case SetLogging():
                logs.apply(logs.LogSettings(**message.settings))
            case Ping(number):
                self._control.send(Acknowledged(number))
            case Stop():
                self._stopped = True
            case _:
                assert_never(message)

    def _open(self, start: SchedulerStart) -> None:
        try:
            scheduler = KINDS[start.kind](start, self._waiter, self._neighbours, self._touched)
        except (ShmserveError, OSError) as error:
            # No descriptor or memory is left; the other schedulers continue.
            reason = error.message if isinstance(error, ShmserveError) else str(error)
            logger.error("a scheduler cannot start: %s", reason)
            self._control.send(SchedulerClosed(start.number, reason))
            return
        self._schedulers.append(scheduler)
        gc.freeze()  # the scheduler's objects are permanent and need no collection
