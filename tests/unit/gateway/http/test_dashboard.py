"""The feed of figures: one look for all viewers, nothing without any; and the page's policy."""

import asyncio
import base64
import contextlib
import hashlib
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shmserve.errors import PermissionDenied, QueueFull
from shmserve.gateway.api import management
from shmserve.gateway.http import dashboard as live
from shmserve.ipc import endpoints
from shmserve.ipc.messages import publications as m
from shmserve.ipc.messages.publications import HealthChanged
from shmserve.supervisor.events import EventFeed, EventPublisher
from tests.unit.gateway.test_figures import report

Viewer = AsyncGenerator[Sequence[bytes], None]


@pytest.fixture
def snapshots(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the number of snapshots; a further model answers each time."""
    pending_calls: list[float] = []

    async def collect(*_: Any) -> list[dict[str, Any]]:
        pending_calls.append(0)
        reports = {"a": report(len(pending_calls)), "still": report()}
        return [{"name": n, "version": "1", "shmserve": figures} for n, figures in reports.items()]

    monkeypatch.setattr(management, "collect_reports", collect)
    monkeypatch.setattr(live, "_SNAPSHOT_INTERVAL_S", 0.01)
    return pending_calls


def model(name: str) -> SimpleNamespace:
    return SimpleNamespace(name=name, version="1", is_ready=True, steps=[])


def feed(run_dir: Path) -> live.LiveFigures:
    no_regions: Callable[[], list[Any]] = list
    gateway: Any = SimpleNamespace(
        models=SimpleNamespace(all_versions=lambda: [model("a"), model("still")]),
        regions=SimpleNamespace(named_regions=no_regions, unnamed_regions=no_regions),
        settings=SimpleNamespace(id="x", arena_byte_size=4096),
        health=SimpleNamespace(ready=True),
        arena=SimpleNamespace(used_bytes=0),
    )
    return live.LiveFigures(gateway, run_dir)


async def next_event(viewer: Viewer) -> dict[str, Any]:
    (frame,) = await anext(viewer)
    assert frame.startswith(b"data: ") and frame.endswith(b"\n\n")
    return dict(json.loads(frame[6:]))


def no_counters() -> None:
    """Return no counters."""


def viewing(figures: live.LiveFigures) -> Any:
    """Return a context with the events of a further viewer."""
    return contextlib.aclosing(figures._stream_events())


@contextlib.asynccontextmanager
async def running_feed(run_dir: Path) -> AsyncIterator[live.LiveFigures]:
    """Yield the figures beside a publisher of events, and check that nothing remains at the end."""
    feeds: list[EventFeed] = []
    publisher = EventPublisher()
    publisher.open(endpoints.events(run_dir), lambda *change: feeds[0].on_subscription(*change))
    states = {("a", "1"): ("READY", ""), ("b", "2"): ("UNAVAILABLE", "no such file")}
    healthy = HealthChanged(live=True, ready=True, exiting=False)
    feeds.append(EventFeed(publisher, lambda: states, list, list, lambda: healthy, no_counters))
    publisher.publish(m.ProcessEnded(7, "worker a.0 cpu", "signal SIGKILL"))
    own_events = asyncio.all_tasks()
    try:
        yield feed(run_dir)
        async with asyncio.timeout(5):
            while asyncio.all_tasks() - own_events:  # noqa: ASYNC110
                await asyncio.sleep(0)
    finally:
        publisher.close()


async def test_two_viewers_share_the_snapshots(run_dir: Path, snapshots: list[float]) -> None:
    async with running_feed(run_dir) as figures, viewing(figures) as first_viewer:
        first_event = await next_event(first_viewer)
        assert first_event["whole"] and set(first_event["models"]) == {"a/1", "still/1", "b/2"}
        assert first_event["models"]["b/2"]["because"] == "no such file"
        assert "ProcessEnded" in [event["event"] for event in first_event["events"]]
        async with viewing(figures) as second_viewer:
            assert (await next_event(second_viewer))["whole"]
            snapshots_before = len(snapshots)
            next_events = [await next_event(first_viewer), await next_event(second_viewer)]
            assert next_events[0]["models"]["a/1"]["recent"]["rate"] > 0
            assert len(snapshots) <= snapshots_before + 3, "each viewer has looks of its own"


async def test_requests_are_handled_between_the_processes_whose_memory_is_read(
    run_dir: Path, snapshots: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    handled: list[int] = []

    def sizes(_: int) -> Iterator[int]:
        for number in range(3):
            asyncio.get_running_loop().call_soon(handled.append, number)
            yield number + 1
            assert handled[-1] == number

    monkeypatch.setattr(live, "proportional_sizes", sizes)
    async with running_feed(run_dir) as figures, viewing(figures) as viewer:
        server = (await next_event(viewer))["server"]
        assert (server["processes"], server["pss_bytes"]) == (3, 6)


async def test_unchanged_models_are_not_sent_again(run_dir: Path, snapshots: list[float]) -> None:
    async with running_feed(run_dir) as figures, viewing(figures) as viewer:
        await next_event(viewer)
        await next_event(viewer)
        third_event = await next_event(viewer)
        assert "whole" not in third_event and set(third_event["models"]) == {"a/1"}
        assert third_event["events"] == [] and third_event["gone"] == []


async def test_a_viewer_that_missed_one_receives_all(run_dir: Path, snapshots: list[float]) -> None:
    async with (
        running_feed(run_dir) as figures,
        viewing(figures) as slow_viewer,
        viewing(figures) as fast_viewer,
    ):
        await next_event(slow_viewer)
        for _ in range(4):
            await next_event(fast_viewer)
        assert (await next_event(slow_viewer))["whole"]


async def test_no_snapshots_are_taken_without_viewers(
    run_dir: Path, snapshots: list[float]
) -> None:
    async with running_feed(run_dir) as figures:
        assert figures._task is None and not snapshots
        for _ in range(2):
            async with viewing(figures) as viewer:
                await next_event(viewer)
            assert figures._task is None


async def test_the_exit_of_the_server_ends_the_feed(run_dir: Path, snapshots: list[float]) -> None:
    async with running_feed(run_dir) as figures, viewing(figures) as viewer:
        await next_event(viewer)
        figures.end_streams()
        async for _ in viewer:
            pass


@pytest.mark.parametrize("failing", ["EventWatch", "_SnapshotSource"])
async def test_an_error_ends_the_streams_of_the_current_viewers_only(
    run_dir: Path, snapshots: list[float], monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    async with running_feed(run_dir) as figures:
        with monkeypatch.context() as patch:
            patch.setattr(live, failing, None)
            assert [event async for event in figures._stream_events()] == []
        async with viewing(figures) as viewer:
            assert (await next_event(viewer))["whole"]


async def test_unauthorised_viewers_are_refused(run_dir: Path) -> None:
    async with running_feed(run_dir) as figures:
        gateway: Any = None
        cross_site: Any = SimpleNamespace(headers={"Sec-Fetch-Site": "cross-site"})
        with pytest.raises(PermissionDenied, match="pages of other origins"):
            await figures.respond(gateway, cross_site)
        figures._viewer_count = 32
        with pytest.raises(QueueFull, match=r"32 dashboards \(the maximum\)"):
            await figures.respond(gateway, SimpleNamespace(headers={}))  # type: ignore[arg-type]


def test_the_policy_allows_only_the_content_of_the_page() -> None:
    body, headers = live._load_page()
    policy = dict(re.findall(r"([a-z]+-src) ([^;\r]+)", headers.decode()))
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    for tag in ("style", "script"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", body.decode(), re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    markup = re.sub(r"<(style|script)>.*?</\1>", "", body.decode(), flags=re.DOTALL)
    assert not re.search(r"\s(on\w+|style)=|https?://|src=", markup)
    assert body.count(b"\n") <= 900
