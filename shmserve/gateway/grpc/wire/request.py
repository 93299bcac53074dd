"""The decoder of ModelInferRequest, which parses a message or receives its tensors into the arena.

A parsed message is checked as in Triton, with Triton's error texts. The bytes of an input are in
its typed `contents`, or in the message's `raw_input_contents`, which has an entry for each input
outside of regions. The tensors of a large message are received by a `RequestSink`:

    | fields before the tensors | tag, length | tensor | tag, length | tensor |
      collected, and parsed       collected     arena    collected     arena

A message of another layout is collected as a whole, and parsed as small messages are. Examples are
fields behind the tensors, a long head, and tensors of other sizes than the head describes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from shmserve.errors import InvalidArgument
from shmserve.gateway.grpc.wire.fingerprint import HEAD_TAGS, MAX_SHIFT, RAW_INPUT_TAG
from shmserve.gateway.inference.infer_request import (
    InferInput,
    InferOutput,
    InferRequest,
    RegionRange,
    check_correlation_id,
    check_member_count,
)
from shmserve.gateway.inference.prepare import ArrivingRequest
from shmserve.ipc.tensors.arrays import NUMPY_DTYPES
from shmserve.ipc.tensors.datatypes import ITEM_SIZE, element_count
from shmserve.ipc.tensors.schemas import SEQUENCE_END, SEQUENCE_START
from shmserve.ipc.tensors.signature import shape_text
from shmserve.proto.grpc_service_pb2 import InferParameter, InferTensorContents, ModelInferRequest

_EMPTY_FINAL_PARAMETER = "triton_enable_empty_final_response"
_RESERVED_KEYS = (
    "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys "
    f"starting with 'triton_' are allowed: {_EMPTY_FINAL_PARAMETER}"
)
# The fields of InferTensorContents, with the datatype and the narrower datatypes of their values.
_CONTENT_FIELDS = (
    ("bool_contents", "BOOL", ()),
    ("int_contents", "INT32", ("INT8", "INT16")),
    ("int64_contents", "INT64", ()),
    ("uint_contents", "UINT32", ("UINT8", "UINT16")),
    ("uint64_contents", "UINT64", ()),
    ("fp32_contents", "FP32", ()),
    ("fp64_contents", "FP64", ()),
    ("bytes_contents", "BYTES", ()),
)

# The datatypes whose values have the same bytes in protobuf and in a tensor.
_SAME_LAYOUT_DATATYPES = frozenset(("BOOL", "FP32", "FP64"))

_Parameters = Mapping[str, InferParameter]


def decode_request(
    message: ModelInferRequest, raw_contents: Sequence[bytes] | None = None
) -> InferRequest:
    """Return the request of a message.

    Args:
        message: The message.
        raw_contents: The raw contents, if the message does not contain them.

    Raises:
        InvalidArgument: The message is invalid.
        Unsupported: The id of the sequence is too long.
    """
    request = InferRequest(message.id, [], [], binary=True, version=message.model_version)
    if message.parameters:
        _set_parameters(request, message.parameters)
    check_member_count(message.inputs, "inputs")
    check_member_count(message.outputs, "outputs")
    raw_contents = message.raw_input_contents if raw_contents is None else raw_contents
    raw_index = 0
    for tensor in message.inputs:
        infer_input = _decode_input(tensor)
        if tensor.parameters:
            infer_input.memory_range = _decode_region(tensor.name, tensor.parameters)
        if infer_input.memory_range is None:
            if tensor.HasField("contents"):
                if raw_contents:
                    raise InvalidArgument(
                        "contents field must not be specified when using raw_input_contents for "
                        f"'{tensor.name}' for model '{message.model_name}'"
                    )
                infer_input.data = _decode_typed_contents(tensor, message.model_name)
            elif raw_index < len(raw_contents):
                infer_input.data = raw_contents[raw_index]
                raw_index += 1
            else:
                raise InvalidArgument(
                    f"unable to find data for input tensor '{tensor.name}' for model "
                    f"'{message.model_name}' in request."
                )
        elif tensor.HasField("contents"):
            raise InvalidArgument(
                "unexpected 'content' provided when using shared memory for input tensor "
                f"'{tensor.name}' for model '{message.model_name}'"
            )
        request.inputs.append(infer_input)
    request.outputs = [_decode_output(output) for output in message.outputs]
    return request


def _decode_input(tensor: ModelInferRequest.InferInputTensor) -> InferInput:
    name, datatype, shape = tensor.name, tensor.datatype, tuple(tensor.shape)
    if datatype not in ITEM_SIZE:
        datatype = "<invalid>"  # Triton's word in the error, since no model has this datatype
    if shape and min(shape) < 0:
        raise InvalidArgument(
            f"invalid shape for input '{name}': shape {shape_text(shape)} contains one or more "
            "invalid dimensions"
        )
    return InferInput(name, datatype, shape, element_count(shape))


def _decode_output(output: ModelInferRequest.InferRequestedOutputTensor) -> InferOutput:
    if not output.parameters:
        return InferOutput(output.name, True)
    region_range = _decode_region(output.name, output.parameters)
    if "classification" in output.parameters:
        parameter = output.parameters["classification"]
        if parameter.WhichOneof("parameter_choice") != "int64_param":
            text = "invalid value type for 'classification' parameter, expected int64_param"
            raise InvalidArgument(text)
        if parameter.int64_param <= 0:
            text = "invalid value for 'classification' parameter, expected > 0"
            raise InvalidArgument(f"{text}, got {parameter.int64_param}")
        if region_range is not None:
            text = "output can't set both 'shared_memory_region' and 'classification'"
            raise InvalidArgument(text)
        return InferOutput(output.name, True, class_count=parameter.int64_param)
    return InferOutput(output.name, True, region_range)


def _decode_region(tensor: str, parameters: _Parameters) -> RegionRange | None:
    """Return the range of a region that the parameters of a tensor name; None without a region."""
    if "shared_memory_region" not in parameters:
        for key in ("shared_memory_offset", "shared_memory_byte_size"):
            if key in parameters:
                raise InvalidArgument(
                    f"'{key}' can not be specified without 'shared_memory_region' parameter for "
                    f"tensor '{tensor}'"
                )
        return None
    name = _parameter_value(tensor, parameters, "shared_memory_region", "string_param")
    offset = 0
    if "shared_memory_offset" in parameters:
        offset = _parameter_value(tensor, parameters, "shared_memory_offset", "int64_param")
    if "shared_memory_byte_size" not in parameters:
        raise InvalidArgument(
            "'shared_memory_byte_size' must be specified along with 'shared_memory_region' "
            f"parameter for tensor '{tensor}'"
        )
    size = _parameter_value(tensor, parameters, "shared_memory_byte_size", "int64_param")
    return RegionRange(name, offset, size)


def _parameter_value(tensor: str, parameters: _Parameters, key: str, kind: str) -> Any:
    if parameters[key].WhichOneof("parameter_choice") != kind:
        text = f"invalid value type for '{key}' parameter for tensor '{tensor}', expected {kind}."
        raise InvalidArgument(text)
    value = getattr(parameters[key], kind)
    if kind == "int64_param" and value < 0:
        text = f"invalid value for '{key}' parameter for tensor '{tensor}', expected >= 0"
        raise InvalidArgument(f"{text}, got {value}")
    return value


def _decode_typed_contents(tensor: ModelInferRequest.InferInputTensor, model: str) -> bytes:
    """Return the bytes of an input with typed contents."""
    datatype = tensor.datatype
    data: bytes | None = None
    for field, field_datatype, narrower_datatypes in _CONTENT_FIELDS:
        values = getattr(tensor.contents, field)
        if not values:
            continue
        if data is not None:
            raise InvalidArgument(
                f"unexpected explicit tensor data for input tensor '{tensor.name}' for model "
                f"'{model}', binary data was already supplied."
            )
        if datatype != field_datatype and datatype not in narrower_datatypes:
            raise InvalidArgument(
                f"unexpected explicit tensor data for input tensor '{tensor.name}' for model "
                f"'{model}' of type '{field_datatype}', expected datatype '{datatype}'"
            )
        if field_datatype == "BYTES":
            data = b"".join(p for item in values for p in (len(item).to_bytes(4, "little"), item))
        elif field_datatype in _SAME_LAYOUT_DATATYPES:
            data = _packed_values(tensor.contents)
        else:
            array = np.fromiter(values, NUMPY_DTYPES[field_datatype], len(values))
            data = array.astype(NUMPY_DTYPES[datatype], copy=False).tobytes()
    return data or b""


def _packed_values(contents: InferTensorContents) -> bytes:
    """Return the values of the first non-empty field, in protobuf's serialization.

    A loop over the values takes a hundred times as long, and changes signalling NaNs.
    """
    contents.DiscardUnknownFields()
    serialized_contents: bytes = contents.SerializeToString()
    size, start = _decode_length(serialized_contents, 1)  # from 1, because the tag is one byte
    return serialized_contents[start : start + size]


def _set_parameters(request: InferRequest, parameters: _Parameters) -> None:
    for key, parameter in parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        value: Any = getattr(parameter, kind) if kind else None
        match key:
            case "sequence_id":
                _check_kind(key, kind, "int64_param", "string_param")
                request.correlation_id = (
                    check_correlation_id(value) if kind == "string_param" else value % 2**64
                )
            case "sequence_start":
                _check_kind(key, kind, "bool_param")
                request.flags |= SEQUENCE_START * value
            case "sequence_end":
                _check_kind(key, kind, "bool_param")
                request.flags |= SEQUENCE_END * value
            case "priority":
                _check_kind(key, kind, "int64_param", "uint64_param")
                if value < 0:
                    raise InvalidArgument("invalid value for 'priority', expected value >= 0.")
                request.priority = value
            case "timeout":
                _check_kind(key, kind, "int64_param")
                request.timeout_us = max(value, 0)
            case "deadline_us":
                _check_kind(key, kind, "int64_param", "uint64_param")
                request.deadline_us = max(value, 0)
            case _ if key == _EMPTY_FINAL_PARAMETER:
                # This parameter concerns decoupled models only, which have several responses.
                _check_kind(key, kind, "bool_param")
                request.has_empty_final = value
            case _ if key.startswith("triton_"):
                raise InvalidArgument(_RESERVED_KEYS)
            case _:
                if kind in (None, "uint64_param"):
                    raise _kind_error(key, ("int64_param", "bool_param", "string_param"))
                request.parameters[key] = value


def _check_kind(key: str, kind: str | None, *allowed_kinds: str) -> None:
    if kind not in allowed_kinds:
        raise _kind_error(key, allowed_kinds)


def _kind_error(key: str, allowed_kinds: tuple[str, ...]) -> InvalidArgument:
    *first_kinds, last_kind = allowed_kinds
    comma = "," if len(first_kinds) > 1 else ""
    kinds_text = f"{', '.join(first_kinds)}{comma} or {last_kind}" if first_kinds else last_kind
    return InvalidArgument(f"invalid value type for '{key}' parameter, expected {kinds_text}.")


_MAX_HEAD_BYTES = 64 * 1024  # of a message without its tensors
_INCOMPLETE, _MALFORMED = -1, -2  # results of `_decode_length` instead of a position


class RequestSink:
    """The receiver of one large message, which writes its tensors into their final memory.

    Args:
        create_request: Returns the request with this head, given the size of the first tensor;
            None if the message has to be collected as a whole.
    """

    def __init__(self, create_request: Callable[[bytes, int], ArrivingRequest | None]) -> None:
        self._create_request = create_request
        self._request: ArrivingRequest | None = None
        self._head = bytearray()  # the head, then the bytes between two tensors
        self._position = 0  # the position of the next field in the head
        self._prefixes: list[bytes] = []  # the bytes before each tensor that has begun
        self._whole_message: list[bytes] | None = None  # the message, if it is collected as a whole
        self.collected_bytes = 0  # the received bytes of `_whole_message`

    def next_buffer(self, byte_limit: int) -> memoryview | None:
        """Return the memory that the next bytes are received into, at most `byte_limit` bytes.

        Returns:
            None if the bytes are not those of a tensor with reserved memory.
        """
        return None if self._request is None else self._request.next_buffer(byte_limit)

    def feed(self, piece: memoryview) -> None:
        """Receive the next bytes of the message."""
        position, piece_size = 0, len(piece)
        while position < piece_size:
            if self._whole_message is not None:
                self._whole_message.append(bytes(piece[position:]))
                self.collected_bytes += piece_size - position
                return
            if self._request is not None and self._request.missing_bytes:
                position += self._request.feed(piece[position:])
                continue
            size = min(piece_size - position, _MAX_HEAD_BYTES)
            self._head += piece[position : position + size]
            position += size - self._read_fields()

    def _read_fields(self) -> int:
        """Parse the tags and lengths in the collected bytes.

        Returns:
            The number of surplus bytes at the end.
        """
        collected_head = self._head
        while self._position < len(collected_head):
            tag = collected_head[self._position]
            size, length_end = _decode_length(collected_head, self._position + 1)
            if length_end < 0:
                if length_end == _MALFORMED:
                    self._collect_whole()
                return 0
            if tag == RAW_INPUT_TAG:
                surplus_bytes = len(collected_head) - length_end
                del collected_head[length_end:]
                self._start_tensor(size)
                return surplus_bytes
            if tag not in HEAD_TAGS or self._prefixes or length_end + size > _MAX_HEAD_BYTES:
                self._collect_whole()
                return 0
            self._position = length_end + size
        return 0

    def _start_tensor(self, size: int) -> None:
        """Begin to receive a tensor of this size."""
        if self._request is None:
            self._request = self._create_request(bytes(self._head[: self._position]), size)
        if self._request is None or not self._request.start_tensor(size):
            self._collect_whole()
            return
        self._prefixes.append(bytes(self._head))
        self._head.clear()
        self._position = 0

    def _collect_whole(self) -> None:
        """Collect the message as a whole, beginning with the bytes that were received already."""
        pieces: list[bytes] = []
        if self._request is not None:
            for prefix, data in zip(self._prefixes, self._request.received_pieces(), strict=True):
                pieces += (prefix, data)
            self.discard()
        pieces.append(bytes(self._head))
        self._whole_message = pieces
        self.collected_bytes = sum(map(len, pieces))

    def finish(self) -> bytes | ArrivingRequest:
        """Return the complete message.

        The result is the request with its received tensors, or the collected bytes.
        """
        request = self._request
        if self._whole_message is None:
            if request is not None and request.is_complete and not self._head:
                return request
            self._collect_whole()
        assert self._whole_message is not None
        return b"".join(self._whole_message)

    def discard(self) -> None:
        """Release the memory of the tensors. The method is idempotent."""
        request, self._request = self._request, None
        if request is not None:
            request.release()


def _decode_length(data: bytes | bytearray, position: int) -> tuple[int, int]:
    """Decode the varint length at position `position`.

    Returns:
        The length and the position after it. The position is `_INCOMPLETE` or `_MALFORMED` if the
        length cannot be decoded.
    """
    size = shift = 0
    while position < len(data):
        byte = data[position]
        position += 1
        size |= (byte & 127) << shift
        if byte < 128:
            return size, position
        shift += 7
        if shift > MAX_SHIFT:
            return 0, _MALFORMED
    return 0, _INCOMPLETE
