"""A priority queue of requests: strict levels, 1 the highest (pure).

    level 1    in time: in order of arrival    delayed: in order of their timeouts
    level 2    ...                             ...

All of a level come before all of the next one, and its delayed requests, whose timeout has passed,
behind those that are in time. There is no ageing: a low level may starve.

Any request is found by its key, so that it can leave from the middle; no operation but a walk looks
at more requests than it moves. Levels without requests take no memory, but for the last one.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain

from shmserve.scheduler.requests.request import ScheduledRequest


class _Level:
    """The requests of one level by key, in order."""

    __slots__ = ("delayed", "in_time")

    def __init__(self) -> None:
        self.in_time: OrderedDict[int, ScheduledRequest] = OrderedDict()
        self.delayed: OrderedDict[int, ScheduledRequest] = OrderedDict()

    def __len__(self) -> int:
        return len(self.in_time) + len(self.delayed)

    def __iter__(self) -> Iterator[ScheduledRequest]:
        if self.delayed:
            return chain(self.in_time.values(), self.delayed.values())
        return iter(self.in_time.values())

    def part(self, request: ScheduledRequest) -> OrderedDict[int, ScheduledRequest]:
        """The part where this request is, or belongs."""
        return self.delayed if request.delayed else self.in_time


class _Levels(dict[int, _Level]):
    """Levels by number. Who asks for one that has no requests makes it; `order` are those that are
    there, the highest first."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[int] = []

    def __missing__(self, number: int) -> _Level:
        level = self[number] = _Level()
        insort(self.order, number)
        return level


class PriorityQueue:
    """Requests in the order in which they are to run, by their `level`; `count` of them."""

    def __init__(self) -> None:
        self._levels = _Levels()
        # The levels that have requests, the highest first; one that is left alone may be empty.
        self._order = self._levels.order
        self.count = 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[ScheduledRequest]:
        if len(self._order) == 1:
            return iter(self._levels[self._order[0]])
        return chain.from_iterable(map(self._levels.__getitem__, self._order))

    def size(self, level: int) -> int:
        """The number of requests that a level has."""
        found = self._levels.get(level)
        return 0 if found is None else len(found)

    def append(self, request: ScheduledRequest) -> None:
        """Enqueue a request behind those of its level that are in time."""
        self._levels[request.level].in_time[request.key] = request
        self.count += 1

    def prepend(self, request: ScheduledRequest) -> None:
        """Put a request before all others of its level, or of its delayed ones if it is one."""
        part = self._levels[request.level].part(request)
        part[request.key] = request
        part.move_to_end(request.key, last=False)
        self.count += 1

    def delay(self, request: ScheduledRequest) -> None:
        """Move a request that is in time behind all others of its level."""
        level = self._levels[request.level]
        level.delayed[request.key] = level.in_time.pop(request.key)
        request.delayed = True

    def remove(self, request: ScheduledRequest) -> bool:
        """Take a request out from anywhere; whether it was there."""
        level = self._levels.get(request.level)
        if level is None or level.part(request).pop(request.key, None) is None:
            return False
        self.count -= 1
        if not level:
            self._forget(request.level)
        return True

    def take(self, count: int) -> list[ScheduledRequest]:
        """Take the first `count` requests out."""
        taken: list[ScheduledRequest] = []
        self.count -= count
        while len(taken) < count:
            number = self._order[0]
            level = self._levels[number]
            part = level.in_time or level.delayed
            if len(part) <= count - len(taken):
                taken += part.values()
                part.clear()
            while part and len(taken) < count:
                taken.append(part.popitem(last=False)[1])
            if not (level.in_time or level.delayed):
                self._forget(number)
        return taken

    def _forget(self, number: int) -> None:
        """A level is empty; the only one is kept, since it is mostly the next one's, too."""
        if len(self._order) > 1:
            del self._levels[number]
            del self._order[bisect_left(self._order, number)]
