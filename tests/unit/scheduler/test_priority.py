"""The priority queue, compared with a list that is sorted for each query."""

from collections.abc import Iterable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shmserve.scheduler.requests.queue import PriorityQueue
from shmserve.scheduler.requests.scheduled import NEVER, NO_SUBMIT, Client, ScheduledRequest

PRIORITY_LEVELS = st.sampled_from([1, 2, 3, 2**64 - 1])
CLIENT = Client[ScheduledRequest](b"1.a", print)


def request(key: int, level: int) -> ScheduledRequest:
    return ScheduledRequest(key, CLIENT, key, 1, b"", 0, 0, 0, 0, NEVER, NO_SUBMIT, level)


class ComparedQueue(RuleBasedStateMachine):
    """A model of the queue: a plain list of requests with sort keys."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = PriorityQueue()
        self.naive: list[tuple[tuple[int, bool, int], ScheduledRequest]] = []
        self.requests: list[ScheduledRequest] = []
        self.insertions = 0

    def _expected(self) -> list[ScheduledRequest]:
        return [request for _, request in sorted(self.naive, key=lambda item: item[0])]

    def _drop(self, requests: Iterable[ScheduledRequest]) -> None:
        removed_ids = set(map(id, requests))
        self.naive = [item for item in self.naive if id(item[1]) not in removed_ids]

    @rule(level=PRIORITY_LEVELS)
    def append(self, level: int) -> None:
        self.insertions += 1
        new_request = request(self.insertions, level)
        self.requests.append(new_request)
        self.queue.append(new_request)
        self.naive.append(((level, False, self.insertions), new_request))

    @precondition(lambda self: self.naive)
    @rule(data=st.data())
    def delay(self, data: st.DataObject) -> None:
        """Let the timeout of a request expire."""
        undelayed = [request for _, request in self.naive if not request.is_delayed]
        if undelayed:
            self.insertions += 1
            chosen_request = data.draw(st.sampled_from(undelayed))
            self._drop([chosen_request])
            self.queue.delay(chosen_request)
            self.naive.append(((chosen_request.level, True, self.insertions), chosen_request))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        chosen_request = data.draw(st.sampled_from(self.requests))
        is_expected = chosen_request in self._expected()
        self._drop([chosen_request])
        assert self.queue.remove(chosen_request) is is_expected

    @rule(data=st.data(), back=st.booleans())
    def take(self, data: st.DataObject, back: bool) -> None:
        """Remove a batch, and put it back if `back` is set."""
        expected = self._expected()
        count = data.draw(st.integers(0, len(expected)))
        batch = self.queue.take(count)
        assert batch == expected[:count]
        self._drop(batch)
        if back:
            for request in reversed(batch):
                self.insertions += 1
                self.queue.prepend(request)
                self.naive.append(((request.level, request.is_delayed, -self.insertions), request))

    @invariant()
    def check_equality(self) -> None:
        """Check that the order and the counts equal those of the list."""
        expected = self._expected()
        assert list(self.queue) == expected and len(self.queue) == len(expected)
        for level in (1, 2, 3, 4):
            assert self.queue.size(level) == sum(request.level == level for request in expected)
        used_queues = {(request.level, request.is_delayed) for request in expected}
        kept_queues = self.queue._queues.keys() - used_queues
        assert used_queues <= self.queue._queues.keys() and len(kept_queues) <= 1, (
            "memory is for what is there"
        )


ComparedQueue.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAgainstAList = ComparedQueue.TestCase
