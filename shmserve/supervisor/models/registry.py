"""The model registry: the models by name, and the status of each version.

The registry starts and ends no process. A status is derived from the state of its model. The
lifecycle reports each model that has changed (`update`); other statuses are not derived again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, Self

from shmserve.errors import NotFound
from shmserve.ipc.messages.supervision import LoadsFailed
from shmserve.supervisor.models.model_version import ModelVersion
from shmserve.supervisor.models.orders import UNLOADED, LoadOutcome, ModelEntry, Order, OrderPhase
from shmserve.supervisor.models.repository import DUPLICATE_MODEL, ModelFolder

MAX_UNLOADED = 4096  # maximum number of unloaded models that the index and errors mention
_RESTARTING = "a process is being restarted"


class ModelRegistry:
    """The table of all models, with a summary of the status of each."""

    def __init__(self) -> None:
        self.models: dict[str, ModelEntry] = {}
        self.failed_loads = 0
        self._summaries: dict[str, ModelSummary] = {}

    def model(self, name: str) -> ModelEntry:
        """Return the entry of a model; create it if needed."""
        return self.models.setdefault(name, ModelEntry(name))

    def remove_unused(self, model: ModelEntry) -> list[ModelEntry]:
        """Remove a model that has neither orders nor statuses, and the oldest unloaded models.

        Returns:
            The removed models.
        """
        is_unused = not (model.orders or statuses(model)) and self.models.get(model.name) is model
        removed_models = [model] if is_unused else []
        if model.is_unloaded and len(self.models) > MAX_UNLOADED:
            needed_names = {step for user in self.models.values() for step in user.needed_steps}
            models = (entry for entry in self.models.values() if entry.name not in needed_names)
            unloaded_models = [m for m in models if m.is_unloaded and not any(m.versions)]
            removed_models += unloaded_models[:-MAX_UNLOADED]
        for entry in removed_models:
            del self.models[entry.name]
            self._summaries.pop(entry.name, None)
        return removed_models

    def update(self, names: Iterable[str]) -> None:
        """Derive the summaries of models that have changed; other summaries stay valid."""
        for name in names:
            if name in self.models:
                self._summaries[name] = ModelSummary.of(self.models[name])
            else:
                self._summaries.pop(name, None)

    def failures(self) -> LoadsFailed:
        """Return the versions that should serve and do not, and the number of failed loads."""
        summaries = sorted(self._summaries.items())
        versions = [[name, version] for name, s in summaries for version in sorted(s.problems)]
        return LoadsFailed(versions, self.failed_loads)

    # --- versions

    @property
    def live_versions(self) -> list[ModelVersion]:
        """Return the versions that may have a process, serving or not."""
        return [version for model in self.models.values() for version in model.versions]

    def workers_on(self, device_id: int) -> list[int]:
        """Return the worker processes that serve on a GPU."""
        return [pid for v in self.live_versions for pid in v.instances.pids_on(device_id)]

    def find_published(self, name: str, version: str) -> ModelVersion | None:
        """Return the published version of a model, or None; version "" is the latest."""
        model = self.models.get(name)
        return None if model is None else model.published.get(version or model.latest)

    def load_failure(self, name: str) -> str:
        """Return why versions of a model could not be loaded; empty if no load failed."""
        problems = {} if name not in self.models else ModelSummary.of(self.models[name]).problems
        return " ".join(
            f"version {number} is at UNAVAILABLE state: {text};" if number else text
            for number, text in problems.items()
        )

    def describe_published(self, name: str, version: str) -> dict[str, Any]:
        """Return the endpoint and the properties of a model, for the models that call it.

        Raises:
            NotFound: The model or the version does not serve.
        """
        model = self.models.get(name)
        if model is None or not statuses(model):
            raise NotFound(f"Request for unknown model: '{name}' is not found")
        if not model.published:
            raise NotFound(f"Request for unknown model: '{name}' has no available versions")
        model_version = self.find_published(name, version)
        if model_version is None:
            raise NotFound(f"Request for unknown model: '{name}' version {version} is not found")
        return {
            "endpoint": model_version.endpoint,
            "config": model_version.config.source,
            "version": model_version.spec.version,
            "ready": model_version.ready,
            "checks_ready": model_version.instances.checks_ready,
        }

    def pids_with_readiness_check(self, name: str, version: str) -> list[int]:
        """Return the workers that check the readiness of a version; empty if it is not ready."""
        model_version = self.find_published(name, version)
        if model_version is None or not model_version.ready:
            return []
        return model_version.instances.pids_with_readiness_check()

    def publish_counters(self) -> None:
        """Publish the counters of every serving version as events."""
        for model in self.models.values():
            for version in model.serving.values():
                version.scheduler.publish_counters()

    # --- ensembles

    def ensembles_of(self, name: str) -> list[ModelVersion]:
        """Return the ensembles with a step that runs a model, if they may have a process."""
        ensembles = [model for model in self.models.values() if model.has_steps]
        return [version for model in ensembles for version in model.versions if version.uses(name)]

    def loaded_for(self, name: str) -> list[str]:
        """Return the step models of an ensemble that were loaded only for this ensemble."""
        models = self.models
        used_steps = {s for user in models.values() if user.name != name for s in user.step_models}
        steps = models[name].step_models if name in models else []
        return [s for s in steps if s not in used_steps and s in models and models[s].is_step_only]

    def ensembles_using(self, model: ModelEntry) -> list[ModelEntry]:
        """Return the ensembles whose serving or incoming versions need a model."""
        return [
            user
            for user in self.models.values()
            if any(v.uses(model.name) for v in (*user.serving.values(), *user.incoming.values()))
        ]

    def loads_waiting_for(self, model: ModelEntry) -> list[Order]:
        """Return the loads of ensembles that need a model and have not started versions yet."""
        first_orders = [entry.orders[0] for entry in self.models.values() if entry.orders]
        waiting_orders = (order for order in first_orders if order.phase is OrderPhase.WAITING)
        return [order for order in waiting_orders if model.name in order.step_models]

    def users_to_end(self, version: ModelVersion) -> set[ModelVersion]:
        """Return the ensembles that need a version and must end before it.

        Versions that need one another in a cycle are excluded, since they would wait for ever.
        """
        return {user for user in self._users_of(version) if version not in self._users_of(user)}

    def _users_of(self, version: ModelVersion) -> set[ModelVersion]:
        """Return the ensembles that need a version, directly or through other ensembles."""
        ensembles_found: set[ModelVersion] = set()
        unvisited_versions = [version]
        while unvisited_versions:
            ensembles = set(self.ensembles_of(unvisited_versions.pop().spec.name)) - ensembles_found
            ensembles_found |= ensembles
            unvisited_versions += ensembles
        return ensembles_found

    def find_cycle(
        self, name: str, steps: Sequence[str], unloaded_steps: Mapping[str, list[str]]
    ) -> list[str]:
        """Return the cycle of ensembles that a model with these steps would close, or [].

        Args:
            name: The model.
            steps: The models that the model's steps would run.
            unloaded_steps: The steps of models that are not loaded, according to their folders.
        """
        acyclic_names = set[str]()  # ensembles that were visited, since many may use the same one

        def visit(ensemble: str, path: list[str]) -> list[str]:
            if ensemble in path:
                return [*path[path.index(ensemble) :], ensemble]
            if ensemble in acyclic_names:
                return []
            loaded_steps = self.models[ensemble].possible_steps if ensemble in self.models else []
            known_steps = loaded_steps or unloaded_steps.get(ensemble, [])
            for step in known_steps if path else steps:
                if cycle := visit(step, [*path, ensemble]):
                    return cycle
            acyclic_names.add(ensemble)
            return []

        return visit(name, [])

    # --- the repository index and the statuses

    def index(self, folders: Mapping[str, ModelFolder], ready_only: bool) -> list[dict[str, Any]]:
        """Return the repository index.

        Args:
            folders: The models of the repositories.
            ready_only: Whether only ready versions are listed.
        """
        statuses_by_model = {name: statuses(model) for name, model in self.models.items()}
        names = sorted(
            {*folders, *(name for name, versions in statuses_by_model.items() if versions)}
        )
        lists = (index_rows(n, statuses_by_model.get(n), folders.get(n), ready_only) for n in names)
        return [row for rows in lists for row in rows]

    def states(self) -> dict[tuple[str, str], Status]:
        """Return the status of each version, by name and version."""
        summaries = self._summaries.items()
        return {(n, v): state for n, summary in summaries for v, state in summary.states.items()}

    def progress(self) -> dict[str, str]:
        """Return the progress of each model that is loaded at the start."""
        summaries = self._summaries.items()
        return {name: summary.progress for name, summary in summaries if summary.progress}

    def all_ready(self) -> bool:
        """Check whether every model that should serve is ready."""
        return all(summary.is_ready for summary in self._summaries.values())


# --- statuses


class ModelState(StrEnum):
    """The state of a version in the repository index."""

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"
    ON_DEMAND = "ON_DEMAND"  # the model is loaded by its first request


class Status(NamedTuple):
    """The state of a version and the reason for it."""

    state: ModelState
    reason: str = ""


class ModelSummary(NamedTuple):
    """The facts about a model that the server reports.

    Attributes:
        states: The status of each version.
        is_ready: Whether every version that should serve is ready; true for models on demand.
        problems: The reasons why versions do not serve, by number; unloaded versions are left out.
        progress: The progress of a load at the server's start: "loading", "ready", or "failed" with
            reasons that were not logged; empty if the model is not loaded at the start.
    """

    states: dict[str, Status]
    is_ready: bool
    problems: dict[str, str]
    progress: str

    @classmethod
    def of(cls, model: ModelEntry) -> Self:
        """Return the summary of a model in its current state."""

        def should_serve(number: str) -> bool:
            return number in model.serving or model.outcomes[number].is_failure

        states = statuses(model)
        is_loading = any(status.state is ModelState.LOADING for status in states.values())
        reasons = {n: s.reason for n, s in states.items() if s.state is ModelState.UNAVAILABLE}
        is_ready = model.on_demand or not (is_loading or any(map(should_serve, reasons)))
        problems = {n: text for n, text in reasons.items() if model.outcomes.get(n) != UNLOADED}
        progress = "ready" if model.serving and is_ready else "loading"
        if problems:
            progress = _failure_text(model, problems)
        return cls(states, is_ready, problems, progress if model.is_expected else "")


def _failure_text(model: ModelEntry, problems: Mapping[str, str]) -> str:
    numbers = {number for number, outcome in model.outcomes.items() if outcome.is_logged}
    unlogged_problems = (
        (number, reason) for number, reason in problems.items() if number not in numbers
    )
    reasons = [
        f"version {n}: {reason}" if n else reason.rstrip("; \n") for n, reason in unlogged_problems
    ]
    return f"failed: {'; '.join(reasons)}" if reasons else "failed"


_UNLOADED_STATUS = Status(ModelState.UNAVAILABLE, UNLOADED.reason)


def statuses(model: ModelEntry) -> dict[str, Status]:
    """Return the status of each version of a model.

    A model on demand that was not loaded yet has one status, of version "".
    """
    retiring_versions = [version.spec.version for version in model.retiring]
    status_by_version = {
        **{number: _ended_status(model, outcome) for number, outcome in model.outcomes.items()},
        **dict.fromkeys(retiring_versions, Status(ModelState.UNLOADING)),
        **dict.fromkeys(model.incoming, Status(ModelState.LOADING)),
        **{number: _status_of(model.published[number]) for number in model.serving},
    }
    return status_by_version or ({"": Status(ModelState.ON_DEMAND)} if model.on_demand else {})


def _ended_status(model: ModelEntry, outcome: LoadOutcome) -> Status:
    if model.on_demand and outcome == UNLOADED and not model.serving:
        return Status(ModelState.ON_DEMAND)
    return Status(ModelState.UNAVAILABLE, outcome.reason)


def _status_of(version: ModelVersion) -> Status:
    if version.problem:
        return Status(ModelState.UNAVAILABLE, version.problem)
    return Status(ModelState.READY) if version.ready else Status(ModelState.LOADING, _RESTARTING)


def index_rows(
    name: str, by_version: Mapping[str, Status] | None, folder: ModelFolder | None, ready_only: bool
) -> list[dict[str, Any]]:
    """Return the rows of a model in the repository index.

    A model that was never loaded has one row with its name, and the problem of its folder if there
    is one. An unloaded model without a folder has no row.

    Args:
        name: The model.
        by_version: The statuses of its versions.
        folder: The model in the repositories.
        ready_only: Whether only ready versions are listed.
    """
    fault = folder.problem if folder is not None else ""
    # The problem is listed even if the model serves, since it prevents the next load.
    if fault == DUPLICATE_MODEL or not by_version:
        if ready_only:
            return []
        return [_row(name, "", Status(ModelState.UNAVAILABLE, fault)) if fault else {"name": name}]
    if folder is None and all(status == _UNLOADED_STATUS for status in by_version.values()):
        return []
    states = (ModelState.READY, ModelState.ON_DEMAND)
    rows = sorted(by_version.items(), key=lambda row: int(row[0] or 0))
    return [_row(name, v, status) for v, status in rows if not ready_only or status.state in states]


def _row(name: str, version: str, status: Status) -> dict[str, Any]:
    row = {"name": name, "version": version, "state": str(status.state), "reason": status.reason}
    return {key: value for key, value in row.items() if value}
