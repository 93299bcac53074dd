"""The status of each version in the repository index, derived from facts: what serves, what loads,
what is on its way out, and how what is not there any more ended (pure).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from shmserve.supervisor.models.model_version import ModelVersion
from shmserve.supervisor.models.orders import UNLOADED, LoadOutcome, ModelEntry
from shmserve.supervisor.models.repository import IN_SEVERAL, ModelFolder

_RESTARTING = "a process that ended is started again"


class ModelState(StrEnum):
    """The state of a version in the repository index."""

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"
    ON_DEMAND = "ON_DEMAND"  # is loaded when it is asked for


class Status(NamedTuple):
    """The state of a version, and the reason for it."""

    state: ModelState
    reason: str = ""


_GONE = Status(ModelState.UNAVAILABLE, UNLOADED.reason)


def statuses(model: ModelEntry) -> dict[str, Status]:
    """The status of each version of a model, as it is this moment. One on demand that was not
    loaded yet has the version ""."""
    found = {
        **{number: _ended(model, outcome) for number, outcome in model.outcomes.items()},
        **dict.fromkeys(model.leaving, Status(ModelState.UNLOADING)),
        **dict.fromkeys(model.coming, Status(ModelState.LOADING)),
        **{number: _of(model.shown[number]) for number in model.serving},
    }
    return found or ({"": Status(ModelState.ON_DEMAND)} if model.on_demand else {})


def _ended(model: ModelEntry, outcome: LoadOutcome) -> Status:
    if model.on_demand and outcome == UNLOADED and not model.serving:
        return Status(ModelState.ON_DEMAND)
    return Status(ModelState.UNAVAILABLE, outcome.reason)


def _of(version: ModelVersion) -> Status:
    if version.problem:
        return Status(ModelState.UNAVAILABLE, version.problem)
    return Status(ModelState.READY) if version.ready else Status(ModelState.LOADING, _RESTARTING)


def is_ready(model: ModelEntry) -> bool:
    """Whether all of a model serves that should; one on demand is loaded if it does not."""
    return model.on_demand or not any(
        status.state is ModelState.LOADING
        or (status.state is ModelState.UNAVAILABLE and _should_serve(model, number))
        for number, status in statuses(model).items()
    )


def _should_serve(model: ModelEntry, number: str) -> bool:
    return number in model.serving or model.outcomes[number].failed


def progress(model: ModelEntry) -> str:
    """The progress of the load of a model: "loading", "ready", or "failed" and why."""
    problems = [
        f"version {number}: {status.reason}" if number else status.reason
        for number, status in statuses(model).items()
        if status.state is ModelState.UNAVAILABLE and model.outcomes.get(number) != UNLOADED
    ]
    if problems:
        return f"failed: {'; '.join(problems)}"
    return "ready" if model.serving and is_ready(model) else "loading"


def index_rows(
    name: str, known: Mapping[str, Status] | None, folder: ModelFolder | None, ready: bool
) -> list[dict[str, Any]]:
    """The rows of the repository index for a model of which this is `known`, and which the
    repositories hold in `folder`; with `ready` those alone that are. One that was never loaded has
    a name, and why it cannot be, if so. There is none for what was unloaded and is not there."""
    problem = folder.problem if folder is not None else ""
    if problem == IN_SEVERAL or not known:  # whatever serves of it: it cannot be loaded again
        if ready:
            return []
        return [
            _row(name, "", Status(ModelState.UNAVAILABLE, problem)) if problem else {"name": name}
        ]
    if folder is None and all(status == _GONE for status in known.values()):
        return []
    return [
        _row(name, version, known[version])
        for version in sorted(known, key=_number)
        if not ready or known[version].state in (ModelState.READY, ModelState.ON_DEMAND)
    ]


def _number(version: str) -> int:
    return int(version or 0)


def _row(name: str, version: str, status: Status) -> dict[str, Any]:
    row = {"name": name, "version": version, "state": str(status.state), "reason": status.reason}
    return {key: value for key, value in row.items() if value}
