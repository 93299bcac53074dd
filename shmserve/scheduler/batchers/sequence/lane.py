"""A lane: the slots of one instance, each of which one sequence has at a time (pure)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque

from shmserve.ipc.transport.records import record
from shmserve.scheduler.batchers.base import Closed, WaitUntil
from shmserve.scheduler.requests.client import Client
from shmserve.scheduler.requests.request import Request

# Who began a sequence: a client of the scheduler's, and who that says it comes from.
Owner = tuple[Client[Request], int]


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
        self.waiting: deque[Request] = deque()
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
