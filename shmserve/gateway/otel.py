"""Traces for OpenTelemetry, whose SDK sends the spans by OTLP over HTTP in a separate thread.

The spans of a request, from parents to children:

InferRequest ──> receive, the model's span, encode
                     └──> queue, compute_input, compute, compute_output
                     └──> steps of an ensemble, models that were called, each with the same spans
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, TraceFlags

import shmserve
from shmserve.gateway.request_trace import RequestTrace
from shmserve.ipc.trace import Span

_PHASES = (
    ("queue", "enqueued_ns", "compute_start_ns"),
    ("compute_input", "compute_start_ns", "input_end_ns"),
    ("compute", "input_end_ns", "output_start_ns"),
    ("compute_output", "output_start_ns", "compute_end_ns"),
)
_SHUTDOWN_TIMEOUT_S = 1.0
_PROCESSOR_ARGUMENTS = {  # Triton's names of the settings of OpenTelemetry's processor
    "bsp_max_queue_size": "max_queue_size",
    "bsp_schedule_delay": "schedule_delay_millis",
    "bsp_max_export_batch_size": "max_export_batch_size",
}


class _HashedResource(Resource):
    """A resource whose hash is computed once, since the SDK needs it for each span."""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()


class _SpanContext(NamedTuple):
    """The ids of a span, with the attributes of opentelemetry.trace.SpanContext."""

    trace_id: int
    span_id: int
    trace_flags: TraceFlags = TraceFlags(TraceFlags.SAMPLED)
    trace_state: None = None
    is_remote: bool = False


@dataclass(slots=True, eq=False)
class _ExportedSpan:
    """A span with the attributes of opentelemetry.sdk.trace.ReadableSpan.

    Creating and encoding a span of the SDK takes 1.7 times as long.
    """

    name: str
    context: _SpanContext
    parent: _SpanContext | None
    resource: Resource
    attributes: dict[str, Any]
    kind: SpanKind
    status: Status | None
    start_time: int
    end_time: int
    events: ClassVar[tuple[()]] = ()
    links: ClassVar[tuple[()]] = ()
    instrumentation_scope: ClassVar[None] = None
    dropped_attributes: ClassVar[int] = 0
    dropped_events: ClassVar[int] = 0
    dropped_links: ClassVar[int] = 0

    def get_span_context(self) -> _SpanContext:
        """Return the ids of the span."""
        return self.context


class Exporter:
    """An exporter of traces by OTLP.

    The destination is in the settings, or in OTEL_EXPORTER_OTLP_ENDPOINT, or else
    http://localhost:4318.
    """

    def __init__(self, settings: Iterable[Sequence[str]]) -> None:
        urls = [value for name, value in settings if name == "url"]
        attributes = [value.partition("=")[::2] for name, value in settings if name == "resource"]
        names = _PROCESSOR_ARGUMENTS  # of the processor's arguments, by Triton's names
        processor_arguments: dict[str, Any] = {names[n]: int(v) for n, v in settings if n in names}
        service_attributes = {"service.name": "shmserve", "service.version": shmserve.__version__}
        resource = Resource.create(service_attributes | dict(attributes))
        self._resource = _HashedResource(resource.attributes, resource.schema_url)
        exporter = OTLPSpanExporter(endpoint=urls[-1] if urls else None)
        self._processor: Any = BatchSpanProcessor(exporter, **processor_arguments)

    def export(self, trace: RequestTrace) -> None:
        """Queue the spans of a finished request for export."""
        # The zero of the monotonic clock, as OpenTelemetry's time since the epoch.
        epoch_ns = time.time_ns() - time.monotonic_ns()
        for span in self._convert_spans(trace, epoch_ns):
            self._processor.on_end(span)

    def close(self) -> None:
        """Send the remaining traces, unless the collector does not accept them in time."""
        shutdown_thread = threading.Thread(target=self._processor.shutdown, daemon=True)
        shutdown_thread.start()
        shutdown_thread.join(_SHUTDOWN_TIMEOUT_S)

    def _convert_spans(self, trace: RequestTrace, epoch_ns: int) -> Iterator[_ExportedSpan]:
        trace_id = int(trace.context.trace_id, 16)
        attributes = _attributes(trace.model, trace.version, trace.request_id)
        yield self._span(
            *("InferRequest", trace_id, trace.context.span_id, trace.context.parent_id),
            *(trace.arrived_ns + epoch_ns, trace.ended_ns + epoch_ns),
            attributes,
            SpanKind.SERVER,
            trace.error,
        )
        for name, start_ns, end_ns in () if trace.is_local else _gateway_phases(trace):
            times = (start_ns + epoch_ns, end_ns + epoch_ns)
            yield self._span(name, trace_id, os.urandom(8).hex(), trace.context.span_id, *times, {})
        for span in trace.spans:
            times = (span.arrived_ns + epoch_ns, span.responded_ns + epoch_ns)
            parent_id = span.parent_id
            # The scheduler's span begins when the gateway has submitted.
            if span.span_id == trace.scheduler_context.span_id:
                times = (trace.submitted_ns + epoch_ns, times[1])
                parent_id = trace.context.span_id
            attributes = _attributes(span.model, span.version, span.request_id)
            attributes["shmserve.batch_size"] = span.batch_size
            if span.close_reason:
                attributes["shmserve.batch_closed"] = span.close_reason
            yield self._span(span.model, trace_id, span.span_id, parent_id, *times, attributes)
            yield from self._phase_spans(trace_id, span, epoch_ns)

    def _phase_spans(self, trace_id: int, span: Span, epoch_ns: int) -> Iterator[_ExportedSpan]:
        if not span.compute_start_ns:
            return
        for name, start_field, end_field in _PHASES:
            times = (getattr(span, start_field) + epoch_ns, getattr(span, end_field) + epoch_ns)
            yield self._span(name, trace_id, os.urandom(8).hex(), span.span_id, *times, {})

    def _span(
        self,
        name: str,
        trace_id: int,
        span_id: str,
        parent_id: str,
        start_ns: int,
        end_ns: int,
        attributes: dict[str, Any],
        kind: SpanKind = SpanKind.INTERNAL,
        error: str = "",
    ) -> _ExportedSpan:
        context = _SpanContext(trace_id, int(span_id, 16))
        parent = _SpanContext(trace_id, int(parent_id, 16)) if parent_id else None
        status = Status(StatusCode.ERROR, error) if error else None
        fields = (attributes, kind, status, start_ns, end_ns)
        return _ExportedSpan(name, context, parent, self._resource, *fields)


def _gateway_phases(trace: RequestTrace) -> Iterator[tuple[str, int, int]]:
    """Yield (name, start, end) of the request's phases at the gateway.

    The phases are the receipt of the request and the encoding of its response.
    """
    yield "receive", trace.arrived_ns, trace.submitted_ns
    if trace.responded_ns:
        yield "encode", trace.responded_ns, trace.ended_ns


def _attributes(model: str, version: str, request_id: str) -> dict[str, Any]:
    """Return the attributes of a span, with Triton's names."""
    model_attributes = {"triton.model_name": model, "triton.model_version": int(version)}
    return model_attributes | ({"triton.request_id": request_id} if request_id else {})
