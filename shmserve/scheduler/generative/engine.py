"""The engine of one instance: which sequences run in the next step, and in which blocks (pure).

    plan    Step: decoding before prompts that were begun before new ones, within the budgets
    done    Stepped: the new tokens, and who has ended

Where blocks are short, the last in the order of the policy is preempted: its blocks are copied to
the host, or thrown away, and computed again when its turn comes. A step that preempted admits
nobody. (Yu et al., "Orca", 2022; Agrawal et al., "Sarathi-Serve", 2024, for prompts in chunks.)
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from shmserve.ipc.engine_settings import EngineSettings
from shmserve.ipc.messages.generation import Begin, Row, RowResult, Step, Stepped
from shmserve.scheduler.generative.blocks import BlockPool
from shmserve.scheduler.generative.sequences import Beams, Generation, Place, Sequence, ranking
from shmserve.scheduler.generative.steps import (
    CHUNK,
    PROBE_STEPS,
    Acceptance,
    Running,
    StepPlan,
    StepTimes,
)
from shmserve.scheduler.tables import GenerationStats

T = TypeVar("T")


@dataclass(eq=False)
class Engine(Generic[T]):
    """One instance's sequences and blocks. `ended` hears of each sequence that needs no more steps,
    with why; `chosen` of a beam search that has its hypotheses."""

    settings: EngineSettings
    counts: GenerationStats
    numbers: Iterator[int]
    ended: Callable[[Sequence[T], str], None]
    chosen: Callable[[Generation[T], Beams[T]], None]
    times: StepTimes = field(default_factory=StepTimes)
    running: Running | None = None

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.settings.kv_cache_blocks)
        self.host = BlockPool(self.settings.swap_blocks)
        self._live: dict[int, Sequence[T]] = {}  # those that run, wait or are swapped
        self._beams: dict[int, Beams[T]] = {}  # by the key of their generation
        self._acceptance: dict[int, Acceptance] = {}
        self._begin: list[Begin] = []
        self._over: list[int] = []
        self._steps = 0
        # Prompts are cut at multiples of it, if a step has room for one beside all that decode.
        room = self.settings.max_tokens_per_batch - self.settings.max_batch_size
        room = min(room, self.settings.prefill_chunk_size, self.settings.max_prefill_tokens)
        self._grain = CHUNK if room >= CHUNK else 1

    # --- requests

    def fits(self, generation: Generation[T]) -> bool:
        """Whether it can ever run: alone, and all of its sequences where these go together."""
        size = self.settings.block_size
        shared, most = generation.shared // size, -(-generation.most_tokens // size)
        preempted = self.settings.enable_preemption and generation.beams is None
        together = 1 if preempted else generation.rows
        needed = shared + together * (most - shared) + (together > 1)
        return needed <= self.pool.count and generation.rows <= self.settings.max_batch_size

    def add(self, generation: Generation[T], resumed: dict[int, array[int]] | None = None) -> None:
        """A request is ready; of one that another instance has lost, `resumed` has the tokens that
        its open samples had."""
        samples = resumed or dict.fromkeys(range(1), array("i"))
        for sample, tokens in samples.items():
            sequence = Sequence(next(self.numbers), generation, sample, generation.prompt + tokens)
            if resumed is None and generation.beams is None:
                sequence.forks = generation.samples - 1
            self._enter(sequence, Begin(sequence.number, generation.key, sample))
        if generation.beams is not None:
            self._beams[generation.key] = Beams(generation)

    def _enter(self, sequence: Sequence[T], begin: Begin) -> None:
        sequence.generation.sequences.append(sequence)
        self._live[sequence.number] = sequence
        self._begin.append(begin)

    def runs(self, generation: Generation[T]) -> bool:
        """Whether the step that runs has rows of it."""
        rows = {} if self.running is None else self.running.rows
        return any(sequence.number in rows for sequence in generation.sequences)

    def cancel(self, generation: Generation[T]) -> None:
        """Nobody waits for it: its sequences end, without a word."""
        for sequence in generation.sequences[:]:
            self.drop(sequence)
        self._beams.pop(generation.key, None)
        self._acceptance.pop(generation.key, None)

    def stopped(self, number: int) -> None:
        """A sequence has ended by its text, of which the step that runs may have the last token."""
        sequence = self._live.get(number)
        if sequence is None:
            return
        sequence.stopped = True
        if self.running is None or number not in self.running.rows:
            self._end(sequence, "stop")

    def drop(self, sequence: Sequence[T]) -> None:
        """Let go of a sequence; its blocks may be written by the step that runs, and are used again
        in the next at the earliest."""
        if self._live.pop(sequence.number, None) is None:
            return
        sequence.generation.sequences.remove(sequence)
        self._let_go(sequence)
        sequence.place = Place.OVER
        self._over.append(sequence.number)

    def _let_go(self, sequence: Sequence[T]) -> None:
        self.pool.release(sequence.table)
        self.host.release(sequence.host)
        sequence.lost()

    def _end(self, sequence: Sequence[T], why: str) -> None:
        self.drop(sequence)
        if not sequence.generation.sequences:
            self._acceptance.pop(sequence.generation.key, None)
        self.ended(sequence, why)

    @property
    def live(self) -> int:
        """The sequences that have not ended."""
        return len(self._live)

    def at(self, place: Place) -> int:
        """The number of sequences there."""
        return sum(sequence.place is place for sequence in self._live.values())

    @property
    def waiting(self) -> int:
        """The number of sequences that have not run yet, or have to begin again."""
        return self.at(Place.WAITING)

    # --- plan

    def plan(self, now_ns: int) -> Step | None:
        """The next step, where there is work; none runs now."""
        plan = StepPlan(self._steps + 1, self.settings)
        # Once a step, of what is known now: nothing overtakes while it is planned.
        rank = ranking(self.settings, now_ns)
        inside, outside = [], []
        for sequence in self._live.values():
            if sequence.place is Place.RUNNING:
                inside.append(sequence)
            elif not sequence.held:
                outside.append(sequence)
        inside.sort(key=rank)
        decoding = [each for each in inside if each.missing == 1]
        plan.decoding = max(len(decoding), 1)
        self._run(plan, decoding, inside)
        self._run(plan, [each for each in inside if each.missing > 1], inside)
        outside.sort(key=rank)
        if outside and not plan.preempted:
            self._admit(plan, outside, inside)
        inside = [each for each in inside if each.place is Place.RUNNING]
        while outside and inside and not plan.rows:
            # All that are inside wait for others of their beam search, which find no room.
            self._preempt(plan, inside.pop())
            self._admit(plan, outside, inside)
        if not (plan.rows or self._over):
            return None
        return self._ready(plan)

    def _run(self, plan: StepPlan, sequences: list[Sequence[T]], inside: list[Sequence[T]]) -> None:
        """Rows for sequences that have blocks; whoever is last of those `inside` makes room."""
        for sequence in sequences:
            if sequence.place is not Place.RUNNING or sequence.held:
                continue  # it was preempted for another, or waits for one
            count, drafts = self._share_of(plan, sequence)
            while count and not self._room(plan, sequence, count + drafts):
                if drafts:
                    drafts = 0
                    continue
                victim = next(
                    each
                    for each in reversed(inside)
                    if each.place is Place.RUNNING and each.number not in plan.rows
                )
                self._preempt(plan, victim)
                if victim is sequence:
                    break
            else:
                if count:
                    plan.add(sequence, count, drafts)

    def _share_of(self, plan: StepPlan, sequence: Sequence[T]) -> tuple[int, int]:
        """How many of its missing tokens fit what is left of the budgets, and how many drafts."""
        missing, forks = sequence.missing, sequence.forks
        missing -= forks > 0
        if missing > 1 or forks:
            limit = min(self.settings.prefill_chunk_size, plan.prompt_tokens, plan.tokens)
            target = self.settings.target_itl_ms
            if target and plan.load.decoded:  # whose tokens are not to be late
                limit = min(limit, self.times.chunk(plan.load, sequence.computed, target))
            if limit < missing:
                limit -= limit % self._grain
            return max(min(missing, limit), 0), 0
        count = min(missing, plan.tokens)
        drafts = self._drafts(sequence, plan)
        return count, min(drafts, plan.tokens - count) if drafts else 0

    def _drafts(self, sequence: Sequence[T], plan: StepPlan) -> int:
        """The tokens to propose behind a sequence's last."""
        speculation, generation = self.settings.speculative_decoding, sequence.generation
        if not (speculation.enabled and generation.drafts) or generation.beams is not None:
            return 0
        most = min(speculation.num_spec_tokens, sequence.left - 1)
        acceptance = self._acceptance.setdefault(generation.key, Acceptance())
        if speculation.adaptive_length and most > 0:
            if not plan.step.step % PROBE_STEPS:
                return 0  # what a step takes without them is to be known, too
            most = self.times.draft_length(plan.decoding, acceptance.rate, most)
        return acceptance.length(max(most, 0), speculation.accept_threshold)

    def _room(self, plan: StepPlan, sequence: Sequence[T], count: int) -> bool:
        """Have a block that may be written for each of the next `count` positions; whether there
        are as many."""
        size, table = self.settings.block_size, sequence.table
        first = sequence.computed // size
        last = (sequence.computed + count - 1) // size
        missing, writable = last + 1 - len(table), self.pool.writable
        shared = [
            index
            for index, block in enumerate(table[first : last + 1], first)
            if not writable(block)
        ]
        if not shared and missing <= 0:
            return True
        if len(shared) + max(missing, 0) > self.pool.available:
            return False
        for index in shared:
            for block in self.pool.allocate(1):
                plan.step.within.extend((table[index], block))
                self.pool.release([table[index]])
                table[index] = block
            self.counts.copied_on_write += 1
            sequence.told = min(sequence.told, index)
        if missing > 0:
            table += self.pool.allocate(missing, table[-1] if table else -1)
        return True

    # --- preemption

    def _preempt(self, plan: StepPlan, sequence: Sequence[T]) -> None:
        plan.preempted = True
        generation = sequence.generation
        generation.preemptions += 1
        if self._swaps(sequence):
            sequence.host = self.host.allocate(self._filled(sequence))
            for pair in zip(sequence.table, sequence.host, strict=False):
                plan.step.out.extend(pair)
            self.counts.preemptions["swap"] += 1
            self.counts.swapped_out += len(sequence.host)
            self.pool.release(sequence.table)
            sequence.table = []
            sequence.told = sequence.sealed = 0
            sequence.place = Place.SWAPPED
        else:
            self.counts.preemptions["recompute"] += 1
            self.counts.recomputed += sequence.computed
            self._let_go(sequence)

    def _filled(self, sequence: Sequence[T]) -> int:
        """The blocks that it has something in; one for drafts may follow."""
        return -(-sequence.computed // self.settings.block_size)

    def _swaps(self, sequence: Sequence[T]) -> bool:
        """Whether its blocks are copied to the host, and not computed again."""
        mode, blocks = self.settings.preemption_mode, self._filled(sequence)
        if mode == "recompute" or not sequence.computed or blocks > self.host.available:
            return False
        if sequence.held:
            return False  # who follows it begins from what it has in the pool, or anew
        return mode == "swap" or self.times.swap_pays(blocks, sequence.computed)

    # --- admission

    def _admit(self, plan: StepPlan, outside: list[Sequence[T]], inside: list[Sequence[T]]) -> None:
        """Take in who is outside, in order, until one finds no room; those are outside still."""
        seats = self._seats(inside)
        promised = sum(self._needed(each) for each in inside)
        while outside:
            sequence = outside[0]
            seats -= sequence.seats
            if seats < 0 or plan.tokens < 1:
                return
            free = self.pool.available - promised - (len(inside) and self.pool.count // 64)
            if sequence.place is Place.SWAPPED:
                entered = self._swap_in(plan, sequence, free)
            else:
                entered = self._begin_prompt(sequence, free)
            if not entered:
                return
            inside.append(outside.pop(0))
            sequence.place = Place.RUNNING
            needed, before = self._needed(sequence), self.pool.available
            if sequence.forks and sequence.missing == 1:
                self._fork(sequence)
            self._run(plan, [sequence], [sequence])
            # Also to those that it has become.
            promised += max(needed - (before - self.pool.available), 0)

    def _seats(self, taken: list[Sequence[T]]) -> int:
        """The sequences that there is room for in a step beside those of `taken` that run."""
        seats = sum(each.seats for each in taken if each.place is Place.RUNNING)
        return self.settings.max_batch_size - seats

    def _needed(self, sequence: Sequence[T]) -> int:
        """The blocks that a sequence does not have yet and is to get without preempting anybody:
        for its tokens, or, where nobody may be preempted, all that it may come to have."""
        size, generation = self.settings.block_size, sequence.generation
        if self.settings.enable_preemption:
            return max(-(-len(sequence.tokens) // size) - len(sequence.table), 0)
        most = -(-generation.most_tokens // size)
        shared = generation.shared // size
        # Beams go on in one another's blocks, and who writes into such a one gets its own.
        own = sum(self.pool.references[block] == 1 for block in sequence.table[shared:])
        held = min(len(sequence.table), shared) + own
        return max(shared + sequence.seats * (most - shared) - held, 0)

    def _begin_prompt(self, sequence: Sequence[T], free: int) -> bool:
        """Give a sequence that has nothing the cached blocks of its beginning; whether what it
        needs besides is `free`."""
        size = self.settings.block_size
        cached: list[int] = []
        if self.settings.enable_prefix_caching and not sequence.generation.whole:
            cached = sequence.find_prefix(self.pool, size)
        before = self.pool.available
        self.pool.share(cached)
        free -= before - self.pool.available
        sequence.table = cached
        if self._needed(sequence) > free:
            self.pool.release(cached)
            sequence.table = []
            return False
        sequence.computed = len(cached) * size
        sequence.sealed = len(cached)
        self.counts.prefix_queries += len(sequence.tokens)
        self.counts.prefix_hits += sequence.computed
        if not sequence.generated:
            sequence.generation.cached = sequence.computed
        return True

    def _swap_in(self, plan: StepPlan, sequence: Sequence[T], free: int) -> bool:
        """Have a sequence's blocks copied back from the host; whether as many are `free`."""
        if self._needed(sequence) > free:
            return False
        sequence.table = self.pool.allocate(len(sequence.host))
        for pair in zip(sequence.host, sequence.table, strict=True):
            plan.step.back.extend(pair)
        self.counts.swapped_in += len(sequence.host)
        self.host.release(sequence.host)
        sequence.host = []
        return True

    def _ready(self, plan: StepPlan) -> Step:
        step = plan.step
        self._steps = step.step
        step.begin.extend(self._begin)
        step.over.extend(self._over)
        self._begin, self._over = [], []
        copies = (len(step.out) + len(step.back)) // 2
        self.running = Running(step.step, plan.rows, plan.load, copies, plan.drafts)
        return step

    # --- done

    def done(self, message: Stepped) -> None:
        """Take a step's results. Raises ValueError where they are not those of the step that
        runs."""
        running = self.running
        if running is None or message.step != running.step:
            raise ValueError("a result of another step")
        results = {result.sequence: result for result in message.results}
        sampled = {number for number, (_, row) in running.rows.items() if row.samples}
        if results.keys() != sampled - {*message.lost}:
            raise ValueError("results of other rows than those of the step")
        self.running = None
        running.observe(message, self.times, self.counts)
        for number in running.rows.keys() & message.lost:
            self.cancel(running.rows[number][0].generation)
        for number, (sequence, row) in running.rows.items():
            if sequence.place is Place.RUNNING:
                self._computed(sequence, row, results.get(number))

    def _computed(self, sequence: Sequence[T], row: Row, result: RowResult | None) -> None:
        sequence.computed = row.start + row.count
        if result is None:
            self._seal(sequence)
            if sequence.forks and sequence.missing == 1:
                self._fork(sequence)
        elif sequence.generation.beams is None:
            self._sampled(sequence, row, result)
        else:
            self._searched(sequence, result)
        if sequence.stopped and sequence.place is Place.RUNNING:
            self._end(sequence, "stop")

    def _seal(self, sequence: Sequence[T]) -> None:
        if self.settings.enable_prefix_caching:
            sequence.seal(self.pool, self.settings.block_size)

    def _sampled(self, sequence: Sequence[T], row: Row, result: RowResult) -> None:
        tokens = result.tokens
        if not 1 <= len(tokens) <= row.draft + 1:
            raise ValueError("more tokens than were asked for, or none")
        sequence.tokens.extend(tokens)
        sequence.computed += len(tokens) - 1
        self._seal(sequence)
        counts = self.counts
        counts.generated += len(tokens)
        if result.drafted:
            counts.drafted += result.drafted
            counts.accepted += len(tokens) - 1
            counts.speculative_steps += 1
            acceptance = self._acceptance.get(sequence.generation.key)
            if acceptance is not None:
                acceptance.observe(result.drafted, len(tokens) - 1)
        if result.over:
            self._end(sequence, result.over)

    def _fork(self, sequence: Sequence[T]) -> None:
        """The other samples of a prompt begin, with its blocks."""
        for sample in range(1, sequence.forks + 1):
            self._child(sequence, sample)
        sequence.forks = 0

    def _child(
        self, parent: Sequence[T], sample: int, token: int = -1, seated: bool = True
    ) -> Sequence[T]:
        child = Sequence(next(self.numbers), parent.generation, sample, parent.tokens[:])
        if token >= 0:
            child.tokens.append(token)
        child.keys, child.sampled_ns = parent.keys[:], parent.sampled_ns
        if parent.place is Place.RUNNING and seated:  # else it has to be computed, too
            child.place = Place.RUNNING
            child.computed, child.sealed, child.told = parent.computed, parent.sealed, parent.told
            child.table = parent.table[:]
            self.pool.share(child.table)
        self._enter(
            child,
            Begin(child.number, parent.generation.key, sample, parent.number, token),
        )
        return child

    # --- beam search

    def _searched(self, sequence: Sequence[T], result: RowResult) -> None:
        """A beam has its candidates; once all have, the best go on."""
        self._seal(sequence)
        beams = self._beams[sequence.generation.key]
        sequence.held = True
        beams.add(sequence, result)
        if any(not each.held for each in sequence.generation.sequences):
            return
        before = sequence.generation.sequences[:]
        free = self._seats([each for each in self._live.values() if each not in before])
        for place, chosen in enumerate(beams.step()):
            # Beams that were preempted while they waited for these have lost their seats.
            child = self._child(chosen.parent, 0, chosen.token, place < free)
            child.score = chosen.score
        for parent in before:  # after all have begun: what they share is not let go of meanwhile
            self.drop(parent)
        if beams.over:
            generation = sequence.generation
            self.cancel(generation)
            self.chosen(generation, beams)
