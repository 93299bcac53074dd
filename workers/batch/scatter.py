"""Scattering: each output of a response is written once, directly to its destination.

the client's region      if the request names a range for the output
the range of an input    if the output is that input, and the request allows it
the message              if all other outputs together are small, or the output is empty
the worker's arena       otherwise; the reader releases the block

Outputs for a client's device memory are copied from host or device memory. An output that a runner
has computed at its destination is not copied.

Responses with equal names, types and shapes share a template: their schema and the destination of
each output, derived from the first of these responses.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from shmserve.errors import Internal
from shmserve.ipc.model_spec import TensorSpec
from shmserve.ipc.tensors.arrays import STORAGE_DTYPES, elements_as_text, encode_bytes
from shmserve.ipc.tensors.datatypes import ITEM_SIZE, TO_CONFIG
from shmserve.ipc.tensors.descriptors import Range, TensorRef
from shmserve.ipc.tensors.schemas import (
    INLINE_LIMIT,
    MAX_MEMBERS,
    Packed,
    pack_data,
    pack_response_schema,
)
from shmserve.ipc.tensors.signature import Signature, client_shape, shape_text, shapes_match
from shmserve.ipc.trace import TraceContext, TracedTensor
from shmserve.workers.batch.backend_request import Array, Input, Output, Request, Response
from shmserve.workers.context import ModelContext
from shmserve.workers.memory.outputs import Copier

MAX_TRACED_CHARS = 1 << 26  # maximum number of characters of the traced tensors of an execution
_MAX_RESPONSE_TEMPLATES = 64  # maximum number of cached templates of a request schema
# Maximum size of a response's parameters, and the names and shapes of its outputs. Larger responses
# would block each process that handles them for seconds.
_MAX_SCHEMA_BYTES = 1 << 20

# Bytes; copying a smaller array takes less time than checking whether it is at its destination.
_MIN_CHECKED_BYTES = 16 * 1024


class ReadyOutput(NamedTuple):
    """An output that is ready to be written.

    Attributes:
        data: The wire form (BYTES), an array, or a tensor if the destination is on a device.
        returned_range: The range of the input that is returned as this output, if the output may
            stay there.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Any
    byte_size: int
    returned_range: Range | None = None


# The destination of an output in responses of one template: None for the message, "" for the range
# of the client, or the name of the input that is returned as the output.
_Destination = str | None


def _is_repeatable(ready_outputs: list[ReadyOutput], request: Request, response: Response) -> bool:
    """Check whether all outputs were written unconverted.

    If so, later responses with the same template are written in the same way.
    """
    if len(ready_outputs) != len(response.outputs):
        return False
    if request.memory_ranges and len(ready_outputs) < len(request.requested_outputs):
        return False
    pairs = zip(ready_outputs, response.outputs, strict=True)
    return all(
        item.name not in request.memory_ranges
        if item.datatype == "BYTES"
        else item.data is output.data or type(output.data) is not np.ndarray
        for item, output in pairs
    )


def _destination(item: ReadyOutput, request: Request) -> _Destination:
    """Return the destination of a written output that is not in the worker's arena."""
    if item.returned_range is not None:
        sources = request.inputs.items()
        return next(n for n, source in sources if source.memory_range is item.returned_range)
    return "" if item.name in request.memory_ranges else None


@dataclass(eq=False)
class Scatterer:
    """The writer of one model's responses. Large outputs are copied by all threads of the instance.

    Args:
        _signature: The model's inputs and outputs.
        _context: The instance.
        _must_match_config: Whether outputs must match the model's configuration.
        _strict_shapes: Whether strict outputs of another shape are errors, not warnings.
        _expects_all: Whether a response should contain all requested outputs.
    """

    _signature: Signature
    _context: ModelContext
    _must_match_config: bool  # whether outputs must match the configuration
    _strict_shapes: bool  # whether a wrong shape is an error, not a warning
    _expects_all: bool  # whether a missing output is reported

    def __post_init__(self) -> None:
        self._supports_batching = self._signature.max_batch_size > 0
        self._copier = Copier(self._context.threads)
        self._has_warned = False

    def write(self, request: Request, response: Response) -> Packed:
        """Write the outputs of a successful response; return its schema and data.

        Outputs that were not requested or not configured are omitted. After an exception, no block
        of the arena stays allocated.

        Raises:
            ShmserveError: An output does not fit the model or its range, or memory is full.
        """
        if request.work.trace:
            self.trace(request, response.outputs)
        if response.parameters or request.is_aliased:
            return self._write_new(request, response, None)
        memory_ranges, inputs = request.memory_ranges, request.inputs
        key: Any = []
        for name, datatype, data in response.outputs:
            key += (name, datatype, data.dtype, data.shape)
            if memory_ranges:  # an input that is returned as an output may need no copy
                for source in inputs:
                    if inputs[source].array is data and inputs[source].memory_range is not None:
                        key += (source,)
        key = tuple(key)
        if key not in request.response_templates:
            return self._write_new(request, response, key)
        schema, destinations = request.response_templates[key]
        tensors: list[Any] = []
        message_bytes = 0
        for output, destination in zip(response.outputs, destinations, strict=True):
            data = output.data
            if destination is None:
                array = data if type(data) is np.ndarray else _host_array(output)
                if output.datatype == "BYTES":
                    encoded_bytes = encode_bytes(array)
                    message_bytes += len(encoded_bytes)
                else:
                    encoded_bytes = array.tobytes()
                    message_bytes += array.nbytes
                tensors += [encoded_bytes]
                continue
            if not destination:
                memory_range = memory_ranges[output.name]
                if data.nbytes != memory_range.byte_size:
                    memory_range = _used_range(output.name, memory_range, data.nbytes)
                is_host_array = type(data) is np.ndarray and memory_range.memory.cuda is None
                content = data if is_host_array else _host_or_device_array(output, memory_range)
                self._write_to(memory_range, content)
            else:
                source_range = inputs[destination].memory_range
                assert source_range is not None
                memory_range = source_range
            tensors += [(memory_range.memory.packed, memory_range.offset, memory_range.byte_size)]
        if message_bytes > INLINE_LIMIT:  # possible, because the size of BYTES outputs varies
            return self._write_new(request, response, None)
        self._context.copy_counter.outputs += message_bytes
        return schema, tensors

    def trace(self, request: Request, tensors: Iterable[Input | Output]) -> None:
        """Record tensors if the request's trace includes them, long ones without their data."""
        context = TraceContext.of(request.work.trace)
        if not context.with_tensors:
            return
        spans = self._context.spans
        chars_left = MAX_TRACED_CHARS - sum(map(len, spans))
        for tensor in tensors:
            output = tensor if isinstance(tensor, Output) else _as_output(tensor)
            text = ""
            if output.data.nbytes < chars_left:
                text = elements_as_text(tensor.datatype, _host_array(output))
            text = text if len(text) < chars_left else ""
            chars_left -= len(text)
            shape = ",".join(map(str, tensor.shape))
            fields = (context.span_id, output is tensor, tensor.name, tensor.datatype, shape, text)
            spans.append(TracedTensor(*fields).packed())

    def _write_new(self, request: Request, response: Response, key: Any) -> Packed:
        """Write a response, and store the destinations of its outputs for the `key`, if any."""
        ready_outputs = [
            self._prepare(output, self._signature.outputs[output.name], request)
            for output in response.outputs
            if output.name in request.requested_outputs and output.name in self._signature.outputs
        ]
        self._check_count(len(ready_outputs), len(self._signature.outputs), "outputs")
        self._check_count(len(response.parameters), 0, "parameters")
        if len(ready_outputs) < len(request.requested_outputs):
            self._handle_missing(request, {item.name for item in ready_outputs})
        if request.is_aliased and len(ready_outputs) > 1:
            ready_outputs = [_detach(item, request) for item in ready_outputs]
        memory_ranges = request.memory_ranges
        message_bytes = sum([i.byte_size for i in ready_outputs if i.name not in memory_ranges])
        is_inline = message_bytes <= INLINE_LIMIT
        claimed_offsets: list[int] = []
        try:
            data = [
                self._put(
                    item,
                    memory_ranges.get(item.name),
                    is_inline,
                    request.work.client_pid,
                    claimed_offsets,
                )
                for item in ready_outputs
            ]
            pairs = zip(ready_outputs, data, strict=True)
            tensor_refs = [TensorRef(*item[:3], tensor_data) for item, tensor_data in pairs]
            schema = pack_response_schema(tensor_refs, response.parameters)
            if len(schema) > _MAX_SCHEMA_BYTES:
                raise Internal(
                    f"the parameters of a response, and the names and shapes of its outputs, have "
                    f"{len(schema)} bytes; at most {_MAX_SCHEMA_BYTES} bytes are allowed"
                )
        except BaseException:
            self._context.output_memory.free_unused(claimed_offsets)
            raise
        if (
            key is not None
            and not claimed_offsets
            and _is_repeatable(ready_outputs, request, response)
        ):
            if len(request.response_templates) >= _MAX_RESPONSE_TEMPLATES:
                request.response_templates.clear()
            destinations = [_destination(item, request) for item in ready_outputs]
            request.response_templates[key] = (schema, destinations)
        return schema, pack_data(data)

    @staticmethod
    def _check_count(count: int, configured_count: int, noun: str) -> None:
        if count > max(MAX_MEMBERS, configured_count):
            raise Internal(f"a response may have at most {MAX_MEMBERS} {noun}, got {count}")

    def _handle_missing(self, request: Request, returned_names: set[str]) -> None:
        """Zero the client's ranges of missing outputs, so that it does not read old content there.

        Log a warning, once, unless the model may omit outputs as in Triton's Python backend.
        """
        missing_outputs = [name for name in request.requested_outputs if name not in returned_names]
        for name in missing_outputs:
            if name in request.memory_ranges:
                memory_range = request.memory_ranges[name]
                self._write_to(memory_range, bytes(memory_range.byte_size))
        if self._expects_all:
            self._expects_all = False  # reported only once
            names = ", ".join(missing_outputs)
            text = f"model '{self._signature.name}' did not return the requested outputs {names}"
            self._context.warn("missing outputs", f"{text} (logged once)")

    def _prepare(self, output: Output, spec: TensorSpec, request: Request) -> ReadyOutput:
        memory_range, returned_range = request.memory_ranges.get(output.name), None
        array = _host_or_device_array(output, memory_range)
        if request.requested_outputs[output.name].may_reuse_input and isinstance(array, np.ndarray):
            returned_range = request.range_of_input(array)
        shape = tuple(array.shape)
        if self._must_match_config:
            self._check(output, spec, shape, request)
        if spec.reshape is not None:
            shape = client_shape(spec, shape, self._supports_batching)
        if output.datatype == "BYTES":
            data = encode_bytes(array)
            return ReadyOutput(output.name, "BYTES", shape, data, len(data))
        return ReadyOutput(output.name, output.datatype, shape, array, array.nbytes, returned_range)

    def _check(
        self, output: Output, spec: TensorSpec, shape: tuple[int, ...], request: Request
    ) -> None:
        if output.datatype != spec.datatype:
            raise Internal(
                f"configuration expects datatype {TO_CONFIG[spec.datatype]} for output "
                f"'{output.name}', model provides {TO_CONFIG[output.datatype]}"
            )
        dims = spec.model_dims
        expected_shape = (request.batch_size, *dims) if self._supports_batching else dims
        if not shapes_match(expected_shape, shape):
            text = (
                f"unexpected shape for inference output '{output.name}' for model "
                f"'{self._signature.name}'. Expected {shape_text(expected_shape)}, got "
                f"{shape_text(shape)}."
            )
            has_wrong_rows = self._supports_batching and shape[:1] != (request.batch_size,)
            if self._strict_shapes or has_wrong_rows:
                raise Internal(text)
            if not self._has_warned:
                self._has_warned = True
                text += " The true shape is returned (reported only once)."
                self._context.warn("shapes of outputs", text)

    def _put(
        self,
        item: ReadyOutput,
        memory_range: Range | None,
        is_inline: bool,
        client_pid: int,
        claimed_offsets: list[int],
    ) -> bytes | Range:
        """Write an output; return its bytes or its range.

        Args:
            item: The output.
            memory_range: The client's range for the output, if the request names one.
            is_inline: Whether the output is sent in the message.
            client_pid: The reader of the output.
            claimed_offsets: Receives the offset of the output's block, if it is in the arena.
        """
        if item.returned_range is not None:
            return item.returned_range
        if memory_range is not None:
            memory_range = _used_range(item.name, memory_range, item.byte_size)
            self._write_to(memory_range, item.data)
            return memory_range
        if is_inline or not item.byte_size:
            self._context.copy_counter.outputs += item.byte_size
            return item.data if isinstance(item.data, bytes) else item.data.tobytes()
        return self._put_in_arena(item, client_pid, claimed_offsets)

    def _put_in_arena(self, item: ReadyOutput, pid: int, claimed_offsets: list[int]) -> Range:
        memory = self._context.output_memory
        if isinstance(item.data, np.ndarray) and item.data.flags.c_contiguous:
            address = item.data.__array_interface__["data"][0]
            claimed_range = memory.claim(pid, address, item.byte_size)
            if claimed_range is not None:  # the model computed the output in this block
                claimed_offsets.append(claimed_range.offset)
                return claimed_range
        memory_range, view = memory.allocate(pid, item.byte_size)
        claimed_offsets.append(memory_range.offset)
        self._context.copy_counter.outputs += self._write(view, item.data)
        return memory_range

    def _write_to(self, memory_range: Range, data: Any) -> None:
        """Write an output to the client's range."""
        context = self._context
        if memory_range.memory.cuda is not None:
            self._write_to_device(memory_range, data, memory_range.memory.cuda.device)
        elif memory_range.memory.copied:
            content = data if isinstance(data, bytes) else data.tobytes()
            context.mappings.write(memory_range, content)
            context.copy_counter.outputs += memory_range.byte_size
        else:
            context.copy_counter.outputs += self._write(context.mappings.view(memory_range), data)

    def _write_to_device(self, memory_range: Range, data: Any, device: int) -> None:
        destination = self._context.mappings.view(memory_range)
        if not memory_range.byte_size:
            return
        assert self._context.device_memory is not None
        if isinstance(data, bytes):
            from shmserve.workers.memory.tensors import as_bytes

            data = as_bytes(bytearray(data))
        written_bytes = self._context.device_memory.write(destination, data, device)
        self._context.copy_counter.outputs += written_bytes

    def _write(self, destination: memoryview, data: Any) -> int:
        """Write bytes or an array to a destination; return the number of copied bytes."""
        size = destination.nbytes
        if not size:
            return 0
        if type(data) is bytes:
            destination[:] = data
            return size
        # The array may be strided, and may be a view of its destination.
        target: Array = np.ndarray(data.shape, data.dtype, destination)
        if size < _MIN_CHECKED_BYTES or data.flags.owndata or not np.may_share_memory(target, data):
            self._copier.copy(target, data)
        elif _have_same_start(target, data):
            return 0  # the model computed the output at its destination
        else:
            target[...] = data
        return size

    def finish_writes(self) -> None:
        """Wait for pending writes to devices; must be called before the response is sent.

        Raises:
            DeviceLost: A write has failed.
        """
        memory = self._context.device_memory
        if memory is not None and memory.written_devices:
            memory.finish_writes()


def _used_range(name: str, memory_range: Range, byte_size: int) -> Range:
    """Return the part of a client's range that an output of `byte_size` bytes uses.

    Raises:
        Internal: The range is too small.
    """
    if byte_size > memory_range.byte_size:
        raise Internal(
            f"shared memory size specified with the request for output '{name}' "
            f"({memory_range.byte_size} bytes) should be at least {byte_size} bytes to hold the "
            "results"
        )
    if byte_size == memory_range.byte_size:
        return memory_range
    return Range(memory_range.memory, memory_range.offset, byte_size)


def _detach(item: ReadyOutput, request: Request) -> ReadyOutput:
    """Return an output, with a copy of its data if the data is a view of an input.

    Another output may be written over the input before this one.
    """
    data = item.data
    if isinstance(data, bytes):
        return item
    if not isinstance(data, np.ndarray):
        return item._replace(data=data.clone())
    shared_inputs = [source.raw for source in request.inputs.values() if source.is_shared]
    if any(
        np.may_share_memory(data, view) for view in shared_inputs if isinstance(view, memoryview)
    ):
        return item._replace(data=data.copy())
    return item


def _have_same_start(first: Array, second: Array) -> bool:
    """Check whether two arrays of one shape and type start at the same address."""
    return second.flags.c_contiguous and bool(
        first.__array_interface__["data"][0] == second.__array_interface__["data"][0]
    )


def _host_or_device_array(output: Output, memory_range: Range | None) -> Any:
    """Return an output as a host array, or as a tensor if its range is on a device."""
    if (
        memory_range is not None
        and memory_range.memory.cuda is not None
        and output.datatype != "BYTES"
    ):
        return _as_tensor(output)
    return _host_array(output)


def _as_tensor(output: Output) -> Any:
    """Return an output as a tensor in host or device memory."""
    from shmserve.workers.memory.tensors import PROTOCOL_DATATYPES, as_torch

    if isinstance(output.data, np.ndarray):
        array = np.ascontiguousarray(_host_array(output))
        return as_torch(output.datatype, array.shape, bytearray(array))
    if PROTOCOL_DATATYPES.get(output.data.dtype) != output.datatype:
        text = (
            f"inference output '{output.name}' is {output.data.dtype}, expected {output.datatype}"
        )
        raise Internal(text)
    return output.data


def _as_output(source: Input) -> Output:
    data = source.torch() if source.on_device else source.numpy()
    return Output(source.name, source.datatype, data)


def _host_array(output: Output) -> Array:
    name, datatype, data = output
    if datatype not in ITEM_SIZE:
        raise Internal(f"inference output '{name}' has the unknown datatype '{datatype}'")
    if not isinstance(data, np.ndarray):
        from shmserve.workers.memory.tensors import host_array

        data = host_array(data)
    if datatype == "BYTES":
        return data
    dtype = STORAGE_DTYPES[datatype]
    if data.dtype == dtype:
        return data
    if data.dtype.newbyteorder("=") != dtype:
        text = f"inference output '{name}' has the datatype {data.dtype}, expected {datatype}"
        raise Internal(text)
    native_array: Array = data.astype(dtype)
    return native_array
