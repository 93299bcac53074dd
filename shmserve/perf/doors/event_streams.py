"""Server-sent events over HTTP: the responses of `generate_stream`, and the tokens of OpenAI's
routes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shmserve.cli.client_tensors import decode
from shmserve.cli.transports import Address, Credentials, InputTensor, OutgoingRequest
from shmserve.cli.transports.http import model_path
from shmserve.errors import InvalidArgument
from shmserve.perf.doors import Heard
from shmserve.perf.doors.http import HttpDoor, HttpLane
from shmserve.perf.poller import Poller

OPENAI = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
_JSON = {"Content-Type": "application/json"}
_LONGEST_ERROR = 300

# Text that is not empty: the first chunk of a chat says who speaks, and nothing yet.
_has_text = re.compile(rb'"(?:content|text|reasoning_content)" ?: ?"(?!")').search
_completion_tokens = re.compile(rb'"completion_tokens" ?: ?(\d+)').search


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
