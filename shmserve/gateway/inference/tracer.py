"""Whose times are wanted, and what becomes of them: an explanation in the response, a line in the
log.

    begin ──> Submit.trace ... response ──answered──> explanation, if asked for ──> finish ──> log
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass, field, replace
from typing import Any

from shmserve.gateway.inference.request import InferRequest
from shmserve.ipc.inflight import Response
from shmserve.ipc.messages.inference import Failed
from shmserve.ipc.tensors.inference import Inferred
from shmserve.ipc.trace import Span, TraceContext, explain, unpack_spans

logger = logging.getLogger(__name__)

_NS_PER_MS = 1_000_000


@dataclass(slots=True, eq=False)
class RequestTrace:
    """A request whose times are wanted: `context` is the gateway's own span, `scheduler` that which
    the scheduler tells. Times are monotonic ns, 0: not yet."""

    tracer: Tracer
    model: str
    request_id: str
    context: TraceContext
    arrived_ns: int
    explained: bool
    scheduler: TraceContext = field(init=False)
    submitted_ns: int = field(default_factory=time.monotonic_ns)
    answered_ns: int = 0
    spans: list[Span] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scheduler = self.context.child()

    def answered(self, message: Response) -> None:
        """The last response is here."""
        self.answered_ns = time.monotonic_ns()
        if not isinstance(message, Failed) and message.spans:
            self.spans = unpack_spans(message.spans)

    def explanation(self, now_ns: int) -> dict[str, Any]:
        """Where its time went until now, as `ipc.trace.explain` has it."""
        times = (self.arrived_ns, self.submitted_ns, now_ns)
        return explain(self.spans, self.scheduler.span_id, *times)

    def explain(self, inferred: Inferred) -> Inferred:
        """Its response, with the explanation that it asks for."""
        if not self.explained:
            return inferred
        told = {"explanation": self.explanation(time.monotonic_ns())}
        return replace(inferred, parameters=inferred.parameters | told)

    def finish(self, error: str = "") -> None:
        """It has ended, with its response or an `error`."""
        self.tracer.finish(self, error)


@dataclass(slots=True, eq=False)
class Tracer:
    """The traces of a gateway. `active`: requests are to be traced that do not ask for it;
    those that take longer than `slow_ns` are logged, 0: none are."""

    slow_ns: int = 0
    active: bool = field(init=False)

    def __post_init__(self) -> None:
        self.active = self.slow_ns > 0

    @classmethod
    def of(cls, slow_request_ms: int) -> Tracer:
        """By the server's settings."""
        return cls(slow_request_ms * _NS_PER_MS)

    def begin(
        self, model: str, request: InferRequest, arrived_ns: int, traceparent: str
    ) -> RequestTrace | None:
        """The trace of a request, if its times are wanted, that is about to be submitted."""
        explained = request.parameters.get("explain") is True
        caller = TraceContext.of_header(traceparent) if traceparent else None
        if not (explained or caller or self.slow_ns):
            return None
        context = TraceContext.new() if caller is None else caller.child()
        return RequestTrace(self, model, request.id, context, arrived_ns, explained)

    def finish(self, trace: RequestTrace, error: str) -> None:
        """A request has ended; what is wanted of its times is told."""
        now_ns = time.monotonic_ns()
        if self.slow_ns and now_ns - trace.arrived_ns > self.slow_ns:
            self._log_slow(trace, error, now_ns)

    def _log_slow(self, trace: RequestTrace, error: str, now_ns: int) -> None:
        told = trace.explanation(now_ns)
        if trace.answered_ns:
            told["encode_us"] = (now_ns - trace.answered_ns) // 1000
        if error:
            told["error"] = error
        logger.warning(
            "inference of model '%s' was slow: %s",
            trace.model,
            json.dumps(told),
            extra={"request_id": trace.request_id, "trace_id": trace.context.trace_id},
        )
