"""The memory of models: what their processes have for themselves, of the host's and of
accelerators', which comes back when they end; and which models on demand leave for it, the least
recently used first, which is decided by a function that measures nothing."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Iterable
from operator import attrgetter
from typing import NamedTuple

from shmserve.supervisor.models.model_version import ModelVersion
from shmserve.supervisor.models.orders import ModelEntry
from shmserve.supervisor.models.room import private_bytes


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


_MEASURE_EVERY_S = 10.0


class MemoryUse:
    """The bytes that versions have, as they were measured last."""

    def __init__(self) -> None:
        self._sizes: dict[ModelVersion, int] = {}
        self._measured: dict[ModelVersion, float] = {}
        self._usual: dict[str, int] = {}  # of a version by its name, of what was unloaded, too

    async def measure(self, live: Iterable[ModelVersion], again: bool = False) -> None:
        """Look at those of the versions that have loaded, and of which nothing is known; with
        `again` at those that were not looked at lately, too. It takes milliseconds for each."""
        now = time.monotonic()
        loaded = [version for version in live if version.loaded]
        last = {each: self._measured.get(each, -math.inf) for each in loaded}
        old = {each for each in loaded if again and now - last[each] >= _MEASURE_EVERY_S}
        wanted = old | {each for each in loaded if each.spec.name not in self._usual}
        if not wanted:
            return
        pids = {each: each.pids() for each in loaded}
        shared = Counter(pid for each in loaded for pid in pids[each])
        found = await asyncio.to_thread(_measured, {pid for each in wanted for pid in pids[each]})
        self._measured = last | dict.fromkeys(wanted, now)
        self._sizes = {each: self._sizes[each] for each in loaded if each in self._sizes}
        for each in wanted:
            # A process that hosts several schedulers counts for each with its part.
            host_size = sum(found[pid] // shared[pid] for pid in pids[each])
            size = host_size + each.instances.device_byte_size
            self._sizes[each] = self._usual[each.spec.name] = size

    def byte_size(self, model: ModelEntry) -> int:
        """The bytes of all its versions: one that was not measured will have as many as before, or
        as others have."""
        known = self._usual.values()
        expected = self._usual.get(model.name, sum(known) // (len(known) or 1))
        return sum(self._sizes.get(version, expected) for version in model.versions)


def _measured(pids: Iterable[int]) -> dict[int, int]:
    return {pid: private_bytes(pid) for pid in pids}
