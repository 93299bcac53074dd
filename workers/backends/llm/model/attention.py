"""Attention over a paged KV cache: one interface, a way for CPUs and one for CUDA.

A sequence whose blocks lie side by side is read where it is, as a view; else its blocks are
gathered first, which gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

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
        # Heads come before slots: then each is read in one piece.
        heads = (architecture.layers, 2, architecture.kv_heads)
        size = architecture.head_dim
        self.pool = torch.zeros((*heads, blocks * block_size, size), device=device)
        self._blocks = self.pool.view(*heads, blocks, block_size, size)
        self._host = torch.zeros((*heads, host_blocks, block_size, size))
        self.keys = [layer[0] for layer in self.pool]
        self.values = [layer[1] for layer in self.pool]

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, at: torch.Tensor) -> None:
        """Put keys and values [tokens, KV heads, head size] into these slots."""
        self.keys[layer].index_copy_(1, at, keys.transpose(0, 1))
        self.values[layer].index_copy_(1, at, values.transpose(0, 1))

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
    """The rows of one sequence in a pass: `size` from `first` on, behind `before` tokens. Its
    blocks are `blocks`, or all slots from `begin` on, where they lie side by side."""

    first: int
    size: int
    before: int
    begin: int
    blocks: torch.Tensor | None
    mask: torch.Tensor | None

    @property
    def length(self) -> int:
        """The tokens that its last row sees."""
        return self.before + self.size


@dataclass(eq=False)
class Pass:
    """The rows of one pass through a model: where each is in its sequence (`positions`), and where
    its keys and values go (`slots`). Rows without a span pad the batch."""

    block_size: int
    device: str = "cpu"
    spans: list[Span] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    _positions: list[np.ndarray] = field(default_factory=list)
    _slots: list[np.ndarray] = field(default_factory=list)

    def add(self, tokens: Sequence[int], start: int, table: list[int]) -> int:
        """Rows for these tokens of a sequence, which begin at position `start`; where they begin in
        the pass."""
        first, count, size = len(self.tokens), len(tokens), self.block_size
        positions = np.arange(start, start + count)
        blocks = np.array(table[: -(-(start + count) // size)])
        self._positions.append(positions)
        self._slots.append(blocks[positions // size] * size + positions % size)
        apart = None
        if any(after - before != 1 for before, after in pairwise(blocks)):
            apart = torch.from_numpy(blocks).to(self.device)
        mask = None
        if count > 1 and start:
            seen = torch.ones(count, start + count, dtype=torch.bool, device=self.device)
            mask = seen.tril(start)
        self.spans.append(Span(first, count, start, int(blocks[0]) * size, apart, mask))
        self.tokens.extend(tokens)
        return first

    def pad(self, rows: int) -> None:
        """Repeat the last row until there are so many."""
        while len(self.tokens) < rows:
            self.tokens.append(self.tokens[-1])
            self._positions.append(self._positions[-1][-1:])
            self._slots.append(self._slots[-1][-1:])

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens, positions and slots, int64 [rows]."""
        parts = self.tokens, np.concatenate(self._positions), np.concatenate(self._slots)
        tokens, positions, slots = (torch.as_tensor(part, device=self.device) for part in parts)
        return tokens, positions, slots


class Attention:
    """Attention span by span, on any device."""

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache

    def attend(self, queries: torch.Tensor, layer: int, rows: Pass) -> torch.Tensor:
        """What the rows' queries [rows, heads, head size] find in their sequences, keys and values
        of this pass included: [rows, heads * head size]."""
        cache = self._cache
        keys, values = cache.keys[layer], cache.values[layer]
        # Query heads that share a key-value head are rows of one product.
        shared = queries.view(len(queries), len(keys), -1, queries.shape[2])
        grouped: Sequence[torch.Tensor] = torch.split(shared, 1)
        attention = functional.scaled_dot_product_attention
        found: list[torch.Tensor] = []
        for span in rows.spans:
            seen = self._read(keys, span), self._read(values, span)
            if span.size == 1:
                found.append(attention(grouped[span.first], *seen).reshape(1, -1))
            else:
                mine = queries[span.first : span.first + span.size]
                found.append(_prompt(mine, *seen, span.mask))
        padding = len(queries) - sum(span.size for span in rows.spans)
        if padding:
            # They repeat the last row in all, as they write to its slot, too.
            found.append(found[-1][-1:].expand(padding, -1))
        return torch.cat(found)

    def _read(self, pool: torch.Tensor, span: Span) -> torch.Tensor:
        """A sequence's keys or values, [1, KV heads, length, head size], of one layer's."""
        heads, slots, size = pool.shape
        if span.blocks is not None:
            blocks = pool.view(heads, -1, self._cache.block_size, size)
            gathered = blocks.index_select(1, span.blocks).flatten(1, 2)
            return gathered[:, : span.length].unsqueeze(0)
        begin = pool.storage_offset() + span.begin * size
        return pool.as_strided((1, heads, span.length, size), (0, slots * size, size, 1), begin)


def _prompt(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Attention of several rows of one sequence; without a mask they are its first."""
    found = functional.scaled_dot_product_attention(
        queries.transpose(0, 1).unsqueeze(0),
        keys,
        values,
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=keys.shape[1] != queries.shape[1],
    )
    return found.squeeze(0).transpose(0, 1).reshape(len(queries), -1)


class PagedAttention(Attention):
    """Attention of all spans in one call, on CUDA devices whose kernels read block tables."""

    def attend(self, queries: torch.Tensor, layer: int, rows: Pass) -> torch.Tensor:
        """As `Attention.attend` says."""
        from torch.nn.attention.varlen import varlen_attn

        cache, device, spans = self._cache, queries.device, rows.spans
        keys, values = cache.keys[layer], cache.values[layer]
        heads, _, size = keys.shape
        pages, order = (heads, -1, cache.block_size, size), (1, 2, 0, 3)
        counts = [span.size for span in spans]
        lengths = torch.tensor([span.length for span in spans], dtype=torch.int32, device=device)
        mine = sum(counts)
        attend: Any = varlen_attn
        found = attend(
            queries[:mine],
            keys.view(pages).permute(order),
            values.view(pages).permute(order),
            _ends(counts, device),
            None,
            max(counts),
            max(span.length for span in spans),
            window_size=(-1, 0),
            enable_gqa=heads != queries.shape[1],
            seqused_k=lengths,
            block_table=self._tables(spans, device),
        )
        return torch.cat((found, found[-1:].expand(len(queries) - mine, -1, -1))).flatten(1)

    def _tables(self, spans: list[Span], device: torch.device) -> torch.Tensor:
        size = self._cache.block_size
        tables = [
            torch.arange(span.begin // size, (span.begin + span.length - 1) // size + 1)
            if span.blocks is None
            else span.blocks.cpu()
            for span in spans
        ]
        padded = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True)
        return padded.to(device, torch.int32)


def _ends(counts: Iterable[int], device: torch.device) -> torch.Tensor:
    """0 and the running sums, int32."""
    return torch.tensor([0, *np.cumsum(list(counts))], dtype=torch.int32, device=device)


def make_attention(cache: KvCache, architecture: Architecture, device: str) -> Attention:
    """The best attention that works on a device."""
    if not device.startswith("cuda"):
        return Attention(cache)
    paged, plain = PagedAttention(cache), Attention(cache)
    rows = Pass(cache.block_size, device)
    rows.add([0], 0, [0])
    queries = torch.ones(1, architecture.heads, architecture.head_dim, device=device)
    try:
        same = torch.allclose(paged.attend(queries, 0, rows), plain.attend(queries, 0, rows))
    except Exception:  # a torch, or a device, without such a kernel
        return plain
    return paged if same else plain
