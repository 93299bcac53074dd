"""Triton's interface for Python models, which import it as `triton_python_backend_utils`.

`ModelConfig` is the configuration that `auto_complete_config` of a model completes.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from shmserve.errors import suggestion
from shmserve.ipc.tensors.arrays import NUMPY_DTYPES, encode_bytes
from shmserve.ipc.tensors.datatypes import FROM_CONFIG
from shmserve.workers.backends.python.errors import TritonError, TritonModelException
from shmserve.workers.backends.python.metrics import MetricFamily
from shmserve.workers.backends.python.request import (
    RELEASE_ALL,
    RELEASE_RESCHEDULE,
    RESPONSE_COMPLETE_FINAL,
    InferenceRequest,
    InferenceResponse,
    InferenceResponseSender,
    InferenceTrace,
    MemoryType,
    PreferredMemory,
    ReceivedRequest,
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
from shmserve.workers.backends.python.tensor import TYPE_NUMBERS, Tensor

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


def __getattr__(name: str) -> Any:
    """Raise AttributeError with the name by which models import this module."""
    text = f"module 'triton_python_backend_utils' has no attribute '{name}'"
    raise AttributeError(text + suggestion(name, __all__))


_NUMPY_TYPES: dict[str, Any] = {name: dtype.type for name, dtype in NUMPY_DTYPES.items()}
TRITON_STRING_TO_NUMPY: dict[str, Any] = {
    config: bool if name == "BOOL" else _NUMPY_TYPES[name]
    for config, name in FROM_CONFIG.items()
    if name in NUMPY_DTYPES
}
_NUMPY_BY_NUMBER = {TYPE_NUMBERS[name]: kind for name, kind in _NUMPY_TYPES.items()}


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """Return the input of a request with this name, or None."""
    if type(inference_request) is ReceivedRequest or isinstance(inference_request, ReceivedRequest):
        return inference_request.tensors.get(name)
    return _find_tensor(inference_request.inputs(), name)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """Return the output of a response with this name, or None."""
    return _find_tensor(inference_response.output_tensors(), name)


def _find_tensor(tensors: list[Tensor], name: str) -> Tensor | None:
    return next((tensor for tensor in tensors if tensor.name() == name), None)


def get_input_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Return the entry of a configuration for an input, or None."""
    return next((item for item in model_config.get("input", ()) if item["name"] == name), None)


def get_output_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Return the entry of a configuration for an output, or None."""
    return next((item for item in model_config.get("output", ()) if item["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: dict[str, Any]) -> bool:
    """Return whether a configuration describes a decoupled model."""
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """Return the numpy type of a configuration's data_type (TYPE_FP32, ...), or raise KeyError."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def triton_to_numpy_type(data_type: int) -> Any:
    """Return the numpy type for a value of Triton's datatype enum; None if numpy has none."""
    return _NUMPY_BY_NUMBER.get(data_type)


def numpy_to_triton_type(data_type: Any) -> int | None:
    """Return the value of Triton's datatype enum for a numpy type; None if there is none."""
    dtype = np.dtype(data_type)
    if dtype.kind == "S":
        return TYPE_NUMBERS["BYTES"]
    return next((TYPE_NUMBERS[name] for name, kind in NUMPY_DTYPES.items() if kind == dtype), None)


def serialize_byte_tensor(input_tensor: np.ndarray[Any, Any]) -> bytes | None:
    """Return the wire form of a BYTES tensor, or None for another tensor.

    Each element is a 4-byte length and its bytes.
    """
    if input_tensor.dtype.kind not in "OS":
        return None
    return encode_bytes(input_tensor)


def deserialize_bytes_tensor(encoded_tensor: bytes) -> np.ndarray[Any, Any]:
    """Return the elements of a BYTES tensor's wire form, as a flat object array of bytes."""
    elements: list[bytes] = []
    encoded_bytes = bytes(encoded_tensor)
    position = 0
    while position < len(encoded_bytes):
        end = position + 4 + int.from_bytes(encoded_bytes[position : position + 4], "little")
        if end > len(encoded_bytes):
            raise ValueError("the lengths in an encoded BYTES tensor go beyond its end")
        elements.append(encoded_bytes[position + 4 : end])
        position = end
    strings = np.empty(len(elements), dtype=np.object_)
    strings[:] = elements
    return strings


_LOCATION_TEXT = "in auto-complete-config function for model"


class ModelConfig:
    """A model's configuration, which may be extended but not contradicted.

    The constructor takes the configuration as JSON. The setters raise ValueError for a
    contradiction.
    """

    def __init__(self, model_config: str) -> None:
        self._model_config: dict[str, Any] = json.loads(model_config)

    def as_dict(self) -> dict[str, Any]:
        """Return the current configuration, for reading."""
        return self._model_config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Set the maximum batch size; raise ValueError if a larger one is configured."""
        configured_size = self._model_config["max_batch_size"]
        if configured_size > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {configured_size}, but {_LOCATION_TEXT} "
                f"'{self._name}' specified max_batch_size {max_batch_size}"
            )
        self._model_config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Enable the dynamic batcher; raise ValueError if another scheduler is configured."""
        for scheduler in ("sequence_batching", "ensemble_scheduling"):
            if scheduler in self._model_config:
                raise ValueError(
                    f"Configuration specified scheduling_choice as '{scheduler}', but "
                    f"auto-complete-config function for model '{self._name}' tries to set "
                    "scheduling_choice as 'dynamic_batching'"
                )
        self._model_config.setdefault("dynamic_batching", {})

    def set_model_transaction_policy(self, transaction_policy_dict: dict[str, Any]) -> None:
        """Set {"decoupled": bool}; raise ValueError if the opposite is configured."""
        if transaction_policy_dict.keys() - {"decoupled"}:
            raise ValueError(
                "model transaction property in auto-complete-config function for model "
                f"'{self._name}' contains property other than 'decoupled'."
            )
        policy = self._model_config.setdefault("model_transaction_policy", {})
        if "decoupled" not in transaction_policy_dict:
            return
        is_decoupled = transaction_policy_dict["decoupled"]
        if policy.get("decoupled", is_decoupled) != is_decoupled:
            raise ValueError(
                f"trying to change decoupled property in auto-complete-config for model "
                f"'{self._name}', which is already set to '{policy['decoupled']}'."
            )
        policy["decoupled"] = is_decoupled

    def add_input(self, input: dict[str, Any]) -> None:  # noqa: A002 - models may name it
        """Add {"name", "data_type", "dims", optionally "optional"}.

        Raise ValueError if the configured input differs.
        """
        self._add_tensor("input", input, "name", "data_type", "dims", "optional")

    def add_output(self, output: dict[str, Any]) -> None:
        """Add {"name", "data_type", "dims"}; raise ValueError if the configured output differs."""
        self._add_tensor("output", output, "name", "data_type", "dims")

    @property
    def _name(self) -> str:
        name: str = self._model_config.get("name", "")  # tests of models may omit it
        return name

    def _check_properties(
        self, kind: str, tensor: dict[str, Any], allowed_keys: tuple[str, ...]
    ) -> None:
        if "name" not in tensor:
            raise ValueError(f"{kind} {_LOCATION_TEXT} '{self._name}' is missing 'name' property.")
        subject = f"{kind} '{tensor['name']}' {_LOCATION_TEXT} '{self._name}'"
        if tensor.keys() - {*allowed_keys}:
            *first_keys, last_key = map(repr, allowed_keys)
            allowed_text = f"{', '.join(first_keys)} and {last_key}"
            raise ValueError(f"{subject} contains property other than {allowed_text}.")
        for key in ("data_type", "dims"):
            if key not in tensor:
                raise ValueError(f"{subject} is missing '{key}' property.")

    def _add_tensor(self, kind: str, tensor: dict[str, Any], *allowed_keys: str) -> None:
        self._check_properties(kind, tensor, allowed_keys)
        tensors: list[dict[str, Any]] = self._model_config[kind]
        for configured_tensor in tensors:
            if configured_tensor["name"] == tensor["name"]:
                self._check_agreement(kind, configured_tensor, tensor)
                configured_tensor.update(tensor)
                return
        tensors.append(tensor)

    def _check_agreement(
        self, kind: str, configured: dict[str, Any], provided: dict[str, Any]
    ) -> None:
        if configured["data_type"] not in ("TYPE_INVALID", provided["data_type"]):
            raise ValueError(
                f"unable to load model '{self._name}', configuration expects datatype "
                f"{configured['data_type']} for {kind} '{provided['name']}', model provides "
                f"{provided['data_type']}"
            )
        for key in ("dims", "optional"):
            if (
                key not in configured
                or key not in provided
                or (key == "dims" and not configured[key])
            ):
                continue
            if configured[key] != provided[key]:
                raise ValueError(
                    f"model '{self._name}', tensor '{provided['name']}': the model expects {key} "
                    f"{provided[key]} but the model configuration specifies {key} {configured[key]}"
                )
