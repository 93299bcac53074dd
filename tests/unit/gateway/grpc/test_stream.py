"""A stream whose client does not read."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from shmserve.errors import Unavailable
from shmserve.gateway.grpc.infer import Inferences, RequestRefused
from shmserve.gateway.grpc.stream_infer import stream_infer
from shmserve.gateway.inference.in_flight import UnaryInference
from shmserve.gateway.inference.prepare import ArrivingRequest
from shmserve.gateway.listener import ActiveCount
from shmserve.ipc.messages import inference as m


class AnsweredRequest(UnaryInference):
    """A request that has its response at once."""

    def __init__(self, cancelled_ids: list[str], name: str) -> None:
        self.request_id = name
        self.message = m.Finished(1, b"", [])
        self._cancelled_ids = cancelled_ids

    def cancel(self) -> None:
        self._cancelled_ids.append(self.request_id)


class FakeInferences(ActiveCount):
    """Fake inferences of a stream; `trimmed_sizes` records the requested trims."""

    def __init__(self) -> None:
        super().__init__()
        self.trimmed_sizes: list[int] = []
        self.gateway = SimpleNamespace(
            malloc_trim=SimpleNamespace(schedule=self.trimmed_sizes.append),
            settings=SimpleNamespace(body_timeout_s=60.0),
        )

    def encode_response(self, inference: UnaryInference) -> bytes:
        return bytes(40_000)  # no other is written with it

    def select_headers(self, call: Any) -> dict[str, str]:
        return {}


class DeafCall:
    """The call of a client that takes one response."""

    client: Any = None
    head = SimpleNamespace(ends_on_error=False, traceparent="")

    def __init__(self, requests: AsyncIterator[bytes]) -> None:
        self.read_messages = lambda: requests
        self.taken_count = 0
        self.on_ended: Callable[[], None] | None = None

    def remaining_us(self) -> int:
        return 0

    async def write_all(self, responses: Sequence[bytes], stall_s: float) -> None:
        for _ in responses:
            if self.taken_count:
                async with asyncio.timeout(stall_s):
                    await asyncio.Event().wait()
            self.taken_count += 1


def start_stream(inferences: Any, call: Any, patience_s: float) -> Coroutine[Any, Any, None]:
    inferences.gateway.settings.body_timeout_s = patience_s
    return stream_infer(inferences, call)


def test_a_queued_refusal_keeps_no_references() -> None:
    """Its request can be large, and many may wait behind a slow one."""

    def refuse(raw: bytes) -> None:
        try:
            raise KeyError(raw)
        except KeyError:
            raise RequestRefused(Unavailable("no"), "1") from None

    with pytest.raises(RequestRefused) as caught:
        refuse(b"large")
    refusal = caught.value.without_traceback()
    for error in (refusal, refusal.error):
        assert error.__traceback__ is None and error.__context__ is None


def test_a_client_that_does_not_read_is_disconnected() -> None:
    """Responses that wait behind one that the client does not read are dropped."""
    cancelled_ids: list[str] = []

    class Inferences(FakeInferences):
        def submit_request(self, raw: bytes, *_: Any) -> UnaryInference:
            return AnsweredRequest(cancelled_ids, raw.decode())

    async def requests() -> AsyncIterator[bytes]:
        for name in ("taken", "stuck", "behind", "further behind"):
            yield name.encode()
        await asyncio.Event().wait()

    inferences: Any = Inferences()
    with pytest.raises(Unavailable):
        asyncio.run(start_stream(inferences, DeafCall(requests()), 0.05))
    assert cancelled_ids == ["behind", "further behind"]
    assert not inferences.active_count

    async def cancel_twice() -> None:
        call = asyncio.create_task(start_stream(inferences, DeafCall(requests()), 60.0))
        for _ in range(100):  # until the window is full
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    cancelled_ids.clear()
    asyncio.run(cancel_twice())
    assert cancelled_ids == ["behind", "further behind"]


@pytest.mark.parametrize(
    ("size", "max_requests"),
    [(10, 1024), (30_000, 1024), (1 << 20, 32), (10 << 20, 4), (40 << 20, 1)],
)
def test_requests_in_flight_are_bounded_in_bytes_and_number(size: int, max_requests: int) -> None:
    """Further requests are not read; one request of any size is."""
    cancelled_ids: list[str] = []
    request = bytes(size)
    request_count = 0

    class Inferences(FakeInferences):
        def submit_request(self, raw: bytes, *_: Any) -> UnaryInference:
            nonlocal request_count
            request_count += 1
            return AnsweredRequest(cancelled_ids, str(request_count))

    async def requests() -> AsyncIterator[bytes]:
        while True:
            yield request

    inferences: Any = Inferences()
    with pytest.raises(Unavailable):
        asyncio.run(start_stream(inferences, DeafCall(requests()), 0.05))
    assert request_count == max_requests + 1  # one request was answered


def test_memory_is_trimmed_when_the_call_ends() -> None:
    """The call may hold much of it until then, long after the stream was given up."""

    class Inferences(FakeInferences):
        def submit_request(self, raw: bytes, *_: Any) -> UnaryInference:
            return AnsweredRequest([], "")

    async def requests() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield bytes(1000)

    inferences: Any = Inferences()
    call = DeafCall(requests())
    with pytest.raises(Unavailable):
        asyncio.run(start_stream(inferences, call, 0.05))
    inferences.trimmed_sizes.clear()
    assert call.on_ended is not None
    call.on_ended()
    (byte_size,) = inferences.trimmed_sizes
    assert byte_size >= 3000


async def test_a_disconnect_before_a_load_begins_releases_the_request() -> None:
    """The client resets its call in the packet that completes a large request."""
    releases: list[int] = []
    built: Any = SimpleNamespace(
        release=lambda: releases.append(1),
        infer_request=SimpleNamespace(id=""),
        model=SimpleNamespace(name="m", version="1", is_published=False),
    )
    gateway: Any = SimpleNamespace(
        malloc_trim=SimpleNamespace(schedule=lambda _: None),
        models=SimpleNamespace(on_demand_names={"m"}, find=lambda *_: None),
        settings=SimpleNamespace(grpc_header_forward_pattern=""),
    )
    call: Any = SimpleNamespace()
    Inferences(gateway).infer(ArrivingRequest(built, [], 0), call)
    call.on_disconnect()
    await asyncio.sleep(0)
    assert releases


def test_an_error_of_the_reader_fails_the_call() -> None:
    """Its client would wait for a response, or take the stream for complete."""

    class Inferences(FakeInferences):
        def submit_request(self, raw: bytes, *_: Any) -> UnaryInference:
            if raw == b"bad":
                raise KeyError("a fault of ours")
            return AnsweredRequest([], "")

    async def requests() -> AsyncIterator[bytes]:
        yield b"good"
        yield b"bad"

    inferences: Any = Inferences()
    call = DeafCall(requests())
    with pytest.raises(KeyError):
        asyncio.run(start_stream(inferences, call, 10))
    assert call.taken_count == 1
