"""Requests that nobody waits for any more: what they were answered takes up a worker's memory; and
those that come too late."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from shmserve.errors import Unavailable
from shmserve.gateway.http.infer import HttpInference
from shmserve.gateway.inference.inference import Inference, submit
from shmserve.gateway.links import GatewayRequest, RequestDispatcher, SchedulerHandle
from shmserve.ipc.messages import inference as m
from shmserve.ipc.tensors.descriptors import Memory, Place, TensorRef
from shmserve.ipc.tensors.inference import SEQUENCE_START, Inferred, Packed, pack_inferred
from tests.rigs.scheduler_rig import work_in_place

WORKER = Memory(1, 4321, 5, 6, 1 << 20, True)
HELD_S = 0.05  # longer than what was read is held for the next request


class Link:
    """Keeps what is posted."""

    def __init__(self, endpoint: str, identity: str, take: Any) -> None:
        self.posted: list[Any] = []

        self.take = take
        self.last_words: list[Any] = []
        self.connected = True

    def post(self, message: Any) -> None:
        self.posted.append(message)

    def flush(self) -> None:
        pass

    def receive_remaining(self) -> None:
        for message in self.last_words:
            self.take(message)

    def retire(self) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(slots=True, eq=False)
class Asked(GatewayRequest):
    """A request that keeps what it is told."""

    heard: list[Any] = field(default_factory=list)

    def responded(self, message: Any) -> None:
        self.heard.append(message)


def asked(
    scheduler: SchedulerHandle,
    number: int,
    release: Callable[[], None] = lambda: None,
    work: Packed = (b"", []),
) -> Asked:
    """A request that is submitted."""
    submit = m.Submit(number, *work, 0, 0, 0, 0, "mine")
    request = Asked(submit, scheduler.endpoint, scheduler, release)
    scheduler.submit(request)
    return request


def answer() -> m.Finished:
    place = Place(WORKER, 4096, 64)
    return m.Finished(1, *pack_inferred(Inferred((TensorRef("OUT", "INT8", (64,), place),))))


@pytest.mark.parametrize("answered", ["before", "after"])
@pytest.mark.parametrize("kind", [HttpInference, Inference])
def test_an_answer_that_is_not_read_is_given_back(
    monkeypatch: pytest.MonkeyPatch, kind: Any, answered: str
) -> None:
    """Once, whether it came before the request was given up or after."""
    monkeypatch.setattr("shmserve.gateway.links.Link", Link)

    async def give_up() -> list[Any]:
        scheduler = SchedulerHandle("ipc://nowhere", lambda scheduler: None)
        built: Any = SimpleNamespace(trace=None)
        message = m.Submit(1, b"", [], 0, 0, 0, 0, "")
        how = (message, scheduler.endpoint, scheduler, lambda: None, built)
        if kind is Inference:
            request = Inference(*how, lambda inference: None)
        else:
            request = HttpInference(*how, HttpInference.arrived, MagicMock(), MagicMock())
        scheduler.submit(request)
        if answered == "before":
            scheduler._take(answer())
        request.cancel()
        if answered == "after":
            scheduler._take(answer())
        link: Any = scheduler.link
        return list(link.posted)

    posted = asyncio.run(give_up())
    assert posted.count(m.Release(4321, [4096])) == 1
    assert (m.Cancel(1) in posted) == (answered == "after")


def test_what_was_read_goes_with_the_next_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where another is in flight: it saves a wake-up; but no later than a moment after, and the
    last before the link closes."""
    monkeypatch.setattr("shmserve.gateway.links.Link", Link)

    async def read() -> list[type[Any]]:
        dispatcher = RequestDispatcher()
        scheduler = dispatcher.scheduler("ipc://nowhere")
        link: Any = scheduler.link
        for number in (1, 2):
            asked(scheduler, number)
            scheduler.discard(answer())
            assert type(link.posted[-1]) is m.Submit
        await asyncio.sleep(HELD_S)
        assert type(link.posted[-1]) is m.Release
        scheduler.discard(answer())
        scheduler.close()
        return [type(message) for message in link.posted]

    submitted = [m.Submit, m.Release, m.Submit]
    assert asyncio.run(read()) == [*submitted, m.Release, m.Release]


def failure(request: Asked) -> str:
    (failed,) = request.heard
    assert isinstance(failed, m.Failed)
    assert failed.code == "UNAVAILABLE" and failed.message.startswith("[request id: mine] ")
    return failed.message


@pytest.mark.parametrize("successor", ["ipc://new", ""])
def test_what_a_lost_scheduler_had_is_dealt_with(
    monkeypatch: pytest.MonkeyPatch, successor: str
) -> None:
    """What it had answered is read first; the rest goes to the successor, or is refused, as is what
    may have been written over its own input."""
    monkeypatch.setattr("shmserve.gateway.links.Link", Link)
    released: list[int] = []

    async def lose() -> tuple[RequestDispatcher, list[Asked]]:
        dispatcher = RequestDispatcher()
        scheduler = dispatcher.scheduler("ipc://old")
        requests = [
            asked(scheduler, number, partial(released.append, number), work)
            for number, work in ((1, (b"", [])), (2, (b"", [])), (3, work_in_place()))
        ]
        link: Any = scheduler.link
        link.last_words = [m.Finished(1, *pack_inferred(Inferred(())))]
        dispatcher.lost("ipc://old", successor)
        return dispatcher, requests

    dispatcher, (answered, other, in_place) = asyncio.run(lose())
    assert [type(message) for message in answered.heard] == [m.Finished]
    assert list(dispatcher._schedulers) == ([successor] if successor else [])
    if successor:
        link: Any = dispatcher.scheduler(successor).link
        assert link.posted == [other.submit]
        assert not other.over
        assert "may be changed" in failure(in_place)
        assert released == [1, 3]
    else:
        assert "no other serves the model" in failure(other)
        assert "may be changed" in failure(in_place)
        assert sorted(released) == [1, 2, 3]


def test_the_last_answer_of_a_lost_scheduler_takes_nothing_from_its_successor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A gateway that was stopped meanwhile hears of both at once, and reads the answer after."""
    monkeypatch.setattr("shmserve.gateway.links.Link", Link)

    async def lose() -> None:
        dispatcher = RequestDispatcher()
        old = dispatcher.scheduler("ipc://old")
        old.use()
        request = asked(old, 1)
        new = dispatcher.scheduler("ipc://new")
        new.use()  # the model's, which is published anew
        old.leave()
        link: Any = old.link
        link.last_words = [answer()]
        dispatcher.lost("ipc://old", "ipc://new")
        assert request.scheduler is old and request.over
        old.use()  # whoever sends its outputs
        old.leave()
        assert new.users == 1 and dispatcher.scheduler("ipc://new") is new

    asyncio.run(lose())


@pytest.mark.parametrize("known", ["before", "after", "never"])
def test_what_is_read_when_its_scheduler_is_lost_is_given_back_by_way_of_the_successor(
    monkeypatch: pytest.MonkeyPatch, known: str
) -> None:
    """Whether it was read before anybody knew of a successor, or long after that."""
    monkeypatch.setattr("shmserve.gateway.links.Link", Link)

    async def lose() -> tuple[list[Any], list[Any]]:
        dispatcher = RequestDispatcher()
        old = dispatcher.scheduler("ipc://old")
        old.use()
        link: Any = old.link
        if known == "before":
            link.connected = False
            old.discard(answer())
        dispatcher.lost("ipc://old", "" if known == "never" else "ipc://new")
        if known != "before":
            link.connected = False
            old.discard(answer())
        new: Any = dispatcher.scheduler("ipc://new").link
        return link.posted, new.posted

    old, new = asyncio.run(lose())
    assert old == []
    assert new == ([] if known == "never" else [m.Release(4321, [4096])])


def test_any_number_of_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is told, and the end; what comes after who waited has left is given back."""
    monkeypatch.setattr("shmserve.gateway.links.Link", Link)
    finished = answer()
    body = (finished.schema, finished.data)

    async def stream() -> tuple[list[Any], list[Any], list[str]]:
        dispatcher = RequestDispatcher()
        scheduler = dispatcher.scheduler("ipc://nowhere")
        scheduler.use()
        heard: list[Any] = []
        released: list[str] = []
        link: Any = scheduler.link
        for number in (1, 2):
            request = asked(scheduler, number, partial(released.append, f"of {number}"))
            request.heard = heard
            scheduler._take(m.Responded(number, "", "", *body, False))
            request.grant(4)
            if number == 2:
                request.give_up()
            scheduler._take(m.Responded(number, "", "", *body, False))
            scheduler._take(m.Responded(number, "", "", b"", [], True))
            request.grant(5)  # too late: it has ended
        await asyncio.sleep(HELD_S)
        return heard, link.posted, released

    heard, posted, released = asyncio.run(stream())
    assert [(message.id, message.final) for message in heard] == [
        *((1, False), (1, False), (1, True)),
        (2, False),
    ]
    assert [message for message in posted if not isinstance(message, m.Submit)] == [
        *(m.Credit(1, 4), m.Credit(2, 4), m.Cancel(2)),
        m.Release(4321, [4096]),
    ]
    assert released == ["of 1", "of 2"]


@pytest.mark.parametrize("end", ["cancelled", "reported", "lost"])
def test_a_scheduler_without_users_is_dropped_after_its_last_report(
    monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Also where none comes: its link would stay for good."""
    monkeypatch.setattr("shmserve.gateway.links.Link", Link)

    async def report() -> list[bool]:
        dispatcher = RequestDispatcher()
        scheduler = dispatcher.scheduler("ipc://nowhere")
        scheduler.use()
        future = dispatcher.report(scheduler)
        scheduler.leave()
        known = [scheduler.endpoint in dispatcher._schedulers]
        match end:
            case "cancelled":
                future.cancel()
            case "reported":
                scheduler._take(m.StatisticsReported(1, {}))
            case "lost":
                dispatcher.lost(scheduler.endpoint, "")
        await asyncio.wait([future])
        if not future.cancelled():
            future.exception()
        await asyncio.sleep(0)
        return [*known, scheduler.endpoint in dispatcher._schedulers]

    assert asyncio.run(report()) == [True, False]


STOPPING = "Server is stopping, scheduler for model has stopped accepting new inference requests"


@pytest.mark.parametrize(
    ("prefix", "stateful", "request_id", "text"),
    [
        ("", False, "", f"[request id: <id_unknown>] {STOPPING}"),
        ("", False, "x", f"[request id: x] {STOPPING}"),
        ("", True, "", STOPPING),
        ("", True, "x", f"[request id: x] {STOPPING}"),
        ("in ensemble 'e', ", False, "", f"in ensemble 'e', [request id: <id_unknown>] {STOPPING}"),
    ],
)
def test_what_begins_while_the_server_ends_is_refused(
    prefix: str, stateful: bool, request_id: str, text: str
) -> None:
    """In the words of Triton's schedulers; who has begun a sequence goes on."""
    leaving: Any = SimpleNamespace(refusing=True)
    model: Any = SimpleNamespace(prefix=prefix, stateful=stateful)
    begins = SimpleNamespace(id=request_id, correlation_id=5, flags=SEQUENCE_START)
    built: Any = MagicMock(infer_request=begins, model=model)
    client: Any = None
    with pytest.raises(Unavailable) as caught:
        submit(leaving, built, client, 0, Inference, None)
    assert caught.value.message == text
    built.release.assert_called_once()
