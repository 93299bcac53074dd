"""An ensemble's steps, as far as others serve them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from shmserve.ipc.model_spec import ModelSpec
from shmserve.supervisor.models.instances import Lifetime, VersionSpec
from shmserve.supervisor.models.model_version import EnsembleInstances

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


def steps_of(*ready: str, labels: dict[str, list[str]] | None = None) -> EnsembleInstances:
    """An ensemble over "a" and "b", whose outputs Y have labels; some of the models are ready."""

    def find(name: str, version: str) -> Any:
        instances = SimpleNamespace(labels={"Y": [name]})
        return SimpleNamespace(instances=instances, problem="", ready=name in ready)

    folder, nothing = Path("/tmp"), MagicMock()
    spec = VersionSpec("e", "1", folder, folder, ModelSpec.of(CONFIG), labels or {})
    parts = (nothing, spec, nothing, Lifetime(), nothing, lambda spec, completed: spec.config)
    return EnsembleInstances(*parts, find=find)


@pytest.mark.parametrize(("own", "label"), [({}, "b"), ({"Z": ["own"]}, "own")])
def test_an_output_has_the_labels_of_the_model_that_makes_it(
    own: dict[str, list[str]], label: str
) -> None:
    steps = steps_of("a", "b", labels=own)
    asyncio.run(steps.complete_config())
    assert steps.labels == {"Z": [label]}


def test_it_is_ready_while_all_its_models_are() -> None:
    assert steps_of("a", "b").any_ready
    assert not steps_of("a").any_ready
