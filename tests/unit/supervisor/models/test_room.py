"""What another instance needs of the host, and whether that is there."""

from __future__ import annotations

import os
import time

import pytest

from shmserve.common.host import CpuUtilization
from shmserve.supervisor.models import room
from shmserve.supervisor.models.room import Room, private_bytes, processor_s

MIB = 2**20


def test_a_process_is_measured() -> None:
    held = bytearray(os.urandom(1)) * (32 * MIB)
    assert private_bytes(os.getpid()) > len(held)
    before, began = processor_s(os.getpid()), time.process_time()
    while time.process_time() - began < 0.1:
        pass
    assert 0.05 < processor_s(os.getpid()) - before < 1
    assert (private_bytes(0), processor_s(0)) == (0, 0.0)


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """The processor time of processes that have no memory of their own."""
    found = {1: 10.0, 2: 20.0}
    monkeypatch.setattr(room, "processor_s", found.__getitem__)
    monkeypatch.setattr(room, "private_bytes", lambda pid: 0)
    monkeypatch.setattr(CpuUtilization, "read", lambda meter: 0.5)
    return found


def test_processors_for_all_of_them_at_work(times: dict[int, float]) -> None:
    """Instances that take two processors each while they execute, or less while they wait."""
    host = Room(processors=4)
    host.look([1], 5.0, 0.0)
    assert host.lacks(9) == ""  # nobody knows yet
    times[1] += 2
    host.look([1, 2], 6.0, 0.1)
    assert host.lacks(2) == ""
    assert host.lacks(3) == "4 processors, an instance at work takes 2"
    for number in range(100):
        times[1] += 1
        host.look([1, 2], 16.0 + 10 * number, 0.2)
        assert bool(host.lacks(3)) == (number < 14)


def test_none_where_all_processors_are_busy_and_it_needs_some(
    times: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Room(processors=4)
    host.look([1], 0.0, 0.0)
    times[1] += 1
    monkeypatch.setattr(CpuUtilization, "read", lambda meter: 0.97)
    host.look([1], 1.0, 0.5)
    assert host.lacks(2) == ""  # that was half a second ago
    host.look([1], 1.0, 1.0)
    assert host.lacks(2) == "the processors are busy for 97 % of the time"
    idle = Room(processors=4)
    idle.look([1], 0.0, 0.0)
    idle.look([1], 1.0, 2.0)
    assert idle.lacks(9) == ""


def test_memory_for_one_as_large_as_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "private_bytes", {1: 100 * MIB, 2: 200 * MIB}.__getitem__)
    monkeypatch.setattr(room, "processor_s", lambda pid: 0.0)
    host = Room(processors=4)
    host.look([1, 2], 0.0, 0.0)
    monkeypatch.setattr(room, "memory_bytes", lambda: (1000 * MIB, 0))
    monkeypatch.setattr(room, "memory_left", lambda: 251 * MIB)
    assert host.lacks(3) == ""
    monkeypatch.setattr(room, "memory_left", lambda: 249 * MIB)
    assert host.lacks(3) == "249 MiB of memory are left, an instance takes 200 MiB"
