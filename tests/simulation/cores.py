"""The construction and inspection of the tested cores; no other module knows their internals."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any

from shmserve.ipc.memory.lent import LentMemory
from shmserve.ipc.messages.supervision import CacheStart
from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.processes import REMEMBERED_EXITS
from shmserve.ipc.tensors.descriptors import Memory, Range
from shmserve.ipc.tensors.schemas import Schemas
from shmserve.scheduler.batching import BatchingCore
from shmserve.scheduler.ensemble.core import EnsembleCore
from shmserve.scheduler.ensemble.memory import EnsembleMemory
from shmserve.scheduler.front import Front
from shmserve.scheduler.generative.sequences import Sequence
from shmserve.scheduler.response_cache import ResponseCache
from shmserve.scheduler.settings import Settings
from tests.simulation.memory import SimulatedMemory
from tests.simulation.models import Model
from tests.simulation.texts import STOP_TOKEN
from tests.simulation.world import Process, Violation
from tests.support.generative_worker import END_TOKEN

_SUPERVISOR_PID = 1
# The objects that a core may keep when no request is in flight, and their maximum number: tables of
# models, instances and settings, counters, and collections with a limit of their own.
_MAX_ENTRIES = {
    "ClientTable": 1024,
    "Schemas": 256,
    "LruCache._entries": 1 << 20,
    "Front._exited_pids": REMEMBERED_EXITS,
    "Sequences._lost_ids": 4096,
    "Sequences._free_slots": 1 << 20,
    "Timers._heap": 1100,
    "Responses._ordered_requests": 1100,
    "PriorityQueue._queues": 1,
    "PriorityQueue._order": 1,
    "Pool._slots": 64,
    "Pool._slots_by_peer": 64,
    "Pool.free_slots": 64,
    "SequenceDispatcher._slots_by_peer": 64,
    "Executions._early_releases": 64,
    "Executions._unknown_releases": 4096,
    "BlockPool.references": 1 << 10,
    "BlockPool._length_by_start": 1 << 10,
    "BlockPool._start_by_end": 1 << 10,
    "BlockPool._keys_by_block": 1 << 10,
    "BlockPool._blocks_by_key": 1 << 10,
    "BlockPool._cached_blocks": 1 << 10,
    "SchedulerClient.successors": 4096,
    "EnsembleCore._endpoints": 10,
    "Targets._versions": 10,
    "Targets._latest_versions": 10,
    "Targets._targets_by_step": 10,
    "EnsembleCore._plans": 64,
    "StepRunner._waiting_firings": 10,
    "StepRunner._in_flight": 10,
    "_EnsembleMemory._held_arenas": 64,
}
_WALKED_MODULES = (
    "shmserve.scheduler",
    "shmserve.ipc.memory.lent",
    "shmserve.ipc.scheduler_client",
)
# Modules whose objects hold no request, and classes with a limit of their own or with one object
# per ensemble graph.
_SKIPPED_MODULES = ("statistics", "settings", "adaptive", "estimates", "scheduler.tables")
_STATIC_CLASSES = ("LruCache", "Graph", "Plan", "PlannedStep", "Target", "Signature", "StepTimes")


class Scheduler:
    """A scheduler like in its process; `outboxes`: clients, workers or steps, supervisor."""

    def __init__(
        self,
        model: Model,
        version: str,
        process: Process,
        memory: SimulatedMemory,
        outboxes: tuple[Any, Any, Any],
        checkpoint: list[Any],
        alive: list[int],
    ) -> None:
        clients, peers, control = outboxes
        world = process.world
        spec = ModelSpec.of(model.config)
        settings = Settings.read(spec, version, model.limits)
        cache, lent = None, _simulate_lent_memory(model, process, memory)
        if settings.caches_responses and model.cache_byte_size:
            start = CacheStart(model.cache_byte_size, _SUPERVISOR_PID)
            cache = ResponseCache(model.name, version, start, lent, lambda: world.now_ns)
            cache._mappings = memory  # type: ignore[assignment]
        core: Any
        if model.steps:
            ensemble_memory = _EnsembleMemory(lent, memory)
            core = EnsembleCore(settings, spec, peers, control, ensemble_memory, cache)
            self.from_peer: Any = core.step_runner.receive
        else:
            properties_by_schema = Schemas(model.batch_properties)
            core = BatchingCore(
                settings, properties_by_schema, peers, control, lambda: world.now_ns, cache
            )
            self.from_peer = core.results.handle
            if model.is_generative:
                _check_stopped(core._dispatcher)
        self.front: Front[Any] = Front(
            *(core, clients, control, world.wall_clock, model.name, cache)
        )
        self._core = core
        if checkpoint:
            self.front.restore(checkpoint, alive)

    @property
    def instances(self) -> dict[str, int]:
        instances: dict[str, int] = self._core.gauges()["instances"]
        return instances

    @property
    def used_blocks(self) -> int:
        """Return the number of blocks that sequences hold, including blocks on the host."""
        blocks = self._core.gauges().get("generation", {}).get("blocks", {})
        return int(blocks.get("used", 0) + blocks.get("host", 0))


def _check_stopped(dispatcher: Any) -> None:
    """Raise Violation if a text ended with "stop" but lacks the token that ends it."""
    record = dispatcher._on_sequence_end

    def check_sequence_end(sequence: Sequence[Any], reason: str) -> None:
        tokens = sequence.tokens[len(sequence.generation.prompt) :]
        if reason == "stop" and not {STOP_TOKEN, END_TOKEN} & {*tokens}:
            raise Violation(f"a text ends with {reason!r} after the tokens {list(tokens)}")
        record(sequence, reason)

    dispatcher._on_sequence_end = check_sequence_end


class _HeldArena:
    """A simulated arena that an ensemble holds, so that it survives its owner."""

    def __init__(self, memory: Memory) -> None:
        self.pid = memory.pid
        self.memory = memory
        self.reference_count = 0
        self.owner_exited = False

    def close(self) -> None:
        """Release the arena."""


class _EnsembleMemory(EnsembleMemory):
    def __init__(self, lent: LentMemory, memory: SimulatedMemory) -> None:
        super().__init__(lent, lambda memory_id: None)
        self._mappings = memory  # type: ignore[assignment]

    def hold(self, memory_range: Range) -> None:
        arena: Any = _HeldArena(memory_range.memory)
        held_arena: Any = self._held_arenas.setdefault(memory_range.memory.id, arena)
        held_arena.reference_count += 1


def _simulate_lent_memory(model: Model, process: Process, memory: SimulatedMemory) -> LentMemory:
    """Return the lent memory of a process, based on a simulated arena."""
    lent = LentMemory(model.arena_byte_size)
    lent._arena = memory.arena(process, model.arena_byte_size)  # type: ignore[assignment]
    return lent


def tables(scheduler: Scheduler) -> Iterator[tuple[str, int, int]]:
    """Yield each container of a scheduler: its path, length, and maximum length when idle."""
    seen_ids: set[int] = set()
    stack: list[Any] = [scheduler.front]
    while stack:
        element = stack.pop()
        if id(element) in seen_ids:
            continue
        seen_ids.add(id(element))
        if type(element).__name__ in _STATIC_CLASSES:
            continue
        module = type(element).__module__
        for name, value in _attributes(element):
            if isinstance(value, (dict, list, set, deque, OrderedDict)):
                attribute = f"{type(element).__name__}.{name}"
                bound = _MAX_ENTRIES.get(attribute, _MAX_ENTRIES.get(type(value).__name__, 0))
                entries = list(value.values() if isinstance(value, dict) else value)
                count = sum(entry is not None for entry in entries)
                yield attribute, count if isinstance(value, list) else len(entries), bound
                stack += entries
            elif type(value).__module__.startswith(_WALKED_MODULES) and not any(
                part in type(value).__module__ + module for part in _SKIPPED_MODULES
            ):
                stack.append(value)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    if not type(value).__module__.startswith(_WALKED_MODULES):
        return
    yield from vars(value).items() if hasattr(value, "__dict__") else ()
    for cls in type(value).__mro__:
        for name in getattr(cls, "__slots__", ()):
            if hasattr(value, name):
                yield name, getattr(value, name)
