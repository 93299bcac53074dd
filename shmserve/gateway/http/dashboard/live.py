"""GET /live: the server's figures as server-sent events, one a second, for any number of viewers.

The first event for a viewer is whole; the next ones have the models that changed. Nothing is asked,
and no timer runs, while nobody watches.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from shmserve import __version__
from shmserve.common.host import CpuUtilization, memory_bytes, processes
from shmserve.errors import PermissionDenied, QueueFull
from shmserve.gateway.api import statistics
from shmserve.gateway.api.figures import Figures, Row
from shmserve.gateway.context import Gateway
from shmserve.gateway.http.json.framing import SERVER_SENT_EVENTS
from shmserve.gateway.http.request import FETCH_SITE, HttpRequest
from shmserve.gateway.http.response import ChunkedResponse, HttpResponse

if TYPE_CHECKING:
    from shmserve.gateway.http.dashboard.event_watch import EventWatch

logger = logging.getLogger(__name__)

_MOST_VIEWERS = 32  # scrapes share their listener
_EVERY_S = 1.0
_COST = 10  # of the time at most one part in so many goes into looking
_LONGEST_S = 5.0
_PROCESSES_EVERY = 5  # looks: /proc is read for each
_STATE_S = 1.0
_HEADERS = b"Content-Type: %b\r\nCache-Control: no-store\r\n" % SERVER_SENT_EVENTS.content_type


class LiveFigures:
    """The feed: a task that looks, while there are viewers, and what it saw last."""

    def __init__(self, gateway: Gateway, run_dir: Path) -> None:
        self._gateway = gateway
        self._run_dir = run_dir
        self._viewers = 0
        self._task: asyncio.Task[None] | None = None
        self._ended = False
        self._number = 0  # of the last look
        self._whole = self._change = b""
        self._looked = asyncio.Event()

    async def respond(self, gateway: Gateway, request: HttpRequest) -> HttpResponse:
        """The response to a viewer. Raises PermissionDenied for another site's page, QueueFull."""
        if request.headers.get(FETCH_SITE) in ("cross-site", "same-site"):
            raise PermissionDenied("another site's page may not watch this server")
        if self._viewers >= _MOST_VIEWERS:
            raise QueueFull(f"{_MOST_VIEWERS} watch this server already")
        return ChunkedResponse(200, self._events(), _HEADERS)

    def end(self) -> None:
        """No more for anybody: the server goes."""
        self._ended = True
        self._looked.set()

    async def _events(self) -> AsyncGenerator[Sequence[bytes], None]:
        seen = 0
        self._enter()
        try:
            while not self._ended:
                if self._number == seen:
                    await self._looked.wait()
                    continue
                frame = self._change if seen == self._number - 1 else self._whole
                frame = frame if seen else self._whole
                seen = self._number
                yield (frame,)
        finally:
            self._leave()

    def _enter(self) -> None:
        self._viewers += 1
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._look())

    def _leave(self) -> None:
        self._viewers -= 1
        if not self._viewers and self._task is not None:
            self._task.cancel()
            self._task, self._number = None, 0

    async def _look(self) -> None:
        # Who is never watched does without its library.
        from shmserve.gateway.http.dashboard.event_watch import EventWatch

        watch = EventWatch(self._run_dir)
        try:
            await watch.known(_STATE_S)
            snapshot = _Snapshot(self._gateway, watch)
            while True:
                began_s = time.monotonic()
                self._show(*await snapshot.take(began_s))
                took_s = time.monotonic() - began_s
                await asyncio.sleep(min(max(_EVERY_S - took_s, _COST * took_s), _LONGEST_S))
        except Exception:
            logger.exception("the server's figures cannot be shown")
            self.end()
        finally:
            watch.close()

    def _show(self, whole: dict[str, Any], change: dict[str, Any]) -> None:
        self._whole, self._change = (
            SERVER_SENT_EVENTS.frame(orjson.dumps(e)) for e in (whole, change)
        )
        self._number += 1
        looked, self._looked = self._looked, asyncio.Event()
        looked.set()


class _Snapshot:
    """One look after the other, and how it differs from the one before."""

    def __init__(self, gateway: Gateway, watch: EventWatch) -> None:
        self._gateway = gateway
        self._watch = watch
        self._figures = Figures()
        self._cpu = CpuUtilization()
        self._models: dict[str, Row] = {}
        self._told = 0
        self._looks = 0
        self._host: dict[str, Any] = {}

    async def take(self, now_s: float) -> tuple[dict[str, Any], dict[str, Any]]:
        """A look: all of it, and what is new in it."""
        gateway, watch = self._gateway, self._watch
        reports = await statistics.collect(gateway, gateway.models.all(), logging.DEBUG)
        before, self._models = self._models, self._rows(self._figures.rows(reports, now_s))
        newest = list(watch.newest)
        new, self._told = min(watch.count - self._told, len(newest)), watch.count
        common = {"at": time.time(), "server": self._server()}
        changed = {key: row for key, row in self._models.items() if before.get(key) != row}
        return (
            {**common, "whole": True, "models": self._models, "events": newest},
            {
                **common,
                "models": changed,
                "gone": sorted(before.keys() - self._models.keys()),
                "events": newest[len(newest) - new :],
            },
        )

    def _rows(self, rows: dict[str, Row]) -> dict[str, Row]:
        """Each with its state, those of models that do not serve too."""
        found: dict[str, Row] = {}
        for model in self._gateway.models.all():
            key = f"{model.name}/{model.version}"
            row = {"state": "READY" if model.ready else "STARTING", **rows.get(key, _SILENT)}
            found[key] = row | ({"steps": model.steps} if model.steps else {})
        for (name, version), (state, reason) in self._watch.states.items():
            row = found.setdefault(f"{name}/{version}", {"state": state})
            if state != "READY" or row["state"] == "READY":
                row |= {"state": state, "reason": reason}
            if state == "UNAVAILABLE" and reason not in ("", "unloaded"):
                row |= {"hurts": 9000, "because": reason}
        return found

    def _server(self) -> dict[str, Any]:
        gateway = self._gateway
        if self._looks % _PROCESSES_EVERY == 0:
            running = list(processes(os.getppid()))
            self._host = {
                "processes": len(running),
                "resident_bytes": sum(each.resident_bytes for each in running),
            }
        self._looks += 1
        total, used = memory_bytes()
        regions = [*gateway.regions.all(), *gateway.regions.listed_only()]
        return {
            "id": gateway.settings.id,
            "version": __version__,
            "ready": gateway.health.ready,
            "cpu": round(self._cpu.read(), 3),
            "memory_used": used,
            "memory_total": total,
            "regions": len(regions),
            "region_bytes": sum(region.byte_size for region in regions),
            "arena_used": gateway.arena.used,
            "arena_size": gateway.settings.arena_byte_size,
            **self._host,
        }


_SILENT: Row = {"hurts": 5000, "because": "its scheduler does not report"}
