"""The model manager: operations on models, execution of the lifecycle's decisions, publication.

`ModelManager` gives orders to the `Lifecycle` and waits for them. `LifecycleExecutor` executes the
lifecycle's decisions with threads that read files, processes, and messages.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, get_args

from shmserve.common.names import check_model_name, is_traversal
from shmserve.errors import Internal, InvalidArgument, ShmserveError, Unavailable
from shmserve.ipc.messages import control_requests as m
from shmserve.ipc.messages.publications import (
    LoadRefused,
    ModelPublication,
    ModelPublished,
    ModelWithdrawn,
    ReadinessChanged,
    SchedulerLost,
)
from shmserve.ipc.model_spec import ModelSpec
from shmserve.supervisor.context import LOCAL_CLIENT, SupervisorContext
from shmserve.supervisor.models.instances import REQUEST_PATIENCE_S, Instances
from shmserve.supervisor.models.lifecycle import Lifecycle
from shmserve.supervisor.models.load_planner import LoadPlanner, VersionSpec
from shmserve.supervisor.models.model_version import ModelVersion
from shmserve.supervisor.models.on_demand import OnDemand
from shmserve.supervisor.models.orders import (
    FOLDER,
    LifecycleActions,
    LoadPlan,
    LoadSource,
    LoggedFailure,
    ModelEntry,
    Order,
    OrderKind,
    OrderPhase,
)
from shmserve.supervisor.models.registry import ModelRegistry
from shmserve.supervisor.models.repository import CONFIG_FILE, ModelFolder
from shmserve.supervisor.models.scheduler_process import Group, SchedulerHosts

logger = logging.getLogger(__name__)

P = ParamSpec("P")
Publication = ModelPublication | ModelWithdrawn
ModelRequest = (
    m.LoadModel | m.UnloadModel | m.IndexRepository | m.NameModels | m.WantModel | m.FindModel
)


class Audience:
    """The receivers of publications: the processes and programs that submit requests."""

    def __init__(self, context: SupervisorContext) -> None:
        self._control, self._local_clients = context.control, context.local_clients

    def announce(self, message: Publication) -> int:
        """Announce a change of a model to every gateway and local client.

        Ensembles receive published models, too, but no withdrawals, since they finish their
        requests first. Workers that call models receive withdrawals without acknowledgement.

        Returns:
            The number that the receivers acknowledge, see `is_acknowledged`.
        """

        def numbered(number: int) -> Publication:
            return replace(message, ack_number=number)

        is_published = isinstance(message, ModelPublished)
        roles = ("gateway", "ensemble") if is_published else ("gateway",)
        local_clients = self._local_clients.numbers()
        number = self._control.announce(numbered, *roles, extra_peers=local_clients)
        self._local_clients.announce(numbered(number))
        if isinstance(message, ModelWithdrawn):
            self._control.broadcast(message, "caller")
        return number

    def is_acknowledged(self, number: int) -> bool:
        """Check whether each connected receiver has acknowledged the change with this number."""
        return self._control.acknowledgements.is_acknowledged(number)

    def publish_readiness(self, message: ReadinessChanged) -> None:
        """Send the readiness of a model to every gateway."""
        self._control.broadcast(message, "gateway")


class _SentMessage(NamedTuple):
    message: Publication
    number: int  # that the clients acknowledge


class ModelPublisher:
    """The sender of publications of models: after a change it sends only the differences.

    A change of readiness alone is sent as `ReadinessChanged`, without acknowledgement, so that
    gateways keep their caches for the model.
    """

    def __init__(self) -> None:
        self._sent_messages: dict[str, dict[str, _SentMessage]] = {}

    def update(
        self,
        audience: Audience,
        name: str,
        publications: Mapping[str, ModelPublication],
        unpublished_versions: set[str],
    ) -> None:
        """Send the differences between the last and the current publications of a model.

        Args:
            audience: The receivers.
            name: The model.
            publications: The current publications by version, see `ModelEntry.publications`.
            unpublished_versions: The versions that are withdrawn even if they were never published.
        """
        sent_messages = self._sent_messages.setdefault(name, {})
        for version, message in publications.items():
            previous_message = sent_messages.get(version)
            if previous_message is None or previous_message.message != message:
                sent_messages[version] = _publish(audience, previous_message, message)
        # Withdrawals follow, so that a request for the latest version always finds a version.
        for version in sorted((sent_messages.keys() | unpublished_versions) - publications.keys()):
            previous_message = sent_messages.get(version)
            if previous_message is None or not isinstance(previous_message.message, ModelWithdrawn):
                withdrawn = ModelWithdrawn(name, version, 0)
                sent_messages[version] = _SentMessage(withdrawn, audience.announce(withdrawn))
        if not sent_messages:
            del self._sent_messages[name]

    def remove(self, name: str) -> None:
        """Remove the record of a model that was withdrawn."""
        self._sent_messages.pop(name, None)

    def are_acknowledged(self, audience: Audience, name: str) -> bool:
        """Check whether every client has acknowledged the publications of a model."""
        sent_messages = self._sent_messages.get(name, {})
        return all(audience.is_acknowledged(number) for _, number in sent_messages.values())

    def snapshot(self) -> Iterator[Any]:
        """Yield the last publication of each version, for a client that has just connected."""
        for sent_messages in self._sent_messages.values():
            for message, _ in sent_messages.values():
                yield message


def _publish(
    audience: Audience, previous_message: _SentMessage | None, message: ModelPublication
) -> _SentMessage:
    if (
        previous_message is not None
        and isinstance(message, ModelPublished)
        and isinstance(previous_message.message, ModelPublished)
        and (message == replace(previous_message.message, ready=message.ready))
    ):
        audience.publish_readiness(ReadinessChanged(message.name, message.version, message.ready))
        return previous_message._replace(message=message)
    return _SentMessage(message, audience.announce(message))


def _in_background(
    method: Callable[Concatenate[LifecycleExecutor, P], Coroutine[Any, Any, None]],
) -> Callable[Concatenate[LifecycleExecutor, P], None]:
    """Turn a coroutine method into one that starts a task and returns at once."""

    @wraps(method)
    def start_task(self: LifecycleExecutor, /, *args: P.args, **kwargs: P.kwargs) -> None:
        self.context.background(method(self, *args, **kwargs))

    return start_task


@dataclass(eq=False)
class LifecycleExecutor(LifecycleActions):
    """The implementation of `LifecycleActions`, which reads files and controls processes.

    Attributes:
        context: The shared parts of the supervisor.
        planner: Reads the repositories.
        registry: The models.
        _publisher: Sends the publications.
        _observers: Called when the status of a model may have changed.
        lifecycle: The lifecycle of the registry's models.
    """

    context: SupervisorContext
    planner: LoadPlanner
    registry: ModelRegistry
    _publisher: ModelPublisher
    _observers: list[Callable[[], None]]

    def __post_init__(self) -> None:
        self._audience = Audience(self.context)
        self._answer_events: dict[Order, asyncio.Event] = {}
        self._start_tasks: dict[ModelVersion, asyncio.Task[None]] = {}
        self._hosts = SchedulerHosts(self.context)
        shares_hosts = self.context.config.ensemble_scheduling == "hosted"
        self.lifecycle = Lifecycle(self.registry, self, shares_hosts)
        arguments = (self.context, self.registry, self.lifecycle, self.wait_for, self._observers)
        self.on_demand = OnDemand(*arguments)
        self._follow_acknowledgements()

    async def wait_for(self, order: Order) -> None:
        """Wait until an order is answered; raise the ShmserveError with which it failed."""
        if not order.is_answered:
            await self._answer_events.setdefault(order, asyncio.Event()).wait()
        if order.error is not None:
            raise order.error

    def answer(self, order: Order) -> None:
        if order.kind is OrderKind.LOAD and order.error is not None:
            self.registry.failed_loads += 1
            self.context.events.publish(LoadRefused(order.model.name, order.error.message))
        event = self._answer_events.pop(order, None)
        if event is not None:
            event.set()

    def report_change(self) -> None:
        for observer in self._observers:
            observer()

    # --- publications

    def publish(self, model: ModelEntry) -> None:
        self._publisher.update(
            self._audience, model.name, model.publications, model.unpublished_versions
        )

    def remove(self, model: ModelEntry) -> None:
        self._publisher.remove(model.name)

    def is_published(self, model: ModelEntry) -> bool:
        return self._publisher.are_acknowledged(self._audience, model.name)

    @_in_background
    async def _follow_acknowledgements(self) -> None:
        while True:
            await self.context.control.acknowledgements.until_next_complete()
            self.lifecycle.publication_acknowledged()

    def forward(self, version: ModelVersion, successor: ModelVersion | None) -> None:
        endpoint, configuration = "", version.config.immutable_config
        if successor is not None and successor.config.immutable_config == configuration:
            endpoint = successor.endpoint
        broadcast = self.context.broadcast
        broadcast(SchedulerLost(version.endpoint, endpoint), "gateway", "ensemble")
        broadcast(SchedulerLost(version.endpoint, ""), "caller", LOCAL_CLIENT)

    # --- files

    @_in_background
    async def read(self, order: Order) -> None:
        try:
            plan = await asyncio.to_thread(self._plan, order)
        except Exception as error:  # any exception, because the order waits for its plan
            plan = LoadPlan("", [], {}, _plan_error(order.model.name, error))
        if plan.is_ambiguous:
            logger.error(
                "failed to poll model '%s': not unique across all model repositories",
                order.model.name,
            )
        self.lifecycle.load_planned(order, plan)

    def _plan(self, order: Order) -> LoadPlan:
        name, planner = order.model.name, self.planner
        # The fingerprint is taken first, so that the next poll detects a change during the read.
        fingerprint = ""
        try:
            fingerprint = planner.fingerprint(name)
            specs = planner.plan(name, *order.source)
        except Exception as error:
            count = planner.count_repositories(name)
            return LoadPlan(fingerprint, [], {}, _plan_error(name, error), count > 0, count > 1)
        steps: dict[str, list[str]] = {}
        unvisited_names = [step.name for spec in specs for step in spec.steps]
        while unvisited_names:
            step = unvisited_names.pop()
            if step not in steps:
                steps[step] = [model.name for model in planner.steps(step)]
                unvisited_names += steps[step]
        return LoadPlan(fingerprint, specs, steps)

    def discard(self, specs: Iterable[VersionSpec]) -> None:
        used_folders = {version.spec.model_dir for version in self.registry.live_versions}
        for spec in {spec.model_dir: spec for spec in specs}.values():
            if spec.model_dir not in used_folders:
                self.planner.discard(spec)
        if self.planner.has_environments():
            self.context.background(asyncio.to_thread(self.planner.remove_unused_environments))

    def _finalise_config(self, spec: VersionSpec, reported_properties: dict[str, Any]) -> ModelSpec:
        """Return the final configuration of a version; raise InvalidArgument if it is invalid.

        An ensemble reports no properties: its configuration is completed with the models that
        serve.
        """
        if spec.steps:
            find_published = self.registry.find_published
            models = [find_published(*step) for step in spec.steps]
            reported_properties = {
                "steps": [None if model is None else model.config for model in models],
                "has_any_version": [find_published(s.name, "") is not None for s in spec.steps],
                "failures": [self.registry.load_failure(step.name) for step in spec.steps],
            }
        return self.planner.finalise_config(spec, reported_properties)

    # --- processes

    def create(self, spec: VersionSpec, group: Group) -> ModelVersion:
        find = self.registry.find_published
        callbacks = self.lifecycle.version_changed, self._finalise_config
        return ModelVersion(self.context, spec, group, self._hosts, find, *callbacks)

    def start(self, version: ModelVersion) -> None:
        self._start_tasks[version] = self.context.background(self._start(version))

    async def _start(self, version: ModelVersion) -> None:
        error: Exception | None = None
        try:
            if self.context.config.load_on_demand:
                await self.on_demand.free_memory()
            await version.start()
        except Exception as raised:
            error = raised
            if not isinstance(raised, ShmserveError):
                logger.exception("model '%s': loading failed", version.spec.name)
        del self._start_tasks[version]
        self.lifecycle.version_started(version, error)

    @_in_background
    async def update(self, order: Order) -> None:
        updates = order.updates if order.phase is OrderPhase.STARTING else {}
        incoming = order.model.incoming
        additions = (incoming[number].instances.add(update) for number, update in updates.items())
        results = await asyncio.gather(*additions, return_exceptions=True)
        pairs = zip(updates, results, strict=True)
        errors = {number: result for number, result in pairs if isinstance(result, BaseException)}
        self.lifecycle.updates_finished(order, errors)

    @_in_background
    async def move(self, order: Order, group: Group) -> None:
        model = order.model
        for version in list(model.serving.values()):
            try:
                await version.regroup(group, partial(self._publish_move, model))
            except ShmserveError as error:
                logger.error(
                    "model '%s' cannot be moved to another process, and stays where it is: %s",
                    model.name,
                    error.message,
                )
        self.lifecycle.move_finished(order)

    async def _publish_move(self, model: ModelEntry) -> None:
        """Publish a moved model and wait until every client has acknowledged the publication."""
        self.lifecycle.publish(model)
        while not self.is_published(model):
            await self.context.control.acknowledgements.until_next_complete()

    @_in_background
    async def kill(self, version: ModelVersion) -> None:
        start_task = self._start_tasks.get(version)
        await version.kill()
        if start_task is not None:
            await asyncio.wait({start_task})
        self.lifecycle.version_ended(version)

    @_in_background
    async def retire(self, version: ModelVersion) -> None:
        await version.stop()
        self.lifecycle.version_ended(version)

    @_in_background
    async def await_ends(self, order: Order) -> None:
        if order.updates:
            removed_instances = [i for u in order.updates.values() for i in u.removed_instances]
            await Instances.await_exits(removed_instances)
        else:
            await asyncio.sleep(REQUEST_PATIENCE_S)
        self.lifecycle.wait_finished(order)


def _plan_error(name: str, error: Exception) -> ShmserveError:
    if isinstance(error, ShmserveError):
        return error
    if isinstance(error, OSError):
        if error.errno in (errno.ENOSPC, errno.EDQUOT):  # --run-dir is where sent files are written
            return Unavailable(f"the model's files do not fit into --run-dir: {error.strerror}")
        path = Path(error.filename or f"{name}/files")
        return InvalidArgument(f"'{path.parent.name}/{path.name}': {error.strerror}")
    logger.error("model '%s' is not loaded: its files could not be read", name, exc_info=error)
    return Internal()


class ModelManager:
    """The operations on the models of a server."""

    def __init__(self, executor: LifecycleExecutor) -> None:
        self._context, self._planner = executor.context, executor.planner
        self._registry, self._lifecycle = executor.registry, executor.lifecycle
        self._wait_for, self.on_demand = executor.wait_for, executor.on_demand
        self._scan_lock, self._alias_lock = asyncio.Lock(), asyncio.Lock()
        self._context.control.serve_requests(get_args(ModelRequest), self._handle)

    async def start(self) -> bool:
        """Load the models that the control mode selects, and publish the on-demand models.

        Returns:
            Whether every model could be loaded.
        """
        config = self._context.config
        folders = await asyncio.to_thread(self._scan)
        names = list(folders)
        if not folders and config.model_control_mode != "explicit":
            logger.warning(
                "no model in %s: a model is a folder with a configuration (config.pbtxt) or a "
                "version folder (1); a Hugging Face folder needs a config.json",
                ", ".join(f"'{root}'" for root in config.model_repositories),
            )
        if config.model_control_mode == "explicit":
            names = list(folders) if config.load_models == ("*",) else list(config.load_models)
        if config.load_on_demand:
            names = names if config.model_control_mode == "explicit" else []
            self._lifecycle.offer_on_demand(folders.keys() - set(names))
        self._lifecycle.expect(await asyncio.to_thread(self._steps, names))
        # All orders are created before any is awaited, since ensembles wait for their steps.
        orders = [self._lifecycle.load(name) for name in names]
        await asyncio.gather(*map(self._wait_for, orders), return_exceptions=True)
        return all(order.error is None for order in orders)

    def _scan(self) -> dict[str, ModelFolder]:
        for root in self._context.config.model_repositories:
            if os.path.isfile(root / CONFIG_FILE):
                logger.warning("'%s' is a model: set --model-repository to its parent folder", root)
        return self._planner.scan()

    def _steps(self, names: list[str]) -> dict[str, list[str]]:
        steps = self._planner.steps
        return {name: list(dict.fromkeys(step.name for step in steps(name))) for name in names}

    # --- requests of gateways and models

    async def _handle(self, pid: int, request: ModelRequest) -> dict[str, Any] | None:
        """Handle a request of a gateway or a model; return the payload of the response."""
        match request:
            case m.LoadModel(name=name, config=config, files=files):
                await self.load_on_request(name, config, files)
            case m.UnloadModel(name=name, unload_dependents=dependents):
                await self.unload_on_request(name, dependents)
            case m.IndexRepository(ready=only_ready):
                return {"models": await self.index(only_ready)}
            case m.NameModels():
                return {"names": await self.list_generative_aliases()}
            case m.WantModel(name=name, timeout_s=timeout_s):
                await self.on_demand.load(name, timeout_s)
            case m.FindModel(name=name, version=version, timeout_s=timeout_s):
                self._context.control.add_caller(pid)
                await self.on_demand.load(name, timeout_s)
                return self._registry.describe_published(name, version)
        return None

    async def load_on_request(self, name: str, config: str, files: dict[str, bytes]) -> None:
        """Handle POST /v2/repository/models/NAME/load."""
        self._require_explicit()
        check_model_name(name)
        try:
            await self.load(name, LoadSource(config, files or {}))
        except ShmserveError as error:
            if not isinstance(error, LoggedFailure):
                logger.error("request to load model %s: %s", name, error.message.rstrip("; \n"))
            raise

    async def unload_on_request(self, name: str, with_dependents: bool) -> None:
        """Handle POST /v2/repository/models/NAME/unload; the model may be unknown.

        Args:
            name: The model.
            with_dependents: Whether to unload the models that were loaded only as its steps.
        """
        self._require_explicit()
        if is_traversal(name):
            return  # the model is unknown
        check_model_name(name)
        steps = self._registry.loaded_for(name) if with_dependents else []
        await self.unload(name)
        for step in steps:
            await self.unload_on_request(step, with_dependents)

    def _require_explicit(self) -> None:
        mode = self._context.config.model_control_mode
        if mode != "explicit":
            raise Unavailable(
                "explicit model load / unload is not allowed if polling is enabled "
                f"(--model-control-mode is {mode}; restart the server with explicit)"
            )

    async def index(self, ready_only: bool) -> list[dict[str, Any]]:
        """Return the repository index: the models of the repositories and the loaded models."""
        # The scan runs in a thread, since a file system that hangs must not block the supervisor.
        # One scan at a time, so that the scans of such a file system do not block all threads.
        async with self._scan_lock:
            folders = await asyncio.to_thread(self._planner.scan)
        return self._registry.index(folders, ready_only)

    async def list_generative_aliases(self) -> dict[str, list[str]]:
        """Return the aliases of each unloaded on-demand model that generates text, by name."""
        models = self._registry.models.values()
        unloaded_models = [model.name for model in models if model.on_demand and not model.serving]
        find = self._planner.aliases
        async with self._alias_lock:  # requests, which look up aliases, do not wait for a scan
            aliases_by_name = await asyncio.to_thread(lambda: {n: find(n) for n in unloaded_models})
        return {name: aliases for name, aliases in aliases_by_name.items() if aliases is not None}

    # --- load and unload

    def offer_on_demand(self, name: str) -> None:
        """Publish that a model is loaded on demand."""
        self._lifecycle.offer_on_demand([name])

    async def load(self, name: str, source: LoadSource = FOLDER, pins: bool = True) -> None:
        """Load or reload a model, its steps before it and its ensembles after it.

        Args:
            name: The model.
            source: The configuration and files of a request.
            pins: Whether the model then stays loaded, even if it was loaded on demand before.

        Raises:
            ShmserveError: The load failed; the serving versions continue. The text is Triton's.
        """
        await self._wait_for(self._lifecycle.load(name, source, pins))

    async def unload(self, name: str) -> None:
        """Unload a model, which may be unknown; the ensembles that need it are unloaded first.

        Loads that run are finished first, unless they hang. The call returns once every client has
        acknowledged the unload and the instances are finalized. Instances with long requests are
        finalized later.
        """
        await self._wait_for(self._lifecycle.unload(name))

    # --- the server's end

    async def finish_sequences(self) -> None:
        """Reject new sequences and wait until the open sequences have ended."""
        await asyncio.gather(*(v.finish_sequences() for v in self._registry.live_versions))

    async def stop(self) -> None:
        """Drain and stop every version; loads are cancelled."""
        tasks: dict[ModelVersion, asyncio.Task[None]] = {}

        def stop(version: ModelVersion) -> asyncio.Task[None]:
            if version not in tasks:
                ensembles = self._registry.users_to_end(version)
                tasks[version] = asyncio.ensure_future(_stop(version, [*map(stop, ensembles)]))
            return tasks[version]

        await asyncio.gather(*map(stop, self._registry.live_versions))

    async def kill(self) -> None:
        """End every version at once; the requests in flight are rejected."""
        live_versions = self._registry.live_versions
        await asyncio.gather(*(version.kill() for version in live_versions))
        for version in live_versions:
            self._context.broadcast(SchedulerLost(version.endpoint, ""), "gateway", LOCAL_CLIENT)


async def _stop(version: ModelVersion, ensemble_stops: list[asyncio.Task[None]]) -> None:
    """Stop a version when the ensembles that need it have stopped."""
    await asyncio.gather(*ensemble_stops)
    await (version.stop() if version.has_loaded else version.kill())
