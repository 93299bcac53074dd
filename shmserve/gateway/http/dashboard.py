"""The dashboard of a metrics listener: the page at `/` and its feed of figures at `/live`.

GET /live sends the server's figures as server-sent events, one a second, to any number of viewers.
The first event for a viewer contains all figures and their history of ten minutes; later events
contain the models that changed. While no viewer is connected, the schedulers are queried only every
five seconds, for the history.

GET / returns the page (pages/dashboard.html) with a policy by which a browser runs nothing else. A
browser sends no token with a typed address. It therefore receives the page with the status of a
refusal, and the page asks for the token. The page contains no data of the server.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import os
import re
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import orjson

from shmserve import __version__
from shmserve.common.auth_tokens import METRICS
from shmserve.common.host import CpuUtilization, memory_bytes, proportional_bytes
from shmserve.errors import PermissionDenied, QueueFull, Unauthenticated
from shmserve.gateway.api import management
from shmserve.gateway.api.figures import HISTORY_EVERY_S, Figures, History, Row
from shmserve.gateway.context import Gateway
from shmserve.gateway.http.messages import (
    FETCH_SITE,
    SERVER_SENT_EVENTS,
    ChunkedResponse,
    HttpRequest,
    HttpResponse,
)
from shmserve.ipc import endpoints
from shmserve.ipc.messages import publications as m
from shmserve.ipc.transport.frames import unpack

logger = logging.getLogger(__name__)

_MOST_VIEWERS = 32  # limited because scrapes share the listener
_EVERY_S = 1.0
_COST = 10  # taking snapshots may use at most 1/10 of the time
_LONGEST_S = 5.0
_PROCESSES_EVERY = 5  # Processes are read with every fifth snapshot, since /proc is slow.
_STATE_S = 1.0
_HEADERS = b"Content-Type: %b\r\nCache-Control: no-store\r\n" % SERVER_SENT_EVENTS.content_type
_TOPICS = (m.MODELS, m.PROCESSES, m.REGIONS, m.HEALTH)
_MOST_EVENTS = 100
_PAGE = Path(__file__).with_name("pages") / "dashboard.html"


class LiveFigures:
    """The feed of figures. A task takes snapshots while the feed has viewers."""

    def __init__(self, gateway: Gateway, run_dir: Path) -> None:
        self._gateway = gateway
        self._run_dir = run_dir
        self._viewers = 0
        self._figures, self._history = Figures(), History()
        self._recorder: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._ended = False
        self._number = 0  # the number of the last snapshot
        self._whole_event = self._change_event = b""
        self._snapshot_taken = asyncio.Event()

    def begin(self) -> None:
        """Record the history until the server exits."""
        self._recorder = asyncio.get_running_loop().create_task(self._record())

    async def _record(self) -> None:
        while True:
            await asyncio.sleep(HISTORY_EVERY_S)
            if self._task is None:
                try:
                    reports = await management.collect_reports(
                        self._gateway, self._gateway.models.all_versions(), logging.DEBUG
                    )
                    self._history.add(
                        time.time(), self._figures.build_rows(reports, time.monotonic())
                    )
                except Exception:
                    logger.exception("the dashboard's history cannot be recorded")

    async def respond(self, gateway: Gateway, request: HttpRequest) -> HttpResponse:
        """Return the response to a viewer.

        Raises:
            PermissionDenied: The page of another site sent the request.
            QueueFull: The feed has its maximum of viewers.
        """
        if request.headers.get(FETCH_SITE) in ("cross-site", "same-site"):
            raise PermissionDenied("pages of other origins may not open the dashboard's stream")
        if self._viewers >= _MOST_VIEWERS:
            raise QueueFull(f"{_MOST_VIEWERS} dashboards are already connected to this server")
        return ChunkedResponse(200, self._events(), _HEADERS)

    def end(self) -> None:
        """End the responses to all viewers, since the server exits."""
        self._ended = True
        self._snapshot_taken.set()
        if self._recorder is not None:
            self._recorder.cancel()

    async def _events(self) -> AsyncGenerator[Sequence[bytes], None]:
        seen = 0
        self._add_viewer()
        try:
            while not self._ended:
                if self._number == seen:
                    await self._snapshot_taken.wait()
                    continue
                frame = self._change_event if seen == self._number - 1 else self._whole_event
                frame = frame if seen else self._first()
                seen = self._number
                yield (frame,)
        finally:
            self._remove_viewer()

    def _first(self) -> bytes:
        """Return the first event for a viewer: the whole snapshot with the history."""
        history = orjson.dumps(self._history.as_series())
        return b'%b,"history":%b}\n\n' % (self._whole_event.rstrip()[:-1], history)

    def _add_viewer(self) -> None:
        self._viewers += 1
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._take_snapshots())

    def _remove_viewer(self) -> None:
        self._viewers -= 1
        if not self._viewers and self._task is not None:
            self._task.cancel()
            self._task, self._number = None, 0

    async def _take_snapshots(self) -> None:
        watch = EventWatch(self._run_dir)
        try:
            await watch.wait_for_state(_STATE_S)
            snapshot = _Snapshot(self._gateway, watch, self._figures, self._history)
            while True:
                began_s = time.monotonic()
                self._publish(*await snapshot.take(began_s))
                took_s = time.monotonic() - began_s
                await asyncio.sleep(min(max(_EVERY_S - took_s, _COST * took_s), _LONGEST_S))
        except Exception:
            logger.exception("the dashboard's figures cannot be computed")
            self.end()
        finally:
            watch.close()

    def _publish(self, figures: dict[str, Any], change: dict[str, Any]) -> None:
        self._whole_event, self._change_event = (
            SERVER_SENT_EVENTS.frame(orjson.dumps(e)) for e in (figures, change)
        )
        self._number += 1
        taken_event, self._snapshot_taken = self._snapshot_taken, asyncio.Event()
        taken_event.set()


class _Snapshot:
    """Consecutive snapshots of the figures, and the differences between them."""

    def __init__(
        self, gateway: Gateway, watch: EventWatch, figures: Figures, history: History
    ) -> None:
        self._gateway = gateway
        self._watch = watch
        self._figures = figures
        self._history = history
        self._cpu = CpuUtilization()
        self._models: dict[str, Row] = {}
        self._last_event = 0
        self._count = 0
        self._host: dict[str, Any] = {}

    async def take(self, now_s: float) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the whole snapshot and its difference from the last snapshot."""
        gateway, watch = self._gateway, self._watch
        reports = await management.collect_reports(
            gateway, gateway.models.all_versions(), logging.DEBUG
        )
        rows = self._figures.build_rows(reports, now_s)
        self._history.add(time.time(), rows)
        before, self._models = self._models, self._rows(rows)
        newest = list(watch.newest)
        new, self._last_event = min(watch.count - self._last_event, len(newest)), watch.count
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
        """Return a row for each model version, including versions that are not ready."""
        found: dict[str, Row] = {}
        for model in self._gateway.models.all_versions():
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
        if self._count % _PROCESSES_EVERY == 0:
            count, pss_bytes = proportional_bytes(os.getppid())
            self._host = {"processes": count, "pss_bytes": pss_bytes}
        self._count += 1
        total, used = memory_bytes()
        regions = [*gateway.regions.named_regions(), *gateway.regions.unnamed_regions()]
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


_SILENT: Row = {"hurts": 5000, "because": "its scheduler does not respond"}


class EventWatch:
    """A subscriber to the supervisor's events.

    Attributes:
        states: The state and the reason of each model version, including those that do not serve.
        newest: The latest events, oldest first.
        count: The number of events since the start.
    """

    def __init__(self, run_dir: Path) -> None:
        self.states: dict[tuple[str, str], tuple[str, str]] = {}
        self.newest: deque[dict[str, Any]] = deque(maxlen=_MOST_EVENTS)
        self.count = 0
        import zmq.asyncio  # Imported late, since most gateways have no viewer.

        self._topic_suffix = secrets.token_hex(8)
        self._state_received = asyncio.Event()
        self._context = zmq.asyncio.Context(io_threads=1)
        self._socket = self._context.socket(zmq.SUB)
        self._socket.set(zmq.LINGER, 0)
        self._socket.connect(endpoints.events(run_dir))
        for topic in (*_TOPICS, m.RECENT + self._topic_suffix, m.SNAPSHOT + self._topic_suffix):
            self._socket.subscribe(topic)
        self._task = asyncio.get_running_loop().create_task(self._read())

    async def wait_for_state(self, within_s: float) -> None:
        """Wait until the server's state has arrived, at most `within_s` seconds."""
        try:
            async with asyncio.timeout(within_s):
                await self._state_received.wait()
        except TimeoutError:
            pass  # No events are published: the figures are shown without states.

    async def _read(self) -> None:
        while True:
            topic, frame = await self._socket.recv_multipart()
            header, *events = unpack(frame)
            for event in events:
                if type(event) is m.ModelChanged:
                    self._changed(event)
                if not topic.startswith(m.SNAPSHOT.encode()):
                    shown = {"time": header.time_ns / 1e9, "event": type(event).__name__}
                    self.newest.append(shown | asdict(event))
                    self.count += 1
            if topic.startswith(m.SNAPSHOT.encode()):
                self._state_received.set()

    def _changed(self, event: m.ModelChanged) -> None:
        key = event.name, event.version
        if event.state:
            self.states[key] = event.state, event.reason
        else:
            self.states.pop(key, None)

    def close(self) -> None:
        """Cancel the subscription."""
        self._task.cancel()
        self._context.destroy(linger=0)


async def page(gateway: Gateway, request: HttpRequest) -> HttpResponse:
    """Return the page.

    Raises:
        PermissionDenied: The request has a token of other scopes.
    """
    body, headers = _page()
    refusal = request.connection.client.find_access_error(METRICS, request.headers)
    if refusal is None:
        return HttpResponse(200, (body,), headers)
    if not isinstance(refusal, Unauthenticated):
        raise refusal
    return HttpResponse(refusal.status, (body,), headers + b"WWW-Authenticate: Bearer\r\n")


@cache
def _page() -> tuple[bytes, bytes]:
    body = _PAGE.read_bytes()
    policy = (
        "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; "
        f"style-src {_hash(body, b'style')}; script-src {_hash(body, b'script')}"
    )
    headers = (
        "Content-Type: text/html; charset=utf-8\r\n"
        f"Content-Security-Policy: {policy}\r\n"
        "Referrer-Policy: no-referrer\r\n"
        "Cache-Control: no-cache\r\n"
    )
    return body, headers.encode()


def _hash(body: bytes, tag: bytes) -> str:
    """Return the policy's source for the only element with this tag."""
    (text,) = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), body, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"
