"""Giving memory back: once, after the last large request."""

from __future__ import annotations

import asyncio

import pytest

from shmserve.gateway.inference import malloc_trim


@pytest.mark.parametrize(("size", "trims"), [(malloc_trim.LARGE, [0]), (malloc_trim.LARGE - 1, [])])
def test_large_requests_cost_one_trim_and_small_ones_none(
    monkeypatch: pytest.MonkeyPatch, size: int, trims: list[int]
) -> None:
    calls: list[int] = []

    async def requests() -> None:
        trim = malloc_trim.MallocTrim()
        for _ in range(50):
            trim.soon(size)
        done = asyncio.Event()
        # Timers run in order, so this one comes last.
        asyncio.get_running_loop().call_later(0.002, done.set)
        await done.wait()

    monkeypatch.setattr(malloc_trim, "_PAUSE_S", 0.001)
    monkeypatch.setattr(malloc_trim, "_malloc_trim", calls.append)
    asyncio.run(requests())
    assert calls == trims


def test_this_host_can() -> None:
    assert malloc_trim._malloc_trim is not None
    malloc_trim._malloc_trim(0)
