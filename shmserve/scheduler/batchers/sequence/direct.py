"""Triton's direct strategy: a batch has a row for each slot, and a sequence keeps its row (pure).

1. A batch has the rows from slot 0 to the highest slot with a request. Slots below it without one,
   and those whose request has other shapes, get null rows. Behind it there is no row, not even for
   an idle sequence: a lone request in slot 0 is READY [1], as a real Triton has it, where its
   documentation's example shows READY [1, 0].
2. The request that has waited for longest says which shapes a batch has.
3. Where a delay and a minimum utilization are both set, a batch waits until so many of the slots
   have a request, its oldest request has waited that long, or a deadline would pass.
"""

from __future__ import annotations

from shmserve.scheduler.batchers.base import Closed, WaitUntil
from shmserve.scheduler.batchers.sequence.lane import Lane, Rows, Sequence


class DirectLane(Lane):
    """A lane by these rules."""

    def __init__(
        self,
        peer: bytes,
        number: tuple[int, int],
        slots: int,
        delay_ns: int,
        minimum_utilization: float,
    ) -> None:
        super().__init__(peer, number, slots)
        self._ready: dict[int, Sequence] = {}
        self._delay_ns = delay_ns
        self._needed = minimum_utilization * slots

    def offer(self, sequence: Sequence) -> None:
        """As `Lane` says."""
        self._ready[sequence.slot] = sequence

    def withdraw(self, sequence: Sequence) -> None:
        """As `Lane` says."""
        if self._ready.get(sequence.slot) is sequence:
            del self._ready[sequence.slot]

    def decide(self, now_ns: int, reserve_ns: int) -> Rows | WaitUntil | None:
        """As `Lane` says."""
        if not self._ready:
            return None
        slots = sorted(self._ready)
        fronts = {slot: self._ready[slot].waiting.first for slot in slots}
        oldest = min(slots, key=lambda slot: (fronts[slot].enqueued_ns, slot))
        reason = Closed.FULL if len(slots) == len(self.slots) else Closed.IDLE
        if self._delay_ns and self._needed and len(slots) < self._needed:
            # More than the delay must have passed.
            until = fronts[oldest].enqueued_ns + self._delay_ns + 1
            hurry = min(front.hurry_ns for front in fronts.values()) - reserve_ns
            if now_ns < min(until, hurry):
                return WaitUntil(min(until, hurry))
            reason = Closed.DELAY if until <= now_ns else Closed.DEADLINE
        shape_key = fronts[oldest].shape_key
        rows: list[tuple[int, Sequence | None]] = [(slot, None) for slot in range(slots[-1] + 1)]
        for slot in slots:
            if fronts[slot].shape_key == shape_key:
                rows[slot] = slot, self._ready[slot]
            else:
                reason = Closed.SHAPE
        return Rows(rows, reason)

    def hurry(self) -> None:
        """As `Lane` says."""
        self._delay_ns = 0
