"""Response streams of decoupled models, and reports of a model's own metrics.

send ──> credit? ──> scatter ──> ExecutionResponded

A stream sends any number of responses to one request, from any thread. The first and the final
response are sent immediately. Other responses may be sent together (see `InstanceLink.flush_soon`).

`send` blocks while the client has not read earlier responses (back-pressure). After
`MAX_CREDIT_WAIT_S` the request fails, so that it no longer holds resources.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shmserve.errors import Internal, ShmserveError, Unavailable
from shmserve.ipc.messages.inference import ExecutionResponded, MetricsReported, Reply
from shmserve.ipc.tensors.schemas import Packed, byte_size_of
from shmserve.workers.batch.backend_request import Request, Response
from shmserve.workers.batch.scatter import MAX_TRACED_CHARS, Scatterer
from shmserve.workers.context import ModelContext, client_error
from shmserve.workers.links import InstanceLink, Timer, WorkerRequest

_REPORT_INTERVAL_S = 0.1
_REPORT_DELAY_NS = 1_000_000
_BURST_REPORTS = 100  # number of reports without a delay


class MetricsReports:
    """Reports of a model's own metrics to the scheduler.

    A change is reported before the next response, so a client that has received the response finds
    the change in the metrics. Threads of a model may change metrics at any time. These changes are
    reported between batches, at most every `_REPORT_INTERVAL_S`. A model may read the metrics page
    during its execution. Up to `_BURST_REPORTS` changes are therefore reported immediately (token
    bucket), and further changes at the rate of the reports between batches.
    """

    def __init__(
        self, collect_changes: Callable[[], list[list[Any]] | None], link: InstanceLink
    ) -> None:
        # Returns all metric families if a metric has changed since the last call.
        self._collect_changes = collect_changes
        self._link = link
        self._last_report: MetricsReported | None = None
        self._next_report_s = 0.0
        # Tokens of the bucket, and the time of its last refill.
        self._tokens, self._refilled_s = float(_BURST_REPORTS), 0.0
        self.timer = Timer(_REPORT_DELAY_NS, self._send)

    def report_change(self, at_once: bool) -> None:
        """Report a change; safe in any thread.

        Args:
            at_once: Whether this call reports the change. The garbage collector passes False,
                and a timer then reports the change.
        """
        if at_once:
            self._send()
        else:
            self.timer.start()

    def _send(self) -> None:
        now_s = time.monotonic()
        new_tokens = (now_s - self._refilled_s) / _REPORT_INTERVAL_S
        self._tokens = min(_BURST_REPORTS, self._tokens + new_tokens)
        self._refilled_s = now_s
        if self._tokens < 1:
            return
        with self._link.lock:
            # `attach` reports the changes of warm-up requests, which run before the link exists.
            if self._link.connected and self.post_changes():
                self._tokens -= 1
                self._link.flush()

    def attach(self) -> None:
        """Post all metrics to a scheduler that has just been attached."""
        with self._link.lock:
            if not self.post_changes() and self._last_report is not None:
                self._link.post(self._last_report)

    def post_changes(self) -> bool:
        """Post changed metrics; return whether there were any. Needs the link's lock."""
        families = self._collect_changes()
        if families is not None:
            self._last_report = MetricsReported(families)
            self._link.post(self._last_report)
        return families is not None

    def send_if_due(self) -> float | None:
        """Send changed metrics unless a report was sent recently.

        Returns:
            The seconds until the next call, or None if no metric has changed.
        """
        now_s = time.monotonic()
        if now_s < self._next_report_s:
            return self._next_report_s - now_s
        with self._link.lock:
            if not self.post_changes():
                return None
            self._link.flush()
        self._next_report_s = now_s + _REPORT_INTERVAL_S
        return _REPORT_INTERVAL_S


MAX_CREDIT_WAIT_S = 30.0
_NO_FINAL_RESPONSE = Internal(
    "the model released the request's response sender without a final response"
)


def unread_responses() -> Unavailable:
    """Return the error of a request whose client reads no responses."""
    return Unavailable(
        f"the client has read no response for {MAX_CREDIT_WAIT_S:g} s; no more responses are sent"
    )


@dataclass(frozen=True, slots=True)
class ResponseWriter:
    """The shared parts of the response streams of an instance, used under the link's lock.

    Attributes:
        abandoned_streams: The streams that the model has dropped without a final response, with the
            exception that was raised, if it is known. The loop ends these streams.
    """

    link: InstanceLink
    scatterer: Scatterer
    metrics: MetricsReports
    context: ModelContext
    abandoned_streams: deque[tuple[OutputStream, BaseException | None]] = field(
        default_factory=deque
    )

    def refuse(self, open_request: WorkerRequest, error: ShmserveError) -> None:
        """Send the error of a request that could not be read, and end the request."""
        now_ns = time.monotonic_ns()
        with self.link.lock:
            if self.link.is_open(open_request):
                self.link.close_requests(open_request)
                self.link.send(
                    ExecutionResponded(
                        open_request.key,
                        error.code,
                        error.message,
                        b"",
                        [],
                        final=True,
                        computed_ns=now_ns,
                        written_ns=now_ns,
                        request_failed=True,
                    )
                )

    def end_abandoned(self) -> None:
        """End the streams that the model has dropped."""
        while self.abandoned_streams:
            stream, error = self.abandoned_streams.popleft()
            stream.end_abandoned(error)


class OutputStream:
    """The responses to one `request`; safe to use in any thread.

    If the client does not read further responses, only the final response is sent.
    """

    __slots__ = (
        *("_is_closed", "_open_request", "_timed_out", "_has_sent", "_traced_tensors", "_writer"),
        *("request", "is_rescheduled"),
    )

    def __init__(
        self, writer: ResponseWriter, open_request: WorkerRequest, request: Request
    ) -> None:
        self.request = request
        self._writer = writer
        self._open_request = open_request
        self._has_sent = False
        self._is_closed = False
        self._traced_tensors = b""  # packed tensors of a traced request
        self._timed_out = False  # whether the client has read no response for too long
        self.is_rescheduled = False
        open_request.open_window(bool(request.memory_ranges))

    @property
    def is_closed(self) -> bool:
        """Return whether the model has ended the stream or failed, and must send no more responses.

        A stream that was ended because its client reads nothing counts as cancelled, not as closed.
        """
        return self._is_closed and not self._timed_out

    def is_cancelled(self) -> bool:
        """Check whether the request was cancelled, after reading pending messages."""
        return self._writer.link.is_cancelled(self._open_request)

    def send(self, response: Response | None = None, final: bool = False) -> None:
        """Send a response; block until the client has granted credit.

        The outputs may be reused when the method returns. If the response cannot be written, an
        error is sent instead.

        Args:
            response: The response, or None to send only the end of the stream.
            final: Whether to end the stream.
        """
        computed_ns = time.monotonic_ns()
        link, open_request = self._writer.link, self._open_request
        while True:
            with link.lock:
                if self._is_closed:
                    return
                if open_request.reader_gone:
                    response = None
                if response is None or open_request.window.is_open:
                    is_first = not self._has_sent
                    if response is not None or final:
                        self._post(response, final, computed_ns, request_failed=False)
                    break
            if not link.wait_for_credit(open_request, MAX_CREDIT_WAIT_S):
                self._time_out()
                return
        if is_first and not final:
            # Let the processes that forward the response run; the model would keep this core busy.
            os.sched_yield()

    @property
    def may_send(self) -> bool:
        """Return whether `send` would return without blocking."""
        return (
            self._is_closed or self._open_request.reader_gone or self._open_request.window.is_open
        )

    def on_cancel(self, listener: Callable[[], object]) -> None:
        """Register a function that is called when the request is cancelled, in any thread."""
        with self._writer.link.lock:
            self._open_request.on_cancel = listener
            if self._open_request.cancelled:
                listener()

    def on_credit(self, listener: Callable[[], object]) -> None:
        """Register a function that is called, in any thread, when the client grants credit."""
        self._open_request.on_credit = listener

    def fail(self, error: ShmserveError) -> None:
        """Fail the request with an error, unless it has ended."""
        with self._writer.link.lock:
            if not self._is_closed:
                self._post(Response(error=error), True, time.monotonic_ns(), request_failed=True)

    def fail_raised(self, error: BaseException) -> None:
        """Fail the request with an exception of the model or the server."""
        self.fail(self.client_error(error))

    def refuse(self, error: ShmserveError) -> Reply | None:
        """Fail the request; return the error as a reply of its batch if no response was sent.

        Otherwise call `fail`, and return None.
        """
        with self._writer.link.lock:
            if self._is_closed or self._has_sent:
                self.fail(error)
                return None
            self._trace_inputs()
            self._end()
            return Reply(self._open_request.key, error.code, error.message)

    def reschedule(self) -> None:
        """End the stream because the model asks to execute the request again.

        The batch reports the request as rescheduled, and another stream continues it.
        """
        with self._writer.link.lock:
            if not self._is_closed:
                self.is_rescheduled = True
                self._end()

    def abandon(self, error: BaseException | None = None) -> None:
        """Request the loop to end the stream, because the model has released all its senders.

        The garbage collector may call this method at any time.

        Args:
            error: The exception that the sending thread has raised, if known.
        """
        if not self._is_closed:
            self._writer.abandoned_streams.append((self, error))
            self._writer.context.control.wake(includes_loop_thread=True)

    def end_abandoned(self, error: BaseException | None) -> None:
        """Fail a stream that the model has dropped; a cancelled stream just ends."""
        if self.is_cancelled():
            self.send(final=True)
        else:
            self.fail(_NO_FINAL_RESPONSE if error is None else self.client_error(error))

    def _time_out(self) -> None:
        with self._writer.link.lock:
            if not self._is_closed:
                self.fail(unread_responses())
                self._timed_out = True
                self._open_request.cancel()

    def _post(
        self, response: Response | None, final: bool, computed_ns: int, request_failed: bool
    ) -> None:
        """Write a response and send it, with the lock held."""
        writer = self._writer
        counter, memory = writer.context.copy_counter, writer.context.output_memory
        code = message = ""
        packed_outputs: Packed = (b"", [])
        copied_bytes_before = counter.outputs
        self._trace_inputs()
        if response is not None and response.error is not None:
            code, message = response.error.code, response.error.message
        elif response is not None:
            try:
                packed_outputs = writer.scatterer.write(self.request, response)
                writer.scatterer.finish_writes()
            except BaseException as error:
                failure = self.client_error(error)
                code, message = failure.code, failure.message
                request_failed = final
        copied_bytes = counter.outputs - copied_bytes_before
        counter.outputs = copied_bytes_before
        if self.request.work.trace and len(self._traced_tensors) < MAX_TRACED_CHARS:
            self._traced_tensors += b"".join(writer.context.spans)
            writer.context.spans.clear()
        is_sent = False
        if writer.link.is_open(self._open_request):
            writer.metrics.post_changes()
            writer.link.post(
                ExecutionResponded(
                    self._open_request.key,
                    code,
                    message,
                    *packed_outputs,
                    final,
                    computed_ns,
                    time.monotonic_ns(),
                    copied_bytes,
                    request_failed,
                    self._traced_tensors if final else b"",
                )
            )
            # A response with arena memory is flushed now, so that a failure frees its blocks.
            may_delay = self._has_sent and not final and not memory.unsent
            is_sent = writer.link.flush_soon() if may_delay else writer.link.flush()
        if not is_sent:
            memory.free_unsent()
        elif memory.unsent:
            memory.mark_sent()
        if response is not None:
            self._has_sent = True
            self._open_request.window.record_sent(byte_size_of(packed_outputs[1]))
        if final:
            self._end()

    def _trace_inputs(self) -> None:
        """Record the inputs before the first response, if the request is traced."""
        if self.request.work.trace and not self._has_sent:
            self._writer.scatterer.trace(self.request, self.request.inputs.values())

    def client_error(self, error: BaseException) -> ShmserveError:
        """Return the error for the client, given an exception of the model or of a write."""
        try:
            return client_error(self._writer.context, error, self.request.work)
        except BaseException as device_error:
            # The loop ends the process when it receives the error.
            self._writer.context.control.inbox.append(device_error)
            self._writer.context.control.wake(includes_loop_thread=True)
            return Unavailable("the device of the model was lost")

    def _end(self) -> None:
        self._is_closed = True
        self._writer.link.close_requests(self._open_request)


class WarmupStream(OutputStream):
    """A stream that drops its responses; `error` is the first error among them."""

    __slots__ = ("_end_event", "error")

    def __init__(self, writer: ResponseWriter, request: Request) -> None:
        super().__init__(writer, WorkerRequest(request.work), request)
        self.error: ShmserveError | None = None
        self._end_event = threading.Event()

    def wait(self) -> None:
        """Wait until the model has ended the stream."""
        self._end_event.wait()
        self._writer.end_abandoned()

    def refuse(self, error: ShmserveError) -> Reply | None:
        self.fail(error)
        return None

    def abandon(self, error: BaseException | None = None) -> None:
        super().abandon(error)
        self._end_event.set()

    def _post(
        self, response: Response | None, final: bool, computed_ns: int, request_failed: bool
    ) -> None:
        if response is not None and response.error is not None:
            self.error = self.error or response.error
        if final:
            self._end()

    def _end(self) -> None:
        super()._end()
        self._end_event.set()
