"""A simulated model repository that changes while it is read, and the load plans from it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shmserve.errors import InvalidArgument, NotFound, ShmserveError
from shmserve.ipc.model_spec import ModelSpec
from shmserve.supervisor.models.load_planner import VersionSpec
from shmserve.supervisor.models.orders import LoadPlan, LoadSource
from tests.simulation.world import World

if TYPE_CHECKING:
    from tests.simulation.lifecycle.oracles import LifecycleOracles

_OVERRIDES_DIR = Path("/overrides")
_MODELS_DIR = Path("/models")
LEAVES = ("a", "b", "c")
ENSEMBLES = ("x", "y", "z")
_AUTOSCALED_MODEL = "c"  # the instances of this model are autoscaled
MAX_INSTANCES = 4


class DrawnRepository:
    """Models without steps, and ensembles over them and over each other.

    For each model it stores the versions, their files and the number of instances.
    `removals_by_folder` has the folders of overrides, with the number of removals of each.
    """

    def __init__(self, world: World, oracles: LifecycleOracles) -> None:
        self._world = world
        self._oracles = oracles
        self._random = world.random
        self._note_numbers = itertools.count(1)
        self.steps: dict[str, list[str]] = {name: [] for name in LEAVES}
        for name in ENSEMBLES:
            self.steps[name] = self.draw_steps(name)
        self.versions = {name: {"1": "0"} for name in self.steps}
        for name in LEAVES:
            if world.chance(0.5):
                self.versions[name]["2"] = "0"
        self.instance_counts = dict.fromkeys(self.steps, 2)
        self.absent_models: set[str] = set()
        self.ambiguous_models: set[str] = set()
        self.invalid_models: set[str] = set()  # models whose configuration is invalid
        self.removals_by_folder: dict[Path, int] = {}

    def draw_steps(self, name: str) -> list[str]:
        """Draw the step models of an ensemble, sometimes with a cycle."""
        candidates = [*LEAVES, *(ensemble for ensemble in ENSEMBLES if ensemble < name)]
        if self._world.chance(0.2):
            candidates += [ensemble for ensemble in ENSEMBLES if ensemble > name]
        return sorted(self._random.sample(candidates, self._random.randint(1, 2)))

    def has_environments(self) -> bool:
        return False

    def change(self) -> None:
        name = self._random.choice([*self.steps])
        changes = [self._change_files, self.change_instance_count] * 2
        changes += [self._add_version, self._remove_version, self._change_steps, self._toggle_fault]
        self._random.choice(changes)(name)

    def _change_files(self, name: str) -> None:
        version = self._random.choice([*self.versions[name]])
        self.versions[name][version] = str(next(self._note_numbers))

    def _add_version(self, name: str) -> None:
        version = self._random.choice("123")
        self.versions[name].setdefault(version, str(next(self._note_numbers)))

    def _remove_version(self, name: str) -> None:
        if len(self.versions[name]) > 1:
            del self.versions[name][self._random.choice([*self.versions[name]])]

    def change_instance_count(self, name: str) -> None:
        self.instance_counts[name] = self._random.randint(1, 3)

    def _change_steps(self, name: str) -> None:
        if name in ENSEMBLES:
            self.steps[name] = self.draw_steps(name)

    def _toggle_fault(self, name: str) -> None:
        self._random.choice(
            [self.absent_models, self.ambiguous_models, self.invalid_models]
        ).symmetric_difference_update({name})

    def draw_source(self, name: str) -> LoadSource:
        """Draw the configuration of a load request, possibly with files."""
        steps = self.draw_steps(name) if name in ENSEMBLES else []
        fields = {
            "steps": steps,
            "count": self._random.randint(1, 3),
            "note": next(self._note_numbers),
        }
        files = {"1/model.py": b""} if self._world.chance(0.5) else {}
        return LoadSource(json.dumps(fields), files)

    def plan_of(self, name: str, source: LoadSource) -> LoadPlan:
        fingerprint = json.dumps([self.versions.get(name), self.instance_counts.get(name)])
        try:
            specs = self._plan_specs(name, source)
        except ShmserveError as error:
            is_ambiguous = name in self.ambiguous_models
            is_known = name in self.steps and name not in self.absent_models
            return LoadPlan(fingerprint, [], {}, error, is_known, is_ambiguous)
        return LoadPlan(fingerprint, specs, dict(self.steps))

    def _plan_specs(self, name: str, source: LoadSource) -> list[VersionSpec]:
        if name not in self.steps or name in self.absent_models:
            raise NotFound("there is no such model folder")
        if name in self.ambiguous_models or name in self.invalid_models:
            raise InvalidArgument("it cannot be read")
        sent_fields = json.loads(source.config) if source.config else {}
        steps = sent_fields.get("steps", self.steps[name])
        parameters = {"note": {"string_value": str(sent_fields.get("note", ""))}}
        if name == _AUTOSCALED_MODEL:
            parameters["max_instances"] = {"string_value": str(MAX_INSTANCES)}
        fields: dict[str, Any] = {
            "name": name,
            "parameters": parameters,
            "instance_group": [{"count": sent_fields.get("count", self.instance_counts[name])}],
        }
        if steps:
            fields["ensemble_scheduling"] = {"step": [{"model_name": step} for step in steps]}
            fields["instance_group"] = []
        config = ModelSpec.of(fields)
        versions, folder = self.versions[name], _MODELS_DIR / name
        if source.files:
            folder = _OVERRIDES_DIR / str(next(self._note_numbers))
            versions = {"1": folder.name}
            self.removals_by_folder[folder] = 0

        return [
            VersionSpec(name, version, folder, config, fingerprint=files)
            for version, files in versions.items()
        ]

    def finalise_config(self, spec: VersionSpec, reported_properties: dict[str, Any]) -> ModelSpec:
        if None in reported_properties.get("steps", ()):
            raise InvalidArgument("a model of its steps is not available")
        return spec.config

    def discard(self, spec: VersionSpec) -> None:
        folder = spec.model_dir
        self._oracles.folder_discarded(folder)
        if folder in self.removals_by_folder:
            self.removals_by_folder[folder] += 1
            if self.removals_by_folder[folder] > 1:
                self._oracles.report_violation(f"14: {folder} is removed twice")
