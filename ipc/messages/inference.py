"""Requests on their way: between clients and a scheduler, and between that and its workers."""

from __future__ import annotations

from typing import Any

from shmserve.ipc.transport.frames import message


@message
class Submit:
    """Run this request. `batch_size` 0: the model does not batch. `deadline_ns` 0: none (monotonic
    clock).

    `request_id` is the client's own, for error texts and logs; it may be empty.
    """

    id: int
    batch_size: int
    shape_key: bytes
    arrived_ns: int
    deadline_ns: int
    timeout_us: int
    priority: int
    work: bytes
    request_id: str = ""


@message
class Cancel:
    """Nobody waits for this request any more."""

    id: int


@message
class Release:
    """The outputs at these offsets of a worker's arena have been read."""

    pid: int
    offsets: list[int]


@message
class ReportStatistics:
    """Answer with `StatisticsReported`."""

    id: int


@message
class Finished:
    """The request succeeded; `body` is a packed `Inferred`."""

    id: int
    body: bytes


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


@message
class Execute:
    """Run a batch. `requests` holds [key, client pid, work] of each request, in order; `live`: how
    many the scheduler has under way, these among them."""

    batch: int
    requests: list[list[Any]]
    live: int = 1


@message
class CancelExecution:
    """Do not write this request's outputs: nobody waits."""

    key: int


@message
class ReleaseOutputs:
    """These offsets of the worker's arena have been read by process `client_pid`."""

    client_pid: int
    offsets: list[int]


@message
class InstanceReady:
    """A loaded instance (index within its model) offers itself for batches."""

    index: int
    pid: int


@message
class BatchFinished:
    """A batch ended. Times are monotonic ns. `replies` holds [key, code, message, body] of each
    request; code "" is success. `copied_in`, `copied_out`: bytes of tensors that were copied.
    `executed`: whether the model was asked at all."""

    batch: int
    compute_start_ns: int
    input_end_ns: int
    output_start_ns: int
    compute_end_ns: int
    replies: list[list[Any]]
    copied_in: int = 0
    copied_out: int = 0
    executed: bool = True


@message
class MetricsReported:
    """An instance's model has changed metrics of its own: all of them, since the process began.
    shmserve.common.model_metrics says what `families` are."""

    families: list[list[Any]]
