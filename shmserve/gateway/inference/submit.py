"""The common pipeline of inferences, whatever protocol they came by: access to regions, the message
to the scheduler, failures.

A `StreamingRequest` gets any number of responses, with credit-based flow control:

    opened ──> response* ──> the last one: a final `Responded`, or a `Failed`
       └──> cancelled, at the scheduler too: what comes after that is discarded

The scheduler may send a response only for credit. When one has gone on to the client its credit is
given back, for several small ones at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from shmserve.errors import QueueFull, ShmserveError, Unavailable, from_code
from shmserve.gateway.client_identity import ClientIdentity
from shmserve.gateway.context import Gateway, loaded
from shmserve.gateway.inference.builder import BuiltRequest
from shmserve.gateway.inference.request import InferRequest
from shmserve.gateway.inference.response import unpack
from shmserve.gateway.links import GatewayRequest, GatewaySchedulers
from shmserve.gateway.model_table import GatewayModel
from shmserve.gateway.region_table import authorise
from shmserve.gateway.request_trace import RequestTrace
from shmserve.ipc.credit import ReadWindow
from shmserve.ipc.messages import inference as m
from shmserve.ipc.messages.inference import Response, make_submit
from shmserve.ipc.tensors.inference import SEQUENCE_START, Inferred
from shmserve.ipc.tensors.signature import stopping

logger = logging.getLogger(__name__)


Message = m.Responded | m.Failed


def prepare_submit(
    gateway: Gateway,
    model: GatewayModel,
    built: BuiltRequest,
    client: ClientIdentity,
    arrived_ns: int,
    call_limit_us: int = 0,
    traceparent: str = "",
) -> tuple[GatewayModel, m.Submit]:
    """The message that submits a request, if its regions are `client`'s to use, and what serves its
    model now; else the resources of the request are released.

    `call_limit_us` is how long the client's own call lasts, 0: any; `traceparent` the trace that it
    is part of, as the client says it. Raises NotFound,
    PermissionDenied, Unsupported, or Unavailable where the model was loaded with another
    configuration, or the gateway refuses: only sequences that have begun go on then.
    """
    request = built.infer_request
    try:
        goes_on = model.stateful and request.correlation_id and not request.flags & SEQUENCE_START
        if gateway.refusing and not goes_on:
            raise Unavailable(model.prefix + stopping(request.id, of_sequence=model.stateful))
        if built.regions:
            authorise(built.regions, client.peer())
        if not model.published:
            model = gateway.models.current(model)
    except BaseException:
        built.release()
        raise
    trace = ""
    if traceparent or gateway.tracer.active or "explain" in request.parameters:
        asked = request.parameters.get("explain") is True
        of_model = (model.name, model.version, request.id)
        built.trace = gateway.tracer.begin(*of_model, arrived_ns, traceparent, asked)
        if built.trace is not None:
            trace = built.trace.scheduler.message
            if built.trace.explained:
                built.responses = None  # no other response is like it
    submit = make_submit(
        gateway.schedulers.next_number(),
        built.schema,
        built.data,
        arrived_ns,
        request_id=request.id,
        priority=request.priority,
        timeout_us=request.timeout_us,
        limit_us=gateway.settings.request_timeout_us,
        call_limit_us=call_limit_us,
        flags=request.flags,
        correlation_id=request.correlation_id,
        source=client.source if request.correlation_id else 0,
        trace=trace,
    )
    return model, submit


async def still(gateway: Gateway, model: GatewayModel, built: BuiltRequest) -> None:
    """Have a model loaded again that was unloaded while a request for it arrived. Raises what
    `loaded` does; the resources of the request are released then."""
    try:
        await loaded(gateway, model.name, model.version)
    except BaseException:
        built.release()
        raise


def failure(message: m.Failed) -> ShmserveError:
    """The exception for a `Failed`."""
    if message.retry_after_s > 0:
        return QueueFull(message.message, message.retry_after_s)
    return from_code(message.code, message.message)


def log_failure(
    model: GatewayModel, request_id: str, error: ShmserveError, trace: RequestTrace | None
) -> None:
    """Log a failure: a server's fault as an error, a client's at debug level. From now on the error
    knows its trace, if it has one."""
    if trace is not None:
        error.traceparent = trace.context.traceparent
    level = logging.ERROR if error.server_fault else logging.DEBUG
    if logger.isEnabledFor(level):
        what = "failed" if error.server_fault else "was refused"
        told = (model.name, what, error.message)
        extra = {"request_id": request_id, "trace_id": trace and trace.context.trace_id}
        logger.log(level, "inference of model '%s' %s: %s", *told, extra=extra)


@dataclass(slots=True, eq=False)
class StreamingRequest(GatewayRequest):
    """`on_response(request, message)` is called for each response, the last included, in the
    event loop.

    Each that has gone on to the client is to be followed by a `credit`. Where the client is gone,
    those whose outputs are not released are to be discarded, and the request cancelled.
    """

    model: GatewayModel
    infer_request: InferRequest
    trace: RequestTrace | None
    on_response: Callable[[StreamingRequest, Message], None]
    _window: ReadWindow
    _here: int = field(init=False, default=0)  # responses that have not gone on yet

    def responded(self, message: Response) -> None:
        if isinstance(message, m.Finished):
            packed = (message.schema, message.data)
            message = m.Responded(message.id, "", "", *packed, True, spans=message.spans)
        self._here += 1
        if self.over and self.trace is not None:
            self.trace.answered(message)
        self.on_response(self, message)

    def outputs(self, message: Message) -> Inferred | None:
        """The outputs of a response; None for one that only says that it was the last, and explains
        nothing. Their memory is in use until the `release_outputs`.

        Raises the error that the response is.
        """
        try:
            if (error := error_of(message)) is not None:
                raise error
            inferred: Inferred | None = None
            if not isinstance(message, m.Failed) and message.schema:
                inferred = unpack(message.schema, message.data)
            if self.trace is not None and self.trace.explained and is_last(message):
                inferred = self.trace.explain(inferred or Inferred(()))
            return inferred
        except ShmserveError as error:
            log_failure(self.model, self.infer_request.id, error, self.trace)
            raise

    def credit(self, inferred: Inferred | None) -> None:
        """The response with these outputs has gone on to the client, which takes another."""
        self._here -= 1
        if self.over and not self._here and self.trace is not None:
            self.trace.finish()
        if not self.over:
            credit = self._window.read(_byte_size(inferred))
            if credit:
                self.schedulers.credit(self, credit)

    def cancel(self) -> None:
        """Cancel it: no more responses are waited for."""
        if not self.over:
            self.give_up()
        if self.trace is not None:
            self.trace.gone()


def submit_streaming(
    schedulers: GatewaySchedulers,
    model: GatewayModel,
    built: BuiltRequest,
    submit: m.Submit,
    on_response: Callable[[StreamingRequest, Message], None],
) -> StreamingRequest:
    """Submit a request for any number of responses."""
    request = built.infer_request
    # Each response goes over the one before it where they have places: they come one by one.
    window = ReadWindow(any(output.place is not None for output in request.outputs))
    how = (submit, schedulers, built.release)
    made = StreamingRequest(*how, model, request, built.trace, on_response, window)
    schedulers.submit(made, model.endpoint)
    return made


def error_of(message: Message) -> ShmserveError | None:
    """The error that a response is, None for one that is none."""
    if isinstance(message, m.Failed):
        return failure(message)
    return from_code(message.code, message.message) if message.code else None


def is_last(message: Message) -> bool:
    """Whether nothing comes after it."""
    return isinstance(message, m.Failed) or message.final


def _byte_size(inferred: Inferred | None) -> int:
    datas = () if inferred is None else (tensor.data for tensor in inferred.outputs)
    return sum(len(data) if isinstance(data, bytes) else data.byte_size for data in datas)
