"""The HTTP/2 engine with a record of its events and of the frames that it sends."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from shmserve.gateway.http2.connection import Http2Connection
from shmserve.gateway.http2.frames import FaultCode
from shmserve.gateway.http2.header_blocks import Fields, parse_content_length
from shmserve.gateway.http2.incoming import (
    Data,
    Limits,
    PingAcknowledged,
    StreamOpened,
    StreamReset,
)
from shmserve.gateway.http2.outgoing import Stream
from tests.support.wire.http2 import (
    ACK,
    CLIENT_OPENING,
    DATA,
    END_HEADERS,
    END_STREAM,
    GO_AWAY,
    HEADERS,
    PING,
    RESET,
    frame,
    post,
)

_PROBE_STREAM = 1001  # the number of a stream that no test case uses
_SIGN_BYTES = b"stillon?"


class Frame(NamedTuple):
    """A decoded frame."""

    kind: int
    flags: int
    stream: int
    payload: bytes


def frames_of(data: bytes) -> list[Frame]:
    """Return the frames in these bytes; the last one must be complete."""
    events = []
    offset = 0
    while offset < len(data):
        size = int.from_bytes(data[offset : offset + 3], "big")
        kind, flags, stream = struct.unpack_from(">BBI", data, offset + 3)
        offset += 9 + size
        assert offset <= len(data)
        events.append(Frame(kind, flags, stream, data[offset - size : offset]))
    return events


@dataclass
class Request:
    stream: Stream
    fields: Fields
    data: bytes = b""
    ended: bool = False
    cancelled: bool = False


class RequestFields(tuple[tuple[bytes, bytes], ...]):
    """The header fields of a request."""

    @property
    def data_size(self) -> int:
        """Return the announced content length, or -1 without one."""
        return parse_content_length(self)


class Engine:
    """One connection: pass a client's bytes to `take`, then inspect the result."""

    def __init__(
        self, limits: Limits | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.http2 = Http2Connection(RequestFields, limits or Limits(), clock)
        self.requests: dict[int, Request] = {}
        self.acknowledged: list[bytes] = []
        self.sent: list[Frame] = []
        self.turns = 0
        self.flush()

    def take(self, data: bytes) -> Engine:
        self._take(data)
        while self.http2.has_pending_frames:
            self._take(b"")
        return self

    def _take(self, data: bytes) -> None:
        self.turns += 1
        for event in self.http2.receive(data):
            if isinstance(event, StreamOpened):
                assert event.stream.id not in self.requests
                self.requests[event.stream.id] = Request(event.stream, event.head)
            elif isinstance(event, Data):
                request = self.requests[event.stream.id]
                assert not (request.ended or request.cancelled)
                request.data += event.piece
                request.ended = event.is_last
            elif isinstance(event, StreamReset):
                request = self.requests[event.stream.id]
                assert not request.cancelled
                request.cancelled = True
            else:
                assert isinstance(event, PingAcknowledged)
                self.acknowledged.append(event.payload)
        self.flush()

    def flush(self) -> list[Frame]:
        ready, self.http2.sender.output = self.http2.sender.output, []
        new_frames = frames_of(b"".join(ready))
        self.sent += new_frames
        return new_frames

    def stream(self, number: int) -> Stream:
        return self.requests[number].stream

    @property
    def gone(self) -> FaultCode | None:
        """Return the error code of a closed connection, or None if it is open."""
        if not self.http2.is_closing:
            return None
        last_frame = self.sent[-1]
        assert last_frame.kind == GO_AWAY
        return FaultCode(int.from_bytes(last_frame.payload[4:8], "big"))

    @property
    def resets(self) -> dict[int, FaultCode]:
        return {
            frame.stream: FaultCode(int.from_bytes(frame.payload, "big"))
            for frame in self.sent
            if frame.kind == RESET
        }

    def check_goes_on(self) -> None:
        """Check that the connection still works: it answers a ping and serves a request."""
        request = frame(HEADERS, END_HEADERS, _PROBE_STREAM, post("/later"))
        data = frame(DATA, END_STREAM, _PROBE_STREAM, b"later")
        self.take(frame(PING, 0, 0, _SIGN_BYTES) + request + data)
        assert self.gone is None
        assert Frame(PING, ACK, 0, _SIGN_BYTES) in self.sent
        assert self.requests[_PROBE_STREAM].data == b"later"
        assert self.requests[_PROBE_STREAM].ended
        assert dict(self.requests[_PROBE_STREAM].fields)[b":path"] == b"/later"


@dataclass(frozen=True)
class Case:
    """The bytes of a client after its preface and SETTINGS, and the expected result.

    The connection `ends` with one of these codes, or these streams are reset; otherwise there is no
    error. `served` are the complete requests by stream, with their data.
    """

    section: str
    title: str
    sent: bytes
    ends: tuple[FaultCode, ...] = ()
    resets: tuple[tuple[int, FaultCode], ...] = ()
    served: tuple[tuple[int, bytes], ...] = ()
    before: bytes = CLIENT_OPENING

    def __str__(self) -> str:
        return f"{self.section} {self.title}"

    def check(self, limits: Limits | None = None) -> None:
        """Let the engine process the bytes, at once and byte by byte."""
        uncut, cut_engine = Engine(limits), Engine(limits)
        uncut.take(self.before + self.sent)
        for byte in self.before + self.sent:
            cut_engine.take(bytes((byte,)))
        for engine in (uncut, cut_engine):
            self._check(engine)

    def _check(self, engine: Engine) -> None:
        if self.ends:
            assert engine.gone in self.ends
            return
        assert engine.gone is None and engine.resets == dict(self.resets)
        served = {
            number: request.data
            for number, request in engine.requests.items()
            if request.ended and not request.cancelled
        }
        assert served == dict(self.served)
        engine.check_goes_on()
