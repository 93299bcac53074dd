"""Changes that hold once every process that was told says so."""

from __future__ import annotations

import asyncio

import pytest

from shmserve.supervisor.processes.control_socket import Acknowledgements


def test_all_must_acknowledge_that_are_there() -> None:
    async def change() -> None:
        changes = Acknowledgements()
        number, done = changes.begin({1, 2, 3})
        changes.acknowledged(1, number)
        changes.acknowledged(1, number)
        changes.exited(2)
        changes.acknowledged(4, number)
        changes.acknowledged(3, number + 1)
        assert not done.done()
        changes.acknowledged(3, number)
        await done
        assert changes.begin(set())[1].done()

    asyncio.run(change())


def test_what_nobody_waits_for_is_not_kept() -> None:
    """A program may stay for weeks and acknowledge nothing, and models come and go."""

    async def change() -> None:
        changes = Acknowledgements()
        number, done = changes.begin({1})
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(done, 0)
        await asyncio.sleep(0)
        assert not changes._open
        changes.acknowledged(1, number)

    asyncio.run(change())
