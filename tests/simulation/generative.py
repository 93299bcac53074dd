"""`python -m tests.simulation.generative [--seconds S] [--first SEED]`: simulate the text engine.

Random schedules run with token histories instead of keys and values. A seed draws the settings of
an engine and its requests, which arrive, are cancelled, end by their text, or continue those of
another instance. Each sample must have the tokens that it has when it runs alone, and read only its
own history. After each step the reference counts must match the block tables. An operation is the
arrival or end of a request, a row, or the allocation, sharing, copying or release of a block.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from shmserve.ipc.engine_settings import EngineSettings
from shmserve.ipc.messages.generation import BeamSearch, Step
from shmserve.scheduler.generative.engine import Engine
from shmserve.scheduler.generative.sequences import (
    Beams,
    BlockPool,
    Generation,
    Sequence,
    SequenceStatus,
)
from shmserve.scheduler.tables import GenerationStats
from tests.support.generative_worker import (
    END_TOKEN,
    VOCABULARY_SIZE,
    GenerativeWorker,
    candidates,
    extend,
    generate_alone,
)

MS = 1_000_000


class CountedPool(BlockPool):
    """A block pool that counts its operations."""

    operations = 0

    def allocate(self, count: int, previous_block: int = -1) -> list[int]:
        """Allocate blocks, and check that none of them was in use."""
        self.operations += count
        references_before = self.references[:]
        new_block = super().allocate(count, previous_block)
        assert len(set(new_block)) == count
        assert not any(references_before[block] for block in new_block)
        return new_block

    def share(self, blocks: Iterable[int]) -> None:
        blocks = list(blocks)
        self.operations += len(blocks)
        super().share(blocks)

    def release(self, blocks: list[int]) -> None:
        self.operations += len(blocks)
        super().release(blocks)


@dataclass
class EngineRig:
    """An engine with its worker; `ended` has tokens and end reason, `found` beam searches."""

    settings: EngineSettings
    proposals: int = 1
    ended: dict[tuple[int, int], tuple[list[int], str]] = field(default_factory=dict)
    found: dict[int, list[tuple[list[int], str]]] = field(default_factory=dict)
    generations: dict[int, Generation[None]] = field(default_factory=dict)
    now_ns: int = 0
    rows: int = 0

    def __post_init__(self) -> None:
        s = self.settings
        self.worker = GenerativeWorker(
            s.block_size, s.kv_cache_blocks, s.swap_blocks, self.proposals
        )
        self.engine: Engine[None] = Engine(
            s, GenerationStats(), itertools.count(1), self._on_ended, self._on_beams_chosen
        )
        self.pools = [CountedPool(s.kv_cache_blocks), CountedPool(s.swap_blocks)]
        self.engine.pool, self.engine.host_pool = self.pools
        self._step: Step | None = None

    def _on_ended(self, sequence: Sequence[None], reason: str) -> None:
        generation = sequence.generation
        tokens = list(sequence.tokens[len(generation.prompt) :])
        assert (generation.key, sequence.sample) not in self.ended
        self.ended[generation.key, sequence.sample] = (tokens, reason)

    def _on_beams_chosen(self, generation: Generation[None], beams: Beams[None]) -> None:
        assert generation.key not in self.found
        self.found[generation.key] = [
            (array("i", hypothesis.tokens).tolist(), hypothesis.finish_reason)
            for hypothesis in beams.hypotheses
        ]

    @property
    def operations(self) -> int:
        """Return the number of operations, as defined in the module's docstring."""
        requests = len(self.generations) + len(self.ended) + len(self.found)
        return requests + self.rows + sum(pool.operations for pool in self.pools)

    def submit(
        self,
        prompt: Iterable[int],
        max_tokens: int,
        resumed_tokens: dict[int, array[int]] | None = None,
        **options: Any,
    ) -> Generation[None] | None:
        key = len(self.generations) + 1
        generation: Generation[None] = Generation(
            None, key, self.now_ns, array("i", prompt), max_tokens, **options
        )
        if not self.engine.fits(generation):
            return None
        self.worker.prompts[key] = generation.prompt
        self.worker.max_tokens_by_key[key] = max_tokens
        if generation.beams is not None:
            self.worker.width[key] = generation.beams.width
        for sample, tokens in (resumed_tokens or {}).items():
            self.worker.resumed_tokens[key, sample] = tokens
        self.generations[key] = generation
        self.engine.add(generation, resumed_tokens)
        return generation

    def plan(self) -> bool:
        """Begin a step, if there is one, and check that live sequences make progress."""
        self.now_ns += MS
        before = {generation: generation.status for generation in self.engine._sequences.values()}
        step = self._step = self.engine.plan(self.now_ns)
        if step is None:
            assert not self.engine.live_sequence_count, (
                f"{self.engine.live_sequence_count} sequences get no further"
            )
            return False
        s = self.settings
        assert sum(row.count + row.draft_count for row in step.rows) <= s.max_tokens_per_batch
        assert len(step.rows) <= s.max_batch_size
        prompts = [row.count for row in step.rows if row.count > 1 or not row.samples_next]
        assert sum(prompts) <= s.max_prefill_tokens
        assert all(count <= s.prefill_chunk_size for count in prompts)
        assert self.engine.running_step is not None
        for sequence, row in self.engine.running_step.rows.values():
            max_tokens = sequence.generation.max_computed_tokens
            assert row.start + row.count + row.draft_count <= max_tokens
        assert s.enable_preemption or not any(self.engine.counts.preemptions.values())
        self._check_preemptions(before, step)
        return True

    def _check_preemptions(self, before: dict[Sequence[None], SequenceStatus], step: Step) -> None:
        """Check that a preempting step admits no sequence, unless nothing else could run."""
        changes = [
            (status_before, sequence)
            for sequence, status_before in before.items()
            if sequence.status is not status_before
        ]
        preempted = any(status_before is SequenceStatus.RUNNING for status_before, _ in changes)
        admitted = any(sequence.status is SequenceStatus.RUNNING for _, sequence in changes)
        inside = {
            sequence.number
            for sequence, status_before in before.items()
            if status_before is SequenceStatus.RUNNING
        }
        assert not (preempted and admitted and any(row.sequence in inside for row in step.rows))

    def complete_step(self) -> None:
        assert self._step is not None
        self.rows += len(self._step.rows)
        self.engine.finish_step(self.worker.step(self._step))
        self.check()

    def run_turn(self) -> bool:
        if not self.plan():
            return False
        self.complete_step()
        return True

    def check(self) -> None:
        """Check that no block is lost and that the counts match the tables."""
        live = list(self.engine._sequences.values())
        for pool, held in (
            (self.engine.pool, [s.table for s in live]),
            (self.engine.host_pool, [s.host_blocks for s in live]),
        ):
            reference_counts = [0] * pool.block_count
            for block in itertools.chain.from_iterable(held):
                reference_counts[block] += 1
            assert reference_counts == pool.references
            assert pool.used_count == sum(map(bool, reference_counts))
        rows = [s.row_count for s in live if s.status is SequenceStatus.RUNNING]
        assert sum(rows) <= self.settings.max_batch_size
        for s in live:
            blocks = -(-s.computed_tokens // self.settings.block_size)
            if s.status is SequenceStatus.SWAPPED:
                assert len(s.host_blocks) == blocks
            else:
                assert len(s.table) >= blocks
            assert s.status is not SequenceStatus.WAITING or not (s.computed_tokens or s.table)
            assert s.status is not SequenceStatus.SWAPPED or not (s.is_held or s.table)

    def drain(self, max_steps: int = 20_000) -> None:
        for _ in range(max_steps):
            if not self.run_turn():
                break
        else:
            raise AssertionError(f"{self.engine.live_sequence_count} sequences get no further")
        assert not self.engine.live_sequence_count
        assert not any(pool.used_count for pool in self.pools)
        assert not self.worker.sequences

    def check_emptied(self) -> None:
        """Check that all blocks form one free extent once the cache is evicted."""
        for pool in self.pools:
            assert pool.allocate(pool.block_count) == list(range(pool.block_count))

    def verify(self, generation: Generation[None], samples: Iterable[int]) -> None:
        """Check that each ended sample has the tokens that it has when it runs alone."""
        if generation.beams is not None:
            assert self.found[generation.key] == reference_beam_search(generation)
            return
        for sample in samples:
            expected = generate_alone(generation.prompt, sample, generation.max_tokens)
            assert self.ended[generation.key, sample] == expected, (generation.key, sample)


def reference_beam_search(generation: Generation[None]) -> list[tuple[list[int], str]]:
    """Return the result of a beam search by the rules of transformers, without blocks."""
    search, prompt, max_tokens = generation.beams, generation.prompt, generation.max_tokens
    assert search is not None
    count = max(2, 1 + len(search.end_tokens)) * search.width
    beams = [(0.0, extend([], prompt))]
    found: list[tuple[float, list[int], str]] = []
    for length in range(1, max_tokens + 1):
        ranked = sorted(
            (
                (score + logprob, slots, token)
                for score, slots in beams
                for token, logprob in candidates(slots, count)
            ),
            key=lambda candidate: -candidate[0],
        )[:count]
        beams = []
        for index, (score, slots, token) in enumerate(ranked):
            text = [*(token_before for token_before, _, _ in slots[len(prompt) :]), token]
            if token in search.end_tokens:
                if index < search.width:
                    found.append((score / length**search.length_penalty, text, "stop"))
            elif len(beams) < search.width:
                beams.append((score, extend(slots[:], [token])))
        found = sorted(found, key=lambda candidate: -candidate[0])[: search.width]
        reach = (
            max_tokens if search.early_stopping == "never" and search.length_penalty > 0 else length
        )
        best = beams[0][0] / reach**search.length_penalty if beams else float("-inf")
        is_full = len(found) == search.width
        if not beams or (is_full and (search.early_stopping == "true" or found[-1][0] >= best)):
            break
    else:
        for score, slots in beams:
            text = [token for token, _, _ in slots[len(prompt) :]]
            found.append((score / max_tokens**search.length_penalty, text, "length"))
        found = sorted(found, key=lambda candidate: -candidate[0])[: search.width]
    return [(text, reason) for _, text, reason in found]


VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"preemption_mode": "swap"},
    {"preemption_mode": "recompute"},
    {"scheduling_policy": "sjf", "max_wait_time_ms": 100.0},
    {"scheduling_policy": "priority"},
    {"enable_prefix_caching": False},
    {"enable_preemption": False},
    {"speculative_decoding": {"enabled": True, "adaptive_length": False}},
    {"prefill_chunk_size": 5, "block_size": 1, "kv_cache_blocks": 200},
    {"target_itl_ms": 2.0},
)


def engine_settings(**settings: Any) -> EngineSettings:
    small = {"block_size": 4, "kv_cache_blocks": 64, "swap_blocks": 32, "max_batch_size": 8}
    budgets = {"max_tokens_per_batch": 64, "max_prefill_tokens": 48, "prefill_chunk_size": 32}
    return EngineSettings.of({**small, **budgets, **settings})


class Schedule:
    """The engine and the events of a seed."""

    def __init__(self, seed: int) -> None:
        draw = self._draw = random.Random(seed)
        fields = {
            "kv_cache_blocks": draw.choice((17, 24, 40)),
            "swap_blocks": draw.choice((0, 8, 32)),
            "max_batch_size": draw.choice((4, 8)),
            "max_tokens_per_batch": draw.choice((10, 64)),
            "prefill_chunk_size": draw.choice((3, 16, 32)),
            **VARIANTS[seed % len(VARIANTS)],
        }
        self.rig = EngineRig(engine_settings(**fields), draw.randint(0, 3))
        self._prefixes = [
            [draw.randint(1, VOCABULARY_SIZE) for _ in range(30)] for _ in range(draw.randint(1, 3))
        ]
        self._samples: dict[int, set[int]] = {}  # unfinished samples, by the key of their request
        self._stopped: set[tuple[int, int]] = set()

    def run(self, requests: int = 60) -> None:
        """Run a number of requests and check the result of each. Raises AssertionError."""
        rig, draw = self.rig, self._draw
        while requests or rig.engine.live_sequence_count:
            if requests and draw.random() < 0.6:
                requests -= 1
                self._add_generation()
            self._cause_event()
            if rig.plan():
                self._cause_event()
                rig.complete_step()
        rig.drain()
        rig.check_emptied()
        for key, samples in self._samples.items():
            rig.verify(rig.generations[key], samples)
        self._verify_stopped()

    def _add_generation(self) -> None:
        draw = self._draw
        prompt = draw.choice(self._prefixes)[: draw.randint(1, 30)]
        if draw.random() < 0.5:
            prompt = prompt + [draw.randint(1, VOCABULARY_SIZE) for _ in range(9)]
        fields: dict[str, Any] = {"samples": draw.choice((1, 1, 1, 2, 4))}
        if draw.random() < 0.1:
            early, penalty = (draw.choice(("true", "false", "never")), draw.choice((-0.5, 0.7, 1)))
            fields = {"beams": BeamSearch(draw.randint(2, 3), penalty, early, [END_TOKEN, 7, 19])}
        generation = self.rig.submit(
            prompt,
            draw.randint(1, 25),
            priority=draw.randint(0, 3),
            ignores_prefix_cache=draw.random() < 0.1,
            **fields,
        )
        if generation is not None:
            self._samples[generation.key] = set(range(generation.samples))

    def _cause_event(self) -> None:
        """Cause an external event, possibly during a step."""
        if self._draw.random() < 0.1:
            live = list(self.rig.engine._sequences.values())
            if live:
                event = self._draw.choice((self._cancel, self._stop, self._move))
                event(self._draw.choice(live))

    def _cancel(self, sequence: Sequence[None]) -> None:
        del self._samples[sequence.generation.key]
        self.rig.engine.cancel(sequence.generation)

    def _stop(self, sequence: Sequence[None]) -> None:
        generation = sequence.generation
        if generation.beams is not None or not sequence.generated_tokens:
            return
        self.rig.engine.stop_sequence(sequence.number)
        self._samples[generation.key].discard(sequence.sample)
        self._stopped.add((generation.key, sequence.sample))

    def _verify_stopped(self) -> None:
        """Check that a sample ended by its text has the tokens sampled until then."""
        for key, sample in self._stopped & self.rig.ended.keys():
            generation = self.rig.generations[key]
            tokens, why = self.rig.ended[key, sample]
            expected, reason = generate_alone(generation.prompt, sample, generation.max_tokens)
            assert tokens == expected[: len(tokens)]
            assert why == "stop" or (tokens, why) == (expected, reason)

    def _move(self, sequence: Sequence[None]) -> None:
        """Restart a sequence's request with its tokens, as if its instance had died."""
        generation = sequence.generation
        sampled = {row.sample: row.tokens[len(generation.prompt) :] for row in generation.sequences}
        ended = sum((generation.key, row) in self.rig.ended for row in range(generation.samples))
        if generation.beams is not None or len(sampled) + ended < generation.samples:
            return
        self.rig.engine.cancel(generation)
        moved_generation = self.rig.submit(
            generation.prompt, generation.max_tokens, sampled, samples=generation.samples
        )
        assert moved_generation is not None
        self._samples[generation.key] -= sampled.keys()
        self._samples[moved_generation.key] = set(sampled)


def main() -> int:
    """Run the simulation; return 1 if a rule was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.generative")
    parser.add_argument("--seconds", type=float, default=60.0, help="of CPU time [60]")
    parser.add_argument("--first", type=int, default=0, help="the first seed [0]")
    arguments = parser.parse_args()
    operations = rows = tokens_read = 0
    for seed in itertools.count(arguments.first):
        schedule = Schedule(seed)
        try:
            schedule.run()
        except Exception as error:
            print(f"seed {seed}: {error}")
            raise
        operations += schedule.rig.operations
        rows += schedule.rig.rows
        tokens_read += schedule.rig.worker.read_count
        seconds = time.process_time()
        if seconds > arguments.seconds:
            break
    print(
        f"{operations} operations in {seconds:.1f} s ({operations / seconds:.0f} a second) by "
        f"{seed + 1 - arguments.first} seeds: {rows} rows, {tokens_read} tokens read; "
        "no block was lost"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
