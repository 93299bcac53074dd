"""The service for local clients: programs on this host that use `shmserve.client`.

    program ── Hello ──────────────> listener  a unix socket, with the credentials of the program
            <── Welcome, models ───            a number, a token, the scheduler of each model
            ── ShareMemory + fd ──>            memory of the program, usually a sealed memfd
            ── ShareDeviceMemory ──>           or device memory, by its handle
            <── changes of models ──           acknowledged, so that a reload loses no request
            ── end of connection ──>           all of its memory is released

A local client can submit requests and share memory for them, but cannot manage the server. The
client sends requests directly to the schedulers, which validate them
(scheduler/hosting/local_clients.py). The id of a shared memory is a MAC of its description,
by which schedulers verify that the client has shared the memory (`Capabilities`).
"""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import logging
import mmap
import os
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shmserve.common.peers import Peer
from shmserve.common.tasks import in_background
from shmserve.errors import InvalidArgument
from shmserve.ipc import endpoints
from shmserve.ipc.endpoints import Capabilities
from shmserve.ipc.memory.cuda_ipc import HANDLE_SIZE
from shmserve.ipc.memory.posix_shm import SharedObject, describe_object
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
from shmserve.ipc.messages.publications import (
    Acknowledged,
    MemoryDropped,
    OwnerExited,
    RegionDrained,
    RegionPublished,
    RegionUnregistered,
    ServerEnding,
)
from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.tensors.descriptors import CudaHandle, Memory, is_within, require_integer
from shmserve.ipc.transport import frames
from shmserve.ipc.transport.frames import MalformedMessage
from shmserve.supervisor.local_clients.connections import (
    LocalClient,
    LocalClientConnections,
    is_memory,
)
from shmserve.supervisor.processes.control_socket import (
    Acknowledgements,
    create_refusal,
    create_response,
)
from shmserve.supervisor.regions.opener import RegionOpener
from shmserve.supervisor.regions.region import OpenRegion
from shmserve.supervisor.regions.registry import Processes

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class LocalMemory:
    """The private regions of local clients, by memory id.

    A region ends when it is released or its client disconnects; workers then unmap it. Gateways
    list the regions under names that no request can use. Methods that share memory return the
    region's encoded description, and raise ShmserveError if the region is rejected.
    """

    _capabilities: Capabilities
    _opener: RegionOpener
    _processes: Processes
    _publish_event: Callable[[Any], None]
    _memory_numbers: itertools.count[int] = field(init=False, default_factory=itertools.count)
    _regions: dict[int, OpenRegion] = field(init=False, default_factory=dict)

    def __len__(self) -> int:
        return len(self._regions)

    def all(self) -> list[OpenRegion]:
        """Return the regions of all local clients."""
        return list(self._regions.values())

    def publications(self) -> Iterator[RegionPublished]:
        """Yield the messages that bring a new gateway up to date."""
        for region in self._regions.values():
            yield region.listing(0)

    def share(self, client: LocalClient, byte_size: int, pin: bool, fds: list[int]) -> bytes:
        """Register a client's memory, whose descriptor must be the only element of `fds`.

        The server then owns the descriptor and empties `fds`, unless the registration fails.

        Returns:
            The packed `Memory`.
        """
        if len(fds) != 1:
            raise InvalidArgument(f"expected 1 descriptor of shared memory, got {len(fds)}")
        (fd,) = fds
        number, uid = client.number, client.uid
        memfd = check_memory(fd, byte_size, is_trusted=uid in (0, os.geteuid()))
        sealed = is_sealed(fd)
        region = self._opener.adopt_memory(
            *(self._name(client), memfd, byte_size, Peer(uid), number), pin=pin, is_sealed=sealed
        )
        fields = (os.getpid(), fd, memfd.inode, byte_size, sealed, region.owner.copied, pin)
        region.memory_id = self._capabilities.memory_id(number, *fields)
        self._add_region(region)
        fds.clear()
        return Memory(region.memory_id, *fields).packed

    async def share_device(self, client: LocalClient, request: ShareDeviceMemory) -> bytes:
        """Share device memory by its handle, which a worker checks.

        The caller must handle a disconnection of the client during this call.
        """
        handle = CudaHandle(request.handle, request.device_id, request.device_uuid)
        if len(handle.raw) != HANDLE_SIZE or len(handle.uuid) not in (0, 16):
            raise InvalidArgument(
                f"expected a handle of {HANDLE_SIZE} bytes and a device UUID of 16 or 0, got "
                f"{len(handle.raw)} and {len(handle.uuid)}"
            )
        size = require_integer(request.byte_size, "byte_size")
        if not size or handle.device < 0:
            raise InvalidArgument(
                f"'byte_size' must be at least 1, got {size}; 'device_id' must be at least 0, got "
                f"{handle.device}"
            )
        number, uid = client.number, client.uid
        memory_id = self._capabilities.device_memory_id(
            number, next(self._memory_numbers), size, handle
        )
        memory = Memory.on_device(memory_id, size, handle)
        name = self._name(client)
        self._add_region(await self._opener.adopt_cuda(name, memory, Peer(uid), number))
        return memory.packed

    def _name(self, client: LocalClient) -> str:
        return f"shmserve.client {client.pid}.{next(self._memory_numbers)}"

    def _add_region(self, region: OpenRegion) -> None:
        self._regions[region.memory_id] = region
        self._publish_event(region.registration_event())
        self._processes.broadcast(region.listing(0), "gateway")

    def release(self, client_number: int, memory_id: int = 0, reason: str = "") -> None:
        """Release a region of a local client, or with `memory_id` 0 all regions of the client."""
        reason = reason if memory_id else "its program has disconnected"
        for region in list(self._regions.values()):
            if region.lease_holder == client_number and memory_id in (0, region.memory_id):
                del self._regions[region.memory_id]
                self._processes.broadcast(MemoryDropped(region.memory_id), "worker")
                self._processes.broadcast(RegionDrained(region.memory_id, 0), "gateway")
                self._publish_event(RegionUnregistered(region.name, reason))
                self._opener.close(region)

    def release_shrunk(self) -> None:
        """Release regions that lost pages, since a worker has accessed a missing page (SIGBUS)."""
        for region in self.all():
            if not region.owner.copied and region.has_shrunk():
                event = region.report_truncation()
                self._publish_event(event)
                self.release(region.lease_holder, region.memory_id, event.reason)

    def close(self) -> None:
        """Close every region."""
        for region in self._regions.values():
            self._opener.close(region)
        self._regions.clear()


def is_sealed(fd: int) -> bool:
    """Check whether a memfd is sealed against shrinking."""
    return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)


def check_memory(fd: int, byte_size: int, is_trusted: bool = True) -> SharedObject:
    """Check that workers can use the first `byte_size` bytes of the memory `fd`.

    Raises:
        InvalidArgument: The descriptor is no shared memory, the memory is too small or not
            reserved, or a worker may not open it. Only a trusted user may pass huge pages.
    """
    if not is_memory(fd):
        raise InvalidArgument("shared memory must be a memfd or an object in /dev/shm")
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & (fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL):
        raise InvalidArgument("a memfd that can be sealed must have the seal F_SEAL_SHRINK")
    memfd = describe_object(fd)
    status = os.fstat(fd)
    page_bytes = os.fstatvfs(fd).f_bsize
    if page_bytes != mmap.PAGESIZE and (not is_trusted or byte_size % page_bytes):
        raise InvalidArgument(
            "shared memory on huge pages is accepted only from the server's user or root, and only "
            "if 'byte_size' is a multiple of the size of a huge page"
        )
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR:
        raise InvalidArgument("shared memory must be open for reading and writing")
    if not byte_size > 0 or not is_within(0, byte_size, memfd.size):
        limit_text = f"{memfd.size} (the size of the shared memory)"
        raise InvalidArgument(f"'byte_size' must be from 1 to {limit_text}, got {byte_size}")
    if status.st_blocks * 512 < byte_size:
        raise InvalidArgument("memory must be reserved (posix_fallocate) before it is shared")
    if not os.access(f"/proc/self/fd/{fd}", os.R_OK | os.W_OK, effective_ids=True):
        raise InvalidArgument(f"the server may not read and write memory of uid {memfd.uid}")
    return memfd


_ACK_TIMEOUT_S = 1.0  # the longest time for which a local client that hangs delays a reload
# The fields of a model's configuration and of its tensors that local clients need.
_MODEL_FIELDS = ("name", "backend", "max_batch_size", "input", "output", "model_transaction_policy")
_TENSOR_FIELDS = ("name", "data_type", "dims", "reshape", "optional", "allow_ragged_batch")
_MAX_PACKET_BYTES = 4 * 1024 * 1024  # maximum bytes of a packet


class LocalClientServer:
    """The service for local clients in the supervisor.

    Args:
        read_snapshot: Returns the models and the health.
        on_disconnect: Called with the number of a client that has disconnected.
        load_on_demand: Loads a model by name, with a time limit in seconds.
        shared: Listeners that another server uses, too.
        predecessor_listener: The predecessor's listener, if this server takes over.
    """

    def __init__(
        self,
        run_dir: Path,
        group: int,
        capabilities: Capabilities,
        memory: LocalMemory,
        read_snapshot: Callable[[], Iterable[Any]],
        acknowledgements: Acknowledgements,
        on_disconnect: Callable[[int], None],
        load_on_demand: Callable[[str, float], Awaitable[None]],
        shared: Iterable[socket.socket] = (),  # listeners that other servers use, too
        predecessor_listener: socket.socket | None = None,
    ) -> None:
        """Open the listener for local clients."""
        self._capabilities = capabilities
        self._memory = memory
        self._read_snapshot = read_snapshot
        self._on_disconnect = on_disconnect
        self._load_on_demand = load_on_demand
        self._response_tasks: set[asyncio.Task[None]] = set()
        self._acknowledgements = acknowledgements
        self.connections = LocalClientConnections(
            run_dir, group, self._on_message, self._on_disconnected, shared, predecessor_listener
        )
        self._max_packet_bytes = min(self.connections.largest_packet, _MAX_PACKET_BYTES)

    async def redirect(self) -> None:
        """Redirect clients to the successor that serves at the shared listeners, if there are any.

        The call returns when all clients have acknowledged the redirection.
        """
        if not self.connections.close_shared():
            return
        number = self._acknowledgements.begin(self.numbers())
        self.announce(ServerEnding(number))
        await self._acknowledgements.until_acknowledged(number)

    def _on_disconnected(self, client_number: int) -> None:
        self._acknowledgements.remove_peer(client_number)
        self._on_disconnect(client_number)

    # --- messages to all clients

    def numbers(self) -> list[int]:
        """Return the numbers of the clients that have sent Hello."""
        return [client.number for client in self.connections.clients_after_hello()]

    def announce(self, message: Any) -> None:
        """Send a message that every local client has to acknowledge within a second."""
        client_numbers, number = self.numbers(), message.ack_number
        self.broadcast(message)
        loop, acknowledge = asyncio.get_running_loop(), self._acknowledgements.record_acknowledged
        for client_number in client_numbers:
            loop.call_later(_ACK_TIMEOUT_S, acknowledge, client_number, number)

    def broadcast(self, message: Any) -> None:
        """Send a message to every local client."""
        data = self._encode_packet(message, logging.WARNING)
        for client in self.connections.clients_after_hello():
            self.connections.send(client, data)

    def _encode_packet(self, message: Any, level: int = logging.DEBUG) -> bytes:
        """Encode a message as one packet.

        A model whose description exceeds a packet is withdrawn from local clients, which is logged
        with `level`.
        """
        data = frames.pack([_convert_for_clients(message)])
        if len(data) <= self._max_packet_bytes or not isinstance(message, m.ModelPublished):
            return data
        logger.log(
            level,
            "model '%s' version %s is not available to shmserve.client: the description of its "
            "inputs and outputs has %d bytes, but a message may have at most %d "
            "(net.core.wmem_default)",
            *(message.name, message.version, len(data), self._max_packet_bytes),
        )
        return frames.pack([m.ModelWithdrawn(message.name, message.version, message.ack_number)])

    # --- requests of a client

    def _on_message(self, client: LocalClient, message: Any, fds: list[int]) -> None:
        match message:
            case Hello(version=frames.VERSION) if not client.has_sent_hello:
                client.has_sent_hello = True
                welcome = Welcome(client.number, self._capabilities.token(client.number))
                for first_message in (welcome, *self._read_snapshot()):
                    self.connections.send(client, self._encode_packet(first_message))
            case Hello(version=version) if version != frames.VERSION:
                raise frames.VersionMismatch(version)
            case Acknowledged(number=number) if client.has_sent_hello:
                self._acknowledgements.record_acknowledged(client.number, number)
            case ShareMemory(number, size, pin) if client.has_sent_hello:
                # The request is handled immediately, since `fds` are closed afterwards.
                response: Answered | Refused
                try:
                    memory = self._memory.share(client, size, pin, fds)
                    response = Answered(number, {"memory": memory})
                except Exception as error:  # any exception, because the client waits
                    response = create_refusal(client.pid, message, error)
                self.connections.send(client, frames.pack([response]))
            case ShareDeviceMemory() if client.has_sent_hello:
                self._respond(client, message, self._share_device(client, message))
            case WantModel(_, name, timeout_s) if client.has_sent_hello:
                self._respond(client, message, self._load_on_demand(name, timeout_s))
            case WithdrawMemory(memory_id=memory_id) if client.has_sent_hello and memory_id:
                self._memory.release(client.number, memory_id)
            case _:
                raise MalformedMessage(f"unexpected message {type(message).__name__}")

    def _respond(self, client: LocalClient, request: Any, payload: Awaitable[Any]) -> None:
        """Respond with the result or the error of a coroutine."""

        async def respond() -> None:
            response = await create_response(client.pid, request, payload)
            if client.number in self.connections:
                self.connections.send(client, frames.pack([response]))

        in_background(respond(), self._response_tasks)

    async def _share_device(self, client: LocalClient, offer: ShareDeviceMemory) -> dict[str, Any]:
        memory = await self._memory.share_device(client, offer)
        if client.number not in self.connections:
            self._memory.release(client.number)
        return {"memory": memory}


def _convert_for_clients(message: Any) -> Any:
    match message:
        case m.ModelPublished(config=config, endpoint=endpoint):
            source = config.source
            fields = {key: source[key] for key in _MODEL_FIELDS if key in source}
            if config.ensemble_scheduling is not None:
                fields["ensemble_scheduling"] = {}
            for key in ("input", "output"):
                fields[key] = [_tensor_fields(tensor) for tensor in source.get(key, ())]
            client_config, convert = ModelSpec.of(fields), endpoints.for_local_clients
            return replace(message, config=client_config, metadata={}, endpoint=convert(endpoint))
        case m.SchedulerLost(endpoint, successor):
            convert = endpoints.for_local_clients
            return m.SchedulerLost(convert(endpoint), convert(successor))
        case m.ProcessExited(process):
            return OwnerExited(process)
        case _:
            return message


def _tensor_fields(tensor: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an input or output that are set."""
    return {key: tensor[key] for key in _TENSOR_FIELDS if tensor.get(key, False) is not False}
