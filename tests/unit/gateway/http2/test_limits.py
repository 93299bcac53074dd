"""Attacks on a connection: each ends it, or costs a bounded number of bytes and steps."""

import contextlib
import struct
import tracemalloc
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.gateway.http2.frames import ConnectionFault, FaultCode
from shmserve.gateway.http2.header_blocks import encode_block
from shmserve.gateway.http2.incoming import Budget, Limits
from shmserve.gateway.http2.outgoing import ResponseBlocks
from tests.support.wire.http2 import (
    ACK,
    CLIENT_OPENING,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GO_AWAY,
    HEADERS,
    PING,
    PRIORITY,
    RESET,
    SETTINGS,
    WINDOW,
    frame,
    window,
)
from tests.support.wire.http2_engine import Engine

PADDED_FLAG, UNKNOWN_TYPE = 0x8, 0x16
REQUEST = b"\x83\x86\x84"
RESPONSE_BLOCKS = ResponseBlocks(b"\x88", b"\x88")
LIMITS = Limits(
    resets=20, resets_per_s=2, control_frames=30, control_frames_per_s=4, max_streams=16
)
_FLOOD_SIZE = 200  # more frames than any small limit allows


def begin(stream: int, *, end: bool = False, block: bytes = REQUEST) -> bytes:
    return frame(HEADERS, END_HEADERS | end, stream, block)


class Clock:
    """A clock that a test advances."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


# --- resets by the client and resets that it provokes

CLIENT_RESETS: dict[str, Callable[[int], bytes]] = {
    "rapid reset": lambda n: begin(n) + frame(RESET, 0, n, bytes(4)),
    "rapid reset of whole requests": lambda n: begin(n, end=True) + frame(RESET, 0, n, bytes(4)),
    "a window by nothing": lambda n: begin(n, end=True) + window(n, 0),
    "a window that is too large": lambda n: begin(n, end=True) + window(n, 2**31 - 1),
    "a broken PRIORITY": lambda n: begin(n) + frame(PRIORITY, 0, n, b"1"),
    "more data than is said": lambda n: (begin(n,
        block=REQUEST + encode_block([(b"content-length", b"1")])) + frame(DATA, 0, n, b"12")),
    "less data than is said": lambda n: begin(n, end=True,
        block=REQUEST + encode_block([(b"content-length", b"1")])),
    "more data than was granted": lambda n: (begin(n) + frame(DATA, 0, n,
        bytes(LIMITS.window_bytes)) + frame(DATA, 0, n, b"1")),
    "a malformed request": lambda n: begin(n, block=REQUEST[:2]),
    "malformed trailers": lambda n: begin(n) + begin(n, end=True, block=REQUEST),
    "trailers that end nothing": lambda n: begin(n) + begin(n, block=b""),
}  # fmt: skip


@pytest.mark.parametrize("name", CLIENT_RESETS)
def test_too_many_stream_resets_end_the_connection(name: str) -> None:
    """By the client, or by us because it has us do so: a number of them at once ends it."""
    engine = Engine(LIMITS, Clock()).take(CLIENT_OPENING)
    streams = iter(range(1, 100_000, 2))
    for _ in range(LIMITS.resets):
        engine.take(CLIENT_RESETS[name](next(streams)))
        assert engine.gone is None and not engine.http2.streams
    engine.take(CLIENT_RESETS[name](next(streams)))
    assert engine.gone is FaultCode.ENHANCE_YOUR_CALM and len(engine.sent) < 100


def test_resets_are_refilled_over_time() -> None:
    """A client that resets streams more slowly stays connected."""
    clock = Clock()
    engine = Engine(LIMITS, clock).take(CLIENT_OPENING)
    for number in range(1, 1000, 2):
        engine.take(CLIENT_RESETS["rapid reset"](number))
        clock.now += 1 / LIMITS.resets_per_s
    assert engine.gone is None


def test_responses_earn_stream_resets() -> None:
    """As clients with deadlines do, at any rate; and when their ends cross ours."""
    engine = Engine(LIMITS, Clock()).take(CLIENT_OPENING)
    for number in range(1, 4000, 4):
        engine.take(begin(number, end=True))
        engine.http2.sender.send_response(engine.stream(number), RESPONSE_BLOCKS, (b"12345",))
        engine.take(CLIENT_RESETS["rapid reset of whole requests"](number + 2))
        if number % 3 == 0:
            engine.take(frame(RESET, 0, number, bytes(4)))
    assert engine.gone is None


# --- frames that carry nothing


def _repeat(sent_data: bytes) -> Callable[[int], bytes]:
    return lambda _: sent_data


CONTROL: dict[str, Callable[[int], bytes]] = {
    "PING": _repeat(frame(PING, 0, 0, bytes(8))),
    "answers to no PING": _repeat(frame(PING, ACK, 0, bytes(8))),
    "SETTINGS": _repeat(frame(SETTINGS, 0, 0)),
    "SETTINGS with values": _repeat(frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 1) * 2000)),
    "acknowledgements of SETTINGS": _repeat(frame(SETTINGS, ACK, 0)),
    "RST_STREAM of a stream that is over": _repeat(frame(RESET, 0, 3, bytes(4))),
    "PRIORITY": _repeat(frame(PRIORITY, 0, 7, bytes(5))),
    "PRIORITY of many streams": lambda n: frame(PRIORITY, 0, n + 1000, bytes(5)),
    "GOAWAY": _repeat(frame(GO_AWAY, 0, 0, bytes(8))),
    "frames of no known kind": _repeat(frame(UNKNOWN_TYPE, 0, 1, b"x")),
    "windows of all": _repeat(window(0, 1)),
    "windows of a stream": _repeat(window(1, 1)),
    "windows of a stream that is over": _repeat(window(3, 1)),
    "empty DATA": _repeat(frame(DATA, 0, 1)),
    "DATA of nothing but padding": _repeat(frame(DATA, PADDED_FLAG, 1, b"\x05" + bytes(5))),
    "DATA of a stream that we have ended": _repeat(frame(DATA, 0, 5, b"x")),
    "trailers of a stream that we have ended": _repeat(begin(5, block=b"")),
}


def engine_with_ended_streams(clock: Clock) -> Engine:
    """Return an engine with the open stream 1, the answered stream 3 and the reset stream 5."""
    engine = Engine(LIMITS, clock).take(CLIENT_OPENING + begin(1) + begin(3, end=True) + begin(5))
    engine.http2.sender.send_response(engine.stream(3), RESPONSE_BLOCKS, ())
    engine.http2.reset(engine.stream(5), FaultCode.CANCEL)
    return engine


@pytest.mark.parametrize("name", CONTROL)
def test_floods_end_the_connection(name: str) -> None:
    """The answers are bounded by the received frames."""
    engine = engine_with_ended_streams(Clock())
    engine.flush()
    sent_before = len(engine.sent)
    for number in range(_FLOOD_SIZE):
        engine.take(CONTROL[name](2 * number))
    assert engine.gone is FaultCode.ENHANCE_YOUR_CALM
    assert engine.sent[-1].payload[8:] == b"too many frames without effect (allowed: 4 per second)"
    assert len(engine.sent) - sent_before <= LIMITS.control_frames + 1


@pytest.mark.parametrize("name", CONTROL)
def test_control_frames_of_an_honest_client_are_permitted(name: str) -> None:
    """Such frames are permitted at a low rate or together with calls."""
    clock = Clock()
    engine = engine_with_ended_streams(clock)
    for number in range(_FLOOD_SIZE):
        engine.take(CONTROL[name](2 * number))
        clock.now += 1 / LIMITS.control_frames_per_s
    assert engine.gone is None


def test_calls_earn_control_frames() -> None:
    """A PING and a WINDOW_UPDATE for each call, as some clients send, at any rate."""
    engine = Engine(LIMITS, Clock()).take(CLIENT_OPENING)
    for number in range(1, 2000, 2):
        control_frames = frame(PING, 0, 0, bytes(8)) + window(0, 5) + frame(PING, ACK, 0, bytes(8))
        engine.take(begin(number, end=True) + control_frames)
        engine.http2.sender.send_response(engine.stream(number), RESPONSE_BLOCKS, (b"12345",))
    assert engine.gone is None


def test_sent_data_earns_window_updates() -> None:
    engine = Engine(LIMITS, Clock()).take(CLIENT_OPENING + begin(1))
    for _ in range(1000):
        engine.http2.sender.send_data(engine.stream(1), b"token")
        engine.take(window(0, 5) + window(1, 5))
    assert engine.gone is None


def test_messages_in_one_frame_earn_window_updates_each() -> None:
    """A client may grant more for each message that its program takes, when all have come."""
    engine = Engine(LIMITS, Clock()).take(
        CLIENT_OPENING + window(0, 1 << 20) + begin(1) + window(1, 1 << 20)
    )
    engine.http2.sender.send_data(engine.stream(1), b"a message of thirty-two bytes..." * 5000)
    for _ in range(5000):
        engine.take(window(1, 32))
    assert engine.gone is None
    for _ in range(LIMITS.control_frames + 200):
        engine.take(window(1, 32))
    assert engine.gone is FaultCode.ENHANCE_YOUR_CALM


# --- header blocks


def test_endless_continuations_are_refused() -> None:
    for piece in (b"", b"\x84"):
        engine = Engine().take(CLIENT_OPENING + frame(HEADERS, END_STREAM, 1, REQUEST))
        for _ in range(Limits().max_continuations):
            assert engine.take(frame(CONTINUATION, 0, 1, piece)).gone is None
        assert engine.take(frame(CONTINUATION, 0, 1, piece)).gone is FaultCode.ENHANCE_YOUR_CALM


def test_an_endless_header_block_is_refused() -> None:
    """By its bytes on the wire, before they are here."""
    limits = Limits(header_block_bytes=20000)
    engine = Engine(limits).take(CLIENT_OPENING + frame(HEADERS, 0, 1, bytes(15000)))
    assert engine.take(frame(CONTINUATION, 0, 1, bytes(5000))).gone is None
    assert engine.take(frame(CONTINUATION, 0, 1, b"x")).gone is FaultCode.ENHANCE_YOUR_CALM
    head = frame(HEADERS, END_HEADERS, 1, bytes(20001))[:9]
    assert Engine(limits).take(CLIENT_OPENING + head).gone is FaultCode.ENHANCE_YOUR_CALM


def test_a_header_list_is_limited_while_it_is_decoded() -> None:
    """The table has a large field, of which each reference takes one byte."""
    field = b"\x40\x01a\x7f\xc1\x1e" + b"x" * 4032
    engine = Engine().take(CLIENT_OPENING + begin(1, block=REQUEST + field))
    tracemalloc.start()
    engine.take(begin(3, block=REQUEST + b"\xbe" * 50_000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert engine.gone is FaultCode.ENHANCE_YOUR_CALM
    assert peak < 2**20


def test_many_small_fields_are_refused() -> None:
    engine = Engine().take(CLIENT_OPENING)
    assert engine.take(begin(1, block=REQUEST + b"\x90" * 3000)).gone is FaultCode.ENHANCE_YOUR_CALM


# --- streams, and data


def test_too_many_streams_are_refused() -> None:
    """A client that continues to open streams is disconnected."""
    engine = Engine(LIMITS, Clock()).take(CLIENT_OPENING)
    for number in range(1, 1000, 2):
        engine.take(begin(number))
    assert len(engine.requests) == LIMITS.max_streams
    assert engine.gone is FaultCode.ENHANCE_YOUR_CALM
    assert len(engine.resets) == LIMITS.resets


def test_incomplete_frames_are_bounded() -> None:
    """Data is not buffered; of any other incomplete frame at most its maximum size is."""
    engine = Engine().take(CLIENT_OPENING + begin(1) + frame(DATA, 0, 1, bytes(2**20))[:9])
    for _ in range(60):
        engine.take(bytes(16384))
        assert not engine.http2._buffer
    for kind in (PING, SETTINGS, RESET, WINDOW, PRIORITY, GO_AWAY, UNKNOWN_TYPE):
        head = frame(kind, 0, 0, bytes(16385))[:9]
        assert Engine().take(CLIENT_OPENING + head).gone is FaultCode.FRAME_SIZE_ERROR


def test_a_client_that_does_not_read_is_bounded() -> None:
    """The queued bytes are bounded for any number of calls that are answered at once."""
    engine = Engine(LIMITS, Clock()).take(CLIENT_OPENING)
    engine.http2.sender.is_paused = True
    sent_before = len(engine.sent)
    for number in range(1, 1000, 2):
        engine.take(begin(number, end=True))
        if number in engine.requests:
            engine.http2.sender.send_trailers(engine.stream(number), b"\x88")
    assert engine.gone is FaultCode.ENHANCE_YOUR_CALM
    assert len(engine.sent) - sent_before <= LIMITS.resets + 1


# --- work


def _frames_per_turn(engine: Engine, sent_data: bytes) -> Iterator[int]:
    frames_before = engine.http2.received_frames
    engine.http2.receive(sent_data)
    while True:
        yield engine.http2.received_frames - frames_before
        if not engine.http2.has_pending_frames:
            break
        frames_before = engine.http2.received_frames
        engine.http2.receive(b"")


@pytest.mark.parametrize(
    ("piece", "frames_per_turn"),
    [
        (frame(DATA, 0, 1, b"x"), 100),
        (frame(PING, 0, 0, bytes(8)), 25),
        (window(1, 1), 25),
        (frame(PRIORITY, 0, 1, bytes(5)), 25),
        (frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 1) * 2000), 1),
    ],
)
def test_the_work_of_a_turn_is_bounded(piece: bytes, frames_per_turn: int) -> None:
    """The limit counts frames, and empty frames count more; all are handled in the end."""
    engine = Engine(Limits(frames_per_call=100, control_frames=10**6)).take(
        CLIENT_OPENING + begin(1)
    )
    handled = list(_frames_per_turn(engine, piece * 1000))
    expected_turns = [frames_per_turn] * (1000 // frames_per_turn)
    assert handled in (expected_turns, [*expected_turns, 0])


@pytest.mark.parametrize(("size", "requests_per_turn"), [(0, 10), (70, 8), (5000, 1)])
def test_requests_count_as_more_work(size: int, requests_per_turn: int) -> None:
    """Long header blocks more than short ones, in one frame or in several."""
    field = encode_block([(b"a", b"x" * size)])
    for sent_frames in (
        [begin(number, block=REQUEST + field) for number in range(1, 81, 2)],
        [
            frame(HEADERS, 0, number, REQUEST) + frame(CONTINUATION, END_HEADERS, number, field)
            for number in range(1, 81, 2)
        ],
    ):
        engine = Engine(Limits(frames_per_call=100, stream_cost_frames=9)).take(CLIENT_OPENING)
        handled = list(_frames_per_turn(engine, b"".join(sent_frames)))
        assert max(handled) <= 2 * requests_per_turn
        assert len(engine.http2.streams) == 40


def test_frames_received_meanwhile_stay_in_order() -> None:
    engine = Engine(Limits(frames_per_call=10)).take(CLIENT_OPENING)
    pings = [frame(PING, 0, 0, struct.pack(">Q", number)) for number in range(40)]
    for offset in range(0, 40, 8):
        engine.http2.receive(b"".join(pings[offset : offset + 8]))
    while engine.http2.has_pending_frames:
        engine.http2.receive(b"")
    answers = [sent_frame.payload for sent_frame in engine.flush()]
    assert answers == [struct.pack(">Q", number) for number in range(40)]


def test_nothing_is_pending_after_the_connection_failed() -> None:
    engine = Engine(Limits(frames_per_call=10))
    engine.http2.receive(CLIENT_OPENING + frame(PING, 0, 0) + frame(PING, 0, 0, bytes(8)) * 50)
    assert engine.http2.is_closing and not engine.http2.has_pending_frames
    assert not engine.http2._buffer


def test_enlarged_windows_are_used_once_per_turn() -> None:
    """However many frames make them grow, and however many streams wait."""
    look_count = 0

    def count_look() -> None:
        nonlocal look_count
        look_count += 1

    engine = Engine().take(CLIENT_OPENING)
    streams = range(1, 1001, 2)
    for number in streams:
        engine.take(begin(number, end=True))
    engine.http2.sender.window = 0
    for number in streams:
        stream = engine.stream(number)
        engine.http2.sender.send_data(stream, bytes(100_000))
        stream.on_progress = count_look
    engine.take(window(0, 1) * 60)
    assert look_count <= 2
    look_count = 0
    size = struct.pack(">HI", 4, 65536) + struct.pack(">HI", 4, 65537)
    engine.take(frame(SETTINGS, 0, 0, size * 1000) * 100)
    assert look_count <= len(streams)


# --- budgets


def test_a_budget_is_spent_and_exhausted() -> None:
    budget = Budget(3, 2.0, Clock(), "things")
    for _ in range(3):
        budget.take_token()
    with pytest.raises(ConnectionFault, match="too many things"):
        budget.take_token()


def test_time_refills_a_budget() -> None:
    clock = Clock()
    budget = Budget(3, 2.0, clock, "things")
    for _ in range(3):
        budget.take_token()
    clock.now += 0.5
    budget.take_token()
    clock.now += 1000
    for _ in range(4):  # the rest of the first second, and then the full capacity
        budget.take_token()
    with pytest.raises(ConnectionFault):
        budget.take_token()


@given(st.lists(st.tuples(st.sampled_from(["spend", "earn", "wait"]), st.integers(0, 50))))
def test_a_refill_does_not_exceed_the_capacity(actions: list[tuple[str, int]]) -> None:
    """The sum is bounded by the capacity and the refill, and a burst by twice the capacity."""
    clock = Clock()
    budget = Budget(10, 2.0, clock, "things")
    spent_budget, available = 0, 10.0
    for action, count in actions:
        if action == "earn":
            budget.add_tokens(count)
            available += count
        elif action == "wait":
            clock.now += count
            available += 2.0 * count
        else:
            at_once = 0
            with contextlib.suppress(ConnectionFault):
                while at_once < count:
                    budget.take_token()
                    at_once += 1
            spent_budget += at_once
            assert spent_budget <= available
            assert at_once <= 2 * 10 + 1
