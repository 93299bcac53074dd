"""A tensor on its way through an ensemble, and the memory that it keeps (pure)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shmserve.ipc.memory.lent import Block, Token
from shmserve.ipc.tensors.descriptors import Place, TensorRef


class Value(Token):
    """A tensor of the ensemble, counted by who uses it, the flow first; `memory` is released with
    it.

    `holds`: not all its elements are false, if it is a condition. `override`: parameters
    (sequence_id, sequence_start, sequence_end) of the response that it came with.
    `held_credits`: its producers' credit for their next responses, which is held back as long. No
    `tensor`: there is none.
    """

    __slots__ = ("batched", "held_credits", "holds", "memory", "override", "tensor")

    def __init__(
        self,
        tensor: TensorRef | None,
        memory: Token | None = None,
        *,
        holds: bool = True,
        batched: bool = False,
        override: dict[str, Any] | None = None,
        held_credits: tuple[Token, ...] = (),
    ) -> None:
        self._users = 1
        self.tensor = tensor
        self.memory = memory
        self.holds = holds
        self.batched = batched
        self.override = override or {}
        self.held_credits = held_credits
        for credit in held_credits:
            credit.acquire()

    @property
    def there(self) -> bool:
        """Whether there is a tensor."""
        return self.tensor is not None

    @property
    def given(self) -> TensorRef:
        """The tensor, which is there."""
        assert self.tensor is not None
        return self.tensor

    @property
    def in_block(self) -> bool:
        """Whether it is inline, or lies in a block of the ensemble's, which may be kept longer."""
        inline = self.tensor is not None and isinstance(self.tensor.data, bytes)
        return inline or isinstance(self.memory, Block)

    def block_at(self, place: Place) -> Block | None:
        """The block of the ensemble's that it lies in, if that is there."""
        block = self.memory
        return block if isinstance(block, Block) and block.place == place else None

    def _free(self) -> None:
        if self.memory is not None:
            self.memory.release()
        for credit in self.held_credits:
            credit.release()

    @property
    def unsettled(self) -> bool:
        return self._users > 0 and bool(self.memory or self.held_credits)


def overrides(values: Iterable[Value]) -> dict[str, Any]:
    """The sequence's parameters that these tensors came with."""
    found: dict[str, Any] = {}
    for value in values:
        if value.override:
            found.update(value.override)
    return found


SKIPPED = Value(None, holds=False)
ABSENT = Value(None, holds=False)
