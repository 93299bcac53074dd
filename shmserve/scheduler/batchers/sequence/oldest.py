"""Triton's oldest strategy: a dynamic batcher over the first request of each slot (pure).

A sequence has at most one request that may run; the next one may when that has returned, and then
comes behind those of the other sequences. So no batch has two of one sequence, and none is passed
over for long.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from itertools import islice

from shmserve.scheduler.batchers.base import Batch, WaitUntil
from shmserve.scheduler.batchers.dynamic import decide
from shmserve.scheduler.batchers.sequence.lane import Lane, Rows, Sequence
from shmserve.scheduler.settings import Batching


class OldestLane(Lane):
    """A lane by these rules."""

    def __init__(self, peer: bytes, number: tuple[int, int], slots: int, rules: Batching) -> None:
        super().__init__(peer, number, slots)
        self._ready: OrderedDict[int, Sequence] = OrderedDict()  # by slot, in order of offer
        self._rules = rules

    def offer(self, sequence: Sequence) -> None:
        """As `Lane` says."""
        self._ready[sequence.slot] = sequence

    def withdraw(self, sequence: Sequence) -> None:
        """As `Lane` says."""
        if self._ready.get(sequence.slot) is sequence:
            del self._ready[sequence.slot]

    def decide(self, now_ns: int, reserve_ns: int) -> Rows | WaitUntil | None:
        """As `Lane` says."""
        fronts = (sequence.waiting.first for sequence in self._ready.values())
        decision = decide(now_ns, fronts, self._rules, reserve_ns)
        if isinstance(decision, Batch):
            first = islice(self._ready.items(), decision.count)
            return Rows(list(first), decision.reason)
        return decision

    def hurry(self) -> None:
        """As `Lane` says."""
        self._rules = replace(self._rules, delay_ns=0)
