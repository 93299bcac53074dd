"""The passes that CUDA graphs record, computed without a graph, equal ordinary passes."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shmserve.workers.backends.llm.model.attention import Attention, KvCache, Pass
from shmserve.workers.backends.llm.model.checkpoint import Checkpoint
from shmserve.workers.backends.llm.model.transformer import (
    Transformer,
    _graph_size,
    _graph_sizes,
    decode_inputs,
    decode_logits,
)

BLOCK, BLOCKS = 4, 128
LENGTHS = (1, 30, 4, 17, 9)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_one_row_of_each_sequence(folder: Callable[..., Path], family: str) -> None:
    model = Transformer(Checkpoint.open(folder(family)))
    cache = KvCache(model.architecture, BLOCK, BLOCKS, 0)
    attention, rng = Attention(cache), random.Random(3)
    free_blocks = rng.sample(range(BLOCKS), BLOCKS)
    prompts = Pass(BLOCK)
    rows = Pass(BLOCK)
    for length in LENGTHS:
        table = [free_blocks.pop() for _ in range(-(-length // BLOCK))]
        tokens = [rng.randrange(3, 320) for _ in range(length)]
        if length > 1:
            prompts.add(tokens[:-1], 0, table, True)
        rows.add(tokens[-1:], length - 1, table)
    model.forward(prompts, cache, attention, [])
    count, blocks = 8, 16
    with torch.inference_mode():
        graph_inputs = torch.from_numpy(decode_inputs(rows, count, blocks))
        logits = decode_logits(model, cache, graph_inputs)
    expected = model.forward(rows, cache, attention, list(range(len(LENGTHS))))
    assert logits.shape == (count, expected.shape[1])
    assert torch.allclose(logits[: len(LENGTHS)], expected, atol=1e-4)
    assert torch.equal(logits[-1], logits[-2])  # the padding rows repeat the last row


@pytest.mark.parametrize(
    ("max_batch_size", "longest"), [(1, 10), (32, 2048), (5, 300), (64, 1 << 17)]
)
def test_every_pass_within_the_bounds_has_a_graph(
    folder: Callable[..., Path], max_batch_size: int, longest: int
) -> None:
    cache = KvCache(Checkpoint.open(folder()).architecture, 16, 1 << 14, 0)
    sizes = set(_graph_sizes(max_batch_size, longest, cache))
    assert all(rows * blocks * 16 <= 1 << 17 for rows, blocks in sizes)
    for rows in range(1, max_batch_size + 1):
        for length in (1, 16, 17, 255, 256, 257, longest):
            if length <= longest and 2 * rows * max(length, 256) * 2 <= 1 << 17:
                assert _graph_size(rows, -(-length // 16), 16) in sizes
