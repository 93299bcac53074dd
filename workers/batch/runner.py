"""Runners, which gather the tensors of requests into batches for a model and split its outputs.

Rows are gathered into one contiguous batch of each input:

adjacent rows in one memory, or a batch of one    a view without a copy
otherwise                                         one copy into a buffer that is kept

Rows in clients' device memory are gathered there, unless the backend requires host memory.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shmserve.errors import Internal
from shmserve.ipc.memory.mappings import Mappings
from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.tensors.arrays import NUMPY_DTYPES, STORAGE_DTYPES, is_bfloat16
from shmserve.ipc.tensors.datatypes import element_count
from shmserve.ipc.tensors.descriptors import Range
from shmserve.ipc.tensors.padding import Shape
from shmserve.ipc.tensors.signature import Signature, shape_text
from shmserve.workers.backends import ModelContext, Output, Response
from shmserve.workers.batch.backend_request import CopyCounter, Input, Request
from shmserve.workers.batch.ragged import RaggedRules
from shmserve.workers.device import Device
from shmserve.workers.memory.device_memory import is_module, is_tensor
from shmserve.workers.memory.static_plan import MemoryPlan

if TYPE_CHECKING:
    import torch


# Size of the largest buffer that is reserved in advance for larger batches.
_MAX_RESERVED_BYTES = 64 * 1024 * 1024


@dataclass(eq=False)
class Gatherer:
    """A gatherer of batches, which makes the rows of each input contiguous.

    If a row is in device memory, the result is a tensor of uint8 there.

    Args:
        _signature: The model's inputs and outputs.
        _mappings: The mapped memories.
        _allocate: Allocates a writable host buffer of a size in bytes. Each input keeps one buffer,
            which grows.
    """

    _signature: Signature
    _mappings: Mappings
    _allocate: Callable[[int], memoryview]  # returns host memory
    _copy_counter: CopyCounter = field(default_factory=CopyCounter)
    _buffers: dict[str, memoryview] = field(default_factory=dict)  # by input
    _device_buffers: Any = None  # a DeviceBuffers object, from the first batch in device memory on

    def __post_init__(self) -> None:
        self._max_rows = max(1, self._signature.max_batch_size)
        self._ragged_inputs = {spec.name for spec in self._signature.inputs.values() if spec.ragged}

    def reserve(self, name: str, byte_size: int) -> None:
        """Allocate the buffer of an input for batches of at most `byte_size` bytes."""
        self._buffer(name, byte_size, byte_size)

    def gather(
        self, name: str, requests: Sequence[Request], copies_views: bool = False
    ) -> tuple[Any, tuple[int, ...], bool]:
        """Gather an input that all `requests` have; not for BYTES.

        An input with `allow_ragged_batch` is always flat, one request after the other.

        Args:
            name: The input.
            requests: The requests of the batch.
            copies_views: Whether to copy the bytes even if a view is possible.

        Returns:
            The bytes, which are valid until the next call for the same input, the shape of the
            whole batch, and whether the bytes are a view.
        """
        inputs = [request.inputs[name] for request in requests]
        shape = self._batch_shape(name, inputs)
        if not copies_views:
            data = inputs[0].raw if len(inputs) == 1 else self._adjacent_bytes(inputs)
            if data is not None:
                return data, shape, inputs[0].memory_range is not None or inputs[0].is_state
        byte_size = sum(len(item.raw) for item in inputs)
        rows = sum(request.batch_size for request in requests)
        self._copy_counter.inputs += byte_size
        capacity = buffer_capacity(byte_size, rows, self._max_rows)
        if any(item.on_device for item in inputs):
            return self._gather_on_device(name, inputs, capacity), shape, False
        buffer = self._buffer(name, byte_size, capacity)
        position = 0
        for item in inputs:
            end = position + len(item.raw)
            buffer[position:end] = item.raw
            position = end
        return buffer[:byte_size], shape, False

    def gather_strings(self, name: str, requests: Sequence[Request]) -> np.ndarray[Any, Any]:
        """Return a BYTES input of a batch as an object array of `bytes`, shaped as by `gather`."""
        arrays = [request.inputs[name].numpy() for request in requests]
        if name in self._ragged_inputs:
            arrays = [array.reshape(-1) for array in arrays]
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)

    def _batch_shape(self, name: str, inputs: list[Input]) -> tuple[int, ...]:
        first_shape = inputs[0].shape
        if name in self._ragged_inputs:
            return (sum(element_count(item.shape) for item in inputs),)
        if len(inputs) == 1:
            return first_shape
        return (sum(item.shape[0] for item in inputs), *first_shape[1:])

    def _gather_on_device(self, name: str, inputs: list[Input], capacity: int) -> Any:
        if self._device_buffers is None:
            from shmserve.workers.memory.tensors import DeviceBuffers

            self._device_buffers = DeviceBuffers()
        return self._device_buffers.gather(name, [item.raw for item in inputs], capacity)

    def _adjacent_bytes(self, inputs: list[Input]) -> Any:
        first_range = inputs[0].memory_range
        if first_range is None:
            batch_bytes = inputs[0].batch
            parts = [i.raw for i in inputs if batch_bytes is not None and i.batch is batch_bytes]
            return batch_bytes if parts and sum(map(len, parts)) == len(batch_bytes) else None
        end = first_range.offset
        for item in inputs:
            memory_range = item.memory_range
            if (
                memory_range is None
                or memory_range.offset != end
                or memory_range.memory.id != first_range.memory.id
            ):
                return None
            end += memory_range.byte_size
        memory, start = first_range.memory, first_range.offset
        return self._mappings.view(Range(memory, start, end - start))

    def _buffer(self, name: str, byte_size: int, capacity: int) -> memoryview:
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < byte_size:
            self._buffers.pop(name, None)  # freed before the larger buffer is allocated
            buffer = self._buffers[name] = self._allocate(capacity)
        return buffer


def buffer_capacity(byte_size: int, rows: int, max_rows: int) -> int:
    """Return the capacity of a buffer whose first batch has `byte_size` bytes and `rows` rows.

    The capacity is the size of the largest batch of such rows, if at most
    `_MAX_RESERVED_BYTES`. The buffer then grows only if rows become larger. A larger buffer has at
    most a quarter more than its batch, so that it rarely grows.

    >>> buffer_capacity(1000, 2, 8)
    4000
    >>> buffer_capacity(2 << 30, 2, 32) == 5 << 29
    True
    """
    rows = max(1, rows)
    largest_bytes = (byte_size + rows - 1) // rows * max(max_rows, rows)
    return min(largest_bytes, max(byte_size + byte_size // 4, _MAX_RESERVED_BYTES))


_ALL_ROWS = slice(None)


class BatchOutput(NamedTuple):
    """An output of a whole batch, in host memory (if a request requires it) and on the device."""

    name: str
    datatype: str
    host_batch: Any
    device_batch: torch.Tensor | None

    @property
    def shape(self) -> Shape:
        """Return the shape of the whole batch."""
        batch: Any = self.host_batch if self.device_batch is None else self.device_batch
        return tuple(batch.shape)

    def part(self, request: Request, rows: slice = _ALL_ROWS, shape: Shape | None = None) -> Output:
        """Return the part of a request.

        Args:
            request: The request.
            rows: The rows of the request in the batch; its elements if there is a `shape`.
            shape: The shape of the request's part of a flat output; None for rows.
        """
        batch = self._batch_for(request)
        if shape is not None:
            return Output(self.name, self.datatype, batch.reshape(-1)[rows].reshape(shape))
        return Output(self.name, self.datatype, batch if rows is _ALL_ROWS else batch[rows])

    def _batch_for(self, request: Request) -> Any:
        if self.device_batch is not None and (
            self.host_batch is None or requires_device_memory(request, self.name)
        ):
            return self.device_batch
        return self.host_batch


def requires_device_memory(request: Request, name: str) -> bool:
    """Check whether a request requires an output in device memory."""
    memory_range = request.memory_ranges.get(name)
    return memory_range is not None and memory_range.memory.cuda is not None


@dataclass(eq=False)
class Runner:
    """The conversion of an instance's requests to model inputs, and of outputs to responses.

    torch does not support read-only tensors, and a view may expose a client's memory. The first
    batch is therefore a copy. Only a model that has not changed any byte of this copy receives
    views. If it later writes into a view with operations of torch, it receives copies from then on.

    Args:
        _context: The instance.
        _signature: The model's inputs and outputs.
        _device: The instance's device.
        _numpy_inputs: The inputs that become numpy arrays.
        _ragged_rules: The rules for generated inputs of a batch and for splitting flat outputs.
    """

    _context: ModelContext
    _signature: Signature
    _device: Device
    _numpy_inputs: frozenset[str] = frozenset()  # names
    _ragged_rules: RaggedRules | None = None
    _passes_views: bool = False  # whether the model receives views of its inputs
    _is_learning: bool = True  # until it is known whether the model writes to its inputs
    # The inputs that are checked by torch's version counter, with their version.
    _watched_tensors: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    # The inputs that are checked for changes, with their original bytes.
    _original_bytes: list[tuple[memoryview, bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        context, signature = self._context, self._signature
        self._supports_batching = signature.max_batch_size > 0
        self._copy_counter = context.copy_counter
        if "torch" in sys.modules:  # imported at load instead of in the first request
            importlib.import_module("shmserve.workers.memory.tensors")
        mappings, counter = context.mappings, context.copy_counter
        self._gatherer = Gatherer(signature, mappings, self._device.host_buffer, counter)

    def memory_plan(self, config: ModelSpec, model: object) -> MemoryPlan | None:
        """Return the memory plan of `model`, and allocate its buffers; None if shapes vary."""
        weight_bytes = _weights_byte_size(model) if is_module(model) else 0
        plan = MemoryPlan.of(config, self._signature, weight_bytes)
        if plan is not None and plan.rows > 1 and config.has_scheduler:
            for name, row_bytes in plan.input_row_bytes.items():
                self._gatherer.reserve(name, row_bytes * plan.rows)
        return plan

    @contextlib.contextmanager
    def detecting_writes(self) -> Iterator[None]:
        """Return a context for the model's call that detects writes into the inputs."""
        has_failed = True
        try:
            yield
            has_failed = False
        finally:
            self._detect_writes(has_failed)

    def inputs(self, requests: Sequence[Request]) -> dict[str, Any]:
        """Return each input as one batch on the device; all requests must have the same inputs.

        Must be called outside `inference_mode`, where tensors have no version counter.
        """
        self._clear_watched_inputs()
        batch: dict[str, Any] = {}
        for name, first_input in requests[0].inputs.items():
            if first_input.datatype == "BYTES":
                batch[name] = self._gatherer.gather_strings(name, requests)
            elif name in self._numpy_inputs:
                batch[name] = self._numpy_input(name, first_input.datatype, requests)
            else:
                batch[name] = self._torch_input(name, first_input.datatype, requests)
        self._add_ragged(batch, requests)
        self._context.stopwatch.input_end_ns = time.monotonic_ns()
        return batch

    def _add_ragged(self, batch: dict[str, Any], requests: Sequence[Request]) -> None:
        if self._ragged_rules is None:
            return
        for name, array in self._ragged_rules.inputs(requests).items():
            if name in self._numpy_inputs:
                batch[name] = array
            else:
                import torch

                batch[name] = torch.from_numpy(array).to(self._device.torch)

    def _numpy_input(
        self, name: str, datatype: str, requests: Sequence[Request]
    ) -> np.ndarray[Any, Any]:
        data, shape, is_view = self._gatherer.gather(name, requests)
        if not isinstance(data, memoryview):
            self._copy_counter.inputs += len(data)
            data, is_view = _to_host(data), False
        array: np.ndarray[Any, Any] = np.ndarray(shape, STORAGE_DTYPES[datatype], data)
        if not array.flags.aligned:
            return array.copy()
        # The executor passes copies to a model that fails because it writes into its inputs.
        array.flags.writeable = not is_view
        return array

    def _torch_input(self, name: str, datatype: str, requests: Sequence[Request]) -> torch.Tensor:
        # An input that is copied to the device needs no protection from writes.
        first_input = requests[0].inputs[name]
        is_in_place = not self._device.needs_copies or first_input.on_device
        is_aliased = is_in_place and not first_input.is_private
        copies_views = is_aliased and not self._passes_views
        data, shape, is_view = self._gatherer.gather(name, requests, copies_views)
        from shmserve.workers.memory.tensors import as_torch

        tensor = as_torch(datatype, shape, data)
        if isinstance(data, memoryview):
            if self._is_learning and is_aliased:
                self._original_bytes.append((data, bytes(data)))
            if self._device.needs_copies:
                self._copy_counter.inputs += tensor.nbytes
                return self._device.put(tensor)
        elif tensor.device != self._device.torch:
            self._copy_counter.inputs += tensor.nbytes
            return tensor.to(self._device.torch)
        if (is_view or self._is_learning) and not first_input.is_private:
            self._watched_tensors.append((tensor, tensor._version))
        return tensor

    def _detect_writes(self, has_failed: bool) -> None:
        has_written = any(tensor._version != version for tensor, version in self._watched_tensors)
        # Writes that bypass torch, as through `x.numpy()`, do not change the version.
        has_written = has_written or any(
            view.tobytes() != original_data for view, original_data in self._original_bytes
        )
        # A call that failed may have ended before its writes.
        if self._watched_tensors and (has_written or not has_failed):
            if has_written and (self._passes_views or self._is_learning):
                self._context.warn_of_writes()
            self._passes_views = not has_written
            self._is_learning = False
        self._clear_watched_inputs()

    def _clear_watched_inputs(self) -> None:
        self._watched_tensors.clear()
        self._original_bytes.clear()

    def responses(self, requests: Sequence[Request], outputs: Mapping[str, Any]) -> list[Response]:
        """Return a response for each request, with its rows of each requested output.

        Raises:
            Internal: An output is not an array, or has a wrong number of rows.
        """
        requested_names = {name for request in requests for name in request.requested_outputs}
        batch_outputs: list[BatchOutput] = []
        for name, output in outputs.items():
            if name in requested_names:
                batch_outputs.append(self._fetch(name, output, requests))
        if self._device.needs_copies:
            self._device.synchronize()
        self._context.stopwatch.output_start_ns = time.monotonic_ns()
        state_names = [name for name in requests[0].states if name in outputs]
        states = [self._fetch_state(name, outputs, requests) for name in state_names]
        if len(requests) == 1:
            first_parts = [self._split(item, requests)[0] for item in batch_outputs]
            return [Response(first_parts, states=states)]
        parts = [self._split(item, requests) for item in batch_outputs]
        state_rows = [
            [state._replace(data=state.data[rows]) for rows in row_slices]
            for state in states
            if (row_slices := self._row_slices(state.name, state.shape, requests))
        ]
        return [
            Response([part[index] for part in parts], states=[state[index] for state in state_rows])
            for index in range(len(requests))
        ]

    def copied_inputs(self, request: Request) -> dict[str, Any]:
        """Return the inputs of a request as copies that the model may keep."""
        inputs: dict[str, Any] = {}
        for name, item in request.inputs.items():
            self._copy_counter.inputs += item.detach()
            if item.datatype == "BYTES" or (name in self._numpy_inputs and not item.on_device):
                inputs[name] = item.numpy()
            elif name in self._numpy_inputs:
                dtype = STORAGE_DTYPES[item.datatype]
                inputs[name] = np.ndarray(item.shape, dtype, _to_host(item.raw))
            else:
                inputs[name] = item.torch().to(self._device.torch)
        self._add_ragged(inputs, [request])
        return inputs

    def response(self, request: Request, outputs: Mapping[str, Any]) -> Response:
        """Return one response to a request that may have several; safe in any thread.

        Raises:
            Internal: An output is not an array.
        """
        names = [name for name in outputs if name in request.requested_outputs]
        fetched_outputs = [self._fetch(name, outputs[name], [request]) for name in names]
        if self._device.needs_copies:
            self._device.synchronize()
        return Response([self._split(item, [request])[0] for item in fetched_outputs])

    def _fetch(self, name: str, output: Any, requests: Sequence[Request]) -> BatchOutput:
        if (
            self._device.needs_copies
            and is_tensor(output)
            and (datatype := _protocol_datatype(output))
        ):
            output_requests = [request for request in requests if name in request.requested_outputs]
            host_batch: torch.Tensor | None = None
            if not all(requires_device_memory(request, name) for request in output_requests):
                self._copy_counter.outputs += output.nbytes
                host_batch = self._device.fetch(output)
            return BatchOutput(name, datatype, host_batch, output)
        name, datatype, data = self._fetch_host(name, output, requests)
        return BatchOutput(name, datatype, data, None)

    def _fetch_host(self, name: str, output: Any, requests: Sequence[Request]) -> Output:
        if is_tensor(output):
            datatype = _protocol_datatype(output)
            if not datatype:
                raise Internal(
                    f"inference output '{name}' has the datatype {output.dtype}, which no client "
                    "can receive"
                )
            return Output(name, datatype, self._device.fetch(output))
        spec = self._signature.outputs[name]
        datatype = spec.datatype
        if datatype == "BYTES":
            array = np.asarray(output, dtype=np.object_)
            rows = sum(request.batch_size for request in requests)
            # A flat list of strings contains the strings of each row in order.
            is_flat_list = array.ndim == len(spec.model_dims) == 1 and isinstance(output, list)
            if is_flat_list and self._supports_batching and rows and not array.size % rows:
                array = array.reshape(rows, -1)
            return Output(name, datatype, array)
        if type(output) is not np.ndarray and hasattr(output, "__array__"):
            if isinstance(output, np.ma.MaskedArray):
                text = "is a masked array: return its .data, or call .filled()"
                raise Internal(f"inference output '{name}' {text}")
            output = np.asarray(output)  # an array of JAX, for example
        if isinstance(output, np.ndarray):
            if is_bfloat16(output.dtype):
                return Output(name, "BF16", output.view(STORAGE_DTYPES["BF16"]))
            return Output(name, _array_datatype(name, output, datatype), output)
        raise Internal(
            f"inference output '{name}' is a {type(output).__name__}, not a tensor: expected a "
            "numpy array or a torch tensor"
        )

    def _fetch_state(
        self, name: str, outputs: Mapping[str, Any], requests: Sequence[Request]
    ) -> Output:
        """Return the state that a request's model has returned, on the device if it is there."""
        state = outputs[name]
        if is_tensor(state) and (datatype := _protocol_datatype(state)):
            return Output(name, datatype, state)
        return self._fetch_host(name, state, requests)

    def _split(self, output: BatchOutput, requests: Sequence[Request]) -> list[Output]:
        """Return the part of an output that belongs to each request."""
        shape = output.shape
        shapes = self._ragged_rules and self._ragged_rules.part_shapes(output.name, requests, shape)
        if shapes:
            element_slices = _adjacent_slices(map(element_count, shapes))
            return list(map(output.part, requests, element_slices, shapes))
        if len(requests) == 1:
            return [output.part(requests[0])]
        return list(map(output.part, requests, self._row_slices(output.name, shape, requests)))

    def _row_slices(
        self, name: str, shape: Sequence[int], requests: Sequence[Request]
    ) -> list[slice]:
        """Return the rows of each request.

        Raises:
            Internal: The output has another number of rows than the batch.
        """
        row_count = sum(request.batch_size for request in requests)
        if not shape or shape[0] != row_count:
            raise Internal(
                f"unexpected shape for inference output '{name}' for model "
                f"'{self._signature.name}'. Expected {row_count} rows, got {shape_text(shape)}."
            )
        return _adjacent_slices(request.batch_size for request in requests)


def _protocol_datatype(tensor: torch.Tensor) -> str:
    """Return the protocol's datatype of a tensor, or "" if clients cannot receive it."""
    from shmserve.workers.memory.tensors import PROTOCOL_DATATYPES

    return PROTOCOL_DATATYPES.get(tensor.dtype, "")


def _to_host(data: Any) -> memoryview:
    from shmserve.workers.memory.tensors import to_host  # imported here, because it imports torch

    return to_host(data)


def _adjacent_slices(sizes: Iterable[int]) -> list[slice]:
    """Return slices of these sizes, each of which begins at the end of the previous one."""
    return [slice(*pair) for pair in pairwise(accumulate(sizes, initial=0))]


def _weights_byte_size(model: Any) -> int:
    tensors = [*model.parameters(), *model.buffers()]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def _array_datatype(name: str, array: np.ndarray[Any, Any], expected_datatype: str) -> str:
    dtype = array.dtype.newbyteorder("=")
    if dtype == STORAGE_DTYPES[expected_datatype]:
        return expected_datatype
    for datatype, candidate_dtype in NUMPY_DTYPES.items():
        if candidate_dtype == dtype:
            return datatype
    raise Internal(f"inference output '{name}' is {dtype}, which no client can receive")
