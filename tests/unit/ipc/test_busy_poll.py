"""Busy polling: a scheduler or worker polls for a moment if messages usually arrive within it."""

import itertools
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from shmserve.ipc.processes import SPIN_NS, BusyPoll
from shmserve.workers import main
from shmserve.workers.main import WorkerInstance

SHORT_WAIT, LONG_WAIT = 50_000, 5_000_000


def learned_poll(wait_times: list[int], requests: int = 1, cores: int = 2) -> BusyPoll:
    busy_poll = BusyPoll(cores)
    for waited_ns in wait_times:
        busy_poll.observe(requests, waited_ns)
    return busy_poll


def test_a_busy_poll_begins_asleep() -> None:
    assert not BusyPoll(2).should_spin[False] and not BusyPoll(2).should_spin[True]


def test_short_waits_enable_polling_and_long_waits_disable_it() -> None:
    busy_poll = learned_poll([SHORT_WAIT] * 20)
    assert busy_poll.should_spin[True]
    for _ in range(4):
        busy_poll.observe(1, LONG_WAIT)
    assert not busy_poll.should_spin[True]


def test_one_long_wait_has_little_effect() -> None:
    busy_poll = learned_poll([SHORT_WAIT] * 20)
    busy_poll.observe(1, 3_600_000_000_000)
    for _ in range(10):
        busy_poll.observe(1, SHORT_WAIT)
    assert busy_poll.should_spin[True]


def test_polling_stops_while_requests_need_the_cores() -> None:
    assert not learned_poll([SHORT_WAIT] * 20, requests=2).should_spin[True]
    busy_poll = learned_poll([SHORT_WAIT] * 20, requests=3)
    busy_poll.observe(1, SHORT_WAIT)
    assert not busy_poll.should_spin[True], "there were three just now"
    for _ in range(100):
        busy_poll.observe(1, SHORT_WAIT)
    assert busy_poll.should_spin[True]


def test_clients_and_workers_are_distinguished() -> None:
    busy_poll = learned_poll([SHORT_WAIT] * 20, requests=1)
    assert busy_poll.should_spin[True] and not busy_poll.should_spin[False]


def test_a_single_core_disables_polling() -> None:
    assert not learned_poll([SHORT_WAIT] * 20, cores=1).should_spin[True]


class Link:
    """A worker's link at which a message arrives after a given number of polls."""

    def __init__(self, looks_left: int) -> None:
        self.inbox: list[object] = []
        self.waits: list[float | None] = []
        self._looks_left = looks_left

    def wait(self, timeout_s: float | None) -> bool:
        self.waits.append(timeout_s)
        return timeout_s is None or len(self.waits) >= self._looks_left


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[float | None]]:
    """Return a function that lists the timeouts of a worker's waits until the message arrives."""

    def wait(
        waited_ns: int, in_flight: int, looks_left: int, tick_ns: int = 0, threads: bool = False
    ) -> list[float | None]:
        clock = itertools.count(0, tick_ns)
        monkeypatch.setattr(main, "time", SimpleNamespace(monotonic_ns=lambda: next(clock)))
        link = Link(looks_left)
        worker = object.__new__(WorkerInstance)
        worker._context = SimpleNamespace(control=link)  # type: ignore[assignment]
        worker.link = SimpleNamespace(has_open_requests=threads)  # type: ignore[assignment]
        worker._busy_poll, worker._in_flight = learned_poll([waited_ns] * 20, in_flight), in_flight
        assert worker._wait(None)
        return link.waits

    return wait


def test_a_worker_with_frequent_requests_polls(waits: Callable[..., list[float | None]]) -> None:
    assert waits(SHORT_WAIT, 1, looks_left=3) == [0.0, 0.0, 0.0]
    assert waits(SHORT_WAIT, 1, looks_left=1 << 40, tick_ns=SPIN_NS // 2) == [0.0, None]


def test_a_worker_with_rare_requests_sleeps(waits: Callable[..., list[float | None]]) -> None:
    assert waits(LONG_WAIT, 1, looks_left=1) == [None]
    assert waits(SHORT_WAIT, 5, looks_left=1) == [None]


def test_a_worker_whose_model_sends_from_its_threads_sleeps(
    waits: Callable[..., list[float | None]],
) -> None:
    assert waits(SHORT_WAIT, 1, looks_left=1, threads=True) == [None]
