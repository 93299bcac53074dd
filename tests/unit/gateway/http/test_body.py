"""Arriving bodies: whose memory counts, and which body is evicted when memory is short."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, MagicMock

import numpy as np
import pytest
from aiohttp import StreamReader
from multidict import CIMultiDict, CIMultiDictProxy

from shmserve.errors import InvalidArgument, Unavailable
from shmserve.gateway.http.body import Body, timeout_in_body_us
from shmserve.gateway.http.incoming import TensorReceiver
from shmserve.gateway.http.messages import HttpRequest, WholeBody
from shmserve.gateway.inference import body_arrival, prepare
from shmserve.gateway.inference.body_arrival import BodyBudget, BodyTimeout, MallocTrim
from shmserve.gateway.inference.infer_request import InferInput, InferRequest
from shmserve.gateway.inference.prepare import ArrivingRequest, BuiltRequest, Resources
from shmserve.gateway.region_table import RegionTable
from shmserve.gateway.settings import GatewaySettings
from shmserve.ipc.memory.arena import Arena
from tests.rigs.clocks import Clock

MIB = 1 << 20


budget = BodyBudget(MIB, MallocTrim())


@pytest.fixture(autouse=True)
def no_bodies() -> Iterator[None]:
    yield
    assert not budget._used_bytes
    budget._bodies.clear()


def make_resources(arena: Arena) -> Resources:
    regions = RegionTable(lambda _: None)
    gateway: Any = SimpleNamespace(arena=arena, body_budget=budget, regions=regions)
    return Resources(gateway)


def arriving_tensors(views: list[memoryview]) -> ArrivingRequest:
    request = cast("BuiltRequest", SimpleNamespace(release=lambda: None))
    return ArrivingRequest(request, views, sum(map(len, views)))


class Client:
    """A client that sends its body as the test demands. A body awaited for 10 ms may be slow."""

    def __init__(self, body_timeout_s: float = 0.3) -> None:
        protocol = SimpleNamespace(connected=True, resume_reading=lambda **_: None)
        loop = asyncio.get_running_loop()
        self.content = StreamReader(cast("Any", protocol), 2**16, loop=loop)
        headers = CIMultiDictProxy(CIMultiDict({"Content-Length": str(MIB)}))
        self.complete: asyncio.Future[None] = loop.create_future()
        connection = SimpleNamespace(receiving=lambda *_: nullcontext(self.complete))
        fields = {"content": self.content, "headers": headers, "connection": connection}
        settings = GatewaySettings(
            max_input_size=MIB, arena_byte_size=MIB, body_timeout_s=body_timeout_s
        )
        self.body = Body(cast("HttpRequest", SimpleNamespace(**fields)), settings, budget)

    async def upload(self, arena: Arena, size: int) -> None:
        """Allocate a block of the arena, and wait for the bytes that fill it."""
        resources = make_resources(arena)
        try:
            self.body.arrival.register_block(resources.release)
            (memory_range,) = resources.allocate([size])
            arriving = arriving_tensors([arena.view(memory_range)])
            await self.body.read_tensors(arriving, memoryview(b""))
        finally:
            self.body.arrival.release_budget()
            resources.release()


@contextmanager
def open_arena(size: int) -> Iterator[Arena]:
    arena = Arena(size)
    yield arena
    assert not arena.used_bytes
    gc.collect()  # frees views that exceptions refer to
    arena.close()


@pytest.fixture
def arena() -> Iterator[Arena]:
    with open_arena(MIB) as arena:
        yield arena


@pytest.fixture
def make_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Clock]:

    def make() -> Clock:
        clock = Clock()
        monkeypatch.setattr(body_arrival, "time", SimpleNamespace(monotonic=clock.read))
        return clock

    return make


async def start_tasks(
    clock: Clock, *coroutines: Coroutine[object, object, object]
) -> list[asyncio.Task[object]]:
    """Return tasks that have waited for 50 ms."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    await clock.advance(0)
    await clock.advance(0.05)
    return tasks


async def test_only_bodies_with_blocks_are_evicted_for_a_block(
    arena: Arena, make_clock: Callable[[], Clock]
) -> None:
    """Memory for JSON is not memory for tensors."""
    clock = make_clock()
    json, tensor = Client(), Client()
    tasks = await start_tasks(clock, json.body.read(MIB, ""), tensor.upload(arena, MIB))
    json.content.feed_data(bytes(1000))
    await clock.advance(0.02)
    resources = make_resources(arena)
    resources.allocate([MIB])
    await clock.advance(0.01)
    assert [task.done() for task in tasks] == [False, True]
    with pytest.raises(BodyTimeout, match="at less than 1 MiB"):
        await tasks[1]
    with pytest.raises(Unavailable):
        make_resources(arena).allocate([MIB])
    await clock.advance(0.01)
    assert not tasks[0].done()
    resources.release()
    tasks[0].cancel()


async def test_server_time_does_not_count_against_a_body(
    arena: Arena, make_clock: Callable[[], Clock]
) -> None:
    clock = make_clock()
    client = Client()
    resources = make_resources(arena)
    (block,) = resources.allocate([MIB])
    client.content.feed_data(bytes(100))
    client.body.arrival.register_block(resources.release)
    await client.body.next()
    await clock.advance(0.1)  # decompression takes this long
    with pytest.raises(Unavailable):
        make_resources(arena).allocate([MIB])
    client.content.feed_data(bytes(100))
    arriving = arriving_tensors([arena.view(block)[:100]])
    assert await client.body.read_tensors(arriving, memoryview(b""))
    client.body.arrival.release_budget()
    resources.release()


async def test_a_body_at_its_time_limit_can_be_evicted(
    arena: Arena, make_clock: Callable[[], Clock]
) -> None:
    """The eviction happens between the expiry of its time limit and the body's reaction."""
    clock = make_clock()
    tasks = await start_tasks(clock, Client(0.1).upload(arena, MIB))
    outcomes: list[BaseException | None] = []

    def allocate_all() -> None:
        resources = make_resources(arena)
        try:
            resources.allocate([MIB])
            outcomes.append(None)
        except BaseException as error:
            outcomes.append(error)
        resources.release()

    # Both timers expire in one turn of the loop.
    asyncio.get_running_loop().call_later(0.06, allocate_all)
    await clock.advance(0.1)
    assert outcomes == [None]
    with pytest.raises(BodyTimeout):
        await tasks[0]


async def test_thousands_of_bodies_are_evicted_at_once() -> None:
    """The event loop is not blocked meanwhile."""
    with open_arena(64 * MIB) as arena, ExitStack() as stack:
        for _ in range(4000):
            client = Client()
            resources = make_resources(arena)
            resources.allocate([16 << 10])
            # Some bodies may stay if the remaining memory suffices.
            stack.callback(resources.release)
            stack.callback(client.body.arrival.release_budget)
            client.body.arrival.register_block(resources.release)
            client.body.arrival._earlier_waits_s = 1.0
        started_s = time.process_time()
        resources = make_resources(arena)
        resources.allocate([63 * MIB])
        assert time.process_time() - started_s < 1
        resources.release()


def test_a_tensor_in_pieces_is_copied_between_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, copied_states = bytearray(6), []
    arriving = arriving_tensors([memoryview(memory)[:5], memoryview(memory)[5:]])
    arriving.built_request = "built"  # type: ignore[assignment]
    monkeypatch.setattr(prepare, "reserve_tensors", lambda *_: arriving)
    large_input = InferInput("A", "BYTES", (1,), 1, [b"ab", b"c", b"de"], 5)
    request = InferRequest("", [large_input, InferInput("B", "BYTES", (1,), 1, [b"f"], 1)], [])

    async def copy_repeatedly() -> None:
        while True:
            copied_states.append(bytes(memory).rstrip(b"\0"))
            await asyncio.sleep(0)

    async def build_while_copying() -> Any:
        task = asyncio.create_task(copy_repeatedly())
        built_request = await prepare.build_in_pieces(cast("Any", None), cast("Any", None), request)
        task.cancel()
        return built_request

    assert asyncio.run(build_while_copying()) == "built"
    assert copied_states == [b"ab", b"abc", b"abcde", b"abcdef"]
    assert [(t.data, t.binary_size) for t in request.inputs] == [(None, 5), (None, 1)]


@pytest.mark.parametrize(
    ("parameters", "limit_us"),
    [
        (b'{"deadline_us": 5, "timeout": 3}', 3),
        (b'{"deadline_us": "x"}', 0),
        (b'{"deadline_us": NaN}', 0),
        (b'{"deadline_us": -Infinity}', 0),
        (b"[]", 0),
    ],
)
async def test_the_time_limit_of_a_load_ignores_invalid_limits(
    parameters: bytes, limit_us: int
) -> None:
    """The load is not limited, and the request is then refused with an error about its body."""
    settings = GatewaySettings(request_timeout_is_deadline=True)
    memory = SimpleNamespace(memory=SimpleNamespace(byte_size=MIB))
    gateway: Any = SimpleNamespace(settings=settings, body_budget=budget, arena=memory)
    content = WholeBody(b'{"parameters": %b}' % parameters)
    request: Any = SimpleNamespace(content=content, headers=CIMultiDict())
    assert await timeout_in_body_us(gateway, request) == limit_us


@pytest.mark.parametrize(("id_size", "text_size"), [(1, 16 << 20), (16 << 20, 1)])
def test_a_request_is_limited_besides_its_tensors(id_size: int, text_size: int) -> None:
    """The requests of a batch are one message, whose size is limited."""
    request = InferRequest("x" * id_size, [], [], parameters={"text": "x" * text_size})
    model: Any = SimpleNamespace(signature=MagicMock())
    with pytest.raises(InvalidArgument, match=r"have 16777\d\d\d bytes \(maximum: 16777216\)"):
        prepare.check_and_pack(model, request, [], make_resources(Arena(4096)))


async def test_the_start_of_a_body_is_joined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start of 64 MiB took 20 s when it was copied for each piece."""
    client, piece = Client(), bytes(64 * 1024)
    monkeypatch.setattr(budget, "_capacity_bytes", 128 * MIB)
    started_s = time.process_time()
    monkeypatch.setattr(StreamReader, "readany", AsyncMock(return_value=piece))
    assert len(await client.body.read_start(48 * MIB + 1)) == 48 * MIB + len(piece)
    assert time.process_time() - started_s < 3
    client.body.arrival.release_budget()


def test_small_tensors_are_received_together() -> None:
    """The socket is not read once for each of them."""
    arena, sizes = memoryview(bytearray(400_000)), [*[100] * 1000, 300_000]
    starts = accumulate(sizes, initial=0)
    arriving = arriving_tensors([arena[start:end] for start, end in pairwise(starts)])
    arriving.feed_across_tensors(memoryview(b""))
    data = np.random.default_rng(0).bytes(400_000)

    async def receive() -> int:
        connection: Any = MagicMock()
        receiver = TensorReceiver(connection)
        complete = receiver.begin(arriving, Client().body.arrival, len(data))
        read_count = position = 0
        while not complete.done():
            buffer = receiver.get_buffer(-1)
            buffer[:] = data[position : position + len(buffer)]
            receiver.buffer_updated(len(buffer))
            read_count, position = read_count + 1, position + len(buffer)
        return read_count

    assert asyncio.run(receive()) == 3
    assert arriving.is_complete and arena == data


@pytest.mark.parametrize("is_progressing", [False, True])
async def test_received_bytes_extend_the_time_limit(
    arena: Arena, make_clock: Callable[[], Clock], *, is_progressing: bool
) -> None:
    """The limit is 0.3 s, and a second more for each 64 KiB; the socket receives the tensors."""
    clock = make_clock()
    client = Client()
    (task,) = await start_tasks(clock, client.upload(arena, MIB))
    client.body.arrival.received_bytes += is_progressing * 64 * 1024
    await clock.advance(0.4)
    assert task.done() is not is_progressing
    await clock.advance(1.0)
    with pytest.raises(BodyTimeout, match=r"limit: (0|1).3 s"):
        await task
