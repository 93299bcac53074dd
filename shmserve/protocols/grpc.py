"""Clients of gRPC (the extra `grpc`): `GrpcTransport` and `GrpcLaneFactory`.

`GrpcTransport` blocks and uses grpcio. The lanes of `GrpcLaneFactory` never block, and serve the
load generator. They implement the part of HTTP/2 that a gRPC client needs. The trailers determine
whether a unary call succeeded. Messages of a stream are parsed only to find their ends. Several
lanes share a connection, and their output in one turn of the loop is one write.
"""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import grpc
from hpack import Decoder

from shmserve.errors import Unavailable
from shmserve.gateway.http2 import frames as h2
from shmserve.gateway.http2.header_blocks import encode_block
from shmserve.model_config import to_dict
from shmserve.proto import grpc_service_pb2
from shmserve.protocols import (
    NOT_READY,
    QUERY_TIMEOUT_S,
    TOKEN_HINT,
    Address,
    Credentials,
    LaneObserver,
    OutgoingRequest,
    Parameter,
    TransportError,
    output_json,
    response_json,
)
from shmserve.protocols.connection import ClientConnection, EventLoop, create_tls_context
from shmserve.protocols.tensors import ModelTensor

pb: Any = grpc_service_pb2

_SERVICE = "/inference.GRPCInferenceService/"
# A parameter that belongs to the stream, not to the model.
_FINAL_PARAMETER = "triton_final_response"
# The serialised parameter with the value true.
_FINAL_MARK = b"\x0a\x15triton_final_response\x12\x02\x08\x01"
_NOT_FINAL_MARK = _FINAL_MARK[:-1] + b"\0"
_ERROR_TAG = b"\x0a"  # the first byte of a stream message that is an error
_NO_SIZE_LIMITS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
_LANES_PER_CONNECTION = 6  # as many as Triton's clients that share a connection by default
_HEADER_TABLE_SIZE_SETTING = 1
_WINDOW_REFILL_BYTES = 1 << 30  # bytes read after which a window is restored to its initial size
_MESSAGE_PREFIX_SIZE = 5  # size of a gRPC message's prefix: the compression flag and the length


class GrpcTransport:
    """A blocking client of a gRPC server."""

    def __init__(self, address: Address, credentials: Credentials) -> None:
        self.address_text = address.address_text
        self._metadata = [(name.lower(), value) for name, value in credentials.headers]
        self._channel = (
            grpc.secure_channel(address.target, _channel_credentials(credentials), _NO_SIZE_LIMITS)
            if address.uses_tls
            else grpc.insecure_channel(address.target, _NO_SIZE_LIMITS)
        )

    def inputs(self, model: str, version: str) -> dict[str, ModelTensor]:
        """Call ModelMetadata and return the inputs by name."""
        metadata = self._call("ModelMetadata", name=model, version=version)
        return {t.name: ModelTensor(t.name, t.datatype, tuple(t.shape)) for t in metadata.inputs}

    def infer(self, request: OutgoingRequest) -> Iterator[dict[str, Any]]:
        """Call ModelStreamInfer, which every model supports, and yield each response."""
        codecs = (pb.ModelInferRequest.SerializeToString, pb.ModelStreamInferResponse.FromString)
        call = self._channel.stream_stream(_SERVICE + "ModelStreamInfer", *codecs)
        with _transport_errors():
            for response in call(iter([encode_infer_message(request)]), metadata=self._metadata):
                if response.error_message:
                    raise TransportError(response.error_message)
                yield _decode_response(response.infer_response)

    def ready(self, model: str, version: str) -> None:
        """Call ServerReady or ModelReady."""
        if not model and not self._call("ServerReady", QUERY_TIMEOUT_S).ready:
            raise TransportError(NOT_READY)
        fields = {"name": model, "version": version}
        if model and not self._call("ModelReady", QUERY_TIMEOUT_S, **fields).ready:
            version_text = f" version {version}" if version else ""
            raise TransportError(f"model '{model}'{version_text} is not ready")

    def models(self) -> list[dict[str, Any]]:
        """Call RepositoryIndex."""
        rows = [to_dict(row) for row in self._call("RepositoryIndex").models]
        return [{name: value for name, value in row.items() if value} for row in rows]

    def load(self, model: str, config: Mapping[str, Any] | None = None) -> None:
        """Call RepositoryModelLoad."""
        parameter = pb.ModelRepositoryParameter(string_param=json.dumps(config))
        parameters = {"config": parameter} if config else {}
        self._call("RepositoryModelLoad", model_name=model, parameters=parameters)

    def unload(self, model: str) -> None:
        """Call RepositoryModelUnload."""
        self._call("RepositoryModelUnload", model_name=model)

    def stats(self, model: str, version: str) -> list[dict[str, Any]]:
        """Call ModelStatistics."""
        reply = self._call("ModelStatistics", QUERY_TIMEOUT_S, name=model, version=version)
        return [to_dict(row) for row in reply.model_stats]

    def config(self, model: str, version: str) -> dict[str, Any]:
        """Call ModelConfig."""
        return to_dict(self._call("ModelConfig", name=model, version=version).config)

    def regions(self) -> list[dict[str, Any]]:
        """Call SystemSharedMemoryStatus and CudaSharedMemoryStatus."""
        return [
            to_dict(reply.regions[name])
            for kind in ("System", "Cuda")
            for reply in [self._call(f"{kind}SharedMemoryStatus")]
            for name in sorted(reply.regions)
        ]

    def register(self, kind: str, name: str, fields: Mapping[str, Any]) -> None:
        """Call SystemSharedMemoryRegister or CudaSharedMemoryRegister."""
        self._call(f"{kind.title()}SharedMemoryRegister", name=name, **fields)

    def unregister(self, kind: str, name: str) -> None:
        """Call SystemSharedMemoryUnregister or CudaSharedMemoryUnregister."""
        self._call(f"{kind.title()}SharedMemoryUnregister", name=name)

    def _call(self, method: str, timeout_s: float | None = None, **fields: Any) -> Any:
        request = getattr(pb, f"{method}Request")(**fields)
        decode = getattr(pb, f"{method}Response").FromString
        call = self._channel.unary_unary(_SERVICE + method, type(request).SerializeToString, decode)
        with _transport_errors():
            return call(request, timeout=timeout_s, metadata=self._metadata)

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()


@contextlib.contextmanager
def _transport_errors() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        details = error.details() or str(error.code())
        if error.code() is grpc.StatusCode.UNAVAILABLE and "connect" in details:
            details = f"no response: {details}"
        elif error.code() is grpc.StatusCode.UNAUTHENTICATED:
            details += TOKEN_HINT
        raise TransportError(details) from error


def _channel_credentials(credentials: Credentials) -> grpc.ChannelCredentials:
    credentials.create_tls_context()  # gRPC's own error does not name the invalid file
    files = (credentials.root_cert, credentials.client_key, credentials.client_cert)
    pem_contents = (Path(file).read_bytes() if file else None for file in files)
    return grpc.ssl_channel_credentials(*pem_contents)


def encode_infer_message(request: OutgoingRequest) -> Any:
    """Return the ModelInferRequest message of a request."""
    message = pb.ModelInferRequest(
        model_name=request.model, model_version=request.version, id=request.id
    )
    if request.timeout_us:
        message.parameters["deadline_us"].int64_param = request.timeout_us
    set_parameters(message, request.request_parameters())
    for tensor in request.inputs:
        input_message = message.inputs.add(
            name=tensor.name, datatype=tensor.datatype, shape=tensor.shape
        )
        if tensor.region_part:
            set_parameters(input_message, tensor.region_part.parameters())
        else:
            message.raw_input_contents.append(tensor.raw)
    for name in request.outputs:
        output_message = message.outputs.add(name=name)
        if name in request.output_parts:
            set_parameters(output_message, request.output_parts[name].parameters())
    return message


def set_parameters(message: Any, values: Mapping[str, Parameter]) -> None:
    """Set parameters of a request, an input or an output."""
    for name, value in values.items():
        if isinstance(value, bool):
            message.parameters[name].bool_param = value
        elif isinstance(value, int):
            # `sequence_id` is unsigned, but must be an int64_param: its two's complement is sent.
            message.parameters[name].int64_param = (value + 2**63) % 2**64 - 2**63
        elif isinstance(value, float):
            message.parameters[name].double_param = value
        else:
            message.parameters[name].string_param = value


def _decode_response(reply: Any) -> dict[str, Any]:
    try:
        pairs = zip(reply.outputs, reply.raw_output_contents, strict=True)
        outputs = [output_json(t.name, t.datatype, t.shape, data) for t, data in pairs]
    except (KeyError, ValueError) as error:
        raise TransportError("the server's response is malformed") from error
    values = ((n, value) for n, value in reply.parameters.items() if n != _FINAL_PARAMETER)
    parameters = {n: getattr(value, value.WhichOneof("parameter_choice")) for n, value in values}
    return response_json(reply.model_name, reply.model_version, reply.id, parameters, outputs)


class GrpcLaneFactory:
    """A factory of lanes that call ModelInfer or ModelStreamInfer.

    With ModelStreamInfer, each lane has one stream, with one request at a time.
    """

    def __init__(
        self, address: Address, credentials: Credentials, loop: EventLoop, *, is_decoupled: bool
    ) -> None:
        """Prepare the factory, whose lanes open the connections.

        Raises InvalidArgument for invalid TLS files.
        """
        self.is_decoupled = is_decoupled
        self.loop = loop
        tls = create_tls_context(address, credentials, "h2")
        self._connect = partial(ClientConnection, address, tls, loop)
        fields = {
            ":method": "POST",
            ":scheme": "https" if address.uses_tls else "http",
            ":path": _SERVICE + ("ModelStreamInfer" if is_decoupled else "ModelInfer"),
            ":authority": address.target,
            "content-type": "application/grpc",
            "te": "trailers",
            **{name.lower(): value for name, value in credentials.headers},
        }
        self.head = encode_block((name.encode(), value.encode()) for name, value in fields.items())
        self._connections: list[Http2Client] = []
        self._lane_count = 0

    def encode(self, request: OutgoingRequest) -> bytes:
        """Return the gRPC message of a request, with its length prefix."""
        message = encode_infer_message(request)
        if self.is_decoupled:
            set_parameters(message, {"triton_enable_empty_final_response": True})
        encoded_message: bytes = message.SerializeToString()
        return b"\0" + h2.pack_uint32(len(encoded_message)) + encoded_message

    def lane(self, observer: LaneObserver) -> GrpcLane:
        """Open a lane on a connection that several lanes share."""
        index, self._lane_count = self._lane_count // _LANES_PER_CONNECTION, self._lane_count + 1
        if index == len(self._connections):
            self._connections.append(Http2Client(self._connect, self.loop))
        return GrpcLane(self, index, observer)

    def connection(self, index: int) -> Http2Client:
        """Return the connection with an index, reopened if it was lost."""
        if not self._connections[index].is_open:
            self._connections[index] = Http2Client(self._connect, self.loop)
        return self._connections[index]

    def close(self) -> None:
        """Close the connections of all lanes."""
        for connection in self._connections:
            connection.close()


class GrpcLane:
    """A lane, which makes one unary call after another, or sends all requests on one stream."""

    def __init__(self, lane_factory: GrpcLaneFactory, index: int, observer: LaneObserver) -> None:
        self.observer = observer
        self._lane_factory = lane_factory
        self._connection_index = index
        self._connection = lane_factory.connection(index)
        self._stream_id = 0
        self._is_busy = False
        self._received_data = bytearray()
        self._stream_error = ""  # the first error in the responses to the current request

    def send(self, message: bytes) -> None:
        """Send a request."""
        self._is_busy, self._stream_error = True, ""
        if not self._stream_id:
            self._connection = self._lane_factory.connection(self._connection_index)
            self._stream_id = self._connection.start(self, self._lane_factory.head)
        self._connection.send(self._stream_id, message, is_last=not self._lane_factory.is_decoupled)

    def receive_data(self, payload: bytes) -> None:
        """Parse the messages in a DATA frame, which may be partial."""
        if not self._lane_factory.is_decoupled:
            return
        messages = self._received_data
        messages += payload
        position, received_size = 0, len(messages)
        while received_size - position >= _MESSAGE_PREFIX_SIZE:
            content_start = position + _MESSAGE_PREFIX_SIZE
            size = int.from_bytes(messages[position + 1 : content_start], "big")
            next_position = content_start + size
            if next_position > received_size:
                break
            self._handle_response(bytes(messages[content_start:next_position]))
            position = next_position
        del messages[:position]

    def _handle_response(self, message: bytes) -> None:
        if not self._is_busy:
            return
        if message[:1] == _ERROR_TAG:
            error = pb.ModelStreamInferResponse.FromString(message).error_message
            self._stream_error = self._stream_error or error
            if _NOT_FINAL_MARK not in message:
                self._is_busy = False
                self.observer.on_end(self._stream_error)
        elif _FINAL_MARK not in message:
            self.observer.on_response()
        else:
            # A final response without outputs only marks the end.
            if pb.ModelStreamInferResponse.FromString(message).infer_response.outputs:
                self.observer.on_response()
            self._is_busy = False
            self.observer.on_end(self._stream_error)

    def handle_end(self, error: str) -> None:
        """Handle the end of the call or of the stream."""
        self._stream_id = 0
        self._received_data.clear()
        was_busy, self._is_busy = self._is_busy, False
        if was_busy:
            end_text = "the server ended the stream" if self._lane_factory.is_decoupled else ""
            self.observer.on_end(error or end_text)

    def close(self) -> None:
        """Discard later responses. The factory closes the connection."""
        self._is_busy = False


@dataclass(slots=True, eq=False)
class _LaneStream:
    """The HTTP/2 stream of a lane: send window, and bytes received since the window update."""

    lane: GrpcLane
    window: int  # bytes that may be sent
    unacknowledged_bytes: int = 0


class Http2Client:
    """The client's end of an HTTP/2 connection, with the streams of several lanes."""

    def __init__(self, connect: partial[ClientConnection], loop: EventLoop) -> None:
        self._loop = loop
        self._connection: ClientConnection = connect(self)
        self._streams: dict[int, _LaneStream] = {}
        self._next_stream_id = 1
        self._output: list[bytes] = []
        # Data that waits for window updates: (stream id, bytes, whether they end the stream).
        self._waiting_messages: deque[tuple[int, memoryview, bool]] = deque()
        self._window = self._initial_window = h2.DEFAULT_WINDOW
        self._unacknowledged_bytes = 0
        self._max_frame_size = h2.DEFAULT_MAX_FRAME_SIZE
        self._partial_frame = b""
        self._header_block = b""
        # This client announces a header table of size 0, so equal blocks mean the same headers.
        self._decoder = Decoder()
        self._decoder.header_table_size = 0
        self._errors_by_block: dict[bytes, str] = {}
        values = {_HEADER_TABLE_SIZE_SETTING: 0, h2.ENABLE_PUSH: 0}
        settings = h2.encode_settings({**values, h2.INITIAL_WINDOW_SIZE: h2.LARGEST_WINDOW})
        window_update = _encode_window_update(0, h2.LARGEST_WINDOW - h2.DEFAULT_WINDOW)
        self._queue_output(h2.PREFACE + settings + window_update)

    @property
    def is_open(self) -> bool:
        """Check whether the connection is open."""
        return self._connection.is_open

    def start(self, lane: GrpcLane, head: bytes) -> int:
        """Begin a call and return its stream id.

        Args:
            lane: The lane that receives the data of the stream.
            head: The header block of the call.
        """
        stream_id = self._next_stream_id
        self._next_stream_id += 2
        self._streams[stream_id] = _LaneStream(lane, self._initial_window)
        frame_header = h2.encode_frame_header(len(head), h2.HEADERS, h2.END_HEADERS, stream_id)
        self._queue_output(frame_header + head)
        return stream_id

    def send(self, stream_id: int, message: bytes, *, is_last: bool) -> None:
        """Send a message on a stream; with `is_last`, also end this client's side of the stream."""
        size = len(message)
        stream = self._streams[stream_id]
        sendable_bytes = min(self._window, stream.window, self._max_frame_size)
        if size <= sendable_bytes and not self._waiting_messages:
            self._window -= size
            stream.window -= size
            flags = h2.END_STREAM if is_last else 0
            self._queue_output(h2.encode_frame_header(size, h2.DATA, flags, stream_id) + message)
        else:
            self._waiting_messages.append((stream_id, memoryview(message), is_last))
            self._send_waiting()

    def _send_waiting(self) -> None:
        for _ in range(len(self._waiting_messages)):
            stream_id, message, is_last = self._waiting_messages.popleft()
            stream = self._streams.get(stream_id)
            if stream is None:
                continue  # the stream has ended in the meantime
            while (
                message
                and (sendable_bytes := min(self._window, stream.window, self._max_frame_size)) > 0
            ):
                sendable_part, message = message[:sendable_bytes], message[sendable_bytes:]
                self._window -= len(sendable_part)
                stream.window -= len(sendable_part)
                flags = h2.END_STREAM if is_last and not message else 0
                frame_header = h2.encode_frame_header(len(sendable_part), h2.DATA, flags, stream_id)
                self._queue_output(frame_header + bytes(sendable_part))
            if message:
                self._waiting_messages.append((stream_id, message, is_last))

    def _queue_output(self, data: bytes) -> None:
        if not self._output:
            self._loop.call_soon(self._flush)
        self._output.append(data)

    def _flush(self) -> None:
        output, self._output = self._output, []
        self._connection.write(b"".join(output))

    def on_received(self, data: bytes) -> None:
        """Parse the frames in received bytes, which may be partial."""
        data = self._partial_frame + data if self._partial_frame else data
        position, data_size = 0, len(data)
        while data_size - position >= h2.FRAME_HEADER_SIZE:
            high, low, frame_type, flags, stream_id = h2.FRAME_HEADER.unpack_from(data, position)
            next_position = position + h2.FRAME_HEADER_SIZE + (high << 8 | low)
            if next_position > data_size:
                break
            payload = data[position + h2.FRAME_HEADER_SIZE : next_position]
            self._handle_frame(frame_type, flags, stream_id, payload)
            position = next_position
        self._partial_frame = data[position:]

    def _handle_frame(self, frame_type: int, flags: int, stream_id: int, payload: bytes) -> None:
        if flags & h2.PADDED and frame_type in (h2.DATA, h2.HEADERS):
            raise Unavailable("the server sent padded HTTP/2 frames, which are not supported")
        match frame_type:
            case h2.DATA:
                self._handle_data(stream_id, payload)
            case h2.HEADERS | h2.CONTINUATION:
                self._header_block += payload
                if flags & h2.END_HEADERS:
                    self._handle_headers(stream_id, flags)
            case h2.SETTINGS | h2.PING if not flags & h2.ACK:
                if frame_type == h2.SETTINGS:
                    self._handle_settings(payload)
                content = payload if frame_type == h2.PING else b""
                self._queue_output(h2.encode_frame(frame_type, h2.ACK, 0, content))
            case h2.WINDOW_UPDATE:
                self._enlarge_window(stream_id, h2.parse_uint32(payload, "WINDOW_UPDATE"))
            case h2.RST_STREAM:
                self._finish_stream(
                    stream_id, f"the server reset the call ({int.from_bytes(payload)})"
                )
            case h2.GOAWAY:
                self._connection.close()
                reason = payload[8:].decode(errors="replace")
                self.on_lost(f"the server ended a connection: {reason}")

    def _handle_data(self, stream_id: int, payload: bytes) -> None:
        size = len(payload)
        self._unacknowledged_bytes += size
        if self._unacknowledged_bytes > _WINDOW_REFILL_BYTES:
            self._queue_output(_encode_window_update(0, self._unacknowledged_bytes))
            self._unacknowledged_bytes = 0
        stream = self._streams.get(stream_id)
        if stream is not None:
            stream.unacknowledged_bytes += size
            if stream.unacknowledged_bytes > _WINDOW_REFILL_BYTES:
                self._queue_output(_encode_window_update(stream_id, stream.unacknowledged_bytes))
                stream.unacknowledged_bytes = 0
            stream.lane.receive_data(payload)

    def _handle_headers(self, stream_id: int, flags: int) -> None:
        block, self._header_block = self._header_block, b""
        error = self._errors_by_block.get(block)
        if error is None:
            error = self._errors_by_block[block] = _response_error(self._decoder.decode(block))
        if flags & h2.END_STREAM:
            self._finish_stream(stream_id, error)

    def _handle_settings(self, payload: bytes) -> None:
        for key, value in h2.parse_settings(payload):
            if key == h2.INITIAL_WINDOW_SIZE:
                for stream in self._streams.values():
                    stream.window += value - self._initial_window
                self._initial_window = value
            elif key == h2.MAX_FRAME_SIZE:
                self._max_frame_size = value
        self._send_waiting()

    def _enlarge_window(self, stream_id: int, size: int) -> None:
        if not stream_id:
            self._window += size
        elif stream_id in self._streams:
            self._streams[stream_id].window += size
        if self._waiting_messages:
            self._send_waiting()

    def _finish_stream(self, stream_id: int, error: str) -> None:
        stream = self._streams.pop(stream_id, None)
        if stream is not None:
            stream.lane.handle_end(error)

    def on_lost(self, reason: str) -> None:
        """Fail all calls, because the connection has ended."""
        for stream_id in list(self._streams):
            self._finish_stream(stream_id, reason)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def _encode_window_update(stream_id: int, size: int) -> bytes:
    return h2.encode_frame(h2.WINDOW_UPDATE, 0, stream_id, h2.pack_uint32(size))


def _response_error(decoded_fields: Iterable[Any]) -> str:
    """Return the error in the headers or trailers of a response, or ""."""
    fields: dict[str, str] = dict(decoded_fields)
    if fields.get("grpc-status", "0") != "0":
        message = unquote(fields.get("grpc-message", ""))
        return f"{message} (gRPC status {fields['grpc-status']})"
    if fields.get(":status", "200") != "200":
        return f"HTTP status {fields[':status']}"
    return ""
