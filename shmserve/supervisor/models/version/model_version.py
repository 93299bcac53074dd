"""One loaded model version: its scheduler and its instances (of an ensemble: the models of its
steps); started, watched, restarted, drained, stopped.

start:           worker 0 completes the configuration -> scheduler -> all workers load -> READY
worker dies:     its scheduler is told at once, it starts again with backoff (instance_processes.py)
reload:          where only its instances differ, some are added and others retire
scheduler dies:  a new one on a new endpoint; workers attach to it, gateways submit again what they
                 had
stop:            scheduler drains (workers that die meanwhile still start again) -> workers finalize
                 and exit (all their memory comes back) -> scheduler ends
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from shmserve.common.tasks import either
from shmserve.errors import ShmserveError, Unavailable
from shmserve.ipc.messages import supervision as m
from shmserve.ipc.messages.publications import MemoryDropped, SchedulerLost
from shmserve.ipc.model_spec import ModelSpec
from shmserve.supervisor.context import LOCAL_CLIENT, SupervisorContext
from shmserve.supervisor.models.version.instance_processes import Instances, first_of
from shmserve.supervisor.models.version.instances import InstanceUpdate
from shmserve.supervisor.models.version.scheduler_process import VersionScheduler
from shmserve.supervisor.models.version.spec import Lifetime, VersionSpec
from shmserve.supervisor.models.version.step_models import EnsembleInstances, ServingModels
from shmserve.supervisor.processes.scheduler_hosts import Group
from shmserve.supervisor.processes.table import RestartBackoff

logger = logging.getLogger(__name__)

# Failed starts of a scheduler in a row, while somebody waits for the first that serves; and before
# requests are refused that wait for one: some seconds.
_MOST_FAILED_STARTS = 5
_MOST_WAITED_FOR = 10
# Whoever submits requests.
_CLIENTS = ("gateway", "ensemble", "caller", LOCAL_CLIENT)
_KILL_PATIENCE_S = 1.0  # for a scheduler that others share a process with


def differs_in_instances_only(old: VersionSpec, new: VersionSpec) -> bool:
    """Whether nothing differs but the instances: neither what else is configured, nor a file."""
    same_files = (old.model_dir, old.files) == (new.model_dir, new.files)
    same_rest = old.config.immutable_config == new.config.immutable_config
    return same_files and same_rest and not new.steps


class ModelVersion:
    """A model version's processes. `on_change` is called when readiness, endpoint or failure
    changes; `models` are those that serve, for an ensemble's steps. Its scheduler is hosted with
    those of its `group`.

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
        self.loaded_ns = 0  # when, by the monotonic clock
        self._context = context
        self._on_change = on_change
        self._news = asyncio.Event()
        self._lifetime = lifetime = Lifetime()
        self.scheduler = VersionScheduler(context, spec, group, lifetime, self._scheduler_said)
        parts = (context, spec, self.scheduler, lifetime, self.changed)
        self.instances = (
            EnsembleInstances(*parts, models=models) if spec.steps else Instances(*parts)
        )
        self._backoff = RestartBackoff()
        self._failed_starts = 0
        self._keeping: asyncio.Task[None] | None = None

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
        failed = self._failed_starts >= _MOST_FAILED_STARTS
        return self.problem or ("no scheduler could be started" if failed else "")

    async def until_ready(self) -> None:
        """Wait until it is ready. Raises Unavailable when it will not be."""
        while not self.ready:
            if self.hopeless:
                raise Unavailable(self.hopeless)
            self._news.clear()
            await self._news.wait()

    def pids(self) -> list[int]:
        """The processes that run for it, of which the scheduler's may run for others, too."""
        scheduler = [self.scheduler.serving.child.pid] if self.scheduler.serves else []
        return [*self.instances.pids(), *scheduler]

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
            await self._start_scheduler(first=True)
            self._keeping = self._context.background(self._keep())
            await self.instances.load()
            self.loaded, self.loaded_ns = True, time.monotonic_ns()
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
        return self.instances.update_to(spec, config)

    def commit(self, update: InstanceUpdate) -> None:
        """Become what an update, whose instances have been added, leads to."""
        self.instances.settle(update)
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
            await self._move(group, publish)

    async def _move(self, group: Group, publish: Callable[[], Awaitable[None]]) -> None:
        """Have the version scheduled in the process of another group, without a lost request: a new
        scheduler takes what comes, the old one finishes what it has, and the instances change over.

        `publish()` returns once every client knows where requests go now. Where all its workers, or
        one of the schedulers, die meanwhile, what the old had is submitted again: nothing runs it
        any more. Raises Unavailable, and changes nothing, when the new one does not come up.
        """
        scheduler, instances = self.scheduler, self.instances
        old, lost = scheduler.serving, scheduler.endpoint
        workers = [child.exited for child in instances.children() if child.alive]
        unless: list[asyncio.Future[Any]] = [asyncio.gather(*workers)] if workers else []
        if self._keeping is not None:
            self._keeping.cancel()
        try:
            await scheduler.succeed(group, instances.config)
            unless.append(scheduler.serving.child.exited)
            await publish()
            await scheduler.drain_one(old, unless=unless)
            instances.introduce([])
            self._say_lost(lost, scheduler.endpoint, *_CLIENTS)
            await publish()
            # Outputs that were read meanwhile are released by way of the old one.
            await scheduler.drain_one(old, unless=unless)
            instances.attach()
            self.changed()
            await self._context.hosts.close(old)
        finally:
            self._keeping = self._context.background(self._keep())

    def hand_counts_to(self, successor: ModelVersion | None) -> None:
        """Hand over what this version has counted, and will while it finishes what it has, to
        `successor`."""
        self.scheduler.counts.be_base_of(None if successor is None else successor.scheduler.counts)

    # --- schedulers

    async def _start_scheduler(self, first: bool = False) -> None:
        """Start a scheduler and tell it of every instance; raises ShmserveError when it does not
        come up."""
        workers = self.instances.pids()
        await self.scheduler.start(self.config, workers, first)
        self._failed_starts = 0
        self.instances.introduce(workers)

    async def _keep(self) -> None:
        """Replace each scheduler that dies, from now on."""
        while not self._lifetime.retiring:
            dead, born = self.scheduler.serving, time.monotonic()
            child = dead.child
            await either(dead.closed, child.exited)
            if not self._lifetime.retiring:
                reason = child.exited.result() if child.exited.done() else "closed"
                logger.error("%s ended (%s); a new one takes over", child.title, reason)
                self.changed()
                await self._replace(self._backoff.pause_s(time.monotonic() - born))

    async def _replace(self, pause: float) -> None:
        lost = self.scheduler.endpoint
        while not self._lifetime.retiring:
            if pause:
                await asyncio.sleep(pause)
            try:
                await self._start_scheduler()
            except ShmserveError as error:
                logger.error("%s", error.message)
                pause = self._backoff.pause_s(0)
                self._failed_starts += 1
                self.changed()
                if self._failed_starts >= _MOST_WAITED_FOR:
                    # What was submitted fails; what comes later goes to the successor, if any.
                    self._say_lost(lost, "", *_CLIENTS)
                continue
            self.instances.attach()
            # Whoever submits keeps what it submitted, and submits it again: while it knows the old.
            self._say_lost(lost, self.scheduler.endpoint, *_CLIENTS)
            self.changed()
            return
        # Retired meanwhile: models that called it look for who serves now.
        self._say_lost(lost, "", "caller", LOCAL_CLIENT)

    def _say_lost(self, endpoint: str, successor: str, *roles: str) -> None:
        # What the successor was told leaves before: programs on this host have other sockets, and
        # submit again at once.
        self._context.control.flush()
        self._context.broadcast(SchedulerLost(endpoint, successor), *roles)

    # --- events

    def _scheduler_said(self, message: Any) -> None:
        match message:
            case m.KillInstance(process, reason):
                self.instances.kill_overrunning(process, reason)
            case m.InstanceServed(process):
                self.instances.served(process)
                self._backoff.worked()
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
