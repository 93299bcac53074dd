"""The instances of a model version, each of which has a worker process.

Instances are loaded together and restarted with backoff; after too many consecutive failures the
version has failed. Instances are added and retired while the version serves.

supervisor                        worker
   spawn          ------------>   WorkerStarted
   CompleteConfig ------------>   ConfigCompleted       (the first instance only)
   LoadInstance   ------------>   InstanceLoaded
                                  LoadFailed instead of any response; the worker then exits
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from shmserve.common.tasks import wait_any
from shmserve.errors import InvalidArgument, ShmserveError, Unavailable, from_code
from shmserve.ipc.messages import supervision as m
from shmserve.ipc.messages.publications import ProcessExited
from shmserve.ipc.messages.supervision import WorkerStart, encode_start
from shmserve.ipc.model_spec import ModelSpec
from shmserve.supervisor.context import SupervisorContext
from shmserve.supervisor.models.instance import (
    Instance,
    InstanceState,
    InstanceUpdate,
    bounds_of,
    create_inbox,
    expand_instances,
    find_changes,
    format_stacks,
    stacks_of,
    wait_for_load,
    with_instance_count,
)
from shmserve.supervisor.models.load_planner import VersionSpec
from shmserve.supervisor.models.scheduler_process import Lifetime, VersionScheduler
from shmserve.supervisor.processes.children import Child

logger = logging.getLogger(__name__)

_WORKER_ENTRY = "shmserve.workers.main:run"
_MIN_STOP_PATIENCE_S = 5.0
# A load or an unload waits this long for requests in flight on the instances that it removes.
REQUEST_PATIENCE_S = 1.0
_MAX_FAILED_LOADS = 5
# The consecutive crashes without an executed request after which an instance has failed. They take
# about 5 s if the model loads immediately.
_MAX_CRASHES = 10
_MAX_PAUSE_S = 30.0  # maximum pause before the restart of a process that is killed repeatedly
_LOADING_STATES = {InstanceState.STARTING, InstanceState.LOADING}
_SERVING_STATES = {InstanceState.READY, InstanceState.RETIRING}
_DOWN_STATES = {InstanceState.FAILED, InstanceState.RETIRING, InstanceState.STOPPED}


T = TypeVar("T")

# Returns the final configuration of a spec, given the properties that its model has reported.
ConfigFinaliser = Callable[[VersionSpec, dict[str, Any]], ModelSpec]


def first_error(error: BaseException) -> BaseException:
    """Return the error itself, or the first error of an exception group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@dataclass(slots=True, eq=False)
class Instances:
    """The instances of a version.

    Methods that load raise ShmserveError, with a text for operators, if the model or its process
    fails.

    Attributes:
        config: The configuration; final once it has been completed.
        reported_config: The properties that the model reported for its configuration.
        defers_attach: Whether new instances stay connected to the old scheduler, which drains,
            until the next `attach`.
    """

    _context: SupervisorContext
    _spec: VersionSpec
    _scheduler: VersionScheduler
    _lifetime: Lifetime
    _on_change: Callable[[], None]  # called when an instance becomes ready, dies or has failed
    _finalise_config: ConfigFinaliser
    config: ModelSpec = field(init=False)
    labels: dict[str, list[str]] = field(init=False)  # the label texts of each output
    reported_config: dict[str, Any] = field(init=False, default_factory=dict)
    failure: str = field(init=False, default="")  # why no instance is restarted
    defers_attach: bool = field(init=False, default=False)
    _warned_topics: set[str] = field(init=False, default_factory=set)
    _abandon_reason: str = field(init=False, default="")  # why the last instance was abandoned
    _instances: list[Instance] = field(init=False)
    # The number of instances of the version that this version replaces.
    _replaced_count: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.config, self.labels = self._spec.config, self._spec.labels
        self._instances = expand_instances(self.config)

    def adopt_count(self, replaced_instances: Instances) -> None:
        """Use the replaced version's number of instances if the autoscaler has chosen it."""
        if bounds_of(replaced_instances.config) is not None:
            self._replaced_count = replaced_instances.count
            self._instances = expand_instances(self.config, self._replaced_count)

    @property
    def problem(self) -> str:
        """Return the reason why no instance will accept requests again, or empty."""
        return self.failure

    @property
    def can_serve(self) -> bool:
        """Return whether an instance accepts requests."""
        return any(instance.state is InstanceState.READY for instance in self._instances)

    @property
    def count(self) -> int:
        """Return the number of instances that serve or will serve."""
        return sum(instance.state not in _DOWN_STATES for instance in self._instances)

    @property
    def hangs(self) -> bool:
        """Return whether a load of an instance takes so long that it was reported."""
        return any(instance.hangs for instance in self._instances)

    @property
    def all_serve(self) -> bool:
        """Return whether no instance is starting or restarting; failed ones are ignored."""
        return self.count == self.states().count(InstanceState.READY)

    def states(self) -> list[InstanceState]:
        """Return the state of each instance, in order."""
        return [instance.state for instance in self._instances]

    def children(self) -> list[Child]:
        """Return the processes of the instances, whether they run or have exited."""
        return [instance.child for instance in self._instances if instance.child is not None]

    def pids(self) -> list[int]:
        """Return the running processes."""
        return [child.pid for child in self.children() if child.alive]

    def serving_exits(self) -> list[asyncio.Future[str]]:
        """Return the futures of the exits of the processes that execute requests."""
        serving_instances = [i for i in self._instances if i.state in _SERVING_STATES]
        return [i.child.exit_future for i in serving_instances if i.child is not None]

    def pids_on(self, device_id: int) -> list[int]:
        """Return the processes that serve on a GPU."""
        gpu_instances = [i for i in self._instances if (i.kind, i.device_id) == ("GPU", device_id)]
        serving_instances = [i for i in gpu_instances if i.state in _SERVING_STATES]
        return [i.child.pid for i in serving_instances if i.child is not None]

    def pids_with_readiness_check(self) -> list[int]:
        """Return the serving processes whose models implement a readiness check."""
        ready_instances = [
            i for i in self._instances if i.state is InstanceState.READY and i.checks_ready
        ]
        return [i.child.pid for i in ready_instances if i.child is not None]

    @property
    def device_byte_size(self) -> int:
        """Return the accelerator memory in bytes that the running processes used after loading."""
        return sum(instance.device_byte_size for instance in self._instances if instance.alive)

    @property
    def checks_ready(self) -> bool:
        """Return whether the model implements a readiness check."""
        return any(instance.checks_ready for instance in self._instances)

    # --- loads

    async def complete_config(self) -> None:
        """Complete the configuration with the first instance, and reserve resources for all."""
        first = self._instances[0]
        await self._spawn(first, self._spec.config, len(self._instances))
        self._send(first, m.CompleteConfig(self._spec.config))
        self.reported_config = (await self._receive_in_time(first, m.ConfigCompleted)).config
        self.config = self._finalise_config(self._spec, self.reported_config)
        instances = expand_instances(self.config, self._replaced_count)
        if [i.device for i in instances] == [i.device for i in self._instances]:
            first.rate_limit = instances[0].rate_limit
            instances[0] = first
        self._instances = instances
        if first not in instances and first.child is not None:
            # The completed configuration has no instance with this process's device.
            first.child.kill()
            await first.child.until_exit()
        self._scheduler.reserve(self.config, self._instances)

    async def load(self) -> None:
        """Load the model in every instance; raise an ExceptionGroup if an instance fails."""
        await self._load_all(self._instances, self.config, len(self._instances))

    async def _load_all(
        self, instances: list[Instance], config: ModelSpec, instance_count: int
    ) -> None:
        async with asyncio.TaskGroup() as task_group:
            for instance in instances:
                task_group.create_task(self._load(instance, config, instance_count))

    async def _load(self, instance: Instance, config: ModelSpec, instance_count: int) -> None:
        """Load the model in the process of an instance; start the process if needed.

        Args:
            instance: The instance.
            config: The configuration to load.
            instance_count: The number of instances of the version, which share the processors.
        """
        if instance.child is None:
            await self._spawn(instance, config, instance_count)
        self._send_instance_expected(instance)
        endpoint = self._scheduler.instances_endpoint
        self._send(instance, m.LoadInstance(config, endpoint))
        message = await self._receive_in_time(instance, m.InstanceLoaded)
        instance.mark_loaded(message.checks_ready, message.device_byte_size)
        current_endpoint = self._scheduler.instances_endpoint
        # The scheduler may have been replaced while the model loaded.
        if current_endpoint != endpoint and not self.defers_attach:
            self._send(instance, m.Attach(current_endpoint))
        self._on_change()

    async def _spawn(self, instance: Instance, config: ModelSpec, instance_count: int) -> None:
        spec, server_config = self._spec, self._context.config
        bounds, processors = bounds_of(self.config), len(os.sched_getaffinity(0))
        title = f"worker {spec.name}.{instance.index} {instance.device}"
        start = WorkerStart(
            number=self._scheduler.number,
            index=instance.index,
            model_name=spec.name,
            version=spec.version,
            model_dir=spec.model_dir,
            run_dir=self._context.run_dir,
            device=instance.device,
            kind=instance.kind,
            device_id=instance.device_id,
            instance_name=instance.name,
            backend_config={
                key: value
                for backend, key, value in server_config.backend_config
                if backend in ("", config.backend)
            },
            arena_byte_size=server_config.arena_byte_size,
            threads=max(
                1, processors // max(1, bounds.maximum if bounds is not None else instance_count)
            ),
            log=self._context.log,
            environment=config.environment,
        )
        instance.inbox = create_inbox()
        child = await self._context.worker_zygote.spawn(title, _WORKER_ENTRY, encode_start(start))
        instance.child = child
        child.exit_future.add_done_callback(partial(self._handle_exit, instance, child))

        def receive(message: Any) -> None:
            if isinstance(message, m.ModelWarned):
                if message.topic not in self._warned_topics:
                    self._warned_topics.add(message.topic)
                    logger.warning("%s", message.text)
            elif instance.child is child and not instance.inbox.full():
                instance.inbox.put_nowait(message)

        self._context.control.register_peer(child.pid, "worker", receive)
        self._check_needed(instance)
        instance.stacks_fd = (await self._receive_response(instance, m.WorkerStarted)).stacks_fd
        instance.transition("started")

    async def _receive_in_time(self, instance: Instance, message_type: type[T]) -> T:
        """Receive the response to a step that runs the model's code, which may hang."""
        limit_s = self._context.config.load_timeout_s
        response = self._receive_response(instance, message_type)
        folder = self._spec.model_dir
        return await wait_for_load(response, instance, folder, limit_s, self._on_change)

    async def _receive_response(self, instance: Instance, message_type: type[T]) -> T:
        """Return the worker's next message, which must be of this kind.

        Raises:
            ShmserveError: The load failed.
            Unavailable: The worker died.
        """
        child = instance.child
        problem = f"the process of instance '{instance.name}' ended while loading"
        assert child is not None
        next_message = asyncio.ensure_future(instance.inbox.get())
        try:
            await wait_any(next_message, child.exit_future)
        finally:
            next_message.cancel()
        if not next_message.done() and instance.inbox.empty():
            self._check_needed(instance)
            raise Unavailable(f"{problem} ({child.reason})")
        # If the worker has ended, its last message may contain the reason.
        message = next_message.result() if next_message.done() else instance.inbox.get_nowait()
        if isinstance(message, m.LoadFailed):
            error = from_code(message.code, message.message)
            if message.frames:
                error.add_note(message.frames)
            raise error
        if not isinstance(message, message_type):
            text = f"instance '{instance.name}' sent an unexpected {type(message).__name__}"
            raise InvalidArgument(f"{text} while it was loading")
        self._check_needed(instance)
        if not instance.alive:  # the process died right after its message
            raise Unavailable(problem)
        return message

    def _check_needed(self, instance: Instance) -> None:
        if not self._is_needed(instance):  # the process may have started after the stop
            if instance.child is not None:
                instance.child.kill()
            raise Unavailable(f"instance '{instance.name}' was stopped while it was loading")

    def _send_instance_expected(self, instance: Instance) -> None:
        """Notify the scheduler of an instance that will attach, and of its process, if any."""
        pid = instance.child.pid if instance.child is not None else 0
        self._scheduler.send(m.InstanceExpected(instance.index, pid))

    def _send(self, instance: Instance, message: Any) -> None:
        if instance.child is not None:
            self._context.control.send(instance.child.pid, message)

    # --- changes of the number of instances

    def update_to(self, spec: VersionSpec, config: ModelSpec) -> InstanceUpdate:
        """Return the update to the instances of `config`, the final configuration of `spec`."""
        config_differs, scaled_config = config != self.config, config
        if bounds_of(config) is not None and not config_differs:
            # A load without changes keeps the current number of instances.
            scaled_config = with_instance_count(config, self.count)
        changes = find_changes(self._instances, scaled_config, self.count)
        return InstanceUpdate(spec, config, config_differs, *changes)

    async def add(self, update: InstanceUpdate) -> None:
        """Load the added instances of an update, which then serve immediately.

        Raises:
            ShmserveError: An instance could not be loaded.
        """
        self._scheduler.reserve(update.config, update.added_instances)
        self._instances += update.added_instances
        count = len(self._instances) - len(update.removed_instances)
        try:
            await self._load_all(update.added_instances, update.config, count)
        except ExceptionGroup as failures:
            raise first_error(failures) from None

    def commit(self, update: InstanceUpdate) -> None:
        """Adopt the configuration of an update, and retire the instances that it removes."""
        self.config = update.config
        self.retire(update.removed_instances)

    async def resize(self, count: int) -> None:
        """Change the number of instances of a version that is scaled automatically.

        Raises:
            ShmserveError: An instance could not be loaded; nothing is changed.
        """
        config = with_instance_count(self.config, count)
        added_instances, removed_instances = find_changes(self._instances, config)
        try:
            await self.add(
                InstanceUpdate(self._spec, self.config, False, added_instances, removed_instances)
            )
        except ShmserveError:
            self.retire(added_instances)
            raise
        self.retire(removed_instances)

    def retire(self, instances: list[Instance]) -> None:
        """Retire instances, which finish their requests and end."""
        for instance in instances:
            if instance not in self._instances:
                continue  # the instance has ended
            if instance.state is InstanceState.READY:
                instance.transition("retire")
            else:
                self._instances.remove(instance)
                self._scheduler.release(instance)
                if instance.child is not None:
                    instance.child.kill()
            self._scheduler.send(m.RetireInstance(instance.index))
        if self._store_failure():
            self._on_change()

    @staticmethod
    async def await_exits(retired_instances: list[Instance]) -> None:
        """Wait for the exits of retired instances, but at most a second for their requests."""
        exits = {i.child.exit_future: i for i in retired_instances if i.child is not None}
        if exits:
            await asyncio.wait(exits, timeout=REQUEST_PATIENCE_S)
        idle_exits = [e for e, i in exits.items() if i.state is not InstanceState.RETIRING]
        if idle_exits:
            await asyncio.wait(idle_exits)

    def on_retired(self, pid: int) -> None:
        """End a retiring instance that has finished its requests."""
        instance = self._instance_of(pid)
        if instance is not None and instance.state is InstanceState.RETIRING:
            self._context.background(self._end(instance))

    def _instance_of(self, pid: int) -> Instance | None:
        """Return the instance that currently runs in a process, if any."""
        matches = (i for i in self._instances if i.child is not None and i.child.pid == pid)
        return next(matches, None)

    async def _end(self, instance: Instance) -> None:
        self._send(instance, m.Stop())
        instance.transition("stop")
        patience_s = max(self._context.config.exit_timeout_s, _MIN_STOP_PATIENCE_S)
        if instance.child is not None and not await instance.child.end(patience_s):
            logger.error(
                "instance '%s' is killed: its `unload`, `finalize` or execution exceeds %g s",
                instance.name,
                patience_s,
            )

    # --- changes of schedulers

    def notify_new_scheduler(self, worker_pids: list[int]) -> None:
        """Notify a new scheduler of its instances, and of the exits since it was started.

        Args:
            worker_pids: The worker processes that ran when the scheduler was started.
        """
        for pid in set(worker_pids) - set(self.pids()):
            self._scheduler.send(ProcessExited(pid, ""))
        for instance in self._instances:
            if instance.state is InstanceState.RETIRING:
                # Clients have resubmitted the instance's requests to the new scheduler.
                self._context.background(self._end(instance))
            elif instance.state is InstanceState.FAILED:
                self._send_instance_gone(instance)
            elif instance.state is not InstanceState.STOPPED:
                self._send_instance_expected(instance)

    def attach(self) -> None:
        """Connect every ready instance to the current scheduler."""
        self.defers_attach = False
        attach = m.Attach(self._scheduler.instances_endpoint)
        for instance in self._instances:
            if instance.state is InstanceState.READY:
                self._send(instance, attach)

    # --- exits of processes

    def kill_overdue(self, pid: int, reason: str) -> None:
        """Kill an instance that exceeded its time limit, unless its process has been replaced."""
        instance = self._instance_of(pid)
        if instance is not None and instance.child is not None:
            instance.child.kill_reason = reason
            self._context.background(self._kill(instance, instance.child))

    @staticmethod
    async def _kill(instance: Instance, child: Child) -> None:
        stacks = format_stacks(await stacks_of(instance))
        logger.error(
            "instance '%s' is killed: %s; its stacks: %s", instance.name, child.kill_reason, stacks
        )
        child.kill()

    def _handle_exit(self, instance: Instance, child: Child, _: object) -> None:
        """Restart an instance whose process has ended; its scheduler was notified before."""
        if instance.child is not child or instance not in self._instances:
            return
        previous_state = instance.state
        instance.transition("exited")
        if self._lifetime.is_stopping:
            return  # `stop` waits for the exit
        if instance.state is InstanceState.STOPPED:
            self._instances.remove(instance)
            self._scheduler.release(instance)
        if previous_state not in _SERVING_STATES:
            return  # the coroutine that starts or ends the process waits for the exit
        instance.child = None
        logger.error("process %s ended (%s)", child.title, child.reason)
        if instance.state is not InstanceState.STOPPED:
            self._on_change()
            self._context.background(self._restart(instance, child))

    def _is_needed(self, instance: Instance) -> bool:
        return not self._lifetime.is_stopping and instance in self._instances

    def on_served(self, pid: int) -> None:
        """Reset the crash counter of an instance that has executed a request."""
        instance = self._instance_of(pid)
        if instance is not None:
            instance.crashes = 0
            instance.backoff.record_work()

    async def _restart(self, instance: Instance, exited_child: Child) -> None:
        exited_at = time.monotonic()
        pause_s = self._pause_s(instance, exited_child, exited_at - instance.ready_at)
        # A long lifetime also resets the number of consecutive crashes.
        earlier_crashes = min(instance.crashes, instance.backoff.exits - 1)
        instance.crashes = earlier_crashes + (not exited_child.was_killed)
        if earlier_crashes < instance.crashes == _MAX_CRASHES and self._is_needed(instance):
            reason = f"its process ended {_MAX_CRASHES} times in a row ({exited_child.reason})"
            self._abandon(instance, f"{reason}, and it executed no request in between")
            return
        while self._is_needed(instance):
            if pause_s:
                await asyncio.sleep(pause_s)
            if not self._is_needed(instance):
                return
            instance.transition("restart")
            instance.child = None
            try:
                await self._load(instance, self.config, len(self._instances))
            except ShmserveError as error:
                child = await instance.discard()
                if not self._is_needed(instance):
                    return
                was_killed = child is not None and child.was_killed
                instance.failed_loads += not was_killed
                text = "\n".join((error.message, *getattr(error, "__notes__", ())))
                logger.error(
                    "instance '%s' could not be restarted (counted failures: %d of %d): %s",
                    instance.name,
                    instance.failed_loads,
                    _MAX_FAILED_LOADS,
                    text,
                )
                if instance.failed_loads < _MAX_FAILED_LOADS:
                    pause_s = self._pause_s(instance, child, 0)
                    continue
                self._abandon(instance, error.message)
                return
            pid = instance.child.pid if instance.child is not None else 0
            downtime_s = time.monotonic() - exited_at
            logger.info(
                "%s runs again: pid %d, %.1f s after its exit", exited_child.title, pid, downtime_s
            )
            return

    @staticmethod
    def _pause_s(instance: Instance, exited_child: Child | None, lifetime_s: float) -> float:
        """Return the seconds until the restart.

        A process that is killed from outside does not count as a crash. Its instance therefore
        never fails, but the pauses grow.
        """
        pause_s = instance.backoff.pause_s(lifetime_s)
        excess_exits = instance.backoff.exits - _MAX_CRASHES
        if exited_child is None or not exited_child.was_killed or excess_exits < 0:
            return pause_s
        pause_s = min(2.0**excess_exits, _MAX_PAUSE_S)
        logger.warning(
            "instance '%s' restarts in %g s: its process was killed or ended %d times",
            instance.name,
            pause_s,
            instance.backoff.exits,
        )
        return pause_s

    def _abandon(self, instance: Instance, reason: str) -> None:
        instance.transition("abandon")
        logger.error("instance '%s' is not restarted any more: %s", instance.name, reason)
        self._send_instance_gone(instance)
        self._abandon_reason = reason
        self._store_failure()
        self._on_change()

    def _store_failure(self) -> bool:
        """Store the failure if no instance serves or will serve; return whether there is one."""
        states = self.states()
        if InstanceState.FAILED in states and _DOWN_STATES.issuperset(states):
            self.failure = self._abandon_reason
        return bool(self.failure)

    def _send_instance_gone(self, instance: Instance) -> None:
        reason = f"model '{self._spec.name}' failed: its instances are not restarted"
        self._scheduler.send(m.InstanceGone(instance.index, reason))

    # --- the version's end

    async def stop(self) -> None:
        """Finalize the model in every process that has loaded it, and wait for all exits."""
        for instance in self._instances:
            # A restarted process may hang in `load`, and would then outlast any `finalize`.
            if instance.state in _LOADING_STATES and instance.child is not None:
                instance.child.kill()
        await asyncio.gather(*(self._end(i) for i in self._instances if i.alive))
