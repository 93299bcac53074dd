"""The orders in which sequences are served, and in reverse order preempted (pure).

An order is made once a step, of what is known then, so that nobody overtakes anybody while it is
used. In each of them a request that waits comes nearer with time, so that none waits for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shmserve.ipc.engine_settings import EngineSettings
from shmserve.scheduler.generative.sequences import Sequence

# A level of priority counts as much as 1,024 tokens, or as ten seconds of waiting.
_TOKENS_A_LEVEL = 1024.0
_TOKENS_A_SECOND = 102.4

Rank = tuple[float, int, int]


def ranking(settings: EngineSettings, now_ns: int) -> Callable[[Sequence[Any]], Rank]:
    """The key by which the sequences of a step are sorted: the first goes first. Ties are broken by
    arrival, then by number."""
    score = _SCORES[settings.scheduling_policy]
    limit_s = settings.max_wait_time_ms / 1e3

    def rank(sequence: Sequence[Any]) -> Rank:
        arrived_ns = sequence.generation.arrived_ns
        waited_s = (now_ns - arrived_ns) / 1e9
        late = limit_s and waited_s >= limit_s
        return (float("-inf") if late else score(sequence, waited_s), arrived_ns, sequence.number)

    return rank


def _arrival(sequence: Sequence[Any], waited_s: float) -> float:
    return 0.0


def _shortest(sequence: Sequence[Any], waited_s: float) -> float:
    return sequence.missing + sequence.left - _TOKENS_A_SECOND * waited_s


def _composite(sequence: Sequence[Any], waited_s: float) -> float:
    level = sequence.generation.priority
    return _TOKENS_A_LEVEL * level + _shortest(sequence, waited_s)


_SCORES: Mapping[str, Callable[[Sequence[Any], float], float]] = {
    "fcfs": _arrival,
    "sjf": _shortest,
    "priority": _composite,
}
