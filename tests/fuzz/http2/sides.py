"""The three engines, as far as they are compared: each takes frames and server's deeds."""

from dataclasses import dataclass, field
from typing import Any, Protocol

import h2.events
import ngh2
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.exceptions import H2Error

from shmserve.gateway.http2.frames import FaultCode
from shmserve.gateway.http2.header_blocks import Fields, HeaderDecoder
from shmserve.gateway.http2.incoming import Limits
from tests.support.wire.http2 import ACK, CLIENT_OPENING, GO_AWAY, PING, RESET, SETTINGS
from tests.support.wire.http2_engine import Engine, RequestFields, frames_of

_MAX_WINDOW = 2**31 - 1
LIMITS = Limits(max_streams=100, header_list_bytes=65536, window_bytes=65535, frame_bytes=16384)
_ANSWER = b"\x88"


@dataclass
class Request:
    """The state of a stream as an engine reports it."""

    fields: list[tuple[bytes, bytes]]
    data: bytes = b""
    ended: bool = False


@dataclass
class EngineView:
    """The result of a conversation in an engine: requests, resets, acknowledgements, end."""

    end_reason: str = ""
    last_reset: int | None = None  # the code of a reset in the last step
    requests: dict[int, Request] = field(default_factory=dict)
    resets: dict[int, int] = field(default_factory=dict)
    answers: list[tuple[int, bytes]] = field(default_factory=list)

    def take(self, frames_sent: bytes) -> None:
        for sent_frame in frames_of(frames_sent):
            if sent_frame.kind == RESET:
                self.last_reset = int.from_bytes(sent_frame.payload, "big")
                self.resets[sent_frame.stream] = self.last_reset
                self.requests.pop(sent_frame.stream, None)
            elif sent_frame.kind == GO_AWAY:
                code = FaultCode(int.from_bytes(sent_frame.payload[4:8], "big")).name
                text = sent_frame.payload[8:].decode("latin-1")
                self.end_reason = self.end_reason or f"{code} {text}".strip()
            elif sent_frame.kind in (SETTINGS, PING) and sent_frame.flags & ACK:
                self.answers.append((sent_frame.kind, sent_frame.payload))

    def answered(self, stream: int) -> bool:
        """Record that the server has completed the stream, and whether the client has, too."""
        request = self.requests.pop(stream, None)
        return request is None or request.ended


class Side(Protocol):
    view: EngineView

    def take(self, data: bytes) -> None:
        """Read a frame of the client."""

    def answer(self, stream: int) -> None:
        """Respond with header fields alone; further data of the client are unwanted."""

    def reset(self, stream: int) -> None:
        """Reset a stream by the server."""


class OwnSide:
    """The engine of the gateway; it receives this number of bytes at once."""

    def __init__(self, step: int = 1 << 20) -> None:
        self._step = step
        self._engine = Engine(LIMITS)
        self._answered: set[int] = set()
        self.early_resets: set[int] = set()  # streams that it has reset before the client was done
        self.decoded: Fields = ()  # the fields of the last header block
        headers = self._engine.http2._headers
        headers._decode = self._decode  # type: ignore[method-assign]
        headers._convert = self._read
        self.view = EngineView()
        self.take(CLIENT_OPENING)

    def take(self, data: bytes) -> None:
        engine = self._engine
        first_index = len(engine.sent)
        for start in range(0, len(data), self._step):
            engine.take(data[start : start + self._step])
        assert not engine.http2.has_pending_frames
        assert not engine.http2._buffer, "a whole frame is not handled"
        self._look(first_index)

    def _look(self, first_index: int) -> None:
        engine, view = self._engine, self.view
        view.requests = {
            number: Request(list(vars(request.fields)["sent"]), request.data, request.ended)
            for number, request in engine.requests.items()
            if not request.cancelled and number not in self._answered
        }
        view.take(b"".join(_encode_sent_frame(answer) for answer in engine.sent[first_index:]))
        for number in view.resets:
            view.requests.pop(number, None)
            if number not in engine.requests or not engine.requests[number].ended:
                self.early_resets.add(number)
        assert engine.http2.is_closing == bool(view.end_reason)
        assert all(stream.id == number for number, stream in engine.http2.streams.items())
        assert not view.requests.keys() & view.resets.keys()

    def _decode(self, block: bytes) -> tuple[Fields, bool]:
        fields = HeaderDecoder._decode(self._engine.http2._headers, block)
        self.decoded = fields[0]
        return fields

    def _read(self, fields: Fields) -> RequestFields:
        head = RequestFields(fields)
        vars(head)["sent"] = self.decoded  # before fields were dropped and blanks removed
        return head

    @property
    def in_block(self) -> bool:
        """Return whether the rest of a header block is missing; other engines decode it already."""
        return self._engine.http2._block is not None

    def is_open(self, stream: int) -> bool:
        """Return whether the server may still respond on the stream."""
        return stream in self._engine.http2.streams

    def answer(self, stream: int) -> None:
        first_index = len(self._engine.sent)
        self._answered.add(stream)
        self._engine.http2.sender.send_trailers(self._engine.stream(stream), _ANSWER)
        self._engine.flush()
        self._look(first_index)

    def reset(self, stream: int) -> None:
        first_index = len(self._engine.sent)
        self._engine.http2.reset(self._engine.stream(stream), FaultCode.CANCEL)
        self._engine.flush()
        self._look(first_index)


def _encode_sent_frame(sent_frame: Any) -> bytes:
    head = len(sent_frame.payload).to_bytes(3, "big") + bytes((sent_frame.kind, sent_frame.flags))
    return head + sent_frame.stream.to_bytes(4, "big") + sent_frame.payload


class H2:
    """`h2`, in Python."""

    _config = H2Configuration(
        client_side=False, header_encoding=None, normalize_inbound_headers=False
    )

    def __init__(self) -> None:
        self._engine = H2Connection(self._config)
        self._engine.initiate_connection()
        self._engine.increment_flow_control_window(_MAX_WINDOW - 65535)
        self._engine.data_to_send()
        self.view = EngineView()
        self.take(CLIENT_OPENING)

    def take(self, data: bytes) -> None:
        try:
            events = self._engine.receive_data(data)
        except H2Error as error:
            self._engine.data_to_send()
            self.view.end_reason = f"{type(error).__name__} {error}"
            return
        requests = self.view.requests
        for event in events:
            if isinstance(event, h2.events.RequestReceived):
                fields = [(bytes(name), bytes(value)) for name, value in event.headers]
                requests[event.stream_id] = Request(fields)
            elif isinstance(event, h2.events.DataReceived):
                if event.stream_id in requests:
                    requests[event.stream_id].data += event.data
            elif isinstance(event, h2.events.StreamEnded):
                if event.stream_id in requests:
                    requests[event.stream_id].ended = True
            elif isinstance(event, h2.events.StreamReset):
                requests.pop(event.stream_id, None)
        self.view.take(self._engine.data_to_send())

    def answer(self, stream: int) -> None:
        has_ended = self.view.answered(stream)
        self._engine.send_headers(stream, [(b":status", b"200")], end_stream=True)
        if not has_ended:
            self._engine.reset_stream(stream, FaultCode.NO_ERROR)
        self.view.take(self._engine.data_to_send())

    def reset(self, stream: int) -> None:
        self._engine.reset_stream(stream, FaultCode.CANCEL)
        self.view.take(self._engine.data_to_send())


class Ngh2:
    """`ngh2`, which is nghttp2."""

    def __init__(self) -> None:
        self._engine = ngh2.Connection(ngh2.Role.SERVER)
        self._engine.initiate_connection()
        self._engine.set_local_window_size(_MAX_WINDOW)
        self._engine.data_to_send()
        self.view = EngineView()
        self.take(CLIENT_OPENING)

    def take(self, data: bytes) -> None:
        error = ""
        try:
            self._engine.receive_data(data)
        except ngh2.NGH2Error as error_raised:
            error = f"{type(error_raised).__name__} {error_raised}"
        requests = self.view.requests
        for event in self._engine.events():
            if isinstance(event, ngh2.RequestReceived):
                requests[event.stream_id] = Request(_plain(event.headers), ended=event.end_stream)
            elif isinstance(event, ngh2.DataReceived):
                if event.stream_id in requests:
                    request = requests[event.stream_id]
                    request.data += event.data
                    request.ended = request.ended or event.end_stream
            elif isinstance(event, ngh2.TrailersReceived):
                if event.stream_id in requests:
                    requests[event.stream_id].ended = True
            elif isinstance(event, ngh2.StreamReset):
                requests.pop(event.stream_id, None)
        self.view.take(self._engine.data_to_send())
        self.view.end_reason = self.view.end_reason or error

    def answer(self, stream: int) -> None:
        has_ended = self.view.answered(stream)
        self._engine.send_response(stream, [(b":status", b"200")], end_stream=True)
        self.view.take(self._engine.data_to_send())
        if not has_ended:
            self._engine.reset_stream(stream, FaultCode.NO_ERROR)
            self.view.take(self._engine.data_to_send())

    def reset(self, stream: int) -> None:
        self._engine.reset_stream(stream, FaultCode.CANCEL)
        self.view.take(self._engine.data_to_send())


def _plain(headers: Any) -> list[tuple[bytes, bytes]]:
    return [(bytes(name), bytes(value)) for name, value in headers]
