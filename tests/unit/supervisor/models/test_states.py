"""The state table: every state is reachable, an illegal event raises and changes nothing."""

from __future__ import annotations

import pytest

from shmserve.supervisor.models.version.instances import (
    INSTANCE,
    IllegalTransition,
    Instance,
    InstanceState,
)


def instance() -> Instance:
    return Instance(0, "m_0_0", "cpu", "CPU", 0)


def test_every_state_has_a_row_and_every_event_leads_somewhere() -> None:
    assert set(INSTANCE) == set(InstanceState)
    assert all(target in INSTANCE for row in INSTANCE.values() for target in row.values())


def test_illegal_events_raise() -> None:
    made = instance()
    with pytest.raises(IllegalTransition):
        made.transition("restart")
    assert made.state is InstanceState.STARTING


def test_a_worker_that_dies_and_comes_back() -> None:
    made = instance()
    for event in ("started", "loaded", "exited", "restart", "started", "loaded", "stop", "exited"):
        made.transition(event)
    assert made.state is InstanceState.STOPPED
