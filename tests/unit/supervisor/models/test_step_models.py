"""An ensemble's steps, as far as others serve them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from shmserve.ipc.messages import publications as m
from shmserve.ipc.model_spec import ModelSpec
from shmserve.supervisor.models.version.spec import Lifetime, StepModel, VersionSpec
from shmserve.supervisor.models.version.step_models import EnsembleInstances

CONFIG: dict[str, Any] = {
    "name": "e",
    "output": [{"name": "Z"}, {"name": "W"}],
    "ensemble_scheduling": {
        "step": [
            {"model_name": "a", "output_map": {"Y": "middle"}},
            {"model_name": "b", "output_map": {"Y": "Z", "V": "W"}},
        ]
    },
}


class Serving:
    """Models "a" and "b", whose outputs Y have labels; `ready` are some of them."""

    def __init__(self, *ready: str) -> None:
        self._ready = ready

    def published_now(self, step: StepModel) -> m.ModelPublished:
        """It serves."""
        labels = {"labels": {"Y": [step.name]}}
        return m.ModelPublished(step.name, "1", ModelSpec.of({}), labels, "", True, True, 0.0, 0)

    def failure_now(self, step: StepModel) -> str:
        """None is broken."""
        return ""

    def ready_now(self, step: StepModel) -> bool:
        """Whether it takes requests."""
        return step.name in self._ready


def steps_of(models: Serving, labels: dict[str, list[str]] | None = None) -> EnsembleInstances:
    folder = Path("/tmp")
    config = ModelSpec.of(CONFIG)
    spec = VersionSpec("e", "1", folder, folder, config, lambda found: config, labels or {})
    nothing = MagicMock()
    return EnsembleInstances(nothing, spec, nothing, Lifetime(), nothing, models=models)


@pytest.mark.parametrize(("own", "label"), [({}, "b"), ({"Z": ["own"]}, "own")])
def test_an_output_has_the_labels_of_the_model_that_makes_it(
    own: dict[str, list[str]], label: str
) -> None:
    steps = steps_of(Serving("a", "b"), own)
    asyncio.run(steps.complete_config())
    assert steps.labels == {"Z": [label]}


def test_it_is_ready_while_all_its_models_are() -> None:
    assert steps_of(Serving("a", "b")).any_ready
    assert not steps_of(Serving("a")).any_ready
