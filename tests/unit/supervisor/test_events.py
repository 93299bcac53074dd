"""The server's events: to whom they are sent, what they are made of, what a slow reader loses."""

import asyncio
import contextlib
import dataclasses
import re
import typing
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from shmserve.cli.events import _as_json, _as_text
from shmserve.client.events import TOPICS, EventReader, GapDetector, ReceivedEvent
from shmserve.errors import Disconnected
from shmserve.ipc import endpoints
from shmserve.ipc.messages import publications
from shmserve.ipc.messages import publications as m
from shmserve.ipc.messages.publications import HealthChanged
from shmserve.ipc.messages.unions import ServerEvent
from shmserve.ipc.transport import frames
from shmserve.supervisor import events as events_package
from shmserve.supervisor.events import EventFeed, EventPublisher, Subscriptions, changes
from tests.support.waiting import until_async

STARTED_EVENT = m.ProcessStarted(7, "worker simple.0 cpu")
READY_EVENT = HealthChanged(live=True, ready=True, exiting=False)


@contextlib.asynccontextmanager
async def open_publisher(
    run_dir: Path, on_subscription: Callable[[str, bool], None] = lambda prefix, subscribed: None
) -> AsyncIterator[EventPublisher]:
    publisher = EventPublisher()
    publisher.open(endpoints.events(run_dir), on_subscription)
    try:
        yield publisher
    finally:
        publisher.close()


def test_subscribe_and_unsubscribe_frames() -> None:
    subscriptions = Subscriptions()
    assert not subscriptions.has_subscriber("models")
    assert subscriptions.apply_message(b"\1mod") == ("mod", True)
    assert subscriptions.has_subscriber("models") and not subscriptions.has_subscriber("health")
    assert subscriptions.apply_message(b"\1") == ("", True)
    assert subscriptions.has_subscriber("health")
    assert subscriptions.apply_message(b"\0") == ("", False)
    assert subscriptions.apply_message(b"\0mod") == ("mod", False)
    assert not subscriptions.has_subscriber("models")
    assert subscriptions.apply_message(b"\0never") == ("never", False)


@given(st.binary(max_size=20))
def test_any_bytes_are_a_subscription_or_nothing(frame: bytes) -> None:
    assert (Subscriptions().apply_message(frame) is None) == (frame[:1] not in (b"\0", b"\1"))


def test_a_publisher_before_its_opening_has_no_subscribers() -> None:
    publisher = EventPublisher()
    publisher.publish(STARTED_EVENT)
    assert not publisher.has_subscriber(publications.PROCESSES)
    publisher.close()


async def test_events_without_subscribers_are_not_sent(run_dir: Path) -> None:
    records: list[tuple[str, bool]] = []
    async with open_publisher(run_dir, lambda *change: records.append(change)) as publisher:
        publisher.publish(STARTED_EVENT)  # number 1 is the first that is sent
        with EventReader(run_dir, [publications.PROCESSES]) as reader:
            await until_async(lambda: publisher.has_subscriber(publications.PROCESSES))
            assert not publisher.has_subscriber(publications.MODELS)
            publisher.publish(m.LoadRefused("m", "no"))
            publisher.publish(STARTED_EVENT)
            arrived = await asyncio.to_thread(reader._receive, 5000)
            assert arrived is not None
            _, header, body = arrived
            assert (header.sequence, body) == (1, [STARTED_EVENT])
        await until_async(lambda: not publisher.has_subscriber(publications.PROCESSES))
    assert records == [(publications.PROCESSES, True), (publications.PROCESSES, False)]


async def test_the_socket_is_accessible_to_its_owner_only(run_dir: Path) -> None:
    async with open_publisher(run_dir):
        assert (run_dir / "events").stat().st_mode & 0o777 == 0o600


async def test_a_missing_run_directory_is_reported(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Only the events are missing then."""
    async with open_publisher(run_dir / "none") as publisher:
        publisher.publish(STARTED_EVENT)
    assert "the event socket cannot be opened, so no events are sent: [Errno 2] " in caplog.text


@given(st.sets(st.integers(1, 60), min_size=1))
def test_missing_events_are_counted(arrived: set[int]) -> None:
    gaps = GapDetector()
    lost_counts = [gaps.count_before("models", number) for number in sorted(arrived)]
    assert lost_counts[0] == 0  # events before the first received one are not counted as lost
    assert sum(lost_counts) == max(arrived) - min(arrived) + 1 - len(arrived)
    assert gaps.count_before("health", 50) == 0 and gaps.count_up_to("health", 50) == 0
    assert gaps.count_up_to("health", 53) == 3 and gaps.count_before("health", 54) == 0
    assert gaps.count_up_to("new", 7) == 0


def _count_events(reader: EventReader, total: int = 0) -> tuple[int, int]:
    """Return how many events are read and lost until they are `total`, or one has the pid -1."""
    read_count = lost_count = 0
    for received_event in reader.follow():
        read_count += received_event.event is not None
        lost_count += received_event.lost_count
        if read_count + lost_count == total or getattr(received_event.event, "pid", 0) == -1:
            return read_count, lost_count
    raise AssertionError


async def test_a_slow_reader_loses_events_and_knows_how_many(run_dir: Path) -> None:
    count = 50_000
    async with open_publisher(run_dir) as publisher:
        with EventReader(run_dir, [publications.PROCESSES]) as reader:
            await until_async(lambda: publisher.has_subscriber(publications.PROCESSES))
            for number in range(count):  # the publisher does not wait for subscribers
                publisher.publish(m.ProcessStarted(number, "x"))

            reading_task = asyncio.ensure_future(asyncio.to_thread(_count_events, reader))
            while not reading_task.done():  # until an event arrives, when the queue has space again
                publisher.publish(m.ProcessStarted(-1, "x"))
                await asyncio.sleep(0.01)
            read_count, lost_count = await reading_task
    assert 0 < read_count < count
    assert lost_count >= count + 1 - read_count


async def test_a_loss_of_the_last_events_is_reported(run_dir: Path) -> None:
    """Nothing follows them that could show a gap."""
    count = 50_000
    feeds: list[EventFeed] = []
    async with open_publisher(run_dir, lambda *c: feeds[0].on_subscription(*c)) as publisher:
        feeds.append(feed(publisher, {}, []))
        with EventReader(run_dir, [publications.PROCESSES]) as reader:
            await until_async(lambda: publisher.has_subscriber(publications.PROCESSES))
            for number in range(count):
                publisher.publish(m.ProcessStarted(number, "x"))
            read_count, lost_count = await asyncio.to_thread(_count_events, reader, count)
    assert 0 < read_count < count
    assert read_count + lost_count == count


def feed(publisher: EventPublisher, states: dict[Any, Any], calls: list[str]) -> EventFeed:
    process: Any = type("Process", (), {"pid": 7, "title": STARTED_EVENT.title})()
    return EventFeed(
        publisher,
        lambda: dict(states),
        lambda: [process],
        list,
        lambda: READY_EVENT,
        lambda: calls.append("counters"),
    )


def test_changes_of_models() -> None:
    before = {("a", "1"): ("READY", ""), ("b", "1"): ("LOADING", ""), ("c", "2"): ("READY", "")}
    after = {("a", "1"): ("READY", ""), ("b", "1"): ("READY", ""), ("d", ""): ("UNAVAILABLE", "x")}
    assert list(changes(before, after)) == [
        m.ModelChanged("c", "2", "", ""),
        m.ModelChanged("b", "1", "READY", ""),
        m.ModelChanged("d", "", "UNAVAILABLE", "x"),
    ]


async def test_a_snapshot_precedes_the_events(run_dir: Path) -> None:
    states = {("a", "1"): ("LOADING", "")}
    pending_calls: list[str] = []
    feeds: list[EventFeed] = []
    async with open_publisher(run_dir, lambda *c: feeds[0].on_subscription(*c)) as publisher:
        feeds.append(feed(publisher, states, pending_calls))
        feeds[0].models_changed()  # no process receives it
        with EventReader(run_dir) as reader:
            snapshot = await asyncio.to_thread(reader.snapshot)
            assert [received.event for received in snapshot] == [
                READY_EVENT,
                m.ModelChanged("a", "1", "LOADING", ""),
                STARTED_EVENT,
            ]
            assert pending_calls == ["counters"]
            states["a", "1"] = ("READY", "")
            feeds[0].models_changed()
            received_event = await asyncio.to_thread(next, reader.follow())
            assert received_event.event == m.ModelChanged("a", "1", "READY", "")
            await until_async(lambda: len(pending_calls) > 1)  # a second later
        await until_async(lambda: not publisher.has_subscriber(publications.COUNTERS))
        await until_async(lambda: feeds[0]._timer is None)


async def test_the_end_of_a_server_is_reported(run_dir: Path) -> None:
    async with open_publisher(run_dir) as publisher:
        reader = EventReader(run_dir)
        await until_async(lambda: publisher.has_subscriber(publications.MODELS))
    with reader, pytest.raises(Disconnected, match="the server has exited"):
        await asyncio.to_thread(next, reader.follow())


def test_no_server(run_dir: Path) -> None:
    with pytest.raises(Disconnected, match="no server publishes events for this user at"):
        EventReader(run_dir)


def test_a_publisher_that_is_no_server_is_refused(run_dir: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.XPUB) as socket:
        socket.bind(endpoints.events(run_dir))
        with EventReader(run_dir, [publications.MODELS]) as reader:
            assert socket.poll(5000)
            socket.send_multipart([b"models", b"\xc1"])
            with pytest.raises(Disconnected, match="not events of"):
                next(reader.follow())


def test_the_page_has_every_event_and_field() -> None:
    page = (Path(events_package.__file__).parent / "EVENTS.md").read_text()
    for kind, topic in publications.TOPICS.items():
        (row,) = (
            text
            for text in page.splitlines()
            if text.startswith(f"| `{topic}` | `{kind.__name__}` |")
        )
        cell = re.sub(r" \([^)]*\)|;.*", "", row.split(" | ", 2)[2]).removesuffix(" |")
        assert cell == ", ".join(f"{f.name}: {f.type}" for f in dataclasses.fields(kind)), row
    assert f'`[{frames.VERSION}, ["EventHeader", sequence, time_ns],' in page
    assert set(publications.TOPICS) == set(typing.get_args(ServerEvent))
    assert set(publications.TOPICS.values()) == set(TOPICS)


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (READY_EVENT, "server: ready"),
        (HealthChanged(live=True, ready=True, exiting=True), "server: stopping"),
        (m.ModelChanged("m", "1", "READY", ""), "model m version 1: READY"),
        (m.ModelChanged("m", "", "UNAVAILABLE", "no\n"), "model m: UNAVAILABLE (no)"),
        (m.ModelChanged("m", "1", "", ""), "model m version 1: gone"),
        (m.LoadRefused("m", "a\x1bb"), "model m: not loaded (a?b)"),
        (m.InstancesChanged("m", "1", 2, 3, "they wait"),
         "model m version 1: 3 instances (before: 2) (they wait)"),
        (STARTED_EVENT, "process 7 worker simple.0 cpu: runs"),
        (m.ProcessEnded(7, "x", "signal 9"), "process 7 x: ended (signal 9)"),
        (m.RegionRegistered("r", "/k", 8, 64, 1000, -1),
         "region r: 64 bytes, /k from 8, of uid 1000"),
        (m.RegionRegistered("r", "", 0, 64, 0, 1), "region r: 64 bytes, on device 1, of uid 0"),
        (m.RegionUnregistered("r", ""), "region r: unregistered"),
        (m.RegionBlamed("r", "cut"), "region r: a request failed (cut)"),
        (m.ModelCounted("m", "1", {"a": 1, "b": 2}), "counters of m version 1: a=1 b=2"),
    ],
)  # fmt: skip
def test_an_event_is_one_json_line(event: Any, line: str) -> None:
    received = ReceivedEvent(publications.TOPICS[type(event)], event, 1_700_000_000_999_999_999, 0)
    assert received.topic in TOPICS
    assert _as_text(received) == f"2023-11-14T22:13:20.999Z {line}"
    assert f'"event": "{type(event).__name__}"' in _as_json(received)
