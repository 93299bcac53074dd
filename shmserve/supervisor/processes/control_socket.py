"""The control socket, which connects the supervisor and its processes, and the settings sent by it.

`register_peer` routes the messages of a process or of a scheduler to the handler of its address.
Requests to the control plane are routed to their service (`serve`, `serve_requests`). An
announcement is complete once all receivers have acknowledged it (`Acknowledgements`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, get_args

from shmserve import logs
from shmserve.common.tasks import in_background
from shmserve.common.trace_settings import TraceSettings
from shmserve.errors import Internal, InvalidArgument, ShmserveError
from shmserve.ipc.messages.control_requests import Answered, Refused
from shmserve.ipc.messages.publications import Acknowledged
from shmserve.ipc.messages.supervision import (
    RequestTraced,
    SetLogging,
    SetTracing,
    Started,
    WorkerStarted,
)
from shmserve.ipc.messages.unions import (
    EnsembleToSupervisor,
    GatewayToSupervisor,
    HostToSupervisor,
    SchedulerToSupervisor,
    WorkerToSupervisor,
    WorkspaceToSupervisor,
)
from shmserve.ipc.transport.router import PeerCredRouter, leading_pid, trailing_pid
from shmserve.logs import LogSettings

logger = logging.getLogger(__name__)

# Messages that a process may send, by its role. A worker runs a model's code, which is not trusted.
_MAY_SEND = {
    "gateway": frozenset(get_args(GatewayToSupervisor)),
    "host": frozenset(get_args(HostToSupervisor)),
    "scheduler": frozenset(get_args(SchedulerToSupervisor)),
    "ensemble": frozenset(get_args(EnsembleToSupervisor)),
    "worker": frozenset(get_args(WorkerToSupervisor)),
    "workspace": frozenset({WorkspaceToSupervisor}),
}
_HOSTED_ROLES = (b"scheduler", b"ensemble")
_MAX_EARLY_MESSAGES = 64  # maximum messages queued for addresses that are not registered yet
_MAX_EARLY_PER_ADDRESS = 4  # maximum early messages queued for each address
_MAX_READS = 64  # maximum messages read at once, since a peer may never stop sending


class SchedulerAddress(NamedTuple):
    """The address of a scheduler: its number, and the process that hosts it."""

    pid: int
    number: int


# The address of a process is its pid.
Address = int | SchedulerAddress
# Handles a request of the process `pid`, and returns the payload of the response.
RequestHandler = Callable[[int, Any], Awaitable[dict[str, Any] | None]]
_FIRST_MESSAGES = Started | WorkerStarted


def pid_of(address: Address) -> int:
    """Return the pid in an address: a process's own, or that of a scheduler's host process."""
    return address if isinstance(address, int) else address.pid


async def create_response(
    pid: int, request: Any, payload: Awaitable[dict[str, Any] | None]
) -> Answered | Refused:
    """Return the response to a request of process `pid`: its payload, or the error of `payload`."""
    try:
        return Answered(request.id, await payload or {})
    except Exception as error:  # any exception, because the sender waits for the response
        return create_refusal(pid, request, error)


def create_refusal(pid: int, request: Any, error: Exception) -> Refused:
    """Return the response to a request of process `pid` that failed; log unexpected errors."""
    if isinstance(error, ShmserveError):
        return Refused.of(request.id, error)
    request_type = type(request).__name__
    logger.error("the request %s of process %d failed", request_type, pid, exc_info=error)
    return Refused.of(request.id, Internal())


class Acknowledgements:
    """The announced changes by number, with the peers that have not acknowledged them.

    A change is removed once every peer has acknowledged it.
    """

    def __init__(self) -> None:
        self._message_numbers = itertools.count(1)
        self._missing_peers: dict[int, set[Hashable]] = {}
        self._change_acknowledged = asyncio.Event()

    def begin(self, peers: Iterable[Hashable]) -> int:
        """Register a change that is sent to these peers, and return its number."""
        number = next(self._message_numbers)
        missing_peers = set(peers)
        if missing_peers:
            self._missing_peers[number] = missing_peers
        return number

    def record_acknowledged(self, peer: Hashable, number: int) -> None:
        """Record that `peer` has acknowledged a change, or no longer has to."""
        missing_peers = self._missing_peers.get(number, set())
        missing_peers.discard(peer)
        if not missing_peers and self._missing_peers.pop(number, None) is not None:
            self._change_acknowledged.set()

    def remove_peer(self, peer: Hashable) -> None:
        """Stop waiting for the acknowledgements of a peer that has exited."""
        for number in list(self._missing_peers):
            self.record_acknowledged(peer, number)

    def missing(self, number: int) -> set[Hashable]:
        """Return the peers that have not acknowledged a change."""
        return self._missing_peers.get(number, set())

    def is_acknowledged(self, number: int) -> bool:
        """Return whether each live peer has acknowledged a change."""
        return number not in self._missing_peers

    async def until_next_complete(self) -> None:
        """Wait until the next change, whichever it is, has been acknowledged by all peers."""
        self._change_acknowledged.clear()
        await self._change_acknowledged.wait()

    async def until_acknowledged(self, number: int) -> None:
        """Wait until every live peer has acknowledged a change."""
        while number in self._missing_peers:
            await self.until_next_complete()


@dataclass(frozen=True, slots=True)
class _Peer:
    role: str
    handler: Callable[[Any], None]


class ControlSocket:
    """The supervisor's socket for messages with its processes, in the event loop.

    The routing identity of a process starts with its role and ends with its pid; that of a
    scheduler is "role.number.pid". The role of a registered address decides which messages it may
    send, since a model's code can connect, too. Messages that a process sends shortly before its
    registration are queued.

    Attributes:
        acknowledgements: The announced changes.
        on_started: Called with the address and the role of a process that has started.
        request_tasks: The tasks that handle requests.
    """

    def __init__(self, endpoint: str) -> None:
        self._router = PeerCredRouter(endpoint, trailing_pid)
        self._peers: dict[Address, _Peer] = {}
        self._callers: set[Address] = set()  # workers whose models call models
        self._handlers_by_type: dict[type[Any], Callable[[Any, Any], None]] = {}
        self.acknowledgements = Acknowledgements()
        self.on_started: list[Callable[[Address, str], None]] = []
        self.request_tasks: set[asyncio.Task[None]] = set()
        self._identities: dict[Address, bytes] = {}  # ZeroMQ identities
        self._early_messages: deque[tuple[Address, bytes, Any]] = deque(maxlen=_MAX_EARLY_MESSAGES)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._router.fd, self._receive)
        self._is_flushing = False

    # --- peers

    def register_peer(self, address: Address, role: str, handler: Callable[[Any], None]) -> None:
        """Route the messages of a process or scheduler, including queued ones, to `handler`.

        Args:
            address: The address of the process or scheduler.
            role: "gateway", "host", "scheduler", "ensemble", "worker" or "workspace".
            handler: Receives the messages that `serve` routes to no other handler.
        """
        self._peers[address] = _Peer(role, handler)
        early_messages = [item for item in self._early_messages if item[0] == address]
        for item in early_messages:
            self._early_messages.remove(item)
            self._handle_registered(*item)

    def add_caller(self, address: Address) -> None:
        """Grant a worker that calls models the role "caller", which receives changes of models."""
        if address in self._peers:
            self._callers.add(address)

    def serve(self, types: Iterable[type[Any]], handler: Callable[[Any, Any], None]) -> None:
        """Route messages of these types from all peers to `handler(address, message)`."""
        self._handlers_by_type.update(dict.fromkeys(types, handler))

    def serve_requests(self, types: Iterable[type[Any]], handle: RequestHandler) -> None:
        """Handle requests of these types; respond `Answered`, or `Refused` if `handle` fails."""

        def start(pid: int, request: Any) -> None:
            in_background(self._respond(handle, pid, request), self.request_tasks)

        self.serve(types, start)

    async def _respond(self, handle: RequestHandler, pid: int, request: Any) -> None:
        self.send(pid, await create_response(pid, request, handle(pid, request)))

    def remove_process(self, pid: int) -> str:
        """Withdraw all addresses of a process that has exited, after handling its last messages.

        Returns:
            The role of the process, or "" if it was not registered.
        """
        self.receive_all()
        peer = self._peers.get(pid)
        for address in [address for address in self._peers if pid_of(address) == pid]:
            self.withdraw(address)
        return "" if peer is None else peer.role

    def withdraw(self, address: Address) -> None:
        """Stop routing messages from and to an address."""
        self._peers.pop(address, None)
        self._callers.discard(address)
        self._identities.pop(address, None)
        self.acknowledgements.remove_peer(address)

    def connected(self, address: Address) -> bool:
        """Return whether a message was received from an address."""
        return address in self._identities

    def pids(self, *roles: str) -> list[int]:
        """Return the pids of the processes with one of these roles that have sent a message."""
        return list(dict.fromkeys(map(pid_of, self._addresses(*roles))))

    def _addresses(self, *roles: str) -> list[Address]:
        callers: set[Address] = self._callers if "caller" in roles else set()
        return [
            address
            for address, peer in self._peers.items()
            if address in self._identities and (peer.role in roles or address in callers)
        ]

    # --- received messages

    def receive_all(self) -> None:
        """Handle the received messages, in at most `_MAX_READS` reads."""
        for _ in range(_MAX_READS):
            if not self._router.wait(0):
                return
            self._receive()

    def _receive(self) -> None:
        for identity, message in self._router.receive():
            address = _parse_address(identity)
            if address in self._peers:
                self._handle_registered(address, identity, message)
            elif sum(item[0] == address for item in self._early_messages) < _MAX_EARLY_PER_ADDRESS:
                self._early_messages.append((address, identity, message))

    def _handle_registered(self, address: Address, identity: bytes, message: Any) -> None:
        peer = self._peers.get(address)
        if peer is None:  # the process exited in the meantime
            return
        self._identities[address] = identity
        try:
            if type(message) not in _MAY_SEND[peer.role]:
                logger.warning("unexpected message from %s: %s", peer.role, type(message).__name__)
            elif isinstance(message, Acknowledged):
                self.acknowledgements.record_acknowledged(address, message.number)
            elif (handler := self._handlers_by_type.get(type(message))) is not None:
                handler(address, message)
            else:
                if isinstance(message, _FIRST_MESSAGES):
                    for on_started in self.on_started:
                        on_started(address, peer.role)
                peer.handler(message)
        except Exception:
            text = "the message %s from a %s could not be handled; it is not repeated"
            logger.exception(text, type(message).__name__, peer.role)

    # --- sent messages

    def send(self, address: Address, message: Any) -> None:
        """Queue a message; all messages of one turn of the event loop are sent in one frame.

        The message is dropped if nothing was received from the address.
        """
        identity = self._identities.get(address)
        if identity is None:
            return
        self._router.post(identity, message)
        if not self._is_flushing:
            self._is_flushing = True
            self._loop.call_soon(self.flush)

    def broadcast(self, message: Any, *roles: str) -> None:
        """Send a message to all peers with one of these roles."""
        for address in self._addresses(*roles):
            self.send(address, message)

    def announce(
        self, make_message: Callable[[int], Any], *roles: str, extra_peers: Iterable[Hashable] = ()
    ) -> int:
        """Send `make_message(number)` to all peers with one of these roles, and return the number.

        The peers acknowledge the number. The `extra_peers`, to which the caller sends the message,
        acknowledge it, too.
        """
        number = self.acknowledgements.begin([*self._addresses(*roles), *extra_peers])
        self.broadcast(make_message(number), *roles)
        return number

    async def publish(self, make_message: Callable[[int], Any], *roles: str) -> None:
        """Announce a change, and wait until every live peer has acknowledged it."""
        await self.acknowledgements.until_acknowledged(self.announce(make_message, *roles))

    def flush(self) -> None:
        """Send the queued messages now, before the end of the loop's turn."""
        self._is_flushing = False
        self._router.flush()

    def close(self) -> None:
        """Flush and close the socket."""
        self._router.flush()
        self._loop.remove_reader(self._router.fd)
        self._router.close()


def _parse_address(identity: bytes) -> Address:
    role, _, remainder = identity.partition(b".")
    pid, number = trailing_pid(identity), leading_pid(remainder)
    return SchedulerAddress(pid, number) if role in _HOSTED_ROLES and number else pid


@dataclass(slots=True, eq=False)
class LogControl:
    """The log settings of the server, which are sent to every process."""

    _control: ControlSocket
    settings: LogSettings

    def change(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Change settings in every process; return all settings by name."""
        settings = replace(self.settings, **changes)
        if settings != self.settings:
            logger.info("changed log settings: %s", changes)
            self.settings = settings
            logs.apply(settings)
            self._control.broadcast(SetLogging(asdict(settings)), "gateway", "host", "worker")
        return asdict(settings)

    def on_started(self, address: Address, _role: str) -> None:
        """Send the settings to a process that has started, since they may have changed."""
        self._control.send(address, SetLogging(asdict(self.settings)))


@dataclass(slots=True, eq=False)
class TraceControl:
    """The trace settings of the server: those at its start, and the changes of clients by model.

    The name "" stands for all models without settings of their own.
    """

    _control: ControlSocket
    _start_settings: TraceSettings
    _slow_request_ms: int = 0
    _changes: dict[str, dict[str, Any]] = field(default_factory=dict)

    def change(self, model: str, changes: dict[str, Any]) -> dict[str, list[str]]:
        """Change settings of a model, or of all models ("").

        Args:
            model: The name of the model, or "".
            changes: Values by name. None resets a setting.

        Returns:
            The settings of the model as the protocol shows them.

        Raises:
            InvalidArgument: The level is not OFF, but requests would not be traced.
        """
        if changes:
            previous_changes = self._changes
            merged_changes = (previous_changes.get(model, {}) | changes).items()
            kept_changes = {name: value for name, value in merged_changes if value is not None}
            self._changes = {**previous_changes, model: kept_changes}
            if problem := self._settings_of(model).problem:
                self._changes = previous_changes
                raise InvalidArgument(f"Attempting to set invalid trace setting :{problem}")
            logger.info("changed trace settings of %s: %s", model or "all models", changes)
            self._control.broadcast(self._tracing_message(), "gateway", "scheduler", "ensemble")
        return self._settings_of(model).as_string_lists()

    def _settings_of(self, model: str) -> TraceSettings:
        common = self._start_settings.with_changes(self._changes.get("", {}))
        return common.with_changes(self._changes.get(model, {})) if model else common

    def _tracing_message(self) -> SetTracing:
        settings = {name: asdict(self._settings_of(name)) for name in ("", *self._changes)}
        return SetTracing(settings, self._slow_request_ms)

    def on_started(self, address: Address, role: str) -> None:
        """Send the settings to a gateway that has started."""
        if role == "gateway":
            self.send_settings(address)

    def send_settings(self, address: Address) -> None:
        """Send the settings to a gateway or scheduler, unless they are the defaults."""
        if self._start_settings.is_on or self._changes or self._slow_request_ms:
            self._control.send(address, self._tracing_message())

    def on_traced(self, _: Address, message: RequestTraced) -> None:
        """Forward the trace of a local client's request to a gateway, which writes traces."""
        for pid in self._control.pids("gateway")[:1]:
            self._control.send(pid, message)
