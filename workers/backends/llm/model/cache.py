"""A paged KV cache, and the rows of a pass over it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from shmserve.workers.backends.llm.model.architecture import Architecture


class KvCache:
    """Keys and values of all layers: [layers, 2, KV heads, blocks * block size, head size].

    A host pool of the same layout has `host_blocks` blocks. Memory is allocated when it is first
    written.
    """

    def __init__(
        self,
        architecture: Architecture,
        block_size: int,
        blocks: int,
        host_blocks: int,
        device: str = "cpu",
    ) -> None:
        self.block_size = block_size
        self.slots = blocks * block_size
        self.query_heads, self.kv_heads = architecture.heads, architecture.kv_heads
        # Heads precede slots, so that each head is read contiguously.
        heads = (architecture.layers, 2, self.kv_heads)
        size = architecture.head_dim
        self.pool = torch.zeros((*heads, self.slots, size), device=device)
        self._blocks = self.pool.view(*heads, blocks, block_size, size)
        self._host = torch.zeros((*heads, host_blocks, block_size, size))
        self._layers = self.pool.flatten(1, 2).unbind()
        self.keys = [layer[0] for layer in self.pool]
        self.values = [layer[1] for layer in self.pool]
        # The same, as rows of heads and slots.
        self.rows = [
            (keys.flatten(0, 1), values.flatten(0, 1))
            for keys, values in zip(self.keys, self.values, strict=True)
        ]

    def write(self, layer: int, keys_and_values: torch.Tensor, at: torch.Tensor) -> None:
        """Store keys and values in slots: [tokens, heads of keys and then of values, head size]."""
        self._layers[layer].index_copy_(1, at, keys_and_values.transpose(0, 1))

    def copy(self, out: list[int], back: list[int], within: list[int]) -> None:
        """Copy blocks to the host pool, back from it, and within the pool, in this order.

        Each list alternates between source and destination.
        """
        for source, target, pairs in (
            (self._blocks, self._host, out),
            (self._host, self._blocks, back),
            (self._blocks, self._blocks, within),
        ):
            if pairs:
                read = torch.tensor(pairs[::2], device=source.device)
                write = torch.tensor(pairs[1::2], device=target.device)
                target.index_copy_(3, write, source.index_select(3, read).to(target.device))


class RowSpan(NamedTuple):
    """The rows of one sequence in a pass.

    Attributes:
        first: The index of the first row.
        size: The number of rows.
        before: The number of tokens before the rows.
        table: The block table.
        prompt: Whether the tokens are from the prompt. Sampled tokens are computed with the same
            bits as one by one.
    """

    first: int
    size: int
    before: int
    table: list[int]
    prompt: bool

    @property
    def length(self) -> int:
        """Return the number of tokens that the last row sees."""
        return self.before + self.size

    def parts(self, size: int) -> Iterator[RowSpan]:
        """Yield the rows as spans that end at multiples of `size` tokens of the sequence.

        The parts are then independent of how a prompt is split otherwise.
        """
        for begin in range(self.before - self.before % size, self.length, size):
            start, end = max(begin, self.before), min(begin + size, self.length)
            first = self.first + start - self.before
            yield RowSpan(first, end - start, start, self.table, self.prompt)


@dataclass(eq=False)
class Pass:
    """The rows of one pass through a model.

    Rows without a span pad the batch and repeat the last row.

    Attributes:
        block_size: The size of a block.
        device: The device.
        spans: The rows by sequence.
        tokens: The tokens.
        positions: The position of each row in its sequence.
        slots: The slot for the keys and values of each row.
    """

    block_size: int
    device: str = "cpu"
    spans: list[RowSpan] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)

    def add(self, tokens: Sequence[int], start: int, table: list[int], prompt: bool = False) -> int:
        """Add rows for tokens of a sequence; return the index of the first one.

        Args:
            tokens: The tokens.
            start: The position of the first token.
            table: The block table of the sequence.
            prompt: Whether the tokens are from the prompt.
        """
        first, size = len(self.tokens), self.block_size
        new_positions = range(start, start + len(tokens))
        self.tokens += tokens
        self.positions += new_positions
        self.slots += [
            table[position // size] * size + position % size for position in new_positions
        ]
        self.spans.append(RowSpan(first, len(tokens), start, table, prompt))
        return first

    def only(self, indices: list[int]) -> Pass:
        """Return a pass of the `indices` rows, which are the last ones of their spans."""
        few = Pass(self.block_size, self.device)
        for first, size, before, table, prompt in self.spans:
            end = first + size
            count = bisect_left(indices, end) - bisect_left(indices, first)
            if count:
                few.spans.append(
                    RowSpan(len(few.tokens), count, before + size - count, table, prompt)
                )
                few.tokens += self.tokens[end - count : end]
                few.positions += self.positions[end - count : end]
                few.slots += self.slots[end - count : end]
        return few

    def pad(self, rows: int) -> None:
        """Repeat the last row until there are `rows` rows."""
        for column in (self.tokens, self.positions, self.slots):
            column += column[-1:] * (rows - len(column))

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return tokens, positions and slots, int64 [rows]."""
        columns = torch.tensor([self.tokens, self.positions, self.slots], device=self.device)
        tokens, positions, slots = columns.unbind()
        return tokens, positions, slots
