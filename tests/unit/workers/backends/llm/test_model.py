"""The model: equal to transformers for every schedule, and bit-identical where that is promised."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shmserve.workers.backends.llm.model import transformer
from shmserve.workers.backends.llm.model.attention import (
    KvCache,
    Pass,
    SparseAttention,
    make_attention,
)
from shmserve.workers.backends.llm.model.checkpoint import Checkpoint
from shmserve.workers.backends.llm.model.transformer import Transformer
from tests.rigs.llm_rig import llm_rig
from tests.unit.workers.backends.llm.conftest import generate, reference

Folder = Callable[..., Path]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0}
OTHER_YARN = {
    "type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 16,
    "beta_slow": 2, "truncate": False, "attention_factor": 1.3,
}  # fmt: skip
SCALED_YARN = {**OTHER_YARN, "attention_factor": None, "mscale": 0.8, "mscale_all_dim": 0.5}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"rope_scaling": LLAMA3}),
    ("llama", {"rope_parameters": {"rope_theta": 5000.0, "rope_type": "linear", "factor": 2.0}}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("mistral", {"sliding_window": None, "rope_scaling": YARN}),
    ("qwen2", {}),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 2, "rope_scaling": OTHER_YARN}),
    ("qwen3", {}),
    ("qwen3", {"architectures": None, "rope_scaling": SCALED_YARN}),
    ("qwen3", {"use_sliding_window": True, "layer_types": ["full_attention"] * 2,
     "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}),
    ("qwen3", {"tie_word_embeddings": False, "shards": 3}),
]  # fmt: skip


def prompt(size: int, seed: int = 0) -> list[int]:
    return [random.Random(seed + index).randrange(3, 320) for index in range(size)]


class LoneModel:
    """A model with a cache that computes one sequence in chunks."""

    def __init__(self, path: Path, block_size: int = 4, blocks: int = 128) -> None:
        self.model = Transformer(Checkpoint.open(path))
        self.cache = KvCache(self.model.architecture, block_size, blocks, 16)
        self.attention = make_attention(self.cache, self.model.architecture, "cpu")
        assert isinstance(self.attention, SparseAttention)

    def run_chunks(self, tokens: list[int], size: int, table: list[int]) -> torch.Tensor:
        logits = [
            self.run_pass([(tokens[begin : begin + size], begin, table)])
            for begin in range(0, len(tokens), size)
        ]
        return torch.cat(logits)

    def run_pass(
        self, rows: list[tuple[list[int], int, list[int]]], drafted: bool = False
    ) -> torch.Tensor:
        """Return the logits of all rows of one pass; rows are prompt tokens or drafts."""
        forward_pass = Pass(self.cache.block_size)
        for tokens, start, table in rows:
            forward_pass.add(tokens, start, table, len(tokens) > 1 and not drafted)
        expected = list(range(len(forward_pass.tokens)))
        return self.model.forward(forward_pass, self.cache, self.attention, expected)


@pytest.mark.parametrize(("family", "fields"), VARIANTS)
def test_logits_equal_transformers(folder: Folder, family: str, fields: dict[str, Any]) -> None:
    path = folder(family, **fields)
    tokens = prompt(90)
    with torch.inference_mode():
        expected = reference(path)(torch.tensor([tokens])).logits[0]
    lone = LoneModel(path)
    shuffled_blocks = random.Random(1).sample(range(128), 128)
    all_blocks, half_blocks = list(range(128)), [*range(10), *range(60, 128)]
    for size, table in (
        (90, all_blocks),
        (90, half_blocks),
        (16, shuffled_blocks),
        (7, shuffled_blocks),
        (1, half_blocks),
    ):
        chunks = lone.run_chunks(tokens, size, table)
        assert torch.allclose(chunks, expected, atol=1e-4), (size, (chunks - expected).abs().max())


def test_a_wrong_block_is_detected(folder: Folder) -> None:
    """A wrong block changes the logits, so the other tests would detect it."""
    lone = LoneModel(folder())
    tokens = prompt(41)
    correct_logits = lone.run_chunks(tokens[:40], 16, list(range(20)))
    assert correct_logits.argmax(-1).unique().numel() > 20
    logits_before = lone.run_pass([(tokens[40:], 40, list(range(20)))])
    lone.cache.copy([], [], [9, 3])
    logits_after = lone.run_pass([(tokens[40:], 40, list(range(20)))])
    assert (logits_before - logits_after).abs().max() > 0.01


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("chunk", "block_size", "shuffled", "disturbance"),
    [(16, 4, False, ""), (1, 1, True, ""), (7, 4, True, "recompute"), (64, 16, True, "swap")],
)
def test_greedy_texts_equal_those_of_transformers(
    folder: Folder,
    tmp_path: Path,
    family: str,
    chunk: int,
    block_size: int,
    shuffled: bool,
    disturbance: str,
) -> None:
    path = folder(family)
    prompts = {key: prompt(3 + 7 * key, key) for key in range(1, 6)}
    engine = {"block_size": block_size}
    shuffle = random.Random(5) if shuffled else None
    with llm_rig(tmp_path / "rig", path, engine, chunk=chunk, shuffle=shuffle) as scheduler:
        for key, tokens in prompts.items():
            scheduler.add(key, input_ids=tokens, temperature=0, max_tokens=12)
            scheduler.step()  # the requests begin in turn
        rng = random.Random(1)
        for number in range(400):
            if disturbance and number % 10 == 9 and scheduler.running:
                victim = rng.choice(list(scheduler.running.values()))
                getattr(scheduler, disturbance)(victim)
            scheduler.step()
            if not scheduler.running:
                break
        scheduler.finish()
        for key, tokens in prompts.items():
            assert scheduler.tokens(key) == generate(path, tokens, max_new_tokens=12)


def test_logits_are_the_same_bits_in_any_company(folder: Folder) -> None:
    if not transformer.can_pack():
        pytest.fail("packed linears do not work here")
    lone = LoneModel(folder())
    tokens = prompt(48)
    tables = [list(range(16 * index, 16 * index + 16)) for index in range(8)]
    lone_logits = lone.run_chunks(tokens, 48, tables[0])
    for size in (16, 32):
        assert torch.equal(lone.run_chunks(tokens, size, tables[1]), lone_logits)
    shuffled_blocks = random.Random(2).sample(range(32, 128), 96)
    assert torch.equal(lone.run_chunks(tokens, 48, shuffled_blocks), lone_logits)
    single_logits = lone.run_pass([([7], 48, tables[0])])
    other_rows = [(prompt(5 + index, 9), 0, tables[index]) for index in range(2, 6)]
    in_company = lone.run_pass([*other_rows, ([7], 48, tables[0]), ([8], 48, tables[1])])
    row_index = sum(len(row[0]) for row in other_rows)
    assert torch.equal(in_company[row_index : row_index + 1], single_logits)


@pytest.mark.parametrize("size", [16, 48, 64, 80, 128, 176])
def test_logits_of_a_long_prompt_are_the_same_bits_for_any_split(folder: Folder, size: int) -> None:
    lone = LoneModel(folder(), 16, 40)
    tokens, table = prompt(400), list(range(7, 32))
    assert torch.equal(lone.run_chunks(tokens, size, table), lone.run_chunks(tokens, 400, table))


def test_logits_of_selected_rows_equal_those_of_all(folder: Folder) -> None:
    lone = LoneModel(folder(), 16)
    tokens, tables = prompt(90), [list(range(6)), list(range(6, 12)), list(range(12, 18))]
    parts = [tokens[:1], tokens[:33], tokens]
    every = lone.run_pass([(part, 0, table) for part, table in zip(parts, tables, strict=True)])
    rows = Pass(16)
    for part, table in zip(parts, tables, strict=True):
        rows.add(part, 0, table, len(part) > 1)
    for expected in ([], [0], [33], [0, 122, 123], list(range(1, 34))):
        first_rows = rows.select(list(range(124)))
        logits = lone.model.forward(first_rows, lone.cache, lone.attention, expected)
        assert torch.equal(logits, every[expected])


def test_rows_of_drafts_are_the_same_bits_as_single_rows(folder: Folder) -> None:
    """The rows of longer and shorter sequences in the same pass are bit-identical, too."""
    lone = LoneModel(folder(), block_size=2, blocks=1024)
    lengths = [1, 15, 16, 17, 130, 300, 301, 40]
    shuffled_blocks = random.Random(3).sample(range(1024), 1024)
    tables = [shuffled_blocks[128 * index : 128 * index + 128] for index in range(8)]
    tables[5] += tables[7][64:]
    tables[6] += tables[0][64:]
    texts = [prompt(length, length) for length in lengths]
    lone_logits = []
    for text, table in zip(texts, tables, strict=True):
        lone.run_chunks(text, 512, table)
        rows = [([7 + index], len(text) + index, table) for index in range(3)]
        lone_logits.append(torch.cat([lone.run_pass([row]) for row in rows]))
    drafted = [([7, 8, 9], len(text), table) for text, table in zip(texts, tables, strict=True)]
    assert torch.equal(lone.run_pass(drafted, drafted=True), torch.cat(lone_logits))


def test_copied_blocks_are_the_same_bits(folder: Folder) -> None:
    lone = LoneModel(folder())
    tokens = prompt(38)
    table = list(range(10))
    lone.run_chunks(tokens, 16, table)
    expected = lone.run_pass([([7], 38, table)])
    pairs = [block for table_block in table for block in (table_block, table_block + 3)]
    lone.cache.copy(pairs, [], [])
    lone.cache.pool.zero_()
    outside = [30, 50, 31, 70, 33, 90, 32, 12, 11, 10]
    inside = [block for a, b in zip(table, outside, strict=True) for block in (a + 3, b)]
    lone.cache.copy([], inside, [])
    assert torch.equal(lone.run_pass([([7], 38, outside)]), expected)
    lone.cache.copy([], [], [10, 60])
    assert torch.equal(lone.run_pass([([7], 38, [*outside[:-1], 60])]), expected)


def test_one_step_copies_out_then_back_then_within(folder: Folder) -> None:
    cache = LoneModel(folder(), block_size=1, blocks=4).cache
    cache.pool[:] = torch.arange(4.0).view(1, 1, 1, 4, 1)
    cache.copy([0, 5], [], [])
    cache.copy([1, 6], [5, 1], [1, 2, 3, 0])
    assert cache.keys[0][0, :, 0].tolist() == [3.0, 0.0, 0.0, 3.0]
    cache.copy([], [6, 3], [])
    assert cache.values[1][0, :, 0].tolist() == [3.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("rows", [1, 2, 17, 300])
def test_linear_layers_agree(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(80, 128, generator=generator)
    bias = torch.randn(80, generator=generator)
    activations = torch.randn(rows, 128, generator=generator)
    expected = activations @ weight.T + bias
    for layer, error in (
        (transformer.make_linear(weight, bias), 1e-4),
        (transformer._make_plain(weight, bias), 1e-4),
        (transformer.make_linear(weight, bias, "int8"), 2.5),
    ):
        output = layer(activations)
        assert (output - expected).abs().max() < error
        assert (output - expected).square().mean() < 0.001 * expected.square().mean()


def test_a_row_of_8_bits_is_accurate_beside_a_large_one() -> None:
    generator = torch.Generator().manual_seed(1)
    weight, rows = (torch.randn(count, 128, generator=generator) for count in (80, 5))
    layer = transformer.make_linear(weight, None, "int8")
    rows[2] *= 1000
    rows[3] = 0
    expected = rows @ weight.T
    errors = (layer(rows) - expected).square().mean(1)
    assert (errors <= 0.001 * expected.square().mean(1)).all()
