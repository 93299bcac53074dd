"""A paged KV cache, and attention over it: one interface, implemented for CPUs and for CUDA.

A sequence with contiguous blocks is read as a view; otherwise its blocks are gathered, with the
same bits as the result.

On CPUs, rows that are computed one by one are computed for all sequences together. The keys that a
row sees are a row of a sparse matrix, for each head:

    scores  = queries x keys, where they are seen
    weights = softmax of each row
    found   = sums of values, with these weights

Keys and values are read in place. The bits of a row depend only on its own sequence: each row has
its own width, and no sum goes beyond it.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch.nn import functional

from shmserve.workers.backends.llm.model.architecture import Architecture

_GRAIN = 16  # widths are multiples of this number of keys
# Maximum number of rows of a sequence that are computed one by one, to verify proposed tokens.
_MAX_ROWS = 16


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
        # Views of the same memory with a row for each head and slot.
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
    block_table: list[int]
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
            yield RowSpan(first, end - start, start, self.block_table, self.prompt)


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


class LoneRow(NamedTuple):
    """A row of a pass, at index `row_index`, whose attention is computed row by row.

    Attributes:
        length: The number of tokens of the sequence that the row sees.
        width: The number of keys it is computed with, rounded up so that there are few widths.
    """

    row_index: int
    length: int
    width: int
    block_table: list[int]


def lone_rows(rows: Pass, cache: KvCache) -> list[LoneRow]:
    """Return the rows of a pass that are computed one by one."""
    lone: list[LoneRow] = []
    for span in rows.spans:
        if span.prompt or span.size > _MAX_ROWS:
            continue
        for index in range(span.size):
            length = span.before + index + 1
            grain = max(_GRAIN, 1 << length.bit_length() >> 3)
            width = min(length + -length % grain, cache.slots)
            lone.append(LoneRow(span.first + index, length, width, span.block_table))
    return lone


class VisibleKeys(NamedTuple):
    """The keys that the lone rows of a pass see, at indices `row_indices`.

    Attributes:
        pattern: A CSR matrix [rows * heads of queries, keys and values, KV heads * slots], with 0
            for a key that is seen, and -inf for a key that fills a row up to its width.
        parts: The numbers of consecutive values whose rows have one width, and these widths.
        ends: The end of the values of each head.
    """

    row_indices: torch.Tensor
    pattern: torch.Tensor
    columns: torch.Tensor
    ends: torch.Tensor
    parts: tuple[list[int], list[int]]

    @classmethod
    def of(cls, lone: list[LoneRow], rows: int, cache: KvCache) -> Self:
        """Return the keys that these rows see, in a pass of `rows` rows."""
        heads, kv_heads = cache.query_heads, cache.kv_heads
        first_slots = np.arange(heads, dtype=np.int32) // (heads // kv_heads) * cache.slots
        columns, values, widths = [], [], []
        for width, same in groupby(lone, key=lambda row: row.width):
            slots, hidden = _keys(list(same), width, cache.block_size)
            columns.append((slots[:, None] + first_slots[:, None]).ravel())
            values.append(np.repeat(hidden, heads, 0).ravel())
            widths.append(width)
        row_indices = np.array([row.row_index for row in lone])
        counts = np.zeros((rows, heads + 2 * kv_heads), np.int32)
        counts[row_indices, :heads] = np.array([row.width for row in lone])[:, None]
        indices = torch.from_numpy(np.concatenate(columns))
        pattern = torch.sparse_csr_tensor(
            _row_ends(counts),
            indices,
            torch.from_numpy(np.concatenate(values)),
            (counts.size, kv_heads * cache.slots),
            check_invariants=False,
        )
        ends = _row_ends(counts[row_indices, :heads])
        parts = [len(part) for part in columns], widths
        return cls(torch.from_numpy(row_indices), pattern, indices, ends, parts)

    def attend(self, heads: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Return the attention of these rows, [rows, heads * head size].

        Args:
            heads: [all rows, heads of queries, keys and values, head size].
            keys: The keys of a layer, [KV heads * slots, head size].
            values: The values of a layer, in the same shape.
        """
        size = heads.shape[2]
        scores = torch.sparse.sampled_addmm(
            self.pattern, heads.view(-1, size), keys.t(), alpha=size**-0.5
        ).values()
        lengths, widths = self.parts
        if len(widths) == 1:
            weights = scores.view(-1, widths[0]).softmax(-1).view(-1)
        else:
            parts = zip(scores.split(lengths), widths, strict=True)
            weights = torch.cat(
                [part.view(-1, width).softmax(-1).view(-1) for part, width in parts]
            )
        output = torch._embedding_bag_forward_only(
            values, self.columns, self.ends, per_sample_weights=weights, include_last_offset=True
        )
        return output[0].view(self.row_indices.shape[0], -1)


def _row_ends(counts: np.ndarray) -> torch.Tensor:
    """Return the running sums of `counts`, preceded by 0, as int32."""
    ends = np.zeros(counts.size + 1, np.int32)
    np.cumsum(counts, out=ends[1:])
    return torch.from_numpy(ends)


def _keys(rows: list[LoneRow], width: int, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the slots that rows of one width read, and the bias of their scores, [rows, width].

    A shorter row reads its own first slot again.
    """
    count = -(-width // block_size)
    tables = (row.block_table for row in rows)
    padded_tables = [table[:count] + table[:1] * (count - len(table)) for table in tables]
    blocks = np.array(padded_tables, np.int32)[:, :, None] * block_size
    slots = (blocks + np.arange(block_size, dtype=np.int32)).reshape(len(rows), -1)[:, :width]
    visible = np.arange(width) < np.array([row.length for row in rows])[:, None]
    hidden = np.where(visible, np.float32(0), np.float32(-np.inf))
    return np.where(visible, slots, slots[:, :1]), hidden


# The attention of rows in a layer, as a function of the rows' heads [rows, heads of queries, keys
# and values, head size] and the layer. Keys and values are already in the cache. The result is
# [rows, heads * head size].
Attend = Callable[[torch.Tensor, int], torch.Tensor]
CHUNK = 16
_MAX_RUN_ROWS = 4 * CHUNK  # maximum rows of a run on CPUs


class Run(NamedTuple):
    """Consecutive rows of a pass from `first` on, which see keys up to `length`.

    The keys are in `blocks`, or in contiguous slots from `begin` on. Several rows, or the last row
    of a prompt, have a `mask`, unless they begin their sequence.
    """

    first: int
    size: int
    length: int
    begin: int
    blocks: torch.Tensor | None
    mask: torch.Tensor | None

    @classmethod
    def of(cls, span: RowSpan, block_size: int, device: str) -> Run:
        """Return the rows of a span."""
        blocks = span.block_table[: -(-span.length // block_size)]
        scattered = any(after - before != 1 for before, after in pairwise(blocks))
        mask = None
        if span.before and (span.prompt or span.size > 1):
            shape = padded(span.size) if span.prompt else span.size, span.length
            mask = torch.ones(shape, dtype=torch.bool, device=device).tril(span.before)
        return cls(
            span.first,
            span.size,
            span.length,
            blocks[0] * block_size,
            torch.tensor(blocks, device=device) if scattered else None,
            mask,
        )


def padded(count: int) -> int:
    """Return the number of rows to compute for `count` rows of a prompt: a multiple of CHUNK.

    Each row then has the same bits wherever its prompt is split at multiples of CHUNK.
    """
    return count + -count % CHUNK


class Attention:
    """Attention run by run, on any device."""

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache

    def for_rows(self, rows: Pass) -> Attend:
        """Return the attention of the rows of a pass."""
        runs = self._runs(rows, rows.spans)

        def attend(heads: torch.Tensor, layer: int) -> torch.Tensor:
            output = torch.cat([self._find(heads, layer, run) for run in runs])
            return _padded(output, heads.shape[0])

        return attend

    def _runs(self, rows: Pass, spans: Iterable[RowSpan]) -> list[Run]:
        return [Run.of(span, rows.block_size, rows.device) for span in spans]

    def _find(self, heads: torch.Tensor, layer: int, run: Run) -> torch.Tensor:
        cache = self._cache
        queries = heads[run.first : run.first + run.size, : cache.query_heads]
        keys, values = self._read(cache.keys[layer], run), self._read(cache.values[layer], run)
        if run.size == 1 and run.mask is None:
            # Query heads that share a key-value head are rows of one product.
            shared = queries.view(1, keys.shape[1], -1, queries.shape[2])
            return functional.scaled_dot_product_attention(shared, keys, values).reshape(1, -1)
        rows = padded(run.size) if run.mask is None else len(run.mask)
        queries = torch.cat((queries, queries[-1:].expand(rows - run.size, -1, -1)))
        output = functional.scaled_dot_product_attention(
            queries.transpose(0, 1).unsqueeze(0),
            keys,
            values,
            attn_mask=run.mask,
            is_causal=run.mask is None,
            enable_gqa=keys.shape[1] != queries.shape[1],
        )
        return output.squeeze(0).transpose(0, 1)[: run.size].reshape(run.size, -1)

    def _read(self, pool: torch.Tensor, run: Run) -> torch.Tensor:
        """Return a sequence's keys or values in a layer, [1, KV heads, length, head size]."""
        heads, slots, size = pool.shape
        if run.blocks is not None:
            blocks = pool.view(heads, -1, self._cache.block_size, size)
            gathered = blocks.index_select(1, run.blocks).flatten(1, 2)
            return gathered[:, : run.length].unsqueeze(0)
        begin = pool.storage_offset() + run.begin * size
        return pool.as_strided((1, heads, run.length, size), (0, slots * size, size, 1), begin)


class SparseAttention(Attention):
    """Attention on CPUs: lone rows are computed together, and other rows run by run."""

    def for_rows(self, rows: Pass) -> Attend:
        """Return the attention of the rows of a pass."""
        cache = self._cache
        lone = lone_rows(rows, cache)
        if not lone:
            return super().for_rows(rows)
        visible = VisibleKeys.of(lone, len(rows.tokens), cache)
        alone = {row.row_index for row in lone}
        last = rows.spans[-1]
        count = last.first + last.size
        runs = self._runs(rows, (span for span in rows.spans if span.first not in alone))

        def attend(heads: torch.Tensor, layer: int) -> torch.Tensor:
            sparse = visible.attend(heads, *cache.rows[layer])
            if not runs:
                return _padded(sparse, heads.shape[0])
            output = heads.new_empty(count, sparse.shape[1])
            output[visible.row_indices] = sparse
            for run in runs:
                output[run.first : run.first + run.size] = self._find(heads, layer, run)
            return _padded(output, heads.shape[0])

        return attend

    def _runs(self, rows: Pass, spans: Iterable[RowSpan]) -> list[Run]:
        # The kernel also computes keys after a row, up to the last key of its run.
        return super()._runs(rows, (part for span in spans for part in span.parts(_MAX_RUN_ROWS)))


class PagedAttention(Attention):
    """Attention of all spans in one call, on CUDA devices whose kernels read block tables."""

    def for_rows(self, rows: Pass) -> Attend:
        """Return the attention of the rows of a pass."""
        from torch.nn.attention.varlen import varlen_attn

        cache, spans, device = self._cache, rows.spans, rows.device
        heads, _, size = cache.keys[0].shape
        pages, order = (heads, -1, cache.block_size, size), (1, 2, 0, 3)
        counts = [span.size for span in spans]
        lengths = torch.tensor([span.length for span in spans], dtype=torch.int32, device=device)
        longest, most, total = max(span.length for span in spans), max(counts), sum(counts)
        ends, tables = _ends(counts, device), self._tables(spans).to(device)
        varlen: Any = varlen_attn

        def attend(stacked: torch.Tensor, layer: int) -> torch.Tensor:
            output = varlen(
                stacked[:total, : cache.query_heads],
                cache.keys[layer].view(pages).permute(order),
                cache.values[layer].view(pages).permute(order),
                ends,
                None,
                most,
                longest,
                window_size=(-1, 0),
                enable_gqa=heads != cache.query_heads,
                seqused_k=lengths,
                block_table=tables,
            )
            return _padded(output.flatten(1), stacked.shape[0])

        return attend

    def _tables(self, spans: list[RowSpan]) -> torch.Tensor:
        size = self._cache.block_size
        tables = (span.block_table[: -(-span.length // size)] for span in spans)
        tensors = [torch.tensor(table, dtype=torch.int32) for table in tables]
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)


def _padded(output: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the rows extended to `rows` rows by repeating the last one.

    Padding rows write to the slot of the last row.
    """
    missing = rows - output.shape[0]
    return torch.cat((output, output[-1:].expand(missing, -1))) if missing else output


def _ends(counts: Iterable[int], device: str) -> torch.Tensor:
    """Return the running sums of `counts`, preceded by 0, as int32 on a device."""
    return torch.tensor([0, *np.cumsum(list(counts))], dtype=torch.int32, device=device)


def make_attention(cache: KvCache, architecture: Architecture, device: str) -> Attention:
    """Return the fastest attention that works on a device."""
    best = PagedAttention if device.startswith("cuda") else SparseAttention
    tried = KvCache(architecture, cache.block_size, 3, 0, device)
    generator = torch.Generator().manual_seed(0)
    tried.pool.copy_(torch.randn(tried.pool.shape, generator=generator))
    rows = Pass(cache.block_size, device)
    rows.add([0], 2 * cache.block_size, [2, 0, 1])
    heads = architecture.heads + 2 * architecture.kv_heads
    queries = torch.randn(1, heads, architecture.head_dim, generator=generator).to(device)
    ways = best(tried), Attention(tried)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that sparse tensors are in beta state
            output, expected = (way.for_rows(rows)(queries, 0) for way in ways)
        works = torch.allclose(output, expected, atol=1e-4)
    except Exception:  # this version of torch or this device has no such kernel
        works = False
    return best(cache) if works else Attention(cache)
