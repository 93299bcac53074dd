"""From the queue to the instances: the interface of dispatchers, one for each kind of scheduling,
and the one of models without sequences: retries alone, then the batches that the batcher forms."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shmserve.ipc.messages.inference import Submit
from shmserve.scheduler.batchers.adaptive import AdaptiveBatcher
from shmserve.scheduler.batchers.dynamic import (
    Batch,
    Batcher,
    Closed,
    DynamicBatcher,
    WaitUntil,
)
from shmserve.scheduler.instances.executions import Executions
from shmserve.scheduler.instances.pool import InstanceTickets, Lost, Pool, Slot
from shmserve.scheduler.requests.queue import EXPIRED, RequestQueue
from shmserve.scheduler.requests.request import NEVER, Client, ScheduledRequest
from shmserve.scheduler.requests.responses import Responses
from shmserve.scheduler.settings import Settings


class SequenceKey(NamedTuple):
    """The sequence that a request belongs to, and its flags there."""

    correlation_id: int | str
    flags: int


@dataclass(eq=False)
class Dispatcher(ABC):
    """Starts what can run. Requests need not belong to anything unless a kind says so: one that
    `follows` requests is asked about each before it is enqueued, and told of it then."""

    follows: bool = field(init=False, default=True)

    _settings: Settings
    _queue: RequestQueue
    _pool: Pool
    _executions: Executions
    _responses: Responses
    _tickets: InstanceTickets | None

    def __post_init__(self) -> None:
        self._holds = any(self._settings.hold)

    def _is_held(self, waiting: int, backlog: int = 0) -> bool:
        """Check whether no batch may start until more requests wait: a hook of Triton's tests
        (TRITONSERVER_DELAY_SCHEDULER, TRITONSERVER_BACKLOG_DELAY_SCHEDULER)."""
        least, least_backlog = self._settings.hold
        self._holds = waiting < least or backlog < least_backlog
        return self._holds

    @abstractmethod
    def run(self, now_ns: int) -> int:
        """Start all that can; returns when to try again if nothing happens before."""

    @abstractmethod
    def flush(self) -> None:
        """Nothing more comes that would be worth waiting for."""

    def identify(self, client: Client[ScheduledRequest], message: Submit) -> SequenceKey | None:
        """The sequence that a request belongs to, before it is admitted to the queue.

        Raises InvalidArgument or QueueFull for one that may not be.
        """
        return None

    def enqueued(self, request: ScheduledRequest, sequence_key: SequenceKey | None) -> None:  # noqa: B027
        """A request is in the queue."""

    def removed(  # noqa: B027
        self, request: ScheduledRequest, now_ns: int, *, expired: bool = False, apart: bool = False
    ) -> None:
        """A request was taken out of the queue, for ever; what cannot run without it fails, unless
        it is dealt with `apart`."""

    def again(self, request: ScheduledRequest) -> bool:
        """Its model has asked for an executed request once more; whether it gets it."""
        return False

    def from_worker(self, slot: Slot, message: Any, now_ns: int) -> bool:
        """Take a message that only this kind of scheduling knows; whether it makes sense."""
        return False

    def kept(self, lost: Lost) -> Lost:
        """What a dead instance had, without what this kind lets go on elsewhere."""
        return lost

    def gauges(self) -> dict[str, Any]:
        """What is so now of this kind's own."""
        return {}

    def lost_text(self, request: ScheduledRequest) -> str:
        """Why a request whose worker died in the middle cannot run again; "": it may."""
        return ""

    def expired_text(self, request: ScheduledRequest) -> str:
        """The error text for a request whose time is over while it waits."""
        return EXPIRED

    def needs(self, slot: Slot) -> bool:
        """Whether an instance that is to retire has more to do than it was given."""
        return False

    @property
    def open_sequences(self) -> int:
        """The number of sequences that have begun and not ended."""
        return 0

    def accepts_while_draining(self, message: Submit) -> bool:
        """Whether a request may come while the model is being stopped."""
        return False


@dataclass(eq=False)
class Dispatch(Dispatcher):
    """Starts what can run. An instance that is free gets a batch at once, one that is busy only
    what could not grow while it waits, and none where the queue has priorities or policies: what
    is sent ahead can be neither overtaken nor timed out."""

    _batcher: Batcher

    def __post_init__(self) -> None:
        super().__post_init__()
        self.follows = self._batcher.learns
        self._sends_ahead = not self._settings.policies.limited and self._tickets is None

    def flush(self) -> None:
        """As `Dispatcher` says."""
        self._holds = False
        self._batcher.flush()

    def enqueued(self, request: ScheduledRequest, sequence_key: SequenceKey | None) -> None:
        """As `Dispatcher` says."""
        self._batcher.arrived(request.enqueued_ns, self._responses.live)

    def run(self, now_ns: int) -> int:
        """As `Dispatcher` says."""
        queue, tickets = self._queue, self._tickets
        in_order, retries = queue.in_order, queue.retries
        executions, batcher, pool = self._executions, self._batcher, self._pool
        wake_ns = NEVER
        while in_order.count or retries:
            slot, ahead = None, not pool.free
            if ahead:
                # What must run alone waits for an instance that has nothing else.
                slot = self._room() if self._sends_ahead and in_order.count else None
                if slot is None:
                    break
            elif tickets is not None:
                slot = tickets.find(pool.free)
                if slot is None and self._would_run(now_ns):
                    tickets.ask(pool.free, len(queue))
                    break
            if retries and not ahead:
                executions.start([queue.take_retry()], Closed.RETRY, now_ns, slot)
                continue
            if self._holds and self._is_held(in_order.count):
                break
            reserve_ns = executions.service_time.reserve_ns
            decision = (
                batcher.closed(in_order) if ahead else batcher.decide(now_ns, in_order, reserve_ns)
            )
            if isinstance(decision, WaitUntil):
                wake_ns = decision.ns
                break
            if decision is None:
                break
            executions.start(queue.take(decision.count), decision.reason, now_ns, slot)
        if tickets is not None:
            tickets.give_back()
        return wake_ns

    def _room(self) -> Slot | None:
        """The instance that takes a batch ahead, if there is one."""
        times, pool = self._executions.service_time, self._pool
        depth = times.pipeline_depth
        if depth == 1 and times.ends_soon and pool.ready_count == 1:
            depth = 2  # no other instance could take what is sent ahead
        return pool.room(depth)

    def _would_run(self, now_ns: int) -> bool:
        """Whether a batch is there for an instance that is free."""
        queue, reserve_ns = self._queue, self._executions.service_time.reserve_ns
        if queue.retries:
            return True
        if self._holds and self._is_held(queue.in_order.count):
            return False
        return isinstance(self._batcher.decide(now_ns, queue.in_order, reserve_ns), Batch)


def batcher_of(settings: Settings) -> Batcher:
    """The batcher of a model."""
    if settings.batching is None:
        return Batcher()
    if settings.batching.target_ns:
        return AdaptiveBatcher(settings.batching)
    return DynamicBatcher(settings.batching)
