"""The states of a request: each message is handled once, lost schedulers resubmit or fail."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.errors import Unavailable
from shmserve.ipc.messages import inference as m
from shmserve.ipc.messages.inference import MAX_TIMEOUT_US, Response, make_submit
from shmserve.ipc.scheduler_client import (
    CANNOT_RUN_AGAIN,
    LOST_AFTER_RESPONSE,
    NO_SCHEDULER,
    InflightRequest,
    SchedulerClient,
    Successors,
)
from shmserve.ipc.tensors.descriptors import Memory, Range, TensorRef
from shmserve.ipc.tensors.schemas import Inferred, Packed, pack_inferred
from tests.rigs.scheduler_rig import in_place_work

OLD, NEW = "ipc://old", "ipc://new"
WORKER = Memory(1, 4321, 5, 6, 1 << 20, True)
REQUEST: Packed = (b"schema", [b"data"])


def submit(number: int = 1, packed_request: Packed = REQUEST, request_id: str = "") -> m.Submit:
    return m.Submit(number, *packed_request, 0, 0, 0, 0, request_id)


class SentMessages:
    """Links that record queued messages, and the last messages from lost schedulers."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Any]] = []
        self.last_messages: dict[str, list[Any]] = {}
        self.opened: set[str] = set()
        self.full = False

    def open(self, endpoint: str) -> None:
        if self.full:
            raise Unavailable("no link can be made")
        self.opened.add(endpoint)

    def queue(self, endpoint: str, message: Any, byte_size: int = 0) -> None:
        self.open(endpoint)
        self.sent.append((endpoint, message))

    def post(self, endpoint: str, message: Any) -> None:
        if endpoint in self.opened:
            self.sent.append((endpoint, message))

    defer = post

    def drain(self, endpoint: str, receive: Callable[[str, Any], None]) -> None:
        for message in self.last_messages.pop(endpoint, []):
            receive(endpoint, message)
        self.opened.discard(endpoint)

    def of_type(self, kind: type[Any]) -> list[tuple[str, Any]]:
        return [(endpoint, message) for endpoint, message in self.sent if type(message) is kind]


class Client(SchedulerClient["Request"]):
    """A client with its links. `serving` is the endpoint that `find` returns."""

    def __init__(self, successors: Successors | None = None) -> None:
        self.links = SentMessages()
        self.serving: str | None = ""
        super().__init__(self.links, lambda request, refusal: self.serving, successors)

    def receive(self, message: Any, endpoint: str = OLD) -> None:
        self.handle(endpoint, message)

    def lose(self, endpoint: str, successor: str) -> None:
        self.successors.add(endpoint, successor)
        self.handle_loss(endpoint)


class Request(InflightRequest):
    """A request that records messages; with `repeats` its response cannot be read."""

    def __init__(self, client: Client, endpoint: str = OLD, **of_submit: Any) -> None:
        super().__init__(submit(**of_submit))
        self.client = client
        self.received: list[Response] = []
        self.freed = 0
        self.awaits_response = True
        self.repeats = False
        client.submit(self, endpoint)

    def is_awaited(self) -> bool:
        return self.awaits_response

    def handle(self, message: Response) -> None:
        self.received.append(message)
        if self.repeats and isinstance(message, m.Finished):
            self.repeats = False
            self.client.submit(self, self.endpoint)

    def free(self) -> None:
        self.freed += 1


class BrokenRequest(Request):
    def handle(self, message: Response) -> None:
        raise RuntimeError("broken")


@pytest.fixture
def client() -> Client:
    return Client()


def failure_message(
    number: int = 1, code: str = "INVALID_ARG", *, is_early: bool = False
) -> m.Failed:
    return m.Failed(number, code, "why", 0, is_early)


def response_message(number: int = 1, *, final: bool = False) -> m.Responded:
    return m.Responded(number, "", "", b"schema", [b"data"], final)


def lent_response(number: int = 1, *, offset: int = 4096) -> m.Finished:
    output = TensorRef("OUT", "INT8", (64,), Range(WORKER, offset, 64))
    return m.Finished(number, *pack_inferred(Inferred((output,))))


def last_failure(request: Request) -> m.Failed:
    message = request.received[-1]
    assert isinstance(message, m.Failed)
    return message


def test_a_response_ends_a_request_and_frees_its_memory(client: Client) -> None:
    for end in (m.Finished(1, b"s", [b"data"]), failure_message(), response_message(final=True)):
        request = Request(client)
        assert client
        client.receive(end)
        client.receive(end)  # a duplicate belongs to no request
        assert (request.received, request.freed, bool(client)) == ([end], 1, False)


def test_responses_before_the_last_free_nothing(client: Client) -> None:
    request = Request(client)
    client.receive(response_message())
    client.receive(response_message())
    assert (len(request.received), request.freed, request.response_count) == (2, 0, 2)
    client.receive(response_message(final=True))
    assert (len(request.received), request.freed) == (3, 1)


def test_an_early_failure_keeps_the_memory_until_it_is_settled(client: Client) -> None:
    request = Request(client)
    client.receive(failure_message(is_early=True))
    assert len(request.received) == 1 and client and request.freed == 0
    client.receive(lent_response())  # a later response of the worker is discarded
    assert client.links.of_type(m.Release) == [(OLD, m.Release(4321, [4096], 1))]
    client.receive(m.Settled(1), NEW)  # a message from another scheduler is ignored
    assert request.freed == 0
    client.receive(m.Settled(1))
    client.receive(m.Settled(1))
    assert len(request.received) == 1 and request.freed == 1 and not client


def test_outputs_of_a_response_to_no_request_are_released(client: Client) -> None:
    """The request is unknown, has ended, or was moved to another scheduler."""
    request = Request(client, number=2)
    client.receive(lent_response(1))
    client.receive(lent_response(2), NEW)
    client.receive(lent_response(2))
    client.receive(lent_response(2))
    assert len(request.received) == 1
    client.links.opened.add(NEW)
    client.receive(lent_response(2), NEW)
    release = m.Release(4321, [4096], 1)
    assert client.links.of_type(m.Release) == [(OLD, release), (OLD, release), (NEW, release)]


def test_outputs_in_the_requesters_own_memory_are_not_released(client: Client) -> None:
    class OwnerRequest(Request):
        def own_memories(self) -> set[int]:
            return {WORKER.id}

    OwnerRequest(client)
    client.receive(failure_message(is_early=True))
    client.receive(lent_response())
    assert client.links.of_type(m.Release) == []


def test_a_refused_request_is_resubmitted_to_the_current_scheduler(client: Client) -> None:
    request = Request(client)
    client.serving = NEW
    client.receive(failure_message(code="UNAVAILABLE"))
    assert (request.received, request.freed, request.endpoint) == ([], 0, NEW)
    assert client.links.of_type(m.Submit) == [(OLD, request.submit), (NEW, request.submit)]
    # The successor fails, too, and there is no further scheduler.
    client.receive(failure_message(code="UNAVAILABLE"), NEW)
    assert (len(request.received), request.freed) == (1, 1)


def test_a_finder_may_keep_a_request(client: Client) -> None:
    request = Request(client)
    client.serving = None
    client.receive(failure_message(code="UNAVAILABLE"))
    assert (request.received, request.freed, bool(client)) == ([], 0, False)
    client.submit(request, NEW)
    client.lose(NEW, "")
    assert (request.received, request.freed, bool(client)) == ([], 0, False)


@pytest.mark.parametrize("cause", ["begun", "left", "early", "another code"])
def test_a_refusal_ends_a_request_that_cannot_be_resent(client: Client, cause: str) -> None:
    request = Request(client)
    client.serving = NEW
    if cause == "begun":
        client.receive(response_message())
    request.awaits_response = cause != "left"
    code = "INTERNAL" if cause == "another code" else "UNAVAILABLE"
    client.receive(failure_message(code=code, is_early=cause == "early"))
    assert last_failure(request).code == code and request.freed == (cause != "early")


def test_a_request_that_is_submitted_again_keeps_its_memory(client: Client) -> None:
    request = Request(client)
    request.repeats = True
    client.receive(m.Finished(1, b"of a worker that died", []))
    assert client.pending and request.freed == 0
    client.receive(m.Finished(1, b"schema", [b"data"]))
    assert not client.pending and request.freed == 1


def test_the_memory_of_a_request_that_cannot_take_its_response_is_free(client: Client) -> None:
    request = BrokenRequest(client)
    with pytest.raises(RuntimeError):
        client.receive(m.Finished(1, b"", []))
    assert request.freed == 1 and not client


def test_only_pending_requests_are_cancelled_or_credited(client: Client) -> None:
    request = Request(client)
    client.cancel(request, keeps_reading=True)
    client.credit(request, 3)
    client.receive(m.Finished(1, b"", []))
    client.cancel(request)
    client.credit(request, 3)
    assert client.links.sent[1:] == [(OLD, m.Cancel(1, True)), (OLD, m.Credit(1, 3))]


def test_a_request_without_a_link_fails_once(client: Client) -> None:
    client.links.full = True
    request = Request(client)
    assert last_failure(request).message == "[request id: <id_unknown>] no link can be made"
    assert (len(request.received), request.freed, bool(client)) == (1, 1, False)


# --- losses


def test_no_unneeded_link_to_a_successor_is_opened(client: Client) -> None:
    """A client without requests or memory of a lost scheduler opens no link to its successor."""
    client.lose(OLD, NEW)
    client.release(OLD, [])
    assert client.links.opened == set()


@pytest.mark.parametrize("successor", [NEW, ""])
def test_requests_of_lost_schedulers_move_or_fail(client: Client, successor: str) -> None:
    """A request fails that has a response, may have lost its inputs, or is not awaited."""
    (fresh, begun_request, retried_request, impatient_request, early_request, answered_request) = (
        Request(
            client,
            number=number,
            request_id="me",
            packed_request=in_place_work() if number == 3 else REQUEST,
        )
        for number in range(1, 7)
    )
    other = Request(client, "ipc://other", number=7)
    client.receive(response_message(begun_request.submit.id))
    impatient_request.awaits_response = False
    client.receive(failure_message(early_request.submit.id, is_early=True))
    client.links.last_messages[OLD] = [m.Finished(6, b"", [])]
    client.lose(OLD, successor)
    settled = (
        begun_request, retried_request, impatient_request, early_request, answered_request,
    )  # fmt: skip
    assert [r.freed for r in settled] == [1] * 5 and other.freed == 0
    assert [type(message) for message in answered_request.received] == [m.Finished]
    assert impatient_request.received == []
    failures = [
        (begun_request, LOST_AFTER_RESPONSE),
        (retried_request, CANNOT_RUN_AGAIN),
        *([] if successor else [(fresh, NO_SCHEDULER)]),
    ]
    for request, reason in failures:
        assert last_failure(request).code == "UNAVAILABLE"
        assert last_failure(request).message == f"[request id: me] {reason}"
    assert fresh.freed == (not successor)
    assert set(client.pending) == ({1, 7} if successor else {7}) and not client.settling
    if successor:
        assert client.links.of_type(m.Submit)[-1] == (NEW, fresh.submit) and fresh.endpoint == NEW


def test_requests_of_a_lost_scheduler_move_to_the_current_scheduler(client: Client) -> None:
    request = Request(client)
    client.serving = NEW
    client.lose(OLD, "")
    assert request.endpoint == NEW and client.links.of_type(m.Submit)[-1] == (NEW, request.submit)
    client.serving = OLD  # the exit of the new scheduler is not known yet
    client.lose(NEW, "")
    assert last_failure(request).message.endswith(NO_SCHEDULER)


def test_a_request_for_a_lost_scheduler_is_sent_to_its_last_successor(client: Client) -> None:
    client.lose(OLD, "ipc://between")
    client.lose("ipc://between", NEW)
    request = Request(client)
    assert request.endpoint == NEW and client.links.of_type(m.Submit) == [(NEW, request.submit)]
    client.lose(NEW, "")
    assert last_failure(Request(client, number=2)).message.endswith(NO_SCHEDULER)


@pytest.mark.parametrize("read_time", ["before", "after"])
def test_outputs_read_after_a_scheduler_died_are_released_by_its_successor(
    client: Client, read_time: str
) -> None:
    """A link to the successor is opened for it if none exists."""
    if read_time == "before":
        client.links.last_messages[OLD] = [lent_response()]
    client.lose(OLD, NEW)
    if read_time == "after":
        client.discard(OLD, lent_response())
    assert client.links.sent == [(NEW, m.Release(4321, [4096], 1))]


def test_a_response_that_cannot_be_taken_stops_no_failover(client: Client) -> None:
    broken_request, other_request = BrokenRequest(client, number=1), Request(client, number=2)
    client.links.last_messages[OLD] = [m.Finished(1, b"", [])]
    client.lose(OLD, NEW)
    assert broken_request.freed == 1 and other_request.endpoint == NEW


def test_lost_requests_fail_without_a_link_to_the_successor(client: Client) -> None:
    request = Request(client)
    client.links.full = True
    client.lose(OLD, NEW)
    assert last_failure(request).message.endswith("no link can be made") and request.freed == 1


def test_old_losses_are_removed() -> None:
    successors = Successors()
    for number in range(10_000):
        successors.add(f"s{number}", f"s{number + 1}")
    assert "s0" not in successors and "s9999" in successors
    assert successors.latest("s9990") == "s10000"
    assert successors.latest("unknown") == "unknown"


def test_withdrawing_all_frees_settling_requests(client: Client) -> None:
    first_request, second_request = Request(client, number=1), Request(client, number=2)
    client.receive(failure_message(1, is_early=True))
    assert client.withdraw_all() == [second_request]
    assert (first_request.freed, second_request.freed, bool(client)) == (1, 0, False)


EVENTS = (
    *("finished", "responded", "final", "failed", "early", "unavailable", "settled"),
    *("left", "serving", "nobody", "lost old", "lost new"),
)


@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(1, 3)), max_size=30))
def test_each_request_is_ended_and_its_memory_freed_once(events: list[tuple[str, int]]) -> None:
    """Holds for any messages of a scheduler in any order."""
    client = Client()
    requests = {number: Request(client, number=number) for number in (1, 2, 3)}
    for event, number in events:
        endpoint = requests[number].endpoint
        match event:
            case "finished":
                client.handle(endpoint, m.Finished(number, b"", []))
            case "responded" | "final":
                client.handle(endpoint, response_message(number, final=event == "final"))
            case "failed" | "early":
                client.handle(endpoint, failure_message(number, is_early=event == "early"))
            case "unavailable":
                client.handle(endpoint, failure_message(number, "UNAVAILABLE"))
            case "settled":
                client.handle(endpoint, m.Settled(number))
            case "left":
                requests[number].awaits_response = False
            case "serving" | "nobody":
                client.serving = NEW if event == "serving" else ""
            case "lost old":
                client.lose(OLD, NEW)
            case "lost new":
                client.lose(NEW, "ipc://newest")
        for request in requests.values():
            check(client, request)
    for request in client.withdraw_all():
        request.fail("the end")
    assert all(request.freed == 1 for request in requests.values())


def check(client: Client, request: Request) -> None:
    number = request.submit.id
    final = [r for r in request.received if not isinstance(r, m.Responded) or r.final]
    assert len(final) <= 1 and request.freed <= 1
    assert request.received[-1:] == final or not final  # the final response is the last message
    if number in client.pending:
        assert not final and not request.freed and number not in client.settling
        assert request.endpoint not in client.successors
    elif number in client.settling:
        assert final and not request.freed
    else:
        assert request.freed == 1 and (final or not request.awaits_response)


# --- the message


@pytest.mark.parametrize(
    ("limits", "deadline_us"),
    [
        ({}, None),
        ({"timeout_us": 5}, None),
        ({"limit_us": 7, "limit_origin": "--x"}, 7),
        ({"timeout_us": 2**64 - 1}, None),
        ({"limit_us": 10**30}, MAX_TIMEOUT_US),
        ({"caller_deadline_ns": 1_003_000}, 3),
        ({"caller_deadline_ns": 1_003_000, "limit_us": 2, "limit_origin": "--x"}, 2),
        ({"caller_deadline_ns": 1_003_000, "limit_us": 4, "limit_origin": "--x"}, 3),
    ],
)
def test_the_shortest_limit_is_the_deadline(limits: dict[str, Any], deadline_us: int) -> None:
    arrived_ns = 1_000_000
    submit = make_submit(7, b"s", [b"d"], arrived_ns, request_id="me", priority=3, **limits)
    deadline_ns = arrived_ns + deadline_us * 1000 if deadline_us is not None else 0
    timeout_us = limits.get("timeout_us", 0)  # models read it as it was sent
    deadline_origin = limits.get("limit_origin", "") if deadline_us != 3 else ""
    fields = (7, b"s", [b"d"], arrived_ns, deadline_ns, timeout_us, 3, "me")
    assert submit == m.Submit(*fields, deadline_origin=deadline_origin)


def test_a_caller_may_handle_a_finished_request_itself() -> None:
    client = Client()
    request = Request(client)
    finished_message = m.Finished(1, b"schema", [])
    assert client.remove_finished(NEW, finished_message) is None, "another scheduler's"
    assert client.remove_finished(OLD, m.Finished(2, b"schema", [])) is None, "unknown"
    assert client.remove_finished(OLD, finished_message) is request and not client
    assert client.remove_finished(OLD, finished_message) is None, "it has ended"
    assert (request.received, request.freed) == ([], 0)
