"""The state table: every state is reachable, an illegal event raises and changes nothing."""

from __future__ import annotations

import pytest

from shmserve.supervisor.models.version.spec import (
    INSTANCE,
    IllegalTransition,
    InstanceState,
    instance_after,
)


def test_every_state_has_a_row_and_every_event_leads_somewhere() -> None:
    assert set(INSTANCE) == set(InstanceState)
    assert all(target in INSTANCE for row in INSTANCE.values() for target in row.values())


def test_illegal_events_raise() -> None:
    with pytest.raises(IllegalTransition):
        instance_after(InstanceState.FAILED, "restart")


def test_a_worker_that_dies_and_comes_back() -> None:
    state = InstanceState.STARTING
    for event in ("started", "loaded", "exited", "restart", "started", "loaded", "stop", "exited"):
        state = instance_after(state, event)
    assert state is InstanceState.STOPPED
