"""A reader of a server's events, which receives the current state and then each change."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from shmserve.client import discovery
from shmserve.errors import Disconnected
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
from shmserve.ipc.transport.frames import MalformedMessage, unpack

TOPICS = (HEALTH, MODELS, PROCESSES, REGIONS, COUNTERS)

_SNAPSHOT_TIMEOUT_MS = 10_000
_SILENCE_MS = 250  # time without events after which the reader checks for losses
_DISCONNECT_EVENTS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED


@dataclass(frozen=True, slots=True)
class ReceivedEvent:
    """A received event.

    Attributes:
        topic: The event's topic.
        event: A message of shmserve.ipc.messages.publications, or None if this object only reports
            lost events.
        time_ns: The time of the event in nanoseconds since the epoch.
        lost_count: The number of lost events of the topic before this event.
    """

    topic: str
    event: Any
    time_ns: int
    lost_count: int


class GapDetector:
    """A detector of lost events, by the sequence numbers of each topic."""

    def __init__(self) -> None:
        self._latest_by_topic: dict[str, int] = {}

    def count_before(self, topic: str, number: int) -> int:
        """Return the number of lost events between this event and the last one received."""
        latest_number = self._latest_by_topic.get(topic, number - 1)
        self._latest_by_topic[topic] = number
        return max(number - latest_number - 1, 0)

    def count_up_to(self, topic: str, number: int) -> int:
        """Return the number of lost events if the server's latest event has this number."""
        latest_number = self._latest_by_topic.get(topic, number)
        self._latest_by_topic[topic] = max(latest_number, number)
        return max(number - latest_number, 0)


class EventReader:
    """A subscriber to topics of a server's events.

    Args:
        run_dir: The run directory, as for `shmserve.client.connect`.
        topics: The topics to receive, by default all.

    Raises:
        Disconnected: There is no server.
    """

    def __init__(
        self, run_dir: str | os.PathLike[str] | None = None, topics: Iterable[str] = TOPICS
    ) -> None:
        endpoint = endpoints.events(discovery.find(run_dir))
        if not os.access(endpoint.removeprefix("ipc://"), os.W_OK):
            text = f"no server publishes events for this user at {endpoint}"
            raise Disconnected(f"{text}; start one, or give the run directory of another")
        self._topics = tuple(topics)
        self._gaps = GapDetector()
        self._output_fd: int | None = None
        self._context = zmq.Context(io_threads=1)
        try:
            self._socket = self._context.socket(zmq.SUB)
            self._socket.set(zmq.LINGER, 0)
            self._monitor = self._socket.get_monitor_socket(_DISCONNECT_EVENTS)
            self._socket.connect(endpoint)
            for topic in self._topics:
                self._socket.subscribe(topic)
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise

    def snapshot(self) -> list[ReceivedEvent]:
        """Return the current state, which includes all earlier events.

        Raises:
            Disconnected: The server has exited, or does not respond in time.
        """
        snapshot_topic = SNAPSHOT + secrets.token_hex(8)
        self._socket.subscribe(snapshot_topic)
        try:
            while True:
                publication = self._receive(_SNAPSHOT_TIMEOUT_MS)
                if publication is None:
                    text = f"the server did not send its state within {_SNAPSHOT_TIMEOUT_MS} ms"
                    raise Disconnected(text)
                topic, header, events = publication
                if topic == snapshot_topic:
                    return [ReceivedEvent(topic, event, header.time_ns, 0) for event in events]
                self._gaps.count_before(topic, header.sequence)
        finally:
            self._socket.unsubscribe(snapshot_topic)

    def follow(self, output_fd: int | None = None) -> Iterator[ReceivedEvent]:
        """Yield events as they occur.

        After 250 ms without an event, the reader requests the server's latest sequence numbers, to
        detect that a topic's latest events were lost.

        Args:
            output_fd: The descriptor to which the caller writes the events.

        Raises:
            BrokenPipeError: The reader of `output_fd` has closed it.
            Disconnected: The server has exited.
        """
        self._output_fd = output_fd
        is_silent = False
        while True:
            message = self._receive(None if is_silent else _SILENCE_MS)
            if message is None:
                is_silent = True
                self._socket.subscribe(SEQUENCES + secrets.token_hex(8))
                continue
            topic, header, events = message
            if topic.startswith(SEQUENCES):
                self._socket.unsubscribe(topic)
                yield from self._report_losses(header, events)
                continue
            is_silent = False
            lost_count = self._gaps.count_before(topic, header.sequence)
            for event in events:
                yield ReceivedEvent(topic, event, header.time_ns, lost_count)
                lost_count = 0

    def _report_losses(
        self, header: EventHeader, events: list[SequenceReached]
    ) -> Iterator[ReceivedEvent]:
        for sequence_reached in events:
            lost_count = self._gaps.count_up_to(sequence_reached.topic, sequence_reached.sequence)
            if lost_count and sequence_reached.topic in self._topics:
                yield ReceivedEvent(sequence_reached.topic, None, header.time_ns, lost_count)

    def _receive(self, timeout_ms: int | None) -> tuple[str, EventHeader, list[Any]] | None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        if self._output_fd is not None:
            poller.register(self._output_fd, zmq.POLLERR)
        while True:
            ready_sockets = dict(poller.poll(timeout_ms))
            if self._output_fd in ready_sockets:
                raise BrokenPipeError(errno.EPIPE, "the reader of the output has closed it")
            if self._socket in ready_sockets:
                topic, frame = self._socket.recv_multipart()
                try:
                    header, *events = unpack(frame)
                except MalformedMessage as error:
                    text = f"received data that are not events of a shmserve server: {error}"
                    raise Disconnected(text) from None
                return topic.decode(), header, events
            if self._monitor in ready_sockets:
                recv_monitor_message(self._monitor)
                raise Disconnected("the server has exited")
            return None

    def close(self) -> None:
        """Close the subscription."""
        self._socket.disable_monitor()
        self._monitor.close()
        self._context.destroy(linger=0)

    def __enter__(self) -> EventReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
