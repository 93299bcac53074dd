"""The log settings, propagated: processes start with the latest, and are sent each change."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, replace
from typing import Any

from shmserve import logs
from shmserve.ipc.messages.supervision import SetLogging, Started, WorkerStarted
from shmserve.logs import LogSettings
from shmserve.supervisor.processes.control_socket import Address, ControlSocket

logger = logging.getLogger(__name__)

_FIRST_MESSAGES = Started | WorkerStarted


@dataclass(slots=True, eq=False)
class LogControl:
    """The settings, and who has them."""

    _control: ControlSocket
    settings: LogSettings

    def change(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Log in another way, in every process that there is and will be; the settings, by
        name."""
        settings = replace(self.settings, **changes)
        if settings != self.settings:
            logger.info("log settings: %s", changes)
            self.settings = settings
            logs.apply(settings)
            news = SetLogging(asdict(settings))
            self._control.broadcast(news, "gateway", "host", "worker")
        return asdict(settings)

    def on_message(self, address: Address, message: Any) -> None:
        """Somebody has sent something: after its first message it is sent the settings, which may
        have changed since it was started."""
        if isinstance(message, _FIRST_MESSAGES):
            self._control.send(address, SetLogging(asdict(self.settings)))
