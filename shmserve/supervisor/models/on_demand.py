"""Models on demand (--load-on-demand): loaded when they are asked for, and unloaded when they were
idle for too long, or others need their memory.

When a model was used, and whether it has requests in flight, its schedulers say; residency.py
decides, and the lifecycle loads and unloads as for anybody else.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from shmserve.common.tasks import either
from shmserve.errors import ShmserveError, Unavailable
from shmserve.ipc.model_settings import IDLE_UNLOAD, idle_unload_s
from shmserve.supervisor.context import SupervisorContext
from shmserve.supervisor.models.lifecycle import Lifecycle
from shmserve.supervisor.models.model_version import ModelVersion
from shmserve.supervisor.models.orders import ModelEntry, Order
from shmserve.supervisor.models.registry import ModelRegistry
from shmserve.supervisor.models.residency import MemoryUse, Resident, leaving
from shmserve.supervisor.processes.table import RestartBackoff

logger = logging.getLogger(__name__)

_FOREVER_S = 1e6
_LOOK_EVERY_S = 1.0
_REPORT_WITHIN_S = 1.0  # a scheduler that does not say what it has has something
# A model that leaves finishes what reached it too late, which may wait for the one that comes.
_GONE_WITHIN_S = 2.0


class _Use(NamedTuple):
    """What a version's scheduler said last: how many requests it has answered, when it executed the
    last, and whether it has some; and when the version was used, by that."""

    answered: int
    executed_ns: int
    used_ns: int
    busy: bool


class OnDemand:
    """Those of a registry's models."""

    def __init__(
        self,
        context: SupervisorContext,
        registry: ModelRegistry,
        lifecycle: Lifecycle,
        wait_for: Callable[[Order], Awaitable[None]],
    ) -> None:
        self._context = context
        self._registry = registry
        self._lifecycle = lifecycle
        self._wait_for = wait_for
        self._loads: dict[str, asyncio.Future[ShmserveError | None]] = {}
        self._failures: dict[str, tuple[RestartBackoff, float]] = {}  # and when to try again
        self._leaving = asyncio.Lock()
        self._memory = MemoryUse()
        self._uses: dict[ModelVersion, _Use] = {}
        self._news = asyncio.Event()

    def changed(self) -> None:
        """A model's state has changed."""
        self._news.set()

    # --- loading

    async def load(self, name: str, patience_s: float) -> None:
        """Have a model loaded that is on demand; returns once it serves, or is no such model.

        Raises the ShmserveError that the load fails with, Unavailable after `patience_s` seconds,
        0: any time. Whoever comes while it loads waits for the same load.
        """
        model = self._registry.models.get(name)
        if model is None or not model.on_demand or (model.serving and not model.orders):
            return
        over = self._loads.get(name)
        if over is None:
            over = self._loads[name] = asyncio.get_running_loop().create_future()
            self._context.background(self._load(name, over))
        await either(over, timeout_s=patience_s if 0 < patience_s < _FOREVER_S else None)
        if not over.done():
            raise Unavailable(f"model '{name}' was not loaded within the time of the request")
        error = over.result()
        if error is not None:
            raise error

    async def _load(self, name: str, over: asyncio.Future[ShmserveError | None]) -> None:
        backoff, again_at = self._failures.pop(name, (RestartBackoff(), 0.0))
        outcome: ShmserveError | None = Unavailable("the server ends")
        try:
            await asyncio.sleep(again_at - time.monotonic())
            order = self._lifecycle.load_on_demand(name)
            if order is not None:
                await self._wait_for(order)
            outcome = None
        except ShmserveError as error:
            self._failures[name] = backoff, time.monotonic() + backoff.pause_s(0)
            outcome = error
        finally:
            del self._loads[name]
            over.set_result(outcome)

    # --- unloading

    async def run(self) -> None:
        """Have models leave when they are to, until this is cancelled."""
        while True:
            if self._context.config.max_loaded_byte_size:
                await self._memory.measure(self._registry.live, again=True)
            await self.free_memory()
            await asyncio.sleep(_LOOK_EVERY_S)

    async def free_memory(self) -> None:
        """Have models leave that are to, which leaves room for what is coming; returns when they
        have ended."""
        async with self._leaving:
            names = await self._to_leave()
            gone = {version for name in names for version in self._registry.models[name].versions}
            for name in names:
                logger.info("model '%s' is unloaded until it is asked for", name)
                self._lifecycle.unload(name, on_demand=True)
            try:
                async with asyncio.timeout(_GONE_WITHIN_S):
                    while not gone.isdisjoint(self._registry.live):
                        self._news.clear()
                        await self._news.wait()
            except TimeoutError:
                logger.warning("unloading takes long: what is loaded in its place does not wait")

    async def _to_leave(self) -> list[str]:
        bound = self._context.config.max_loaded_byte_size
        if bound:
            await self._memory.measure(self._registry.live)
        if not leaving(self._residents(), bound, time.monotonic_ns()):
            return []  # by what was known before: the schedulers are not asked for nothing
        await self._ask()
        return leaving(self._residents(), bound, time.monotonic_ns())

    def _residents(self) -> list[Resident]:
        models = list(self._registry.models.values())
        users: dict[str, set[str]] = {}
        for model in models:
            for step in model.possible_steps if model.serving or model.orders else ():
                users.setdefault(step, set()).add(model.name)
        return [
            self._resident(model, frozenset(users.get(model.name, ())))
            for model in models
            if any(model.versions)
        ]

    def _resident(self, model: ModelEntry, users: frozenset[str]) -> Resident:
        uses = [self._use(version) for version in model.serving.values()]
        held = model.orders or model.retiring or model.name in self._loads or not model.on_demand
        idle_s = min(map(self._idle_s, model.serving.values()), default=0.0)
        return Resident(
            model.name,
            self._memory.byte_size(model),
            max((use.used_ns for use in uses), default=0),
            bool(held) or any(use.busy for use in uses),
            int(idle_s * 1e9),
            users,
        )

    def _idle_s(self, version: ModelVersion) -> float:
        given = idle_unload_s(version.config.parameters.get(IDLE_UNLOAD, ""))
        return self._context.config.idle_unload_s if given is None else given

    # --- what schedulers say

    def _use(self, version: ModelVersion) -> _Use:
        return self._uses.get(version) or _Use(0, 0, version.loaded_ns, False)

    async def _ask(self) -> None:
        """Ask the schedulers of all models on demand that serve."""
        versions = [
            version
            for model in self._registry.models.values()
            if model.on_demand and not model.orders
            for version in model.serving.values()
        ]
        said = [version.scheduler.snapshot() for version in versions]
        if said:
            await asyncio.wait(said, timeout=_REPORT_WITHIN_S)
        self._uses = {
            version: self._updated(self._use(version), future.result() if future.done() else None)
            for version, future in zip(versions, said, strict=True)
        }

    @staticmethod
    def _updated(use: _Use, said: Mapping[str, Any] | None) -> _Use:
        if said is None:
            return use._replace(busy=True)
        answered, executed_ns = said["success"] + said["fail"], said["last_ns"]
        used_ns = use.used_ns
        if executed_ns > use.executed_ns:
            used_ns = max(used_ns, executed_ns)
        elif answered != use.answered:  # from a cache, or with an error: lately
            used_ns = time.monotonic_ns()
        return _Use(answered, executed_ns, used_ns, bool(said["live"] or said["open_sequences"]))
