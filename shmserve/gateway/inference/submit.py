"""The common pipeline of inferences, whatever protocol they came by: access to regions, the message
to the scheduler, failures."""

from __future__ import annotations

import logging

from shmserve.errors import QueueFull, ShmserveError, Unavailable, from_code
from shmserve.gateway.client_identity import ClientIdentity
from shmserve.gateway.context import Gateway
from shmserve.gateway.inference.builder import BuiltRequest
from shmserve.gateway.model_table import GatewayModel
from shmserve.gateway.on_demand import loaded
from shmserve.gateway.region_table import authorise
from shmserve.gateway.tracing.request_trace import RequestTrace
from shmserve.ipc.inflight import make_submit, stopping
from shmserve.ipc.messages import inference as m
from shmserve.ipc.tensors.inference import SEQUENCE_START

logger = logging.getLogger(__name__)


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
                built.templates = None  # no other response is like it
    submit = make_submit(
        gateway.dispatcher.next_number(),
        built.fit,
        arrived_ns,
        built.work,
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
