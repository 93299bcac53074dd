"""An ensemble's decisions: what each message changes, and what is sent next. No clock, no socket.

    from_client, from_step, from_control    a message arrived
    plan                                    now: run steps, respond, expire

To its clients an ensemble is a scheduler; to the schedulers of its steps it is a client.
"""

from __future__ import annotations

import heapq
import itertools
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, assert_never

from shmserve import logs
from shmserve.errors import Internal, ShmserveError, Unavailable
from shmserve.ipc.inflight import ENDED, InflightTable, Response
from shmserve.ipc.messages import (
    Acknowledged,
    Cancel,
    ClientToScheduler,
    CountsInherited,
    Drain,
    Drained,
    Failed,
    Finished,
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
    Responded,
    SchedulerLost,
    SchedulerToClient,
    SetLogging,
    Stop,
    Submit,
    SupervisorToEnsemble,
    Timed,
)
from shmserve.ipc.tensors.descriptors import Place, TensorRef
from shmserve.ipc.tensors.inference import Inferred, unpack_inference, unpack_inferred
from shmserve.ipc.tensors.signature import Signature, id_prefix
from shmserve.ipc.transport.records import MalformedMessage
from shmserve.scheduler.ensemble.flow import Firing, Plan
from shmserve.scheduler.ensemble.graph import Graph, Step
from shmserve.scheduler.ensemble.memory import EnsembleMemory, once_all
from shmserve.scheduler.ensemble.requests import Client, EnsembleRequest, StepRequest, Steps
from shmserve.scheduler.ensemble.responses import Responses
from shmserve.scheduler.ensemble.submission import prepare
from shmserve.scheduler.ensemble.targets import Target, Targets
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


class StepLinks(Protocol):
    """The links to the schedulers of steps, by endpoint."""

    def submit(self, endpoint: str, message: Submit) -> None:
        """Queue a request for a scheduler. Raises Unavailable when no link to it can be made."""

    def tell(self, endpoint: str, message: Cancel | Grant | Release) -> None:
        """Queue a message for a scheduler, or for who has taken its place."""

    def lose(self, endpoint: str, successor: str, hear_out: Callable[[Any], None]) -> None:
        """The scheduler at `endpoint` is gone; `hear_out` takes its last words."""


class Ensemble(Steps):
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
        self._links = links
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
        self._table: InflightTable[StepRequest] = InflightTable()
        self._numbers = itertools.count(1)
        self._clients: dict[bytes, Client] = {}
        self._touched: dict[EnsembleRequest, None] = {}
        self._timers: list[tuple[int, int, EnsembleRequest]] = []
        self._running = [0] * len(self._graph.steps)
        self._waiting: list[deque[tuple[EnsembleRequest, Firing]]] = [
            deque() for _ in self._graph.steps
        ]
        self._live = 0
        self._now_ns = 0
        self._draining = False
        self._drained = False
        self.stopped = False

    # --- clients ----------------------------------------------------------------------------------

    def from_client(self, peer: bytes, message: ClientToScheduler, now_ns: int) -> None:
        """Handle a client's message."""
        self._now_ns = now_ns
        client = self._clients.get(peer) or self._new_client(peer)
        match message:
            case Submit():
                self._submit(client, message)
            case Cancel():
                request = client.requests.get(message.id)
                if request is not None:
                    self._fail(request, "CANCELLED", "request cancelled")
                    self._cancel_steps(request)
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

    # --- steps ------------------------------------------------------------------------------------

    def from_step(self, endpoint: str, message: SchedulerToClient, now_ns: int) -> None:
        """Handle what the scheduler at `endpoint` says."""
        self._now_ns = now_ns
        match message:
            case Timed():
                step = self._table.pending.get(message.id)
                if step is not None:
                    for index, ns in enumerate(
                        (message.input_ns, message.infer_ns, message.output_ns)
                    ):
                        step.request.times_ns[index] += ns
            case Finished() | Responded():
                if not self._table.take(message):
                    self._discard(endpoint, message.body)
            case Failed():
                self._table.take(message)
            case _:
                self._table.take(message)  # type: ignore[arg-type]

    def responded(self, step: StepRequest, message: Response) -> None:
        request = step.request
        self._touched[request] = None
        if isinstance(message, Failed):
            self._fail(request, message.code, message.message, message.retry_after_s)
            if message.early:
                self._tell_early(request)
        elif isinstance(message, Responded) and message.code:
            self._fail(request, message.code, message.message)
        elif message.body:
            self._made(step, message)

    def _made(self, step: StepRequest, message: Finished | Responded) -> None:
        """A step has given outputs."""
        request = step.request
        try:
            inferred = unpack_inferred(message.body)
        except MalformedMessage as error:
            logger.error("a worker's response is malformed: %s", error)
            self._fail(request, Internal.code, "internal error")
            return
        if request.over or (step.answered and step.firing.step.index not in request.plan.decoupled):
            self._release(step.endpoint, inferred.outputs, step)
            return
        step.answered = True
        values = self._values(step, inferred, isinstance(message, Responded) and not message.final)
        request.flow.respond(step.firing, values)

    def _values(self, step: StepRequest, inferred: Inferred, grants: bool) -> dict[str, Value]:
        """The outputs of a response; `grants`: once nobody uses it, the next may come."""
        given = inferred.parameters
        override = {key: given[key] for key in _OVERRIDES if key in given}
        override = override or _inherited(step.firing)
        endpoint, number = step.endpoint, step.submit.id

        def granted() -> None:
            if number in self._table.pending:
                self._links.tell(endpoint, Grant(number, 1))

        one = once_all(len(inferred.outputs), granted) if grants and inferred.outputs else None
        if grants and not inferred.outputs:
            granted()
        values: dict[str, Value] = {}
        conditions, batched = self._graph.conditions, step.signature.max_batch_size > 0
        for tensor in inferred.outputs:
            holds = True
            if step.firing.step.outputs.get(tensor.name) in conditions:
                holds = self._memory.any_true(tensor)
            values[tensor.name] = Value(
                tensor,
                self._freeing(step, tensor, one),
                holds=holds,
                batched=batched,
                override=override,
            )
        return values

    def _freeing(
        self, step: StepRequest, tensor: TensorRef, also: Callable[[], None] | None
    ) -> Callable[[], None] | None:
        """What gives the memory of an output back; None: it lies in none of ours."""
        data, endpoint = tensor.data, step.endpoint
        if not isinstance(data, Place) or tensor.name in step.given:
            return also
        place = step.placed.pop(tensor.name, None)
        if place is None:
            self._memory.hold(data)

        def free() -> None:
            if place is not None:
                self._memory.free(place)
            else:
                self._memory.let_go(data)
                self._links.tell(endpoint, Release(data.memory.pid, [data.offset]))
            if also is not None:
                also()

        return free

    def _discard(self, endpoint: str, body: bytes) -> None:
        """Nobody reads this response of a scheduler."""
        try:
            outputs = unpack_inferred(body).outputs if body else ()
        except MalformedMessage:
            return
        self._release(endpoint, outputs, None)

    def _release(
        self, endpoint: str, outputs: tuple[TensorRef, ...], step: StepRequest | None
    ) -> None:
        """Tell a step's workers that nobody reads these outputs."""
        for tensor in outputs:
            data = tensor.data
            if not isinstance(data, Place) or not data.memory.sealed or self._memory.owns(data):
                continue
            if step is None or tensor.name not in step.given:
                self._links.tell(endpoint, Release(data.memory.pid, [data.offset]))

    def moves(self, step: StepRequest) -> bool:
        try:
            target = self._targets.find(step.firing.step)
        except ShmserveError:
            return False
        if target.endpoint == step.endpoint:
            return False
        self._send(step, target)
        return True

    def ended(self, step: StepRequest) -> None:
        request, index = step.request, step.firing.step.index
        for value in step.firing.inputs.values():
            value.release()
        for place in step.placed.values():
            self._memory.free(place)
        step.placed.clear()
        request.running.pop(step.submit.id, None)
        self._touched[request] = None
        self._running[index] -= 1
        self._run_waiting(index)

    # --- supervisor -------------------------------------------------------------------------------

    def from_control(self, message: SupervisorToEnsemble, now_ns: int) -> None:
        """Handle the supervisor's message."""
        self._now_ns = now_ns
        match message:
            case ModelPublished():
                self._targets.publish(message)
                if message.acknowledge:
                    self._control.post(Acknowledged(message.acknowledge))
            case SchedulerLost():
                self._lost(message.endpoint, message.successor)
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
            case Granted() | InstanceExpected() | InstanceExited() | PoolFailed():
                self.misplaced()  # there are no instances
            case _:
                assert_never(message)

    def _lost(self, endpoint: str, successor: str) -> None:
        self._targets.move(endpoint, successor)

        def last_words(message: Any) -> None:
            self.from_step(endpoint, message, self._now_ns)

        self._links.lose(endpoint, successor, last_words)
        for step in self._table.lose(endpoint):
            try:
                target = self._targets.find(step.firing.step)
            except ShmserveError:
                target = None
            if target is None or target.endpoint == endpoint:
                step.fail(ENDED)
            else:
                self._send(step, target)

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
                self._cancel_steps(request)

    def _stop(self) -> None:
        self.stopped = True
        for client in self._clients.values():
            for request in client.requests.values():
                if not request.told and not request.gone:
                    text = id_prefix(request.submit.request_id) + _STOPPING
                    self._fail(request, Unavailable.code, text)
                    self._responses.failed(request)

    # --- requests ---------------------------------------------------------------------------------

    def _fail(self, request: EnsembleRequest, code: str, text: str, retry_after_s: int = 0) -> None:
        """No further step of a request runs; the first failure counts."""
        self._touched[request] = None
        if request.over:
            return
        request.failure = Failed(request.id, code, self._told(text), retry_after_s, False)
        reason = Reason.CANCELED if code == "CANCELLED" else Reason.BACKEND
        self._statistics.failed(request.arrived_ns, reason, self._now_ns)

    def _tell_early(self, request: EnsembleRequest) -> None:
        """Its time is over: its failure is told, though steps are still running."""
        if not request.gone and not request.told and request.running:
            request.told = True
            self._responses.failed(request, early=True)
        self._cancel_steps(request)

    def _cancel_steps(self, request: EnsembleRequest) -> None:
        self._touched[request] = None
        for step in request.running.values():
            if step.submit.id in self._table.pending:
                self._links.tell(step.endpoint, Cancel(step.submit.id))

    def _advance(self, request: EnsembleRequest) -> None:
        """Run the steps of a request that can run, and respond; end it when nothing is left."""
        flow = request.flow
        while flow.firings and not request.over:
            firings, flow.firings = flow.firings, []
            for firing in firings:
                self._run(request, firing)
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
            self._fail(request, "INVALID_ARG", id_prefix(request.submit.request_id) + _DEADLOCK)
        self._end(request)

    def _drop(self, request: EnsembleRequest) -> None:
        """What was still to come of a request that is over."""
        flow = request.flow
        for firing in flow.firings:
            _let_go(firing)
        flow.firings.clear()
        for response in flow.responses:
            for value in response.values():
                value.release()
        flow.responses.clear()
        if request.waiting:
            for waiting in self._waiting:
                for entry in [entry for entry in waiting if entry[0] is request]:
                    waiting.remove(entry)
                    _let_go(entry[1])
            request.waiting = 0

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

    def _run(self, request: EnsembleRequest, firing: Firing) -> None:
        """Run a step, as soon as there is room for it."""
        index, most = firing.step.index, self._graph.max_inflight
        if request.over:
            _let_go(firing)
        elif most and self._running[index] >= most:
            self._waiting[index].append((request, firing))
            request.waiting += 1
        else:
            self._run_now(request, firing)

    def _run_waiting(self, index: int) -> None:
        waiting = self._waiting[index]
        while waiting and self._running[index] < self._graph.max_inflight:
            request, firing = waiting.popleft()
            request.waiting -= 1
            self._touched[request] = None
            self._run_now(request, firing)

    def _run_now(self, request: EnsembleRequest, firing: Firing) -> None:
        number = next(self._numbers)
        try:
            target = self._targets.find(firing.step)
            submit, placed, given = prepare(
                number, request, firing, target, self._graph, self._memory, self._now_ns
            )
        except ShmserveError as error:
            _let_go(firing)
            self._fail(request, error.code, error.message)
            return
        step = StepRequest(
            self, request, firing, target.signature, submit, target.endpoint, placed, given
        )
        request.running[number] = step
        self._running[firing.step.index] += 1
        self._send(step, target)

    def _send(self, step: StepRequest, target: Target) -> None:
        step.endpoint = target.endpoint
        try:
            self._links.submit(target.endpoint, step.submit)
        except ShmserveError as error:
            step.fail(error.message)
        else:
            self._table.add(step)

    @property
    def live(self) -> int:
        """How many requests are not done."""
        return self._live

    # --- time -------------------------------------------------------------------------------------

    def plan(self, now_ns: int) -> int:
        """Do what is due; returns when to come back if nothing happens before (NEVER: no need)."""
        self._now_ns = now_ns
        timers = self._timers
        while timers and (timers[0][0] < now_ns or _done(timers[0][2])):
            request = heapq.heappop(timers)[2]
            if not _done(request):
                self._fail(request, Unavailable.code, EXPIRED)
                self._tell_early(request)
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


def _let_go(firing: Firing) -> None:
    """A step is not run after all."""
    for value in firing.inputs.values():
        value.release()


def _inherited(firing: Firing) -> dict[str, Any]:
    """The sequence's parameters that the inputs of a step came with."""
    found: dict[str, Any] = {}
    for value in firing.inputs.values():
        found.update(value.override)
    return found
