"""A model's processes, in every order in which the supervisor can hear of them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shmserve.children import Child
from shmserve.config import from_flags
from shmserve.deployment import Deployment, Plan
from shmserve.flags import parse
from shmserve.host import Host
from shmserve.ipc import messages as m
from shmserve.ipc.guests import Seals
from shmserve.lifecycle import InstanceState
from shmserve.logs import LogSettings

CONFIG = {
    "name": "m",
    "backend": "python",
    "instance_group": [{"name": "m_0", "kind": "KIND_CPU", "count": 1}],
}


class Processes:
    """A zygote, its processes and the supervisor's socket to them: each says what is expected of
    it, unless `at_start` has something else happen to it."""

    def __init__(self) -> None:
        self._pids = itertools.count(1001)
        self.started: list[Child] = []
        self.at_start: Callable[[Child], None] = lambda child: None
        self.deployment: Any = None
        self.host: Any = None

    async def spawn(self, title: str, entry: str, args: Any, fds: Any = ()) -> Child:
        loop = asyncio.get_running_loop()
        child = Child(next(self._pids), title, loop.create_future())
        self.started.append(child)
        first = m.SchedulerReady if "scheduler" in entry else m.WorkerStarted
        loop.call_soon(self.host.dispatch, child.pid, first(child.pid))
        loop.call_soon(self.at_start, child)
        return child

    def die(self, child: Child) -> None:
        child.exited.set_result("signal 9")
        self.deployment.process_exited(child)

    def send(self, pid: int, message: Any) -> None:
        answer: Any = None
        if isinstance(message, m.CompleteConfig):
            answer = m.ConfigCompleted(message.config)
        elif isinstance(message, m.LoadInstance):
            answer = m.InstanceLoaded(0.0)
        if answer is not None:
            asyncio.get_running_loop().call_soon(self.host.dispatch, pid, answer)

    def admit(self, pid: int) -> None:
        """It has said nothing yet."""

    connected = admit


def deployment(processes: Processes) -> Deployment:
    """One of one instance."""
    fake: Any = processes
    config = from_flags(parse(["--model-repository=/tmp"]), {})
    folder = Path("/tmp")
    seals, log = Seals(bytes(32)), LogSettings()
    processes.host = Host(config, folder, fake, fake, fake, fake, seals, log)
    plan = Plan("m", "1", folder, folder, CONFIG, lambda completed: completed)
    made = processes.deployment = Deployment(
        processes.host, plan, lambda changed: None, lambda pid, message: None
    )
    return made


def test_a_worker_that_dies_as_soon_as_it_has_started() -> None:
    """Its first word and its end come in one turn of the loop: another one starts in its place."""

    async def live() -> list[InstanceState]:
        processes = Processes()
        model = deployment(processes)
        await model.start()

        def once(child: Child) -> None:
            processes.at_start = lambda child: None
            processes.die(child)

        processes.at_start = once
        worker = processes.started[0]
        processes.die(worker)
        assert not model.ready
        async with asyncio.timeout(10):
            await model.until_ready()
        assert len(processes.started) == 4  # a worker, the scheduler, and two more workers
        states = [instance.state for instance in model.instances]
        for task in list(processes.host.tasks):
            task.cancel()
        return states

    assert asyncio.run(live()) == [InstanceState.READY]


def test_only_the_process_is_killed_that_its_scheduler_means(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may have died before that is heard, and another have been started in its place."""
    signalled: list[Child] = []
    monkeypatch.setattr(Child, "kill", lambda child, *number: signalled.append(child))

    async def live() -> Child:
        processes = Processes()
        model = deployment(processes)
        await model.start()
        first = processes.started[0]
        processes.die(first)
        async with asyncio.timeout(10):
            await model.until_ready()
        second = processes.started[-1]
        for child in (first, second):
            model._from_scheduler(m.KillInstance(0, "it takes too long", child.pid))
        for task in list(processes.host.tasks):
            task.cancel()
        return second

    meant = asyncio.run(live())
    assert signalled == [meant]
