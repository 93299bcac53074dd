"""The queue of requests: admission, order, deadlines, cancellation (pure).

    retries   requests whose worker died: each alone in an execution, before all others
    queue     by priority and in the order of arrival; any request can be removed
    timers    deadlines and queue limits

The duration of an operation does not depend on the number of waiting requests, except for the
logarithm of a heap, `all`, and the sweep of timers, whose cost is amortised.

Priorities are strict levels, 1 the highest:

    level 1    in time: in order of arrival    delayed: in order of their timeouts
    level 2    ...                             ...

All requests of a level precede those of the next one. Its delayed requests, whose timeout has
passed, follow the requests in time. There is no ageing: a low level may starve.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain, islice

from shmserve.errors import QueueFull, Unavailable
from shmserve.ipc.messages.inference import MAX_TIMEOUT_US, Submit
from shmserve.ipc.model_spec import LevelPolicy
from shmserve.ipc.tensors.signature import BatchProperties, id_prefix
from shmserve.ipc.timers import Timers
from shmserve.scheduler.requests.scheduled import NEVER, Client, Event, ScheduledRequest, State
from shmserve.scheduler.settings import Settings

_NS_PER_US = 1_000
EXPIRED_TEXT = "Request timeout expired"  # Triton's, whose tests compare it


class _Queues(dict[tuple[int, bool], OrderedDict[int, ScheduledRequest]]):
    """FIFO queues by priority level and `ScheduledRequest.is_delayed`, in the order of these keys.

    A lookup of an unknown key adds a queue. `order` has the sorted keys.
    """

    def __init__(self) -> None:
        super().__init__()
        self.order: list[tuple[int, bool]] = []

    def __missing__(self, key: tuple[int, bool]) -> OrderedDict[int, ScheduledRequest]:
        queue = self[key] = OrderedDict()
        insort(self.order, key)
        return queue


class PriorityQueue:
    """The queued requests, in the order of their priority `level` and arrival; `count` of them.

    The delayed requests of a level follow its other requests.
    """

    def __init__(self) -> None:
        self._queues = _Queues()
        # The keys of the queues with requests. If there is only one queue, it may be empty.
        self._order = self._queues.order
        self.count = 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[ScheduledRequest]:
        if len(self._order) == 1:
            return iter(self._queues[self._order[0]].values())
        return chain.from_iterable(self._queues[key].values() for key in self._order)

    def size(self, level: int) -> int:
        """Return the number of queued requests of a priority level."""
        return sum(len(self._queues.get((level, is_delayed), ())) for is_delayed in (False, True))

    def append(self, request: ScheduledRequest) -> None:
        """Queue a request behind all requests of its level with the same `is_delayed`."""
        self._queues[request.level, request.is_delayed][request.key] = request
        self.count += 1

    def prepend(self, request: ScheduledRequest) -> None:
        """Queue a request ahead of all requests of its level with the same `is_delayed`."""
        self.append(request)
        queue = self._queues[request.level, request.is_delayed]
        queue.move_to_end(request.key, last=False)

    def delay(self, request: ScheduledRequest) -> None:
        """Move a request whose timeout has passed behind all others of its priority level."""
        self.remove(request)
        request.is_delayed = True
        self.append(request)

    def remove(self, request: ScheduledRequest) -> bool:
        """Remove a request; return False if it is not in the queue."""
        key = (request.level, request.is_delayed)
        queue = self._queues.get(key)
        if queue is None or queue.pop(request.key, None) is None:
            return False
        self.count -= 1
        if not queue:
            self._remove_empty(key)
        return True

    def take(self, count: int) -> list[ScheduledRequest]:
        """Remove and return the first `count` requests."""
        taken_requests: list[ScheduledRequest] = []
        self.count -= count
        while count:
            key = self._order[0]
            queue = self._queues[key]
            if len(queue) <= count:
                count -= len(queue)
                taken_requests += queue.values()
                queue.clear()
                self._remove_empty(key)
            else:
                first_requests = list(islice(queue.values(), count))
                taken_requests += first_requests
                for request in first_requests:
                    del queue[request.key]
                count = 0
        return taken_requests

    def _remove_empty(self, key: tuple[int, bool]) -> None:
        """Remove an empty queue.

        The only queue is kept, because the next request usually has the same level.
        """
        if len(self._order) > 1:
            del self._queues[key]
            del self._order[bisect_left(self._order, key)]


class RequestQueue:
    """The requests that wait for an instance, and the timers of all requests.

    `retries`, by key, run alone; all other requests are `in_order`. `model_requests` are the
    requests that executing models have sent; some may have left the queue. While `in_order`
    contains fewer than `min_bound` requests, no level can be full.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.in_order = PriorityQueue()  # by priority level and arrival
        self.retries: OrderedDict[int, ScheduledRequest] = OrderedDict()
        self.model_requests: list[ScheduledRequest] = []  # sent by executing models
        self.timers: Timers[ScheduledRequest] = Timers(_has_ended)
        self._next_key = itertools.count(1).__next__
        policies = settings.policies
        # The level and policy of all requests, if there is only one level.
        self._only_level = None if policies.levels else (0, policies.default)
        all_policies = (policies.default, *policies.level_policies.values())
        bounds = [policy.max_queue_size for policy in all_policies]
        self.min_bound = min(filter(None, bounds), default=NEVER)

    def __len__(self) -> int:
        return self.in_order.count + len(self.retries)

    # --- admission --------------------------------------------------------------------------------

    def is_full(self, priority: int) -> bool:
        """Check whether the level of this priority has reached its bound."""
        return self.in_order.count >= self.min_bound and self._is_full(*self._level(priority))

    def enqueue(
        self,
        client: Client[ScheduledRequest],
        submit: Submit,
        properties: BatchProperties,
        now_ns: int,
        *,
        is_cached: bool = False,
    ) -> ScheduledRequest:
        """Queue a request, and return it.

        With `is_cached`, the response is in the cache. The request is then not queued, but its
        deadline may expire.

        Raises:
            Unavailable: The deadline of the request has passed.
            QueueFull: The priority level of the request is full.
        """
        level, policy, arrived_ns, deadline_ns, own_timeout_us = self._limits(submit, now_ns)
        may_be_full = not is_cached and self.in_order.count >= self.min_bound
        if may_be_full and self._is_full(level, policy):
            raise QueueFull(f"{id_prefix(submit.request_id)}Exceeds maximum queue size")
        timeout_ns = (own_timeout_us or policy.default_timeout_microseconds) * _NS_PER_US
        request = ScheduledRequest(
            self._next_key(),
            client,
            submit.id,
            properties.batch_size or 1,
            properties.shape_key,
            arrived_ns,
            now_ns,
            deadline_ns,
            now_ns + timeout_ns if timeout_ns else 0,
            # The batch starts before this deadline. A timeout of the queue policy has no such
            # effect: it rejects the request when it expires.
            deadline_ns if deadline_ns and not own_timeout_us else NEVER,
            submit,
            level,
        )
        if deadline_ns:
            self.timers.add(deadline_ns, request)
        if is_cached:
            request.transition(Event.DISPATCH)
            return request
        self.in_order.append(request)
        if submit.callers:
            self.model_requests.append(request)
        if timeout_ns:
            self.timers.add(request.queue_limit_ns, request)
        return request

    def calls(self) -> list[ScheduledRequest]:
        """Return the waiting requests that executing models have sent and wait for."""
        waiting_calls = [call for call in self.model_requests if call.state is State.QUEUED]
        self.model_requests = waiting_calls
        return waiting_calls

    def _level(self, priority: int) -> tuple[int, LevelPolicy]:
        """Return the level of requests with this priority, and its policy."""
        policies = self._settings.policies
        level = policies.level(priority)
        return level, policies.policy(level)

    def _is_full(self, level: int, policy: LevelPolicy) -> bool:
        return 0 < policy.max_queue_size <= self.in_order.size(level)

    def check(self, submit: Submit, now_ns: int) -> None:
        """Raise Unavailable, as `enqueue` does, if the deadline of the request has passed."""
        self._limits(submit, now_ns)

    def _limits(self, submit: Submit, now_ns: int) -> tuple[int, LevelPolicy, int, int, int]:
        """Return the limits of a request.

        Returns:
            Its level, policy, arrival (ns), deadline (ns) and queue timeout (µs; 0: none).
        """
        settings = self._settings
        level, policy = self._only_level or self._level(submit.priority)
        arrived_ns, deadline_ns = submit.arrived_ns, submit.deadline_ns
        if not 0 < arrived_ns < now_ns:
            arrived_ns = plausible_arrival_ns(arrived_ns, now_ns)
        if deadline_ns < 0:
            deadline_ns = 0
        own_timeout_us = 0
        if submit.timeout_us:
            # While a sequence waits in the backlog, the timeout of its request applies to the
            # sequence, even if the policy does not permit requests to override its timeout.
            has_backlog = settings.sequences is not None
            timeout_us = min(submit.timeout_us, MAX_TIMEOUT_US)
            own_timeout_us = timeout_us if has_backlog else policy.own_timeout_us(timeout_us)
            if settings.timeout_is_deadline and not (own_timeout_us and policy.delays_expired):
                deadline_ns = earlier_deadline(deadline_ns, submit, arrived_ns)
        if 0 < deadline_ns < now_ns:
            raise Unavailable(expired_text(submit, arrived_ns, deadline_ns))
        return level, policy, arrived_ns, deadline_ns, own_timeout_us

    # --- order ------------------------------------------------------------------------------------

    def all(self) -> list[ScheduledRequest]:
        """Return all waiting requests, retries first."""
        return [*self.retries.values(), *self.in_order]

    def take_retry(self) -> ScheduledRequest:
        """Remove and return the first retry; its state becomes EXECUTING."""
        request = self.retries.popitem(last=False)[1]
        request.transition(Event.DISPATCH)
        return request

    def take(self, count: int) -> list[ScheduledRequest]:
        """Remove and return the first `count` requests in order; they become EXECUTING."""
        requests = self.in_order.take(count)
        for request in requests:
            request.transition(Event.DISPATCH)
        return requests

    def retry(self, request: ScheduledRequest) -> None:
        """Requeue a request whose worker died; it runs alone and before all others."""
        request.transition(Event.REQUEUE)
        # A retried request has no queue limit, because it has waited before.
        request.queue_limit_ns = 0
        self.retries[request.key] = request

    def put_back(self, request: ScheduledRequest) -> None:
        """Requeue a dispatched request that was not begun, before all others."""
        request.transition(Event.REQUEUE)
        self.in_order.prepend(request)

    def remove(self, request: ScheduledRequest) -> None:
        """Remove a queued request; the caller changes its state."""
        if not self.in_order.remove(request):
            self.retries.pop(request.key, None)

    # --- time -------------------------------------------------------------------------------------

    def take_expired(self, now_ns: int) -> list[ScheduledRequest]:
        """Return the expired requests: past their deadline, or past their queue limit while queued.

        If the policy of its level delays it, a request past its queue limit moves behind the others
        of the level and has no queue limit any more.
        """
        expired_requests: list[ScheduledRequest] = []
        for request in self.timers.take_expired(now_ns):
            is_past_deadline = 0 < request.deadline_ns < now_ns
            match request.state:
                case State.QUEUED if is_past_deadline:
                    expired_requests.append(request)
                case State.QUEUED if 0 < request.queue_limit_ns < now_ns:
                    if request.sequence is not None and request.sequence.instance_slots is not None:
                        request.queue_limit_ns = 0  # the queue limit applied only to the backlog
                    elif self._settings.policies.policy(request.level).delays_expired:
                        request.queue_limit_ns = 0
                        self.in_order.delay(request)
                    else:
                        expired_requests.append(request)
                case State.EXECUTING | State.RESPONDING | State.HELD if is_past_deadline:
                    expired_requests.append(request)
                case _:
                    pass
        return expired_requests


def _has_ended(request: ScheduledRequest) -> bool:
    return request.state is State.DONE


def earlier_deadline(deadline_ns: int, submit: Submit, arrived_ns: int) -> int:
    """Return the earlier of a deadline (0: none) and the end of a request's `timeout`."""
    timeout_end_ns = arrived_ns + min(submit.timeout_us, MAX_TIMEOUT_US) * _NS_PER_US
    return min(deadline_ns or timeout_end_ns, timeout_end_ns)


def expired_text(submit: Submit, arrived_ns: int, deadline_ns: int) -> str:
    """Return the error text of a request whose deadline has passed.

    The text contains the origin of the deadline.
    """
    origin = "the request's parameter 'timeout'"
    if deadline_ns == submit.deadline_ns:
        origin = submit.deadline_origin or "the caller"
    timeout_us = max(0, deadline_ns - arrived_ns) // _NS_PER_US
    return f"{EXPIRED_TEXT} ({timeout_us} microseconds, from {origin})"


def queue_expired_text(request: ScheduledRequest, now_ns: int) -> str:
    """Return the error text of a request that waited too long in the queue."""
    if 0 < request.deadline_ns < now_ns:
        return expired_text(request.submit, request.arrived_ns, request.deadline_ns)
    return EXPIRED_TEXT


def plausible_arrival_ns(arrived_ns: int, now_ns: int) -> int:
    """Return the arrival time that a client sent, or `now_ns` if that time is impossible."""
    return arrived_ns if 0 < arrived_ns < now_ns else now_ns
