"""The inference requests of unary gRPC calls and of streams, from decoding to the response.

message ──> `submit_request`: fills a template, or parses the message, or takes it from the arena
        ──> UnaryInference ──> `encode_response`: fills a template, or serializes the response
        └──> StreamingInference, for decoupled models in streams (stream_infer.py)
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from google.protobuf.message import DecodeError

from shmserve.errors import InvalidArgument, ShmserveError, Unavailable, Unsupported
from shmserve.gateway.context import UNLIMITED, Gateway, checked_version, needs_load, resolve_model
from shmserve.gateway.grpc.call import GrpcCall, UnaryCall
from shmserve.gateway.grpc.framing import (
    DEADLINE_EXPIRED,
    INTERNAL_FAILURE,
    CallHead,
    MessageContent,
    Status,
    release_message,
    status_from_error,
)
from shmserve.gateway.grpc.wire.fingerprint import SplitMessage, TemplateCache, split_message
from shmserve.gateway.grpc.wire.request import RequestSink, decode_request
from shmserve.gateway.grpc.wire.response import GrpcResponseTemplate
from shmserve.gateway.inference.classification import classify_outputs
from shmserve.gateway.inference.in_flight import (
    StreamedResponse,
    StreamingInference,
    UnaryInference,
    output_bytes,
    record_failure,
    submit_inference,
)
from shmserve.gateway.inference.infer_request import InferInput, select_forwarded_headers
from shmserve.gateway.inference.prepare import (
    ArrivingRequest,
    BuiltRequest,
    build_request,
    build_with_template,
    reserve_tensors,
)
from shmserve.gateway.listener import ActiveCount
from shmserve.ipc.messages import inference as m
from shmserve.ipc.tensors.datatypes import ITEM_SIZE
from shmserve.ipc.tensors.schemas import BoundedCache, Inferred
from shmserve.ipc.trace import TraceContext
from shmserve.proto.grpc_service_pb2 import ModelInferRequest

logger = logging.getLogger(__name__)

_NO_HEADERS: Mapping[str, str] = MappingProxyType({})
_MODEL_UNLOADED = "the model was unloaded while the request arrived"
_DECOUPLED_UNSUPPORTED = "ModelInfer RPC doesn't support models with decoupled transaction policy"

StreamedCallback = Callable[[StreamingInference, StreamedResponse], None]


class RequestRefused(Exception):
    """The error for a refused request; `request_id` is "" if the message could not be parsed."""

    def __init__(self, error: ShmserveError, request_id: str) -> None:
        super().__init__(error.message)
        self.error = error
        self.request_id = request_id

    def without_traceback(self) -> RequestRefused:
        """Remove the frames of the traceback, which refer to the request, and return the error."""
        for error in (self, self.error):
            error.__traceback__ = error.__context__ = None
        return self


class Inferences(ActiveCount):
    """The inferences of a gateway; `active_count` counts those whose last response is not sent."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__()
        self.gateway = gateway
        self._template_cache = TemplateCache(gateway.models)

    # --- ModelInfer

    def infer(self, received_message: MessageContent, call: UnaryCall) -> None:
        """Handle a ModelInfer without a task; its message may be in the arena already."""
        try:
            pattern = self.gateway.settings.grpc_header_forward_pattern
            headers = self.select_headers(call.head) if pattern else _NO_HEADERS
            inference = self.submit_request(
                received_message, call, headers, partial(self._respond, call)
            )
        except Exception as error:
            if isinstance(error, RequestRefused) and self.needs_load(received_message):
                task = asyncio.ensure_future(self._infer_once_loaded(received_message, call))
                call.on_disconnect = partial(self._cancel_load, task, received_message)
            else:
                call.fail(_status_from_error(error, call))
            return
        if not call.is_done:
            self.active_count += 1
            call.on_disconnect = inference.cancel
            call.on_ended = self.decrement

    @staticmethod
    def _cancel_load(task: asyncio.Task[None], received_message: MessageContent) -> None:
        task.cancel()
        release_message(received_message)  # a task that has not started yet would not release it

    async def _infer_once_loaded(self, received_message: MessageContent, call: UnaryCall) -> None:
        try:
            await self.load_model(received_message, call.remaining_us())
        except Exception as error:
            call.fail(_status_from_error(error, call))
        else:
            call.on_disconnect = None
            self.infer(received_message, call)

    def _respond(self, call: UnaryCall, inference: UnaryInference) -> None:
        try:
            response = self.encode_response(inference)
        except Exception as error:
            call.fail(_status_from_error(error, call))
        else:
            call.finish(response)

    # --- requests

    def select_headers(self, head: CallHead) -> Mapping[str, str]:
        """Return the metadata of a call that becomes parameters of its requests, sorted.

        Raises:
            InvalidArgument: A name is reserved.
        """
        pattern = self.gateway.settings.grpc_header_forward_pattern
        metadata = sorted((key, value) for key, value in head.metadata if type(value) is str)
        return select_forwarded_headers(pattern, metadata)

    def create_sink(self, head: CallHead, size: int) -> RequestSink:
        """Return the receiver of a large request, which writes its tensors into the arena."""
        return RequestSink(partial(self._reserve_request, head, size))

    def submit_request(
        self,
        received_message: MessageContent,
        call: GrpcCall,
        headers: Mapping[str, str],
        on_response: Callable[[UnaryInference], None],
        on_streamed: StreamedCallback | None = None,
    ) -> UnaryInference | StreamingInference:
        """Submit a request.

        Args:
            received_message: The serialized ModelInferRequest, or the request in the arena.
            call: The call of the client.
            headers: The metadata that becomes parameters.
            on_response: The callback for the response of an `UnaryInference`.
            on_streamed: The callback for the responses of a decoupled model. None: the call is
                unary, and decoupled models are refused.

        Raises:
            RequestRefused: The request is refused.
        """
        arrived_ns = time.monotonic_ns()
        built_request = self._decode(received_message, headers, is_streamed=on_streamed is not None)
        request_id = built_request.infer_request.id
        create_inference: Any = partial(UnaryInference, on_response=on_response)
        if built_request.model.decoupled:
            if on_streamed is None:
                built_request.release()
                raise RequestRefused(Unsupported(_DECOUPLED_UNSUPPORTED), request_id)
            create_inference = partial(StreamingInference, on_response=on_streamed)
        call_limit = UNLIMITED
        if call.head.timeout_s is not None:
            call_limit = (call.remaining_us(), "the deadline of the gRPC call")
        try:
            inference: UnaryInference | StreamingInference = submit_inference(
                *(self.gateway, built_request, call.client, arrived_ns, create_inference),
                call_limit,
                call.head.traceparent,
            )
            return inference
        except ShmserveError as error:
            raise RequestRefused(error, request_id) from None

    def _decode(
        self, received_message: MessageContent, headers: Mapping[str, str], *, is_streamed: bool
    ) -> BuiltRequest:
        if type(received_message) is ArrivingRequest:
            self.gateway.malloc_trim.schedule(len(received_message))
            arrived_request = received_message.built_request
            if not arrived_request.model.is_published and self.needs_load(received_message):
                raise RequestRefused(Unavailable(_MODEL_UNLOADED), arrived_request.infer_request.id)
            return arrived_request
        if headers:  # a cached template would lack the parameters from the call's metadata
            return self._parse(received_message, None, headers, is_streamed=is_streamed)
        try:
            built_request = self._template_cache.find_by_layout(received_message)
            split = split_message(received_message) if built_request is None else None
            if split is not None:
                built_request = self._template_cache.find_by_fingerprint(received_message, split)
        except ShmserveError as error:
            raise RequestRefused(error, _request_id(received_message)) from None
        if built_request is not None:
            return built_request
        return self._parse(received_message, split, headers, is_streamed=is_streamed)

    def _parse(
        self,
        encoded_request: bytes,
        split: SplitMessage | None,
        headers: Mapping[str, str],
        *,
        is_streamed: bool,
    ) -> BuiltRequest:
        request_id = ""
        self.gateway.malloc_trim.schedule(len(encoded_request))
        try:
            message = _parse_message(encoded_request)
            request_id = message.id
            version = checked_version(message.model_version)
            model = self.gateway.models.resolve(message.model_name, version)
            if model.decoupled and not is_streamed:
                raise Unsupported(_DECOUPLED_UNSUPPORTED)
            request = decode_request(message)
            request.parameters |= headers
            if split is None:
                return build_request(self.gateway, model, request)
            if split.contents:
                # Each input is read from `body`, which joins the tensors as in an HTTP body.
                for tensor in request.inputs:
                    if tensor.memory_range is None:
                        tensor.binary_size, tensor.data = len(tensor.data), None
            body = b"".join(split.contents)
            if any(tensor.data is not None for tensor in request.inputs):
                return build_request(self.gateway, model, request, body)
            built_request, template = build_with_template(self.gateway, model, request, body, 0)
        except ShmserveError as error:
            raise RequestRefused(error, request_id) from None
        if template is not None:
            self._template_cache.store(split, request, model, template)
        return built_request

    def _reserve_request(
        self, call_head: CallHead, message_size: int, encoded_fields: bytes, first_tensor_size: int
    ) -> ArrivingRequest | None:
        """Reserve arena memory for the tensors of a message, and return the request.

        Args:
            call_head: The head of the call.
            message_size: The size of the message in bytes.
            encoded_fields: The fields of the message before the tensors.
            first_tensor_size: The size of the first tensor in bytes.

        Returns:
            None if the size of a tensor is unknown, a tensor is in a region, or the head is
            invalid. The message is then parsed as a whole.
        """
        try:
            message = ModelInferRequest.FromString(encoded_fields)
            version = checked_version(message.model_version)
            model = self.gateway.models.resolve(message.model_name, version)
            request = decode_request(message, [b""] * len(message.inputs))
            request.parameters |= self.select_headers(call_head)
            inputs = request.inputs
            for tensor in inputs:
                tensor.binary_size = first_tensor_size if len(inputs) == 1 else _input_size(tensor)
                tensor.data = None
            if any(tensor.memory_range is not None or tensor.binary_size < 0 for tensor in inputs):
                return None
            return reserve_tensors(self.gateway, model, request, message_size)
        except (ShmserveError, DecodeError):
            return None

    # --- responses

    def encode_response(self, inference: UnaryInference) -> bytes:
        """Return the serialized ModelInferResponse of an inference whose response has arrived.

        Raises:
            ShmserveError: The inference failed.
        """
        response: bytes | None = inference.encoded
        inference.encoded = None
        try:
            if response is None:
                response = self._encode_outputs(inference, inference.take())
        except ShmserveError as error:
            record_failure(inference.built_request, error)
            raise
        inference.message = None
        if inference.built_request.trace is not None:
            inference.built_request.trace.finish()
        return response

    def _encode_outputs(self, inference: UnaryInference, result: m.Finished | m.Responded) -> bytes:
        built_request = inference.built_request
        inferred = inference.unpack_outputs(result)
        try:
            templates = built_request.response_templates
            encoded_response = self.encode(built_request, templates, result.schema, inferred)
        finally:
            # The encoded response is a copy, so the outputs are no longer needed.
            inference.release_outputs(inferred)
        self.gateway.malloc_trim.schedule(len(encoded_response))
        return encoded_response

    def encode(
        self,
        built_request: BuiltRequest,
        templates: BoundedCache[bytes, GrpcResponseTemplate] | None,
        schema: bytes,
        inferred: Inferred,
    ) -> bytes:
        """Return a response as a serialized ModelInferResponse.

        Args:
            built_request: The request.
            templates: The templates of responses by their schemas; None: no template is used.
            schema: The schema of the response.
            inferred: The response.

        Raises:
            InvalidArgument: An output cannot be classified.
            Internal: An output's size does not match its shape, or the response is too large.
        """
        request = built_request.infer_request
        response = classify_outputs(self.gateway, built_request.model, request, inferred)
        if response is not inferred:
            templates = None
        region_outputs = request.region_outputs
        template = None if templates is None else templates.find(schema)
        if template is None:
            template = GrpcResponseTemplate(built_request.model, response, region_outputs)
            if templates is not None:
                templates.store(schema, template)
        contents: list[bytes | memoryview] = []
        for tensor in response.outputs:
            is_sent = tensor.name not in region_outputs
            contents.append(output_bytes(self.gateway, tensor) if is_sent else b"")
        return template.encode(request.id, contents)

    # --- models that are loaded on demand

    def needs_load(self, received_message: MessageContent) -> bool:
        """Return whether the model of a refused request is on demand, and not loaded."""
        if not isinstance(received_message, bytes):
            model = received_message.built_request.model
            return needs_load(self.gateway, model.name, model.version)
        try:
            message = _parse_message(received_message)
            version = checked_version(message.model_version)
        except ShmserveError:
            return False
        return needs_load(self.gateway, message.model_name, version)

    async def load_model(self, received_message: MessageContent, remaining_us: int) -> None:
        """Load the model of a request, within the time limits of the request and its call.

        `remaining_us` is the remaining time of the call in microseconds; 0 means no limit.

        Raises:
            RequestRefused: The request is invalid, or the load failed or took too long.
        """
        request_id = ""
        self.active_count += 1
        try:
            if isinstance(received_message, bytes):
                message = _parse_message(received_message)
                request_id, name, version = message.id, message.model_name, message.model_version
                request = decode_request(message)
            else:
                model = received_message.built_request.model
                request = received_message.built_request.infer_request
                request_id, name, version = request.id, model.name, model.version
            is_deadline = self.gateway.settings.request_timeout_is_deadline
            timeout_us = request.timeout_us if is_deadline else 0
            limits = (request.deadline_us, timeout_us, remaining_us)
            await resolve_model(self.gateway, name, version, *limits)
        except BaseException as error:
            release_message(received_message)
            if isinstance(error, ShmserveError):
                raise RequestRefused(error, request_id) from None
            raise
        finally:
            self.decrement()


def _status_from_error(error: Exception, call: GrpcCall) -> Status:
    """Return the status of a call whose inference failed."""
    if isinstance(error, RequestRefused):
        error = error.error
        caller_context = TraceContext.of_header(call.head.traceparent)
        error.traceparent = "" if caller_context is None else caller_context.traceparent
    if not isinstance(error, ShmserveError):
        logger.error("gRPC call %s failed", call.head.path, exc_info=error)
        return INTERNAL_FAILURE
    if call.is_out_of_time():
        # The scheduler's error for an expired deadline has another code, but clients expect this
        # status.
        return DEADLINE_EXPIRED
    return status_from_error(error)


def _input_size(tensor: InferInput) -> int:
    """Return the byte size of an input, or -1 if its datatype and shape do not determine it."""
    item_size = ITEM_SIZE.get(tensor.datatype, 0)
    return tensor.count * item_size if item_size > 0 else -1


def _request_id(encoded_request: bytes) -> str:
    try:
        return _parse_message(encoded_request).id
    except InvalidArgument:
        return ""


def _parse_message(encoded_request: bytes) -> ModelInferRequest:
    try:
        return ModelInferRequest.FromString(encoded_request)
    except DecodeError:
        raise InvalidArgument("malformed ModelInferRequest") from None
