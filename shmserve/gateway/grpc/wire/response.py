"""The serializer of ModelInferResponse: protobuf by hand, with the tensors copied once.

Everything but the id and the tensors' bytes is the same from one response of a model to the next,
as long as the shapes are: that part is serialized once and kept. The rest is appended as protobuf
has it on the wire: a field is its tag, its length and its bytes, in any order.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from shmserve.errors import Internal
from shmserve.gateway.model_table import GatewayModel
from shmserve.ipc.tensors.descriptors import TensorRef
from shmserve.ipc.tensors.inference import Inferred
from shmserve.ipc.tensors.template_cache import BoundedCache
from shmserve.proto.grpc_service_pb2 import (
    InferParameter,
    ModelInferResponse,
    ModelStreamInferResponse,
)

LARGEST_MESSAGE = 2**31 - 1  # what protobuf and gRPC can carry

_ID = b"\x1a"  # field 3, length-delimited
_RAW_OUTPUT = b"\x32"  # field 6
_INFER_RESPONSE = b"\x12"  # field 2 of ModelStreamInferResponse
_MOST_HEADS = 256

_Form = tuple[str, str, tuple[tuple[str, str, tuple[int, ...]], ...]]


class GrpcResponseTemplate:
    """A serialized response but for its request's id and its tensors' bytes, whose sizes are known;
    those in regions have none."""

    __slots__ = ("_before", "_form")

    def __init__(self, before: Sequence[bytes | memoryview], sizes: Sequence[int | None]) -> None:
        pieces = [_RAW_OUTPUT + varint(size or 0) for size in sizes]
        in_regions = [piece for piece, size in zip(pieces, sizes, strict=True) if size is None]
        assert len(in_regions) in (0, len(pieces))  # they stand in the order of the outputs
        self._before = b"".join((*before, *in_regions))
        fields = [] if in_regions else [piece.replace(b"%", b"%%") + b"%b" for piece in pieces]
        self._form = b"".join(fields)

    def fill(self, request_id: str, contents: Sequence[bytes]) -> bytes:
        """The response with these tensors to the request with this id."""
        tail = self._form % tuple(contents)
        if not request_id:
            return self._before + tail
        return b"".join((self._before, *_id(request_id), tail))


class ResponseEncoder:
    """Serializes responses, and their templates, behind heads that are cached."""

    def __init__(self) -> None:
        self._heads: BoundedCache[_Form, bytes] = BoundedCache(_MOST_HEADS)

    def encode(
        self,
        model: GatewayModel,
        request_id: str,
        inferred: Inferred,
        contents: Sequence[bytes | memoryview],
    ) -> bytes:
        """The serialized response; `contents` has the bytes of each output, empty for one in a
        region.

        Raises Internal when it is larger than a message can be.
        """
        pieces: list[bytes | memoryview] = self._before(model, request_id, inferred)
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
        self, model: GatewayModel, inferred: Inferred, sizes: Sequence[int | None]
    ) -> GrpcResponseTemplate:
        """The template of a response whose outputs have these sizes, in bytes; None for all, when
        they are in regions."""
        return GrpcResponseTemplate(self._before(model, "", inferred), sizes)

    def streamed_template(
        self, model: GatewayModel, request_id: str, inferred: Inferred
    ) -> StreamedTemplate:
        """The template of a response in a stream that is not the last to its request."""
        return StreamedTemplate(b"".join(self._before(model, request_id, inferred)))

    def _before(
        self, model: GatewayModel, request_id: str, inferred: Inferred
    ) -> list[bytes | memoryview]:
        pieces: list[bytes | memoryview] = [self._head(model, inferred.outputs)]
        if inferred.parameters:
            pieces.append(_parameters(inferred.parameters))
        pieces += _id(request_id)
        return pieces

    def _head(self, model: GatewayModel, outputs: Sequence[TensorRef]) -> bytes:
        key = (model.name, model.version, tuple((t.name, t.datatype, t.shape) for t in outputs))
        head = self._heads.find(key)
        if head is None:
            response = ModelInferResponse(model_name=model.name, model_version=model.version)
            for name, datatype, shape in key[2]:
                response.outputs.add(name=name, datatype=datatype, shape=shape)
            head = response.SerializeToString()
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


class StreamedTemplate:
    """The responses to one request in a stream that differ only in their tensors' bytes; none of
    them is the last."""

    __slots__ = ("_fixed",)

    def __init__(self, before: bytes) -> None:
        self._fixed = before + _NOT_FINAL

    def fill(self, contents: Sequence[bytes]) -> bytes:
        """The response with these bytes of its outputs, which are small."""
        pieces = [self._fixed]
        for content in contents:
            pieces += (_RAW_OUTPUT, varint(len(content)), content)
        size = sum(map(len, pieces))
        return b"".join((_INFER_RESPONSE, varint(size), *pieces))


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
