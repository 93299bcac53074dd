"""One loaded model version: its scheduler and its instances (of an ensemble: the models of its
steps); started, watched, restarted, drained, stopped.

start:           worker 0 completes the configuration -> scheduler -> all workers load -> READY
worker dies:     its scheduler is told at once, it starts again with backoff (instance_processes.py)
reload:          where only its instances differ, some are added and others retire
scheduler dies:  a new one on a new endpoint; workers attach to it, gateways submit again what they
                 had (fail_over.py)
stop:            scheduler drains (workers that die meanwhile still start again) -> workers finalize
                 and exit (all their memory comes back) -> scheduler ends
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from shmserve.errors import ShmserveError, Unavailable
from shmserve.ipc.messages import supervision as m
from shmserve.ipc.messages.memory import MemoryDropped
from shmserve.ipc.model_spec import ModelSpec
from shmserve.supervisor.context import SupervisorContext
from shmserve.supervisor.models.version.fail_over import FailOver
from shmserve.supervisor.models.version.instance_processes import Instances, first_of
from shmserve.supervisor.models.version.instances import InstanceChange
from shmserve.supervisor.models.version.scheduler_process import VersionScheduler
from shmserve.supervisor.models.version.spec import Lifetime, VersionSpec
from shmserve.supervisor.models.version.step_models import EnsembleInstances, ServingModels
from shmserve.supervisor.processes.scheduler_hosts import Group

logger = logging.getLogger(__name__)

_KILL_PATIENCE_S = 1.0  # for a scheduler that others share a process with


def differs_in_instances_only(old: VersionSpec, new: VersionSpec) -> bool:
    """Whether nothing differs but the instances: neither what else is configured, nor a file."""
    same_files = (old.model_dir, old.files) == (new.model_dir, new.files)
    same_rest = old.config.immutable_config == new.config.immutable_config
    return same_files and same_rest and not new.steps


class InstanceUpdate:
    """A change from the instances that a version has to those of `config`, the final configuration
    of `spec`; `differs`: which is another one than it has."""

    def __init__(self, instances: Instances, spec: VersionSpec, config: ModelSpec) -> None:
        self.spec = spec
        self.differs = config != instances.config
        self._instances = instances
        self._config = config
        self._change: InstanceChange | None = None

    async def add(self) -> None:
        """Add what is new. Raises ShmserveError when one fails to load; none is added then."""
        self._change = self._instances.change_to(self._config)
        await self._instances.add(self._change, self._config)

    def commit(self) -> None:
        """Have what is not asked for any more retire."""
        assert self._change is not None
        self._instances.settle(self._change, self._config)

    def revert(self) -> None:
        """Have what was added retire, if anything was."""
        if self._change is not None:
            self._instances.retire(self._change.added)

    def cancel(self) -> None:
        """Have `add` fail, if it is still loading: nobody waits for what is added."""
        if self._change is not None:
            self._instances.kill_loading(self._change.added)


class ModelVersion:
    """A model version's processes. `on_change` is called when readiness, endpoint or failure
    changes; `models` are those that serve, for an ensemble's steps. Its
    scheduler is hosted with those of its `group`.

    `loaded`: it was ready once.
    """

    def __init__(
        self,
        context: SupervisorContext,
        spec: VersionSpec,
        on_change: Callable[[ModelVersion], None],
        models: ServingModels,
        group: Group,
    ) -> None:
        self.spec = spec
        self.loaded = False
        self.load_seconds = 0.0
        self._context = context
        self._on_change = on_change
        self._news = asyncio.Event()
        self._lifetime = lifetime = Lifetime()
        self.scheduler = VersionScheduler(context, spec, group, lifetime, self._scheduler_said)
        parts = (context, spec, self.scheduler, lifetime, self.changed)
        self.instances = (
            EnsembleInstances(*parts, models=models) if spec.steps else Instances(*parts)
        )
        self._fail_over = FailOver(context, self.scheduler, self.instances, lifetime, self.changed)

    @property
    def config(self) -> ModelSpec:
        """The configuration; the final one once the model has completed it."""
        return self.instances.config

    @property
    def endpoint(self) -> str:
        """Where requests for this version are submitted."""
        return self.scheduler.endpoint

    @property
    def problem(self) -> str:
        """Why it will take no request any more, or empty."""
        return self.instances.problem

    @property
    def ready(self) -> bool:
        """Whether a request submitted now would find an instance."""
        return self.loaded and self.scheduler.serves and self.instances.any_ready

    @property
    def hopeless(self) -> str:
        """Why nobody should wait until it is ready, or empty."""
        if self._lifetime.retiring or self._lifetime.stopping:
            return self.problem or "the model is unloaded"
        return self.problem or ("no scheduler could be started" if self._fail_over.hopeless else "")

    async def until_ready(self) -> None:
        """Wait until it is ready. Raises Unavailable when it will not be."""
        while not self.ready:
            if self.hopeless:
                raise Unavailable(self.hopeless)
            self._news.clear()
            await self._news.wait()

    def uses(self, name: str) -> bool:
        """Whether it is an ensemble of which the model of this name is a step."""
        return any(step.name == name for step in self.spec.steps)

    def changed(self) -> None:
        """Note that it, or a model that is a step of it, may be ready now, or not any more."""
        self._news.set()
        self._on_change(self)

    async def start(self) -> None:
        """Load the model on every instance; returns when it is ready, whoever died meanwhile.

        Raises ShmserveError with a text for the operator when it cannot be; nothing of it is left
        then.
        """
        began = time.monotonic()
        try:
            await self.instances.complete_config()
            await self._fail_over.start(first=True)
            self._fail_over.keep()
            await self.instances.load()
            self.loaded = True
            await self.until_ready()
        except (ShmserveError, ExceptionGroup) as error:
            # Not `except*`: what is raised there becomes a group itself, whose text nobody knows.
            await self.kill()
            raise first_of(error) from None
        self.load_seconds = time.monotonic() - began

    def update_to(self, spec: VersionSpec) -> InstanceUpdate | None:
        """The update by which this version, which serves, becomes `spec`; None where it differs in
        more than its instances, or is broken."""
        if self.spec.steps or self.instances.failure:
            return None
        # A scheduler is told when it starts whether it has to ask before its instances execute.
        limited = self.scheduler.is_limited(self.config)
        if limited != self.scheduler.is_limited(spec.config):
            return None
        if not differs_in_instances_only(self.spec, spec):
            return None
        try:
            config = spec.complete(self.instances.completed)
        except ShmserveError:
            return None  # loading it says what is wrong
        if config.immutable_config != self.config.immutable_config:
            return None
        return InstanceUpdate(self.instances, spec, config)

    def commit(self, update: InstanceUpdate) -> None:
        """Become what an update, whose instances have been added, leads to."""
        update.commit()
        self.spec = update.spec

    async def regroup(self, group: Group, publish: Callable[[], Awaitable[None]]) -> None:
        """Be scheduled in this group's process, if it is not already. What has sequences, streams
        or tickets, which cannot change over, stays where it is until it is loaded again."""
        config = self.config
        stays = (
            config.sequence_batching is not None
            or config.decoupled
            or self.scheduler.is_limited(config)
        )
        if self.ready and not stays and self.scheduler.misplaced(group):
            logger.info("model '%s' moves to the process of %s", self.spec.name, group.title)
            await self._fail_over.move(group, publish)

    def hand_counts_to(self, successor: ModelVersion | None) -> None:
        """Hand over what this version has counted, and will while it finishes what it has, to
        `successor`."""
        self.scheduler.counts.be_base_of(None if successor is None else successor.scheduler.counts)

    # --- events

    def _scheduler_said(self, message: Any) -> None:
        match message:
            case m.KillInstance(process, reason):
                self.instances.kill_overrunning(process, reason)
            case m.InstanceRetired(process):
                self.instances.retired(process)
            case MemoryDropped():  # which an ensemble has kept for workers
                self._context.broadcast(message, "worker")
            case _:
                logger.warning("dropped a %s from a scheduler", type(message).__name__)

    # --- end

    async def finish_sequences(self) -> None:
        """Begin no sequence any more; returns when those that are open have ended."""
        if self.loaded and self.scheduler.serves and self.config.sequence_batching:
            await self.scheduler.drain(sequences=True)

    async def stop(self) -> None:
        """Finish what is in flight, then end every process."""
        self._lifetime.retiring = True
        self._news.set()
        if self.loaded and self.scheduler.serves:
            await self.scheduler.drain()
        self._lifetime.stopping = True
        if self.loaded and not self.scheduler.serves:
            await self.kill()  # what they execute, nobody waits for: it will run elsewhere
        await self.instances.stop()
        await self.scheduler.stop()

    async def kill(self) -> None:
        """End every process now."""
        self._lifetime.retiring = self._lifetime.stopping = True
        self._news.set()
        children = self.instances.children()
        for child in children:
            child.kill()
        await asyncio.gather(
            self.scheduler.stop(_KILL_PATIENCE_S), *(child.gone() for child in children)
        )
