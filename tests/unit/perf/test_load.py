"""Schedules, sweeps and loads on fake lanes: closed and open, errors, silence."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.client.request.channel import RequestChannel
from shmserve.client.request.prepare import PLAIN, PackedRequest
from shmserve.client.server_state import ServerState
from shmserve.errors import InvalidArgument, Unavailable
from shmserve.ipc.messages.publications import ModelPublished
from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.scheduler_client import NO_SCHEDULER
from shmserve.perf.load import (
    SCHEDULES,
    LoadGenerator,
    Probe,
    constant,
    parse_loads,
    poisson,
    probe,
)
from shmserve.protocols import Credentials, LaneObserver, TransportError, servers
from shmserve.protocols.connection import EventLoop
from shmserve.protocols.http import HttpLaneFactory
from shmserve.protocols.native import NativeLane
from tests.support.servers import reply_once


class InstantLaneFactory:
    """A transport that answers in the next turn: with an error for an error, and never for None."""

    is_decoupled = False

    def __init__(self, loop: EventLoop) -> None:
        self.loop = loop
        self.sent: list[Any] = []

    def encode(self, request: Any) -> Any:
        return request

    def lane(self, observer: LaneObserver) -> InstantLane:
        return InstantLane(self, observer)

    def close(self) -> None:
        pass


class InstantLane:
    def __init__(self, factory: InstantLaneFactory, observer: LaneObserver) -> None:
        self.lane_factory, self.observer = factory, observer

    def send(self, request: Any) -> None:
        self.lane_factory.sent.append(request)
        if request is not None:
            self.lane_factory.loop.call_soon(self.answer(request))

    def answer(self, request: str) -> Any:
        return lambda: self.observer.on_end(request if request.startswith("error") else "")

    def close(self) -> None:
        pass


@pytest.fixture
def transport() -> Iterator[InstantLaneFactory]:
    with contextlib.closing(EventLoop()) as loop:
        yield InstantLaneFactory(loop)


def load(lanes: InstantLaneFactory, sent: list[Any], count: int, plan: Any = None) -> LoadGenerator:
    return LoadGenerator(lanes.loop, lanes, lambda slot: sent, count, plan, patience_s=0.2)


def test_a_closed_loop_keeps_its_number_and_rotates_requests(transport: InstantLaneFactory) -> None:
    generator = load(transport, ["a", "b", "c"], 2)
    generator.begin()
    assert transport.sent == ["a", "a"]
    while len(transport.sent) < 6:
        generator.run(0)
    generator.finish()
    assert transport.sent[:6] == ["a", "a", "b", "b", "c", "c"]
    assert generator.mark().requests == len(transport.sent) == len(generator.records.delays_ns)


def test_a_request_without_a_slot_waits_and_its_latency_counts_from_its_scheduled_time(
    transport: InstantLaneFactory,
) -> None:
    # Four are due at once, and the next never.
    generator = load(transport, ["a"], 1, itertools.chain([0, 0, 0, 0], itertools.repeat(10**15)))
    generator.begin()
    deadline_s = time.monotonic() + 10
    while generator.mark().requests < 4 and time.monotonic() < deadline_s:
        generator.run(0)
    generator.finish()
    assert len(set(generator.records.scheduled_ns)) == 1
    assert list(generator.records.delays_ns) == sorted(generator.records.delays_ns)
    assert transport.sent == ["a"] * 4


def test_errors_are_counted_by_text_without_latencies(transport: InstantLaneFactory) -> None:
    generator = load(transport, ["a", "error one", "error two"], 1)
    generator.begin()
    while generator.mark().failed_count < 4:
        generator.run(0)
    generator.finish()
    assert set(generator.records.errors) == {"error one", "error two"}
    assert generator.mark().requests == transport.sent.count("a")


def test_a_load_against_a_silent_server_ends(transport: InstantLaneFactory) -> None:
    generator = load(transport, [None], 1)
    generator.begin()
    with pytest.raises(Unavailable, match=r"not responded to a request for 0\.2 s"):
        generator.run(60)
    with pytest.raises(Unavailable, match=r"not responded within 0\.1 s"):
        probe(transport.loop, transport, None, 0.1)
    assert probe(transport.loop, transport, "error!", 5) == "error!"


class LostServer(ServerState):
    """A server whose only scheduler is lost, while the connection to its listener is open."""

    def is_closed(self) -> bool:
        return False


@pytest.mark.parametrize("is_decoupled", [False, True])
def test_requests_that_fail_at_once_are_counted(
    transport: InstantLaneFactory, is_decoupled: bool
) -> None:
    """A native client's request fails before `send` returns if no scheduler serves its model."""
    server = LostServer()
    spec = ModelSpec.of({"name": "m", "max_batch_size": 0, "input": [], "output": []})
    server.models.publish(ModelPublished("m", "1", spec, {}, "ipc://lost", True, True, 0.0, 0))
    server.record_lost_scheduler("ipc://lost", "")
    packed = PackedRequest(server.models.resolve("m", ""), b"work", [], PLAIN)
    lanes: Any = SimpleNamespace(is_decoupled=is_decoupled, loop=transport.loop, connection=None)
    lanes.session = SimpleNamespace(pack=lambda *_, **__: packed)
    lanes.lane = partial(NativeLane, lanes)
    lanes.channel = RequestChannel(server, lambda fd: None, lambda fd: None)
    with contextlib.closing(lanes.channel):
        generator = load(lanes, ["a"], 2)
        generator.begin()
        while generator.mark().failed_count < 4:
            generator.run(0)
        generator.finish()
    assert set(generator.records.errors) == {NO_SCHEDULER}


def lane_factory(port: int, loop: EventLoop) -> HttpLaneFactory:
    address = servers.parse_address(f"http://127.0.0.1:{port}")
    return HttpLaneFactory(address, Credentials(), loop)


@pytest.mark.parametrize("size", [b"zz", b"-5", b""])
def test_a_malformed_chunk_ends_the_load(transport: InstantLaneFactory, size: bytes) -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    with reply_once(head + size + b"\r\nabc\r\n") as port:
        lanes = lane_factory(port, transport.loop)
        with pytest.raises(TransportError, match="response is malformed"):
            probe(transport.loop, lanes, b"GET / HTTP/1.1\r\n\r\n", 5)


def test_a_connection_is_not_used_again_after_http_1_0(transport: InstantLaneFactory) -> None:
    observer = Probe()
    with reply_once(b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n{}") as port:
        lane = lane_factory(port, transport.loop).lane(observer)
        lane.send(b"GET / HTTP/1.1\r\n\r\n")
        while observer.error is None:
            transport.loop.run_turn(10_000_000)
        assert observer.error == "" and not lane._connection.is_open


RATES = st.floats(0.5, 1e6)


def take_first(schedule: Iterator[int], count: int) -> list[int]:
    return list(itertools.islice(schedule, count))


@given(RATES, st.sampled_from(sorted(SCHEDULES)), st.integers(0, 9))
def test_a_schedule_is_monotonic_and_reproducible(rate: float, kind: str, seed: int) -> None:
    intervals = take_first(SCHEDULES[kind](rate, seed), 50)
    assert intervals == sorted(intervals) and intervals[0] >= 0
    assert intervals == take_first(SCHEDULES[kind](rate, seed), 50)


@given(RATES, st.integers(1, 100_000))
def test_a_constant_schedule_does_not_drift(rate: float, number: int) -> None:
    (start_ns,) = itertools.islice(constant(rate), number, number + 1)
    assert start_ns == pytest.approx(number * 1e9 / rate, abs=1)


def test_random_arrivals_are_poisson() -> None:
    intervals = take_first(poisson(1000.0, 1), 20_001)
    gaps = [next_ns - previous_ns for previous_ns, next_ns in itertools.pairwise(intervals)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1e6, rel=0.03)
    # Of an exponential distribution the standard deviation is the mean.
    assert (sum((g - mean) ** 2 for g in gaps) / len(gaps)) ** 0.5 == pytest.approx(mean, rel=0.05)


@pytest.mark.parametrize(
    ("text", "values"),
    [("4", [4]), ("1,2,8", [1, 2, 8]), ("1:3", [1, 2, 3]), ("8:32:8", [8, 16, 24, 32])],
)
def test_a_sweep_is_a_list_or_a_range(text: str, values: list[float]) -> None:
    assert parse_loads(text, "concurrency", int) == values


def test_rates_may_be_fractions() -> None:
    assert parse_loads("0.1:0.3:0.1", "rate", float) == pytest.approx([0.1, 0.2, 0.3])


@pytest.mark.parametrize("text", [
    *("", "0", "-1", "x", "1.5", "3:1", "1:3:0", "1:2:3:4", "1,,2"),
    *("1000001", "9" * 400, "1:" + "9" * 400),
])  # fmt: skip
def test_unknown_schedules_are_rejected_by_name(text: str) -> None:
    with pytest.raises(InvalidArgument, match="--concurrency: "):
        parse_loads(text, "concurrency", int)


def test_too_many_loads_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="1000000 loads, but at most 1000"):
        parse_loads("1:1000000", "rate", float)
    for text in ("inf", "1:inf", "nan:5", "1e-300"):
        with pytest.raises(InvalidArgument, match=f"--rate: '{text}' is .* to 1000000"):
            parse_loads(text, "rate", float)
