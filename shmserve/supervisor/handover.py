"""The handover of a server to a successor that was started beside it (`--take-over`).

1. The successor has loaded its models, and sends "go".
2. The predecessor sends the registrations of its regions, one after the other. From now on,
   each server sends the other one its changes of registrations.
3. The successor moves into the run directory, so that clients that look for a server find it.
4. When the predecessor's sequences have ended, it stops accepting clients, and sends "accept".
5. The successor accepts clients, including those that wait at the shared sockets. The
   predecessor drains and exits.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from shmserve.common.peers import credentials
from shmserve.common.tasks import in_background, wait_any
from shmserve.errors import Unavailable
from shmserve.ipc import endpoints
from shmserve.ipc.transport.router import Listener, open_listening_socket
from shmserve.supervisor.host.handover_link import HandoverLink, Offer, refuse
from shmserve.supervisor.host.listeners import Listeners
from shmserve.supervisor.host.run_directory import RunDirectory
from shmserve.supervisor.local_clients.server import LocalClientServer
from shmserve.supervisor.regions.region import KeptRegions
from shmserve.supervisor.regions.registry import RegionRegistry

logger = logging.getLogger(__name__)


T = TypeVar("T")

_GO, _ACCEPT = "go", "accept"  # verbs of the messages between the servers
_LOST_PREDECESSOR = "the previous server has exited; start this one again, without --take-over"


@dataclass(slots=True, eq=False)
class Handover:
    """Both sides of a handover. A server whose listeners have an `offer` is a successor.

    `_refusal_reason()` returns the reason why no successor may take over now, or "".
    `_on_handed_over()` is called when the successor has received the regions. `has_successor` is
    then true, and this server exits.
    """

    run_dir: RunDirectory
    _listeners: Listeners
    _regions: RegionRegistry
    _kept_regions: KeptRegions
    _local_clients: LocalClientServer
    _refusal_reason: Callable[[], str]
    _on_handed_over: Callable[[], None]
    has_successor: bool = field(init=False, default=False)
    _listener: Listener | None = field(init=False, default=None)
    _predecessor: HandoverLink | None = field(init=False, default=None)
    _successor: HandoverLink | None = field(init=False, default=None)
    _accepted_event: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _tasks: set[asyncio.Task[None]] = field(init=False, default_factory=set)

    def open(self) -> None:
        """Listen for a successor, and open the link to a predecessor.

        Raises:
            Unavailable: The run directory does not exist, or the host has no resources for a
                socket.
        """
        path = os.fspath(endpoints.handover(self.run_dir.path))
        self._listener = Listener(open_listening_socket(socket.SOCK_SEQPACKET, path, 1))
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._on_successor_connected)
        if self._listeners.offer is not None:
            self._predecessor = HandoverLink(self._listeners.offer.link, self._execute)

    # --- the handover from a predecessor

    async def run_beside_predecessor(self, work: asyncio.Future[T]) -> T:
        """Wait for `work` and return its result. A predecessor, if any, must not exit meanwhile.

        Raises:
            Unavailable: The predecessor has exited before the work was done. Its last process has
                deleted this server's run directory.
        """
        if self._predecessor is not None:
            await wait_any(work, self._predecessor.end_future)
            if not work.done():
                raise Unavailable(_LOST_PREDECESSOR)
        return await work

    async def take_over(self) -> None:
        """Take over from the predecessor, if any, and wait until clients may be accepted.

        Raises:
            Unavailable: The predecessor has exited before it sent everything.
        """
        predecessor, offer = self._predecessor, self._listeners.offer
        if predecessor is None or offer is None:
            return
        self._kept_regions.mirror_to(predecessor)
        await predecessor.ask(_GO)
        try:
            if predecessor.end_future.done():
                raise FileNotFoundError
            self.run_dir.replace_predecessor()
        except OSError:
            raise Unavailable(_LOST_PREDECESSOR) from None
        self._listeners.shared_sockets = offer.shared
        count = len(self._regions.active_regions())
        logger.info("registrations of regions received from the previous server: %d", count)
        accepted_wait = asyncio.ensure_future(self._accepted_event.wait())
        await wait_any(accepted_wait, predecessor.end_future)
        accepted_wait.cancel()
        in_background(self._await_predecessor_exit(predecessor), self._tasks)

    async def _execute(self, verb: str, name: str, fds: list[int]) -> None:
        if verb == _ACCEPT:
            self._accepted_event.set()
        elif verb == _GO:
            await self._hand_over()
        else:
            await self._regions.apply(verb, name, fds)

    async def _await_predecessor_exit(self, predecessor: HandoverLink) -> None:
        await predecessor.end_future
        predecessor.close()
        self._predecessor = None
        self._kept_regions.mirror_to(None)
        with suppress(OSError):
            self.run_dir.clear_predecessor()
        logger.info("the previous server has exited")

    # --- the handover to a successor

    def _on_successor_connected(self) -> None:
        assert self._listener is not None
        link = self._listener.accept()
        if link is None:
            return
        pid, uid, _ = credentials(link)
        refusal_reason = self._refusal_reason()
        if uid != os.geteuid():
            refusal_reason = "it belongs to another user"
        elif self._predecessor is not None or self._successor is not None:
            refusal_reason = "another successor is taking over, or has just done so"
        if refusal_reason:
            refuse(link, refusal_reason)
            return
        try:
            self._offer(link).send()
        except OSError as error:
            refuse(link, f"its sockets cannot be passed: {error.strerror}")
            return
        logger.info("a successor (pid %d) has started, and takes over when it is ready", pid)
        self._successor = HandoverLink(link, self._execute)
        in_background(self._await_successor_exit(self._successor), self._tasks)

    def _offer(self, link: socket.socket) -> Offer:
        listeners, client_connections = self._listeners, self._local_clients.connections
        sockets = {"http": listeners.http, "grpc": listeners.grpc, "metrics": listeners.metrics}
        sockets["local"] = client_connections.shared_sockets()
        return Offer(link, sockets, listeners.shared_sockets, client_connections.client_listener)

    async def _await_successor_exit(self, successor: HandoverLink) -> None:
        await successor.end_future
        successor.close()
        self._successor = None
        self._kept_regions.mirror_to(None)
        if not self.has_successor:
            logger.warning("the successor has exited before it took over; this server continues")

    async def _hand_over(self) -> None:
        successor = self._successor
        assert successor is not None
        self._kept_regions.mirror_to(successor)
        for region in self._regions.active_regions():
            self._kept_regions.send_to_other_server(region)
            await successor.until_done()
        if not successor.end_future.done():
            self.has_successor = True
            self._listeners.share_all()
            self._local_clients.connections.share_listeners()
            logger.info("the server's successor takes over")
            self._on_handed_over()

    async def let_successor_accept(self) -> None:
        """Let the successor accept clients, and wait until the successor uses the run directory.

        This server must not end before that, because it would remove the directory.
        """
        if self._successor is not None:
            await self._successor.ask(_ACCEPT)

    def close(self) -> None:
        """Close the links, so that the other server detects the end of this server."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
        for link in (self._predecessor, self._successor):
            if link is not None:
                link.close()
        for task in list(self._tasks):
            task.cancel()
