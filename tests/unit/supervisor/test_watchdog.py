"""Signs of life for a service manager."""

import asyncio
from collections.abc import Hashable
from unittest.mock import MagicMock

import pytest

from shmserve.ipc.messages.supervision import Ping
from shmserve.supervisor.health import Watchdog
from shmserve.supervisor.processes.control_socket import Acknowledgements
from tests.support.waiting import until_async


class Control:
    """A control socket whose peers answer queries when the test allows it."""

    def __init__(self) -> None:
        self.acknowledgements = Acknowledgements()
        self.pings: asyncio.Queue[int] = asyncio.Queue()

    def announce(self, make: type[Ping], *roles: str) -> int:
        assert roles == ("gateway", "host")
        number = self.acknowledgements.begin([7, 8])
        self.pings.put_nowait(make(number).ack_number)
        return number

    def answer(self, number: int, *peers: Hashable) -> None:
        for peer in peers:
            self.acknowledgements.record_acknowledged(peer, number)


async def test_an_unresponsive_process_is_named_without_pings(
    caplog: pytest.LogCaptureFixture,
) -> None:
    control, manager, processes = Control(), MagicMock(watchdog_s=0.4), MagicMock()
    processes.all.return_value = [MagicMock(pid=7, title="a"), MagicMock(pid=8, title="b")]
    watching = asyncio.ensure_future(
        Watchdog(control, processes, manager).run()  # type: ignore[arg-type]
    )
    async with asyncio.timeout(20):
        for signs in range(2):
            number = await control.pings.get()
            assert manager.notify_alive.call_count == signs
            control.answer(number, 7, 8)
        number = await control.pings.get()
        control.answer(number, 7)
        await until_async(lambda: "do not respond" in caplog.text)
        assert caplog.text.strip().endswith("these processes do not respond: b (pid 8)")
        assert (manager.notify_alive.call_count, control.pings.qsize()) == (2, 0)
        control.answer(number, 8)
        await control.pings.get()
        assert manager.notify_alive.call_count == 3
    watching.cancel()


async def test_the_watchdog_ends_when_the_last_answer_arrives_with_the_stop() -> None:
    control, manager = Control(), MagicMock(watchdog_s=40.0)
    watching = asyncio.ensure_future(
        Watchdog(control, MagicMock(), manager).run()  # type: ignore[arg-type]
    )
    for peer in (7, 8):
        control.answer(await control.pings.get() if peer == 7 else 1, peer)
    watching.cancel()
    await asyncio.wait({watching}, timeout=10)
    assert watching.cancelled()


async def test_no_liveness_check_without_a_watchdog() -> None:
    control, manager = MagicMock(), MagicMock(watchdog_s=0.0)
    await Watchdog(control, MagicMock(), manager).run()
    assert not control.mock_calls
