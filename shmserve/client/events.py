"""A server's events, for a program of its user on this host: what is, and what happens then."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from shmserve.client.errors import Disconnected
from shmserve.client.server import discovery
from shmserve.ipc import endpoints
from shmserve.ipc.messages.publications import (
    COUNTERS,
    HEALTH,
    MODELS,
    PROCESSES,
    REGIONS,
    SEQUENCES,
    SNAPSHOT,
    EventHeader,
    SequenceReached,
)
from shmserve.ipc.transport.frames import unpack
from shmserve.ipc.transport.records import MalformedMessage

TOPICS = (HEALTH, MODELS, PROCESSES, REGIONS, COUNTERS)

_ANSWER_WITHIN_MS = 10_000
_SILENCE_MS = 250  # after which what comes next would tell of losses too late
_ENDINGS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED


@dataclass(frozen=True, slots=True)
class ReceivedEvent:
    """An event of shmserve.ipc.messages.publications and its time in ns since the epoch.

    `lost` is the number of events of the topic that were lost before it. `event` is None where only
    a loss is reported.
    """

    topic: str
    event: Any
    time_ns: int
    lost: int


class Gaps:
    """A detector of lost events, by their numbers in each topic (pure)."""

    def __init__(self) -> None:
        self._latest: dict[str, int] = {}

    def before(self, topic: str, sequence: int) -> int:
        """The number of those that were lost between this one and the one that came before it."""
        latest = self._latest.get(topic, sequence - 1)
        self._latest[topic] = sequence
        return max(sequence - latest - 1, 0)

    def reached(self, topic: str, sequence: int) -> int:
        """The number of those that were lost where everything up to `sequence` has been sent."""
        latest = self._latest.get(topic, sequence)
        self._latest[topic] = max(latest, sequence)
        return max(sequence - latest, 0)


class EventReader:
    """Listens to a server's events, of these topics.

    run_dir: as `shmserve.client.connect` has it. Raises Disconnected where there is no server.
    """

    def __init__(
        self, run_dir: str | os.PathLike[str] | None = None, topics: Iterable[str] = TOPICS
    ) -> None:
        endpoint = endpoints.events(discovery.find(run_dir))
        if not Path(endpoint.removeprefix("ipc://")).is_socket():
            raise Disconnected(f"no server tells its events at {endpoint}")
        self._topics = tuple(topics)
        self._gaps = Gaps()
        self._context = zmq.Context(io_threads=1)
        try:
            self._socket = self._context.socket(zmq.SUB)
            self._socket.set(zmq.LINGER, 0)
            self._monitor = self._socket.get_monitor_socket(_ENDINGS)
            self._socket.connect(endpoint)
            for topic in self._topics:
                self._socket.subscribe(topic)
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise

    def snapshot(self) -> list[ReceivedEvent]:
        """The present state; events that came before it are in it. Raises Disconnected."""
        mine = SNAPSHOT + secrets.token_hex(8)
        self._socket.subscribe(mine)
        try:
            while True:
                arrived = self._next(_ANSWER_WITHIN_MS)
                if arrived is None:
                    raise Disconnected("the server does not say what is")
                topic, header, events = arrived
                if topic == mine:
                    return [ReceivedEvent(topic, event, header.time_ns, 0) for event in events]
                self._gaps.before(topic, header.sequence)
        finally:
            self._socket.unsubscribe(mine)

    def follow(self) -> Iterator[ReceivedEvent]:
        """The events as they happen. Raises Disconnected when the server has ended.

        Where nothing comes any more the server is asked how far it is: what was lost at the end is
        told too.
        """
        quiet = False
        while True:
            arrived = self._next(None if quiet else _SILENCE_MS)
            if arrived is None:
                quiet = True
                self._socket.subscribe(SEQUENCES + secrets.token_hex(8))
                continue
            topic, header, events = arrived
            if topic.startswith(SEQUENCES):
                self._socket.unsubscribe(topic)
                yield from self._missing(header, events)
                continue
            quiet = False
            lost = self._gaps.before(topic, header.sequence)
            for event in events:
                yield ReceivedEvent(topic, event, header.time_ns, lost)
                lost = 0

    def _missing(
        self, header: EventHeader, events: list[SequenceReached]
    ) -> Iterator[ReceivedEvent]:
        for reached in events:
            lost = self._gaps.reached(reached.topic, reached.sequence)
            if lost and reached.topic in self._topics:
                yield ReceivedEvent(reached.topic, None, header.time_ns, lost)

    def _next(self, timeout_ms: int | None) -> tuple[str, EventHeader, list[Any]] | None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(timeout_ms))
            if self._socket in ready:
                topic, frame = self._socket.recv_multipart()
                try:
                    header, *events = unpack(frame)
                except MalformedMessage as error:
                    raise Disconnected(f"what tells events is no server: {error}") from None
                return topic.decode(), header, events
            if self._monitor in ready:
                recv_monitor_message(self._monitor)
                raise Disconnected("the server has ended")
            return None

    def close(self) -> None:
        """Listen no more."""
        self._socket.disable_monitor()
        self._monitor.close()
        self._context.destroy(linger=0)

    def __enter__(self) -> EventReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
