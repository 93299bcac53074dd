"""A step while it is planned, and while it runs (pure)."""

from __future__ import annotations

from typing import Any, NamedTuple

from shmserve.ipc.engine_settings import EngineSettings
from shmserve.ipc.messages.generation import Row, Step, Stepped
from shmserve.scheduler.generative.pace import StepTimes, StepWork
from shmserve.scheduler.generative.sequences import Sequence
from shmserve.scheduler.statistics.generation_stats import GenerationStats


class Running(NamedTuple):
    """The step that runs: its rows' sequences by number, its work, and the blocks it copies."""

    step: int
    rows: dict[int, tuple[Sequence[Any], Row]]
    load: StepWork
    copies: int
    drafts: int

    def observe(self, message: Stepped, times: StepTimes, counts: GenerationStats) -> None:
        """It has ended: learn from what it took, and count it."""
        load, took_ms = self.load, (message.forward_ns + message.sample_ns) / 1e6
        if self.copies:
            times.copied(self.copies, message.gather_ns / 1e6)
        else:
            took_ms += message.gather_ns / 1e6
        if self.drafts:
            times.drafted(self.drafts, message.draft_ns / 1e6)
        times.observe(load, took_ms - message.draft_ns / 1e6)
        counts.batch_tokens.observe(load.decoded + load.prefilled)
        counts.iteration_seconds.observe(message.gather_ns + message.forward_ns + message.sample_ns)
        phases = counts.phases
        phases["gather"] += message.gather_ns - message.draft_ns
        phases["forward"] += message.forward_ns
        phases["sample"] += message.sample_ns
        phases["draft"] += message.draft_ns
        phases["text"] += message.text_ns
        counts.prefilled += load.prefilled
        counts.decoded += load.decoded


class StepPlan:
    """A step that is being planned: what is still free of its budgets, and what it has so far."""

    def __init__(self, number: int, settings: EngineSettings) -> None:
        self.step = Step(number, [])
        self.tokens = settings.max_tokens_per_batch
        self.prompt_tokens = settings.max_prefill_tokens
        self.rows: dict[int, tuple[Sequence[Any], Row]] = {}
        self.load = StepWork()
        self.decoding = 1  # sequences
        self.drafts = 0
        self.preempted = False

    def add(self, sequence: Sequence[Any], count: int, drafts: int) -> None:
        """A row for the next `count` tokens of a sequence, and what it proposes: they are paid
        for."""
        start, samples = sequence.computed, count == sequence.missing
        blocks = sequence.table[sequence.told :]
        row = Row(sequence.number, start, count, sequence.told, blocks, drafts, samples)
        sequence.told = len(sequence.table)
        self.step.rows.append(row)
        self.rows[sequence.number] = (sequence, row)
        self.tokens -= count + drafts
        decodes = samples and count == 1
        if not decodes:
            self.prompt_tokens -= count
        load = self.load
        self.load = StepWork(
            load.decoded + (count + drafts if decodes else 0),
            load.prefilled + (0 if decodes else count),
            load.pairs + count * (start + count),
        )
        self.drafts = max(self.drafts, drafts)
