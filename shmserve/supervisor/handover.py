"""The handover of a server to a successor that was started beside it (`--take-over`).

new  loads its models ── go ──> old
     <── keep, for each region ──       from now on each sends the other its registrations
     owns the run directory             clients that look for a server find the new one
     <── accept ──────────────────      the old server's sequences have ended, and it drains
     accepts clients                    including those that waited at the sockets
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from shmserve.common.peers import credentials
from shmserve.common.tasks import either, in_background
from shmserve.errors import Unavailable
from shmserve.ipc import endpoints
from shmserve.ipc.transport.router import Listener, listening
from shmserve.supervisor.host.handover_link import HandoverLink, Offer, refuse
from shmserve.supervisor.host.listeners import Listeners
from shmserve.supervisor.host.run_directory import RunDirectory
from shmserve.supervisor.local_clients.server import LocalClientServer
from shmserve.supervisor.regions.region import KeptRegions
from shmserve.supervisor.regions.registry import RegionRegistry

logger = logging.getLogger(__name__)


_GO, _ACCEPT = "go", "accept"


@dataclass(slots=True, eq=False)
class Handover:
    """Both sides of a handover: the successor, which has an `offer`, and the predecessor.

    `_objection()` returns the reason why no successor may take over now, or "". `_on_followed()` is
    called when the successor has received everything. The predecessor then `is_followed` and exits.
    """

    run_dir: RunDirectory
    _listeners: Listeners
    _regions: RegionRegistry
    _kept: KeptRegions
    _local_clients: LocalClientServer
    _objection: Callable[[], str]
    _on_followed: Callable[[], None]
    is_followed: bool = field(init=False, default=False)
    _listener: Listener | None = field(init=False, default=None)
    _before: HandoverLink | None = field(init=False, default=None)
    _after: HandoverLink | None = field(init=False, default=None)
    _accepted: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _tasks: set[asyncio.Task[None]] = field(init=False, default_factory=set)

    def open(self) -> None:
        """Listen for a successor, and open the link to a predecessor.

        Raises:
            Unavailable: The run directory does not exist, or the host has no resources for a
                socket.
        """
        path = os.fspath(endpoints.handover(self.run_dir.path))
        self._listener = Listener(listening(socket.SOCK_SEQPACKET, path, 1))
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._ask_for_it)
        if self._listeners.offer is not None:
            self._before = HandoverLink(self._listeners.offer.link, self._obey)

    # --- the predecessor

    async def take(self) -> None:
        """Take over from the predecessor, if any, and wait until clients may be accepted.

        Raises:
            Unavailable: The predecessor has exited before it sent everything.
        """
        before, offer = self._before, self._listeners.offer
        if before is None or offer is None:
            return
        self._kept.mirror_to(before)
        await before.ask(_GO)
        try:
            if before.ended.done():
                raise FileNotFoundError
            self.run_dir.take()
        except OSError:
            raise Unavailable("the previous server has exited") from None
        self._listeners.lent = offer.lent
        logger.info(
            "%d registered regions were received from the previous server",
            len(self._regions.active()),
        )
        accepted = asyncio.ensure_future(self._accepted.wait())
        await either(accepted, before.ended)
        accepted.cancel()
        in_background(self._forget(before), self._tasks)

    async def _obey(self, verb: str, name: str, fds: list[int]) -> None:
        if verb == _ACCEPT:
            self._accepted.set()
        elif verb == _GO:
            await self._pass_all()
        else:
            await self._regions.apply(verb, name, fds)

    async def _forget(self, before: HandoverLink) -> None:
        await before.ended
        before.close()
        self._before = None
        self._kept.mirror_to(None)
        with suppress(OSError):
            self.run_dir.clear_before()
        logger.info("the previous server has exited")

    # --- the successor

    def _ask_for_it(self) -> None:
        assert self._listener is not None
        link = self._listener.accept()
        if link is None:
            return
        pid, uid, _ = credentials(link)
        objection = self._objection()
        if uid != os.geteuid():
            objection = "it is another user's"
        elif self._before is not None or self._after is not None:
            objection = "another server is about to take over already, or has just done so"
        if objection:
            refuse(link, objection)
            return
        try:
            self._offered(link).make()
        except OSError as error:
            refuse(link, f"its sockets cannot be passed: {error.strerror}")
            return
        logger.info("a successor (pid %d) has started, and takes over when it is ready", pid)
        self._after = HandoverLink(link, self._obey)
        in_background(self._watch(self._after), self._tasks)

    def _offered(self, link: socket.socket) -> Offer:
        all_of, local = self._listeners, self._local_clients.connections
        sockets = {"http": all_of.http, "grpc": all_of.grpc, "metrics": all_of.metrics}
        return Offer(link, {**sockets, "local": local.lent()}, all_of.lent, local.door)

    async def _watch(self, after: HandoverLink) -> None:
        await after.ended
        after.close()
        self._after = None
        self._kept.mirror_to(None)
        if not self.is_followed:
            logger.warning("the successor has exited before it took over; this server continues")

    async def _pass_all(self) -> None:
        after = self._after
        assert after is not None
        self._kept.mirror_to(after)
        for region in self._regions.active():
            self._kept.mirror(region)
            await after.settled()
        if not after.ended.done():
            self.is_followed = True
            self._listeners.lend_all()
            self._local_clients.connections.lend()
            logger.info("the successor takes over")
            self._on_followed()

    def let_successor_accept(self) -> None:
        """Let the successor accept clients. This server no longer accepts clients."""
        if self._after is not None:
            self._after.ask(_ACCEPT)

    def close(self) -> None:
        """Close the links, so that the other server detects the end of this one."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
        for link in (self._before, self._after):
            if link is not None:
                link.close()
        for task in list(self._tasks):
            task.cancel()
