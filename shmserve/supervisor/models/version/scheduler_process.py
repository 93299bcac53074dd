"""The scheduler of a model version, hosted by a process: started, replaced, drained, stopped.

Every one has a number of its own, and with it endpoints of its own: what is sent to one that died
reaches no other. Its counters outlive it: `CarryOver`.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from shmserve.common.counters import total
from shmserve.common.tasks import either, settle
from shmserve.errors import Unavailable
from shmserve.ipc import endpoints
from shmserve.ipc.messages import supervision as m
from shmserve.ipc.messages.supervision import CacheStart, SchedulerStart, SchedulingLimits
from shmserve.ipc.model_spec import ModelSpec
from shmserve.supervisor.context import SupervisorContext
from shmserve.supervisor.events.feed import counted
from shmserve.supervisor.models.version.instances import Instance
from shmserve.supervisor.models.version.spec import Lifetime, VersionSpec
from shmserve.supervisor.processes.scheduler_hosts import STOP_PATIENCE_S, Group, HostedHandle
from shmserve.supervisor.resources.rate_limiter import Needs

logger = logging.getLogger(__name__)


class CarryOver:
    """Snapshots of one scheduler's counters, for whatever follows it: one that takes over restores
    the last, and what replaces the version, or moves it to another process, has it as its base.
    `tell` reaches the scheduler."""

    def __init__(self, tell: Callable[[Any], None]) -> None:
        self._tell = tell
        self.snapshot: list[Any] = []  # as SchedulerStart has it
        self._base: dict[str, Any] = {}
        self._successor: CarryOver | None = None

    def update(self, statistics: dict[str, Any], metrics: list[list[Any]]) -> None:
        """The scheduler has counted so much; a key that is not there is as it was."""
        last = self.snapshot[0] if self.snapshot else {}
        self.snapshot = [{**last, **statistics}, metrics]
        self._update_successor()

    def be_base_of(self, successor: CarryOver | None) -> None:
        """`successor` adds to its own what this one has counted, and will while it drains."""
        self._successor = successor
        self._update_successor()

    def _set_base(self, base: dict[str, Any]) -> None:
        self._base = base
        self.send_base()
        self._update_successor()

    def send_base(self) -> None:
        """Tell the scheduler what was counted before this version; one that was only just started
        does not know it."""
        if self._base:
            self._tell(m.BaseCounters(self._base))

    def _update_successor(self) -> None:
        # Our scheduler may have ended, and one before it be counting still.
        if self._successor is None:
            return
        base = self._base
        if self.snapshot:
            counted = self.snapshot[0]
            base = total({**counted, "base": base or counted["base"]})
        if base:
            self._successor._set_base(base)


class VersionScheduler:
    """One at a time, or none, hosted with those of its `group`. `on_message` takes what is not
    about its own life."""

    def __init__(
        self,
        context: SupervisorContext,
        spec: VersionSpec,
        group: Group,
        lifetime: Lifetime,
        on_message: Callable[[Any], None],
    ) -> None:
        self._group = group
        self._context = context
        self._spec = spec
        self._lifetime = lifetime
        self._on_message = on_message
        self.number = next(context.numbers)  # of the one that serves, or of the first
        self._last: HostedHandle | None = None  # that was started
        self._serving: HostedHandle | None = None  # the one that is at `endpoint`
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = loop.create_future()
        self._drained: asyncio.Future[None] = loop.create_future()
        self.counts = CarryOver(self.tell)
        self._publish_counters = False
        self._asked: asyncio.Future[dict[str, Any]] | None = None  # for a snapshot
        self._rate_limited = False

    @property
    def endpoint(self) -> str:
        """Where requests are submitted."""
        return endpoints.scheduler(self._context.run_dir, self.number)

    @property
    def instances_endpoint(self) -> str:
        """Where instances offer themselves."""
        return endpoints.instances(self._context.run_dir, self.number)

    @property
    def serves(self) -> bool:
        """Whether one takes requests."""
        return self._serving is not None and self._serving.alive

    @property
    def serving(self) -> HostedHandle:
        """The one at `endpoint`, dead or alive; there has been one."""
        assert self._serving is not None
        return self._serving

    async def start(self, config: ModelSpec, workers: list[int], first: bool = False) -> None:
        """Start one, in the place of the last (`first`: there was none), which knows the worker
        processes `workers`.

        Raises Unavailable when it ends while it starts, or is not wanted any more.
        """
        context = self._context
        number = self.number if first else next(context.numbers)
        ready = self._ready = asyncio.get_running_loop().create_future()
        start = self._start_record(number, config, workers)
        on_message = partial(self._on_scheduler, self.counts)
        hosted = self._last = await context.hosts.open(self._group, start, on_message)
        if self._rate_limited:
            context.tickets.bind(hosted.address, id(self))
        await either(ready, hosted.closed, hosted.child.exited)  # before, it hears nothing
        if self._lifetime.stopping:
            await context.hosts.close(hosted)
            raise Unavailable("the model is unloaded")
        if not ready.done():
            await context.hosts.close(hosted)
            ended = hosted.child.exited
            reason = hosted.closed.result() or (ended.result() if ended.done() else "closed")
            raise Unavailable(f"the scheduler ended while starting ({reason})")
        self.number = number  # now there is something at its endpoints
        self._serving = hosted
        self.counts.send_base()
        context.tracing.tell(hosted.address)

    def _start_record(self, number: int, config: ModelSpec, workers: list[int]) -> SchedulerStart:
        context, server = self._context, self._context.config
        limits = SchedulingLimits(
            execution_timeout_s=server.execution_timeout_s,
            request_timeout_us=server.request_timeout_us,
            max_queue_size=server.max_queue_size,
            delay_scheduler=server.delay_scheduler,
            backlog_delay_scheduler=server.backlog_delay_scheduler,
            quantiles=server.metrics.kept_quantiles,
            rate_limited=self._rate_limited,
        )
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
            snapshot=self.counts.snapshot,
            alive=workers,
        )

    def _cache_start(self, config: ModelSpec) -> CacheStart:
        """The part of the response cache that a model version gets, if it asks for any."""
        shares = self._context.cache_shares
        if not config.cached:
            return CacheStart()
        if not shares.byte_size:
            logger.warning(
                "model '%s' asks for a response cache, which this server has not: see "
                "--cache-config",
                self._spec.name,
            )
            return CacheStart()
        share = shares.join(id(self), self.tell)
        return CacheStart(share, os.getpid())

    def _on_scheduler(self, counts: CarryOver, message: Any) -> None:
        match message:
            case m.SchedulerReady():
                settle(self._ready, None)
            case m.Drained():
                settle(self._drained, None)
            case m.StatisticsSnapshot(statistics, metrics):
                counts.update(statistics, metrics)
                settle(self._asked, statistics)
                if self._publish_counters:
                    self._publish_counters = False
                    event = counted(self._spec.name, self._spec.version, statistics)
                    self._context.events.publish(event)
            case _:
                self._on_message(message)

    def tell(self, message: Any) -> None:
        """Send a message to the one that was started last."""
        if self._last is not None:
            self._context.control.send(self._last.address, message)

    def publish_counters(self) -> None:
        """Have its counters published as an event."""
        self._publish_counters = True
        self.tell(m.SnapshotStatistics())

    def snapshot(self) -> asyncio.Future[dict[str, Any]]:
        """Ask for what it has counted, as `StatisticsSnapshot` has it; one that does not run gives
        none."""
        if self._asked is None or self._asked.done():
            self._asked = asyncio.get_running_loop().create_future()
            self.tell(m.SnapshotStatistics())
        return self._asked

    async def drain(self, sequences: bool = False) -> None:
        """Have it finish what it has, with `sequences` those that are open, too; returns when it
        did, or is gone."""
        assert self._last is not None
        await self.drain_one(self._last, sequences)

    async def drain_one(
        self,
        hosted: HostedHandle,
        sequences: bool = False,
        unless: Iterable[asyncio.Future[Any]] = (),
    ) -> None:
        """The same of one that was started before; returns early when one of `unless` is done."""
        self._drained = asyncio.get_running_loop().create_future()
        self._context.control.send(hosted.address, m.Drain(sequences))
        await either(self._drained, hosted.closed, hosted.child.exited, *unless)

    def misplaced(self, group: Group) -> bool:
        """Whether the one that serves belongs into another process, as one of this group."""
        return self._serving is not None and self._context.hosts.misplaced(self._serving, group)

    async def succeed(self, group: Group, config: ModelSpec) -> None:
        """Start another one beside the one that serves, in this group's process: from now on it is
        the one at `endpoint`. It counts from zero, but for metrics. Raises Unavailable."""
        before, counts = self.counts, CarryOver(self.tell)
        former, self._group, self.counts = self._group, group, counts
        try:
            await self.start(config, [])
        except Unavailable:
            self._last, self._group, self.counts = self._serving, former, before
            raise
        before.be_base_of(counts)

    def is_limited(self, config: ModelSpec) -> bool:
        """Whether the rate limiter has a say in it."""
        needs = (group.rate_limiter.limits for group in config.instance_group)
        return self._context.tickets.on and any(needs)

    def reserve(self, config: ModelSpec, instances: Iterable[Instance]) -> None:
        """Enter what instances need with the rate limiter, if that has a say in it. Raises
        InvalidArgument for what there will never be."""
        if self.is_limited(config):
            needs = {each.index: Needs.of(each.rate_limit, each.device_id) for each in instances}
            self._context.tickets.join(id(self), needs)
            self._rate_limited = True

    def release(self, instance: Instance) -> None:
        """An instance is gone: it needs nothing any more."""
        self._context.tickets.remove_instance(id(self), instance.index)

    def leave(self) -> None:
        """Leave its share of the response cache, and of the rate limiter, to others."""
        self._context.cache_shares.leave(id(self))
        self._context.tickets.remove(id(self))

    async def stop(self, patience_s: float = STOP_PATIENCE_S) -> None:
        """End it: what it has not finished it refuses, within `patience_s` seconds."""
        self.leave()
        if self._last is not None:
            await self._context.hosts.close(self._last, patience_s)
