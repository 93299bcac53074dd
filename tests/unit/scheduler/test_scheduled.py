"""The state machine of a request."""

import pytest

from shmserve.errors import IllegalEvent
from shmserve.scheduler.requests.scheduled import (
    NO_SUBMIT,
    TRANSITIONS,
    Client,
    Event,
    ScheduledRequest,
    State,
)


@pytest.mark.parametrize("state", list(State))
@pytest.mark.parametrize("event", list(Event))
def test_events_follow_the_table_of_transitions(state: State, event: Event) -> None:
    request = ScheduledRequest(1, Client(b"1.a", print), 1, 1, b"", 0, 0, 0, 0, 0, NO_SUBMIT)
    request.state = state
    if event in TRANSITIONS[state]:
        request.transition(event)
        assert request.state is TRANSITIONS[state][event]
    else:
        with pytest.raises(IllegalEvent):
            request.transition(event)
        assert request.state is state


def test_every_path_of_transitions_ends() -> None:
    assert TRANSITIONS[State.DONE] == {}
    for state in State:
        visited, unvisited = set(), [state]
        while unvisited:
            current = unvisited.pop()
            visited.add(current)
            unvisited += [
                next_state
                for next_state in TRANSITIONS[current].values()
                if next_state not in visited
            ]
        assert State.DONE in visited
