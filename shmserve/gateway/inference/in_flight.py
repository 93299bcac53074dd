"""Inferences: requests in flight at a scheduler, and their responses, for every protocol.

A `UnaryInference` has one response, a `StreamingInference` any number:

    submitted ──> in flight ──response──> outputs unpacked, encoded by the protocol
                    ├──cancelled: the scheduler is notified, later responses are discarded
                    └──response* (streaming) ──> the last one: a final `Responded`, or a `Failed`

A response with a known schema to a request with a known header is encoded by a template
(`UnaryInference.handle_response`). Any other response is unpacked (`unpack_response`), and encoded
by its protocol.

A `StreamingInference` has credit-based flow control: the scheduler sends responses only for credit,
which is returned when responses have been sent to the client.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from shmserve.errors import Internal, QueueFull, ShmserveError, Unavailable, from_code
from shmserve.gateway.context import UNLIMITED, Gateway, TimeLimit, resolve_model
from shmserve.gateway.inference.prepare import BuiltRequest
from shmserve.gateway.links import GatewayRequest
from shmserve.gateway.listener import ClientIdentity
from shmserve.gateway.region_table import authorise
from shmserve.ipc.credit import ReadWindow
from shmserve.ipc.messages import inference as m
from shmserve.ipc.messages.inference import Response, make_submit
from shmserve.ipc.tensors.datatypes import ITEM_SIZE, element_count
from shmserve.ipc.tensors.descriptors import TensorRef
from shmserve.ipc.tensors.schemas import (
    SEQUENCE_START,
    BoundedCache,
    Inferred,
    ResponseSchema,
    Schemas,
)
from shmserve.ipc.tensors.signature import shape_text, stopping_text
from shmserve.ipc.transport.frames import MalformedMessage

logger = logging.getLogger(__name__)

StreamedResponse = m.Responded | m.Failed
_MAX_TEMPLATES = 8  # maximum number of response templates of one stream

R = TypeVar("R", bound=GatewayRequest)


def submit_inference(
    gateway: Gateway,
    built_request: BuiltRequest,
    client: ClientIdentity,
    arrived_ns: int,
    create_inference: Callable[..., R],
    call_limit: TimeLimit = UNLIMITED,
    traceparent: str = "",
) -> R:
    """Submit a request to the scheduler of its model, and return it as an inference in flight.

    Args:
        gateway: The gateway.
        built_request: The request, whose resources are released if it is refused.
        client: The client, which must own the regions of the request.
        arrived_ns: The time of the request's arrival.
        create_inference: Creates the inference, given the arguments of `GatewayRequest` and the
            built request.
        call_limit: The time limit of the client's call.
        traceparent: The trace context of the client.

    Raises:
        NotFound: The model was unloaded, or a region belongs to another user.
        PermissionDenied: The user of the client is unknown.
        Unsupported: The client may not use shared memory.
        Unavailable: The model was loaded with another configuration, or the server drains. Open
            sequences continue during a drain.
    """
    request, model = built_request.infer_request, built_request.model
    try:
        is_continuation = (
            model.is_stateful and request.correlation_id and not request.flags & SEQUENCE_START
        )
        if gateway.refuses_requests and not is_continuation:
            text = stopping_text(request.id, of_sequence=model.is_stateful)
            raise Unavailable(model.error_prefix + text)
        if built_request.regions:
            authorise(built_request.regions, client.peer())
        if not model.is_published:
            model = built_request.model = gateway.models.current(model)
    except BaseException:
        built_request.release()
        raise
    trace_context = ""
    if traceparent or gateway.tracer.is_active or "explain" in request.parameters:
        trace_context = _begin_trace(gateway, built_request, arrived_ns, traceparent)
    limit_us, limit_origin = call_limit
    server_limit_us = gateway.settings.request_timeout_us
    if request.deadline_us > 0 and not 0 < limit_us <= request.deadline_us:
        limit_us, limit_origin = request.deadline_us, "the request's parameter 'deadline_us'"
    if server_limit_us and not 0 < limit_us <= server_limit_us:
        limit_us, limit_origin = server_limit_us, "--request-timeout-us"
    schedulers = gateway.schedulers
    message = make_submit(
        schedulers.next_number(),
        built_request.schema,
        built_request.data,
        arrived_ns,
        request_id=request.id,
        priority=request.priority,
        timeout_us=request.timeout_us,
        limit_us=limit_us,
        limit_origin=limit_origin,
        flags=request.flags,
        correlation_id=request.correlation_id,
        # The address of the object distinguishes the connections of this process.
        source=id(client) if request.correlation_id else 0,
        trace=trace_context,
    )
    inference = create_inference(message, schedulers, built_request.on_release, built_request)
    schedulers.submit(inference, model.endpoint)
    return inference


def _begin_trace(gateway: Gateway, built: BuiltRequest, arrived_ns: int, traceparent: str) -> str:
    """Begin the trace of a request, and return its context for the scheduler, or ""."""
    request, model = built.infer_request, built.model
    has_explanation = request.parameters.get("explain") is True
    request_fields = (model.name, model.version, request.id)
    trace = built.trace = gateway.tracer.begin_trace(
        *request_fields, arrived_ns, traceparent, has_explanation
    )
    if trace is None:
        return ""
    if trace.has_explanation:
        # A template would repeat the durations of the first response in later responses.
        built.response_templates = None
    return trace.scheduler_context.encoded


async def reload_model(gateway: Gateway, built_request: BuiltRequest) -> None:
    """Load the model of a request again, if it was unloaded while the request arrived.

    Raises:
        ShmserveError: As in `resolve_model`. The resources of the request are released.
    """
    if built_request.model.is_published:
        return
    try:
        await resolve_model(gateway, built_request.model.name, built_request.model.version)
    except BaseException:
        built_request.release()
        raise


def error_from_failed(message: m.Failed) -> ShmserveError:
    """Return the exception for a `Failed` message."""
    if message.retry_after_s > 0:
        return QueueFull(message.message, message.retry_after_s)
    return from_code(message.code, message.message)


def log_failure(built_request: BuiltRequest, error: ShmserveError) -> None:
    """Log a failed request, and add the id of its trace to the error.

    A failure that the client has caused is logged at debug level.
    """
    trace = built_request.trace
    if trace is not None:
        error.traceparent = trace.context.traceparent
    level = logging.ERROR if error.server_fault else logging.DEBUG
    if logger.isEnabledFor(level):
        outcome = "failed" if error.server_fault else "was refused"
        log_args = (built_request.model.name, outcome, error.message)
        log_fields = {
            "request_id": built_request.infer_request.id,
            "trace_id": trace and trace.context.trace_id,
        }
        logger.log(level, "inference of model '%s' %s: %s", *log_args, extra=log_fields)


def record_failure(built_request: BuiltRequest, error: ShmserveError) -> None:
    """Log the failure of a request with one response, and end its trace."""
    log_failure(built_request, error)
    if built_request.trace is not None:
        built_request.trace.finish(error.message)


@dataclass(slots=True, eq=False)
class UnaryInference(GatewayRequest):
    """A request in flight with one response.

    Attributes:
        built_request: The request.
        on_response: The callback for the response. It is not called after `cancel`.
        allows_template: Whether the response may be encoded by a template.
        message: The response, until it is taken.
        encoded: The response as its template has encoded it, or None.
    """

    built_request: BuiltRequest
    on_response: Callable[[Any], None]
    allows_template: bool = field(default=True, kw_only=True)
    message: Response | None = field(init=False, default=None)
    encoded: Any = field(init=False, default=None)  # as encoded by a template

    def handle_response(self, message: Response) -> None:
        if not self.has_ended:
            self.discard(message)  # a unary inference has only the last response
            return
        self.message = message
        built_request = self.built_request
        if built_request.trace is not None:
            built_request.trace.on_response(message)
        if (
            self.allows_template
            and built_request.response_templates is not None
            and type(message) is m.Finished
        ):
            template = built_request.response_templates.find(message.schema)
            if template is not None:
                try:
                    self.encoded = template.fill(built_request.infer_request.id, message.data)
                except Exception:
                    self.encoded = None  # encoding it again reports the error
        self.on_response(self)

    def take(self) -> m.Finished | m.Responded:
        """Return the response and remove it from `message`; raise the error of a failed request."""
        message, self.message = self.message, None
        assert message is not None
        if isinstance(message, m.Failed):
            raise error_from_failed(message)
        return message

    def unpack_outputs(self, message: m.Finished | m.Responded) -> Inferred:
        """Unpack the outputs; with the parameter `explain`, add where the request's time was spent.

        Raises:
            Internal: The response is malformed.
        """
        inferred = unpack_response(message.schema, message.data)
        if self.built_request.trace is None:
            return inferred
        return self.built_request.trace.explain(inferred)

    def cancel(self) -> None:
        """Cancel the request, since the client has disconnected."""
        message, self.message = self.message, None
        if message is not None:
            self.discard(message)
        self.abandon()
        if self.built_request.trace is not None:
            self.built_request.trace.on_disconnect()


@dataclass(slots=True, eq=False)
class StreamingInference(GatewayRequest):
    """A request in flight with any number of responses.

    The owner calls `credit` after each response that was sent to the client. If the client has
    disconnected, responses that were not sent are discarded, and the request is cancelled.

    Attributes:
        built_request: The request.
        on_response: The callback for each response, including the last.
        response_templates: The templates of responses by their schemas.
    """

    built_request: BuiltRequest
    on_response: Callable[[StreamingInference, StreamedResponse], None]
    response_templates: BoundedCache[bytes, Any] = field(init=False)
    _window: ReadWindow = field(init=False)
    _unsent_responses: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        # Each response in a region overwrites the previous one, so only one may be unread.
        outputs = self.built_request.infer_request.outputs
        self._window = ReadWindow(any(output.memory_range is not None for output in outputs))
        templates = self.built_request.response_templates
        self.response_templates = BoundedCache(_MAX_TEMPLATES) if templates is None else templates

    def handle_response(self, message: Response) -> None:
        if isinstance(message, m.Finished):
            schema_and_data = (message.schema, message.data)
            message = m.Responded(message.id, "", "", *schema_and_data, True, spans=message.spans)
        self._unsent_responses += 1
        if self.has_ended and self.built_request.trace is not None:
            self.built_request.trace.on_response(message)
        self.on_response(self, message)

    def from_template(self, message: StreamedResponse) -> Any:
        """Return the response as encoded by a template.

        Returns:
            None if there is no template, or if data of the response is not in the message.
        """
        if not isinstance(message, m.Responded) or message.final:
            return None
        template = self.response_templates.find(message.schema)
        return template and template.fill(self.built_request.infer_request.id, message.data)

    def unpack_outputs(self, message: StreamedResponse) -> Inferred | None:
        """Unpack the outputs of a response, which occupy memory until `release_outputs`.

        Returns:
            None for a message that only ends the stream.

        Raises:
            ShmserveError: The response is an error, or malformed.
        """
        trace = self.built_request.trace
        try:
            if (error := find_error(message)) is not None:
                raise error
            inferred: Inferred | None = None
            if not isinstance(message, m.Failed) and message.schema:
                inferred = unpack_response(message.schema, message.data)
            if trace is not None and trace.has_explanation and is_last_response(message):
                inferred = trace.explain(inferred or Inferred(()))
            return inferred
        except ShmserveError as error:
            log_failure(self.built_request, error)
            raise

    def credit(self, inferred: Inferred | None) -> None:
        """Record that the response with these outputs was sent, and grant credit for it."""
        self._unsent_responses -= 1
        if self.has_ended:
            if not self._unsent_responses and self.built_request.trace is not None:
                self.built_request.trace.finish()
            return
        sizes = () if inferred is None else (_byte_size(tensor.data) for tensor in inferred.outputs)
        credit = self._window.record_read(sum(sizes))
        if credit:
            self.schedulers.credit(self, credit)

    def cancel(self) -> None:
        """Cancel the request."""
        if not self.has_ended:
            self.abandon()
        if self.built_request.trace is not None:
            self.built_request.trace.on_disconnect()


def find_error(message: StreamedResponse) -> ShmserveError | None:
    """Return the error of a response, or None."""
    if isinstance(message, m.Failed):
        return error_from_failed(message)
    return from_code(message.code, message.message) if message.code else None


def is_last_response(message: StreamedResponse) -> bool:
    """Return whether a response is the last one."""
    return isinstance(message, m.Failed) or message.final


def _byte_size(data: Any) -> int:
    return len(data) if isinstance(data, bytes) else int(data.byte_size)


# All models share this table, because an unpacked schema does not depend on the model.
_SCHEMAS: Schemas[ResponseSchema] = Schemas(ResponseSchema)


def unpack_response(schema: bytes, data: Sequence[Any]) -> Inferred:
    """Return the outputs of a response.

    Raises:
        Internal: The response is malformed.
    """
    try:
        return _SCHEMAS[schema].inferred(data)
    except MalformedMessage as error:
        logger.error("a worker's response is malformed, so its request fails: %s", error)
        raise Internal() from None


def output_bytes(gateway: Gateway, tensor: TensorRef) -> bytes | memoryview:
    """Return the bytes of an output, without a copy.

    Raises:
        Internal: The size does not match the shape.
    """
    location = tensor.data  # the bytes, or their range in shared memory
    data = location if isinstance(location, bytes) else gateway.mappings.view(location)
    expected_size = element_count(tensor.shape) * ITEM_SIZE[tensor.datatype]
    if expected_size != len(data) and ITEM_SIZE[tensor.datatype]:
        raise Internal(
            f"output '{tensor.name}': expected {expected_size} bytes for {tensor.datatype} "
            f"{shape_text(tensor.shape)}, got {len(data)}"
        )
    return data
