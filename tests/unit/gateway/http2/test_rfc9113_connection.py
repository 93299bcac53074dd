"""RFC 9113 by section: the preface, frames in general, and those of the whole connection."""

import struct

import pytest

from shmserve.gateway.http2.frames import FaultCode
from shmserve.gateway.http2.incoming import Limits
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
    PREFACE,
    PRIORITY,
    RESET,
    SETTINGS,
    WINDOW,
    frame,
    post,
)
from tests.support.wire.http2_engine import Case, Engine, Frame

PROTOCOL = (FaultCode.PROTOCOL_ERROR,)
FRAME_SIZE = (FaultCode.FRAME_SIZE_ERROR,)
FLOW = (FaultCode.FLOW_CONTROL_ERROR,)
PUSH_PROMISE, UNKNOWN = 5, 0x16
POST = post("/x")
BEGUN = frame(HEADERS, END_HEADERS, 1, POST)
WHOLE = frame(HEADERS, END_HEADERS | END_STREAM, 1, POST)
LAST = frame(DATA, END_STREAM, 1, b"data")
SERVED = ((1, b"data"),)
NO_SETTINGS = frame(SETTINGS, 0, 0)


def settings_frame(*values: tuple[int, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", *value) for value in values))


CASES = [
    # --- the preface
    Case("3.4", "a preface and SETTINGS", BEGUN + LAST, served=SERVED),
    Case("3.4", "a request right behind them", NO_SETTINGS + WHOLE, served=((1, b""),)),
    Case("3.4", "another preface", b"INVALID CONNECTION PREFACE\r\n\r\n", PROTOCOL, before=b""),
    Case("3.4", "a broken end", PREFACE[:-1] + b"X", PROTOCOL, before=b""),
    Case("3.4", "HTTP/1.1", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", PROTOCOL, before=b""),
    Case("3.4", "a wrong first byte", b"\x16", PROTOCOL, before=b""),
    Case("3.4", "a request before SETTINGS", WHOLE, PROTOCOL, before=PREFACE),
    Case("3.4", "DATA before SETTINGS", LAST, PROTOCOL, before=PREFACE),
    Case("3.4", "a PING before SETTINGS", frame(PING, 0, 0, bytes(8)), PROTOCOL, before=PREFACE),
    Case("3.4", "an acknowledgement first", frame(SETTINGS, ACK, 0), PROTOCOL, before=PREFACE),
    Case("3.4", "an unknown frame first", frame(UNKNOWN, 0, 0), PROTOCOL, before=PREFACE),
    # --- the layout of frames
    Case("4.1", "an unknown frame", frame(UNKNOWN, 0, 0, bytes(8)) + WHOLE, served=((1, b""),)),
    Case(*("4.1", "an unknown frame of a stream", BEGUN + frame(UNKNOWN, 0xFF, 1, bytes(8)) + LAST),
        served=SERVED),
    Case("4.1", "an unknown frame of a stream not begun", frame(UNKNOWN, 0, 99, bytes(8))),
    Case("4.1", "unknown flags of PING", frame(PING, 0xFE, 0, bytes(8))),
    Case("4.1", "unknown flags of SETTINGS", frame(SETTINGS, 0xFE, 0)),
    Case(*("4.1", "unknown flags of HEADERS", frame(HEADERS, END_HEADERS | 0xD2, 1, POST) + LAST),
        served=SERVED),
    Case(*("4.1", "unknown flags of DATA", BEGUN + frame(DATA, END_STREAM | 0xF6, 1, b"data")),
        served=SERVED),
    Case("4.1", "unknown flags of RST_STREAM", BEGUN + frame(RESET, 0xFF, 1, bytes(4))),
    Case("4.1", "unknown flags of WINDOW_UPDATE", frame(WINDOW, 0xFF, 0, b"\0\0\0\1")),
    Case("4.1", "the reserved bit", frame(PING, 0, 0x80000000, bytes(8))),
    Case("4.1", "the reserved bit of a stream's frames",
        frame(HEADERS, END_HEADERS, 0x80000001, POST) + frame(DATA, END_STREAM, 0x80000001,
        b"data"), served=SERVED),
    Case(*("4.2", "DATA of the largest size that all take",
        BEGUN + frame(DATA, 1, 1, bytes(16384))), served=((1, bytes(16384)), )),
    Case("4.2", "too large DATA", BEGUN + frame(DATA, 0, 1, bytes(16385)), FRAME_SIZE),
    Case("4.2", "too large DATA of no stream", frame(DATA, 0, 9, bytes(16385)), FRAME_SIZE),
    Case("4.2", "too large HEADERS", frame(HEADERS, END_HEADERS, 1, bytes(16385)), FRAME_SIZE),
    Case("4.2", "too large SETTINGS", frame(SETTINGS, 0, 0, bytes(16386)), FRAME_SIZE),
    Case("4.2", "too large a PRIORITY", frame(PRIORITY, 0, 1, bytes(16385)), FRAME_SIZE),
    Case("4.2", "too large an unknown frame", frame(UNKNOWN, 0, 0, bytes(16385)), FRAME_SIZE),
    Case(*("4.3", "no header block", frame(HEADERS, END_HEADERS, 1, b"\x00\x00")),
        (FaultCode.COMPRESSION_ERROR, )),
    Case("4.3", "a block that PRIORITY interrupts",
        frame(HEADERS, 0, 1, POST) + frame(PRIORITY, 0, 1, bytes(5)), PROTOCOL),
    Case("4.3", "a block that HEADERS of another stream interrupts",
        frame(HEADERS, 0, 1, POST) + frame(HEADERS, END_HEADERS, 3, POST), PROTOCOL),
    Case(*("4.3", "a block that DATA interrupts", frame(HEADERS, 0, 1, POST) + LAST), PROTOCOL),
    Case("4.3", "a block that SETTINGS interrupts", frame(HEADERS, 0, 1, POST) + NO_SETTINGS,
        PROTOCOL),
    Case("4.3", "trailers that a PING interrupts",
        BEGUN + frame(HEADERS, END_STREAM, 1, b"") + frame(PING, 0, 0, bytes(8)), PROTOCOL),
    # --- errors of the connection
    Case("5.4.1", "nothing counts behind an error", frame(PING, 0, 0) + WHOLE, FRAME_SIZE),
    # --- extensions
    Case("5.5", "an unknown frame in a header block",
        frame(HEADERS, 0, 1, POST) + frame(UNKNOWN, 0, 1, bytes(4)), PROTOCOL),
    Case("5.5", "an unknown setting", settings_frame((0xFF, 1))),
    # --- SETTINGS
    Case("6.5", "an acknowledgement", frame(SETTINGS, ACK, 0)),
    Case("6.5", "an acknowledgement with values", frame(SETTINGS, ACK, 0, bytes(6)), FRAME_SIZE),
    Case("6.5", "SETTINGS of a stream", BEGUN + frame(SETTINGS, 0, 1), PROTOCOL),
    Case("6.5", "an acknowledgement of a stream", BEGUN + frame(SETTINGS, ACK, 1), PROTOCOL),
    Case("6.5", "SETTINGS frame with an invalid size", frame(SETTINGS, 0, 0, bytes(3)), FRAME_SIZE),
    Case("6.5", "SETTINGS with half a value more", frame(SETTINGS, 0, 0, bytes(7)), FRAME_SIZE),
    Case("6.5.2", "ENABLE_PUSH of 2", settings_frame((2, 2)), PROTOCOL),
    Case("6.5.2", "ENABLE_PUSH of 0 and of 1", settings_frame((2, 0), (2, 1))),
    Case("6.5.2", "INITIAL_WINDOW_SIZE of 2^31", settings_frame((4, 2**31)), FLOW),
    Case("6.5.2", "INITIAL_WINDOW_SIZE of 2^31-1", settings_frame((4, 2**31 - 1))),
    Case("6.5.2", "MAX_FRAME_SIZE below 2^14", settings_frame((5, 2**14 - 1)), PROTOCOL),
    Case("6.5.2", "MAX_FRAME_SIZE above 2^24-1", settings_frame((5, 2**24)), PROTOCOL),
    Case("6.5.2", "MAX_FRAME_SIZE at its ends", settings_frame((5, 2**14), (5, 2**24 - 1))),
    Case("6.5.2", "any of the others",
        settings_frame((1, 2**32 - 1), (3, 0), (6, 0), (6, 2**32 - 1))),
    Case("6.5.3", "the first of two is wrong", settings_frame((5, 1), (5, 2**14)), PROTOCOL),
    # --- PUSH_PROMISE
    Case("6.6", "a PUSH_PROMISE", BEGUN + frame(PUSH_PROMISE, 4, 1, bytes(4) + POST), PROTOCOL),
    Case("6.6", "a PUSH_PROMISE of no stream", frame(PUSH_PROMISE, 4, 0, bytes(4)), PROTOCOL),
    # --- PING
    Case("6.7", "a PING", frame(PING, 0, 0, b"12345678")),
    Case("6.7", "an answer that nobody asked for", frame(PING, ACK, 0, b"12345678")),
    Case("6.7", "a PING of a stream", BEGUN + frame(PING, 0, 1, bytes(8)), PROTOCOL),
    Case("6.7", "too short a PING", frame(PING, 0, 0, bytes(7)), FRAME_SIZE),
    Case("6.7", "too long a PING", frame(PING, 0, 0, bytes(9)), FRAME_SIZE),
    Case("6.7", "too short an answer", frame(PING, ACK, 0, bytes(6)), FRAME_SIZE),
    # --- GOAWAY
    Case("6.8", "a GOAWAY, behind which calls go on", frame(GO_AWAY, 0, 0, bytes(8))),
    Case("6.8", "a GOAWAY with a reason", frame(GO_AWAY, 0, 0, bytes(8) + b"as it is")),
    Case("6.8", "a GOAWAY of a stream", BEGUN + frame(GO_AWAY, 0, 1, bytes(8)), PROTOCOL),
    Case("6.8", "too short a GOAWAY", frame(GO_AWAY, 0, 0, bytes(7)), FRAME_SIZE),
    # --- error codes
    Case("7", "an unknown code of GOAWAY", frame(GO_AWAY, 0, 0, bytes(4) + b"\0\0\0\xff")),
    Case("7", "an unknown code of RST_STREAM", BEGUN + frame(RESET, 0, 1, b"\0\0\0\xff")),
    # --- CONTINUATION of nothing, in general
    Case("6.10", "of no stream", frame(CONTINUATION, END_HEADERS, 0, POST), PROTOCOL),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_section(case: Case) -> None:
    case.check(Limits(frame_bytes=16384))


def test_the_servers_settings_are_its_first_frame() -> None:
    """3.4: SETTINGS are the first that a server sends, which may come before the preface."""
    engine = Engine(
        Limits(max_streams=7, window_bytes=70000, frame_bytes=20000, header_list_bytes=5000)
    )
    first_frame = engine.sent[0]
    assert first_frame[:3] == (SETTINGS, 0, 0)
    values = dict(struct.iter_unpack(">HI", first_frame.payload))
    assert values == {3: 7, 4: 70000, 5: 20000, 6: 5000}


def test_a_ping_is_acknowledged_with_its_payload() -> None:
    """6.7: once, and no answer is answered."""
    engine = Engine().take(
        CLIENT_OPENING + frame(PING, 0, 0, b"12345678") + frame(PING, ACK, 0, b"x" * 8)
    )
    answers = [sent_frame for sent_frame in engine.sent if sent_frame.kind == PING]
    assert answers == [Frame(PING, ACK, 0, b"12345678")]
    assert engine.acknowledged == [b"x" * 8]


def test_each_settings_frame_is_acknowledged() -> None:
    """6.5.3."""
    engine = Engine().take(CLIENT_OPENING + settings_frame((3, 1)) + settings_frame((4, 1), (4, 2)))
    assert engine.sent.count(Frame(SETTINGS, ACK, 0, b"")) == 3
    assert engine.http2.sender.initial_window == 2
    assert not engine.http2.is_settings_acknowledged
    assert engine.take(frame(SETTINGS, ACK, 0)).http2.is_settings_acknowledged


def test_goaway_names_the_last_stream() -> None:
    """6.8, 5.4.1: the highest that may have been served; and nothing is handled behind it."""
    engine = Engine().take(
        CLIENT_OPENING + BEGUN + frame(HEADERS, END_HEADERS, 7, POST) + frame(PING, 0, 0)
    )
    assert engine.sent[-1].payload[:8] == struct.pack(">II", 7, FaultCode.FRAME_SIZE_ERROR)
    sent_before = len(engine.sent)
    engine.take(frame(HEADERS, END_HEADERS, 9, POST) + frame(PING, 0, 0, bytes(8)))
    assert 9 not in engine.requests and len(engine.sent) == sent_before


def test_a_drain_sends_two_goaways_with_descending_stream_ids() -> None:
    """6.8: the last stream of a GOAWAY is never higher than that of the one before."""
    engine = Engine().take(CLIENT_OPENING + BEGUN)
    engine.http2.send_goaway(is_final=False)
    engine.take(frame(HEADERS, END_HEADERS, 3, POST))
    assert 3 in engine.requests
    engine.http2.send_goaway(is_final=True)
    engine.take(frame(HEADERS, END_HEADERS, 5, POST))
    engine.http2.send_goaway(is_final=True)
    assert 5 not in engine.requests
    engine.take(frame(PING, 0, 0))
    last_ids = [struct.unpack_from(">I", i.payload)[0] for i in engine.sent if i.kind == GO_AWAY]
    assert last_ids == [2**31 - 1, 3, 3, 3]
    assert engine.resets[5] is FaultCode.REFUSED_STREAM
