"""Sequences, and the requests that they are samples of (pure).

A sequence has `tokens`, of which the keys and values of the first `computed` are in the blocks of
its `table`. There are no phases: what is missing is computed, and when nothing is, the next token
is sampled. So a prompt, one that was cut into chunks, and what a preemption has thrown away are one
case.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

from shmserve.ipc.messages.generation import BeamSearch
from shmserve.scheduler.generative.blocks import ROOT, BlockPool, block_key

T = TypeVar("T")


class Place(StrEnum):
    """Where a sequence's keys and values are."""

    WAITING = "waiting"  # nowhere
    RUNNING = "running"
    SWAPPED = "swapped"  # in blocks of the host
    OVER = "over"


@dataclass(slots=True, eq=False)
class Generation(Generic[T]):
    """A request that was prepared: `owner` is whose. `samples` sequences are generated from one
    prompt, of at most `max_tokens` each, or those of a beam search. `arrived_ns` orders it."""

    owner: T
    key: int
    arrived_ns: int
    prompt: array[int]
    max_tokens: int
    samples: int = 1
    priority: int = 0
    whole: bool = False
    drafts: bool = True
    beams: BeamSearch | None = None
    preemptions: int = 0
    cached: int = 0  # tokens of the prompt that were found in the prefix cache
    sequences: list[Sequence[T]] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """The sequences that it has at a time, at most."""
        return self.beams.width if self.beams is not None else self.samples

    @property
    def shared(self) -> int:
        """The tokens that its samples have in common once computed: each computes the last of the
        prompt itself."""
        return len(self.prompt) - 1

    @property
    def most_tokens(self) -> int:
        """The tokens that a sequence of it may come to have; the last one's are never computed."""
        return len(self.prompt) + self.max_tokens - 1


@dataclass(slots=True, eq=False)
class Sequence(Generic[T]):
    """One sequence of a generation, by its `number`. `forks`: so many more begin from it where its
    prompt is computed but for the last token. `held`: it waits for its beam search's others.
    `stopped`: its text has ended it, which it does once the step is done that runs.

    `told` entries of the table are known to the worker.
    """

    number: int
    generation: Generation[T]
    sample: int
    tokens: array[int]
    place: Place = Place.WAITING
    computed: int = 0
    table: list[int] = field(default_factory=list)
    host: list[int] = field(default_factory=list)
    told: int = 0
    forks: int = 0
    held: bool = False
    stopped: bool = False
    sampled_ns: int = 0  # when it had its last token
    score: float = 0.0
    keys: list[bytes] = field(default_factory=list)  # of its full blocks
    sealed: int = 0  # blocks of its table that the prefix cache was told of

    @property
    def seats(self) -> int:
        """The sequences that it is, or is about to become."""
        search = self.generation.beams
        return search.width if search is not None and not self.generated else 1 + self.forks

    @property
    def missing(self) -> int:
        """The tokens to be computed before the next is sampled."""
        return len(self.tokens) - self.computed

    @property
    def generated(self) -> int:
        """The tokens behind the prompt."""
        return len(self.tokens) - len(self.generation.prompt)

    @property
    def left(self) -> int:
        """The tokens that may still follow."""
        return self.generation.max_tokens - self.generated

    def prefix_keys(self, block_size: int, blocks: int) -> list[bytes]:
        """The keys of its first `blocks` blocks, all of which are full."""
        keys = self.keys
        while len(keys) < blocks:
            first = len(keys) * block_size
            before = keys[-1] if keys else ROOT
            keys.append(block_key(before, self.tokens[first : first + block_size]))
        return keys[:blocks]

    def find_prefix(self, pool: BlockPool, block_size: int) -> list[int]:
        """The cached blocks of its beginning, which leave a token to compute."""
        found: list[int] = []
        for key in self.prefix_keys(block_size, (len(self.tokens) - 1) // block_size):
            block = pool.find(key)
            if block is None:
                break
            found.append(block)
        return found

    def seal(self, pool: BlockPool, block_size: int) -> None:
        """Have the blocks that are full by now found by others."""
        full = self.computed // block_size
        if full > self.sealed:
            keys = self.prefix_keys(block_size, full)
            for index in range(self.sealed, full):
                pool.seal(self.table[index], keys[index])
            self.sealed = full

    def lost(self) -> None:
        """Its keys and values are nowhere any more."""
        self.place = Place.WAITING
        self.computed = self.told = self.sealed = 0
        self.table = []
        self.host = []
