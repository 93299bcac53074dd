"""When a scheduler stays awake for a moment: what was waited for has lately come within it."""

from __future__ import annotations

from shmserve.scheduler.loop import Spin

SHORT, LONG = 50_000, 5_000_000


def after(waits: list[int], requests: int = 1, cores: int = 2) -> Spin:
    spin = Spin(cores)
    for waited in waits:
        spin.observe(requests, waited)
    return spin


def test_it_begins_asleep() -> None:
    assert not Spin(2).worth(0) and not Spin(2).worth(1)


def test_short_waits_are_worth_it_and_long_ones_end_it() -> None:
    spin = after([SHORT] * 20)
    assert spin.worth(1)
    for _ in range(4):
        spin.observe(1, LONG)
    assert not spin.worth(1)


def test_one_long_wait_is_forgotten_soon() -> None:
    spin = after([SHORT] * 20)
    spin.observe(1, 3_600_000_000_000)
    for _ in range(10):
        spin.observe(1, SHORT)
    assert spin.worth(1)


def test_many_requests_need_the_cores() -> None:
    assert not after([SHORT] * 20, requests=2).worth(2)
    spin = after([SHORT] * 20, requests=3)
    spin.observe(1, SHORT)
    assert not spin.worth(1), "there were three just now"
    for _ in range(100):
        spin.observe(1, SHORT)
    assert spin.worth(1)


def test_clients_and_workers_are_told_apart() -> None:
    spin = after([SHORT] * 20, requests=1)
    assert spin.worth(1) and not spin.worth(0)


def test_there_must_be_a_core_for_the_others() -> None:
    assert not after([SHORT] * 20, cores=1).worth(1)
