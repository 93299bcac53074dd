"""The life of a request between its submission and the last word of a scheduler."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.ipc.inflight import (
    BEGUN,
    LONGEST_TIMEOUT_US,
    ONCE,
    InflightRequest,
    InflightTable,
    Response,
    make_submit,
)
from shmserve.ipc.messages import inference as m
from shmserve.ipc.tensors.inference import Packed
from tests.rigs.scheduler_rig import work_in_place

OLD, NEW = "ipc://old", "ipc://new"
REQUEST: Packed = (b"schema", [b"data"])


def submit(number: int = 1, work: Packed = REQUEST, request_id: str = "") -> m.Submit:
    return m.Submit(number, *work, 0, 0, 0, 0, request_id)


class Request(InflightRequest):
    """Notes what it is told. `patient`: somebody waits; `movable`: its owner knows another
    scheduler; `repeats`: an answer that its owner could not read, who submits it again."""

    __slots__ = ("freed", "heard", "movable", "patient", "repeats", "table")

    def __init__(self, table: InflightTable[Request], **of_submit: Any) -> None:
        super().__init__(submit(**of_submit), OLD)
        self.table = table
        self.heard: list[Response] = []
        self.freed = 0
        self.patient = True
        self.movable = self.repeats = False
        table.add(self)

    def awaited(self) -> bool:
        return self.patient

    def respond(self, message: Response) -> None:
        self.heard.append(message)
        if self.repeats and isinstance(message, m.Finished):
            self.repeats = False
            self.table.add(self)

    def goes_elsewhere(self, message: m.Failed) -> bool:
        if self.movable:
            self.movable = False
            self.endpoint = NEW
            self.table.add(self)
            return True
        return False

    def free(self) -> None:
        self.freed += 1


@pytest.fixture
def table() -> InflightTable[Request]:
    return InflightTable()


def failed(number: int = 1, code: str = "INVALID_ARG", *, early: bool = False) -> m.Failed:
    return m.Failed(number, code, "why", 0, early)


def responded(number: int = 1, *, final: bool = False) -> m.Responded:
    return m.Responded(number, "", "", b"schema", [b"data"], final)


def test_an_answer_ends_a_request_and_frees_its_memory(table: InflightTable[Request]) -> None:
    for message in (m.Finished(1, b"schema", [b"data"]), failed(), responded(final=True)):
        request = Request(table)
        assert table and table.take(message)
        assert (request.heard, request.freed, bool(table)) == ([message], 1, False)
        assert not table.take(message)  # a second one is of no request


def test_responses_before_the_last_free_nothing(table: InflightTable[Request]) -> None:
    request = Request(table)
    assert table.take(responded()) and table.take(responded())
    assert (len(request.heard), request.freed, request.responses) == (2, 0, 2)
    table.take(responded(final=True))
    assert (len(request.heard), request.freed) == (3, 1)


def test_an_early_failure_keeps_the_memory_until_it_is_settled(
    table: InflightTable[Request],
) -> None:
    request = Request(table)
    table.take(failed(early=True))
    assert len(request.heard) == 1 and table and request.freed == 0
    assert not table.take(responded())  # what its worker goes on to say is nobody's
    assert table.take(m.Settled(1))
    assert len(request.heard) == 1 and request.freed == 1 and not table
    assert not table.take(m.Settled(1))


def test_a_refusal_may_send_a_request_elsewhere_before_its_first_response(
    table: InflightTable[Request],
) -> None:
    request = Request(table)
    request.movable = True
    assert table.take(failed(code="UNAVAILABLE"))
    assert (request.heard, request.freed, request.endpoint) == ([], 0, NEW)
    table.take(failed(code="UNAVAILABLE"))  # there as well, and nobody else serves the model
    assert (len(request.heard), request.freed) == (1, 1)


@pytest.mark.parametrize("how", ["begun", "left", "early", "another code"])
def test_a_refusal_ends_what_cannot_go_elsewhere(table: InflightTable[Request], how: str) -> None:
    request = Request(table)
    request.movable = True
    if how == "begun":
        table.take(responded())
    request.patient = how != "left"
    code = "INTERNAL" if how == "another code" else "UNAVAILABLE"
    table.take(failed(code=code, early=how == "early"))
    assert request.movable and isinstance(request.heard[-1], m.Failed)
    assert request.freed == (how != "early")


def test_an_owner_that_submits_again_keeps_the_memory(table: InflightTable[Request]) -> None:
    request = Request(table)
    request.repeats = True
    table.take(m.Finished(1, b"of a worker that died", []))
    assert table.pending and request.freed == 0
    table.take(m.Finished(1, b"schema", [b"data"]))
    assert not table.pending and request.freed == 1


def test_an_owner_that_fails_has_freed_its_memory(table: InflightTable[Request]) -> None:
    class Broken(Request):
        __slots__ = ()

        def respond(self, message: Response) -> None:
            raise RuntimeError("broken")

    request = Broken(table)
    with pytest.raises(RuntimeError):
        table.take(m.Finished(1, b"", []))
    assert request.freed == 1 and not table


def test_what_a_lost_scheduler_had(table: InflightTable[Request]) -> None:
    """It runs again unless it has begun to respond, may have lost its inputs, or is not waited for;
    what others have is left alone."""
    fresh, begun, once, left, early, other = (
        Request(
            table,
            number=number,
            request_id="me",
            **({"work": work_in_place()} if number == 3 else {}),
        )
        for number in range(1, 7)
    )
    other.endpoint = NEW
    table.take(responded(begun.submit.id))
    left.patient = False
    table.take(failed(early.submit.id, early=True))
    assert table.lose(OLD) == [fresh]
    assert table.pending == {6: other} and not table.settling
    assert [each.freed for each in (fresh, begun, once, left, early, other)] == [0, 1, 1, 1, 1, 0]
    for request, why in ((begun, BEGUN), (once, ONCE)):
        message = request.heard[-1]
        assert isinstance(message, m.Failed) and message.code == "UNAVAILABLE"
        assert message.message == f"[request id: me] {why}"
    assert left.heard == []


def test_dropping_all_frees_what_is_settling(table: InflightTable[Request]) -> None:
    first, second = Request(table, number=1), Request(table, number=2)
    table.take(failed(1, early=True))
    assert table.drop() == [second]
    assert (first.freed, second.freed, bool(table)) == (1, 0, False)


EVENTS = (
    *("finished", "responded", "final", "failed", "early", "unavailable", "settled"),
    *("left", "movable", "lost old", "lost new"),
)


@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(1, 3)), max_size=30))
def test_each_request_is_ended_once_and_its_memory_freed_once(
    story: list[tuple[str, int]],
) -> None:
    """Whatever a scheduler says, in whatever order."""
    table: InflightTable[Request] = InflightTable()
    requests = {number: Request(table, number=number) for number in (1, 2, 3)}
    for event, number in story:
        match event:
            case "finished":
                table.take(m.Finished(number, b"", []))
            case "responded" | "final":
                table.take(responded(number, final=event == "final"))
            case "failed" | "early":
                table.take(failed(number, early=event == "early"))
            case "unavailable":
                table.take(failed(number, "UNAVAILABLE"))
            case "settled":
                table.take(m.Settled(number))
            case "left":
                requests[number].patient = False
            case "movable":
                requests[number].movable = True
            case _:
                for again in table.lose(OLD if event == "lost old" else NEW):
                    assert not again.responses and again.patient
                    again.endpoint = NEW
                    table.add(again)
        for request in requests.values():
            check(table, request)
    for request in table.drop():
        request.fail("the end")
    assert all(request.freed == 1 for request in requests.values())


def check(table: InflightTable[Request], request: Request) -> None:
    number = request.submit.id
    last = [
        message
        for message in request.heard
        if not isinstance(message, m.Responded) or message.final
    ]
    assert len(last) <= 1 and request.freed <= 1
    assert request.heard[-1:] == last or not last  # nothing follows the last
    if number in table.pending:
        assert not last and not request.freed and number not in table.settling
    elif number in table.settling:
        assert last and not request.freed
    else:
        assert request.freed == 1 and (last or not request.patient)


# --- the message


@pytest.mark.parametrize(
    ("limits", "deadline_us"),
    [
        ({}, None),
        ({"timeout_us": 5}, 5),
        ({"limit_us": 7}, 7),
        ({"timeout_us": 5, "limit_us": 7, "call_limit_us": 6}, 5),
        ({"timeout_us": 8, "limit_us": 7, "call_limit_us": 6}, 6),
        ({"timeout_us": 10**30}, LONGEST_TIMEOUT_US),
        ({"call_limit_us": 10**30}, LONGEST_TIMEOUT_US),
        ({"ends_ns": 1_003_000}, 3),
        ({"ends_ns": 1_003_000, "timeout_us": 2}, 2),
        ({"ends_ns": 1_003_000, "timeout_us": 4}, 3),
    ],
)
def test_the_shortest_limit_is_the_deadline(limits: dict[str, Any], deadline_us: int) -> None:
    arrived_ns = 1_000_000
    made = make_submit(7, b"s", [b"d"], arrived_ns, request_id="me", priority=3, **limits)
    deadline_ns = arrived_ns + deadline_us * 1000 if deadline_us is not None else 0
    timeout_us = min(limits.get("timeout_us", 0), LONGEST_TIMEOUT_US)
    assert made == m.Submit(7, b"s", [b"d"], arrived_ns, deadline_ns, timeout_us, 3, "me")
