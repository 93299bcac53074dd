"""The supervision of processes that the server always has, gateways and holders of workspaces: each
is started again, with a backoff, when it dies.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from shmserve.errors import ShmserveError, Unavailable
from shmserve.supervisor.context import SupervisorContext
from shmserve.supervisor.processes.table import Child, RestartBackoff

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class KeptProcess:
    """One of them, or the place where the next one will be; `contact` once the first has made
    contact."""

    name: str
    contact: asyncio.Future[None]
    child: Child | None = None
    started: float = 0.0
    backoff: RestartBackoff = field(default_factory=RestartBackoff)


class KeptProcesses(ABC):
    """All processes of one role, by these names."""

    role: ClassVar[str]

    def __init__(self, context: SupervisorContext, names: Iterable[str]) -> None:
        loop = asyncio.get_running_loop()
        self._context = context
        self._kept = [KeptProcess(name, loop.create_future()) for name in names]
        self._stopping = False

    @abstractmethod
    async def _spawn(self, name: str, title: str) -> Child:
        """Start the process of this name."""

    @abstractmethod
    def _received(self, kept: KeptProcess, child: Child, message: Any) -> None:
        """Take a message from a process."""

    def _is_hopeless(self, child: Child) -> bool:
        """Whether one that ended before its first contact would end again."""
        return True

    async def start(self) -> None:
        """Start every one; returns when all have made contact.

        Raises Unavailable when one cannot run here at all; its log says why.
        """
        await asyncio.gather(*map(self._start, self._kept))
        await asyncio.gather(*(kept.contact for kept in self._kept))

    async def _start(self, kept: KeptProcess) -> None:
        kept.started = time.monotonic()
        child = kept.child = await self._spawn(kept.name, f"{self.role} {kept.name}")
        self._context.enrol(child.pid, self.role, partial(self._received, kept, child))
        child.exited.add_done_callback(partial(self._exited, kept, child))

    def _exited(self, kept: KeptProcess, child: Child, _: object) -> None:
        """Start a process again that has ended."""
        if self._stopping:
            return
        if not kept.contact.done() and self._is_hopeless(child):
            kept.contact.set_exception(Unavailable(f"{child.title} ended at its start"))
            kept.contact.exception()  # retrieved, also when nobody waits any more
        else:
            logger.error("%s ended (%s); starting it again", child.title, child.reason)
            self._context.background(self._restart(kept))

    async def _restart(self, kept: KeptProcess) -> None:
        await asyncio.sleep(kept.backoff.pause_s(time.monotonic() - kept.started))
        if self._stopping:
            return
        try:
            await self._start(kept)
        except (ShmserveError, OSError) as error:  # of no descriptor or memory left, too
            logger.error("%s %s could not be started: %s", self.role, kept.name, error)
            self._context.background(self._restart(kept))

    def retire(self) -> None:
        """Start none again: the server ends."""
        self._stopping = True
