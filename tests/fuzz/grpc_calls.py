"""Calls on a connection of gRPC's, as a client may make them, and what else happens meanwhile.

What a handler is given is what its client has sent, and what it answers comes back; nothing is
logged as a fault, and when the connection is over nothing is left: no call, no task, no memory.
"""

import asyncio
import gzip
import logging
import struct
from typing import Any

from shmserve.gateway.grpc.call import StreamingCall
from shmserve.gateway.grpc.framing import Status, StatusCode
from tests.rigs.grpc_scene import STREAM, UNARY, Scene
from tests.support.wire.http2 import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PING,
    RESET,
    SETTINGS,
    WINDOW,
    frame,
    message,
    post,
)

_MAX_STEPS = 40
_FIELDS: list[tuple[tuple[bytes, bytes], ...]] = [
    *((), (), (), ((b"grpc-encoding", b"gzip"),), ((b"grpc-timeout", b"9S"),)),
    *(((b"grpc-timeout", b"0n"),), ((b"grpc-encoding", b"br"),), ((b"grpc-timeout", b"x"),)),
    *(((b"k-bin", b"YQ"),), ((b"content-length", b"10"),)),
]
_MESSAGES = [b"", b"a", b"bcd" * 5, bytes(300), bytes(70_000)]


class _Faults(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(self.format(record))


class _Client:
    """The bytes of a client that are sent and not yet sent, by stream."""

    def __init__(self, scene: Scene, data: bytes) -> None:
        self.scene = scene
        self._data = data
        self._at = 0
        self._next = 1
        self._open: list[int] = []
        self.sent_messages: dict[int, list[bytes]] = {}  # whole messages
        self.unsent_bytes: dict[int, bytearray] = {}  # bytes that are to be sent
        self.received_bytes: dict[int, bytearray] = {}

    def number(self) -> int:
        position = self._at
        self._at = position + 1
        return self._data[position] if position < len(self._data) else 0

    @property
    def has_more(self) -> bool:
        return self._at < len(self._data)

    def _stream(self) -> int:
        """Return a stream that the client has not ended if there is one; at times any stream."""
        stream_number = self.number()
        if stream_number > 0xF8 or not self._open:
            return 1 + 2 * (stream_number % max(1, self._next // 2))
        return self._open[stream_number % len(self._open)]

    def _end(self, stream: int) -> None:
        if stream in self._open:
            self._open.remove(stream)

    def begin(self, path: str) -> None:
        stream, self._next = self._next, self._next + 2
        self.sent_messages[stream], self.unsent_bytes[stream] = [], bytearray()
        self.received_bytes[stream] = bytearray()
        self._open.append(stream)
        block = post(path, *_FIELDS[self.number() % len(_FIELDS)])
        self.scene.send(frame(HEADERS, END_HEADERS, stream, block))

    def write(self) -> None:
        """Queue a message whose bytes are sent later in pieces."""
        stream, choice = self._stream(), self.number()
        data = _MESSAGES[choice % len(_MESSAGES)]
        if choice > 0xF0:
            self.unsent_bytes.setdefault(stream, bytearray()).extend(b"\x07" + bytes(4))
        elif choice > 0xD0:
            compressed = gzip.compress(data, 1)
            self.unsent_bytes.setdefault(stream, bytearray()).extend(
                struct.pack(">BI", 1, len(compressed)) + compressed
            )
        else:
            self.unsent_bytes.setdefault(stream, bytearray()).extend(message(data))
        self.sent_messages.setdefault(stream, []).append(data)

    def send(self) -> None:
        stream, choice = self._stream(), self.number()
        size = (1, 5, 6, 100, 16384, 16384, 16384)[choice % 7]
        unsent = self.unsent_bytes.get(stream, bytearray())
        piece, unsent[:size] = bytes(unsent[:size]), b""
        if choice > 0xE0:
            self._end(stream)
        self.scene.send(frame(DATA, END_STREAM if choice > 0xE0 else 0, stream, piece))

    def step(self) -> None:
        kind = self.number() % 28
        scene = self.scene
        if kind < 3 or not self._open:
            self.begin(UNARY)
        elif kind < 5:
            self.begin(STREAM)
        elif kind < 9:
            self.write()
        elif kind < 16:
            self.send()
        elif kind == 16:
            stream = self._stream()
            self._end(stream)
            scene.send(frame(RESET, 0, stream, bytes(4)))
        elif kind == 17:
            increment = struct.pack(">I", (1, 500, 2**20)[self.number() % 3])
            scene.send(frame(WINDOW, 0, (0, self._stream())[self.number() % 2], increment))
        elif kind == 18:
            size = (0, 10, 65535, 2**20)[self.number() % 4]
            scene.send(frame(SETTINGS, 0, 0, struct.pack(">HI", 4, size)))
        elif kind == 19:
            scene.send(frame(PING, 0, 0, bytes(8)))
        elif kind == 20:
            scene.connection.pause_writing()
        elif kind == 21:
            scene.connection.resume_writing()
        elif scene.begun_calls:
            call: Any = scene.begun_calls[self.number() % len(scene.begun_calls)]
            if kind == 22:
                (call.on_timeout, call._on_deadline)[self.number() % 2]()
            elif isinstance(call, StreamingCall) and self.number() > 0xC0:
                call.fail(Status(StatusCode.UNAVAILABLE, "no"))
            else:
                self._answer()

    def _answer(self) -> None:
        for raw, call in self.scene.calls:
            assert raw == self.sent_messages[call._stream.id][0]
            call.finish(raw)
        self.scene.calls.clear()

    def look(self) -> None:
        for kind, _, stream, payload in self.scene.transport.frames():
            if kind == DATA:
                self.received_bytes[stream] += payload
        for stream, received_bytes in self.received_bytes.items():
            assert b"".join(map(message, self.sent_messages[stream])).startswith(received_bytes)


async def _run_scenario(data: bytes) -> None:
    faults = _Faults()
    logging.getLogger("shmserve").addHandler(faults)
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: faults.messages.append(str(context)))
    try:
        scene = Scene()
        client = _Client(scene, data)
        for _ in range(_MAX_STEPS):
            if not client.has_more or scene.transport.closed or scene.connection._is_closing:
                break
            client.step()
            if client.number() % 2:
                await asyncio.sleep(0)
            client.look()
        scene.connection.connection_lost(None)
        other_tasks = asyncio.all_tasks() - {asyncio.current_task()}
        if other_tasks:
            await asyncio.wait(other_tasks, timeout=10)
        assert all(task.done() for task in other_tasks), "a task goes on"
        assert all(call.is_done for call in scene.begun_calls)
        assert not scene.connection.http2.streams
        assert not scene.connection.http2.sender.waiting_streams
        assert scene.connection.context.budget._used_bytes == 0
    finally:
        logging.getLogger("shmserve").removeHandler(faults)
    assert not faults.messages, faults.messages[0]


def grpc(data: bytes) -> None:
    """Run a gRPC connection with the actions of its client and its server."""
    asyncio.run(_run_scenario(data))
