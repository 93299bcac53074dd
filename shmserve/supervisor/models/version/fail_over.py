"""Fail-over of a version's scheduler: when one dies another takes over, its workers attach to it,
and whoever submitted requests submits them again there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from shmserve.errors import ShmserveError
from shmserve.ipc.messages import supervision as m
from shmserve.supervisor.context import LOCAL_CLIENT, SupervisorContext
from shmserve.supervisor.models.version.instance_processes import Instances
from shmserve.supervisor.models.version.scheduler_process import VersionScheduler
from shmserve.supervisor.models.version.states import Lifetime
from shmserve.supervisor.models.version.step_models import StepModels
from shmserve.supervisor.processes.table import RestartBackoff

logger = logging.getLogger(__name__)

# In a row, while somebody waits for the first that serves.
_MOST_FAILED_STARTS = 5
# Whoever submits requests.
_CLIENTS = ("gateway", "ensemble", "worker", LOCAL_CLIENT)
# Before requests are refused that wait for one: some seconds.
_MOST_WAITED_FOR = 10


class FailOver:
    """Keeps a scheduler alive until the version retires. `on_change` hears of every death, failed
    start and successor."""

    def __init__(
        self,
        context: SupervisorContext,
        scheduler: VersionScheduler,
        instances: Instances | StepModels,
        lifetime: Lifetime,
        on_change: Callable[[], None],
    ) -> None:
        self._context = context
        self._scheduler = scheduler
        self._instances = instances
        self._lifetime = lifetime
        self._on_change = on_change
        self._backoff = RestartBackoff()
        self._failed_starts = 0

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

    async def keep(self) -> None:
        """Replace each scheduler that dies."""
        while not self._lifetime.retiring:
            dead, born = self._scheduler.serving, time.monotonic()
            child = dead.child
            await self._context.either(dead.closed, child.exited)
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
