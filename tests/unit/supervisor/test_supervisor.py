"""The supervisor's own shutdown after any failure."""

import asyncio
from dataclasses import fields
from typing import Any
from unittest.mock import AsyncMock, MagicMock, call

import pytest

from shmserve.common.tasks import in_background
from shmserve.config.command_line import parse
from shmserve.config.server import from_flags
from shmserve.ipc.messages.publications import ProcessExited
from shmserve.supervisor.context import LOCAL_CLIENT
from shmserve.supervisor.host.service_manager import ServiceManager
from shmserve.supervisor.processes.children import Child
from shmserve.supervisor.reload import Reload
from shmserve.supervisor.supervisor import Supervisor
from tests.support.waiting import until_async


def supervisor() -> Any:
    config = from_flags(parse(["--model-repository=/tmp"]), {})
    parts: dict[str, Any] = {field.name: MagicMock() for field in fields(Supervisor) if field.init}
    parts["context"] = MagicMock(tasks=set(), config=config)
    parts["context"].local_clients.redirect = AsyncMock()
    parts["handover"].let_successor_accept = AsyncMock()
    parts["end_signals"] = asyncio.Queue()
    parts["processes"].all.return_value = []
    parts["processes"].wait_for_trackers = AsyncMock()
    parts["gateways"] = MagicMock(drain=AsyncMock(), stop=AsyncMock())
    shutdown_calls = {"finish_sequences": AsyncMock(), "stop": AsyncMock(), "kill": AsyncMock()}
    parts["models"] = MagicMock(**shutdown_calls)
    parts["service_manager"] = ServiceManager(None)
    return Supervisor(**parts)


def test_a_failing_drain_still_stops_the_server(caplog: pytest.LogCaptureFixture) -> None:
    """The server still stops completely, and the log names the failure."""
    failing_supervisor = supervisor()
    failing_supervisor.gateways.drain.side_effect = RuntimeError("so it is")
    asyncio.run(failing_supervisor.end(0))
    assert "so it is" in caplog.text
    failing_supervisor.models.kill.assert_awaited()
    failing_supervisor.processes.close.assert_called()


def test_a_failing_start_still_stops_the_server(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_supervisor = supervisor()

    async def start(_: Supervisor, start_s: float) -> int:
        failing_supervisor.end_signals.put_nowait(15)
        try:
            return await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            raise RuntimeError("so it is") from None

    monkeypatch.setattr(Supervisor, "_start", start)
    monkeypatch.setattr(Supervisor, "open", lambda _: None)
    assert asyncio.run(failing_supervisor.run()) == 0
    assert "so it is" in caplog.text
    failing_supervisor.processes.close.assert_called()


@pytest.mark.parametrize("role", ["gateway", "host", "worker", "workspace", ""])
async def test_an_exit_is_one_message_to_the_handler_of_its_role(role: str) -> None:
    mock_supervisor = supervisor()
    context = mock_supervisor.context
    context.control.remove_process.return_value = role
    child = Child(7, "it", asyncio.get_running_loop().create_future(), kill_reason="it was slow")
    child.exit_future.set_result("signal 9")
    mock_supervisor._process_exited(child)
    context.broadcast.assert_called_once()
    assert context.broadcast.call_args.args[0] == ProcessExited(7, "signal 9")
    assert {
        "gateway": mock_supervisor.regions.draining.gateway_exited.mock_calls,
        "host": context.tickets.process_exited.mock_calls,
        "worker": mock_supervisor.readiness.process_exited.mock_calls,
    } == {
        known_role: [call(7)] if known_role == role else []
        for known_role in ("gateway", "host", "worker")
    }


READER_ROLES, NON_READERS = ("gateway", LOCAL_CLIENT), ("scheduler", "ensemble", "worker")


async def test_several_exits_are_reported_in_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are as many processes as models, and each would be woken for each that is unloaded."""
    monkeypatch.setattr("shmserve.supervisor.supervisor._EXIT_REPORT_DELAY_S", 0.0)
    mock_supervisor = supervisor()
    for pid in (7, 8):
        child = Child(pid, "it", asyncio.get_running_loop().create_future(), is_stopping=True)
        child.exit_future.set_result("exit status 0")
        mock_supervisor._process_exited(child)
    sent = mock_supervisor.context.broadcast.mock_calls
    assert sent == [call(ProcessExited(pid, "exit status 0"), *READER_ROLES) for pid in (7, 8)]
    sent.clear()
    outcomes = asyncio.Event()
    mock_supervisor.context.broadcast.side_effect = lambda *_: outcomes.set()
    await outcomes.wait()
    assert sent == [call(ProcessExited(pid, "exit status 0"), *NON_READERS) for pid in (7, 8)]


async def test_a_background_failure_is_logged_at_once(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise RuntimeError("so it is")

    tasks: set[asyncio.Task[None]] = set()
    task = in_background(fail(), tasks)
    remaining_task = in_background(asyncio.sleep(60), tasks)
    await asyncio.wait({task})
    assert tasks == {remaining_task}
    remaining_task.cancel()
    await asyncio.wait({remaining_task})
    assert not tasks
    (record,) = list(caplog.records)
    assert record.exc_info is not None and str(record.exc_info[1]) == "so it is"


async def test_a_reload_that_fails_does_not_prevent_the_next_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    read_config = MagicMock(side_effect=RuntimeError("can't start new thread"))
    service_manager = MagicMock(extend_timeout=AsyncMock())
    parts: Any = (*(MagicMock() for _ in range(3)), service_manager, read_config, str)
    reload = Reload(*parts)
    task = asyncio.ensure_future(reload.run())
    reload.request()
    await until_async(lambda: read_config.called and service_manager.notify_ready.called)
    reload.request()
    await until_async(lambda: read_config.call_count == 2)
    task.cancel()
    assert "RuntimeError: can't start new thread" in caplog.text
