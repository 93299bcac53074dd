"""The decision which models on demand leave: the least recently used first (pure)."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import NamedTuple


class Resident(NamedTuple):
    """A model that has memory: `byte_size` of it. `used_ns`: when it was asked for last (monotonic
    ns); after `idle_ns` without a request it is to leave, 0: never for that.

    `stays`: it has requests in flight, is loaded, unloaded or waited for just now, or an operator
    has loaded it. `users` are the ensembles that have it as a step: it stays while one of them
    does.
    """

    name: str
    byte_size: int
    used_ns: int
    stays: bool = False
    idle_ns: int = 0
    users: frozenset[str] = frozenset()


def leaving(residents: Iterable[Resident], bound: int, now_ns: int) -> list[str]:
    """The names of those that are to leave now, ensembles before their steps: what was idle for too
    long, and where all together have more than `bound` bytes (0: any number) as many more as bring
    them below it, or as can be, the least recently used first."""
    here = sorted(residents, key=attrgetter("used_ns"))
    chosen: list[str] = []

    def may_leave(each: Resident) -> bool:
        return not (each.stays or each.users.difference(chosen))

    def is_due(each: Resident) -> bool:
        if bound and sum(other.byte_size for other in here) > bound:
            return True
        return 0 < each.idle_ns <= now_ns - each.used_ns

    # Again from the first after each: a step may leave once its ensembles do.
    while due := next((each for each in here if may_leave(each) and is_due(each)), None):
        here.remove(due)
        chosen.append(due.name)
    return chosen
