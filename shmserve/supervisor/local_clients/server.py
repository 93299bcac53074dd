"""The service for local clients: programs on this host that use `shmserve.client`.

    program ── Hello ──────────────> listener  a unix socket, with the credentials of the program
            <── Welcome, models ───            a number, a token, the scheduler of each model
            ── ShareMemory + fd ──>            memory of the program, usually a sealed memfd
            ── ShareDeviceMemory ──>           or device memory, by its handle
            <── changes of models ──           acknowledged, so that a reload loses no request
            ── end of connection ──>           all of its memory is released

A local client can submit requests and share memory for them, but cannot manage the server. The
client sends requests directly to the schedulers, which validate them
(scheduler/hosting/local_clients.py).
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from shmserve.common.tasks import in_background
from shmserve.errors import ShmserveError
from shmserve.ipc import endpoints
from shmserve.ipc.endpoints import Capabilities
from shmserve.ipc.messages import publications as m
from shmserve.ipc.messages.control_requests import (
    Answered,
    Hello,
    Refused,
    ShareDeviceMemory,
    ShareMemory,
    WantModel,
    Welcome,
    WithdrawMemory,
)
from shmserve.ipc.messages.publications import Acknowledged, OwnerExited, ServerEnding
from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.transport import frames
from shmserve.ipc.transport.records import MalformedMessage
from shmserve.supervisor.local_clients.connections import LocalClient, LocalClientConnections
from shmserve.supervisor.local_clients.memory import LocalMemory
from shmserve.supervisor.processes.control_socket import Acknowledgements

logger = logging.getLogger(__name__)

_PATIENCE_S = 1.0  # the longest delay of a reload by a stopped local client
# The fields of a model's configuration and of its tensors that local clients need.
_MODEL_FIELDS = ("name", "max_batch_size", "input", "output", "model_transaction_policy")
_TENSOR_FIELDS = ("name", "data_type", "dims", "reshape", "optional", "allow_ragged_batch")
_LARGEST_PACKET = 4 * 1024 * 1024  # bytes of a packet


class LocalClientServer:
    """The supervisor's side of the protocol.

    Args:
        snapshot: Returns the models and the health.
        on_disconnect: Called with the number of a client that has disconnected.
    """

    def __init__(
        self,
        run_dir: Path,
        group: int,
        capabilities: Capabilities,
        memory: LocalMemory,
        snapshot: Callable[[], Iterable[Any]],
        acknowledgements: Acknowledgements,
        on_disconnect: Callable[[int], None],
        load_on_demand: Callable[[str, float], Awaitable[None]],
        lent: Iterable[socket.socket] = (),
        door: socket.socket | None = None,
    ) -> None:
        """Open the listener."""
        self._capabilities = capabilities
        self._memory = memory
        self._snapshot = snapshot
        self._on_disconnect = on_disconnect
        self._load_on_demand = load_on_demand
        self._checks: set[asyncio.Task[None]] = set()
        self._acknowledgements = acknowledgements
        self.connections = LocalClientConnections(
            run_dir, group, self._take, self._disconnected, lent, door
        )
        self._largest = min(self.connections.largest_packet, _LARGEST_PACKET)

    async def redirect(self) -> None:
        """Redirect clients to the successor that serves at the lent listeners, if there are any.

        The call returns when all clients have acknowledged the redirection.
        """
        if not self.connections.refuse():
            return
        number = self._acknowledgements.begin(self.numbers())
        self.announce(ServerEnding(number))
        while not self._acknowledgements.know(number):
            await self._acknowledgements.news()

    def _disconnected(self, number: int) -> None:
        self._acknowledgements.exited(number)
        self._on_disconnect(number)

    # --- models and health, to all

    def numbers(self) -> list[int]:
        """Return the numbers of the welcomed clients."""
        return [client.number for client in self.connections.welcomed()]

    def announce(self, message: Any) -> None:
        """Send a message that every local client has to acknowledge within a second."""
        clients, number = self.numbers(), message.acknowledge
        self.broadcast(message)
        loop, acknowledged = asyncio.get_running_loop(), self._acknowledgements.acknowledged
        for client in clients:
            loop.call_later(_PATIENCE_S, acknowledged, client, number)

    def broadcast(self, message: Any) -> None:
        """Send a message to every local client."""
        data = self._packet(message, logging.WARNING)
        for client in self.connections.welcomed():
            self.connections.send(client, data)

    def _packet(self, message: Any, level: int = logging.DEBUG) -> bytes:
        """Encode a message as one packet.

        A model whose description exceeds a packet is withdrawn from local clients, which is logged
        with `level`.
        """
        data = frames.pack([_for_local_clients(message)])
        if len(data) <= self._largest or not isinstance(message, m.ModelPublished):
            return data
        logger.log(
            level,
            "model '%s' version %s is not for shmserve.client: its inputs and outputs take %d bytes"
            " to describe, and a socket carries %d (net.core.wmem_default)",
            *(message.name, message.version, len(data), self._largest),
        )
        return frames.pack([m.ModelWithdrawn(message.name, message.version, message.acknowledge)])

    # --- requests of one

    def _take(self, client: LocalClient, message: Any, fds: list[int]) -> None:
        match message:
            case Hello(version=frames.VERSION) if not client.welcomed:
                client.welcomed = True
                welcome = Welcome(client.number, self._capabilities.token(client.number))
                for item in (welcome, *self._snapshot()):
                    self.connections.send(client, self._packet(item))
            case Hello(version=version) if version != frames.VERSION:
                raise frames.OtherVersion(version)
            case Acknowledged(number=number) if client.welcomed:
                self._acknowledgements.acknowledged(client.number, number)
            case ShareMemory(number, size, pin) if client.welcomed:
                # At once, since `fds` are closed afterwards.
                response: Answered | Refused
                try:
                    memory = self._memory.share(client, size, pin, fds)
                    response = Answered(number, {"memory": memory})
                except ShmserveError as error:
                    response = Refused.of(number, error)
                self.connections.send(client, frames.pack([response]))
            case ShareDeviceMemory() if client.welcomed:
                self._respond(client, message.id, self._share_device(client, message))
            case WantModel(number, name, patience_s) if client.welcomed:
                self._respond(client, number, self._want(name, patience_s))
            case WithdrawMemory(memory_id=memory_id) if client.welcomed and memory_id:
                self._memory.release(client.number, memory_id)
            case _:
                raise MalformedMessage(f"an unexpected {type(message).__name__}")

    def _respond(
        self, client: LocalClient, number: int, work: Coroutine[Any, Any, dict[str, Any]]
    ) -> None:
        """Respond with the result or the error of a coroutine."""

        async def respond() -> None:
            response: Answered | Refused
            try:
                response = Answered(number, await work)
            except ShmserveError as error:
                response = Refused.of(number, error)
            if client.number in self.connections:
                self.connections.send(client, frames.pack([response]))

        in_background(respond(), self._checks)

    async def _share_device(
        self, client: LocalClient, request: ShareDeviceMemory
    ) -> dict[str, Any]:
        memory = await self._memory.share_device(client, request)
        if client.number not in self.connections:
            self._memory.release(client.number)
        return {"memory": memory}

    async def _want(self, name: str, patience_s: float) -> dict[str, Any]:
        await self._load_on_demand(name, patience_s)
        return {}


def _for_local_clients(message: Any) -> Any:
    match message:
        case m.ModelPublished(config=config, endpoint=endpoint):
            source = config.source
            fields = {key: source[key] for key in _MODEL_FIELDS if key in source}
            for which in ("input", "output"):
                fields[which] = [_brief(tensor) for tensor in source.get(which, ())]
            brief, local_clients = ModelSpec.of(fields), endpoints.for_local_clients(endpoint)
            return replace(message, config=brief, metadata={}, endpoint=local_clients)
        case m.SchedulerLost(endpoint, successor):
            return m.SchedulerLost(
                endpoints.for_local_clients(endpoint), endpoints.for_local_clients(successor)
            )
        case m.ProcessExited(process):
            return OwnerExited(process)
        case _:
            return message


def _brief(tensor: dict[str, Any]) -> dict[str, Any]:
    """Return the set fields of an input or output."""
    return {key: tensor[key] for key in _TENSOR_FIELDS if tensor.get(key, False) is not False}
