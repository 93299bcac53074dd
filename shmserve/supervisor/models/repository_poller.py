"""The repository poller (--model-control-mode=poll).

The poller scans the repositories periodically and loads, reloads or unloads the models that have
changed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field

from shmserve.errors import ShmserveError
from shmserve.supervisor.context import SupervisorContext
from shmserve.supervisor.models.load_planner import LoadPlanner
from shmserve.supervisor.models.manager import ModelManager
from shmserve.supervisor.models.orders import LoggedFailure
from shmserve.supervisor.models.registry import ModelRegistry
from shmserve.supervisor.models.repository import IN_SEVERAL, ModelFolder

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 300.0


@dataclass(slots=True, eq=False)
class RepositoryPoller:
    """The poller that loads and unloads models as the repositories change.

    A model that hangs while it loads does not delay the others, and its load is cancelled when the
    model is removed. Loads that failed for a temporary reason are retried with exponential backoff.
    """

    _context: SupervisorContext
    _planner: LoadPlanner
    _registry: ModelRegistry
    _models: ModelManager
    # The changes in progress: models, and whether they are present.
    _busy: set[tuple[str, bool]] = field(init=False, default_factory=set)
    # The time of a failed model's next retry, and the pause after that retry.
    _retries: dict[str, tuple[float, float]] = field(init=False, default_factory=dict)

    async def run(self) -> None:
        """Poll every `repository_poll_s` seconds until this is cancelled."""
        pause_s = self._context.config.repository_poll_s
        while pause_s:
            await asyncio.sleep(pause_s)
            await self.look()

    async def look(self) -> list[asyncio.Task[None]]:
        """Scan the repositories once, and return the tasks that apply the changes."""
        try:
            found = await asyncio.to_thread(self._planner.scan)
        except ShmserveError as error:
            logger.error("%s", error.message)
            return []
        except Exception:
            logger.exception("the model repositories could not be looked at")
            return []
        names = sorted({*found, *self._registry.models})
        wanted = [(name, self._may_serve(name, found.get(name))) for name in names]
        changes = [change for change in wanted if change not in self._busy]
        self._busy.update(changes)
        return [self._context.background(self._apply(*change)) for change in changes]

    def _may_serve(self, name: str, folder: ModelFolder | None) -> bool:
        model = self._registry.models.get(name)
        serves = model is not None and bool(model.serving)
        return folder is not None and not (serves and folder.problem == IN_SEVERAL)

    async def _apply(self, name: str, present: bool) -> None:
        try:
            await self.follow(name, present)
        except LoggedFailure:
            pass
        except ShmserveError as error:
            logger.error("model %s: %s", name, error.message)
        except Exception:
            logger.exception("model %s: loading failed", name)
        finally:
            self._busy.discard((name, present))

    async def follow(self, name: str, present: bool) -> None:
        """Load, reload or unload a model if needed; raises ShmserveError if that fails."""
        model = self._registry.models.get(name)
        if not present:
            self._retries.pop(name, None)
            if model is not None and (
                model.serving or model.orders or model.failed or model.on_demand
            ):
                await self._models.unload(name)
            return
        if self._context.config.load_on_demand and model is None:
            self._models.offer(name)
            return
        if model is not None and model.on_demand and not model.serving:
            return  # its next request loads the current files
        fingerprint = await asyncio.to_thread(self._planner.fingerprint, name)
        retry_at, pause_s = self._retries.get(name, (0.0, _FIRST_PAUSE_S))
        if model is None or model.fingerprint != fingerprint:  # also after a failure
            pause_s = _FIRST_PAUSE_S
        elif not model.may_pass or time.monotonic() < retry_at:
            return
        self._retries[name] = time.monotonic() + pause_s, min(2 * pause_s, _LONGEST_PAUSE_S)
        await self._models.load(name, pins=False)
        self._retries.pop(name, None)
