"""The speed of a generative scheduler and its worker's engine in one thread, without sockets.

The cases are a long prompt beside others, a pool that is too small, a cached prefix, a draft model,
and 8-bit weights.

    python -m bench.load.serving [late tight prefix draft int8] [--rounds N]
    python examples/generation/train.py FOLDER --draft
    python -m bench.load.serving --trained FOLDER [--text FILE] [--rounds N]

The model is that of `bench.load.generation`, and times are CPU times. A ratio is that of two loads
in turns, the median of the rounds.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import pydoc_data.topics
import random
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from bench.load.generation import NEW_TOKENS, PROMPT_TOKENS, SIZES, count_blocks
from shmserve.ipc.engine_settings import EngineSettings
from shmserve.ipc.messages.generation import Stepped
from shmserve.scheduler.generative.engine import Engine
from shmserve.scheduler.generative.sequences import Generation
from shmserve.scheduler.tables import GenerationStats
from shmserve.workers.backends.llm.model.attention import KvCache
from shmserve.workers.backends.llm.model.checkpoint import Checkpoint
from shmserve.workers.backends.llm.model.transformer import Passes, Transformer
from shmserve.workers.backends.llm.parameters import GenerationParameters
from shmserve.workers.backends.llm.worker_engine import DraftModel, Prompt, WorkerEngine
from tests.support.hf_folders import config, save_weights, weights, write_folder

_PAIR_SUFFIXES = ("", "-draft")
TARGET_MS, LATE, PREFIX = 50, 900, 500
DRAFT: dict[str, Any] = {
    **SIZES,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


class Serving:
    """A generative scheduler and its worker in one thread.

    Attributes:
        clock: The CPU time that the scheduler and the worker have used, in seconds.
        times: The value of `clock` at each token of a request, by request key.
    """

    def __init__(
        self, model: Transformer, draft: Transformer | None = None, **options: Any
    ) -> None:
        settings = EngineSettings.of({"kv_cache_blocks": 1024, **options})
        settings = replace(settings, max_model_len=0, swap_blocks=settings.kv_cache_blocks)
        sizes = settings.block_size, settings.kv_cache_blocks
        cache = KvCache(model.architecture, *sizes, settings.swap_blocks)
        self._prompts: dict[int, Prompt] = {}
        proposer = (
            DraftModel(Passes(draft, KvCache(draft.architecture, *sizes, 0))) if draft else None
        )
        self._worker = WorkerEngine(
            Passes(model, cache),
            proposer.propose if proposer else None,
            self._prompts,
            lambda outputs: None,
            lambda keys, error: None,
        )
        self.counts = GenerationStats()
        self._numbers, self._next_key, self._steps = itertools.count(1), itertools.count(), 0
        self._engine: Engine[None] = Engine(
            settings, self.counts, self._numbers, lambda *_: None, lambda *_: None
        )
        self.clock = 0.0
        self.times: dict[int, list[float]] = {}

    def add(self, tokens: list[int], new_tokens: int = NEW_TOKENS) -> int:
        """Submit a request, and return its key."""
        key = next(self._next_key)
        parameters = GenerationParameters(max_tokens=new_tokens, temperature=0.0)
        self._prompts[key] = Prompt(key, tokens, parameters, ())
        self._engine.add(Generation(None, key, key, array("i", tokens), new_tokens))
        self.times[key] = [self.clock]
        return key

    def step(self) -> bool:
        """Plan and compute one step; return whether there was one."""
        start_s, wall_start_s = time.thread_time(), time.perf_counter()
        self._steps += 1
        step = self._engine.plan(self._steps)
        if step is None:
            return False
        step_result = self._worker.step(step)
        cpu_s, wall_s = time.thread_time() - start_s, time.perf_counter() - wall_start_s
        self._engine.finish_step(_scale_to_cpu_time(step_result, cpu_s / wall_s))
        self.clock += cpu_s
        keys = {number: s.prompt.key for number, s in self._worker._sequences.items()}
        for result in step_result.results:
            self.times[keys[result.sequence]] += [self.clock] * len(result.tokens)
        return True

    def run(self) -> float:
        """Run until all generations have ended, and return the seconds that this took."""
        start_s = self.clock
        while self.step():
            pass
        return self.clock - start_s


def _scale_to_cpu_time(step_result: Stepped, share: float) -> Stepped:
    """Return a step's result with durations in CPU time, `share` of the measured durations."""
    return replace(
        step_result,
        gather_ns=int(step_result.gather_ns * share),
        forward_ns=int(step_result.forward_ns * share),
        sample_ns=int(step_result.sample_ns * share),
        draft_ns=int(step_result.draft_ns * share),
    )


def prompt(size: int = PROMPT_TOKENS) -> list[int]:
    """Return a prompt of random tokens."""
    return list(map(int, torch.randint(3, SIZES["vocab_size"], (size,))))


@functools.cache
def model(weights_kind: str = "fp32") -> Transformer:
    """Return the random model."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_folder(Path(folder) / "model", **SIZES)
        return Transformer(Checkpoint.open(path), weights_kind)


def ratio(first: Callable[[], float], second: Callable[[], float], rounds: int) -> float:
    """Return the median ratio of two measurements, which run in turns."""
    return round(statistics.median(first() / second() for _ in range(rounds)), 3)


# --- the measured cases


def late(rounds: int) -> dict[str, Any]:
    """Measure the delay that a prompt of 900 tokens causes to four requests that generate."""
    gaps: list[float] = []
    waits: list[float] = []
    for _ in range(rounds):
        served = Serving(model(), target_itl_ms=TARGET_MS)
        for _ in range(2):  # the scheduler learns the duration of a step in the first round
            other_keys = [served.add(prompt(), 150) for _ in range(4)]
            for _ in range(30):
                served.step()
            arrived_s = served.clock
            key = served.add(prompt(LATE), 1)
            served.run()
        waits.append(served.times[key][1] - arrived_s)
        times = [[t for t in served.times[other_key] if t >= arrived_s] for other_key in other_keys]
        gaps += [max(b - a for a, b in itertools.pairwise(token_times)) for token_times in times]
    served_alone = Serving(model())
    served_alone.add(prompt(LATE), 1)
    return {
        "worst_itl_ms": round(max(gaps) * 1e3, 1),
        "median_of_worst_ms": round(statistics.median(gaps) * 1e3, 1),
        "target_ms": TARGET_MS,
        "first_token_ms": round(statistics.median(waits) * 1e3),
        "alone_ms": round(served_alone.run() * 1e3),
    }


def tight(rounds: int) -> dict[str, Any]:
    """Measure a KV pool with a quarter of the blocks that all requests need at once."""

    def load(rows: int, blocks: int) -> float:
        serving = Serving(model(), kv_cache_blocks=blocks, max_batch_size=rows)
        for _ in range(rows):
            serving.add(prompt())
        return serving.run()

    figures: dict[str, Any] = {}
    for rows in (32, 64):
        blocks = count_blocks(rows, NEW_TOKENS)
        quarter_load, ample_load = (
            functools.partial(load, rows, n) for n in (blocks // 4, 2 * blocks)
        )
        figures[f"time_{rows}"] = ratio(quarter_load, ample_load, rounds)
    return figures


def prefix(rounds: int) -> dict[str, Any]:
    """Measure the second of two prompts that share their first 500 tokens."""

    def load(is_second: bool) -> float:
        serving = Serving(model())
        shared_prefix = prompt(PREFIX)
        for _ in range(1 + is_second):
            key = serving.add(shared_prefix + prompt(12), 1)
            serving.run()
        return serving.times[key][1] - serving.times[key][0]

    return {"first_token": ratio(lambda: load(True), lambda: load(False), rounds)}


def draft(rounds: int) -> dict[str, Any]:
    """Measure a draft model that is mostly right, and a draft model that is always wrong."""
    pairs = {"good": _pair(True), "bad": _pair(False)}
    return {
        f"{label}_{rows}": _speculate(*pair, rows, rounds, functools.partial(prompt, 16))
        for label, pair in pairs.items()
        for rows in (1, 8)
    }


def trained(folder: Path, text: str, rounds: int) -> dict[str, Any]:
    """Measure a model with a draft model that was trained for it, on pieces of a text."""
    target, draft = (
        Transformer(Checkpoint.open(folder.with_name(folder.name + suffix)))
        for suffix in _PAIR_SUFFIXES
    )
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    rng = random.Random(1)

    def draw() -> list[int]:
        start = rng.randrange(len(tokens) - PROMPT_TOKENS)
        return tokens[start : start + PROMPT_TOKENS]

    return {f"speed_{rows}": _speculate(target, draft, rows, rounds, draw) for rows in (1, 8)}


def _speculate(
    target: Transformer,
    draft_model: Transformer,
    rows: int,
    rounds: int,
    draw: Callable[[], list[int]],
) -> dict[str, float]:
    acceptance_rates: list[float] = []
    prompts = itertools.cycle([[draw() for _ in range(rows)] for _ in range(rounds)])
    prompt_turns = itertools.chain.from_iterable((prompt_, prompt_) for prompt_ in prompts)

    def load(draft: Transformer | None) -> float:
        speculation = {"enabled": draft is not None, "method": "draft", "draft_model": "draft"}
        serving = Serving(target, draft, speculative_decoding=speculation)
        for tokens in next(prompt_turns):
            serving.add(tokens, 128)
        duration_s = serving.run()
        acceptance_rates.append(serving.counts.accepted / max(serving.counts.drafted, 1))
        return duration_s

    speed_ratio = ratio(lambda: load(None), lambda: load(draft_model), rounds)
    return {"speed": speed_ratio, "accepted": round(acceptance_rates[-1], 2)}


def _pair(agrees: bool) -> tuple[Transformer, Transformer]:
    """Return a model and a draft model.

    The output of the model depends mostly on the first 128 dimensions of its embeddings. The draft
    model has the same dimensions if it `agrees`, and other dimensions otherwise.
    """
    architecture = config(**SIZES)
    target_weights = weights(architecture, seed=1)
    draft_weights = weights(config(**DRAFT), seed=2)
    size = DRAFT["hidden_size"]
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
        target_weights[name][..., size:] *= 0.4
        if agrees:
            draft_weights[name] = target_weights[name][..., :size].clone()
    for tensors, share in ((target_weights, 1e-5), (draft_weights, 0.0)):
        for name in tensors:
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensors[name] *= share
    models: list[Transformer] = []
    with tempfile.TemporaryDirectory() as folder:
        for sizes, tensors in ((SIZES, target_weights), (DRAFT, draft_weights)):
            path = write_folder(Path(folder) / str(len(models)), **sizes)
            save_weights(path, tensors)
            models.append(Transformer(Checkpoint.open(path)))
    return models[0], models[1]


def int8(rounds: int) -> dict[str, Any]:
    """Compare 8-bit weights with 32-bit weights."""

    def load(kind: str, rows: int) -> float:
        serving = Serving(model(kind))
        for _ in range(rows):
            serving.add(prompt())
        return serving.run()

    return {
        f"speed_{rows}": ratio(
            functools.partial(load, "fp32", rows), functools.partial(load, "int8", rows), rounds
        )
        for rows in (1, 8, 32)
    }


CASES: tuple[Callable[[int], dict[str, Any]], ...] = (late, tight, prefix, draft, int8)


def select_cases(names: Iterable[str]) -> list[Callable[[int], dict[str, Any]]]:
    """Return the cases with these names, or all cases if no name is given."""
    return [case for case in CASES if case.__name__ in names] or list(CASES)


def main() -> None:
    """Measure, and print one JSON object per line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--trained", type=Path, metavar="FOLDER", help="measure only the models in FOLDER"
    )
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="a text whose pieces are the prompts"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.trained is None:
        cases = [(case.__name__, case) for case in select_cases(args.cases)]
    else:
        topics = "\n\n".join(pydoc_data.topics.topics.values())
        text = topics if args.text is None else args.text.read_text(encoding="utf-8")
        cases = [("trained", functools.partial(trained, args.trained, text))]
    for name, case in cases:
        figures = {"case": name, **case(args.rounds)}
        sys.stdout.write(json.dumps(figures) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
