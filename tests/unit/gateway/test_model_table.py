"""The version that serves a request whose body took its time, while models come and go."""

from __future__ import annotations

from typing import Any, cast

import pytest

from shmserve.errors import Unavailable
from shmserve.gateway.links import RequestDispatcher
from shmserve.gateway.model_table import ModelTable
from tests.rigs.gateway_rig import SIMPLE, Scheduler, publication


class Link:
    """A scheduler's, which is used as long as a model sends to it."""

    endpoint = "ipc:///nowhere"
    users = 0

    def scheduler(self, endpoint: str) -> Link:
        assert endpoint == self.endpoint
        return self

    def use(self) -> None:
        self.users += 1

    def leave(self) -> None:
        self.users -= 1


def published(link: Link, **others: Any) -> Any:
    return publication({**SIMPLE, **others}, cast("Scheduler", link))


def test_what_was_resolved_is_current_until_it_is_replaced_or_withdrawn() -> None:
    link = Link()
    models = ModelTable(cast("RequestDispatcher", link))
    models.publish(published(link))
    resolved = models.resolve("simple", "")
    assert models.current(resolved) is resolved
    models.publish(published(link))
    again = models.current(resolved)
    assert again is not resolved
    assert again is models.resolve("simple", "1")
    models.publish(published(link, max_batch_size=3))
    with pytest.raises(Unavailable, match="was loaded with another configuration while"):
        models.current(resolved)
    models.withdraw("simple", "1")
    for each in (resolved, again):
        with pytest.raises(Unavailable, match="version 1 is not at ready state"):
            models.current(each)
    assert link.users == 0


def test_names_of_models_that_were_withdrawn_are_forgotten() -> None:
    link = Link()
    models = ModelTable(cast("RequestDispatcher", link))
    for number in range(5_000):
        models.withdraw(f"m{number}", "1")
    assert len(models._withdrawn) == 4096
    with pytest.raises(Unavailable):  # one that is remembered
        models.resolve("m4999", "1")
    models.publish(published(link))
    models.withdraw("simple", "1")
    models.publish(published(link))
    assert "simple" not in models._withdrawn


def test_readiness_changes_nothing_else() -> None:
    """A worker that dies costs no gateway what it has prepared."""
    link = Link()
    models = ModelTable(cast("RequestDispatcher", link))
    models.publish(published(link))
    model = models.resolve("simple", "")
    for ready in (False, True):
        models.set_ready("simple", "1", ready)
        assert models.resolve("simple", "1") is model
        assert model.ready is ready
    models.set_ready("simple", "2", False)
    models.set_ready("other", "1", False)
    assert model.ready
