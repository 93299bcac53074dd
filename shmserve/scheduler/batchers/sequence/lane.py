"""A lane: the slots of one instance, each of which one sequence has at a time (pure)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Iterator

from shmserve.ipc.tensors.inference import SEQUENCE_START
from shmserve.ipc.transport.records import record
from shmserve.scheduler.batchers.base import Closed, WaitUntil
from shmserve.scheduler.requests.client import Client
from shmserve.scheduler.requests.request import Request

# Who began a sequence: a client of the scheduler's, and who that says it comes from.
Owner = tuple[Client[Request], int]


class WaitingRequests:
    """A FIFO queue of the requests of one sequence, in runs: a run is what cannot do without the
    request at its front, and a START begins one. Every operation takes constant time, a request's
    removal for each one that leaves with it."""

    __slots__ = ("_run_of", "_runs")

    def __init__(self) -> None:
        self._runs: deque[OrderedDict[int, Request]] = deque()  # empty ones only in the middle
        self._run_of: dict[int, OrderedDict[int, Request]] = {}  # by the key of a request

    def __len__(self) -> int:
        return len(self._run_of)

    def __iter__(self) -> Iterator[Request]:
        return (request for run in self._runs for request in run.values())

    @property
    def first(self) -> Request:
        """The one that came first."""
        return next(iter(self._runs[0].values()))

    def append(self, request: Request) -> None:
        """Behind all others."""
        if not self._runs or request.flags & SEQUENCE_START:
            self._runs.append(OrderedDict())
        run = self._run_of[request.key] = self._runs[-1]
        run[request.key] = request

    def put_back(self, request: Request) -> None:
        """Before all others, which belong to it up to a START."""
        if not self._runs or self.first.flags & SEQUENCE_START:
            self._runs.appendleft(OrderedDict())
        run = self._run_of[request.key] = self._runs[0]
        run[request.key] = request
        run.move_to_end(request.key, last=False)

    def take(self) -> Request:
        """The one that came first, which leaves."""
        key, request = self._runs[0].popitem(last=False)
        del self._run_of[key]
        self._trim()
        return request

    def is_in_last_run(self, request: Request) -> bool:
        """Whether all that came behind a request would leave with it."""
        return bool(self._runs) and request.key in self._runs[-1]

    def remove(self, request: Request) -> list[Request]:
        """A request leaves: what does so, with those behind it up to a START; [] where it has left
        already."""
        removed: list[Request] = []
        run = self._run_of.get(request.key)
        while run is not None and request.key in run:
            key, last = run.popitem()
            del self._run_of[key]
            removed.append(last)
        self._trim()
        removed.reverse()
        return removed

    def _trim(self) -> None:
        while self._runs and not self._runs[0]:
            self._runs.popleft()
        while self._runs and not self._runs[-1]:
            self._runs.pop()


class Sequence:
    """Requests with one correlation id, from a START to an END, in the order of their arrival.

    It has a slot (`lane`, `slot`) or waits in the backlog (no `lane`). At most one of its requests
    runs at a time. `owner` is who began it. `ended`: no more can come. `begun`: its
    instance has state of it.
    """

    __slots__ = ("begun", "ended", "id", "lane", "owner", "running", "slot", "waiting")

    def __init__(self, correlation_id: int | str, owner: Owner) -> None:
        self.id = correlation_id
        self.owner = owner
        self.waiting = WaitingRequests()
        self.running: Request | None = None
        self.lane: Lane | None = None
        self.slot = 0
        self.ended = False
        self.begun = False


@record
class Rows:
    """Run these now, each in its slot; None is a null row."""

    rows: list[tuple[int, Sequence | None]]
    reason: Closed


class Lane(ABC):
    """The `slots` of the instance at `peer`, and what it `runs`. `number` orders the lanes."""

    def __init__(self, peer: bytes, number: tuple[int, int], slots: int) -> None:
        self.peer = peer
        self.number = number
        self.slots: list[Sequence | None] = [None] * slots
        self.runs: list[Sequence] = []
        self.closed = False  # to sequences that come

    @property
    def empty(self) -> bool:
        """Whether it has no sequence, and runs none."""
        return not self.runs and not any(self.slots)

    @abstractmethod
    def offer(self, sequence: Sequence) -> None:
        """The first waiting request of a sequence may run."""

    @abstractmethod
    def withdraw(self, sequence: Sequence) -> None:
        """It may not any more, or runs; nothing if it was not offered."""

    @abstractmethod
    def decide(self, now_ns: int, reserve_ns: int) -> Rows | WaitUntil | None:
        """What to run now that the instance is idle; None: nothing is there.

        `reserve_ns`: how long before a deadline a batch must start to be done in time.
        """

    @abstractmethod
    def hurry(self) -> None:
        """Nothing more comes that would be worth waiting for."""
