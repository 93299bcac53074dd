"""The settings of logs and traces, propagated: processes are sent them when they start, and each
change. What schedulers measure of local clients' requests goes on to a gateway."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from shmserve import logs
from shmserve.common.trace_settings import TraceSettings
from shmserve.ipc.messages.supervision import (
    RequestTraced,
    SetLogging,
    SetTracing,
    Started,
    WorkerStarted,
)
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


@dataclass(slots=True, eq=False)
class TraceControl:
    """The settings at the start, and what clients have changed since, by model; "": of all that
    have none of their own."""

    _control: ControlSocket
    _start: TraceSettings
    _slow_request_ms: int = 0
    _changes: dict[str, dict[str, Any]] = field(default_factory=dict)

    def change(self, model: str, changes: dict[str, Any]) -> dict[str, list[str]]:
        """Trace a model, or all, in another way; None: as it was at the start, or as all others.
        Returns the model's settings as the protocol shows them."""
        if changes:
            own = self._changes.get(model, {}) | changes
            self._changes[model] = {key: value for key, value in own.items() if value is not None}
            logger.info("trace settings of %s: %s", model or "all models", changes)
            self._control.broadcast(self._message(), "gateway", "scheduler", "ensemble")
        return self._of(model).shown()

    def _of(self, model: str) -> TraceSettings:
        common = self._start.changed(self._changes.get("", {}))
        return common.changed(self._changes.get(model, {})) if model else common

    def _message(self) -> SetTracing:
        settings = {name: asdict(self._of(name)) for name in ("", *self._changes)}
        return SetTracing(settings, self._slow_request_ms)

    def on_message(self, address: Address, message: Any) -> None:
        """Somebody has sent something: a gateway that starts is sent the settings."""
        if isinstance(message, Started):
            self.tell(address)

    def tell(self, address: Address) -> None:
        """Send the settings to a gateway or a scheduler that has just started."""
        if self._start.on or self._changes or self._slow_request_ms:
            self._control.send(address, self._message())

    def on_traced(self, _: Address, message: RequestTraced) -> None:
        """A scheduler has measured a local client's request."""
        for pid in self._control.pids("gateway")[:1]:
            self._control.send(pid, message)
