"""The memory of models: what their processes have for themselves, of the host's and of
accelerators', which comes back when they end."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Iterable

from shmserve.supervisor.models.orders import ModelEntry
from shmserve.supervisor.models.room import private_bytes
from shmserve.supervisor.models.version.model_version import ModelVersion

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
