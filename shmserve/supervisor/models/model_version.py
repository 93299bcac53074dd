"""A loaded model version: its scheduler and its instances, or for an ensemble its steps' models.

start:           worker 0 completes the configuration -> scheduler -> all workers load -> READY
worker dies:     its scheduler is notified at once; the instance restarts with backoff
reload:          if only the instances differ, instances are added and retired in place
scheduler dies:  a successor starts at a new endpoint; workers attach to it, gateways resubmit
stop:            the scheduler drains (workers that die are still restarted) -> workers finalize and
                 exit (all their memory is released) -> the scheduler ends
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import InitVar, dataclass, field
from typing import Any

from shmserve.common.tasks import wait_any
from shmserve.errors import ShmserveError, Unavailable
from shmserve.ipc.messages import supervision as m
from shmserve.ipc.messages.publications import MemoryDropped, ModelPublished, SchedulerLost
from shmserve.ipc.model_spec import ModelSpec, TensorSpec
from shmserve.supervisor.context import LOCAL_CLIENT, SupervisorContext
from shmserve.supervisor.models.instance import InstanceUpdate
from shmserve.supervisor.models.instances import ConfigFinaliser, Instances, first_error
from shmserve.supervisor.models.load_planner import VersionSpec
from shmserve.supervisor.models.repository import incomplete_files
from shmserve.supervisor.models.scheduler_process import (
    Group,
    Lifetime,
    SchedulerHosts,
    VersionScheduler,
)
from shmserve.supervisor.processes.children import RestartBackoff

logger = logging.getLogger(__name__)

_MAX_FAILED_STARTS = 5  # consecutive failed starts of a scheduler after which a load fails
# Consecutive failed starts of a scheduler, over some seconds, after which waiting requests fail.
_MAX_AWAITED_STARTS = 10
_CLIENT_ROLES = ("gateway", "ensemble", "caller", LOCAL_CLIENT)  # the roles that submit requests
_MAX_INCOMPLETE = 3  # incomplete files that the error of a load names
_KILL_PATIENCE_S = 1.0  # seconds until a stopping scheduler that shares its process is killed


def differ_in_instances_only(old_spec: VersionSpec, new: VersionSpec) -> bool:
    """Check whether files and configuration are equal except for the instances."""
    same_files = (old_spec.model_dir, old_spec.fingerprint) == (new.model_dir, new.fingerprint)
    same_config = old_spec.config.immutable_config == new.config.immutable_config
    return same_files and same_config and not new.steps


@dataclass(eq=False)
class ModelVersion:
    """The processes of a model version.

    Attributes:
        _context: The shared parts of the supervisor.
        spec: The version to load.
        group: The models whose schedulers share a process with this version's.
        hosts: The processes that host schedulers.
        find: Returns the published version of a model, by name and version.
        _on_change: Called when readiness, endpoint or failure changes.
        _finalise_config: Returns the final configuration when the first worker has completed it.
        has_loaded: Whether the version has become ready; later failures do not reset it.
        loaded_ns: When the version became ready, on the monotonic clock.
    """

    _context: SupervisorContext
    spec: VersionSpec
    group: InitVar[Group]
    hosts: InitVar[SchedulerHosts]
    find: InitVar[Callable[[str, str], ModelVersion | None]]
    _on_change: Callable[[ModelVersion], None]
    _finalise_config: ConfigFinaliser
    has_loaded: bool = field(init=False, default=False)
    load_seconds: float = field(init=False, default=0.0)
    loaded_ns: int = field(init=False, default=0)

    def __post_init__(
        self, group: Group, hosts: SchedulerHosts, find: Callable[[str, str], ModelVersion | None]
    ) -> None:
        context, spec, finalise_config = self._context, self.spec, self._finalise_config
        self._state_changed = asyncio.Event()
        self._lifetime = lifetime = Lifetime()
        self.scheduler = VersionScheduler(context, hosts, spec, group, lifetime, self._on_message)
        args = (context, spec, self.scheduler, lifetime, self.report_change, finalise_config)
        self.instances = EnsembleInstances(*args, find=find) if spec.steps else Instances(*args)
        self._backoff = RestartBackoff()
        self._failed_starts = 0
        self._supervision_task: asyncio.Task[None] | None = None

    @property
    def config(self) -> ModelSpec:
        """Return the configuration; final once the model has completed it."""
        return self.instances.config

    @property
    def endpoint(self) -> str:
        """Return the endpoint to which requests for this version are submitted."""
        return self.scheduler.endpoint

    @property
    def problem(self) -> str:
        """Return the reason why this version no longer accepts requests; empty while it does."""
        return self.instances.problem

    @property
    def ready(self) -> bool:
        """Return whether an instance would execute a request that is submitted now."""
        return self.has_loaded and self.scheduler.serves and self.instances.can_serve

    @property
    def drained(self) -> bool:
        """Return whether the version has finished its requests, so that its processes may end."""
        return self._lifetime.is_stopping

    @property
    def fatal_problem(self) -> str:
        """Return the reason why this version will not become ready, or empty."""
        if self._lifetime.is_retiring or self._lifetime.is_stopping:
            return self.problem or "the model was unloaded while it was loading"
        has_failed = self._failed_starts >= _MAX_FAILED_STARTS
        return self.problem or ("no scheduler could be started" if has_failed else "")

    async def until_ready(self) -> None:
        """Wait until the version is ready; raise Unavailable if it cannot become ready."""
        while not self.ready:
            if self.fatal_problem:
                raise Unavailable(self.fatal_problem)
            self._state_changed.clear()
            await self._state_changed.wait()

    def pids(self) -> list[int]:
        """Return the running processes; the scheduler's process may also host other schedulers."""
        scheduler_pids = [self.scheduler.current.child.pid] if self.scheduler.serves else []
        return [*self.instances.pids(), *scheduler_pids]

    def uses(self, name: str) -> bool:
        """Check whether this is an ensemble with a step that runs the named model."""
        ensemble = self.spec.config.ensemble_scheduling
        return ensemble is not None and any(step.model_name == name for step in ensemble.step)

    def publication(self, is_latest: bool) -> ModelPublished:
        """Return the message that publishes this version, the newest one if `is_latest`."""
        checks_ready, labels = self.instances.checks_ready, self.instances.labels
        return ModelPublished(
            name=self.spec.name,
            version=self.spec.version,
            config=self.config,
            metadata={**describe(self.config), "labels": labels, "checks_ready": checks_ready},
            endpoint=self.endpoint,
            ready=self.ready,
            latest=is_latest,
            load_seconds=self.load_seconds,
            ack_number=0,
        )

    def report_change(self) -> None:
        """Report that the readiness of this version or of a step's model may have changed."""
        self._state_changed.set()
        self._on_change(self)

    async def start(self) -> None:
        """Load the model on every instance and wait until the version is ready.

        Raises:
            ShmserveError: The load failed and every process has ended; the text is for operators.
        """
        started_at = time.monotonic()
        try:
            await self.instances.complete_config()
            await self._start_scheduler(is_first=True)
            self._supervision_task = self._context.background(self._supervise())
            await self.instances.load()
            self.has_loaded, self.loaded_ns = True, time.monotonic_ns()
            await self.until_ready()
        except (ShmserveError, ExceptionGroup) as error:
            # `except*` would wrap the raised error in a group, which has no text for operators.
            await self.kill()
            first_failure = first_error(error)
            file_problems = incomplete_files(self.spec.model_dir, [self.spec.version])
            if file_problems and isinstance(first_failure, ShmserveError):
                first_failure.message += f" ({'; '.join(file_problems[:_MAX_INCOMPLETE])})"
            raise first_failure from None
        self.load_seconds = time.monotonic() - started_at

    def update_to(self, spec: VersionSpec) -> InstanceUpdate | None:
        """Return the update of the instances that leads to `spec`.

        The result is None if other settings differ, too, or if this version has failed.
        """
        if self.spec.steps or self.instances.failure:
            return None
        # Whether executions need tickets of the rate limiter is fixed when a scheduler starts.
        was_limited = self.scheduler.is_limited(self.config)
        if was_limited != self.scheduler.is_limited(spec.config):
            return None
        if not differ_in_instances_only(self.spec, spec):
            return None
        try:
            config = self._finalise_config(spec, self.instances.reported_config)
        except ShmserveError:
            return None  # the load of the new version reports the error
        if config.immutable_config != self.config.immutable_config:
            return None
        return self.instances.update_to(spec, config)

    def commit(self, update: InstanceUpdate) -> None:
        """Complete an update whose instances have been added."""
        self.instances.commit(update)
        self.spec = update.spec

    async def regroup(self, group: Group, publish: Callable[[], Awaitable[None]]) -> None:
        """Move the scheduler to a group's process, unless it runs there already.

        Versions with sequences, streams or tickets stay where they are until they are reloaded:
        their schedulers have state that cannot be moved.
        """
        config = self.config
        is_stateful = config.sequence_batching is not None or config.decoupled
        is_immovable = is_stateful or self.scheduler.is_limited(config)
        if self.ready and not is_immovable and self.scheduler.must_move(group):
            logger.info("model '%s' is moved to the process of %s", self.spec.name, group.title)
            await self._move(group, publish)

    async def _move(self, group: Group, publish: Callable[[], Awaitable[None]]) -> None:
        """Move the scheduler to another group's process without losing a request.

        A new scheduler accepts the requests, the old scheduler drains, and the instances attach to
        the new one. If a scheduler dies meanwhile, or all workers of the old scheduler die, clients
        resubmit the requests of the old scheduler.

        Args:
            group: The group to move to.
            publish: Returns once every client submits to the current endpoint.

        Raises:
            Unavailable: The new scheduler did not start; nothing is changed.
        """
        scheduler, instances = self.scheduler, self.instances
        old_scheduler, old_endpoint = scheduler.current, scheduler.endpoint
        old_counters = scheduler.counters
        exit_futures = instances.serving_exits()
        instances.defers_attach = True
        losses: list[asyncio.Future[Any]] = [asyncio.gather(*exit_futures)] if exit_futures else []
        if self._supervision_task is not None:
            self._supervision_task.cancel()
        try:
            await scheduler.start_successor(group, instances.config)
            losses.append(scheduler.current.child.exit_future)
            await publish()
            await scheduler.drain(old_scheduler, losses=losses)
            instances.notify_new_scheduler([])
            self._broadcast_lost(old_endpoint, scheduler.endpoint, *_CLIENT_ROLES)
            await publish()
            # The second drain releases outputs that clients have read through the old scheduler.
            await scheduler.drain(old_scheduler, losses=losses)
            scheduler.counters.continue_version(old_counters)
            instances.attach()
            self.report_change()
            await scheduler.hosts.close(old_scheduler)
        finally:
            instances.defers_attach = False
            self._supervision_task = self._context.background(self._supervise())

    def pass_counters_to(self, successor: ModelVersion | None) -> None:
        """Add this version's counters, and their changes until its end, to a successor's counters.

        With None, this version's counters are no longer added to any other counters.
        """
        self.scheduler.counters.pass_to(None if successor is None else successor.scheduler.counters)

    # --- replacement of schedulers

    async def _start_scheduler(self, is_first: bool = False) -> None:
        worker_pids = self.instances.pids()
        await self.scheduler.start(self.config, worker_pids, is_first)
        self._failed_starts = 0
        self.instances.notify_new_scheduler(worker_pids)

    async def _supervise(self) -> None:
        """Replace each scheduler that exits, until the version retires."""
        while not self._lifetime.is_retiring:
            scheduler, started_at = self.scheduler.current, time.monotonic()
            child = scheduler.child
            await wait_any(scheduler.close_future, child.exit_future)
            if not self._lifetime.is_retiring:
                reason = "closed" if child.alive else child.reason
                logger.error("process %s ended (%s); a replacement takes over", child.title, reason)
                self.report_change()
                await self._replace_scheduler(self._backoff.pause_s(time.monotonic() - started_at))

    async def _replace_scheduler(self, pause_s: float) -> None:
        lost_endpoint = self.scheduler.endpoint
        while True:
            await asyncio.sleep(pause_s)
            if self._lifetime.is_retiring:
                break
            try:
                await self._start_scheduler()
            except ShmserveError as error:
                pause_s = self._backoff.pause_s(0)
                text = "no scheduler for model '%s'; the next attempt is in %g s: %s"
                logger.error(text, self.spec.name, pause_s, error.message)
                self._failed_starts += 1
                self.report_change()
                if self._failed_starts >= _MAX_AWAITED_STARTS:
                    # Submitted requests fail; later requests are sent to a successor, if any.
                    self._broadcast_lost(lost_endpoint, "", *_CLIENT_ROLES)
                continue
            self.instances.attach()
            # Clients keep submitted requests until this message, which lets them resubmit the
            # requests to the successor.
            self._broadcast_lost(lost_endpoint, self.scheduler.endpoint, *_CLIENT_ROLES)
            self.report_change()
            return
        # The version retired meanwhile: models that call it look up the current endpoint.
        self._broadcast_lost(lost_endpoint, "", "caller", LOCAL_CLIENT)

    def _broadcast_lost(self, endpoint: str, successor: str, *roles: str) -> None:
        # The messages to the successor are flushed first, since local clients, which use other
        # sockets, resubmit at once.
        self._context.control.flush()
        self._context.broadcast(SchedulerLost(endpoint, successor), *roles)

    def _on_message(self, message: Any) -> None:
        match message:
            case m.KillInstance(pid, reason):
                self.instances.kill_overdue(pid, reason)
            case m.InstanceServed(pid):
                self.instances.on_served(pid)
                self._backoff.record_work()
            case m.InstanceRetired(pid):
                self.instances.on_retired(pid)
            case MemoryDropped():  # an ensemble's memory, which its steps' workers unmap
                self._context.broadcast(message, "worker")
            case _:
                logger.warning("unexpected message from a scheduler: %s", type(message).__name__)

    # --- the version's end

    async def finish_sequences(self) -> None:
        """Reject new sequences and wait until the open sequences have ended."""
        if self.has_loaded and self.scheduler.serves and self.config.sequence_batching:
            await self.scheduler.drain(sequences_only=True)

    async def stop(self) -> None:
        """Finish the requests in flight, then end every process."""
        self._lifetime.is_retiring = True
        self._state_changed.set()
        if self.has_loaded and self.scheduler.serves:
            await self.scheduler.drain()
        self._lifetime.is_stopping = True
        if self.has_loaded and not self.scheduler.serves:
            await self.kill()  # clients resubmit the requests that the workers execute
        await self.instances.stop()
        await self.scheduler.stop()

    async def kill(self) -> None:
        """End every process at once."""
        self._lifetime.is_retiring = self._lifetime.is_stopping = True
        self._state_changed.set()
        children = self.instances.children()
        for child in children:
            child.kill()
        exits = (child.until_exit() for child in children)
        await asyncio.gather(self.scheduler.stop(_KILL_PATIENCE_S), *exits)


@dataclass(slots=True, eq=False)
class EnsembleInstances(Instances):
    """The substitute for the instances of a model, which an ensemble does not have.

    It is ready while the models of its steps are ready.
    """

    find: Callable[[str, str], ModelVersion | None] = field(kw_only=True)

    @property
    def _models(self) -> list[ModelVersion | None]:
        return [self.find(*step) for step in self._spec.steps]

    @property
    def problem(self) -> str:
        """Return the first failure among the steps' models."""
        for step, model in zip(self._spec.steps, self._models, strict=True):
            if model is None:
                return f"model '{step.name}' is not available"
            if model.problem:
                return f"model '{step.name}' failed: {model.problem}"
        return ""

    @property
    def can_serve(self) -> bool:
        """Return whether every step's model is ready."""
        return all(model is not None and model.ready for model in self._models)

    @property
    def hangs(self) -> bool:
        """Return whether the log has reported a step's model whose restart takes long."""
        return any(model is not None and model.instances.hangs for model in self._models)

    async def complete_config(self) -> None:
        """Validate the ensemble against the models that serve now.

        Raises:
            InvalidArgument: The ensemble does not fit the models of its steps.
        """
        self.config = self._finalise_config(self._spec, {})
        self.labels = {**_inherited_labels(self.config, self._models), **self._spec.labels}

    def notify_new_scheduler(self, worker_pids: list[int]) -> None:
        """Send the ensemble's scheduler the endpoints of the steps' models."""
        for step, model in zip(self._spec.steps, self._models, strict=True):
            if model is not None:
                self._scheduler.send(model.publication(self.find(step.name, "") is model))


def _inherited_labels(config: ModelSpec, models: list[ModelVersion | None]) -> dict[str, list[str]]:
    """Return the labels of an ensemble's outputs, taken from the models that produce them."""
    scheduling = config.ensemble_scheduling
    assert scheduling is not None
    outputs = {output.name for output in config.output}
    inherited_labels: dict[str, list[str]] = {}
    for step, model in zip(scheduling.step, models, strict=True):
        labels = {} if model is None else model.instances.labels
        for name, tensor in step.output_map.items():
            if tensor in outputs and name in labels:
                inherited_labels[tensor] = labels[name]
    return inherited_labels


def describe(config: ModelSpec) -> dict[str, Any]:
    """Return the metadata of a model as for GET /v2/models/NAME, without the versions.

    Shapes start with -1 if the model batches.
    """
    batch_dims = [-1] if config.max_batch_size >= 1 else []

    def describe_tensors(tensors: Iterable[TensorSpec]) -> list[dict[str, Any]]:
        return [
            {"name": tensor.name, "datatype": tensor.datatype, "shape": [*batch_dims, *tensor.dims]}
            for tensor in tensors
        ]

    return {
        "name": config.name,
        "platform": config.platform or config.backend,
        "inputs": describe_tensors(config.input),
        "outputs": describe_tensors(config.output),
    }
