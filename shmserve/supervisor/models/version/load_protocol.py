"""The load protocol of one instance: start its process, have it complete the configuration, load.

supervisor                        worker
   spawn          ------------>   WorkerStarted
   CompleteConfig ------------>   ConfigCompleted       (the first instance only)
   LoadInstance   ------------>   InstanceLoaded
                                  LoadFailed, in the place of each, and it ends
"""

from __future__ import annotations

import asyncio
from typing import Any

from shmserve.errors import InvalidArgument, ShmserveError, Unavailable, from_code
from shmserve.ipc import messages as m
from shmserve.ipc.messages.start import WorkerStart, encode
from shmserve.supervisor.context import SupervisorContext
from shmserve.supervisor.models.version.instances import Instance, inbox
from shmserve.supervisor.models.version.scheduler_process import VersionScheduler
from shmserve.supervisor.models.version.spec import VersionSpec
from shmserve.supervisor.models.version.states import Lifetime
from shmserve.supervisor.processes.table import Child

_ENTRY = "shmserve.workers.main:run"


class LoadProtocol:
    """The protocol for the instances of one version.

    Its methods raise ShmserveError, with a text for the operator, when the model or its process
    fails.
    """

    def __init__(
        self,
        context: SupervisorContext,
        spec: VersionSpec,
        scheduler: VersionScheduler,
        lifetime: Lifetime,
    ) -> None:
        self._context = context
        self._spec = spec
        self._scheduler = scheduler
        self._lifetime = lifetime

    async def complete_config(self, instance: Instance, of: int) -> dict[str, Any]:
        """Start a process, one `of` so many; what its model adds to the configuration."""
        await self._spawn(instance, self._spec.config, of)
        self.send(instance, m.CompleteConfig(self._spec.config))
        message = await self._response(instance)
        if not isinstance(message, m.ConfigCompleted):
            raise _failure(message)
        return message.config

    async def load(self, instance: Instance, config: dict[str, Any], of: int) -> None:
        """Load the model in a process, which is started if there is none, as one `of` so many."""
        if instance.child is None:
            await self._spawn(instance, config, of)
        self.announce(instance)
        endpoint = self._scheduler.instances_endpoint
        self.send(instance, m.LoadInstance(config, endpoint))
        message = await self._response(instance)
        if not isinstance(message, m.InstanceLoaded):
            raise _failure(message)
        self._refuse_if_over(instance)
        instance.loaded(message.checks_ready)
        current = self._scheduler.instances_endpoint
        if current != endpoint:  # the scheduler was replaced while the model loaded
            self.send(instance, m.Attach(current))

    def announce(self, instance: Instance) -> None:
        """Tell the scheduler of an instance, and which process it is once that is known."""
        pid = instance.child.pid if instance.child is not None else 0
        self._scheduler.tell(m.InstanceExpected(instance.index, pid))

    def send(self, instance: Instance, message: Any) -> None:
        """Send a message to the instance's process, if there is one."""
        if instance.child is not None:
            self._context.control.send(instance.child.pid, message)

    async def _spawn(self, instance: Instance, config: dict[str, Any], of: int) -> None:
        spec, server = self._spec, self._context.config
        title = f"worker {spec.name}.{instance.index} {instance.device}"
        start = WorkerStart(
            number=self._scheduler.number,
            index=instance.index,
            model_name=spec.name,
            version=spec.version,
            model_dir=spec.model_dir,
            repository=spec.repository,
            run_dir=self._context.run_dir,
            device=instance.device,
            kind=instance.kind,
            device_id=instance.device_id,
            instance_name=instance.name,
            backend_config=server.backend_settings(config["backend"]),
            arena_byte_size=server.arena_byte_size,
            threads=server.worker_threads(of),
            log=self._context.log,
        )
        instance.inbox = inbox()
        child = await self._context.worker_zygote.spawn(title, _ENTRY, encode(start))
        instance.child = child
        self._context.enrol(
            child.pid, "worker", lambda message: self._received(instance, child, message)
        )
        started = await self._response(instance)
        if not isinstance(started, m.WorkerStarted):
            raise _failure(started)
        self._refuse_if_over(instance)
        instance.event("started")

    def _received(self, instance: Instance, child: Child, message: Any) -> None:
        if instance.child is child and not instance.inbox.full():
            instance.inbox.put_nowait(message)

    async def _response(self, instance: Instance) -> Any:
        """The worker's next message; raises Unavailable when it dies instead."""
        child = instance.child
        assert child is not None
        get = asyncio.ensure_future(instance.inbox.get())
        try:
            await self._context.either(get, child.exited)
        finally:
            get.cancel()
        if get.done():
            return get.result()
        if not instance.inbox.empty():  # its last words, and its end
            return instance.inbox.get_nowait()
        self._lifetime.refuse_if_stopping()
        raise Unavailable(
            f"the process of instance '{instance.name}' ended while loading "
            f"({child.exited.result()})"
        )

    def _refuse_if_over(self, instance: Instance) -> None:
        """Raise Unavailable: it is to stop, or its process died as soon as it had said that."""
        self._lifetime.refuse_if_stopping()
        if not instance.alive:
            raise Unavailable(f"the process of instance '{instance.name}' ended while loading")


def _failure(message: Any) -> ShmserveError:
    if isinstance(message, m.LoadFailed):
        return from_code(message.code, message.message)
    return InvalidArgument(f"unexpected {type(message).__name__} while loading")
