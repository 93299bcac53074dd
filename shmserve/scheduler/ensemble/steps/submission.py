"""A step that is to run -> the message to its model's scheduler, and where its outputs go."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from shmserve.errors import Unsupported
from shmserve.ipc.inflight import make_submit
from shmserve.ipc.messages.inference import Submit
from shmserve.ipc.tensors.descriptors import Place, TensorRef, described
from shmserve.ipc.tensors.inference import (
    INLINE_LIMIT,
    SEQUENCE_END,
    SEQUENCE_START,
    Inference,
    PackedTemplate,
    RequestedOutput,
    pack_inference,
)
from shmserve.ipc.tensors.signature import BatchFit, agree
from shmserve.ipc.trace import TraceContext
from shmserve.scheduler.ensemble.flow import Firing
from shmserve.scheduler.ensemble.graph import ONCE, Graph, Step
from shmserve.scheduler.ensemble.memory import EnsembleMemory
from shmserve.scheduler.ensemble.requests import EnsembleRequest, StepRequest
from shmserve.scheduler.ensemble.steps.targets import Target
from shmserve.scheduler.ensemble.values import Value

_MOST_FORMS = 256


def prepare(
    step: StepRequest, number: int, graph: Graph, memory: EnsembleMemory, now_ns: int
) -> None:
    """Make the message that submits a step to its scheduler, with this number, and find its outputs
    their places. Raises InvalidArgument when the inputs do not fit its model, Unavailable when the
    arena is full."""
    form = _form(step, graph, memory)
    devices, outputs = step.request.plan.devices, step.firing.step.outputs
    try:
        for name, byte_size in form.known.items():
            step.placed[name] = memory.allocate(byte_size, devices.get(outputs[name]))
        step.submit = _submit(number, step, form, _work(step, form, memory), now_ns)
    except BaseException:
        for block in step.placed.values():
            block.release()
        raise
    step.given = form.given


def _submit(number: int, step: StepRequest, form: _Form, work: bytes, now_ns: int) -> Submit:
    request, origin = step.request, step.request.submit
    correlation_id, flags = sequence_of(origin, step.override)
    return make_submit(
        number,
        form.fit,
        now_ns,
        work,
        request_id=origin.request_id,
        priority=origin.priority,
        timeout_us=origin.timeout_us,
        ends_ns=request.deadline_ns,
        flags=flags,
        correlation_id=correlation_id,
        source=origin.source,
        trace=TraceContext.of(origin.trace).child().message if origin.trace else "",
    )


def _work(step: StepRequest, form: _Form, memory: EnsembleMemory) -> bytes:
    """The packed `Inference`, whose outputs go to where they are `placed`: from the template where
    all that is new are the bytes of inputs."""
    values = step.firing.inputs.values()
    parameters, placed = step.request.inference.parameters, step.placed
    if form.template is not None and not parameters:
        return form.template.fill([value.tensor.data for value in values])  # type: ignore[misc, union-attr]
    inputs = _inputs(step, form.shapes, memory)
    outputs = form.wanted
    if placed:
        # A client's own memory is no place for what others read.
        ours = all(value.in_block for value in values)
        outputs = tuple(
            RequestedOutput(output.name, placed[output.name].place, ours)
            if output.name in placed
            else output
            for output in outputs
        )
    return pack_inference(Inference(tuple(inputs), outputs, parameters))


class _Form(NamedTuple):
    """The common part of a step's requests whose inputs are described alike: the shapes that these
    have for its model, what is asked for, the sizes of what is to be placed, and, where all is
    `inline`, the template of what is packed."""

    fit: BatchFit
    shapes: tuple[tuple[int, ...], ...]
    wanted: tuple[RequestedOutput, ...]
    known: dict[str, int]
    given: frozenset[str]
    inline: bool
    template: PackedTemplate | None = None


def _form(step: StepRequest, graph: Graph, memory: EnsembleMemory) -> _Form:
    """Raises InvalidArgument when the inputs do not fit the step's model."""
    # What a client places, it places anew each time.
    if step.request.placed:
        return _new_form(step, graph, memory)
    key: list[Any] = [step.firing.step.index, step.target.signature]
    for name, value in step.firing.inputs.items():
        key += (name, value.batched, *described(value.given))
    forms: dict[Any, _Form] = step.request.plan.forms
    form = forms.get(at := tuple(key))
    if form is None:
        form = _new_form(step, graph, memory)
        if len(forms) >= _MOST_FORMS:
            forms.clear()
        forms[at] = form
    elif form.inline and form.template is None:  # not for one that never comes again
        inputs = tuple(_inputs(step, form.shapes, memory))
        form = forms[at] = form._replace(template=PackedTemplate(Inference(inputs, form.wanted)))
    return form


def _new_form(step: StepRequest, graph: Graph, memory: EnsembleMemory) -> _Form:
    wanted, target = _wanted(step.request, step.firing), step.target
    shapes = tuple(_shape(name, value, target) for name, value in step.firing.inputs.items())
    inputs = _inputs(step, shapes, memory)
    fit = target.signature.check(step.request.submit.request_id, inputs, wanted)
    sizes = placed_sizes(step.firing.step, target, graph, fit.batch_size, wanted)
    given = frozenset(output.name for output in wanted if output.place is not None)
    inline = all(isinstance(tensor.data, bytes) for tensor in inputs) and not sizes and not given
    return _Form(fit, shapes, wanted, sizes, given, inline)


def _shape(name: str, value: Value, target: Target) -> tuple[int, ...]:
    """The shape of an input as the step's model takes it."""
    shape, spec = value.given.shape, target.signature.inputs.get(name)
    if spec is None:
        return shape
    return fitted(shape, spec.dims, target.signature.max_batch_size > 0, value.batched)


def _inputs(
    step: StepRequest, shapes: Iterable[tuple[int, ...]], memory: EnsembleMemory
) -> list[TensorRef]:
    inputs: list[TensorRef] = []
    for (name, value), shape in zip(step.firing.inputs.items(), shapes, strict=True):
        tensor = value.given
        data = tensor.data
        if isinstance(data, Place):
            data = memory.passed_on(data)
        inputs.append(TensorRef(name, tensor.datatype, shape, data))
    return inputs


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
