"""Workers are asked whether their model is ready: what they say together, in time or not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shmserve.ipc.messages import CheckReady, ReadyChecked
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
