"""The dashboard of a metrics listener: the page at `/` and its feed of figures at `/live`.

GET /live sends the server's figures as server-sent events, one a second, to several viewers.
The first event for a viewer contains all figures and their history of ten minutes. Later events
contain only the models whose figures have changed. While no viewer is connected, the schedulers are
queried only every five seconds, for the history.

GET / returns the page (pages/dashboard.html). Its Content-Security-Policy permits only the page's
own script and style. A browser sends no token with a typed address. If a token is required, the
page is sent with status 401, and asks for the token. The page contains no data of the server.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import logging
import os
import re
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import orjson

from shmserve import __version__
from shmserve.common.auth_tokens import METRICS
from shmserve.common.host import CpuUtilization, memory_bytes, proportional_sizes
from shmserve.common.tasks import collect
from shmserve.errors import PermissionDenied, QueueFull, Unauthenticated
from shmserve.gateway.api import management
from shmserve.gateway.api.figures import HISTORY_INTERVAL_S, Figures, History, Row
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

_MAX_VIEWERS = 32  # limited because scrapes share the listener
_SNAPSHOT_INTERVAL_S = 1.0
_INTERVAL_PER_COST = 10  # taking a snapshot may use at most 1/10 of the time between snapshots
_MAX_INTERVAL_S = 5.0  # the longest time between two snapshots
# Processes are read with every fifth snapshot, since /proc is slow.
_SNAPSHOTS_PER_PROCESS_READ = 5
_STATE_TIMEOUT_S = 1.0  # the time limit of the wait for the supervisor's state
_HEADERS = SERVER_SENT_EVENTS.headers + b"Cache-Control: no-store\r\n"
_TOPICS = (m.MODELS, m.PROCESSES, m.REGIONS, m.HEALTH)
_MAX_EVENTS = 100  # number of events that the dashboard shows
_PAGE_FILE = Path(__file__).with_name("pages") / "dashboard.html"


class LiveFigures:
    """The feed of the server's figures. A task takes snapshots while the feed has viewers."""

    def __init__(self, gateway: Gateway, run_dir: Path) -> None:
        self._gateway = gateway
        self._run_dir = run_dir
        self._viewer_count = 0
        self._figures, self._history = Figures(), History()
        self._recorder: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_ended = False
        self._snapshot_number = 0  # the number of the last snapshot
        self._full_event = self._change_event = b""
        self._snapshot_taken = asyncio.Event()

    def start_recording(self) -> None:
        """Start the task that records the figures for the history until the server exits."""
        self._recorder = asyncio.get_running_loop().create_task(self._record_history())

    async def _record_history(self) -> None:
        while True:
            await asyncio.sleep(HISTORY_INTERVAL_S)
            if self._task is None:
                try:
                    models = self._gateway.models.all_versions()
                    reports = await management.collect_reports(self._gateway, models, logging.DEBUG)
                    rows = self._figures.build_rows(reports, time.monotonic())
                    self._history.add(time.time(), rows)
                except Exception:
                    text = "the dashboard's history cannot be recorded; the next attempt is in %g s"
                    logger.exception(text, HISTORY_INTERVAL_S)

    async def respond(self, gateway: Gateway, request: HttpRequest) -> HttpResponse:
        """Return the response to a viewer.

        Raises:
            PermissionDenied: A page of another origin sent the request.
            QueueFull: The feed has its maximum of viewers.
        """
        if request.headers.get(FETCH_SITE) in ("cross-site", "same-site"):
            raise PermissionDenied("pages of other origins may not open the dashboard's stream")
        if self._viewer_count >= _MAX_VIEWERS:
            raise QueueFull(f"{_MAX_VIEWERS} dashboards (the maximum) are connected to this server")
        return ChunkedResponse(200, self._stream_events(), _HEADERS)

    def end_streams(self) -> None:
        """End the responses to all viewers, since the server exits."""
        self._is_ended = True
        self._snapshot_taken.set()
        if self._recorder is not None:
            self._recorder.cancel()

    async def _stream_events(self) -> AsyncGenerator[Sequence[bytes], None]:
        seen_snapshot_number = 0
        task = self._add_viewer()
        try:
            while not (self._is_ended or task.done()):
                if self._snapshot_number == seen_snapshot_number:
                    await self._snapshot_taken.wait()
                    continue
                has_previous = seen_snapshot_number == self._snapshot_number - 1
                event = self._change_event if has_previous else self._full_event
                event = event if seen_snapshot_number else self._first_event()
                seen_snapshot_number = self._snapshot_number
                yield (event,)
        finally:
            self._remove_viewer()

    def _first_event(self) -> bytes:
        """Return the first event for a viewer: the whole snapshot with the history."""
        history = orjson.dumps(self._history.as_series())
        return b'%b,"history":%b}\n\n' % (self._full_event.rstrip()[:-1], history)

    def _add_viewer(self) -> asyncio.Task[None]:
        self._viewer_count += 1
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._take_snapshots())
        return self._task

    def _remove_viewer(self) -> None:
        self._viewer_count -= 1
        if not self._viewer_count and self._task is not None:
            self._task.cancel()
            self._task, self._snapshot_number = None, 0

    async def _take_snapshots(self) -> None:
        try:
            with contextlib.closing(EventWatch(self._run_dir)) as watch:
                await watch.wait_for_state(_STATE_TIMEOUT_S)
                snapshots = _SnapshotSource(self._gateway, watch, self._figures, self._history)
                while True:
                    started_s = time.monotonic()
                    self._publish(*await snapshots.take(started_s))
                    cost_s = time.monotonic() - started_s
                    pause_s = max(_SNAPSHOT_INTERVAL_S - cost_s, _INTERVAL_PER_COST * cost_s)
                    await asyncio.sleep(min(pause_s, _MAX_INTERVAL_S))
        except Exception:
            logger.exception("the dashboard's figures cannot be computed; open the dashboard again")
            self._wake_viewers()  # their streams end, and the next viewer starts another task

    def _publish(self, figures: dict[str, Any], change: dict[str, Any]) -> None:
        self._full_event, self._change_event = (
            SERVER_SENT_EVENTS.frame(orjson.dumps(event)) for event in (figures, change)
        )
        self._snapshot_number += 1
        self._wake_viewers()

    def _wake_viewers(self) -> None:
        snapshot_event, self._snapshot_taken = self._snapshot_taken, asyncio.Event()
        snapshot_event.set()


@dataclass(slots=True, eq=False)
class _SnapshotSource:
    """A source of snapshots of the dashboard's figures, and of the changes between snapshots."""

    _gateway: Gateway
    _watch: EventWatch
    _figures: Figures
    _history: History
    _cpu: CpuUtilization = field(init=False, default_factory=CpuUtilization)
    _models: dict[str, Row] = field(init=False, default_factory=dict)
    _seen_event_count: int = field(init=False, default=0)
    _snapshot_count: int = field(init=False, default=0)
    _process_figures: dict[str, Any] = field(init=False, default_factory=dict)

    async def take(self, now_s: float) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the event with the whole snapshot, and the event with its changes."""
        gateway, watch = self._gateway, self._watch
        models = gateway.models.all_versions()
        reports = await management.collect_reports(gateway, models, logging.DEBUG)
        rows = self._figures.build_rows(reports, now_s)
        self._history.add(time.time(), rows)
        previous_models, self._models = self._models, self._model_rows(rows)
        newest_events = list(watch.newest_events)
        new_event_count = min(watch.event_count - self._seen_event_count, len(newest_events))
        self._seen_event_count = watch.event_count
        common_members = {"at": time.time(), "server": await self._server_figures()}
        items = self._models.items()
        changed_models = {key: row for key, row in items if previous_models.get(key) != row}
        return (
            {**common_members, "whole": True, "models": self._models, "events": newest_events},
            {
                **common_members,
                "models": changed_models,
                "gone": sorted(previous_models.keys() - self._models.keys()),
                "events": newest_events[len(newest_events) - new_event_count :],
            },
        )

    def _model_rows(self, rows: dict[str, Row]) -> dict[str, Row]:
        """Return a row for each model version, including versions that are not ready."""
        model_rows: dict[str, Row] = {}
        for model in self._gateway.models.all_versions():
            key = f"{model.name}/{model.version}"
            state = "READY" if model.is_ready else "STARTING"
            row = {"state": state, **rows.get(key, _SILENT_SCHEDULER)}
            model_rows[key] = row | ({"steps": model.steps} if model.steps else {})
        for (name, version), (state, reason) in self._watch.states.items():
            row = model_rows.setdefault(f"{name}/{version}", {"state": state})
            if state != "READY" or row["state"] == "READY":
                row |= {"state": state, "reason": reason}
            if state == "UNAVAILABLE" and reason not in ("", "unloaded"):
                row |= {"hurts": 9000, "because": reason}
        return model_rows

    async def _server_figures(self) -> dict[str, Any]:
        gateway = self._gateway
        if self._snapshot_count % _SNAPSHOTS_PER_PROCESS_READ == 0:
            pss_bytes = await collect(proportional_sizes(os.getppid()))
            self._process_figures = {"processes": len(pss_bytes), "pss_bytes": sum(pss_bytes)}
        self._snapshot_count += 1
        total_bytes, used_bytes = memory_bytes()
        regions = [*gateway.regions.named_regions(), *gateway.regions.unnamed_regions()]
        return {
            "id": gateway.settings.id,
            "version": __version__,
            "ready": gateway.health.ready,
            "cpu": round(self._cpu.read(), 3),
            "memory_used": used_bytes,
            "memory_total": total_bytes,
            "regions": len(regions),
            "region_bytes": sum(region.byte_size for region in regions),
            "arena_used": gateway.arena.used_bytes,
            "arena_size": gateway.settings.arena_byte_size,
            **self._process_figures,
        }


_SILENT_SCHEDULER: Row = {"hurts": 5000, "because": "its scheduler does not respond"}


class EventWatch:
    """A subscriber to the supervisor's events.

    Attributes:
        states: The state and the reason of each model version, including those that do not serve.
        newest_events: The latest events, oldest first.
        event_count: The number of events since the start.
    """

    def __init__(self, run_dir: Path) -> None:
        self.states: dict[tuple[str, str], tuple[str, str]] = {}  # (name, version): (state, reason)
        self.newest_events: deque[dict[str, Any]] = deque(maxlen=_MAX_EVENTS)
        self.event_count = 0
        import zmq.asyncio  # imported late, since most gateways have no viewer

        self._topic_suffix = secrets.token_hex(8)
        self._state_received = asyncio.Event()
        self._context = zmq.asyncio.Context(io_threads=1)
        self._socket = self._context.socket(zmq.SUB)
        self._socket.set(zmq.LINGER, 0)
        self._socket.connect(endpoints.events(run_dir))
        for topic in (*_TOPICS, m.RECENT + self._topic_suffix, m.SNAPSHOT + self._topic_suffix):
            self._socket.subscribe(topic)
        self._task = asyncio.get_running_loop().create_task(self._read_events())

    async def wait_for_state(self, timeout_s: float) -> None:
        """Wait until the server's state has arrived, at most `timeout_s` seconds."""
        with contextlib.suppress(TimeoutError):  # without events, the page shows no states
            async with asyncio.timeout(timeout_s):
                await self._state_received.wait()

    async def _read_events(self) -> None:
        while True:
            topic, frame = await self._socket.recv_multipart()
            header, *events = unpack(frame)
            for event in events:
                if type(event) is m.ModelChanged:
                    self._record_model_change(event)
                if not topic.startswith(m.SNAPSHOT.encode()):
                    event_entry = {"time": header.time_ns / 1e9, "event": type(event).__name__}
                    self.newest_events.append(event_entry | asdict(event))
                    self.event_count += 1
            if topic.startswith(m.SNAPSHOT.encode()):
                self._state_received.set()

    def _record_model_change(self, event: m.ModelChanged) -> None:
        key = event.name, event.version
        if event.state:
            self.states[key] = event.state, event.reason
        else:
            self.states.pop(key, None)

    def close(self) -> None:
        """Cancel the subscription."""
        self._task.cancel()
        self._context.destroy(linger=0)


async def show_dashboard(gateway: Gateway, request: HttpRequest) -> HttpResponse:
    """Handle GET / of a metrics listener: return the dashboard's page.

    Raises:
        PermissionDenied: The request has a token of other scopes.
    """
    body, headers = _load_page()
    refusal = request.connection.client.find_access_error(METRICS, request.headers)
    if refusal is None:
        return HttpResponse(200, (body,), headers)
    if not isinstance(refusal, Unauthenticated):
        raise refusal
    return HttpResponse(refusal.status, (body,), headers + b"WWW-Authenticate: Bearer\r\n")


@cache
def _load_page() -> tuple[bytes, bytes]:
    body = _PAGE_FILE.read_bytes()
    policy = (
        "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; "
        f"style-src {_content_hash(body, b'style')}; script-src {_content_hash(body, b'script')}"
    )
    headers = (
        "Content-Type: text/html; charset=utf-8\r\n"
        f"Content-Security-Policy: {policy}\r\n"
        "Referrer-Policy: no-referrer\r\n"
        "Cache-Control: no-cache\r\n"
    )
    return body, headers.encode()


def _content_hash(body: bytes, tag: bytes) -> str:
    """Return the hash of the only element with this tag, for the Content-Security-Policy."""
    (content,) = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), body, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}'"
