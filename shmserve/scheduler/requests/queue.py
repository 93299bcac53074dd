"""The queue of requests: admission, order, deadlines, cancellation (pure).

retries   alone, one an execution: their worker died; always first
queue     in order of arrival; any request can leave from the middle
timers    (time, key, request): deadlines and queue limits; those of done requests are skipped
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Iterator

from shmserve.errors import InvalidArgument, QueueFull, Unavailable
from shmserve.ipc.messages import Submit
from shmserve.ipc.tensors.signature import id_prefix
from shmserve.scheduler.requests.request import NEVER, Client, Event, Request, State
from shmserve.scheduler.settings import Settings

EXPIRED = "Request timeout expired"

# Stale timers are swept when they outnumber the live requests by this much.
_STALE_TIMERS = 1024


class RequestQueue:
    """Requests that wait for an instance, and the timers of those that do not any more."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._queue: OrderedDict[int, Request] = OrderedDict()
        self._retries: OrderedDict[int, Request] = OrderedDict()
        self._timers: list[tuple[int, int, Request]] = []
        self._keys = itertools.count(1)
        self._hold_until = settings.hold_until

    def __len__(self) -> int:
        return len(self._queue) + len(self._retries)

    @property
    def queued(self) -> int:
        """How many wait that need not run alone."""
        return len(self._queue)

    # --- admission --------------------------------------------------------------------------------

    @property
    def full(self) -> bool:
        """Whether the queue has reached its bound."""
        return 0 < self._settings.policy.max_size <= len(self)

    def admit(self, client: Client, message: Submit, now_ns: int) -> Request:
        """Enqueue a request.

        Raises InvalidArgument (its batch size), Unavailable (its deadline has passed) or QueueFull.
        """
        settings = self._settings
        if not 0 <= message.batch_size <= settings.max_batch_size:
            raise InvalidArgument(
                f"{id_prefix(message.request_id)}inference request batch-size must be <= "
                f"{settings.max_batch_size} for '{settings.name}'"
            )
        deadline = max(message.deadline_ns, 0)
        if 0 < deadline < now_ns:
            raise Unavailable(EXPIRED)
        policy = settings.policy
        if self.full:
            raise QueueFull(f"{id_prefix(message.request_id)}Exceeds maximum queue size")
        own = policy.own_timeout_ns(message.timeout_us)
        timeout = own or policy.timeout_ns
        request = Request(
            next(self._keys),
            client,
            message.id,
            message.batch_size or 1,
            message.shape_key,
            believable(message.arrived_ns, now_ns),
            now_ns,
            deadline,
            now_ns + timeout if timeout else 0,
            # Where the queue policy takes a request's timeout, it rejects; else the batch hurries.
            deadline if deadline and not own else NEVER,
            message.work,
            message.request_id,
        )
        self._queue[request.key] = request
        if deadline:
            heapq.heappush(self._timers, (deadline, request.key, request))
        if timeout:
            heapq.heappush(self._timers, (request.queue_limit_ns, request.key, request))
        return request

    # --- order ------------------------------------------------------------------------------------

    def holding(self) -> bool:
        """Whether batching still waits for the queue to fill once (a hook for tests)."""
        if self._hold_until and len(self._queue) >= self._hold_until:
            self._hold_until = 0
        return self._hold_until > 0

    def release_hold(self) -> None:
        """Let batches form from now on, however few requests wait."""
        self._hold_until = 0

    def waiting(self) -> Iterator[Request]:
        """The queue in order, without retries."""
        return iter(self._queue.values())

    def all(self) -> list[Request]:
        """Everything that waits, retries first."""
        return [*self._retries.values(), *self._queue.values()]

    def take_retry(self) -> Request | None:
        """Dispatch the first request that must run alone."""
        if not self._retries:
            return None
        request = self._retries.popitem(last=False)[1]
        request.meet(Event.DISPATCH)
        return request

    def take(self, count: int) -> list[Request]:
        """Dispatch the first `count` requests of the queue."""
        pop = self._queue.popitem
        taken = [pop(last=False)[1] for _ in range(count)]
        for request in taken:
            request.meet(Event.DISPATCH)
        return taken

    def retry(self, request: Request) -> None:
        """Take back a request whose worker is gone, to run alone and before all others."""
        request.meet(Event.RETURN)
        request.queue_limit_ns = 0  # it has had its wait
        self._retries[request.key] = request

    def put_back(self, request: Request) -> None:
        """Take back a request that was dispatched and not begun: it comes before all others."""
        request.meet(Event.RETURN)
        self._queue[request.key] = request
        self._queue.move_to_end(request.key, last=False)
        if request.queue_limit_ns:  # its timer may have run out where it did not count
            heapq.heappush(self._timers, (request.queue_limit_ns, request.key, request))

    def remove(self, request: Request) -> None:
        """Take a queued request out; its state is the caller's to change."""
        if self._queue.pop(request.key, None) is None:
            self._retries.pop(request.key, None)

    # --- time -------------------------------------------------------------------------------------

    def next_timer_ns(self) -> int:
        """When `expired` may have something, or NEVER."""
        timers = self._timers
        while timers and timers[0][2].state is State.DONE:
            heapq.heappop(timers)
        # A timeout is over when more than its time has passed.
        return timers[0][0] + 1 if timers else NEVER

    def expired(self, now_ns: int) -> list[Request]:
        """Requests whose time is over: a deadline anywhere, a queue limit only in the queue."""
        over: list[Request] = []
        timers = self._timers
        while timers and timers[0][0] < now_ns:
            _, _, request = heapq.heappop(timers)
            late = 0 < request.deadline_ns < now_ns
            match request.state:
                case State.QUEUED if late or 0 < request.queue_limit_ns < now_ns:
                    over.append(request)
                case State.EXECUTING | State.RESPONDING | State.HELD if late:
                    over.append(request)
                case _:
                    pass
        return over

    def sweep(self, live: int) -> None:
        """Drop the timers of requests that are done when they are many; `live` requests are not."""
        if len(self._timers) > 2 * live + _STALE_TIMERS:
            self._timers = [entry for entry in self._timers if entry[2].state is not State.DONE]
            heapq.heapify(self._timers)


def believable(arrived_ns: int, now_ns: int) -> int:
    """A client's own reading of the clock, as far as it can be true."""
    return arrived_ns if 0 < arrived_ns < now_ns else now_ns
