"""The processes that host schedulers: one for each model, or one for an ensemble and its steps.

A scheduler is opened in the process that hosts its group, or in a new process. A process exits with
its last scheduler. When it dies, all of its schedulers have died.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from shmserve.common.tasks import resolve_future, wait_any
from shmserve.errors import Unavailable
from shmserve.ipc.messages import supervision as m
from shmserve.ipc.messages.supervision import HostStart, SchedulerStart, encode_start
from shmserve.supervisor.processes.children import Child, Zygote
from shmserve.supervisor.processes.control_socket import ControlSocket, LogControl, SchedulerAddress

_ENTRY = "shmserve.scheduler.hosting.host:run"
STOP_PATIENCE_S = 5.0


class Group(NamedTuple):
    """The names of models whose schedulers share a process, and the title of the process."""

    title: str
    names: frozenset[str]


class HostedHandle:
    """The supervisor's handle of a scheduler for the model `name` in a host process.

    `close_future` resolves when the process no longer hosts the scheduler, with the reason if the
    scheduler was never opened.
    """

    def __init__(self, host: _Host, name: str, number: int) -> None:
        self.name = name
        self.child = host.child
        self.address = SchedulerAddress(host.child.pid, number)
        self._host = host
        self.close_future: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def alive(self) -> bool:
        """Return whether neither the scheduler nor its process is known to have ended."""
        return self.child.alive and not self.close_future.done()


class _Host:
    """A host process, its schedulers by number, and the `names` of models that may share it."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self.names: frozenset[str] = frozenset()
        self.handles: dict[int, HostedHandle] = {}
        self.ready_future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.pending_opens = 0  # number of callers that are about to open a scheduler


@dataclass(slots=True, eq=False)
class SchedulerHosts:
    """All host processes of a server."""

    _control: ControlSocket
    _zygote: Zygote
    _run_dir: Path
    _logging: LogControl
    _hosts: list[_Host] = field(init=False, default_factory=list)
    _spawn_lock: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)

    async def open(
        self, group: Group, start: SchedulerStart, on_message: Callable[[Any], None]
    ) -> HostedHandle:
        """Open a scheduler, which serves once `on_message` has received its `SchedulerReady`.

        Raises:
            Unavailable: No process can host it.
        """
        host = await self._host(group)
        host.pending_opens += 1
        try:
            await wait_any(host.ready_future, host.child.exited)
        finally:
            host.pending_opens -= 1
        if not host.child.alive:
            raise Unavailable(f"the scheduler ended while starting ({host.child.reason})")
        hosted = host.handles[start.number] = HostedHandle(host, start.config.name, start.number)
        self._control.enrol(hosted.address, start.kind, on_message)
        self._control.send(host.child.pid, m.OpenScheduler(encode_start(start)))
        return hosted

    def must_move(self, hosted: HostedHandle, group: Group) -> bool:
        """Return whether a scheduler of this group would be opened in a different process now."""
        host = hosted._host
        if len(group.names) == 1:
            return any(hosted.name not in group.names for hosted in host.handles.values())
        return self._running_host(group) not in (None, host)

    def _running_host(self, group: Group) -> _Host | None:
        if len(group.names) > 1:
            for host in self._hosts:
                if host.child.alive and host.names & group.names:
                    return host
        return None

    async def _host(self, group: Group) -> _Host:
        """Return the process that hosts a group, or start one."""
        async with self._spawn_lock:
            self._hosts = [host for host in self._hosts if host.child.alive]
            existing_host = self._running_host(group)
            if existing_host is not None:
                existing_host.names |= group.names
                return existing_host
            start = HostStart(group.title, self._run_dir, self._logging.settings)
            child = await self._zygote.spawn(group.title, _ENTRY, encode_start(start))
            host = _Host(child)
            if len(group.names) > 1:
                host.names = group.names
            self._hosts.append(host)
            self._control.enrol(child.pid, "host", partial(self._handle_host_message, host))
            return host

    def _handle_host_message(self, host: _Host, message: Any) -> None:
        self._logging.on_message(host.child.pid, message)
        match message:
            case m.Started():
                resolve_future(host.ready_future, None)
            case m.SchedulerClosed(number, reason):
                if (hosted := host.handles.get(number)) is not None:
                    resolve_future(hosted.close_future, reason)

    async def close(self, hosted: HostedHandle, patience_s: float = STOP_PATIENCE_S) -> None:
        """Close a scheduler and, if it is the last one, its process; wait until they have ended."""
        host = hosted._host
        self._control.send(hosted.address, m.Stop())
        await wait_any(hosted.close_future, host.child.exited, timeout_s=patience_s)
        resolve_future(hosted.close_future, "")
        host.handles.pop(hosted.address.number, None)
        self._control.withdraw(hosted.address)
        if host.handles or host.pending_opens:
            return
        if host in self._hosts:
            self._hosts.remove(host)
        if not host.child.alive:
            return
        self._control.send(host.child.pid, m.Stop())
        await wait_any(host.child.exited, timeout_s=patience_s)
        host.child.kill()
        await host.child.until_exit()
