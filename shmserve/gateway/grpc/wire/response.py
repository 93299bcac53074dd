"""The serializer of ModelInferResponse, which copies the bytes of tensors once.

Responses of one schema differ only in the id and the bytes of the tensors. The other fields are
serialized once and cached. The id and the tensors are appended in protobuf's wire format: the tag,
the length and the bytes of each field, in any order.
"""

from __future__ import annotations

import json
from collections.abc import Container, Sequence
from typing import Any

from shmserve.errors import Internal
from shmserve.gateway.context import GatewayModel
from shmserve.ipc.tensors.schemas import Inferred, tensor_schema
from shmserve.proto.grpc_service_pb2 import (
    InferParameter,
    ModelInferResponse,
    ModelStreamInferResponse,
)

LARGEST_MESSAGE = 2**31 - 1  # maximum message size of protobuf and gRPC

_ID_TAG = b"\x1a"  # the tag of field 3, length-delimited
_RAW_OUTPUT_TAG = b"\x32"  # the tag of field 6
_EMPTY_OUTPUT = _RAW_OUTPUT_TAG + b"\0"  # the field of an output in a region, without contents
_INFER_RESPONSE_TAG = b"\x12"  # the tag of field 2 of ModelStreamInferResponse


class GrpcResponseTemplate:
    """A template for responses of one schema, without the id and the tensors' bytes.

    Args:
        model: The model.
        response: A response with the schema.
        in_regions: The names of the outputs in regions of the client. The messages do not contain
            the bytes of these outputs.
    """

    __slots__ = ("_empty_outputs", "_format", "_output_count", "_prefix", "_sizes")

    def __init__(self, model: GatewayModel, response: Inferred, in_regions: Container[str]) -> None:
        head = ModelInferResponse(model_name=model.name, model_version=model.version)
        # The byte size of each output; -1 for BYTES, whose size varies; None: no contents.
        sizes: list[int | None] = []
        for tensor in response.outputs:
            head.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
            size = tensor_schema(tensor.name, tensor.datatype, tensor.shape).byte_size
            sizes.append(None if tensor.name in in_regions else size)
        for name, value in response.parameters.items():
            set_parameter(head.parameters[name], value)
        self._prefix: bytes = head.SerializeToString()  # the message without id and contents
        self._sizes = sizes
        self._output_count = len(sizes)
        # The encoded outputs if none of them has contents; otherwise b"".
        self._empty_outputs = _EMPTY_OUTPUT * len(sizes) if set(sizes) == {None} else b""
        self._format: bytes | None = None  # the output fields, with %b for each tensor
        if all(size is not None and size >= 0 for size in sizes):
            fields = [_RAW_OUTPUT_TAG + encode_varint(size or 0) for size in sizes]
            self._format = b"".join([field.replace(b"%", b"%%") + b"%b" for field in fields])

    def fill(self, request_id: str, data: Sequence[Any]) -> bytes | None:
        """Return the response to the request with this id.

        Returns:
            None if the data of an output is not in the message, or has another size than its
            shape, or if the number of outputs differs.
        """
        output_fields: bytes | None = None
        if self._format is not None:
            try:
                if list(map(len, data)) == self._sizes:
                    output_fields = self._format % tuple(data)
            except TypeError:  # the data is a memory range, or missing
                return None
        elif len(data) == self._output_count:
            output_fields = self._empty_outputs or self._encode_contents(data)
        if output_fields is None:
            return None
        if not request_id:
            return self._prefix + output_fields
        return b"".join((self._prefix, *_id_field(request_id), output_fields))

    def _encode_contents(self, data: Sequence[Any]) -> bytes | None:
        pieces: list[bytes] = []
        for size, content in zip(self._sizes, data, strict=True):
            if size is None:
                pieces.append(_EMPTY_OUTPUT)
                continue
            if type(content) is not bytes or len(content) != size >= 0:
                return None
            pieces += (_RAW_OUTPUT_TAG, encode_varint(len(content)), content)
        return b"".join(pieces)

    def encode(self, request_id: str, contents: Sequence[bytes | memoryview]) -> bytes:
        """Return the response to the request with this id.

        Args:
            request_id: The id of the request; it may be empty.
            contents: The bytes of each output; empty for an output in a region of the client.

        Raises:
            Internal: The response exceeds the largest message.
        """
        pieces: list[bytes | memoryview] = [self._prefix, *_id_field(request_id)]
        for content in contents:
            pieces += (_RAW_OUTPUT_TAG, encode_varint(len(content)), content)
        size = sum(map(len, pieces))
        if size > LARGEST_MESSAGE:
            raise Internal(
                f"Response has byte size {size} which exceeds gRPC's byte size limit "
                f"{LARGEST_MESSAGE}."
            )
        return b"".join(pieces)


def _id_field(request_id: str) -> tuple[bytes, ...]:
    """Return the field with the id of a request, or nothing for an empty id."""
    if not request_id:
        return ()
    encoded_id = request_id.encode()
    return (_ID_TAG, encode_varint(len(encoded_id)), encoded_id)


def _encode_parameters(values: dict[str, Any]) -> bytes:
    response = ModelInferResponse()
    for key, value in values.items():
        set_parameter(response.parameters[key], value)
    return bytes(response.SerializeToString())


def set_parameter(parameter: InferParameter, value: Any) -> None:
    """Set the field of a parameter that has the type of the value; a dict becomes a JSON text."""
    match value:
        case bool():
            parameter.bool_param = value
        case int():
            parameter.int64_param = value
        case float():
            parameter.double_param = value
        case dict():
            parameter.string_param = json.dumps(value)
        case _:
            parameter.string_param = str(value)


_FINAL_PARAMETER = "triton_final_response"
FINAL_FIELD = _encode_parameters({_FINAL_PARAMETER: True})
_NOT_FINAL_FIELD = _encode_parameters({_FINAL_PARAMETER: False})
# Used for an empty error text, because clients take an empty message for success.
_EMPTY_ERROR_TEXT = "<EMPTY MESSAGE>"


def encode_streamed(response: bytes, *, is_final: bool = True) -> bytes:
    """Return a ModelInferResponse as a stream message; `is_final` marks a request's last one."""
    final_field = FINAL_FIELD if is_final else _NOT_FINAL_FIELD
    encoded_size = encode_varint(len(response) + len(final_field))
    return b"".join((_INFER_RESPONSE_TAG, encoded_size, response, final_field))


def encode_stream_end(model_name: str, version: str, request_id: str) -> bytes:
    """Return the message without outputs that ends the responses to a request.

    `version` is the version of the model in the request.
    """
    response = ModelInferResponse(model_name=model_name, model_version=version, id=request_id)
    return encode_streamed(response.SerializeToString())


def encode_stream_error(
    message: str, request_id: str, model_name: str = "", *, is_final: bool = True
) -> bytes:
    """Return the message for a failed request.

    A request that was refused before it reached a scheduler has no `model_name`. `is_final` marks
    the last response of any other request.
    """
    response = ModelStreamInferResponse(error_message=message or _EMPTY_ERROR_TEXT)
    response.infer_response.id = request_id
    if model_name:
        response.infer_response.model_name = model_name
        response.infer_response.parameters[_FINAL_PARAMETER].bool_param = is_final
    return bytes(response.SerializeToString())


def encode_varint(value: int) -> bytes:
    """Return a `value` >= 0 as a varint: seven bits in a byte, the lowest first."""
    if value < 128:
        return _ONE_BYTE_VARINTS[value]
    varint = bytearray()
    while value >= 128:
        varint.append(value & 127 | 128)
        value >>= 7
    varint.append(value)
    return bytes(varint)


_ONE_BYTE_VARINTS = tuple(bytes((value,)) for value in range(128))
