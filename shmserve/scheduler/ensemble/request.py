"""The requests of an ensemble: their states, their ends, and the messages to their clients.

    RUNNING ──FAIL──> FAILED ──REPORT──> REPORTED: `Settled` must follow
       │                │                   │
       └──ABANDON──> ABANDONED <────────────┘     each ──END──> DONE

A failed request begins no further steps. When none of its steps is in flight, its error is sent and
the request ends. If the deadline expires, the error is sent without waiting for the steps.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum, auto
from functools import partial
from typing import Any, NamedTuple

from shmserve.errors import IllegalEvent, Unavailable
from shmserve.ipc.credit import SendWindow
from shmserve.ipc.messages.inference import (
    ExecutionResponded,
    Failed,
    Finished,
    Responded,
    Settled,
    Submit,
)
from shmserve.ipc.tensors.descriptors import Range, TensorRef, pack_range
from shmserve.ipc.tensors.schemas import (
    SEQUENCE_END,
    SEQUENCE_START,
    BoundedCache,
    Packed,
    inline_size_of,
    pack_response_schema,
)
from shmserve.ipc.tensors.signature import Signature, client_shape
from shmserve.ipc.timers import Timers
from shmserve.scheduler.batchers import CloseReason
from shmserve.scheduler.ensemble.flow import Flow
from shmserve.scheduler.ensemble.memory import EnsembleMemory, TensorKind, Value, combined_override
from shmserve.scheduler.requests.queue import expired_text, plausible_arrival_ns
from shmserve.scheduler.requests.responses import spans_of
from shmserve.scheduler.requests.scheduled import CACHED, EMPTY_RESPONSE, Client, Lookup, Timing
from shmserve.scheduler.response_cache import ResponseCache
from shmserve.scheduler.statistics import Reason, Statistics

logger = logging.getLogger(__name__)

_MAX_SCHEMAS = 64


class EnsembleState(StrEnum):
    """The states of an ensemble's request."""

    RUNNING = auto()
    FAILED = auto()  # an error must still be sent
    REPORTED = auto()  # the error was sent while steps were in flight: `Settled` must still be sent
    ABANDONED = auto()  # the client has exited: nothing must be sent
    DONE = auto()


class EnsembleEvent(StrEnum):
    """An event that changes the state of an ensemble's request."""

    FAIL = auto()
    REPORT = auto()
    ABANDON = auto()
    END = auto()


# The transitions of every state except DONE.
_END_TRANSITIONS = {
    EnsembleEvent.ABANDON: EnsembleState.ABANDONED,
    EnsembleEvent.END: EnsembleState.DONE,
}
TRANSITIONS: Mapping[EnsembleState, Mapping[EnsembleEvent, EnsembleState]] = {
    EnsembleState.RUNNING: {EnsembleEvent.FAIL: EnsembleState.FAILED, **_END_TRANSITIONS},
    EnsembleState.FAILED: {EnsembleEvent.REPORT: EnsembleState.REPORTED, **_END_TRANSITIONS},
    EnsembleState.REPORTED: _END_TRANSITIONS,
    EnsembleState.ABANDONED: _END_TRANSITIONS,
    EnsembleState.DONE: {},
}
# A module constant, because looking up a member of an enumeration takes longer.
RUNNING = EnsembleState.RUNNING


class RequestProperties(NamedTuple):
    """The properties of a request that its schema determines.

    Attributes:
        inputs: The name and kind of each input, and whether it is a condition.
        omitted_inputs: The inputs that the request omits.
        outputs: The outputs that the request asks for.
        parameters: The parameters that the request passes to its steps.
        schema_for_steps: The schema if its ranges or parameters affect the steps' requests.
        rows: The batch size.
    """

    entry_count: int  # number of entries in the request's `data`
    inputs: tuple[tuple[str, TensorKind, bool], ...]
    omitted_inputs: tuple[tuple[str, Value], ...]
    outputs: tuple[str, ...]  # the requested outputs
    placed_outputs: tuple[str, ...]  # outputs with ranges of the client's memory
    parameters: dict[str, Any]  # parameters that are passed to the steps
    schema_for_steps: bytes  # the schema if it affects the steps' requests; else empty
    rows: int


@dataclass(slots=True, eq=False)
class EnsembleRequest:
    """A request of an ensemble. Times are monotonic ns, durations ns.

    Attributes:
        properties: The properties that the request's schema determines.
        memory_ranges: The ranges of the client's memory for outputs, by the output's name.
        lookup: The result of the lookup in the response cache, if there was one.
        running_ids: The numbers of the steps' requests in flight.
        failure: The error, once the request has failed.
        input_ns: The sum of the steps' input phases; `infer_ns` and `output_ns` likewise.
        unread_responses: The responses of a stream that the client has not read.
        response_count: The number of responses of a stream that were sent.
        responded_ns: The time of the last of these responses, or of the start.
        succeeded_early: Unused; `Statistics` sets it for other kinds of requests.
    """

    client: Client[EnsembleRequest]
    submit: Submit
    properties: RequestProperties
    memory_ranges: dict[str, Range]
    flow: Flow
    lookup: Lookup | None
    arrived_ns: int
    enqueued_ns: int
    deadline_ns: int
    responded_ns: int
    rows: int
    running_ids: set[int] = field(default_factory=set)  # step requests in flight
    state: EnsembleState = RUNNING
    waiting_count: int = 0  # steps that wait because of `max_inflight_requests`
    failure: Failed | None = None
    input_ns: int = 0  # total of the steps' input phases
    infer_ns: int = 0  # total of their inference phases
    output_ns: int = 0  # total of their output phases
    spans: bytes = b""  # the packed trace spans of the steps
    unread_responses: UnreadResponses | None = None  # of a stream
    response_count: int = 0
    succeeded_early: bool = False  # unused: `Statistics` sets it for other requests

    def transition(self, event: EnsembleEvent) -> EnsembleState:
        """Apply an event: move to the next state and return the previous one.

        Raises:
            IllegalEvent: The event is not allowed in this state. Nothing changes.
        """
        previous_state = self.state
        try:
            self.state = TRANSITIONS[previous_state][event]
        except KeyError:
            raise IllegalEvent(f"event {event.name} in state {previous_state.name}") from None
        return previous_state


class UnreadResponses:
    """The responses of a stream that its client has not read, oldest first."""

    __slots__ = ("_values", "_window")

    def __init__(self, in_client_memory: bool) -> None:
        self._window = SendWindow(in_client_memory)
        self._values: deque[list[Value]] = deque()

    @property
    def is_open(self) -> bool:
        """Return whether the client can receive another response."""
        return self._window.is_open

    def add(self, values: Iterable[Value], byte_size: int) -> None:
        """Record a response that is sent; its values are released once it is read."""
        self._window.record_sent(byte_size)
        self._values.append(list(values))

    def read(self, read_count: int) -> None:
        """Release the oldest `read_count` responses, which the client has read."""
        for _ in range(self._window.record_credit(read_count)):
            _release(self._values.popleft())

    def close(self) -> None:
        """Release all responses."""
        while self._values:
            _release(self._values.popleft())


@dataclass(eq=False)
class EnsembleRequests:
    """The requests of an ensemble that have not ended.

    Attributes:
        changed_requests: The requests that have changed since the last turn.
        timers: The deadlines.
        open_count: The number of requests.
    """

    _name: str
    _signature: Signature
    _is_decoupled: bool
    _memory: EnsembleMemory
    _statistics: Statistics
    _cache: ResponseCache | None
    changed_requests: dict[EnsembleRequest, None] = field(default_factory=dict)
    open_count: int = 0
    _warned_tensors: set[str] = field(default_factory=set)
    # Packed response schemas by the kinds of the tensors, their names, and the sequence.
    _schemas: BoundedCache[Any, bytes] = field(default_factory=partial(BoundedCache, _MAX_SCHEMAS))

    def __post_init__(self) -> None:
        self.timers: Timers[EnsembleRequest] = Timers(
            lambda request: request.state is EnsembleState.DONE
        )

    def add(self, request: EnsembleRequest) -> None:
        """Register an admitted request."""
        request.client.requests[request.submit.id] = request
        self.open_count += 1
        self.changed_requests[request] = None
        if request.deadline_ns:
            self.timers.add(request.deadline_ns, request)

    # --- failures ---------------------------------------------------------------------------------

    def fail(
        self, request: EnsembleRequest, code: str, text: str, now_ns: int, retry_after_s: int = 0
    ) -> None:
        """Fail a request unless it has failed before."""
        self.changed_requests[request] = None
        if request.state is not RUNNING:
            return
        request.transition(EnsembleEvent.FAIL)
        text = self.error_text(text)
        request.failure = Failed(request.submit.id, code, text, retry_after_s, False)
        reason = Reason.CANCELED if code == "CANCELLED" else Reason.OTHER
        self._statistics.count_failure(request.arrived_ns, reason, now_ns)

    def error_text(self, text: str) -> str:
        """Return an error text in the form that clients receive."""
        return f"in ensemble '{self._name}', {text}"

    def report_early(self, request: EnsembleRequest) -> None:
        """Send the error of a failed request whose steps are in flight; `Settled` follows."""
        if request.state is EnsembleState.FAILED and request.running_ids:
            self._report(request, is_early=True)

    def abandon(self, request: EnsembleRequest, now_ns: int) -> None:
        """Fail a request whose client has exited."""
        if request.failure is None:
            self._statistics.count_failure(request.arrived_ns, Reason.CANCELED, now_ns)
        request.transition(EnsembleEvent.ABANDON)
        self.changed_requests[request] = None

    def stop(self, request: EnsembleRequest, text: str, now_ns: int) -> None:
        """Fail a request immediately because the scheduler stops."""
        self.fail(request, Unavailable.code, text, now_ns)
        if request.state is EnsembleState.FAILED:
            self._report(request, is_early=False)

    def expire(self, now_ns: int) -> list[EnsembleRequest]:
        """Fail the requests whose deadlines have expired, and return them."""
        expired_requests = self.timers.take_expired(now_ns)
        for request in expired_requests:
            text = expired_text(request.submit, request.arrived_ns, request.deadline_ns)
            self.fail(request, Unavailable.code, text, now_ns)
            self.report_early(request)
        return expired_requests

    def _report(self, request: EnsembleRequest, is_early: bool) -> None:
        request.transition(EnsembleEvent.REPORT)
        assert request.failure is not None
        request.client.post(replace(request.failure, early=is_early))

    # --- responses --------------------------------------------------------------------------------

    def relay(self, request: EnsembleRequest, now_ns: int) -> None:
        """Send the responses of a stream, as many as the client can receive."""
        responses = request.flow.responses
        if not responses:
            return
        unread = request.unread_responses
        if unread is None:
            unread = request.unread_responses = UnreadResponses(bool(request.memory_ranges))
        while responses and unread.is_open:
            response = responses.pop(0)
            schema, data = self._pack_response(request, response)
            unread.add(response.values(), len(schema) + inline_size_of(data))
            self._count_response(request, schema, final=False, now_ns=now_ns)
            request.response_count += 1
            request.client.post(Responded(request.submit.id, "", "", schema, data, final=False))

    def credit(self, request: EnsembleRequest, read_count: int) -> None:
        """Release the responses of a stream that the client has read."""
        if request.unread_responses is not None:
            request.unread_responses.read(read_count)
        self.changed_requests[request] = None

    def end(self, request: EnsembleRequest, now_ns: int) -> None:
        """End a request that has no steps in flight, and send the final message to its client."""
        match request.transition(EnsembleEvent.END):
            case EnsembleState.RUNNING:
                self._succeed(request, now_ns)
            case EnsembleState.FAILED:
                assert request.failure is not None
                spans = self._encode_spans(request, now_ns) if request.submit.trace else b""
                request.client.post(replace(request.failure, spans=spans))
            case EnsembleState.REPORTED:
                request.client.post(Settled(request.submit.id))
        del request.client.requests[request.submit.id]
        self.open_count -= 1
        if request.unread_responses is not None:
            request.unread_responses.close()
        request.flow.close()

    def _succeed(self, request: EnsembleRequest, now_ns: int) -> None:
        flow, submit = request.flow, request.submit
        if flow.absent_outputs:
            self._warn_absent(flow.absent_outputs)
        times_ns = (request.input_ns, request.infer_ns, request.output_ns)
        timing = Timing(request.enqueued_ns, *times_ns)
        self._statistics.count_execution(CloseReason.IDLE, request.rows, timing, now_ns)
        packed_response = EMPTY_RESPONSE
        if self._is_decoupled:
            self._count_response(request, b"", final=True, now_ns=now_ns)
        else:
            response = flow.responses.pop()
            packed_response = self._pack_response(request, response)
            _release(response.values())
            self._insert_into_cache(request, packed_response, now_ns)
        self._statistics.count_success(request, timing, now_ns)
        spans = self._encode_spans(request, now_ns) if submit.trace else b""
        if self._is_decoupled:
            end_message = Responded(submit.id, "", "", *packed_response, True, *times_ns, spans)
            request.client.post(end_message)
        else:
            request.client.post(Finished(submit.id, *packed_response, *times_ns, spans))

    def _encode_spans(self, request: EnsembleRequest, now_ns: int) -> bytes:
        timing = Timing(0, 0, 0, 0, request.rows, spans=request.spans)
        times = (request.arrived_ns, request.enqueued_ns, timing, now_ns)
        return spans_of(self._statistics, request.submit, *times)

    def _warn_absent(self, tensors: set[str]) -> None:
        for tensor in tensors - self._warned_tensors:
            self._warned_tensors.add(tensor)
            logger.warning(self.error_text(f"composing models did not output tensor {tensor}"))

    def serve_cached(
        self, client: Client[EnsembleRequest], submit: Submit, lookup: Lookup, now_ns: int
    ) -> None:
        """Send the cached response to a request; no step runs."""
        assert self._cache is not None
        self._cache.lend(client.pid, lookup)
        arrived_ns = plausible_arrival_ns(submit.arrived_ns, now_ns)
        self._statistics.count_hit(arrived_ns, 0, lookup.duration_ns, now_ns)
        times = (arrived_ns, now_ns, Timing(now_ns, 0, 0, 0, close_reason=CACHED), now_ns)
        spans = spans_of(self._statistics, submit, *times)
        client.post(Finished(submit.id, *lookup.response, spans=spans))

    def _insert_into_cache(self, request: EnsembleRequest, response: Packed, now_ns: int) -> None:
        lookup = request.lookup
        if lookup is not None and self._cache is not None:
            insert_ns = self._cache.insert(lookup.key, response)
            self._statistics.count_miss(lookup.duration_ns, insert_ns, now_ns)

    def _count_response(
        self, request: EnsembleRequest, schema: bytes, final: bool, now_ns: int
    ) -> None:
        response = ExecutionResponded(0, "", "", schema, [], final, now_ns, now_ns)
        self._statistics.count_response(request, response, now_ns)

    def _pack_response(self, request: EnsembleRequest, response: dict[str, Value]) -> Packed:
        """Return a response's schema and data, and lend the client the memory that it reads."""
        data: list[Any] = []
        sequence = step_sequence(request.submit, combined_override(response.values()))
        key_parts: list[Any] = [sequence]
        for name, value in response.items():
            key_parts += (name, value.kind)
            content = value.data
            if type(content) is bytes:
                data.append(content)
                continue
            assert isinstance(content, Range)
            data.append(pack_range(content))
            if name not in request.memory_ranges:
                value.acquire()
                self._memory.lent_memory.lend(request.client.pid, content, value)
        schema_key = tuple(key_parts)
        schema = self._schemas.find(schema_key)
        if schema is None:
            schema = self._response_schema(response, *sequence)
            self._schemas.store(schema_key, schema)
        return schema, data

    def _response_schema(
        self, response: dict[str, Value], correlation_id: int | str, flags: int
    ) -> bytes:
        is_batched, outputs = self._signature.max_batch_size > 0, self._signature.outputs
        tensors = []
        for name, value in response.items():
            if (kind := value.kind) is not None:
                spec = outputs[name]
                model_shape = kind.shape_for(spec.model_dims, is_batched)
                shape = client_shape(spec, model_shape, is_batched)
                tensors.append(TensorRef(name, kind.datatype, shape, b""))
        parameters = {
            "sequence_id": correlation_id,
            "sequence_start": bool(flags & SEQUENCE_START),
            "sequence_end": bool(flags & SEQUENCE_END),
        }
        return pack_response_schema(tensors, parameters)


def step_sequence(submit: Submit, sequence_override: Mapping[str, Any]) -> tuple[int | str, int]:
    """Return the correlation id and the sequence flags for a step's request or a response.

    Args:
        submit: The request to the ensemble.
        sequence_override: The sequence parameters in the responses that contained the tensors; they
            have precedence over the request's.
    """
    correlation_id: int | str = submit.correlation_text or submit.correlation_id
    flags = submit.flags
    if sequence_override:
        correlation_id = sequence_override.get("sequence_id", correlation_id)
        for key, bit in (("sequence_start", SEQUENCE_START), ("sequence_end", SEQUENCE_END)):
            if key in sequence_override:
                flags = flags | bit if sequence_override[key] else flags & ~bit
    return correlation_id, flags


def _release(values: Iterable[Value]) -> None:
    for value in values:
        value.release()
