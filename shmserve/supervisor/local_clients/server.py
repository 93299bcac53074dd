"""The local clients: programs on this host that use `shmserve.client`, and what each of them may
do.

    program ── Hello ──────────────> listener     a unix socket; the kernel says whose program it is
            <── Welcome, models ───           a number, a token, where each model's scheduler is
            ── ShareMemory + fd ──>           a memfd of its own, sealed
            ── ShareDeviceMemory ──>          or memory on a device, by its handle
            <── news of models ────           acknowledged, so that a reload loses no request
            ── end of connection ──>          everything it had is dropped, at once

The connection is the process's that made it: a child that inherited it does not keep it.
A local client can submit requests, and share its own memory for them; it manages nothing. Requests
do not come here: they go to the schedulers, which check them (shmserve/scheduler/local_clients.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shmserve.common import fd_limits
from shmserve.common.access.group_access import admit_group
from shmserve.common.access.peer_credentials import credentials
from shmserve.common.access.shm_access import NO_GROUP
from shmserve.common.tasks import in_background
from shmserve.errors import ShmserveError
from shmserve.ipc import endpoints
from shmserve.ipc import messages as m
from shmserve.ipc.capabilities import FIRST, Capabilities
from shmserve.ipc.transport import frames
from shmserve.ipc.transport.listener import Listener, listening, no_room
from shmserve.ipc.transport.records import MalformedMessage
from shmserve.supervisor.local_clients import fd_passing
from shmserve.supervisor.local_clients.memory import LocalMemory
from shmserve.supervisor.processes.acknowledgements import Acknowledgements
from shmserve.supervisor.regions.lent import LentRegions

logger = logging.getLogger(__name__)

_MOST_CLIENTS = 1024
_MOST_STRANGERS = 256  # who have not said hello; who has not for longest makes room
_BACKLOG = 128
_AT_ONCE = 64  # so many come in before those who did are listened to
_MOST_UNREAD = 4096  # messages for a local client that does not read; then it is shown out
_PATIENCE_S = 1.0  # a local client that is stopped must not hold up a reload for longer
# What a local client needs of a model's configuration, and of each input and output.
_TOLD = ("name", "max_batch_size", "input", "output", "model_transaction_policy")
_TOLD_OF_TENSOR = ("name", "data_type", "dims", "reshape", "optional", "allow_ragged_batch")
_LARGEST_TOLD = 4 * 1024 * 1024  # bytes of a packet
_OVERHEAD = 32  # bytes of a socket's buffer that a packet cannot have


@dataclass(slots=True, eq=False)
class _LocalClient:
    number: int
    uid: int
    link: socket.socket
    process: int  # a pidfd, or -1 where the process cannot be seen from here
    welcomed: bool = False
    unsent: deque[bytes] = field(default_factory=deque)


class LocalClientServer:
    """The listener and who has come in. `snapshot()` gives the models and the health;
    `on_left(number)` hears of an end."""

    def __init__(
        self,
        run_dir: Path,
        group: int,
        capabilities: Capabilities,
        lent: LentRegions,
        snapshot: Callable[[], Iterable[Any]],
        on_left: Callable[[int], None],
    ) -> None:
        """Open the listener: to programs of this user, or also of a group.

        Raises Unavailable when the run directory has no room for it.
        """
        self._capabilities = capabilities
        self._memory = LocalMemory(capabilities, lent)
        self._snapshot = snapshot
        self._on_left = on_left
        self._local_clients: dict[int, _LocalClient] = {}
        self._numbers = itertools.count(FIRST)
        self._checks: set[asyncio.Task[None]] = set()
        self._acknowledgements = Acknowledgements()
        self._loop = asyncio.get_running_loop()
        self._most = min(_MOST_CLIENTS, fd_limits.for_local_clients())
        path = endpoints.listener(run_dir)
        try:
            path.parent.mkdir(mode=0o700)
        except OSError as error:
            raise no_room(error) from None
        listener = listening(socket.SOCK_SEQPACKET, str(path), _BACKLOG)
        if group != NO_GROUP:
            admit_group(path.parent, group)
            admit_group(path, group)
        buffer = listener.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)  # that of every link, too
        self._largest = min(buffer - _OVERHEAD, _LARGEST_TOLD)
        self._listener = Listener(listener)
        self._loop.add_reader(self._listener.fileno(), self._accept)

    # --- news

    async def publish(self, make: Callable[[int], Any]) -> None:
        """Tell every local client what `make(number)` gives; returns once all have acknowledged it,
        or have been silent for a second."""
        number, done = self._acknowledgements.begin(
            {
                local_client.number
                for local_client in self._local_clients.values()
                if local_client.welcomed
            }
        )
        self.tell(make(number))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(done, _PATIENCE_S)

    def tell(self, message: Any) -> None:
        """Tell every local client."""
        data = self._packet(message, logging.WARNING)
        for local_client in list(self._local_clients.values()):
            if local_client.welcomed:
                self._send(local_client, data)

    def _packet(self, message: Any, level: int = logging.DEBUG) -> bytes:
        """What local clients are told. A model that no packet can tell of is none of theirs, and
        costs nobody the connection; `level` is how loudly that is said."""
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

    # --- coming and going

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            link = self._listener.accept()
            if link is None:
                return
            pid, uid, _ = credentials(link)
            strangers = [
                local_client
                for local_client in self._local_clients.values()
                if not local_client.welcomed
            ]
            if len(strangers) >= _MOST_STRANGERS:
                self._leave(strangers[0])
            if not self._has_room(uid):
                fd_passing.part(link)
                continue
            try:
                process = os.pidfd_open(pid) if pid else -1
            except OSError:  # gone already, or no descriptor left
                fd_passing.part(link)
                continue
            local_client = _LocalClient(next(self._numbers), uid, link, process)
            self._local_clients[local_client.number] = local_client
            self._loop.add_reader(link.fileno(), self._read, local_client)
            if process >= 0:
                self._loop.add_reader(process, self._leave, local_client)

    def _has_room(self, uid: int) -> bool:
        """One user's programs do not take all the places."""
        of_one = sum(local_client.uid == uid for local_client in self._local_clients.values())
        return len(self._local_clients) < self._most and of_one < fd_limits.share_of(self._most)

    def _leave(self, local_client: _LocalClient) -> None:
        if self._local_clients.pop(local_client.number, None) is None:
            return
        self._loop.remove_reader(local_client.link.fileno())
        self._loop.remove_writer(local_client.link.fileno())
        if local_client.process >= 0:
            self._loop.remove_reader(local_client.process)
            os.close(local_client.process)
        self._acknowledgements.exited(local_client.number)
        fd_passing.part(
            local_client.link
        )  # before the schedulers cut it off: so it sees why they do
        if local_client.welcomed:
            self._on_left(local_client.number)

    def close(self) -> None:
        """Show everybody out and close the listener."""
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        for local_client in list(self._local_clients.values()):
            self._leave(local_client)

    # --- out

    def _send(self, local_client: _LocalClient, data: bytes) -> None:
        local_client.unsent.append(data)
        if len(local_client.unsent) > _MOST_UNREAD:
            logger.warning("a client program does not read what it is told: disconnected")
            self._leave(local_client)
        elif len(local_client.unsent) == 1:
            self._flush(local_client)

    def _flush(self, local_client: _LocalClient) -> None:
        while local_client.unsent:
            try:
                local_client.link.send(local_client.unsent[0], socket.MSG_NOSIGNAL)
            except BlockingIOError:
                self._loop.add_writer(local_client.link.fileno(), self._flush, local_client)
                return
            except OSError:
                self._leave(local_client)
                return
            local_client.unsent.popleft()
        self._loop.remove_writer(local_client.link.fileno())

    # --- in

    def _read(self, local_client: _LocalClient) -> None:
        try:
            data, fds = fd_passing.receive(local_client.link)
        except BlockingIOError:
            return
        except OSError:
            self._leave(local_client)
            return
        try:
            if not data:
                self._leave(local_client)
                return
            for message in frames.unpack(data):
                if local_client.number not in self._local_clients:
                    return  # it left before it was answered: what it shares now, nobody gives back
                self._take(local_client, message, fds)
        except MalformedMessage as error:
            logger.warning("a client program sent what is no message: %s", error)
            self._leave(local_client)
        finally:
            fd_passing.let_go(fds)

    def _take(self, local_client: _LocalClient, message: Any, fds: list[int]) -> None:
        match message:
            case m.Hello(version=frames.VERSION) if not local_client.welcomed:
                local_client.welcomed = True
                welcome = m.Welcome(
                    local_client.number, self._capabilities.token(local_client.number)
                )
                for item in (welcome, *self._snapshot()):
                    self._send(local_client, self._packet(item))
            case m.Acknowledged(number=number) if local_client.welcomed:
                self._acknowledgements.acknowledged(local_client.number, number)
            case m.ShareMemory(number, size, pin) if local_client.welcomed:
                answer: Any
                try:
                    answer = m.Answered(
                        number,
                        {
                            "memory": self._memory.share(
                                local_client.number, local_client.uid, size, pin, fds
                            )
                        },
                    )
                except ShmserveError as error:
                    answer = m.Refused(number, error.code, error.message)
                self._send(local_client, frames.pack([answer]))
            case m.ShareDeviceMemory() if local_client.welcomed:
                in_background(self._answer_device(local_client, message), self._checks)
            case m.WithdrawMemory(memory_id=memory_id) if local_client.welcomed and memory_id:
                self._memory.give_back(local_client.number, memory_id)
            case _:
                raise MalformedMessage(f"an unexpected {type(message).__name__}")

    async def _answer_device(self, local_client: _LocalClient, asked: m.ShareDeviceMemory) -> None:
        answer: Any
        try:
            memory = await self._memory.share_device(local_client.number, local_client.uid, asked)
            if local_client.number not in self._local_clients:
                self._memory.give_back(local_client.number)
            answer = m.Answered(asked.id, {"memory": memory})
        except ShmserveError as error:
            answer = m.Refused(asked.id, error.code, error.message)
        if local_client.number in self._local_clients:
            self._send(local_client, frames.pack([answer]))


def _for_local_clients(message: Any) -> Any:
    match message:
        case m.ModelPublished(config=config, endpoint=endpoint):
            told = {key: config[key] for key in _TOLD if key in config}
            for which in ("input", "output"):
                told[which] = [_brief(tensor) for tensor in config.get(which, ())]
            local_clients = endpoints.for_local_clients(endpoint)
            return replace(message, config=told, metadata={}, endpoint=local_clients)
        case m.SchedulerLost(endpoint, successor):
            return m.SchedulerLost(
                endpoints.for_local_clients(endpoint), endpoints.for_local_clients(successor)
            )
        case _:
            return message


def _brief(tensor: dict[str, Any]) -> dict[str, Any]:
    """An input or output without what is not set."""
    return {key: tensor[key] for key in _TOLD_OF_TENSOR if tensor.get(key, False) is not False}
