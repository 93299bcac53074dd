"""Triton's interface for Python models, which import it as `triton_python_backend_utils`."""

from __future__ import annotations

from typing import Any

import numpy as np

from shmserve.ipc.tensors.arrays import NUMPY, encode_bytes
from shmserve.ipc.tensors.datatypes import FROM_CONFIG
from shmserve.workers.backends.python.config import ModelConfig
from shmserve.workers.backends.python.errors import TritonError, TritonModelException
from shmserve.workers.backends.python.metrics import MetricFamily
from shmserve.workers.backends.python.request import (
    RELEASE_ALL,
    RELEASE_RESCHEDULE,
    InferenceRequest,
    InferenceTrace,
    MemoryType,
    PreferredMemory,
    ReceivedRequest,
)
from shmserve.workers.backends.python.response import (
    RESPONSE_COMPLETE_FINAL,
    InferenceResponse,
    InferenceResponseSender,
    ResponseIterator,
)
from shmserve.workers.backends.python.server import (
    Logger,
    get_model_dir,
    is_model_ready,
    load_model,
    shared_memory,
    unload_model,
    workspace,
)
from shmserve.workers.backends.python.tensor import NUMBER, Tensor

__all__ = [
    "TRITONSERVER_MEMORY_CPU",
    "TRITONSERVER_MEMORY_GPU",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START",
    "TRITONSERVER_REQUEST_RELEASE_ALL",
    "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE",
    "TRITONSERVER_RESPONSE_COMPLETE_FINAL",
    "TRITON_STRING_TO_NUMPY",
    "InferenceRequest",
    "InferenceResponse",
    "InferenceResponseSender",
    "InferenceTrace",
    "Logger",
    "MetricFamily",
    "ModelConfig",
    "PreferredMemory",
    "ResponseIterator",
    "Tensor",
    "TritonError",
    "TritonModelException",
    "deserialize_bytes_tensor",
    "get_input_config_by_name",
    "get_input_tensor_by_name",
    "get_model_dir",
    "get_output_config_by_name",
    "get_output_tensor_by_name",
    "is_model_ready",
    "load_model",
    "numpy_to_triton_type",
    "serialize_byte_tensor",
    "shared_memory",
    "triton_string_to_numpy",
    "triton_to_numpy_type",
    "unload_model",
    "using_decoupled_model_transaction_policy",
    "workspace",
]

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_RESPONSE_COMPLETE_FINAL = RESPONSE_COMPLETE_FINAL
TRITONSERVER_REQUEST_RELEASE_ALL = RELEASE_ALL
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = RELEASE_RESCHEDULE
TRITONSERVER_MEMORY_GPU = MemoryType.TRITONSERVER_MEMORY_GPU
TRITONSERVER_MEMORY_CPU = MemoryType.TRITONSERVER_MEMORY_CPU

_NUMPY_TYPES: dict[str, Any] = {name: dtype.type for name, dtype in NUMPY.items()}
TRITON_STRING_TO_NUMPY: dict[str, Any] = {
    config: bool if name == "BOOL" else _NUMPY_TYPES[name]
    for config, name in FROM_CONFIG.items()
    if name in NUMPY
}
_BY_NUMBER = {NUMBER[name]: kind for name, kind in _NUMPY_TYPES.items()}


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """Return the input of a request with this name, or None."""
    if type(inference_request) is ReceivedRequest or isinstance(inference_request, ReceivedRequest):
        return inference_request.tensors.get(name)
    return _named(inference_request.inputs(), name)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """Return the output of a response with this name, or None."""
    return _named(inference_response.output_tensors(), name)


def _named(tensors: list[Tensor], name: str) -> Tensor | None:
    return next((tensor for tensor in tensors if tensor.name() == name), None)


def get_input_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Return the entry of a configuration for an input, or None."""
    return next((t for t in model_config.get("input", ()) if t["name"] == name), None)


def get_output_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Return the entry of a configuration for an output, or None."""
    return next((t for t in model_config.get("output", ()) if t["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: dict[str, Any]) -> bool:
    """Return whether a configuration is that of a decoupled model."""
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """Return the numpy type of a configuration's data_type, such as TYPE_FP32; raise KeyError."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def triton_to_numpy_type(data_type: int) -> Any:
    """Return the numpy type of Triton's number of a datatype; None if numpy has none."""
    return _BY_NUMBER.get(data_type)


def numpy_to_triton_type(data_type: Any) -> int | None:
    """Triton's number of a numpy type; None where Triton has none."""
    kind = np.dtype(data_type)
    if kind.kind == "S":
        return NUMBER["BYTES"]
    return next((NUMBER[name] for name, dtype in NUMPY.items() if dtype == kind), None)


def serialize_byte_tensor(input_tensor: np.ndarray[Any, Any]) -> bytes | None:
    """Return the wire form of a BYTES tensor, or None for another tensor.

    Each element is a 4-byte length and its bytes.
    """
    if input_tensor.dtype.kind not in "OS":
        return None
    return encode_bytes(input_tensor)


def deserialize_bytes_tensor(encoded_tensor: bytes) -> np.ndarray[Any, Any]:
    """Return the elements of a BYTES tensor's wire form, as a flat object array of bytes."""
    items: list[bytes] = []
    data = bytes(encoded_tensor)
    at = 0
    while at < len(data):
        end = at + 4 + int.from_bytes(data[at : at + 4], "little")
        if end > len(data):
            raise ValueError("the lengths in an encoded BYTES tensor go beyond its end")
        items.append(data[at + 4 : end])
        at = end
    made = np.empty(len(items), dtype=np.object_)
    made[:] = items
    return made
