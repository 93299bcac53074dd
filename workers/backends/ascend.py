"""Backend `ascend`: offline models (`.om`) on Ascend devices, through CANN's pyACL.

The file is `default_model_filename` (model.om) in the version folder; its shapes are static. With a
`max_batch_size` the first dimension of every tensor is the batch. If a batch is smaller, the
results of its unused rows are ignored. The model runs on the device of its instance. For an
instance of KIND_CPU (if torch does not support the device), the parameter "device_id" (0) is used.

All device memory is allocated at load, in two allocations, because all shapes are fixed. The sizes
of tensors are known once the model is in the first allocation.

    session    | weights | workspace |
    tensors    | input 0 | input 1 | ... | output 0 | ... |

    init, device, context ─> sizes ─> memory ─> load model ─> description ─> memory ─> datasets
    finalize  <── in the reverse order ───────────────────────────────────────────────────┘

This backend follows the documentation of CANN 8. It is tested against a recorded sequence of calls,
but not on hardware.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from shmserve.errors import InvalidArgument, Unavailable
from shmserve.ipc.model_spec import ModelSpec, TensorSpec
from shmserve.ipc.tensors.arrays import STORAGE_DTYPES
from shmserve.ipc.tensors.datatypes import TO_CONFIG, element_count
from shmserve.ipc.tensors.signature import Signature, shape_text
from shmserve.workers.backends import (
    Backend,
    ModelContext,
    Output,
    Request,
    Response,
    parse_integer,
)
from shmserve.workers.tensor_specs import FileTensor, tensor_config, with_generated_tensors

_ALIGNMENT = 512  # the alignment that the device's memory requires
_MIB = 1024 * 1024


def aligned_layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return the aligned offsets of parts with `sizes` in one allocation, and its size in bytes.

    >>> aligned_layout([100, 1000, 8])
    ([0, 512, 1536], 2048)
    """
    aligned_sizes = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    *offsets, total_size = accumulate(aligned_sizes, initial=0)
    return offsets, total_size


def memory_summary(sizes_by_part: Mapping[str, int]) -> str:
    """Return the memory plan as text for the log.

    >>> memory_summary({"weights": 3 << 20, "workspace": 1 << 19})
    'weights 3.0 MiB, workspace 0.5 MiB, 3.5 MiB in all'
    """
    part_texts = [f"{name} {size / _MIB:.1f} MiB" for name, size in sizes_by_part.items()]
    return ", ".join([*part_texts, f"{sum(sizes_by_part.values()) / _MIB:.1f} MiB in all"])


logger = logging.getLogger(__name__)

_HUGE_PAGES_FIRST = 0
_TO_DEVICE, _TO_HOST = 1, 2
# ACL's numbers of datatypes.
_DATATYPES = {
    0: "FP32",
    1: "FP16",
    2: "INT8",
    3: "INT32",
    4: "UINT8",
    6: "INT16",
    7: "UINT16",
    8: "UINT32",
    9: "INT64",
    10: "UINT64",
    11: "FP64",
    12: "BOOL",
    27: "BF16",
}


class AclError(Exception):
    """The error of a failed call of the ACL library."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineTensor(FileTensor):
    """An input or output of the model file, with its size on the device."""

    byte_size: int


def import_acl() -> Any:
    """Import pyACL.

    Raises:
        Unavailable: CANN is not installed, or not set up.
    """
    try:
        return importlib.import_module("acl")
    except ImportError as error:
        raise Unavailable(
            f"backend 'ascend' needs pyACL, whose module acl cannot be imported ({error}): install "
            "CANN (driver, firmware and toolkit or nnrt) and run its set_env.sh before the server "
            "starts"
        ) from None


class OfflineModel:
    """A model on device `device_id`, usable in the thread that created it.

    Raises:
        Unavailable: pyACL is missing.
        InvalidArgument: The protocol lacks the datatype of a tensor.
        AclError: A call of the library failed. No resources remain on the device.
    """

    def __init__(self, path: Path, device_id: int) -> None:
        self._acl = import_acl()
        with contextlib.ExitStack() as stack:
            self._open(stack, str(path), device_id)
            self._exit_stack = stack.pop_all()

    def _open(self, stack: contextlib.ExitStack, path: str, device_id: int) -> None:
        acl = self._acl
        self._check("acl.init", acl.init())
        self._defer_release(stack, "acl.finalize", acl.finalize)
        self._check("acl.rt.set_device", acl.rt.set_device(device_id))
        self._defer_release(stack, "acl.rt.reset_device", acl.rt.reset_device, device_id)
        context = self._check_result("acl.rt.create_context", acl.rt.create_context(device_id))
        self._defer_release(stack, "acl.rt.destroy_context", acl.rt.destroy_context, context)

        workspace, weights, error = acl.mdl.query_size(path)
        self._check("acl.mdl.query_size", error)
        (weights_offset, workspace_offset), size = aligned_layout([weights, workspace])
        base = self._allocate(stack, size)
        memory_arguments = (base + workspace_offset, workspace, base + weights_offset, weights)
        load_result = acl.mdl.load_from_file_with_mem(path, *memory_arguments)
        self._model = self._check_result("acl.mdl.load_from_file_with_mem", load_result)
        self._defer_release(stack, "acl.mdl.unload", acl.mdl.unload, self._model)

        description = acl.mdl.create_desc()
        self._defer_release(stack, "acl.mdl.destroy_desc", acl.mdl.destroy_desc, description)
        self._check("acl.mdl.get_desc", acl.mdl.get_desc(description, self._model))
        self.inputs = self._read_tensors(description, "input")
        self.outputs = self._read_tensors(description, "output")
        sizes = [tensor.byte_size for tensor in (*self.inputs, *self.outputs)]
        offsets, size = aligned_layout(sizes)
        base = self._allocate(stack, size)
        count = len(self.inputs)
        self._input_addresses = [base + offset for offset in offsets[:count]]
        self._output_addresses = [base + offset for offset in offsets[count:]]
        self._input_dataset = self._create_dataset(stack, self.inputs, self._input_addresses)
        self._output_dataset = self._create_dataset(stack, self.outputs, self._output_addresses)
        parts = {"weights": weights, "workspace": workspace}
        parts |= {"inputs": sum(sizes[:count]), "outputs": sum(sizes[count:])}
        logger.info("device memory of the model: %s", memory_summary(parts))

    def _allocate(self, stack: contextlib.ExitStack, byte_size: int) -> int:
        result = self._acl.rt.malloc(byte_size, _HUGE_PAGES_FIRST)
        base_address: int = self._check_result(f"acl.rt.malloc of {byte_size} bytes", result)
        self._defer_release(stack, "acl.rt.free", self._acl.rt.free, base_address)
        return base_address

    def _read_tensors(self, description: Any, side: str) -> tuple[OfflineTensor, ...]:
        count = getattr(self._acl.mdl, f"get_num_{side}s")(description)
        return tuple(self._read_tensor(description, side, index) for index in range(count))

    def _read_tensor(self, description: Any, side: str, index: int) -> OfflineTensor:
        mdl = self._acl.mdl
        name = getattr(mdl, f"get_{side}_name_by_index")(description, index)
        datatype_number = getattr(mdl, f"get_{side}_data_type")(description, index)
        result = getattr(mdl, f"get_{side}_dims")(description, index)
        dims = tuple(self._check_result(f"acl.mdl.get_{side}_dims", result)["dims"])
        size = getattr(mdl, f"get_{side}_size_by_index")(description, index)
        if datatype_number not in _DATATYPES:
            choices = ", ".join(f"{key} ({value})" for key, value in _DATATYPES.items())
            text = f"ACL's datatype {datatype_number} is not supported (supported: {choices})"
            raise InvalidArgument(f"{side} '{name}': {text}")
        if any(dim < 1 for dim in dims) or not element_count(dims):
            raise InvalidArgument(
                f"{side} '{name}' has the shape {list(dims)}: only static shapes are served, so "
                "convert the model without dynamic dimensions"
            )
        return OfflineTensor(name, _DATATYPES[datatype_number], dims, byte_size=size)

    def _create_dataset(
        self, stack: contextlib.ExitStack, tensors: Sequence[OfflineTensor], addresses: list[int]
    ) -> Any:
        acl = self._acl
        dataset = acl.mdl.create_dataset()
        self._defer_release(stack, "acl.mdl.destroy_dataset", acl.mdl.destroy_dataset, dataset)
        for tensor, address in zip(tensors, addresses, strict=True):
            buffer = acl.create_data_buffer(address, tensor.byte_size)
            self._defer_release(stack, "acl.destroy_data_buffer", acl.destroy_data_buffer, buffer)
            result = acl.mdl.add_dataset_buffer(dataset, buffer)
            self._check_result("acl.mdl.add_dataset_buffer", result)
        return dataset

    def put(self, index: int, offset: int, address: int, byte_size: int) -> None:
        """Copy host bytes into input `index`, from its byte `offset` on."""
        device_address = self._input_addresses[index] + offset
        capacity = self.inputs[index].byte_size - offset
        status = self._acl.rt.memcpy(device_address, capacity, address, byte_size, _TO_DEVICE)
        self._check("acl.rt.memcpy", status)

    def run(self) -> None:
        """Run the model, and wait for its outputs."""
        error = self._acl.mdl.execute(self._model, self._input_dataset, self._output_dataset)
        self._check("acl.mdl.execute", error)

    def fetch(self, index: int, address: int, byte_size: int) -> None:
        """Copy the first `byte_size` bytes of output `index` to host memory at `address`."""
        device_address = self._output_addresses[index]
        error = self._acl.rt.memcpy(address, byte_size, device_address, byte_size, _TO_HOST)
        self._check("acl.rt.memcpy", error)

    def close(self) -> None:
        """Release all resources in the reverse order."""
        self._exit_stack.close()

    def _check_result(self, call: str, result: Any) -> Any:
        value, error = result
        self._check(call, error)
        return value

    def _check(self, call: str, error: int) -> None:
        if error:
            raise AclError(f"pyACL call {call} failed with error {error}")

    def _defer_release(
        self, stack: contextlib.ExitStack, call: str, release: Callable[..., int], *args: Any
    ) -> None:
        def release_and_log() -> None:
            error = release(*args)
            if error:  # continue despite the error, to release the remaining resources
                logger.warning("pyACL call %s failed with error %d", call, error)

        stack.callback(release_and_log)


class AscendBackend(Backend):
    """The backend of one offline model on one device."""

    read_only_inputs = False  # inputs are copied to the device, so they need no protection

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        self._model: OfflineModel | None = None

    def complete_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """Add the inputs and outputs of the file to the configuration."""
        model = self._open(ModelSpec.of(config))
        is_batched = config.get("max_batch_size", 0) > 0
        completed_config = dict(config)
        for side, tensors in (("input", model.inputs), ("output", model.outputs)):
            if not config.get(side):
                completed_config[side] = [tensor_config(tensor, is_batched) for tensor in tensors]
        return completed_config

    def load(self, config: ModelSpec) -> None:
        """Load the file and check it against the configuration."""
        model = self._open(config)
        signature = Signature(with_generated_tensors(config), self.context.version)
        self._supports_batching = signature.max_batch_size > 0
        _check(signature, "input", signature.inputs, model.inputs)
        _check(signature, "output", signature.outputs, model.outputs)
        self._output_arrays = [np.empty(t.dims, STORAGE_DTYPES[t.datatype]) for t in model.outputs]

    def execute(self, requests: list[Request]) -> list[Response]:
        """Run the whole batch once, after copying each request's rows to the device."""
        model = self._model
        assert model is not None
        copy_counter = self.context.copy_counter
        for index, tensor in enumerate(model.inputs):
            offset = 0
            for request in requests:
                array = np.ascontiguousarray(request.inputs[tensor.name].numpy())
                model.put(index, offset, array.ctypes.data, array.nbytes)
                offset += array.nbytes
            copy_counter.inputs += offset
        self.context.stopwatch.input_end_ns = time.monotonic_ns()
        model.run()
        self.context.stopwatch.output_start_ns = time.monotonic_ns()
        rows = sum(request.batch_size for request in requests)
        names = ((*request.requested_outputs, *request.states) for request in requests)
        needed_names = set[str]().union(*names)
        outputs: dict[str, Output] = {}
        for index, tensor in enumerate(model.outputs):
            if tensor.name in needed_names:
                result = self._output_arrays[index]
                if self._supports_batching:
                    result = result[:rows]
                model.fetch(index, result.ctypes.data, result.nbytes)
                copy_counter.outputs += result.nbytes
                outputs[tensor.name] = Output(tensor.name, tensor.datatype, result)
        return self._split(requests, outputs)

    def unload(self) -> None:
        """Unload the model from the device."""
        if self._model is not None:
            self._model.close()
            self._model = None

    def _split(self, requests: Sequence[Request], batch: dict[str, Output]) -> list[Response]:
        responses, start = [], 0
        for request in requests:
            rows, end = batch, start + request.batch_size
            if self._supports_batching:
                rows = {n: o._replace(data=o.data[start:end]) for n, o in batch.items()}
            outputs = [output for name, output in rows.items() if name in request.requested_outputs]
            responses.append(Response(outputs, states=[rows[name] for name in request.states]))
            start = end
        return responses

    def _open(self, config: ModelSpec) -> OfflineModel:
        if self._model is None:
            file = config.default_model_filename or "model.om"
            path = self.context.model_file([file], file)
            self._model = OfflineModel(path, self._device_id(config))
        return self._model

    def _device_id(self, config: ModelSpec) -> int:
        if self.context.kind == "GPU":
            return self.context.device_id
        return parse_integer(config.parameters, "device_id", 0)


def _check(
    signature: Signature, side: str, specs: dict[str, TensorSpec], tensors: Sequence[OfflineTensor]
) -> None:
    """Check a configuration against the model file.

    Raises:
        InvalidArgument: The configuration contradicts the file.
    """
    file_tensors = {tensor.name: tensor for tensor in tensors}
    max_batch_size, subject = signature.max_batch_size, f"of model '{signature.name}'"
    required_names = {spec.name for spec in specs.values() if not spec.optional}
    if side == "input" and set(file_tensors) != required_names:
        raise InvalidArgument(
            f"the required inputs {subject} are {sorted(required_names)} in the configuration, but "
            f"{sorted(file_tensors)} in the file"
        )
    for spec in specs.values():
        tensor = file_tensors.get(spec.name)
        if tensor is None:
            raise InvalidArgument(
                f"{side} '{spec.name}' {subject} is not in the file, which has "
                f"{sorted(file_tensors)}"
            )
        if spec.datatype != tensor.datatype:
            raise InvalidArgument(
                f"{side} '{spec.name}' {subject} has data_type {TO_CONFIG[spec.datatype]}, but the "
                f"file's has {TO_CONFIG[tensor.datatype]}"
            )
        dims = spec.model_dims
        expected_dims = tensor.dims[1:] if max_batch_size else tensor.dims
        if dims != expected_dims and (expected_dims or math.prod(dims) != 1):
            raise InvalidArgument(
                f"{side} '{spec.name}' {subject} has the shape {shape_text(dims)}, but the file's "
                f"has {shape_text(expected_dims)}"
            )
        largest_batch = tensor.dims[0] if tensor.dims else 0
        if max_batch_size > largest_batch:
            raise InvalidArgument(
                f"model '{signature.name}' has max_batch_size {max_batch_size}, but the file was "
                f"made for batches of {largest_batch}; reduce max_batch_size, or convert it again"
            )
