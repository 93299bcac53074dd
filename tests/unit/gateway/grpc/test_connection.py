"""A connection and its calls, without a socket: turns, patience, lifetime, ends."""

import asyncio
import gzip
import random
import time
import tracemalloc
from typing import Any

import pytest

from shmserve.gateway.grpc.call import StreamingCall
from shmserve.gateway.grpc.framing import LARGE_MESSAGE_BYTES, Status, StatusCode
from shmserve.gateway.grpc.wire.request import RequestSink
from shmserve.gateway.inference.body_arrival import SLOWEST_RATE
from shmserve.proto.grpc_service_pb2 import ModelInferRequest
from tests.rigs.grpc_scene import PATIENCE_S, STREAM, UNARY, open_scene
from tests.support.wire.http2 import (
    ACK,
    DATA,
    END_STREAM,
    GO_AWAY,
    HEADERS,
    PING,
    RESET,
    WINDOW,
    frame,
    message,
)

PADDED_FLAG = 8  # a flag


async def test_a_response_is_written_in_one_piece() -> None:
    async with open_scene() as scene:
        scene.call(1, b"one")
        ((raw, call),) = scene.calls
        assert raw == b"one" and call.remaining_us() == 0
        call.finish(b"two")
        kinds = [(k, flags, payload[-8:]) for k, flags, _, payload in scene.transport.frames()]
        assert [k for k, _, _ in kinds] == [HEADERS, DATA, HEADERS]
        assert kinds[1][2] == message(b"two") and kinds[2][1] & END_STREAM
        call.finish(b"again")
        call.fail(Status(StatusCode.INTERNAL, "late"))
        assert not scene.transport.frames()


class TensorSink:
    """The sink of an arriving message; `copied` counts the bytes that were not read in place."""

    def __init__(self, size: int) -> None:
        self.data = bytearray(size)
        self.remaining = memoryview(self.data)
        self.copied = self.collected_bytes = 0

    def next_buffer(self, max_size: int) -> memoryview:
        return self.remaining[:max_size]

    def feed(self, piece: memoryview) -> None:
        if piece.obj is not self.data:
            self.remaining[: len(piece)] = piece
            self.copied += len(piece)
        self.remaining = self.remaining[len(piece) :]

    def finish(self) -> bytes:
        return bytes(self.data)

    def discard(self) -> None:
        raise AssertionError


async def test_a_large_message_is_received_in_place() -> None:
    """In frames, some of them padded; nothing is asked for where it fits the window."""
    async with open_scene() as scene:
        data = random.Random(0).randbytes(600_000)
        sink: Any = TensorSink(len(data))
        scene.create_sink = lambda *_: sink
        framed = message(data)
        scene.send(scene.head(1) + frame(DATA, PADDED_FLAG, 1, b"\7" + framed[:200_000] + bytes(7)))
        scene.send(frame(DATA, 0, 1, framed[200_000:200_100]) + frame(DATA, 0, 1, framed[200_100:]))
        ((raw, call),) = scene.calls
        assert raw == data and not sink.remaining and sink.copied < 3 * LARGE_MESSAGE_BYTES
        assert not scene.transport.frames()
        call.finish(b"")
        scene.send(frame(DATA, END_STREAM, 1))


async def test_a_call_that_is_reset_at_once_never_begins() -> None:
    async with open_scene() as scene:
        request_frames = frame(DATA, END_STREAM, 1, message(b"abc"))
        scene.send(scene.head(1) + request_frames + frame(RESET, 0, 1, bytes(4)))
        assert not scene.begun_calls


async def test_a_disconnect_is_reported_once() -> None:
    async with open_scene() as scene:
        reports: list[str] = []
        scene.call(1)
        call = scene.calls[0][1]
        call.on_disconnect = lambda: reports.append("gone")
        call.on_ended = lambda: reports.append("over")
        scene.send(frame(RESET, 0, 1, bytes(4)))
        scene.send(frame(RESET, 0, 1, bytes(4)))
        assert reports == ["gone", "over"] and call.is_done
        call.finish(b"late")
        assert not [kind for kind, *_ in scene.transport.frames() if kind in (HEADERS, DATA)]


async def test_a_deadline_ends_a_call() -> None:
    async with open_scene() as scene:
        reports: list[str] = []
        scene.call(1, b"abc", (b"grpc-timeout", b"2S"))
        call = scene.calls[0][1]
        call.on_disconnect = lambda: reports.append("gone")
        assert 0 < call.remaining_us() <= 2_000_000
        await scene.clock.advance(2.1)
        assert scene.statuses()[1].startswith(b"4") and reports == ["gone"]


async def test_a_late_message_ends_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_scene() as scene:
        monkeypatch.setattr(time, "monotonic", scene.clock.read)
        scene.send(scene.head(1) + scene.head(3))
        scene.send(frame(DATA, 0, 3, message(bytes(100))[:50]))
        scene.call(5)
        for _ in range(6):
            await scene.clock.advance(PATIENCE_S / 4)
        statuses = scene.statuses()
        assert {stream: status[:2] for stream, status in statuses.items()} == {1: b"14", 3: b"14"}
        assert [raw for raw, _ in scene.calls] == [b"abc"] and not scene.calls[0][1].is_done


async def test_a_message_that_arrives_after_its_head_has_no_time_limit_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its inference may take longer than the limit."""
    async with open_scene() as scene:
        monkeypatch.setattr(time, "monotonic", scene.clock.read)
        scene.send(scene.head(1))
        scene.send(frame(DATA, END_STREAM, 1, message(b"abc")))
        for _ in range(6):
            await scene.clock.advance(PATIENCE_S / 4)
        assert not scene.statuses() and not scene.calls[0][1].is_done


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"", b"13"), (b"\0\0\0", b"13"), (message(b"one") + message(b"two"), b"13"),
        (b"\2\0\0\0\1x", b"13"), (b"\1\0\0\0\1x", b"13"), (b"\0\xff\xff\xff\xffx", b"8"),
    ],
)  # fmt: skip
async def test_a_malformed_message_ends_its_call(data: bytes, status: bytes) -> None:
    async with open_scene() as scene:
        scene.send(scene.head(1) + frame(DATA, END_STREAM, 1, data))
        await scene.clock.advance(0)
        assert scene.statuses()[1].startswith(status)


@pytest.mark.parametrize("path", [UNARY, STREAM])
@pytest.mark.parametrize("data", [b"\2\0\0\0\1x", message(bytes(100))[:50]])
async def test_a_broken_second_message_cancels_the_requests_of_its_call(
    path: str, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client receives no further response, so that the requests would run for nothing."""
    async with open_scene() as scene:
        monkeypatch.setattr(time, "monotonic", scene.clock.read)
        reports: list[str] = []
        scene.send(scene.head(1, path) + frame(DATA, 0, 1, message(b"one")))
        await scene.clock.advance(0)
        scene.begun_calls[0].on_disconnect = lambda: reports.append("gone")
        scene.send(frame(DATA, 0, 1, data))
        for _ in range(6):
            await scene.clock.advance(PATIENCE_S / 4)
        assert scene.statuses()[1][:2] in (b"13", b"14") and reports == ["gone"]


async def test_a_collected_message_counts_in_the_memory_limit() -> None:
    """A large request whose tensors have no place in the arena, for example of an unknown model."""
    async with open_scene() as scene:
        scene.create_sink = lambda *_: RequestSink(lambda head, size: None)
        request = ModelInferRequest(model_name="m", raw_input_contents=[bytes(2 << 20)])
        framed = message(request.SerializeToString())
        for stream in (1, 3):
            scene.send(scene.head(stream))
        for start in range(0, 800_000, 16_000):
            for stream in (1, 3):
                scene.send(frame(DATA, 0, stream, framed[start : start + 16_000]))
        budget = scene.connection.context.budget
        assert [call.is_done for call in scene.begun_calls].count(True) == 1
        assert 790_000 < budget._used_bytes < 1 << 20


async def test_a_flood_waits_for_its_next_turn() -> None:
    async with open_scene() as scene:
        scene.send(frame(PING, 0, 0, bytes(8)) * 500)
        answered_count = len(scene.transport.frames())
        assert answered_count < 500 and not scene.transport.reading
        await scene.clock.advance(0.001)
        assert not scene.transport.frames()
        for _ in range(1000):
            await scene.clock.advance(0.1)
            answered_count += len(scene.transport.frames())
            if scene.transport.reading:
                break
        assert answered_count == 500 and scene.connection.is_open


async def test_many_calls_at_once_are_begun_in_turns() -> None:
    async with open_scene() as scene:
        request_frames = frame(DATA, END_STREAM, 0, message(b"abc"))
        calls = b"".join(
            scene.head(number) + request_frames[:5] + number.to_bytes(4, "big") + request_frames[9:]
            for number in range(1, 401, 2)
        )
        scene.send(calls)
        assert 0 < len(scene.calls) < 200
        await scene.clock.advance(0)
        assert len(scene.calls) == 200 and scene.transport.reading


async def test_a_protocol_violation_ends_the_connection() -> None:
    """The client receives GOAWAY, and its call is cancelled; the socket closes after a linger."""
    async with open_scene() as scene:
        reports: list[str] = []
        scene.call(1)
        scene.calls[0][1].on_disconnect = lambda: reports.append("gone")
        scene.send(frame(WINDOW, 0, 0, bytes(4)))
        assert scene.transport.frames()[-1][0] == GO_AWAY
        assert reports == ["gone"] and not scene.connection.is_open and not scene.transport.closed
        await scene.clock.advance(1)
        assert scene.transport.closed


async def test_a_silent_client_receives_a_ping() -> None:
    async with open_scene(keepalive_time_ms=1000, keepalive_timeout_ms=500) as scene:
        await scene.clock.advance(1.1)
        assert not scene.transport.frames()  # a connection without calls is not probed
        scene.call(1)
        await scene.clock.advance(1.1)  # bytes arrived since the last check
        await scene.clock.advance(1.1)
        ((kind, flags, _, payload),) = scene.transport.frames()
        assert (kind, flags) == (PING, 0)
        scene.send(frame(PING, ACK, 0, payload))
        await scene.clock.advance(0.6)
        assert not scene.transport.aborted
        await scene.clock.advance(1.1)
        await scene.clock.advance(1.1)
        await scene.clock.advance(1.1)
        assert scene.transport.aborted


async def test_too_many_pings_end_a_connection_if_limited() -> None:
    async with open_scene(max_ping_strikes=2) as scene:
        for _ in range(3):
            scene.send(frame(PING, 0, 0, bytes(8)))
        assert scene.connection.is_open
        scene.send(frame(PING, 0, 0, bytes(8)))
        kind, _, _, payload = scene.transport.frames()[-1]
        assert kind == GO_AWAY and payload.endswith(b"too_many_pings")


async def test_pings_of_the_client_do_not_hide_sent_data_from_the_keepalive() -> None:
    settings = {"keepalive_time_ms": 1000, "max_pings_without_data": 1, "max_ping_strikes": 5}
    async with open_scene(**settings) as scene:
        scene.call(1)
        scene.call(3)
        for stream in (1, 0):
            await scene.clock.advance(1.1)
            await scene.clock.advance(1.1)
            ((kind, _, _, payload),) = scene.transport.frames()
            assert kind == PING
            scene.send(frame(PING, ACK, 0, payload))
            if stream:
                scene.calls[0][1].finish(b"")  # the data permits another ping of the server
                scene.send(frame(PING, 0, 0, bytes(8)))
                scene.transport.frames()


async def test_an_old_connection_receives_two_goaways_and_loses_no_call() -> None:
    async with open_scene(max_connection_age_ms=1000) as scene:
        scene.call(1)
        await scene.clock.advance(1.2)
        (kind, _, _, last_stream), (ping, _, _, payload) = scene.transport.frames()
        assert (kind, last_stream[:4], ping) == (GO_AWAY, b"\x7f\xff\xff\xff", PING)
        scene.call(3)  # the call was already sent
        scene.send(frame(PING, ACK, 0, payload))
        ((kind, _, _, last_stream),) = scene.transport.frames()
        assert (kind, last_stream[:4]) == (GO_AWAY, (3).to_bytes(4, "big"))
        scene.call(5)
        assert [frame_[:3] for frame_ in scene.transport.frames()] == [(RESET, 0, 5)]
        for _, call in scene.calls:
            assert not scene.transport.closed
            call.finish(b"")
        assert not scene.transport.closed and set(scene.statuses()) == {1, 3}
        await scene.clock.advance(0)
        assert scene.transport.ended


async def test_a_drain_announces_the_end_at_once_and_calls_in_flight_finish() -> None:
    async with open_scene() as scene:
        scene.call(1)
        scene.connection.shut_down()
        (kind, _, _, last_stream), (_, _, _, payload) = scene.transport.frames()
        assert (kind, last_stream[:4]) == (GO_AWAY, b"\x7f\xff\xff\xff")
        scene.connection.shut_down()
        scene.call(3)  # It crossed the GOAWAY.
        scene.send(frame(PING, ACK, 0, payload))
        ((kind, _, _, last_stream),) = scene.transport.frames()
        assert (kind, last_stream[:4]) == (GO_AWAY, (3).to_bytes(4, "big"))
        for _, call in scene.calls:
            assert not scene.transport.ended
            call.finish(b"")
        await scene.clock.advance(0)
        assert set(scene.statuses()) == {1, 3} and scene.transport.ended
        # A closed socket would answer these frames with a reset, and the responses would be lost.
        for _ in range(3):
            scene.send(frame(8, 0, 0, (1).to_bytes(4, "big")))
        assert not (scene.transport.frames() or scene.transport.closed)
        await scene.clock.advance(0.6)
        assert scene.transport.closed


async def test_a_connection_that_ends_during_a_pause_is_read_on() -> None:
    async with open_scene() as scene:
        scene.call(1)
        scene.connection.shut_down()
        _, (_, _, _, payload) = scene.transport.frames()
        scene.send(frame(PING, ACK, 0, payload))
        scene.calls[0][1].finish(b"")
        scene.send(frame(WINDOW, 0, 0, (1).to_bytes(4, "big")) * 100)
        assert not (scene.transport.reading or scene.transport.ended)
        await scene.clock.advance(0)
        assert scene.transport.ended and scene.transport.reading


async def test_a_drain_without_a_successor_refuses_calls_that_cross_its_goaway() -> None:
    async with open_scene() as scene:
        scene.call(1)
        scene.connection.shut_down(refuses_requests=True)
        (_, _, _, first_stream), (_, _, _, last_stream), _ = scene.transport.frames()
        assert (first_stream[:4], last_stream[:4]) == (b"\x7f\xff\xff\xff", (1).to_bytes(4, "big"))
        scene.call(3)
        ((kind, _, stream, code),) = scene.transport.frames()
        assert (kind, stream, code) == (RESET, 3, (7).to_bytes(4, "big"))
        ((_, call),) = scene.calls
        call.finish(b"")
        assert set(scene.statuses()) == {1}


async def test_calls_of_an_old_connection_end_after_the_grace_period() -> None:
    async with open_scene(max_connection_age_ms=1000, max_connection_age_grace_ms=500) as scene:
        scene.call(1)
        await scene.clock.advance(1.2)
        await scene.clock.advance(0.6)
        assert scene.transport.aborted


async def test_a_stream_waits_for_its_client() -> None:
    """A response that the client's window has no room for is waited for."""
    async with open_scene() as scene:
        scene.send(scene.head(1, STREAM))
        scene.send(frame(DATA, 0, 1, message(bytes(70_000))[:16384]))
        for offset in range(16384, 70_005, 16384):
            scene.send(frame(DATA, 0, 1, message(bytes(70_000))[offset : offset + 16384]))
        scene.send(frame(DATA, END_STREAM, 1, message(b"second")))
        await scene.clock.advance(0)
        sent_data = [payload for kind, _, _, payload in scene.transport.frames() if kind == DATA]
        assert sum(map(len, sent_data)) == 65535
        increment = (1 << 20).to_bytes(4, "big")
        scene.send(frame(WINDOW, 0, 0, increment) + frame(WINDOW, 0, 1, increment))
        await scene.clock.advance(0)
        remaining_frames = scene.transport.frames()
        assert remaining_frames[-1][0] == HEADERS and remaining_frames[-1][1] & END_STREAM
        sent_data += [payload for kind, _, _, payload in remaining_frames if kind == DATA]
        assert b"".join(sent_data) == message(bytes(70_000)) + message(b"second")


async def test_a_stream_that_is_not_read_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_scene() as scene:
        monkeypatch.setattr(time, "monotonic", scene.clock.read)

        async def write_much(call: StreamingCall) -> None:
            await call.write_all([bytes(1 << 20)])

        scene.serve = write_much
        scene.send(scene.head(1, STREAM))
        scene.call(3)
        await scene.clock.advance(0)
        for _ in range(10):
            await scene.clock.advance(PATIENCE_S / 4)
        frames = scene.transport.frames()
        assert (RESET, 1) in [(kind, stream) for kind, _, stream, _ in frames]
        assert scene.connection.is_open and not scene.calls[0][1].is_done


@pytest.mark.parametrize("is_slow", [False, True])
async def test_a_stream_may_be_read_slowly(*, is_slow: bool) -> None:
    """The time limit of a response permits 64 KiB/s, as for a unary call."""
    async with open_scene() as scene:
        outcomes: list[str] = []

        async def write_much(call: StreamingCall) -> None:
            try:
                await call.write_all([bytes(1 << 20)], 1.0)
                outcomes.append("read")
            except TimeoutError:
                outcomes.append("stalled")

        scene.serve = write_much
        scene.send(scene.head(1, STREAM))
        scene.send(frame(WINDOW, 0, 0, (1 << 20).to_bytes(4, "big")))
        await scene.clock.advance(0)
        for _ in range(20):
            increment = SLOWEST_RATE // 2 if is_slow else SLOWEST_RATE
            scene.send(frame(WINDOW, 0, 1, increment.to_bytes(4, "big")))
            await scene.clock.advance(1.01)
        assert outcomes == ["stalled" if is_slow else "read"]


async def test_a_stream_of_tiny_messages_uses_little_memory() -> None:
    """Holds for any number of messages and frames at a time; the last message may be malformed."""
    async with open_scene() as scene:
        resume, handler_ended, received = asyncio.Event(), asyncio.Event(), []

        async def slow(call: StreamingCall) -> Status | None:
            await resume.wait()
            async for request in call.read_messages():
                received.append(request)  # noqa: PERF401
            return None

        scene.serve = slow
        messages = [message(b"%d" % number) for number in range(9000)]
        data = b"".join(messages[1000:]) + b"\x09" + bytes(4)
        scene.send(scene.head(1, STREAM))
        tracemalloc.start()
        for piece in (*messages[:1000], *(data[at : at + 999] for at in range(0, len(data), 999))):
            scene.send(frame(DATA, 0, 1, piece))
        traced_bytes = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert traced_bytes < 2 * len(data) + 100_000
        scene.begun_calls[0].on_ended = handler_ended.set
        resume.set()
        await handler_ended.wait()
        assert len(received) > 8500
        assert received == [sent_message[5:] for sent_message in messages][: len(received)]
        assert b"malformed message: compression flag 9 (allowed: 0, 1)" in scene.statuses()[1]


async def test_unread_messages_do_not_keep_the_read_buffer() -> None:
    """The socket's read buffer is larger than the stream's bytes in it, and may be reused."""
    async with open_scene() as scene:
        scene.send(scene.head(1, STREAM))
        buffer = bytearray(message(b"x") * 1000)
        scene.begun_calls[0].receive_data(memoryview(buffer), True)
        buffer[:] = bytes(len(buffer))
        handler_ended = asyncio.Event()
        scene.begun_calls[0].on_ended = handler_ended.set
        await handler_ended.wait()
        data = b"".join(payload for kind, *_, payload in scene.transport.frames() if kind == DATA)
        assert data == message(b"x") * 1000


async def test_reading_messages_enlarges_the_window() -> None:
    """By the quarter of a window at a time: small requests are not answered by updates, too."""
    async with open_scene() as scene:

        async def take(call: StreamingCall) -> Status | None:
            async for _ in call.read_messages():
                pass
            return None

        scene.serve = take
        window = scene.connection.context.limits.window_bytes
        scene.send(scene.head(1, STREAM))
        sent_size = granted_credit = updates = 0
        for _ in range(300):
            request_frames = message(bytes(10_000))
            scene.send(frame(DATA, 0, 1, request_frames))
            sent_size += len(request_frames)
            for _ in range(3):
                await asyncio.sleep(0)
            sizes = [payload for kind, *_, payload in scene.transport.frames() if kind == WINDOW]
            updates += len(sizes)
            granted_credit += sum(int.from_bytes(increment, "big") for increment in sizes)
            assert sent_size - window // 4 - len(request_frames) <= granted_credit <= sent_size
        assert 0 < updates <= 4 * sent_size // window


@pytest.mark.parametrize("is_timeout", [False, True])
async def test_an_ended_stream_ends_its_handler(is_timeout: bool) -> None:
    """A handler that waits for a message, or for the client to read, continues or is cancelled."""
    async with open_scene() as scene:
        endings: list[int] = []

        async def serve(call: StreamingCall) -> Status | None:
            try:
                async for request in call.read_messages():
                    await call.write_all([request])
            finally:
                endings.append(1)
            return None

        scene.serve = serve
        scene.send(scene.head(1, STREAM) + frame(DATA, 0, 1, b"\0"))
        scene.send(scene.head(3, STREAM) + frame(DATA, 0, 3, message(bytes(100_000))))
        await asyncio.sleep(0)
        for call in scene.begun_calls:
            call.on_timeout() if is_timeout else call.fail(Status(StatusCode.UNAVAILABLE, "no"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert endings == [1, 1]


async def test_requests_and_responses_are_compressed() -> None:
    async with open_scene(compression_level=1) as scene:
        compressed = gzip.compress(bytes(10_000))
        head = scene.head(1, UNARY, (b"grpc-encoding", b"gzip"), (b"grpc-accept-encoding", b"gzip"))
        data = b"\1" + len(compressed).to_bytes(4, "big") + compressed
        scene.send(head + frame(DATA, END_STREAM, 1, data))
        await scene.clock.advance(0)
        ((raw, call),) = scene.calls
        assert raw == bytes(10_000)
        call.finish(raw)
        (answer,) = [payload for kind, _, _, payload in scene.transport.frames() if kind == DATA]
        assert answer[0] == 1 and gzip.decompress(answer[5:]) == raw


async def test_a_client_that_does_not_read_is_disconnected_even_without_queued_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Responses without messages wait, too, when the socket takes nothing."""
    async with open_scene() as scene:
        now_s = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now_s)
        scene.connection.pause_writing()
        scene.call(1)
        scene.calls[0][1].fail(Status(StatusCode.INTERNAL, "no"))
        assert not scene.statuses() and scene.connection._check_timer is not None
        scene.connection._check_time_limits()
        assert not scene.transport.aborted
        now_s += 2 * PATIENCE_S
        scene.connection._check_time_limits()
        assert scene.transport.aborted


async def test_a_client_that_reads_again_receives_all_responses() -> None:
    async with open_scene() as scene:
        scene.connection.pause_writing()
        for stream in (1, 3):
            scene.call(stream)
        scene.calls[0][1].fail(Status(StatusCode.INTERNAL, "no"))
        scene.calls[1][1].finish(b"yes")
        assert not scene.statuses()
        scene.connection.resume_writing()
        assert scene.statuses().keys() == {1, 3}


async def test_a_disconnect_during_compression_cancels_nothing() -> None:
    """The inference has ended, so its memory may already belong to another request."""
    async with open_scene(compression_level=1) as scene:
        reports: list[str] = []
        scene.call(1, b"abc", (b"grpc-accept-encoding", b"gzip"))
        call = scene.calls[0][1]
        call.on_disconnect = lambda: reports.append("gone")
        call.on_ended = lambda: reports.append("over")
        call.finish(bytes(1 << 20))
        scene.send(frame(RESET, 0, 1, bytes(4)))
        await scene.clock.advance(0)
        assert reports == ["over"]
        assert not [kind for kind, *_ in scene.transport.frames() if kind in (HEADERS, DATA)]
