"""The event stream: a publish/subscribe feed of changes in the server, over ZeroMQ."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import Any

import zmq

from shmserve.ipc.messages.publications import (
    COUNTERS,
    RECENT,
    SEQUENCES,
    SNAPSHOT,
    TOPICS,
    EventHeader,
    ModelChanged,
    ProcessStarted,
    SequenceReached,
)
from shmserve.ipc.transport.frames import pack
from shmserve.supervisor.processes.children import Child
from shmserve.supervisor.regions.region import OpenRegion

logger = logging.getLogger(__name__)

_MAX_RECENT = 50  # number of recent events that are stored for each topic
MAX_QUEUED = 1000  # maximum messages queued for a subscriber; further messages are lost
_LONGEST_MESSAGE = 256  # maximum bytes of a subscriber's message, which contains only a topic


class Subscriptions:
    """The set of subscribed topic prefixes, as XPUB reports them (pure)."""

    def __init__(self) -> None:
        self._prefixes: set[bytes] = set()

    def apply_message(self, frame: bytes) -> tuple[str, bool] | None:
        """Apply a subscriber's message.

        Returns:
            The prefix and whether it is subscribed now, or None if this is no subscription.
        """
        if frame[:1] not in (b"\0", b"\1"):
            return None
        prefix, is_subscribed = frame[1:], frame[:1] == b"\1"
        if is_subscribed:
            self._prefixes.add(prefix)
        else:
            self._prefixes.discard(prefix)
        return prefix.decode("utf-8", "replace"), is_subscribed

    def has_subscriber(self, topic: str) -> bool:
        """Return whether an event on this topic has a subscriber."""
        return any(topic.encode().startswith(prefix) for prefix in self._prefixes)


class Xpub:
    """A ZeroMQ XPUB socket on the event loop, at ipc://PATH, for programs of this user.

    `on_message` is called with each message of a subscriber. The process must not fork after the
    socket is created, since a child would not have the threads of libzmq.

    Raises:
        OSError: The socket cannot be created.
    """

    def __init__(self, endpoint: str, on_message: Callable[[bytes], None]) -> None:
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context(io_threads=1)
        try:
            self._context.set(zmq.MAX_SOCKETS, 4)
            self._socket = self._context.socket(zmq.XPUB)
            self._socket.set(zmq.LINGER, 0)
            self._socket.set(zmq.SNDHWM, MAX_QUEUED)
            self._socket.set(zmq.MAXMSGSIZE, _LONGEST_MESSAGE)
            self._socket.bind(endpoint)
            os.chmod(endpoint.removeprefix("ipc://"), 0o600)
        except (zmq.ZMQError, OSError) as error:
            self._context.destroy(linger=0)
            raise OSError(error.errno, error.strerror) from None
        self._fd = self._socket.fileno()
        self._loop.add_reader(self._fd, self._receive_all)

    def send(self, topic: bytes, frame: bytes) -> None:
        """Send a message to each subscriber of the topic whose queue is not full."""
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart([topic, frame], zmq.NOBLOCK)
        # libzmq's descriptor is edge-triggered: sending may have cleared the signal of a message.
        if self._readable():
            self._loop.call_soon(self._receive_all)

    def _receive_all(self) -> None:
        while not self._socket.closed and self._readable():
            self._on_message(self._socket.recv(zmq.NOBLOCK))

    def _readable(self) -> bool:
        events = self._socket.get(zmq.EVENTS)
        return isinstance(events, int) and bool(events & zmq.POLLIN)

    def close(self) -> None:
        """Disconnect all subscribers."""
        self._loop.remove_reader(self._fd)
        self._context.destroy(linger=0)


class EventPublisher:
    """The publisher of events. Before `open` and after `close` it has no subscribers."""

    def __init__(self) -> None:
        self._subscriptions = Subscriptions()
        self._sequences: Counter[str] = Counter()  # the last sequence number of each topic
        # One queue for each topic, so that frequent events do not evict the events of other topics.
        self._recent_events: dict[str, deque[tuple[int, Any]]] = {}
        self._socket: Xpub | None = None

    def open(self, endpoint: str, on_subscription: Callable[[str, bool], None]) -> None:
        """Bind to ipc://PATH. An error is logged and disables only the events.

        `on_subscription(prefix, is_subscribed)` is called for the first subscription of a
        prefix, and when the last one ends.
        """

        def on_frame(frame: bytes) -> None:
            subscription = self._subscriptions.apply_message(frame)
            if subscription is not None:
                on_subscription(*subscription)

        try:
            self._socket = Xpub(endpoint, on_frame)
        except OSError as error:
            logger.error("the event socket cannot be opened, so no events are sent: %s", error)

    def has_subscriber(self, topic: str) -> bool:
        """Return whether a topic has a subscriber."""
        return self._socket is not None and self._subscriptions.has_subscriber(topic)

    def publish(self, event: Any) -> None:
        """Send an event to its subscribers; store it for `send_recent` unless it has counters."""
        topic = TOPICS[type(event)]
        if topic != COUNTERS:
            recent_events = self._recent_events.setdefault(topic, deque(maxlen=_MAX_RECENT))
            recent_events.append((time.time_ns(), event))
        if self.has_subscriber(topic):
            self._sequences[topic] += 1
            self._send(topic, self._sequences[topic], (event,))

    def process_started(self, child: Child) -> None:
        """Publish the start of a process."""
        self.publish(ProcessStarted(child.pid, child.title))

    def send_snapshot(self, topic: str, events: Iterable[Any]) -> None:
        """Send a snapshot on the topic of the subscriber that requested it."""
        self._send(topic, 0, events)

    def send_recent(self, topic: str) -> None:
        """Send the latest events again, in order, on the topic of the requesting subscriber."""
        for time_ns, event in sorted(chain(*self._recent_events.values()), key=itemgetter(0)):
            self._send(topic, 0, (event,), time_ns)

    def send_sequence_numbers(self, topic: str) -> None:
        """Send each topic's sequence number, on the topic of the requesting subscriber."""
        topics = sorted(set(TOPICS.values()))
        self._send(topic, 0, [SequenceReached(name, self._sequences[name]) for name in topics])

    def _send(self, topic: str, sequence: int, events: Iterable[Any], time_ns: int = 0) -> None:
        if self._socket is not None:
            header = EventHeader(sequence, time_ns or time.time_ns())
            self._socket.send(topic.encode(), pack((header, *events)))

    def close(self) -> None:
        """Disconnect all subscribers."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


_COUNTERS_INTERVAL_S = 1.0

# (state, reason) by (name, version)
States = Mapping[tuple[str, str], tuple[str, str]]


@dataclass(slots=True, eq=False)
class EventFeed:
    """The source of the events about the server's state, which callbacks read.

    `_request_counters()` requests the publication of every model's counters.
    """

    _publisher: EventPublisher
    _read_states: Callable[[], States]
    _list_processes: Callable[[], list[Child]]
    _list_regions: Callable[[], list[OpenRegion]]
    _read_health: Callable[[], Any]
    _request_counters: Callable[[], None]
    _published_states: States = field(init=False, default_factory=dict)
    _timer: asyncio.TimerHandle | None = None

    def on_subscription(self, prefix: str, is_subscribed: bool) -> None:
        """Respond to a new subscription to `prefix`, or process its end (not `is_subscribed`)."""
        if is_subscribed and prefix.startswith(SNAPSHOT):
            self._publisher.send_snapshot(prefix, self.snapshot())
        if is_subscribed and prefix.startswith(SEQUENCES):
            self._publisher.send_sequence_numbers(prefix)
        if is_subscribed and prefix.startswith(RECENT):
            self._publisher.send_recent(prefix)
        if self._timer is None:
            self._poll()

    def models_changed(self) -> None:
        """Publish the changes of models' states since the last call."""
        old_states, self._published_states = self._published_states, self._read_states()
        for event in changes(old_states, self._published_states):
            self._publisher.publish(event)

    def snapshot(self) -> Iterator[Any]:
        """Yield the server's state as events."""
        yield self._read_health()
        yield from changes({}, self._read_states())
        for child in self._list_processes():
            yield ProcessStarted(child.pid, child.title)
        for region in self._list_regions():
            yield region.registration_event()

    def _poll(self) -> None:
        self._timer = None
        if self._publisher.has_subscriber(COUNTERS):
            self._request_counters()
            self._timer = asyncio.get_running_loop().call_later(_COUNTERS_INTERVAL_S, self._poll)


def changes(before: States, after: States) -> Iterator[ModelChanged]:
    """Yield the differences of two snapshots of the models' states as events."""
    for name, version in before.keys() - after.keys():
        yield ModelChanged(name, version, "", "")
    for (name, version), state in after.items():
        if before.get((name, version)) != state:
            yield ModelChanged(name, version, *state)
