"""Inference requests over gRPC: from a message to a scheduler and back, for calls and streams."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

from google.protobuf.message import DecodeError

from shmserve.errors import InvalidArgument, ShmserveError, Unavailable, Unsupported
from shmserve.gateway.context import Gateway, awaits_load, loaded
from shmserve.gateway.grpc.calls.call import GrpcCall
from shmserve.gateway.grpc.calls.headers import CallHead
from shmserve.gateway.grpc.calls.messages import Sink, release
from shmserve.gateway.grpc.placed_request import PlacedRequest, RequestSink
from shmserve.gateway.grpc.wire.fingerprint import Split, split
from shmserve.gateway.grpc.wire.prepared_requests import PreparedRequests
from shmserve.gateway.grpc.wire.request import infer_request
from shmserve.gateway.grpc.wire.response import ResponseEncoder
from shmserve.gateway.inference.builder import BuiltRequest, build
from shmserve.gateway.inference.request import InferRequest, forwarded_headers
from shmserve.gateway.inference.response import classified_as_requested, output_bytes, unpack
from shmserve.gateway.inference.submit import (
    Message,
    StreamingRequest,
    failure,
    log_failure,
    prepare_submit,
    submit_streaming,
)
from shmserve.gateway.links import GatewayRequest
from shmserve.gateway.model_table import GatewayModel, checked_version
from shmserve.gateway.process import ActiveCount
from shmserve.ipc.messages import inference as m
from shmserve.ipc.messages.inference import Response
from shmserve.ipc.tensors.inference import Inferred
from shmserve.proto.grpc_service_pb2 import ModelInferRequest

_NO_HEADERS: Mapping[str, str] = MappingProxyType({})
_UNLOADED = "the model was unloaded while the request arrived"
_DECOUPLED = "ModelInfer RPC doesn't support models with decoupled transaction policy"


@dataclass(slots=True, eq=False)
class Submitted(GatewayRequest):
    """A request in flight for one response; every one must be left, when that is sent, or
    cancelled."""

    inferences: Inferences
    model: GatewayModel
    built: BuiltRequest
    on_response: Callable[[], None] | None = field(init=False, default=None)
    _response: Response | None = field(init=False, default=None)
    _left: bool = field(init=False, default=False)

    def when_done(self, action: Callable[[], None]) -> None:
        """Call this as soon as there is a response, to take with `response`; never if it is
        cancelled."""
        self.on_response = action

    def responded(self, message: Response) -> None:
        if not self.over:
            self.discard(message)  # its model gives one response
            return
        self._response = message
        if self.on_response is not None:
            self.on_response()

    def response(self) -> bytes:
        """The ModelInferResponse that is there, serialized; raises what the request failed with."""
        message, trace = self._response, self.built.trace
        assert message is not None
        self._response = None
        try:
            if trace is not None:
                trace.answered(message)
            if isinstance(message, m.Failed):
                raise failure(message)
            response = self._encoded(message)
        except ShmserveError as error:
            log_failure(self.model, self.submit.request_id, error, trace)
            if trace is not None:
                trace.finish(error.message)
            raise
        if trace is not None:
            trace.finish()
        return response

    def _encoded(self, message: m.Finished | m.Responded) -> bytes:
        built, schema = self.built, message.schema
        if built.responses is not None and (known := built.responses.find(schema)) is not None:
            filled: bytes | None = known.fill(self.submit.request_id, message.data)
            if filled is not None:
                return filled
        inferred = unpack(schema, message.data)
        if built.trace is not None:
            explained = built.trace.explain(inferred)
            if explained is not inferred:  # no other response is like it
                inferred, schema = explained, b""
        try:
            encoded = self.inferences.encode(self.model, built.infer_request, schema, inferred)
        finally:
            # The message is a copy: the worker's memory is free again.
            self.release_outputs(inferred)
        if schema and built.responses is not None and _is_plain(built.infer_request, inferred):
            placed = _placed(built.infer_request)
            template = self.inferences.encoder.template(self.model, schema, inferred, placed)
            built.responses.remember(schema, template)
        return encoded

    @property
    def done(self) -> bool:
        """Whether there is a response to take with `response`."""
        return self._response is not None

    def cancel(self) -> None:
        """Cancel it: the response is waited for no longer."""
        response, self._response = self._response, None
        if response is not None:
            self.discard(response)
        if self.built.trace is not None:
            self.built.trace.gone()
        self.leave()
        self.give_up()

    def leave(self) -> None:
        """Nothing is left to be done for it: its response is sent."""
        if not self._left:
            self._left = True
            self.inferences.left()


def _is_plain(request: InferRequest, inferred: Inferred) -> bool:
    """Return whether a response is sent as it is, and all of it is in the message or in regions."""
    if not inferred.outputs or any(output.classes for output in request.outputs):
        return False
    placed = _placed(request)
    return all(type(each.data) is bytes or each.name in placed for each in inferred.outputs)


def _placed(request: InferRequest) -> set[str]:
    """Return the names of the outputs that go to regions."""
    return {output.name for output in request.outputs if output.place is not None}


class RequestRefused(Exception):
    """A request was refused; `request_id` is its own, as far as it was understood."""

    def __init__(self, error: ShmserveError, request_id: str) -> None:
        super().__init__(error.message)
        self.error = error
        self.request_id = request_id

    def bare(self) -> RequestRefused:
        """Without the frames that it came through: those hold the request, which can be large."""
        for error in (self, self.error):
            error.__traceback__ = error.__context__ = None
        return self


class Inferences(ActiveCount):
    """Submits inferences, of unary calls and of streams, and encodes their responses.

    `active` is how many responses are not sent yet.
    """

    def __init__(self, gateway: Gateway) -> None:
        super().__init__()
        self.gateway = gateway
        self.encoder = ResponseEncoder()
        self._prepared = PreparedRequests(gateway.models)

    def headers(self, head: CallHead) -> Mapping[str, str]:
        """The metadata of a call that become parameters of its requests, in Triton's order. Raises
        InvalidArgument."""
        pattern = self.gateway.settings.grpc_header_forward_pattern
        if not pattern:
            return _NO_HEADERS
        given = sorted((key, value) for key, value in head.metadata if type(value) is str)
        return forwarded_headers(pattern, given)

    def sink(self, head: CallHead, size: int) -> Sink:
        """Where a large request of a call with this head goes while it arrives."""
        return RequestSink(self.gateway, size, partial(self.headers, head))

    def submit(
        self, raw: bytes | PlacedRequest, call: GrpcCall, headers: Mapping[str, str]
    ) -> Submitted:
        """Hand the serialized ModelInferRequest `raw` of a client's `call` to its scheduler.

        `headers` are parameters, too. Raises `RequestRefused`.
        """
        model, built, submit = self._admitted(raw, call, headers, streamed=False)
        return self._submitted(model, built, submit)

    def stream(
        self,
        raw: bytes | PlacedRequest,
        call: GrpcCall,
        headers: Mapping[str, str],
        on_response: Callable[[StreamingRequest, Message], None],
    ) -> Submitted | StreamingRequest:
        """As `submit`, for a request in a stream: one for a decoupled model is a
        `StreamingRequest`, which tells `on_response` of its responses."""
        model, built, submit = self._admitted(raw, call, headers, streamed=True)
        if not model.decoupled:
            return self._submitted(model, built, submit)
        return submit_streaming(self.gateway.schedulers, model, built, submit, on_response)

    def encode(
        self, model: GatewayModel, request: InferRequest, schema: bytes, inferred: Inferred
    ) -> bytes:
        """Return a worker's response, whose schema this is, as a serialized ModelInferResponse.

        Raises InvalidArgument or Internal.
        """
        shown = classified_as_requested(self.gateway, model, request, inferred)
        placed = _placed(request)
        contents: list[bytes | memoryview] = []
        for tensor in shown.outputs:
            if tensor.name in placed:
                contents.append(b"")
                continue
            contents.append(output_bytes(self.gateway, tensor))
        kept = schema if shown is inferred else b""
        return self.encoder.encode(model, request.id, kept, shown, contents)

    def awaits_load(self, raw: bytes | PlacedRequest) -> bool:
        """Whether a request that was refused is for a model that is to be loaded for it, with
        `load`."""
        if not isinstance(raw, bytes):
            return awaits_load(self.gateway, raw.model.name, raw.model.version)
        try:
            message = _parsed(raw)
            version = checked_version(message.model_version)
        except ShmserveError:
            return False
        return awaits_load(self.gateway, message.model_name, version)

    async def load(self, raw: bytes | PlacedRequest, remaining_s: float | None) -> None:
        """Wait until the model of a request is loaded, at most for `remaining_s` seconds, and as
        long as the request may take. Raises `RequestRefused`."""
        if isinstance(raw, bytes):
            message = _parsed(raw)
            asked, name, version = infer_request(message), message.model_name, message.model_version
        else:
            asked, name, version = raw.built.infer_request, raw.model.name, raw.model.version
        limit_us = _limit_us(remaining_s)
        self.active += 1
        try:
            await loaded(self.gateway, name, version, asked.timeout_us, limit_us)
        except BaseException as error:
            release(raw)
            if isinstance(error, ShmserveError):
                raise RequestRefused(error, asked.id) from None
            raise
        finally:
            self.left()

    def _submitted(self, model: GatewayModel, built: BuiltRequest, submit: m.Submit) -> Submitted:
        schedulers = self.gateway.schedulers
        submitted = Submitted(submit, schedulers, built.release, self, model, built)
        schedulers.submit(submitted, model.endpoint)
        self.active += 1
        return submitted

    def _admitted(
        self,
        raw: bytes | PlacedRequest,
        call: GrpcCall,
        headers: Mapping[str, str],
        *,
        streamed: bool,
    ) -> tuple[GatewayModel, BuiltRequest, m.Submit]:
        arrived_ns = time.monotonic_ns()
        gateway, head = self.gateway, call.head
        model, built = self._read(raw, headers, streamed)
        limit_us = 0 if head.timeout_s is None else _limit_us(call.time_remaining())
        how = (call.client, arrived_ns, limit_us, head.traceparent)
        try:
            model, submit = prepare_submit(gateway, model, built, *how)
        except ShmserveError as error:
            raise RequestRefused(error, built.infer_request.id) from None
        return model, built, submit

    def _read(
        self, raw: bytes | PlacedRequest, headers: Mapping[str, str], streamed: bool
    ) -> tuple[GatewayModel, BuiltRequest]:
        if not isinstance(raw, bytes):
            if not raw.model.published and self.awaits_load(raw):
                raise RequestRefused(Unavailable(_UNLOADED), raw.built.infer_request.id)
            if raw.model.decoupled and not streamed:
                raw.release()
                raise RequestRefused(Unsupported(_DECOUPLED), raw.built.infer_request.id)
            return raw.model, raw.built
        parts: Split | None = None
        if not headers:  # with parameters of its own a request is not like others with its message
            try:
                found = self._prepared.find(raw)
                if found is None and (parts := split(raw)) is not None:
                    found = self._prepared.repeat(raw, parts)
            except ShmserveError as error:
                raise RequestRefused(error, _id_of(raw)) from None
            if found is not None:
                model, built = found
                if model.decoupled and not streamed:
                    built.release()
                    raise RequestRefused(Unsupported(_DECOUPLED), built.infer_request.id)
                return found
        request_id = ""
        try:
            message = _parsed(raw)
            request_id = message.id
            version = checked_version(message.model_version)
            model = self.gateway.models.resolve(message.model_name, version)
            if model.decoupled and not streamed:
                raise Unsupported(_DECOUPLED)
            request = infer_request(message)
            request.parameters |= headers
            if parts is None:
                return model, build(self.gateway, model, request, b"", 0)[0]
            if parts.contents:
                _concatenate(request)
            prepare = all(tensor.data is None for tensor in request.inputs)
            body = b"".join(parts.contents)
            built, prepared = build(self.gateway, model, request, body, 0, prepare=prepare)
        except ShmserveError as error:
            raise RequestRefused(error, request_id) from None
        if prepared is not None:
            self._prepared.remember(parts, request, model, prepared)
        return model, built


def _limit_us(remaining_s: float | None) -> int:
    """How long a call lasts, in microseconds; 0: any time."""
    return 0 if remaining_s is None else max(1, int(remaining_s * 1e6))


def _concatenate(request: InferRequest) -> None:
    """Have the raw contents one behind the other, as binary tensors are in an HTTP body."""
    for tensor in request.inputs:
        if tensor.place is None:
            tensor.binary_size, tensor.data = len(tensor.data), None


def _id_of(raw: bytes) -> str:
    try:
        return _parsed(raw).id
    except InvalidArgument:
        return ""


def _parsed(raw: bytes) -> ModelInferRequest:
    try:
        return ModelInferRequest.FromString(raw)
    except DecodeError:
        raise InvalidArgument("malformed ModelInferRequest") from None
