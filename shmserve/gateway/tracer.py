"""Traces of requests: explanations, log lines, Triton's trace file, and OpenTelemetry spans.

    begin ──> Submit.trace ... response ──on_response──> explanation, if requested ──> finish
                                                          log, file, collector <─────────┘

The trace file is a JSON array. Each request has an entry with its names and an entry with its
timestamps (monotonic ns). Requests of an ensemble's steps and of models that call models have such
entries, too. Several gateways write to the file. Each write holds a lock and leaves a complete
array.
"""

from __future__ import annotations

import asyncio
import fcntl
import gc
import json
import logging
import os
from contextlib import suppress
from itertools import repeat
from pathlib import Path
from typing import Any

from shmserve.common.trace_settings import OPENTELEMETRY, Sampler, Samplers, TraceSettings
from shmserve.gateway.request_trace import RequestTrace, trace_entries
from shmserve.ipc.messages.supervision import RequestTraced
from shmserve.ipc.trace import TraceContext

logger = logging.getLogger(__name__)


_NS_PER_MS = 1_000_000
_WRITE_DELAY_S = 1.0  # A trace waits this long to be written together with later traces.


def append_entries(path: str, entries: list[dict[str, Any]]) -> None:
    """Append entries to the JSON array in a file, which is created if it is missing.

    Raises:
        OSError: The file cannot be written.
        ValueError: The file does not end with a JSON array.
    """
    encoded_entries = json.dumps(entries)[1:-1].encode()
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not file.seek(0, os.SEEK_END):
            file.write(b"[" + encoded_entries + b"]")
            return
        file.seek(-1, os.SEEK_END)
        if file.read() != b"]":
            raise ValueError("the file does not end with a JSON array of traces")
        file.seek(-1, os.SEEK_END)
        file.write(b"," + encoded_entries + b"]")


def create_next_file(path: str) -> str:
    """Create the next of the files PATH.0, PATH.1, ..., and return its path."""
    file_number = 0
    while True:
        numbered_path = f"{path}.{file_number}"
        with suppress(FileExistsError):
            Path(numbered_path).touch(exist_ok=False)
            return numbered_path
        file_number += 1


class Tracer:
    """The traces of a gateway.

    Attributes:
        is_active: Whether requests that do not ask for a trace may be traced.
    """

    def __init__(self, slow_request_ms: int = 0, protocol: str = "HTTP") -> None:
        """Create a tracer, whose trace settings `apply_settings` sets.

        Args:
            slow_request_ms: The duration from which requests are logged; 0 logs none.
            protocol: "HTTP" or "GRPC".
        """
        self._slow_request_ns = slow_request_ms * _NS_PER_MS
        self._protocol = protocol
        self._samplers = Samplers()
        self._write_timer: asyncio.TimerHandle | None = None
        self._exporter: Any = None  # an otel.Exporter if the settings enable OpenTelemetry
        self.is_active = self._slow_request_ns > 0

    def apply_settings(self, settings: dict[str, dict[str, Any]]) -> None:
        """Apply settings by model; "" has the settings of all other models."""
        self._write_all()
        self._samplers.set(settings)
        default_settings = TraceSettings(**settings[""])
        if default_settings.trace_mode == OPENTELEMETRY and self._exporter is None:
            # OpenTelemetry is an optional dependency, and slow to import.
            from shmserve.gateway.otel import Exporter

            self._exporter = Exporter(default_settings.exporter)
            gc.freeze()  # later garbage collections skip the imported modules
        self.is_active = self._slow_request_ns > 0 or self._samplers.is_on

    def begin_trace(
        self,
        model: str,
        version: str,
        request_id: str,
        arrived_ns: int,
        traceparent: str,
        has_explanation: bool,
    ) -> RequestTrace | None:
        """Return the trace of a request before it is submitted; None if it is not traced."""
        parent = TraceContext.of_header(traceparent) if traceparent else None
        sampler = self._samplers.of(model)
        is_sampled = sampler.should_trace(None if parent is None else parent.is_sampled)
        if not (has_explanation or is_sampled or parent or self._slow_request_ns):
            return None
        if parent is None:
            context = TraceContext.new(is_sampled)
        else:
            context = parent.child(is_sampled or parent.is_sampled)
        context = context._replace(with_tensors=is_sampled and sampler.settings.with_tensors)
        request_fields = (model, version, request_id, context, arrived_ns)
        return RequestTrace(self.finish, *request_fields, has_explanation, is_sampled)

    def record_local_request(self, message: RequestTraced) -> None:
        """Record the trace of a local client's request, which no gateway has received."""
        scheduler_context = TraceContext.of(message.trace)
        context = scheduler_context._replace(span_id=os.urandom(8).hex())
        request_fields = (message.model, message.version, message.request_id, context)
        trace = RequestTrace(
            self.finish, *request_fields, message.arrived_ns, False, message.is_sampled, True
        )
        trace.scheduler_context, trace.submitted_ns = scheduler_context, message.arrived_ns
        trace.ended_ns, trace.error = message.ended_ns, message.error
        trace.read_spans(message.spans)
        self.finish(trace)

    def finish(self, trace: RequestTrace) -> None:
        """Log, export or write the trace of a request that has ended."""
        if self._slow_request_ns and trace.ended_ns - trace.arrived_ns > self._slow_request_ns:
            _log_slow(trace)
        if trace.is_sampled and self._exporter is not None:
            self._exporter.export(trace)
        elif trace.is_sampled:
            sampler = self._samplers.of(trace.model)
            sampler.pending.append(trace)
            if len(sampler.pending) == sampler.settings.log_frequency:
                self._write(sampler)
            elif self._write_timer is None:
                loop = asyncio.get_running_loop()
                self._write_timer = loop.call_later(_WRITE_DELAY_S, self._write_all)

    def close(self) -> None:
        """Write or send the pending traces."""
        self._write_all()
        if self._exporter is not None:
            self._exporter.close()

    def _write_all(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        for sampler in self._samplers.all:
            if sampler.pending:
                self._write(sampler)

    def _write(self, sampler: Sampler) -> None:
        traces, sampler.pending = sampler.pending, []
        settings = sampler.settings
        path = settings.trace_file
        if not path:
            return
        protocols = ("" if trace.is_local else self._protocol for trace in traces)
        entry_lists = map(trace_entries, traces, protocols, repeat(settings.trace_level))
        entries = [entry for entries in entry_lists for entry in entries]
        if not entries:
            return
        try:
            append_entries(create_next_file(path) if settings.log_frequency else path, entries)
        except (OSError, ValueError) as error:
            logger.error(
                "%d traces are lost, because file '%s' cannot be written: %s",
                len(traces),
                path,
                error,
            )


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
