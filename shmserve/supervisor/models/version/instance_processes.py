"""The worker processes of a model version: loaded together, restarted one by one when they die
(instance_restarts), stopped. For another `instance_group` some are added and others retire, while
the version serves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from shmserve.ipc import messages as m
from shmserve.supervisor.context import SupervisorContext
from shmserve.supervisor.models.version.instance_restarts import InstanceRestarts
from shmserve.supervisor.models.version.instances import (
    Instance,
    InstanceChange,
    change_between,
    expand_instances,
)
from shmserve.supervisor.models.version.load_protocol import LoadProtocol
from shmserve.supervisor.models.version.scheduler_process import VersionScheduler
from shmserve.supervisor.models.version.spec import VersionSpec
from shmserve.supervisor.models.version.states import InstanceState, Lifetime
from shmserve.supervisor.processes.table import Child

logger = logging.getLogger(__name__)

_STOP_PATIENCE_S = 5.0


def first_of(error: BaseException) -> BaseException:
    """The error, or the first of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class InstanceProcesses:
    """The instances that a version's configuration asks for. `on_change` hears when one becomes
    ready, dies, or is given up."""

    def __init__(
        self,
        context: SupervisorContext,
        spec: VersionSpec,
        protocol: LoadProtocol,
        scheduler: VersionScheduler,
        lifetime: Lifetime,
        on_change: Callable[[], None],
    ) -> None:
        self._context = context
        self._spec = spec
        self._protocol = protocol
        self._scheduler = scheduler
        self._on_change = on_change
        self._all = expand_instances(spec.config)
        self.config = spec.config
        self.completed: dict[str, Any] = {}  # what the model has said of its configuration
        self._restarts = InstanceRestarts(
            context, spec.name, protocol, scheduler, lifetime, self._all, self._reload, on_change
        )

    @property
    def failure(self) -> str:
        """Why none will come back, or empty."""
        return self._restarts.failure

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
            and i.state in (InstanceState.READY, InstanceState.RETIRING)
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

    @property
    def labels(self) -> dict[str, list[str]]:
        """The texts for the indices of each output that has any."""
        return self._spec.labels

    # --- start

    async def complete_config(self) -> None:
        """Have the first instance's model complete the configuration, and reserve what all need;
        raises ShmserveError."""
        first = self._all[0]
        self.completed = await self._protocol.complete_config(first, len(self._all))
        self.config = self._spec.complete(self.completed)
        known, *others = expand_instances(self.config)
        first.settings = known.settings
        self._all[1:] = others
        self._scheduler.reserve(self.config, self._all)

    async def load(self) -> None:
        """Load the model in every instance; raises an ExceptionGroup when one fails."""
        await self._load_all(self._all, self.config, len(self._all))

    async def _load_all(self, instances: list[Instance], config: dict[str, Any], of: int) -> None:
        async with asyncio.TaskGroup() as group:
            for instance in instances:
                group.create_task(self._load(instance, config, of))

    async def _load(self, instance: Instance, config: dict[str, Any], of: int) -> None:
        await self._protocol.load(instance, config, of)
        self._on_change()

    async def _reload(self, instance: Instance) -> None:
        await self._load(instance, self.config, len(self._all))

    # --- another instance_group

    def change_to(self, config: dict[str, Any]) -> InstanceChange:
        """What leads to the instances that `config` asks for."""
        return change_between(self._all, config)

    async def add(self, change: InstanceChange, config: dict[str, Any]) -> None:
        """Load the model in what a change adds; it serves at once. Raises ShmserveError when one
        fails."""
        self._scheduler.reserve(config, change.added)
        self._all += change.added
        of = len(self._all) - len(change.leaving)
        try:
            await self._load_all(change.added, config, of)
        except ExceptionGroup as failures:
            raise first_of(failures) from None

    def settle(self, change: InstanceChange, config: dict[str, Any]) -> None:
        """What a change adds is there: from now on `config` holds, and what it does not ask for
        retires."""
        self.config = config
        self.retire(change.leaving)

    def retire(self, instances: list[Instance]) -> None:
        """Have these finish what they have, and end."""
        for instance in instances:
            if instance not in self._all:
                continue  # it has ended
            if instance.state is InstanceState.READY:
                instance.event("retire")
            else:
                self._all.remove(instance)
                self._scheduler.release(instance)
                if instance.child is not None:
                    instance.child.kill()
            self._scheduler.tell(m.RetireInstance(instance.index))

    def kill_loading(self, instances: list[Instance]) -> None:
        """Give up those of these that are not there yet."""
        for instance in instances:
            if instance.child is not None and instance.state is not InstanceState.READY:
                instance.child.kill()

    def retired(self, index: int, pid: int) -> None:
        """The scheduler says that an instance has finished what it had, and it gives it nothing
        more."""
        for instance in self._all:
            child = instance.child
            retires = instance.index == index and instance.state is InstanceState.RETIRING
            if retires and child is not None and child.pid == pid:
                self._context.background(self._end(instance))

    async def _end(self, instance: Instance) -> None:
        self._protocol.send(instance, m.Stop())
        instance.event("stop")
        await self._context.end(instance.child, _STOP_PATIENCE_S)

    # --- schedulers

    def introduce(self, known: list[int]) -> None:
        """Tell a scheduler that was started with the processes `known` what happened since, and
        what it should expect."""
        for pid in set(known) - set(self.pids()):
            self._scheduler.tell(m.ProcessExited(pid))
        for instance in self._all:
            if instance.state is InstanceState.RETIRING:
                # What it runs, nobody waits for: it runs elsewhere.
                self._context.background(self._end(instance))
            elif instance.state not in (InstanceState.FAILED, InstanceState.STOPPED):
                self._protocol.announce(instance)
        self._restarts.introduce()

    def attach(self) -> None:
        """Have every instance that is ready offer itself to the scheduler that serves now."""
        attach = m.Attach(self._scheduler.instances_endpoint)
        for instance in self._all:
            if instance.state is InstanceState.READY:
                self._protocol.send(instance, attach)

    # --- deaths

    def kill_overrunning(self, index: int, reason: str, pid: int) -> None:
        """The scheduler says that an instance overran its limit: it is killed, if it is process
        `pid` still."""
        instance = next((each for each in self._all if each.index == index), None)
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
        self._restarts.process_exited(child)

    # --- end

    async def stop(self) -> None:
        """Have every process finalize its model and end."""
        running = [instance for instance in self._all if instance.alive]
        for instance in running:
            self._protocol.send(instance, m.Stop())
            instance.event("stop")
        await asyncio.gather(*(self._context.end(i.child, _STOP_PATIENCE_S) for i in running))
