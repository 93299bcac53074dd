"""The layout of frames, and that it makes no difference how a client's bytes are cut."""

import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.gateway.http2 import frames
from shmserve.gateway.http2.frames import ConnectionFault, FaultCode
from shmserve.gateway.http2.incoming import Limits
from tests.support.wire import http2 as wire
from tests.support.wire.http2_engine import Engine, frames_of


@given(st.integers(0, 255), st.integers(0, 255), st.integers(0, 2**31 - 1), st.binary(max_size=300))
def test_a_frame(kind: int, flags: int, stream: int, payload: bytes) -> None:
    frame_bytes = frames.encode_frame(kind, flags, stream, payload)
    assert frame_bytes == wire.frame(kind, flags, stream, payload)
    assert frames_of(frame_bytes) == [(kind, flags, stream, payload)]


@given(st.integers(0, 2**24 - 1))
def test_the_size_of_a_frame(size: int) -> None:
    high_bits, low_bits, *_ = frames.FRAME_HEADER.unpack(frames.encode_frame_header(size, 0, 0, 1))
    assert high_bits << 8 | low_bits == size


@given(st.lists(st.tuples(st.integers(7, 2**16 - 1), st.integers(0, 2**32 - 1)), max_size=9))
def test_settings(values: list[tuple[int, int]]) -> None:
    payload = b"".join(struct.pack(">HI", *value) for value in values)
    assert list(frames.parse_settings(payload)) == values
    assert frames.encode_settings(dict(values))[9:] == b"".join(
        struct.pack(">HI", *value) for value in dict(values).items()
    )


def test_a_32_bit_integer() -> None:
    assert frames.parse_uint32(b"\xff\0\0\1", "it") == 0xFF000001
    for wrong_value in (b"", b"123", b"12345"):
        with pytest.raises(ConnectionFault, match="bytes, expected 4") as caught:
            frames.parse_uint32(wrong_value, "it")
        assert caught.value.code is FaultCode.FRAME_SIZE_ERROR


def test_goaway() -> None:
    goaway_frames = frames_of(frames.encode_goaway(7, FaultCode.ENHANCE_YOUR_CALM, "too many"))
    assert goaway_frames == [(7, 0, 0, struct.pack(">II", 7, 11) + b"too many")]


_BLOCKS = [
    *(b"\x83\x86\x84", b"\x83\x86\x84\x40\x01a\x01b", b"\x83\x86\x84\xbe", b"\x83\x86"),
    *(b"", wire.post("/x"), wire.post("/x", (b"content-length", b"5"))),
]
streams = st.sampled_from([1, 3, 5, 7, 1, 3, 0, 2])
flags = st.sampled_from([0, 1, 4, 5, 5, 4, 8, 9, 12, 0x2D, 0xFF])
payloads = st.one_of(
    st.sampled_from(_BLOCKS),
    st.binary(max_size=12),
    st.sampled_from([b"\x05data" + bytes(5), bytes(4), bytes(5), bytes(6), bytes(8), b"\0\0\0\1"]),
    st.integers(0, 3000).map(bytes),
)
some_frames = st.one_of(
    st.builds(wire.frame, st.integers(0, 10), flags, streams, payloads),
    st.builds(wire.frame, st.just(wire.HEADERS), flags, streams, st.sampled_from(_BLOCKS)),
    st.builds(wire.frame, st.just(wire.DATA), flags, streams, payloads),
    st.builds(wire.frame, st.just(wire.PING), st.just(0), st.just(0), st.just(bytes(8))),
)


def _describe_state(engine: Engine) -> Any:
    requests = {
        number: (request.fields, request.data, request.ended, request.cancelled)
        for number, request in engine.requests.items()
    }
    return requests, engine.sent, engine.gone, engine.acknowledged, engine.http2.received_frames


@settings(max_examples=300)
@given(
    st.lists(some_frames, max_size=12),
    st.binary(max_size=8),
    st.lists(st.integers(1, 60), min_size=1, max_size=8),
)
def test_events_are_equal_for_any_split(sent: list[bytes], rest: bytes, steps: list[int]) -> None:
    """Nor how many frames are handled in a turn."""
    stream = wire.CLIENT_OPENING + b"".join(sent) + rest
    limits = Limits(frame_bytes=16384, window_bytes=70000)
    whole_engine = Engine(limits).take(stream)
    split, limited = (
        Engine(limits),
        Engine(Limits(frame_bytes=16384, window_bytes=70000, frames_per_call=1)),
    )
    offset = count = 0
    while offset < len(stream):
        step = steps[count % len(steps)]
        split.take(stream[offset : offset + step])
        offset, count = offset + step, count + 1
    limited.take(stream)
    assert _describe_state(split) == _describe_state(whole_engine)
    assert _describe_state(limited) == _describe_state(whole_engine)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_parsed_or_refused(data: bytes) -> None:
    """The bytes are frames, or the connection is closed with an error."""
    engine = Engine().take(wire.CLIENT_OPENING + data)
    assert engine.gone is None or engine.http2.is_closing
    assert Engine().take(data).http2.received_frames == 0
