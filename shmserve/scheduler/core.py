"""The scheduler's decisions: what each message changes, and what runs next. No clock, no socket.

    from_client, from_worker, from_control    a message arrived
    plan                                      now: expire, dispatch, release

What is to be sent is posted to three outboxes, which the loop flushes once a turn.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any, assert_never

from shmserve import logs
from shmserve.errors import InvalidArgument, QueueFull, ShmserveError, Unavailable
from shmserve.ipc.messages import (
    Cancel,
    ClientToScheduler,
    CountsInherited,
    Drain,
    Drained,
    ExecutionResponded,
    Grant,
    InstanceExited,
    InstanceExpected,
    KeepStatistics,
    MetricsReported,
    PoolFailed,
    ProcessExited,
    Release,
    ReportStatistics,
    ReportTimes,
    ResizeCache,
    SetLogging,
    Stop,
    Submit,
    SupervisorToScheduler,
    WorkerToScheduler,
)
from shmserve.ipc.tensors.signature import id_prefix
from shmserve.ipc.transport.peercred_router import last_number
from shmserve.scheduler.batchers.dispatch import Dispatch
from shmserve.scheduler.batchers.dispatcher import Dispatcher
from shmserve.scheduler.batchers.sequence.dispatch import SequenceDispatch
from shmserve.scheduler.instances.executions import Executions
from shmserve.scheduler.instances.losses import ControlLink, Losses
from shmserve.scheduler.instances.pool import Pool
from shmserve.scheduler.reports import Reports
from shmserve.scheduler.requests.queue import EXPIRED, RequestQueue, believable
from shmserve.scheduler.requests.request import (
    NEVER,
    Client,
    Event,
    Lookup,
    Outcome,
    Request,
    State,
)
from shmserve.scheduler.requests.responses import Peers, Responses
from shmserve.scheduler.response_cache.cache import ResponseCache
from shmserve.scheduler.settings import Settings
from shmserve.scheduler.statistics.counters import Reason, Statistics
from shmserve.scheduler.statistics.timing import Timing

logger = logging.getLogger(__name__)

_STOPPING = "Server is stopping, scheduler for model has stopped accepting new inference requests"
_MOST_CLIENTS = 1024  # more than that, and those without requests are forgotten
_DEAD_REMEMBERED = 64


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
        self._ordered = settings.preserve_ordering
        self._statistics = Statistics(settings)
        self._responses = Responses(clients, workers, self._statistics, self._ordered)
        self._responses.cache = self._cache = cache
        self._queue = RequestQueue(settings)
        self._pool = Pool(settings.execution_limit_ns)
        self._losses = Losses(
            settings, self._pool, control, self._queue, self._responses, self._statistics
        )
        self._executions = Executions(
            settings, self._pool, workers, self._responses, self._statistics, self._losses
        )
        self._dispatch = self._dispatcher(settings)
        self._reports = Reports(self._statistics, clients, control, wall_clock, self._gauges)
        self._clients: dict[bytes, Client] = {}
        self._dead: deque[int] = deque(maxlen=_DEAD_REMEMBERED)
        self._draining = False
        self._drained = False
        self._limit_ns = NEVER  # when the first execution passes its limit, as of the last turn
        self.stopped = False

    def _dispatcher(self, settings: Settings) -> Dispatcher:
        kind = Dispatch if settings.sequences is None else SequenceDispatch
        return kind(settings, self._queue, self._pool, self._executions, self._responses)

    # --- clients ----------------------------------------------------------------------------------

    def from_client(self, peer: bytes, message: ClientToScheduler, now_ns: int) -> None:
        """Handle a client's message."""
        client = self._clients.get(peer) or self._new_client(peer)
        match message:
            case Submit():
                self._submit(client, message, now_ns)
            case Cancel():
                request = client.requests.get(message.id)
                if request is not None:
                    self._cancel(request, now_ns)
            case Grant():
                request = client.requests.get(message.id)
                if request is not None and request.state is State.RESPONDING:
                    self._executions.grant(request, message.responses)
            case Release():
                self._release(client, message)
            case ReportStatistics():
                self._reports.tell(peer, message.id, now_ns)
            case ReportTimes():
                client.timed = True
            case _:
                assert_never(message)

    def _new_client(self, peer: bytes) -> Client:
        if len(self._clients) >= _MOST_CLIENTS:
            self._clients = {p: c for p, c in self._clients.items() if c.requests or c.timed}
        client = self._clients[peer] = Client(peer)
        return client

    def _submit(self, client: Client, message: Submit, now_ns: int) -> None:
        if message.id in client.requests or (client.pid and client.pid in self._dead):
            # Nothing is owed: a response would be taken for the other request's, or by nobody.
            self.misplaced()
            return
        try:
            if self._draining and not self._dispatch.goes_on(message):
                raise Unavailable(id_prefix(message.request_id) + _STOPPING)
            if self._pool.failure:
                raise Unavailable(self._pool.failure)
            lookup = None
            if self._cache is not None:
                lookup = self._cache.look_up(message.work, client.pid)
                if lookup is not None and lookup.body:
                    self._hit(client, message, lookup, now_ns)
                    return
            if self._pool.free and self._queue.full(message.priority):
                self._dispatch.run(now_ns)
            identity = self._dispatch.identify(message)
            request = self._queue.admit(client, message, now_ns)
            request.lookup = lookup
            self._responses.admitted(request)
            self._dispatch.admitted(request, identity)
        except InvalidArgument as error:
            self._responses.refuse(client, message, error, 0)
        except ShmserveError as error:
            wait_s = 0
            if isinstance(error, QueueFull):
                waiting, instances = len(self._queue), self._pool.ready_count
                wait_s = self._executions.service_time.drain_s(waiting, instances)
            self._statistics.failed(believable(message.arrived_ns, now_ns), Reason.REJECTED, now_ns)
            self._responses.refuse(client, message, error, wait_s)

    def _hit(self, client: Client, message: Submit, lookup: Lookup, now_ns: int) -> None:
        """The response to a request is known; only its turn may still have to come."""
        request = self._queue.admit(client, message, now_ns, cached=True)
        request.lookup = lookup
        self._responses.admitted(request)
        timing = Timing(now_ns, 0, 0, 0)
        self._responses.finish(request, Outcome("", "", lookup.body, timing), now_ns)

    def _cancel(self, request: Request, now_ns: int) -> None:
        match request.state:
            case State.QUEUED | State.HELD:
                self._withdraw(request, now_ns)
                self._responses.fail(
                    request, "CANCELLED", "request cancelled", Reason.CANCELED, now_ns
                )
            case State.EXECUTING | State.RESPONDING:
                request.meet(Event.CANCEL)
                self._executions.cancel(request)
            case _:
                pass  # decided already

    def _withdraw(self, request: Request, now_ns: int) -> None:
        """Nobody waits for what is in the queue, or held after it ran."""
        if request.state is State.QUEUED:
            self._queue.remove(request)
            self._dispatch.removed(request, now_ns)

    def _client_gone(self, client: Client, now_ns: int) -> None:
        self._clients.pop(client.peer, None)
        for request in list(client.requests.values()):
            match request.state:
                case State.DONE:
                    continue  # it was of a sequence of which another one was cancelled
                case State.QUEUED | State.HELD:
                    self._withdraw(request, now_ns)
                case State.EXECUTING | State.RESPONDING:
                    self._executions.cancel(request)
                case _:
                    pass
            self._responses.abandon(request, now_ns)

    def _release(self, client: Client, message: Release) -> None:
        read = (client.pid, message.pid, message.offsets)
        if self._cache is None or not self._cache.release(*read):
            self._executions.release(*read)

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
        elif pid not in self._dead:
            self._reports.metrics_reported(pid, message)

    def from_control(self, message: SupervisorToScheduler, now_ns: int) -> None:
        """Handle the supervisor's message."""
        match message:
            case InstanceExpected():
                self._pool.expect(message.index, message.pid)
            case InstanceExited():
                lost = self._pool.exit(message.index)
                self._losses.exited(lost, message.reason, now_ns)
            case ProcessExited():
                self._process_exited(message.pid, now_ns)
            case PoolFailed():
                self._pool.fail(message.reason)
            case CountsInherited():
                self._reports.inherit(message, now_ns)
            case KeepStatistics():
                self._reports.keep_brief(now_ns)
            case ResizeCache():
                if self._cache is not None:
                    self._cache.resize(message.byte_size)
            case SetLogging():
                logs.apply(logs.LogSettings(**message.settings))
            case Drain():
                self._drain(now_ns)
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
        # Frames that it sent may still be on their way.
        self._dead.append(pid)
        for client in [c for c in self._clients.values() if c.pid == pid]:
            self._client_gone(client, now_ns)

    def _drain(self, now_ns: int) -> None:
        self._reports.keep(now_ns)
        self._draining = True
        self._drained = False
        self._dispatch.hurry()

    def _stop(self, now_ns: int) -> None:
        self.stopped = True
        for client in self._clients.values():
            for request in list(client.requests.values()):
                if request.state is State.FAILED_EARLY:
                    self._responses.close(request, now_ns)
                else:
                    text = id_prefix(request.request_id) + _STOPPING
                    self._responses.fail(request, "UNAVAILABLE", text, Reason.OTHER, now_ns)

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
        if self._ordered:
            self._responses.release(now_ns)
            self._responses.sweep()
        if self._draining and not self._drained and not self._responses.live:
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
