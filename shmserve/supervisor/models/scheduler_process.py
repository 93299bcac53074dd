"""The scheduler of a model version (start, replacement, drain and stop), and its host processes.

Every scheduler has its own number and therefore its own endpoints, so that messages for a scheduler
that has ended reach no successor. A version's counters outlive its schedulers (`CarriedCounters`).
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Self

from shmserve.common.model_metrics import sum_counters
from shmserve.common.tasks import resolve_future, wait_any
from shmserve.errors import Unavailable
from shmserve.ipc import endpoints
from shmserve.ipc.messages import supervision as m
from shmserve.ipc.messages.publications import ModelCounted
from shmserve.ipc.messages.supervision import CacheStart, HostStart, SchedulerStart, encode_start
from shmserve.ipc.model_spec import ModelSpec
from shmserve.supervisor.context import SupervisorContext
from shmserve.supervisor.models.instance import Instance
from shmserve.supervisor.models.load_planner import VersionSpec
from shmserve.supervisor.processes.children import Child
from shmserve.supervisor.processes.control_socket import SchedulerAddress
from shmserve.supervisor.resources.rate_limiter import Needs

logger = logging.getLogger(__name__)

_ENTRY = "shmserve.scheduler.hosting.host:run"
STOP_PATIENCE_S = 5.0
_COUNTER_NAMES = ("success", "fail", "inference_count", "execution_count", "pending", "executing")
_DURATION_NAMES = ("queue_ns", "compute_input_ns", "compute_infer_ns", "compute_output_ns")


class Group(NamedTuple):
    """The names of models whose schedulers share a process, and the title of the process."""

    title: str
    names: frozenset[str]

    @classmethod
    def of(cls, name: str, step_models: Mapping[str, list[str]], shares_hosts: bool) -> Self:
        """Return the group of a model.

        Args:
            name: The model.
            step_models: The models of the steps of each ensemble.
            shares_hosts: Whether connected ensembles and steps share a process; otherwise the
                model has a process of its own.
        """
        names = _connected_models(step_models, name) if shares_hosts else {name}
        ensembles = names & step_models.keys()
        steps = {step for ensemble in ensembles for step in step_models[ensemble]}
        outermost_ensembles = sorted(ensembles - steps)
        host_title = f"scheduler {name}"
        if outermost_ensembles:
            host_title = f"ensemble {outermost_ensembles[0]}"
        return cls(host_title, frozenset(names))


def _connected_models(step_models: Mapping[str, list[str]], name: str) -> set[str]:
    """Return the models that are connected to a model by ensembles."""
    names, unvisited_names = {name}, [name]
    while unvisited_names:
        current_name = unvisited_names.pop()
        ensembles = (ensemble for ensemble, steps in step_models.items() if current_name in steps)
        neighbours = {*step_models.get(current_name, ()), *ensembles}
        unvisited_names += neighbours - names
        names |= neighbours
    return names


@dataclass(slots=True)
class Lifetime:
    """The shutdown state that the parts of a model version share."""

    is_retiring: bool = False  # whether the version finishes its requests
    is_stopping: bool = False  # whether the version's processes are being stopped


class SchedulerHandle:
    """The supervisor's handle of a scheduler for the model `name` in a host process.

    `close_future` resolves when the process no longer hosts the scheduler, with the reason if the
    scheduler was never opened.
    """

    def __init__(self, host: _SchedulerHost, name: str, number: int) -> None:
        self.name = name
        self.child = host.child
        self.address = SchedulerAddress(host.child.pid, number)
        self._host = host
        self.close_future: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def alive(self) -> bool:
        """Return whether neither the scheduler nor its process is known to have ended."""
        return self.child.alive and not self.close_future.done()


class _SchedulerHost:
    """A host process, its schedulers by number, and the `names` of the models that may share it."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self.names: frozenset[str] = frozenset()
        self.handles: dict[int, SchedulerHandle] = {}
        self.ready_future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.pending_opens = 0  # number of callers that are about to open a scheduler


@dataclass(slots=True, eq=False)
class SchedulerHosts:
    """All host processes of a server: one for each model, or one for an ensemble and its steps.

    A scheduler is opened in the process that hosts its group, or in a new process. A process exits
    with its last scheduler. When it dies, all of its schedulers have died.
    """

    _context: SupervisorContext
    _hosts: list[_SchedulerHost] = field(init=False, default_factory=list)
    _spawn_lock: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)

    async def open(
        self, group: Group, start: SchedulerStart, on_message: Callable[[Any], None]
    ) -> SchedulerHandle:
        """Open a scheduler, which serves once `on_message` has received its `SchedulerReady`.

        Raises:
            Unavailable: No process can host it.
        """
        host = await self._find_or_start_host(group)
        host.pending_opens += 1
        try:
            await wait_any(host.ready_future, host.child.exit_future)
        finally:
            host.pending_opens -= 1
        if not host.child.alive:
            raise Unavailable(f"the scheduler ended while starting ({host.child.reason})")
        handle = host.handles[start.number] = SchedulerHandle(host, start.config.name, start.number)
        self._context.control.register_peer(handle.address, start.kind, on_message)
        self._context.control.send(host.child.pid, m.OpenScheduler(encode_start(start)))
        return handle

    def must_move(self, handle: SchedulerHandle, group: Group) -> bool:
        """Return whether a scheduler of this group would be opened in a different process now."""
        host = handle._host
        if len(group.names) == 1:
            return any(handle.name not in group.names for handle in host.handles.values())
        return self._running_host(group) not in (None, host)

    def _running_host(self, group: Group) -> _SchedulerHost | None:
        if len(group.names) > 1:
            for host in self._hosts:
                if host.child.alive and host.names & group.names:
                    return host
        return None

    async def _find_or_start_host(self, group: Group) -> _SchedulerHost:
        """Return the process that hosts a group, or start one."""
        async with self._spawn_lock:
            self._hosts = [host for host in self._hosts if host.child.alive]
            existing_host = self._running_host(group)
            if existing_host is not None:
                existing_host.names |= group.names
                return existing_host
            start = HostStart(group.title, self._context.run_dir, self._context.log)
            child = await self._context.front_zygote.spawn(group.title, _ENTRY, encode_start(start))
            host = _SchedulerHost(child)
            if len(group.names) > 1:
                host.names = group.names
            self._hosts.append(host)
            on_message = partial(self._handle_host_message, host)
            self._context.control.register_peer(child.pid, "host", on_message)
            return host

    def _handle_host_message(self, host: _SchedulerHost, message: Any) -> None:
        match message:
            case m.Started():
                resolve_future(host.ready_future, None)
            case m.SchedulerClosed(number, reason):
                if (handle := host.handles.get(number)) is not None:
                    resolve_future(handle.close_future, reason)

    async def close(self, handle: SchedulerHandle, patience_s: float = STOP_PATIENCE_S) -> None:
        """Close a scheduler and, if it is the last one, its process; wait until they have ended."""
        host, control = handle._host, self._context.control
        control.send(handle.address, m.Stop())
        await wait_any(handle.close_future, host.child.exit_future, timeout_s=patience_s)
        resolve_future(handle.close_future, "")
        host.handles.pop(handle.address.number, None)
        control.withdraw(handle.address)
        if host.handles or host.pending_opens:
            return
        if host in self._hosts:
            self._hosts.remove(host)
        if not host.child.alive:
            return
        control.send(host.child.pid, m.Stop())
        await wait_any(host.child.exit_future, timeout_s=patience_s)
        host.child.kill()
        await host.child.until_exit()


class CarriedCounters:
    """The counters of a scheduler, kept for its successors.

    A scheduler that replaces a dead one restores the last snapshot. A scheduler of another version
    or in another process counts from zero, and reports its own counts plus these counters.
    """

    def __init__(self, send: Callable[[Any], None]) -> None:
        """Create empty counters; `send` sends a message to the scheduler."""
        self._send = send
        self.snapshot: list[Any] = []  # the last snapshot, in the format of SchedulerStart
        self._base_counters: dict[str, Any] = {}
        self._successor: CarriedCounters | None = None

    def update(self, statistics: dict[str, Any], metrics: list[list[Any]]) -> None:
        """Store the scheduler's counters; a missing key means that its value has not changed."""
        previous_counters = self.snapshot[0] if self.snapshot else {}
        self.snapshot = [{**previous_counters, **statistics}, metrics]
        self._update_successor()

    def pass_to(self, successor: CarriedCounters | None) -> None:
        """Add these counters and their later changes to `successor`; None ends the addition."""
        self._successor = successor
        self._update_successor()

    def continue_version(self, predecessor: CarriedCounters) -> None:
        """Continue the counts of a scheduler of the same version, which has drained."""
        if predecessor.snapshot:
            predecessor.pass_to(None)
            self._base_counters = predecessor._base_counters
            self._send(m.BaseCounters(self._base_counters, predecessor.snapshot[0]))

    def _set_base(self, base: dict[str, Any]) -> None:
        self._base_counters = base
        self.send_base()
        self._update_successor()

    def send_base(self) -> None:
        """Send the counts of replaced versions (the base) to a scheduler that has just started."""
        if self._base_counters:
            self._send(m.BaseCounters(self._base_counters))

    def _update_successor(self) -> None:
        # This is called even after this scheduler's end, while an earlier scheduler still drains.
        if self._successor is None:
            return
        base = self._base_counters
        if self.snapshot:
            counters = self.snapshot[0]
            base = sum_counters({**counters, "base": base or counters["base"]})
        if base:
            self._successor._set_base(base)


@dataclass(eq=False)
class VersionScheduler:
    """The scheduler of a model version; at most one scheduler serves at a time.

    Attributes:
        _context: The shared parts of the supervisor.
        hosts: The processes that host schedulers.
        _spec: The version to schedule.
        _group: The models whose schedulers share the process.
        _lifetime: The shutdown state of the version.
        _on_message: Receives messages about instances and memory.
    """

    _context: SupervisorContext
    hosts: SchedulerHosts
    _spec: VersionSpec
    _group: Group
    _lifetime: Lifetime
    _on_message: Callable[[Any], None]

    def __post_init__(self) -> None:
        # The number of the scheduler at `endpoint`; before the start, the first scheduler's number.
        self.number = next(self._context.scheduler_ids)
        self._latest: SchedulerHandle | None = None  # the scheduler that was started last
        self._handle: SchedulerHandle | None = None  # the scheduler at `endpoint`
        loop = asyncio.get_running_loop()
        self._ready_future: asyncio.Future[None] = loop.create_future()
        self._drain_future: asyncio.Future[None] = loop.create_future()
        self.counters = CarriedCounters(self.send)
        self._publishes_counters = False  # whether the next snapshot becomes an event
        self._snapshot: asyncio.Future[dict[str, Any]] | None = None
        self._is_rate_limited = False

    @property
    def endpoint(self) -> str:
        """Return the endpoint to which requests are submitted."""
        return endpoints.scheduler(self._context.run_dir, self.number)

    @property
    def instances_endpoint(self) -> str:
        """Return the endpoint to which the workers of the version's instances connect."""
        return endpoints.instances(self._context.run_dir, self.number)

    @property
    def serves(self) -> bool:
        """Return whether a scheduler accepts requests."""
        return self._handle is not None and self._handle.alive

    @property
    def current(self) -> SchedulerHandle:
        """Return the scheduler at `endpoint`, whether it runs or has exited.

        A scheduler must have started.
        """
        assert self._handle is not None
        return self._handle

    async def start(
        self, config: ModelSpec, worker_pids: list[int], is_first: bool = False
    ) -> None:
        """Start a scheduler in place of the last one.

        Args:
            config: The configuration of the version.
            worker_pids: The worker processes that the scheduler may expect.
            is_first: Whether this is the version's first scheduler.

        Raises:
            Unavailable: The scheduler ended while starting, or the version is being unloaded.
        """
        context = self._context
        number = self.number if is_first else next(context.scheduler_ids)
        ready_future = self._ready_future = asyncio.get_running_loop().create_future()
        start = self._create_start_record(number, config, worker_pids)
        on_message = partial(self._on_scheduler_message, self.counters)
        handle = self._latest = await self.hosts.open(self._group, start, on_message)
        if self._is_rate_limited:
            context.tickets.bind(handle.address, id(self))
        # Messages to the scheduler would be lost before it is ready.
        await wait_any(ready_future, handle.close_future, handle.child.exit_future)
        if self._lifetime.is_stopping:
            await self.stop()
            raise Unavailable("the model was unloaded while it was loading")
        if not ready_future.done():
            await self.hosts.close(handle)
            exit_future = handle.child.exit_future
            reason = handle.close_future.result() or (
                exit_future.result() if exit_future.done() else "closed"
            )
            raise Unavailable(f"the scheduler ended while starting ({reason})")
        self.number = number  # the endpoints of the new scheduler exist from now on
        self._handle = handle
        self.counters.send_base()
        if self._snapshot is not None:  # the previous scheduler may not have answered
            self.send(m.SnapshotStatistics())
        if config.caches_responses:  # the share may have changed while the scheduler started
            context.cache_shares.send(id(self))
        context.tracing.send_settings(handle.address)

    def _create_start_record(
        self, number: int, config: ModelSpec, worker_pids: list[int]
    ) -> SchedulerStart:
        context, server = self._context, self._context.config
        quantiles = server.metrics.summary_quantiles
        limits = replace(server.scheduling, quantiles=quantiles, rate_limited=self._is_rate_limited)
        return SchedulerStart(
            kind="ensemble" if self._spec.steps else "scheduler",
            number=number,
            version=self._spec.version,
            config=config,
            run_dir=context.run_dir,
            capability_key=context.capabilities.key,
            group=server.shm.group,
            arena_byte_size=server.arena_byte_size,
            limits=limits,
            cache=self._cache_start(config),
            snapshot=self.counters.snapshot,
            worker_pids=worker_pids,
        )

    def _cache_start(self, config: ModelSpec) -> CacheStart:
        """Let the version join the response cache, and return its share; empty without a cache."""
        shares = self._context.cache_shares
        if config.caches_responses and shares.byte_size:
            return CacheStart(shares.join(id(self), self.send), os.getpid())
        if config.caches_responses:
            logger.warning(
                "model '%s' has a response_cache, but the server has no cache: set --cache-config",
                self._spec.name,
            )
        return CacheStart()

    def _on_scheduler_message(self, counters: CarriedCounters, message: Any) -> None:
        match message:
            case m.SchedulerReady():
                resolve_future(self._ready_future, None)
            case m.Drained():
                resolve_future(self._drain_future, None)
            case m.StatisticsSnapshot(statistics, metrics):
                counters.update(statistics, metrics)
                resolve_future(self._snapshot, statistics)
                if self._publishes_counters:
                    self._publishes_counters = False
                    event = _counters_event(self._spec.name, self._spec.version, statistics)
                    self._context.events.publish(event)
            case _:
                self._on_message(message)

    def send(self, message: Any) -> None:
        """Send a message to the scheduler that was started last."""
        if self._latest is not None:
            self._context.control.send(self._latest.address, message)

    def publish_counters(self) -> None:
        """Request the counters and publish them as an event."""
        self._publishes_counters = True
        self.send(m.SnapshotStatistics())

    def snapshot(self) -> asyncio.Future[dict[str, Any]]:
        """Request a `StatisticsSnapshot`; return its future. A dead scheduler does not respond."""
        if self._snapshot is None or self._snapshot.done():
            self._snapshot = asyncio.get_running_loop().create_future()
            self.send(m.SnapshotStatistics())
        return self._snapshot

    async def drain(
        self,
        handle: SchedulerHandle | None = None,
        sequences_only: bool = False,
        losses: Iterable[asyncio.Future[Any]] = (),
    ) -> None:
        """Drain a scheduler; return when it has finished its requests or has ended.

        Args:
            handle: The scheduler to drain; None is the last one that was started.
            sequences_only: Whether only open sequences are finished; other requests are accepted.
            losses: Futures that end the wait early.
        """
        handle = handle or self._latest
        assert handle is not None
        self._drain_future = asyncio.get_running_loop().create_future()
        self._context.control.send(handle.address, m.Drain(sequences_only))
        await wait_any(self._drain_future, handle.close_future, handle.child.exit_future, *losses)

    def must_move(self, group: Group) -> bool:
        """Check whether the scheduler at `endpoint` must move to the process of `group`."""
        return self._handle is not None and self.hosts.must_move(self._handle, group)

    async def start_successor(self, group: Group, config: ModelSpec) -> None:
        """Start a successor in a group's process; `endpoint` is the successor's from now on.

        The metrics of the successor continue. Its statistics start at zero, and continue with
        `CarriedCounters.continue_version`.

        Raises:
            Unavailable: The successor does not start.
        """
        old_counters, new_counters = self.counters, CarriedCounters(self.send)
        old_group, self._group, self.counters = self._group, group, new_counters
        try:
            await self.start(config, [])
        except Unavailable:
            self._latest = self._handle
            self._group, self.counters = old_group, old_counters
            raise
        old_counters.pass_to(new_counters)

    def is_limited(self, config: ModelSpec) -> bool:
        """Check whether the rate limiter applies to a configuration."""
        are_limited = (group.rate_limiter.needs_resources for group in config.instance_group)
        return self._context.tickets.is_enabled and any(are_limited)

    def reserve(self, config: ModelSpec, instances: Iterable[Instance]) -> None:
        """Register the resources that instances need with the rate limiter, if it applies.

        Raises InvalidArgument if an instance needs more than the server has.
        """
        if self.is_limited(config):
            needs = {i.index: Needs.of(i.rate_limit, i.device_id) for i in instances}
            self._context.tickets.join(id(self), needs)
            self._is_rate_limited = True

    def release(self, instance: Instance) -> None:
        """Release the rate-limiter resources of an instance that has ended."""
        self._context.tickets.remove_instance(id(self), instance.index)

    async def stop(self, patience_s: float = STOP_PATIENCE_S) -> None:
        """End the scheduler; requests that are not finished in `patience_s` are rejected."""
        self._context.cache_shares.remove(id(self))
        self._context.tickets.remove(id(self))
        if self._latest is not None:
            await self.hosts.close(self._latest, patience_s)


def _counters_event(name: str, version: str, statistics: dict[str, Any]) -> ModelCounted:
    """Return the event for a scheduler's snapshot. Durations are sums over all requests in ns."""
    counters = {
        **{name: statistics[name] for name in _COUNTER_NAMES},
        "request_ns": statistics["success_ns"],
        **{name: statistics[name] for name in _DURATION_NAMES},
    }
    return ModelCounted(name, version, counters)
