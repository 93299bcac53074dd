"""What the rooms of the supervisor share."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from shmserve.config.options import parse
from shmserve.config.server import from_flags
from shmserve.ipc import endpoints
from shmserve.ipc import messages as m
from shmserve.ipc.capabilities import Capabilities
from shmserve.ipc.transport.dealer import Dealer
from shmserve.logs import LogSettings
from shmserve.supervisor.context import SupervisorContext
from shmserve.supervisor.processes.control_socket import Control


def host(run_dir: Path) -> SupervisorContext:
    """One with a socket, whose every process is this one."""
    config = from_flags(parse(["--model-repository=/tmp"]), {})
    nobody: Any = None
    control = Control(
        endpoints.control(run_dir),
        lambda pid: made.knows(pid),
        lambda pid, message: made.dispatch(pid, message),
    )
    made = SupervisorContext(
        config, run_dir, nobody, control, nobody, nobody, Capabilities(bytes(32)), LogSettings()
    )
    return made


def test_last_words_are_heard_before_the_end(tmp_path: Path) -> None:
    """The end of a process may be noticed while its words wait to be read."""

    async def listen() -> list[Any]:
        heard: list[Any] = []
        supervisor = host(tmp_path)
        supervisor.enrol(os.getpid(), "worker", heard.append)
        worker = Dealer(endpoints.control(tmp_path), f"worker.1.0.{os.getpid()}")
        worker.send(m.WorkerStarted(os.getpid()))
        worker.send(m.LoadFailed("INTERNAL", "no such file"))
        supervisor.dismiss(os.getpid())
        worker.close()
        supervisor.control.close()
        return heard

    heard = asyncio.run(listen())
    assert heard == [m.WorkerStarted(os.getpid()), m.LoadFailed("INTERNAL", "no such file")]
