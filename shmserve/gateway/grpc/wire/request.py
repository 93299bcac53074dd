"""The decoding of ModelInferRequest: parsed as a message, or received into the arena (pure).

The checks and the error texts of a parsed message are those of Triton. The bytes of an input are in
`raw_input_contents`, which has an entry for each input that is not in a region, or in the typed
`contents` of the input. The tensors of a large message are received by a `RequestSink`:

    | fields before the tensors | tag, length | tensor | tag, length | tensor |
      collected, and parsed       collected     arena    collected     arena

A message of another layout is collected as a whole, and parsed as small messages are. Examples are
fields behind the tensors, a long head, and tensors of other sizes than the head describes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from shmserve.errors import InvalidArgument
from shmserve.gateway.grpc.wire.fingerprint import EARLIER, MOST_SHIFT, RAW_INPUT
from shmserve.gateway.inference.prepare import ArrivingTensors
from shmserve.gateway.inference.request import (
    InferInput,
    InferOutput,
    InferRequest,
    RegionRange,
    check_correlation_id,
    check_member_count,
)
from shmserve.ipc.tensors.arrays import NUMPY_DTYPES
from shmserve.ipc.tensors.datatypes import ITEM_SIZE, element_count
from shmserve.ipc.tensors.descriptors import MAX_UINT64
from shmserve.ipc.tensors.inference import SEQUENCE_END, SEQUENCE_START
from shmserve.ipc.tensors.signature import shape_text
from shmserve.proto.grpc_service_pb2 import (
    InferParameter,
    InferTensorContents,
    ModelInferRequest,
)

_EMPTY_FINAL = "triton_enable_empty_final_response"
_RESERVED = (
    "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys "
    f"starting with 'triton_' are allowed: {_EMPTY_FINAL}"
)
# The fields of InferTensorContents, with their datatype and narrower datatypes.
_CONTENTS = (
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
_SAME_BYTES = frozenset(("BOOL", "FP32", "FP64"))

_Parameters = Mapping[str, InferParameter]


def infer_request(message: ModelInferRequest, raw: Sequence[bytes] | None = None) -> InferRequest:
    """Return the request of a message.

    Args:
        message: The message.
        raw: The raw contents, if the message does not contain them.

    Raises:
        InvalidArgument: The message is invalid.
        Unsupported: The id of the sequence is too long.
    """
    request = InferRequest(message.id, [], [], binary=True, version=message.model_version)
    if message.parameters:
        _take_parameters(request, message.parameters)
    check_member_count(message.inputs, "inputs")
    check_member_count(message.outputs, "outputs")
    raw = message.raw_input_contents if raw is None else raw
    raw_index = 0
    for tensor in message.inputs:
        infer_input = _input(tensor)
        if tensor.parameters:
            infer_input.memory_range = _region(tensor.name, tensor.parameters)
        if infer_input.memory_range is None:
            if tensor.HasField("contents"):
                if raw:
                    raise InvalidArgument(
                        "contents field must not be specified when using raw_input_contents for "
                        f"'{tensor.name}' for model '{message.model_name}'"
                    )
                infer_input.data = _typed(tensor, message.model_name)
            elif raw_index < len(raw):
                infer_input.data = raw[raw_index]
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
    request.outputs = [_output(output) for output in message.outputs]
    return request


def _input(tensor: ModelInferRequest.InferInputTensor) -> InferInput:
    name, datatype, shape = tensor.name, tensor.datatype, tuple(tensor.shape)
    if datatype not in ITEM_SIZE:
        datatype = "<invalid>"  # Triton's word in the error, since no model has this datatype
    if shape and min(shape) < 0:
        raise InvalidArgument(
            f"invalid shape for input '{name}': shape {shape_text(shape)} contains one or more "
            "invalid dimensions"
        )
    return InferInput(name, datatype, shape, element_count(shape))


def _output(output: ModelInferRequest.InferRequestedOutputTensor) -> InferOutput:
    if not output.parameters:
        return InferOutput(output.name, True)
    region_range = _region(output.name, output.parameters)
    if "classification" in output.parameters:
        parameter = output.parameters["classification"]
        if parameter.WhichOneof("parameter_choice") != "int64_param":
            raise InvalidArgument(
                "invalid value type for 'classification' parameter, expected int64_param"
            )
        if parameter.int64_param <= 0:
            raise InvalidArgument("invalid value for 'classification' parameter, expected >= 0")
        if region_range is not None:
            raise InvalidArgument(
                "output can't set both 'shared_memory_region' and 'classification'"
            )
        return InferOutput(output.name, True, classes=parameter.int64_param)
    return InferOutput(output.name, True, region_range)


def _region(tensor: str, parameters: _Parameters) -> RegionRange | None:
    """Return the range of a region in the parameters of a tensor, or None."""
    if "shared_memory_region" not in parameters:
        for key in ("shared_memory_offset", "shared_memory_byte_size"):
            if key in parameters:
                raise InvalidArgument(
                    f"'{key}' can not be specified without 'shared_memory_region' parameter for "
                    f"tensor '{tensor}'"
                )
        return None
    name = _of_kind(tensor, parameters, "shared_memory_region", "string_param")
    offset = 0
    if "shared_memory_offset" in parameters:
        offset = _of_kind(tensor, parameters, "shared_memory_offset", "int64_param")
    if "shared_memory_byte_size" not in parameters:
        raise InvalidArgument(
            "'shared_memory_byte_size' must be specified along with 'shared_memory_region' "
            f"parameter for tensor '{tensor}'"
        )
    size = _of_kind(tensor, parameters, "shared_memory_byte_size", "int64_param")
    # Negative numbers become very large ones, as in Triton, which exceed every region.
    return RegionRange(name, offset & MAX_UINT64, size & MAX_UINT64)


def _of_kind(tensor: str, parameters: _Parameters, key: str, kind: str) -> Any:
    if parameters[key].WhichOneof("parameter_choice") != kind:
        raise InvalidArgument(
            f"invalid value type for '{key}' parameter for tensor '{tensor}', expected {kind}."
        )
    return getattr(parameters[key], kind)


def _typed(tensor: ModelInferRequest.InferInputTensor, model: str) -> bytes:
    """Return the bytes of an input with typed contents."""
    datatype = tensor.datatype
    data: bytes | None = None
    for field, field_datatype, narrower in _CONTENTS:
        values = getattr(tensor.contents, field)
        if not values:
            continue
        if data is not None:
            raise InvalidArgument(
                f"unexpected explicit tensor data for input tensor '{tensor.name}' for model "
                f"'{model}', binary data was already supplied."
            )
        if datatype != field_datatype and datatype not in narrower:
            raise InvalidArgument(
                f"unexpected explicit tensor data for input tensor '{tensor.name}' for model "
                f"'{model}' of type '{field_datatype}', expected datatype '{datatype}'"
            )
        if field_datatype == "BYTES":
            data = b"".join(
                part for item in values for part in (len(item).to_bytes(4, "little"), item)
            )
        elif field_datatype in _SAME_BYTES:
            data = _packed(tensor.contents)
        else:
            array = np.fromiter(values, NUMPY_DTYPES[field_datatype], len(values))
            data = array.astype(NUMPY_DTYPES[datatype], copy=False).tobytes()
    return data or b""


def _packed(contents: InferTensorContents) -> bytes:
    """Return the values of the first field that is set, as protobuf serializes them.

    A loop over the values takes a hundred times as long, and changes signalling NaNs.
    """
    contents.DiscardUnknownFields()
    serialized = contents.SerializeToString()
    size = shift = 0
    for at in range(1, len(serialized)):  # from 1, because the tag is one byte
        size |= (serialized[at] & 127) << shift
        shift += 7
        if serialized[at] < 128:
            return serialized[at + 1 : at + 1 + size]
    return b""


def _take_parameters(request: InferRequest, parameters: _Parameters) -> None:
    for key, parameter in parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        value: Any = getattr(parameter, kind) if kind else None
        match key:
            case "sequence_id":
                _expect(key, kind, "int64_param", "string_param")
                request.correlation_id = (
                    check_correlation_id(value) if kind == "string_param" else value % 2**64
                )
            case "sequence_start":
                _expect(key, kind, "bool_param")
                request.flags |= SEQUENCE_START * value
            case "sequence_end":
                _expect(key, kind, "bool_param")
                request.flags |= SEQUENCE_END * value
            case "priority":
                _expect(key, kind, "int64_param", "uint64_param")
                if value < 0:
                    raise InvalidArgument("invalid value for 'priority', expected value >= 0.")
                request.priority = value
            case "timeout":
                _expect(key, kind, "int64_param")
                request.timeout_us = max(value, 0)
            case "deadline_us":
                _expect(key, kind, "int64_param", "uint64_param")
                request.deadline_us = max(value, 0)
            case _ if key == _EMPTY_FINAL:
                # Only decoupled models have several responses.
                _expect(key, kind, "bool_param")
                request.empty_final = value
            case _ if key.startswith("triton_"):
                raise InvalidArgument(_RESERVED)
            case _:
                if kind in (None, "uint64_param"):
                    raise _wrong_kind(key, ("int64_param", "bool_param", "string_param"))
                request.parameters[key] = value


def _expect(key: str, kind: str | None, *allowed: str) -> None:
    if kind not in allowed:
        raise _wrong_kind(key, allowed)


def _wrong_kind(key: str, allowed: tuple[str, ...]) -> InvalidArgument:
    *first, last = allowed
    comma = "," if len(first) > 1 else ""
    listed = f"{', '.join(first)}{comma} or {last}" if first else last
    return InvalidArgument(f"invalid value type for '{key}' parameter, expected {listed}.")


_LONGEST_HEAD = 64 * 1024
_MORE, _BROKEN = -1, -2

A = TypeVar("A", bound=ArrivingTensors)


class RequestSink(Generic[A]):
    """The receiver of one large message, which writes its tensors into their final memory.

    Args:
        find: Returns the tensors of the request with this head, given the size of the first
        tensor; None if the message has to be collected as a whole.
    """

    def __init__(self, find: Callable[[bytes, int], A | None]) -> None:
        self._find = find
        self._tensors: A | None = None
        self._head = bytearray()  # the head, then the bytes between two tensors
        self._at = 0  # the position of the next field in the head
        self._prefixes: list[bytes] = []  # the bytes before each tensor that has begun
        self._whole_message: list[bytes] | None = None  # the message, if it is collected as a whole

    def next_buffer(self, most: int) -> memoryview | None:
        """Return the memory that the next bytes are received into, at most `most` bytes.

        Return None if it is unknown.
        """
        return None if self._tensors is None else self._tensors.next_buffer(most)

    def feed(self, piece: memoryview) -> None:
        """Receive the next bytes."""
        at, end = 0, len(piece)
        while at < end:
            if self._whole_message is not None:
                self._whole_message.append(bytes(piece[at:]))
                return
            if self._tensors is not None and self._tensors.missing:
                at += self._tensors.feed(piece[at:])
                continue
            size = min(end - at, _LONGEST_HEAD)
            self._head += piece[at : at + size]
            at += size - self._read_fields()

    def _read_fields(self) -> int:
        """Parse the tags and lengths in the collected bytes.

        Returns:
            The number of surplus bytes at the end.
        """
        head = self._head
        while self._at < len(head):
            tag = head[self._at]
            size, end = _length(head, self._at + 1)
            if end < 0:
                if end == _BROKEN:
                    self._collect()
                return 0
            if tag == RAW_INPUT:
                surplus = len(head) - end
                del head[end:]
                self._begin(size)
                return surplus
            if tag not in EARLIER or self._prefixes or end + size > _LONGEST_HEAD:
                self._collect()
                return 0
            self._at = end + size
        return 0

    def _begin(self, size: int) -> None:
        """Begin to receive a tensor of this size."""
        if self._tensors is None:
            self._tensors = self._find(bytes(self._head[: self._at]), size)
        if self._tensors is None or not self._tensors.begin(size):
            self._collect()
            return
        self._prefixes.append(bytes(self._head))
        self._head.clear()
        self._at = 0

    def _collect(self) -> None:
        """Collect the message as a whole, from the bytes that were received already."""
        pieces: list[bytes] = []
        if self._tensors is not None:
            for before, tensor in zip(self._prefixes, self._tensors.received(), strict=True):
                pieces += (before, tensor)
            self.drop()
        pieces.append(bytes(self._head))
        self._whole_message = pieces

    def whole(self) -> bytes | A:
        """Return the complete message.

        The result is the request with its received tensors, or the collected bytes.
        """
        tensors = self._tensors
        if self._whole_message is None:
            if tensors is not None and tensors.complete and not self._head:
                return tensors
            self._collect()
        assert self._whole_message is not None
        return b"".join(self._whole_message)

    def drop(self) -> None:
        """Release the memory of the tensors. The method is idempotent."""
        tensors, self._tensors = self._tensors, None
        if tensors is not None:
            tensors.release()


def _length(data: bytearray, at: int) -> tuple[int, int]:
    """Decode the varint length at position `at`.

    Returns:
        The length and the position behind it, or `_MORE` or `_BROKEN`.
    """
    size = shift = 0
    while at < len(data):
        byte = data[at]
        at += 1
        size |= (byte & 127) << shift
        if byte < 128:
            return size, at
        shift += 7
        if shift > MOST_SHIFT:
            return 0, _BROKEN
    return 0, _MORE
