"""A paged KV cache, and attention over it: one interface, implemented for CPUs and for CUDA.

If the blocks of a sequence are contiguous, its keys and values are read as a view; otherwise they
are gathered. Both ways give the same bits.

On CPUs, the decode rows of all sequences are computed together by sparse operations. Each head of a
row is a row of a sparse matrix, whose columns are the keys that the row sees:

    scores  = queries x keys, at the columns
    weights = softmax of each row
    output  = sums of values, with these weights

Keys and values are read in place. The bits of a row depend only on its own sequence, because each
row has its own width, and no sum extends beyond it.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from operator import attrgetter
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch.nn import functional

from shmserve.workers.backends.llm.model.architecture import Architecture

_MIN_WIDTH_STEP = 16  # widths of decode rows are multiples of this number of keys
# The maximum size of a span of decode rows. A span has several rows if it has draft tokens.
_MAX_ROWS = 16


class KvCache:
    """Keys and values of all layers: [layers, 2, KV heads, blocks * block size, head size].

    A host pool of the same layout has `host_blocks` blocks. The operating system allocates memory
    when it is first written.
    """

    def __init__(
        self,
        architecture: Architecture,
        block_size: int,
        block_count: int,
        host_block_count: int,
        device: str = "cpu",
    ) -> None:
        self.block_size = block_size
        self.slot_count = block_count * block_size
        self.query_heads, self.kv_heads = architecture.heads, architecture.kv_heads
        # Heads precede slots, so that each head is read contiguously.
        heads = (architecture.layers, 2, self.kv_heads)
        size = architecture.head_dim
        self.pool = torch.zeros((*heads, self.slot_count, size), device=device)
        self._blocks = self.pool.view(*heads, block_count, block_size, size)
        self._host_blocks = torch.zeros((*heads, host_block_count, block_size, size))
        self._layers = self.pool.flatten(1, 2).unbind()
        self.keys = [layer[0] for layer in self.pool]
        self.values = [layer[1] for layer in self.pool]
        # Views of the same memory with a row for each head and slot.
        pairs = zip(self.keys, self.values, strict=True)
        self.flat_layers = [(keys.flatten(0, 1), values.flatten(0, 1)) for keys, values in pairs]

    def write(self, layer: int, keys_and_values: torch.Tensor, slots: torch.Tensor) -> None:
        """Store keys and values in slots.

        The shape of `keys_and_values` is [tokens, KV heads of keys, then of values, head size].
        """
        self._layers[layer].index_copy_(1, slots, keys_and_values.transpose(0, 1))

    def copy(self, to_host: list[int], from_host: list[int], on_device: list[int]) -> None:
        """Copy blocks to the host pool, back from it, and within the pool, in this order.

        Each list contains a source block and its destination block in turn.
        """
        for source, target, block_pairs in (
            (self._blocks, self._host_blocks, to_host),
            (self._host_blocks, self._blocks, from_host),
            (self._blocks, self._blocks, on_device),
        ):
            if block_pairs:
                sources = torch.tensor(block_pairs[::2], device=source.device)
                targets = torch.tensor(block_pairs[1::2], device=target.device)
                blocks = source.index_select(3, sources)
                target.index_copy_(3, targets, blocks.to(target.device))


class RowSpan(NamedTuple):
    """The rows of one sequence in a pass.

    Attributes:
        first_row: The index of the first row.
        size: The number of rows.
        start: The position of the first row in the sequence.
        block_table: The block table of the sequence.
        is_prompt: Whether the tokens are from the prompt (prefill). The results of other tokens
            have the same bits in a span as in steps of one token (decode).
    """

    first_row: int
    size: int
    start: int
    block_table: list[int]
    is_prompt: bool

    @property
    def length(self) -> int:
        """Return the number of tokens that the last row sees."""
        return self.start + self.size

    def split(self, size: int) -> Iterator[RowSpan]:
        """Yield the rows as spans that end at multiples of `size` positions.

        The spans are then independent of how a prompt is divided into chunks.
        """
        for begin in range(self.start - self.start % size, self.length, size):
            start, end = max(begin, self.start), min(begin + size, self.length)
            first_row = self.first_row + start - self.start
            yield RowSpan(first_row, end - start, start, self.block_table, self.is_prompt)


@dataclass(eq=False)
class Pass:
    """The rows of one pass through a model; each row is a token of a sequence.

    Rows without a span are padding, which repeats the last row.

    Attributes:
        block_size: The size of a block.
        device: The device.
        spans: The rows by sequence.
        tokens: The token of each row.
        positions: The position of each row in its sequence.
        slots: The index in the cache's pool for the keys and values of each row.
    """

    block_size: int
    device: str = "cpu"
    spans: list[RowSpan] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)

    def add(
        self, tokens: Sequence[int], start: int, block_table: list[int], is_prompt: bool = False
    ) -> int:
        """Add rows for tokens of a sequence; return the index of the first one.

        Args:
            tokens: The tokens.
            start: The position of the first token.
            block_table: The block table of the sequence.
            is_prompt: Whether the tokens are from the prompt.
        """
        first_row, size = len(self.tokens), self.block_size
        new_positions = range(start, start + len(tokens))
        self.tokens += tokens
        self.positions += new_positions
        self.slots += [block_table[p // size] * size + p % size for p in new_positions]
        self.spans.append(RowSpan(first_row, len(tokens), start, block_table, is_prompt))
        return first_row

    def select(self, indices: list[int]) -> Pass:
        """Return a pass of the rows with these indices, which must be the last of their spans."""
        selected_rows = Pass(self.block_size, self.device)
        for span in self.spans:
            end = span.first_row + span.size
            count = bisect_left(indices, end) - bisect_left(indices, span.first_row)
            if count:
                start = span.start + span.size - count
                first_row = len(selected_rows.tokens)
                new_span = RowSpan(first_row, count, start, span.block_table, span.is_prompt)
                selected_rows.spans.append(new_span)
                selected_rows.tokens += self.tokens[end - count : end]
                selected_rows.positions += self.positions[end - count : end]
                selected_rows.slots += self.slots[end - count : end]
        return selected_rows

    def pad(self, rows: int) -> None:
        """Repeat the last row until there are `rows` rows."""
        for column in (self.tokens, self.positions, self.slots):
            column += column[-1:] * (rows - len(column))

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return tokens, positions and slots, int64 [rows]."""
        columns = torch.tensor([self.tokens, self.positions, self.slots], device=self.device)
        tokens, positions, slots = columns.unbind()
        return tokens, positions, slots


class DecodeRow(NamedTuple):
    """A generated token in a pass; its attention does not depend on the span's other rows.

    Attributes:
        row_index: The index of the row in the pass.
        length: The number of keys that the row sees.
        width: The number of keys in the computation: `length` rounded up, for few distinct widths.
        block_table: The block table of the sequence.
    """

    row_index: int
    length: int
    width: int
    block_table: list[int]


def find_decode_rows(rows: Pass, cache: KvCache) -> list[DecodeRow]:
    """Return the rows of a pass that are not from prompts, in spans of at most `_MAX_ROWS` rows."""
    decode_rows: list[DecodeRow] = []
    for span in rows.spans:
        if span.is_prompt or span.size > _MAX_ROWS:
            continue
        for index in range(span.size):
            length = span.start + index + 1
            width_step = max(_MIN_WIDTH_STEP, 1 << length.bit_length() >> 3)
            width = min(length + -length % width_step, cache.slot_count)
            decode_rows.append(DecodeRow(span.first_row + index, length, width, span.block_table))
    return decode_rows


class VisibleKeys(NamedTuple):
    """The keys that the decode rows of a pass see.

    Attributes:
        row_indices: The indices of the decode rows.
        mask_matrix: A sparse (CSR) matrix [rows * (query heads + 2 * KV heads), KV heads * slots].
            A stored element is 0 for a key that is seen, or -inf for one that pads a row.
        columns: The column of each stored element.
        offsets: The index of the first stored element of each query head of the decode rows.
        width_groups: The number of stored elements, and the width, of each group of consecutive
            rows with one width.
    """

    row_indices: torch.Tensor
    mask_matrix: torch.Tensor
    columns: torch.Tensor
    offsets: torch.Tensor
    width_groups: tuple[list[int], list[int]]

    @classmethod
    def of(cls, decode_rows: list[DecodeRow], row_count: int, cache: KvCache) -> Self:
        """Return the keys that decode rows see, in a pass of `row_count` rows."""
        heads, kv_heads = cache.query_heads, cache.kv_heads
        head_slots = np.arange(heads, dtype=np.int32) // (heads // kv_heads) * cache.slot_count
        columns, values, widths = [], [], []
        for width, group in groupby(decode_rows, key=attrgetter("width")):
            slots, bias = _visible_slots(list(group), width, cache.block_size)
            columns.append((slots[:, None] + head_slots[:, None]).ravel())
            values.append(np.repeat(bias, heads, 0).ravel())
            widths.append(width)
        row_indices = np.array([row.row_index for row in decode_rows])
        counts = np.zeros((row_count, heads + 2 * kv_heads), np.int32)
        counts[row_indices, :heads] = np.array([row.width for row in decode_rows])[:, None]
        indices = torch.from_numpy(np.concatenate(columns))
        data = torch.from_numpy(np.concatenate(values))
        shape = (counts.size, kv_heads * cache.slot_count)
        mask_matrix = torch.sparse_csr_tensor(
            _cumulative_sums(counts), indices, data, shape, check_invariants=False
        )
        offsets = _cumulative_sums(counts[row_indices, :heads])
        width_groups = [len(part) for part in columns], widths
        return cls(torch.from_numpy(row_indices), mask_matrix, indices, offsets, width_groups)

    def attend(self, heads: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Return the attention of the decode rows, [decode rows, heads * head size].

        Args:
            heads: [rows, heads of queries, keys and values, head size].
            keys: The keys of a layer, [KV heads * slots, head size].
            values: The values of a layer, in the same shape.
        """
        size = heads.shape[2]
        scores = torch.sparse.sampled_addmm(
            self.mask_matrix, heads.view(-1, size), keys.t(), alpha=size**-0.5
        ).values()
        lengths, widths = self.width_groups
        if len(widths) == 1:
            weights = scores.view(-1, widths[0]).softmax(-1).view(-1)
        else:
            groups = zip(scores.split(lengths), widths, strict=True)
            weights = torch.cat([g.view(-1, width).softmax(-1).view(-1) for g, width in groups])
        output = torch._embedding_bag_forward_only(
            values, self.columns, self.offsets, per_sample_weights=weights, include_last_offset=True
        )
        return output[0].view(self.row_indices.shape[0], -1)


def _cumulative_sums(counts: np.ndarray) -> torch.Tensor:
    """Return the cumulative sums of `counts`, preceded by 0, as int32."""
    ends = np.zeros(counts.size + 1, np.int32)
    np.cumsum(counts, out=ends[1:])
    return torch.from_numpy(ends)


def _visible_slots(rows: list[DecodeRow], width: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the slots that rows of one width read, and the bias of their scores, [rows, width].

    The keys that pad a row are in its first slot, and have the bias -inf.
    """
    count = -(-width // size)
    tables = (row.block_table for row in rows)
    padded_tables = [table[:count] + table[:1] * (count - len(table)) for table in tables]
    blocks = np.array(padded_tables, np.int32)[:, :, None] * size
    slots = (blocks + np.arange(size, dtype=np.int32)).reshape(len(rows), -1)[:, :width]
    is_visible = np.arange(width) < np.array([row.length for row in rows])[:, None]
    bias = np.where(is_visible, np.float32(0), np.float32(-np.inf))
    return np.where(is_visible, slots, slots[:, :1]), bias


# Returns the attention in a layer, [rows, heads * head size]. The arguments are the rows' heads
# [rows, heads of queries, keys and values, head size] and the number of the layer. Keys and values
# are already in the cache.
Attend = Callable[[torch.Tensor, int], torch.Tensor]
CHUNK = 16  # number of rows
_MAX_RUN_ROWS = 4 * CHUNK  # maximum of successive rows computed together on CPUs


class Run(NamedTuple):
    """Consecutive rows of one sequence in a pass, whose attention is one call.

    Attributes:
        first_row: The index of the first row.
        size: The number of rows.
        length: The number of keys that the last row sees.
        first_slot: The slot of the first key, if the blocks are contiguous.
        blocks: The blocks of the keys, int64 [blocks]; None if they are contiguous.
        mask: The keys that each row sees, bool [rows, keys]. None for a single decode row, and for
            rows at the beginning of a sequence, which are causal.
    """

    first_row: int
    size: int
    length: int
    first_slot: int
    blocks: torch.Tensor | None
    mask: torch.Tensor | None

    @classmethod
    def of(cls, span: RowSpan, block_size: int, device: str) -> Run:
        """Return the run that consists of the rows of a span."""
        blocks = span.block_table[: -(-span.length // block_size)]
        is_scattered = any(next_block - block != 1 for block, next_block in pairwise(blocks))
        mask = None
        if span.start and (span.is_prompt or span.size > 1):
            shape = padded_count(span.size) if span.is_prompt else span.size, span.length
            mask = torch.ones(shape, dtype=torch.bool, device=device).tril(span.start)
        block_ids = torch.tensor(blocks, device=device) if is_scattered else None
        return cls(span.first_row, span.size, span.length, blocks[0] * block_size, block_ids, mask)


def padded_count(count: int) -> int:
    """Return the number of rows to compute: `count` rounded up to a multiple of CHUNK.

    Each row of a prompt then has the same bits if the prompt is split at other multiples of CHUNK.
    """
    return count + -count % CHUNK


class Attention:
    """Attention on any device, with one call of torch's kernel for each `Run` of a pass."""

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache

    def for_rows(self, rows: Pass) -> Attend:
        """Return the function that computes the attention of a pass in each layer."""
        runs = self._runs(rows, rows.spans)

        def attend(heads: torch.Tensor, layer: int) -> torch.Tensor:
            output = torch.cat([self._attend_run(heads, layer, run) for run in runs])
            return _pad(output, heads.shape[0])

        return attend

    def _runs(self, rows: Pass, spans: Iterable[RowSpan]) -> list[Run]:
        return [Run.of(span, rows.block_size, rows.device) for span in spans]

    def _attend_run(self, heads: torch.Tensor, layer: int, run: Run) -> torch.Tensor:
        cache = self._cache
        queries = heads[run.first_row : run.first_row + run.size, : cache.query_heads]
        keys, values = self._gather(cache.keys[layer], run), self._gather(cache.values[layer], run)
        if run.size == 1 and run.mask is None:
            # Query heads that share a key-value head are rows of one product.
            groups = queries.view(1, keys.shape[1], -1, queries.shape[2])
            return functional.scaled_dot_product_attention(groups, keys, values).reshape(1, -1)
        padded_rows = padded_count(run.size) if run.mask is None else len(run.mask)
        queries = torch.cat((queries, queries[-1:].expand(padded_rows - run.size, -1, -1)))
        output = functional.scaled_dot_product_attention(
            queries.transpose(0, 1).unsqueeze(0),
            keys,
            values,
            attn_mask=run.mask,
            is_causal=run.mask is None,
            enable_gqa=keys.shape[1] != queries.shape[1],
        )
        return output.squeeze(0).transpose(0, 1)[: run.size].reshape(run.size, -1)

    def _gather(self, pool: torch.Tensor, run: Run) -> torch.Tensor:
        """Return the keys or values of a run in a layer, [1, KV heads, length, head size]."""
        heads, slots, size = pool.shape
        if run.blocks is not None:
            blocks = pool.view(heads, -1, self._cache.block_size, size)
            return blocks.index_select(1, run.blocks).flatten(1, 2)[:, : run.length].unsqueeze(0)
        offset = pool.storage_offset() + run.first_slot * size
        return pool.as_strided((1, heads, run.length, size), (0, slots * size, size, 1), offset)


class SparseAttention(Attention):
    """Attention on CPUs: decode rows are computed together, the other rows `Run` by `Run`."""

    def for_rows(self, rows: Pass) -> Attend:
        cache = self._cache
        decode_rows = find_decode_rows(rows, cache)
        if not decode_rows:
            return super().for_rows(rows)
        visible_keys = VisibleKeys.of(decode_rows, len(rows.tokens), cache)
        indices = {row.row_index for row in decode_rows}
        row_count = rows.spans[-1].first_row + rows.spans[-1].size
        runs = self._runs(rows, (span for span in rows.spans if span.first_row not in indices))

        def attend(heads: torch.Tensor, layer: int) -> torch.Tensor:
            sparse = visible_keys.attend(heads, *cache.flat_layers[layer])
            if not runs:
                return _pad(sparse, heads.shape[0])
            output = heads.new_empty(row_count, sparse.shape[1])
            output[visible_keys.row_indices] = sparse
            for run in runs:
                end = run.first_row + run.size
                output[run.first_row : end] = self._attend_run(heads, layer, run)
            return _pad(output, heads.shape[0])

        return attend

    def _runs(self, rows: Pass, spans: Iterable[RowSpan]) -> list[Run]:
        # Runs are short, because the kernel computes each row with all keys of its run.
        return super()._runs(rows, (part for span in spans for part in span.split(_MAX_RUN_ROWS)))


class PagedAttention(Attention):
    """Attention of all spans in one call, on CUDA devices whose kernels read block tables."""

    def for_rows(self, rows: Pass) -> Attend:
        from torch.nn.attention.varlen import varlen_attn

        cache, spans, device = self._cache, rows.spans, rows.device
        kv_heads, _, size = cache.keys[0].shape
        page_shape, page_order = (kv_heads, -1, cache.block_size, size), (1, 2, 0, 3)
        counts = np.array([span.size for span in spans], np.int32)
        lengths = torch.tensor([span.length for span in spans], dtype=torch.int32, device=device)
        max_length = max(span.length for span in spans)
        max_rows, row_count = int(counts.max()), int(counts.sum())
        cu_seqlens, tables = _cumulative_sums(counts).to(device), self._tables(spans).to(device)
        varlen: Any = varlen_attn

        def attend(heads: torch.Tensor, layer: int) -> torch.Tensor:
            output = varlen(
                heads[:row_count, : cache.query_heads],
                cache.keys[layer].view(page_shape).permute(page_order),
                cache.values[layer].view(page_shape).permute(page_order),
                cu_seqlens,
                None,
                max_rows,
                max_length,
                window_size=(-1, 0),
                enable_gqa=kv_heads != cache.query_heads,
                seqused_k=lengths,
                block_table=tables,
            )
            return _pad(output.flatten(1), heads.shape[0])

        return attend

    def _tables(self, spans: list[RowSpan]) -> torch.Tensor:
        size = self._cache.block_size
        tables = (span.block_table[: -(-span.length // size)] for span in spans)
        tensors = [torch.tensor(table, dtype=torch.int32) for table in tables]
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)


def _pad(output: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the output with the last row repeated up to `rows` rows.

    Padding rows store the same keys and values in the same slot as the last row.
    """
    missing_rows = rows - output.shape[0]
    return torch.cat((output, output[-1:].expand(missing_rows, -1))) if missing_rows else output


def make_attention(cache: KvCache, architecture: Architecture, device: str) -> Attention:
    """Return the fastest attention whose result on a device is close to `Attention`'s."""
    fastest_class = PagedAttention if device.startswith("cuda") else SparseAttention
    trial_cache = KvCache(architecture, cache.block_size, 3, 0, device)
    generator = torch.Generator().manual_seed(0)
    trial_cache.pool.copy_(torch.randn(trial_cache.pool.shape, generator=generator))
    rows = Pass(cache.block_size, device)
    rows.add([0], 2 * cache.block_size, [2, 0, 1])
    heads = architecture.heads + 2 * architecture.kv_heads
    queries = torch.randn(1, heads, architecture.head_dim, generator=generator).to(device)
    pair = fastest_class(trial_cache), Attention(trial_cache)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that sparse tensors are in beta state
            output, expected_output = (attention.for_rows(rows)(queries, 0) for attention in pair)
        is_accurate = torch.allclose(output, expected_output, atol=1e-4)
    except Exception:  # this version of torch or this device has no such kernel
        is_accurate = False
    return fastest_class(cache) if is_accurate else Attention(cache)
