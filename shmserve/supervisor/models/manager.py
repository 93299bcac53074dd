"""Which models are loaded: start-up, load, reload without downtime, unload, polling; one turn at a
time for each name.

load:    plan every version -> deploy all (or none) -> publish to the gateways until all know that
         all are ready -> drain and stop what was there before
unload:  give up what is loading -> withdraw from the gateways -> drain -> stop
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from shmserve.common.accelerators import Accelerators
from shmserve.common.model_names import check_model_name
from shmserve.errors import Internal, InvalidArgument, NotFound, ShmserveError, Unavailable
from shmserve.ipc import messages as m
from shmserve.supervisor.context import SupervisorContext
from shmserve.supervisor.gateways import Gateways
from shmserve.supervisor.models.load_planner import LoadPlanner
from shmserve.supervisor.models.repository import CONFIG_FILE
from shmserve.supervisor.models.states import ModelState
from shmserve.supervisor.models.version import ModelVersion
from shmserve.supervisor.processes.table import Child
from shmserve.supervisor.startup_report import StartupReport

logger = logging.getLogger(__name__)

_UNLOADED = "unloaded"
_UNLOADED_MEANWHILE = "the model is unloaded"
_RESTARTING = "a process that ended is started again"
_MOST_ANNOUNCEMENTS = 8


@dataclass(slots=True)
class _Status:
    state: ModelState
    reason: str = ""

    @property
    def failed(self) -> bool:
        return self.state is ModelState.UNAVAILABLE and self.reason != _UNLOADED


@dataclass(slots=True, eq=False)
class _Model:
    """Everything about one name; `serving` by version."""

    name: str
    serving: dict[str, ModelVersion] = field(default_factory=dict)
    status: dict[str, _Status] = field(default_factory=dict)
    fingerprint: str = ""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    changes: int = 0  # that have their turn, or wait for it
    coming: list[ModelVersion] = field(default_factory=list)  # of the load that has its turn
    unloads: int = 0  # that were asked for: each gives up the loads before it

    @property
    def failed(self) -> bool:
        """Whether a version of it could not be loaded, or broke."""
        return any(status.failed for status in self.status.values())

    def states(self) -> dict[str, _Status]:
        """The status of each version, as it is this moment: one whose last process has just died is
        not ready, though it was loaded."""
        return {
            version: _Status(ModelState.LOADING, _RESTARTING)
            if status.state is ModelState.READY and not self.serving[version].ready
            else status
            for version, status in self.status.items()
        }

    @property
    def latest(self) -> str:
        """The version that serves requests that name none; "" when there is none."""
        return max(self.serving, key=int, default="")


def _load_failed(model: _Model, reasons: dict[str, str]) -> InvalidArgument:
    """What is said of a model whose versions could not be loaded, for these reasons."""
    failures = "".join(
        f"version {version} is at UNAVAILABLE state: {reason};\n"
        for version, reason in reasons.items()
    )
    return InvalidArgument(f"load failed for model '{model.name}': {failures}")


def _number(version: str) -> int:
    return int(version or 0)


def _index_row(name: str, version: str, status: _Status) -> dict[str, Any]:
    row = {"name": name, "version": version, "state": str(status.state), "reason": status.reason}
    return {key: value for key, value in row.items() if value}


class Models:
    """The loaded models. `on_call` takes what models ask of the server, `on_change` hears of
    readiness, `on_states` of every state."""

    def __init__(
        self,
        host: SupervisorContext,
        gateways: Gateways,
        accelerators: Accelerators,
        on_call: Callable[[int, Any], None],
        on_change: Callable[[], None],
        on_states: Callable[[], None] = lambda: None,
    ) -> None:
        self._host = host
        self._gateways = gateways
        self._on_call = on_call
        self._on_change = on_change
        self._on_states = on_states
        self._planner = LoadPlanner(host.config, host.run_dir, accelerators)
        self._models: dict[str, _Model] = {}
        self._live: set[ModelVersion] = set()  # from creation to the end of its last process

    # --- what is asked

    async def start(self, progress: StartupReport) -> bool:
        """Load what the control mode says; whether all of it could be loaded."""
        config = self._host.config
        for root in config.model_repositories:
            if (root / CONFIG_FILE).is_file():
                logger.warning("'%s' is a model's folder: a repository is what holds it", root)
        found = self._planner.scan()
        wanted = list(found)
        if config.model_control_mode == "explicit":
            wanted = list(found) if config.load_models == ("*",) else list(config.load_models)
        results = await asyncio.gather(*(self._load_at_start(name, progress) for name in wanted))
        return all(results)

    async def _load_at_start(self, name: str, progress: StartupReport) -> bool:
        progress.phase(name, "loading")
        try:
            await self._load(name)
        except ShmserveError as error:
            progress.phase(name, f"failed: {error.message}")
            model = self._models.setdefault(name, _Model(name))
            if not model.status:  # not even there: the server is not ready either
                model.status[""] = _Status(ModelState.UNAVAILABLE, error.message)
            return False
        progress.phase(name, "ready")
        return True

    async def load_on_request(self, name: str, config: str, files: dict[str, bytes]) -> None:
        """POST /v2/repository/models/NAME/load."""
        self._require_explicit()
        check_model_name(name)
        await self._load(name, config, files)

    async def unload_on_request(self, name: str) -> None:
        """POST /v2/repository/models/NAME/unload; an unknown model is fine."""
        self._require_explicit()
        check_model_name(name)
        await self._unload(name)

    def _require_explicit(self) -> None:
        if self._host.config.model_control_mode != "explicit":
            raise Unavailable("explicit model load / unload is not allowed if polling is enabled")

    async def find(self, name: str, version: str) -> dict[str, Any]:
        """Where a model's requests go, for a model that calls it; raises NotFound."""
        model = self._models.get(name)
        if model is None or not model.status:
            raise NotFound(f"Request for unknown model: '{name}' is not found")
        if not model.serving:
            raise NotFound(f"Request for unknown model: '{name}' has no available versions")
        deployment = model.serving.get(version or model.latest)
        if deployment is None:
            raise NotFound(f"Request for unknown model: '{name}' version {version} is not found")
        return {
            "endpoint": deployment.endpoint,
            "config": deployment.config,
            "version": deployment.plan.version,
            "ready": deployment.ready,
        }

    def workers_on(self, device_id: int) -> list[int]:
        """The worker processes that serve on an accelerator now."""
        return [pid for deployment in self._live for pid in deployment.pids_on(device_id)]

    def index(self, ready: bool) -> list[dict[str, Any]]:
        """The repository index: models never loaded have a name, and why they cannot be, if so."""
        rows: list[dict[str, Any]] = []
        found = self._planner.scan()
        known = {name: model.states() for name, model in self._models.items() if model.status}
        for name in sorted({*found, *known}):
            status = known.get(name)
            if status is None:
                problem = found[name].problem
                status = {"": _Status(ModelState.UNAVAILABLE, problem)} if problem else {}
                if not (problem or ready):
                    rows.append({"name": name})
            rows += [
                _index_row(name, version, of_version)
                for version, of_version in sorted(status.items(), key=lambda item: _number(item[0]))
                if not ready or of_version.state is ModelState.READY
            ]
        return rows

    def states(self) -> dict[tuple[str, str], tuple[str, str]]:
        """The state of each version, and the reason for it, by name and version."""
        return {
            (model.name, version): (str(status.state), status.reason)
            for model in self._models.values()
            for version, status in model.states().items()
        }

    def count(self) -> None:
        """Have the counters of what serves published as events."""
        for model in self._models.values():
            for deployment in model.serving.values():
                deployment.count()

    def all_ready(self) -> bool:
        """Whether every model that should serve does."""
        return all(
            status.state in (ModelState.READY, ModelState.UNLOADING) or status.reason == _UNLOADED
            for model in self._models.values()
            for status in model.states().values()
        )

    def published(self) -> Iterator[m.ModelPublished | m.ModelWithdrawn]:
        """What a new gateway must know."""
        for model in self._models.values():
            for version in model.status.keys() - model.serving.keys() - {""}:
                yield m.ModelWithdrawn(model.name, version, 0)
            for deployment in model.serving.values():
                yield self._publication(model, deployment, 0)

    # --- load and unload

    def _model(self, name: str) -> _Model:
        return self._models.setdefault(name, _Model(name))

    @contextlib.asynccontextmanager
    async def _turn(self, name: str) -> AsyncIterator[_Model]:
        """One change of a model after the other; of a name that is none's nothing stays."""
        model = self._model(name)
        model.changes += 1
        try:
            async with model.turn:
                yield model
        finally:
            model.changes -= 1
            if not (model.changes or model.status or model.serving):
                del self._models[name]

    async def _load(
        self, name: str, config: str = "", files: dict[str, bytes] | None = None
    ) -> None:
        try:
            await self._load_in_turn(name, config, files or {})
        except ShmserveError as error:
            self._host.events.publish(m.LoadRefused(name, error.message))
            raise

    async def _load_in_turn(self, name: str, config: str, files: dict[str, bytes]) -> None:
        unloads = self._model(name).unloads
        async with self._turn(name) as model:
            try:
                # Before it is read: a file that is changed meanwhile is seen by the next look.
                model.fingerprint = await asyncio.to_thread(self._planner.fingerprint, name)
                plans = await asyncio.to_thread(self._planner.plan, name, config, files)
            except ShmserveError as error:
                # Of a name that no repository has, nothing is kept: anybody may have mistyped it.
                if not model.serving and (model.status or self._planner.has(name)):
                    model.status = {"": _Status(ModelState.UNAVAILABLE, error.message)}
                    self._states_changed()
                raise
            if model.unloads != unloads:
                for plan in plans:
                    self._planner.discard(plan)
                reason = f"{Unavailable.title}: {_UNLOADED_MEANWHILE}"
                raise _load_failed(model, {plan.version: reason for plan in plans})
            model.status.pop("", None)
            new = model.coming = [
                ModelVersion(self._host, plan, partial(self._changed, model), self._on_call)
                for plan in plans
            ]
            self._live.update(new)
            for deployment in new:
                if deployment.plan.version not in model.serving:
                    model.status[deployment.plan.version] = _Status(ModelState.LOADING)
            self._on_states()
            try:
                await self._deploy(model, new)
                await self._switch(model, {d.plan.version: d for d in new})
            finally:
                model.coming = []

    async def _deploy(self, model: _Model, new: list[ModelVersion]) -> None:
        results = await asyncio.gather(*(d.start() for d in new), return_exceptions=True)
        failures: dict[str, str] = {}
        for deployment, result in zip(new, results, strict=True):
            if not isinstance(result, BaseException):
                continue
            if not isinstance(result, ShmserveError):
                logger.error("loading failed", exc_info=result)
                result = Internal("internal error")
            version, reason = deployment.plan.version, f"{result.title}: {result.message}"
            failures[version] = reason
            if version not in model.serving:
                model.status[version] = _Status(ModelState.UNAVAILABLE, reason)
                self._gateways.tell(m.ModelWithdrawn(model.name, version, 0))
        if failures:
            await asyncio.gather(*(d.kill() for d in new))
            self._forget(new)
            for version, status in model.status.items():
                if status.state is ModelState.LOADING:
                    model.status[version] = _Status(
                        ModelState.UNAVAILABLE, "another version failed"
                    )
            self._states_changed()
            raise _load_failed(model, failures)

    async def _switch(self, model: _Model, new: dict[str, ModelVersion]) -> None:
        """Have `new` serve instead of what does now; that comes back when `new` breaks for good
        before every gateway knows that it is ready."""
        old, model.serving = model.serving, new
        before = model.status
        model.status = {
            version: status
            for version, status in before.items()
            # What failed and is not wanted any more is nobody's concern.
            if version in old or not status.failed
        }
        for version in old.keys() - new.keys():
            model.status[version] = _Status(ModelState.UNLOADING)
        for version in old.keys() & new.keys():
            old[version].bequeath(new[version])
        for version, deployment in new.items():
            try:
                await self._announce(model, deployment)
            except Unavailable as error:
                model.serving, model.status = old, before
                for former in old.values():
                    former.bequeath(None)
                    self._changed(model, former)
                reason = f"{error.title}: {error.message}"
                for lost in new.keys() - old.keys():
                    model.status[lost] = _Status(ModelState.UNAVAILABLE, reason)
                await self._dismiss(model, new)
                raise _load_failed(model, {version: reason}) from None
        for version in new:
            model.status[version] = _Status(ModelState.READY)
        await self._dismiss(model, old)

    async def _announce(self, model: _Model, deployment: ModelVersion) -> None:
        """Returns once it is ready and every gateway knows. Raises Unavailable when it will not
        be, or is never so for long enough to be told."""
        for _ in range(_MOST_ANNOUNCEMENTS):
            await deployment.until_ready()
            changes = deployment.changes
            await self._gateways.publish_model(partial(self._publication, model, deployment))
            if deployment.ready and deployment.changes == changes:
                return
        raise Unavailable("its processes end as soon as they are ready")

    async def _unload(self, name: str) -> None:
        if name not in self._models:
            return
        # A model that hangs while it loads would keep its turn for ever, or take it next.
        model = self._model(name)
        model.unloads += 1
        await asyncio.gather(*(d.kill() for d in model.coming if not d.ready))
        async with self._turn(name) as model:
            old, model.serving = model.serving, {}
            model.status.pop("", None)
            for version, status in model.status.items():
                if version in old:
                    model.status[version] = _Status(ModelState.UNLOADING)
                elif status.failed:
                    model.status[version] = _Status(ModelState.UNAVAILABLE, _UNLOADED)
            model.fingerprint = ""
            await self._dismiss(model, old)

    async def _dismiss(self, model: _Model, leaving: dict[str, ModelVersion]) -> None:
        """These do not serve any more: the versions that no other serves are withdrawn, and what is
        in flight is finished."""
        for version in leaving.keys() - model.serving.keys():
            await self._gateways.publish_model(partial(m.ModelWithdrawn, model.name, version))
            self._host.broadcast(m.ModelWithdrawn(model.name, version, 0), "worker")
        self._states_changed()
        for deployment in leaving.values():
            self._host.background(self._retire(model, deployment))

    async def _retire(self, model: _Model, deployment: ModelVersion) -> None:
        version = deployment.plan.version
        await deployment.stop()
        # What reached the old scheduler too late to be answered, or died with it, goes to who
        # serves now.
        self._host.broadcast(self._lost(model, deployment), "gateway")
        self._host.broadcast(m.SchedulerLost(deployment.endpoint, ""), "worker", "guest")
        self._forget([deployment])
        status = model.status.get(version)
        last = all((d.plan.name, d.plan.version) != (model.name, version) for d in self._live)
        if status is not None and status.state is ModelState.UNLOADING and last:
            model.status[version] = _Status(ModelState.UNAVAILABLE, _UNLOADED)
        self._states_changed()

    @staticmethod
    def _lost(model: _Model, deployment: ModelVersion) -> m.SchedulerLost:
        now = model.serving.get(deployment.plan.version)
        same = now is not None and now.config == deployment.config
        return m.SchedulerLost(deployment.endpoint, now.endpoint if now and same else "")

    def _forget(self, ended: list[ModelVersion]) -> None:
        self._live.difference_update(ended)
        for plan in {d.plan.model_dir: d.plan for d in ended}.values():
            if all(plan.model_dir != d.plan.model_dir for d in self._live):
                self._planner.discard(plan)

    # --- events

    def process_exited(self, child: Child) -> None:
        """A process of the server has ended: its deployment deals with it."""
        for deployment in self._live:
            deployment.process_exited(child)

    def _states_changed(self) -> None:
        self._on_states()
        self._on_change()

    def _changed(self, model: _Model, deployment: ModelVersion) -> None:
        if model.serving.get(deployment.plan.version) is deployment:
            self._gateways.tell(self._publication(model, deployment, 0))
            if deployment.failure:
                model.status[deployment.plan.version] = _Status(
                    ModelState.UNAVAILABLE, deployment.failure
                )
            self._states_changed()

    def _publication(
        self, model: _Model, deployment: ModelVersion, number: int
    ) -> m.ModelPublished:
        return m.ModelPublished(
            name=model.name,
            version=deployment.plan.version,
            config=deployment.config,
            metadata=self._planner.metadata(
                deployment.config, sorted(model.serving, key=int), deployment.plan.labels
            ),
            endpoint=deployment.endpoint,
            ready=deployment.ready,
            latest=deployment.plan.version == model.latest,
            load_seconds=deployment.load_seconds,
            acknowledge=number,
        )

    async def poll_forever(self) -> None:
        """Look at the repositories every `repository_poll_s` seconds; load, reload and unload what
        changed. A model that takes long to load, or hangs, keeps no other waiting, and is given up
        when it is removed."""
        busy: set[tuple[str, bool]] = set()
        while True:
            await asyncio.sleep(self._host.config.repository_poll_s)
            try:
                found = await asyncio.to_thread(self._planner.scan)
            except ShmserveError as error:
                logger.error("%s", error.message)
                continue
            except Exception:
                logger.exception("the model repositories could not be looked at")
                continue
            for name in sorted({*found, *self._models}):
                look = (name, name in found)
                if look not in busy:
                    busy.add(look)
                    self._host.background(self._follow_one(*look, busy))

    async def _follow_one(self, name: str, present: bool, busy: set[tuple[str, bool]]) -> None:
        try:
            await self._follow(name, present)
        except ShmserveError as error:
            logger.error("model %s: %s", name, error.message)
        except Exception:
            logger.exception("model %s: loading failed", name)
        finally:
            busy.discard((name, present))

    async def _follow(self, name: str, present: bool) -> None:
        model = self._models.get(name)
        if not present:
            if model is not None and (model.serving or model.failed or model.coming):
                await self._unload(name)
            return
        fingerprint = await asyncio.to_thread(self._planner.fingerprint, name)
        if model is None or model.fingerprint != fingerprint:  # one that failed, too
            await self._load(name)

    async def stop(self) -> None:
        """Drain and stop everything; what loads is given up."""
        await asyncio.gather(*(d.stop() if d.loaded else d.kill() for d in self._live))

    async def kill(self) -> None:
        """End everything now; what was in flight is refused."""
        await asyncio.gather(*(deployment.kill() for deployment in self._live))
        for deployment in self._live:
            self._host.broadcast(m.SchedulerLost(deployment.endpoint, ""), "gateway", "guest")
