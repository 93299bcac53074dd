"""The speed of a generative worker's steps, and of the scheduler that plans them.

A worker runs alone in one thread, and is compared with the floor of its linear layers. The
scheduler runs without a model.

    python -m bench.load.generation [--rows 1 8 32] [--weights fp32|int8] [--rounds N]
    python -m bench.load.generation --scheduler 32 256

The model is random: 8 layers, 512 wide, 8 heads that share 4 key-value heads, 32,000 tokens.
Prompts have 128 tokens, and 32 follow. The floor is the time of the linear layers alone, with the
same weights and rows. A share of 1.0 would be a step that does nothing else. Both are measured in
turns, in CPU time, since other programs may use the machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shmserve.ipc.engine_settings import EngineSettings
from shmserve.ipc.messages.generation import NewSequence, Row, RowResult, Step, Stepped
from shmserve.scheduler.generative.engine import Engine
from shmserve.scheduler.generative.sequences import Generation
from shmserve.scheduler.tables import GenerationStats
from shmserve.workers.backends.llm.model.attention import KvCache
from shmserve.workers.backends.llm.model.checkpoint import Checkpoint
from shmserve.workers.backends.llm.model.transformer import MIN_ROWS, Passes, Transformer
from shmserve.workers.backends.llm.parameters import GenerationParameters
from shmserve.workers.backends.llm.worker_engine import Prompt, WorkerEngine
from tests.support.hf_folders import write_folder

PROMPT_TOKENS, NEW_TOKENS, BLOCK_TOKENS = 128, 32, 16
SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}


def count_blocks(rows: int, new_tokens: int) -> int:
    """Return the number of blocks for `rows` prompts with `new_tokens` generated tokens each."""
    return rows * (PROMPT_TOKENS + new_tokens) // BLOCK_TOKENS


class SequenceBatch:
    """A number of sequences that one engine generates.

    Args:
        passes: The model's forward passes, whose cache has the blocks of all sequences.
        rows: The number of sequences.
        new_tokens: The number of tokens that follow each prompt.
        clock: Returns the time in seconds by which steps are measured.
    """

    def __init__(
        self,
        passes: Passes,
        rows: int,
        new_tokens: int = NEW_TOKENS,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._blocks = count_blocks(1, new_tokens)
        parameters = GenerationParameters(max_tokens=new_tokens, temperature=0.0)
        prompts = {
            key: Prompt(key, torch.randint(3, 300, (PROMPT_TOKENS,)).tolist(), parameters, ())
            for key in range(rows)
        }
        self._rows, self._new_tokens, self._clock = rows, new_tokens, clock
        self._engine = WorkerEngine(passes, None, prompts, lambda outputs: None, lambda *_: None)

    def prefill(self) -> float:
        """Compute all prompts, one per step, and return the seconds that this took."""
        start_s = self._clock()
        for key in range(self._rows):
            blocks = list(range(key * self._blocks, (key + 1) * self._blocks))
            row = Row(key + 1, 0, PROMPT_TOKENS, 0, blocks)
            self._step(key + 1, [row], [NewSequence(key + 1, key, 0)])
        return self._clock() - start_s

    def decode(self) -> list[float]:
        """Decode all sequences together after their prompts; return the seconds of each step."""
        took_s: list[float] = []
        for position in range(1, self._new_tokens):
            rows = [
                Row(key + 1, PROMPT_TOKENS + position - 1, 1, self._blocks, [])
                for key in range(self._rows)
            ]
            start_s = self._clock()
            self._step(self._rows + position, rows, [])
            took_s.append(self._clock() - start_s)
        return took_s

    def _step(self, number: int, rows: list[Row], begin: list[NewSequence]) -> Stepped:
        return self._engine.step(Step(number, rows, begin))


def floor(model: Transformer, rows: int, head_rows: int) -> Callable[[], None]:
    """Return a function that runs one pass of `rows` rows through the linear layers.

    Only `head_rows` rows go through the output layer, and through the linear layers of the last
    transformer layer except `qkv`, because only logits need their results.
    """
    architecture = model.architecture
    padded_rows = max(rows, MIN_ROWS)
    hidden = torch.randn(padded_rows, architecture.hidden)
    inner_states = torch.randn(padded_rows, architecture.intermediate)
    last_hidden = hidden[: max(head_rows, MIN_ROWS)].contiguous()

    @torch.inference_mode()
    def run_layers() -> None:
        for layer in model.layers[:-1]:
            layer.qkv(hidden), layer.output(hidden), layer.gate_up(hidden), layer.down(inner_states)
        layer = model.layers[-1]
        (
            layer.qkv(hidden),
            layer.output(last_hidden),
            layer.gate_up(last_hidden),
            layer.down(inner_states[: len(last_hidden)]),
        )
        model.head(last_hidden)

    return run_layers


def median_ms(call: Callable[[], None], times: int) -> float:
    """Return the median duration of `times` calls in ms."""
    took_s: list[float] = []
    for _ in range(times):
        start_s = time.thread_time()
        call()
        took_s.append(time.thread_time() - start_s)
    return statistics.median(took_s) * 1e3


def measure(model: Transformer, rows: int, rounds: int) -> dict[str, float]:
    """Return medians over the rounds: the time of a step, of its floor, and tokens per second."""
    steps: list[float] = []
    prompts: list[float] = []
    floors: list[float] = []
    prompt_floors: list[float] = []
    for _ in range(rounds):
        blocks = count_blocks(rows, NEW_TOKENS)
        cache = KvCache(model.architecture, BLOCK_TOKENS, blocks, 0)
        batch = SequenceBatch(Passes(model, cache), rows)
        prompts.append(batch.prefill() / rows * 1e3)
        steps.append(statistics.median(batch.decode()) * 1e3)
        floors.append(median_ms(floor(model, rows, rows), 10))
        prompt_floors.append(median_ms(floor(model, PROMPT_TOKENS, 1), 3))
    step, prompt = statistics.median(steps), statistics.median(prompts)
    step_floor, prompt_floor = statistics.median(floors), statistics.median(prompt_floors)
    token_count = rows * prompt + (NEW_TOKENS - 1) * step
    total_floor = rows * prompt_floor + (NEW_TOKENS - 1) * step_floor
    return {
        "rows": rows,
        "step_ms": round(step, 2),
        "step_floor_ms": round(step_floor, 2),
        "prompt_ms": round(prompt, 2),
        "prompt_floor_ms": round(prompt_floor, 2),
        "tokens_per_s": round(rows * NEW_TOKENS / token_count * 1e3, 1),
        "floor_tokens_per_s": round(rows * NEW_TOKENS / total_floor * 1e3, 1),
        "share_of_floor": round(total_floor / token_count, 3),
    }


def schedule(sequences: int, rounds: int) -> dict[str, float]:
    """Return the median and the mean cost of a step in the scheduler, in ms.

    The median is that of the steps with one token of each sequence. The mean is that of all steps
    from the first prompt to the last token.
    """
    settings = EngineSettings.of(
        {
            "max_batch_size": sequences,
            "kv_cache_blocks": count_blocks(sequences, NEW_TOKENS) + sequences,
            "max_tokens_per_batch": 16 * sequences,
            "max_prefill_tokens": 16 * sequences,
        }
    )
    decode_s: list[float] = []
    step_s: list[float] = []
    numbers = itertools.count(1)
    for _ in range(rounds):
        engine: Engine[None] = Engine(
            settings, GenerationStats(), numbers, lambda *_: None, lambda *_: None
        )
        for key in range(sequences):
            prompt = array("i", [key, *range(1, PROMPT_TOKENS)])
            engine.add(Generation(None, key, key, prompt, NEW_TOKENS))
        for number in range(1, 1_000_000):
            start_s = time.thread_time()
            step = engine.plan(number)
            planned_s = time.thread_time()
            if step is None:
                break
            results = [
                RowResult(
                    row.sequence,
                    [7],
                    "length" if row.start == PROMPT_TOKENS + NEW_TOKENS - 2 else "",
                )
                for row in step.rows
                if row.samples_next
            ]
            step_result = Stepped(number, results, 0, 20_000_000, 0)
            responded_s = time.thread_time()
            engine.finish_step(step_result)
            step_s.append(time.thread_time() - responded_s + planned_s - start_s)
            if len(results) == sequences:
                decode_s.append(step_s[-1])
    return {
        "sequences": sequences,
        "scheduler_ms": round(statistics.median(decode_s) * 1e3, 3),
        "scheduler_mean_ms": round(statistics.mean(step_s) * 1e3, 3),
    }


def main() -> None:
    """Measure, and print one JSON object per line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--weights", choices=["fp32", "int8"], default="fp32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scheduler", type=int, nargs="+", metavar="SEQUENCES")
    args = parser.parse_args()
    for sequences in args.scheduler or ():
        sys.stdout.write(json.dumps(schedule(sequences, args.rounds)) + "\n")
    if args.scheduler:
        return
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = write_folder(Path(folder) / "m512", **SIZES)
        model = Transformer(Checkpoint.open(path), args.weights)
    for rows in args.rows:
        sys.stdout.write(json.dumps(measure(model, rows, args.rounds)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
