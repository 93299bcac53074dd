"""Messages of inference: between clients and a scheduler, and between that and its workers."""

from __future__ import annotations

from dataclasses import field
from typing import Any, ClassVar

from shmserve.ipc.transport.frames import message
from shmserve.ipc.transport.records import record

# A reply's code: the model asks for the request again (iterative sequences only).
RESCHEDULED = "RESCHEDULED"


@message
class Submit:
    """Run this request; `schema` and `data` are an `Inference`, see ipc/tensors/inference.py.

    `request_id` is the client's own; it may be empty. `timeout_us` is the request's own limit,
    `deadline_ns` (monotonic clock) when nobody waits any more; 0: none. The sequence that
    it belongs to is `correlation_id`, or `correlation_text` where that is a text; 0 and "": none.
    `flags` say whether it is the first of it, or the last (SEQUENCE_START, SEQUENCE_END). `source`
    tells apart those who come through one gateway, by a number of its own: only of such a request.
    With a `trace`, as ipc/trace.py has it, its times are told with its response.
    """

    id: int
    schema: bytes
    data: list[Any]
    arrived_ns: int
    deadline_ns: int
    timeout_us: int
    priority: int
    request_id: str = ""
    flags: int = 0
    correlation_id: int = 0
    correlation_text: str = ""
    source: int = 0
    trace: str = ""


@message
class Cancel:
    """The cancellation of a request for which nobody waits any more; or, `listening`, which its
    model should end, of which the client takes what comes until it does."""

    id: int
    listening: bool = False


@message
class Credit:
    """The client has read so many responses of this request, and takes as many more."""

    TAG: ClassVar[str] = "Grant"  # the protocol's name for it since its first version

    id: int
    responses: int


@message
class Release:
    """The outputs at these offsets of a process's memory have been read. `memory` is that memory's
    id: a process that hosts schedulers has several."""

    pid: int
    offsets: list[int]
    memory: int = field(default=0, compare=False)


@message
class ReportStatistics:
    """Respond with `StatisticsReported`."""

    id: int


@message
class Finished:
    """The request succeeded; `schema` and `data` are an `Inferred`. Its execution took so many ns
    by phase: input, inference, output. `spans` of one with a `trace` are as ipc/trace.py has
    them."""

    id: int
    schema: bytes
    data: list[Any]
    input_ns: int = field(default=0, compare=False)
    infer_ns: int = field(default=0, compare=False)
    output_ns: int = field(default=0, compare=False)
    spans: bytes = field(default=b"", compare=False)


@message
class Responded:
    """One of any number of responses to a request: an `Inferred`, or, with a `code`, an error for
    the client. An empty `schema` without a code is no response, only the end.

    `final`: nothing follows, and no worker has the request any more; its execution took so many ns
    by phase, as in `Finished`, which has `spans`, too.
    """

    id: int
    code: str
    message: str
    schema: bytes
    data: list[Any]
    final: bool
    input_ns: int = field(default=0, compare=False)
    infer_ns: int = field(default=0, compare=False)
    output_ns: int = field(default=0, compare=False)
    spans: bytes = field(default=b"", compare=False)


@message
class Failed:
    """The request failed; `message` is for the client. `retry_after_s` 0: no hint.

    `early`: a worker still has the request (its deadline passed there), so its memory stays in use
    until `Settled`.
    """

    id: int
    code: str
    message: str
    retry_after_s: int
    early: bool


@message
class Settled:
    """No worker has the request any more, whose `Failed` came early."""

    id: int


@message
class StatisticsReported:
    """A model version's counters: see shmserve/scheduler/statistics.py for the keys."""

    id: int
    statistics: dict[str, Any]


@record
class Work:
    """A request as a worker gets it; `schema` and `data` are an `Inference`, and the other fields
    are those of `Submit`. What the model asks of other models on its behalf ends at the deadline
    too."""

    key: int
    client_pid: int
    schema: bytes
    data: list[Any]
    request_id: str = ""
    flags: int = 0
    correlation_id: int = 0
    correlation_text: str = ""
    timeout_us: int = 0
    priority: int = 0
    deadline_ns: int = 0
    trace: str = ""

    @property
    def sequence(self) -> int | str:
        """The sequence's id, 0 for none."""
        return self.correlation_text or self.correlation_id


@record
class Reply:
    """A batch's result for a request; `code` "" is success, and `schema` and `data` then an
    `Inferred`."""

    key: int
    code: str
    message: str
    schema: bytes = b""
    data: list[Any] = field(default_factory=list)


@record
class SequenceRow:
    """A row of a batch of sequences: the request `key` with its sequence, whose state is in `slot`.
    With `key` 0 it is a null row: nobody's, there because a model wants no gap between slots."""

    slot: int
    key: int
    flags: int = 0
    correlation_id: int = 0
    correlation_text: str = ""


@message
class Execute:
    """Run a batch, in order; `live`: how many requests the scheduler has under way, these among
    them. With `rows`, which every batch of sequences has, these say where in the batch they are."""

    batch: int
    requests: list[Work]
    live: int = 1
    rows: list[SequenceRow] = field(default_factory=list)


@message
class EndSequences:
    """The sequences in these slots are over, and no END of theirs has run: their states go."""

    slots: list[int]


@message
class CancelExecution:
    """Do not write this request's outputs: nobody waits. Or, `listening`: as in `Cancel`."""

    key: int
    listening: bool = False


@message
class CreditExecution:
    """The client of this request takes so many more responses."""

    key: int
    responses: int


@message
class ReleaseOutputs:
    """These offsets of the worker's arena, the memory with this id, have been read by process
    `client_pid`."""

    client_pid: int
    offsets: list[int]
    memory: int = field(default=0, compare=False)


@message
class ReaderExited:
    """Process `pid` has ended, and the scheduler does not look any more at what it was lent."""

    pid: int


@message
class InstanceReady:
    """A loaded instance (index within its model) offers itself for batches."""

    index: int
    pid: int


@message
class BatchFinished:
    """A batch ended, and the instance takes the next. Times are monotonic ns. Requests of a model
    that gives any number of responses have no reply where an `ExecutionResponded` ends them, now
    or later. `copied_in`, `copied_out`: bytes of tensors that were copied. `executed`: whether the
    model was asked at all. `spans`: of what it has asked other models, as ipc/trace.py has them."""

    batch: int
    compute_start_ns: int
    input_end_ns: int
    output_start_ns: int
    compute_end_ns: int
    replies: list[Reply]
    copied_in: int = 0
    copied_out: int = 0
    executed: bool = True
    spans: bytes = b""


@message
class ExecutionResponded:
    """A response of a model that gives any number of them, as `Responded` has it. Times are
    monotonic ns: when the model gave it, and when its outputs were written. `failed`: the request
    has ended by a failure, not by an error that its model chose to send."""

    key: int
    code: str
    message: str
    schema: bytes
    data: list[Any]
    final: bool
    given_ns: int
    written_ns: int
    copied_out: int = 0
    failed: bool = False


@message
class MetricsReported:
    """An instance's model has changed metrics of its own: all of them, since the process began.
    shmserve.common.model_metrics says what `families` are."""

    families: list[list[Any]]


Response = Finished | Responded | Failed  # to a request

# A limit on time beyond this, in microseconds, is as good as this: its deadline is a number still.
LONGEST_TIMEOUT_US = 10**15


def make_submit(
    number: int,
    schema: bytes,
    data: list[Any],
    arrived_ns: int,
    *,
    request_id: str = "",
    priority: int = 0,
    timeout_us: int = 0,
    limit_us: int = 0,
    call_limit_us: int = 0,
    ends_ns: int = 0,
    flags: int = 0,
    correlation_id: int | str = 0,
    source: int = 0,
    trace: str = "",
) -> Submit:
    """Return the message that submits a request, of this schema and these data.

    The deadline is the shortest of the request's own `timeout_us`, the server's `limit_us` and the
    call's `call_limit_us`, which count from the arrival, and the caller's end `ends_ns` (monotonic
    clock); 0: none.
    """
    if timeout_us > LONGEST_TIMEOUT_US:
        timeout_us = LONGEST_TIMEOUT_US
    shortest_us = timeout_us
    if limit_us and (not shortest_us or limit_us < shortest_us):
        shortest_us = limit_us
    if call_limit_us and (not shortest_us or call_limit_us < shortest_us):
        shortest_us = min(call_limit_us, LONGEST_TIMEOUT_US)
    deadline_ns = ends_ns
    if shortest_us:
        deadline_ns = arrived_ns + shortest_us * 1000
        if ends_ns:
            deadline_ns = min(deadline_ns, ends_ns)
    sequence, text = correlation_fields(correlation_id) if correlation_id else (0, "")
    return Submit(
        number,
        schema,
        data,
        arrived_ns,
        deadline_ns,
        timeout_us,
        priority,
        request_id,
        flags,
        sequence,
        text,
        source,
        trace,
    )


def correlation_fields(correlation_id: int | str) -> tuple[int, str]:
    """A sequence's id as messages carry it: `correlation_id` and `correlation_text`."""
    return (correlation_id, "") if isinstance(correlation_id, int) else (0, correlation_id)


def message_size(submit: Submit) -> int:
    """Return the bytes of a request's message, about: its schema and its inline tensors."""
    return len(submit.schema) + sum([len(each) for each in submit.data if type(each) is bytes])
