"""The restarts of a model version's instances: one that dies starts again, with backoff, and is
given up after too many failures in a row.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from shmserve.errors import ShmserveError
from shmserve.ipc import messages as m
from shmserve.supervisor.context import SupervisorContext
from shmserve.supervisor.models.version.instances import Instance
from shmserve.supervisor.models.version.load_protocol import LoadProtocol
from shmserve.supervisor.models.version.scheduler_process import VersionScheduler
from shmserve.supervisor.models.version.states import InstanceState, Lifetime
from shmserve.supervisor.processes.table import Child

logger = logging.getLogger(__name__)

_MOST_FAILED_LOADS = 5


class InstanceRestarts:
    """Starts those of `instances` again that die, with `load(instance)`; one that retired is
    removed from them. `instances` are the version's, whichever it has at the time. `on_change`
    hears when one dies or is given up.

    `failure`: why none will come back, or empty.
    """

    def __init__(
        self,
        context: SupervisorContext,
        model_name: str,
        protocol: LoadProtocol,
        scheduler: VersionScheduler,
        lifetime: Lifetime,
        instances: list[Instance],
        load: Callable[[Instance], Awaitable[None]],
        on_change: Callable[[], None],
    ) -> None:
        self._context = context
        self._model_name = model_name
        self._protocol = protocol
        self._scheduler = scheduler
        self._lifetime = lifetime
        self._instances = instances
        self._load = load
        self._on_change = on_change
        self.failure = ""

    def introduce(self) -> None:
        """Tell a scheduler that was just started if no instance will come back."""
        if self.failure:
            self._tell_pool_failed()

    def _tell_pool_failed(self) -> None:
        reason = f"model '{self._model_name}' failed: no instance could be started"
        self._scheduler.tell(m.PoolFailed(reason))

    def process_exited(self, child: Child) -> None:
        """A process of these (or not: then nothing happens) has ended."""
        for instance in self._instances[:]:
            if instance.child is child:
                self._exited(instance, child)

    def _exited(self, instance: Instance, child: Child) -> None:
        reason = child.exited.result()
        before = instance.state
        instance.event("exited")
        if self._lifetime.stopping:
            return  # whoever stops it sees it end
        if instance.state is InstanceState.STOPPED:
            self._instances.remove(instance)
            self._scheduler.release(instance)
        if before not in (InstanceState.READY, InstanceState.RETIRING):
            return  # whoever stops or starts it sees it end
        instance.child = None
        logger.error("%s ended (%s)", child.title, reason)
        self._scheduler.tell(m.InstanceExited(instance.index, reason))
        if instance.state is not InstanceState.STOPPED:
            self._on_change()
            self._context.background(self._restart(instance))

    def _wanted(self, instance: Instance) -> bool:
        return not self._lifetime.stopping and instance in self._instances

    async def _restart(self, instance: Instance) -> None:
        while self._wanted(instance):
            pause = instance.backoff.pause_s(time.monotonic() - instance.ready_at)
            self._protocol.announce(instance)
            if pause:
                await asyncio.sleep(pause)
            if not self._wanted(instance):
                return
            instance.event("restart")
            instance.child = None
            try:
                await self._load(instance)
            except ShmserveError as error:
                await self._discard(instance)
                if not self._wanted(instance):
                    return
                instance.failed_loads += 1
                logger.error("instance '%s' did not start again: %s", instance.name, error.message)
                if instance.failed_loads < _MOST_FAILED_LOADS:
                    continue
                self._give_up(instance, error.message)
            return

    @staticmethod
    async def _discard(instance: Instance) -> None:
        if instance.child is not None and instance.child.alive:
            instance.child.kill()
            await instance.child.gone()
        instance.child = None
        instance.state = InstanceState.WAITING

    def _give_up(self, instance: Instance, reason: str) -> None:
        instance.event("give_up")
        logger.error(
            "instance '%s' stays down after %d failed starts", instance.name, _MOST_FAILED_LOADS
        )
        self._scheduler.tell(m.InstanceExited(instance.index, reason))
        gone = (InstanceState.FAILED, InstanceState.RETIRING, InstanceState.STOPPED)
        if all(other.state in gone for other in self._instances):
            self.failure = reason
            self._tell_pool_failed()
        self._on_change()
