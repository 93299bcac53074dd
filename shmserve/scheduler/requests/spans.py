"""The span of a request at its scheduler, for who wants its times."""

from __future__ import annotations

from shmserve.ipc.messages.inference import Submit
from shmserve.ipc.trace import Span, TraceContext
from shmserve.scheduler.statistics.counters import Statistics
from shmserve.scheduler.statistics.timing import Timing

_NOT_EXECUTED = Timing(0, 0, 0, 0)


def spans_of(
    counted: Statistics,
    submit: Submit,
    arrived_ns: int,
    enqueued_ns: int,
    timing: Timing | None,
    now_ns: int,
) -> bytes:
    """The span of a request that ends now, at the model of these statistics, and those of what was
    asked for it, as `Finished` has them: none where nobody wants them."""
    if not submit.trace:
        return b""
    start_ns, input_ns, infer_ns, output_ns, rows, closed, spans = timing or _NOT_EXECUTED
    context = TraceContext.of(submit.trace)
    span = Span(
        context.span_id,
        context.parent_id,
        *counted.model,
        submit.request_id,
        arrived_ns,
        enqueued_ns,
        start_ns,
        start_ns + input_ns,
        start_ns + input_ns + infer_ns,
        start_ns + input_ns + infer_ns + output_ns,
        now_ns,
        rows,
        closed,
    )
    return span.packed() + spans
