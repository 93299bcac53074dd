"""The life of a gateway process, whatever its protocol: start-up, readiness, drain, stop.

Started ──> told what there is, last HealthChanged ──> clients are let in ──> GatewayReady
Drain ──> connections end with their next response, what is in flight finishes ──> Drained ──> Stop
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from shmserve import logs
from shmserve.gateway.client_identity import ListenerRules
from shmserve.gateway.context import Gateway
from shmserve.gateway.inference.body_arrival import BodyBudget
from shmserve.gateway.inference.malloc_trim import MallocTrim
from shmserve.gateway.links.link import SupervisorLink
from shmserve.gateway.links.schedulers import RequestDispatcher
from shmserve.gateway.model_table import ModelTable
from shmserve.gateway.region_table import RegionTable
from shmserve.gateway.settings import GatewaySettings, GatewayStart
from shmserve.ipc import endpoints
from shmserve.ipc.memory.arena import Arena
from shmserve.ipc.memory.mappings import Mappings
from shmserve.ipc.messages import supervision as m
from shmserve.ipc.messages.memory import (
    RegionDrained,
    RegionPublished,
    RegionReleased,
    RegionWithdrawn,
)
from shmserve.ipc.processes import name_process
from shmserve.logs import LogSettings

logger = logging.getLogger(__name__)

_LAST_RESPONSES_S = 1.0


class Frontend(ABC):
    """The protocol server of a gateway: its listeners and connections."""

    def __init__(self) -> None:
        self.listeners: list[ListenerRules] = []

    @abstractmethod
    async def open(self) -> None:
        """Accept connections; the gateway has been told of all models and regions."""

    def health_changed(self) -> None:  # noqa: B027
        """The gateway's `health` has changed."""

    @abstractmethod
    def drain(self, drained: Callable[[], None]) -> None:
        """Let nobody in any more; call `drained` once no inference is in flight."""

    @abstractmethod
    async def close(self) -> None:
        """Close every connection."""


class ActiveCount:
    """A count of what is under way, `active`, by which a drain knows when that is over."""

    def __init__(self) -> None:
        self.active = 0
        self._idle: Callable[[], None] | None = None

    def left(self) -> None:
        """One less."""
        self.active -= 1
        if not self.active and self._idle is not None:
            self.when_idle(self._idle)

    def when_idle(self, then: Callable[[], None]) -> None:
        """Call `then` once, as soon as nothing is under way: every response is sent."""
        self._idle = then if self.active else None
        if not self.active:
            then()


def prepare(role: str, title: str, log: LogSettings) -> None:
    """Set up this process: its log, its title for `ps`; signals that end it are ignored."""
    logs.configure(role, log)
    name_process(title)
    # The supervisor decides when this ends; a Ctrl-C reaches the whole process group.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


async def serve(start: GatewayStart, make_front: Callable[[Gateway], Frontend]) -> None:
    """Be a gateway until the supervisor says `Stop`."""
    await _Process(start.name, start.run_dir, start.settings, make_front).run()


class _Process:
    """A gateway, wired; a state machine driven by the supervisor's messages."""

    def __init__(
        self,
        name: str,
        run_dir: Path,
        settings: GatewaySettings,
        make_front: Callable[[Gateway], Frontend],
    ) -> None:
        self._informed = asyncio.Event()
        self._stopped = asyncio.Event()
        dispatcher = RequestDispatcher()
        trim = MallocTrim()
        supervisor = SupervisorLink(
            endpoints.control(run_dir),
            f"gateway.{name}.{os.getpid()}",
            self._take,
        )
        self._gateway = Gateway(
            settings=settings,
            dispatcher=dispatcher,
            models=ModelTable(dispatcher),
            regions=RegionTable(self._region_released, settings.shm_overlap),
            supervisor=supervisor,
            arena=Arena(settings.arena_byte_size),
            body_budget=BodyBudget(max(settings.arena_byte_size, settings.max_input_size), trim),
            malloc_trim=trim,
            mappings=Mappings(),
            health=m.HealthChanged(live=True, ready=False, exiting=False),
        )
        self._front = make_front(self._gateway)

    async def run(self) -> None:
        """Serve until `Stop`."""
        gateway = self._gateway
        gateway.supervisor.post(m.Started())
        try:
            # A gateway that takes over from one that died would answer 404 before it knows the
            # models.
            await self._informed.wait()
            await self._front.open()
            gateway.supervisor.post(m.GatewayReady())
            await self._stopped.wait()
        finally:
            await self._front.close()
            gateway.supervisor.close()
            gateway.dispatcher.close()

    def _take(self, message: Any) -> None:
        gateway = self._gateway
        match message:
            case m.ModelPublished():
                gateway.models.publish(message)
                self._acknowledge(message.acknowledge)
            case m.ReadinessChanged(name, version, ready):
                gateway.models.set_ready(name, version, ready)
            case m.ModelWithdrawn(name, version, acknowledge):
                gateway.models.withdraw(name, version)
                self._acknowledge(acknowledge)
            case m.SchedulerLost(endpoint, successor):
                gateway.dispatcher.lost(endpoint, successor)
            case RegionPublished():
                gateway.regions.publish(message)
                self._acknowledge(message.acknowledge)
            case RegionWithdrawn(memory_id=memory_id, acknowledge=acknowledge):
                gateway.regions.withdraw(memory_id)
                self._acknowledge(acknowledge)
            case RegionDrained(memory_id, acknowledge):
                gateway.regions.drained(memory_id)
                self._acknowledge(acknowledge)
            case m.HealthChanged():
                gateway.health = message
                self._front.health_changed()
                self._informed.set()
            case m.ProcessExited(process=pid):
                # Responses of it may be here, and still to be read: they lie in its memory.
                later = asyncio.get_running_loop().call_later
                later(_LAST_RESPONSES_S, gateway.mappings.drop_process, pid)
            case m.SetLogging(settings):
                logs.apply(LogSettings(**settings))
            case m.SetTokens(tokens):
                gateway.settings = replace(gateway.settings, tokens=tokens)
                for listener in self._front.listeners:
                    listener.authorisation = listener.authorisation.with_tokens(tokens)
            case m.Ping(number):
                self._acknowledge(number)
            case m.Drain():
                gateway.draining = True
                self._front.drain(self._drained)
            case m.Stop():
                self._stopped.set()
            case _:
                logger.warning("the supervisor sent a %s", type(message).__name__)

    def _region_released(self, memory_id: int) -> None:
        self._gateway.supervisor.post(RegionReleased(memory_id))

    def _acknowledge(self, number: int) -> None:
        if number > 0:
            self._gateway.supervisor.post(m.Acknowledged(number))

    def _drained(self) -> None:
        self._gateway.supervisor.post(m.Drained())
