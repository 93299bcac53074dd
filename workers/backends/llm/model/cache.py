"""A paged KV cache, and the rows of a pass over it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from shmserve.workers.backends.llm.model.architecture import Architecture


class KvCache:
    """Keys and values of a model, of all layers: [layers, 2, KV heads, blocks * block size, head
    size], and the same on the host for `host_blocks`. Memory is taken as it is first written."""

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
        # Heads come before slots: then each is read in one piece.
        heads = (architecture.layers, 2, self.kv_heads)
        size = architecture.head_dim
        self.pool = torch.zeros((*heads, self.slots, size), device=device)
        self._blocks = self.pool.view(*heads, blocks, block_size, size)
        self._host = torch.zeros((*heads, host_blocks, block_size, size))
        self._layers = self.pool.flatten(1, 2).unbind()
        self.keys = [layer[0] for layer in self.pool]
        self.values = [layer[1] for layer in self.pool]
        self.block_slots = np.arange(self.slots, dtype=np.int32).reshape(blocks, block_size)
        # The same with a row for each head and slot; and where those of each query head begin.
        self.rows = [
            (keys.flatten(0, 1), values.flatten(0, 1))
            for keys, values in zip(self.keys, self.values, strict=True)
        ]
        shared = self.query_heads // self.kv_heads
        self.first_rows = np.arange(self.query_heads, dtype=np.int32) // shared * self.slots

    def write(self, layer: int, both: torch.Tensor, at: torch.Tensor) -> None:
        """Put keys and values of the first tokens into these slots, one each: [tokens, heads of
        keys and then of values, head size]."""
        self._layers[layer].index_copy_(1, at, both[: at.shape[0]].transpose(0, 1))

    def copy(self, out: list[int], back: list[int], within: list[int]) -> None:
        """Copy blocks to the host pool, back from it, and within the pool, in this order; each is
        from, to, from, to, ..."""
        for source, target, pairs in (
            (self._blocks, self._host, out),
            (self._host, self._blocks, back),
            (self._blocks, self._blocks, within),
        ):
            if pairs:
                read = torch.tensor(pairs[::2], device=source.device)
                write = torch.tensor(pairs[1::2], device=target.device)
                target.index_copy_(3, write, source.index_select(3, read).to(target.device))


class Span(NamedTuple):
    """The rows of one sequence in a pass: `size` from `first` on, behind `before` tokens, which are
    in the blocks of its `table`. Those of a `prompt` were given; the others are such as were
    sampled one by one, and each is computed as it is alone."""

    first: int
    size: int
    before: int
    table: list[int]
    prompt: bool

    @property
    def length(self) -> int:
        """The tokens that its last row sees."""
        return self.before + self.size

    def parts(self, size: int) -> Iterator[Span]:
        """Its rows as spans that end where the sequence has a multiple of `size` tokens, so that
        they are the same wherever else a prompt is cut."""
        for begin in range(self.before - self.before % size, self.length, size):
            start, end = max(begin, self.before), min(begin + size, self.length)
            first = self.first + start - self.before
            yield Span(first, end - start, start, self.table, self.prompt)


@dataclass(eq=False)
class Pass:
    """The rows of one pass through a model: where each is in its sequence (`positions`), and where
    its keys and values go (`slots`). Rows without a span or slot pad the batch."""

    block_size: int
    device: str = "cpu"
    spans: list[Span] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)

    def add(self, tokens: Sequence[int], start: int, table: list[int], prompt: bool = False) -> int:
        """Rows for these tokens of a sequence, which begin at position `start`, perhaps in its
        `prompt`; where they begin in the pass."""
        first, size = len(self.tokens), self.block_size
        places = range(start, start + len(tokens))
        self.tokens += tokens
        self.positions += places
        self.slots += [table[place // size] * size + place % size for place in places]
        self.spans.append(Span(first, len(tokens), start, table, prompt))
        return first

    def only(self, wanted: list[int]) -> Pass:
        """A pass of the `wanted` rows: each span's are its last ones."""
        few = Pass(self.block_size, self.device)
        for first, size, before, table, prompt in self.spans:
            end = first + size
            count = bisect_left(wanted, end) - bisect_left(wanted, first)
            if count:
                few.spans.append(Span(len(few.tokens), count, before + size - count, table, prompt))
                few.tokens += self.tokens[end - count : end]
                few.positions += self.positions[end - count : end]
                few.slots += self.slots[end - count : end]
        return few

    def pad(self, rows: int) -> None:
        """Repeat the last row until there are so many; what it computes again is not kept."""
        for column in (self.tokens, self.positions):
            column += column[-1:] * (rows - len(column))

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens and positions, int64 [rows], and slots, fewer where rows pad the batch."""
        rows = len(self.tokens)
        columns = torch.tensor(self.tokens + self.positions + self.slots, device=self.device)
        return columns[:rows], columns[rows : 2 * rows], columns[2 * rows :]
