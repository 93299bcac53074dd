"""Sequences and their generations: their order, beam search, and their KV blocks (pure).

A sequence has `tokens`, of which the keys and values of the first `computed_tokens` are in the
blocks of its `table`. There are no phases: missing tokens are computed, and when none is missing,
the next token is sampled. A prompt, a prompt in chunks, and a recomputation after a preemption are
thus one case.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar

from shmserve.ipc.engine_settings import EngineSettings
from shmserve.ipc.messages.generation import BeamSearch, Hypothesis, RowResult

ROOT_KEY = b""  # the key before the first block


def block_key(previous_key: bytes, tokens: array[int]) -> bytes:
    """Return the key of a full block from its `tokens` and the key of the block before it."""
    return hashlib.blake2b(previous_key + tokens.tobytes(), digest_size=16).digest()


class BlockPool:
    """The blocks of a KV cache: their references, the prefix cache, and contiguous free extents.

        free ── allocate ──> referenced ── release ──> cached, if its content has a key
          └───────────<── evicted, least recently used first ──┘

    The only holder of a block without a key may write to it (Kwon et al., "PagedAttention", 2023).
    The blocks of a sequence are adjacent if possible, because attention reads runs of blocks
    together: a sequence grows into the block after its last one, and a new sequence begins in the
    middle of the widest gap, so that it and its neighbour can grow.

    `references` counts the tables that hold each block.
    """

    def __init__(self, block_count: int) -> None:
        self.block_count = block_count
        self.references = [0] * block_count
        # The length of each free extent, by its first block.
        self._length_by_start: dict[int, int] = {0: block_count} if block_count else {}
        # The first block of each free extent, by its last block.
        self._start_by_end: dict[int, int] = {block_count - 1: 0} if block_count else {}
        self.free_count = block_count
        self._keys_by_block: dict[int, bytes] = {}
        self._blocks_by_key: dict[bytes, int] = {}
        # Cached blocks without references, least recently used first.
        self._cached_blocks: OrderedDict[int, None] = OrderedDict()

    @property
    def available_count(self) -> int:
        """Return the number of free blocks and of cached blocks without a reference."""
        return self.free_count + len(self._cached_blocks)

    @property
    def cached_count(self) -> int:
        """Return the number of unreferenced blocks with reusable content."""
        return len(self._cached_blocks)

    @property
    def used_count(self) -> int:
        """Return the number of blocks that the tables of sequences refer to."""
        return self.block_count - self.available_count

    # --- allocation

    def allocate(self, count: int, previous: int = -1) -> list[int]:
        """Return `count` blocks with one reference each, after block `previous` if possible.

        At least `count` blocks must be available.
        """
        blocks: list[int] = []
        while len(blocks) < count and previous >= 0:
            previous += 1
            if previous in self._cached_blocks:
                self._evict(previous)
            if previous not in self._length_by_start:
                break
            self._take_from_extent(previous, previous, 1)
            blocks.append(previous)
        if len(blocks) < count:
            blocks += self._take_free_blocks(count - len(blocks))
        for block in blocks:
            self.references[block] = 1
        return blocks

    def _take_free_blocks(self, count: int) -> Iterator[int]:
        """Yield `count` free blocks, taken from as few extents as possible."""
        while self._cached_blocks and max(self._length_by_start.values(), default=0) < count:
            if self.free_count >= 4 * count:
                break
            self._evict(next(iter(self._cached_blocks)))
        while count:
            start = max(self._length_by_start, key=self._length_by_start.__getitem__)
            length = self._length_by_start[start]
            block_count = min(count, length)
            # The blocks are taken from the middle of the extent. Half of the rest stays free before
            # them, so that the sequence whose blocks end there can grow.
            first_block = start + (length - block_count) // 2 if start else start
            self._take_from_extent(start, first_block, block_count)
            yield from range(first_block, first_block + block_count)
            count -= block_count

    def _take_from_extent(self, start: int, first_block: int, block_count: int) -> None:
        """Take `block_count` blocks from `first_block` out of the extent at `start`."""
        extent_end = start + self._length_by_start.pop(start)
        del self._start_by_end[extent_end - 1]
        self._add_extent(start, first_block)
        self._add_extent(first_block + block_count, extent_end)
        self.free_count -= block_count

    def _add_extent(self, start: int, end: int) -> None:
        if start < end:
            self._length_by_start[start] = end - start
            self._start_by_end[end - 1] = start

    def _free_block(self, block: int) -> None:
        start, end = block, block + 1
        if block - 1 in self._start_by_end:
            start = self._start_by_end.pop(block - 1)
            del self._length_by_start[start]
        if end in self._length_by_start:
            end += self._length_by_start.pop(end)
            del self._start_by_end[end - 1]
        self._add_extent(start, end)
        self.free_count += 1

    # --- references

    def share(self, blocks: Iterable[int]) -> None:
        """Take a reference to blocks, which may be cached."""
        for block in blocks:
            self.references[block] += 1
            self._cached_blocks.pop(block, None)

    def release(self, blocks: list[int]) -> None:
        """Remove a reference from the successive blocks of a table.

        Of the blocks that stay cached, the last ones in the table are evicted first.
        """
        for block in reversed(blocks):
            self.references[block] -= 1
            if self.references[block]:
                continue
            if block in self._keys_by_block:
                self._cached_blocks[block] = None
            else:
                self._free_block(block)

    def is_writable(self, block: int) -> bool:
        """Check whether the holder of a block may write to it."""
        return self.references[block] == 1 and block not in self._keys_by_block

    # --- the prefix cache

    def register(self, block: int, key: bytes) -> None:
        """Register the key of a full block, unless another block has it."""
        if key not in self._blocks_by_key and block not in self._keys_by_block:
            self._blocks_by_key[key] = block
            self._keys_by_block[block] = key

    def find(self, key: bytes) -> int | None:
        """Return the block with the content that this key identifies, or None."""
        return self._blocks_by_key.get(key)

    def _evict(self, block: int) -> None:
        del self._cached_blocks[block]
        del self._blocks_by_key[self._keys_by_block.pop(block)]
        self._free_block(block)


T = TypeVar("T")


class SequenceStatus(StrEnum):
    """The status of a sequence, which determines where its keys and values are."""

    WAITING = "waiting"  # its keys and values are not stored
    RUNNING = "running"
    SWAPPED = "swapped"  # its keys and values are in blocks of the host
    ENDED = "over"


@dataclass(slots=True, eq=False)
class Generation(Generic[T]):
    """The generation of text for `owner`, a request whose prompt was tokenized.

    Its `sequences` continue one prompt by at most `max_tokens` each: `samples` independent ones,
    or the beams of a beam search. `arrived_ns` orders generations of equal rank.
    """

    owner: T
    key: int  # the request's key
    arrived_ns: int
    prompt: array[int]
    max_tokens: int
    samples: int = 1  # number of samples
    priority: int = 0
    ignores_prefix_cache: bool = False
    allows_drafts: bool = True
    beams: BeamSearch | None = None  # the parameters of a beam search
    preemptions: int = 0  # number of preemptions of its sequences
    sequences: list[Sequence[T]] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """Return the maximum number of sequences of this generation at a time."""
        return self.beams.width if self.beams is not None else self.samples

    @property
    def shared_tokens(self) -> int:
        """Return the number of computed tokens that its samples share.

        Each sample computes the last token of the prompt itself.
        """
        return len(self.prompt) - 1

    @property
    def max_computed_tokens(self) -> int:
        """Return the maximum number of computed tokens of a sequence, without its last token."""
        return len(self.prompt) + self.max_tokens - 1


@dataclass(slots=True, eq=False)
class Sequence(Generic[T]):
    """A sequence of a generation.

    Attributes:
        host_blocks: The blocks of the host pool while the sequence is swapped out.
        has_stopped: Whether its text has ended; the sequence then ends with the running step.
    """

    number: int  # the id of the sequence in messages
    generation: Generation[T]
    sample: int  # the index of the sample
    tokens: array[int]
    status: SequenceStatus = SequenceStatus.WAITING
    computed_tokens: int = 0
    table: list[int] = field(default_factory=list)  # its blocks, in order
    host_blocks: list[int] = field(default_factory=list)  # blocks that were swapped out
    sent_blocks: int = 0  # number of first entries of the table that were sent to the worker
    forks: int = 0  # number of samples that begin once all but the last prompt token is computed
    is_held: bool = False  # whether the sequence waits for the other beams of its search
    has_stopped: bool = False  # whether its text is complete
    sampled_ns: int = 0  # the time at which the last token was sampled
    score: float = 0.0  # the score of a beam
    block_keys: list[bytes] = field(default_factory=list)  # prefix-cache keys of the full blocks
    registered_blocks: int = 0  # number of first entries of the table in the prefix cache

    @property
    def row_count(self) -> int:
        """Return the number of rows for the sequence and for the samples that it will fork."""
        search = self.generation.beams
        return search.width if search is not None and not self.generated_tokens else 1 + self.forks

    @property
    def missing_tokens(self) -> int:
        """Return the number of tokens to compute before the next token is sampled."""
        return len(self.tokens) - self.computed_tokens

    @property
    def generated_tokens(self) -> int:
        """Return the number of tokens that were generated after the prompt."""
        return len(self.tokens) - len(self.generation.prompt)

    @property
    def remaining_tokens(self) -> int:
        """Return the number of tokens that may still follow."""
        return self.generation.max_tokens - self.generated_tokens

    def prefix_keys(self, block_size: int, block_count: int) -> list[bytes]:
        """Return the keys of the sequence's first `block_count` blocks, all of which are full."""
        keys = self.block_keys
        while len(keys) < block_count:
            start = len(keys) * block_size
            previous_key = keys[-1] if keys else ROOT_KEY
            keys.append(block_key(previous_key, self.tokens[start : start + block_size]))
        return keys[:block_count]

    def find_prefix(self, pool: BlockPool, block_size: int) -> list[int]:
        """Return the cached blocks of the sequence's beginning, without its last token's block."""
        blocks: list[int] = []
        for key in self.prefix_keys(block_size, (len(self.tokens) - 1) // block_size):
            block = pool.find(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def register_blocks(self, pool: BlockPool, block_size: int) -> None:
        """Register the full blocks of the sequence in the prefix cache."""
        full_count = self.computed_tokens // block_size
        if full_count > self.registered_blocks:
            keys = self.prefix_keys(block_size, full_count)
            for index in range(self.registered_blocks, full_count):
                pool.register(self.table[index], keys[index])
            self.registered_blocks = full_count

    def reset(self) -> None:
        """Reset the sequence after its blocks were lost: all its tokens must be computed again."""
        self.status = SequenceStatus.WAITING
        self.computed_tokens = self.sent_blocks = self.registered_blocks = 0
        self.table = []
        self.host_blocks = []


# A level of priority counts as much as 1,024 tokens, or as ten seconds of waiting.
_TOKENS_PER_LEVEL = 1024.0
_TOKENS_PER_SECOND = 102.4

Rank = tuple[float, int, int]  # (rank by the policy, arrival time, sequence number)


def ranking(settings: EngineSettings, now_ns: int) -> Callable[[Sequence[Any]], Rank]:
    """Return the key function by which the sequences of a step are sorted.

    Ties are broken by arrival, then by number.

    Sequences are served in this order and preempted in reverse order. The order is fixed for one
    step. A request that has waited longer ranks higher, so that no request waits forever.
    """
    score = _SCORES[settings.scheduling_policy]
    limit_s = settings.max_wait_time_ms / 1e3

    def rank(sequence: Sequence[Any]) -> Rank:
        arrived_ns = sequence.generation.arrived_ns
        waited_s = (now_ns - arrived_ns) / 1e9
        is_overdue = limit_s and waited_s >= limit_s
        rank = float("-inf") if is_overdue else score(sequence, waited_s)
        return rank, arrived_ns, sequence.number

    return rank


def _score_by_arrival(sequence: Sequence[Any], waited_s: float) -> float:
    return 0.0


def _score_by_length(sequence: Sequence[Any], waited_s: float) -> float:
    return sequence.missing_tokens + sequence.remaining_tokens - _TOKENS_PER_SECOND * waited_s


def _score_by_level(sequence: Sequence[Any], waited_s: float) -> float:
    return _TOKENS_PER_LEVEL * sequence.generation.priority + _score_by_length(sequence, waited_s)


_SCORES: Mapping[str, Callable[[Sequence[Any], float], float]] = {
    "fcfs": _score_by_arrival,
    "sjf": _score_by_length,
    "priority": _score_by_level,
}


class BeamCandidate(NamedTuple, Generic[T]):
    """A beam of the next step: the parent beam of this step and the token that extends it."""

    parent: Sequence[T]
    token: int
    score: float


@dataclass(eq=False)
class Beams(Generic[T]):
    """A beam search over one generation's sequences, with the same results as in transformers.

    With n end tokens, the best `max(2, 1 + n) * width` candidates of all beams are considered, so
    that at least `width` of them have not ended and can be the next beams. Ended candidates are
    hypotheses if they are among the best `width`. `hypotheses` are the best hypotheses so far, best
    first. A search is `is_finished` if no better hypotheses can follow.
    """

    generation: Generation[T]
    hypotheses: list[Hypothesis] = field(default_factory=list)
    is_finished: bool = False
    _candidates: list[BeamCandidate[T]] = field(default_factory=list)

    def add(self, sequence: Sequence[T], result: RowResult) -> None:
        """Add the next tokens that a step has returned for a beam to the search's candidates."""
        for token, score in zip(result.candidates, result.scores, strict=True):
            self._candidates.append(BeamCandidate(sequence, token, sequence.score + score))

    def step(self) -> list[BeamCandidate[T]]:
        """Return the beams of the next step, best first; [] once the search is finished."""
        search = self.generation.beams
        assert search is not None
        by_score = sorted(self._candidates, key=attrgetter("score"), reverse=True)
        best_candidates = by_score[: max(2, 1 + len(search.end_tokens)) * search.width]
        self._candidates = []
        length = best_candidates[0].parent.generated_tokens + 1
        next_beams: list[BeamCandidate[T]] = []
        for rank, candidate in enumerate(best_candidates):
            if candidate.token in search.end_tokens:
                if rank < search.width:
                    self._add_hypothesis(candidate, length, "stop")
            elif len(next_beams) < search.width:
                next_beams.append(candidate)
        if length >= self.generation.max_tokens:
            if not self._is_settled(next_beams[0].score if next_beams else -math.inf, length):
                for candidate in next_beams:
                    self._add_hypothesis(candidate, length, "length")
            self.is_finished = True
        else:
            self.is_finished = not next_beams or self._is_settled(next_beams[0].score, length)
        return [] if self.is_finished else next_beams

    def _add_hypothesis(self, candidate: BeamCandidate[T], length: int, reason: str) -> None:
        search = self.generation.beams
        assert search is not None
        tokens = candidate.parent.tokens[len(self.generation.prompt) :]
        tokens.append(candidate.token)
        score = candidate.score / length**search.length_penalty
        self.hypotheses.append(Hypothesis(tokens.tobytes(), reason, score))
        self.hypotheses.sort(key=attrgetter("score"), reverse=True)
        del self.hypotheses[search.width :]

    def _is_settled(self, best_score: float, length: int) -> bool:
        """Check whether the search can end, because its best hypotheses are final.

        Unless `early_stopping` is "true", the search continues while a beam could become better
        than the worst of the present hypotheses.
        """
        search = self.generation.beams
        assert search is not None
        if len(self.hypotheses) < search.width:
            return False
        if search.early_stopping == "true":
            return True
        uses_max_length = search.early_stopping == "never" and search.length_penalty > 0
        max_length = self.generation.max_tokens if uses_max_length else length
        return bool(self.hypotheses[-1].score >= best_score / max_length**search.length_penalty)
