"""The JSON part of an inference response (pure)."""

from __future__ import annotations

from typing import Any

import orjson

from shmserve.errors import Internal
from shmserve.ipc.tensors import ITEM_SIZE, Inferred, TensorRef, element_count


def output_entry(tensor: TensorRef) -> dict[str, Any]:
    """What every output begins with."""
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}


def check_size(tensor: TensorRef, data: bytes | memoryview) -> None:
    """The model must have given as many bytes as its shape says; raises Internal."""
    item = ITEM_SIZE[tensor.datatype]
    if item and len(data) != element_count(tensor.shape) * item:
        raise Internal(f"output '{tensor.name}' does not have the byte size of its shape")


def response_json(
    request_id: str, name: str, version: str, answer: Inferred, entries: list[dict[str, Any]]
) -> bytes:
    """The response's JSON, keys in Triton's order."""
    body: dict[str, Any] = {"id": request_id} if request_id else {}
    body["model_name"] = name
    body["model_version"] = version
    if answer.parameters:
        body["parameters"] = answer.parameters
    body["outputs"] = entries
    return orjson.dumps(body)
