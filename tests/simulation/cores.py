"""The one place that makes the cores under test and knows what is inside them."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any

from shmserve.ipc.memory.lent import LentMemory
from shmserve.ipc.messages.start import CacheStart
from shmserve.ipc.model_spec import ModelSpec
from shmserve.scheduler.batching import BatchingCore
from shmserve.scheduler.front import Front
from shmserve.scheduler.response_cache import ResponseCache
from shmserve.scheduler.settings import Settings
from tests.simulation.memory import SimulatedMemory
from tests.simulation.models import Model
from tests.simulation.world import Process

_SUPERVISOR_PID = 1
# What a core may still have when nothing is in flight, and how many of it: tables of what is there
# (instances, settings), counters, and the few that are kept from growing by a bound of their own.
_KEPT = {
    "ClientTable": 1024,
    "LruCache._entries": 1 << 20,
    "Front._dead": 64,
    "Sequences._lost": 4096,
    "Sequences._free": 1 << 20,
    "RequestQueue._timers": 1100,
    "Responses._order": 1100,
    "PriorityQueue._levels": 1,
    "PriorityQueue._order": 1,
    "Pool._slots": 64,
    "Pool._by_peer": 64,
    "Pool.free": 64,
    "SequenceDispatch._lanes": 64,
    "Executions._early": 64,
}
_WALKED = ("shmserve.scheduler", "shmserve.ipc.memory.lent", "shmserve.ipc.inflight")
# Rooms whose objects hold nothing of requests.
_SKIPPED = ("statistics", "settings", "adaptive", "arrivals", "reports", "batch_time")


class Scheduler:
    """A scheduler as its process hosts it: the front and, behind it, the core of a model version;
    `outboxes` to clients, to workers and to the supervisor."""

    def __init__(
        self,
        model: Model,
        version: str,
        process: Process,
        memory: SimulatedMemory,
        outboxes: tuple[Any, Any, Any],
        kept: list[Any],
        alive: list[int],
    ) -> None:
        clients, workers, control = outboxes
        world = process.world
        settings = Settings.read(ModelSpec.of(model.config), version, model.limits)
        cache = None
        if settings.cached and model.cache_byte_size:
            start = CacheStart(model.cache_byte_size, _SUPERVISOR_PID)
            lent = _lent(model, process, memory)
            cache = ResponseCache(model.name, version, start, lent, lambda: world.now_ns)
            cache._mappings = memory  # type: ignore[assignment]
        self.core = BatchingCore(settings, clients, workers, control, cache)
        self.front = Front(self.core, clients, control, world.wall_clock, cache)
        if kept:
            self.front.restore(kept, alive, world.now_ns)


def _lent(model: Model, process: Process, memory: SimulatedMemory) -> LentMemory:
    """What a process lends, of a simulated arena."""
    lent = LentMemory(model.arena_byte_size)
    lent._arena = memory.arena(process, model.arena_byte_size)  # type: ignore[assignment]
    return lent


def tables(scheduler: Scheduler) -> Iterator[tuple[str, int, int]]:
    """Every container that a scheduler has: where it is, how many things are in it, and the most
    that may be left there when nothing is in flight."""
    seen: set[int] = set()
    stack: list[Any] = [scheduler.front]
    while stack:
        found = stack.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        module = type(found).__module__
        for name, value in _attributes(found):
            if isinstance(value, (dict, list, set, deque, OrderedDict)):
                where = f"{type(found).__name__}.{name}"
                bound = _KEPT.get(where, _KEPT.get(type(value).__name__, 0))
                entries = list(value.values() if isinstance(value, dict) else value)
                count = sum(each is not None for each in entries)
                yield where, count if isinstance(value, list) else len(entries), bound
                stack += entries
            elif type(value).__module__.startswith(_WALKED) and not any(
                part in type(value).__module__ + module for part in _SKIPPED
            ):
                stack.append(value)


def _attributes(found: Any) -> Iterator[tuple[str, Any]]:
    if not type(found).__module__.startswith(_WALKED):
        return
    yield from vars(found).items() if hasattr(found, "__dict__") else ()
    for cls in type(found).__mro__:
        for name in getattr(cls, "__slots__", ()):
            if hasattr(found, name):
                yield name, getattr(found, name)
