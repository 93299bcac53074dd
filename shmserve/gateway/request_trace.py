"""The trace of one request, and its entries in Triton's trace file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shmserve.common.trace_settings import TENSORS, TIMESTAMPS
from shmserve.ipc.messages.inference import Failed, Responded, Response
from shmserve.ipc.tensors.schemas import Inferred
from shmserve.ipc.trace import (
    Span,
    TraceContext,
    TracedTensor,
    phase_durations,
    span_subtree,
    unpack_spans,
)

_ENTRY_ID_DIGITS = 13  # hex digits: 52 bits, since many JSON parsers read integers as float64
_ACTIVITIES = {"HTTP": ("HTTP_RECV", "HTTP_SEND"), "GRPC": ("GRPC_WAITREAD", "GRPC_SEND")}
_COMPUTE_ACTIVITIES = (
    ("COMPUTE_START", "compute_start_ns"),
    ("COMPUTE_INPUT_END", "input_end_ns"),
    ("COMPUTE_OUTPUT_START", "output_start_ns"),
    ("COMPUTE_END", "compute_end_ns"),
)


@dataclass(slots=True, eq=False)
class RequestTrace:
    """The trace of one request. Times are monotonic ns; 0 means that the event is still to happen.

    Attributes:
        on_end: Called at the end of the request.
        context: The ids of the gateway's span.
        scheduler_context: The ids of the scheduler's span.
        spans: The scheduler's span and the spans within it, once the response has arrived.
        tensors: The traced inputs and outputs of these spans.
        has_explanation: Whether the response contains an explanation.
        is_sampled: Whether the trace is written to the file or sent to the collector.
        is_local: Whether a local client sent the request to the scheduler, without a gateway.
        error: The message of the error, if the request failed.
    """

    on_end: Callable[[RequestTrace], None]
    model: str
    version: str
    request_id: str
    context: TraceContext
    arrived_ns: int
    has_explanation: bool  # whether the response explains where its time was spent
    is_sampled: bool
    is_local: bool = False  # whether a local client sent it, without a gateway
    scheduler_context: TraceContext = field(init=False)
    submitted_ns: int = field(default_factory=time.monotonic_ns)
    responded_ns: int = 0
    ended_ns: int = 0
    spans: list[Span] = field(default_factory=list)
    tensors: list[TracedTensor] = field(default_factory=list)
    error: str = ""

    def __post_init__(self) -> None:
        self.scheduler_context = self.context.child()

    def on_response(self, message: Response) -> None:
        """Record the time, the error and the spans of the last response."""
        self.responded_ns = time.monotonic_ns()
        if isinstance(message, Failed | Responded) and message.code:
            self.error = message.message
        if message.spans:
            self.read_spans(message.spans)

    def read_spans(self, spans: bytes) -> None:
        """Store this request's spans, which are among the packed `spans` of its last response."""
        self.spans = span_subtree(unpack_spans(spans, self.tensors), self.scheduler_context.span_id)

    def explanation(self, now_ns: int) -> dict[str, Any]:
        """Return the durations of the phases until `now_ns`; see `ipc.trace.phase_durations`."""
        times = (self.arrived_ns, self.submitted_ns, now_ns)
        return phase_durations(self.spans, self.scheduler_context.span_id, *times)

    def explain(self, inferred: Inferred) -> Inferred:
        """Return the response, with an explanation if the request has requested it."""
        if not self.has_explanation:
            return inferred
        explanation = {"explanation": self.explanation(time.monotonic_ns())}
        return replace(inferred, parameters=inferred.parameters | explanation)

    def finish(self, error: str = "") -> None:
        """Record the end of the request, unless it has ended; an earlier error is kept."""
        if not self.ended_ns:
            self.ended_ns, self.error = time.monotonic_ns(), self.error or error
            self.on_end(self)

    def on_disconnect(self) -> None:
        """Record that the client has disconnected, unless the request has ended."""
        self.finish("the client has disconnected")


def trace_entries(
    trace: RequestTrace, protocol: str, levels: Sequence[str] = (TIMESTAMPS,)
) -> list[dict[str, Any]]:
    """Return the trace file's entries for a completed request, of the kinds in `levels`.

    The gateway's timestamps are named after the `protocol`, which is "" for a local request.
    """
    entries = _timestamp_entries(trace, protocol) if TIMESTAMPS in levels else []
    return [*entries, *_tensor_entries(trace)] if TENSORS in levels else entries


def _tensor_entries(trace: RequestTrace) -> Iterator[dict[str, Any]]:
    """Yield the entries in Triton's trace file for the traced tensors, each input once.

    An ensemble's input is traced again by each step that reads it.
    """
    inputs = {(t.span_id, t.name): t for t in trace.tensors if not t.is_output}
    outputs = [tensor_entry for tensor_entry in trace.tensors if tensor_entry.is_output]
    span_ids = {span.span_id for span in trace.spans}
    for span_id, is_output, name, datatype, shape, data in [*inputs.values(), *outputs]:
        if span_id in span_ids:
            activity = "TENSOR_BACKEND_OUTPUT" if is_output else "TENSOR_QUEUE_INPUT"
            tensor_entry = {"name": name, "data": data, "shape": shape, "dtype": datatype}
            yield {"id": _entry_id(span_id), "activity": activity, "tensor": tensor_entry}


def _timestamp_entries(trace: RequestTrace, protocol: str) -> list[dict[str, Any]]:
    responded_ns = trace.responded_ns or trace.ended_ns
    receive_events: list[tuple[str, int]] = []
    send_events: list[tuple[str, int]] = []
    if protocol:
        receive_name, send_name = _ACTIVITIES[protocol]
        receive_events = [
            (f"{receive_name}_START", trace.arrived_ns),
            (f"{receive_name}_END", trace.submitted_ns),
        ]
        send_events = [(f"{send_name}_START", responded_ns), (f"{send_name}_END", trace.ended_ns)]
    root_span_id = trace.scheduler_context.span_id
    entries: list[dict[str, Any]] = []
    for span in trace.spans:
        timestamps = _span_timestamps(span)
        if span.span_id == root_span_id:
            start_timestamp = ("REQUEST_START", trace.submitted_ns)
            timestamps = [*receive_events, start_timestamp, *timestamps[1:], *send_events]
        parent_id = "" if span.span_id == root_span_id else span.parent_id
        span_fields = (span.span_id, span.model, span.version, span.request_id)
        entries += _span_entries(*span_fields, parent_id, timestamps)
    if not entries:  # the request failed before a scheduler recorded a span
        timestamps = [*receive_events, ("REQUEST_START", trace.submitted_ns)]
        timestamps += [("REQUEST_END", responded_ns), *send_events]
        span_fields = (root_span_id, trace.model, trace.version, trace.request_id)
        entries = _span_entries(*span_fields, "", timestamps)
    return entries


def _span_timestamps(span: Span) -> list[tuple[str, int]]:
    compute_timestamps = [(name, getattr(span, field)) for name, field in _COMPUTE_ACTIVITIES]
    return [
        ("REQUEST_START", span.arrived_ns),
        ("QUEUE_START", span.enqueued_ns),
        *(compute_timestamps if span.compute_start_ns else ()),
        ("INFER_RESPONSE_COMPLETE", span.responded_ns),
        ("REQUEST_END", span.responded_ns),
    ]


def _span_entries(
    span_id: str,
    model: str,
    version: str,
    request_id: str,
    parent_id: str,
    timestamps: list[tuple[str, int]],
) -> list[dict[str, Any]]:
    entry_id = _entry_id(span_id)
    entry: dict[str, Any] = {"id": entry_id, "model_name": model, "model_version": int(version)}
    if request_id:
        entry["request_id"] = request_id
    if parent_id:
        entry["parent_id"] = _entry_id(parent_id)
    return [entry, {"id": entry_id, "timestamps": [{"name": n, "ns": ns} for n, ns in timestamps]}]


def _entry_id(span_id: str) -> int:
    return int(span_id[:_ENTRY_ID_DIGITS], 16)
