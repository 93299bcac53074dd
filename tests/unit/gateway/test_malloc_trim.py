"""Giving memory back: once, after the last large request."""

import asyncio

import pytest

from shmserve.gateway.inference import body_arrival
from shmserve.gateway.inference.body_arrival import MIN_COUNTED_BYTES
from shmserve.ipc import processes


@pytest.mark.parametrize(
    ("size", "expected_trims"),
    [(1 << 20, [0]), (MIN_COUNTED_BYTES, [0]), (MIN_COUNTED_BYTES - 1, [])],
)
async def test_large_requests_cost_one_trim_and_small_ones_none(
    monkeypatch: pytest.MonkeyPatch, size: int, expected_trims: list[int]
) -> None:
    calls: list[int] = []

    monkeypatch.setattr(body_arrival, "_TRIM_DELAY_S", 0.001)
    monkeypatch.setattr(processes, "trim_heap", lambda: calls.append(0))
    trim = body_arrival.MallocTrim()
    for _ in range(50):
        trim.schedule(size)
    was_trimmed = asyncio.Event()
    # Timers run in order, so this one comes last.
    asyncio.get_running_loop().call_later(0.002, was_trimmed.set)
    await was_trimmed.wait()
    assert calls == expected_trims


def test_malloc_trim_is_available() -> None:
    processes._libc.malloc_trim(0)
