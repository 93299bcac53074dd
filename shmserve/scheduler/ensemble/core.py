"""An ensemble's decisions: what each message changes, and what is sent next. No clock, no socket.

    from_client, from_step, from_control    a message arrived
    plan                                    now: run steps, respond, expire

To its clients an ensemble is a scheduler; to the schedulers of its steps it is a client.
"""

from __future__ import annotations

import heapq
import itertools
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
    Drain,
    Drained,
    Failed,
    Grant,
    Granted,
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
)
from shmserve.ipc.tensors.inference import unpack_inference
from shmserve.ipc.tensors.signature import Signature, id_prefix
from shmserve.ipc.transport.records import MalformedMessage
from shmserve.scheduler.ensemble.flow import Plan
from shmserve.scheduler.ensemble.graph import Graph, Step
from shmserve.scheduler.ensemble.memory import EnsembleMemory
from shmserve.scheduler.ensemble.requests import Client, EnsembleRequest
from shmserve.scheduler.ensemble.responses import Responses
from shmserve.scheduler.ensemble.steps import StepLinks, StepRunner, let_go
from shmserve.scheduler.ensemble.submission import placed_sizes
from shmserve.scheduler.ensemble.targets import Targets
from shmserve.scheduler.ensemble.values import ABSENT, Value
from shmserve.scheduler.instances.losses import ControlLink
from shmserve.scheduler.reports import Reports
from shmserve.scheduler.requests.queue import EXPIRED
from shmserve.scheduler.requests.request import NEVER
from shmserve.scheduler.requests.responses import Peers
from shmserve.scheduler.response_cache.cache import ResponseCache
from shmserve.scheduler.settings import Settings
from shmserve.scheduler.statistics.counters import Reason, Statistics

logger = logging.getLogger(__name__)

_STOPPING = "Server is stopping, scheduler for model has stopped accepting new inference requests"
_MOST_CLIENTS = 1024  # more than that, and those without requests are forgotten
_MOST_PLANS = 64
_OVERRIDES = ("sequence_id", "sequence_start", "sequence_end")


class Ensemble:
    """One ensemble's requests. Times are monotonic ns; `wall_clock` gives epoch ns."""

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
        self._name = settings.name
        self._graph = Graph.read(config)
        self._signature = Signature(config, settings.version)
        self._decoupled = settings.decoupled
        self._control = control
        self._memory = memory
        self._targets = Targets(self._graph)
        self._plans: dict[tuple[str, ...], Plan] = {}
        self._plans_of = 0
        self._statistics = Statistics(settings)
        self._responses = Responses(
            self._signature, settings.decoupled, clients, memory, self._statistics, cache
        )
        self._cache = cache
        self._reports = Reports(self._statistics, clients, control, wall_clock, self._gauges)
        self._to_clients = clients
        self._numbers = itertools.count(1)
        self._clients: dict[bytes, Client] = {}
        self._touched: dict[EnsembleRequest, None] = {}
        self._timers: list[tuple[int, int, EnsembleRequest]] = []
        self._steps = StepRunner(self._graph, self._targets, links, memory, self)
        self._live = 0
        self._planned_bytes = 0
        self._now_ns = 0
        self._draining = False
        self._drained = False
        self.stopped = False

    # --- clients ----------------------------------------------------------------------------------

    def from_client(self, peer: bytes, message: ClientToScheduler, now_ns: int) -> None:
        """Handle a client's message."""
        self._now_ns = self._steps.now_ns = now_ns
        client = self._clients.get(peer) or self._new_client(peer)
        match message:
            case Submit():
                self._submit(client, message)
            case Cancel():
                request = client.requests.get(message.id)
                if request is not None:
                    self.fail(request, "CANCELLED", "request cancelled")
                    self._steps.cancel(request)
            case Grant():
                request = client.requests.get(message.id)
                if request is not None:
                    self._responses.granted(request, message.responses)
                    self._touched[request] = None
            case Release():
                read = (client.pid, message.pid, message.offsets)
                if self._cache is None or not self._cache.release(*read):
                    self._responses.given_back(client, message)
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

    def _submit(self, client: Client, message: Submit) -> None:
        if message.id in client.requests:
            self.misplaced()
            return
        try:
            if self._draining:
                raise Unavailable(id_prefix(message.request_id) + _STOPPING)
            if 0 < message.deadline_ns < self._now_ns:
                raise Unavailable(EXPIRED)
            lookup = None
            if self._cache is not None:
                lookup = self._cache.look_up(message.work, client.pid)
                if lookup is not None and lookup.body:
                    self._responses.hit(client, message, lookup, self._now_ns)
                    return
            request = self._admitted(client, message)
            request.lookup = lookup
        except MalformedMessage as error:
            logger.error("a request cannot be read: %s", error)
            self._refuse(client, message, Internal("internal error"))
        except ShmserveError as error:
            self._refuse(client, message, error)
        else:
            client.requests[message.id] = request
            self._live += 1
            self._touched[request] = None
            if request.deadline_ns:
                entry = (request.deadline_ns, next(self._numbers), request)
                heapq.heappush(self._timers, entry)

    def _admitted(self, client: Client, message: Submit) -> EnsembleRequest:
        inference = unpack_inference(message.work)
        outputs = tuple(output.name for output in inference.outputs) or self._graph.outputs
        request = EnsembleRequest(client, message, inference, self._plan(outputs), self._now_ns)
        self._responses.check_places(request, self._graph)
        batched = self._signature.max_batch_size > 0
        inputs = dict.fromkeys(self._graph.inputs, ABSENT)
        for tensor in inference.inputs:
            holds = tensor.name not in self._graph.conditions or self._memory.any_true(tensor)
            inputs[tensor.name] = Value(tensor, holds=holds, batched=batched)
        request.flow.begin(inputs)
        return request

    def _plan(self, outputs: tuple[str, ...]) -> Plan:
        if self._plans_of != self._targets.changes or len(self._plans) >= _MOST_PLANS:
            self._plans.clear()
            self._plans_of = self._targets.changes
        plan = self._plans.get(outputs)
        if plan is None:
            plan = self._plans[outputs] = Plan(
                self._graph, outputs, self._gives_many, self._optional
            )
        return plan

    def _gives_many(self, step: Step) -> bool:
        return self._targets.find(step).decoupled

    def _optional(self, step: Step) -> frozenset[str]:
        signature = self._targets.find(step).signature
        return frozenset(signature.inputs) - signature.required

    def _refuse(self, client: Client, message: Submit, error: ShmserveError) -> None:
        self._statistics.failed(message.arrived_ns, Reason.REJECTED, self._now_ns)
        self._to_clients.post(
            client.peer, Failed(message.id, error.code, self._told(error.message), 0, False)
        )

    def _told(self, text: str) -> str:
        return f"in ensemble '{self._name}', {text}"

    def from_step(self, endpoint: str, message: SchedulerToClient, now_ns: int) -> None:
        """Handle what the scheduler at `endpoint` says."""
        self._now_ns = self._steps.now_ns = now_ns
        self._steps.hear(endpoint, message)

    # --- supervisor -------------------------------------------------------------------------------

    def from_control(self, message: SupervisorToEnsemble, now_ns: int) -> None:
        """Handle the supervisor's message."""
        self._now_ns = self._steps.now_ns = now_ns
        match message:
            case ModelPublished():
                self._targets.publish(message)
                self._plan_memory()
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
                Granted() | InstanceExpected() | InstanceExited() | RetireInstance() | PoolFailed()
            ):
                self.misplaced()  # there are no instances
            case _:
                assert_never(message)

    def _plan_memory(self) -> None:
        """Once all steps' models are known: the memory of one request, as far as that is fixed, is
        there from then on."""
        if self._planned_bytes:
            return
        try:
            targets = [(step, self._targets.find(step)) for step in self._graph.steps]
        except ShmserveError:
            return
        batch_size = self._signature.max_batch_size
        sizes = [
            size
            for step, target in targets
            for size in placed_sizes(step, target, self._graph, batch_size).values()
        ]
        self._planned_bytes = sum(sizes)
        if sizes:
            self._memory.reserve(sizes)
            megabytes = self._planned_bytes / 1e6
            logger.info(
                "%d tensors of fixed shapes between steps: %.1f MB a request, planned",
                len(sizes),
                megabytes,
            )

    def _process_exited(self, pid: int) -> None:
        self._memory.process_exited(pid)
        if self._cache is not None:
            self._cache.process_exited(pid)
        self._responses.forget(pid)
        for client in [c for c in self._clients.values() if c.pid == pid]:
            del self._clients[client.peer]
            for request in list(client.requests.values()):
                if request.failure is None:
                    self._statistics.failed(request.arrived_ns, Reason.CANCELED, self._now_ns)
                request.gone = True
                self._steps.cancel(request)

    def _stop(self) -> None:
        self.stopped = True
        for client in self._clients.values():
            for request in client.requests.values():
                if not request.told and not request.gone:
                    text = id_prefix(request.submit.request_id) + _STOPPING
                    self.fail(request, Unavailable.code, text)
                    self._responses.failed(request)

    # --- requests ---------------------------------------------------------------------------------

    def touch(self, request: EnsembleRequest) -> None:
        """Something of a request has changed: `plan` looks at it."""
        self._touched[request] = None

    def fail(self, request: EnsembleRequest, code: str, text: str, retry_after_s: int = 0) -> None:
        """No further step of a request runs; the first failure counts."""
        self._touched[request] = None
        if request.over:
            return
        request.failure = Failed(request.id, code, self._told(text), retry_after_s, False)
        reason = Reason.CANCELED if code == "CANCELLED" else Reason.BACKEND
        self._statistics.failed(request.arrived_ns, reason, self._now_ns)

    def tell_early(self, request: EnsembleRequest) -> None:
        """Its time is over: its failure is told, though steps are still running."""
        if not request.gone and not request.told and request.running:
            request.told = True
            self._responses.failed(request, early=True)
        self._steps.cancel(request)

    def _advance(self, request: EnsembleRequest) -> None:
        """Run the steps of a request that can run, and respond; end it when nothing is left."""
        flow = request.flow
        while flow.firings and not request.over:
            firings, flow.firings = flow.firings, []
            for firing in firings:
                self._steps.run(request, firing)
        for value in flow.unused:
            value.release()
        flow.unused.clear()
        if request.over:
            self._drop(request)
        elif self._decoupled:
            self._responses.relay(request, self._now_ns)
        if request.running or request.waiting:
            return
        if not request.over and self._decoupled and flow.responses:
            return  # until its client has read some
        if not request.over and not self._decoupled and not flow.responded:
            self.fail(request, "INVALID_ARG", id_prefix(request.submit.request_id) + _DEADLOCK)
        self._end(request)

    def _drop(self, request: EnsembleRequest) -> None:
        """What was still to come of a request that is over."""
        flow = request.flow
        for firing in flow.firings:
            let_go(firing)
        flow.firings.clear()
        for response in flow.responses:
            for value in response.values():
                value.release()
        flow.responses.clear()
        self._steps.forget(request)

    def _end(self, request: EnsembleRequest) -> None:
        if request.client.requests.pop(request.id, None) is None:
            return  # ended before
        self._live -= 1
        if request.over:
            self._drop(request)
        self._responses.end(request, self._now_ns)
        request.flow.close()
        for value in request.flow.unused:
            value.release()
        request.flow.unused.clear()

    @property
    def live(self) -> int:
        """How many requests are not done."""
        return self._live

    # --- time -------------------------------------------------------------------------------------

    def plan(self, now_ns: int) -> int:
        """Do what is due; returns when to come back if nothing happens before (NEVER: no need)."""
        self._now_ns = self._steps.now_ns = now_ns
        timers = self._timers
        while timers and (timers[0][0] < now_ns or _done(timers[0][2])):
            request = heapq.heappop(timers)[2]
            if not _done(request):
                self.fail(request, Unavailable.code, EXPIRED)
                self.tell_early(request)
        while self._touched:
            touched = list(self._touched)
            self._touched.clear()
            for request in touched:
                if not _done(request) or request.gone:
                    self._advance(request)
        if self._draining and not self._drained and not self._live:
            self._drained = True
            self._reports.keep(now_ns)
            self._control.post(Drained())
        return timers[0][0] + 1 if timers else NEVER

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
            "executing": self._live,
            "instances": {},
            "cache": {} if self._cache is None else self._cache.gauges(),
            "malformed": self._to_clients.malformed + self._control.malformed,
        }


_DEADLOCK = (
    "unexpected deadlock, at least one output is not set while no more ensemble steps can be made"
)


def _done(request: EnsembleRequest) -> bool:
    return request.client.requests.get(request.id) is not request
