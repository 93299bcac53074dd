"""Requests that no client waits for: the memory of their responses is released."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from shmserve.errors import Unavailable
from shmserve.gateway.http.infer import HttpInference
from shmserve.gateway.inference.in_flight import UnaryInference, submit_inference
from shmserve.gateway.links import GatewayRequest, GatewaySchedulers
from shmserve.ipc.messages import inference as m
from shmserve.ipc.tensors.descriptors import Memory, Range, TensorRef
from shmserve.ipc.tensors.schemas import SEQUENCE_START, Inferred, pack_inferred
from shmserve.ipc.transport.router import Router

WORKER = Memory(1, 4321, 5, 6, 1 << 20, True)


@dataclass(slots=True, eq=False)
class RecordingRequest(GatewayRequest):
    """A request that records the messages that it receives."""

    messages: list[Any] = field(default_factory=list)

    def handle_response(self, message: Any) -> None:
        self.messages.append(message)


class Rig:
    """A gateway's client of schedulers, in an event loop, and a real scheduler's end of a link."""

    def __init__(self, folder: Path) -> None:
        self.router = Router(f"ipc://{folder}/scheduler")
        self.endpoint = self.router.endpoint
        self.schedulers = GatewaySchedulers()
        self.schedulers.open(self.endpoint)
        self.received: list[Any] = []
        self._peer = b""

    def send_request(self, n: int, release: Callable[[], None] = lambda: None) -> RecordingRequest:
        submit = m.Submit(n, b"", [], 0, 0, 0, 0, "mine")
        request = RecordingRequest(submit, self.schedulers, release)
        self.schedulers.submit(request, self.endpoint)
        return request

    def read(self, response: m.Finished) -> None:
        self.schedulers.discard(self.endpoint, response)

    async def receive(self, count: int) -> list[Any]:
        while len(self.received) < count:
            await asyncio.sleep(0)
            for peer, message in self.router.receive():
                self._peer = peer
                self.received.append(message)
        return self.received

    async def send_response(self, *messages: Any) -> None:
        for message in messages:
            self.router.post(self._peer, message)
        self.router.flush()

    def close(self) -> None:
        self.schedulers.close()
        self.router.close()


async def turn_until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0)


def answer(number: int = 1) -> m.Finished:
    output = TensorRef("OUT", "INT8", (64,), Range(WORKER, 4096, 64))
    return m.Finished(number, *pack_inferred(Inferred((output,))))


@contextlib.asynccontextmanager
async def running_rig(tmp_path: Path) -> AsyncIterator[Rig]:
    with contextlib.closing(Rig(tmp_path)) as rig:
        async with asyncio.timeout(10):
            yield rig


@pytest.mark.parametrize("answer_time", ["before", "after"])
@pytest.mark.parametrize("kind", [HttpInference, UnaryInference])
async def test_an_unread_response_is_released(tmp_path: Path, kind: Any, answer_time: str) -> None:
    """The response is released once, whether it arrived before or after the cancellation."""
    async with running_rig(tmp_path) as rig:
        built_request: Any = SimpleNamespace(trace=None, response_templates=None)
        message = m.Submit(1, b"", [], 0, 0, 0, 0, "")
        notified_requests: list[Any] = []
        arguments = (
            message, rig.schedulers, lambda: None, built_request, notified_requests.append,
        )  # fmt: skip
        request = UnaryInference(*arguments)
        if kind is HttpInference:
            request = HttpInference(*arguments, MagicMock(), MagicMock())
        rig.schedulers.submit(request, rig.endpoint)
        if answer_time == "before":
            rig.schedulers.handle(rig.endpoint, answer())
            assert request.message is not None
        request.cancel()
        if answer_time == "after":
            rig.schedulers.handle(rig.endpoint, answer())
        is_late = answer_time == "after"
        assert notified_requests == ([] if is_late else [request]) and request.message is None
        expected = [message, *([m.Cancel(1)] if is_late else []), m.Release(4321, [4096], 1)]
        assert await rig.receive(len(expected)) == expected


async def test_releases_are_sent_with_the_next_request(tmp_path: Path) -> None:
    """A release waits for a further request to save a wake-up, but only briefly."""
    frames: list[list[type[Any]]] = []
    async with running_rig(tmp_path) as rig:
        link = rig.schedulers._table.open(rig.endpoint)
        flush = link.flush

        def record_frames() -> bool:
            frames.append([type(message) for message in link.pending])
            return flush()

        link.flush = record_frames  # type: ignore[method-assign]
        for number in (1, 2):
            rig.send_request(number)
            rig.read(answer())
        assert await rig.receive(4)
        rig.schedulers.handle(rig.endpoint, m.Finished(1, b"", []))
        rig.schedulers.handle(rig.endpoint, m.Finished(2, b"", []))
        rig.read(answer())  # no message in flight can carry the release
        await rig.receive(5)
    sent_types = [frame for frame in frames if frame]
    assert sent_types == [[m.Submit], [m.Release, m.Submit, m.Release], [m.Release]]


async def test_a_request_may_have_any_number_of_responses(tmp_path: Path) -> None:
    """Each response is delivered, and the end. Responses after a cancellation are released."""
    finished_message = answer()
    body = (finished_message.schema, finished_message.data)
    sent: list[Any] = []
    releases: list[str] = []
    async with running_rig(tmp_path) as rig:
        for number in (1, 2):
            request = rig.send_request(number, partial(releases.append, f"of {number}"))
            request.messages = sent
            rig.schedulers.handle(rig.endpoint, m.Responded(number, "", "", *body, False))
            rig.schedulers.credit(request, 4)
            if number == 2:
                request.abandon()
            rig.schedulers.handle(rig.endpoint, m.Responded(number, "", "", *body, False))
            rig.schedulers.handle(rig.endpoint, m.Responded(number, "", "", b"", [], True))
            rig.schedulers.credit(request, 5)  # too late: it has ended
        notices = [r for r in await rig.receive(6) if not isinstance(r, m.Submit)]
        release_message = m.Release(4321, [4096], 1)
        assert notices == [m.Credit(1, 4), m.Credit(2, 4), m.Cancel(2), release_message]
    assert [(r.id, r.final) for r in sent] == [*((1, False), (1, False), (1, True)), (2, False)]
    assert releases == ["of 1", "of 2"]


async def test_requests_and_responses_pass_a_real_link(tmp_path: Path) -> None:
    async with running_rig(tmp_path) as rig:
        first_call, second_call = rig.send_request(1), rig.send_request(2)
        await rig.receive(2)
        await rig.send_response(m.Finished(2, b"", []), m.Failed(1, "INTERNAL", "no", 0, False))
        await turn_until(lambda: not rig.schedulers)
        assert [type(message) for message in first_call.messages] == [m.Failed]
        assert [type(message) for message in second_call.messages] == [m.Finished]
        assert first_call.has_ended and second_call.has_ended


@pytest.mark.parametrize("end_cause", ["cancelled", "reported", "lost"])
async def test_a_report_is_that_of_the_current_scheduler(tmp_path: Path, end_cause: str) -> None:
    async with running_rig(tmp_path) as rig:
        rig.schedulers.successors.add("ipc://old", rig.endpoint)
        future = rig.schedulers.request_statistics("ipc://old")
        (request,) = await rig.receive(1)
        match end_cause:
            case "cancelled":
                future.cancel()
            case "reported":
                await rig.send_response(m.StatisticsReported(request.id, {"executions": 1}))
            case "lost":
                rig.schedulers.fail_over(rig.endpoint, "")
        await asyncio.wait([future])
        if end_cause == "reported":
            assert future.result() == {"executions": 1}
        elif end_cause == "lost":
            assert isinstance(future.exception(), Unavailable)
        await asyncio.sleep(0)
        assert not rig.schedulers._pending_statistics


@pytest.mark.parametrize("inflight", [False, True])
async def test_the_link_to_an_exited_scheduler_is_closed(tmp_path: Path, inflight: bool) -> None:
    async with running_rig(tmp_path) as rig:
        request = rig.send_request(1) if inflight else None
        (link,) = rig.schedulers._table
        rig.router.close()
        await turn_until(lambda: not link.connected)
        assert list(rig.schedulers._table) == ([link] if inflight else [])
        rig.schedulers.fail_over(rig.endpoint, "")
        assert not list(rig.schedulers._table)
        if request is not None:
            (failed_message,) = request.messages
            assert failed_message.message.startswith("[request id: mine] ")
            assert "no other scheduler serves it" in failed_message.message


STOPPING_ERROR = (
    "Server is stopping, scheduler for model has stopped accepting new inference requests"
)


@pytest.mark.parametrize(
    ("prefix", "stateful", "request_id", "text"),
    [
        ("", False, "", f"[request id: <id_unknown>] {STOPPING_ERROR}"),
        ("", False, "x", f"[request id: x] {STOPPING_ERROR}"),
        ("", True, "", STOPPING_ERROR),
        ("", True, "x", f"[request id: x] {STOPPING_ERROR}"),
        ("in ensemble 'e', ", False, "",
         f"in ensemble 'e', [request id: <id_unknown>] {STOPPING_ERROR}"),
    ],
)  # fmt: skip
def test_drains_refuse_requests(prefix: str, stateful: bool, request_id: str, text: str) -> None:
    """The text is that of Triton's schedulers; a client that has begun a sequence continues."""
    draining_gateway: Any = SimpleNamespace(refuses_requests=True)
    model: Any = SimpleNamespace(error_prefix=prefix, is_stateful=stateful)
    sequence_start = SimpleNamespace(id=request_id, correlation_id=5, flags=SEQUENCE_START)
    built_request: Any = MagicMock(infer_request=sequence_start, model=model)
    client: Any = None
    with pytest.raises(Unavailable) as caught:
        submit_inference(draining_gateway, built_request, client, 0, UnaryInference)
    assert caught.value.message == text
    built_request.release.assert_called_once()
