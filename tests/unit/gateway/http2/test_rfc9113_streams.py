"""RFC 9113 by section: the states of streams, and the frames of a stream."""

import struct

import pytest

from shmserve.gateway.http2.frames import FaultCode
from shmserve.gateway.http2.incoming import Limits
from shmserve.gateway.http2.outgoing import ResponseBlocks
from tests.support.wire.http2 import (
    ACK,
    CLIENT_OPENING,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PING,
    PRIORITY,
    RESET,
    SETTINGS,
    WINDOW,
    frame,
    post,
    window,
)
from tests.support.wire.http2_engine import Case, Engine

PROTOCOL = (FaultCode.PROTOCOL_ERROR,)
FRAME_SIZE = (FaultCode.FRAME_SIZE_ERROR,)
CLOSED = (FaultCode.STREAM_CLOSED,)
FLOW = (FaultCode.FLOW_CONTROL_ERROR,)
PADDED, HAS_PRIORITY = 0x8, 0x20
WHOLE = END_HEADERS | END_STREAM

POST = post("/x")
BLOCKS = ResponseBlocks(b"\x88", b"\x88")
BEGUN = frame(HEADERS, END_HEADERS, 1, POST)
REQUEST = frame(HEADERS, WHOLE, 1, POST)
LAST = frame(DATA, END_STREAM, 1, b"data")
SERVED = ((1, b"data"),)
EMPTY = ((1, b""),)
ABORTED = BEGUN + frame(RESET, 0, 1, b"\0\0\0\x08")
TRAILERS = frame(HEADERS, WHOLE, 1, b"")
PING_FRAME = frame(PING, 0, 0, bytes(8))


def priority_frame(stream: int, dependency: int = 0) -> bytes:
    return frame(PRIORITY, 0, stream, struct.pack(">IB", dependency, 16))


def continuation_frames(*pieces: bytes, flags: int = END_STREAM) -> bytes:
    """Return a header block in several frames of stream 1."""
    first_piece, *middle_pieces, last_piece = pieces
    return (
        frame(HEADERS, flags, 1, first_piece)
        + b"".join(frame(CONTINUATION, 0, 1, piece) for piece in middle_pieces)
        + frame(CONTINUATION, END_HEADERS, 1, last_piece)
    )


CASES = [
    # --- idle streams
    Case("5.1", "idle: DATA", LAST, PROTOCOL),
    Case("5.1", "idle: RST_STREAM", frame(RESET, 0, 1, bytes(4)), PROTOCOL),
    Case("5.1", "idle: WINDOW_UPDATE", window(1, 1), PROTOCOL),
    Case("5.1", "idle: CONTINUATION", frame(CONTINUATION, END_HEADERS, 1, POST), PROTOCOL),
    Case("5.1", "idle: PRIORITY", priority_frame(1) + REQUEST, served=EMPTY),
    Case("5.1", "idle: DATA of a stream of ours", frame(DATA, 0, 2, b"x"), PROTOCOL),
    Case("5.1", "idle: RST_STREAM of a stream of ours", frame(RESET, 0, 2, bytes(4)), PROTOCOL),
    # --- open
    Case("5.1", "open: all that may come", BEGUN + priority_frame(1) + window(1, 1) + LAST,
        served=SERVED),
    # --- half closed
    Case("5.1", "half closed: DATA", REQUEST + LAST, CLOSED),
    Case("5.1", "half closed by DATA: DATA", BEGUN + LAST + frame(DATA, 0, 1), CLOSED),
    Case("5.1", "half closed: HEADERS", REQUEST + BEGUN, CLOSED),
    Case("5.1", "half closed: trailers", REQUEST + TRAILERS, CLOSED),
    Case(*("5.1", "half closed: CONTINUATION", REQUEST + frame(CONTINUATION, END_HEADERS, 1, b"")),
        (*PROTOCOL, *CLOSED)),
    Case("5.1", "half closed: WINDOW_UPDATE", REQUEST + window(1, 1), served=EMPTY),
    Case("5.1", "half closed: PRIORITY", REQUEST + priority_frame(1), served=EMPTY),
    Case("5.1", "half closed: RST_STREAM", REQUEST + frame(RESET, 0, 1, bytes(4))),
    # --- closed by the client's RST_STREAM
    Case("5.1", "given up: DATA", ABORTED + LAST, CLOSED),
    Case("5.1", "given up: HEADERS", ABORTED + BEGUN, CLOSED),
    Case(*("5.1", "given up: CONTINUATION", ABORTED + frame(CONTINUATION, 4, 1, b"")),
        (*PROTOCOL, *CLOSED)),
    Case("5.1", "given up: WINDOW_UPDATE", ABORTED + window(1, 1)),
    Case("5.1", "given up: PRIORITY", ABORTED + priority_frame(1)),
    Case("5.1", "given up: RST_STREAM", ABORTED + frame(RESET, 0, 1, bytes(4))),
    # --- identifiers
    Case("5.1.1", "an even stream", frame(HEADERS, WHOLE, 2, POST), PROTOCOL),
    Case(*("5.1.1", "a lower stream than before", frame(HEADERS, WHOLE, 5, POST) + REQUEST),
        (*PROTOCOL, *CLOSED)),
    Case("5.1.1", "DATA of a stream that was passed over", frame(HEADERS, WHOLE, 5, POST) + LAST,
        CLOSED),
    Case("5.1.1", "the same stream again", REQUEST + REQUEST, CLOSED),
    Case(*("5.1.1", "streams that are passed over", REQUEST + frame(HEADERS, WHOLE, 9, POST)),
        served=((1, b""), (9, b""))),
    # --- priorities
    Case("5.3", "a chain of streams not begun",
        b"".join(priority_frame(n, n + 2) for n in range(1, 9, 2))),
    Case("5.3", "a stream that depends on itself", BEGUN + priority_frame(1, 1) + LAST,
        served=SERVED),
    Case("5.3", "HEADERS that depend on themselves",
        frame(HEADERS, WHOLE | HAS_PRIORITY, 1, struct.pack(">IB", 1, 0) + POST), served=EMPTY),
    # --- DATA
    Case("6.1", "DATA of no stream", BEGUN + frame(DATA, 0, 0, b"x"), PROTOCOL),
    Case(*("6.1", "padding", BEGUN + frame(DATA, END_STREAM | PADDED, 1, b"\x05data" + bytes(5))),
        served=SERVED),
    Case(*("6.1", "nothing but padding", BEGUN + frame(DATA, PADDED, 1, b"\x05" + bytes(5)) + LAST),
        served=SERVED),
    Case(*("6.1", "padding of no bytes", BEGUN + frame(DATA, PADDED, 1, b"\0") + LAST),
        served=SERVED),
    Case("6.1", "as much padding as frame", BEGUN + frame(DATA, 8, 1, b"\x05data"), PROTOCOL),
    Case("6.1", "more padding than frame", BEGUN + frame(DATA, PADDED, 1, b"\xffdata"), PROTOCOL),
    Case("6.1", "no room for padding's length", BEGUN + frame(DATA, PADDED, 1), FRAME_SIZE),
    Case(*("6.1", "an empty last frame", BEGUN + frame(DATA, 0, 1, b"data") + frame(DATA, 1, 1)),
        served=SERVED),
    # --- HEADERS
    Case("6.2", "HEADERS of no stream", frame(HEADERS, WHOLE, 0, POST), PROTOCOL),
    Case(*("6.2", "padding", frame(HEADERS, WHOLE | PADDED, 1, b"\x03" + POST + bytes(3))),
        served=EMPTY),
    Case("6.2", "padding and a priority",
        frame(HEADERS, WHOLE | PADDED | HAS_PRIORITY, 1, b"\x03" + bytes(5) + POST + bytes(3)),
        served=EMPTY),
    Case("6.2", "more padding than frame", frame(HEADERS, WHOLE | PADDED, 1, b"\xff" + POST),
        PROTOCOL),
    Case(*("6.2", "padding over the priority", frame(HEADERS, WHOLE | 0x28, 1, b"\x04" + bytes(8))),
        PROTOCOL),
    Case("6.2", "no room for padding's length", frame(HEADERS, WHOLE | PADDED, 1), FRAME_SIZE),
    Case(*("6.2", "no room for a priority", frame(HEADERS, WHOLE | HAS_PRIORITY, 1, bytes(4))),
        FRAME_SIZE),
    # --- PRIORITY
    Case("6.3", "PRIORITY of no stream", priority_frame(0), PROTOCOL),
    Case(*("6.3", "too short a PRIORITY", BEGUN + frame(PRIORITY, 0, 1, bytes(4))),
        resets=((1, FaultCode.FRAME_SIZE_ERROR), )),
    Case("6.3", "too short a PRIORITY of an idle stream", frame(PRIORITY, 0, 1, bytes(4)),
        FRAME_SIZE),
    # --- RST_STREAM
    Case("6.4", "RST_STREAM of no stream", frame(RESET, 0, 0, bytes(4)), PROTOCOL),
    Case("6.4", "too short an RST_STREAM", BEGUN + frame(RESET, 0, 1, bytes(3)), FRAME_SIZE),
    Case("6.4", "too long an RST_STREAM", BEGUN + frame(RESET, 0, 1, bytes(5)), FRAME_SIZE),
    Case("6.4", "RST_STREAM", BEGUN + frame(RESET, 0, 1, bytes(4))),
    # --- WINDOW_UPDATE
    Case("6.9", "of all by nothing", window(0, 0), PROTOCOL),
    Case(*("6.9", "of a stream by nothing", BEGUN + window(1, 0)),
        resets=((1, FaultCode.PROTOCOL_ERROR), )),
    Case("6.9", "by nothing, but for the reserved bit", window(0, 2**31), PROTOCOL),
    Case("6.9", "too short a WINDOW_UPDATE", frame(WINDOW, 0, 0, bytes(3)), FRAME_SIZE),
    Case("6.9", "too long a WINDOW_UPDATE", BEGUN + frame(WINDOW, 0, 1, bytes(5)), FRAME_SIZE),
    Case("6.9.1", "the largest window of all", window(0, 2**31 - 1 - 65535)),
    Case("6.9.1", "a larger one", window(0, 2**31 - 65535), FLOW),
    Case("6.9.1", "a larger one in steps", window(0, 2**30) + window(0, 2**30), FLOW),
    Case("6.9.1", "a stream's largest", BEGUN + window(1, 2**31 - 1 - 65535) + LAST, served=SERVED),
    Case(*("6.9.1", "a stream's larger one", BEGUN + window(1, 2**31 - 1)),
        resets=((1, FaultCode.FLOW_CONTROL_ERROR), )),
    Case("6.9.2", "SETTINGS that make a stream's window too large",
        BEGUN + window(1, 2**31 - 1 - 65535) + frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 65536)),
        FLOW),
    # --- CONTINUATION
    Case("6.10", "several", continuation_frames(POST[:5], b"", POST[5:9], POST[9:]), served=EMPTY),
    Case("6.10", "of trailers", BEGUN + continuation_frames(b"", b"", b""), served=EMPTY),
    Case("6.10", "another frame between", frame(HEADERS, 0, 1, POST) + PING_FRAME, PROTOCOL),
    Case("6.10", "behind the end of HEADERS", BEGUN + frame(CONTINUATION, 4, 1, b""), PROTOCOL),
    Case(*("6.10", "behind the end of a CONTINUATION",
        continuation_frames(POST, b"") + frame(CONTINUATION, 4, 1)), PROTOCOL),
    Case("6.10", "behind DATA", BEGUN + LAST + frame(CONTINUATION, 4, 1), PROTOCOL),
    Case(*("6.10", "of another stream", frame(HEADERS, 0, 1, POST) + frame(CONTINUATION, 4, 3)),
        PROTOCOL),
    Case(*("6.10", "of no stream", frame(HEADERS, 0, 1, POST) + frame(CONTINUATION, 4, 0)),
        PROTOCOL),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_section(case: Case) -> None:
    case.check()


OPEN_ENDED = [
    ("DATA", LAST),
    ("empty DATA", frame(DATA, 0, 1)),
    ("padded DATA", frame(DATA, PADDED, 1, b"\x03data" + bytes(3))),
    ("trailers", TRAILERS),
    ("malformed trailers", frame(HEADERS, WHOLE, 1, post("/"))),
    ("RST_STREAM", frame(RESET, 0, 1, bytes(4))),
    ("WINDOW_UPDATE", window(1, 5)),
    ("PRIORITY", priority_frame(1)),
]


@pytest.mark.parametrize(("name", "late_frame"), OPEN_ENDED, ids=[name for name, _ in OPEN_ENDED])
@pytest.mark.parametrize("ending", ["reset", "answered early"])
def test_frames_for_a_stream_the_server_ended(name: str, late_frame: bytes, ending: str) -> None:
    """5.1, closed: frames that the client sent before it received the end are ignored."""
    engine = Engine().take(CLIENT_OPENING + BEGUN)
    if ending == "reset":
        engine.http2.reset(engine.stream(1), FaultCode.CANCEL)
    else:
        engine.http2.sender.send_trailers(engine.stream(1), b"\x88")
    engine.take(late_frame)
    assert list(engine.resets) == [1]
    engine.check_goes_on()


def test_a_stream_that_is_reset_within_a_frame() -> None:
    """5.1, closed: the rest of its data is passed over, and the next frame is found."""
    engine = Engine().take(CLIENT_OPENING + BEGUN + frame(DATA, END_STREAM, 1, bytes(100))[:50])
    engine.http2.reset(engine.stream(1), FaultCode.CANCEL)
    engine.take(frame(DATA, END_STREAM, 1, bytes(100))[50:])
    assert len(engine.requests[1].data) == 41 and not engine.requests[1].ended
    engine.check_goes_on()


def test_header_blocks_of_ended_streams_are_decoded() -> None:
    """4.3: their fields are in the table for the blocks that follow."""
    engine = Engine().take(CLIENT_OPENING + BEGUN)
    engine.http2.reset(engine.stream(1), FaultCode.CANCEL)
    indexed_field = b"\x40\x01a\x01b"  # adds the field to the dynamic table
    engine.take(frame(HEADERS, WHOLE, 1, indexed_field) + frame(HEADERS, WHOLE, 3, POST + b"\xbe"))
    assert engine.requests[3].fields[-1] == (b"a", b"b")


def test_frames_for_a_completed_stream() -> None:
    """5.1, closed: both are done; only what may cross the answer is ignored."""
    for late_frame, is_fatal in [
        (window(1, 1) + priority_frame(1) + frame(RESET, 0, 1, bytes(4)), None),
        (LAST, FaultCode.STREAM_CLOSED),
        (TRAILERS, FaultCode.STREAM_CLOSED),
    ]:
        engine = Engine().take(CLIENT_OPENING + REQUEST)
        engine.http2.sender.send_response(engine.stream(1), BLOCKS, (b"data",))
        assert not engine.http2.streams and engine.take(late_frame).gone is is_fatal


def test_too_many_concurrent_streams_are_refused() -> None:
    """5.1.2: they are refused, and may be tried again when others are done."""
    engine = Engine(Limits(max_streams=2)).take(CLIENT_OPENING)
    for stream in (1, 3, 5):
        engine.take(frame(HEADERS, END_HEADERS, stream, POST))
    assert list(engine.requests) == [1, 3]
    assert engine.resets == {5: FaultCode.REFUSED_STREAM}
    engine.take(frame(DATA, END_STREAM, 5, b"on its way") + LAST)
    engine.http2.sender.send_response(engine.stream(1), BLOCKS, ())
    engine.check_goes_on()


def test_a_response_may_overlap_its_request() -> None:
    """5.1, half closed: sending does not depend on receiving."""
    engine = Engine().take(CLIENT_OPENING + BEGUN)
    sender, stream = engine.http2.sender, engine.stream(1)
    sender.send_head(stream, b"\x88")
    sender.send_data(stream, b"some")
    engine.take(LAST + window(1, 5) + priority_frame(1))
    sender.send_data(stream, b"more")
    sender.send_trailers(stream, b"\x88")
    sent_frames = engine.flush()
    assert [(i.kind, i.payload) for i in sent_frames] == [(DATA, b"more"), (HEADERS, b"\x88")]
    assert not engine.http2.streams


def test_data_beyond_the_window_is_refused() -> None:
    """6.9.1: the window of a stream; window updates and padding count."""
    limits = Limits(window_bytes=65535, frame_bytes=16384)
    full_window = b"".join(frame(DATA, 0, 1, bytes(13107)) for _ in range(5))
    assert Engine(limits).take(CLIENT_OPENING + BEGUN + full_window).resets == {}
    one_more = Engine(limits).take(CLIENT_OPENING + BEGUN + full_window + frame(DATA, 0, 1, b"x"))
    assert one_more.resets == {1: FaultCode.FLOW_CONTROL_ERROR}
    assert one_more.requests[1].cancelled
    granted_engine = Engine(limits).take(CLIENT_OPENING + BEGUN + full_window)
    granted_engine.http2.send_window_update(granted_engine.stream(1), 6)
    assert granted_engine.take(frame(DATA, PADDED, 1, b"\4" + bytes(5))).resets == {}
    granted_engine.take(frame(DATA, PADDED, 1, b"\0"))
    assert granted_engine.resets == {1: FaultCode.FLOW_CONTROL_ERROR}


def test_padding_is_returned_to_the_window() -> None:
    """6.9.1: padding uses the window, and the receiver of the data does not see it."""
    engine = Engine(Limits(window_bytes=65535, frame_bytes=16384)).take(CLIENT_OPENING + BEGUN)
    for _ in range(2000):
        engine.take(frame(DATA, PADDED, 1, b"\xff" + bytes(255)))
    assert engine.resets == {}
    window_updates = [item for item in engine.sent if item.kind == WINDOW and item.stream == 1]
    assert 0 < len(window_updates) < 40


def test_the_window_of_the_connection_is_refilled() -> None:
    """6.9.1: what streams are granted is all that holds a client back."""
    engine = Engine(Limits(frame_bytes=2**20, window_bytes=2**20))
    updates = [i for i in engine.sent if i.kind == WINDOW]
    assert [(i.stream, i.payload) for i in updates] == [(0, struct.pack(">I", 2**31 - 65536))]
    engine.take(CLIENT_OPENING + BEGUN)
    piece = frame(DATA, 0, 1, bytes(2**20))
    for _ in range(1100):
        engine.http2.send_window_update(engine.stream(1), 2**20)
        engine.take(piece)
        engine.requests[1].data = b""
    assert engine.gone is None
    assert len([i for i in engine.sent if i.kind == WINDOW and not i.stream]) == 2


def test_acknowledgements_are_no_requests() -> None:
    """6.5: an acknowledgement of ours is answered by nothing."""
    engine = Engine().take(CLIENT_OPENING)
    sent_before = len(engine.sent)
    engine.take(frame(SETTINGS, ACK, 0))
    assert len(engine.sent) == sent_before
