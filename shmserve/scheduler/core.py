"""The scheduler's decisions: what each message changes, and what runs next. No clock, no socket.

    from_client, from_worker, from_control    a message arrived
    plan                                      now: expire, dispatch, release

What is to be sent is posted to three outboxes, which the loop flushes once a turn.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, assert_never

from shmserve import logs
from shmserve.ipc.messages import (
    ClientToScheduler,
    CountsInherited,
    Drain,
    Drained,
    ExecutionResponded,
    InstanceExited,
    InstanceExpected,
    InstanceRetired,
    KeepStatistics,
    MetricsReported,
    PoolFailed,
    ProcessExited,
    ResizeCache,
    RetireInstance,
    SetLogging,
    Stop,
    SupervisorToScheduler,
    TicketGranted,
    WorkerToScheduler,
)
from shmserve.ipc.transport.peercred_router import last_number
from shmserve.scheduler.batchers.base import Batcher
from shmserve.scheduler.batchers.dispatch import Dispatch, batcher_of
from shmserve.scheduler.batchers.dispatcher import Dispatcher
from shmserve.scheduler.batchers.sequence.dispatch import SequenceDispatch
from shmserve.scheduler.clients import Clients
from shmserve.scheduler.instances.executions import Executions
from shmserve.scheduler.instances.losses import ControlLink, Losses
from shmserve.scheduler.instances.pool import Pool
from shmserve.scheduler.instances.tickets import InstanceTickets
from shmserve.scheduler.reports import Reports
from shmserve.scheduler.requests.queue import EXPIRED, RequestQueue
from shmserve.scheduler.requests.request import NEVER, Request, State
from shmserve.scheduler.requests.responses import Peers, Responses
from shmserve.scheduler.response_cache.cache import ResponseCache
from shmserve.scheduler.settings import Settings
from shmserve.scheduler.statistics.counters import Reason, Statistics

logger = logging.getLogger(__name__)


class Scheduler:
    """One model version's requests. Times are monotonic ns; `wall_clock` gives epoch ns."""

    def __init__(
        self,
        settings: Settings,
        clients: Peers,
        workers: Peers,
        control: ControlLink,
        wall_clock: Callable[[], int],
        cache: ResponseCache | None = None,
    ) -> None:
        self._to_clients = clients
        self._to_workers = workers
        self._to_control = control
        self._name = settings.name
        self._ordered = settings.preserve_ordering
        self._statistics = Statistics(settings)
        self._cache = cache
        self._responses = Responses(clients, workers, self._statistics, self._ordered, cache)
        self._queue = RequestQueue(settings)
        self._tickets = InstanceTickets(control) if settings.rate_limited else None
        self._pool = Pool(settings.execution_limit_ns, self._tickets, settings.most_open)
        self._losses = Losses(
            settings, self._pool, control, self._queue, self._responses, self._statistics
        )
        batcher = batcher_of(settings)
        self._executions = Executions(
            settings,
            self._pool,
            workers,
            self._responses,
            self._statistics,
            self._losses,
            batcher,
            lambda request: self._dispatch.again(request),
        )
        self._dispatch = self._dispatcher(settings, batcher)
        self._reports = Reports(self._statistics, clients, control, wall_clock, self._gauges)
        self.clients = Clients(
            self._queue,
            self._pool,
            self._dispatch,
            self._executions,
            self._responses,
            self._statistics,
            self._reports,
        )
        self._drained = False
        self._awaits_sequences = False
        self._limit_ns = NEVER  # when the first execution passes its limit, as of the last turn
        self.stopped = False

    def _dispatcher(self, settings: Settings, batcher: Batcher) -> Dispatcher:
        parts = (self._queue, self._pool, self._executions, self._responses, self._tickets)
        if settings.sequences is None:
            return Dispatch(settings, batcher, *parts)
        return SequenceDispatch(settings, *parts)

    # --- clients ----------------------------------------------------------------------------------

    def from_client(self, peer: bytes, message: ClientToScheduler, now_ns: int) -> None:
        """Handle a client's message."""
        self.clients.handle(peer, message, now_ns)

    # --- workers and supervisor -------------------------------------------------------------------

    def from_worker(self, peer: bytes, message: WorkerToScheduler, now_ns: int) -> None:
        """Handle a worker's message."""
        if isinstance(message, ExecutionResponded):
            self._executions.responded(peer, message, now_ns)
        elif isinstance(message, MetricsReported):
            self._metrics_reported(peer, message)
        else:
            self._executions.handle(peer, message, now_ns)

    def _metrics_reported(self, peer: bytes, message: MetricsReported) -> None:
        pid = last_number(peer)  # as the instance's InstanceReady says
        if not (pid and peer.partition(b".")[0].isdigit()):
            self.misplaced()
        elif not self.clients.is_dead(pid):
            self._reports.metrics_reported(pid, message)

    def from_control(self, message: SupervisorToScheduler, now_ns: int) -> None:
        """Handle the supervisor's message."""
        match message:
            case InstanceExpected():
                self._pool.expect(message.index, message.pid)
            case InstanceExited():
                lost = self._pool.exit(message.index)
                self._losses.exited(lost, message.reason, now_ns)
            case RetireInstance():
                self._pool.retire(message.index)
            case ProcessExited():
                self._process_exited(message.pid, now_ns)
            case PoolFailed():
                self._pool.fail(message.reason)
            case CountsInherited():
                self._reports.inherit(message, now_ns)
            case KeepStatistics():
                self._reports.keep_brief(now_ns)
            case TicketGranted():
                if self._tickets is not None:
                    self._tickets.granted(message.ticket)
            case ResizeCache():
                if self._cache is not None:
                    self._cache.resize(message.byte_size)
            case SetLogging():
                logs.apply(logs.LogSettings(**message.settings))
            case Drain():
                self._drain(message.sequences, now_ns)
            case Stop():
                self._stop(now_ns)
            case _:
                assert_never(message)

    def _process_exited(self, pid: int, now_ns: int) -> None:
        self._losses.exited(self._pool.exit_process(pid), "", now_ns)
        self._executions.forget(pid)
        if self._cache is not None:
            self._cache.process_exited(pid)
        self._reports.exited(pid)
        self.clients.exited(pid, now_ns)

    def _drain(self, sequences: bool, now_ns: int) -> None:
        self._reports.keep(now_ns)
        self.clients.draining = True
        self._drained = False
        self._awaits_sequences = sequences
        if sequences and self._dispatch.open_sequences:
            logger.info(
                "waiting for the %d open sequences of model '%s' to end",
                self._dispatch.open_sequences,
                self._name,
            )
        self._dispatch.hurry()

    def _stop(self, now_ns: int) -> None:
        self.stopped = True
        self.clients.stop(now_ns)

    @property
    def _unfinished(self) -> int:
        """How much a drain waits for."""
        return self._responses.live or (self._awaits_sequences and self._dispatch.open_sequences)

    @property
    def live(self) -> int:
        """How many requests are not done."""
        return self._responses.live

    # --- time -------------------------------------------------------------------------------------

    def plan(self, now_ns: int) -> int:
        """Do what is due; returns when to come back if nothing happens before (NEVER: no need)."""
        for request in self._queue.expired(now_ns):
            self._expire(request, now_ns)
        if now_ns >= self._limit_ns:
            for slot in self._pool.overdue(now_ns):
                self._losses.overrun(slot, now_ns)
        if self._pool.failure:
            self._refuse_waiting(self._pool.failure, now_ns)
        wake_ns = self._dispatch.run(now_ns)
        if self._tickets is not None:
            self._tickets.end_turn()
        if self._pool.retiring:
            for index, pid in self._pool.take_retired(self._dispatch.needs):
                self._to_control.post(InstanceRetired(index, pid))
        if self._ordered:
            self._responses.release(now_ns)
            self._responses.sweep()
        if self.clients.draining and not self._drained and not self._unfinished:
            self._drained = True
            self._reports.keep(now_ns)
            self._to_control.post(Drained())
        self._queue.sweep(self._responses.live)
        # What begins before the next turn can only pass its limit later than this.
        self._limit_ns = self._pool.next_limit_ns()
        return min(wake_ns, self._queue.next_timer_ns(), self._limit_ns)

    def _expire(self, request: Request, now_ns: int) -> None:
        early, reason, text = False, Reason.OTHER, EXPIRED
        match request.state:
            case State.QUEUED:
                text = self._dispatch.expired_text(request)
                self._queue.remove(request)
                self._dispatch.removed(request, now_ns, expired=True)
                reason = Reason.REJECTED
            case State.EXECUTING | State.RESPONDING:
                self._executions.cancel(request)
                early = True
            case State.HELD:
                pass
            case _:
                return  # its other timer was first
        self._responses.fail(request, "UNAVAILABLE", text, reason, now_ns, early)

    def _refuse_waiting(self, reason: str, now_ns: int) -> None:
        for request in self._queue.all():
            self._queue.remove(request)
            self._dispatch.removed(request, now_ns, apart=True)
            self._responses.fail(request, "UNAVAILABLE", reason, Reason.OTHER, now_ns)

    # --- counts -----------------------------------------------------------------------------------

    def go_on(self, kept: list[Any], alive: list[int], now_ns: int) -> None:
        """Count on from a predecessor's last StatisticsKept, as [statistics, metrics].

        `alive` are the pids of the instances that it has left behind.
        """
        self._reports.go_on(kept, alive, now_ns)

    def misplaced(self) -> None:
        """A message was dropped because it makes no sense from its sender or now."""
        self._reports.misplaced += 1

    def _gauges(self) -> dict[str, Any]:
        links = (self._to_clients, self._to_workers, self._to_control)
        unread = sum(link.malformed for link in links)
        return {
            "pending": len(self._queue),
            "executing": self._pool.executing,
            "instances": self._pool.counts(),
            "cache": {} if self._cache is None else self._cache.gauges(),
            "malformed": unread + self._executions.misplaced,
        }
