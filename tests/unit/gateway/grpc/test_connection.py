"""A connection and its calls, without a socket: turns, patience, lifetime, ends."""

from __future__ import annotations

import asyncio
import gzip
import time
import tracemalloc
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from shmserve.common.access.auth_tokens import Authorisation
from shmserve.common.grpc_settings import GrpcSettings
from shmserve.gateway.client_identity import ListenerKind, ListenerRules
from shmserve.gateway.grpc.calls.call import Call, StreamCall, UnaryCall
from shmserve.gateway.grpc.calls.front import GrpcFront
from shmserve.gateway.grpc.calls.head import CallHead
from shmserve.gateway.grpc.calls.messages import Deflater
from shmserve.gateway.grpc.connection.protocol import GrpcConnection
from shmserve.gateway.grpc.status import Ending, StatusCode
from shmserve.gateway.inference.body_arrival import BodyBudget
from shmserve.gateway.inference.malloc_trim import MallocTrim
from tests.rigs.clocks import Clock
from tests.support.wire.http2 import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    GO_AWAY,
    HEADERS,
    OPENED,
    PING,
    RESET,
    SETTINGS,
    WINDOW,
    frame,
    message,
    post,
)

UNARY, STREAM = "/a.B/Unary", "/a.B/Stream"
PATIENCE_S = 10.0


class Transport(asyncio.Transport):
    """A socket that takes everything; `frames` has what was written, cut."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.reading = True
        self.closed = False
        self.aborted = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def writelines(self, pieces: Any) -> None:
        self.write(b"".join(pieces))

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = self.aborted = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: Any, default: Any = None) -> Any:
        return default

    def frames(self) -> list[tuple[int, int, int, bytes]]:
        """Kind, flags, stream and payload of what was written since the last look."""
        data, self.written = self.written, b""
        found = []
        while data:
            end = 9 + int.from_bytes(data[:3], "big")
            found.append((data[3], data[4], int.from_bytes(data[5:9], "big"), data[9:end]))
            data = data[end:]
        return found


class Scene:
    """A connection whose unary calls wait in `calls`, each with its message, and whose streams
    `serve` handles."""

    def __init__(self, **settings: Any) -> None:
        self.calls: list[tuple[bytes, UnaryCall]] = []
        self.begun: list[Call] = []
        self.clock = Clock()
        self.serve: Callable[[StreamCall], Coroutine[Any, Any, Ending | None]] = self._echo
        deflater = Deflater(settings.pop("deflate", 0)) if "deflate" in settings else None
        front = GrpcFront(
            settings=GrpcSettings(**settings),
            begin=self._begin,
            budget=BodyBudget(1 << 20, MallocTrim()),
            header_timeout_s=PATIENCE_S,
            body_timeout_s=PATIENCE_S,
            largest_inflated=1 << 20,
            tls=None,
            deflater=deflater,
        )
        self.lost = 0
        rules = ListenerRules(ListenerKind.UNIX, Authorisation(None, {}), None)
        client = SimpleNamespace(gone=lambda: None, listener=rules)
        owner: Any = SimpleNamespace(connection_made=lambda _: client, connection_lost=self._lost)
        self.connection = GrpcConnection(owner, front)
        self.transport = Transport()
        self.connection.connection_made(self.transport)
        self.say(OPENED + frame(SETTINGS, ACK, 0))
        self.transport.frames()

    def _lost(self, _: Any) -> None:
        self.lost += 1

    def _begin(self, connection: Any, stream: Any, head: CallHead) -> Call:
        call: UnaryCall | StreamCall
        if head.path == UNARY:
            call = UnaryCall(connection, stream, head, lambda raw, c: self.calls.append((raw, c)))
        else:
            call = StreamCall(connection, stream, head)
            call.run(lambda made: self.serve(made))
        self.begun.append(call)
        return call

    @staticmethod
    async def _echo(call: StreamCall) -> Ending | None:
        async for request in call.requests():
            await call.write_all([request])
        return None

    def say(self, data: bytes) -> None:
        """The client's bytes."""
        self.connection.data_received(data)

    def head(self, stream: int, path: str = UNARY, *more: tuple[bytes, bytes]) -> bytes:
        """A call begins."""
        return frame(HEADERS, END_HEADERS, stream, post(path, *more))

    def ask(self, stream: int, data: bytes = b"abc", *more: tuple[bytes, bytes]) -> None:
        """A unary call, whole."""
        asked = frame(DATA, END_STREAM, stream, message(data))
        self.say(self.head(stream, UNARY, *more) + asked)

    def statuses(self) -> dict[int, bytes]:
        """How calls ended since the last look, by stream: the status and what follows it."""
        return {
            stream: payload.partition(b"grpc-status")[2][1:]
            for kind, flags, stream, payload in self.transport.frames()
            if kind == HEADERS and flags & END_STREAM
        }


def played(play: Callable[[Scene], Coroutine[Any, Any, None]], **settings: Any) -> None:
    """A scene in a loop of its own."""

    async def run() -> None:
        scene = Scene(**settings)
        await play(scene)
        scene.connection.connection_lost(None)
        await asyncio.sleep(0)
        assert not scene.connection.http2.streams

    asyncio.run(run())


def test_a_response_is_written_in_one_piece() -> None:
    async def play(scene: Scene) -> None:
        scene.ask(1, b"one")
        ((raw, call),) = scene.calls
        assert raw == b"one" and call.time_remaining() is None
        call.finish(b"two")
        kinds = [
            (kind, flags, payload[-8:]) for kind, flags, _, payload in scene.transport.frames()
        ]
        assert [kind for kind, _, _ in kinds] == [HEADERS, DATA, HEADERS]
        assert kinds[1][2] == message(b"two") and kinds[2][1] & END_STREAM
        call.finish(b"again")
        call.fail(StatusCode.INTERNAL, "late")
        assert not scene.transport.frames()

    played(play)


def test_a_call_that_is_given_up_at_once_never_begins() -> None:
    async def play(scene: Scene) -> None:
        asked = frame(DATA, END_STREAM, 1, message(b"abc"))
        scene.say(scene.head(1) + asked + frame(RESET, 0, 1, bytes(4)))
        assert not scene.begun

    played(play)


def test_who_leaves_is_told_of_once() -> None:
    async def play(scene: Scene) -> None:
        told: list[str] = []
        scene.ask(1)
        call = scene.calls[0][1]
        call.on_gone = lambda: told.append("gone")
        call.on_over = lambda: told.append("over")
        scene.say(frame(RESET, 0, 1, bytes(4)))
        scene.say(frame(RESET, 0, 1, bytes(4)))
        assert told == ["gone", "over"] and call.done
        call.finish(b"late")
        assert not [kind for kind, *_ in scene.transport.frames() if kind in (HEADERS, DATA)]

    played(play)


def test_a_deadline_ends_a_call() -> None:
    async def play(scene: Scene) -> None:
        told: list[str] = []
        scene.ask(1, b"abc", (b"grpc-timeout", b"2S"))
        call = scene.calls[0][1]
        call.on_gone = lambda: told.append("gone")
        left_s = call.time_remaining()
        assert left_s is not None and 0 < left_s <= 2
        await scene.clock.go_on(2.1)
        assert scene.statuses()[1].startswith(b"4") and told == ["gone"]

    played(play)


def test_a_message_that_does_not_come_ends_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(scene: Scene) -> None:
        monkeypatch.setattr(time, "monotonic", scene.clock.read)
        scene.say(scene.head(1) + scene.head(3))
        scene.say(frame(DATA, 0, 3, message(bytes(100))[:50]))
        scene.ask(5)
        for _ in range(6):
            await scene.clock.go_on(PATIENCE_S / 4)
        found = scene.statuses()
        assert {stream: status[:2] for stream, status in found.items()} == {1: b"14", 3: b"14"}
        assert [raw for raw, _ in scene.calls] == [b"abc"] and not scene.calls[0][1].done

    played(play)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"", b"13"),
        (b"\0\0\0", b"13"),
        (message(b"one") + message(b"two"), b"13"),
        (b"\2\0\0\0\1x", b"13"),
        (b"\1\0\0\0\1x", b"13"),
        (b"\0\xff\xff\xff\xffx", b"8"),
    ],
)
def test_what_is_no_message_ends_its_call(data: bytes, status: bytes) -> None:
    async def play(scene: Scene) -> None:
        scene.say(scene.head(1) + frame(DATA, END_STREAM, 1, data))
        await scene.clock.go_on(0)
        assert scene.statuses()[1].startswith(status)

    played(play)


def test_a_flood_waits_for_its_next_turn() -> None:
    async def play(scene: Scene) -> None:
        scene.say(frame(PING, 0, 0, bytes(8)) * 500)
        answered = len(scene.transport.frames())
        assert answered < 500 and not scene.transport.reading
        await scene.clock.go_on(0.001)
        assert not scene.transport.frames()
        for _ in range(1000):
            await scene.clock.go_on(0.1)
            answered += len(scene.transport.frames())
            if scene.transport.reading:
                break
        assert answered == 500 and scene.connection.open

    played(play)


def test_many_calls_at_once_are_begun_in_turns() -> None:
    async def play(scene: Scene) -> None:
        asked = frame(DATA, END_STREAM, 0, message(b"abc"))
        calls = b"".join(
            scene.head(number) + asked[:5] + number.to_bytes(4, "big") + asked[9:]
            for number in range(1, 401, 2)
        )
        scene.say(calls)
        assert 0 < len(scene.calls) < 200
        await scene.clock.go_on(0)
        assert len(scene.calls) == 200 and scene.transport.reading

    played(play)


def test_who_breaks_a_rule_is_shown_out() -> None:
    """It is told at once, and what it has asked for is given up; the socket lingers."""

    async def play(scene: Scene) -> None:
        told: list[str] = []
        scene.ask(1)
        scene.calls[0][1].on_gone = lambda: told.append("gone")
        scene.say(frame(WINDOW, 0, 0, bytes(4)))
        assert scene.transport.frames()[-1][0] == GO_AWAY
        assert told == ["gone"] and not scene.connection.open and not scene.transport.closed
        await scene.clock.go_on(1)
        assert scene.transport.closed

    played(play)


def test_a_silent_client_is_asked_for_a_sign_of_life() -> None:
    async def play(scene: Scene) -> None:
        await scene.clock.go_on(1.1)
        assert not scene.transport.frames()  # nothing is asked of who has no call
        scene.ask(1)
        await scene.clock.go_on(1.1)  # something came since the last look
        await scene.clock.go_on(1.1)
        ((kind, flags, _, payload),) = scene.transport.frames()
        assert (kind, flags) == (PING, 0)
        scene.say(frame(PING, ACK, 0, payload))
        await scene.clock.go_on(0.6)
        assert not scene.transport.aborted
        await scene.clock.go_on(1.1)
        await scene.clock.go_on(1.1)
        await scene.clock.go_on(1.1)
        assert scene.transport.aborted

    played(play, keepalive_time_ms=1000, keepalive_timeout_ms=500)


def test_too_many_pings_end_a_connection_where_they_are_counted() -> None:
    async def play(scene: Scene) -> None:
        for _ in range(3):
            scene.say(frame(PING, 0, 0, bytes(8)))
        assert scene.connection.open
        scene.say(frame(PING, 0, 0, bytes(8)))
        kind, _, _, payload = scene.transport.frames()[-1]
        assert kind == GO_AWAY and payload.endswith(b"too_many_pings")

    played(play, max_ping_strikes=2)


def test_an_old_connection_is_told_twice_to_go_and_loses_no_call() -> None:
    async def play(scene: Scene) -> None:
        scene.ask(1)
        await scene.clock.go_on(1.2)
        (kind, _, _, last), (ping, _, _, payload) = scene.transport.frames()
        assert (kind, last[:4], ping) == (GO_AWAY, b"\x7f\xff\xff\xff", PING)
        scene.ask(3)  # was on its way
        scene.say(frame(PING, ACK, 0, payload))
        ((kind, _, _, last),) = scene.transport.frames()
        assert (kind, last[:4]) == (GO_AWAY, (3).to_bytes(4, "big"))
        scene.ask(5)
        assert [frame_[:3] for frame_ in scene.transport.frames()] == [(RESET, 0, 5)]
        for _, call in scene.calls:
            assert not scene.transport.closed
            call.finish(b"")
        assert scene.transport.closed and set(scene.statuses()) == {1, 3}

    played(play, max_connection_age_ms=1000)


def test_calls_have_no_longer_than_the_grace_of_an_old_connection() -> None:
    async def play(scene: Scene) -> None:
        scene.ask(1)
        await scene.clock.go_on(1.2)
        await scene.clock.go_on(0.6)
        assert scene.transport.aborted

    played(play, max_connection_age_ms=1000, max_connection_age_grace_ms=500)


def test_a_stream_waits_for_its_client() -> None:
    """A response that the client's window has no room for is waited for."""

    async def play(scene: Scene) -> None:
        scene.say(scene.head(1, STREAM))
        scene.say(frame(DATA, 0, 1, message(bytes(70_000))[:16384]))
        for at in range(16384, 70_005, 16384):
            scene.say(frame(DATA, 0, 1, message(bytes(70_000))[at : at + 16384]))
        scene.say(frame(DATA, END_STREAM, 1, message(b"second")))
        await scene.clock.go_on(0)
        sent = [payload for kind, _, _, payload in scene.transport.frames() if kind == DATA]
        assert sum(map(len, sent)) == 65535
        more = (1 << 20).to_bytes(4, "big")
        scene.say(frame(WINDOW, 0, 0, more) + frame(WINDOW, 0, 1, more))
        await scene.clock.go_on(0)
        rest = scene.transport.frames()
        assert rest[-1][0] == HEADERS and rest[-1][1] & END_STREAM
        sent += [payload for kind, _, _, payload in rest if kind == DATA]
        assert b"".join(sent) == message(bytes(70_000)) + message(b"second")

    played(play)


def test_a_stream_that_is_not_read_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(scene: Scene) -> None:
        monkeypatch.setattr(time, "monotonic", scene.clock.read)

        async def much(call: StreamCall) -> None:
            await call.write_all([bytes(1 << 20)])

        scene.serve = much
        scene.say(scene.head(1, STREAM))
        scene.ask(3)
        await scene.clock.go_on(0)
        for _ in range(10):
            await scene.clock.go_on(PATIENCE_S / 4)
        found = scene.transport.frames()
        assert (RESET, 1) in [(kind, stream) for kind, _, stream, _ in found]
        assert scene.connection.open and not scene.calls[0][1].done

    played(play)


def test_a_stream_of_tiny_messages_takes_no_more_than_what_came() -> None:
    """However many come at once, and in how many frames; the last is none, when its turn comes."""

    async def play(scene: Scene) -> None:
        go_on, over, seen = asyncio.Event(), asyncio.Event(), []

        async def slow(call: StreamCall) -> Ending | None:
            await go_on.wait()
            async for request in call.requests():
                seen.append(request)  # noqa: PERF401
            return None

        scene.serve = slow
        sent = [message(b"%d" % number) for number in range(9000)]
        data = b"".join(sent[1000:]) + b"\x09" + bytes(4)
        scene.say(scene.head(1, STREAM))
        tracemalloc.start()
        for piece in (*sent[:1000], *(data[at : at + 999] for at in range(0, len(data), 999))):
            scene.say(frame(DATA, 0, 1, piece))
        held = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert held < 2 * len(data) + 100_000
        scene.begun[0].on_over = over.set
        go_on.set()
        await over.wait()
        assert len(seen) > 8500
        assert seen == [one[5:] for one in sent][: len(seen)]
        assert scene.statuses() == {1: b"13\x00\x0cgrpc-message\x11malformed message"}

    played(play)


def test_a_stream_that_is_ended_for_its_handler() -> None:
    """Who waits for a message, or for the client to take one, waits no longer."""

    async def play(scene: Scene) -> None:
        over: list[int] = []

        async def serve(call: StreamCall) -> Ending | None:
            async for request in call.requests():
                await call.write_all([request])
            over.append(1)
            return None

        scene.serve = serve
        scene.say(scene.head(1, STREAM) + frame(DATA, 0, 1, b"\0"))
        scene.say(scene.head(3, STREAM) + frame(DATA, 0, 3, message(bytes(100_000))))
        await asyncio.sleep(0)
        for call in scene.begun:
            call.late()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert over == [1, 1]

    played(play)


def test_compressed_both_ways() -> None:
    async def play(scene: Scene) -> None:
        small = gzip.compress(bytes(10_000))
        head = scene.head(1, UNARY, (b"grpc-encoding", b"gzip"), (b"grpc-accept-encoding", b"gzip"))
        data = b"\1" + len(small).to_bytes(4, "big") + small
        scene.say(head + frame(DATA, END_STREAM, 1, data))
        await scene.clock.go_on(0)
        ((raw, call),) = scene.calls
        assert raw == bytes(10_000)
        call.finish(raw)
        (answer,) = [payload for kind, _, _, payload in scene.transport.frames() if kind == DATA]
        assert answer[0] == 1 and gzip.decompress(answer[5:]) == raw

    played(play, deflate=1)
