"""The ensemble core: to its clients the scheduler of a model, to the schedulers of its steps a
client.

admit, cancel, ...        a client's message, by the front
from_step, from_control   a step's scheduler's, or the supervisor's
tick                      now: run steps, respond, expire
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple, assert_never

from shmserve.errors import Internal, QueueFull, ShmserveError, Unavailable, Unsupported
from shmserve.ipc.messages import SchedulerToClient, SupervisorToEnsemble
from shmserve.ipc.messages.inference import Release, Submit
from shmserve.ipc.messages.publications import ModelPublished, SchedulerLost
from shmserve.ipc.messages.supervision import Acknowledged
from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.scheduler_client import Links
from shmserve.ipc.tensors.inference import RequestSchema
from shmserve.ipc.tensors.schemas import Schemas
from shmserve.ipc.tensors.signature import Signature, id_prefix, stopping
from shmserve.ipc.transport.records import MalformedMessage
from shmserve.scheduler.ensemble.flow import Plan
from shmserve.scheduler.ensemble.graph import Graph
from shmserve.scheduler.ensemble.live import LiveRequests
from shmserve.scheduler.ensemble.memory import EnsembleMemory
from shmserve.scheduler.ensemble.requests import EnsembleRequest
from shmserve.scheduler.ensemble.responses import EnsembleResponses, check_places
from shmserve.scheduler.ensemble.steps.runner import StepRunner, let_go
from shmserve.scheduler.ensemble.steps.submission import placed_sizes
from shmserve.scheduler.ensemble.steps.targets import Targets
from shmserve.scheduler.ensemble.values import ABSENT, Value
from shmserve.scheduler.front import Core
from shmserve.scheduler.requests.queue import EXPIRED
from shmserve.scheduler.requests.request import Client, ControlLink, Lookup
from shmserve.scheduler.response_cache import ResponseCache
from shmserve.scheduler.settings import Settings
from shmserve.scheduler.statistics import (
    Reason,
    Statistics,
)

logger = logging.getLogger(__name__)

_MOST_PLANS = 64
_DEADLOCK = (
    "unexpected deadlock, at least one output is not set while no more ensemble steps can be made"
)
_MANY = "a step gives any number of responses by now, and the ensemble gives one: load it again"


class _Known(NamedTuple):
    """What follows from a request's schema: the outputs that it wants, and its size in a batch."""

    schema: RequestSchema
    outputs: tuple[str, ...]
    units: int


class EnsembleCore(Core[EnsembleRequest]):
    """One ensemble's requests, each a flow of tensors through its steps."""

    def __init__(
        self,
        settings: Settings,
        config: ModelSpec,
        links: Links,
        control: ControlLink,
        memory: EnsembleMemory,
        cache: ResponseCache | None = None,
    ) -> None:
        graph = Graph.of(config)
        signature = Signature(config, settings.version)
        statistics = self.statistics = Statistics(settings)
        responses = EnsembleResponses(signature, settings.decoupled, memory, statistics, cache)
        live = LiveRequests(settings.name, statistics, responses)
        targets = Targets(graph)
        steps = StepRunner(graph, targets, links, memory, live)
        self._live = live
        self._targets = targets
        self._steps = steps
        self._responses = responses
        self._graph = graph
        self._decoupled = settings.decoupled
        self._plans: dict[tuple[str, ...], Plan] = {}  # by the outputs that are wanted
        self._plans_of = 0
        self._schemas: Schemas[_Known] = Schemas(self._derive)
        self._signature = signature
        self._batch_size = signature.max_batch_size
        self._planned_bytes = 0  # of memory between steps, for a request
        self._control = control
        self._memory = memory
        self._cache = cache
        # Of steps that max_inflight_requests has no room for; 0: any number.
        self._most_waiting = settings.policies.default.max_queue_size
        self._endpoints: dict[tuple[str, str], str] = {}  # of all models that serve

    # --- clients ----------------------------------------------------------------------------------

    def check(self, submit: Submit, now_ns: int) -> None:
        if 0 < submit.deadline_ns < now_ns:
            raise Unavailable(EXPIRED)

    def retry_after_s(self, error: ShmserveError) -> int:
        return 1 if isinstance(error, QueueFull) else 0

    def admit(
        self,
        client: Client[EnsembleRequest],
        submit: Submit,
        lookup: Lookup | None,
        now_ns: int,
    ) -> None:
        self._live.now_ns = now_ns
        self.check(submit, now_ns)
        if 0 < self._most_waiting <= self._steps.waiting:
            raise QueueFull(f"{id_prefix(submit.request_id)}Exceeds maximum queue size")
        try:
            request = self._request(client, submit, now_ns)
        except MalformedMessage as error:
            logger.error("a request cannot be read: %s", error)
            raise Internal("internal error") from None
        request.lookup = lookup
        self._live.add(request)

    def _request(
        self, client: Client[EnsembleRequest], message: Submit, now_ns: int
    ) -> EnsembleRequest:
        """The request that a message submits, its flow begun. Raises MalformedMessage, Unavailable
        when a step has no model, InvalidArgument when a tensor lies where it cannot."""
        known = self._schemas.find(message.schema) or self._schemas.learn(message.schema)
        inference = known.schema.inference(message.data)
        graph, plan = self._graph, self._plan(known.outputs)
        request = EnsembleRequest(client, message, inference, plan, known.units, now_ns)
        check_places(request, graph)
        inputs = dict.fromkeys(graph.inputs, ABSENT)
        for tensor in inference.inputs:
            holds = tensor.name not in graph.conditions or self._memory.any_true(tensor)
            inputs[tensor.name] = Value(tensor, holds=holds, batched=self._batch_size > 0)
        request.flow.begin(inputs)
        return request

    def _derive(self, packed: bytes) -> _Known:
        schema = RequestSchema(packed)
        outputs = tuple(output.name for output in schema.outputs) or self._graph.outputs
        return _Known(schema, outputs, self._signature.fit(packed).batch_size or 1)

    def _plan(self, outputs: tuple[str, ...]) -> Plan:
        """Shared by requests that want the same outputs, while the models of the steps stay."""
        if self._plans_of != self._targets.changes or len(self._plans) >= _MOST_PLANS:
            self._plans.clear()
            self._plans_of = self._targets.changes
        plan = self._plans.get(outputs)
        if plan is None:
            plan = self._plans[outputs] = Plan(self._graph, outputs, self._targets)
        return plan

    def hit(
        self, client: Client[EnsembleRequest], submit: Submit, lookup: Lookup, now_ns: int
    ) -> None:
        self._responses.hit(client, submit, lookup, now_ns)

    def worded(self, text: str) -> str:
        return self._live.told(text)

    def cancel(self, request: EnsembleRequest, now_ns: int, listening: bool = False) -> None:
        self._live.now_ns = now_ns
        self._live.fail(request, "CANCELLED", "request cancelled")
        self._steps.cancel(request)

    def credit(self, request: EnsembleRequest, responses: int, now_ns: int) -> None:
        self._responses.credit(request, responses)
        self._live.touch(request)

    def release(self, client: Client[EnsembleRequest], message: Release) -> None:
        self._memory.lent.release(client.pid, message.memory, message.offsets)

    def disconnect(self, client: Client[EnsembleRequest], now_ns: int) -> None:
        for request in list(client.requests.values()):
            if request.failure is None:
                self.statistics.failed(request.arrived_ns, Reason.CANCELED, now_ns)
            request.left()
            self._steps.cancel(request)

    def stop(self, request: EnsembleRequest, now_ns: int) -> None:
        self._live.now_ns = now_ns
        if not request.told and not request.gone:
            self._live.fail(request, Unavailable.code, stopping(request.submit.request_id))
            self._responses.failed(request)

    # --- steps and supervisor ---------------------------------------------------------------------

    def from_step(self, endpoint: str, message: SchedulerToClient, now_ns: int) -> None:
        """Handle a message of the scheduler at `endpoint`."""
        self._live.now_ns = now_ns
        self._steps.schedulers.take(endpoint, message)

    def from_control(self, message: SupervisorToEnsemble, now_ns: int) -> None:
        self._live.now_ns = now_ns
        match message:
            case ModelPublished():
                self._published(message)
                if message.acknowledge:
                    self._control.post(Acknowledged(message.acknowledge))
            case SchedulerLost():
                self._steps.lost(message.endpoint, message.successor)
                for key, endpoint in list(self._endpoints.items()):
                    if endpoint == message.endpoint:
                        del self._endpoints[key]
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
        if not self._planned_bytes:
            self._plan_memory()

    def _plan_memory(self) -> None:
        """As soon as all steps' models are known: what a request needs between its steps, as far as
        that is fixed, is there before the first one comes."""
        graph, targets = self._graph, self._targets
        try:
            known = [(step, targets.find(step)) for step in graph.steps]
            devices = Plan(graph, graph.outputs, targets).devices
        except ShmserveError:
            return
        blocks = [
            (size, devices.get(step.outputs[name]))
            for step, target in known
            for name, size in placed_sizes(step, target, graph, self._batch_size).items()
        ]
        self._planned_bytes = sum(size for size, _ in blocks)
        if blocks:
            self._memory.reserve(blocks)
            on_devices = sum(size for size, device in blocks if device is not None)
            logger.info(
                "%d tensors of fixed shapes between steps: %.1f MB a request, planned%s",
                len(blocks),
                self._planned_bytes / 1e6,
                f", {on_devices / 1e6:.1f} of them on CUDA devices" if on_devices else "",
            )

    def process_exited(self, pid: int, reason: str, now_ns: int) -> None:
        self._live.now_ns = now_ns
        self._memory.process_exited(pid)
        self._memory.lent.drop_reader(pid)

    @property
    def live(self) -> int:
        return self._live.count

    # --- time -------------------------------------------------------------------------------------

    def tick(self, now_ns: int) -> int:
        self._live.now_ns = now_ns
        timers = self._live.timers
        if now_ns >= timers.due_ns:
            for request in self._live.expired():
                self._steps.cancel(request)
        while self._live.touched:
            for request in self._live.changed():
                self._advance(request)
        return timers.due_ns

    def _advance(self, request: EnsembleRequest) -> None:
        """Run the steps of a request that can run, and respond; end it when nothing is left."""
        flow = request.flow
        while flow.firings and not request.over:
            firings, flow.firings = flow.firings, []
            for firing in firings:
                self._steps.run(request, firing)
        if flow.unused:
            _release(flow.unused)
        if not self._decoupled and len(flow.responses) > 1:
            text = id_prefix(request.submit.request_id) + _MANY
            self._live.fail(request, Unsupported.code, text)
            self._steps.cancel(request)
        if request.over:
            self._drop(request)
        elif self._decoupled:
            self._responses.relay(request, self._live.now_ns)
        if request.running or request.waiting:
            return
        if not request.over and self._decoupled and flow.responses:
            return  # until its client has read some
        if not request.over and not self._decoupled and not flow.responded:
            text = id_prefix(request.submit.request_id) + _DEADLOCK
            self._live.fail(request, "INVALID_ARG", text)
        self._end(request)

    def _drop(self, request: EnsembleRequest) -> None:
        """Release what was still to come of a request that is over, and what its flow keeps: a step
        that runs may have to wait until that is read."""
        flow = request.flow
        for firing in flow.firings:
            let_go(firing)
        for response in flow.responses:
            _release(list(response.values()))
        flow.close()
        _release(flow.unused)
        self._steps.forget(request)

    def _end(self, request: EnsembleRequest) -> None:
        if not self._live.end(request):
            return
        if request.over:
            self._drop(request)
        self._responses.end(request, self._live.now_ns)
        request.flow.close()
        _release(request.flow.unused)

    def gauges(self) -> dict[str, Any]:
        return {
            "pending": 0,  # what waits, waits for its steps
            "executing": self._live.count,
            "instances": {},
            "open_sequences": 0,
            "malformed": 0,
        }


def _release(values: list[Value]) -> None:
    """Nobody uses these any more."""
    for value in values:
        value.release()
    values.clear()
