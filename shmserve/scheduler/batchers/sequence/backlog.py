"""The backlog: sequences that wait for a slot, in the order of their arrival, by client (pure).

Where several clients' sequences wait, these take turns: one that opens a million of them and ends
none delays its own. Of those who come through a gateway, each connection is one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator

from shmserve.scheduler.batchers.sequence.slots import Sequence


class Backlog:
    """Sequences by who opened them. Every operation takes the same time however many there are."""

    def __init__(self) -> None:
        self._by_owner: OrderedDict[Hashable, OrderedDict[Sequence, None]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._by_owner)

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for line in self._by_owner.values() for sequence in line)

    def count(self, owner: Hashable) -> int:
        """The number of a client's sequences that wait."""
        return len(self._by_owner.get(owner, ()))

    def append(self, sequence: Sequence) -> None:
        """Behind all others of its client."""
        self._by_owner.setdefault(sequence.owner, OrderedDict())[sequence] = None

    def put_back(self, sequence: Sequence) -> None:
        """Before all others."""
        self.append(sequence)
        self._by_owner[sequence.owner].move_to_end(sequence, last=False)
        self._by_owner.move_to_end(sequence.owner, last=False)

    def pop(self) -> Sequence:
        """The next, whose client has its turn again after all others."""
        owner, line = next(iter(self._by_owner.items()))
        sequence, _ = line.popitem(last=False)
        self._by_owner.move_to_end(owner)
        self._drop_empty(owner, line)
        return sequence

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence that does not wait any more, if it did."""
        line = self._by_owner.get(sequence.owner)
        if line is not None:
            line.pop(sequence, None)
            self._drop_empty(sequence.owner, line)

    def _drop_empty(self, owner: Hashable, line: OrderedDict[Sequence, None]) -> None:
        if not line:
            del self._by_owner[owner]
