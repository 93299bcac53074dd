"""The publisher of events: serialises and sends only what somebody subscribes to.

Subscribers name the topics they want, which XPUB reports here. Each subscriber has a queue of
bounded length of its own: one that does not read loses events, and keeps nobody waiting. The events
of a topic are numbered; by that it knows how many it lost.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from shmserve.ipc.messages.events import (
    SEQUENCES,
    SNAPSHOT,
    TOPICS,
    EventHeader,
    SequenceReached,
)
from shmserve.ipc.transport.frames import pack

if TYPE_CHECKING:
    from shmserve.supervisor.events.xpub import Xpub

logger = logging.getLogger(__name__)


class Subscriptions:
    """The prefixes of topics that somebody subscribes to, as XPUB reports them (pure)."""

    def __init__(self) -> None:
        self._prefixes: set[bytes] = set()

    def update(self, frame: bytes) -> tuple[str, bool] | None:
        """Apply a subscriber's message: the prefix, and whether it is wanted from now on. None: it
        is not a subscription."""
        if frame[:1] not in (b"\0", b"\1"):
            return None
        prefix, wanted = frame[1:], frame[:1] == b"\1"
        if wanted:
            self._prefixes.add(prefix)
        else:
            self._prefixes.discard(prefix)
        return prefix.decode("utf-8", "replace"), wanted

    def want(self, topic: str) -> bool:
        """Whether an event on this topic would reach anybody."""
        return any(topic.encode().startswith(prefix) for prefix in self._prefixes)


class EventPublisher:
    """Sends events to subscribers; before `open`, and after `close`, to nobody."""

    def __init__(self) -> None:
        self._subscriptions = Subscriptions()
        self._sequences: Counter[str] = Counter()
        self._socket: Xpub | None = None

    def open(self, endpoint: str, on_subscription: Callable[[str, bool], None]) -> None:
        """Listen at ipc://PATH; `on_subscription(prefix, wanted)` is called when the first wants
        such topics, and when the last does not any more.

        Where that fails nothing but the events is missing, and the log says so.
        """
        from shmserve.supervisor.events.xpub import Xpub  # has threads: not while others are forked

        def updated(frame: bytes) -> None:
            subscription = self._subscriptions.update(frame)
            if subscription is not None:
                on_subscription(*subscription)

        try:
            self._socket = Xpub(endpoint, updated)
        except OSError as error:
            logger.error("no events can be listened to: %s", error)

    def wants(self, topic: str) -> bool:
        """Whether anybody subscribes to a topic."""
        return self._socket is not None and self._subscriptions.want(topic)

    def publish(self, event: Any) -> None:
        """Send an event to the subscribers of its topic."""
        topic = TOPICS[type(event)]
        if self.wants(topic):
            self._sequences[topic] += 1
            self._send(topic, self._sequences[topic], (event,))

    def respond(self, topic: str, events: Iterable[Any]) -> None:
        """Send a snapshot to the one who asked for it, by a topic that is its own."""
        assert topic.startswith(SNAPSHOT)
        self._send(topic, 0, events)

    def number(self, topic: str) -> None:
        """Send how far each topic is to who asked for it, by a topic that is its own."""
        assert topic.startswith(SEQUENCES)
        topics = sorted(set(TOPICS.values()))
        self._send(topic, 0, [SequenceReached(name, self._sequences[name]) for name in topics])

    def _send(self, topic: str, sequence: int, events: Iterable[Any]) -> None:
        if self._socket is not None:
            header = EventHeader(sequence, time.time_ns())
            self._socket.send(topic.encode(), pack((header, *events)))

    def close(self) -> None:
        """Disconnect everybody."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
