"""Fail-over of a version's scheduler: when one dies another takes over, its workers attach to it,
and whoever submitted requests submits them again there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from shmserve.common.tasks import either
from shmserve.errors import ShmserveError
from shmserve.ipc.messages import supervision as m
from shmserve.supervisor.context import LOCAL_CLIENT, SupervisorContext
from shmserve.supervisor.models.version.instance_processes import Instances
from shmserve.supervisor.models.version.scheduler_process import VersionScheduler
from shmserve.supervisor.models.version.spec import Lifetime
from shmserve.supervisor.processes.scheduler_hosts import Group
from shmserve.supervisor.processes.table import RestartBackoff

logger = logging.getLogger(__name__)

# In a row, while somebody waits for the first that serves.
_MOST_FAILED_STARTS = 5
# Whoever submits requests.
_CLIENTS = ("gateway", "ensemble", "worker", LOCAL_CLIENT)
# Before requests are refused that wait for one: some seconds.
_MOST_WAITED_FOR = 10


@dataclass(slots=True, eq=False)
class FailOver:
    """Keeps a scheduler alive until the version retires. `on_change` hears of every death, failed
    start and successor."""

    _context: SupervisorContext
    _scheduler: VersionScheduler
    _instances: Instances
    _lifetime: Lifetime
    _on_change: Callable[[], None]
    _backoff: RestartBackoff = field(init=False, default_factory=RestartBackoff)
    _failed_starts: int = 0
    _keeping: asyncio.Task[None] | None = None

    @property
    def hopeless(self) -> bool:
        """Whether so many starts in a row failed that nobody should wait for the next."""
        return self._failed_starts >= _MOST_FAILED_STARTS

    async def start(self, first: bool = False) -> None:
        """Start a scheduler and tell it of every instance; raises ShmserveError when it does not
        come up."""
        workers = self._instances.pids()
        await self._scheduler.start(self._instances.config, workers, first)
        self._failed_starts = 0
        self._instances.introduce(workers)

    def keep(self) -> None:
        """Replace each scheduler that dies, from now on."""
        self._keeping = self._context.background(self._keep())

    async def move(self, group: Group, publish: Callable[[], Awaitable[None]]) -> None:
        """Have the version scheduled in the process of another group, without a lost request: a new
        scheduler takes what comes, the old one finishes what it has, and the instances change over.

        `publish()` returns once every client knows where requests go now. Where all its workers, or
        one of the schedulers, die meanwhile, what the old had is submitted again: nothing runs it
        any more. Raises Unavailable, and changes nothing, when the new one does not come up.
        """
        scheduler, instances = self._scheduler, self._instances
        old, lost = scheduler.serving, scheduler.endpoint
        workers = [child.exited for child in instances.children() if child.alive]
        unless: list[asyncio.Future[Any]] = [asyncio.gather(*workers)] if workers else []
        if self._keeping is not None:
            self._keeping.cancel()
        try:
            await scheduler.succeed(group, instances.config)
            unless.append(scheduler.serving.child.exited)
            await publish()
            await scheduler.drain_one(old, unless=unless)
            instances.introduce([])
            self._say_lost(lost, scheduler.endpoint, *_CLIENTS)
            await publish()
            # Outputs that were read meanwhile are released by way of the old one.
            await scheduler.drain_one(old, unless=unless)
            instances.attach()
            self._on_change()
            await self._context.hosts.close(old)
        finally:
            self.keep()

    async def _keep(self) -> None:
        while not self._lifetime.retiring:
            dead, born = self._scheduler.serving, time.monotonic()
            child = dead.child
            await either(dead.closed, child.exited)
            if not self._lifetime.retiring:
                reason = child.exited.result() if child.exited.done() else "closed"
                logger.error("%s ended (%s); a new one takes over", child.title, reason)
                self._on_change()
                await self._replace(self._backoff.pause_s(time.monotonic() - born))

    async def _replace(self, pause: float) -> None:
        lost = self._scheduler.endpoint
        while not self._lifetime.retiring:
            if pause:
                await asyncio.sleep(pause)
            try:
                await self.start()
            except ShmserveError as error:
                logger.error("%s", error.message)
                pause = self._backoff.pause_s(0)
                self._failed_starts += 1
                self._on_change()
                if self._failed_starts >= _MOST_WAITED_FOR:
                    # What was submitted fails; what comes later goes to the successor, if any.
                    self._say_lost(lost, "", *_CLIENTS)
                continue
            self._instances.attach()
            # Whoever submits keeps what it submitted, and submits it again: while it knows the old.
            self._say_lost(lost, self._scheduler.endpoint, *_CLIENTS)
            self._on_change()
            return
        # Retired meanwhile: models that called it look for who serves now.
        self._say_lost(lost, "", "worker", LOCAL_CLIENT)

    def _say_lost(self, endpoint: str, successor: str, *roles: str) -> None:
        self._context.broadcast(m.SchedulerLost(endpoint, successor), *roles)
