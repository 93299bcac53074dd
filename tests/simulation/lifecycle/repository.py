"""A simulated model repository that changes while it is read, and the load plans from it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shmserve.errors import InvalidArgument, NotFound, ShmserveError
from shmserve.ipc.model_spec import ModelSpec
from shmserve.supervisor.models.instances import VersionSpec
from shmserve.supervisor.models.orders import LoadPlan, LoadSource
from tests.simulation.world import World

if TYPE_CHECKING:
    from tests.simulation.lifecycle.oracles import LifecycleOracles

_OVERRIDES = Path("/overrides")
_NOBODY = Path("/models")
LEAVES = ("a", "b", "c")
ENSEMBLES = ("x", "y", "z")
_FOLLOWS = "c"  # the instances of this model are autoscaled
MAX_INSTANCES = 4


class DrawnRepository:
    """Models without steps, and ensembles over them and over each other.

    For each model it stores the versions, their files and the number of instances. `folders`
    contains the folders of overrides and how often each was removed.
    """

    def __init__(self, world: World, oracles: LifecycleOracles) -> None:
        self._world = world
        self._oracles = oracles
        self._random = world.random
        self._notes = itertools.count(1)
        self.steps: dict[str, list[str]] = {name: [] for name in LEAVES}
        for name in ENSEMBLES:
            self.steps[name] = self.draw_steps(name)
        self.versions = {name: {"1": "0"} for name in self.steps}
        for name in LEAVES:
            if world.chance(0.5):
                self.versions[name]["2"] = "0"
        self.counts = dict.fromkeys(self.steps, 2)
        self.absent: set[str] = set()
        self.ambiguous: set[str] = set()
        self.broken: set[str] = set()  # models whose configuration is invalid
        self.folders: dict[Path, int] = {}

    def draw_steps(self, name: str) -> list[str]:
        """Draw the step models of an ensemble, sometimes with a cycle."""
        below = [*LEAVES, *(ensemble for ensemble in ENSEMBLES if ensemble < name)]
        if self._world.chance(0.2):
            below += [ensemble for ensemble in ENSEMBLES if ensemble > name]
        return sorted(self._random.sample(below, self._random.randint(1, 2)))

    def has_environments(self) -> bool:
        return False

    def change(self) -> None:
        name = self._random.choice([*self.steps])
        changes = [self._touch, self.scale] * 2
        changes += [self._add, self._remove, self._reshape, self._toggle]
        self._random.choice(changes)(name)

    def _touch(self, name: str) -> None:
        version = self._random.choice([*self.versions[name]])
        self.versions[name][version] = str(next(self._notes))

    def _add(self, name: str) -> None:
        version = self._random.choice("123")
        self.versions[name].setdefault(version, str(next(self._notes)))

    def _remove(self, name: str) -> None:
        if len(self.versions[name]) > 1:
            del self.versions[name][self._random.choice([*self.versions[name]])]

    def scale(self, name: str) -> None:
        """Change the number of instances in the configuration."""
        self.counts[name] = self._random.randint(1, 3)

    def _reshape(self, name: str) -> None:
        if name in ENSEMBLES:
            self.steps[name] = self.draw_steps(name)

    def _toggle(self, name: str) -> None:
        self._random.choice([self.absent, self.ambiguous, self.broken]).symmetric_difference_update(
            {name}
        )

    def draw_source(self, name: str) -> LoadSource:
        """Draw the configuration of a load request, possibly with files."""
        steps = self.draw_steps(name) if name in ENSEMBLES else []
        sent = {"steps": steps, "count": self._random.randint(1, 3), "note": next(self._notes)}
        files = {"1/model.py": b""} if self._world.chance(0.5) else {}
        return LoadSource(json.dumps(sent), files)

    def plan_of(self, name: str, source: LoadSource) -> LoadPlan:
        """Return the plan of a load from the current contents."""
        fingerprint = json.dumps([self.versions.get(name), self.counts.get(name)])
        try:
            specs = self._specs(name, source)
        except ShmserveError as error:
            ambiguous = name in self.ambiguous
            known = name in self.steps and name not in self.absent
            return LoadPlan(fingerprint, [], {}, error, known, ambiguous)
        return LoadPlan(fingerprint, specs, dict(self.steps))

    def _specs(self, name: str, source: LoadSource) -> list[VersionSpec]:
        if name not in self.steps or name in self.absent:
            raise NotFound("there is no such model folder")
        if name in self.ambiguous or name in self.broken:
            raise InvalidArgument("it cannot be read")
        sent = json.loads(source.config) if source.config else {}
        steps = sent.get("steps", self.steps[name])
        parameters = {"note": {"string_value": str(sent.get("note", ""))}}
        if name == _FOLLOWS:
            parameters["max_instances"] = {"string_value": str(MAX_INSTANCES)}
        written: dict[str, Any] = {
            "name": name,
            "parameters": parameters,
            "instance_group": [{"count": sent.get("count", self.counts[name])}],
        }
        if steps:
            written["ensemble_scheduling"] = {"step": [{"model_name": step} for step in steps]}
            written["instance_group"] = []
        config = ModelSpec.of(written)
        versions, folder = self.versions[name], _NOBODY / name
        if source.files:
            folder = _OVERRIDES / str(next(self._notes))
            versions = {"1": folder.name}
            self.folders[folder] = 0

        return [
            VersionSpec(name, version, folder, folder, config, fingerprint=files)
            for version, files in versions.items()
        ]

    def complete(self, spec: VersionSpec, completed: dict[str, Any]) -> ModelSpec:
        if None in completed.get("steps", ()):
            raise InvalidArgument("a model of its steps is not available")
        return spec.config

    def discard(self, spec: VersionSpec) -> None:
        folder = spec.model_dir
        self._oracles.discarded(folder)
        if folder in self.folders:
            self.folders[folder] += 1
            if self.folders[folder] > 1:
                self._oracles.broke(f"14: {folder} is removed twice")
