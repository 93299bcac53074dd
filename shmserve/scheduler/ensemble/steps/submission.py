"""A step that is to run -> the message to its model's scheduler, and where its outputs go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from shmserve.errors import Unsupported
from shmserve.ipc.messages.inference import Submit, make_submit
from shmserve.ipc.tensors.descriptors import TensorRef, pack_place
from shmserve.ipc.tensors.inference import (
    INLINE_LIMIT,
    SEQUENCE_END,
    SEQUENCE_START,
    RequestedOutput,
    pack_request_schema,
)
from shmserve.ipc.tensors.signature import agree
from shmserve.ipc.trace import TraceContext
from shmserve.scheduler.ensemble.flow import Firing
from shmserve.scheduler.ensemble.graph import ONCE, Graph, Step
from shmserve.scheduler.ensemble.memory import EnsembleMemory
from shmserve.scheduler.ensemble.requests import EnsembleRequest, StepRequest
from shmserve.scheduler.ensemble.steps.targets import Target
from shmserve.scheduler.ensemble.values import Value

_MOST_KINDS = 256


def prepare(
    step: StepRequest, number: int, graph: Graph, memory: EnsembleMemory, now_ns: int
) -> None:
    """Make the message that submits a step to its scheduler, and allocate its outputs.

    Raises:
        InvalidArgument: The inputs do not fit the step's model.
        Unavailable: The arena is full.
    """
    kind = _kind(step, graph)
    devices, outputs = step.request.plan.devices, step.firing.step.outputs
    try:
        for name, byte_size in kind.sizes.items():
            step.placed[name] = memory.allocate(byte_size, devices.get(outputs[name]))
        step.submit = _submit(number, step, kind, memory, now_ns)
    except BaseException:
        for block in step.placed.values():
            block.release()
        raise
    step.given = kind.given


def _submit(
    number: int, step: StepRequest, kind: _StepKind, memory: EnsembleMemory, now_ns: int
) -> Submit:
    request, origin = step.request, step.request.submit
    schema = kind.schema
    values = step.firing.inputs.values()
    data: list[Any] = []
    for value in values:
        given = value.tensor.data  # type: ignore[union-attr]
        data.append(given if type(given) is bytes else pack_place(memory.passed_on(given)))  # type: ignore[arg-type]
    if kind.placed:
        # A client's own memory is no place for what others read.
        if kind.sizes and all(value.in_block for value in values):
            schema = kind.schema_or_input
        places = {output.name: output.place for output in request.inference.outputs}
        for name, tensor in kind.placed:
            block = step.placed.get(name)
            place = places[tensor] if block is None else block.place
            assert place is not None
            data.append(pack_place(place))
    correlation_id, flags = sequence_of(origin, step.override)
    return make_submit(
        number,
        schema,
        data,
        now_ns,
        request_id=origin.request_id,
        priority=origin.priority,
        timeout_us=origin.timeout_us,
        ends_ns=request.deadline_ns,
        flags=flags,
        correlation_id=correlation_id,
        source=origin.source,
        trace=TraceContext.of(origin.trace).child().message if origin.trace else "",
    )


class _StepKind(NamedTuple):
    """The common part of a step's requests whose inputs have the same datatypes and shapes.

    Attributes:
        schema: The schema of the requests.
        schema_or_input: The same, where outputs may stay where an input lies.
        placed: The outputs that have places: the model's name, and the ensemble's.
        sizes: The byte sizes of those that the ensemble allocates.
        given: Those that go to places of the client's.
    """

    schema: bytes
    schema_or_input: bytes
    placed: tuple[tuple[str, str], ...]
    sizes: dict[str, int]
    given: frozenset[str]


def _kind(step: StepRequest, graph: Graph) -> _StepKind:
    """Return the kind of a step's request. Raises InvalidArgument where the inputs do not fit."""
    request = step.request
    own = request.placed or request.inference.parameters
    schema = request.submit.schema if own else b""
    key: list[Any] = [step.firing.step.index, step.target.signature, schema]
    for name, value in step.firing.inputs.items():
        tensor = value.given
        key += (name, value.batched, tensor.datatype, tensor.shape)
    kinds: dict[Any, _StepKind] = request.plan.kinds
    kind = kinds.get(at := tuple(key))
    if kind is None:
        if len(kinds) >= _MOST_KINDS:
            kinds.clear()
        kind = kinds[at] = _new_kind(step, graph)
    return kind


def _new_kind(step: StepRequest, graph: Graph) -> _StepKind:
    request, target = step.request, step.target
    wanted = _wanted(request, step.firing)
    inputs = [
        TensorRef(name, value.given.datatype, _shape(name, value, target), value.given.data)
        for name, value in step.firing.inputs.items()
    ]
    fit = target.signature.check(request.submit.request_id, inputs, wanted)
    sizes = placed_sizes(step.firing.step, target, graph, fit.batch_size, wanted)
    given = frozenset(output.name for output in wanted if output.place is not None)
    names = [output.name for output in wanted]
    placed = [name for name in names if name in sizes or name in given]
    parameters = request.inference.parameters
    return _StepKind(
        pack_request_schema(inputs, names, placed, (), parameters),
        pack_request_schema(inputs, names, placed, sizes, parameters),
        tuple((name, step.firing.step.outputs[name]) for name in placed),
        sizes,
        given,
    )


def _shape(name: str, value: Value, target: Target) -> tuple[int, ...]:
    """The shape of an input as the step's model takes it."""
    shape, spec = value.given.shape, target.signature.inputs.get(name)
    if spec is None:
        return shape
    return fitted(shape, spec.dims, target.signature.max_batch_size > 0, value.batched)


def fitted(
    shape: tuple[int, ...], dims: Sequence[int], batches: bool, batched: bool
) -> tuple[int, ...]:
    """The shape of a tensor that comes from a model that does batch (`batched`) or not, for one of
    these `dims` that does (`batches`) or not: a batch dimension of 1 is added or taken away."""
    if batches and not batched and agree(dims, shape):
        return (1, *shape)
    if batched and not batches and shape[:1] == (1,) and agree(dims, shape[1:]):
        return shape if agree(dims, shape) else shape[1:]
    return shape


def _wanted(request: EnsembleRequest, firing: Firing) -> tuple[RequestedOutput, ...]:
    """The outputs of a step that somebody uses; where the client says, if they are its own."""
    places = {output.name: output.place for output in request.inference.outputs}
    plan = request.plan
    wanted: list[RequestedOutput] = []
    for name, tensor in firing.step.outputs.items():
        if not plan.uses[tensor]:
            continue
        place = places.get(tensor)
        if place is not None and plan.follows[firing.step.index] != ONCE:
            raise Unsupported(
                f"output '{tensor}' follows a step that gives any number of responses: it cannot "
                "go to shared memory"
            )
        wanted.append(RequestedOutput(name, place))
    return tuple(wanted)


def placed_sizes(
    step: Step,
    target: Target,
    graph: Graph,
    batch_size: int,
    wanted: Sequence[RequestedOutput] | None = None,
) -> dict[str, int]:
    """The sizes of a step's outputs, of those `wanted`, that are written to the ensemble's arena:
    not those that travel inside the message, and of a model that gives any number of responses
    none, because each would go over the one before it."""
    if target.config.decoupled:
        return {}
    if wanted is None:
        wanted = tuple(map(RequestedOutput, step.outputs))
    sizes = {
        output.name: target.signature.output_size(output.name, batch_size)
        for output in wanted
        if output.place is None and step.outputs[output.name] not in graph.conditions
    }
    known = {name: size for name, size in sizes.items() if size is not None}
    return known if sum(known.values()) > INLINE_LIMIT else {}


def sequence_of(submit: Submit, override: Mapping[str, Any]) -> tuple[int | str, int]:
    """The correlation id and the flags that go with some tensors: the request's own, unless a
    response that one of them came with has others."""
    correlation_id: int | str = submit.correlation_text or submit.correlation_id
    flags = submit.flags
    if override:
        correlation_id = override.get("sequence_id", correlation_id)
        for key, bit in (("sequence_start", SEQUENCE_START), ("sequence_end", SEQUENCE_END)):
            if key in override:
                flags = flags | bit if override[key] else flags & ~bit
    return correlation_id, flags
