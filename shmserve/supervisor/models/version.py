"""One loaded model version: its scheduler and its instances; started, watched, restarted, drained,
stopped.

start:           worker 0 completes the configuration -> scheduler -> all workers load -> READY
worker dies:     its scheduler is told at once, it starts again after a pause that grows with
                 deaths in a row
scheduler dies:  a new one on a new endpoint; workers attach to it, gateways submit again what they
                 had
stop:            scheduler drains (workers that die meanwhile still start again) -> workers finalize
                 and exit (all their memory comes back) -> scheduler ends
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from shmserve.common.cumulative_counters import following
from shmserve.errors import InvalidArgument, ShmserveError, Unavailable, from_code
from shmserve.ipc import endpoints
from shmserve.ipc import messages as m
from shmserve.supervisor.context import SupervisorContext
from shmserve.supervisor.events.counters import counted
from shmserve.supervisor.models.instances import Instance, expand_instances, inbox
from shmserve.supervisor.models.states import InstanceState
from shmserve.supervisor.models.version_spec import VersionSpec
from shmserve.supervisor.processes.restart_backoff import RestartBackoff
from shmserve.supervisor.processes.table import Child

logger = logging.getLogger(__name__)

_MOST_FAILED_LOADS = 5
# Of schedulers, in a row, while somebody waits for the first that serves.
_MOST_FAILED_STARTS = 5
# Of a scheduler, before requests are refused that wait for one: some seconds.
_MOST_WAITED_FOR = 10
_STOP_PATIENCE_S = 5.0
# What workers say that is not about themselves.
_CALLS = m.FindModel | m.LoadModel | m.UnloadModel | m.MemoryChecked


class ModelVersion:
    """A model version's processes. `on_change` is called when readiness, endpoint or failure
    changes (`changes` counts it), `on_call` with what its models ask the server.

    `retiring`: it finishes what it has; `stopping`: its processes end.
    """

    def __init__(
        self,
        host: SupervisorContext,
        plan: VersionSpec,
        on_change: Callable[[ModelVersion], None],
        on_call: Callable[[int, Any], None],
    ) -> None:
        self.host = host
        self.plan = plan
        self.config = plan.config
        self.number = next(host.numbers)
        self.instances = expand_instances(plan.config)
        self.scheduler: Child | None = None
        self.loaded = False
        self.retiring = False
        self.stopping = False
        self.failure = ""
        self.changes = 0
        self.load_seconds = 0.0
        self._counting = False
        self._kept: list[Any] = []  # of StatisticsKept, for the scheduler's successor
        self._inherited: dict[str, Any] = {}
        self._successor: ModelVersion | None = None
        self._on_change = on_change
        self._on_call = on_call
        self._news = asyncio.Event()
        self._serving: Child | None = None  # the scheduler that is at `endpoint`
        self._failed_starts = 0
        self._scheduler_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._drained: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def endpoint(self) -> str:
        """Where requests for this version are submitted."""
        return endpoints.scheduler(self.host.run_dir, self.number)

    @property
    def ready(self) -> bool:
        """Whether a request submitted now would find an instance."""
        return (
            self.loaded
            and self._has_scheduler
            and any(i.state is InstanceState.READY for i in self.instances)
        )

    @property
    def _has_scheduler(self) -> bool:
        return self._serving is not None and self._serving.alive

    async def until_ready(self) -> None:
        """Wait until it is ready. Raises Unavailable when it will not be."""
        while not self.ready:
            if self.failure or self.retiring or self.stopping:
                raise Unavailable(self.failure or "the model is unloaded")
            if self._failed_starts >= _MOST_FAILED_STARTS:
                raise Unavailable("no scheduler could be started")
            self._news.clear()
            await self._news.wait()

    def _changed(self) -> None:
        self.changes += 1
        self._news.set()
        self._on_change(self)

    # --- start

    async def start(self) -> None:
        """Load the model on every instance; returns when it is ready, whoever died meanwhile.

        Raises ShmserveError with a text for the operator when it cannot be; nothing of it is left
        then.
        """
        began = time.monotonic()
        try:
            completed = await self._complete_config(self.instances[0])
            self.config = self.plan.complete(completed)
            groups = expand_instances(self.config)
            self.instances[1:] = groups[1:]
            await self._start_scheduler(self.number)
            self.host.background(self._keep_scheduler())
            async with asyncio.TaskGroup() as group:
                for instance in self.instances:
                    group.create_task(self._load(instance))
            self.loaded = True
            await self.until_ready()
        except (ShmserveError, ExceptionGroup) as error:
            # Not `except*`: what is raised there becomes a group itself, whose text nobody knows.
            await self.kill()
            first: BaseException = error
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            raise first from None
        self.load_seconds = time.monotonic() - began

    async def _complete_config(self, instance: Instance) -> dict[str, Any]:
        await self._spawn(instance)
        self._send(instance, m.CompleteConfig(self.plan.config))
        message = await self._reply(instance)
        if not isinstance(message, m.ConfigCompleted):
            raise self._failure_of(message)
        return message.config

    async def _load(self, instance: Instance) -> None:
        if instance.child is None:
            await self._spawn(instance)
        self._announce(instance)
        endpoint = endpoints.instances(self.host.run_dir, self.number)
        self._send(instance, m.LoadInstance(self.config, endpoint))
        message = await self._reply(instance)
        if not isinstance(message, m.InstanceLoaded):
            raise self._failure_of(message)
        self._refuse_if_over(instance)
        instance.event("loaded")
        instance.ready_at = time.monotonic()
        instance.failed_loads = 0
        current = endpoints.instances(self.host.run_dir, self.number)
        if current != endpoint:  # the scheduler was replaced while the model loaded
            self._send(instance, m.Attach(current))
        self._changed()

    async def _spawn(self, instance: Instance) -> None:
        plan, config = self.plan, self.host.config
        title = f"worker {plan.name}.{instance.index} {instance.device}"
        args = {
            "number": self.number,
            "index": instance.index,
            "model_name": plan.name,
            "version": plan.version,
            "model_dir": str(plan.model_dir),
            "repository": str(plan.repository),
            "run_dir": str(self.host.run_dir),
            "device": instance.device,
            "kind": instance.kind,
            "device_id": instance.device_id,
            "instance_name": instance.name,
            "backend_config": config.backend_settings(self.config["backend"]),
            "arena_byte_size": config.arena_byte_size,
            "log": asdict(self.host.log),
            "threads": config.worker_threads(len(self.instances)),
        }
        instance.inbox = inbox()
        child = await self.host.worker_zygote.spawn(title, "shmserve.workers.main:run", args)
        instance.child = child
        self.host.enrol(child.pid, "worker", lambda msg: self._from_worker(instance, child, msg))
        started = await self._reply(instance)
        if not isinstance(started, m.WorkerStarted):
            raise self._failure_of(started)
        self._refuse_if_over(instance)
        instance.event("started")

    def _refuse_if_over(self, instance: Instance) -> None:
        """Raise Unavailable: it is to stop, or its process died as soon as it had said that."""
        self._refuse_if_stopping()
        if instance.child is None or not instance.child.alive:
            raise Unavailable(f"the process of instance '{instance.name}' ended while loading")

    def _refuse_if_stopping(self) -> None:
        """Raise Unavailable: `stop` may not have seen a process that was only just started."""
        if self.stopping:
            raise Unavailable("the model is unloaded")

    def _from_worker(self, instance: Instance, child: Child, message: Any) -> None:
        if isinstance(message, _CALLS):
            self._on_call(child.pid, message)
        elif instance.child is child and not instance.inbox.full():
            instance.inbox.put_nowait(message)

    async def _reply(self, instance: Instance) -> Any:
        """The worker's next message; raises Unavailable when it dies instead."""
        child = instance.child
        assert child is not None
        get = asyncio.ensure_future(instance.inbox.get())
        try:
            await self.host.either(get, child.exited)
        finally:
            get.cancel()
        if get.done():
            return get.result()
        if not instance.inbox.empty():  # its last words, and its end
            return instance.inbox.get_nowait()
        self._refuse_if_stopping()
        raise Unavailable(
            f"the process of instance '{instance.name}' ended while loading "
            f"({child.exited.result()})"
        )

    def _announce(self, instance: Instance) -> None:
        """Tell the scheduler of an instance, and which process it is once that is known."""
        pid = instance.child.pid if instance.child is not None else 0
        self._tell_scheduler(m.InstanceExpected(instance.index, pid))

    def _failure_of(self, message: Any) -> ShmserveError:
        if isinstance(message, m.LoadFailed):
            return from_code(message.code, message.message)
        return InvalidArgument(f"unexpected {type(message).__name__} while loading")

    async def _start_scheduler(self, number: int) -> None:
        plan, config = self.plan, self.host.config
        ready = self._scheduler_ready = asyncio.get_running_loop().create_future()
        alive = self.pids()
        child = await self.host.front_zygote.spawn(
            f"scheduler {plan.name}",
            "shmserve.scheduler.main:run",
            {
                "number": number,
                "version": plan.version,
                "config": self.config,
                "run_dir": str(self.host.run_dir),
                "kept": self._kept,
                "alive": alive,
                "log": asdict(self.host.log),
                "guests": {"key": self.host.capabilities.key, "group": config.shm.group},
                "settings": {
                    "execution_timeout_s": config.execution_timeout_s,
                    "request_timeout_us": config.request_timeout_us,
                    "max_queue_size": config.max_queue_size,
                    "delay_scheduler": config.delay_scheduler,
                    "quantiles": config.metrics.kept_quantiles,
                },
            },
        )
        self.scheduler = child
        self.host.enrol(child.pid, "scheduler", self._from_scheduler)
        if not self.stopping:
            await self.host.either(ready, child.exited)
        if self.stopping:
            child.kill()
        self._refuse_if_stopping()
        if not ready.done():
            raise Unavailable(f"the scheduler ended while starting ({child.exited.result()})")
        self.number = number  # now there is something at its endpoints
        self._serving = child
        self._failed_starts = 0
        # What happened while it could not be told.
        for pid in set(alive) - set(self.pids()):
            self._tell_scheduler(m.ProcessExited(pid))
        for instance in self.instances:
            if instance.state is not InstanceState.FAILED:
                self._announce(instance)
        if self.failure:
            self._tell_pool_failed()
        if self._inherited:
            self._tell_scheduler(m.CountsInherited(self._inherited))

    def _from_scheduler(self, message: Any) -> None:
        match message:
            case m.SchedulerReady():
                if not self._scheduler_ready.done():
                    self._scheduler_ready.set_result(None)
            case m.Drained():
                if not self._drained.done():
                    self._drained.set_result(None)
            case m.StatisticsKept(statistics, metrics):
                self._kept = [statistics, metrics]
                self._pass_on()
                if self._counting:
                    self._counting = False
                    self.host.events.publish(counted(statistics))
            case m.KillInstance(index, reason, pid):
                self._kill_instance(index, reason, pid)
            case _:
                logger.warning("dropped a %s from a scheduler", type(message).__name__)

    def count(self) -> None:
        """Have its counters published as an event."""
        self._counting = True
        self._tell_scheduler(m.KeepStatistics())

    def _kill_instance(self, index: int, reason: str, pid: int) -> None:
        instance = self.instances[index] if 0 <= index < len(self.instances) else None
        child = instance.child if instance is not None else None
        # It may have ended by itself meanwhile, and another process be on its way to its place.
        if instance is not None and child is not None and child.pid == pid:
            logger.error("instance '%s' is killed: %s", instance.name, reason)
            child.cause = reason
            child.dump_stacks()
            # The dump is written by the dying process itself; give it a moment, not more.
            asyncio.get_running_loop().call_later(0.1, child.kill)

    def bequeath(self, successor: ModelVersion | None) -> None:
        """What this version has counted, and will while it finishes what it has, is
        `successor`'s."""
        self._successor = successor
        self._pass_on()

    def inherit(self, statistics: dict[str, Any]) -> None:
        """Count on from what a version that this one replaces had counted."""
        self._inherited = statistics
        self._tell_scheduler(m.CountsInherited(statistics))
        self._pass_on()

    def _pass_on(self) -> None:
        # Our scheduler may have ended, and one before it be counting still.
        if self._successor is None:
            return
        counted = self._kept[0] if self._kept else self._inherited
        if self._kept and self._inherited:
            counted = following(counted, self._inherited)
        if counted:
            self._successor.inherit(counted)

    # --- deaths

    def process_exited(self, child: Child) -> None:
        """A process of this version (or not: then nothing happens) has ended."""
        for instance in self.instances:
            if instance.child is child:
                self._instance_exited(instance, child)

    def _instance_exited(self, instance: Instance, child: Child) -> None:
        reason = child.exited.result()
        served = instance.state is InstanceState.READY
        instance.event("exited")
        if self.stopping or not served:
            return  # whoever stops or starts it sees it end
        instance.child = None
        logger.error("%s ended (%s)", child.title, reason)
        self._tell_scheduler(m.InstanceExited(instance.index, reason))
        self._changed()
        self.host.background(self._restart(instance))

    async def _restart(self, instance: Instance) -> None:
        while not self.stopping:
            pause = instance.row.pause_s(time.monotonic() - instance.ready_at)
            self._announce(instance)
            if pause:
                await asyncio.sleep(pause)
            if self.stopping:
                return
            instance.event("restart")
            instance.child = None
            try:
                await self._load(instance)
            except ShmserveError as error:
                await self._discard(instance)
                if self.stopping:
                    return
                instance.failed_loads += 1
                logger.error("instance '%s' did not start again: %s", instance.name, error.message)
                if instance.failed_loads < _MOST_FAILED_LOADS:
                    continue
                self._give_up(instance, error.message)
            return

    async def _discard(self, instance: Instance) -> None:
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
        self._tell_scheduler(m.InstanceExited(instance.index, reason))
        if all(i.state is InstanceState.FAILED for i in self.instances):
            self.failure = reason
            self._tell_pool_failed()
        self._changed()

    def _tell_pool_failed(self) -> None:
        reason = f"model '{self.plan.name}' failed: no instance could be started"
        self._tell_scheduler(m.PoolFailed(reason))

    async def _keep_scheduler(self) -> None:
        """Have another one take over from each scheduler that dies."""
        row = RestartBackoff()
        while not self.retiring:
            dead, born = self._serving, time.monotonic()
            assert dead is not None
            await self.host.either(dead.exited)
            if not self.retiring:
                reason = dead.exited.result()
                logger.error("%s ended (%s); a new one takes over", dead.title, reason)
                self._changed()
                await self._replace_scheduler(row, row.pause_s(time.monotonic() - born))

    async def _replace_scheduler(self, row: RestartBackoff, pause: float) -> None:
        lost = self.endpoint
        while not self.retiring:
            if pause:
                await asyncio.sleep(pause)
            try:
                await self._start_scheduler(next(self.host.numbers))
            except ShmserveError as error:
                logger.error("%s", error.message)
                pause = row.pause_s(0)
                self._failed_starts += 1
                self._changed()
                if self._failed_starts >= _MOST_WAITED_FOR:
                    self._refuse_at(lost)
                continue
            attach = m.Attach(endpoints.instances(self.host.run_dir, self.number))
            for instance in self.instances:
                if instance.state is InstanceState.READY:
                    self._send(instance, attach)
            # Whoever submits keeps what it submitted, and submits it again: while it knows the old.
            successor = m.SchedulerLost(lost, self.endpoint)
            self.host.broadcast(successor, "gateway", "worker", "guest")
            self._changed()
            return
        # Retired meanwhile: models that called it look for who serves now.
        self.host.broadcast(m.SchedulerLost(lost, ""), "worker", "guest")

    def _refuse_at(self, lost: str) -> None:
        """What was submitted there fails; what comes later goes to the successor, if one comes."""
        self.host.broadcast(m.SchedulerLost(lost, ""), "gateway", "worker", "guest")

    # --- end

    async def stop(self, drain: bool = True) -> None:
        """Finish what is in flight (unless not `drain`), then end every process."""
        self.retiring = True
        self._news.set()
        if drain and self.loaded and self._has_scheduler:
            assert self.scheduler is not None
            self._tell_scheduler(m.Drain())
            await self.host.either(self._drained, self.scheduler.exited)
        self.stopping = True
        if self.loaded and not self._has_scheduler:
            await self.kill()  # what they execute, nobody waits for: it will run elsewhere
        workers = [i for i in self.instances if i.child is not None and i.child.alive]
        for instance in workers:
            self._send(instance, m.Stop())
            instance.event("stop")
        await asyncio.gather(*(self.host.end(i.child, _STOP_PATIENCE_S) for i in workers))
        self._tell_scheduler(m.Stop())
        await self.host.end(self.scheduler, _STOP_PATIENCE_S)

    async def kill(self) -> None:
        """End every process now."""
        self.retiring = self.stopping = True
        self._news.set()
        children = [self.scheduler, *(i.child for i in self.instances)]
        for child in children:
            if child is not None:
                child.kill()
        await asyncio.gather(*(child.gone() for child in children if child is not None))

    def _send(self, instance: Instance, message: Any) -> None:
        if instance.child is not None:
            self.host.control.send(instance.child.pid, message)

    def _tell_scheduler(self, message: Any) -> None:
        if self.scheduler is not None:
            self.host.control.send(self.scheduler.pid, message)

    def pids(self) -> list[int]:
        """The running worker processes."""
        return [i.child.pid for i in self.instances if i.child is not None and i.child.alive]

    def pids_on(self, device_id: int) -> list[int]:
        """The worker processes that serve on an accelerator now."""
        return [
            i.child.pid
            for i in self.instances
            if i.child is not None
            and i.state is InstanceState.READY
            and i.kind == "GPU"
            and i.device_id == device_id
        ]
