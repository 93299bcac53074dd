"""The watchdog of a service manager: the server says that it is alive only when every gateway and
every process that hosts schedulers has acknowledged a ping since the last time.

A process that is gone or stopped is replaced by the server itself. This is for one that hangs, and
for the supervisor: the manager ends the server then, and starts it again.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from shmserve.ipc.messages.supervision import Ping
from shmserve.supervisor.host.service_manager import ServiceManager
from shmserve.supervisor.processes.control_socket import ControlSocket
from shmserve.supervisor.processes.table import ProcessTable

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Watchdog:
    """Gives a sign of life twice in the time that the manager waits for one, if it does."""

    _control: ControlSocket
    _processes: ProcessTable
    _manager: ServiceManager

    async def run(self) -> None:
        """Until it is cancelled."""
        limit_s = self._manager.watchdog_s
        while limit_s:
            number = self._control.announce(Ping, "gateway", "host")
            try:
                async with asyncio.timeout(limit_s / 4):
                    await self._control.known(number)
            except TimeoutError:
                logger.error(
                    "no sign of life for the service manager, which ends this server %g s after "
                    "the last one: no answer from %s",
                    limit_s,
                    ", ".join(self._missing(number)),
                )
                await self._control.known(number)
                logger.warning("all processes answer again")
            self._manager.alive()
            await asyncio.sleep(limit_s / 2)

    def _missing(self, number: int) -> list[str]:
        missing = self._control.acknowledgements.missing(number)
        children = [child for child in self._processes.all() if child.pid in missing]
        return sorted(f"{child.title} (pid {child.pid})" for child in children)
