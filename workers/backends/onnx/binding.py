"""IO binding: inputs and outputs of a session in memory of the server.

inputs    in the memory they were gathered in: a client's region, an arena or a cached buffer
outputs   of a single request: in the client's region or the arena, if the shape is known before
          the run; otherwise, and in batches, in memory of onnxruntime

A shape is known if the file fixes it or gives it by symbols of an input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from shmserve.errors import ShmserveError
from shmserve.ipc.tensors.arrays import STORAGE_DTYPES, array_interface
from shmserve.ipc.tensors.datatypes import ITEM_SIZE
from shmserve.ipc.tensors.descriptors import Range
from shmserve.workers.backends import ModelContext, Request
from shmserve.workers.device import Device
from shmserve.workers.tensor_specs import FileDescription, FileTensor, escaping_surrogates

if TYPE_CHECKING:
    import torch

# Minimum bytes of an output to bind; copying fewer bytes is cheaper than binding.
_MIN_BOUND_BYTES = 64 * 1024
# The datatypes of outputs that are computed in a client's memory. The client may change this memory
# during the run, and integers may be indices of the model.
_FLOAT_DATATYPES = {"FP16", "FP32", "FP64"}
_DTYPES = {name: kind for name, kind in STORAGE_DTYPES.items() if name != "BYTES"}
# ONNX's number of the datatype that numpy lacks.
_ONNX_BF16 = 16

Array = np.ndarray[Any, Any]


class HostBinding:
    """A session on the CPU, whose inputs and outputs are numpy arrays."""

    def __init__(
        self, context: ModelContext, session: Any, description: FileDescription, run_options: Any
    ) -> None:
        self._context = context
        self._session = session
        self._run_options = run_options
        self._outputs = {tensor.name: tensor for tensor in description.outputs}
        self._inputs = {tensor.name: tensor for tensor in description.inputs}
        tensors = (*description.inputs, *description.outputs)
        self._is_bindable = all(ITEM_SIZE[tensor.datatype] for tensor in tensors)
        # numpy does not support BF16.
        self._has_bf16 = any(tensor.datatype == "BF16" for tensor in tensors)
        # Outputs whose shape differed from the predicted one.
        self._unpredictable_outputs: set[str] = set()

    def run(
        self, inputs: Mapping[str, Array], output_names: Sequence[str], requests: Sequence[Request]
    ) -> dict[str, Array]:
        """Return the requested outputs of a batch; errors of onnxruntime are passed on."""
        bound_arrays: dict[str, Array] = {}
        if len(requests) == 1 and self._is_bindable:
            bound_arrays = self._bind_in_place(inputs, output_names, requests[0])
        if not bound_arrays and not self._has_bf16:
            arrays = {name: _convert_strings(array, _decode) for name, array in inputs.items()}
            run = partial(self._session.run, list(output_names), arrays, self._run_options)
            try:
                outputs = run()
            except UnicodeError:
                # A string is not UTF-8. The session is stateless and may run again.
                with escaping_surrogates():
                    outputs = [_convert_strings(array, _encode) for array in run()]
            return dict(zip(output_names, outputs, strict=True))
        try:
            return self._run_bound(inputs, output_names, bound_arrays)
        except RuntimeError:
            if not bound_arrays:
                raise
            # The output may have an unexpected shape. The session is stateless and may run again.
            outputs = self._run_bound(inputs, output_names, {})
            self._unpredictable_outputs |= {
                n for n in bound_arrays if outputs[n].shape != bound_arrays[n].shape
            }
            return outputs

    def _bind_in_place(
        self, inputs: Mapping[str, Array], output_names: Sequence[str], request: Request
    ) -> dict[str, Array]:
        """Return arrays, by output name, over the memory in which outputs can be computed."""
        arrays_by_output: dict[str, Array] = {}
        symbol_sizes = _symbol_sizes(self._inputs, inputs)
        free_ranges = _free_ranges(request, _MIN_BOUND_BYTES)
        for name in output_names:
            tensor = self._outputs[name]
            shape = _predict_shape(tensor, symbol_sizes)
            if shape is None or name in self._unpredictable_outputs:
                continue
            byte_size = math.prod(shape) * ITEM_SIZE[tensor.datatype]
            if byte_size < _MIN_BOUND_BYTES or name not in request.requested_outputs:
                continue
            if name not in request.memory_ranges:
                buffer = self._reserve_in_arena(request, byte_size)
            else:
                buffer = self._view_of_region(free_ranges.get(name), byte_size, tensor.datatype)
            if buffer is not None:
                arrays_by_output[name] = np.ndarray(shape, _DTYPES[tensor.datatype], buffer)
        return {name: array for name, array in arrays_by_output.items() if array.flags.aligned}

    def _reserve_in_arena(self, request: Request, byte_size: int) -> memoryview | None:
        try:
            return self._context.output_memory.reserve(request.work.client_pid, byte_size)
        except ShmserveError:
            return None  # if memory stays full, writing the output fails the request later

    def _view_of_region(
        self, memory_range: Range | None, byte_size: int, datatype: str
    ) -> memoryview | None:
        if (
            memory_range is None
            or memory_range.memory.cuda is not None
            or datatype not in _FLOAT_DATATYPES
        ):
            return None
        if memory_range.byte_size < byte_size:
            return None  # writing such an output fails the request, as intended
        used_range = Range(memory_range.memory, memory_range.offset, byte_size)
        view: memoryview = self._context.mappings.view(used_range)
        return view

    def _run_bound(
        self, inputs: Mapping[str, Array], output_names: Sequence[str], targets: Mapping[str, Array]
    ) -> dict[str, Array]:
        # Created for each run: in older versions of onnxruntime the binding owns its outputs.
        binding = self._session.io_binding()
        for name, array in inputs.items():
            element_type = _element_type(self._inputs[name].datatype)
            binding.bind_input(name, "cpu", 0, element_type, array.shape, _address(array))
        for name in output_names:
            target = targets.get(name)
            if target is None:
                binding.bind_output(name, "cpu")
                continue
            element_type = _element_type(self._outputs[name].datatype)
            binding.bind_output(name, "cpu", 0, element_type, target.shape, _address(target))
        self._session.run_with_iobinding(binding, self._run_options)
        ort_values = dict(zip(output_names, binding.get_outputs(), strict=True))
        return {
            name: targets[name] if name in targets else self._own_array(name, ort_value, binding)
            for name, ort_value in ort_values.items()
        }

    def _own_array(self, name: str, ort_value: Any, binding: Any) -> Array:
        """Return an array over memory of onnxruntime; the array keeps the memory alive."""
        return np.asarray(_OrtMemory(ort_value, binding, _DTYPES[self._outputs[name].datatype]))


class DeviceBinding:
    """A session whose inputs and outputs are torch tensors of a device."""

    def __init__(
        self, session: Any, description: FileDescription, device: Device, run_options: Any
    ) -> None:
        self._session = session
        self._run_options = run_options
        tensors = (*description.inputs, *description.outputs)
        self._datatypes = {tensor.name: tensor.datatype for tensor in tensors}
        self._device = device.torch
        self._kind, self._index = device.torch.type, device.torch.index or 0
        self._synchronize = device.synchronize

    def run(
        self, inputs: Mapping[str, Any], output_names: Sequence[str], requests: Sequence[Request]
    ) -> dict[str, Any]:
        """Return the requested outputs of a batch; errors of onnxruntime are passed on."""
        binding = self._session.io_binding()
        for name, tensor in inputs.items():
            element_type = _element_type(self._datatypes[name])
            memory = (self._kind, self._index, element_type, tuple(tensor.shape), tensor.data_ptr())
            binding.bind_input(name, *memory)
        for name in output_names:
            binding.bind_output(name, self._kind, self._index)
        self._synchronize()  # necessary, because onnxruntime uses another stream
        self._session.run_with_iobinding(binding, self._run_options)
        binding.synchronize_outputs()
        ort_values = binding.get_outputs()
        pairs = zip(output_names, ort_values, strict=True)
        return {name: self._own_tensor(name, ort_value, binding) for name, ort_value in pairs}

    def _own_tensor(self, name: str, ort_value: Any, binding: Any) -> torch.Tensor:
        """Return a tensor over memory of onnxruntime; the tensor keeps the memory alive."""
        import torch

        from shmserve.workers.memory.tensors import as_torch

        shape, datatype = tuple(ort_value.shape()), self._datatypes[name]
        byte_size = math.prod(shape) * ITEM_SIZE[datatype]
        array: Any = _OrtMemory(ort_value, binding, np.dtype(np.uint8), byte_size)
        if self._kind == "cpu":  # torch does not support numpy's array interface
            array = np.asarray(array)
        return as_torch(datatype, shape, torch.as_tensor(array, device=self._device))


class _OrtMemory:
    """Memory of an OrtValue, for numpy and torch.

    The object keeps the value and its binding alive. With `byte_size` it is an array of that many
    bytes, regardless of the shape.
    """

    def __init__(
        self, ort_value: Any, binding: Any, dtype: np.dtype[Any], byte_size: int | None = None
    ) -> None:
        self._owners = ort_value, binding  # keep the memory alive
        shape = tuple(ort_value.shape()) if byte_size is None else (byte_size,)
        self.__array_interface__ = array_interface(ort_value.data_ptr(), shape, dtype.str)
        if ort_value.device_name().lower() == "cuda":
            self.__cuda_array_interface__ = self.__array_interface__


def _symbol_sizes(tensors: Mapping[str, FileTensor], inputs: Mapping[str, Array]) -> dict[str, int]:
    """Return the sizes of the inputs' symbolic dimensions in this call."""
    return {
        symbol: size
        for name, array in inputs.items()
        for symbol, size in zip(tensors[name].symbols, array.shape, strict=False)
        if symbol
    }


def _predict_shape(tensor: FileTensor, symbol_sizes: Mapping[str, int]) -> tuple[int, ...] | None:
    """Return the shape of an output in a call, or None if it is not known before the call."""
    pairs = zip(tensor.dims, tensor.symbols, strict=True)
    shape = [symbol_sizes.get(symbol, -1) if dim == -1 else dim for dim, symbol in pairs]
    return None if -1 in shape else tuple(shape)


def _element_type(datatype: str) -> Any:
    return _ONNX_BF16 if datatype == "BF16" else _DTYPES[datatype].type


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


# Convert strings without loss: bytes that are not UTF-8 are surrogates in a str.
_decode = partial(bytes.decode, errors="surrogateescape")
_encode = partial(str.encode, errors="surrogateescape")


def _convert_strings(array: Array, convert: Callable[[Any], Any]) -> Array:
    """Apply a function to all elements of a BYTES tensor; return any other tensor unchanged."""
    if array.dtype != np.object_:
        return array
    elements = np.empty(array.size, np.object_)
    elements[:] = list(map(convert, array.reshape(-1).tolist()))
    return elements.reshape(array.shape)


def _free_ranges(request: Request, min_bytes: int) -> dict[str, Range]:
    """Return the mapped output ranges, by name, that overlap no other range of the request.

    Ranges of less than `min_bytes` bytes are omitted.
    """
    pairs = request.memory_ranges.items()
    ranges = {n: r for n, r in pairs if r.byte_size >= min_bytes and not r.memory.copied}
    if not ranges:
        return {}
    used_ranges = [i.memory_range for i in request.inputs.values() if i.memory_range is not None]
    used_ranges += request.memory_ranges.values()
    # Each range overlaps itself, so that a count of 1 means no other overlap.
    return {n: r for n, r in ranges.items() if sum(r.overlaps(item) for item in used_ranges) == 1}
