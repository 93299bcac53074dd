"""What a connection sends: never more than its client's windows, all of it in the end, in turns."""

import struct

from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.gateway.http2.frames import FaultCode
from shmserve.gateway.http2.outgoing import ResponseBlocks
from tests.support.wire.http2 import (
    CLIENT_OPENING,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    RESET,
    SETTINGS,
    frame,
    post,
    window,
)
from tests.support.wire.http2_engine import Engine, Frame

HEAD, TRAILERS = b"\x88", b"\x00\x01t\x01t"
RESPONSE_BLOCKS = ResponseBlocks(HEAD, TRAILERS)
INITIAL_WINDOW, MAX_FRAME = 4, 5
_STREAMS = (1, 3, 5)


def settings_frame(key: int, value: int) -> bytes:
    return frame(SETTINGS, 0, 0, struct.pack(">HI", key, value))


def begin(*streams: int, end: bool = True) -> bytes:
    flags = END_HEADERS | end
    return b"".join(frame(HEADERS, flags, stream, post("/x")) for stream in streams)


class Client:
    """The client of an engine, which checks the sent data against its granted windows."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.engine.take(CLIENT_OPENING + begin(*_STREAMS))
        self.sender = self.engine.http2.sender
        self.window, self.initial_window, self.frame = 65535, 65535, 16384
        self.windows = dict.fromkeys(_STREAMS, 65535)
        self.queued = dict.fromkeys(_STREAMS, b"")
        self.received = dict.fromkeys(_STREAMS, b"")
        self.trailers: set[int] = set()
        self.ended: set[int] = set()
        self.reset_streams: set[int] = set()
        self.seen_count = len(self.engine.sent)

    def check_frames(self) -> None:
        """Check the frames sent since the last call."""
        self.engine.flush()
        new_frames, self.seen_count = self.engine.sent[self.seen_count :], len(self.engine.sent)
        for item in new_frames:
            if item.kind == DATA:
                assert item.stream not in self.ended
                self.window -= len(item.payload)
                self.windows[item.stream] -= len(item.payload)
                assert len(item.payload) <= self.frame
                assert not item.payload or min(self.window, self.windows[item.stream]) >= 0
                self.received[item.stream] += item.payload
            elif item.kind == HEADERS and item.flags & END_STREAM:
                assert item.stream not in self.ended
                assert self.received[item.stream] == self.queued[item.stream]
                self.ended.add(item.stream)
        for stream in _STREAMS:
            queued_bytes = self.queued[stream][len(self.received[stream]) :]
            assert self.queued[stream].startswith(self.received[stream])
            if stream in self.reset_streams or self.sender.is_paused:
                continue
            if queued_bytes:  # only because of a window
                assert self.window <= 0 or self.windows[stream] <= 0
            elif stream in self.trailers:
                assert stream in self.ended

    def perform(self, action: str, stream: int, size: int) -> None:
        sent_stream = self.engine.stream(stream)
        server = stream not in self.trailers | self.reset_streams
        if action == "data" and server:
            piece = bytes((size & 0xFF,)) * size
            self.queued[stream] += piece
            self.sender.send_data(sent_stream, piece)
        elif action == "trailers" and server:
            self.trailers.add(stream)
            self.sender.send_trailers(sent_stream, TRAILERS)
        elif action == "respond" and server and not self.queued[stream]:
            self.trailers.add(stream)
            pieces = (bytes(size // 2), b"", bytes(size - size // 2))
            self.queued[stream] += b"".join(pieces)
            self.sender.send_response(sent_stream, RESPONSE_BLOCKS, pieces)
        elif action == "grant" and stream not in self.ended | self.reset_streams:
            self.windows[stream] += size + 1
            self.engine.take(window(stream, size + 1))
        elif action == "grant all":
            self.window += size + 1
            self.engine.take(window(0, size + 1))
        elif action == "initial":
            for number in self.windows:
                self.windows[number] += size - self.initial_window
            self.initial_window = size
            self.engine.take(settings_frame(INITIAL_WINDOW, size))
        elif action == "frame":
            self.frame = 16384 + size
            self.engine.take(settings_frame(MAX_FRAME, self.frame))
        elif action == "pause":
            self.sender.is_paused = True
        elif action == "resume":
            self.sender.is_paused = False
            self.sender.resume()
        elif action == "give up" and size < 1000:
            self.reset_streams.add(stream)
            self.engine.take(frame(RESET, 0, stream, bytes(4)))
        self.check_frames()


action_strategy = st.tuples(
    st.sampled_from(
        [
            *("data", "data", "data", "trailers", "respond", "grant", "grant", "grant all"),
            *("initial", "frame", "pause", "resume", "give up"),
        ]
    ),
    st.sampled_from(_STREAMS),
    st.sampled_from([0, 1, 5, 500, 16384, 20000, 65535, 70000, 300000]),
)


@settings(max_examples=200)
@given(st.lists(action_strategy, max_size=30))
def test_data_is_sent_within_any_windows(actions: list[tuple[str, int, int]]) -> None:
    """5.2, 6.9: nothing is sent that was not granted, and all that was; in the end all is sent."""
    client = Client()
    for action, stream, size in actions:
        client.perform(action, stream, size)
    client.perform("resume", 1, 0)
    for stream in _STREAMS:
        client.perform("trailers", stream, 0)
    client.perform("initial", 1, 2**24)
    client.perform("grant all", 1, 2**25)
    assert client.ended | client.reset_streams == set(_STREAMS)
    assert not client.engine.http2.streams and not client.sender.waiting_streams
    assert client.engine.gone is None


def test_a_response_is_three_frames() -> None:
    engine = Engine().take(CLIENT_OPENING + begin(1))
    completions: list[int] = []
    stream = engine.stream(1)
    stream.on_sent = lambda: completions.append(1)
    engine.http2.sender.send_response(stream, RESPONSE_BLOCKS, (b"01", b"23"))
    assert engine.flush() == [
        Frame(HEADERS, END_HEADERS, 1, HEAD),
        Frame(DATA, 0, 1, b"0123"),
        Frame(HEADERS, END_HEADERS | END_STREAM, 1, TRAILERS),
    ]
    assert completions == [1]
    engine.http2.sender.send_response(stream, RESPONSE_BLOCKS, (b"again",))
    engine.http2.sender.send_head(stream, HEAD)
    engine.http2.sender.send_data(stream, b"more")
    engine.http2.sender.send_trailers(stream, TRAILERS)
    assert engine.flush() == []
    assert completions == [1]


def test_a_response_before_the_end_of_the_request() -> None:
    """8.1: the rest of the request is not wanted."""
    engine = Engine().take(CLIENT_OPENING + begin(1, end=False))
    engine.http2.sender.send_response(engine.stream(1), RESPONSE_BLOCKS, (b"no",))
    assert engine.flush()[-1] == Frame(RESET, 0, 1, struct.pack(">I", FaultCode.NO_ERROR))


def test_streams_share_the_window_of_the_connection_in_turns() -> None:
    """None of them has all of a window that is given in small pieces."""
    engine = Engine().take(
        CLIENT_OPENING + begin(1, 3, 5, 7) + settings_frame(INITIAL_WINDOW, 2**20)
    )
    sender = engine.http2.sender
    for number in (1, 3, 5, 7):
        sender.send_data(engine.stream(number), bytes(100_000))
    sent_before = {number: engine.stream(number).sent_bytes for number in (1, 3, 5, 7)}
    for _ in range(40):
        engine.take(window(0, 100))
    gained = [engine.stream(number).sent_bytes - sent for number, sent in sent_before.items()]
    assert gained == [1000] * 4


def test_a_long_response_does_not_block_other_streams() -> None:
    """Of a window for all of them each has a turn, not the first all of it."""
    engine = Engine().take(CLIENT_OPENING + begin(1, 3) + settings_frame(INITIAL_WINDOW, 2**30))
    sender = engine.http2.sender
    sender.send_data(engine.stream(1), bytes(2**23))
    sender.send_data(engine.stream(3), bytes(2**16))
    engine.take(window(0, 2**22))
    assert engine.stream(3).sent_bytes == 2**16 and engine.stream(1).sent_bytes > 2**21


def test_an_exhausted_stream_window_does_not_block_other_streams() -> None:
    engine = Engine().take(CLIENT_OPENING + settings_frame(INITIAL_WINDOW, 10) + begin(1, 3))
    sender = engine.http2.sender
    sender.send_data(engine.stream(1), bytes(100))
    sender.send_data(engine.stream(3), bytes(10))
    sender.send_trailers(engine.stream(3), TRAILERS)
    assert (engine.stream(1).sent_bytes, engine.stream(3).sent_bytes) == (10, 10)
    assert list(engine.http2.streams) == [1]
    assert list(sender.waiting_streams) == [engine.stream(1)]


def test_trailers_for_a_client_that_does_not_read_are_bounded() -> None:
    """A stream is not finished while the socket accepts no bytes."""
    engine = Engine().take(CLIENT_OPENING + begin(1, 3))
    sender = engine.http2.sender
    sender.is_paused = True
    sender.send_trailers(engine.stream(1), HEAD + TRAILERS)
    sender.send_head(engine.stream(3), HEAD)
    sender.send_trailers(engine.stream(3), TRAILERS)
    assert [item.stream for item in engine.flush()] == [3]
    assert list(engine.http2.streams) == [1, 3]
    engine.take(window(0, 1))
    assert list(engine.http2.streams) == [1, 3]
    sender.is_paused = False
    sender.resume()
    assert [item.payload for item in engine.flush()] == [HEAD + TRAILERS, TRAILERS]
    assert not engine.http2.streams


def test_trailers_need_no_window() -> None:
    engine = Engine().take(CLIENT_OPENING + settings_frame(INITIAL_WINDOW, 0) + begin(1, 3))
    sender = engine.http2.sender
    sender.window = 0
    sender.send_response(engine.stream(1), RESPONSE_BLOCKS, ())
    sender.is_paused = True
    sender.send_response(engine.stream(3), RESPONSE_BLOCKS, ())
    sender.is_paused = False
    sender.resume()
    assert not engine.http2.streams


def test_progress_is_reported() -> None:
    """A task that waits for the client to read written data is woken."""
    engine = Engine().take(CLIENT_OPENING + settings_frame(INITIAL_WINDOW, 10) + begin(1))
    stream = engine.stream(1)
    engine.http2.sender.send_data(stream, bytes(25))
    queued_sizes: list[int] = []
    stream.on_progress = lambda: queued_sizes.append(stream.queued_bytes)
    engine.take(window(1, 5) + window(1, 100))
    assert queued_sizes[0] == 10 and queued_sizes[-1] == 0


def test_a_long_header_block_is_split() -> None:
    """4.2, 6.10: a client need not take frames of more than 16 KiB."""
    engine = Engine().take(CLIENT_OPENING + begin(1, 3))
    block = bytes(40000)
    sender, stream = engine.http2.sender, engine.stream(1)
    sender.send_head(stream, HEAD)
    sender.send_data(stream, b"x")
    sender.send_trailers(stream, block)
    sent_frames = engine.flush()
    assert [(item.kind, item.flags, len(item.payload)) for item in sent_frames] == [
        (HEADERS, END_HEADERS, 1), (DATA, 0, 1), (HEADERS, END_STREAM, 16384),
        (CONTINUATION, 0, 16384), (CONTINUATION, END_HEADERS, 40000 - 2 * 16384),
    ]  # fmt: skip


def test_a_dropped_stream_is_released() -> None:
    engine = Engine().take(CLIENT_OPENING + settings_frame(INITIAL_WINDOW, 10) + begin(1))
    engine.http2.sender.send_data(engine.stream(1), bytes(100))
    engine.take(frame(RESET, 0, 1, bytes(4)))
    assert not engine.http2.sender.waiting_streams
    sent_before = len(engine.sent)
    engine.take(window(1, 100) + settings_frame(INITIAL_WINDOW, 1000))
    assert {item.kind for item in engine.sent[sent_before:]} == {SETTINGS}
