"""The model registry: which versions serve, the state of each, and what is published of them (no
process is started or ended here).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shmserve.errors import NotFound
from shmserve.ipc.messages import supervision as m
from shmserve.ipc.model_spec import ModelSpec, TensorSpec
from shmserve.supervisor.models.publications import Audience, Publications
from shmserve.supervisor.models.repository import NO_VERSION, ModelFolder
from shmserve.supervisor.models.statuses import Outcome, index_rows, is_ready, statuses
from shmserve.supervisor.models.version.model_version import InstanceUpdate, ModelVersion
from shmserve.supervisor.models.version.spec import StepModel


class LoadSource(NamedTuple):
    """The source of a load: a request's configuration and files, or the model's folder where there
    are none."""

    config: str
    files: dict[str, bytes]


FOLDER = LoadSource("", {})


@dataclass(slots=True, eq=False)
class ModelEntry:
    """Everything about one name. `serving` by version; `coming` are those of the load that has its
    turn, which take over once they are `offered` and everybody knows it; `outcomes` are those of
    what is not there. `source` is what serves, or was to serve last, is loaded of."""

    name: str
    serving: dict[str, ModelVersion] = field(default_factory=dict)
    coming: dict[str, ModelVersion] = field(default_factory=dict)
    offered: bool = False
    retiring: list[ModelVersion] = field(default_factory=list)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    fingerprint: str = ""
    source: LoadSource = FOLDER
    changes: list[asyncio.Event] = field(default_factory=list)  # each set once it is over
    updates: list[InstanceUpdate] = field(default_factory=list)  # as `coming`, of what serves
    unloaded: asyncio.Event = field(default_factory=asyncio.Event)  # by the next unload
    may_pass: bool = False  # the reason for which the last load failed: another may succeed

    def give_up_loads(self) -> None:
        """Have the loads that were asked for until now fail: the model is to be unloaded."""
        self.unloaded.set()
        self.unloaded = asyncio.Event()
        for update in self.updates:
            update.cancel()

    @property
    def shown(self) -> dict[str, ModelVersion]:
        """What is published."""
        return {**self.serving, **self.coming} if self.offered else self.serving

    @property
    def leaving(self) -> set[str]:
        """The versions of which something finishes what it has."""
        return {version.spec.version for version in self.retiring}

    @property
    def latest(self) -> str:
        """The version that serves requests that name none; "" when there is none."""
        return max(self.coming if self.offered else self.serving, key=int, default="")


class Change:
    """A change of a model, which waits for those before it."""

    def __init__(self, model: ModelEntry, before: list[asyncio.Event]) -> None:
        self.model = model
        self._before = before

    async def turn(self) -> None:
        """Return once all changes are over that were asked for before this one."""
        for change in self._before:
            await change.wait()


class ModelRegistry:
    """The models by name."""

    def __init__(self) -> None:
        self.publications = Publications()
        self._models: dict[str, ModelEntry] = {}
        self._live: set[ModelVersion] = set()  # from creation to the end of its last process

    def get(self, name: str) -> ModelEntry | None:
        """The model of this name, if anything is known of it."""
        return self._models.get(name)

    def model(self, name: str) -> ModelEntry:
        """The model of this name, entered if need be."""
        return self._models.setdefault(name, ModelEntry(name))

    def names(self) -> set[str]:
        """Of all models of which anything is known."""
        return set(self._models)

    @contextlib.contextmanager
    def changing(self, name: str) -> Iterator[Change]:
        """Enter a change of a model, which has its `turn` once those are over that were entered
        before it; of a name that is none's nothing stays."""
        model, over = self.model(name), asyncio.Event()
        before = model.changes[:]
        model.changes.append(over)
        try:
            yield Change(model, before)
        finally:
            over.set()
            model.changes.remove(over)
            if not (model.changes or statuses(model)):
                del self._models[name]

    # --- processes

    @property
    def live(self) -> set[ModelVersion]:
        """The versions that may have a process, serving or not."""
        return set(self._live)

    def created(self, versions: Iterable[ModelVersion]) -> None:
        """Enter versions that may have processes from now on."""
        self._live.update(versions)

    def ended(self, versions: Iterable[ModelVersion]) -> None:
        """Remove versions that have no process any more."""
        for version in versions:
            self._live.discard(version)
            version.ended.set()

    def workers_on(self, device_id: int) -> list[int]:
        """The worker processes that serve on an accelerator now."""
        return [pid for version in self._live for pid in version.instances.pids_on(device_id)]

    # --- what is published

    def find(self, name: str, version: str) -> dict[str, Any]:
        """The destination of a model's requests, for a model that calls it; raises NotFound."""
        model = self._models.get(name)
        if model is None or not statuses(model):
            raise NotFound(f"Request for unknown model: '{name}' is not found")
        shown = model.shown
        if not shown:
            raise NotFound(f"Request for unknown model: '{name}' has no available versions")
        found = shown.get(version or model.latest)
        if found is None:
            raise NotFound(f"Request for unknown model: '{name}' version {version} is not found")
        return {
            "endpoint": found.endpoint,
            "config": found.config.source,
            "version": found.spec.version,
            "ready": found.ready,
            "checks_ready": found.instances.checks_ready,
        }

    def _serving(self, name: str, version: str) -> ModelVersion | None:
        model = self._models.get(name)
        return None if model is None else model.shown.get(version or model.latest)

    def published_now(self, step: StepModel) -> m.ModelPublished | None:
        """The publication of a model version now, or None where it does not serve."""
        found = self._serving(*step)
        return None if found is None else _publication(self._models[step.name], found)

    def failure_now(self, step: StepModel) -> str:
        """Why a model version serves no request, and will not; empty: it does, or will."""
        found = self._serving(*step)
        if found is None:
            return f"model '{step.name}' is not available"
        problem = found.instances.problem
        return f"model '{step.name}' failed: {problem}" if problem else ""

    def ready_now(self, step: StepModel) -> bool:
        """Whether a model version takes requests now."""
        found = self._serving(*step)
        return found is not None and found.ready

    def configurations(self, name: str) -> dict[str, dict[str, Any]]:
        """Of the versions that serve, apart from what may change while they do."""
        model = self._models.get(name)
        serving = {} if model is None else model.serving
        return {v: each.config.immutable_config for v, each in serving.items()}

    def ensembles_of(self, name: str) -> list[ModelVersion]:
        """The ensembles with a process, serving or not, that have this model as a step."""
        return [version for version in self._live if version.uses(name)]

    def with_users(self, name: str) -> list[str]:
        """The ensembles that need a model, and those that need them, each before what it needs; and
        the model itself. A generation that is on its way out needs nothing for long."""
        found: dict[str, None] = {}

        def add(each: str) -> None:
            for user, model in self._models.items():
                versions = (*model.serving.values(), *model.coming.values())
                if user not in found and any(version.uses(each) for version in versions):
                    add(user)
            found[each] = None

        add(name)
        return list(found)

    def asked_whether_ready(self, name: str, version: str) -> list[int]:
        """The workers that say whether a version is ready; none where it is not, or not there."""
        found = self._serving(name, version)
        return found.instances.checking_ready() if found is not None and found.ready else []

    def index(self, found: Mapping[str, ModelFolder], ready: bool) -> list[dict[str, Any]]:
        """The repository index; `found` is what the repositories hold. Models never loaded have a
        name, and why they cannot be, if so."""
        known = {name: statuses(model) for name, model in self._models.items()}
        names = sorted({*found, *(name for name, status in known.items() if status)})
        return [
            row
            for name in names
            for row in index_rows(name, known.get(name), found.get(name), ready)
        ]

    def states(self) -> dict[tuple[str, str], tuple[str, str]]:
        """The state of each version, and the reason for it, by name and version."""
        return {
            (model.name, version): (str(status.state), status.reason)
            for model in self._models.values()
            for version, status in statuses(model).items()
        }

    def publish_counters(self) -> None:
        """Have the counters of what serves published as events."""
        for model in self._models.values():
            for version in model.serving.values():
                version.scheduler.publish_counters()

    def all_ready(self) -> bool:
        """Whether every model that should serve does."""
        return all(map(is_ready, self._models.values()))

    def publish(self, audience: Audience, model: ModelEntry) -> None:
        """Have everybody know what serves of a model, where that differs from what they know."""
        published = {number: _publication(model, each) for number, each in model.shown.items()}
        absent = [
            number
            for number, status in statuses(model).items()
            if number or status.reason.endswith(NO_VERSION)
        ]
        self.publications.update(audience, model.name, published, absent)


def _publication(model: ModelEntry, version: ModelVersion) -> m.ModelPublished:
    """The message about a version that serves."""
    return m.ModelPublished(
        name=model.name,
        version=version.spec.version,
        config=version.config,
        metadata={
            **describe(version.config),
            "labels": version.instances.labels,
            "checks_ready": version.instances.checks_ready,
        },
        endpoint=version.endpoint,
        ready=version.ready,
        latest=version.spec.version == model.latest,
        load_seconds=version.load_seconds,
        acknowledge=0,
    )


def describe(config: ModelSpec) -> dict[str, Any]:
    """The metadata of a model, as GET /v2/models/NAME shows it, but for its versions; shapes start
    with -1 where it batches."""
    batch = [-1] if config.max_batch_size >= 1 else []

    def shown(tensors: Iterable[TensorSpec]) -> list[dict[str, Any]]:
        return [
            {"name": each.name, "datatype": each.datatype, "shape": [*batch, *each.dims]}
            for each in tensors
        ]

    return {
        "name": config.name,
        "platform": config.platform or config.backend,
        "inputs": shown(config.input),
        "outputs": shown(config.output),
    }
