"""The messages of steps: a step to run -> its request, a response -> values in the data flow.

A conversion is derived once for each kind of message. The kind of a request is determined by the
datatypes and shapes of its inputs, and the kind of a response by its schema. Later messages of the
same kind need only a lookup.

A step that gives any number of responses needs a credit for each (credit-based flow control). The
credit is returned once no tensor derived from the response is in use. Tensors in responses that the
ensemble's client has not read are in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from shmserve.errors import ShmserveError, Unsupported
from shmserve.ipc.memory.lent import Block, CallbackToken, Token, release_messages
from shmserve.ipc.messages.inference import (
    Finished,
    Release,
    Responded,
    Response,
    Submit,
    correlation_fields,
)
from shmserve.ipc.scheduler_client import InflightRequest, SchedulerClient
from shmserve.ipc.tensors.descriptors import Range, TensorRef, pack_range, unpack_range
from shmserve.ipc.tensors.schemas import (
    INLINE_LIMIT,
    RequestedOutput,
    ResponseSchema,
    Schemas,
    pack_request_schema,
)
from shmserve.ipc.trace import TraceContext
from shmserve.ipc.transport.frames import MalformedMessage
from shmserve.scheduler.ensemble.flow import Firing, Graph, PlannedStep, StepNode, Target, Tensors
from shmserve.scheduler.ensemble.memory import ABSENT, EnsembleMemory, TensorKind, Value
from shmserve.scheduler.ensemble.request import RUNNING, EnsembleRequest, step_sequence

_SEQUENCE_PARAMETERS = ("sequence_id", "sequence_start", "sequence_end")


@dataclass(slots=True, eq=False)
class StepRequest(InflightRequest):
    """The request of a step at its model's scheduler.

    Attributes:
        template: The part that is common to requests with inputs of the same kinds.
        blocks: The ensemble's blocks that the outputs are written to, until a response uses them.
        sequence_override: The sequence parameters in the responses that contained the inputs. They
            have precedence over those of the client's request.
        step_events: The events of requests: a response, or None when no worker has the request's
            memory any more. The runner handles these events.
    """

    request: EnsembleRequest
    firing: Firing
    template: StepTemplate
    blocks: dict[str, Block]
    sequence_override: dict[str, Any] | None
    step_events: list[tuple[StepRequest, Response | None]]
    has_outputs: bool = False  # whether there has been a response with outputs

    def is_awaited(self) -> bool:
        return self.request.state is RUNNING

    def handle(self, message: Response) -> None:
        self.step_events.append((self, message))

    def free(self) -> None:
        # The runner frees the memory when it handles this event.
        self.step_events.append((self, None))


class StepTemplate(NamedTuple):
    """The part that is common to a step's requests with inputs of the same datatypes and shapes.

    Attributes:
        schema: The schema of the requests.
        schema_reusing_input: The schema of requests whose outputs may stay in an input's memory.
        placed_outputs: The names, in the model and the ensemble, of outputs with memory ranges.
        allocations: The byte size of each output that the ensemble allocates, and its CUDA device.
        outputs_in_client_memory: The names of the outputs that are written to the client's memory.
        response_schemas: The unpacked schemas of the responses.
    """

    schema: bytes
    schema_reusing_input: bytes
    placed_outputs: tuple[tuple[str, str], ...]  # (the model's name, the ensemble's name)
    allocations: dict[str, tuple[int, int | None]]  # output -> (byte size, CUDA device)
    outputs_in_client_memory: frozenset[str]
    response_schemas: Schemas[StepResponse]


class StepOutput(NamedTuple):
    """An output in the responses of a step.

    Attributes:
        name: The model's name of the output.
        is_condition: Whether the output decides if a step runs.
    """

    name: str
    kind: TensorKind
    tensor: str  # the ensemble's name; "": the ensemble does not use it
    is_condition: bool
    for_client: bool  # whether the client receives the output


class StepResponse:
    """The unpacked schema of a step's responses.

    Attributes:
        outputs: The outputs in the order of the data.
        absent_outputs: The tensors of the step that the responses lack.
        sequence_override: The sequence parameters in the responses, which have precedence over
            those of the client's request in later steps.
    """

    __slots__ = ("absent_outputs", "outputs", "sequence_override")

    def __init__(
        self,
        step: PlannedStep,
        is_batched: bool,
        conditions: frozenset[str],
        client_outputs: frozenset[str],
        packed_schema: bytes,
    ) -> None:
        """Unpack a schema; raise MalformedMessage if it is no response schema."""
        schema = ResponseSchema(packed_schema)
        outputs: list[StepOutput] = []
        missing_tensors = dict(step.node.outputs)
        for name, datatype, shape, _ in schema.outputs:
            tensor = missing_tensors.pop(name, "")  # a model may return an output repeatedly
            kind = TensorKind.shared(datatype, shape, is_batched)
            outputs.append(
                StepOutput(name, kind, tensor, tensor in conditions, tensor in client_outputs)
            )
        parameters = schema.parameters or {}
        self.outputs = tuple(outputs)
        self.absent_outputs = tuple((tensor, ABSENT) for tensor in missing_tensors.values())
        override = {key: parameters[key] for key in _SEQUENCE_PARAMETERS if key in parameters}
        self.sequence_override = override or None


@dataclass(eq=False)
class StepMessages:
    """The converter of steps to requests, and of the responses to values in the data flow.

    Attributes:
        step_events: See `StepRequest`.
    """

    _graph: Graph
    _memory: EnsembleMemory
    _schedulers: SchedulerClient[StepRequest]
    step_events: list[tuple[StepRequest, Response | None]] = field(default_factory=list)

    # --- requests ---------------------------------------------------------------------------------

    def request(
        self, number: int, request: EnsembleRequest, firing: Firing, target: Target, now_ns: int
    ) -> StepRequest:
        """Return the request of a step, with this number.

        Raises:
            InvalidArgument: The inputs do not fit the step's model.
            Unsupported: The client's memory is given for an output that may be returned many times.
            Unavailable: The arena is full.
        """
        client_request, memory = request.submit, self._memory
        key = (target.signature, request.properties.schema_for_steps, firing.kinds)
        template: StepTemplate | None = firing.step.templates.find(key)
        if template is None:
            template = self._template(request, firing, target)
            firing.step.templates.store(key, template)
        blocks = self._allocate(template) if template.allocations else {}
        data: list[Any] = []
        override: dict[str, Any] | None = None
        for value in firing.inputs.values():
            content: Any = value.data
            if type(content) is not bytes:
                content = pack_range(memory.make_durable(content))
            data.append(content)
            if value.sequence_override:
                override = {**(override or {}), **value.sequence_override}
        schema = template.schema
        for name, tensor in template.placed_outputs:
            block = blocks.get(name)
            data.append(
                pack_range(request.memory_ranges[tensor] if block is None else block.memory_range)
            )
        # A model may return an input in place as its output, but not an input in a client's memory,
        # because the client may overwrite that memory.
        if blocks and all(value.is_in_own_memory for value in firing.inputs.values()):
            schema = template.schema_reusing_input
        flags = client_request.flags
        correlation_number = client_request.correlation_id
        correlation_text = client_request.correlation_text
        if override:
            correlation_id, flags = step_sequence(client_request, override)
            correlation_number, correlation_text = correlation_fields(correlation_id)
        submit = Submit(
            number,
            schema,
            data,
            now_ns,
            request.deadline_ns,
            client_request.timeout_us,
            client_request.priority,
            client_request.request_id,
            flags,
            correlation_number,
            correlation_text,
            client_request.source,
            TraceContext.of(client_request.trace).child().encoded if client_request.trace else "",
            callers=client_request.callers,
        )
        return StepRequest(submit, request, firing, template, blocks, override, self.step_events)

    def _template(self, request: EnsembleRequest, firing: Firing, target: Target) -> StepTemplate:
        used_outputs = _used_outputs(request, firing.step)
        signature = target.signature
        is_batched = signature.max_batch_size > 0
        inputs: list[TensorRef] = []
        for name, value in firing.inputs.items():
            kind, spec = value.kind, signature.inputs.get(name)
            assert kind is not None
            shape = kind.shape if spec is None else kind.shape_for(spec.dims, is_batched)
            inputs.append(TensorRef(name, kind.datatype, shape, value.data))
        properties = signature.check(request.submit.request_id, inputs, used_outputs)
        sizes = placed_sizes(
            firing.step.node, target, self._graph, properties.batch_size, used_outputs
        )
        outputs_in_client_memory = frozenset(
            o.name for o in used_outputs if o.memory_range is not None
        )
        placed_names = sizes.keys() | outputs_in_client_memory
        names = [output.name for output in used_outputs]
        requested_outputs = [(name, name in placed_names, False) for name in names]
        reusing_outputs = [(name, name in placed_names, name in sizes) for name in names]
        outputs = firing.step.node.outputs
        parameters, plan = request.properties.parameters, request.flow.plan
        response_args = (firing.step, is_batched, self._graph.conditions, plan.outputs)
        unpack_response = partial(StepResponse, *response_args)
        return StepTemplate(
            pack_request_schema(inputs, requested_outputs, parameters),
            pack_request_schema(inputs, reusing_outputs, parameters),
            tuple((name, outputs[name]) for name in names if name in placed_names),
            {name: (size, plan.devices.get(outputs[name])) for name, size in sizes.items()},
            outputs_in_client_memory,
            firing.step.response_schemas.setdefault(is_batched, Schemas(unpack_response)),
        )

    def _allocate(self, template: StepTemplate) -> dict[str, Block]:
        blocks: dict[str, Block] = {}
        try:
            for name, (byte_size, device) in template.allocations.items():
                blocks[name] = self._memory.allocate(byte_size, device)
        except BaseException:
            for block in blocks.values():
                block.release()
            raise
        return blocks

    # --- responses --------------------------------------------------------------------------------

    def store_outputs(
        self, step: StepRequest, message: Finished | Responded, more_follow: bool
    ) -> None:
        """Put the outputs of a response into the data flow; discard outputs that nothing reads.

        Args:
            step: The step's request.
            message: The response, which has a schema.
            more_follow: Whether the step sends further responses once this response is not in use.

        Raises:
            MalformedMessage: The response cannot be read.
            Unavailable: The memory of an output is gone, or the arena is full.
            InvalidArgument: A condition lies in memory that cannot be read.
        """
        request, planned_step = step.request, step.firing.step
        response = step.template.response_schemas[message.schema]
        packed_data = message.data
        if len(packed_data) != len(response.outputs):
            raise MalformedMessage(
                f"expected {len(response.outputs)} data entries, got {len(packed_data)}"
            )
        data = [entry if type(entry) is bytes else unpack_range(entry) for entry in packed_data]
        if request.state is not RUNNING or (step.has_outputs and not planned_step.decoupled):
            if more_follow:
                self._schedulers.credit(step, 1)
            self._discard(step, response.outputs, data)
            return
        step.has_outputs = True
        tensors = self._make_values(step, response, data, more_follow)
        request.flow.store_response(planned_step, step.firing.response_index, tensors)

    def _make_values(
        self,
        step: StepRequest,
        response: StepResponse,
        data: list[bytes | Range],
        more_follow: bool,
    ) -> Tensors:
        """Return the tensors of a response, and the outputs that the response lacks as ABSENT."""
        firing = step.firing
        sequence_override = response.sequence_override or step.sequence_override
        held_credits = () if firing.step.runs_once else _held_credits(firing)
        credit = CallbackToken(partial(self._schedulers.credit, step, 1)) if more_follow else None
        if credit is not None:
            held_credits = (*held_credits, credit)
        tensors: list[tuple[str, Value]] = []
        try:
            for index, (name, kind, tensor, is_condition, for_client) in enumerate(
                response.outputs
            ):
                content = data[index]
                is_true = not is_condition or self._memory.any_true(name, content)
                memory = None
                if type(content) is not bytes:
                    content, memory = self._keep_output(step, name, content, for_client)  # type: ignore[arg-type]
                tensors.append(
                    (tensor, Value(kind, content, memory, is_true, sequence_override, held_credits))
                )
        except ShmserveError:
            for _, value in tensors:
                value.release()
            self._discard(step, response.outputs[len(tensors) :], data[len(tensors) :])
            raise
        finally:
            if credit is not None:
                credit.release()
        tensors += response.absent_outputs
        return tensors

    def _keep_output(
        self, step: StepRequest, name: str, memory_range: Range, for_client: bool
    ) -> tuple[Range, Token | None]:
        """Return the memory range in which an output stays, and the token that keeps it alive.

        If this process exits, workers reuse the memory of their outputs, although a client may
        still read them. Outputs for the client are therefore copied into the ensemble's memory.

        Returns:
            The range and its token, or None for an output in the client's memory.
        """
        if name in step.template.outputs_in_client_memory:
            return memory_range, None
        block = step.blocks.pop(name, None)
        if block is not None:
            return memory_range, _output_block(step, memory_range, block)
        self._memory.hold(memory_range)
        if not for_client:
            return memory_range, CallbackToken(partial(self._end_hold, step.endpoint, memory_range))
        try:
            block = self._memory.copy(memory_range)
        except ShmserveError:
            self._memory.end_hold(memory_range)
            raise
        self._end_hold(step.endpoint, memory_range)
        return block.memory_range, block

    def _end_hold(self, endpoint: str, memory_range: Range) -> None:
        self._memory.end_hold(memory_range)
        release = Release(memory_range.memory.pid, [memory_range.offset], memory_range.memory.id)
        self._schedulers.release(endpoint, (release,))

    def _discard(
        self, step: StepRequest, outputs: Sequence[StepOutput], data: Sequence[bytes | Range]
    ) -> None:
        """Release outputs that are in their workers' memory."""
        ensemble_outputs = step.template.outputs_in_client_memory | step.blocks.keys()
        memory_ranges = [
            content
            for output, content in zip(outputs, data, strict=True)
            if isinstance(content, Range) and output.name not in ensemble_outputs
        ]
        self._schedulers.release(step.endpoint, release_messages(memory_ranges))


def _output_block(step: StepRequest, memory_range: Range, block: Block) -> Block:
    """Return the block that keeps an output at `memory_range`.

    The model may have returned an input in place. Otherwise the output is in `block`.
    """
    if (
        memory_range.offset == block.memory_range.offset
        and memory_range.memory.id == block.memory_range.memory.id
    ):
        return block
    for value in step.firing.inputs.values():
        input_block = value.block_at(memory_range)
        if input_block is not None:
            input_block.acquire()
            block.release()
            return input_block
    return block


def _held_credits(firing: Firing) -> tuple[Token, ...]:
    """Return the credits that are held by the inputs of a step."""
    all_credits = (credit for value in firing.inputs.values() for credit in value.held_credits)
    return tuple(dict.fromkeys(all_credits))


def _used_outputs(request: EnsembleRequest, step: PlannedStep) -> tuple[RequestedOutput, ...]:
    """Return the outputs of a step that are used, with the client's memory ranges.

    Raises:
        Unsupported: The client's memory is given for an output that may be returned many times.
    """
    used_outputs: list[RequestedOutput] = []
    for name, tensor in step.node.outputs.items():
        if tensor not in request.flow.plan.routes:
            continue
        memory_range = request.memory_ranges.get(tensor)
        if memory_range is not None and not step.runs_once:
            raise Unsupported(
                f"output '{tensor}' follows a decoupled step, so that it cannot be written to "
                "shared memory"
            )
        used_outputs.append(RequestedOutput(name, memory_range))
    return tuple(used_outputs)


def placed_sizes(
    step: StepNode,
    target: Target,
    graph: Graph,
    batch_size: int,
    used_outputs: Sequence[RequestedOutput] | None = None,
) -> dict[str, int]:
    """Return the sizes of a step's outputs that are written to the ensemble's memory.

    Outputs that fit inside the message are left out. The outputs of a decoupled model are left out
    because each response would overwrite the previous one. Outputs that the model no longer has
    after a reload are left out until the ensemble is reloaded, too.

    Args:
        step: The step.
        target: The model that runs it.
        graph: The ensemble's graph.
        batch_size: The batch size of the request.
        used_outputs: The outputs that are used; None: all.
    """
    if target.decoupled:
        return {}
    if used_outputs is None:
        used_outputs = tuple(map(RequestedOutput, step.outputs))
    sizes = {
        output.name: target.signature.output_size(output.name, batch_size)
        for output in used_outputs
        if output.memory_range is None
        and output.name in target.signature.outputs
        and step.outputs[output.name] not in graph.conditions
    }
    known_sizes = {name: size for name, size in sizes.items() if size is not None}
    return known_sizes if sum(known_sizes.values()) > INLINE_LIMIT else {}
