"""A worker of a generative model that computes histories in the place of keys and values.

Each slot of its pools holds what a real one's would depend on: the token, its position, and a hash
of all tokens before it. What is read is compared with the sequence's own tokens, so that a block
that was given away, copied wrongly or found for another prefix is seen at once; and the next token
follows from the history alone, so that no schedule may change it.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass, field
from functools import cache

from shmserve.ipc.messages.generation import Row, RowResult, Step, Stepped

VOCABULARY = 61
END = 0  # the token that ends a sequence

Slot = tuple[int, int, bytes]  # token, position, hash of the tokens before it


@cache
def _digest(before: bytes, token: int) -> bytes:
    return hashlib.blake2b(before + token.to_bytes(4, "little"), digest_size=8).digest()


def history(tokens: array[int]) -> bytes:
    """What stands for a sequence of tokens."""
    digest = b""
    for token in tokens:
        digest = _digest(digest, token)
    return digest


def next_token(tokens: array[int], sample: int) -> int:
    """The token that follows: of each sample another one."""
    return int.from_bytes(_digest(history(tokens), VOCABULARY + sample), "little") % VOCABULARY


def candidates(tokens: array[int], count: int) -> list[tuple[int, float]]:
    """The best tokens to follow in a beam search, with their scores, best first."""
    found, before = [], history(tokens)
    for token in range(VOCABULARY):
        digest = _digest(before, token)
        found.append((token, -int.from_bytes(digest[:4], "little") / 2**30))
    return sorted(found, key=lambda each: -each[1])[:count]


def alone(prompt: array[int], sample: int, max_tokens: int) -> tuple[list[int], str]:
    """What a sample of a prompt comes to, by itself."""
    tokens = prompt[:]
    for _ in range(max_tokens):
        tokens.append(next_token(tokens, sample))
        if tokens[-1] == END:
            return list(tokens[len(prompt) :]), "stop"
    return list(tokens[len(prompt) :]), "length"


@dataclass
class _Known:
    tokens: array[int]
    key: int
    sample: int
    prompt: int
    table: list[int] = field(default_factory=list)


@dataclass
class GenerativeWorker:
    """Executes steps. `prompts` are those of the requests it prepared, and `most` how many tokens
    each may have; beam searches have a `width`, and `resumed` the tokens of a lost worker."""

    block_size: int
    blocks: int
    host_blocks: int
    proposals: int = 1  # of three that are drafted, so many are right
    prompts: dict[int, array[int]] = field(default_factory=dict)
    most: dict[int, int] = field(default_factory=dict)
    width: dict[int, int] = field(default_factory=dict)
    resumed: dict[tuple[int, int], array[int]] = field(default_factory=dict)
    known: dict[int, _Known] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._pool: list[list[Slot | None]] = [[None] * self.block_size for _ in range(self.blocks)]
        self._host: list[list[Slot | None]] = [
            [None] * self.block_size for _ in range(self.host_blocks)
        ]

    def step(self, step: Step) -> Stepped:
        """Execute one, checking all that is read."""
        for begin in step.begin:
            if begin.parent:
                parent = self.known[begin.parent]
                known = _Known(parent.tokens[:], begin.key, begin.sample, parent.prompt)
                known.table = parent.table[:]
                if begin.token >= 0:
                    known.tokens.append(begin.token)
            else:
                prompt = self.prompts[begin.key]
                had = self.resumed.get((begin.key, begin.sample), array("i"))
                known = _Known(prompt + had, begin.key, begin.sample, len(prompt))
            self.known[begin.sequence] = known
        for source, target in _pairs(step.out):
            self._host[target] = self._pool[source][:]
        for source, target in _pairs(step.back):
            self._pool[target] = self._host[source][:]
        for source, target in _pairs(step.within):
            self._pool[target] = self._pool[source][:]
        results = [result for row in step.rows for result in self._row(row)]
        for number in step.over:
            self.known.pop(number, None)
        return Stepped(step.step, results, 0, 1_000_000 + 100_000 * len(step.rows), 0)

    def _row(self, row: Row) -> list[RowResult]:
        known = self.known[row.sequence]
        known.table[row.keep :] = row.blocks
        assert row.count >= 1
        assert row.samples == (row.start + row.count == len(known.tokens))
        self._check(known, row.start)
        self._write(known, row.start, known.tokens[row.start : row.start + row.count])
        if not row.samples:
            return []
        if known.key in self.width:
            best = candidates(known.tokens, 2 * self.width[known.key])
            return [
                RowResult(
                    row.sequence, [], candidates=[t for t, _ in best], scores=[s for _, s in best]
                )
            ]
        return [self._sampled(known, row)]

    def _sampled(self, known: _Known, row: Row) -> RowResult:
        end = len(known.tokens)
        right = array("i")
        tokens = known.tokens[:]
        for _ in range(row.draft):
            right.append(next_token(tokens, known.sample))
            tokens.append(right[-1])
        proposed = array("i", right)
        for index in range(row.draft):
            if (end + index) % 3 >= self.proposals:
                proposed[index] = (right[index] + 1) % VOCABULARY
        self._write(known, end, proposed)
        new: list[int] = []
        over = ""
        for index in range(row.draft + 1):
            token = next_token(known.tokens, known.sample)
            known.tokens.append(token)
            new.append(token)
            generated = len(known.tokens) - known.prompt
            over = "stop" if token == END else ""
            over = over or ("length" if generated >= self.most[known.key] else "")
            if over or index == row.draft or proposed[index] != token:
                break
        return RowResult(row.sequence, new, over, row.draft)

    def _check(self, known: _Known, end: int) -> None:
        digest = b""
        for position in range(end):
            found = self._pool[known.table[position // self.block_size]][position % self.block_size]
            wanted = (known.tokens[position], position, digest)
            assert found == wanted, f"position {position} of {end}: {found} is not {wanted}"
            digest = _digest(digest, known.tokens[position])

    def _write(self, known: _Known, start: int, tokens: array[int]) -> None:
        digest = history(known.tokens[:start])
        for position, token in enumerate(tokens, start):
            block = known.table[position // self.block_size]
            self._pool[block][position % self.block_size] = (token, position, digest)
            digest = _digest(digest, token)


def _pairs(flat: list[int]) -> list[tuple[int, int]]:
    return list(zip(flat[::2], flat[1::2], strict=True))
