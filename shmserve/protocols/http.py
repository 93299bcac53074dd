"""Clients of HTTP/1.1: `HttpTransport`, and `HttpLaneFactory` with its subclasses.

`HttpTransport` blocks and opens a connection for each request. The lanes of the factories never
block, and serve the load generator. Both send all tensors as binary data. A lane encodes a request
once. Of a response it parses only the length, except for errors and server-sent events
(`generate_stream`, the routes of OpenAI).
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import re
import ssl
import urllib.error
from collections.abc import Callable, Container, Iterator, Mapping
from functools import partial
from typing import Any
from urllib.parse import quote

import numpy as np

from shmserve.errors import InvalidArgument
from shmserve.protocols import (
    NOT_READY,
    QUERY_TIMEOUT_S,
    TOKEN_HINT,
    Address,
    Credentials,
    InputTensor,
    LaneObserver,
    OutgoingRequest,
    TransportError,
    response_json,
)
from shmserve.protocols.connection import ClientConnection, EventLoop, connect, create_tls_context
from shmserve.protocols.tensors import ModelTensor, decode

_JSON_LINES = "application/x-ndjson"
HEADER_LENGTH = "Inference-Header-Content-Length"
_find_content_length = re.compile(rb"(?i)\r\ncontent-length: *(\d+)\r\n").search
_is_chunked = re.compile(rb"(?i)\r\ntransfer-encoding: *chunked\r\n").search
_is_chunk_size = re.compile(rb"[0-9a-fA-F]+").fullmatch
_closes_connection = re.compile(rb"(?i)\r\nconnection: *close\r\n").search
_CHUNKED = -1  # in place of the remaining bytes, for a chunked body
_MAX_ERROR_LENGTH = 300
OPENAI_PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
# Part of the error that rejects a request to a decoupled model unless it accepts JSON lines.
_DECOUPLED_ERROR = "models with decoupled transaction policy"
_JSON_HEADERS = {"Content-Type": "application/json"}

# Matches an event with text. The first event of a chat has only the role, and is not counted.
_has_text = re.compile(rb'"(?:content|text|reasoning_content)" ?: ?"(?!")').search
_find_completion_tokens = re.compile(rb'"completion_tokens" ?: ?(\d+)').search


class _OneTimeConnection(http.client.HTTPConnection):
    """A connection for one HTTP request and its response."""

    def __init__(
        self, address: Address, tls: ssl.SSLContext | None, timeout_s: float | None
    ) -> None:
        super().__init__(address.target or "localhost")
        if tls is not None:
            self.default_port = http.client.HTTPS_PORT  # the Host header omits the default port
        self._connect = partial(connect, address, tls, timeout_s)

    def connect(self) -> None:
        self.sock = self._connect()


class HttpTransport:
    """A blocking client of an HTTP server."""

    def __init__(self, address: Address, credentials: Credentials) -> None:
        self.address_text = address.address_text
        self._headers = dict(credentials.headers)
        self._connect = partial(
            _OneTimeConnection,
            address,
            credentials.create_tls_context() if address.uses_tls else None,
        )

    def inputs(self, model: str, version: str) -> dict[str, ModelTensor]:
        """Send GET /v2/models/NAME and return the inputs by name."""
        metadata = self._get_object(model_path(model, version))
        try:
            inputs = metadata["inputs"]
            return {
                t["name"]: ModelTensor(t["name"], t["datatype"], tuple(t["shape"])) for t in inputs
            }
        except (KeyError, TypeError) as error:
            raise TransportError("the server's response is not a model's metadata") from error

    def infer(self, request: OutgoingRequest) -> Iterator[dict[str, Any]]:
        """Send POST /v2/models/NAME/infer and yield each response.

        If the model is decoupled, the request is sent again, and accepts JSON lines.
        """
        try:
            yield _decode_response(*self._exchange(*_encode_inference(request, binary=True)))
            return
        except TransportError as error:
            if _DECOUPLED_ERROR not in error.message:
                raise
        call_arguments = _encode_inference(request, binary=False)
        with self._open_response(*call_arguments, accept=_JSON_LINES) as reply:
            for line in reply:
                yield _decode_response(line, None)

    def ready(self, model: str, version: str) -> None:
        """Send GET /v2/health/ready, or GET /v2/models/NAME/ready."""
        if model:
            self._exchange("GET", f"{model_path(model, version)}/ready", timeout_s=QUERY_TIMEOUT_S)
            return
        with self._open_response(
            *("GET", "/v2/health/ready"),
            accepted_statuses=(http.HTTPStatus.OK, http.HTTPStatus.BAD_REQUEST),
            timeout_s=QUERY_TIMEOUT_S,
        ) as reply:
            if reply.status != http.HTTPStatus.OK:
                raise TransportError(NOT_READY)

    def models(self) -> list[dict[str, Any]]:
        """Send POST /v2/repository/index."""
        return self._request_list("POST", "/v2/repository/index")

    def load(self, model: str, config: Mapping[str, Any] | None = None) -> None:
        """Send POST /v2/repository/models/NAME/load."""
        body = json.dumps({"parameters": {"config": json.dumps(config)}}).encode()
        path = f"/v2/repository/models/{quote(model, safe='')}/load"
        self._exchange("POST", path, body if config else None)

    def unload(self, model: str) -> None:
        """Send POST /v2/repository/models/NAME/unload."""
        self._exchange("POST", f"/v2/repository/models/{quote(model, safe='')}/unload")

    def stats(self, model: str, version: str) -> list[dict[str, Any]]:
        """Send GET /v2/models[/NAME]/stats."""
        path = model_path(model, version) if model else "/v2/models"
        body, _ = self._exchange("GET", f"{path}/stats", timeout_s=QUERY_TIMEOUT_S)
        rows = _parse_object(body).get("model_stats")
        if not isinstance(rows, list):
            raise TransportError("the server's response has no statistics")
        return rows

    def config(self, model: str, version: str) -> dict[str, Any]:
        """Send GET /v2/models/NAME/config."""
        return self._get_object(f"{model_path(model, version)}/config")

    def regions(self) -> list[dict[str, Any]]:
        """Send GET /v2/systemsharedmemory/status and /v2/cudasharedmemory/status."""
        return [
            row
            for kind in ("system", "cuda")
            for row in self._request_list("GET", f"/v2/{kind}sharedmemory/status")
        ]

    def register(self, kind: str, name: str, fields: Mapping[str, Any]) -> None:
        """Send POST /v2/systemsharedmemory/region/NAME/register, or the same for cuda."""
        handle = fields.get("raw_handle")
        if handle is not None:
            fields = {**fields, "raw_handle": {"b64": base64.b64encode(handle).decode()}}
        body = json.dumps(dict(fields)).encode()
        self._exchange("POST", f"{_region_path(kind, name)}/register", body)

    def unregister(self, kind: str, name: str) -> None:
        """Send POST /v2/systemsharedmemory/region/NAME/unregister, or the same for cuda."""
        self._exchange("POST", f"{_region_path(kind, name)}/unregister")

    def close(self) -> None:
        """Do nothing: every exchange opens and closes its own connection."""

    def _get_object(self, path: str) -> dict[str, Any]:
        return _parse_object(self._exchange("GET", path)[0])

    def _request_list(self, method: str, path: str) -> list[dict[str, Any]]:
        rows = _parse_json(self._exchange(method, path)[0])
        if not isinstance(rows, list):
            raise TransportError("the server's response is not a JSON list")
        return rows

    def _exchange(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        header_length: int | None = None,
        timeout_s: float | None = None,
    ) -> tuple[bytes, int | None]:
        """Return the body of a response and its `Inference-Header-Content-Length`."""
        with self._open_response(method, path, body, header_length, timeout_s=timeout_s) as reply:
            length = reply.getheader(HEADER_LENGTH)
            return reply.read(), int(length) if length and length.isdecimal() else None

    @contextlib.contextmanager
    def _open_response(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        header_length: int | None = None,
        accept: str = "",
        accepted_statuses: Container[int] = (http.HTTPStatus.OK,),
        timeout_s: float | None = None,
    ) -> Iterator[http.client.HTTPResponse]:
        """Yield an unread response whose status is one of `accepted_statuses`.

        Raises:
            TransportError: There is no response, or it has another status.
        """
        headers = dict(self._headers)
        if header_length is not None:
            headers[HEADER_LENGTH] = str(header_length)
        if accept:
            headers["Accept"] = accept
        try:
            with contextlib.closing(self._connect(timeout_s)) as connection:
                connection.request(method, path, body, headers)
                reply = connection.getresponse()
                if reply.status not in accepted_statuses:
                    default_message = f"{reply.status} {reply.reason}"
                    raise TransportError(_error_text(reply.read(), reply.status, default_message))
                yield reply
        except (OSError, http.client.HTTPException) as error:
            if type(error) is http.client.BadStatusLine:
                problem = "the response is not HTTP/1.1 (gRPC needs --url grpc://HOST:PORT)"
                raise TransportError(problem) from error
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise TransportError(f"no response: {reason}") from error


def _encode_inference(request: OutgoingRequest, binary: bool) -> tuple[str, str, bytes, int]:
    """Return the method, path, body and JSON header length of an inference request."""
    header = json.dumps(encode_inference_header(request, binary)).encode()
    body = b"".join([header, *(tensor.raw for tensor in request.inputs)])
    return "POST", f"{model_path(request.model, request.version)}/infer", body, len(header)


def _region_path(kind: str, name: str) -> str:
    return f"/v2/{kind}sharedmemory/region/{quote(name, safe='')}"


def model_path(model: str, version: str) -> str:
    """Return the path of a model, or of one version of it."""
    path = f"/v2/models/{quote(model, safe='')}"
    return f"{path}/versions/{quote(version, safe='')}" if version else path


def encode_inference_header(request: OutgoingRequest, binary: bool) -> dict[str, Any]:
    """Return the JSON header of a request, to which the bytes of inputs are appended.

    With `binary`, the outputs are requested as bytes instead of JSON.
    """
    parameters: dict[str, Any] = {}
    if request.timeout_us:
        parameters["deadline_us"] = request.timeout_us
    parameters |= request.request_parameters()
    inputs: list[Any] = []
    for tensor in request.inputs:
        input_header = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
        part, size_parameter = tensor.region_part, {"binary_data_size": len(tensor.raw)}
        inputs.append({**input_header, "parameters": part.parameters() if part else size_parameter})
    header: dict[str, Any] = {"inputs": inputs, "parameters": parameters}
    if request.id:
        header["id"] = request.id
    if request.outputs:
        default_parameters = {"binary_data": True} if binary else {}
        regions = {name: part.parameters() for name, part in request.output_parts.items()}
        header["outputs"] = [
            {"name": n, "parameters": regions.get(n, default_parameters)} for n in request.outputs
        ]
    elif binary:
        parameters["binary_data_output"] = True
    return header


def _decode_response(body: bytes, header_length: int | None) -> dict[str, Any]:
    """Return the response, with each output as nested lists of its shape."""
    header = _parse_object(body if header_length is None else body[:header_length])
    if "error" in header:
        raise TransportError(str(header["error"]))
    binary_data = memoryview(body)[len(body) if header_length is None else header_length :]
    try:
        for output in header["outputs"]:
            size = output.pop("parameters", {}).get("binary_data_size", 0)
            if "data" in output:
                output["data"] = np.array(output["data"], object).reshape(output["shape"]).tolist()
            else:
                output["data"] = decode(output["datatype"], output["shape"], binary_data[:size])
                binary_data = binary_data[size:]
        head = (header["model_name"], header["model_version"], header.get("id", ""))
        return response_json(*head, header.get("parameters"), header["outputs"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TransportError("the server's response is malformed") from error


def _parse_object(content: bytes) -> dict[str, Any]:
    value = _parse_json(content)
    if not isinstance(value, dict):
        raise TransportError("the server's response is not a JSON object")
    return value


def _parse_json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError as error:
        raise TransportError("the server's response is not JSON") from error


def describe_http_error(error: urllib.error.HTTPError) -> str:
    """Return the message of an error response, which is closed."""
    with error:
        return _error_text(error.read(1000), error.code, str(error))


def _error_text(content: bytes, status: int, default: str) -> str:
    """Return the message of an error response, with a hint if the client lacks a token.

    The message is `default` if the body has none.
    """
    try:
        error = json.loads(content)["error"]
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        text = ""
    return (text or default) + (TOKEN_HINT if status == http.HTTPStatus.UNAUTHORIZED else "")


class HttpLaneFactory:
    """A factory of lanes for inference over HTTP, with one response per request."""

    is_decoupled = False

    def __init__(self, address: Address, credentials: Credentials, loop: EventLoop) -> None:
        """Prepare the factory. Raises InvalidArgument for invalid TLS files."""
        tls = create_tls_context(address, credentials, "http/1.1")
        self.connect = partial(ClientConnection, address, tls, loop)
        self._host = address.target or "localhost"
        self._headers = credentials.headers

    def encode(self, request: OutgoingRequest) -> bytes:
        """Return a POST of .../infer with binary tensors in both directions."""
        _, path, body, header_length = _encode_inference(request, binary=True)
        return self.post(path, body, {HEADER_LENGTH: str(header_length)})

    def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        """Return the bytes of a POST request."""
        fields = [
            ("Host", self._host),
            *self._headers,
            *headers.items(),
            ("Content-Length", str(len(body))),
        ]
        header_lines = "".join(f"{name}: {value}\r\n" for name, value in fields)
        return f"POST {path} HTTP/1.1\r\n{header_lines}\r\n".encode() + body

    def lane(self, observer: LaneObserver) -> HttpLane:
        """Open a connection; the lane sends one request at a time on it."""
        return HttpLane(self, observer)

    def close(self) -> None:
        """Do nothing: each lane closes its own connection."""


class HttpLane:
    """A lane with its own connection, which it reopens if the server has closed it."""

    def __init__(self, lane_factory: HttpLaneFactory, observer: LaneObserver) -> None:
        self.observer = observer
        self._lane_factory = lane_factory
        self._connection: ClientConnection = lane_factory.connect(self)
        self._is_busy = False
        self._in_body = False
        self._remaining_body_bytes = 0  # bytes of the body that have not been received
        self._partial_data = b""  # received bytes of an incomplete head or chunk size line
        self._is_ok = True
        self._closes_after_response = False
        self._error = b""  # the server's error message

    def send(self, request: bytes) -> None:
        """Send a request."""
        if not self._connection.is_open:
            self._connection = self._lane_factory.connect(self)
        self._is_busy = True
        self._connection.write(request)

    def on_received(self, data: bytes) -> None:
        """Parse the next bytes of a response."""
        if not self._in_body:
            data = self._partial_data + data if self._partial_data else data
            head_end = data.find(b"\r\n\r\n")
            if head_end < 0:
                self._partial_data = data
                return
            self._start_response(data[: head_end + 2])
            data = data[head_end + 4 :]
        if self._remaining_body_bytes == _CHUNKED:
            self._receive_chunks(data)
            return
        self._remaining_body_bytes -= len(data)
        if not self._is_ok:
            self._error += data
        if self._remaining_body_bytes <= 0:
            self._finish_response()

    def _start_response(self, head: bytes) -> None:
        self._in_body, self._partial_data = True, b""
        self._is_ok = head[9:12] == b"200"
        self._error = b""
        is_http10 = head.startswith(b"HTTP/1.0")
        self._closes_after_response = is_http10 or _closes_connection(head) is not None
        length_match = _find_content_length(head)
        if length_match is not None:
            self._remaining_body_bytes = int(length_match[1])
        else:
            self._remaining_body_bytes = _CHUNKED if _is_chunked(head) else 0
        if not self._is_ok:
            self._error = head[9 : head.find(b"\r\n")] + b": "

    def _receive_chunks(self, data: bytes) -> None:
        data = self._partial_data + data if self._partial_data else data
        position = 0
        while True:
            line_end = data.find(b"\r\n", position)
            if line_end < 0:
                break
            size_text = data[position:line_end].partition(b";")[0].strip()
            if not _is_chunk_size(size_text):
                raise TransportError("the server's response is malformed")
            size = int(size_text, 16)
            chunk_end = line_end + 2 + size + 2
            if len(data) < chunk_end:
                break
            if not size:
                self._partial_data = b""
                self._finish_response()
                return
            self.handle_chunk(data[line_end + 2 : chunk_end - 2])
            position = chunk_end
        self._partial_data = data[position:]

    def handle_chunk(self, data: bytes) -> None:
        """Handle a chunk of the body."""
        if not self._is_ok:
            self._error += data

    def _finish_response(self) -> None:
        self._in_body = self._is_busy = False
        if self._closes_after_response:
            self._connection.close()
        if self._is_ok:
            self.handle_success()
        else:
            self.observer.on_end(_describe_error(self._error))

    def handle_success(self) -> None:
        """Handle the end of a successful response."""
        self.observer.on_end()

    def on_lost(self, reason: str) -> None:
        """Report the exchange in flight, if any, as failed."""
        was_busy = self._is_busy
        self._is_busy = False
        self._in_body = False
        self._partial_data = b""
        if was_busy:
            self.observer.on_end(reason)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def _describe_error(error: bytes) -> str:
    status, _, body = error.partition(b": ")
    is_refused = status.startswith(b"401")
    message = _error_text(body, 401 if is_refused else 0, body.decode(errors="replace"))
    return f"{status.decode()}: {' '.join(message.split())[:_MAX_ERROR_LENGTH]}"


class EventLane(HttpLane):
    """A lane for generation requests, whose responses arrive as server-sent events."""

    def __init__(self, lane_factory: GenerateLaneFactory, observer: LaneObserver) -> None:
        super().__init__(lane_factory, observer)
        self._is_response = lane_factory.is_response
        self._partial_event = b""
        self._error_event = b""
        self._token_count = -1

    def handle_chunk(self, data: bytes) -> None:
        """Parse the events in a chunk, which may be partial."""
        if not self._is_ok:
            super().handle_chunk(data)
            return
        *events, self._partial_event = (self._partial_event + data).split(b"\n\n")
        for event in events:
            content = event.strip().removeprefix(b"data:").lstrip()
            if content.startswith(b'{"error"'):
                self._error_event = content
            elif self._is_response(content):
                self.observer.on_response()
            token_count = _find_completion_tokens(content)
            if token_count is not None:
                self._token_count = int(token_count[1])

    def handle_success(self) -> None:
        """Report the end of the request, with the error or the number of tokens in its events."""
        error_event, token_count = self._error_event, self._token_count
        self._partial_event, self._error_event, self._token_count = b"", b"", -1
        self.observer.on_end(error_event.decode(errors="replace")[:_MAX_ERROR_LENGTH], token_count)


class GenerateLaneFactory(HttpLaneFactory):
    """A factory of lanes for `generate_stream`: inputs as JSON, any number of responses.

    Attributes:
        is_response: A function that returns whether a server-sent event counts as a response.
    """

    is_decoupled = True
    is_response: Callable[[bytes], Any] = bool

    def encode(self, request: OutgoingRequest) -> bytes:
        """Return the bytes of a POST request to .../generate_stream."""
        body: dict[str, Any] = {tensor.name: _tensor_value(tensor) for tensor in request.inputs}
        body |= request.request_parameters()
        return self.post_json(f"{model_path(request.model, request.version)}/generate_stream", body)

    def post_json(self, path: str, body: dict[str, Any]) -> bytes:
        """Return the bytes of a POST request with a JSON body."""
        return self.post(path, json.dumps(body).encode(), _JSON_HEADERS)

    def lane(self, observer: LaneObserver) -> EventLane:
        """Open a connection; the lane sends one request at a time on it."""
        return EventLane(self, observer)


class OpenAILaneFactory(GenerateLaneFactory):
    """A factory of lanes for text generation by the OpenAI routes.

    Each chunk with text counts as a response. The last chunk has the number of tokens.
    """

    is_response = _has_text


def _tensor_value(tensor: InputTensor) -> Any:
    if tensor.region_part is not None:
        text = "generate_stream does not support shared memory; use gRPC, or --run-dir"
        raise InvalidArgument(text)
    value = decode(tensor.datatype, tensor.shape, memoryview(tensor.raw))
    while isinstance(value, list) and len(value) == 1:
        value = value[0]
    return value
