"""Messages to clients about their requests: sent, counted, and ordered if the model requires it.

relay    a response that is not the last
end      the last response of a decoupled model
finish   the outcome of an execution (ordered if the model preserves ordering)
fail     an error out of order: rejection, deadline, cancellation
close    the return of a request that was ended before
abandon  the exit of the client
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from shmserve.ipc.memory.lent import unread_releases
from shmserve.ipc.messages.inference import (
    ExecutionResponded,
    Failed,
    Finished,
    ReleaseOutputs,
    Reply,
    Responded,
    Settled,
    Submit,
)
from shmserve.ipc.tensors.schemas import Packed
from shmserve.ipc.trace import Span, TraceContext
from shmserve.scheduler.requests.scheduled import (
    AT_WORK,
    NO_SUBMIT,
    Event,
    Outcome,
    ScheduledRequest,
    State,
    Timing,
    WorkerLinks,
)
from shmserve.scheduler.response_cache import ResponseCache
from shmserve.scheduler.statistics import Reason, Statistics

# Ended requests are removed from the order of responses when there are about this many of them.
_MAX_ENDED_IN_ORDER = 1024
_UNDECIDED_STATES = AT_WORK | {State.QUEUED}
_ORDERED_STATES = _UNDECIDED_STATES | {State.HELD}
_NOT_EXECUTED = Timing(0, 0, 0, 0)


@dataclass(eq=False)
class Responses:
    """The sender of messages to clients.

    `live_count` is the number of requests that are not done; `cache` keeps responses for equal
    requests.
    """

    _workers: WorkerLinks
    _statistics: Statistics
    _preserves_order: bool
    cache: ResponseCache | None = None
    _ordered_requests: deque[ScheduledRequest] = field(default_factory=deque)
    live_count: int = 0

    def register(self, request: ScheduledRequest) -> None:
        """Register a request that must receive a response."""
        request.client.requests[request.id] = request
        self.live_count += 1
        if self._preserves_order:
            self._ordered_requests.append(request)

    def relay(self, request: ScheduledRequest, message: ExecutionResponded) -> None:
        """Send a response that is not the last."""
        if request.state is State.EXECUTING:
            request.transition(Event.RESPOND)
        request.response_count += 1
        request.client.post(
            Responded(
                request.id, message.code, message.message, message.schema, message.data, False
            )
        )

    def end(
        self,
        request: ScheduledRequest,
        final_message: ExecutionResponded | Reply,
        unfinished_timing: Timing,
        now_ns: int,
    ) -> None:
        """Send the final message about a request of a decoupled model.

        As in Triton, an error that the model sent is a response and its request a success; an error
        that it raised is a failure. If the execution has not returned, its times are
        `unfinished_timing`.
        """
        if final_message.code and (
            isinstance(final_message, Reply) or final_message.request_failed
        ):
            reason = Reason.CANCELED if final_message.code == "CANCELLED" else Reason.BACKEND
            self._statistics.count_failure(request.arrived_ns, reason, now_ns)
        else:
            self._statistics.count_success(request, request.timing, now_ns)
        request.transition(Event.FINISH)
        timing = request.timing or unfinished_timing
        spans = self._spans(request, timing, now_ns) if request.submit.trace else b""
        if spans and isinstance(final_message, ExecutionResponded):
            spans += final_message.spans
        fields = (
            final_message.code,
            final_message.message,
            final_message.schema,
            final_message.data,
            True,
            *timing[1:4],
        )
        request.client.post(Responded(request.id, *fields, spans=spans))
        self._remove(request)

    def finish(
        self,
        request: ScheduledRequest,
        code: str,
        text: str,
        response: Packed,
        timing: Timing | None,
        now_ns: int,
    ) -> None:
        """End an executing request with its outcome, or hold the outcome until its turn.

        An empty `code` is success. `timing` is None if the worker died.
        """
        lookup = request.lookup
        if request.state is not State.HELD:
            if lookup is not None and lookup.key and self.cache is not None and not code:
                insert_ns = self.cache.insert(lookup.key, response)
                self._statistics.count_miss(lookup.duration_ns, insert_ns, now_ns)
            if self._preserves_order:
                request.transition(Event.HOLD)
                request.outcome = Outcome(code, text, response, timing)
                return
        if code or timing is None:
            reason = Reason.CANCELED if code == "CANCELLED" else Reason.BACKEND
            self.fail(request, code, text, reason, now_ns, timing=timing)
            return
        if lookup is not None and lookup.is_hit and self.cache is not None:
            self.cache.lend(request.client.pid, lookup)
            queued_ns = timing[0] - request.enqueued_ns
            self._statistics.count_hit(request.arrived_ns, queued_ns, lookup.duration_ns, now_ns)
        else:
            self._statistics.count_success(request, timing, now_ns)
        request.transition(Event.FINISH)
        spans = self._spans(request, timing, now_ns) if request.submit.trace else b""
        _, input_ns, infer_ns, output_ns, *_ = timing
        request.client.post(Finished(request.id, *response, input_ns, infer_ns, output_ns, spans))
        self._remove(request)

    def send_held_outcomes(self, now_ns: int) -> None:
        """Send the held outcomes whose turn has come."""
        ordered_requests = self._ordered_requests
        while ordered_requests and ordered_requests[0].state not in _UNDECIDED_STATES:
            request = ordered_requests.popleft()
            if request.state is State.HELD:
                outcome, request.outcome = request.outcome, None
                assert outcome is not None  # every HELD request has an outcome
                self.finish(request, *outcome, now_ns)
                now_ns += 1  # so that the times in traces have the order of the responses

    def sweep(self) -> None:
        """Remove ended requests from the list of ordered responses if there are many.

        They would otherwise accumulate behind a live request that takes long.
        """
        if len(self._ordered_requests) > 2 * self.live_count + _MAX_ENDED_IN_ORDER:
            self._ordered_requests = deque(
                [r for r in self._ordered_requests if r.state in _ORDERED_STATES]
            )

    def _spans(self, request: ScheduledRequest, timing: Timing | None, now_ns: int) -> bytes:
        times = (request.arrived_ns, request.enqueued_ns, timing, now_ns)
        return spans_of(self._statistics, request.submit, *times)

    def fail(
        self,
        request: ScheduledRequest,
        code: str,
        message: str,
        reason: Reason,
        now_ns: int,
        is_early: bool = False,
        timing: Timing | None = None,
    ) -> None:
        """End a request with an error now.

        If `is_early`, a worker still has the request, and `close` follows.
        """
        self._statistics.count_failure(request.arrived_ns, reason, now_ns)
        request.transition(Event.FAIL_EARLY if is_early else Event.FINISH)
        spans = self._spans(request, timing, now_ns) if request.submit.trace else b""
        request.client.post(Failed(request.id, code, message, 0, is_early, spans))
        if not is_early:
            self._release_held(request)
            self._remove(request)

    def close(self, request: ScheduledRequest, now_ns: int) -> None:
        """End a request whose result is not used, after its worker has returned it."""
        match request.state:
            case State.CANCELLED:
                self.fail(request, "CANCELLED", "request cancelled", Reason.CANCELED, now_ns)
            case State.FAILED_EARLY:
                request.transition(Event.SETTLE)
                request.client.post(Settled(request.id))
                self._remove(request)
            case _:
                request.transition(Event.SETTLE)
                self._remove(request)

    def abandon(self, request: ScheduledRequest, now_ns: int) -> None:
        """End a request whose client has exited; its worker, if any, still returns it."""
        if request.state is not State.FAILED_EARLY:
            self._statistics.count_failure(request.arrived_ns, Reason.CANCELED, now_ns)
        request.transition(Event.ABANDON)
        if request.state is State.DONE:
            self._release_held(request)
            self._remove(request)

    def release_outputs(self, request: ScheduledRequest, data: list[Any]) -> None:
        """Release the outputs in a worker's memory that no client will read."""
        worker = request.worker
        for release in unread_releases(data):
            if worker is not None and release.pid == worker.pid:
                message = ReleaseOutputs(request.client.pid, release.offsets, release.memory)
                self._workers.post(worker.peer, message)

    def _release_held(self, request: ScheduledRequest) -> None:
        outcome, request.outcome = request.outcome, None
        if outcome is None:
            return
        if request.lookup is not None:
            request.lookup.cancel()
        self.release_outputs(request, outcome.response[1])

    def _remove(self, request: ScheduledRequest) -> None:
        self.live_count -= 1
        request.submit = NO_SUBMIT
        del request.client.requests[request.id]


def spans_of(
    statistics: Statistics,
    submit: Submit,
    arrived_ns: int,
    enqueued_ns: int,
    timing: Timing | None,
    now_ns: int,
) -> bytes:
    """Return the packed span of a request that ends now, followed by the spans of its execution.

    Returns:
        The `spans` of `Finished`; empty if the request is not traced.
    """
    if not submit.trace:
        return b""
    start_ns, input_ns, infer_ns, output_ns, rows, close_reason, spans = timing or _NOT_EXECUTED
    context = TraceContext.of(submit.trace)
    span = Span(
        context.span_id,
        context.parent_id,
        *statistics.model_key,
        submit.request_id,
        arrived_ns,
        enqueued_ns,
        start_ns,
        start_ns + input_ns,
        start_ns + input_ns + infer_ns,
        start_ns + input_ns + infer_ns + output_ns,
        now_ns,
        rows,
        close_reason,
    )
    return span.packed() + spans
