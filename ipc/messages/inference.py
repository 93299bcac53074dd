"""Messages of inference: between clients and a scheduler, and between a scheduler and workers."""

from __future__ import annotations

import re
from dataclasses import field
from typing import Any, ClassVar, NamedTuple

from shmserve.ipc.transport.frames import Message, Record

# The code of a reply by which a model reschedules a request (iterative sequences only).
RESCHEDULED = "RESCHEDULED"
_CALLER_LINE = re.compile(r"^([0-9]{1,19})/([0-9]{1,19})/(.+)$", re.MULTILINE)


class Submit(Message):
    """Sent by a client to a scheduler to execute a request.

    Attributes:
        id: The request's number on this link.
        schema: The schema of an `Inference` (ipc/tensors/schemas.py).
        data: The data of that `Inference`.
        arrived_ns: The arrival time (monotonic clock).
        deadline_ns: The time after which no client waits (monotonic clock); 0: none.
        timeout_us: The parameter `timeout` of the request; 0: none.
        priority: The priority level; 0: the model's default.
        request_id: The client's id, which may be empty.
        flags: SEQUENCE_START and SEQUENCE_END for the first and last request of a sequence.
        correlation_id: The sequence, if its id is a number; 0: none.
        correlation_text: The sequence, if its id is a string; "": none.
        source: A number that distinguishes clients of one gateway; only for requests of sequences.
        trace: The trace context (ipc/trace.py) if the response should contain spans, or "".
        deadline_origin: The origin of the deadline, for the error of an expired request; "": the
            caller.
        callers: The executions that wait for the response, as `Caller` lines; "": none.
    """

    id: int  # number of the request on this link
    schema: bytes  # of the tensors
    data: list[Any]  # bytes or memory ranges of the tensors
    arrived_ns: int
    deadline_ns: int  # monotonic; 0: none
    timeout_us: int  # 0: none
    priority: int  # 0: the model's default
    request_id: str = ""
    flags: int = 0  # start and end of a sequence
    correlation_id: int = 0  # of a sequence; 0: none
    correlation_text: str = ""
    source: int = 0  # number of the client at a gateway
    trace: str = ""  # trace context, or ""
    deadline_origin: str = ""  # for the error of an expired request
    callers: str = ""  # executions that wait, as `Caller` lines


class Caller(NamedTuple):
    """An execution that waits for a call of another model.

    Attributes:
        pid: The process of the instance.
        key: The key of one of its requests.
        model: The name of the model.
    """

    pid: int
    key: int  # of the request
    model: str

    @property
    def line(self) -> str:
        """Return the caller as a line of `Submit.callers`."""
        return f"{self.pid}/{self.key}/{self.model}"

    @classmethod
    def parse(cls, lines: str) -> list[Caller]:
        """Return the callers in `Submit.callers`, the first one first."""
        return [cls(int(pid), int(key), model) for pid, key, model in _CALLER_LINE.findall(lines)]


class Cancel(Message):
    """Sent by a client to a scheduler to cancel a request.

    With `keeps_reading`, the model should end the request, and the client still reads the
    remaining responses. Otherwise the client has disconnected.
    """

    id: int  # number of the request
    keeps_reading: bool = False  # whether responses are still read


class Credit(Message):
    """Sent by a client to a scheduler when it has read responses of a decoupled model.

    The model may send `responses` further responses to the request.
    """

    TAG: ClassVar[str] = "Grant"  # the wire name since version 1 of the protocol

    id: int  # number of the request
    responses: int  # number of responses that were read


class Release(Message):
    """Sent by a client to a scheduler when it has read outputs in the memory of process `pid`.

    The blocks at these offsets are then freed. `memory` is the id of the memory, because a process
    that hosts schedulers has several.
    """

    pid: int  # process that holds the memory
    offsets: list[int]  # of the outputs
    memory: int = field(default=0, compare=False)  # id of the memory


class ReportStatistics(Message):
    """Sent by a gateway to a scheduler to request `StatisticsReported`."""

    id: int


class Finished(Message):
    """Sent by a scheduler to a client when a request has succeeded.

    `schema` and `data` are an `Inferred`. The times are the durations of the phases of its
    execution. A request with a `trace` has `spans` (ipc/trace.py).
    """

    id: int  # number of the request
    schema: bytes
    data: list[Any]  # of the outputs
    input_ns: int = field(default=0, compare=False)  # time for the inputs
    infer_ns: int = field(default=0, compare=False)  # time in the model
    output_ns: int = field(default=0, compare=False)  # time for the outputs
    spans: bytes = field(default=b"", compare=False)  # of the trace, packed


class Responded(Message):
    """Sent by a scheduler to a client for each response of a decoupled model.

    The response is an `Inferred`, or an error for the client if `code` is set. A message with
    neither a `schema` nor a code contains no response and only marks the end. `final` means that
    no response follows and no worker has the request any more. Only a final message has the
    durations of the phases and the `spans`, as in `Finished`.
    """

    id: int  # number of the request
    code: str  # of an error; "": none
    message: str
    schema: bytes
    data: list[Any]  # of the outputs
    final: bool  # whether this response is the last
    input_ns: int = field(default=0, compare=False)
    infer_ns: int = field(default=0, compare=False)
    output_ns: int = field(default=0, compare=False)
    spans: bytes = field(default=b"", compare=False)


class Failed(Message):
    """Sent by a scheduler to a client when a request has failed; `message` is for the client.

    `retry_after_s` is a hint for the client; 0: none. `early` means that the deadline expired while
    a worker had the request; the request's memory then remains in use until `Settled`. `spans` are
    as in `Finished`. `is_refused` means that the scheduler did not admit the request.
    """

    id: int  # number of the request
    code: str
    message: str
    retry_after_s: int  # 0: no advice
    early: bool  # the deadline expired while a worker had the request
    spans: bytes = field(default=b"", compare=False)
    is_refused: bool = field(default=False, compare=False)  # whether the request was not admitted


class Settled(Message):
    """Sent by a scheduler to a client when no worker uses the memory of a failed request any more.

    `Failed` was sent earlier, with `early` set. The client now frees the memory of the request.
    """

    id: int  # number of the request


class StatisticsReported(Message):
    """Sent by a scheduler to a gateway with the counters of its model version.

    shmserve/scheduler/statistics.py documents the keys.
    """

    id: int
    statistics: dict[str, Any]


class Work(Record):
    """A request in a message to a worker; `schema` and `data` are an `Inference`.

    `key` is the request's number at the scheduler, and `client_pid` the client's process. The other
    fields are copied from `Submit`. The deadline also applies to the calls that the model makes.
    """

    key: int  # id of the request at the scheduler
    client_pid: int  # the reader of the outputs
    schema: bytes
    data: list[Any]  # of the tensors
    request_id: str = ""
    flags: int = 0  # start and end of a sequence
    correlation_id: int = 0  # of a sequence; 0: none
    correlation_text: str = ""
    timeout_us: int = 0
    priority: int = 0
    deadline_ns: int = 0
    trace: str = ""
    callers: str = ""  # executions that wait for the response

    @property
    def sequence(self) -> int | str:
        """Return the sequence's id; 0: none."""
        return self.correlation_text or self.correlation_id


class Reply(Record):
    """The result of the request `key` of a batch.

    If `code` is empty the request has succeeded, and `schema` and `data` are an `Inferred`.
    """

    key: int  # of the request
    code: str  # of an error; "": none
    message: str
    schema: bytes = b""
    data: list[Any] = field(default_factory=list)  # of the outputs


class SequenceRow(Record):
    """A row of a batch of sequences: the request `key`, and the slot of its sequence's state.

    A row with `key` 0 has no request and fills a gap between slots.
    """

    slot: int  # of the sequence's state
    key: int  # of the request; 0: none
    flags: int = 0  # start and end of a sequence
    correlation_id: int = 0  # of a sequence; 0: none
    correlation_text: str = ""


class Execute(Message):
    """Sent by a scheduler to a worker to execute a batch, in order.

    Attributes:
        batch: The number of the batch.
        requests: The requests.
        in_flight: The number of requests in flight at the scheduler, including these.
        rows: For a batch of sequences, the rows, which refer to the requests.
    """

    batch: int  # number of the batch
    requests: list[Work]
    in_flight: int = 1  # number of requests at the scheduler
    rows: list[SequenceRow] = field(default_factory=list)


class EndSequences(Message):
    """Sent by a scheduler to a worker when sequences have ended without an END request.

    The worker releases the states in these slots.
    """

    slots: list[int]  # of the sequences


class CancelExecution(Message):
    """Sent by a scheduler to a worker when the request `key` was cancelled.

    The worker does not write the outputs of the request. `keeps_reading` is as in `Cancel`.
    """

    key: int  # of the request
    keeps_reading: bool = False  # whether responses are still read


class CreditExecution(Message):
    """Sent by a scheduler to a worker when the client of request `key` has sent `Credit`.

    The model may send `responses` further responses to the request.
    """

    key: int  # of the request
    responses: int  # number of responses that were read


class ReleaseOutputs(Message):
    """Sent by a scheduler to a worker when process `client_pid` has read the worker's outputs.

    The worker frees the blocks at these offsets of its arena, whose id is `memory`.
    """

    client_pid: int  # of the reader
    offsets: list[int]  # of the outputs
    memory: int = field(default=0, compare=False)  # id of the memory


class ReaderExited(Message):
    """Sent by a scheduler to a worker after process `pid` has exited.

    The worker frees the outputs that the process had not released.
    """

    pid: int


class InstanceReady(Message):
    """Sent by a worker to a scheduler when its instance is loaded and accepts batches.

    `index` is the index of the instance within its model.
    """

    index: int  # of the instance
    pid: int


class BatchFinished(Message):
    """Sent by a worker to a scheduler when a batch has ended.

    The instance then accepts the next batch. A request of a decoupled model has no entry in
    `replies` if an `ExecutionResponded` ends it, before or after this message. The model has run
    from `input_end_ns` to `output_start_ns`. `executed` is false if no request has reached it.
    """

    batch: int  # number of the batch
    compute_start_ns: int
    input_end_ns: int
    output_start_ns: int
    compute_end_ns: int
    replies: list[Reply]  # to the requests
    copied_input_bytes: int = 0
    copied_output_bytes: int = 0
    executed: bool = True  # whether a request has reached the model
    spans: bytes = b""


class ExecutionResponded(Message):
    """Sent by a worker to a scheduler for each response of a decoupled model, as in `Responded`.

    The model returned the response at `computed_ns`, and its outputs were written at `written_ns`.
    An error is a response of the model unless `request_failed` is set.
    """

    key: int  # of the request
    code: str
    message: str
    schema: bytes
    data: list[Any]  # of the outputs
    final: bool  # whether this response is the last
    computed_ns: int  # time when the model returned it
    written_ns: int  # time when the outputs were written
    copied_output_bytes: int = 0
    request_failed: bool = False  # whether the whole request has failed
    spans: bytes = b""


class MetricsReported(Message):
    """Sent by a worker to a scheduler when the custom metrics of its model have changed.

    `families` are all metrics since the instance's start, in the format of
    shmserve.common.model_metrics.
    """

    families: list[list[Any]]  # metric families with their values


Response = Finished | Responded | Failed  # the responses to a request

# The maximum of a time limit in microseconds. Longer limits are reduced to it, so that the deadline
# fits into 64 bits.
MAX_TIMEOUT_US = 10**15


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
    limit_origin: str = "",
    caller_deadline_ns: int = 0,
    flags: int = 0,
    correlation_id: int | str = 0,
    source: int = 0,
    trace: str = "",
    callers: str = "",
) -> Submit:
    """Return the message that submits a request with this schema and these data.

    The deadline is `limit_us` after the arrival, with the origin `limit_origin`, or the earlier
    `caller_deadline_ns` (monotonic clock). A limit or deadline of 0 is not set.
    """
    deadline_ns = caller_deadline_ns
    if limit_us:
        deadline_ns = arrived_ns + min(limit_us, MAX_TIMEOUT_US) * 1000
        if 0 < caller_deadline_ns <= deadline_ns:
            deadline_ns, limit_origin = caller_deadline_ns, ""
    else:
        limit_origin = ""
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
        limit_origin,
        callers,
    )


def correlation_fields(correlation_id: int | str) -> tuple[int, str]:
    """Return a sequence's id as `correlation_id` and `correlation_text`."""
    return (correlation_id, "") if isinstance(correlation_id, int) else (0, correlation_id)


def message_size(submit: Submit) -> int:
    """Return the approximate bytes of a request's message: its schema and its inline tensors."""
    return len(submit.schema) + sum([len(item) for item in submit.data if type(item) is bytes])


# From a scheduler to a client of its model.
SchedulerToClient = Finished | Responded | Failed | Settled | StatisticsReported
