"""The one record of a request's times, made for those whose times are wanted."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from shmserve.ipc.inflight import Response
from shmserve.ipc.messages.inference import Failed, Responded
from shmserve.ipc.tensors.inference import Inferred
from shmserve.ipc.trace import Span, TraceContext, explain, unpack_spans, within


@dataclass(slots=True, eq=False)
class RequestTrace:
    """A request whose times are wanted: `context` is the gateway's own span, `scheduler` that which
    the scheduler tells, and `spans` are those within it. Times are monotonic ns, 0: not yet. It is
    `explained` in its response, or `sampled` for whoever collects traces; `local`: no gateway had
    it, but a scheduler that has told of it; `error`: it failed. `on_end` hears of its end."""

    on_end: Callable[[RequestTrace], None]
    model: str
    version: str
    request_id: str
    context: TraceContext
    arrived_ns: int
    explained: bool
    sampled: bool
    local: bool = False
    scheduler: TraceContext = field(init=False)
    submitted_ns: int = field(default_factory=time.monotonic_ns)
    answered_ns: int = 0
    ended_ns: int = 0
    spans: list[Span] = field(default_factory=list)
    error: str = ""

    def __post_init__(self) -> None:
        self.scheduler = self.context.child()

    def answered(self, message: Response) -> None:
        """The last response is here."""
        self.answered_ns = time.monotonic_ns()
        if isinstance(message, Failed | Responded) and message.code:
            self.error = message.message
        if not isinstance(message, Failed) and message.spans:
            self.spans = within(unpack_spans(message.spans), self.scheduler.span_id)

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
        """It has ended, with its response or an `error`. The first that is said of it holds."""
        if not self.ended_ns:
            self.ended_ns, self.error = time.monotonic_ns(), self.error or error
            self.on_end(self)

    def gone(self) -> None:
        """Nobody waits for it any more, if it has not ended."""
        self.finish("its client has gone")
