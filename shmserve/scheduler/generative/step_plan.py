"""A step while it is planned, and while it runs (pure)."""

from __future__ import annotations

from typing import Any, NamedTuple

from shmserve.ipc.engine_settings import EngineSettings
from shmserve.ipc.messages.generation import Row, Step
from shmserve.scheduler.generative.pace import Load
from shmserve.scheduler.generative.sequences import Sequence


class Running(NamedTuple):
    """The step that runs: its rows' sequences by number, its work, and the blocks it copies."""

    step: int
    rows: dict[int, tuple[Sequence[Any], Row]]
    load: Load
    copies: int
    drafts: int


class StepPlan:
    """A step that is being planned: what is still free of its budgets, and what it has so far."""

    def __init__(self, number: int, settings: EngineSettings) -> None:
        self.step = Step(number, [])
        self.tokens = settings.max_tokens_per_batch
        self.prompt_tokens = settings.max_prefill_tokens
        self.rows: dict[int, tuple[Sequence[Any], Row]] = {}
        self.load = Load()
        self.drafts = 0
        self.preempted = False

    def add(self, sequence: Sequence[Any], row: Row) -> None:
        """Another row; it and what it proposes are paid for."""
        self.step.rows.append(row)
        self.rows[sequence.number] = (sequence, row)
        self.tokens -= row.count + row.draft
        decodes = row.samples and row.count == 1
        if not decodes:
            self.prompt_tokens -= row.count
        load, end = self.load, row.start + row.count
        self.load = Load(
            load.decoded + (row.count + row.draft if decodes else 0),
            load.prefilled + (0 if decodes else row.count),
            load.pairs + row.count * end,
        )
        self.drafts = max(self.drafts, row.draft)
