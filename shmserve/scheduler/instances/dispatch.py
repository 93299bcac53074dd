"""From the queue to the instances: dispatchers, and the messages to instances.

A dispatcher selects the queued requests that start, and calls `Executions`. `BatchDispatcher` is
for models without sequences: it starts retries alone, then the batches that the batcher forms.
batchers/sequence_dispatch.py and generative/generation_dispatch.py have the other dispatchers.

`Executions` sends batches, steps, cancellations, credit and releases. It keeps the releases for
processes whose instances are not ready yet.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from shmserve.ipc.messages.generation import Step, Stepped
from shmserve.ipc.messages.inference import (
    CancelExecution,
    CreditExecution,
    Execute,
    ReaderExited,
    Release,
    ReleaseOutputs,
    SequenceRow,
    Submit,
    Work,
)
from shmserve.ipc.messages.supervision import InstanceServed
from shmserve.ipc.tensors.padding import PaddedBatch
from shmserve.ipc.tensors.signature import BatchProperties
from shmserve.scheduler.batchers import Batch, Batcher, CloseReason, DynamicBatcher, WaitUntil
from shmserve.scheduler.batchers.adaptive import AdaptiveBatcher
from shmserve.scheduler.instances.pool import Execution, InstanceTickets, LostWork, Pool, Slot
from shmserve.scheduler.requests.queue import RequestQueue, queue_expired_text
from shmserve.scheduler.requests.responses import Responses
from shmserve.scheduler.requests.scheduled import (
    NEVER,
    Client,
    ControlLink,
    ScheduledRequest,
    Timing,
    WorkerLinks,
)
from shmserve.scheduler.settings import Settings
from shmserve.scheduler.statistics import Statistics

_RETRY_BATCH = Batch(1, CloseReason.RETRY)
_MAX_EARLY_RELEASES = 4096  # kept for processes that are not ready yet
_NS_PER_S = 1_000_000_000
_INITIAL_RESERVE_NS = 10_000_000  # time for an execution before a deadline, until it is measured
_MARGIN_NS = 1_000_000  # allowance for timers and the latency of messages
_MAX_RETRY_S = 60  # maximum of Retry-After
_MAX_AHEAD_NS = 500_000  # maximum duration of the computation queued at a worker
_MAX_PIPELINE_DEPTH = 4
_SHORT_BATCH_NS = 20_000_000  # shorter batches may be sent to busy workers
_MIN_OBSERVATIONS = 16  # number of observations before the average is used


class SequenceKey(NamedTuple):
    """The sequence that a request belongs to, and the request's flags in the sequence."""

    correlation_id: int | str
    flags: int


@dataclass(eq=False)
class Dispatcher(ABC):
    """The interface of a dispatcher, which starts the queued requests that can run.

    A dispatcher that `tracks_requests` is called for each request before and after it is enqueued.
    """

    tracks_requests: bool = field(init=False, default=True)  # `admit` and `on_enqueued` are called

    _settings: Settings
    _queue: RequestQueue
    _pool: Pool
    _executions: Executions
    _responses: Responses
    _tickets: InstanceTickets | None

    def __post_init__(self) -> None:
        self._holds_batches = any(self._settings.hold_thresholds)

    def _is_held(self, waiting_count: int, backlog_count: int = 0) -> bool:
        """Check whether batches are held until more requests wait.

        Triton's tests set TRITONSERVER_DELAY_SCHEDULER and TRITONSERVER_BACKLOG_DELAY_SCHEDULER for
        this purpose.
        """
        min_waiting, min_backlog = self._settings.hold_thresholds
        self._holds_batches = waiting_count < min_waiting or backlog_count < min_backlog
        return self._holds_batches

    @abstractmethod
    def run(self, now_ns: int) -> int:
        """Start all requests that can run.

        Returns:
            The time (monotonic ns) of the next call if nothing happens before.
        """

    @abstractmethod
    def flush(self) -> None:
        """Stop waiting for further requests: batches run with the requests that are queued."""

    def admit(
        self, client: Client[ScheduledRequest], submit: Submit, properties: BatchProperties
    ) -> SequenceKey | None:
        """Admit a request before it is enqueued; return its sequence, or None if it has none.

        Raises:
            InvalidArgument, QueueFull: The request is not admitted.
        """
        return None

    def on_enqueued(self, request: ScheduledRequest, sequence_key: SequenceKey | None) -> None:  # noqa: B027
        """Record that a request was enqueued."""

    def on_removed(  # noqa: B027
        self,
        request: ScheduledRequest,
        now_ns: int,
        *,
        has_expired: bool = False,
        keep_dependents: bool = False,
    ) -> None:
        """Handle the final removal of a request from the queue.

        Later requests of its sequence that depend on this request fail. With `keep_dependents`,
        they do not fail here, because the caller handles each of them.
        """

    def requeue(self, request: ScheduledRequest) -> bool:
        """Requeue an executed request that its model has rescheduled.

        Return False if this kind of scheduling cannot requeue it.
        """
        return False

    def handle_worker_message(self, slot: Slot, message: Any, now_ns: int) -> bool:
        """Handle a message that only workers of this kind of scheduling send.

        Return False if the message is not expected now.
        """
        return False

    def exclude_continuing(self, lost_work: LostWork) -> LostWork:
        """Return the work of a lost instance without the requests that continue elsewhere."""
        return lost_work

    def gauges(self) -> dict[str, Any]:
        """Return the metrics' current values that only this kind of scheduling has."""
        return {}

    def lost_text(self, request: ScheduledRequest) -> str:
        """Return why a request whose worker died cannot run again, or an empty text if it can."""
        return ""

    def expired_text(self, request: ScheduledRequest, now_ns: int) -> str:
        """Return the error text of a request that expired in the queue."""
        return queue_expired_text(request, now_ns)

    def has_work(self, slot: Slot) -> bool:
        """Check whether a retiring instance still has work to do."""
        return False

    @property
    def open_sequence_count(self) -> int:
        """Return the number of sequences that have begun and not ended."""
        return 0

    def accepts_while_draining(self, submit: Submit) -> bool:
        """Check whether a request is accepted while the model drains."""
        return False


@dataclass(eq=False)
class BatchDispatcher(Dispatcher):
    """The dispatcher of batches without sequences.

    A free instance receives a batch immediately. A busy instance receives its next batch ahead if
    the batch cannot grow any more. No batch is sent ahead if the queue has priorities or policies,
    because a batch that was sent ahead can neither be overtaken nor time out.
    """

    _batcher: Batcher

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tracks_requests = self._batcher.is_learning
        self._may_send_ahead = not self._settings.policies.has_limits and self._tickets is None

    def flush(self) -> None:
        self._holds_batches = False
        self._batcher.flush()

    def on_enqueued(self, request: ScheduledRequest, sequence_key: SequenceKey | None) -> None:
        self._batcher.record_arrival(request.enqueued_ns, self._responses.live_count)

    def run(self, now_ns: int) -> int:
        queue, pool, tickets = self._queue, self._pool, self._tickets
        in_order, executions, batcher = queue.in_order, self._executions, self._batcher
        wake_ns = NEVER
        while pool.free_slots and (in_order.count or queue.retries):
            if queue.retries:
                decision: Batch | WaitUntil | None = _RETRY_BATCH
            elif self._holds_batches and self._is_held(in_order.count):
                break
            else:
                decision = batcher.decide(now_ns, in_order, executions.service_time.reserve_ns)
            if type(decision) is WaitUntil:
                wake_ns = decision.end_ns
            if type(decision) is not Batch:
                break
            slot = None  # the instance that has been free longest
            if tickets is not None:
                slot = tickets.find(pool.free_slots)
                if slot is None:
                    tickets.request_tickets(pool.free_slots, len(queue))
                    break
            is_retry = decision is _RETRY_BATCH
            requests = [queue.take_retry()] if is_retry else queue.take(decision.count)
            executions.start(requests, decision.reason, now_ns, slot)
        if self._may_send_ahead and in_order.count and not pool.free_slots:
            self._send_ahead(now_ns)
        if tickets is not None:
            tickets.return_unused()
        return wake_ns

    def _send_ahead(self, now_ns: int) -> None:
        """Send busy instances their next batches, if these batches cannot grow any more.

        Retries are not sent ahead: they run alone, at an instance without other batches.
        """
        queue, in_order, executions = self._queue, self._queue.in_order, self._executions
        service = executions.service_time
        while in_order.count:
            # A request that an executing model has sent, and waits for, must not be sent ahead: it
            # could wait behind the execution of that model.
            if queue.model_requests and queue.calls():
                break
            slot = self._pool.least_busy(service.pipeline_depth, service.has_short_batches)
            if slot is None or (self._holds_batches and self._is_held(in_order.count)):
                break
            batch = self._batcher.closed_batch(in_order)
            if batch is None:
                break
            executions.start(queue.take(batch.count), batch.reason, now_ns, slot)


def batcher_of(settings: Settings) -> Batcher:
    """Return the batcher that a model's settings select."""
    if settings.batching is None:
        return Batcher()
    if settings.batching.target_ns:
        return AdaptiveBatcher(settings.batching)
    return DynamicBatcher(settings.batching)


@dataclass(slots=True, eq=False)
class ServiceTime:
    """The recent service time, for retry hints and the latest start before a deadline (pure).

    The averages are computed like TCP's (RFC 6298): the mean, and the mean deviation.
    """

    _mean_duration_ns: float = 0.0
    _deviation_ns: float = 0.0
    _busy_ns: float = 0.0  # mean time of the phases of an execution
    _mean_requests: float = 0.0  # mean number of requests in an execution
    _observation_count: int = 0
    # The maximum number of batches that a worker has at a time. It is above one if batches are so
    # short that the worker would otherwise wait for messages as long as it computes.
    pipeline_depth: int = 1
    # Whether batches are so short that a second batch may be sent ahead and wait for the first.
    # A request that was sent ahead is executed even if it is cancelled or late by then.
    has_short_batches: bool = False
    # How long before a deadline an execution must start in order to meet it.
    reserve_ns: int = _INITIAL_RESERVE_NS

    def observe(self, duration_ns: int, busy_ns: int, requests: int) -> None:
        """Record an execution of `requests` requests.

        Args:
            duration_ns: The time from dispatch to return.
            busy_ns: The time during which the worker was busy with the execution.
            requests: The number of requests.
        """
        self._observation_count += 1
        if self._mean_requests:
            self._busy_ns += (busy_ns - self._busy_ns) / 8
            error = duration_ns - self._mean_duration_ns
            self._mean_duration_ns += error / 8
            deviation_ns = error if error > 0 else -error
            self._deviation_ns += (deviation_ns - self._deviation_ns) / 4
            self._mean_requests += (requests - self._mean_requests) / 8
        else:
            self._mean_duration_ns = duration_ns
            self._deviation_ns = duration_ns / 2
            self._mean_requests = requests
            self._busy_ns = busy_ns
        self.reserve_ns = int(self._mean_duration_ns + 4 * self._deviation_ns) + _MARGIN_NS
        if self._observation_count >= _MIN_OBSERVATIONS:
            depth = int(_MAX_AHEAD_NS / (self._busy_ns + 1))
            self.pipeline_depth = _MAX_PIPELINE_DEPTH if depth > _MAX_PIPELINE_DEPTH else depth or 1
            self.has_short_batches = self._busy_ns < _SHORT_BATCH_NS

    def drain_s(self, request_count: int, instance_count: int) -> int:
        """Return the expected seconds until `request_count` requests are completed, at least 1.

        The number is rounded up, and limited to `_MAX_RETRY_S`.
        """
        if not self._mean_requests:
            return 1
        execution_count = request_count / self._mean_requests / max(instance_count, 1)
        seconds = execution_count * self._mean_duration_ns / _NS_PER_S
        return max(1, min(_MAX_RETRY_S, int(seconds + 0.999)))


@dataclass(eq=False)
class Executions:
    """The sender of messages to instances, with the recent `service_time` of executions."""

    _settings: Settings
    _pool: Pool
    _workers: WorkerLinks
    _control: ControlLink
    _responses: Responses
    _statistics: Statistics
    service_time: ServiceTime = field(default_factory=ServiceTime)
    _ids: Iterator[int] = field(default_factory=partial(itertools.count, 1))  # of executions
    # Releases for announced instances that are not ready yet, by the instance's pid.
    _early_releases: dict[int, list[ReleaseOutputs | ReaderExited]] = field(default_factory=dict)
    # The latest releases for processes that the supervisor has not announced as instances, with the
    # pid. A client's release of outputs may arrive before the announcement of the worker that owns
    # them. Some pids are never announced.
    _unknown_releases: deque[tuple[int, ReleaseOutputs]] = field(
        default_factory=partial(deque, maxlen=_MAX_EARLY_RELEASES)
    )

    # --- to workers -------------------------------------------------------------------------------

    def start(
        self,
        requests: list[ScheduledRequest],
        reason: CloseReason,
        now_ns: int,
        required_slot: Slot | None = None,
        rows: Sequence[SequenceRow] = (),
    ) -> None:
        """Send a batch to the instance that has been free longest, or to `required_slot`.

        Args:
            requests: The requests of the batch.
            reason: The reason why the batch takes no further request.
            now_ns: The time.
            required_slot: The instance to use, which may be busy.
            rows: The sequence of each row, if the model is stateful.
        """
        if self._settings.padding is not None:
            padded_batch = PaddedBatch(self._settings.padding)
            for request in requests:
                padded_batch.try_join(request.shape_key, request.rows)
            self._statistics.executions.count_padding(padded_batch.element_counts())
        null_rows = len(rows) - len(requests) if rows else 0
        execution = Execution(next(self._ids), requests, reason, now_ns, now_ns, rows=null_rows)
        slot = self._pool.assign(execution, required_slot)  # adds the rows of the requests
        works, live_count = to_works(requests), self._responses.live_count
        self._workers.post(slot.peer, Execute(execution.id, works, live_count, list(rows)))

    def post(self, peer: bytes, message: Any) -> None:
        """Send a message about sequences or generation to the worker at this address."""
        self._workers.post(peer, message)

    def run_step(self, slot: Slot, step: Step, now_ns: int) -> None:
        """Send a step of a generative model to an idle instance."""
        self._pool.assign(Execution(step.step, [], None, now_ns, now_ns), slot)
        self._workers.post(slot.peer, step)

    def record_step_done(self, slot: Slot, message: Stepped, rows: int, now_ns: int) -> None:
        """Record that an instance has returned its step, which had `rows` rows."""
        self._pool.finish(slot, now_ns)
        if not slot.has_served:
            self.report_served(slot)
        times = (message.gather_ns, message.forward_ns, message.sample_ns)
        self._statistics.count_execution(None, rows, Timing(now_ns - sum(times), *times), now_ns)

    def report_served(self, slot: Slot) -> None:
        """Report the first completed execution of an instance's process to the supervisor."""
        slot.has_served = True
        self._control.post(InstanceServed(slot.pid))

    def cancel(self, request: ScheduledRequest, keeps_reading: bool = False) -> None:
        """Cancel a request at its worker.

        With `keeps_reading`, the client still receives responses until the model ends the request.
        """
        if request.worker is not None:
            self._workers.post(request.worker.peer, CancelExecution(request.key, keeps_reading))

    def credit(self, request: ScheduledRequest, read_count: int) -> None:
        """Send credit to the worker of a request, for the responses that the client has read.

        The credit is at most the number of responses sent.
        """
        newly_read = min(read_count, request.response_count - request.credited_responses)
        if newly_read > 0 and request.worker is not None:
            request.credited_responses += newly_read
            self._workers.post(request.worker.peer, CreditExecution(request.key, newly_read))

    def release(self, client_pid: int, message: Release) -> None:
        """Release outputs that a client has read, at the worker that owns them."""
        slot = self._pool.find_by_pid(message.pid)
        if slot is not None:
            release = ReleaseOutputs(client_pid, message.offsets, message.memory)
            self._workers.post(slot.peer, release)
        # The worker of a predecessor scheduler has not connected yet: the release waits for it.
        elif message.pid in self._pool.awaited_pids():
            releases = self._early_releases.setdefault(message.pid, [])
            releases += _split_release(client_pid, message)[: _MAX_EARLY_RELEASES - len(releases)]
        else:  # the process may be announced later, because clients may receive the report first
            split_releases = _split_release(client_pid, message)
            self._unknown_releases += [(message.pid, release) for release in split_releases]

    def process_exited(self, pid: int) -> None:
        """Notify the workers that a process has exited, so that they free the outputs it held."""
        self._early_releases.pop(pid, None)
        self._take_unknown_releases(pid)
        for slot in self._pool.ready():
            self._workers.post(slot.peer, ReaderExited(pid))
        # Workers of a preceding scheduler that have not connected yet receive the message when they
        # connect: that scheduler may have died before it could notify them.
        for awaited_pid in self._pool.awaited_pids():
            self._early_releases.setdefault(awaited_pid, []).append(ReaderExited(pid))

    # --- instances that become ready --------------------------------------------------------------

    def announce(self, instance_index: int, pid: int) -> None:
        """Announce an instance with `Pool.announce`, and send the releases that are kept for it."""
        early_releases = self._take_unknown_releases(pid)
        if early_releases:
            self._early_releases.setdefault(pid, []).extend(early_releases)
        self._send_early_releases(self._pool.announce(instance_index, pid))

    def register_worker(self, instance_index: int, peer: bytes, pid: int) -> None:
        """Record in the pool that a worker is ready, and send the releases kept for it."""
        self._send_early_releases(self._pool.register_worker(instance_index, peer, pid))

    def _take_unknown_releases(self, pid: int) -> list[ReleaseOutputs]:
        """Remove and return the releases that are kept for an unannounced process."""
        releases = [release for owner_pid, release in self._unknown_releases if owner_pid == pid]
        if releases:
            remaining_releases = [entry for entry in self._unknown_releases if entry[0] != pid]
            self._unknown_releases = deque(remaining_releases, _MAX_EARLY_RELEASES)
        return releases

    def _send_early_releases(self, slot: Slot | None) -> None:
        """Send the kept releases of outputs to their worker; None: it is not connected yet."""
        if slot is not None:
            for message in self._early_releases.pop(slot.pid, ()):
                self._workers.post(slot.peer, message)


def _split_release(client_pid: int, message: Release) -> list[ReleaseOutputs]:
    """Return a message for each output that was read; the caller limits how many it keeps."""
    offsets = message.offsets[:_MAX_EARLY_RELEASES]
    return [ReleaseOutputs(client_pid, [offset], message.memory) for offset in offsets]


def to_works(requests: Iterable[ScheduledRequest]) -> list[Work]:
    """Return the requests in the form of messages to their worker."""
    works: list[Work] = []
    for request in requests:
        submit = request.submit
        works += [
            Work(
                request.key,
                request.client.pid,
                submit.schema,
                submit.data,
                submit.request_id,
                submit.flags,
                submit.correlation_id,
                submit.correlation_text,
                submit.timeout_us,
                submit.priority,
                request.deadline_ns,
                submit.trace,
                submit.callers,
            )
        ]
    return works
