"""Whose times are wanted, and what becomes of them: an explanation in the response, a line in the
log, an entry in Triton's trace file, spans for OpenTelemetry.

    begin ──> Submit.trace ... response ──answered──> explanation, if asked for ──> finish
                                                       log, file, collector <─────────┘
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
from typing import TYPE_CHECKING, Any

from shmserve.common.trace_settings import OPENTELEMETRY, Sampler, Samplers, TraceSettings
from shmserve.gateway.tracing import file
from shmserve.gateway.tracing.request_trace import RequestTrace
from shmserve.ipc.messages.supervision import RequestTraced
from shmserve.ipc.trace import TraceContext, unpack_spans, within

if TYPE_CHECKING:
    from shmserve.gateway.tracing.otel import Exporter

logger = logging.getLogger(__name__)

_NS_PER_MS = 1_000_000
_HELD_S = 1.0  # so long a trace waits for others to be written with


class Tracer:
    """The traces of a gateway of a `protocol`, HTTP or GRPC. `active`: requests may be traced that
    do not ask for it. Those that take longer than `slow_request_ms` are logged, 0: none are."""

    def __init__(self, slow_request_ms: int = 0, protocol: str = "HTTP") -> None:
        self._slow_ns = slow_request_ms * _NS_PER_MS
        self._protocol = protocol
        self._samplers = Samplers()
        self._writing: asyncio.TimerHandle | None = None
        self._exporter: Exporter | None = None
        self.active = self._slow_ns > 0

    def use(self, settings: dict[str, dict[str, Any]]) -> None:
        """Trace like this from now on: settings by model, "" for all others."""
        self._write_all()
        self._samplers.set(settings)
        common = TraceSettings(**settings[""])
        if common.trace_mode == OPENTELEMETRY and self._exporter is None:
            # Here, since it is an extra, and takes some time.
            from shmserve.gateway.tracing.otel import Exporter

            self._exporter = Exporter(common.exporter)
            gc.freeze()  # the modules stay: no collection needs to look at them
        self.active = self._slow_ns > 0 or self._samplers.on

    def begin(
        self,
        model: str,
        version: str,
        request_id: str,
        arrived_ns: int,
        traceparent: str,
        explained: bool,
    ) -> RequestTrace | None:
        """The trace of a request, if its times are wanted, that is about to be submitted."""
        caller = TraceContext.of_header(traceparent) if traceparent else None
        sampled = self._samplers.of(model).samples(None if caller is None else caller.sampled)
        if not (explained or sampled or caller or self._slow_ns):
            return None
        if caller is None:
            context = TraceContext.new(sampled)
        else:
            context = caller.child(sampled or caller.sampled)
        of_model = (model, version, request_id)
        return RequestTrace(self.finish, *of_model, context, arrived_ns, explained, sampled)

    def take(self, told: RequestTraced) -> None:
        """A local client's request has ended, which came by no gateway."""
        own = TraceContext.of(told.trace)
        context = own._replace(span_id=os.urandom(8).hex())
        of_model = (told.model, told.version, told.request_id)
        trace = RequestTrace(
            self.finish, *of_model, context, told.arrived_ns, False, told.sampled, True
        )
        trace.scheduler, trace.submitted_ns = own, told.arrived_ns
        trace.ended_ns, trace.error = told.ended_ns, told.error
        trace.spans = within(unpack_spans(told.spans), own.span_id)
        self.finish(trace)

    def finish(self, trace: RequestTrace) -> None:
        """A request has ended; what is wanted of its times is told."""
        if self._slow_ns and trace.ended_ns - trace.arrived_ns > self._slow_ns:
            _log_slow(trace)
        if trace.sampled and self._exporter is not None:
            self._exporter.export(trace)
        elif trace.sampled:
            sampler = self._samplers.of(trace.model)
            sampler.pending.append(trace)
            if len(sampler.pending) == sampler.settings.log_frequency:
                self._write(sampler)
            elif self._writing is None:
                loop = asyncio.get_running_loop()
                self._writing = loop.call_later(_HELD_S, self._write_all)

    def close(self) -> None:
        """Write, or send, what is still to be told."""
        self._write_all()
        if self._exporter is not None:
            self._exporter.close()

    def _write_all(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None
        for sampler in self._samplers.all:
            if sampler.pending:
                self._write(sampler)

    def _write(self, sampler: Sampler) -> None:
        traces, sampler.pending = sampler.pending, []
        settings = sampler.settings
        path = settings.trace_file
        if not path:
            return
        protocols = ("" if trace.local else self._protocol for trace in traces)
        made = map(file.entries_of, traces, protocols)
        entries = [each for entries in made for each in entries]
        try:
            file.append(file.next_file(path) if settings.log_frequency else path, entries)
        except (OSError, ValueError) as error:
            logger.error("%d traces cannot be written to '%s': %s", len(traces), path, error)


def _log_slow(trace: RequestTrace) -> None:
    told = trace.explanation(trace.ended_ns)
    if trace.answered_ns:
        told["encode_us"] = (trace.ended_ns - trace.answered_ns) // 1000
    if trace.error:
        told["error"] = trace.error
    logger.warning(
        "inference of model '%s' was slow: %s",
        trace.model,
        json.dumps(told),
        extra={"request_id": trace.request_id, "trace_id": trace.context.trace_id},
    )
