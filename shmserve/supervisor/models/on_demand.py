"""Models that are loaded by their first request and unloaded to free memory (--load-on-demand).

Models are unloaded when they are idle or when other models need their memory. Schedulers report
when a model was used and whether it has requests in flight. `select_unloads` decides from these
reports and the measured memory, without any I/O. The lifecycle executes the decision.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import InitVar, dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from shmserve.common.tasks import wait_any
from shmserve.errors import Internal, InvalidArgument, ShmserveError, Unavailable
from shmserve.ipc.model_spec import IDLE_UNLOAD, parse_idle_unload_s
from shmserve.supervisor.context import SupervisorContext
from shmserve.supervisor.models.autoscaler import private_bytes
from shmserve.supervisor.models.lifecycle import Lifecycle
from shmserve.supervisor.models.model_version import ModelVersion
from shmserve.supervisor.models.orders import ModelEntry, Order
from shmserve.supervisor.models.registry import ModelRegistry
from shmserve.supervisor.processes.children import RestartBackoff

logger = logging.getLogger(__name__)

_MAX_WAIT_S = 1e6  # a longer time limit counts as no limit
_CHECK_EVERY_S = 1.0
_REPORT_TIMEOUT_S = 1.0  # a scheduler that sends no report within this time counts as busy
# The longest wait of a load for unloads: requests of the unloading models may call the loading one.
_UNLOAD_TIMEOUT_S = 2.0
_MEASURE_EVERY_S = 10.0


class Resident(NamedTuple):
    """A loaded model that uses memory.

    Attributes:
        name: The model.
        byte_size: The bytes of its memory.
        last_used_ns: The time of its last request, on the monotonic clock.
        must_stay: Whether requests in flight, open orders or an operator's load forbid an unload.
        idle_limit_ns: The time without requests after which it is unloaded; 0 is no limit.
        ensembles: The ensembles with the model as a step, which must be unloaded before it.
    """

    name: str
    byte_size: int
    last_used_ns: int
    must_stay: bool = False
    idle_limit_ns: int = 0
    ensembles: frozenset[str] = frozenset()


def select_unloads(residents: Iterable[Resident], max_bytes: int, now_ns: int) -> list[str]:
    """Return the models to unload, ensembles before their steps.

    Models that are idle for longer than their limit are unloaded. The least recently used models
    follow until the total is at most `max_bytes` (0 is no limit).
    """
    remaining_models = sorted(residents, key=attrgetter("last_used_ns"))
    names: list[str] = []

    def may_unload(resident: Resident) -> bool:
        return not (resident.must_stay or resident.ensembles.difference(names))

    def is_due(resident: Resident) -> bool:
        if max_bytes and sum(r.byte_size for r in remaining_models) > max_bytes:
            return True
        return 0 < resident.idle_limit_ns <= now_ns - resident.last_used_ns

    # The search restarts after each model: a step may be unloaded once its ensembles are.
    while due_model := next((r for r in remaining_models if may_unload(r) and is_due(r)), None):
        remaining_models.remove(due_model)
        names.append(due_model.name)
    return names


class MemoryUse:
    """The memory use of versions, as it was measured last."""

    def __init__(self) -> None:
        self._sizes: dict[ModelVersion, int] = {}  # bytes
        self._measured_at: dict[ModelVersion, float] = {}
        # Bytes by model, kept after the model is unloaded.
        self._last_sizes: dict[str, int] = {}

    async def measure(self, models: Mapping[str, ModelEntry], measures_again: bool = False) -> None:
        """Measure the loaded versions whose size is not known; this takes milliseconds for each.

        Args:
            models: All models by name.
            measures_again: Whether sizes older than `_MEASURE_EVERY_S` are measured again.
        """
        now = time.monotonic()
        versions = [v for model in models.values() for v in model.versions if v.has_loaded]
        measured_at = {v: self._measured_at.get(v, -math.inf) for v in versions}
        due_versions = {v for v in versions if v.spec.name not in self._last_sizes}
        if measures_again:
            due_versions |= {v for v in versions if now - measured_at[v] >= _MEASURE_EVERY_S}
        if not due_versions:
            return
        pids_by_version = {version: version.pids() for version in versions}
        sharer_counts = Counter(pid for version in versions for pid in pids_by_version[version])
        measured_pids = {pid for version in due_versions for pid in pids_by_version[version]}
        sizes = await asyncio.to_thread(lambda: {pid: private_bytes(pid) for pid in measured_pids})
        self._measured_at = measured_at | dict.fromkeys(due_versions, now)
        self._sizes = {v: self._sizes[v] for v in versions if v in self._sizes}
        self._last_sizes = {n: size for n, size in self._last_sizes.items() if n in models}
        for version in due_versions:
            # The memory of a process that hosts several schedulers is divided among their models.
            host_size = sum(sizes[pid] // sharer_counts[pid] for pid in pids_by_version[version])
            size = host_size + version.instances.device_byte_size
            self._sizes[version] = self._last_sizes[version.spec.name] = size

    def byte_size(self, model: ModelEntry) -> int:
        """Return the bytes of a model's versions.

        The size of an unmeasured version is estimated by the model's last size, or else by the mean
        of all models.
        """
        sizes = self._last_sizes.values()
        estimated_size = self._last_sizes.get(model.name, sum(sizes) // (len(sizes) or 1))
        return sum(self._sizes.get(version, estimated_size) for version in model.versions)


class _Usage(NamedTuple):
    """The last report of a scheduler; `last_used_ns` is the time of the version's last use."""

    response_count: int
    executed_ns: int  # the time of the last execution
    last_used_ns: int
    is_busy: bool


@dataclass(eq=False)
class OnDemand:
    """The loader and unloader of the on-demand models of a registry.

    Args:
        _context: The shared parts of the supervisor.
        _registry: The models.
        _lifecycle: Receives the orders.
        _wait_for: Waits until an order is answered.
        observers: Called when the status of a model may have changed; `OnDemand` adds a callback.
    """

    _context: SupervisorContext
    _registry: ModelRegistry
    _lifecycle: Lifecycle
    _wait_for: Callable[[Order], Awaitable[None]]
    observers: InitVar[list[Callable[[], None]]]

    def __post_init__(self, observers: list[Callable[[], None]]) -> None:
        self._loads: dict[str, asyncio.Future[ShmserveError | None]] = {}
        # For each model whose load has failed: the backoff, and the time of the next retry.
        self._failures: dict[str, tuple[RestartBackoff, float]] = {}
        self._unload_lock = asyncio.Lock()
        self._memory = MemoryUse()
        self._usages: dict[ModelVersion, _Usage] = {}
        self._status_changed = asyncio.Event()
        observers.append(self._status_changed.set)

    # --- loading

    async def load(self, name: str, timeout_s: float) -> None:
        """Load a model that is loaded on demand; return at once for any other model.

        Concurrent callers wait for the same load.

        Args:
            name: The model.
            timeout_s: The seconds to wait; 0 is no limit.

        Raises:
            ShmserveError: The load failed.
            Unavailable: The model was not loaded in time.
        """
        model = self._registry.models.get(name)
        if model is None or not model.on_demand or (model.serving and not model.orders):
            return
        load = self._loads.get(name)
        if load is None:
            load = self._loads[name] = asyncio.get_running_loop().create_future()
            self._context.background(self._load(name, load))
        await wait_any(load, timeout_s=timeout_s if 0 < timeout_s < _MAX_WAIT_S else None)
        if not load.done():
            raise Unavailable(f"model '{name}' was not loaded within the request's timeout")
        error = load.result()
        if error is not None:
            raise error

    async def _load(self, name: str, load: asyncio.Future[ShmserveError | None]) -> None:
        backoff, retry_at = self._failures.pop(name, (RestartBackoff(), 0.0))
        # The outcome if this coroutine is cancelled.
        outcome: ShmserveError | None = Unavailable("the server ends")
        try:
            await asyncio.sleep(retry_at - time.monotonic())
            order = self._lifecycle.load_on_demand(name)
            if order is not None:
                await self._wait_for(order)
            outcome = None
        except Exception as error:
            models = self._registry.models
            self._failures = {n: entry for n, entry in self._failures.items() if n in models}
            self._failures[name] = backoff, time.monotonic() + backoff.pause_s(0)
            if isinstance(error, InvalidArgument):  # the model is invalid, not the request
                outcome = Unavailable(error.message)
            elif isinstance(error, ShmserveError):
                outcome = error
            else:
                outcome = Internal()
                text = "model '%s' could not be loaded on demand; its next request tries again"
                logger.exception(text, name)
        finally:
            del self._loads[name]
            load.set_result(outcome)

    # --- unloading

    async def run(self) -> None:
        """Unload models that are idle or exceed the memory limit, until the task is cancelled."""
        while True:
            try:
                if self._context.config.max_models_byte_size:
                    await self._memory.measure(self._registry.models, measures_again=True)
                await self.free_memory()
            except Exception:  # for example, no thread can be started
                text = "idle models could not be unloaded; the next attempt is in %g s"
                logger.exception(text, _CHECK_EVERY_S)
            await asyncio.sleep(_CHECK_EVERY_S)

    async def free_memory(self) -> None:
        """Unload the models that are due, and wait until their processes end, with a time limit."""
        async with self._unload_lock:
            names = await self._due_names()
            unloading_versions = {v for name in names for v in self._registry.models[name].versions}
            for name in names:
                logger.info("model '%s' is unloaded; its next request loads it", name)
                self._lifecycle.unload(name, on_demand=True)
            try:
                async with asyncio.timeout(_UNLOAD_TIMEOUT_S):
                    while not unloading_versions.isdisjoint(self._registry.live_versions):
                        self._status_changed.clear()
                        await self._status_changed.wait()
            except TimeoutError:
                logger.warning(
                    "unloading %s takes longer than %g s; the next model is loaded now",
                    ", ".join(map(repr, names)),
                    _UNLOAD_TIMEOUT_S,
                )

    async def _due_names(self) -> list[str]:
        max_bytes = self._context.config.max_models_byte_size
        if max_bytes:
            await self._memory.measure(self._registry.models)
        if not select_unloads(self._residents(), max_bytes, time.monotonic_ns()):
            return []  # newer reports can only show more recent use
        await self._update_usages()
        return select_unloads(self._residents(), max_bytes, time.monotonic_ns())

    def _residents(self) -> list[Resident]:
        models = list(self._registry.models.values())
        users: dict[str, set[str]] = {}
        for model in models:
            for step in model.possible_steps if model.serving or model.orders else ():
                users.setdefault(step, set()).add(model.name)
        active_models = [model for model in models if any(model.versions)]
        return [self._resident(m, frozenset(users.get(m.name, ()))) for m in active_models]

    def _resident(self, model: ModelEntry, users: frozenset[str]) -> Resident:
        usages = [self._usage(version) for version in model.serving.values()]
        used_ns = max((usage.last_used_ns for usage in usages), default=0)
        is_busy = any(usage.is_busy for usage in usages) or model.name in self._loads
        must_stay = is_busy or bool(model.orders or model.retiring) or not model.on_demand
        idle_limit_ns = int(1e9 * min(map(self._idle_limit_s, model.serving.values()), default=0.0))
        size = self._memory.byte_size(model)
        return Resident(model.name, size, used_ns, must_stay, idle_limit_ns, users)

    def _idle_limit_s(self, version: ModelVersion) -> float:
        limit_s = parse_idle_unload_s(version.config.parameters.get(IDLE_UNLOAD, ""))
        return self._context.config.idle_unload_s if limit_s is None else limit_s

    # --- reports of schedulers

    def _usage(self, version: ModelVersion) -> _Usage:
        return self._usages.get(version) or _Usage(0, 0, version.loaded_ns, False)

    async def _update_usages(self) -> None:
        """Request reports from the schedulers of all serving models that are on demand."""
        models = (m for m in self._registry.models.values() if m.on_demand and not m.orders)
        versions = [version for model in models for version in model.serving.values()]
        reports = [version.scheduler.snapshot() for version in versions]
        if reports:
            await asyncio.wait(reports, timeout=_REPORT_TIMEOUT_S)
        self._usages = {
            version: _new_usage(self._usage(version), report.result() if report.done() else None)
            for version, report in zip(versions, reports, strict=True)
        }


def _new_usage(usage: _Usage, report: Mapping[str, Any] | None) -> _Usage:
    if report is None:
        return usage._replace(is_busy=True)
    response_count, executed_ns = report["success"] + report["fail"], report["last_ns"]
    used_ns = usage.last_used_ns
    if executed_ns > usage.executed_ns:
        used_ns = max(used_ns, executed_ns)
    elif response_count != usage.response_count:  # a cached response or an error is a use, too
        used_ns = time.monotonic_ns()
    is_busy = bool(report["live"] or report["open_sequences"])
    return _Usage(response_count, executed_ns, used_ns, is_busy)
