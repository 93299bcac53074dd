"""The version that serves a request whose body took its time, while models come and go."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest

from shmserve.errors import Unavailable
from shmserve.gateway.model_table import ModelTable
from tests.rigs.gateway_rig import SIMPLE, publication


def published(**others: Any) -> Any:
    return publication({**SIMPLE, **others}, MagicMock(endpoint="ipc:///nowhere"))


def test_what_was_resolved_is_current_until_it_is_replaced_or_withdrawn() -> None:
    models = ModelTable(MagicMock())
    models.publish(published())
    resolved = models.resolve("simple", "")
    assert models.current(resolved) is resolved
    models.publish(published())
    again = models.current(resolved)
    assert again is not resolved
    assert again is models.resolve("simple", "1")
    models.publish(published(max_batch_size=3))
    with pytest.raises(Unavailable, match="was loaded with another configuration while"):
        models.current(resolved)
    models.withdraw("simple", "1")
    for each in (resolved, again):
        with pytest.raises(Unavailable, match="version 1 is not at ready state"):
            models.current(each)


def test_names_of_models_that_were_withdrawn_are_forgotten() -> None:
    models = ModelTable(MagicMock())
    for number in range(5_000):
        models.withdraw(f"m{number}", "1")
    assert len(models._withdrawn) == 4096
    with pytest.raises(Unavailable):  # one that is remembered
        models.resolve("m4999", "1")
    models.publish(published())
    models.withdraw("simple", "1")
    models.publish(published())
    assert "simple" not in models._withdrawn


def test_readiness_changes_nothing_else() -> None:
    """A worker that dies costs no gateway what it has prepared."""
    models = ModelTable(MagicMock())
    models.publish(published())
    model = models.resolve("simple", "")
    for ready in (False, True):
        models.set_ready("simple", "1", ready)
        assert models.resolve("simple", "1") is model
        assert model.ready is ready
    models.set_ready("simple", "2", False)
    models.set_ready("other", "1", False)
    assert model.ready
