"""A worker of a generative model that computes token histories instead of keys and values.

Each slot of its pools contains the token, its position, and a hash of all tokens before it, on
which real keys and values depend. Each read is compared with the sequence's own tokens, so that a
freed, wrongly copied or wrongly shared block is detected. The next token depends only on the
history, so no schedule may change it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from shmserve.ipc.messages.generation import Row, RowResult, Step, Stepped

VOCABULARY_SIZE = 61
END_TOKEN = 0  # the token that ends a sequence

Slot = tuple[int, int, bytes]  # the token, its position, and a hash of the tokens before it


@lru_cache(1 << 16)
def _digest(previous_digest: bytes, token: int) -> bytes:
    return hashlib.blake2b(previous_digest + token.to_bytes(4, "little"), digest_size=8).digest()


def extend(slots: list[Slot], tokens: Iterable[int]) -> list[Slot]:
    for token in tokens:
        slots.append((token, len(slots), _hash_slots(slots)))
    return slots


def _hash_slots(slots: list[Slot]) -> bytes:
    return _digest(slots[-1][2], slots[-1][0]) if slots else b""


def next_token(slots: list[Slot], sample: int) -> int:
    """Return the token that follows; it differs between samples."""
    return (
        int.from_bytes(_digest(_hash_slots(slots), VOCABULARY_SIZE + sample), "little")
        % VOCABULARY_SIZE
    )


def candidates(slots: list[Slot], count: int) -> list[tuple[int, float]]:
    """Return the best next tokens of a beam search with their scores, best first."""
    candidates, previous_digest = [], _hash_slots(slots)
    for token in range(VOCABULARY_SIZE):
        digest = _digest(previous_digest, token)
        candidates.append((token, -int.from_bytes(digest[:4], "little") / 2**30))
    return sorted(candidates, key=lambda candidate: -candidate[1])[:count]


def generate_alone(prompt: array[int], sample: int, max_tokens: int) -> tuple[list[int], str]:
    slots = extend([], prompt)
    finish_reason = "length"
    for _ in range(max_tokens):
        token = next_token(slots, sample)
        extend(slots, [token])
        if token == END_TOKEN:
            finish_reason = "stop"
            break
    return [token for token, _, _ in slots[len(prompt) :]], finish_reason


@dataclass
class _SequenceSlots:
    slots: list[Slot]  # one slot for each of its tokens
    key: int
    sample: int
    prompt: int
    table: list[int] = field(default_factory=list)


@dataclass
class GenerativeWorker:
    """A worker that executes steps and checks all reads.

    Attributes:
        prompts: The prompts of prepared requests.
        max_tokens_by_key: The maximum number of tokens of each request.
        width: The width of each beam search.
        resumed_tokens: The tokens of samples that a lost worker had generated.
    """

    block_size: int
    blocks: int
    host_blocks: int
    proposals: int = 1  # number of correct tokens among three draft tokens
    prompts: dict[int, array[int]] = field(default_factory=dict)
    max_tokens_by_key: dict[int, int] = field(default_factory=dict)
    width: dict[int, int] = field(default_factory=dict)
    resumed_tokens: dict[tuple[int, int], array[int]] = field(default_factory=dict)
    sequences: dict[int, _SequenceSlots] = field(default_factory=dict)
    read_count: int = 0  # number of cached tokens that were read and verified

    def __post_init__(self) -> None:
        self._pool: list[list[Slot | None]] = [[None] * self.block_size for _ in range(self.blocks)]
        self._host: list[list[Slot | None]] = [
            [None] * self.block_size for _ in range(self.host_blocks)
        ]

    def step(self, step: Step) -> Stepped:
        for begin in step.new_sequences:
            if begin.parent in self.sequences:
                parent = self.sequences[begin.parent]
                sequence = _SequenceSlots(parent.slots[:], begin.key, begin.sample, parent.prompt)
                sequence.table = parent.table[:]
                if begin.token >= 0:
                    extend(sequence.slots, [begin.token])
            elif begin.key not in self.prompts:
                continue  # the request of this sequence has ended
            else:
                prompt = self.prompts[begin.key]
                resumed = self.resumed_tokens.get((begin.key, begin.sample), array("i"))
                sequence = _SequenceSlots(
                    extend([], prompt + resumed), begin.key, begin.sample, len(prompt)
                )
            self.sequences[begin.sequence] = sequence
        for source, target in _pairs(step.swap_out):
            self._host[target] = self._pool[source][:]
        for source, target in _pairs(step.swap_in):
            self._pool[target] = self._host[source][:]
        for source, target in _pairs(step.copies):
            self._pool[target] = self._pool[source][:]
        results = [result for row in step.rows for result in self._row(row)]
        unknown = [row.sequence for row in step.rows if row.sequence not in self.sequences]
        for number in step.ended:
            self.sequences.pop(number, None)
        forward_ns = 1_000_000 + 100_000 * len(step.rows)
        return Stepped(step.step, results, 0, forward_ns, 0, skipped=unknown)

    def _row(self, row: Row) -> list[RowResult]:
        if row.sequence not in self.sequences:
            return []
        sequence = self.sequences[row.sequence]
        sequence.table[row.kept_blocks :] = row.blocks
        assert row.count >= 1
        assert row.samples_next == (row.start + row.count == len(sequence.slots))
        self._check(sequence, row.start)
        self._write(sequence, sequence.slots[row.start : row.start + row.count])
        if not row.samples_next:
            return []
        if sequence.key in self.width:
            best_candidates = candidates(sequence.slots, 4 * self.width[sequence.key])
            return [
                RowResult(
                    row.sequence,
                    [],
                    candidates=[t for t, _ in best_candidates],
                    scores=[s for _, s in best_candidates],
                )
            ]
        return [self._sampled(sequence, row)]

    def _sampled(self, sequence: _SequenceSlots, row: Row) -> RowResult:
        end = len(sequence.slots)
        true_slots = sequence.slots[:]
        for _ in range(row.draft_count):
            extend(true_slots, [next_token(true_slots, sequence.sample)])
        proposed = [token for token, _, _ in true_slots[end:]]
        for index in range(row.draft_count):
            if (end + index) % 3 >= self.proposals:
                proposed[index] = (proposed[index] + 1) % VOCABULARY_SIZE
        self._write(sequence, extend(sequence.slots[:], proposed)[end:])
        new_tokens: list[int] = []
        reason = ""
        for index in range(row.draft_count + 1):
            token = next_token(sequence.slots, sequence.sample)
            extend(sequence.slots, [token])
            new_tokens.append(token)
            count = len(sequence.slots) - sequence.prompt
            reason = "stop" if token == END_TOKEN else ""
            reason = reason or ("length" if count >= self.max_tokens_by_key[sequence.key] else "")
            if reason or index == row.draft_count or proposed[index] != token:
                break
        return RowResult(row.sequence, new_tokens, reason, row.draft_count)

    def _check(self, sequence: _SequenceSlots, end: int) -> None:
        size = self.block_size
        for index, start in enumerate(range(0, end, size)):
            stop = min(start + size, end)
            rows = self._pool[sequence.table[index]][: stop - start]
            expected = sequence.slots[start:stop]
            assert rows == expected, f"positions {start} to {stop} of {end}: {rows}, not {expected}"
        self.read_count += end

    def _write(self, sequence: _SequenceSlots, slots: list[Slot]) -> None:
        for slot in slots:
            block = sequence.table[slot[1] // self.block_size]
            self._pool[block][slot[1] % self.block_size] = slot


def _pairs(flat: list[int]) -> list[tuple[int, int]]:
    return list(zip(flat[::2], flat[1::2], strict=True))
