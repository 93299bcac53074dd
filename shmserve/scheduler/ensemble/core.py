"""The core of an ensemble, a scheduler to its clients and a client of its steps' schedulers.

admit, cancel, ...       a client's message, from the front
handle_control_message   a message of the supervisor (`step_runner` handles those of the steps)
tick                     run steps, respond, expire
"""

from __future__ import annotations

import logging
from typing import Any, assert_never

from shmserve.errors import (
    Internal,
    InvalidArgument,
    QueueFull,
    ShmserveError,
    Unavailable,
    Unsupported,
)
from shmserve.ipc.messages.inference import Release, Submit
from shmserve.ipc.messages.publications import Acknowledged, ModelPublished, SchedulerLost
from shmserve.ipc.messages.unions import SupervisorToEnsemble
from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.scheduler_client import Links
from shmserve.ipc.tensors.descriptors import Range, unpack_range
from shmserve.ipc.tensors.schemas import RequestSchema, Schemas
from shmserve.ipc.tensors.signature import Signature, id_prefix, model_shape, stopping_text
from shmserve.ipc.transport.frames import MalformedMessage
from shmserve.scheduler.ensemble.flow import RESPONSE, Flow, Graph, Plan, Targets, Tensors
from shmserve.scheduler.ensemble.memory import ABSENT, EnsembleMemory, TensorKind, Value
from shmserve.scheduler.ensemble.request import (
    RUNNING,
    EnsembleRequest,
    EnsembleRequests,
    EnsembleState,
    RequestProperties,
)
from shmserve.scheduler.ensemble.runner import StepRunner
from shmserve.scheduler.ensemble.step_messages import placed_sizes
from shmserve.scheduler.front import Core
from shmserve.scheduler.requests.queue import earlier_deadline, expired_text, plausible_arrival_ns
from shmserve.scheduler.requests.scheduled import Client, ControlLink, Lookup
from shmserve.scheduler.response_cache import ResponseCache
from shmserve.scheduler.settings import Settings
from shmserve.scheduler.statistics import Statistics

logger = logging.getLogger(__name__)

_MAX_PLANS = 64  # cached plans
_DEADLOCK = (
    "unexpected deadlock, at least one output is not set while no more ensemble steps can be made"
)
_NOT_DECOUPLED = (
    "a step has become decoupled, but the ensemble returns one response: reload the ensemble"
)


class EnsembleCore(Core[EnsembleRequest]):
    """The core of one ensemble, whose requests are flows of tensors through its steps."""

    def __init__(
        self,
        settings: Settings,
        config: ModelSpec,
        step_links: Links,
        control: ControlLink,
        memory: EnsembleMemory,
        cache: ResponseCache | None = None,
    ) -> None:
        graph = self._graph = Graph.from_config(config)
        signature = self._signature = Signature(config, settings.version)
        statistics = self.statistics = Statistics(settings)
        targets = self._targets = Targets(graph)
        requests = self._requests = EnsembleRequests(
            settings.name, signature, settings.decoupled, memory, statistics, cache
        )
        self.step_runner = StepRunner(graph, targets, step_links, memory, requests)
        self._is_decoupled = settings.decoupled
        self._timeout_is_deadline = settings.timeout_is_deadline
        self._plans: dict[tuple[str, ...], Plan] = {}  # plans by the names of the requested outputs
        self._planned_changes = 0  # the value of `Targets.change_count` when the plans were made
        self._schemas: Schemas[RequestProperties] = Schemas(self._derive_properties)
        self._planned_bytes = 0  # reserved for the tensors between the steps of one request
        self._control = control
        self._memory = memory
        self._cache = cache
        # The number of steps that may wait because of max_inflight_requests; 0: unlimited.
        self._max_waiting = settings.policies.default.max_queue_size
        # Scheduler endpoints by model name and version.
        self._endpoints: dict[tuple[str, str], str] = {}

    # --- clients ----------------------------------------------------------------------------------

    def check(self, submit: Submit, now_ns: int) -> None:
        arrived_ns = plausible_arrival_ns(submit.arrived_ns, now_ns)
        deadline_ns = self._deadline_ns(submit, arrived_ns)
        if 0 < deadline_ns < now_ns:
            raise Unavailable(expired_text(submit, arrived_ns, deadline_ns))

    def _deadline_ns(self, submit: Submit, arrived_ns: int) -> int:
        deadline_ns = max(submit.deadline_ns, 0)
        if self._timeout_is_deadline and submit.timeout_us:
            return earlier_deadline(deadline_ns, submit, arrived_ns)
        return deadline_ns

    def retry_after_s(self, error: ShmserveError) -> int:
        return 1 if isinstance(error, QueueFull) else 0

    def admit(
        self, client: Client[EnsembleRequest], submit: Submit, lookup: Lookup | None, now_ns: int
    ) -> None:
        self.check(submit, now_ns)
        if 0 < self._max_waiting <= self.step_runner.waiting_count:
            raise QueueFull(f"{id_prefix(submit.request_id)}Exceeds maximum queue size")
        try:
            request = self._create_request(client, submit, lookup, now_ns)
        except MalformedMessage as error:
            logger.error(
                "model '%s': a request is malformed and fails: %s", self._signature.name, error
            )
            raise Internal() from None
        self._requests.add(request)

    def _create_request(
        self, client: Client[EnsembleRequest], submit: Submit, lookup: Lookup | None, now_ns: int
    ) -> EnsembleRequest:
        """Return the request that a message submits, with its inputs in the data flow.

        Raises:
            MalformedMessage: The message cannot be read.
            Unavailable: The model of a step is not served.
            InvalidArgument: The memory range of a tensor is not allowed.
        """
        schema_properties = self._schemas[submit.schema]
        data, plan = submit.data, self._plan(schema_properties.outputs)
        if len(data) != schema_properties.entry_count:
            raise MalformedMessage(
                f"expected {schema_properties.entry_count} data entries, got {len(data)}"
            )
        inputs: list[tuple[str, Value]] = []
        for index, (name, kind, is_condition) in enumerate(schema_properties.inputs):
            packed_tensor = data[index]
            content = packed_tensor if type(packed_tensor) is bytes else unpack_range(packed_tensor)
            is_true = not is_condition or self._memory.any_true(name, content)
            inputs.append((name, Value(kind, content, None, is_true)))
        memory_ranges: dict[str, Range] = {}
        if schema_properties.placed_outputs:
            output_ranges = map(unpack_range, data[len(inputs) :])
            memory_ranges = dict(zip(schema_properties.placed_outputs, output_ranges, strict=True))
            _check_ranges(memory_ranges, inputs, plan, self._graph)
        flow = Flow(plan)
        flow.begin(
            (*inputs, *schema_properties.omitted_inputs)
            if schema_properties.omitted_inputs
            else inputs
        )
        arrived_ns = plausible_arrival_ns(submit.arrived_ns, now_ns)
        times = (arrived_ns, now_ns, self._deadline_ns(submit, arrived_ns), now_ns)
        return EnsembleRequest(
            client,
            submit,
            schema_properties,
            memory_ranges,
            flow,
            lookup,
            *times,
            schema_properties.rows,
        )

    def _derive_properties(self, packed_schema: bytes) -> RequestProperties:
        schema, graph, signature = RequestSchema(packed_schema), self._graph, self._signature
        properties = signature.batch_properties(packed_schema)
        is_batched = signature.max_batch_size > 0
        inputs = tuple(
            (
                name,
                TensorKind.shared(
                    datatype, model_shape(signature.inputs[name], shape, is_batched), is_batched
                ),
                name in graph.conditions,
            )
            for name, datatype, shape, _ in schema.inputs
        )
        input_names = {name for name, _, _ in inputs}
        placed_outputs = tuple(output.name for output in schema.outputs if output.has_range)
        return RequestProperties(
            schema.data_count,
            inputs,
            tuple((name, ABSENT) for name in graph.inputs if name not in input_names),
            tuple(output.name for output in schema.outputs) or graph.outputs,
            placed_outputs,
            schema.parameters,
            packed_schema if placed_outputs or schema.parameters else b"",
            properties.batch_size or 1,
        )

    def _plan(self, outputs: tuple[str, ...]) -> Plan:
        """Return the plan for these outputs; it is valid until the models of the steps change.

        Raises:
            Unavailable: The model of a step is not served.
        """
        if self._planned_changes != self._targets.change_count or len(self._plans) >= _MAX_PLANS:
            self._plans.clear()
            self._planned_changes = self._targets.change_count
        plan = self._plans.get(outputs)
        if plan is None:
            plan = self._plans[outputs] = Plan(self._graph, outputs, self._targets.find)
        return plan

    def serve_cached(
        self, client: Client[EnsembleRequest], submit: Submit, lookup: Lookup, now_ns: int
    ) -> None:
        self._requests.serve_cached(client, submit, lookup, now_ns)

    def format_error(self, text: str) -> str:
        return self._requests.error_text(text)

    def cancel(self, request: EnsembleRequest, now_ns: int, keeps_reading: bool = False) -> None:
        self._requests.fail(request, "CANCELLED", "request cancelled", now_ns)
        self.step_runner.cancel(request)

    def credit(self, request: EnsembleRequest, read_count: int, now_ns: int) -> None:
        self._requests.credit(request, read_count)

    def release(self, client: Client[EnsembleRequest], message: Release) -> None:
        self._memory.lent_memory.release(client.pid, message.memory, message.offsets)

    def disconnect(self, client: Client[EnsembleRequest], now_ns: int) -> None:
        for request in list(client.requests.values()):
            self._requests.abandon(request, now_ns)
            self.step_runner.cancel(request)

    def stop(self, request: EnsembleRequest, now_ns: int) -> None:
        self._requests.stop(request, stopping_text(request.submit.request_id), now_ns)

    # --- supervisor -------------------------------------------------------------------------------

    def handle_control_message(self, message: SupervisorToEnsemble, now_ns: int) -> None:
        match message:
            case ModelPublished():
                self._handle_published(message)
                if message.ack_number:
                    self._control.post(Acknowledged(message.ack_number))
            case SchedulerLost():
                self.step_runner.resubmit(message.endpoint, message.successor, now_ns)
                for key, endpoint in list(self._endpoints.items()):
                    if endpoint == message.endpoint:
                        del self._endpoints[key]
            case _:
                assert_never(message)

    def _handle_published(self, message: ModelPublished) -> None:
        key = (message.name, message.version)
        if self._endpoints.get(key) != message.endpoint:
            self._endpoints[key] = message.endpoint
            # A step may itself be an ensemble, so a change of any model may change the cached
            # results.
            if self._cache is not None:
                self._cache.clear()
        self._targets.publish(message)
        if not self._planned_bytes:
            self._plan_memory()

    def _plan_memory(self) -> None:
        """Reserve the memory for the tensors of fixed size between the steps of a request.

        This is done before the first request, as soon as the models of all steps are known.
        """
        graph, targets = self._graph, self._targets
        try:
            step_targets = [(step, targets.find(step)) for step in graph.steps]
            devices = Plan(graph, graph.outputs, targets.find).devices
        except ShmserveError:
            return
        batch_size = self._signature.max_batch_size
        block_sizes = [
            (size, devices.get(step.outputs[name]))
            for step, target in step_targets
            for name, size in placed_sizes(step, target, graph, batch_size).items()
        ]
        self._planned_bytes = sum(size for size, _ in block_sizes)
        if block_sizes:
            self._memory.reserve(block_sizes)
            device_bytes = sum(size for size, device in block_sizes if device is not None)
            device_text = f" ({device_bytes / 1e6:.1f} MB on CUDA devices)" if device_bytes else ""
            logger.info(
                "ensemble '%s': planned memory of %d tensors between steps: %.1f MB per request%s",
                self._signature.name,
                len(block_sizes),
                self._planned_bytes / 1e6,
                device_text,
            )

    def process_exited(self, pid: int, reason: str, now_ns: int) -> None:
        self._memory.process_exited(pid)
        self._memory.lent_memory.release_all(pid)

    @property
    def live_count(self) -> int:
        return self._requests.open_count

    # --- time -------------------------------------------------------------------------------------

    def tick(self, now_ns: int) -> int:
        requests = self._requests
        if now_ns >= requests.timers.due_ns:
            for request in requests.expire(now_ns):
                self.step_runner.cancel(request)
        while requests.changed_requests:
            changed_requests, requests.changed_requests = requests.changed_requests, {}
            for request in changed_requests:
                if request.state is not EnsembleState.DONE:
                    self._advance(request, now_ns)
        return requests.timers.due_ns

    def _advance(self, request: EnsembleRequest, now_ns: int) -> None:
        """Submit the steps of a request that can run, send its responses, or end it."""
        flow, requests = request.flow, self._requests
        if flow.firings:
            self.step_runner.run(request, now_ns)
        if not self._is_decoupled and len(flow.responses) > 1:
            text = id_prefix(request.submit.request_id) + _NOT_DECOUPLED
            requests.fail(request, Unsupported.code, text, now_ns)
            self.step_runner.cancel(request)
        if request.state is not RUNNING:
            # Release the request's values now: a running step may wait for their memory.
            flow.close()
            self.step_runner.remove_waiting(request)
        elif self._is_decoupled:
            requests.relay(request, now_ns)
        if request.running_ids or request.waiting_count:
            return
        if request.state is RUNNING:
            if self._is_decoupled:
                if flow.responses:
                    return  # sending continues after the client has read some responses
            elif not flow.has_responded:
                text = id_prefix(request.submit.request_id) + _DEADLOCK
                requests.fail(request, "INVALID_ARG", text, now_ns)
        requests.end(request, now_ns)

    def gauges(self) -> dict[str, Any]:
        return {
            "pending": 0,  # an ensemble has no queue: requests wait in its steps' queues
            "executing": self._requests.open_count,
            "instances": {},
            "open_sequences": 0,
            "malformed": self.step_runner.malformed_messages,
            "is_ensemble": True,
        }


def _check_ranges(ranges: dict[str, Range], inputs: Tensors, plan: Plan, graph: Graph) -> None:
    """Check that no output is written over an input that another step reads.

    Raises:
        InvalidArgument: An output overlaps such an input.
    """
    for name, memory_range in ranges.items():
        writer = graph.writers[name].index
        for tensor, value in inputs:
            route = plan.routes.get(tensor)
            if route is None or not isinstance(value.data, Range):
                continue
            readers = {reader.index for reader in route.readers} - {writer, RESPONSE}
            if readers and memory_range.overlaps(value.data):
                raise InvalidArgument(
                    f"output '{name}' overlaps input '{tensor}', which other "
                    "steps of the ensemble read"
                )
