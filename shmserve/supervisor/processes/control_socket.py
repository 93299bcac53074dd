"""The control socket: typed messages between the supervisor and its processes, by address.

Messages of a process, or of a scheduler that one hosts, are routed to whoever started it (`enrol`),
requests to the control plane to their service (`serve`), and what was announced is known once all
have acknowledged it (`Acknowledgements`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

from shmserve.ipc.messages import (
    EnsembleToSupervisor,
    GatewayToSupervisor,
    HostToSupervisor,
    SchedulerToSupervisor,
    WorkerToSupervisor,
    WorkspaceToSupervisor,
)
from shmserve.ipc.messages.supervision import Acknowledged
from shmserve.ipc.transport.router import PeerCredRouter, first_number, last_number

logger = logging.getLogger(__name__)

# Messages that a process may send, by its role: models run foreign code, and are workers at most.
_MAY_SEND = {
    "gateway": frozenset(get_args(GatewayToSupervisor)),
    "host": frozenset(get_args(HostToSupervisor)),
    "scheduler": frozenset(get_args(SchedulerToSupervisor)),
    "ensemble": frozenset(get_args(EnsembleToSupervisor)),
    "worker": frozenset(get_args(WorkerToSupervisor)),
    "workspace": frozenset({WorkspaceToSupervisor}),
}
_HOSTED = (b"scheduler", b"ensemble")
_MOST_UNKNOWN = 64
_MOST_EARLY = 4  # of each
_MOST_READS = 64  # at a time: a peer may never stop sending


class SchedulerAddress(NamedTuple):
    """A scheduler, by its number, in the process that hosts it."""

    pid: int
    number: int


# Of a process its pid.
Address = int | SchedulerAddress


def pid_of(address: Address) -> int:
    """The process at an address."""
    return address if isinstance(address, int) else address.pid


class Acknowledgements:
    """The numbered changes that were sent to processes and programs, and who has not acknowledged
    each. Nothing is kept of those that all know."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._missing: dict[int, set[Hashable]] = {}
        self._news = asyncio.Event()

    def begin(self, peers: Iterable[Hashable]) -> int:
        """A number to send to these peers."""
        number = next(self._numbers)
        missing = set(peers)
        if missing:
            self._missing[number] = missing
        return number

    def acknowledged(self, peer: Hashable, number: int) -> None:
        """The change holds at `peer`, or is not waited for any longer."""
        missing = self._missing.get(number, set())
        missing.discard(peer)
        if not missing and self._missing.pop(number, None) is not None:
            self._news.set()

    def exited(self, peer: Hashable) -> None:
        """Nothing is to be waited for from `peer` any more."""
        for number in list(self._missing):
            self.acknowledged(peer, number)

    def missing(self, number: int) -> set[Hashable]:
        """The peers that have not acknowledged it."""
        return self._missing.get(number, set())

    def know(self, number: int) -> bool:
        """Whether the change holds at each peer that it was sent to, or they are gone."""
        return number not in self._missing

    async def news(self) -> None:
        """Wait until another change is known everywhere."""
        self._news.clear()
        await self._news.wait()


@dataclass(frozen=True, slots=True)
class _Peer:
    role: str
    handler: Callable[[Any], None]


class ControlSocket:
    """Routes messages in the event loop.

    A peer's identity is "role.....pid", a scheduler's "role.number.pid": models run foreign code,
    which may connect here, but not as a gateway. A process may send a moment before the supervisor
    has entered it, so messages of an address that is not enrolled wait in a short queue, from which
    those of others are evicted.
    """

    def __init__(self, endpoint: str) -> None:
        self._router = PeerCredRouter(endpoint, last_number)
        self._enrolled: dict[Address, _Peer] = {}
        self._callers: set[Address] = set()
        self._services: dict[type[Any], Callable[[Any, Any], None]] = {}
        self.acknowledgements = Acknowledgements()
        self._identities: dict[Address, bytes] = {}
        self._unknown: deque[tuple[Address, bytes, Any]] = deque(maxlen=_MOST_UNKNOWN)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._router.fd, self._receive)
        self._flushing = False

    # --- peers

    def enrol(self, address: Address, role: str, handler: Callable[[Any], None]) -> None:
        """Route messages of our process or scheduler at `address`, those that came already too, to
        `handler`; `role` is "gateway", "host", "scheduler", "ensemble", "worker" or "workspace"."""
        self._enrolled[address] = _Peer(role, handler)
        known = [item for item in self._unknown if item[0] == address]
        for item in known:
            self._unknown.remove(item)
            self._take(*item)

    def calls(self, address: Address) -> None:
        """Note that a worker has asked for a model, to call it: it is a "caller", too, who is told
        what becomes of models."""
        if address in self._enrolled:
            self._callers.add(address)

    def serve(self, kinds: Iterable[type[Any]], handler: Callable[[Any, Any], None]) -> None:
        """Route messages of these types to `handler(address, message)`, whichever of our processes
        sends them that may."""
        self._services.update(dict.fromkeys(kinds, handler))

    def dismiss(self, pid: int) -> str:
        """The process is gone; what it had sent, why it ends for one, is handled first. Its role,
        empty where it had none yet."""
        self.receive_all()
        peer = self._enrolled.get(pid)
        for address in [each for each in self._enrolled if pid_of(each) == pid]:
            self.withdraw(address)
        return "" if peer is None else peer.role

    def withdraw(self, address: Address) -> None:
        """Route nothing more from or to an address."""
        self._enrolled.pop(address, None)
        self._callers.discard(address)
        self._identities.pop(address, None)
        self.acknowledgements.exited(address)

    def connected(self, address: Address) -> bool:
        """Whether something was sent from there."""
        return address in self._identities

    def pids(self, *roles: str) -> list[int]:
        """The processes of those with one of these roles that have made contact."""
        return list(dict.fromkeys(map(pid_of, self._addresses(*roles))))

    def _addresses(self, *roles: str) -> list[Address]:
        return [
            address
            for address, peer in self._enrolled.items()
            if address in self._identities
            and (peer.role in roles or ("caller" in roles and address in self._callers))
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
            address = _address(identity)
            if address in self._enrolled:
                self._take(address, identity, message)
            elif sum(item[0] == address for item in self._unknown) < _MOST_EARLY:
                self._unknown.append((address, identity, message))

    def _take(self, address: Address, identity: bytes, message: Any) -> None:
        peer = self._enrolled.get(address)
        if peer is None:  # it ended meanwhile
            return
        self._identities[address] = identity
        try:
            if type(message) not in _MAY_SEND[peer.role]:
                logger.warning("a %s said a %s", peer.role, type(message).__name__)
            elif isinstance(message, Acknowledged):
                self.acknowledgements.acknowledged(address, message.number)
            elif (service := self._services.get(type(message))) is not None:
                service(address, message)
            else:
                peer.handler(message)
        except Exception:
            logger.exception("a message could not be handled: %s", type(message).__name__)

    # --- out

    def send(self, address: Address, message: Any) -> None:
        """Queue a message for a process or a scheduler; one frame goes out a loop turn. Dropped
        when it never sent anything."""
        identity = self._identities.get(address)
        if identity is None:
            return
        self._router.post(identity, message)
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self.flush)

    def broadcast(self, message: Any, *roles: str) -> None:
        """Send a message to everybody with one of these roles."""
        for address in self._addresses(*roles):
            self.send(address, message)

    def announce(
        self, make: Callable[[int], Any], *roles: str, beside: Iterable[Hashable] = ()
    ) -> int:
        """Send what `make(number)` gives to everybody with one of these roles; the number, which
        each that lives is to acknowledge, and so is whoever is told `beside` them."""
        number = self.acknowledgements.begin([*self._addresses(*roles), *beside])
        self.broadcast(make(number), *roles)
        return number

    async def publish(self, make: Callable[[int], Any], *roles: str) -> None:
        """`announce`; returns once each that lives has acknowledged it."""
        await self.known(self.announce(make, *roles))

    async def known(self, number: int) -> None:
        """Return once each that lives has acknowledged what was announced with a number."""
        while not self.acknowledgements.know(number):
            await self.acknowledgements.news()

    def flush(self) -> None:
        """Send what is queued now, before a loop turn is over."""
        self._flushing = False
        self._router.flush()

    def close(self) -> None:
        """Flush and close the socket."""
        self._router.flush()
        self._loop.remove_reader(self._router.fd)
        self._router.close()


def _address(identity: bytes) -> Address:
    role, _, rest = identity.partition(b".")
    pid, number = last_number(identity), first_number(rest)
    return SchedulerAddress(pid, number) if role in _HOSTED and number else pid
