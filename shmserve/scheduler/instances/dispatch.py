"""From the queue to the instances: the interface of dispatchers, and the dispatcher of batches.

A dispatcher selects the queued requests that start, and calls `Executions`. `BatchDispatcher` is
for models without sequences: it starts retries alone, then the batches that the batcher forms.
batchers/sequence_dispatch.py and generative/dispatch.py have the other dispatchers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shmserve.ipc.messages.inference import Submit
from shmserve.ipc.tensors.signature import BatchProperties
from shmserve.scheduler.batchers import Batch, Batcher, CloseReason, WaitUntil
from shmserve.scheduler.batchers.adaptive import AdaptiveBatcher
from shmserve.scheduler.batchers.dynamic import DynamicBatcher
from shmserve.scheduler.instances.executions import Executions
from shmserve.scheduler.instances.pool import InstanceTickets, LostWork, Pool, Slot
from shmserve.scheduler.requests.queue import RequestQueue, queue_expired_text
from shmserve.scheduler.requests.responses import Responses
from shmserve.scheduler.requests.scheduled import NEVER, Client, ScheduledRequest
from shmserve.scheduler.settings import Settings

_RETRY_BATCH = Batch(1, CloseReason.RETRY)


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
        self._batcher.record_arrival(request.enqueued_ns, self._responses.live_requests)

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
                wake_ns = decision.ns
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
