"""The counters of a generative model: tokens, steps, blocks, and the times that its clients see."""

from __future__ import annotations

from shmserve.scheduler.statistics.table import Histogram, Table
from shmserve.scheduler.statistics.timing import NS_PER_S, SECONDS

_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_FAST_SECONDS = (0.00001, 0.00005, *SECONDS)


class GenerationStats(Table):
    """Counts since the version was loaded: of tokens (`generated`, and those that were computed in
    the `prefilled` prompts or one by one, `decoded`), of blocks that were copied, and of steps."""

    def __init__(self) -> None:
        self.generated = 0
        self.prefilled = 0
        self.decoded = 0
        self.finished = {"stop": 0, "length": 0}
        self.preemptions = {"swap": 0, "recompute": 0}
        self.recomputed = 0
        self.swapped_in = 0
        self.swapped_out = 0
        self.copied_on_write = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        # ns of steps by part, and of what is done beside them ("text")
        self.phases = dict.fromkeys(("schedule", "gather", "forward", "sample", "draft", "text"), 0)
        self.drafted = 0
        self.accepted = 0
        self.speculative_steps = 0  # rows of steps for which tokens were proposed
        self.iteration_seconds = Histogram(SECONDS, NS_PER_S)
        self.scheduler_seconds = Histogram(_FAST_SECONDS, NS_PER_S)
        self.batch_tokens = Histogram(_TOKENS)
        self.first_token_seconds = Histogram(SECONDS, NS_PER_S)
        self.inter_token_seconds = Histogram(SECONDS, NS_PER_S)
        self.prompt_tokens = Histogram(_TOKENS)
        self.generation_tokens = Histogram(_TOKENS)
