"""Workers are asked whether their model is ready: what they say together, in time or not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shmserve.ipc.messages.supervision import CheckReady, ReadyChecked
from shmserve.supervisor.models import readiness
from shmserve.supervisor.models.readiness import ReadinessCheck


@pytest.mark.parametrize(
    ("says", "ready"),
    [
        ({}, False),
        ({1: True}, True),
        ({1: False}, False),
        ({1: True, 2: True}, True),
        ({1: True, 2: False}, False),
        ({1: None}, False),
        ({1: None, 2: True}, True),
        ({1: None, 2: False}, False),
    ],
)
def test_what_workers_say_together(
    says: dict[int, bool | None], ready: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None: it does not answer in time, as while it executes."""
    monkeypatch.setattr(readiness, "PATIENCE_S", 0.05)

    async def ask() -> bool:
        loop = asyncio.get_running_loop()

        def send(pid: int, message: Any) -> None:
            assert isinstance(message, CheckReady)
            said = says[pid]
            if said is not None:
                loop.call_soon(check.checked, pid, ReadyChecked(message.id, said))

        check = ReadinessCheck(send)
        return await check.check(list(says))

    assert asyncio.run(ask()) is ready


def test_answers_of_others_and_to_nothing_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "PATIENCE_S", 0.05)

    async def ask() -> bool:
        def send(pid: int, message: Any) -> None:
            check.checked(7, ReadyChecked(message.id, True))
            check.checked(pid, ReadyChecked(message.id + 1, True))

        check = ReadinessCheck(send)
        return await check.check([1])

    assert asyncio.run(ask()) is False


def test_a_busy_worker_has_one_check_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it is polled, and by however many."""
    monkeypatch.setattr(readiness, "PATIENCE_S", 0.01)
    sent: list[CheckReady] = []

    async def ask() -> list[bool]:
        check = ReadinessCheck(lambda pid, message: sent.append(message))
        together = await asyncio.gather(*(check.check([1]) for _ in range(3)))
        late = await check.check([1])
        monkeypatch.setattr(readiness, "PATIENCE_S", 60.0)
        joined = asyncio.ensure_future(check.check([1]))
        await asyncio.sleep(0)
        check.checked(1, ReadyChecked(sent[0].id, True))
        return [*together, late, await joined]

    assert asyncio.run(ask()) == [False, False, False, False, True]
    assert len(sent) == 1


@pytest.mark.parametrize("others", [[], [2]])
def test_a_worker_that_ends_is_not_waited_for(others: list[int]) -> None:
    async def ask() -> bool:
        def send(pid: int, message: Any) -> None:
            if pid == 2:
                check.checked(pid, ReadyChecked(message.id, True))

        check = ReadinessCheck(send)
        asked = asyncio.ensure_future(check.check([1, *others]))
        await asyncio.sleep(0)
        check.exited(1)
        check.exited(1)
        return await asked

    assert asyncio.run(ask()) is bool(others)
