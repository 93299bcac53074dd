"""An ensemble's core: what each message changes, and when something is due. No clock, no socket.

    from_client, from_step, from_control    a message arrived
    plan                                    now: run steps, respond, expire

To its clients an ensemble is a scheduler; to the schedulers of its steps it is a client.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, assert_never

from shmserve import logs
from shmserve.errors import Internal, ShmserveError, Unavailable
from shmserve.ipc.messages import (
    Acknowledged,
    Cancel,
    ClientToScheduler,
    CountsInherited,
    Credit,
    Drain,
    Drained,
    Failed,
    InstanceExited,
    InstanceExpected,
    KeepStatistics,
    ModelPublished,
    PoolFailed,
    ProcessExited,
    Release,
    ReportStatistics,
    ReportTimes,
    ResizeCache,
    RetireInstance,
    SchedulerLost,
    SchedulerToClient,
    SetLogging,
    Stop,
    Submit,
    SupervisorToEnsemble,
    TicketGranted,
)
from shmserve.ipc.tensors.signature import Signature
from shmserve.ipc.transport.records import MalformedMessage
from shmserve.scheduler.ensemble.admission import RequestAdmission
from shmserve.scheduler.ensemble.graph import Graph
from shmserve.scheduler.ensemble.live import LiveRequests
from shmserve.scheduler.ensemble.memory import EnsembleMemory
from shmserve.scheduler.ensemble.progress import Progress
from shmserve.scheduler.ensemble.requests import EnsembleRequest
from shmserve.scheduler.ensemble.responses import Responses
from shmserve.scheduler.ensemble.steps.memory_plan import MemoryPlanner
from shmserve.scheduler.ensemble.steps.outputs import StepLinks
from shmserve.scheduler.ensemble.steps.runner import StepRunner
from shmserve.scheduler.ensemble.steps.targets import Targets
from shmserve.scheduler.instances.losses import ControlLink
from shmserve.scheduler.reports import Reports
from shmserve.scheduler.requests.client import Client, ClientTable, stopping
from shmserve.scheduler.requests.queue import EXPIRED
from shmserve.scheduler.requests.responses import Peers
from shmserve.scheduler.response_cache.cache import ResponseCache
from shmserve.scheduler.settings import Settings
from shmserve.scheduler.statistics.counters import Reason, Statistics

logger = logging.getLogger(__name__)


class Ensemble:
    """One ensemble. Times are monotonic ns; `wall_clock` gives epoch ns."""

    def __init__(
        self,
        settings: Settings,
        config: dict[str, Any],
        clients: Peers,
        links: StepLinks,
        control: ControlLink,
        memory: EnsembleMemory,
        wall_clock: Callable[[], int],
        cache: ResponseCache | None = None,
    ) -> None:
        graph = Graph.read(config)
        signature = Signature(config, settings.version)
        statistics = Statistics(settings)
        responses = Responses(signature, settings.decoupled, clients, memory, statistics, cache)
        live = LiveRequests(settings.name, statistics, responses)
        targets = Targets(graph)
        steps = StepRunner(graph, targets, links, memory, live)
        self._live = live
        self._targets = targets
        self._steps = steps
        self._statistics = statistics
        self._responses = responses
        self._admission = RequestAdmission(graph, signature, targets, memory)
        self._progress = Progress(settings.decoupled, live, steps, responses)
        self._planner = MemoryPlanner(graph, signature.max_batch_size, targets, memory)
        self._reports = Reports(statistics, clients, control, wall_clock, self._gauges)
        self._control = control
        self._memory = memory
        self._cache = cache
        self._endpoints: dict[tuple[str, str], str] = {}  # of all models that have served
        self._to_clients = clients
        self._clients: ClientTable[EnsembleRequest] = ClientTable()
        self._draining = False
        self._drained = False
        self.stopped = False

    # --- clients ----------------------------------------------------------------------------------

    def from_client(self, peer: bytes, message: ClientToScheduler, now_ns: int) -> None:
        """Handle a client's message."""
        self._live.now_ns = now_ns
        client = self._clients[peer]
        match message:
            case Submit():
                self._submit(client, message)
            case Cancel():
                request = client.requests.get(message.id)
                if request is not None:
                    self._live.fail(request, "CANCELLED", "request cancelled")
                    self._steps.cancel(request)
            case Credit():
                request = client.requests.get(message.id)
                if request is not None:
                    self._responses.credit(request, message.responses)
                    self._live.touch(request)
            case Release():
                self._memory.lent.release(client.pid, message.pid, message.offsets)
            case ReportStatistics():
                self._reports.tell(peer, message.id, now_ns)
            case ReportTimes():
                client.timed = True
            case _:
                assert_never(message)

    def _submit(self, client: Client[EnsembleRequest], message: Submit) -> None:
        if message.id in client.requests:
            self.misplaced()
            return
        try:
            if self._draining:
                raise Unavailable(stopping(message.request_id))
            if 0 < message.deadline_ns < self._live.now_ns:
                raise Unavailable(EXPIRED)
            lookup = None
            if self._cache is not None:
                lookup = self._cache.look_up(message)
                if lookup is not None and lookup.body:
                    self._responses.hit(client, message, lookup, self._live.now_ns)
                    return
            request = self._admission.admit(client, message, self._live.now_ns)
            request.lookup = lookup
        except MalformedMessage as error:
            logger.error("a request cannot be read: %s", error)
            self._refuse(client, message, Internal("internal error"))
        except ShmserveError as error:
            self._refuse(client, message, error)
        else:
            self._live.add(request)

    def _refuse(
        self, client: Client[EnsembleRequest], message: Submit, error: ShmserveError
    ) -> None:
        self._statistics.failed(message.arrived_ns, Reason.REJECTED, self._live.now_ns)
        self._to_clients.post(
            client.peer, Failed(message.id, error.code, self._live.told(error.message), 0, False)
        )

    def from_step(self, endpoint: str, message: SchedulerToClient, now_ns: int) -> None:
        """Handle what the scheduler at `endpoint` says."""
        self._live.now_ns = now_ns
        self._steps.hear(endpoint, message)

    # --- supervisor -------------------------------------------------------------------------------

    def from_control(self, message: SupervisorToEnsemble, now_ns: int) -> None:
        """Handle the supervisor's message."""
        self._live.now_ns = now_ns
        match message:
            case ModelPublished():
                self._published(message)
                if message.acknowledge:
                    self._control.post(Acknowledged(message.acknowledge))
            case SchedulerLost():
                self._steps.lost(message.endpoint, message.successor)
            case ProcessExited():
                self._process_exited(message.pid)
            case CountsInherited():
                self._reports.inherit(message, now_ns)
            case KeepStatistics():
                self._reports.keep(now_ns)
            case SetLogging():
                logs.apply(logs.LogSettings(**message.settings))
            case Drain():
                self._reports.keep(now_ns)
                self._draining = True
                self._drained = False
            case Stop():
                self._stop()
            case ResizeCache():
                if self._cache is not None:
                    self._cache.resize(message.byte_size)
            case (
                TicketGranted()
                | InstanceExpected()
                | InstanceExited()
                | RetireInstance()
                | PoolFailed()
            ):
                self.misplaced()  # there are no instances
            case _:
                assert_never(message)

    def _published(self, message: ModelPublished) -> None:
        key = (message.name, message.version)
        if self._endpoints.get(key) != message.endpoint:
            self._endpoints[key] = message.endpoint
            # Any model may be under a step, of an ensemble that is one, too.
            if self._cache is not None:
                self._cache.clear()
        self._targets.publish(message)
        self._planner.plan()

    def _process_exited(self, pid: int) -> None:
        self._memory.process_exited(pid)
        if self._cache is not None:
            self._cache.process_exited(pid)
        self._memory.lent.drop_reader(pid)
        for client in self._clients.of_process(pid):
            del self._clients[client.peer]
            for request in list(client.requests.values()):
                if request.failure is None:
                    self._statistics.failed(request.arrived_ns, Reason.CANCELED, self._live.now_ns)
                request.gone = True
                self._steps.cancel(request)

    def _stop(self) -> None:
        self.stopped = True
        for client in self._clients.values():
            for request in client.requests.values():
                if not request.told and not request.gone:
                    text = stopping(request.submit.request_id)
                    self._live.fail(request, Unavailable.code, text)
                    self._responses.failed(request)

    @property
    def live(self) -> int:
        """How many requests are not done."""
        return self._live.count

    # --- time -------------------------------------------------------------------------------------

    def plan(self, now_ns: int) -> int:
        """Do what is due; returns when to come back if nothing happens before (NEVER: no need)."""
        self._live.now_ns = now_ns
        for request in self._live.expired():
            self._steps.cancel(request)
        while changed := self._live.changed():
            for request in changed:
                self._progress.advance(request)
        if self._draining and not self._drained and not self._live.count:
            self._drained = True
            self._reports.keep(now_ns)
            self._control.post(Drained())
        return self._live.due_ns

    # --- counts -----------------------------------------------------------------------------------

    def go_on(self, kept: list[Any], now_ns: int) -> None:
        """Count on from a predecessor's last StatisticsKept, as [statistics, metrics]."""
        self._reports.go_on(kept, [], now_ns)

    def misplaced(self) -> None:
        """A message was dropped because it makes no sense from its sender or now."""
        self._reports.misplaced += 1

    def _gauges(self) -> dict[str, Any]:
        return {
            "pending": 0,  # what waits, waits for its steps
            "executing": self._live.count,
            "instances": {},
            "cache": {} if self._cache is None else self._cache.gauges(),
            "malformed": self._to_clients.malformed + self._control.malformed,
        }
