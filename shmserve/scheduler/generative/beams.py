"""Beam search over one generation's sequences (pure), with the result of transformers'.

Of the candidates of all beams, the best 2 * width are looked at: those that end are hypotheses, the
others the next beams.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Generic, NamedTuple, TypeVar

from shmserve.ipc.messages.generation import RowResult
from shmserve.scheduler.generative.sequences import Generation, Sequence

T = TypeVar("T")


class Chosen(NamedTuple, Generic[T]):
    """A beam of the next step: a beam of this one with a token more."""

    parent: Sequence[T]
    token: int
    score: float


class Found(NamedTuple):
    """A hypothesis: its tokens behind the prompt, why it ended, and its score with the penalty."""

    tokens: list[int]
    over: str
    score: float


@dataclass(eq=False)
class Beams(Generic[T]):
    """One search. `found` are the best hypotheses until now, best first; `over`: there will be no
    better ones."""

    generation: Generation[T]
    found: list[Found] = field(default_factory=list)
    over: bool = False
    _candidates: list[Chosen[T]] = field(default_factory=list)

    def heard(self, sequence: Sequence[T], result: RowResult) -> None:
        """A beam has its candidates."""
        for token, score in zip(result.candidates, result.scores, strict=True):
            self._candidates.append(Chosen(sequence, token, sequence.score + score))

    def step(self) -> list[Chosen[T]]:
        """The beams of the next step, best first; none once the search is over."""
        search = self.generation.beams
        assert search is not None
        ranked = sorted(self._candidates, key=attrgetter("score"), reverse=True)[: 2 * search.width]
        self._candidates = []
        generated = ranked[0].parent.generated + 1
        going: list[Chosen[T]] = []
        for place, candidate in enumerate(ranked):
            if candidate.token in search.ends:
                if place < search.width:
                    self._keep(candidate, generated, "stop")
            elif len(going) < search.width:
                going.append(candidate)
        if generated >= self.generation.max_tokens:
            if not self._settled(going[0].score if going else -math.inf, generated):
                for candidate in going:
                    self._keep(candidate, generated, "length")
            self.over = True
        else:
            self.over = not going or self._settled(going[0].score, generated)
        return [] if self.over else going

    def _keep(self, candidate: Chosen[T], length: int, why: str) -> None:
        search = self.generation.beams
        assert search is not None
        tokens = [*candidate.parent.tokens[len(self.generation.prompt) :], candidate.token]
        score = candidate.score / length**search.length_penalty
        self.found.append(Found(tokens, why, score))
        self.found.sort(key=attrgetter("score"), reverse=True)
        del self.found[search.width :]

    def _settled(self, best: float, length: int) -> bool:
        """Whether no beam can come to be better than the worst hypothesis, as `early_stopping` says
        what counts for that."""
        search = self.generation.beams
        assert search is not None
        if len(self.found) < search.width:
            return False
        if search.early_stopping == "true":
            return True
        longest = search.early_stopping == "never" and search.length_penalty > 0
        reach = self.generation.max_tokens if longest else length
        return bool(self.found[-1].score >= best / reach**search.length_penalty)
