"""gRPC's messages in a stream of data: a byte that says whether it is compressed, four of its size,
its bytes. Assembled from pieces of any size, inflated within limits; framed and deflated.
"""

from __future__ import annotations

import asyncio
import struct
import time
import zlib
from collections.abc import Callable
from typing import NamedTuple, Protocol

from shmserve.errors import InvalidArgument, Unavailable
from shmserve.gateway.compression import Inflater
from shmserve.gateway.grpc.calls.headers import CallHead, Ending, StatusCode
from shmserve.gateway.grpc.wire.response import LARGEST_MESSAGE
from shmserve.gateway.inference.body_arrival import SLOWEST_RATE, Arrival, BodyBudget

LARGE = 64 * 1024  # bytes of a message that is placed where it is to be, if it can
PREFIX = struct.Struct(">BI")

_NOTHING = memoryview(b"")

_WBITS = {"gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}


class BrokenMessage(Exception):
    """What comes is no message that can be taken; `ending` is how its call ends."""

    def __init__(self, code: StatusCode, text: str) -> None:
        super().__init__(text)
        self.ending: Ending = (code, text, ())


class Placed(Protocol):
    """A message whose large parts are where they are to be already; of `len` bytes."""

    def __len__(self) -> int: ...

    def release(self) -> None:
        """Nobody needs it."""


Message = bytes | Placed


class Sink(Protocol):
    """A message that goes where it is to be while it arrives."""

    def place(self, most: int) -> memoryview | None:
        """Where the next bytes go, `most` of them; None where that is not known. What is there
        when it is fed is not copied."""

    def feed(self, piece: memoryview) -> None:
        """The next bytes."""

    def whole(self) -> Message:
        """All of it is here."""

    def drop(self) -> None:
        """Nobody needs it any more."""


# For a call with this head, whose next message has so many bytes; None: it is assembled.
Sinks = Callable[[CallHead, int], Sink | None]


def release(message: Message) -> None:
    """Nobody needs this message."""
    if not isinstance(message, bytes):
        message.release()


class Received(NamedTuple):
    """A whole message; `extra` is what of its size was granted to the client beyond the window."""

    data: Message
    compressed: bool
    extra: int


class ArrivingMessage(Arrival):
    """A message of which a part is here, as long as its client may take for the rest; `on_evicted`
    is told when others need its memory."""

    def __init__(
        self, patience_s: float, budget: BodyBudget, on_evicted: Callable[[], None]
    ) -> None:
        super().__init__(patience_s, budget)
        self._on_evicted = on_evicted
        self.patience_s = patience_s
        self.began = time.monotonic()

    def overdue(self, now: float) -> bool:
        """Whether it has taken too long."""
        return now > self.began + self.patience_s + self.received / SLOWEST_RATE

    def _waited(self, now: float) -> float:
        return now - self.began

    def evict(self) -> None:
        """Give its memory back now; its call ends."""
        super().evict()
        self._on_evicted()


class Assembly:
    """Assembles the messages of one call: `feed` it with what comes, and `take` what is whole.
    A message of up to `unasked` bytes comes unasked."""

    __slots__ = (
        *("_at", "_compressed", "_copied", "_head", "_later", "_message", "_piece", "_prefix"),
        *("_sinks", "_size", "_unasked", "extra", "missing", "sink"),
    )

    def __init__(self, unasked: int, head: CallHead, sinks: Sinks | None) -> None:
        self._unasked = unasked
        self._head = head
        self._sinks = sinks
        self.sink: Sink | None = None
        self._piece = _NOTHING  # what came, of which `_at` bytes are taken
        self._at = 0
        self._copied = True  # out of the buffer that it came in
        self._later = bytearray()  # what came behind it
        self._prefix = b""
        self._size = 0
        self._message = bytearray()  # what is here of one that goes nowhere else
        self._compressed = False
        self.missing = 0  # bytes of the message that has begun
        self.extra = 0  # bytes of it that the client may not send unasked

    @property
    def begun(self) -> int:
        """How many bytes are here of the message that is not whole, when there is none to take."""
        return PREFIX.size + self._size - self.missing if self.missing else len(self._prefix)

    def place(self, most: int) -> memoryview | None:
        """Where the next bytes go in the end, `most` of them; None where that is not known."""
        if self.sink is None or self._at < len(self._piece) or self._later:
            return None
        return self.sink.place(min(most, self.missing))

    def feed(self, piece: memoryview) -> None:
        """These bytes came."""
        if self._at == len(self._piece) and not self._later:
            self._piece, self._at, self._copied = piece, 0, False
        else:
            self._later += piece

    def leave(self) -> None:
        """What is here is taken later: it is not to keep the buffer that it is in."""
        if not self._copied:
            self._piece, self._at = memoryview(bytes(self._piece[self._at :])), 0
            self._copied = True

    def take(self) -> Received | None:
        """The next message that is whole, None: its rest is to come. Raises BrokenMessage."""
        while self._at < len(self._piece) or self._go_on():
            if not self.missing:
                taken = PREFIX.size - len(self._prefix)
                self._prefix += self._piece[self._at : self._at + taken]
                self._at = min(self._at + taken, len(self._piece))
                if len(self._prefix) < PREFIX.size:
                    continue
                if not self._begin():
                    return Received(b"", self._compressed, 0)
                continue
            part = self._piece[self._at : self._at + self.missing]
            self._at += len(part)
            self.missing -= len(part)
            if self.sink is None:
                self._message += part
            else:
                self.sink.feed(part)
            if not self.missing:
                data = self._whole()
                extra, self.extra = self.extra, 0
                return Received(data, self._compressed, extra)
        return None

    def _go_on(self) -> bool:
        self._piece, self._at, self._copied = memoryview(bytes(self._later)), 0, True
        self._later.clear()
        return bool(self._piece)

    def _whole(self) -> Message:
        sink, self.sink = self.sink, None
        if sink is not None:
            return sink.whole()
        data = bytes(self._message)
        self._message = bytearray()
        return data

    def drop(self) -> None:
        """Nothing of what is here is needed."""
        sink, self.sink = self.sink, None
        if sink is not None:
            sink.drop()

    def _begin(self) -> bool:
        flag, size = PREFIX.unpack(self._prefix)
        self._prefix = b""
        if flag > 1:
            raise BrokenMessage(StatusCode.INTERNAL, "malformed message")
        if size > LARGEST_MESSAGE:
            raise BrokenMessage(
                StatusCode.RESOURCE_EXHAUSTED,
                f"Received message larger than max ({size} vs. {LARGEST_MESSAGE})",
            )
        self._compressed = bool(flag)
        self._size = self.missing = size
        self.extra = max(0, size + PREFIX.size - self._unasked)
        if size >= LARGE and not flag and self._sinks is not None:
            self.sink = self._sinks(self._head, size)
        return bool(size)


async def inflated(data: bytes, encoding: str, limit: int, budget: BodyBudget) -> bytes:
    """A compressed message as it was, in turns of the loop; raises BrokenMessage. Until it is whole
    what is here of it counts in `budget`: others may be inflated in the same turns."""
    if encoding == "identity":
        raise BrokenMessage(
            StatusCode.INTERNAL, "a compressed message in a call without grpc-encoding"
        )
    inflater = Inflater(limit)
    pieces: list[bytes] = []
    memory = Arrival(0.0, budget)
    try:
        for piece in inflater.feed(data):
            memory.hold(len(piece))
            pieces.append(piece)
            if len(pieces) % 4 == 0:
                await asyncio.sleep(0)  # others have their turn
        inflater.finish()
    except InvalidArgument as error:
        raise BrokenMessage(StatusCode.RESOURCE_EXHAUSTED, error.message) from None
    except Unavailable as error:
        raise BrokenMessage(StatusCode.UNAVAILABLE, error.message) from None
    finally:
        memory.give_back()
    return b"".join(pieces)


def framed(data: bytes) -> tuple[bytes, bytes]:
    """A message as it is sent."""
    return PREFIX.pack(0, len(data)), data


class Deflater:
    """Compresses the messages of calls whose clients take that, with zlib's `level`."""

    def __init__(self, level: int) -> None:
        self._level = level

    def encoding(self, accepts: frozenset[str]) -> str | None:
        """The encoding for a client that accepts these."""
        return next((name for name in _WBITS if name in accepts), None)

    def framed(self, data: bytes, encoding: str) -> tuple[bytes, bytes]:
        """A message as it is sent; as it is where that is shorter."""
        stream = zlib.compressobj(self._level, wbits=_WBITS[encoding])
        return _shorter(data, stream.compress(data) + stream.flush())

    async def framed_in_turns(self, data: bytes, encoding: str) -> tuple[bytes, bytes]:
        """The same of a large one, in turns of the loop."""
        stream = zlib.compressobj(self._level, wbits=_WBITS[encoding])
        pieces: list[bytes] = []
        view = memoryview(data)
        for at in range(0, len(data), LARGE):
            pieces.append(stream.compress(view[at : at + LARGE]))
            await asyncio.sleep(0)  # others have their turn
        pieces.append(stream.flush())
        return _shorter(data, b"".join(pieces))


def _shorter(data: bytes, small: bytes) -> tuple[bytes, bytes]:
    if len(small) >= len(data):
        return framed(data)
    return PREFIX.pack(1, len(small)), small
