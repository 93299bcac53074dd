"""A connection of gRPC and its calls, without a socket."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from types import SimpleNamespace
from typing import Any

from shmserve.common.auth_tokens import Authorisation
from shmserve.gateway.grpc.call import GrpcCall, GrpcContext, StreamingCall, UnaryCall
from shmserve.gateway.grpc.connection import GrpcConnection
from shmserve.gateway.grpc.framing import CallHead, CreateSink, Status
from shmserve.gateway.inference.body_arrival import BodyBudget, MallocTrim
from shmserve.gateway.listener import ListenerKind, ListenerRules
from shmserve.gateway.settings import GrpcSettings
from tests.rigs.clocks import Clock
from tests.support.wire.http2 import (
    ACK,
    CLIENT_OPENING,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    SETTINGS,
    frame,
    message,
    post,
)

UNARY, STREAM = "/a.B/Unary", "/a.B/Stream"
PATIENCE_S = 10.0


class Transport(asyncio.Transport):
    """A socket that accepts all bytes. `frames` returns the written bytes, split into frames."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.reading = True
        self.closed = self.ended = False
        self.aborted = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def writelines(self, pieces: Any) -> None:
        self.write(b"".join(pieces))

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def write_eof(self) -> None:
        assert not self.ended
        self.ended = True

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
        """Return kind, flags, stream and payload of the frames written since the last call."""
        data, self.written = self.written, b""
        messages = []
        while data:
            end = 9 + int.from_bytes(data[:3], "big")
            messages.append((data[3], data[4], int.from_bytes(data[5:9], "big"), data[9:end]))
            data = data[end:]
        return messages


class Scene:
    """A connection whose unary calls wait in `calls`; `serve` handles its streams."""

    def __init__(self, **settings: Any) -> None:
        self.calls: list[tuple[bytes, UnaryCall]] = []
        self.begun_calls: list[GrpcCall] = []
        self.clock = Clock()
        self.serve: Callable[[StreamingCall], Coroutine[Any, Any, Status | None]] = self._echo
        context = GrpcContext(
            settings=GrpcSettings(**settings),
            begin_call=self._begin,
            budget=BodyBudget(1 << 20, MallocTrim()),
            header_timeout_s=PATIENCE_S,
            body_timeout_s=PATIENCE_S,
            max_inflated_bytes=1 << 20,
            tls=None,
        )
        self.disconnects = 0
        self.create_sink: CreateSink | None = None
        rules = ListenerRules(ListenerKind.UNIX, Authorisation(None, {}), None)
        client = SimpleNamespace(call_disconnect_actions=lambda: None, listener=rules)
        owner: Any = SimpleNamespace(
            connection_made=lambda _: client,
            connection_lost=self._on_disconnect,
            connection_drained=lambda _: None,
        )
        self.connection = GrpcConnection(owner, context)
        self.transport = Transport()
        self.connection.connection_made(self.transport)
        self.send(CLIENT_OPENING + frame(SETTINGS, ACK, 0))
        self.transport.frames()

    def _on_disconnect(self, _: Any) -> None:
        self.disconnects += 1

    def _begin(self, connection: Any, stream: Any, head: CallHead) -> GrpcCall:
        call: UnaryCall | StreamingCall
        if head.path == UNARY:
            call = UnaryCall(
                connection,
                stream,
                head,
                lambda raw, c: self.calls.append((raw, c)),
                self.create_sink,
            )
        else:
            call = StreamingCall(connection, stream, head)
            call.run(lambda request: self.serve(request))
        self.begun_calls.append(call)
        return call

    @staticmethod
    async def _echo(call: StreamingCall) -> Status | None:
        async for request in call.read_messages():
            await call.write_all([request])
        return None

    def send(self, data: bytes) -> None:
        read(self.connection, data)

    def head(self, stream: int, path: str = UNARY, *headers: tuple[bytes, bytes]) -> bytes:
        return frame(HEADERS, END_HEADERS, stream, post(path, *headers))

    def call(self, stream: int, data: bytes = b"abc", *headers: tuple[bytes, bytes]) -> None:
        request_frames = frame(DATA, END_STREAM, stream, message(data))
        self.send(self.head(stream, UNARY, *headers) + request_frames)

    def statuses(self) -> dict[int, bytes]:
        """Return the ends of calls since the last call by stream: status and further fields."""
        return {
            stream: payload.partition(b"grpc-status")[2][1:]
            for kind, flags, stream, payload in self.transport.frames()
            if kind == HEADERS and flags & END_STREAM
        }


def read(connection: GrpcConnection, data: bytes) -> None:
    """Let a connection read these bytes, as an event loop does."""
    view = memoryview(data)
    while view:
        buffer = connection.get_buffer(-1)
        size = min(len(buffer), len(view))
        buffer[:size] = view[:size]
        connection.buffer_updated(size)
        view = view[size:]


@contextlib.asynccontextmanager
async def open_scene(**settings: Any) -> AsyncIterator[Scene]:
    """Yield a scene, and check that its connection has no stream left after its end."""
    scene = Scene(**settings)
    yield scene
    scene.connection.connection_lost(None)
    await asyncio.sleep(0)
    assert not scene.connection.http2.streams
