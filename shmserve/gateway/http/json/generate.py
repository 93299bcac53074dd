"""The flat JSON of generate and generate_stream to a request, and responses to it (pure).

    {"TEXT": "hi", "temperature": 0.5, "parameters": {...}}

Each member that is named like one of the model's inputs is that input, a scalar or a list; each
other one is a parameter; of a model with sequences sequence_id, sequence_start and sequence_end are
the request's own. A response has the outputs by name, in their order, one element as a
scalar and several as a list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from shmserve.errors import InvalidArgument, ShmserveError
from shmserve.gateway.http.json.infer_request import (
    parameter_value,
    request_id,
    take_sequence,
    tensor_bytes,
)
from shmserve.gateway.http.json.parser import JsonFault
from shmserve.gateway.inference.request import InferInput, InferRequest, check_number
from shmserve.ipc.tensors.datatypes import element_count
from shmserve.ipc.tensors.descriptors import TensorRef

_NESTED = "parameters"


def parse_generate(
    body: Any, inputs: Mapping[str, tuple[str, Sequence[int]]], stateful: bool = False
) -> InferRequest:
    """The request that a parsed body makes; `inputs` has each input's datatype and shape as the
    model's metadata show them, -1 for any size. `stateful`: the model has sequences.

    Raises JsonFault or InvalidArgument, in Triton's words.
    """
    if type(body) is not dict:
        raise JsonFault("attempt to get members for non-object")
    request = InferRequest(request_id(body), [], [])
    _take_members(request, body, inputs, nested=False)
    if stateful:
        take_sequence(request, request.parameters)
    return request


def _take_members(
    request: InferRequest,
    members: dict[str, Any],
    inputs: Mapping[str, tuple[str, Sequence[int]]],
    *,
    nested: bool,
) -> None:
    check_number(members, "parameters")
    for key, value in members.items():
        if key == _NESTED and not nested:
            if key in inputs:
                raise InvalidArgument(
                    f"Keyword '{key}' for nested schema also given as input tensor name"
                )
            _take_nested(request, value, inputs)
        elif key in inputs:
            request.inputs.append(_tensor(key, value, *inputs[key]))
        else:
            request.parameters[key] = parameter_value(key, value)


def _take_nested(
    request: InferRequest, value: Any, inputs: Mapping[str, tuple[str, Sequence[int]]]
) -> None:
    if type(value) is not dict:
        raise JsonFault(
            f"Expected JSON object for keyword: '{_NESTED}': "
            "attempt to access JSON non-object as object"
        )
    try:
        _take_members(request, value, inputs, nested=True)
    except ShmserveError as error:
        raise type(error)(f"Converting keyword: '{_NESTED}': {error.message}") from None


def _tensor(name: str, value: Any, datatype: str, described: Sequence[int]) -> InferInput:
    values = value if type(value) is list else [value]
    shape = _shape(len(values), described)
    if shape is None:
        raise InvalidArgument(
            f"The schema can not convert input '{name}' to tensor with proper shape"
        )
    tensor = InferInput(name, datatype, shape, len(values), values)
    tensor.data = tensor_bytes(tensor)
    return tensor


def _shape(count: int, described: Sequence[int]) -> tuple[int, ...] | None:
    """The shape of `count` elements: the innermost dimension of any size takes what the fixed ones
    leave, others are 1; None where that is no whole number."""
    fixed = element_count([dim for dim in described if dim >= 0])
    rest, over = divmod(count, fixed) if fixed else (0, count)
    shape = list(described)
    for at in reversed(range(len(shape))):
        if shape[at] < 0:
            shape[at], rest = rest, 1
    return None if over or element_count(shape) != count else tuple(shape)


def response_json(
    request: InferRequest,
    name: str,
    version: str,
    outputs: Sequence[tuple[TensorRef, bytes]],
    parameters: dict[str, Any],
) -> bytes:
    """A response; `outputs` are tensors, each with its elements as a JSON array."""
    body: dict[str, Any] = {}
    for tensor, array in sorted(outputs, key=lambda pair: pair[0].name):
        one = element_count(tensor.shape) == 1
        body[tensor.name] = orjson.Fragment(array[1:-1] if one else array)
    if request.id:
        body["id"] = request.id
    body["model_name"] = name
    body["model_version"] = version
    return orjson.dumps({**body, **parameters})
