"""Bytes to a conversation: what a client sends, frame by frame, and what its server does meanwhile.

Most of it is by the rules, so that it goes on; a part of the frames is then broken in one place.
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple, TypeVar

from shmserve.gateway.http2.header_blocks import encode_block
from tests.support.wire.http2 import (
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
)

PUSH_PROMISE, PADDED, HAS_PRIORITY = 5, 0x8, 0x20
T = TypeVar("T")

_MAX_STEPS = 24
_REQUEST = b"\x83\x86\x84"


class Step(NamedTuple):
    """The client sends a frame; or the server answers a stream, or resets it."""

    action: str  # "send", "answer", "reset"
    data: bytes
    stream: int = 0

    @property
    def name(self) -> str:
        return _KINDS.get(self.data[3], "UNKNOWN") if self.data else self.action

    @property
    def of(self) -> int:
        return int.from_bytes(self.data[5:9], "big") & 0x7FFFFFFF if self.data else self.stream


_KINDS = dict(
    enumerate(
        [
            *("DATA", "HEADERS", "PRIORITY", "RST_STREAM", "SETTINGS", "PUSH_PROMISE", "PING"),
            *("GOAWAY", "WINDOW_UPDATE", "CONTINUATION", "ALTSVC", "UNKNOWN", "ORIGIN"),
        ]
    )
)


def _field(name: bytes, value: bytes) -> bytes:
    return encode_block(((name, value),))


_STARTS = [
    *[_REQUEST + b"\x01\x01h"] * 8,
    *(b"\x82\x87\x84\x41\x01h", b"\x83\x86\x04\x02/x\x01\x01h", b"\x83\x86\x44\x02/y\x01\x01h"),
    *(_REQUEST + b"\x66\x01h", _REQUEST + b"\x01\x01h\x0f\x10\x10application/grpc"),
    *(_REQUEST, b"", b"\x83\x86\x01\x01h", b"\x83\x84\x01\x01h", b"\x86\x84\x01\x01h"),
    *(b"\x83\x86\x84\x84\x01\x01h", b"\x83\x86\x04\x00\x01\x01h", _REQUEST + b"\x01\x00"),
    *(b"\x20" + _REQUEST + b"\x01\x01h", b"\x3f\x01" + _REQUEST + b"\x01\x01h"),
    *(b"\x20\x3f\xe1\x1f" + _REQUEST + b"\x41\x01h", b"\x20\x20\x20" + _REQUEST + b"\x01\x01h"),
    *(_field(b":method", b"CONNECT") + b"\x41\x03h:1", b"\x88", _REQUEST + b"\x01\x01h\x88"),
    *(b"\x83\x86\x01\x01h" + _field(b":path", b"*"), b"\x83\x86\x01\x01h" + _field(b":path", b"x")),
    _field(b":method", b"OPTIONS") + b"\x86\x01\x01h" + _field(b":path", b"*"),
]
_FINE_STARTS = 13
_FIELDS = [
    *(b"\x40\x01a\x01b", b"\x40\x01a\x01c", b"\x00\x01a\x01b", b"\x10\x01a\x01b", b"\xbe", b"\xbf"),
    *(b"\xc0", b"\x7e\x01z", b"\x7f\x00\x01z", b"\x00\x81\x1f\x81\x8f", b"\x90", b"\xbd"),
    b"\x40\x01n\x7f\xf0\x1e" + b"v" * 4079,
    *(_field(b"te", b"trailers"), _field(b"te", b"gzip"), _field(b"te", b"")),
    *(_field(b"content-length", value) for value in (b"0", b"4", b"5", b"8", b"x", b"-1", b"4, 4")),
    *(_field(name, b"x") for name in (b"connection", b"upgrade", b"transfer-encoding", b"A",
        b"a b")),
    *(_field(b"a", value) for value in (b" x", b"x ", b"x\0y", b"x\ny", b"\xff", b"", b"x\ty",
        b"\x7f")),
    *(_field(b":path", b"/"), _field(b":x", b"y"), _field(b":authority", b"h"), _field(b":", b"")),
    *(_field(b"host", b"h"), _field(b"host", b"other"), _field(b"cookie", b"a=b"),
        _field(b"", b"x")),
    *(_field(b"priority", b"u=1"), _field(b"grpc-timeout", b"1S"), _field(b"keep-alive", b"x")),
    *(b"\x80", b"\xff\x80", b"\xff\xff\xff\xff\xff\x0f", b"\x20", b"\x3f\xe1\x1f", b"\x3f\xe2\x1f"),
    *(b"\x00\x01a\x05b", b"\x00\x01a\x82\x1f\xff", b"\x00\x01a\x81\x18", b"\x00\x85",
        b"\x40\x00\x00"),
    *(b"\x00\x01a\x84\x3f\xff\xff\xff", b"\x0f\x80", b"\xc5", b"\x00\x01\xffa\x01b"),
]  # fmt: skip
_VALID_FIELDS = [
    *(*_FIELDS[:4], _field(b"te", b"trailers"), b"\x90", b"\x40\x02bb\x03ccc"),
    *(_field(b"content-length", b"4"), _field(b"a", b"\xff"), _field(b"b", b"")),
]
_INCREMENTS = [
    *(1, 1, 2, 5, 100, 2**14, 2**16, 2**30, 2**31 - 1 - 65535, 2**31 - 1, 0, 2**31, 2**32 - 1)
]
_SETTINGS = [
    *((1, 0), (1, 4096), (1, 2**32 - 1), (2, 0), (2, 1), (2, 2), (3, 0), (3, 100), (4, 0), (4, 1)),
    *((4, 65535), (4, 2**31 - 1), (4, 2**31), (5, 16384), (5, 2**24 - 1), (5, 16383), (5, 2**24)),
    *((6, 100), (6, 2**20), (0, 1), (9, 1), (99, 2**32 - 1)),
]


class Conversation:
    """The conversation that some bytes stand for; the same each time."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._next = 1
        self._begun = [1]

    def _number(self) -> int:
        position = self._at
        self._at = position + 1
        return self._data[position] if position < len(self._data) else 0

    def _one_of(self, choices: list[T]) -> T:
        return choices[self._number() % len(choices)]

    def steps(self) -> Iterator[Step]:
        for _ in range(_MAX_STEPS):
            if self._at >= len(self._data):
                return
            yield from self._step(self._number())

    def _step(self, kind: int) -> Iterator[Step]:
        if kind >= 0xE8:
            action = "answer" if kind & 1 else "reset"
            yield Step(action, b"", self._one_of(self._begun))
            return
        for frame_bytes in self._frames(kind % 20):
            yield Step("send", self._broken(frame_bytes) if self._number() > 0xE8 else frame_bytes)

    def _frames(self, kind: int) -> list[bytes]:
        if kind < 6:
            return self._headers(self._new())
        if kind < 10:
            return [self._padded(DATA, self._stream(), b"data" * (self._number() % 4))]
        if kind == 10:
            return self._headers(self._stream())
        if kind == 11:
            return [frame(RESET, 0, self._stream(), struct.pack(">I", self._number()))]
        if kind == 12:
            increment = struct.pack(">I", self._one_of(_INCREMENTS))
            return [frame(WINDOW, 0, self._one_of([0, self._stream()]), increment)]
        if kind == 13:
            values = [self._one_of(_SETTINGS) for _ in range(self._number() % 3)]
            payload = b"".join(struct.pack(">HI", *value) for value in values)
            return [frame(SETTINGS, 0, 0, payload)]
        if kind == 14:
            return [frame(PING, self._number() & 1, 0, struct.pack(">Q", self._number()))]
        if kind == 15:
            depends = struct.pack(">IB", self._one_of([0, 0, 0, 0, 0, 0, 1, self._next]), 16)
            return [frame(PRIORITY, 0, self._stream(), depends)]
        if kind == 16 and self._number() > 0xC0:
            last_stream, code = (
                struct.pack(">I", self._number() & 0xF2),
                struct.pack(">I", self._number() % 16),
            )
            return [frame(GO_AWAY, 0, 0, last_stream + code)]
        if kind == 17 and self._number() > 0xD0:
            return [frame(SETTINGS, 1, 0)]
        if kind == 18:
            trailers = self._one_of([b"", _FIELDS[0], _FIELDS[2], self._block()])
            return [frame(HEADERS, END_HEADERS | END_STREAM, self._stream(), trailers)]
        size = self._number() % 12
        payload = bytes(self._number() for _ in range(size))
        stream = self._one_of([0, self._stream(), 2, self._next + 2])
        return [frame(self._number() % 12, self._number(), stream, payload)]

    def _new(self) -> int:
        stream, self._next = self._next, self._next + 2 + 4 * (self._number() > 0xF0)
        self._begun.append(stream)
        return stream

    def _stream(self) -> int:
        stream_number = self._number()
        if stream_number > 0xF4:
            return (0, 2, self._next, self._next + 2, 2**31 - 1, 2**31, 1)[stream_number % 7]
        return self._begun[-1 - stream_number % min(len(self._begun), 4)]

    def _block(self) -> bytes:
        count = self._number()
        is_odd = count > 0xD8
        fields = [self._one_of(_FIELDS if is_odd else _VALID_FIELDS) for _ in range(count % 4)]
        return self._one_of(_STARTS if is_odd else _STARTS[:_FINE_STARTS]) + b"".join(fields)

    def _headers(self, stream: int) -> list[bytes]:
        block, choice = self._block(), self._number()
        end = END_STREAM if choice & 1 else 0
        if choice < 0xC8:
            return [self._padded(HEADERS, stream, block, END_HEADERS | end)]
        cuts = sorted(self._number() % (len(block) + 1) for _ in range(choice % 3 + 1))
        parts = [block[a:b] for a, b in zip([0, *cuts], [*cuts, len(block)], strict=True)]
        frames = [frame(HEADERS, end, stream, parts[0])]
        frames += [frame(CONTINUATION, 0, stream, piece) for piece in parts[1:-1]]
        return [
            *frames,
            frame(CONTINUATION, END_HEADERS if choice < 0xF8 else 0, stream, parts.pop()),
        ]

    def _padded(self, kind: int, stream: int, payload: bytes, flags: int = 0) -> bytes:
        choice = self._number()
        if kind == DATA and choice & 1:
            flags |= END_STREAM
        if kind == HEADERS and choice & 0x60 == 0x60:
            flags |= HAS_PRIORITY
            payload = struct.pack(">IB", self._one_of([0, 0, 1, stream]), choice) + payload
        if choice & 0x18 == 0x18:
            flags |= PADDED
            size = self._number() % 6
            payload = bytes((size,)) + payload + bytes(size)
        return frame(kind, flags, stream, payload)

    def _broken(self, frame_bytes: bytes) -> bytes:
        choice, value = self._number() % 8, self._number()
        head, payload = bytearray(frame_bytes[:9]), bytearray(frame_bytes[9:])
        if choice < 2:
            head[4] ^= 1 << value % 8  # a flag
        elif choice == 2:
            head[3] = value % 12  # its kind
        elif choice == 3:
            head[8] = value  # its stream
        elif choice == 4:
            head[5] ^= 0x80  # the reserved bit
        elif choice == 5:
            payload = payload[: -1 - value % 5]
        elif choice == 6:
            payload += bytes(value % 20)
        elif payload:
            payload[value % len(payload)] ^= 1 << value // 32
        head[:3] = len(payload).to_bytes(3, "big")
        return bytes(head + payload)
