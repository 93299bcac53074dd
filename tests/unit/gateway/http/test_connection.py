"""HTTP connections: however the bytes of requests are cut, each gets its own answer, in order."""

import asyncio
import contextlib
import itertools
import json
import random
import socket
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.common.auth_tokens import Authorisation
from shmserve.gateway.http.body import Body
from shmserve.gateway.http.connection import HttpConnection
from shmserve.gateway.http.incoming import TensorReceiver
from shmserve.gateway.http.messages import HttpRequest, HttpResponse, WriteResponse, json_response
from shmserve.gateway.http.routing import App
from shmserve.gateway.inference.body_arrival import BodyBudget, BodyTimeout, MallocTrim
from shmserve.gateway.inference.prepare import ArrivingRequest, BuiltRequest
from shmserve.gateway.listener import Acceptor, LimitedConnection, ListenerKind, ListenerRules
from shmserve.gateway.settings import GatewaySettings
from tests.rigs.clocks import Clock

_SETTINGS = GatewaySettings()
_BODIES = (b"", b"{}", b"{1}", b"POST /a HTTP/1.1\r\n\r\n", bytes(300))
_REQUEST_HEADS = (
    ("POST", "/a", ()),
    ("POST", "/a", ("X-Long: " + "x" * 50,)),
    ("POST", "/b", ()),
    ("GET", "/a", ()),
)


class Transport(asyncio.Transport):
    """A transport that stores the written bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.ended = self.closed = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def close(self) -> None:
        self.closed = True

    def write_eof(self) -> None:
        self.ended = True

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


Handle = Callable[[HttpRequest], Awaitable[HttpResponse]]


class AnsweringApp(App):
    """Answers with a function, and counts."""

    def __init__(self, answer: Handle) -> None:
        super().__init__(MagicMock(), MagicMock())
        self.answer = answer

    async def handle(self, request: HttpRequest) -> HttpResponse:
        begun_request, request.begun_request = request.begun_request, None
        if begun_request is None:
            self.active_count += 1
        reply = await (self.answer(request) if begun_request is None else begun_request.response())
        reply.on_sent = self.decrement
        return reply


def echo(request: HttpRequest, body: bytes) -> HttpResponse:
    long_header = request.headers.get("X-Long", "")
    return json_response([request.method, request.target, len(long_header), body.decode("latin-1")])


async def repeat(request: HttpRequest) -> HttpResponse:
    body = await Body(request, _SETTINGS, BodyBudget(1 << 20, MallocTrim())).read(
        1 << 20, "{size} {limit}"
    )
    return echo(request, body)


TURNS_AT_ONCE = -2


class TasklessRequest:
    """A request that is answered after some turns, with bytes or by the task, or never (-1)."""

    def __init__(
        self,
        request: HttpRequest,
        body: bytes,
        answer: WriteResponse,
        turns: int,
        *,
        whole_body: bool,
    ) -> None:
        self.http_request = request
        self.cancelled = False
        self._response = echo(request, body)
        self._answer = answer
        self._whole_body = whole_body
        if turns >= 0:
            asyncio.get_running_loop().call_soon(self.take_turns, turns)
        elif turns == TURNS_AT_ONCE:
            answer(None)

    def take_turns(self, turns: int) -> None:
        if self.cancelled:
            return
        if turns:
            asyncio.get_running_loop().call_soon(self.take_turns, turns - 1)
        else:
            response = self._response
            self._answer(b"".join(response.pieces) if self._whole_body else None)

    async def response(self) -> HttpResponse:
        await asyncio.sleep(0)
        return self._response

    def cancel(self) -> None:
        assert not self.cancelled
        self.cancelled = True


class RepeatingHandler:
    """A handler with these results for repeated heads: taskless answers, or None for a task."""

    def __init__(self, *turns_and_wholeness: tuple[int, bool] | None) -> None:
        self._turns_and_wholeness = itertools.cycle(turns_and_wholeness or (None,))
        self.begun: list[TasklessRequest] = []

    async def __call__(self, request: HttpRequest) -> HttpResponse:
        def begin(body: bytes, answer: WriteResponse) -> TasklessRequest | None:
            if (turns_and_wholeness := next(self._turns_and_wholeness)) is None:
                return None
            self.begun.append(
                TasklessRequest(
                    request, body, answer, turns_and_wholeness[0], whole_body=turns_and_wholeness[1]
                )
            )
            return self.begun[-1]

        request.begin_repeated = begin
        return await repeat(request)


def pack_request(method: str, path: str, lines: tuple[str, ...], body: bytes, way: str) -> bytes:
    if way == "chunked":
        framing = "Transfer-Encoding: chunked"
        framed = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if body else b"0\r\n\r\n"
    else:
        framing, framed = f"Content-Length: {len(body)}", body
    lines = (f"{method} {path} HTTP/1.1", "Host: localhost", *lines, framing, "", "")
    return "\r\n".join(lines).encode() + framed


KNOWN_REQUEST = pack_request("POST", "/a", (), b"{}", "length")

SentRequest = tuple[tuple[str, str, tuple[str, ...]], bytes, str]

requests = st.lists(
    st.tuples(
        st.sampled_from(_REQUEST_HEADS),
        st.sampled_from(_BODIES),
        st.sampled_from(("length", "length", "length", "chunked")),
    ),
    min_size=1,
    max_size=8,
)


def connect(
    answer: Handle = repeat,
    settings: GatewaySettings = _SETTINGS,
    transport: Transport | None = None,
) -> tuple[HttpConnection, Transport]:
    """Return a new connection whose requests are repeated, or answered by another handler."""
    listener = ListenerRules(ListenerKind.LOOPBACK, Authorisation({}, {}), None)
    make_connection = partial(HttpConnection, app=AnsweringApp(answer), settings=settings)
    connection = Acceptor(make_connection, listener, 10)()
    assert isinstance(connection, HttpConnection)
    transport = transport or Transport()
    connection.connection_made(transport)
    return connection, transport


async def collect_answers(
    pieces: list[tuple[bytes, int]], count: int, answer: Handle = repeat
) -> list[Any]:
    """Return the answers to bytes that arrive in `pieces`, with turns of the loop between."""
    loop = asyncio.get_running_loop()
    connection, transport = connect(answer)
    for piece, turns in pieces:
        connection.data_received(piece)
        for _ in range(turns):
            await asyncio.sleep(0)
    deadline_s = loop.time() + 10
    requests: list[Any] = []
    while len(requests) < count and loop.time() < deadline_s:
        await asyncio.sleep(0)
        requests = parse_replies(transport.written)
    connection.connection_lost(None)
    await asyncio.sleep(0)
    assert connection_app(connection).active_count == 0
    return requests


async def turn_loop(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def feed(connection: HttpConnection, *pieces: bytes) -> None:
    """Let the connection receive each piece, and handle it before the next one."""
    for piece in pieces:
        connection.data_received(piece)
        await turn_loop()


@contextlib.asynccontextmanager
async def connected(
    answer: Handle = repeat, settings: GatewaySettings = _SETTINGS
) -> AsyncIterator[tuple[HttpConnection, Transport]]:
    """Yield a new connection that waits for requests; its client disconnects at the end."""
    connection, transport = connect(answer, settings)
    await turn_loop()
    yield connection, transport
    connection.connection_lost(None)
    await turn_loop()


def connection_app(connection: HttpConnection) -> Any:
    return connection._app


def parse_replies(written: bytes) -> list[Any]:
    responses: list[Any] = []
    while written:
        head, _, remaining = written.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\nContent-Length: "), head
        size = int(head.split(b"\r\n")[1].partition(b": ")[2])
        responses.append(json.loads(remaining[:size]))
        written = remaining[size:]
    return responses


@settings(max_examples=600)
@given(
    requests,
    st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 12)), max_size=12),
    st.lists(st.booleans(), min_size=8, max_size=8),
    st.integers(0, 12),
    st.lists(
        st.none() | st.just((TURNS_AT_ONCE, False)) | st.tuples(st.integers(0, 3), st.booleans()),
        max_size=4,
    ),
)
def test_every_request_receives_its_own_response(
    sent: list[SentRequest],
    cuts: list[tuple[int, int]],
    separate_bodies: list[bool],
    turns: int,
    request_turns: list[tuple[int, bool] | None],
) -> None:
    """Cut anywhere, and more than one at a time; by the connection's task or without it."""
    turns_at: dict[int, int] = {}  # where a piece ends, and the turns after it
    stream = b""
    for (head, body, framing), is_separate in zip(sent, separate_bodies, strict=False):
        raw = pack_request(*head, body, framing)
        if is_separate:
            turns_at[len(stream) + raw.index(b"\r\n\r\n") + 4] = turns
        stream += raw
        turns_at[len(stream)] = turns
    turns_at.update((cut, turn_count) for cut, turn_count in cuts if 0 < cut < len(stream))
    pieces: list[tuple[bytes, int]] = []
    start = 0
    for end in sorted(turns_at):
        pieces.append((stream[start:end], turns_at[end]))
        start = end
    expected = [
        [method, path, 50 * len(lines), body.decode("latin-1")]
        for (method, path, lines), body, _ in sent
    ]
    handler = RepeatingHandler(*request_turns)
    assert asyncio.run(collect_answers(pieces, len(sent), handler)) == expected


class SocketTransport(Transport):
    """A transport that passes bytes to its current protocol while the protocol reads."""

    def __init__(self) -> None:
        super().__init__()
        self.protocol: Any = None
        self.reads = True
        self.unread = b""

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def deliver(self, data: bytes) -> None:
        self.unread += data
        while self.unread and self.reads:
            if isinstance(self.protocol, HttpConnection):
                size = min(len(self.unread), 256_000)  # the buffer of uvloop
                self.protocol.data_received(self.unread[:size])
            else:
                buffer = self.protocol.get_buffer(-1)
                size = min(len(self.unread), len(buffer))
                buffer[:size] = self.unread[:size]
                self.protocol.buffer_updated(size)
            self.unread = self.unread[size:]


def arriving_request(*views: memoryview) -> ArrivingRequest:
    built_request = cast("BuiltRequest", SimpleNamespace(release=lambda: None))
    return ArrivingRequest(built_request, views, 0)


async def receive_tensors(request: HttpRequest) -> HttpResponse:
    """Receive a large body as a head of 10 bytes and three tensors."""
    body = Body(request, _SETTINGS, BodyBudget(1 << 20, MallocTrim()))
    content = body.received_whole()
    if content is None:
        start = await body.read_start(10)
        memory = memoryview(bytearray(body.declared_size - 10))
        arriving = arriving_request(memory[:70_000], memory[:0], memory[70_000:])
        assert await body.read_tensors(arriving, memoryview(start)[10:])
        content = start[:10] + memory
    return json_response([request.target, zlib.crc32(content)])


@settings(max_examples=200)
@given(
    st.lists(st.sampled_from([0, 300, 131_072, 131_073, 200_000, 400_000, 800_000]), min_size=1),
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 8)), max_size=8),
)
def test_large_bodies_in_any_pieces(sizes: list[int], cuts: list[tuple[float, int]]) -> None:
    """Requests of any sizes are cut anywhere, and each receives its own response."""
    generator = random.Random(len(sizes))
    bodies = [generator.randbytes(size) for size in sizes]
    stream = b"".join(
        pack_request("POST", f"/{index}", (), body, "length") for index, body in enumerate(bodies)
    )
    turns_at = {int(part * len(stream)): turns for part, turns in sorted(cuts)}
    turns_at[len(stream)] = 0

    async def send_stream() -> bytes:
        transport = SocketTransport()
        transport.protocol, _ = connect(receive_tensors, transport=transport)
        connection = transport.protocol
        start = 0
        for end, turns in turns_at.items():
            transport.deliver(stream[start:end])
            start = end
            for _ in range(turns):
                await asyncio.sleep(0)
                transport.deliver(b"")
        for _ in range(400):
            await asyncio.sleep(0)
            transport.deliver(b"")
        connection.connection_lost(None)
        await asyncio.sleep(0)
        return transport.written

    expected = [[f"/{index}", zlib.crc32(body)] for index, body in enumerate(bodies)]
    assert parse_replies(uvloop.run(send_stream())) == expected


async def test_tensors_of_an_evicted_body_are_dropped() -> None:
    """Bytes may arrive between the eviction and the end of the task that receives the body."""
    receiver = TensorReceiver(connect()[0])
    arriving = arriving_request(*[memoryview(bytearray(10))] * 2)
    arriving.feed_across_tensors(memoryview(b"1234"))
    complete = receiver.begin(arriving, MagicMock(received_bytes=4), 16)
    arriving.release()
    receiver.get_buffer(-1)[:16] = bytes(16)
    receiver.buffer_updated(16)
    assert complete.done()
    assert not arriving.is_complete


async def test_requests_after_connect_are_dropped() -> None:
    """CONNECT has no body, and the connection ends with it."""
    head = b"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\nContent-Length: 300000\r\n\r\n"
    async with connected() as (connection, transport):
        await feed(connection, head + pack_request("POST", "/a", (), b"hello", "length"))
    assert transport.written.count(b"HTTP/1.1 ") == transport.written.count(b"Connection: close")


_UPGRADE_OFFERS = (
    ("POST", "/a", ("Connection: Upgrade", "Upgrade: h2c")),
    ("POST", "/b", ("Connection: Upgrade", "Upgrade: websocket")),
    ("GET", "/c", ()),
)


@settings(max_examples=300)
@given(
    st.lists(
        st.tuples(st.sampled_from(_UPGRADE_OFFERS), st.sampled_from(_BODIES)),
        min_size=1,
        max_size=5,
    ),
    st.lists(st.tuples(st.integers(0, 1500), st.integers(0, 12)), max_size=8),
)
def test_upgrade_offers_lose_no_request(
    sent_requests: list[tuple[tuple[str, str, tuple[str, ...]], bytes]], cuts: list[tuple[int, int]]
) -> None:
    """Every request has its own answer until an answer closes the connection."""
    stream = b"".join(pack_request(*head, body, "length") for head, body in sent_requests)
    turns_at = {cut: turns for cut, turns in sorted(cuts) if 0 < cut < len(stream)}
    bounds = [0, *turns_at, len(stream)]

    async def send_stream() -> bytes:
        connection, transport = connect()
        for begin, end in itertools.pairwise(bounds):
            connection.data_received(stream[begin:end])
            for _ in range(turns_at.get(end, 0)):
                await asyncio.sleep(0)
        for _ in range(200):
            await asyncio.sleep(0)
        connection.connection_lost(None)
        return transport.written

    before, header, after = uvloop.run(send_stream()).partition(b"Connection: close\r\n")
    answers = parse_replies(before + after)
    expected = [[m, path, 0, body.decode("latin-1")] for (m, path, _), body in sent_requests]
    assert answers == expected[: len(answers)]
    assert header or len(answers) == len(expected)


def test_split_bodies_do_not_shorten_later_pipelines() -> None:
    """Forty bodies arrive while their requests are handled; then a hundred requests at once."""
    raw = pack_request("POST", "/a", (), b"{}", "chunked")
    pieces = [(raw[:-9], 3), (raw[-9:], 3)] * 40 + [(raw * 100, 0)]
    answers = asyncio.run(collect_answers(pieces, 140))
    assert answers == [["POST", "/a", 0, "{}"]] * 140


async def match_first(request: HttpRequest) -> HttpResponse:
    """Answer whether the route of the request's head is known, and keep it."""
    has_match, request.route_match = request.route_match is not None, (match_first, ())
    return json_response(has_match)


async def test_only_an_identical_head_is_reused() -> None:
    """Not for another one behind it, were it of the same length, nor on another connection."""
    for _ in range(2):
        async with connected(match_first) as (connection, transport):
            for token in "aaabaa":
                lines = (f"Authorization: Bearer {token}",)
                await feed(connection, pack_request("POST", "/a", lines, b"{}", "length"))
            # A repeated head is cached, together with its route.
            assert parse_replies(transport.written) == [False, False, True, False, False, False]


async def test_a_change_of_tokens_invalidates_the_cached_head() -> None:
    """A token that is taken back opens nothing more, on connections that are there either."""
    async with connected(match_first) as (connection, transport):
        await feed(connection, *[KNOWN_REQUEST] * 3)
        listener = connection.client.listener
        listener.authorisation = listener.authorisation.with_tokens({})
        await feed(connection, *[KNOWN_REQUEST] * 2)
    assert parse_replies(transport.written) == [False, False, True, False, False]


async def begin_request(
    case: tuple[int, bool],
) -> tuple[HttpConnection, Transport, TasklessRequest]:
    repeats = RepeatingHandler(case)
    connection, transport = connect(repeats)
    await turn_loop()
    for _ in range(3):
        connection.data_received(KNOWN_REQUEST)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert len(repeats.begun) == 1
    return connection, transport, repeats.begun[0]


@pytest.mark.parametrize("taken_over", [False, True])
async def test_a_disconnect_cancels_the_request_in_flight(*, taken_over: bool) -> None:
    """Also where the task was to take it over, and has not come to it."""
    connection, _, pending_request = await begin_request((-1, False))
    if taken_over:
        pending_request.take_turns(0)
    connection.connection_lost(None)
    await turn_loop()
    assert (pending_request.cancelled, connection_app(connection).active_count) == (True, 0)


async def test_the_task_responds_to_a_request_that_fails_at_once() -> None:
    """The request is handled once."""
    repeats = RepeatingHandler((TURNS_AT_ONCE, False))
    async with connected(repeats) as (connection, transport):
        await feed(connection, *[KNOWN_REQUEST] * 4)
        assert len(parse_replies(transport.written)) == 4
    # The first request caches the head, and the second one uses it.
    assert (len(repeats.begun), connection_app(connection).active_count) == (2, 0)


async def test_a_closing_connection_receives_no_response() -> None:
    connection, transport, pending_request = await begin_request((-1, True))
    written_before = len(transport.written)
    connection.force_close()
    pending_request.take_turns(0)
    await turn_loop()
    connection.connection_lost(None)
    assert not pending_request.cancelled
    assert len(transport.written) == written_before
    assert connection_app(connection).active_count == 0


async def test_a_client_that_does_not_read_is_disconnected_without_a_task() -> None:
    """Though it asks for nothing more."""
    aborted = asyncio.Event()
    repeats = RepeatingHandler((0, True))
    settings = GatewaySettings(body_timeout_s=0.05)
    async with connected(repeats, settings) as (connection, transport):
        transport.abort = aborted.set  # type: ignore[method-assign]
        await feed(connection, *[KNOWN_REQUEST] * 2)
        transport.write = lambda data: connection.pause_writing()  # type: ignore[method-assign]
        connection.data_received(KNOWN_REQUEST)
        await aborted.wait()
    assert bool(repeats.begun)


@pytest.mark.parametrize("turns", [0, 20])
@pytest.mark.parametrize("separately", [False, True])
def test_known_heads_inside_a_request_are_ignored(separately: bool, turns: int) -> None:
    """Half a head behind a request, or while that is answered: what follows is the rest of it."""
    half = b"POST /b HTTP/1.1\r\nX-Long: "
    pieces = [(KNOWN_REQUEST, 20)] * 2
    pieces += [(KNOWN_REQUEST, turns), (half, 20)] if separately else [(KNOWN_REQUEST + half, 20)]
    pieces.append((KNOWN_REQUEST, 20))
    first = ["POST", "/a", 0, "{}"]
    assert asyncio.run(collect_answers(pieces, 4)) == [first] * 3 + [["POST", "/b", 16, "{}"]]


async def test_pipelined_requests_yield_to_other_connections() -> None:
    """A hundred requests that come in one piece are not all answered before a neighbour's one."""
    async with connected() as (busy, busy_transport), connected() as (other, other_transport):
        busy.data_received(pack_request("GET", "/a", (), b"", "length") * 100)
        other.data_received(pack_request("GET", "/b", (), b"", "length"))
        for _ in range(1000):
            if other_transport.written:
                break
            await asyncio.sleep(0)
        early_count = len(parse_replies(busy_transport.written))
        await turn_loop(1000)
        final_count = len(parse_replies(busy_transport.written))
    assert early_count < 5
    assert final_count == 100


async def test_queued_requests_behind_the_last_one_do_not_prevent_eviction() -> None:
    """A connection that is closing and waits for its client to read counts as idle."""
    closing_request = pack_request("GET", "/a", ("Connection: close",), b"", "length")
    async with connected() as (connection, transport):
        connection.data_received(pack_request("GET", "/a", (), b"", "length") + closing_request)
        connection.data_received(pack_request("GET", "/b", (), b"", "length"))
        assert connection.idle_since is None
        await turn_loop()
        assert connection.idle_since is not None
    assert len(parse_replies(transport.written)) == 2


@pytest.mark.parametrize(("pause_s", "open_s"), [(1.5, 30), (3, 2)])
async def test_a_client_that_still_sends_is_read_for_a_limited_time(
    pause_s: float, open_s: float
) -> None:
    async def refuse(request: HttpRequest) -> HttpResponse:
        return json_response("refused")

    clock = Clock()
    async with connected(refuse) as (connection, transport):
        await feed(connection, pack_request("POST", "/a", (), bytes(10**6), "length")[:300_000])
        assert transport.ended
        start_s = clock.now
        while not transport.closed:
            await clock.advance(pause_s)
            connection.data_received(bytes(1000))
    assert parse_replies(transport.written.replace(b"Connection: close\r\n", b"")) == ["refused"]
    assert open_s <= clock.now - start_s <= open_s + pause_s


async def test_an_earlier_timer_does_not_shorten_a_time_limit() -> None:
    """A connection has one coarse timer, which counts the whole limit of a state."""
    start, rest = KNOWN_REQUEST[:-2], KNOWN_REQUEST[-2:]
    async with connected() as (connection, transport):
        await feed(connection, *[KNOWN_REQUEST] * 2)
        connection.data_received(start)  # starts the clock
        await feed(connection, rest)
        connection.data_received(start)
        connection._check_timeout()  # as if its time limit had just expired
        await turn_loop()
        await feed(connection, rest)
    assert len(parse_replies(transport.written)) == 4


async def test_each_request_has_its_own_time_limit() -> None:
    """Its clock still runs, and ends in the middle of the next one's head."""
    second_request = pack_request("GET", "/b", (), b"", "length")
    clock = Clock()
    settings = GatewaySettings(header_timeout_s=4, body_timeout_s=4)
    async with connected(settings=settings) as (connection, transport):
        connection.data_received(KNOWN_REQUEST[:-2])
        await clock.advance(1)
        connection.data_received(KNOWN_REQUEST[-2:])
        await clock.advance(2)
        connection.data_received(second_request[:10])
        await clock.advance(1.5)
        await clock.advance(2)
        await feed(connection, second_request[10:])
        assert len(parse_replies(transport.written)) == 2
        connection.data_received(second_request[:10])
        await clock.advance(4.5)
        assert not connection.is_open


async def test_pieces_do_not_extend_the_time_limit_of_a_head_with_a_length_and_chunks() -> None:
    clock = Clock()
    async with connected(settings=GatewaySettings(header_timeout_s=4)) as (connection, _):
        connection.data_received(b"POST /a HTTP/1.1\r\nContent-Length: 5\r\n")
        connection.data_received(b"Transfer-Encoding: chunked\r\n")
        for is_open in (True, False):
            await clock.advance(2.5)
            connection.data_received(b"X: y\r\n")
            assert connection.is_open == is_open


@pytest.mark.parametrize("sent_size", [0, 1])
async def test_a_body_after_a_known_head_has_the_usual_time_limit(sent_size: int) -> None:
    async def answer(request: HttpRequest) -> HttpResponse:
        try:
            return await repeat(request)
        except BodyTimeout:
            return json_response("late")

    clock = Clock()
    settings = GatewaySettings(header_timeout_s=5, body_timeout_s=2)
    requests = []
    async with connected(answer, settings) as (connection, transport):
        await feed(connection, *[KNOWN_REQUEST] * 2)
        connection.data_received(KNOWN_REQUEST[: len(KNOWN_REQUEST) - 2 + sent_size])
        for seconds in (1.9, 0.2):
            await clock.advance(seconds)
            requests.append(parse_replies(transport.written)[2:])
    assert requests == [[], ["late"]]


@pytest.mark.parametrize("end_connection", [HttpConnection.force_close, HttpConnection.abort])
def test_a_client_that_does_not_read_delays_no_close(end_connection: Callable[[Any], None]) -> None:
    """Otherwise the connection could stay open beyond every limit."""
    was_closed = asyncio.Event()

    class ClosingAcceptor(Acceptor):
        def connection_lost(self, connection: LimitedConnection) -> None:
            super().connection_lost(connection)
            was_closed.set()

    async def flood(request: HttpRequest) -> HttpResponse:
        return HttpResponse(200, (bytes(1 << 10),))

    async def run() -> None:
        loop = asyncio.get_running_loop()
        listener = ListenerRules(ListenerKind.LOOPBACK, Authorisation({}, {}), None)
        settings = GatewaySettings(body_timeout_s=0.1)
        make_connection = partial(HttpConnection, app=AnsweringApp(flood), settings=settings)
        server = ClosingAcceptor(make_connection, listener, 10)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            tcp_server = await loop.create_server(server, sock=listening)
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.setblocking(False)
                await loop.sock_connect(client, listening.getsockname())
                while not (server.connections and _unflushed_bytes(server.connections[0])):
                    with contextlib.suppress(BlockingIOError):
                        client.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                    await asyncio.sleep(0.001)
                end_connection(server.connections[0])
                await asyncio.wait_for(was_closed.wait(), 20)
            tcp_server.close()

    uvloop.run(run())


def _unflushed_bytes(connection: LimitedConnection) -> int:
    return 0 if connection.transport is None else connection.transport.get_write_buffer_size()
