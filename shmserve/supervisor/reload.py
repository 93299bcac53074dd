"""The reload on SIGHUP, which reads the command line, its files and the repositories again.

Settings that may change while the server runs are applied. The repositories are polled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shmserve.common.tasks import either, end_all
from shmserve.config.server import ServerConfig
from shmserve.errors import ShmserveError
from shmserve.ipc.messages.supervision import SetTokens
from shmserve.supervisor.context import SupervisorContext
from shmserve.supervisor.host.service_manager import ServiceManager
from shmserve.supervisor.models.repository_poller import RepositoryPoller
from shmserve.supervisor.regions.opener import RegionOpener

logger = logging.getLogger(__name__)

# The flags that may change while the server runs, with their fields.
_TOKENS = "auth-token-file"
_OWN = {"exit-timeout-secs": "exit_timeout_s", "load-timeout-secs": "load_timeout_s"}
_LOG = {
    **{f"log-{name}": f"log_{name}" for name in ("info", "warning", "error", "format")},
    "log-verbose": "log_verbose_level",
}
_SHM = {
    f"shm-{name}": name.replace("-", "_")
    for name in (
        *("max-regions", "max-regions-per-uid", "max-byte-size", "max-byte-size-per-uid"),
        "sparse-byte-size",
    )
}
LIVE = frozenset({_TOKENS, *_OWN, *_LOG, *_SHM})


@dataclass(slots=True, eq=False)
class Reload:
    """The task that reloads the settings.

    `_read()` returns the settings of a start now, `_state()` the status for the service manager.
    """

    _context: SupervisorContext
    _opener: RegionOpener
    _poller: RepositoryPoller
    _manager: ServiceManager
    _read: Callable[[], ServerConfig]
    _state: Callable[[], str]
    _requested: asyncio.Event = field(init=False, default_factory=asyncio.Event)

    def ask(self) -> None:
        """Request a reload, which does not wait for the loads of a previous one."""
        self._requested.set()

    async def run(self) -> None:
        """Reload on each request until the task is cancelled."""
        while True:
            await self._requested.wait()
            self._requested.clear()
            self._manager.reloading()
            waited_for = asyncio.ensure_future(self._manager.keep_waiting())
            try:
                await self._reload()
            finally:
                await end_all(waited_for)
            self._manager.ready(self._state())

    async def _reload(self) -> None:
        logger.info("reloading")
        try:
            config = await asyncio.to_thread(self._read)
        except ShmserveError as error:
            for problem in getattr(error, "problems", [error.message]):
                logger.error("nothing is reloaded: %s", problem)
            return
        self._adopt(config)
        if config.model_control_mode == "explicit":
            logger.info("models are loaded and unloaded on request: they are as they were")
            return
        models = asyncio.gather(*await self._poller.look())
        superseded = asyncio.ensure_future(self._requested.wait())
        await either(models, superseded)
        superseded.cancel()

    def _adopt(self, config: ServerConfig) -> None:
        """Apply the settings that may change, and log these and the ones that need a restart."""
        context = self._context
        before = context.config
        changed = {name for name, value in config.flags.items() if value != before.flags[name]}
        if config.tokens != before.tokens:
            changed.add(_TOKENS)
        live = changed & LIVE
        if bool(config.tokens) != bool(before.tokens):  # tokens allow other listeners
            live.discard(_TOKENS)
        for name in sorted(changed):
            found = f"{_shown(config, name)}, was {_shown(before, name)}"
            if name in live:
                logger.info("--%s has changed: %s", name, found)
            else:
                logger.warning("--%s has changed, for which a restart is needed: %s", name, found)
        if not changed:
            logger.info("no flag has changed")
        context.config = replace(
            before,
            flags={name: (config if name in live else before).flags[name] for name in before.flags},
            shm=replace(before.shm, **_picked(config.shm, _SHM, live)),
            **_picked(config, {**_OWN, _TOKENS: "tokens"}, live),
        )
        context.logging.change(_picked(config.log, _LOG, live))
        self._opener.limit(context.config.shm)
        if _TOKENS in live:
            context.control.broadcast(SetTokens(dict(config.tokens)), "gateway")


def _picked(settings: Any, fields: Mapping[str, str], live: set[str]) -> dict[str, Any]:
    return {name: getattr(settings, name) for flag, name in fields.items() if flag in live}


def _shown(config: ServerConfig, name: str) -> str:
    if name == _TOKENS:
        return f"{len(config.tokens)} tokens"
    value = config.flags[name]
    # A repeated flag may contain a secret.
    return f"{len(value)} values" if isinstance(value, list) else str(value)
