"""The codec of inferences in JSON: requests to values, with Triton's checks, and responses to JSON.

The header of a request is the parsed JSON object. Its binary tensors follow it in the body, in the
order of the inputs. A response is JSON text, followed by the binary outputs in order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from operator import call
from typing import Any, NamedTuple

import orjson

from shmserve.errors import InvalidArgument, clip
from shmserve.gateway.http.json import tensors
from shmserve.gateway.http.json.parser import (
    JsonFault,
    check_boolean,
    check_unsigned,
    find_misspelt,
    is_unsigned,
    member_array,
    member_string,
    mistyped_error,
)
from shmserve.gateway.inference.infer_request import (
    InferInput,
    InferOutput,
    InferRequest,
    RegionRange,
    check_correlation_id,
    check_member_count,
)
from shmserve.ipc.tensors.datatypes import ITEM_SIZE, element_count
from shmserve.ipc.tensors.descriptors import MAX_INT64
from shmserve.ipc.tensors.schemas import SEQUENCE_END, SEQUENCE_START, Inferred, tensor_schema
from shmserve.ipc.tensors.signature import check_extent

logger = logging.getLogger(__name__)

_MAX_DIMS = 1024  # maximum number of dimensions of an input

_ONE_SOURCE_EXPECTED = (
    "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
    "'shared_memory_region' in 'parameters'. "
)
_RESERVED_KEYS = (
    "parameter keys starting with 'triton_' are reserved for Triton usage "
    "and should not be specified."
)
TOO_LARGE = (
    " has a byte_size ({size} bytes) that exceeds the maximum allowed value of {limit} bytes. "
    "Use --http-max-input-size to increase the limit."
)
_NO_PARAMETERS: dict[str, Any] = {}
_CUT_MARK = b"\0"  # a byte that no JSON text contains
_NULL = b"null"  # orjson's text for numbers that are not finite


def request_id(header: Any) -> str:
    """Return the id of a request, or "".

    Raises:
        JsonFault: The id is not a string.
    """
    value = header.get("id", "") if type(header) is dict else ""
    if type(value) is not str:
        raise mistyped_error("id", "string")
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
        _read_parameters(request, header["parameters"])
    binary_size = 0
    inputs = member_array(header, "inputs")
    check_member_count(inputs, "inputs")
    for member in inputs:
        tensor = _read_input(member, json_limit)
        size = tensor.binary_size
        if size >= 0:
            binary_size += size
            if binary_size > tail_size:
                raise InvalidArgument(
                    f"unexpected size for input '{tensor.name}', expecting "
                    f"{binary_size - tail_size} additional bytes for model '{model}'"
                )
        request.inputs.append(tensor)
    if binary_size != tail_size:
        raise InvalidArgument(f"unexpected additional input data for model '{model}'")
    outputs: list[Any] = []
    if "outputs" in header:
        outputs = member_array(header, "outputs")
        check_member_count(outputs, "outputs")
        request.outputs = [_read_output(member) for member in outputs]
    # Checking the first input and output suffices, since clients use the same names in all of them.
    for members in (header, *inputs[:1], *outputs[:1]):
        _warn_of_misspelt(members)
    return request


_warned_names: set[str] = set()


def _warn_of_misspelt(json_object: dict[str, Any]) -> None:
    """Log unknown members whose names resemble a known name, once for each known name."""
    for name, likely_name in find_misspelt(json_object):
        if likely_name not in _warned_names:
            _warned_names.add(likely_name)
            logger.warning(
                "a request has the unknown field '%s' (did you mean '%s'?)", clip(name), likely_name
            )


def decode_data(request: InferRequest) -> None:
    """Decode the inputs whose values are in the JSON header.

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
        raise mistyped_error("data", "array", tensor.name)
    return tensors.decode(data, tensor.datatype, tensor.count, tensor.name)


def _read_input(member: Any, json_limit: int) -> InferInput:
    if type(member) is not dict:
        raise InvalidArgument(_ONE_SOURCE_EXPECTED + "But no field is set")
    parameters = member.get("parameters")
    if type(parameters) is not dict:
        parameters = _NO_PARAMETERS
    is_binary = "binary_data_size" in parameters
    is_in_region = "shared_memory_region" in parameters
    is_inline = "data" in member
    if is_binary + is_in_region + is_inline != 1:
        raise _source_error(is_inline, is_binary, is_in_region)
    name = member_string(member, "name")
    datatype = member_string(member, "datatype")
    item_size = ITEM_SIZE.get(datatype)
    shape = member_array(member, "shape")
    if len(shape) > _MAX_DIMS:
        text = f"input '{name}' may have at most {_MAX_DIMS} dimensions, got {len(shape)}"
        raise InvalidArgument(text)
    for dim in shape:
        if not is_unsigned(dim):
            raise mistyped_error("shape", "unsigned-integer", name)
    count = element_count(shape)
    if item_size is None:
        raise InvalidArgument(
            f"invalid datatype for input {name} ('{clip(datatype)}'; allowed: "
            f"{', '.join(ITEM_SIZE)})"
        )
    if count * (item_size or 1) > MAX_INT64 or count == 0:
        check_extent(name, shape, count, item_size)
    tensor = InferInput(name, datatype, tuple(shape), count)
    if is_binary:
        tensor.binary_size = check_unsigned(parameters["binary_data_size"], "binary_data_size")
    elif is_in_region:
        tensor.memory_range = _read_range(parameters)
    else:
        tensor.data = member["data"]
        if count * item_size > json_limit:
            too_large_text = TOO_LARGE.format(size=count * item_size, limit=json_limit)
            raise InvalidArgument(f"JSON input '{name}'{too_large_text}")
    return tensor


def _source_error(is_inline: bool, is_binary: bool, is_in_region: bool) -> InvalidArgument:
    names = ("'data'", "'binary_data_size'", "'shared_memory_region'")
    source_flags = zip(names, (is_inline, is_binary, is_in_region), strict=True)
    source_names = " ".join(name for name, is_set in source_flags if is_set)
    found_text = f"But set {source_names}" if source_names else "But no field is set"
    return InvalidArgument(_ONE_SOURCE_EXPECTED + found_text)


def _read_range(parameters: dict[str, Any]) -> RegionRange:
    region = parameters["shared_memory_region"]
    if type(region) is not str:
        raise mistyped_error("shared_memory_region", "string")
    offset = parameters.get("shared_memory_offset", 0)
    size = parameters.get("shared_memory_byte_size", 0)
    start = check_unsigned(offset, "shared_memory_offset")
    return RegionRange(region, start, check_unsigned(size, "shared_memory_byte_size"))


def _read_output(member: Any) -> InferOutput:
    if type(member) is not dict:
        text = "Unable to parse 'name': attempt to access non-existing object member 'name'"
        raise JsonFault(text)
    name = member_string(member, "name")
    parameters = member.get("parameters")
    if type(parameters) is not dict:
        return InferOutput(name, False)
    is_binary = "binary_data" in parameters and check_boolean(
        parameters["binary_data"], "binary_data"
    )
    class_count = 0
    if "classification" in parameters:
        class_count = _read_class_count(parameters["classification"])
    region_range = None
    if "shared_memory_region" in parameters:
        region_range = _read_range(parameters)
        for key, is_set in (("classification", class_count), ("binary_data", is_binary)):
            if is_set:
                text = f"Output can't set both 'shared_memory_region' and '{key}'"
                raise InvalidArgument(text)
    else:
        for key in ("shared_memory_offset", "shared_memory_byte_size"):
            if key in parameters:
                check_unsigned(parameters[key], key)
    return InferOutput(name, is_binary, region_range, class_count)


def _read_class_count(value: Any) -> int:
    if not is_unsigned(value):
        raise JsonFault(
            "Unable to set 'classification': "
            "attempt to access JSON non-unsigned-integer as unsigned-integer"
        )
    return value & 0xFFFF_FFFF  # the lower 32 bits, as in Triton; 0 means no classification


def _read_parameters(request: InferRequest, members: Any) -> None:
    if type(members) is not dict:
        raise JsonFault("failed to get request params.: attempt to get members for non-object")
    check_member_count(members, "parameters")
    for key, value in members.items():
        match key:
            case "sequence_id":
                if type(value) is not str and not is_unsigned(value):
                    raise mistyped_error(key, "string")
                request.correlation_id = check_correlation_id(value)
            case "sequence_start":
                request.flags |= SEQUENCE_START * check_boolean(value, key)
            case "sequence_end":
                request.flags |= SEQUENCE_END * check_boolean(value, key)
            case "priority":
                request.priority = check_unsigned(value, key)
            case "timeout":
                request.timeout_us = check_unsigned(value, key)
            case "deadline_us":
                request.deadline_us = check_unsigned(value, key)
            case "binary_data_output":
                request.binary = check_boolean(value, key)
            case _ if key.startswith("triton_"):
                raise InvalidArgument(_RESERVED_KEYS)
            case _:
                request.parameters[key] = parameter_value(key, value)


_SEQUENCE_PARAMETERS = ("sequence_id", "sequence_start", "sequence_end")


def move_sequence_parameters(request: InferRequest, parameters: dict[str, Any]) -> None:
    """Move the sequence parameters from `parameters` to the request.

    Raises:
        JsonFault: A parameter has the wrong type.
    """
    names = [name for name in _SEQUENCE_PARAMETERS if name in parameters]
    _read_parameters(request, {name: parameters.pop(name) for name in names})


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
    parameter: str | int | float | bool = value
    return parameter


class SentOutput(NamedTuple):
    """An output that is sent to the client.

    Attributes:
        byte_size: The size, or -1 for BYTES, whose size varies.
        binary: Whether the output follows the JSON text; otherwise it is an array in the text.
        position: The position of the output in the response.
        unpack: Returns the values of the array; None if `tensors.encode` is needed.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    byte_size: int
    binary: bool  # whether the output follows the JSON text
    position: int  # in the response
    unpack: Callable[[bytes], tuple[Any, ...]] | None


class JsonResponseTemplate:
    """A template for responses of one schema, without the id and the tensors' values.

    Attributes:
        outputs: The outputs that are sent. Outputs in regions of the client are not sent.
    """

    __slots__ = ("_format", "_is_all_binary", "_output_count", "_sizes", "_unpackers", "outputs")

    def __init__(self, request: InferRequest, name: str, version: str, response: Inferred) -> None:
        requested_outputs = {output.name: output for output in request.outputs}
        self.outputs: list[SentOutput] = []
        self._output_count = len(response.outputs)
        entries: list[dict[str, Any]] = []
        for index, tensor in enumerate(response.outputs):
            entry: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype}
            entry["shape"] = tensor.shape
            entries.append(entry)
            output = requested_outputs.get(tensor.name)
            if output is not None and output.memory_range is not None:
                continue
            is_binary = output.binary if output is not None else request.binary
            schema = tensor_schema(tensor.name, tensor.datatype, tensor.shape)
            size = schema.byte_size
            if is_binary:
                binary_size = size if size >= 0 else orjson.Fragment(_CUT_MARK)
                entry["parameters"] = {"binary_data_size": binary_size}
            else:
                entry["data"] = orjson.Fragment(_CUT_MARK)
            unpack = tensors.create_unpacker(tensor.datatype, tensor.shape)
            self.outputs.append(SentOutput(*schema, is_binary, index, unpack))
        text = _encode_members(name, version, response, entries)
        self._format = text.replace(b"%", b"%%").replace(_CUT_MARK, b"%b")
        self._sizes = [output.byte_size for output in self.outputs]
        # `fill` is fast for most responses: their outputs are all JSON numbers, or all binary.
        is_uniform = len(self.outputs) == self._output_count and min(self._sizes, default=-1) >= 0
        self._is_all_binary = is_uniform and all(output.binary for output in self.outputs)
        unpackers = [item.unpack for item in self.outputs if not item.binary and item.unpack]
        self._unpackers = unpackers if is_uniform and len(unpackers) == self._output_count else None

    def encode_json(self, request_id: str, text_values: Sequence[bytes]) -> bytes:
        """Return the JSON text.

        Args:
            request_id: The id of the request; it may be empty.
            text_values: The arrays of the outputs that are not binary, and the sizes of the binary
                BYTES outputs, in the order of the outputs.
        """
        text = self._format % tuple(text_values)
        return b'{"id":%b,%b' % (orjson.dumps(request_id), text) if request_id else b"{" + text

    def encode_pieces(self, request_id: str, text_values: Sequence[Sequence[bytes]]) -> list[bytes]:
        """Return the JSON text as `encode_json` does, without copying the pieces of the values."""
        text = self.encode_json(request_id, [_CUT_MARK] * len(text_values))
        first_text, *texts = text.split(_CUT_MARK)
        pieces = [first_text]
        for value_pieces, text in zip(text_values, texts, strict=True):
            pieces += (*value_pieces, text)
        return pieces

    def fill(self, request_id: str, data: Sequence[Any]) -> tuple[bytes, Sequence[bytes]] | None:
        """Return the JSON text of a response, and its binary data.

        Args:
            request_id: The id of the request; it may be empty.
            data: The field `data` of the scheduler's message, with the bytes of each output.

        Returns:
            None if the data of an output is not in the message, or has another size than its
            shape, or if the number of outputs differs.

        Raises:
            Internal: The bytes of an output do not match its shape.
        """
        if self._is_all_binary or self._unpackers:
            if {*map(type, data)} != {bytes} or list(map(len, data)) != self._sizes:
                return None
            if self._is_all_binary:
                return self.encode_json(request_id, ()), data
            arrays = list(map(orjson.dumps, map(call, self._unpackers, data)))  # type: ignore[arg-type]
            if _NULL not in b"".join(arrays):
                return self.encode_json(request_id, arrays), ()
        elif not self.outputs and len(data) == self._output_count:
            return self.encode_json(request_id, ()), ()
        return self._fill_mixed(request_id, data)

    def _fill_mixed(
        self, request_id: str, data: Sequence[Any]
    ) -> tuple[bytes, Sequence[bytes]] | None:
        if len(data) != self._output_count:
            return None
        text_values: list[bytes] = []
        binary_parts: list[bytes] = []
        for name, datatype, shape, byte_size, is_binary, position, unpack in self.outputs:
            data_bytes = data[position]
            if type(data_bytes) is not bytes or len(data_bytes) != byte_size >= 0:
                return None
            if is_binary:
                binary_parts.append(data_bytes)
                if byte_size < 0:
                    text_values.append(b"%d" % len(data_bytes))
                continue
            text = _NULL if unpack is None else orjson.dumps(unpack(data_bytes))
            if _NULL in text:
                text = tensors.encode(data_bytes, datatype, shape, name)
            text_values.append(text)
        return self.encode_json(request_id, text_values), binary_parts


def _encode_members(
    name: str, version: str, response: Inferred, entries: list[dict[str, Any]]
) -> bytes:
    """Return the JSON members that follow the id, with keys in Triton's order."""
    body: dict[str, Any] = {"model_name": name, "model_version": version}
    if response.parameters:
        body["parameters"] = response.parameters
    body["outputs"] = entries
    return orjson.dumps(body)[1:]
