"""The passes of a model over its KV cache, by CUDA graphs if the device supports them.

A graph computes a decode pass, with one row per sequence, in one launch instead of hundreds. It is
captured for a number of rows and of blocks per row, and computes any smaller pass. The keys and
values of a sequence are gathered from its blocks; the keys after its end are masked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional

from shmserve.workers.backends.llm.model.attention import KvCache, Pass, make_attention
from shmserve.workers.backends.llm.model.transformer import Transformer

_MIN_ROWS = 2
_MIN_KEYS = 256  # per row
# Maximum number of keys of all rows: each graph has memory for its gathered keys.
_MAX_KEYS = 1 << 17
_ROW_COLUMNS = 3  # columns of a row before its blocks: token, position, slot


class CapturedGraph(NamedTuple):
    """A captured CUDA graph with its input and output memory."""

    graph: torch.cuda.CUDAGraph
    inputs: torch.Tensor
    logits: torch.Tensor


class DecodeGraphs:
    """The captured CUDA graphs of one model over its cache."""

    def __init__(self, model: Transformer, cache: KvCache) -> None:
        self._model, self._cache = model, cache
        self._captured: dict[tuple[int, int], CapturedGraph] = {}

    @torch.inference_mode()
    def capture(self, max_rows: int, max_length: int) -> None:
        """Capture graphs for up to `max_rows` sequences of up to `max_length` tokens.

        The largest graph is captured first, so that the others share its memory.
        """
        pool = torch.cuda.graph_pool_handle()
        for rows, blocks in reversed(list(_graph_sizes(max_rows, max_length, self._cache))):
            inputs = torch.zeros(
                (rows, _ROW_COLUMNS + blocks), dtype=torch.int64, device=self._model.device
            )
            # Libraries allocate their memory in the first call, which must not be captured.
            decode_logits(self._model, self._cache, inputs)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                logits = decode_logits(self._model, self._cache, inputs)
            self._captured[rows, blocks] = CapturedGraph(graph, inputs, logits)

    @torch.inference_mode()
    def logits(self, rows: Pass) -> torch.Tensor | None:
        """Return the logits of all rows of a pass, or None if no graph fits.

        The logits are valid until the next pass.
        """
        if any(span.size > 1 for span in rows.spans):
            return None
        blocks = max(-(-span.length // rows.block_size) for span in rows.spans)
        size = _graph_size(len(rows.spans), blocks, rows.block_size)
        captured = self._captured.get(size)
        if captured is None:
            return None
        captured.inputs.copy_(torch.from_numpy(decode_inputs(rows, *size)))
        captured.graph.replay()
        return captured.logits


def decode_inputs(rows: Pass, row_count: int, block_count: int) -> np.ndarray:
    """Return the inputs of a graph for a pass, padded with copies of the last row.

    Returns:
        The token, the position, the slot and the block table of each row, int64
        [row_count, 3 + block_count].
    """
    inputs = np.zeros((row_count, _ROW_COLUMNS + block_count), np.int64)
    for index, span in enumerate(rows.spans):
        table = span.block_table[: -(-span.length // rows.block_size)]
        columns = rows.tokens[index], rows.positions[index], rows.slots[index]
        inputs[index, : _ROW_COLUMNS + len(table)] = *columns, *table
    inputs[len(rows.spans) :] = inputs[len(rows.spans) - 1]
    return inputs


def decode_logits(model: Transformer, cache: KvCache, inputs: torch.Tensor) -> torch.Tensor:
    """Return the logits of all rows of `decode_inputs`, and store their keys and values.

    The attention of each row is computed with all keys of its blocks, of which later ones are
    masked.
    """
    row_count = len(inputs)
    tokens, positions, slots = inputs[:, :_ROW_COLUMNS].unbind(1)
    block_offsets = torch.arange(cache.block_size, device=inputs.device)
    key_slots = (inputs[:, _ROW_COLUMNS:, None] * cache.block_size + block_offsets).flatten(1)
    mask = torch.arange(key_slots.shape[1], device=inputs.device) <= positions.unsqueeze(1)
    mask = mask[None, :, None]

    def attend(heads: torch.Tensor, layer: int) -> torch.Tensor:
        # Query heads that share a key-value head are rows of one product.
        queries = heads[:, : cache.query_heads].view(row_count, cache.kv_heads, -1, heads.shape[2])
        output = functional.scaled_dot_product_attention(
            queries.transpose(0, 1),
            cache.keys[layer][:, key_slots],
            cache.values[layer][:, key_slots],
            attn_mask=mask,
        )
        return output.transpose(0, 1).reshape(row_count, -1)

    return model.logits(model.states(tokens, positions, slots, cache, attend))


def _graph_sizes(max_rows: int, max_length: int, cache: KvCache) -> Iterator[tuple[int, int]]:
    """Yield the number of rows and of blocks per row of each graph, smallest first."""
    max_blocks = min(-(-max_length // cache.block_size), cache.slot_count // cache.block_size)
    rows = _MIN_ROWS
    while True:
        _, blocks = _graph_size(rows, 1, cache.block_size)
        while rows * blocks * cache.block_size <= _MAX_KEYS:
            yield rows, blocks
            if blocks >= max_blocks:
                break
            blocks *= 2
        if rows >= max_rows:
            return
        rows *= 2


def _graph_size(rows: int, blocks: int, block_size: int) -> tuple[int, int]:
    """Return the number of rows and of blocks per row, powers of two, of the graph for a pass."""
    min_blocks = max(-(-_MIN_KEYS // block_size), blocks)
    return _next_power_of_two(max(rows, _MIN_ROWS)), _next_power_of_two(min_blocks)


def _next_power_of_two(minimum: int) -> int:
    """Return the smallest power of two that is at least `minimum`."""
    return 1 << (minimum - 1).bit_length()


class Passes:
    """The executor of a model's passes over its KV cache."""

    def __init__(self, model: Transformer, cache: KvCache) -> None:
        self.cache = cache
        self._model = model
        self._attention = make_attention(cache, model.architecture, model.device)
        self._graphs = DecodeGraphs(model, cache)

    def capture(self, max_rows: int, max_length: int) -> None:
        """Capture CUDA graphs for decode passes, if the device supports them."""
        if self._model.device.startswith("cuda"):
            self._graphs.capture(max_rows, max_length)

    def empty(self) -> Pass:
        """Return a pass without rows."""
        return Pass(self.cache.block_size, self._model.device)

    def logits(self, rows: Pass, logit_rows: list[int]) -> torch.Tensor:
        """Return the logits of the `logit_rows` rows, float32 [logit rows, vocabulary].

        The logits are valid until the next pass. The keys and values of all rows are stored in the
        cache.
        """
        graph_logits = self._graphs.logits(rows)
        if graph_logits is None:
            return self._model.forward(rows, self.cache, self._attention, logit_rows)
        if logit_rows == list(range(len(logit_rows))):
            return graph_logits[: len(logit_rows)]
        return graph_logits[logit_rows]
