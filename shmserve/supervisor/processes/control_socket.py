"""The supervisor's socket: typed messages to and from its processes, told apart by their pid.

What a process says goes to whoever started it (`enrol`), requests to the control plane to who
serves those (`serve`), and acknowledgements to who waits for them (`publish`).
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
)
from shmserve.ipc.transport.peercred_router import PeerCredRouter, last_number
from shmserve.supervisor.processes.acknowledgements import Acknowledgements

logger = logging.getLogger(__name__)

# What a process may say, by its role: models run foreign code, and speak as a worker at most.
_MAY_SAY = {
    "gateway": frozenset(get_args(GatewayToSupervisor)),
    "scheduler": frozenset(get_args(SchedulerToSupervisor)),
    "ensemble": frozenset(get_args(EnsembleToSupervisor)),
    "worker": frozenset(get_args(WorkerToSupervisor)),
}
_MOST_STRANGERS = 64
_MOST_WORDS = 4  # of each
_MOST_READS = 64  # at a time: somebody may never end


@dataclass(frozen=True, slots=True)
class _Process:
    role: str
    handler: Callable[[Any], None]


class Control:
    """Routes messages in the event loop.

    A peer's identity is "role.....pid": models run foreign code, which may connect here, but not as
    a gateway. A process may speak a moment before the supervisor has entered it, so what comes from
    a pid that is not a child of ours waits for `enrol` in a short queue, where a stranger's words
    are forgotten.
    """

    def __init__(self, endpoint: str) -> None:
        self._router = PeerCredRouter(endpoint, last_number)
        self._processes: dict[int, _Process] = {}
        self._services: dict[type[Any], Callable[[int, Any], None]] = {}
        self._acknowledgements = Acknowledgements()
        self._peers: dict[int, bytes] = {}
        self._strangers: deque[tuple[int, bytes, Any]] = deque(maxlen=_MOST_STRANGERS)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._router.fd, self._receive)
        self._flushing = False

    # --- who speaks, who is spoken to

    def enrol(self, pid: int, role: str, handler: Callable[[Any], None]) -> None:
        """`pid` is ours: give what it says, and has said already, to `handler`; `role` is
        "gateway", "scheduler", "ensemble" or "worker"."""
        self._processes[pid] = _Process(role, handler)
        known = [item for item in self._strangers if item[0] == pid]
        for item in known:
            self._strangers.remove(item)
            self._take(*item)

    def serve(self, kinds: Iterable[type[Any]], handler: Callable[[int, Any], None]) -> None:
        """Give messages of these kinds to `handler(pid, message)`, whichever of our processes
        sends them that may."""
        self._services.update(dict.fromkeys(kinds, handler))

    def dismiss(self, pid: int) -> None:
        """The process is gone; what it has said, why it ends for one, is heard before that is
        known."""
        self.hear()
        self._processes.pop(pid, None)
        self._peers.pop(pid, None)
        self._acknowledgements.exited(pid)

    def connected(self, pid: int) -> bool:
        """Whether the process has said something."""
        return pid in self._peers

    def pids(self, *roles: str) -> list[int]:
        """The processes with one of these roles that have made contact."""
        return [
            pid
            for pid, process in self._processes.items()
            if process.role in roles and pid in self._peers
        ]

    # --- in

    def hear(self) -> None:
        """Handle all that has been said so far."""
        for _ in range(_MOST_READS):
            if not self._router.wait(0):
                return
            self._receive()

    def _receive(self) -> None:
        for identity, message in self._router.receive():
            pid = last_number(identity)
            if pid in self._processes:
                self._take(pid, identity, message)
            elif sum(item[0] == pid for item in self._strangers) < _MOST_WORDS:
                self._strangers.append((pid, identity, message))

    def _take(self, pid: int, identity: bytes, message: Any) -> None:
        self._peers[pid] = identity
        process = self._processes.get(pid)
        if process is None:  # it ended meanwhile
            return
        try:
            if type(message) not in _MAY_SAY[process.role]:
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
        said anything."""
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
