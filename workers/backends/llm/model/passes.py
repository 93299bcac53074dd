"""The passes of a model over its KV cache, by CUDA graphs where the device can replay them.

A graph computes passes with one row per sequence in one launch instead of hundreds. It has a number
of rows and of blocks per row, and computes any pass that fits. The keys and values of a sequence
are gathered from its blocks; the keys behind its end are masked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional

from shmserve.workers.backends.llm.model.attention import KvCache, Pass, make_attention
from shmserve.workers.backends.llm.model.transformer import Transformer

_LEAST_ROWS = 2
_LEAST_KEYS = 256  # minimum number of keys per row in a graph
# Maximum number of keys of all rows, because a graph keeps memory for gathered keys.
_MAX_KEYS = 1 << 17
_COLUMNS = 3  # columns of a row before its blocks: token, position, slot


class Captured(NamedTuple):
    """A captured CUDA graph with its inputs and its logits."""

    graph: torch.cuda.CUDAGraph
    given: torch.Tensor
    logits: torch.Tensor


class DecodeGraphs:
    """The captured CUDA graphs of one model over its cache."""

    def __init__(self, model: Transformer, cache: KvCache) -> None:
        self._model, self._cache = model, cache
        self._captured: dict[tuple[int, int], Captured] = {}

    @torch.inference_mode()
    def capture(self, most_rows: int, longest: int) -> None:
        """Capture graphs for up to so many rows, of sequences of up to so many tokens.

        The largest graph is the first, so that the others share its memory.
        """
        pool = torch.cuda.graph_pool_handle()
        for rows, blocks in reversed(list(_sizes(most_rows, longest, self._cache))):
            inputs = torch.zeros(
                (rows, _COLUMNS + blocks), dtype=torch.int64, device=self._model.device
            )
            # A first call, in which libraries allocate their memory.
            decode_logits(self._model, self._cache, inputs)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                logits = decode_logits(self._model, self._cache, inputs)
            self._captured[rows, blocks] = Captured(graph, inputs, logits)

    @torch.inference_mode()
    def logits(self, rows: Pass) -> torch.Tensor | None:
        """Return the logits of all rows of a pass, or None if no graph fits.

        The logits are valid until the next pass.
        """
        if any(span.size > 1 for span in rows.spans):
            return None
        blocks = max(-(-span.length // rows.block_size) for span in rows.spans)
        size = _size(len(rows.spans), blocks, rows.block_size)
        captured = self._captured.get(size)
        if captured is None:
            return None
        captured.given.copy_(torch.from_numpy(decode_inputs(rows, *size)))
        captured.graph.replay()
        return captured.logits


def decode_inputs(rows: Pass, count: int, blocks: int) -> np.ndarray:
    """Return the inputs of a graph for a pass, int64 [count, token, position, slot and blocks].

    The rows that fill the graph repeat the last row.
    """
    inputs = np.zeros((count, _COLUMNS + blocks), np.int64)
    for index, span in enumerate(rows.spans):
        table = span.block_table[: -(-span.length // rows.block_size)]
        columns = rows.tokens[index], rows.positions[index], rows.slots[index]
        inputs[index, : _COLUMNS + len(table)] = *columns, *table
    inputs[len(rows.spans) :] = inputs[len(rows.spans) - 1]
    return inputs


def decode_logits(model: Transformer, cache: KvCache, inputs: torch.Tensor) -> torch.Tensor:
    """Return the logits of all rows of `decode_inputs`, and store their keys and values.

    A row may see as many keys as it has blocks for.
    """
    count = len(inputs)
    tokens, positions, slots = inputs[:, :_COLUMNS].unbind(1)
    inside = torch.arange(cache.block_size, device=inputs.device)
    keys = (inputs[:, _COLUMNS:, None] * cache.block_size + inside).flatten(1)
    mask = torch.arange(keys.shape[1], device=inputs.device) <= positions.unsqueeze(1)
    mask = mask[None, :, None]

    def attend(heads: torch.Tensor, layer: int) -> torch.Tensor:
        # Query heads that share a key-value head are rows of one product.
        queries = heads[:, : cache.query_heads].view(count, cache.kv_heads, -1, heads.shape[2])
        output = functional.scaled_dot_product_attention(
            queries.transpose(0, 1),
            cache.keys[layer][:, keys],
            cache.values[layer][:, keys],
            attn_mask=mask,
        )
        return output.transpose(0, 1).reshape(count, -1)

    return model.logits(model.states(tokens, positions, slots, cache, attend))


def _sizes(most_rows: int, longest: int, cache: KvCache) -> Iterator[tuple[int, int]]:
    """Yield the numbers of rows and blocks of all graphs, the smallest first."""
    most_blocks = min(-(-longest // cache.block_size), cache.slots // cache.block_size)
    rows = _LEAST_ROWS
    while True:
        _, blocks = _size(rows, 1, cache.block_size)
        while rows * blocks * cache.block_size <= _MAX_KEYS:
            yield rows, blocks
            if blocks >= most_blocks:
                break
            blocks *= 2
        if rows >= most_rows:
            return
        rows *= 2


def _size(rows: int, blocks: int, block_size: int) -> tuple[int, int]:
    """Return the rows and blocks of the graph for a pass: powers of two."""
    least = max(-(-_LEAST_KEYS // block_size), blocks)
    return _power(max(rows, _LEAST_ROWS)), _power(least)


def _power(least: int) -> int:
    """Return the smallest power of two that is at least `least`."""
    return 1 << (least - 1).bit_length()


class Passes:
    """A model with its KV cache and its attention, which computes passes."""

    def __init__(self, model: Transformer, cache: KvCache) -> None:
        self.cache = cache
        self._model = model
        self._attention = make_attention(cache, model.architecture, model.device)
        self._graphs = DecodeGraphs(model, cache)

    def capture(self, most_rows: int, longest: int) -> None:
        """Capture CUDA graphs for passes of such sequences, if the device supports them."""
        if self._model.device.startswith("cuda"):
            self._graphs.capture(most_rows, longest)

    def empty(self) -> Pass:
        """Return a pass without rows."""
        return Pass(self.cache.block_size, self._model.device)

    def logits(self, rows: Pass, logit_rows: list[int]) -> torch.Tensor:
        """Return the logits of the `logit_rows` rows, float32 [logit rows, vocabulary].

        The logits are valid until the next pass. The keys and values of all rows are stored in the
        cache.
        """
        captured = self._graphs.logits(rows)
        if captured is None:
            return self._model.forward(rows, self.cache, self._attention, logit_rows)
        return (
            captured[: len(logit_rows)]
            if logit_rows == list(range(len(logit_rows)))
            else captured[logit_rows]
        )
