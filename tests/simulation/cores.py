"""The one place that makes the cores under test and knows what is inside them."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any

from shmserve.ipc.memory.lent import LentMemory
from shmserve.ipc.messages.start import CacheStart
from shmserve.scheduler.core import Scheduler
from shmserve.scheduler.response_cache.cache import ResponseCache
from shmserve.scheduler.settings import Settings
from tests.simulation.memory import SimulatedMemory
from tests.simulation.models import Model
from tests.simulation.world import Process

_SUPERVISOR_PID = 1
# What a core may still have when nothing is in flight, and how many of it: tables of what is there
# (instances, settings), counters, and the few that are kept from growing by a bound of their own.
_KEPT = {
    "ClientTable": 1024,
    "ClientFront._dead": 64,
    "Clients._dead": 64,
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
_SKIPPED = ("statistics", "settings", "adaptive", "arrivals", "reports", "lru", "batch_time")


def scheduler(
    model: Model,
    version: str,
    process: Process,
    memory: SimulatedMemory,
    outboxes: tuple[Any, Any, Any],
    kept: list[Any],
    alive: list[int],
) -> Scheduler:
    """The core of a model version's scheduler; `outboxes` to clients, workers, the supervisor."""
    clients, workers, control = outboxes
    world = process.world
    settings = Settings.read(model.config, version, model.limits)
    cache = None
    if settings.cached and model.cache_byte_size:
        start = CacheStart(model.cache_byte_size, _SUPERVISOR_PID)
        lent = _lent(model, process, memory)
        cache = ResponseCache(model.name, version, start, lent, lambda: world.now_ns)
        cache._mappings = memory  # type: ignore[assignment]
    core = Scheduler(settings, clients, workers, control, world.wall_clock, cache)
    if kept:
        core.go_on(kept, alive, world.now_ns)
    return core


def _lent(model: Model, process: Process, memory: SimulatedMemory) -> LentMemory:
    """What a process lends, of a simulated arena."""
    lent = LentMemory(model.arena_byte_size)
    lent._arena = memory.arena(process, model.arena_byte_size)  # type: ignore[assignment]
    return lent


def tables(core: Any) -> Iterator[tuple[str, int, int]]:
    """Every container that a core has: where it is, its size, and the most that may be left in it
    when nothing is in flight."""
    seen: set[int] = set()
    stack: list[Any] = [core]
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
                yield where, len(value), bound
                stack += value.values() if isinstance(value, dict) else value
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
