"""Traces of requests: explanations, log lines, Triton's trace file, and OpenTelemetry spans.

    Tracer.begin ──> RequestTrace; its span id travels in `Submit.trace`
    response ──> RequestTrace.on_response ──> an explanation in the response, if requested
    response sent ──> RequestTrace.finish ──> Tracer.finish: log, trace file or collector (otel.py)

The trace file is a JSON array. Each request has one entry with its names and one entry with its
timestamps (monotonic ns). The steps of an ensemble and the calls between models have the same two
entries. Several gateways append to one file: each write holds a lock and leaves a complete array.
"""

from __future__ import annotations

import asyncio
import fcntl
import gc
import itertools
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from pathlib import Path
from typing import Any

from shmserve.common.trace_settings import (
    OPENTELEMETRY,
    TENSORS,
    TIMESTAMPS,
    Sampler,
    Samplers,
    TraceSettings,
)
from shmserve.ipc.messages.inference import Failed, Responded, Response
from shmserve.ipc.messages.supervision import RequestTraced
from shmserve.ipc.tensors.inference import Inferred
from shmserve.ipc.trace import Span, TraceContext, TracedTensor, explain, unpack_spans, within

logger = logging.getLogger(__name__)

_ID_DIGITS = 13  # of 16, since not every JSON parser has integers of 64 bits
_OF_PROTOCOL = {"HTTP": ("HTTP_RECV", "HTTP_SEND"), "GRPC": ("GRPC_WAITREAD", "GRPC_SEND")}
_EXECUTED = (
    ("COMPUTE_START", "compute_start_ns"),
    ("COMPUTE_INPUT_END", "input_end_ns"),
    ("COMPUTE_OUTPUT_START", "output_start_ns"),
    ("COMPUTE_END", "compute_end_ns"),
)


@dataclass(slots=True, eq=False)
class RequestTrace:
    """The trace of one request. Times are monotonic ns; 0 means that the event is still to happen.

    Attributes:
        on_end: The callback for the end of the request.
        context: The gateway's span.
        scheduler: The scheduler's span.
        spans: The scheduler's span and the spans within it, once the response has arrived.
        tensors: The traced inputs and outputs of these spans.
        explained: Whether the response contains an explanation.
        sampled: Whether the trace is written to the file or sent to the collector.
        local: Whether a scheduler received the request from a program on this host.
        error: The message of the error, if the request failed.
    """

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
    responded_ns: int = 0
    ended_ns: int = 0
    spans: list[Span] = field(default_factory=list)
    tensors: list[TracedTensor] = field(default_factory=list)
    error: str = ""

    def __post_init__(self) -> None:
        self.scheduler = self.context.child()

    def on_response(self, message: Response) -> None:
        """Record the last response."""
        self.responded_ns = time.monotonic_ns()
        if isinstance(message, Failed | Responded) and message.code:
            self.error = message.message
        if not isinstance(message, Failed) and message.spans:
            self.read_spans(message.spans)

    def read_spans(self, spans: bytes) -> None:
        """Record the spans of the last response."""
        self.spans = within(unpack_spans(spans, self.tensors), self.scheduler.span_id)

    def explanation(self, now_ns: int) -> dict[str, Any]:
        """Return the durations of the phases until `now_ns`, as `ipc.trace.explain` does."""
        times = (self.arrived_ns, self.submitted_ns, now_ns)
        return explain(self.spans, self.scheduler.span_id, *times)

    def explain(self, inferred: Inferred) -> Inferred:
        """Return the response, with an explanation if the request asked for one."""
        if not self.explained:
            return inferred
        added = {"explanation": self.explanation(time.monotonic_ns())}
        return replace(inferred, parameters=inferred.parameters | added)

    def finish(self, error: str = "") -> None:
        """Record the end of the request. The first call and the first error count."""
        if not self.ended_ns:
            self.ended_ns, self.error = time.monotonic_ns(), self.error or error
            self.on_end(self)

    def on_disconnect(self) -> None:
        """Record that the client has disconnected, unless the request has ended."""
        self.finish("its client has gone")


def entries_of(
    trace: RequestTrace, protocol: str, level: Sequence[str] = (TIMESTAMPS,)
) -> list[dict[str, Any]]:
    """Return the entries of a request that has ended, which the trace `level` selects.

    The first and last timestamps have the names of the `protocol`; a local request has none ("").
    """
    made = _timestamps(trace, protocol) if TIMESTAMPS in level else []
    return [*made, *_tensors(trace)] if TENSORS in level else made


def _tensors(trace: RequestTrace) -> Iterator[dict[str, Any]]:
    """Yield the entries of tensors; an input is recorded with each response of a request."""
    inputs = {(each.span_id, each.name): each for each in trace.tensors if not each.is_output}
    outputs = [each for each in trace.tensors if each.is_output]
    own = {span.span_id for span in trace.spans}
    for span_id, is_output, name, datatype, shape, data in [*inputs.values(), *outputs]:
        if span_id in own:
            activity = "TENSOR_BACKEND_OUTPUT" if is_output else "TENSOR_QUEUE_INPUT"
            tensor = {"name": name, "data": data, "shape": shape, "dtype": datatype}
            yield {"id": _number(span_id), "activity": activity, "tensor": tensor}


def _timestamps(trace: RequestTrace, protocol: str) -> list[dict[str, Any]]:
    responded_ns = trace.responded_ns or trace.ended_ns
    own: list[tuple[str, int]] = []
    ends: list[tuple[str, int]] = []
    if protocol:
        receive, send = _OF_PROTOCOL[protocol]
        own = [(f"{receive}_START", trace.arrived_ns), (f"{receive}_END", trace.submitted_ns)]
        ends = [(f"{send}_START", responded_ns), (f"{send}_END", trace.ended_ns)]
    root = trace.scheduler.span_id
    made: list[dict[str, Any]] = []
    for span in trace.spans:
        stamps = _stamps(span)
        if span.span_id == root:
            stamps = [*own, ("REQUEST_START", trace.submitted_ns), *stamps[1:], *ends]
        parent = "" if span.span_id == root else span.parent_id
        made += _entry(span.span_id, span.model, span.version, span.request_id, parent, stamps)
    if not made:  # The request has failed.
        stamps = [*own, ("REQUEST_START", trace.submitted_ns), ("REQUEST_END", responded_ns), *ends]
        made = _entry(root, trace.model, trace.version, trace.request_id, "", stamps)
    return made


def _stamps(span: Span) -> list[tuple[str, int]]:
    executed = [(name, getattr(span, field)) for name, field in _EXECUTED]
    return [
        ("REQUEST_START", span.arrived_ns),
        ("QUEUE_START", span.enqueued_ns),
        *(executed if span.compute_start_ns else ()),
        ("INFER_RESPONSE_COMPLETE", span.responded_ns),
        ("REQUEST_END", span.responded_ns),
    ]


def _entry(
    span_id: str,
    model: str,
    version: str,
    request_id: str,
    parent_id: str,
    stamps: list[tuple[str, int]],
) -> list[dict[str, Any]]:
    number = _number(span_id)
    about: dict[str, Any] = {"id": number, "model_name": model, "model_version": int(version)}
    if request_id:
        about["request_id"] = request_id
    if parent_id:
        about["parent_id"] = _number(parent_id)
    return [about, {"id": number, "timestamps": [{"name": n, "ns": ns} for n, ns in stamps]}]


def _number(span_id: str) -> int:
    return int(span_id[:_ID_DIGITS], 16)


_NS_PER_MS = 1_000_000
_HELD_S = 1.0  # A trace waits this long to be written together with later traces.


def append_entries(path: str, entries: list[dict[str, Any]]) -> None:
    """Append entries to the JSON array in a file, which is created if it is missing.

    Raises:
        OSError: The file cannot be written.
        ValueError: The file does not end with a JSON array.
    """
    text = json.dumps(entries)[1:-1].encode()
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not file.seek(0, os.SEEK_END):
            file.write(b"[" + text + b"]")
            return
        file.seek(-1, os.SEEK_END)
        if file.read() != b"]":
            raise ValueError("it is no array of traces")
        file.seek(-1, os.SEEK_END)
        file.write(b"," + text + b"]")


def next_file(path: str) -> str:
    """Create the next of the files PATH.0, PATH.1, ..., and return its path."""
    for number in itertools.count():
        name = f"{path}.{number}"
        try:
            Path(name).touch(exist_ok=False)
        except FileExistsError:
            continue
        return name
    raise AssertionError  # unreachable


class Tracer:
    """The traces of a gateway.

    Attributes:
        active: Whether requests are traced that do not ask for a trace.
    """

    def __init__(self, slow_request_ms: int = 0, protocol: str = "HTTP") -> None:
        """Create a tracer without settings.

        Args:
            slow_request_ms: The duration from which requests are logged; 0 logs none.
            protocol: "HTTP" or "GRPC".
        """
        self._slow_ns = slow_request_ms * _NS_PER_MS
        self._protocol = protocol
        self._samplers = Samplers()
        self._writing: asyncio.TimerHandle | None = None
        self._exporter: Any = None  # otel.Exporter, if settings ask for it
        self.active = self._slow_ns > 0

    def use(self, settings: dict[str, dict[str, Any]]) -> None:
        """Apply settings by model; "" has the settings of all other models."""
        self._write_all()
        self._samplers.set(settings)
        common = TraceSettings(**settings[""])
        if common.trace_mode == OPENTELEMETRY and self._exporter is None:
            # OpenTelemetry is an optional dependency, and slow to import.
            from shmserve.gateway.otel import Exporter

            self._exporter = Exporter(common.exporter)
            gc.freeze()  # The garbage collector need not scan the modules.
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
        """Return the trace of a request that is about to be submitted, or None."""
        caller = TraceContext.of_header(traceparent) if traceparent else None
        sampler = self._samplers.of(model)
        sampled = sampler.samples(None if caller is None else caller.sampled)
        if not (explained or sampled or caller or self._slow_ns):
            return None
        if caller is None:
            context = TraceContext.new(sampled)
        else:
            context = caller.child(sampled or caller.sampled)
        context = context._replace(tensors=sampled and sampler.settings.with_tensors)
        of_model = (model, version, request_id)
        return RequestTrace(self.finish, *of_model, context, arrived_ns, explained, sampled)

    def take(self, message: RequestTraced) -> None:
        """Record the trace of a local client's request, which no gateway has received."""
        own = TraceContext.of(message.trace)
        context = own._replace(span_id=os.urandom(8).hex())
        of_model = (message.model, message.version, message.request_id)
        trace = RequestTrace(
            self.finish, *of_model, context, message.arrived_ns, False, message.sampled, True
        )
        trace.scheduler, trace.submitted_ns = own, message.arrived_ns
        trace.ended_ns, trace.error = message.ended_ns, message.error
        trace.read_spans(message.spans)
        self.finish(trace)

    def finish(self, trace: RequestTrace) -> None:
        """Log, export or write the trace of a request that has ended."""
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
        """Write or send the pending traces."""
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
        made = map(entries_of, traces, protocols, repeat(settings.trace_level))
        entries = [each for entries in made for each in entries]
        if not entries:
            return
        try:
            append_entries(next_file(path) if settings.log_frequency else path, entries)
        except (OSError, ValueError) as error:
            logger.error("%d traces cannot be written to '%s': %s", len(traces), path, error)


def _log_slow(trace: RequestTrace) -> None:
    durations = trace.explanation(trace.ended_ns)
    if trace.responded_ns:
        durations["encode_us"] = (trace.ended_ns - trace.responded_ns) // 1000
    if trace.error:
        durations["error"] = trace.error
    logger.warning(
        "inference of model '%s' was slow: %s",
        trace.model,
        json.dumps(durations),
        extra={"request_id": trace.request_id, "trace_id": trace.context.trace_id},
    )
