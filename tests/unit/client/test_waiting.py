"""Streams of responses at the client's end: credit, losses, leaving; the test is the scheduler."""

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import numpy as np
import pytest

from shmserve.client import aio, sync
from shmserve.client.request.prepare import PLAIN, Options, PackedRequest
from shmserve.client.request.waiting import ResponseStream, SharedChannel, ThreadChannel
from shmserve.client.server_state import ClientModel
from shmserve.errors import Disconnected, Internal, ShmserveError, TimedOut, Unavailable
from shmserve.ipc import credit
from shmserve.ipc.credit import FIRST_CREDIT, MAX_UNREAD_BYTES, RESPONSES_PER_CREDIT
from shmserve.ipc.messages import inference as m
from shmserve.ipc.messages.publications import ModelPublished
from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.tensors.descriptors import TensorRef
from shmserve.ipc.tensors.schemas import (
    Inference,
    Inferred,
    Packed,
    pack_inference,
    pack_inferred,
)
from shmserve.ipc.transport.router import Router
from tests.rigs.called_models import Peer
from tests.unit.client.test_channel import connection as _connection

connection = _connection
WORK = pack_inference(Inference(()))


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[Peer]:
    router = Router(f"ipc://{tmp_path}/scheduler")
    yield Peer(router)
    router.close()


@pytest.fixture
def channel(connection: Any) -> Iterator[ThreadChannel]:
    channel = ThreadChannel(connection)
    yield channel
    channel.close()


def open_stream(
    channel: Any, tmp_path: Path, freed: list[str], more: Options = PLAIN
) -> ResponseStream:
    """Return a stream at a played scheduler; `ended_ids` records when its memory is free."""
    config = {"name": "m", "max_batch_size": 0, "input": [], "output": []}
    endpoint = f"ipc://{tmp_path}/scheduler"
    published = ModelPublished("m", "1", ModelSpec.of(config), {}, endpoint, True, True, 0.0, 0)
    model = ClientModel(published, channel.connection.models)
    request = PackedRequest(model, *WORK, more, release_memory=lambda: freed.append("free"))
    return ResponseStream(channel, channel.open(request), None)


def pack_outputs(n: int, size: int = 1) -> Packed:
    data = np.full(size, n, np.int32).tobytes()
    return pack_inferred(Inferred((TensorRef("y", "INT32", (size,), data),)))


def make_response(number: int, n: int, *, size: int = 1, final: bool = False) -> m.Responded:
    return m.Responded(number, "", "", *pack_outputs(n, size), final)


def values(responses: Any) -> list[int]:
    return [int(response["y"][0]) for response in responses]


def test_credit_for_several_responses_is_one_message(
    channel: ThreadChannel, scheduler: Peer, tmp_path: Path
) -> None:
    ended_ids: list[str] = []
    stream = open_stream(channel, tmp_path, ended_ids)
    number = scheduler.next(m.Submit).id
    scheduler.send(*(make_response(number, n) for n in range(FIRST_CREDIT)))
    for n in range(RESPONSES_PER_CREDIT):
        assert values([next(stream)]) == [n]
    assert scheduler.is_silent()  # the last is its reader's until the next is asked for
    assert values([next(stream)]) == [RESPONSES_PER_CREDIT]
    assert scheduler.next(m.Credit) == m.Credit(number, RESPONSES_PER_CREDIT)  # type: ignore[type-var]
    assert not ended_ids
    scheduler.send(m.Responded(number, "", "", b"", [], True))
    assert values(stream) == [*range(RESPONSES_PER_CREDIT + 1, FIRST_CREDIT)]
    assert ended_ids == ["free"] and list(stream) == []


def test_large_responses_are_credited_sooner(
    channel: ThreadChannel, scheduler: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert credit.BYTES_PER_CREDIT < MAX_UNREAD_BYTES
    monkeypatch.setattr(credit, "BYTES_PER_CREDIT", 1000)
    stream = open_stream(channel, tmp_path, [])
    number = scheduler.next(m.Submit).id
    for n in range(3):
        scheduler.send(make_response(number, n, size=250))
        assert values([next(stream)]) == [n]
        if n:
            assert scheduler.next(m.Credit) == m.Credit(number, 1)  # type: ignore[type-var]
    scheduler.send(make_response(number, 3, final=True))
    assert values(stream) == [3]


@pytest.mark.parametrize("ending_cause", ["close", "collected"])
def test_closing_a_stream_cancels_it_and_ignores_later_responses(
    channel: ThreadChannel, scheduler: Peer, tmp_path: Path, ending_cause: str
) -> None:
    ended_ids: list[str] = []
    stream: ResponseStream | None = open_stream(channel, tmp_path, ended_ids)
    number = scheduler.next(m.Submit).id
    scheduler.send(make_response(number, 0), make_response(number, 1))
    assert stream is not None and values([next(stream)]) == [0]
    if ending_cause == "close":
        stream.close()
        assert list(stream) == []
        stream.close()
    stream = None
    gc.collect()
    assert scheduler.next(m.Cancel) == m.Cancel(number)
    scheduler.send(make_response(number, 2), m.Failed(number, "CANCELLED", "", 0, False))
    other_stream = open_stream(channel, tmp_path, [])
    scheduler.send(make_response(scheduler.next(m.Submit).id, 7, final=True))
    assert values(other_stream) == [7] and ended_ids == ["free"]


def test_an_error_may_be_followed_by_responses(
    channel: ThreadChannel, scheduler: Peer, tmp_path: Path
) -> None:
    stream = open_stream(channel, tmp_path, [])
    number = scheduler.next(m.Submit).id
    scheduler.send(m.Responded(number, "INTERNAL", "no", b"", [], False), make_response(number, 1))
    with pytest.raises(Internal, match="no"):
        next(stream)
    assert values([next(stream)]) == [1]
    scheduler.send(m.Responded(number, "INTERNAL", "the last", b"", [], True))
    with pytest.raises(Internal, match="the last"):
        next(stream)
    assert list(stream) == []


def test_the_servers_timeout_may_precede_the_clients(
    channel: ThreadChannel, scheduler: Peer, tmp_path: Path
) -> None:
    """Its word of it is the same to a program as the client's own."""
    stream = open_stream(channel, tmp_path, [], PLAIN._replace(deadline_ns=1))
    number = scheduler.next(m.Submit).id
    text = "Request timeout expired"
    stream._request.handle(m.Responded(number, "UNAVAILABLE", text, b"", [], True))
    with pytest.raises(TimedOut, match=text):
        next(stream)


def test_a_response_that_cannot_be_read_ends_the_stream(
    channel: ThreadChannel, scheduler: Peer, tmp_path: Path
) -> None:
    stream = open_stream(channel, tmp_path, [])
    number = scheduler.next(m.Submit).id
    scheduler.send(m.Responded(number, "", "", b"garbage", [], False))
    with pytest.raises(Internal, match="cannot be read"):
        next(stream)
    assert list(stream) == []
    channel.requests.flush()
    assert scheduler.next(m.Cancel) == m.Cancel(number)


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_lost_scheduler_s_streams_run_again_unless_they_have_begun(
    connection: Any, channel: ThreadChannel, scheduler: Peer, tmp_path: Path, has_begun: bool
) -> None:
    successor_router = Router(f"ipc://{tmp_path}/successor")
    successor, ended_ids = Peer(successor_router), list[str]()
    stream = open_stream(channel, tmp_path, ended_ids)
    submit = scheduler.next(m.Submit)
    if has_begun:
        scheduler.send(make_response(submit.id, 0))
        assert values([next(stream)]) == [0]
    connection.record_lost_scheduler(f"ipc://{tmp_path}/scheduler", successor_router.endpoint)
    if has_begun:
        with pytest.raises(Unavailable, match="after the request's first response"):
            next(stream)
        assert ended_ids == ["free"] and list(stream) == []
    else:
        channel.requests.process_events([])
        assert successor.next(m.Submit) == submit
        successor.send(make_response(submit.id, 5, final=True))
        assert values(stream) == [5]
    successor_router.close()


def test_a_unary_response_ends_it(channel: ThreadChannel, scheduler: Peer, tmp_path: Path) -> None:
    ended_ids: list[str] = []
    stream = open_stream(channel, tmp_path, ended_ids)
    scheduler.send(m.Finished(scheduler.next(m.Submit).id, *pack_outputs(3)))
    assert values(stream) == [3] and ended_ids == ["free"]


def test_a_thread_without_its_own_channel_can_stream(
    connection: Any, scheduler: Peer, tmp_path: Path
) -> None:
    stream = open_stream(SharedChannel(connection), tmp_path, [])
    number = scheduler.next(m.Submit).id
    scheduler.send(*(make_response(number, n) for n in range(RESPONSES_PER_CREDIT + 1)))
    for n in range(RESPONSES_PER_CREDIT + 1):
        assert values([next(stream)]) == [n]
    assert scheduler.next(m.Credit) == m.Credit(number, RESPONSES_PER_CREDIT)  # type: ignore[type-var]
    stream.close()
    assert scheduler.next(m.Cancel) == m.Cancel(number)


def test_the_end_of_the_connection_ends_its_streams(
    connection: Any, channel: ThreadChannel, scheduler: Peer, tmp_path: Path
) -> None:
    streams = [open_stream(way, tmp_path, []) for way in (channel, SharedChannel(connection))]
    connection.close()
    for stream in streams:
        with pytest.raises(Disconnected):
            next(stream)
        assert list(stream) == []
        with pytest.raises(ShmserveError):
            open_stream(stream._channel, tmp_path, [])


@pytest.mark.parametrize("module", [sync, aio])
def test_whether_to_retry_depends_on_the_request_that_failed(module: Any) -> None:
    """A request that writes an output over an input, for example, must not run again."""
    session, lost = MagicMock(), Unavailable("the worker has exited")
    session.should_retry.return_value = False
    server = module.Server(session)
    server._get_thread_channel = MagicMock(**{"return_value.wait.side_effect": lost})
    server._get_channel = server._load_on_demand = AsyncMock()
    server._infer = AsyncMock(side_effect=lost)
    with pytest.raises(Unavailable):
        asyncio.run(server.infer("m", {}))
    assert session.should_retry.call_args.args[2] is session.pack.return_value
