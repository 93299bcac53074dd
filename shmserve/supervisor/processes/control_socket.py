"""The control socket: typed messages between the supervisor and its processes, by pid.

Messages of a process are routed to whoever started it (`enrol`), requests to the control plane to
their service (`serve`), and acknowledgements to whoever waits for them (`publish`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, get_args

from shmserve.ipc.messages import (
    Acknowledged,
    EnsembleToSupervisor,
    GatewayToSupervisor,
    SchedulerToSupervisor,
    WorkerToSupervisor,
    WorkspaceToSupervisor,
)
from shmserve.ipc.transport.peercred_router import PeerCredRouter, last_number
from shmserve.supervisor.processes.acknowledgements import Acknowledgements

logger = logging.getLogger(__name__)

# Messages that a process may send, by its role: models run foreign code, and are workers at most.
_MAY_SEND = {
    "gateway": frozenset(get_args(GatewayToSupervisor)),
    "scheduler": frozenset(get_args(SchedulerToSupervisor)),
    "ensemble": frozenset(get_args(EnsembleToSupervisor)),
    "worker": frozenset(get_args(WorkerToSupervisor)),
    "workspace": frozenset({WorkspaceToSupervisor}),
}
_MOST_UNKNOWN = 64
_MOST_EARLY = 4  # of each
_MOST_READS = 64  # at a time: a peer may never stop sending


@dataclass(frozen=True, slots=True)
class _Process:
    role: str
    handler: Callable[[Any], None]


class ControlSocket:
    """Routes messages in the event loop.

    A peer's identity is "role.....pid": models run foreign code, which may connect here, but not as
    a gateway. A process may send a moment before the supervisor has entered it, so messages of a
    pid that is not enrolled wait in a short queue, from which those of others are evicted.
    """

    def __init__(self, endpoint: str) -> None:
        self._router = PeerCredRouter(endpoint, last_number)
        self._processes: dict[int, _Process] = {}
        self._services: dict[type[Any], Callable[[int, Any], None]] = {}
        self._acknowledgements = Acknowledgements()
        self._peers: dict[int, bytes] = {}
        self._unknown: deque[tuple[int, bytes, Any]] = deque(maxlen=_MOST_UNKNOWN)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._router.fd, self._receive)
        self._flushing = False

    # --- peers

    def enrol(self, pid: int, role: str, handler: Callable[[Any], None]) -> None:
        """Route messages of our process `pid`, those that came already too, to `handler`; `role` is
        "gateway", "scheduler", "ensemble", "worker" or "workspace"."""
        self._processes[pid] = _Process(role, handler)
        known = [item for item in self._unknown if item[0] == pid]
        for item in known:
            self._unknown.remove(item)
            self._take(*item)

    def serve(self, kinds: Iterable[type[Any]], handler: Callable[[int, Any], None]) -> None:
        """Route messages of these types to `handler(pid, message)`, whichever of our processes
        sends them that may."""
        self._services.update(dict.fromkeys(kinds, handler))

    def dismiss(self, pid: int) -> None:
        """The process is gone; what it had sent, why it ends for one, is handled first."""
        self.receive_all()
        self._processes.pop(pid, None)
        self._peers.pop(pid, None)
        self._acknowledgements.exited(pid)

    def connected(self, pid: int) -> bool:
        """Whether the process has sent something."""
        return pid in self._peers

    def pids(self, *roles: str) -> list[int]:
        """The processes with one of these roles that have made contact."""
        return [
            pid
            for pid, process in self._processes.items()
            if process.role in roles and pid in self._peers
        ]

    # --- in

    def receive_all(self) -> None:
        """Handle all that has been received so far."""
        for _ in range(_MOST_READS):
            if not self._router.wait(0):
                return
            self._receive()

    def _receive(self) -> None:
        for identity, message in self._router.receive():
            pid = last_number(identity)
            if pid in self._processes:
                self._take(pid, identity, message)
            elif sum(item[0] == pid for item in self._unknown) < _MOST_EARLY:
                self._unknown.append((pid, identity, message))

    def _take(self, pid: int, identity: bytes, message: Any) -> None:
        self._peers[pid] = identity
        process = self._processes.get(pid)
        if process is None:  # it ended meanwhile
            return
        try:
            if type(message) not in _MAY_SEND[process.role]:
                logger.warning("a %s said a %s", process.role, type(message).__name__)
            elif isinstance(message, Acknowledged):
                self._acknowledgements.acknowledged(pid, message.number)
            elif (service := self._services.get(type(message))) is not None:
                service(pid, message)
            else:
                process.handler(message)
        except Exception:
            logger.exception("a message could not be handled: %s", type(message).__name__)

    # --- out

    def send(self, pid: int, message: Any) -> None:
        """Queue a message for a process; one frame goes out a loop turn. Dropped when it never
        sent anything."""
        identity = self._peers.get(pid)
        if identity is None:
            return
        self._router.post(identity, message)
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def broadcast(self, message: Any, *roles: str) -> None:
        """Send a message to every process with one of these roles."""
        for pid in self.pids(*roles):
            self.send(pid, message)

    async def publish(self, make: Callable[[int], Any], *roles: str) -> None:
        """Send what `make(number)` gives to every process with one of these roles; returns once
        each that lives has acknowledged the number."""
        pids = self.pids(*roles)
        number, done = self._acknowledgements.begin(set(pids))
        message = make(number)
        for pid in pids:
            self.send(pid, message)
        await done

    def _flush(self) -> None:
        self._flushing = False
        self._router.flush()

    def close(self) -> None:
        """Flush and close the socket."""
        self._router.flush()
        self._loop.remove_reader(self._router.fd)
        self._router.close()
