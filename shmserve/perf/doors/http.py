"""HTTP/1.1 at full speed: requests are encoded once, and of a response no more is read than how
long it is, unless it is an error; but for server-sent events, the responses of `generate_stream`
and the tokens of OpenAI's routes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from shmserve.cli.client_tensors import decode
from shmserve.cli.transports import Address, Credentials, InputTensor, OutgoingRequest
from shmserve.cli.transports.http import HEADER_LENGTH, inference_header, model_path
from shmserve.errors import InvalidArgument
from shmserve.perf.doors import Heard
from shmserve.perf.doors.connection import ClientConnection, tls_of
from shmserve.perf.poller import Poller

_length = re.compile(rb"(?i)\r\ncontent-length: *(\d+)\r\n").search
_is_chunked = re.compile(rb"(?i)\r\ntransfer-encoding: *chunked\r\n").search
_closes = re.compile(rb"(?i)\r\nconnection: *close\r\n").search
_CHUNKED = -1
_LONGEST_ERROR = 300
OPENAI = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
_JSON = {"Content-Type": "application/json"}

# Text that is not empty: the first chunk of a chat says who speaks, and nothing yet.
_has_text = re.compile(rb'"(?:content|text|reasoning_content)" ?: ?"(?!")').search
_completion_tokens = re.compile(rb'"completion_tokens" ?: ?(\d+)').search


class HttpDoor:
    """Inferences over HTTP, with one response each."""

    streams = False

    def __init__(self, address: Address, credentials: Credentials, poller: Poller) -> None:
        """Raises InvalidArgument for files of TLS that are none."""
        tls = tls_of(address, credentials, "http/1.1")
        self.connect = partial(ClientConnection, address, tls, poller)
        self._host = address.target or "localhost"
        self._headers = credentials.headers

    def encode(self, request: OutgoingRequest) -> bytes:
        """A POST of .../infer with binary tensors both ways."""
        header = json.dumps(inference_header(request, binary=True)).encode()
        body = b"".join([header, *(tensor.raw for tensor in request.inputs)])
        path = f"{model_path(request.model, request.version)}/infer"
        return self.post(path, body, {HEADER_LENGTH: str(len(header))})

    def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        """A request as it travels."""
        fields: Sequence[tuple[str, str]] = [
            ("Host", self._host),
            *self._headers,
            *headers.items(),
            ("Content-Length", str(len(body))),
        ]
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields)
        return f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode() + body

    def lane(self, heard: Heard) -> HttpLane:
        """A connection."""
        return HttpLane(self, heard)

    def close(self) -> None:
        """Its lanes are all that there is."""


class HttpLane:
    """A connection with one exchange at a time; made anew when the server has closed it."""

    def __init__(self, door: HttpDoor, heard: Heard) -> None:
        self.heard = heard
        self._door = door
        self._connection: ClientConnection = door.connect(self)
        self._busy = False
        self._in_body = False
        self._left = 0  # bytes of the body
        self._rest = b""  # of a head, or of a chunk's first line
        self._ok = True
        self._closing = False
        self._error = b""  # what the server says that is wrong

    def send(self, request: bytes) -> None:
        """Send a request."""
        if not self._connection.open:
            self._connection = self._door.connect(self)
        self._busy = True
        self._connection.write(request)

    def received(self, data: bytes) -> None:
        """Of a response."""
        if not self._in_body:
            data = self._rest + data if self._rest else data
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self._rest = data
                return
            self._begin(data[: end + 2])
            data = data[end + 4 :]
        if self._left == _CHUNKED:
            self._chunks(data)
            return
        self._left -= len(data)
        if not self._ok:
            self._error += data
        if self._left <= 0:
            self._end()

    def _begin(self, head: bytes) -> None:
        self._in_body, self._rest = True, b""
        self._ok = head[9:12] == b"200"
        self._error = b""
        self._closing = _closes(head) is not None
        found = _length(head)
        if found is not None:
            self._left = int(found[1])
        else:
            self._left = _CHUNKED if _is_chunked(head) else 0
        if not self._ok:
            self._error = head[9 : head.find(b"\r\n")] + b": "

    def _chunks(self, data: bytes) -> None:
        data = self._rest + data if self._rest else data
        at = 0
        while True:
            line_end = data.find(b"\r\n", at)
            if line_end < 0:
                break
            size = int(data[at:line_end].partition(b";")[0], 16)
            end = line_end + 2 + size + 2
            if len(data) < end:
                break
            if not size:
                self._rest = b""
                self._end()
                return
            self.piece(data[line_end + 2 : end - 2])
            at = end
        self._rest = data[at:]

    def piece(self, data: bytes) -> None:
        """A chunk of the body."""
        if not self._ok:
            self._error += data

    def _end(self) -> None:
        self._in_body = self._busy = False
        if self._closing:
            self._connection.close()
        if self._ok:
            self.complete()
        else:
            self.heard.ended(_text_of(self._error))

    def complete(self) -> None:
        """All of a response has come, which is no error."""
        self.heard.ended()

    def lost(self, reason: str) -> None:
        """The connection has ended; one between two exchanges may."""
        busy, self._busy, self._in_body, self._rest = self._busy, False, False, b""
        if busy:
            self.heard.ended(reason)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def _text_of(error: bytes) -> str:
    status, _, body = error.decode(errors="replace").partition(": ")
    try:
        found: Any = json.loads(body)
        text = found["error"]
        text = text.get("message", text) if isinstance(text, dict) else text
    except (ValueError, KeyError, TypeError):
        text = body
    return f"{status}: {' '.join(str(text).split())[:_LONGEST_ERROR]}"


@dataclass(frozen=True, slots=True)
class OpenAIRequest:
    """A body for one of OpenAI's routes."""

    body: dict[str, Any]


class EventLane(HttpLane):
    """Events of one exchange at a time. `is_response(event)` says which are counted."""

    def __init__(self, door: HttpDoor, heard: Heard, is_response: Callable[[bytes], Any]) -> None:
        super().__init__(door, heard)
        self._is_response = is_response
        self._part = b""
        self._failed = b""
        self._tokens = -1

    def piece(self, data: bytes) -> None:
        """Events, or parts of them."""
        if not self._ok:
            super().piece(data)
            return
        *events, self._part = (self._part + data).split(b"\n\n")
        for event in events:
            text = event.strip().removeprefix(b"data:").lstrip()
            if text.startswith(b'{"error"'):
                self._failed = text
            elif self._is_response(text):
                self.heard.responded()
            found = _completion_tokens(text)
            if found is not None:
                self._tokens = int(found[1])

    def complete(self) -> None:
        """The events have ended."""
        failed, tokens = self._failed, self._tokens
        self._part, self._failed, self._tokens = b"", b"", -1
        self.heard.ended(failed.decode(errors="replace")[:_LONGEST_ERROR], tokens)


class GenerateDoor(HttpDoor):
    """`generate_stream`: inputs as JSON, any number of responses."""

    streams = True

    def encode(self, request: OutgoingRequest) -> bytes:
        """A POST of .../generate_stream."""
        body: dict[str, Any] = {tensor.name: _value(tensor) for tensor in request.inputs}
        body |= request.sequence_parameters()
        path = f"{model_path(request.model, request.version)}/generate_stream"
        return self.post(path, json.dumps(body).encode(), _JSON)

    def lane(self, heard: Heard) -> EventLane:
        """A connection; each event is a response."""
        return EventLane(self, heard, bool)


class OpenAIDoor(HttpDoor):
    """Text that is generated, by OpenAI's routes; a response is a chunk that has some of it, or, at
    the end, a token."""

    streams = True

    def __init__(
        self, address: Address, credentials: Credentials, poller: Poller, route: str
    ) -> None:
        """Raises InvalidArgument for files of TLS that are none."""
        super().__init__(address, credentials, poller)
        self.route = route

    def encode(self, request: Any) -> bytes:
        """A POST of a body."""
        assert isinstance(request, OpenAIRequest)
        return self.post(self.route, json.dumps(request.body).encode(), _JSON)

    def lane(self, heard: Heard) -> EventLane:
        """A connection."""
        return EventLane(self, heard, _has_text)


def _value(tensor: InputTensor) -> Any:
    if tensor.part is not None:
        raise InvalidArgument("generate_stream takes no shared memory: use grpc, or --run-dir")
    flat = decode(tensor.datatype, tensor.shape, memoryview(tensor.raw))
    while isinstance(flat, list) and len(flat) == 1:
        flat = flat[0]
    return flat
