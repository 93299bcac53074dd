"""The state table: every state is reachable, an illegal event raises and changes nothing."""

from __future__ import annotations

import pytest

from shmserve.supervisor.models.instances import (
    TRANSITIONS,
    IllegalTransition,
    Instance,
    InstanceState,
)


def instance() -> Instance:
    return Instance(0, "m_0_0", "cpu", "CPU", 0)


def test_every_state_has_an_event_and_can_be_reached() -> None:
    rows = TRANSITIONS.values()
    assert {state for row in rows for state in row} == {*InstanceState}
    assert {target for row in rows for target in row.values()} == {*InstanceState}


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
