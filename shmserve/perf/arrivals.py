"""Schedules of an open loop, as offsets in nanoseconds from its start; and sweeps of loads (pure).

A closed loop has none: there a request is sent when another one has ended.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial

from shmserve.errors import InvalidArgument

_MOST_POINTS = 1000
_S = 1e9


def constant(per_second: float) -> Iterator[int]:
    """One after the other at the same distance."""
    number = 0
    while True:
        yield round(number * _S / per_second)
        number += 1


def poisson(per_second: float, seed: int) -> Iterator[int]:
    """Independent arrivals: the times between two are exponentially distributed."""
    draw = random.Random(seed).expovariate
    at = 0.0
    while True:
        at += draw(per_second)
        yield round(at * _S)


def schedule(kind: str, per_second: float, seed: int) -> Iterator[int]:
    """The schedule of a kind, one of `KINDS`."""
    return KINDS[kind](per_second, seed)


KINDS: dict[str, Callable[[float, int], Iterator[int]]] = {
    "poisson": poisson,
    "constant": lambda per_second, _: constant(per_second),
}


def points(text: str, flag: str, kind: type[int] | type[float]) -> list[float]:
    """The loads that a flag says: "1,2,8", or "FIRST:LAST[:STEP]", both ends included. Raises
    InvalidArgument for what is no number, not above 0, or too many."""
    refuse = partial(_refused, flag, text)
    try:
        if ":" not in text:
            found = [float(kind(part)) for part in text.split(",")]
        else:
            first, last, step = [*map(kind, text.split(":")), kind(1)][:3]
            if step <= 0 or last < first or text.count(":") > 2:
                raise refuse()
            count = int((last - first) / step + 1e-9) + 1
            if count > _MOST_POINTS:
                raise InvalidArgument(
                    f"--{flag}: '{text}' are {count} loads, at most {_MOST_POINTS}"
                )
            found = [float(first + step * number) for number in range(count)]
    except ValueError:
        raise refuse() from None
    if any(not 0 < each < float("inf") for each in found):
        raise refuse()
    return found


def _refused(flag: str, text: str) -> InvalidArgument:
    return InvalidArgument(
        f"--{flag}: '{text}' is none of N, N,N,... and FIRST:LAST[:STEP], numbers above 0"
    )
