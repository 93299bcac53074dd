"""Preparation of a request: its options, and its tensors in shared memory."""

from __future__ import annotations

import contextlib
import math
import operator
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from shmserve.client.memory.cuda import DeviceView
from shmserve.client.memory.region import Region, check_datatype
from shmserve.client.memory.segments import AnySegment, Memories, MemoryBlock, aligned
from shmserve.client.memory.views import View, lease_of, noop
from shmserve.client.request.arrays import Array, as_array, datatype_of, is_torch
from shmserve.client.request.client_templates import ClientTemplate, TemplateSlot, pack
from shmserve.client.server_state import ClientModel
from shmserve.errors import InvalidArgument
from shmserve.ipc.tensors.arrays import encode_bytes
from shmserve.ipc.tensors.descriptors import Range, TensorRef
from shmserve.ipc.tensors.schemas import (
    INLINE_LIMIT,
    LONGEST_CORRELATION_ID,
    SEQUENCE_END,
    SEQUENCE_START,
    RequestedOutput,
    TensorSchema,
)
from shmserve.ipc.trace import TraceContext

_MAX_TIMEOUT_S = 2e6  # epoll has a limit; a longer timeout counts as no timeout
_INTEGERS = range(-(1 << 63), 1 << 64)  # the range of MessagePack integers
_MISSING_VALUES = ("None", "nan", "NaT", "<NA>")  # of Python, numpy and pandas, as text


class Options(NamedTuple):
    """The options of a call. `flags` mark the first and the last request of a sequence."""

    request_id: str = ""
    parameters: Mapping[str, Any] | None = None
    priority: int = 0
    timeout_us: int = 0
    deadline_ns: int = 0
    sequence: int | str = 0  # the id of the sequence; 0: none
    flags: int = 0  # bits that mark the first and the last request of a sequence
    trace: str = ""  # the trace context for the scheduler


PLAIN = Options()


def options_of(
    request_id: str,
    parameters: Mapping[str, Any] | None,
    priority: int,
    timeout_s: float | None,
    sequence: int | str = 0,
    start: bool = False,
    end: bool = False,
    traceparent: str = "",
) -> Options:
    """Return the options of a call; PLAIN if all are defaults.

    As in the other protocols, the parameters `deadline_us` and `priority` also set options.

    Raises:
        InvalidArgument: An option has an invalid type or value.
    """
    flags = SEQUENCE_START * bool(start) | SEQUENCE_END * bool(end)
    has_defaults = not request_id and not parameters and not priority
    if has_defaults and timeout_s is None and not sequence and not flags and not traceparent:
        return PLAIN
    request_id = _check_text("request_id", request_id or "")
    parameters = _check_parameters(parameters) or {}
    deadline_us = _check_unsigned("deadline_us", parameters.get("deadline_us", 0))
    limits_us = (_as_timeout_us(timeout_s), _as_timeout_us(deadline_us / 1e6) if deadline_us else 0)
    timeout_us = min(filter(None, limits_us), default=0)
    deadline_ns = time.monotonic_ns() + timeout_us * 1000 if timeout_us else 0
    priority_level = _check_unsigned("priority", priority or parameters.get("priority", 0))
    timing_options = (priority_level, timeout_us, deadline_ns)
    sequence_id, trace = _check_sequence(sequence), _trace_context(traceparent, parameters)
    return Options(request_id, parameters or None, *timing_options, sequence_id, flags, trace)


def _trace_context(traceparent: str, parameters: Mapping[str, Any]) -> str:
    """Return a request's trace context; "" if it is neither traced nor explained.

    The parameter `explain` requests an explanation of the response's latency.

    Raises:
        InvalidArgument: `traceparent` has another format than W3C's.
    """
    if traceparent:
        caller = TraceContext.of_header(_check_text("traceparent", traceparent))
        if caller is None:
            raise InvalidArgument(
                f"traceparent must have W3C's format 00-TRACE-SPAN-FLAGS, got {traceparent!r:.80}"
            )
        return caller.child().encoded
    return TraceContext.new().encoded if parameters.get("explain") is True else ""


def _check_sequence(sequence: int | str) -> int | str:
    if isinstance(sequence, str):
        text = _check_text("sequence", sequence)
        if len(text) <= LONGEST_CORRELATION_ID:
            return text
    else:
        with contextlib.suppress(TypeError):
            number = operator.index(sequence)
            if 0 <= number < 1 << 64:
                return number
    raise InvalidArgument(
        f"sequence must be an unsigned 64-bit integer, or a string of at most "
        f"{LONGEST_CORRELATION_ID} characters, got {sequence!r:.80}"
    )


def _as_timeout_us(timeout_s: float | None) -> int:
    if timeout_s is None:
        return 0
    if not isinstance(timeout_s, Real) or math.isnan(timeout_s):
        raise InvalidArgument(f"timeout must be a number of seconds, got {timeout_s!r}")
    if timeout_s <= 0:  # already expired; this includes -inf, which has no integer value
        return 1
    return max(1, round(timeout_s * 1e6)) if timeout_s < _MAX_TIMEOUT_S else 0


def _check_unsigned(name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if number not in _INTEGERS or number < 0:
        raise InvalidArgument(f"{name} must be an integer >= 0, got {value!r}")
    return number


def _check_text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidArgument(f"{name} must be a string, got {value!r:.80}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{name} cannot be encoded as UTF-8: {error}") from None
    return value


def _check_parameters(parameters: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if not parameters:
        return None
    if not isinstance(parameters, Mapping):
        raise InvalidArgument(f"parameters must be a mapping, got {parameters!r:.80}")
    field_name = "the name of a parameter"
    return {_check_text(field_name, n): _check_parameter(n, parameters[n]) for n in parameters}


def _check_parameter(name: str, value: Any) -> Any:
    if isinstance(value, str):
        return _check_text(f"parameter '{name}'", value)
    if isinstance(value, bool | float) or (isinstance(value, int) and value in _INTEGERS):
        return value
    raise InvalidArgument(
        f"parameter '{name}' must be a string, a 64-bit integer, a float or a bool, got "
        f"{value!r:.80}"
    )


_NOT_ON_HOST = np.empty(0, np.uint8)  # placeholder for tensors in device memory


class PackedRequest(NamedTuple):
    """A request that is ready to be sent: `schema` and `data` are the content of its `Submit`.

    `template` and `slot` are set if a template was used. `as_torch` requests torch tensors as
    outputs. `release_memory` frees the request's memory, and is called after the response.
    """

    model: ClientModel
    schema: bytes
    data: list[Any]  # bytes and ranges of the tensors
    options: Options
    template: ClientTemplate | None = None
    slot: TemplateSlot | None = None
    as_torch: bool = False  # whether the outputs are returned as torch tensors
    release_memory: Callable[[], None] = noop  # called when the request has ended
    segments: tuple[AnySegment, ...] = ()  # segments that may contain the request's outputs
    holders: tuple[Any, ...] = ()  # the lease or array that keeps each segment alive


def prepare(
    memories: Memories,
    model: ClientModel,
    inputs: Mapping[str, Any],
    outputs: Sequence[str] | Mapping[str, Any] | None,
    options: Options,
) -> PackedRequest:
    """Return a packed request to `model`.

    Args:
        memories: The client's memory.
        model: The model.
        inputs: The inputs: a mapping or a region.
        outputs: The names of the requested outputs, or the memory to write outputs to: a region,
            or arrays of a region by the outputs' names.
        options: The options.

    Raises:
        InvalidArgument: The request does not fit the model.
        Unavailable: There is not enough memory.
    """
    if type(inputs) is Region and outputs is None:
        return _prepare_region(memories, model, inputs, options)
    if type(inputs) is not dict and not isinstance(inputs, Mapping):
        raise InvalidArgument(f"inputs must be a mapping of names to arrays, got {inputs!r:.80}")
    arrays: list[Array] = []
    template_key: list[Any] = []
    as_torch = False
    can_use_template = not isinstance(outputs, Mapping)
    if can_use_template and outputs is not None and type(outputs) not in (list, tuple):
        outputs = _output_names(outputs)
    byte_size = 0
    specs = model.signature.inputs
    for name, value in inputs.items():
        if type(value) is np.ndarray and value.flags.c_contiguous and value.dtype.kind != "V":
            array, datatype = value, ""
        elif type(value) is DeviceView:
            array, datatype, can_use_template = _NOT_ON_HOST, value.datatype, False
        else:
            as_torch = as_torch or is_torch(value)
            array, datatype = as_array(value, specs.get(name), name)
        arrays.append(array)
        byte_size += array.nbytes
        template_key += (name, array.dtype, array.shape, datatype)
    # The server reads large arrays of a region in place, so their requests use no template. Only
    # the address of an array shows whether it is in a region.
    if can_use_template and (byte_size <= INLINE_LIMIT or not memories.any_within(arrays)):
        template_key += outputs or ()
        template = model.templates.find(tuple(template_key))
        if template is not None:
            return _fill_template(model, template, arrays, options, as_torch)
    else:
        can_use_template = False
    request = _UntemplatedRequest(memories, model, inputs, arrays, options, as_torch)
    if not can_use_template or not request.is_templatable:
        return request.prepare(outputs)
    template = request.make_template(tuple(template_key), tuple(outputs or ()))
    return _fill_template(model, template, arrays, options, as_torch)


def _output_names(outputs: Any) -> tuple[str, ...]:
    if isinstance(outputs, str) or not isinstance(outputs, Iterable):
        raise InvalidArgument(
            "outputs must be names, a region, or a mapping of names to arrays of a region, got "
            f"{outputs!r:.80}"
        )
    return tuple(outputs)


def _fill_template(
    model: ClientModel,
    template: ClientTemplate,
    arrays: Sequence[Array],
    options: Options,
    as_torch: bool,
) -> PackedRequest:
    parameters = options.parameters
    if not template.uses_slots:
        packed_request = template.pack_request(arrays, None, parameters)
        return PackedRequest(model, *packed_request, options, template, None, as_torch)
    slot = template.slot()
    for slot_view, array in zip(slot.inputs, arrays, strict=False):
        np.copyto(slot_view, array)
    packed_request = template.pack_request(arrays, slot, parameters)
    memory_fields = slot.release, (slot.block.segment,)
    return PackedRequest(model, *packed_request, options, template, slot, as_torch, *memory_fields)


def _prepare_region(
    memories: Memories, model: ClientModel, region: Region, options: Options
) -> PackedRequest:
    if region.memories is not memories:
        region = region.attached_to(memories)
    packed_request = region.requests.get(model)
    if packed_request is None or options.parameters:
        signature = model.signature
        for name in region:
            if name not in signature.inputs and name not in signature.outputs:
                raise InvalidArgument(
                    f"the region's tensor '{name}' is neither an input nor an output of "
                    f"model '{model.name}'"
                )
        refs = [region.ref(name) for name in region if name in signature.inputs]
        names = (name for name in region if name not in signature.inputs)
        outputs = [RequestedOutput(name, region.output_range(name, signature)) for name in names]
        signature.check(options.request_id, refs, outputs)
        packed_request = pack(refs, outputs, options.parameters)
        if not options.parameters:
            region.store_request(model, packed_request)
    lease, segment = region.lease, region.segment
    return PackedRequest(model, *packed_request, options, segments=(segment,), holders=(lease,))


def _encode(array: Array, name: str) -> bytes:
    if array.dtype.kind in "OT":
        for item in array.ravel():
            if not isinstance(item, bytes | str) and str(item) in _MISSING_VALUES:
                text = (
                    f"input '{name}' has a missing value ({item}): pass a string or bytes instead"
                )
                raise InvalidArgument(text)
    try:
        return encode_bytes(array)
    except UnicodeEncodeError as error:
        text = f"input '{name}' has text that cannot be encoded as UTF-8: {error}"
        raise InvalidArgument(text) from None


@dataclass(eq=False)
class _UntemplatedRequest:
    """A request that is packed without a template."""

    _memories: Memories
    _model: ClientModel
    inputs: InitVar[Mapping[str, Any]]
    _arrays: list[Array]
    _options: Options
    _as_torch: bool  # whether outputs are torch tensors

    def __post_init__(self, inputs: Mapping[str, Any]) -> None:
        self._segments: list[AnySegment] = []
        self._holders: list[Any] = []
        self._schemas: list[TensorSchema] = []
        self._memory_ranges: list[Range | None] = []
        arrays, specs = self._arrays, self._model.signature.inputs
        for index, (name, data) in enumerate(inputs.items()):
            if type(data) is DeviceView:
                self._schemas.append(TensorSchema(name, data.datatype, data.shape, data.nbytes))
                self._memory_ranges.append(self._device_range(data))
                continue
            array, datatype = as_array(data, specs.get(name), name)
            shape = array.shape
            if datatype == "BYTES":
                array = arrays[index] = np.frombuffer(_encode(array, name), np.uint8)
            self._schemas.append(TensorSchema(name, datatype, shape, array.nbytes))
            self._memory_ranges.append(self._find_range(data, array))

    def _device_range(self, view: DeviceView) -> Range:
        self._hold(view.segment, view.lease)
        return view.memory_range()

    def _hold(self, segment: AnySegment, holder: Any) -> None:
        """Keep a segment, and the `holder` of its memory, alive until the response."""
        self._segments.append(segment)
        self._holders.append(holder)

    def _find_range(self, value: Any, array: Array) -> Range | None:
        """Return the memory range of an array in the client's memory, or None for another array."""
        if type(value) is not View and array.nbytes <= INLINE_LIMIT:
            return None
        segment_offset = self._memories.find(array.ctypes.data, array.nbytes)
        if segment_offset is None:
            return None
        segment, offset = segment_offset
        self._hold(segment, lease_of(value) or value)
        return segment.memory_range(offset, array.nbytes)

    @property
    def is_templatable(self) -> bool:
        """Check that no input has strings or is in a region, so that a template can be made."""
        has_strings = any(schema.datatype == "BYTES" for schema in self._schemas)
        return not has_strings and not any(self._memory_ranges)

    def make_template(self, key: tuple[Any, ...], outputs: Sequence[str]) -> ClientTemplate:
        """Store a template by `key` for requests with the same datatypes and shapes as this one."""
        model = self._model
        # Each response of a decoupled model would overwrite the previous one.
        has_output_memory = not model.decoupled
        arguments = (model.signature, tuple(self._schemas), outputs, self._memories)
        template = ClientTemplate(*arguments, with_outputs=has_output_memory)
        return self._model.store_template(key, template)

    def prepare(self, outputs: Sequence[str] | Mapping[str, Any] | None) -> PackedRequest:
        """Return the packed request for these outputs: names, a region, or arrays of a region."""
        signature = self._model.signature
        requested_outputs = [self._request_output(name, outputs) for name in outputs or ()]
        tensors = list(zip(self._schemas, self._arrays, self._memory_ranges, strict=True))
        sizes = [array.nbytes for _, array, memory_range in tensors if memory_range is None]
        block: MemoryBlock | None = None
        if sum(sizes) > INLINE_LIMIT:
            block = self._memories.allocate(sum(map(aligned, sizes)))
        offset = block.offset if block else 0
        refs: list[TensorRef] = []
        for schema, array, memory_range in tensors:
            data: bytes | Range
            if memory_range is not None:
                data = memory_range
            elif block is None:
                data = array.tobytes()
            else:
                segment = block.segment
                np.copyto(np.ndarray(array.shape, array.dtype, segment.bytes, offset), array)
                data = segment.memory_range(offset, array.nbytes)
                offset += aligned(array.nbytes)
            refs.append(schema.ref(data))
        release_memory = noop if block is None else block.recycle
        try:
            signature.check(self._options.request_id, refs, requested_outputs)
        except InvalidArgument:
            release_memory()
            raise
        return PackedRequest(
            self._model,
            *pack(refs, requested_outputs, self._options.parameters),
            self._options,
            as_torch=self._as_torch,
            release_memory=release_memory,
            segments=tuple(self._segments),
            holders=tuple(self._holders),
        )

    def _request_output(
        self, name: str, outputs: Sequence[str] | Mapping[str, Any] | None
    ) -> RequestedOutput:
        if type(outputs) is Region:
            outputs = outputs.attached_to(self._memories)
            self._hold(outputs.segment, outputs.lease)
            return RequestedOutput(name, outputs.output_range(name, self._model.signature))
        target = outputs[name] if isinstance(outputs, Mapping) else None
        if target is None:
            return RequestedOutput(name)
        memory_range = None
        spec = self._model.signature.outputs.get(name)
        if type(target) is DeviceView:
            check_datatype(name, target.datatype, self._model.signature)
            memory_range = self._device_range(target)
        elif isinstance(target, np.ndarray) and target.flags.c_contiguous:
            array = target.plain() if isinstance(target, View) else target
            datatype = datatype_of(array, spec.datatype if spec is not None else "")
            check_datatype(name, datatype or str(array.dtype), self._model.signature)
            segment_offset = self._memories.find(array.ctypes.data, array.nbytes)
            if segment_offset is not None:
                self._hold(segment_offset[0], lease_of(target) or target)
                memory_range = segment_offset[0].memory_range(segment_offset[1], array.nbytes)
        if memory_range is None:
            raise InvalidArgument(
                f"output '{name}' can only be written to contiguous memory from "
                "`allocate` or `attach`"
            )
        return RequestedOutput(name, memory_range)
