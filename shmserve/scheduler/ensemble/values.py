"""A tensor on its way through an ensemble, and the memory that it keeps (pure)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shmserve.ipc.tensors.descriptors import TensorRef


class HeldCredit:
    """A producer's credit for one more response, counted by the values that come of its last:
    `give_back` runs when nobody uses any of them."""

    __slots__ = ("_give_back", "_users")

    def __init__(self, give_back: Callable[[], None]) -> None:
        self._give_back = give_back
        self._users = 1

    def acquire(self) -> None:
        """One more uses it."""
        self._users += 1

    def release(self) -> None:
        """One uses it no more."""
        self._users -= 1
        if not self._users:
            self._give_back()


class Value:
    """A tensor of the ensemble, counted by who uses it: `on_free` runs when the last one does no
    more. The flow has it first.

    `holds`: not all its elements are false, if it is a condition. `override`: parameters
    (sequence_id, sequence_start, sequence_end) of the response that it came with.
    `held_credits`: those of the producers before it, which are held back as long. No `tensor`:
    there is none.
    """

    __slots__ = ("_on_free", "_users", "batched", "held_credits", "holds", "override", "tensor")

    def __init__(
        self,
        tensor: TensorRef | None,
        on_free: Callable[[], None] | None = None,
        *,
        holds: bool = True,
        batched: bool = False,
        override: dict[str, Any] | None = None,
        held_credits: tuple[HeldCredit, ...] = (),
    ) -> None:
        self.tensor = tensor
        self.holds = holds
        self.batched = batched
        self.override = override or {}
        self.held_credits = held_credits
        self._on_free = on_free
        self._users = 1
        for credit in held_credits:
            credit.acquire()

    @property
    def there(self) -> bool:
        """Whether there is a tensor."""
        return self.tensor is not None

    def acquire(self) -> None:
        """One more uses it."""
        self._users += 1

    def release(self) -> None:
        """One uses it no more."""
        self._users -= 1
        if self._users:
            return
        if self._on_free is not None:
            self._on_free()
        for credit in self.held_credits:
            credit.release()


SKIPPED = Value(None, holds=False)
ABSENT = Value(None, holds=False)
