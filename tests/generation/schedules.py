"""Random schedules on real weights. Each logit of a request has the same bits as when the request
runs alone, for any other requests, any blocks and any number of swaps.

The engine plans, and a worker's engine computes, as in a server. No token is computed twice (no
recomputation, no drafts): a second computation has other rows of its sequence in the same pass, so
its logits are only close.
"""

import functools
import hashlib
import random
import tempfile
from array import array
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shmserve.ipc.engine_settings import EngineSettings
from shmserve.ipc.messages.generation import Step, Stepped
from shmserve.scheduler.generative.sequences import Generation
from shmserve.workers.backends.llm.model.attention import KvCache
from shmserve.workers.backends.llm.model.checkpoint import Checkpoint
from shmserve.workers.backends.llm.model.transformer import Passes, Transformer
from shmserve.workers.backends.llm.parameters import GenerationParameters
from shmserve.workers.backends.llm.worker_engine import Prompt, RowPlan, WorkerEngine
from tests.simulation.generative import EngineRig
from tests.support.generative_worker import GenerativeWorker
from tests.support.hf_folders import write_folder

FAMILIES = ("llama", "qwen2", "qwen3")
_END_TOKENS = (0,)
_TOKENS = range(3, 320)
_REQUEST_COUNT = 120  # number of requests from which the schedules draw
_MAX_PROMPT_TOKENS, _MAX_NEW_TOKENS = 48, 8  # tokens of a prompt, and behind it
_NO_TOKENS = array("i")
_SAMPLED_SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 1.4, "top_k": 40, "top_p": 0.9},
)

Bits = dict[tuple[int, int], bytes]  # the bits of the logits, by sample and number of tokens


class PlannedRequest(NamedTuple):
    prompt: tuple[int, ...]
    max_tokens: int
    samples: int


class NotingEngine(WorkerEngine):
    """A worker's engine that records the `bits` of the logits that it samples from, by request."""

    bits: dict[int, Bits]

    def _forward(self, planned: list[RowPlan]) -> torch.Tensor:
        logits = super()._forward(planned)
        for settings in planned:
            if settings.row.samples_next:
                sequence, line = settings.sequence, logits[settings.logit_row].numpy()
                noted = self.bits.setdefault(sequence.prompt.key, {})
                digest = hashlib.blake2b(line.tobytes(), digest_size=8).digest()
                noted[sequence.sample, len(sequence.tokens)] = digest
        return logits


class ModelWorker(GenerativeWorker):
    """A worker with a model, and a pool of keys and values."""

    def __init__(self, model: Transformer, settings: EngineSettings) -> None:
        sizes = settings.block_size, settings.kv_cache_blocks, settings.swap_blocks
        super().__init__(*sizes)
        cache = KvCache(model.architecture, *sizes)
        self._prompts: dict[int, Prompt] = {}
        model_passes = Passes(model, cache)
        self.engine = NotingEngine(
            model_passes, None, self._prompts, lambda _: None, lambda *_: None
        )
        self.engine.bits = {}
        self.sequences: Any = self.engine._sequences

    def step(self, step: Step) -> Stepped:
        for begin in step.new_sequences:
            if begin.key not in self._prompts:
                tokens = list(self.prompts[begin.key])
                parameters = GenerationParameters(
                    max_tokens=self.max_tokens_by_key[begin.key],
                    seed=sum(tokens),
                    **_SAMPLED_SETTINGS[sum(tokens) % len(_SAMPLED_SETTINGS)],
                )
                self._prompts[begin.key] = Prompt(begin.key, tokens, parameters, _END_TOKENS)
        return self.engine.step(step)


class ModelRig(EngineRig):
    """An engine whose worker has a real model."""

    def __init__(self, model: Transformer, settings: EngineSettings) -> None:
        super().__init__(settings)
        self.worker: ModelWorker = ModelWorker(model, settings)

    @property
    def bits(self) -> dict[int, Bits]:
        return self.worker.engine.bits

    def submit_request(self, request: PlannedRequest) -> Generation[None]:
        generation = self.submit(request.prompt, request.max_tokens, samples=request.samples)
        assert generation is not None
        return generation


@functools.cache
def model(family: str) -> Transformer:
    """Return a tiny model whose logits change with any mistake."""
    with tempfile.TemporaryDirectory(prefix="shmserve-schedules-") as folder:
        return Transformer(Checkpoint.open(write_folder(Path(folder) / family, family)))


@functools.cache
def requests() -> list[PlannedRequest]:
    """Return all requests of the schedules, many with a common prefix."""
    draw = random.Random(1)
    prompt_beginnings = [draw.choices(_TOKENS, k=_MAX_PROMPT_TOKENS) for _ in range(4)]
    requests: list[PlannedRequest] = []
    for _ in range(_REQUEST_COUNT):
        head = draw.choice(prompt_beginnings)[: draw.choice((0, 16, 32, 40))]
        prompt = [*head, *draw.choices(_TOKENS, k=draw.randint(1, _MAX_PROMPT_TOKENS - len(head)))]
        max_tokens = draw.randint(1, _MAX_NEW_TOKENS)
        requests.append(PlannedRequest(tuple(prompt), max_tokens, draw.choice((1, 1, 1, 2, 4))))
    return requests


@functools.cache
def run_alone(
    family: str, planned: PlannedRequest
) -> tuple[Bits, dict[int, tuple[list[int], str]]]:
    """Return the logits and tokens of each sample of a request that runs alone."""
    bits: Bits = {}
    ended_samples: dict[int, tuple[list[int], str]] = {}
    for sample in range(planned.samples):
        rig = ModelRig(model(family), EngineSettings(block_size=1, kv_cache_blocks=128))
        if planned.samples > 1 and len(planned.prompt) > 1:
            # Each sample computes the last token itself, after the shared prefix.
            rig.submit(planned.prompt[:-1], 1)
            rig.drain()
        generation = rig.submit(planned.prompt, planned.max_tokens, {sample: _NO_TOKENS}, samples=1)
        rig.drain()
        assert generation is not None
        bits |= rig.bits[generation.key]
        ended_samples[sample] = rig.ended[generation.key, sample]
    return bits, ended_samples


@dataclass
class Schedule:
    """A random schedule, drawn from a seed; `counts` counts its events."""

    seed: int
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        draw = self._draw = random.Random(self.seed)
        self._family = draw.choice(FAMILIES)
        self._seats = draw.choice((8, 8, 8, 32))
        block_size = draw.choice((1, 4, 16))
        all_blocks = self._seats * -(-(_MAX_PROMPT_TOKENS + _MAX_NEW_TOKENS) // block_size)
        settings = EngineSettings(
            block_size=block_size,
            max_batch_size=self._seats,
            max_tokens_per_batch=self._seats + draw.choice((16, 40, 500)),
            prefill_chunk_size=draw.choice((16, 32, 512)),
            max_prefill_tokens=draw.choice((16, 50, 500)),
            scheduling_policy=draw.choice(("fcfs", "sjf", "priority")),
            # A cached prefix ends at the boundary of a chunk.
            enable_prefix_caching=block_size == 16,
            kv_cache_blocks=int(all_blocks * draw.choice((0.15, 0.25, 1.0))) + 1,
            preemption_mode="swap",
            swap_blocks=2 * all_blocks,
        )
        self._rig = ModelRig(model(self._family), settings)

    def run(self) -> None:
        """Let requests come, some of them go, and compare. Raises AssertionError."""
        rig, draw = self._rig, self._draw
        submitted: dict[int, PlannedRequest] = {}
        cancelled: set[int] = set()
        unsubmitted = self._seats
        while unsubmitted or rig.engine.live_sequence_count:
            while unsubmitted and draw.random() < 0.7:
                unsubmitted -= 1
                request = draw.choice(requests())
                submitted[rig.submit_request(request).key] = request
            if submitted and draw.random() < 0.1:
                key = draw.choice(list(submitted))
                cancelled.add(key)
                rig.engine.cancel(rig.generations[key])
            rig.run_turn()
        rig.drain()
        for key, request in submitted.items():
            self._compare(key, request, key in cancelled)
        counts = rig.engine.counts
        assert not counts.recomputed
        self.counts.update(
            swapped=counts.preemptions["swap"],
            copied_on_write=counts.copied_on_write,
            prefix_hits=counts.prefix_hits,
            requests=len(submitted),
        )

    def _compare(self, key: int, request: PlannedRequest, cancelled: bool) -> None:
        expected, texts = run_alone(self._family, request)
        recorded_bits = self._rig.bits.get(key, {})
        for position, bits in recorded_bits.items():
            assert bits == expected[position], (
                f"{self._family}, {request}: logits behind {position} differ"
            )
        self.counts["logits"] += len(recorded_bits)
        for sample, text in texts.items():
            ended = self._rig.ended.get((key, sample))
            assert ended == text or (cancelled and ended is None), (self._family, request, sample)


def run(size: int, first_seed: int = 0) -> str:
    """Run this number of schedules. Raises AssertionError at the first that differs."""
    counts: Counter[str] = Counter()
    for seed in range(first_seed, first_seed + size):
        schedule = Schedule(seed)
        try:
            schedule.run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        counts += schedule.counts
    return f"{size} schedules, all bits equal: {dict(counts)}"
