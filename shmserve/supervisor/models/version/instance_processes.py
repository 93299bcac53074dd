"""The worker processes of a model version: loaded together, restarted with backoff when they die,
given up after too many failed loads or crashes in a row, stopped. For another `instance_group` some
are added and others retire, while the version serves.

supervisor                        worker
   spawn          ------------>   WorkerStarted
   CompleteConfig ------------>   ConfigCompleted       (the first instance only)
   LoadInstance   ------------>   InstanceLoaded
                                  LoadFailed, in the place of each, and it ends
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from shmserve.common.tasks import either
from shmserve.errors import InvalidArgument, ShmserveError, Unavailable, from_code
from shmserve.ipc.messages import supervision as m
from shmserve.ipc.messages.publications import ProcessExited
from shmserve.ipc.messages.supervision import WorkerStart, encode_start
from shmserve.ipc.model_spec import ModelSpec
from shmserve.supervisor.context import SupervisorContext
from shmserve.supervisor.models.version.hangs import in_a_line, stacks_of, watched
from shmserve.supervisor.models.version.instances import (
    Instance,
    InstanceState,
    InstanceUpdate,
    bounds_of,
    change_between,
    expand_instances,
    inbox,
    sized,
)
from shmserve.supervisor.models.version.scheduler_process import VersionScheduler
from shmserve.supervisor.models.version.spec import Lifetime, VersionSpec
from shmserve.supervisor.processes.table import Child

logger = logging.getLogger(__name__)

_ENTRY = "shmserve.workers.main:run"
_STOP_PATIENCE_S = 5.0
_MOST_FAILED_LOADS = 5
# Ends in a row, with nothing executed meanwhile, after which an instance stays down: some 5 s of a
# model that loads at once.
_MOST_CRASHES = 10
_LONGEST_PAUSE_S = 30.0  # before the next start of what is killed again and again
_DOWN = (InstanceState.FAILED, InstanceState.RETIRING, InstanceState.STOPPED)


T = TypeVar("T")


def first_of(error: BaseException) -> BaseException:
    """The error, or the first of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@dataclass(slots=True, eq=False)
class Instances:
    """The instances that a version's configuration asks for. `on_change` is called when one becomes
    ready, dies, or is given up.

    `failure`: why none will come back, or empty; `labels`: the texts for the indices of each output
    that has any. What loads raises ShmserveError, with a text for
    the operator, when the model or its process fails.
    """

    _context: SupervisorContext
    _spec: VersionSpec
    _scheduler: VersionScheduler
    _lifetime: Lifetime
    _on_change: Callable[[], None]
    config: ModelSpec = field(init=False)
    labels: dict[str, list[str]] = field(init=False)
    completed: dict[str, Any] = field(init=False, default_factory=dict)  # by the model, of `config`
    failure: str = field(init=False, default="")
    _all: list[Instance] = field(init=False)
    _ran: int = field(init=False, default=0)  # of the version before, under its load

    def __post_init__(self) -> None:
        self.config, self.labels = self._spec.config, self._spec.labels
        self._all = expand_instances(self.config)

    def begin_like(self, before: Instances) -> None:
        """Begin with as many as an earlier version has, where their number follows the load, which
        this one takes over."""
        if bounds_of(before.config) is not None:
            self._ran = before.count
            self._all = expand_instances(self.config, self._ran)

    @property
    def problem(self) -> str:
        """Why none will take requests any more, or empty."""
        return self.failure

    @property
    def any_ready(self) -> bool:
        """Whether one takes requests."""
        return any(instance.state is InstanceState.READY for instance in self._all)

    @property
    def count(self) -> int:
        """The instances that serve, or will."""
        return sum(instance.state not in _DOWN for instance in self._all)

    @property
    def all_serve(self) -> bool:
        """Whether each of these takes requests: none is about to, or starts again."""
        return self.count == sum(each.state is InstanceState.READY for each in self._all)

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
    def device_byte_size(self) -> int:
        """The bytes of accelerators' memory that the running processes had when they had loaded."""
        return sum(instance.device_byte_size for instance in self._all if instance.alive)

    @property
    def checks_ready(self) -> bool:
        """Whether the model says itself whether it is ready."""
        return any(instance.checks_ready for instance in self._all)

    # --- start

    async def complete_config(self) -> None:
        """Have the first instance's model complete the configuration, and reserve what all need."""
        first = self._all[0]
        await self._spawn(first, self._spec.config, len(self._all))
        self._send(first, m.CompleteConfig(self._spec.config))
        self.completed = (await self._watched(first, m.ConfigCompleted)).config
        self.config = self._spec.complete(self.completed)
        wanted = expand_instances(self.config, self._ran)
        if [i.device for i in wanted] == [i.device for i in self._all]:
            first.rate_limit = wanted[0].rate_limit
            wanted[0] = first
        self._all = wanted
        if first not in wanted and first.child is not None:
            # The model asks for others: that process has the device and the threads of none.
            first.child.kill()
            await first.child.gone()
        self._scheduler.reserve(self.config, self._all)

    async def load(self) -> None:
        """Load the model in every instance; raises an ExceptionGroup when one fails."""
        await self._load_all(self._all, self.config, len(self._all))

    async def _load_all(self, instances: list[Instance], config: ModelSpec, of: int) -> None:
        async with asyncio.TaskGroup() as group:
            for instance in instances:
                group.create_task(self._load(instance, config, of))

    async def _load(self, instance: Instance, config: ModelSpec, of: int) -> None:
        """Load the model in a process, which is started if there is none, as one `of` so many."""
        if instance.child is None:
            await self._spawn(instance, config, of)
        self._announce(instance)
        endpoint = self._scheduler.instances_endpoint
        self._send(instance, m.LoadInstance(config, endpoint))
        message = await self._watched(instance, m.InstanceLoaded)
        self._refuse_if_over(instance)
        instance.loaded(message.checks_ready)
        instance.device_byte_size = message.device_byte_size
        current = self._scheduler.instances_endpoint
        if current != endpoint:  # the scheduler was replaced while the model loaded
            self._send(instance, m.Attach(current))
        self._on_change()

    async def _spawn(self, instance: Instance, config: ModelSpec, of: int) -> None:
        spec, server = self._spec, self._context.config
        bounds = bounds_of(self.config)
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
            backend_config=server.backend_settings(config.backend),
            arena_byte_size=server.arena_byte_size,
            threads=server.worker_threads(bounds.most if bounds is not None else of),
            log=self._context.log,
        )
        instance.inbox = inbox()
        child = await self._context.worker_zygote.spawn(title, _ENTRY, encode_start(start))
        instance.child = child
        child.exited.add_done_callback(partial(self._exited, instance, child))

        def receive(message: Any) -> None:
            if instance.child is child and not instance.inbox.full():
                instance.inbox.put_nowait(message)

        self._context.enrol(child.pid, "worker", receive)
        self._refuse_if_over(instance)
        instance.stacks_fd = (await self._response(instance, m.WorkerStarted)).stacks_fd
        self._refuse_if_over(instance)
        instance.transition("started")

    async def _watched(self, instance: Instance, kind: type[T]) -> T:
        """`_response` of what runs a model's code, which may hang."""
        limit_s = self._context.config.load_timeout_s
        response = self._response(instance, kind)
        return await watched(response, instance, self._spec.model_dir, limit_s)

    async def _response(self, instance: Instance, kind: type[T]) -> T:
        """The worker's next message, which is of this kind; raises why it is not, or Unavailable
        when it dies instead."""
        message = await self._message(instance)
        if not isinstance(message, kind):
            raise _failure(message)
        return message

    async def _message(self, instance: Instance) -> Any:
        child = instance.child
        assert child is not None
        get = asyncio.ensure_future(instance.inbox.get())
        try:
            await either(get, child.exited)
        finally:
            get.cancel()
        if get.done():
            return get.result()
        if not instance.inbox.empty():  # why it ends, for one
            return instance.inbox.get_nowait()
        if not self._wanted(instance):
            raise Unavailable("the model is unloaded")
        raise Unavailable(
            f"the process of instance '{instance.name}' ended while loading "
            f"({child.exited.result()})"
        )

    def _refuse_if_over(self, instance: Instance) -> None:
        if not self._wanted(instance):  # whoever stopped it may not have seen its process
            if instance.child is not None:
                instance.child.kill()
            raise Unavailable("the model is unloaded")
        if not instance.alive:  # it died right after its message
            raise Unavailable(f"the process of instance '{instance.name}' ended while loading")

    def _announce(self, instance: Instance) -> None:
        """Tell the scheduler to expect an instance, and which process once that is known."""
        pid = instance.child.pid if instance.child is not None else 0
        self._scheduler.tell(m.InstanceExpected(instance.index, pid))

    def _send(self, instance: Instance, message: Any) -> None:
        if instance.child is not None:
            self._context.control.send(instance.child.pid, message)

    # --- another instance_group

    def update_to(self, spec: VersionSpec, config: ModelSpec) -> InstanceUpdate:
        """The update to the instances of `config`, the final configuration of `spec`."""
        differs, wanted = config != self.config, config
        if bounds_of(config) is not None and not differs:
            wanted = sized(config, self.count)  # which follows the load
        change = change_between(self._all, wanted, self.count)
        return InstanceUpdate(spec, config, differs, *change)

    async def add(self, update: InstanceUpdate) -> None:
        """Load the model in what an update adds; it serves at once. Raises ShmserveError when one
        fails."""
        self._scheduler.reserve(update.config, update.added)
        self._all += update.added
        of = len(self._all) - len(update.leaving)
        try:
            await self._load_all(update.added, update.config, of)
        except ExceptionGroup as failures:
            raise first_of(failures) from None

    def settle(self, update: InstanceUpdate) -> None:
        """Complete an update whose instances are added: its configuration holds from now on, and
        the instances that it does not ask for retire."""
        self.config = update.config
        self.retire(update.leaving)

    async def resize(self, count: int) -> None:
        """Have so many instances, of a version that has bounds; what is added serves at once, and
        what ends finishes what it has. Raises ShmserveError, and changes nothing, when one fails.
        """
        change = change_between(self._all, sized(self.config, count))
        update = InstanceUpdate(self._spec, self.config, False, *change)
        try:
            await self.add(update)
        except ShmserveError:
            self.retire(update.added)
            raise
        self.retire(update.leaving)

    def retire(self, instances: list[Instance]) -> None:
        """Have these finish what they have, and end."""
        for instance in instances:
            if instance not in self._all:
                continue  # it has ended
            if instance.state is InstanceState.READY:
                instance.transition("retire")
            else:
                self._all.remove(instance)
                self._scheduler.release(instance)
                if instance.child is not None:
                    instance.child.kill()
            self._scheduler.tell(m.RetireInstance(instance.index))

    def retired(self, process: int) -> None:
        """End an instance that has finished what it had, and is given nothing more."""
        instance = self._of(process)
        if instance is not None and instance.state is InstanceState.RETIRING:
            self._context.background(self._end(instance))

    def _of(self, process: int) -> Instance | None:
        """The instance that this process is, if it is one still."""
        for instance in self._all:
            if instance.child is not None and instance.child.pid == process:
                return instance
        return None

    async def _end(self, instance: Instance) -> None:
        self._send(instance, m.Stop())
        instance.transition("stop")
        await self._context.end(instance.child, _STOP_PATIENCE_S)

    # --- schedulers

    def introduce(self, known: list[int]) -> None:
        """Tell a scheduler that was started with the processes `known` what happened since, and
        what it should expect."""
        for pid in set(known) - set(self.pids()):
            self._scheduler.tell(ProcessExited(pid, ""))
        for instance in self._all:
            if instance.state is InstanceState.RETIRING:
                # What it runs, nobody waits for: it runs elsewhere.
                self._context.background(self._end(instance))
            elif instance.state is InstanceState.FAILED:
                self._tell_gone(instance)
            elif instance.state is not InstanceState.STOPPED:
                self._announce(instance)

    def attach(self) -> None:
        """Have every instance that is ready offer itself to the scheduler that serves now."""
        attach = m.Attach(self._scheduler.instances_endpoint)
        for instance in self._all:
            if instance.state is InstanceState.READY:
                self._send(instance, attach)

    # --- deaths

    def kill_overrunning(self, process: int, reason: str) -> None:
        """Kill an instance that overran its limit, if this is its process still: it may have ended
        by itself meanwhile, and another be on its way to its place."""
        instance = self._of(process)
        if instance is not None and instance.child is not None:
            instance.child.cause = reason
            self._context.background(self._kill(instance, instance.child))

    @staticmethod
    async def _kill(instance: Instance, child: Child) -> None:
        stacks = in_a_line(await stacks_of(instance))
        logger.error("instance '%s' is killed: %s; it is in %s", instance.name, child.cause, stacks)
        child.kill()

    def _exited(self, instance: Instance, child: Child, _: object) -> None:
        """Start an instance again whose process has ended; its scheduler has been told."""
        if instance.child is not child or instance not in self._all:
            return
        before = instance.state
        instance.transition("exited")
        if self._lifetime.stopping:
            return  # whoever stops it sees it end
        if instance.state is InstanceState.STOPPED:
            self._all.remove(instance)
            self._scheduler.release(instance)
        if before not in (InstanceState.READY, InstanceState.RETIRING):
            return  # whoever stops or starts it sees it end
        instance.child = None
        logger.error("%s ended (%s)", child.title, child.exited.result())
        if instance.state is not InstanceState.STOPPED:
            self._on_change()
            self._context.background(self._restart(instance, child))

    def _wanted(self, instance: Instance) -> bool:
        return not self._lifetime.stopping and instance in self._all

    def served(self, process: int) -> None:
        """An instance has executed something: it is none that does nothing but crash."""
        instance = self._of(process)
        if instance is not None:
            instance.crashes = 0
            instance.backoff.worked()

    async def _restart(self, instance: Instance, ended: Child) -> None:
        pause = self._pause_s(instance, ended, time.monotonic() - instance.ready_at)
        # A long life ends the row, too.
        before = min(instance.crashes, instance.backoff.deaths - 1)
        instance.crashes = before + (not ended.was_killed)
        if before < instance.crashes == _MOST_CRASHES and self._wanted(instance):
            row = f"its process ended {_MOST_CRASHES} times in a row ({ended.reason})"
            self._give_up(instance, f"{row}, and has executed nothing meanwhile")
            return
        while self._wanted(instance):
            if pause:
                await asyncio.sleep(pause)
            if not self._wanted(instance):
                return
            instance.transition("restart")
            instance.child = None
            try:
                await self._load(instance, self.config, len(self._all))
            except ShmserveError as error:
                child = await instance.discard()
                if not self._wanted(instance):
                    return
                killed = child is not None and child.was_killed
                instance.failed_loads += not killed
                logger.error("instance '%s' did not start again: %s", instance.name, error.message)
                if instance.failed_loads < _MOST_FAILED_LOADS:
                    pause = self._pause_s(instance, child, 0)
                    continue
                self._give_up(instance, error.message)
            return

    @staticmethod
    def _pause_s(instance: Instance, ended: Child | None, lived_s: float) -> float:
        """Seconds until it is to start again. What somebody else kills is no model that fails: it
        is not given up, and waits longer and longer."""
        pause = instance.backoff.pause_s(lived_s)
        over = instance.backoff.deaths - _MOST_CRASHES
        if ended is None or not ended.was_killed or over < 0:
            return pause
        pause = min(2.0**over, _LONGEST_PAUSE_S)
        text = "instance '%s' starts again in %g s: its process was killed, or ended, %d times"
        logger.warning(text, instance.name, pause, instance.backoff.deaths)
        return pause

    def _give_up(self, instance: Instance, reason: str) -> None:
        instance.transition("give_up")
        logger.error("instance '%s' stays down: %s", instance.name, reason)
        self._tell_gone(instance)
        if all(other.state in _DOWN for other in self._all):
            self.failure = reason
        self._on_change()

    def _tell_gone(self, instance: Instance) -> None:
        reason = f"model '{self._spec.name}' failed: its instances stay down"
        self._scheduler.tell(m.InstanceGone(instance.index, reason))

    # --- end

    async def stop(self) -> None:
        """Have every process finalize its model and end."""
        running = [instance for instance in self._all if instance.alive]
        for instance in running:
            self._send(instance, m.Stop())
            instance.transition("stop")
        await asyncio.gather(*(self._context.end(i.child, _STOP_PATIENCE_S) for i in running))


def _failure(message: Any) -> ShmserveError:
    if isinstance(message, m.LoadFailed):
        return from_code(message.code, message.message)
    return InvalidArgument(f"unexpected {type(message).__name__} while loading")
