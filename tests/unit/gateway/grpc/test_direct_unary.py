"""The short way of a frequent call through gRPC, in one process: it stands on parts of gRPC that a
release may change, and these tests say when one has.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from shmserve.gateway.grpc.core.call_watchdog import Calls, Reading, Soon
from shmserve.gateway.grpc.core.core_call import CoreWaiter, acceptors
from shmserve.gateway.grpc.core.direct_unary import DirectUnaryCall
from shmserve.gateway.inference.body_arrival import SLOWEST_RATE
from tests.support.wire.http2 import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    OPENED,
    SETTINGS,
    WINDOW,
    frame,
    message,
    post,
)

PATH = "/test.Service/Ask"
SLOW = "AskAio"  # a method of grpc.aio's alone, which gives its request a million times
CALLS = 200  # more than are asked for beforehand, so that these are asked for again


class Scene:
    """A server whose method `PATH` is answered by `handler`, a channel to it, and what came by
    grpc.aio's own way."""

    def __init__(self) -> None:
        self.aio = 0
        self.ask: Any = None
        self.server: Any = None
        self.port = 0


def play(
    handler: Callable[[bytes, DirectUnaryCall], None],
    act: Callable[[Scene], Awaitable[None]],
    ends: bool = True,
    calls: Calls | None = None,
) -> Scene:
    """Have `act` ask a server that answers by `handler`; `calls`: which, if not patient ones."""
    scene = Scene()
    calls = calls or Calls(30)

    async def own(raw: bytes, context: Any) -> bytes:
        scene.aio += 1
        return b"aio " + raw

    def first(raw: bytes, call: DirectUnaryCall) -> None:
        call.finish(raw) if raw == b"first" else handler(raw, call)

    async def slow_way(_: Any, context: Any) -> bytes:
        with Reading(calls, context) as reading:
            return await reading.request() * 1_000_000

    slow = {SLOW: grpc.stream_unary_rpc_method_handler(slow_way)}

    async def main() -> None:
        scene.server = server = grpc.aio.server()
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("test.Service", slow),)
        )
        way = grpc.unary_unary_rpc_method_handler(own)
        (short,) = acceptors(
            server,
            {PATH: (way, lambda state: DirectUnaryCall(state, calls).begin(first, lambda _: None))},
        )
        port = scene.port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        short.open()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            scene.ask = channel.unary_unary(PATH)
            # Once grpc.aio has taken a call, it asks for its next behind all that we asked for.
            while not scene.aio:
                await scene.ask(b"first")
            await act(scene)
        if ends:
            await server.stop(None)
            assert not calls.addresses()

    asyncio.run(main())
    return scene


def echo(raw: bytes, call: DirectUnaryCall) -> None:
    call.finish(b"short " + raw)


def test_most_calls_go_the_short_way() -> None:
    answers: list[bytes] = []

    async def act(scene: Scene) -> None:
        answers.extend(await asyncio.gather(*(scene.ask(b"%d" % n) for n in range(CALLS))))

    scene = play(echo, act)
    assert [answer.split()[1] for answer in answers] == [b"%d" % n for n in range(CALLS)]
    assert sum(answer.startswith(b"short ") for answer in answers) == CALLS + 1 - scene.aio
    assert scene.aio < CALLS // 10


def test_an_error_has_its_code_text_and_metadata() -> None:
    seen: list[Any] = []

    def refuse(raw: bytes, call: DirectUnaryCall) -> None:
        seen.append((call.peer(), dict(call.invocation_metadata()), call.time_remaining()))
        call.fail(grpc.StatusCode.NOT_FOUND, "no such thing: é", (("key", "value"),))

    async def act(scene: Scene) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await scene.ask(b"", metadata=(("who", "me"),), timeout=60)
        assert error.value.code() is grpc.StatusCode.NOT_FOUND
        assert error.value.details() == "no such thing: é"
        assert dict(error.value.trailing_metadata())["key"] == "value"

    play(refuse, act)
    peer, metadata, left_s = seen[0]
    assert peer.startswith("ipv4:127.0.0.1:") and metadata["who"] == "me" and left_s > 0


def test_a_client_that_leaves() -> None:
    """Its call is told at once, and may end as it likes; others are answered."""

    async def act(scene: Scene) -> None:
        asked = scene.ask(b"hold")
        await asyncio.wait_for(arrived.get(), 20)
        asked.cancel()
        call = await asyncio.wait_for(gone.get(), 20)
        assert call.done
        call.finish(b"too late")
        assert await scene.ask(b"another") == b"short another"

    def hold(raw: bytes, call: DirectUnaryCall) -> None:
        if raw == b"hold":
            call.on_gone = lambda: gone.put_nowait(call)
            arrived.put_nowait(None)
        else:
            echo(raw, call)

    arrived: asyncio.Queue[None] = asyncio.Queue()
    gone: asyncio.Queue[DirectUnaryCall] = asyncio.Queue()
    play(hold, act)
    gc.collect()
    assert not [thing for thing in gc.get_objects() if type(thing) is DirectUnaryCall]


@pytest.mark.parametrize("path", [PATH, f"/test.Service/{SLOW}"])
def test_who_reads_no_response_is_disconnected(path: str) -> None:
    """R15: its response would take up memory for as long as it likes."""

    async def act(scene: Scene) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", scene.port)
        # It never lets more come than HTTP/2 has a sender send at first.
        writer.write(OPENED + frame(SETTINGS, ACK, 0))
        writer.write(frame(HEADERS, END_HEADERS, 1, post(path)))
        writer.write(frame(DATA, END_STREAM, 1, message(b"a")))
        said = await asyncio.wait_for(reader.read(), 20)
        assert 65535 < len(said) < 80_000
        writer.close()
        assert await scene.ask(b"another") == b"short another"

    def much(raw: bytes, call: DirectUnaryCall) -> None:
        call.finish(bytes(1_000_000)) if raw == b"a" else echo(raw, call)

    play(much, act, calls=Calls(0.5))


def test_who_reads_slowly_is_waited_for() -> None:
    """As long as that is not slower than a body over HTTP may be."""

    size = 600_000

    class Looking(Calls):
        """They look around when they are told to, as if their time were over just then."""

        def _look_again(self) -> None:
            pass

    async def act(scene: Scene) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", scene.port)
        writer.write(OPENED + frame(SETTINGS, ACK, 0))
        writer.write(frame(HEADERS, END_HEADERS, 1, post(PATH)))
        writer.write(frame(DATA, END_STREAM, 1, message(b"ask")))
        said, may_come = 0, 65535
        while said < size:
            while said < min(may_come, size):
                piece = await asyncio.wait_for(reader.read(65536), 20)
                assert piece, "the connection ended"
                said += len(piece)
            calls._look()
            # Twice what must have come by then: the kernel may acknowledge a part of it later.
            may_come += 2 * SLOWEST_RATE
            more = (2 * SLOWEST_RATE).to_bytes(4, "big")
            writer.write(frame(WINDOW, 0, 0, more) + frame(WINDOW, 0, 1, more))
        writer.close()

    def much(raw: bytes, call: DirectUnaryCall) -> None:
        call.finish(bytes(size))

    calls = Looking(1.0)
    play(much, act, calls=calls)


def test_the_server_stops_while_a_call_waits() -> None:
    gone: list[DirectUnaryCall] = []

    async def act(scene: Scene) -> None:
        arrived = asyncio.get_running_loop().create_future()
        waiting.append(arrived)
        asked = scene.ask(b"")
        await asyncio.wait_for(arrived, 20)
        for _ in range(2):  # it is not young any more
            calls.young._run()
        await scene.server.stop(0.01)
        with pytest.raises(grpc.aio.AioRpcError):
            await asked

    def hold(raw: bytes, call: DirectUnaryCall) -> None:
        call.on_gone = lambda: gone.append(call)
        waiting[0].set_result(None)

    waiting: list[asyncio.Future[None]] = []
    calls = Calls(30)
    play(hold, act, ends=False, calls=calls)
    assert len(gone) == 1


def test_what_is_to_be_done_soon_is_done_once_and_not_at_once() -> None:
    done: list[int] = []

    async def main() -> None:
        all_done = asyncio.get_running_loop().create_future()
        soon = Soon(0.001)
        for number in range(3):
            soon.add(lambda number=number: done.append(number))  # type: ignore[misc]
        soon.add(fail)
        soon.add(lambda: all_done.set_result(None))
        assert not done
        await asyncio.wait_for(all_done, 20)
        again = asyncio.get_running_loop().create_future()
        soon.add(lambda: again.set_result(None))  # after it has been idle, too
        await asyncio.wait_for(again, 20)

    def fail() -> None:
        raise ValueError("one of them")

    asyncio.run(main())
    assert done == [0, 1, 2]


def test_a_handler_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    def crash(raw: bytes, call: DirectUnaryCall) -> None:
        raise ValueError("a bug")

    async def act(scene: Scene) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await scene.ask(b"")
        assert error.value.code() is grpc.StatusCode.INTERNAL
        assert error.value.details() == "internal error"

    play(crash, act)
    assert "a bug" in caplog.text


def test_a_release_without_these_parts_goes_its_own_way() -> None:
    nothing: Any = object()
    assert acceptors(nothing, {PATH: (None, lambda _: None)}) == []


def test_a_waiter_goes_on_with_what_it_gets() -> None:
    ends: list[Any] = []

    async def wait(waiter: CoreWaiter) -> str:
        await waiter
        return "result"

    for error in (None, ValueError()):
        waiter = CoreWaiter()
        coroutine = wait(waiter)
        coroutine.send(None).resumes(coroutine, ends.append)
        waiter.set_result(None) if error is None else waiter.set_exception(error)
    assert ends == ["result", None]
