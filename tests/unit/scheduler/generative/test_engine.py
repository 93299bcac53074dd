"""The engine by random schedules: whatever is preempted, shared, copied and cancelled, each sample
has the tokens that it has alone, and no block is lost."""

from __future__ import annotations

import itertools
import random
from array import array
from dataclasses import dataclass, field
from typing import Any

import pytest

from shmserve.ipc.engine_settings import EngineSettings
from shmserve.ipc.messages.generation import BeamSearch
from shmserve.scheduler.generative.beams import Beams
from shmserve.scheduler.generative.engine import Engine
from shmserve.scheduler.generative.sequences import Generation, Place, Sequence
from shmserve.scheduler.statistics.generation_stats import GenerationStats
from tests.support.generative_worker import (
    END,
    VOCABULARY,
    GenerativeWorker,
    alone,
    candidates,
)

MS = 1_000_000


@dataclass
class Rig:
    """An engine with its worker, and what became of its requests."""

    settings: EngineSettings
    proposals: int = 1
    ended: dict[tuple[int, int], tuple[list[int], str]] = field(default_factory=dict)
    found: dict[int, list[Any]] = field(default_factory=dict)
    now_ns: int = 0
    keys: Any = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        s = self.settings
        self.worker = GenerativeWorker(
            s.block_size, s.kv_cache_blocks, s.swap_blocks, self.proposals
        )
        self.engine: Engine[None] = Engine(
            self.settings, GenerationStats(), itertools.count(1), self._ended, self._chosen
        )
        self.generations: dict[int, Generation[None]] = {}

    def _ended(self, sequence: Sequence[None], why: str) -> None:
        generation = sequence.generation
        tokens = list(sequence.tokens[len(generation.prompt) :])
        assert (generation.key, sequence.sample) not in self.ended
        self.ended[generation.key, sequence.sample] = (tokens, why)

    def _chosen(self, generation: Generation[None], beams: Beams[None]) -> None:
        assert generation.key not in self.found
        self.found[generation.key] = [(each.tokens, each.over) for each in beams.found]

    def submit(self, prompt: list[int], max_tokens: int, **more: Any) -> Generation[None]:
        key = next(self.keys)
        generation: Generation[None] = Generation(
            None, key, self.now_ns, array("i", prompt), max_tokens, **more
        )
        self.worker.prompts[key] = generation.prompt
        self.worker.most[key] = max_tokens
        if generation.beams is not None:
            self.worker.width[key] = generation.beams.width
        self.generations[key] = generation
        assert self.engine.fits(generation)
        self.engine.add(generation)
        return generation

    def turn(self) -> bool:
        """A step, if there is one."""
        self.now_ns += MS
        step = self.engine.plan(self.now_ns)
        if step is None:
            return False
        s = self.settings
        assert sum(row.count + row.draft for row in step.rows) <= s.max_tokens_per_batch
        assert len(step.rows) <= s.max_batch_size
        prompts = [row.count for row in step.rows if row.count > 1 or not row.samples]
        assert sum(prompts) <= s.max_prefill_tokens
        assert all(count <= s.prefill_chunk_size for count in prompts)
        self.engine.done(self.worker.step(step))
        self.check()
        return True

    def check(self) -> None:
        """Nothing is lost, and counts are those of the tables."""
        engine = self.engine
        for pool, tables in (
            (engine.pool, [each.table for each in engine._live.values()]),
            (engine.host, [each.host for each in engine._live.values()]),
        ):
            held = list(itertools.chain.from_iterable(tables))
            counted = [0] * pool.count
            for block in held:
                counted[block] += 1
            assert counted == pool.references
            assert pool.used == len(set(held))
            assert pool.used + pool.available == pool.count

    def drain(self, most: int = 20_000) -> None:
        """Steps until nothing is left to do."""
        for _ in range(most):
            if not self.turn():
                break
        else:
            raise AssertionError(f"{self.engine.live} sequences get no further")
        assert not self.engine.live
        assert not self.engine.pool.used
        assert not self.engine.host.used
        assert not self.worker.known


def settings(**given: Any) -> EngineSettings:
    return EngineSettings.of(
        {
            "block_size": 4,
            "kv_cache_blocks": 64,
            "swap_blocks": 32,
            "max_batch_size": 8,
            "max_tokens_per_batch": 64,
            "max_prefill_tokens": 48,
            "prefill_chunk_size": 32,
            **given,
        }
    )


def test_one_request_has_its_tokens() -> None:
    rig = Rig(settings())
    rig.submit(list(range(1, 10)), 20)
    rig.drain()
    assert rig.ended == {(1, 0): alone(array("i", range(1, 10)), 0, 20)}


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "swap": {"preemption_mode": "swap"},
    "recompute": {"preemption_mode": "recompute"},
    "shortest first": {"scheduling_policy": "sjf"},
    "priorities": {"scheduling_policy": "priority"},
    "no cache": {"enable_prefix_caching": False},
    "no preemption": {"enable_preemption": False},
    "speculation": {"speculative_decoding": {"enabled": True, "adaptive_length": False}},
    "small chunks": {"prefill_chunk_size": 5, "block_size": 1, "kv_cache_blocks": 200},
    "a target": {"target_itl_ms": 2.0},
}


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_any_schedule_gives_the_tokens_of_each_alone(variant: str, seed: int) -> None:
    random_ = random.Random(f"{variant}{seed}")
    given = {"kv_cache_blocks": random_.choice((17, 24, 40)), **VARIANTS[variant]}
    rig = Rig(settings(**given), random_.randint(0, 3))
    prefixes = [[random_.randint(1, VOCABULARY) for _ in range(30)] for _ in range(3)]
    cancelled: set[int] = set()
    waiting = 60
    while waiting or rig.engine.live:
        if waiting and random_.random() < 0.6:
            waiting -= 1
            prompt = random_.choice(prefixes)[: random_.randint(1, 30)]
            if random_.random() < 0.5:
                prompt = prompt + [random_.randint(1, VOCABULARY) for _ in range(9)]
            rig.submit(
                prompt,
                random_.randint(1, 25),
                samples=random_.choice((1, 1, 1, 2, 4)),
                priority=random_.randint(0, 3),
                whole=random_.random() < 0.1,
            )
        if rig.generations and random_.random() < 0.05:
            key = random_.choice(list(rig.generations))
            rig.engine.cancel(rig.generations[key])
            cancelled.add(key)
        rig.turn()
    rig.drain()
    for key, generation in rig.generations.items():
        for sample in range(generation.samples):
            if key not in cancelled or (key, sample) in rig.ended:
                wanted = alone(generation.prompt, sample, generation.max_tokens)
                assert rig.ended[key, sample] == wanted, (key, sample)
    if variant in ("swap", "recompute"):
        assert any(rig.engine.counts.preemptions.values())


def searched(prompt: array[int], most: int, search: BeamSearch) -> list[tuple[list[int], str]]:
    """A beam search as the rules of transformers have it, without blocks."""
    beams = [(0.0, prompt[:])]
    found: list[tuple[float, list[int], str]] = []
    for length in range(1, most + 1):
        ranked = sorted(
            (
                (score + more, tokens, token)
                for score, tokens in beams
                for token, more in candidates(tokens, 2 * search.width)
            ),
            key=lambda each: -each[0],
        )[: 2 * search.width]
        beams = []
        for place, (score, tokens, token) in enumerate(ranked):
            text = [*tokens[len(prompt) :], token]
            if token in search.ends:
                if place < search.width:
                    found.append((score / length**search.length_penalty, text, "stop"))
            elif len(beams) < search.width:
                beams.append((score, tokens + array("i", [token])))
        found = sorted(found, key=lambda each: -each[0])[: search.width]
        worst = found[-1][0] if len(found) == search.width else float("-inf")
        if worst >= beams[0][0] / length**search.length_penalty:
            break
    else:
        for score, tokens in beams:
            text = list(tokens[len(prompt) :])
            found.append((score / most**search.length_penalty, text, "length"))
        found = sorted(found, key=lambda each: -each[0])[: search.width]
    return [(text, why) for _, text, why in found]


@pytest.mark.parametrize("blocks", [20, 64])
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_beam_searches_side_by_side(blocks: int, mode: str) -> None:
    rig = Rig(settings(kv_cache_blocks=blocks, preemption_mode=mode))
    search = BeamSearch(3, 0.7, "false", [END, 7, 19])
    random_ = random.Random(blocks)
    for _ in range(8):
        prompt = [random_.randint(1, VOCABULARY) for _ in range(random_.randint(1, 12))]
        rig.submit(prompt, random_.randint(1, 14), beams=search)
        rig.submit(prompt, 10)
    rig.drain()
    for key, generation in rig.generations.items():
        if generation.beams is not None:
            wanted = searched(generation.prompt, generation.max_tokens, search)
            assert rig.found[key] == wanted
        else:
            assert rig.ended[key, 0] == alone(generation.prompt, 0, 10)


def test_a_shared_prefix_is_computed_once() -> None:
    rig = Rig(settings())
    prompt = [5] * 33
    rig.submit(prompt, 2)
    rig.drain()
    before = rig.engine.counts.prefilled
    second = rig.submit([*prompt, 8], 2)
    rig.drain()
    assert second.cached == 32
    assert rig.engine.counts.prefilled - before == 2
    whole = rig.submit(prompt, 2, whole=True)
    rig.drain()
    assert whole.cached == 0


def test_what_can_never_run_is_refused() -> None:
    rig = Rig(settings(kv_cache_blocks=4))
    long: Generation[None] = Generation(None, 1, 0, array("i", [1] * 10), 8)
    assert not rig.engine.fits(long)
    many: Generation[None] = Generation(None, 1, 0, array("i", [1]), 2, samples=9)
    assert not rig.engine.fits(many)
    assert rig.engine.fits(Generation(None, 1, 0, array("i", [1] * 10), 7))


def test_in_order_of_arrival_the_first_token_comes_first() -> None:
    rig = Rig(settings(max_batch_size=2))
    first: list[int] = []
    for _ in range(8):
        rig.submit([1, 2, 3, 4, 5], 6)
    while rig.engine.live:
        rig.turn()
        for sequence in rig.engine._live.values():
            if sequence.generated and sequence.generation.key not in first:
                first.append(sequence.generation.key)
    assert first == sorted(first)


def test_a_stream_of_short_requests_starves_no_long_one() -> None:
    rig = Rig(settings(scheduling_policy="sjf", max_batch_size=2, max_wait_time_ms=50.0))
    long = rig.submit([1] * 40, 20)
    for _ in range(200):
        rig.submit([2], 2)
        rig.turn()
        if long.sequences and long.sequences[0].place is Place.RUNNING:
            break
    else:
        raise AssertionError("it never ran")
