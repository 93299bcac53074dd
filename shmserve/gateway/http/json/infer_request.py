"""The decoder of the JSON part of an inference request, with Triton's checks and error texts.

The header is the parsed JSON object. The binary tensors follow it in the body, in the order of the
inputs.
"""

from __future__ import annotations

import logging
from typing import Any

from shmserve.errors import InvalidArgument, clip
from shmserve.gateway.http.json import tensors
from shmserve.gateway.http.json.parser import (
    JsonFault,
    boolean,
    member_array,
    member_string,
    misspelt,
    mistyped,
    unsigned,
)
from shmserve.gateway.inference.request import (
    InferInput,
    InferOutput,
    InferRequest,
    RegionRange,
    check_correlation_id,
    check_member_count,
)
from shmserve.ipc.tensors.datatypes import ITEM_SIZE, element_count
from shmserve.ipc.tensors.descriptors import MAX_INT64, MAX_UINT64
from shmserve.ipc.tensors.inference import SEQUENCE_END, SEQUENCE_START
from shmserve.ipc.tensors.signature import check_extent

logger = logging.getLogger(__name__)

_MOST_DIMS = 1024  # maximum number of dimensions of an input

_SOURCES = (
    "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
    "'shared_memory_region' in 'parameters'. "
)
_RESERVED = (
    "parameter keys starting with 'triton_' are reserved for Triton usage "
    "and should not be specified."
)
TOO_LARGE = (
    " has a byte_size ({size} bytes) that exceeds the maximum allowed value of {limit} bytes. "
    "Use --http-max-input-size to increase the limit."
)
_NOTHING: dict[str, Any] = {}


def request_id(header: Any) -> str:
    """Return the id of a request, or "".

    Raises:
        JsonFault: The id is not a string.
    """
    value = header.get("id", "") if type(header) is dict else ""
    if type(value) is not str:
        raise mistyped("id", "string")
    return value


def parse_request(header: Any, tail_size: int, model: str, json_limit: int) -> InferRequest:
    """Return the request in a header.

    Args:
        header: The parsed JSON object.
        tail_size: The number of bytes of the binary tensors.
        model: The name of the model, for error texts.
        json_limit: The limit of the bytes of each tensor in JSON.

    Raises:
        JsonFault: A value has the wrong type.
        InvalidArgument: The request is invalid.
        Unsupported: The id of the sequence is too long.
    """
    request = InferRequest(request_id(header), [], [])
    if type(header) is dict and "parameters" in header:
        _take_parameters(request, header["parameters"])
    at = 0
    inputs = member_array(header, "inputs")
    check_member_count(inputs, "inputs")
    for raw in inputs:
        tensor = _input(raw, json_limit)
        size = tensor.binary_size
        if size >= 0:
            at += size
            if at > tail_size:
                raise InvalidArgument(
                    f"unexpected size for input '{tensor.name}', expecting "
                    f"{at - tail_size} additional bytes for model '{model}'"
                )
        request.inputs.append(tensor)
    if at != tail_size:
        raise InvalidArgument(f"unexpected additional input data for model '{model}'")
    outputs: list[Any] = []
    if "outputs" in header:
        outputs = member_array(header, "outputs")
        check_member_count(outputs, "outputs")
        request.outputs = [_output(raw) for raw in outputs]
    # The first input and output are enough, because clients write all of them alike.
    for holder in (header, *inputs[:1], *outputs[:1]):
        _warn_of_misspelt(holder)
    return request


_warned_of: set[str] = set()


def _warn_of_misspelt(holder: dict[str, Any]) -> None:
    """Log ignored members with names that resemble known ones, once for each known name."""
    for name, likely in misspelt(holder):
        if likely not in _warned_of:
            _warned_of.add(likely)
            logger.warning(
                "a request has the unknown field '%s'; did its client mean '%s'?",
                clip(name),
                likely,
            )


def decode_data(request: InferRequest) -> None:
    """Decode the inputs in JSON.

    Raises:
        ShmserveError: The values of an input do not match its datatype or shape.
    """
    for tensor in request.inputs:
        if tensor.memory_range is None and tensor.binary_size < 0:
            tensor.data = tensor_bytes(tensor)


def tensor_bytes(tensor: InferInput) -> bytes:
    """Return the bytes of an input in JSON.

    Raises:
        ShmserveError: The values do not match the datatype or the shape.
    """
    data = tensor.data
    if type(data) is bytes:
        return data  # a large array was decoded earlier
    if not tensor.count:
        return b""
    if type(data) is not list:
        raise mistyped("data", "array", tensor.name)
    return tensors.decode(data, tensor.datatype, tensor.count, tensor.name)


def _input(raw: Any, json_limit: int) -> InferInput:
    if type(raw) is not dict:
        raise InvalidArgument(_SOURCES + "But no field is set")
    parameters = raw.get("parameters")
    if type(parameters) is not dict:
        parameters = _NOTHING
    binary = "binary_data_size" in parameters
    region = "shared_memory_region" in parameters
    inline = "data" in raw
    if binary + region + inline != 1:
        raise _source_error(inline, binary, region)
    name = member_string(raw, "name")
    datatype = member_string(raw, "datatype")
    item = ITEM_SIZE.get(datatype)
    shape = member_array(raw, "shape")
    if len(shape) > _MOST_DIMS:
        raise InvalidArgument(
            f"input '{name}' may have at most {_MOST_DIMS} dimensions, got {len(shape)}"
        )
    for dim in shape:
        if type(dim) is not int or not 0 <= dim <= MAX_UINT64:
            raise mistyped("shape", "unsigned-integer", name)
    count = element_count(shape)
    if item is None:
        raise InvalidArgument(
            f"invalid datatype for input {name} ('{clip(datatype)}'; allowed: "
            f"{', '.join(ITEM_SIZE)})"
        )
    if count * (item or 1) > MAX_INT64 or count == 0:
        check_extent(name, shape, count, item)
    tensor = InferInput(name, datatype, tuple(shape), count)
    if binary:
        tensor.binary_size = unsigned(parameters["binary_data_size"], "binary_data_size")
    elif region:
        tensor.memory_range = _range(parameters)
    else:
        tensor.data = raw["data"]
        if count * item > json_limit:
            excess = TOO_LARGE.format(size=count * item, limit=json_limit)
            raise InvalidArgument(f"JSON input '{name}'{excess}")
    return tensor


def _source_error(inline: bool, binary: bool, region: bool) -> InvalidArgument:
    names = ("'data'", "'binary_data_size'", "'shared_memory_region'")
    sources = zip(names, (inline, binary, region), strict=True)
    text = " ".join(name for name, is_set in sources if is_set)
    return InvalidArgument(_SOURCES + (f"But set {text}" if text else "But no field is set"))


def _range(parameters: dict[str, Any]) -> RegionRange:
    region = parameters["shared_memory_region"]
    if type(region) is not str:
        raise mistyped("shared_memory_region", "string")
    offset = parameters.get("shared_memory_offset", 0)
    size = parameters.get("shared_memory_byte_size", 0)
    return RegionRange(
        region,
        unsigned(offset, "shared_memory_offset"),
        unsigned(size, "shared_memory_byte_size"),
    )


def _output(raw: Any) -> InferOutput:
    if type(raw) is not dict:
        raise JsonFault(
            "Unable to parse 'name': attempt to access non-existing object member 'name'"
        )
    name = member_string(raw, "name")
    parameters = raw.get("parameters")
    if type(parameters) is not dict:
        return InferOutput(name, False)
    binary = "binary_data" in parameters and boolean(parameters["binary_data"], "binary_data")
    classes = 0
    if "classification" in parameters:
        classes = _classes(parameters["classification"])
    region_range = None
    if "shared_memory_region" in parameters:
        region_range = _range(parameters)
        for conflicting, set_too in (("classification", classes), ("binary_data", binary)):
            if set_too:
                raise InvalidArgument(
                    f"Output can't set both 'shared_memory_region' and '{conflicting}'"
                )
    else:
        for word in ("shared_memory_offset", "shared_memory_byte_size"):
            if word in parameters:
                unsigned(parameters[word], word)
    return InferOutput(name, binary, region_range, classes)


def _classes(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MAX_UINT64:
        raise JsonFault(
            "Unable to set 'classification': "
            "attempt to access JSON non-unsigned-integer as unsigned-integer"
        )
    return value & 0xFFFF_FFFF  # the lower 32 bits, as in Triton; 0 means no classification


def _take_parameters(request: InferRequest, raw: Any) -> None:
    if type(raw) is not dict:
        raise JsonFault("failed to get request params.: attempt to get members for non-object")
    check_member_count(raw, "parameters")
    for key, value in raw.items():
        match key:
            case "sequence_id":
                if type(value) is not str and (
                    type(value) is not int or not 0 <= value <= MAX_UINT64
                ):
                    raise mistyped(key, "string")
                request.correlation_id = check_correlation_id(value)
            case "sequence_start":
                request.flags |= SEQUENCE_START * boolean(value, key)
            case "sequence_end":
                request.flags |= SEQUENCE_END * boolean(value, key)
            case "priority":
                request.priority = unsigned(value, key)
            case "timeout":
                request.timeout_us = unsigned(value, key)
            case "deadline_us":
                request.deadline_us = unsigned(value, key)
            case "binary_data_output":
                request.binary = boolean(value, key)
            case _:
                request.parameters[key] = _custom(key, value)


_OF_SEQUENCES = ("sequence_id", "sequence_start", "sequence_end")


def take_sequence(request: InferRequest, parameters: dict[str, Any]) -> None:
    """Move the parameters of the sequence to the request.

    Raises:
        JsonFault: A parameter has the wrong type.
    """
    _take_parameters(request, {n: parameters.pop(n) for n in _OF_SEQUENCES if n in parameters})


def _custom(key: str, value: Any) -> str | int | float | bool:
    if key.startswith("triton_"):
        raise InvalidArgument(_RESERVED)
    return parameter_value(key, value)


def parameter_value(key: str, value: Any) -> str | int | float | bool:
    """Return a request parameter as models receive it.

    Raises:
        InvalidArgument: The value has another type.
    """
    if type(value) not in (str, int, bool, float):
        raise InvalidArgument(
            f"parameter '{key}' has invalid type. It should be either 'int', 'bool', or 'string'."
        )
    if type(value) is int and value > MAX_INT64:
        return float(value)  # integers beyond int64 become floats
    checked: str | int | float | bool = value
    return checked
