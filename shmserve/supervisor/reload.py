"""Changes on disk that a running server applies: of the model repositories, and of its settings.

The poller (--model-control-mode=poll) scans the repositories periodically and loads, reloads or
unloads the models that have changed. SIGHUP reads the command line, its files and the repositories
again, and applies the settings that may change while the server runs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shmserve.common.tasks import cancel_all, wait_any
from shmserve.config.server import ServerConfig
from shmserve.errors import ShmserveError
from shmserve.ipc.messages.supervision import SetTokens
from shmserve.supervisor.context import SupervisorContext
from shmserve.supervisor.host.service_manager import ServiceManager
from shmserve.supervisor.models.load_planner import LoadPlanner
from shmserve.supervisor.models.manager import ModelManager
from shmserve.supervisor.models.orders import LoggedFailure
from shmserve.supervisor.models.registry import ModelRegistry
from shmserve.supervisor.models.repository import DUPLICATE_MODEL, ModelFolder
from shmserve.supervisor.regions.opener import RegionOpener

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 300.0
_SCAN_FAILED = "the model repositories could not be scanned: no model changes until the next scan"
_UPDATE_FAILED = "model '%s' could not be updated, so its serving versions stay%s"


@dataclass(slots=True, eq=False)
class RepositoryPoller:
    """The poller of the repositories, which loads and unloads models as their folders change.

    A model that hangs while it loads does not delay other models. Its load is cancelled when the
    model is removed. Loads that failed for a temporary reason are retried with exponential backoff.
    """

    _context: SupervisorContext
    _planner: LoadPlanner
    _registry: ModelRegistry
    _models: ModelManager
    # The changes in progress: each model's name, and whether its folder is present.
    _in_progress: set[tuple[str, bool]] = field(init=False, default_factory=set)
    # For each model whose load has failed: the time of the next retry, and the pause after it.
    _retries: dict[str, tuple[float, float]] = field(init=False, default_factory=dict)

    async def run(self) -> None:
        """Poll every `repository_poll_s` seconds until the task is cancelled."""
        pause_s = self._context.config.repository_poll_s
        while pause_s:
            await asyncio.sleep(pause_s)
            await self.scan()

    async def scan(self) -> list[asyncio.Task[None]]:
        """Scan the repositories once, and return the tasks that apply the changes."""
        try:
            folders = await asyncio.to_thread(self._planner.scan)
        except ShmserveError as error:
            logger.error("%s (%s)", _SCAN_FAILED, error.message)
            return []
        except Exception:
            logger.exception(_SCAN_FAILED)
            return []
        names = sorted({*folders, *self._registry.models})
        states = [(name, self._may_serve(name, folders.get(name))) for name in names]
        changes = [change for change in states if change not in self._in_progress]
        self._in_progress.update(changes)
        return [self._context.background(self._apply(*change)) for change in changes]

    def _may_serve(self, name: str, folder: ModelFolder | None) -> bool:
        model = self._registry.models.get(name)
        serves = model is not None and bool(model.serving)
        return folder is not None and not (serves and folder.problem == DUPLICATE_MODEL)

    async def _apply(self, name: str, is_present: bool) -> None:
        try:
            await self.update(name, is_present)
        except LoggedFailure:
            pass
        except ShmserveError as error:
            logger.error(_UPDATE_FAILED, name, f": {error.message}")
        except Exception:
            logger.exception(_UPDATE_FAILED, name, "")
        finally:
            self._in_progress.discard((name, is_present))

    async def update(self, name: str, is_present: bool) -> None:
        """Load, reload or unload a model if needed; raise ShmserveError if that fails."""
        model = self._registry.models.get(name)
        if not is_present:
            self._retries.pop(name, None)
            if model and (model.serving or model.orders or model.has_failed or model.on_demand):
                await self._models.unload(name)
            return
        if self._context.config.load_on_demand and model is None:
            self._models.offer_on_demand(name)
            return
        if model is not None and model.on_demand and not model.serving:
            return  # its next request loads the current files
        fingerprint = await asyncio.to_thread(self._planner.fingerprint, name)
        retry_at, pause_s = self._retries.get(name, (0.0, _FIRST_PAUSE_S))
        if model is None or model.fingerprint != fingerprint:  # a change needs no pause
            pause_s = _FIRST_PAUSE_S
        elif not model.failure_is_temporary or time.monotonic() < retry_at:
            return
        self._retries[name] = time.monotonic() + pause_s, min(2 * pause_s, _LONGEST_PAUSE_S)
        await self._models.load(name, pins=False)
        self._retries.pop(name, None)


# The flags that may change while the server runs, with the fields of the settings that they set.
_TOKENS_FLAG = "auth-token-file"
_SERVER_FIELDS = {"exit-timeout-secs": "exit_timeout_s", "load-timeout-secs": "load_timeout_s"}
_LOG_FIELDS = {
    **{f"log-{name}": f"log_{name}" for name in ("info", "warning", "error", "format")},
    "log-verbose": "log_verbose_level",
}
_SHM_FLAGS = (
    *("max-regions", "max-regions-per-uid", "max-byte-size", "max-byte-size-per-uid"),
    "sparse-byte-size",
)
_SHM_FIELDS = {f"shm-{name}": name.replace("-", "_") for name in _SHM_FLAGS}
RELOADABLE = frozenset({_TOKENS_FLAG, *_SERVER_FIELDS, *_LOG_FIELDS, *_SHM_FIELDS})


@dataclass(slots=True, eq=False)
class Reload:
    """The task that reloads the settings.

    `_read_config()` reads the settings again, as at a start. `_describe_state()` returns the status
    line for the service manager.
    """

    _context: SupervisorContext
    _opener: RegionOpener
    _poller: RepositoryPoller
    _service_manager: ServiceManager
    _read_config: Callable[[], ServerConfig]
    _describe_state: Callable[[], str]
    _request_event: asyncio.Event = field(init=False, default_factory=asyncio.Event)

    def request(self) -> None:
        """Request a reload, even while the models of a previous reload are still loading."""
        self._request_event.set()

    async def run(self) -> None:
        """Reload on each request until the task is cancelled."""
        while True:
            await self._request_event.wait()
            self._request_event.clear()
            self._service_manager.report_reloading()
            timeout_extension = asyncio.ensure_future(self._service_manager.extend_timeout())
            try:
                await self._reload()
            except Exception:  # later requests must still be handled
                logger.exception("the reload failed; later changes wait for the next reload")
            finally:
                await cancel_all(timeout_extension)
            self._service_manager.notify_ready(self._describe_state())

    async def _reload(self) -> None:
        logger.info("reloading the configuration and the model repositories")
        try:
            config = await asyncio.to_thread(self._read_config)
        except ShmserveError as error:
            for problem in getattr(error, "problems", [error.message]):
                logger.error("configuration not reloaded: %s", problem)
            return
        self._adopt(config)
        if config.model_control_mode == "explicit":
            logger.info("no model is loaded or unloaded, because of --model-control-mode=explicit")
            return
        model_loads = asyncio.gather(*await self._poller.scan())
        next_request = asyncio.ensure_future(self._request_event.wait())
        await wait_any(model_loads, next_request)
        next_request.cancel()

    def _adopt(self, config: ServerConfig) -> None:
        """Apply the settings that may change; log them, and the changes that need a restart."""
        context = self._context
        old_config = context.config
        old_flags = old_config.flags
        changed_names = {name for name, value in config.flags.items() if value != old_flags[name]}
        if config.tokens != old_config.tokens:
            changed_names.add(_TOKENS_FLAG)
        applied_names = changed_names & RELOADABLE
        # Without tokens, a server may not listen for other hosts. Only a restart changes addresses.
        if bool(config.tokens) != bool(old_config.tokens):
            applied_names.discard(_TOKENS_FLAG)
        for name in sorted(changed_names):
            text = f"{_format_value(config, name)}, was {_format_value(old_config, name)}"
            if name in applied_names:
                logger.info("--%s has changed: %s", name, text)
            else:
                logger.warning("--%s has changed, and takes effect after a restart: %s", name, text)
        if not changed_names:
            logger.info("no flag has changed")
        flags = {n: (config.flags if n in applied_names else old_flags)[n] for n in old_flags}
        shm = replace(old_config.shm, **_select_applied(config.shm, _SHM_FIELDS, applied_names))
        fields = _select_applied(config, {**_SERVER_FIELDS, _TOKENS_FLAG: "tokens"}, applied_names)
        context.config = replace(old_config, flags=flags, shm=shm, **fields)
        context.logging.change(_select_applied(config.log, _LOG_FIELDS, applied_names))
        self._opener.set_limits(context.config.shm)
        if _TOKENS_FLAG in applied_names:
            context.control.broadcast(SetTokens(dict(config.tokens)), "gateway")


def _select_applied(settings: Any, fields: Mapping[str, str], flags: set[str]) -> dict[str, Any]:
    return {name: getattr(settings, name) for flag, name in fields.items() if flag in flags}


def _format_value(config: ServerConfig, name: str) -> str:
    if name == _TOKENS_FLAG:
        return f"{len(config.tokens)} tokens"
    value = config.flags[name]
    # The values of a repeated flag are not logged, since they may contain a secret.
    return f"{len(value)} values" if isinstance(value, list) else str(value)
