"""Changes that hold once every process that was told says so."""

import asyncio

from shmserve.supervisor.processes.control_socket import Acknowledgements


def test_all_must_acknowledge_that_are_there() -> None:
    async def change() -> None:
        changes = Acknowledgements()
        number = changes.begin({1, 2, 3})
        waiting = asyncio.ensure_future(changes.news())
        changes.acknowledged(1, number)
        changes.acknowledged(1, number)
        changes.exited(2)
        changes.acknowledged(4, number)
        changes.acknowledged(3, number + 1)
        assert not changes.know(number)
        await asyncio.sleep(0)
        changes.acknowledged(3, number)
        assert changes.know(number)
        await waiting
        assert changes.know(changes.begin(set()))

    asyncio.run(change())


def test_what_all_know_is_not_kept() -> None:
    """A program may stay for weeks and acknowledge nothing, and models come and go."""
    changes = Acknowledgements()
    number = changes.begin({1})
    changes.acknowledged(1, number)
    assert not changes._missing
    changes.acknowledged(1, number)
    assert changes.know(number)
