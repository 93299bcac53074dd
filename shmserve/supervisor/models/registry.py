"""The model registry: which versions serve, the state of each, and what is published of them (no
process is started or ended here).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shmserve.errors import NotFound
from shmserve.ipc.messages import publications as m
from shmserve.supervisor.models.model_version import ModelVersion
from shmserve.supervisor.models.orders import ModelEntry
from shmserve.supervisor.models.publications import Audience, Publications
from shmserve.supervisor.models.repository import ModelFolder, lacks_version
from shmserve.supervisor.models.statuses import index_rows, is_ready, progress, statuses
from shmserve.supervisor.processes.scheduler_hosts import Group


class ModelRegistry:
    """The models by name."""

    def __init__(self) -> None:
        self.publications = Publications()
        self.audience: Audience  # is told; it needs the registry itself when somebody comes
        self.models: dict[str, ModelEntry] = {}

    def model(self, name: str) -> ModelEntry:
        """The model of this name, entered if need be."""
        return self.models.setdefault(name, ModelEntry(name))

    def forget(self, model: ModelEntry) -> None:
        """Remove a model of which nothing is known any more."""
        if not (model.orders or statuses(model)) and self.models.get(model.name) is model:
            del self.models[model.name]

    # --- processes

    @property
    def live(self) -> list[ModelVersion]:
        """The versions that may have a process, serving or not."""
        return [version for model in self.models.values() for version in model.versions]

    def workers_on(self, device_id: int) -> list[int]:
        """The worker processes that serve on an accelerator now."""
        return [pid for version in self.live for pid in version.instances.pids_on(device_id)]

    # --- what is published

    def find(self, name: str, version: str) -> dict[str, Any]:
        """The destination of a model's requests, for a model that calls it; raises NotFound."""
        model = self.models.get(name)
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

    def serving(self, name: str, version: str) -> ModelVersion | None:
        """Return the published version of a model, or None; version "" is the latest."""
        model = self.models.get(name)
        return None if model is None else model.shown.get(version or model.latest)

    def configurations(self, name: str) -> dict[str, dict[str, Any]]:
        """Of the versions that serve, apart from what may change while they do."""
        model = self.models.get(name)
        serving = {} if model is None else model.serving
        return {v: each.config.immutable_config for v, each in serving.items()}

    def ensembles_of(self, name: str) -> list[ModelVersion]:
        """The ensembles with a process, serving or not, that have this model as a step."""
        return [version for version in self.live if version.uses(name)]

    def has_users(self, version: ModelVersion) -> bool:
        """Whether an ensemble with a process needs a version, and has to end before it; not where
        generations need one another, and would wait for ever."""
        found: set[ModelVersion] = set()
        waiting = [version]
        while waiting:
            more = set(self.ensembles_of(waiting.pop().spec.name)) - found
            found |= more
            waiting += more
        return bool(found) and version not in found

    def needs(self) -> dict[str, list[str]]:
        """The models that each ensemble needs, or will once the load is over that is followed."""
        return {name: model.wanted_steps for name, model in self.models.items()}

    def circle(
        self, name: str, steps: Sequence[str], folders: Mapping[str, list[str]]
    ) -> list[str]:
        """The circle of ensembles that a model with these steps would close, if any. What serves,
        or is to, counts as it is, and anything else as its folder has it."""
        needs = {each: model.possible_steps for each, model in self.models.items()}

        def walk(each: str, above: list[str]) -> list[str]:
            if each in above:
                return [*above[above.index(each) :], each]
            below = steps if not above else needs.get(each) or folders.get(each, [])
            return next(filter(None, (walk(step, [*above, each]) for step in below)), [])

        return walk(name, [])

    def group(self, name: str, hosted: bool) -> Group:
        """The models that are scheduled in one process with this one: it alone, or, where they are
        `hosted`, a connected component of ensembles and their steps."""
        needs = self.needs()
        names = _component(needs, name) if hosted else {name}
        ensembles = {each for each in names if needs.get(each)}
        outermost = sorted(ensembles - {step for each in ensembles for step in needs[each]})
        title = f"ensemble {outermost[0]}" if outermost else f"scheduler {name}"
        return Group(title, frozenset(names))

    def asked_whether_ready(self, name: str, version: str) -> list[int]:
        """The workers that say whether a version is ready; none where it is not, or not there."""
        found = self.serving(name, version)
        return found.instances.checking_ready() if found is not None and found.ready else []

    def index(self, found: Mapping[str, ModelFolder], ready: bool) -> list[dict[str, Any]]:
        """The repository index; `found` is what the repositories hold. Models never loaded have a
        name, and why they cannot be, if so."""
        known = {name: statuses(model) for name, model in self.models.items()}
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
            for model in self.models.values()
            for version, status in statuses(model).items()
        }

    def progress(self) -> dict[str, str]:
        """The progress of each model that is loaded at the start."""
        return {name: progress(model) for name, model in self.models.items() if model.expected}

    def publish_counters(self) -> None:
        """Have the counters of what serves published as events."""
        for model in self.models.values():
            for version in model.serving.values():
                version.scheduler.publish_counters()

    def all_ready(self) -> bool:
        """Whether every model that should serve does."""
        return all(map(is_ready, self.models.values()))

    def known(self, model: ModelEntry) -> bool:
        """Whether everybody knows what serves of a model."""
        return self.publications.known(self.audience, model.name)

    def publish(self, model: ModelEntry) -> None:
        """Have everybody know what serves of a model, where that differs from what they know."""
        published: dict[str, m.ModelNews] = {
            number: each.publication(number == model.latest) for number, each in model.shown.items()
        }
        if model.on_demand:
            published[""] = m.ModelOnDemand(model.name, 0)
        absent = [
            number
            for number, status in statuses(model).items()
            if number or lacks_version(status.reason)
        ]
        self.publications.update(self.audience, model.name, published, absent)


def _component(needs: Mapping[str, list[str]], name: str) -> set[str]:
    names, waiting = {name}, [name]
    while waiting:
        known = waiting.pop()
        near = {*needs.get(known, ()), *(each for each, steps in needs.items() if known in steps)}
        waiting += near - names
        names |= near
    return names
