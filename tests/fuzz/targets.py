"""The fuzz targets: functions of bytes, which raise if the tested code breaks a rule.

A target draws its choices from the first bytes, and uses the rest as a client's message. Invalid
messages must raise a ShmserveError with a text for clients. Invalid messages between processes must
raise a MalformedMessage.
"""

import contextlib
import math
import posixpath
import re
from collections.abc import Callable, Iterator
from typing import Any

import msgpack

from shmserve.errors import InvalidArgument, ShmserveError
from shmserve.gateway.api.shared_memory import check_region_name
from shmserve.gateway.compression import Inflater, check_encoding, preferred_encoding
from shmserve.gateway.http import handlers
from shmserve.gateway.http.body import header_size
from shmserve.gateway.http.json import tensors
from shmserve.gateway.http.json.codec import parse_request, tensor_bytes
from shmserve.gateway.http.json.fingerprint import (
    Fingerprint,
    fill_known_template,
    is_worth_caching,
    store_template,
)
from shmserve.gateway.http.json.parser import NumberArray, loads, loads_large
from shmserve.gateway.http.routes import ROUTES
from shmserve.gateway.inference.infer_request import InferRequest, RegionRange, RequestIdentity
from shmserve.gateway.inference.prepare import raw_request
from shmserve.gateway.region_table import GatewayRegion, WrittenRanges
from shmserve.ipc.endpoints import FIRST_LOCAL_CLIENT, KEY_SIZE, Capabilities
from shmserve.ipc.memory import posix_shm
from shmserve.ipc.messages import publications as messages
from shmserve.ipc.messages.inference import Submit
from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.tensors.arrays import decode_bytes
from shmserve.ipc.tensors.datatypes import ITEM_SIZE
from shmserve.ipc.tensors.descriptors import (
    MAX_INT64,
    Memory,
    Range,
    TensorRef,
    is_within,
    pack_range,
    require_integer,
)
from shmserve.ipc.tensors.schemas import (
    BoundedCache,
    Packed,
    pack_inference,
    pack_inferred,
    unpack_inference,
    unpack_inferred,
)
from shmserve.ipc.tensors.signature import Signature
from shmserve.ipc.transport import frames, zmtp
from shmserve.ipc.transport.frames import MalformedMessage
from shmserve.scheduler.hosting.local_clients import LocalClientRules
from tests.fuzz.grpc_calls import grpc
from tests.fuzz.http2.target import http2

_LIMIT = 1 << 16
_INTERNALS = re.compile(r"Traceback|ipc://|/run/|/proc/|memfd|0x[0-9a-f]{6}| object at ")
_TENSOR_CONFIG = {"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [-1], "optional": False}
_MODEL = {"name": "m", "backend": "python", "max_batch_size": 4, "output": []}
_SIGNATURES = [
    Signature(ModelSpec.of({**_MODEL,
        "input": [_TENSOR_CONFIG, {**_TENSOR_CONFIG, "name": "INPUT1"}]}), "1"),
    Signature(ModelSpec.of({**_MODEL, "input": [_TENSOR_CONFIG]}), "1"),
    Signature(ModelSpec.of({**_MODEL,
        "input": [{**_TENSOR_CONFIG, "data_type": "TYPE_STRING", "dims": [1]}]}), "1"),
]  # fmt: skip


@contextlib.contextmanager
def _check_error_text(request_bytes: bytes) -> Iterator[None]:
    """Check an error's text: it may quote the client's bytes, but no internal names."""
    message = ""
    try:
        yield
    except ShmserveError as error:
        message = error.message
    match = _INTERNALS.search(message)
    assert match is None or match[0].encode() in request_bytes, message


class _Bytes:
    """The choices that an input makes, and its remaining bytes."""

    def __init__(self, data: bytes) -> None:
        self.remaining = data

    def number(self, size: int) -> int:
        number_bytes, self.remaining = self.remaining[:size], self.remaining[size:]
        return int.from_bytes(number_bytes, "little")


# --- HTTP requests


def http(data: bytes) -> None:
    """Parse a request: its target, headers and body."""
    drawn_bytes = _Bytes(data)
    kind = drawn_bytes.number(1) % 5
    with _check_error_text(data):
        if kind == 0:
            _inference(drawn_bytes)
        elif kind == 1:
            _compressed(drawn_bytes)
        elif kind == 2:
            route = ROUTES.find(drawn_bytes.remaining.decode("latin-1"))
            assert route is None or len(route[1]) < 3
        elif kind == 3:
            text = drawn_bytes.remaining.decode("latin-1")
            size = header_size(text, 1000)
            assert 0 <= size <= 1000
        else:
            text = drawn_bytes.remaining.decode("latin-1")
            assert preferred_encoding(text) in ("identity", "gzip", "deflate")
            check_encoding(text)


def _inference(drawn_bytes: _Bytes) -> None:
    tail_size = drawn_bytes.number(1)
    body = drawn_bytes.remaining
    signature = _SIGNATURES[tail_size % 3]
    if not body:
        raw_request(signature, bytes(tail_size))
        return
    wire = parse_request(loads(body), tail_size, "m", _LIMIT)
    tensors = [_tensor(tensor) for tensor in wire.inputs]
    with contextlib.suppress(ShmserveError):
        _same_in_steps(body, tail_size, wire)
    if not tail_size:
        _same_with_other_numbers(body)
    assert sum(max(tensor.binary_size, 0) for tensor in wire.inputs) == tail_size
    signature.check(wire.id, tensors, [])


def _tensor(tensor: Any) -> TensorRef:
    data = b""
    if tensor.binary_size >= 0:
        data = bytes(tensor.binary_size)
    elif tensor.memory_range is None:
        data = tensor_bytes(tensor)
        item = ITEM_SIZE[tensor.datatype]
        if item:
            assert len(data) == tensor.count * item
        else:
            assert decode_bytes(data, tensor.shape, tensor.name, "m").size == tensor.count
    return TensorRef(tensor.name, tensor.datatype, tensor.shape, data)


def _same_in_steps(body: bytes, tail_size: int, wire: InferRequest) -> None:
    """Check that a large JSON document is parsed to the same in steps."""
    reparsed = parse_request(loads_large(body), tail_size, "m", _LIMIT)
    assert (reparsed.id, len(reparsed.inputs)) == (wire.id, len(wire.inputs))
    for original_input, reparsed_input in zip(wire.inputs, reparsed.inputs, strict=True):
        if isinstance(reparsed_input.data, NumberArray) and reparsed_input.count:
            arguments = (reparsed_input.datatype, reparsed_input.count, reparsed_input.name)
            pieces = tensors.decode_parts(reparsed_input.data.parts(), *arguments)
            assert b"".join(pieces) == tensor_bytes(original_input)


def _same_with_other_numbers(body: bytes) -> None:
    """Check that a known fingerprint parses a document to the same, or not at all."""
    cache: Any = BoundedCache(1)
    fingerprint = Fingerprint(body, 0)
    wire = parse_request(loads(body), 0, "m", _LIMIT)
    if not is_worth_caching(cache, fingerprint) and is_worth_caching(cache, fingerprint):
        store_template(cache, fingerprint, wire, _Inline())  # type: ignore[arg-type]
    changed = body.translate(_OTHER_DIGITS)
    filled: Any = fill_known_template(cache, Fingerprint(changed, 0), changed, len(changed))
    if filled is not None:
        wire = parse_request(loads(changed), 0, "m", _LIMIT)
        inline = [tensor for tensor in wire.inputs if tensor.data is not None]
        assert filled == b"".join(map(tensor_bytes, inline))


_OTHER_DIGITS = bytes.maketrans(b"123456789", b"219876543")


class _Built(bytes):
    """The bytes of a request's tensors."""

    def identify(self, identity: RequestIdentity) -> None:
        """Ignore the identity."""


class _Inline:
    """A request template that returns the bytes of inline tensors."""

    def fill_from(self, body: bytes, begin: int) -> _Built:
        return _Built(body[begin:])

    def fill(self, datas: list[bytes]) -> _Built:
        return _Built(b"".join(datas))


def _compressed(drawn_bytes: _Bytes) -> None:
    step = drawn_bytes.number(1) + 1
    inflater = Inflater(_LIMIT)
    size = 0
    for begin in range(0, len(drawn_bytes.remaining), step):
        for piece in inflater.feed(drawn_bytes.remaining[begin : begin + step]):
            size += len(piece)
            assert size <= _LIMIT
    inflater.finish()


# --- registrations


def register(data: bytes) -> None:
    """Parse a registration: the region's name in the target, key and extent in the body."""
    name, _, body = data.partition(b"\n")
    with _check_error_text(data):
        route = ROUTES.find(f"/v2/systemsharedmemory/region/{name.decode('latin-1')}/register")
        if route is not None and route[1][0]:
            check_region_name(route[1][0])
        raw = loads(body)
        key, offset, size, *flags = handlers.decode_registration(raw if type(raw) is dict else {})
        assert list(map(type, flags)) == [bool, bool]
        assert 0 <= offset <= MAX_INT64
        assert 0 <= size <= MAX_INT64
        path = posix_shm.normalize_key("r", key)
        assert posixpath.normpath(f"/dev/shm{path}") == f"/dev/shm{path}"
        assert path.count("/") == 1 and path.isascii() and path.isprintable()
        assert len(path) < 255


# --- ranges

_EDGE_VALUES = [*(0, 1, 2**12, 2**31, 2**32, 2**53, 2**63, 2**64, 2**65)]


def _edge(drawn_bytes: _Bytes) -> int:
    kind = drawn_bytes.number(1)
    if kind < 200:
        return _EDGE_VALUES[kind % len(_EDGE_VALUES)] + (kind // len(_EDGE_VALUES)) % 5 - 2
    return drawn_bytes.number(9)


def ranges(data: bytes) -> None:
    """Compare offsets and sizes with plain arithmetic."""
    drawn_bytes = _Bytes(data)
    offset, size, start, extent, limit = (_edge(drawn_bytes) for _ in range(5))
    inside = offset >= 0 and size >= 0 and offset + size <= limit
    assert is_within(offset, size, limit) == inside
    for value in (offset, size, float(size), str(size), size > 0, None):
        try:
            assert require_integer(value, "f") == value and type(value) is int
            assert 0 <= value < 2**63
        except InvalidArgument:
            assert type(value) is not int or not 0 <= value < 2**63
    start, extent = (min(max(bound, 0), MAX_INT64) for bound in (start, extent))
    memory = Memory(1, 2, 3, 4, start + extent, sealed=False)
    packed_range = list(pack_range(Range(memory, start, extent)))
    region = GatewayRegion(messages.RegionPublished("r", "/k", packed_range, 0, -1, 0))
    with _check_error_text(b""):
        memory_range = region.memory_range(RegionRange("r", max(offset, 0), max(size, 0)))
        assert start <= memory_range.offset
        assert memory_range.offset + memory_range.byte_size <= start + extent
    _spans(drawn_bytes)


def _spans(drawn_bytes: _Bytes) -> None:
    spans = WrittenRanges()
    used_spans: list[tuple[int, int]] = []
    while drawn_bytes.remaining:
        start, size = drawn_bytes.number(1), drawn_bytes.number(1) % 16 + 1
        span = (start, start + size)
        is_free = all(span[1] <= s or e <= span[0] for s, e in used_spans)
        if start % 5 == 0 and used_spans:
            spans.remove(used_spans.pop(size % len(used_spans)))
            continue
        assert spans.add(span) == is_free
        if is_free:
            used_spans.append(span)
    assert sorted(used_spans) == spans.ranges


# --- messages between processes, which the native client speaks too


def wire(data: bytes) -> None:
    """Check that a frame, its request and its response are unpacked as packed, or malformed."""
    kind, content = data[:1], data[1:]
    try:
        if kind == b"i":
            inference = unpack_inference(*_unpack_message(content))
            for tensor in inference.inputs:
                _check_place(tensor.data)
            repacked = pack_inference(inference)
            assert pack_inference(unpack_inference(*repacked)) == repacked
        elif kind == b"a":
            answer = unpack_inferred(*_unpack_message(content))
            for tensor in answer.outputs:
                _check_place(tensor.data)
            repacked = pack_inferred(answer)
            assert pack_inferred(unpack_inferred(*repacked)) == repacked
        elif kind == b"b":
            count = int.from_bytes(content[:1], "little")
            with _check_error_text(data):
                assert decode_bytes(content[1:], (count,), "n", "m").size == count
        else:
            frame = frames.pack(frames.unpack(content))
            assert frames.pack(frames.unpack(frame)) == frame
    except MalformedMessage:
        pass


def _unpack_message(raw: bytes) -> Packed:
    """Return the schema and data of a message. Raises MalformedMessage for anything else."""
    try:
        schema, data = msgpack.unpackb(raw)
    except Exception as error:
        raise MalformedMessage(str(error)) from error
    if type(schema) is not bytes or type(data) is not list:
        raise MalformedMessage("no schema and data")
    return schema, data


def _check_place(data: bytes | Range) -> None:
    if isinstance(data, Range):
        assert data.offset >= 0
        assert 0 <= data.byte_size <= data.memory.byte_size - data.offset


# --- messages of local clients to a scheduler

_CAPABILITIES = Capabilities(b"k" * KEY_SIZE)
_GUEST_NUMBER = FIRST_LOCAL_CLIENT + 7
_HANDSHAKE = zmtp.GREETING + zmtp.ready_command("DEALER", b"fuzz")


def native(data: bytes) -> None:
    """Read the bytes of a local client's connection: its messages and its identity."""
    kind, content = data[:1], data[1:]
    if kind == b"z":
        _check_decoding(_Bytes(content))
    elif kind == b"i":
        number = _CAPABILITIES.local_client(content)
        assert not number or content.startswith(f"{number}.{_CAPABILITIES.token(number)}".encode())
    elif kind == b"w":
        with contextlib.suppress(MalformedMessage):
            _check_local_request(Submit(1, *_unpack_message(content), 0, 0, 0, 0))
    else:
        with contextlib.suppress(MalformedMessage):
            for message in frames.unpack(content):
                if type(message) is Submit:
                    _check_local_request(message)


def _check_decoding(drawn_bytes: _Bytes) -> None:
    """Check that any split of a stream is decoded to the same messages and to no more bytes."""
    step = drawn_bytes.number(1) + 1
    stream = _HANDSHAKE * (drawn_bytes.number(1) % 2) + drawn_bytes.remaining
    uncut, cut_decoder = zmtp.Decoder(), zmtp.Decoder()
    frames_uncut = uncut.feed(stream)
    pieces = []
    for begin in range(0, len(stream), step):
        if not cut_decoder.violation:
            pieces += cut_decoder.feed(stream[begin : begin + step])
    assert uncut.buffered_bytes <= len(stream)
    assert sum(map(len, frames_uncut)) <= len(stream)
    assert pieces == frames_uncut
    assert cut_decoder.violation == uncut.violation
    assert cut_decoder.dropped_messages == uncut.dropped_messages
    assert cut_decoder.properties == uncut.properties
    with contextlib.suppress(MalformedMessage):
        for frame in frames_uncut:
            frames.unpack(frame)


def _check_local_request(submit: Submit) -> None:
    """Check that a request's fields do not change its inference, also after an equal schema."""
    for signature in _SIGNATURES:
        rules = LocalClientRules(_CAPABILITIES, signature)
        counted = []
        for _ in range(2):
            with _check_error_text(submit.schema), contextlib.suppress(MalformedMessage):
                counted.append(rules.validate(_GUEST_NUMBER, submit, 0))
        assert len(counted) in (0, 2)
        for checked in counted:
            assert checked.id == submit.id
            assert checked.schema == submit.schema
            assert checked.data == submit.data
            assert 0 <= signature.batch_properties(checked.schema).batch_size <= 4
            inference = unpack_inference(checked.schema, checked.data)
            for tensor in inference.inputs:
                _check_place(tensor.data)
                if isinstance(tensor.data, Range):
                    assert _CAPABILITIES.owns(_GUEST_NUMBER, tensor.data.memory)
                elif item := ITEM_SIZE[tensor.datatype]:
                    assert len(tensor.data) == item * math.prod(tensor.shape)
            for output in inference.outputs:
                assert output.memory_range is None or _CAPABILITIES.owns(
                    _GUEST_NUMBER, output.memory_range.memory
                )


TARGETS: dict[str, Callable[[bytes], None]] = {
    "http": http, "register": register, "ranges": ranges, "messages": wire, "native": native,
    "http2": http2, "grpc": grpc,
}  # fmt: skip
