"""The serializer of ModelInferResponse: protobuf by hand, with the tensors copied once.

Everything but the id and the tensors' bytes is the same from one response of a model to the next,
as long as the shapes are: that part is serialized once and kept. The rest is appended as protobuf
has it on the wire: a field is its tag, its length and its bytes, in any order.
"""

from __future__ import annotations

import json
from collections.abc import Container, Sequence
from typing import Any

from shmserve.errors import Internal
from shmserve.gateway.model_table import GatewayModel
from shmserve.ipc.tensors.inference import Inferred, tensor_schema
from shmserve.ipc.tensors.schemas import BoundedCache
from shmserve.proto.grpc_service_pb2 import (
    InferParameter,
    ModelInferResponse,
    ModelStreamInferResponse,
)

LARGEST_MESSAGE = 2**31 - 1  # what protobuf and gRPC can carry

_ID = b"\x1a"  # field 3, length-delimited
_RAW_OUTPUT = b"\x32"  # field 6
_NO_CONTENTS = _RAW_OUTPUT + b"\0"  # of an output in a region
_INFER_RESPONSE = b"\x12"  # field 2 of ModelStreamInferResponse
_MOST_HEADS = 256


class GrpcResponseTemplate:
    """The responses of one schema, but for the id and the tensors' bytes.

    Args:
        before: The serialized fields before the id.
        sizes: The byte size of each output; -1 for BYTES, whose size varies; None for one in a
            region, which has no contents.
    """

    __slots__ = ("_before", "_count", "_empty", "_form", "_sizes")

    def __init__(self, before: bytes, sizes: list[int | None]) -> None:
        self._before = before
        self._sizes = sizes
        self._count = len(sizes)
        # Where nothing is sent of any output, the fields without contents.
        self._empty = _NO_CONTENTS * len(sizes) if set(sizes) == {None} else b""
        self._form: bytes | None = None
        if all(size is not None and size >= 0 for size in sizes):
            fields = [_RAW_OUTPUT + varint(size or 0) for size in sizes]
            self._form = b"".join([field.replace(b"%", b"%%") + b"%b" for field in fields])

    def fill(self, request_id: str, data: Sequence[Any]) -> bytes | None:
        """Return the response to the request with this id.

        Returns:
            None where an output is not in the message, or has another size than its shape, or
            where the data are not one for each output.
        """
        form = self._form
        if form is not None:
            try:
                if list(map(len, data)) != self._sizes:
                    return None
                tail = form % tuple(data)
            except TypeError:  # a place, or no data of a tensor at all
                return None
            return self._with_id(request_id, tail)
        if len(data) != self._count:
            return None
        if self._empty:
            return self._with_id(request_id, self._empty)
        pieces: list[bytes] = []
        for size, raw in zip(self._sizes, data, strict=True):
            if size is None:
                pieces.append(_NO_CONTENTS)
                continue
            if type(raw) is not bytes or len(raw) != size >= 0:
                return None
            pieces += (_RAW_OUTPUT, varint(len(raw)), raw)
        return self._with_id(request_id, b"".join(pieces))

    def _with_id(self, request_id: str, tail: bytes) -> bytes:
        if not request_id:
            return self._before + tail
        return b"".join((self._before, *_id(request_id), tail))


class ResponseEncoder:
    """Serializes responses, and their templates, behind heads that are kept by schema."""

    def __init__(self) -> None:
        self._heads: BoundedCache[tuple[str, str, bytes], bytes] = BoundedCache(_MOST_HEADS)

    def encode(
        self,
        model: GatewayModel,
        request_id: str,
        schema: bytes,
        inferred: Inferred,
        contents: Sequence[bytes | memoryview],
    ) -> bytes:
        """Return the serialized response.

        Args:
            model: The model that gave it.
            request_id: The id of its request.
            schema: Its schema; empty where it is not the one that its worker sent.
            inferred: The response.
            contents: The bytes of each output, empty for one in a region.

        Raises:
            Internal: It is larger than a message can be.
        """
        pieces: list[bytes | memoryview] = [self._head(model, schema, inferred), *_id(request_id)]
        for content in contents:
            pieces += (_RAW_OUTPUT, varint(len(content)), content)
        size = sum(map(len, pieces))
        if size > LARGEST_MESSAGE:
            raise Internal(
                f"Response has byte size {size} which exceeds gRPC's byte size limit "
                f"{LARGEST_MESSAGE}."
            )
        return b"".join(pieces)

    def template(
        self, model: GatewayModel, schema: bytes, inferred: Inferred, placed: Container[str]
    ) -> GrpcResponseTemplate:
        """Return the template of responses of a schema, whose `placed` outputs are in regions."""
        sizes = [
            None
            if tensor.name in placed
            else tensor_schema(tensor.name, tensor.datatype, tensor.shape).byte_size
            for tensor in inferred.outputs
        ]
        return GrpcResponseTemplate(self._head(model, schema, inferred), sizes)

    def _head(self, model: GatewayModel, schema: bytes, inferred: Inferred) -> bytes:
        key = (model.name, model.version, schema)
        head = self._heads.find(key) if schema else None
        if head is None:
            response = ModelInferResponse(model_name=model.name, model_version=model.version)
            for tensor in inferred.outputs:
                response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
            for name, value in inferred.parameters.items():
                set_parameter(response.parameters[name], value)
            head = response.SerializeToString()
            if schema:
                self._heads.remember(key, head)
        return head


def _id(request_id: str) -> tuple[bytes, ...]:
    """The field with the id of a request, if that has one."""
    if not request_id:
        return ()
    raw = request_id.encode()
    return (_ID, varint(len(raw)), raw)


def _parameters(values: dict[str, Any]) -> bytes:
    response = ModelInferResponse()
    for key, value in values.items():
        set_parameter(response.parameters[key], value)
    serialized: bytes = response.SerializeToString()
    return serialized


def set_parameter(parameter: InferParameter, value: Any) -> None:
    """Put a bool, int, float or str where its type belongs, and a dict as JSON text."""
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


_FINAL = "triton_final_response"
FINAL = _parameters({_FINAL: True})
_NOT_FINAL = _parameters({_FINAL: False})
_NO_MESSAGE = "<EMPTY MESSAGE>"  # an error without a text would be none


def streamed(response: bytes, *, final: bool = True) -> bytes:
    """A ModelInferResponse as it stands in a stream: the last one to its request, or not."""
    end = FINAL if final else _NOT_FINAL
    return b"".join((_INFER_RESPONSE, varint(len(response) + len(end)), response, end))


def streamed_end(model_name: str, asked_version: str, request_id: str) -> bytes:
    """The message behind the last response, to a request that asks for it: no outputs, the end.

    `asked_version` is the model's version as the request has it.
    """
    response = ModelInferResponse(model_name=model_name, model_version=asked_version, id=request_id)
    return streamed(response.SerializeToString())


def streamed_error(
    message: str, request_id: str, model_name: str = "", *, final: bool = True
) -> bytes:
    """The message for a request that failed; `model_name` tells whose scheduler had it, and `final`
    then that this is the last response."""
    response = ModelStreamInferResponse(error_message=message or _NO_MESSAGE)
    response.infer_response.id = request_id
    if model_name:
        response.infer_response.model_name = model_name
        response.infer_response.parameters[_FINAL].bool_param = final
    serialized: bytes = response.SerializeToString()
    return serialized


def varint(value: int) -> bytes:
    """`value` >= 0 as protobuf writes it: seven bits a byte, the lowest first."""
    if value < 128:
        return _SMALL[value]
    parts = bytearray()
    while value >= 128:
        parts.append(value & 127 | 128)
        value >>= 7
    parts.append(value)
    return bytes(parts)


_SMALL = tuple(bytes((value,)) for value in range(128))
