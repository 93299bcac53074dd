"""The worker processes of a model version: loaded together, restarted one by one with backoff,
given up after too many failures, stopped.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from shmserve.errors import ShmserveError
from shmserve.ipc import messages as m
from shmserve.supervisor.context import SupervisorContext
from shmserve.supervisor.models.version.instances import Instance, expand_instances
from shmserve.supervisor.models.version.load_protocol import LoadProtocol
from shmserve.supervisor.models.version.scheduler_process import SchedulerProcess
from shmserve.supervisor.models.version.spec import VersionSpec
from shmserve.supervisor.models.version.states import InstanceState, Lifetime
from shmserve.supervisor.processes.table import Child

logger = logging.getLogger(__name__)

_MOST_FAILED_LOADS = 5
_STOP_PATIENCE_S = 5.0


class InstanceProcesses:
    """The instances that a version's configuration asks for. `on_change` hears when one becomes
    ready, dies, or is given up.

    `failure`: why none will come back, or empty.
    """

    def __init__(
        self,
        context: SupervisorContext,
        spec: VersionSpec,
        protocol: LoadProtocol,
        scheduler: SchedulerProcess,
        lifetime: Lifetime,
        on_change: Callable[[], None],
    ) -> None:
        self._context = context
        self._spec = spec
        self._protocol = protocol
        self._scheduler = scheduler
        self._lifetime = lifetime
        self._on_change = on_change
        self._all = expand_instances(spec.config)
        self.config = spec.config
        self.failure = ""

    @property
    def any_ready(self) -> bool:
        """Whether one takes requests."""
        return any(instance.state is InstanceState.READY for instance in self._all)

    def states(self) -> list[InstanceState]:
        """The state of each, in order."""
        return [instance.state for instance in self._all]

    def children(self) -> list[Child]:
        """The process of each that has one, dead or alive."""
        return [instance.child for instance in self._all if instance.child is not None]

    def pids(self) -> list[int]:
        """The running processes."""
        return [child.pid for child in self.children() if child.alive]

    def pids_on(self, device_id: int) -> list[int]:
        """The processes that serve on an accelerator now."""
        return [
            i.child.pid
            for i in self._all
            if i.child is not None
            and i.state is InstanceState.READY
            and (i.kind, i.device_id) == ("GPU", device_id)
        ]

    def checking_ready(self) -> list[int]:
        """The processes that serve now, and say themselves whether their model is ready."""
        return [
            i.child.pid
            for i in self._all
            if i.child is not None and i.state is InstanceState.READY and i.checks_ready
        ]

    @property
    def checks_ready(self) -> bool:
        """Whether the model says itself whether it is ready."""
        return any(instance.checks_ready for instance in self._all)

    # --- start

    async def complete_config(self) -> None:
        """Have the first instance's model complete the configuration; raises ShmserveError."""
        completed = await self._protocol.complete_config(self._all[0], len(self._all))
        self.config = self._spec.complete(completed)
        self._all[1:] = expand_instances(self.config)[1:]

    async def load(self) -> None:
        """Load the model in every instance; raises an ExceptionGroup when one fails."""
        async with asyncio.TaskGroup() as group:
            for instance in self._all:
                group.create_task(self._load(instance))

    async def _load(self, instance: Instance) -> None:
        await self._protocol.load(instance, self.config, len(self._all))
        self._on_change()

    # --- schedulers

    def introduce(self, known: list[int]) -> None:
        """Tell a scheduler that was started with the processes `known` what happened since, and
        what it should expect."""
        for pid in set(known) - set(self.pids()):
            self._scheduler.tell(m.ProcessExited(pid))
        for instance in self._all:
            if instance.state is not InstanceState.FAILED:
                self._protocol.announce(instance)
        if self.failure:
            self._tell_pool_failed()

    def attach(self) -> None:
        """Have every instance that is ready offer itself to the scheduler that serves now."""
        attach = m.Attach(self._scheduler.instances_endpoint)
        for instance in self._all:
            if instance.state is InstanceState.READY:
                self._protocol.send(instance, attach)

    def _tell_pool_failed(self) -> None:
        reason = f"model '{self._spec.name}' failed: no instance could be started"
        self._scheduler.tell(m.PoolFailed(reason))

    # --- deaths

    def kill_overrunning(self, index: int, reason: str, pid: int) -> None:
        """The scheduler says that an instance overran its limit: it is killed, if it is process
        `pid` still."""
        instance = self._all[index] if 0 <= index < len(self._all) else None
        child = instance.child if instance is not None else None
        # It may have ended by itself meanwhile, and another process be on its way to its place.
        if instance is not None and child is not None and child.pid == pid:
            logger.error("instance '%s' is killed: %s", instance.name, reason)
            child.cause = reason
            child.dump_stacks()
            # The dump is written by the dying process itself; give it a moment, not more.
            asyncio.get_running_loop().call_later(0.1, child.kill)

    def process_exited(self, child: Child) -> None:
        """A process of these (or not: then nothing happens) has ended."""
        for instance in self._all:
            if instance.child is child:
                self._exited(instance, child)

    def _exited(self, instance: Instance, child: Child) -> None:
        reason = child.exited.result()
        served = instance.state is InstanceState.READY
        instance.event("exited")
        if self._lifetime.stopping or not served:
            return  # whoever stops or starts it sees it end
        instance.child = None
        logger.error("%s ended (%s)", child.title, reason)
        self._scheduler.tell(m.InstanceExited(instance.index, reason))
        self._on_change()
        self._context.background(self._restart(instance))

    async def _restart(self, instance: Instance) -> None:
        while not self._lifetime.stopping:
            pause = instance.backoff.pause_s(time.monotonic() - instance.ready_at)
            self._protocol.announce(instance)
            if pause:
                await asyncio.sleep(pause)
            if self._lifetime.stopping:
                return
            instance.event("restart")
            instance.child = None
            try:
                await self._load(instance)
            except ShmserveError as error:
                await self._discard(instance)
                if self._lifetime.stopping:
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
        if all(other.state is InstanceState.FAILED for other in self._all):
            self.failure = reason
            self._tell_pool_failed()
        self._on_change()

    # --- end

    async def stop(self) -> None:
        """Have every process finalize its model and end."""
        running = [instance for instance in self._all if instance.alive]
        for instance in running:
            self._protocol.send(instance, m.Stop())
            instance.event("stop")
        await asyncio.gather(*(self._context.end(i.child, _STOP_PATIENCE_S) for i in running))
