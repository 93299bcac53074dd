"""Backend `ascend`: offline models (`.om`) on Ascend devices, through CANN's pyACL.

The file is `default_model_filename` (model.om) in the version folder; its shapes are static. With
a `max_batch_size` the first dimension of every tensor is the batch, and batches that are smaller
than it run with what rows are left over: their results go to nobody. The device is the instance's,
or for an instance of KIND_CPU (where torch knows no such device) the parameter "device_id" (0).

static_plan.py      what the model needs on the device, laid out in one allocation
offline_model.py    the model there

Untested on hardware.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from shmserve.errors import InvalidArgument
from shmserve.ipc.model_spec import ModelSpec, TensorSpec
from shmserve.ipc.tensors.arrays import STORED
from shmserve.ipc.tensors.datatypes import TO_CONFIG
from shmserve.ipc.tensors.signature import Signature, shape_text
from shmserve.workers.backends import Backend, ModelContext, Output, Request, Response
from shmserve.workers.backends.ascend.offline_model import OfflineModel, OfflineTensor
from shmserve.workers.model_view import as_model_sees


class AscendBackend(Backend):
    """One offline model on one device."""

    read_only_inputs = False  # they are copied to the device

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        self._model: OfflineModel | None = None

    def complete_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """Inputs and outputs, as the file has them."""
        model = self._open(ModelSpec.of(config))
        batched = config.get("max_batch_size", 0) > 0
        completed = dict(config)
        completed["input"] = config.get("input") or _as_config(model.inputs, batched)
        completed["output"] = config.get("output") or _as_config(model.outputs, batched)
        return completed

    def load(self, config: ModelSpec) -> None:
        """Load the file and match it with the configuration."""
        model = self._open(config)
        signature = Signature(as_model_sees(config), self.context.version)
        self._batched = signature.max_batch_size > 0
        _check(signature, "input", signature.inputs, model.inputs)
        _check(signature, "output", signature.outputs, model.outputs)
        self._results = [np.empty(tensor.dims, STORED[tensor.datatype]) for tensor in model.outputs]

    def execute(self, requests: list[Request]) -> list[Response]:
        """One run for the whole batch: each request's rows are copied to the device from where
        they are."""
        model = self._model
        assert model is not None
        copied = self.context.copied
        for index, tensor in enumerate(model.inputs):
            at = 0
            for request in requests:
                array = np.ascontiguousarray(request.inputs[tensor.name].numpy())
                model.put(index, at, array.ctypes.data, array.nbytes)
                at += array.nbytes
            copied.inputs += at
        self.context.stopwatch.input_end_ns = time.monotonic_ns()
        model.run()
        self.context.stopwatch.output_start_ns = time.monotonic_ns()
        rows = sum(request.batch_size for request in requests)
        needed = {name for request in requests for name in (*request.requested, *request.states)}
        made: dict[str, Output] = {}
        for index, tensor in enumerate(model.outputs):
            if tensor.name in needed:
                result = self._results[index][:rows] if self._batched else self._results[index]
                model.fetch(index, result.ctypes.data, result.nbytes)
                copied.outputs += result.nbytes
                made[tensor.name] = Output(tensor.name, tensor.datatype, result)
        return self._split(requests, made)

    def unload(self) -> None:
        """Take the model off the device."""
        if self._model is not None:
            self._model.close()
            self._model = None

    def _split(self, requests: Sequence[Request], made: dict[str, Output]) -> list[Response]:
        responses, at = [], 0
        for request in requests:
            end = at + request.batch_size

            def rows(name: str, begin: int = at, end: int = end) -> Output:
                output = made[name]
                return output._replace(data=output.data[begin:end]) if self._batched else output

            outputs = [rows(name) for name in made if name in request.requested]
            responses.append(Response(outputs, states=[rows(name) for name in request.states]))
            at = end
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
        value = config.parameters.get("device_id", "0")
        if not value.isdecimal():
            raise InvalidArgument(f"parameter 'device_id' must be an integer >= 0, got '{value}'")
        return int(value)


def _as_config(tensors: Sequence[OfflineTensor], batched: bool) -> list[dict[str, Any]]:
    return [
        {
            "name": tensor.name,
            "data_type": TO_CONFIG[tensor.datatype],
            "dims": list(tensor.dims[1:] if batched else tensor.dims) or [1],
        }
        for tensor in tensors
    ]


def _check(
    signature: Signature,
    side: str,
    specs: dict[str, TensorSpec],
    tensors: Sequence[OfflineTensor],
) -> None:
    """Raises InvalidArgument when a configuration promises what the file cannot do."""
    known = {tensor.name: tensor for tensor in tensors}
    most, subject = signature.max_batch_size, f"of model '{signature.name}'"
    if side == "input" and set(known) != set(specs):
        raise InvalidArgument(
            f"the inputs {subject} are {sorted(specs)} in the configuration, the file's are "
            f"{sorted(known)}"
        )
    for spec in specs.values():
        tensor = known.get(spec.name)
        if tensor is None:
            raise InvalidArgument(
                f"{side} '{spec.name}' {subject} is none of the file's, which are {sorted(known)}"
            )
        if spec.datatype != tensor.datatype:
            raise InvalidArgument(
                f"{side} '{spec.name}' {subject} has data_type {TO_CONFIG[spec.datatype]}, but the "
                f"file's has {TO_CONFIG[tensor.datatype]}"
            )
        dims = spec.model_dims
        want = tensor.dims[1:] if most else tensor.dims
        if dims != want and (want or math.prod(dims) != 1):
            raise InvalidArgument(
                f"{side} '{spec.name}' {subject} has the shape {shape_text(dims)}, but the file's "
                f"has {shape_text(want)}"
            )
        if most and most > tensor.dims[0]:
            raise InvalidArgument(
                f"model '{signature.name}' has max_batch_size {most}, but the file was made for "
                f"batches of {tensor.dims[0]}"
            )
