"""The engine of an instance: which sequences run in the next step, and in which blocks (pure).

    plan          Step: decoding, then begun prompts, then new prompts, within the budgets
    finish_step   Stepped: the new tokens, and the sequences that have ended

If too few blocks are free, the last sequence in the order of the policy is preempted. Its blocks
are copied to the host, or dropped and recomputed later. A step with a preemption admits no
sequence. (Yu et al., "Orca", 2022; Agrawal et al., "Sarathi-Serve", 2024, for prompts in chunks.)
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from shmserve.ipc.engine_settings import EngineSettings
from shmserve.ipc.messages.generation import NewSequence, Row, RowResult, Step, Stepped
from shmserve.scheduler.generative.sequences import (
    Beams,
    BlockPool,
    Generation,
    Sequence,
    SequenceStatus,
    ranking,
)
from shmserve.scheduler.generative.steps import (
    CHUNK,
    PROBE_STEPS,
    Acceptance,
    RunningStep,
    StepPlan,
    StepTimes,
)
from shmserve.scheduler.tables import GenerationStats

T = TypeVar("T")
# Without a latency target, a prompt chunk takes about this long, and has at least this many tokens.
_DEFAULT_ITL_MS, _DEFAULT_CHUNK = 50.0, 64


@dataclass(eq=False)
class Engine(Generic[T]):
    """The sequences and blocks of an instance.

    `on_sequence_end(sequence, reason)` is called for each sequence that needs no more steps,
    `on_search_end` for each complete beam search. `sequence_ids` yields numbers for new sequences.
    """

    settings: EngineSettings
    counts: GenerationStats
    sequence_ids: Iterator[int]
    on_sequence_end: Callable[[Sequence[T], str], None]
    on_search_end: Callable[[Generation[T], Beams[T]], None]
    times: StepTimes = field(default_factory=StepTimes)
    running_step: RunningStep | None = None

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.settings.kv_cache_blocks)
        self.host_pool = BlockPool(self.settings.swap_blocks)
        self._sequences: dict[int, Sequence[T]] = {}  # running, waiting and swapped sequences
        self._beams: dict[int, Beams[T]] = {}  # beam searches by the key of their generation
        self._acceptance: dict[int, Acceptance] = {}  # by the key of the generation
        self._new_sequences: list[NewSequence] = []
        self._ended_sequence_numbers: list[int] = []
        self._step_count = 0
        # The prefill of a prompt is split at multiples of the chunk if a step has space for a chunk
        # beside all decoding rows.
        limits = self.settings
        prefill_tokens = limits.max_tokens_per_batch - limits.max_batch_size
        prefill_tokens = min(prefill_tokens, limits.prefill_chunk_size, limits.max_prefill_tokens)
        self._chunk_multiple = CHUNK if prefill_tokens >= CHUNK else 1

    # --- requests

    def fits(self, generation: Generation[T]) -> bool:
        """Return whether the KV pool is large enough for a generation.

        The pool must hold all sequences that must run together.
        """
        block_size = self.settings.block_size
        shared_blocks = generation.shared_tokens // block_size
        max_blocks = -(-generation.max_computed_tokens // block_size)
        may_preempt = self.settings.enable_preemption and generation.beams is None
        max_rows = self.settings.max_batch_size
        rows = 1 if may_preempt else min(generation.rows, max_rows)
        needed_blocks = shared_blocks + rows * (max_blocks - shared_blocks) + (rows > 1)
        fits_step = generation.beams is None or generation.rows <= max_rows
        return needed_blocks <= self.pool.block_count and fits_step

    def add(self, generation: Generation[T], resumed: dict[int, array[int]] | None = None) -> None:
        """Register a generation.

        Args:
            generation: The generation.
            resumed: The tokens of each open sample if the generation began at an instance that has
                died. Empty if all samples have ended, and only their texts must be sent.
        """
        # If a step has too few rows to fork all samples together, each sample is a sequence from
        # the beginning.
        is_forked = generation.beams is not None or generation.rows <= self.settings.max_batch_size
        count = 1 if is_forked else generation.samples  # of sequences that begin now
        tokens_by_sample = dict.fromkeys(range(count), array("i")) if resumed is None else resumed
        for sample, tokens in tokens_by_sample.items():
            number, all_tokens = next(self.sequence_ids), generation.prompt + tokens
            sequence = Sequence(number, generation, sample, all_tokens)
            if resumed is None and generation.beams is None:
                sequence.forks = generation.samples - count
            self._add_sequence(sequence, NewSequence(sequence.number, generation.key, sample))
        if generation.beams is not None:
            self._beams[generation.key] = Beams(generation)

    def _add_sequence(self, sequence: Sequence[T], message: NewSequence) -> None:
        sequence.generation.sequences.append(sequence)
        self._sequences[sequence.number] = sequence
        self._new_sequences.append(message)

    def is_running(self, generation: Generation[T]) -> bool:
        """Check whether the running step has rows of a generation."""
        rows = {} if self.running_step is None else self.running_step.rows
        return any(sequence.number in rows for sequence in generation.sequences)

    def cancel(self, generation: Generation[T]) -> None:
        """Remove the sequences of a generation, without a call of `on_sequence_end`."""
        for sequence in generation.sequences[:]:
            self.remove(sequence)
        self._beams.pop(generation.key, None)
        self._acceptance.pop(generation.key, None)

    def stop_sequence(self, number: int) -> None:
        """End a sequence whose text is complete. A row in the running step delays the end."""
        sequence = self._sequences.get(number)
        if sequence is None:
            return
        sequence.has_stopped = True
        if self.running_step is None or number not in self.running_step.rows:
            self._end_sequence(sequence, "stop")

    def remove(self, sequence: Sequence[T]) -> None:
        """Remove a sequence and free its blocks.

        The running step may still write to the blocks, so they are reused no earlier than in the
        next step.
        """
        if self._sequences.pop(sequence.number, None) is None:
            return
        sequence.generation.sequences.remove(sequence)
        self._free_blocks(sequence)
        sequence.status = SequenceStatus.ENDED
        self._ended_sequence_numbers.append(sequence.number)

    def _free_blocks(self, sequence: Sequence[T]) -> None:
        self.pool.release(sequence.table)
        self.host_pool.release(sequence.host_blocks)
        sequence.reset()

    def _end_sequence(self, sequence: Sequence[T], finish_reason: str) -> None:
        self.remove(sequence)
        if not sequence.generation.sequences:
            self._acceptance.pop(sequence.generation.key, None)
        self.on_sequence_end(sequence, finish_reason)

    @property
    def live_sequence_count(self) -> int:
        """Return the number of sequences that have not ended."""
        return len(self._sequences)

    def count(self, status: SequenceStatus) -> int:
        """Return the number of sequences with a status."""
        return sum(sequence.status is status for sequence in self._sequences.values())

    # --- plan

    def plan(self, now_ns: int) -> Step | None:
        """Return the next step, or None if nothing can run. No step may be running."""
        plan = StepPlan(self._step_count + 1, self.settings)
        # The order is made once per step, so that it stays the same while the step is planned.
        rank = ranking(self.settings, now_ns)
        running_sequences, waiting_sequences = [], []
        for sequence in self._sequences.values():
            if sequence.status is SequenceStatus.RUNNING:
                running_sequences.append(sequence)
            elif not sequence.is_held:
                waiting_sequences.append(sequence)
        running_sequences.sort(key=rank)
        decoding_sequences = [
            sequence for sequence in running_sequences if sequence.missing_tokens == 1
        ]
        plan.decoding_count = max(len(decoding_sequences), 1)
        # Drafts use the budget that a token per decoding sequence and a prompt chunk leave free.
        has_prompts = len(decoding_sequences) < len(running_sequences) + len(waiting_sequences)
        prompt_token_share = self._chunk_multiple if has_prompts else 0
        plan.draft_budget = plan.token_budget - len(decoding_sequences) - prompt_token_share
        self._add_rows(plan, decoding_sequences, running_sequences)
        self._add_rows(
            plan, [s for s in running_sequences if s.missing_tokens > 1], running_sequences
        )
        waiting_sequences.sort(key=rank)
        if waiting_sequences and not plan.has_preempted:
            self._admit(plan, waiting_sequences, running_sequences)
        running_sequences = [
            sequence for sequence in running_sequences if sequence.status is SequenceStatus.RUNNING
        ]
        while waiting_sequences and running_sequences and not plan.rows:
            # All running sequences wait for further beams of their search that do not fit.
            self._preempt(plan, running_sequences.pop())
            self._admit(plan, waiting_sequences, running_sequences)
        if not (plan.rows or self._ended_sequence_numbers):
            return None
        return self._finish_plan(plan)

    def _add_rows(
        self, plan: StepPlan, sequences: list[Sequence[T]], running_sequences: list[Sequence[T]]
    ) -> None:
        """Add a row to the plan for each of `sequences`, as far as the budgets permit.

        If there are too few free blocks, preempt the last of `running_sequences` that has no row.
        """
        for sequence in sequences:
            if sequence.status is not SequenceStatus.RUNNING or sequence.is_held:
                continue  # the sequence was preempted, or waits for other beams
            token_count, draft_count = self._plan_share(plan, sequence)
            while token_count and not self._reserve(plan, sequence, token_count + draft_count):
                if draft_count:
                    draft_count = 0
                    continue
                victim = next(
                    candidate
                    for candidate in reversed(running_sequences)
                    if candidate.status is SequenceStatus.RUNNING
                    and candidate.number not in plan.rows
                )
                self._preempt(plan, victim)
                if victim is sequence:
                    break
            else:
                if token_count:
                    plan.add(sequence, token_count, draft_count)

    def _plan_share(self, plan: StepPlan, sequence: Sequence[T]) -> tuple[int, int]:
        """Return how many missing tokens, and how many drafts, of a sequence fit the budgets."""
        missing_tokens, forks = sequence.missing_tokens, sequence.forks
        missing_tokens -= forks > 0
        if missing_tokens > 1 or forks:
            limit = min(self.settings.prefill_chunk_size, plan.prompt_budget, plan.token_budget)
            if plan.work.decoded_tokens:  # decoding sequences wait for the step
                configured_ms = self.settings.target_itl_ms
                target_ms = configured_ms or _DEFAULT_ITL_MS
                chunk = self.times.fitting_tokens(plan.work, sequence.computed_tokens, target_ms)
                limit = min(limit, chunk if configured_ms else max(chunk, _DEFAULT_CHUNK))
            if limit < missing_tokens:
                limit -= limit % self._chunk_multiple
            return max(min(missing_tokens, limit), 0), 0
        count = min(missing_tokens, plan.token_budget)
        draft_budget = min(plan.draft_budget, plan.token_budget - count)
        return count, max(min(self._draft_count(sequence, plan), draft_budget), 0)

    def _draft_count(self, sequence: Sequence[T], plan: StepPlan) -> int:
        """Return the number of draft tokens after a sequence's last token."""
        speculation, generation = self.settings.speculative_decoding, sequence.generation
        if not (speculation.enabled and generation.allows_drafts) or generation.beams is not None:
            return 0
        max_drafts = min(speculation.num_spec_tokens, sequence.remaining_tokens - 1)
        acceptance = self._acceptance.setdefault(generation.key, Acceptance())
        if speculation.adaptive_length and max_drafts > 0:
            if not plan.message.step % PROBE_STEPS:
                return 0  # a step without drafts measures their benefit
            max_drafts = self.times.draft_length(plan.decoding_count, acceptance.rate, max_drafts)
        return acceptance.draft_count(max(max_drafts, 0), speculation.accept_threshold)

    def _reserve(self, plan: StepPlan, sequence: Sequence[T], count: int) -> bool:
        """Provide a writable block for each of the next `count` positions.

        Return False if too few are free.
        """
        block_size, table = self.settings.block_size, sequence.table
        first_index = sequence.computed_tokens // block_size
        last_index = (sequence.computed_tokens + count - 1) // block_size
        missing_blocks, is_writable = last_index + 1 - len(table), self.pool.is_writable
        indexed_blocks = enumerate(table[first_index : last_index + 1], first_index)
        shared_indices = [index for index, block in indexed_blocks if not is_writable(block)]
        if not shared_indices and missing_blocks <= 0:
            return True
        if len(shared_indices) + max(missing_blocks, 0) > self.pool.available_count:
            return False
        for index in shared_indices:
            for block in self.pool.allocate(1):
                plan.message.copies.extend((table[index], block))
                self.pool.release([table[index]])
                table[index] = block
            self.counts.copied_on_write += 1
            sequence.sent_blocks = min(sequence.sent_blocks, index)
        if missing_blocks > 0:
            table += self.pool.allocate(missing_blocks, table[-1] if table else -1)
        return True

    # --- preemption

    def _preempt(self, plan: StepPlan, sequence: Sequence[T]) -> None:
        plan.has_preempted = True
        sequence.generation.preemptions += 1
        if self._can_swap(sequence):
            sequence.host_blocks = self.host_pool.allocate(self._filled_blocks(sequence))
            for block_pair in zip(sequence.table, sequence.host_blocks, strict=False):
                plan.message.swap_out.extend(block_pair)
            self.counts.preemptions["swap"] += 1
            self.counts.swapped_out += len(sequence.host_blocks)
            self.pool.release(sequence.table)
            sequence.table = []
            sequence.sent_blocks = sequence.registered_blocks = 0
            sequence.status = SequenceStatus.SWAPPED
        else:
            self.counts.preemptions["recompute"] += 1
            self.counts.recomputed += sequence.computed_tokens
            self._free_blocks(sequence)

    def _filled_blocks(self, sequence: Sequence[T]) -> int:
        """Return the number of blocks with content; a block for drafts may follow."""
        return -(-sequence.computed_tokens // self.settings.block_size)

    def _can_swap(self, sequence: Sequence[T]) -> bool:
        """Check whether a preempted sequence's blocks are copied to the host, not recomputed."""
        mode, block_count = self.settings.preemption_mode, self._filled_blocks(sequence)
        if (
            mode == "recompute"
            or not sequence.computed_tokens
            or block_count > self.host_pool.available_count
        ):
            return False
        if sequence.is_held:
            return False  # the blocks of a parent beam are shared with its successor beams
        return mode == "swap" or self.times.swap_pays(block_count, sequence.computed_tokens)

    # --- admission

    def _admit(
        self, plan: StepPlan, waiting_sequences: list[Sequence[T]], running: list[Sequence[T]]
    ) -> None:
        """Start or resume waiting sequences in order, until one does not fit."""
        free_rows = self._free_rows(running)
        reserved_blocks = sum(self._blocks_needed(sequence) for sequence in running)
        while waiting_sequences:
            sequence = waiting_sequences[0]
            free_rows -= sequence.row_count
            if free_rows < 0 or plan.token_budget < 1:
                return
            headroom_blocks = self.pool.block_count // 64 if running else 0
            free_blocks = self.pool.available_count - reserved_blocks - headroom_blocks
            if sequence.status is SequenceStatus.SWAPPED:
                is_admitted = self._swap_in(plan, sequence, free_blocks)
            else:
                is_admitted = self._begin_prompt(sequence, free_blocks)
            if not is_admitted:
                return
            running.append(waiting_sequences.pop(0))
            sequence.status = SequenceStatus.RUNNING
            blocks_needed, old_available = self._blocks_needed(sequence), self.pool.available_count
            if sequence.forks and sequence.missing_tokens == 1:
                self._fork(sequence)
            self._add_rows(plan, [sequence], [sequence])
            # `blocks_needed` includes the samples that the sequence has forked.
            reserved_blocks += max(blocks_needed - (old_available - self.pool.available_count), 0)

    def _free_rows(self, sequences: list[Sequence[T]]) -> int:
        """Return how many rows of a step the running sequences in `sequences` leave free."""
        taken_rows = sum(s.row_count for s in sequences if s.status is SequenceStatus.RUNNING)
        return self.settings.max_batch_size - taken_rows

    def _blocks_needed(self, sequence: Sequence[T]) -> int:
        """Return the number of further blocks to reserve for a sequence.

        If preemption is enabled, blocks for its tokens so far suffice. Otherwise, the blocks for
        its maximum length are reserved, because no sequence can be preempted later.
        """
        block_size, generation = self.settings.block_size, sequence.generation
        if self.settings.enable_preemption:
            return max(-(-len(sequence.tokens) // block_size) - len(sequence.table), 0)
        max_blocks = -(-generation.max_computed_tokens // block_size)
        shared_blocks = generation.shared_tokens // block_size  # number of blocks
        # Beams share blocks (copy-on-write).
        own_blocks = sum(
            self.pool.references[block] == 1 for block in sequence.table[shared_blocks:]
        )
        held_blocks = min(len(sequence.table), shared_blocks) + own_blocks
        return max(
            shared_blocks + sequence.row_count * (max_blocks - shared_blocks) - held_blocks, 0
        )

    def _begin_prompt(self, sequence: Sequence[T], free_blocks: int) -> bool:
        """Assign a sequence the cached blocks of the beginning of its prompt.

        Return False, without a change, if it needs more than `free_blocks` further blocks.
        """
        block_size = self.settings.block_size
        cached_blocks: list[int] = []
        if self.settings.enable_prefix_caching and not sequence.generation.ignores_prefix_cache:
            cached_blocks = sequence.find_prefix(self.pool, block_size)
        old_available = self.pool.available_count
        self.pool.share(cached_blocks)
        free_blocks -= old_available - self.pool.available_count
        sequence.table = cached_blocks
        if self._blocks_needed(sequence) > free_blocks:
            self.pool.release(cached_blocks)
            sequence.table = []
            return False
        sequence.computed_tokens = len(cached_blocks) * block_size
        sequence.registered_blocks = len(cached_blocks)
        self.counts.prefix_queries += len(sequence.tokens)
        self.counts.prefix_hits += sequence.computed_tokens
        return True

    def _swap_in(self, plan: StepPlan, sequence: Sequence[T], free_blocks: int) -> bool:
        """Copy a sequence's blocks back from the host; return False if too few blocks are free."""
        if self._blocks_needed(sequence) > free_blocks:
            return False
        sequence.table = self.pool.allocate(len(sequence.host_blocks))
        for block_pair in zip(sequence.host_blocks, sequence.table, strict=True):
            plan.message.swap_in.extend(block_pair)
        self.counts.swapped_in += len(sequence.host_blocks)
        self.host_pool.release(sequence.host_blocks)
        sequence.host_blocks = []
        return True

    def _finish_plan(self, plan: StepPlan) -> Step:
        message = plan.message
        self._step_count = message.step
        message.new_sequences.extend(self._new_sequences)
        message.ended.extend(self._ended_sequence_numbers)
        self._new_sequences, self._ended_sequence_numbers = [], []
        copied_blocks = (len(message.swap_out) + len(message.swap_in)) // 2
        fields = (message.step, plan.rows, plan.work, copied_blocks, plan.draft_count)
        self.running_step = RunningStep(*fields)
        return message

    # --- results of steps

    def finish_step(self, message: Stepped) -> None:
        """Handle the results of the running step; raise ValueError for results of another step."""
        running_step = self.running_step
        if running_step is None or message.step != running_step.step:
            raise ValueError(f"step {message.step} is not the running step")
        results_by_number = {result.sequence: result for result in message.results}
        sampled_ids = {number for number, (_, row) in running_step.rows.items() if row.samples_next}
        if results_by_number.keys() != sampled_ids - {*message.skipped}:
            raise ValueError("the sequences of the results differ from those of the step")
        self.running_step = None
        running_step.observe(message, self.times, self.counts)
        for number in running_step.rows.keys() & message.skipped:
            self.cancel(running_step.rows[number][0].generation)
        for number, (sequence, row) in running_step.rows.items():
            if sequence.status is SequenceStatus.RUNNING:
                self._handle_row(sequence, row, results_by_number.get(number))

    def _handle_row(self, sequence: Sequence[T], row: Row, result: RowResult | None) -> None:
        sequence.computed_tokens = row.start + row.count
        if result is None:
            self._register_blocks(sequence)
            if sequence.forks and sequence.missing_tokens == 1:
                self._fork(sequence)
        elif sequence.generation.beams is None:
            self._add_tokens(sequence, row, result)
        else:
            self._search_step(sequence, result)
        if sequence.has_stopped and sequence.status is SequenceStatus.RUNNING:
            self._end_sequence(sequence, "stop")

    def _register_blocks(self, sequence: Sequence[T]) -> None:
        if self.settings.enable_prefix_caching:
            sequence.register_blocks(self.pool, self.settings.block_size)

    def _add_tokens(self, sequence: Sequence[T], row: Row, result: RowResult) -> None:
        tokens = result.tokens
        if not 1 <= len(tokens) <= row.draft_count + 1:
            raise ValueError(f"a row has 1 to {row.draft_count + 1} new tokens, got {len(tokens)}")
        sequence.tokens.extend(tokens)
        sequence.computed_tokens += len(tokens) - 1
        self._register_blocks(sequence)
        counts = self.counts
        counts.generated += len(tokens)
        if result.draft_count:
            counts.drafted += result.draft_count
            counts.accepted += len(tokens) - 1
            counts.speculative_steps += 1
            acceptance = self._acceptance.get(sequence.generation.key)
            if acceptance is not None:
                acceptance.observe(result.draft_count, len(tokens) - 1)
        if result.finish_reason:
            self._end_sequence(sequence, result.finish_reason)

    def _fork(self, sequence: Sequence[T]) -> None:
        """Begin the other samples of a prompt, which share the blocks of the first (`sequence`)."""
        for sample in range(1, sequence.forks + 1):
            self._add_child(sequence, sample)
        sequence.forks = 0

    def _add_child(
        self, parent: Sequence[T], sample: int, token: int = -1, has_row: bool = True
    ) -> Sequence[T]:
        child = Sequence(next(self.sequence_ids), parent.generation, sample, parent.tokens[:])
        if token >= 0:
            child.tokens.append(token)
        child.block_keys, child.sampled_ns = parent.block_keys[:], parent.sampled_ns
        # A child that does not share the parent's blocks computes its own blocks again.
        if parent.status is SequenceStatus.RUNNING and has_row:
            child.status = SequenceStatus.RUNNING
            child.computed_tokens = parent.computed_tokens
            child.registered_blocks = parent.registered_blocks
            child.sent_blocks = parent.sent_blocks
            child.table = parent.table[:]
            self.pool.share(child.table)
        key, number = parent.generation.key, child.number
        self._add_sequence(child, NewSequence(number, key, sample, parent.number, token))
        return child

    # --- beam search

    def _search_step(self, sequence: Sequence[T], result: RowResult) -> None:
        """Add the candidate tokens of one beam to its beam search.

        After the last beam's candidates, replace the beams by the best candidates.
        """
        self._register_blocks(sequence)
        beams = self._beams[sequence.generation.key]
        sequence.is_held = True
        beams.add(sequence, result)
        if any(not sequence.is_held for sequence in sequence.generation.sequences):
            return
        parents = sequence.generation.sequences[:]
        remaining_sequences = [s for s in self._sequences.values() if s not in parents]
        free_rows = self._free_rows(remaining_sequences)
        for index, candidate in enumerate(beams.step()):
            # Beams that were preempted while they were held have lost their rows, so that there may
            # be too few rows for all children.
            child = self._add_child(candidate.parent, 0, candidate.token, index < free_rows)
            child.score = candidate.score
        # Parents are dropped after all children have begun, so that shared blocks stay referenced.
        for parent in parents:
            self.remove(parent)
        if beams.is_finished:
            generation = sequence.generation
            self.cancel(generation)
            self.on_search_end(generation, beams)
