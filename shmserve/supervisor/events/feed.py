"""The event stream: a publisher that serialises and sends only what somebody subscribes to, and a
feed of derived events: changes of models' states, counters once a second, a snapshot for each new
subscriber.

Subscribers name the topics they want, which XPUB reports. Each has a bounded queue of its own: one
that does not read loses events, and keeps nobody waiting. The events of a topic are numbered; by
that a subscriber knows how many it lost.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from shmserve.ipc.messages.publications import (
    COUNTERS,
    RECENT,
    SEQUENCES,
    SNAPSHOT,
    TOPICS,
    EventHeader,
    ModelChanged,
    ModelCounted,
    ProcessStarted,
    SequenceReached,
)
from shmserve.ipc.transport.frames import pack
from shmserve.supervisor.processes.table import Child
from shmserve.supervisor.regions.region import OpenRegion

if TYPE_CHECKING:
    from shmserve.supervisor.events.xpub import Xpub

logger = logging.getLogger(__name__)

_MOST_RECENT = 50  # events of each topic that are remembered


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
        # By topic: regions come and go with programs, and leave the others' where they are.
        self._recent: dict[str, deque[tuple[int, Any]]] = {}
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
        """Send an event to the subscribers of its topic; but for counters it is remembered, too."""
        topic = TOPICS[type(event)]
        if topic != COUNTERS:
            recent = self._recent.setdefault(topic, deque(maxlen=_MOST_RECENT))
            recent.append((time.time_ns(), event))
        if self.wants(topic):
            self._sequences[topic] += 1
            self._send(topic, self._sequences[topic], (event,))

    def respond(self, topic: str, events: Iterable[Any]) -> None:
        """Send a snapshot to the one who asked for it, by a topic that is its own."""
        assert topic.startswith(SNAPSHOT)
        self._send(topic, 0, events)

    def repeat(self, topic: str) -> None:
        """Send the latest events again, in order, to who asked for them, by a topic of its own."""
        assert topic.startswith(RECENT)
        recent = sorted(chain(*self._recent.values()), key=itemgetter(0))
        for time_ns, event in recent:
            self._send(topic, 0, (event,), time_ns)

    def number(self, topic: str) -> None:
        """Send how far each topic is to who asked for it, by a topic that is its own."""
        assert topic.startswith(SEQUENCES)
        topics = sorted(set(TOPICS.values()))
        self._send(topic, 0, [SequenceReached(name, self._sequences[name]) for name in topics])

    def _send(
        self, topic: str, sequence: int, events: Iterable[Any], time_ns: int | None = None
    ) -> None:
        if self._socket is not None:
            header = EventHeader(sequence, time_ns or time.time_ns())
            self._socket.send(topic.encode(), pack((header, *events)))

    def close(self) -> None:
        """Disconnect everybody."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


_COUNTERS_EVERY_S = 1.0

# (state, reason) of (name, version)
States = Mapping[tuple[str, str], tuple[str, str]]


@dataclass(slots=True, eq=False)
class EventFeed:
    """Derives events, while somebody subscribes to them.

    models(): the state of each version; processes(), regions(), health(): what there is;
    count(): have the counters of every model published.
    """

    _publisher: EventPublisher
    _models: Callable[[], States]
    _processes: Callable[[], list[Child]]
    _regions: Callable[[], list[OpenRegion]]
    _health: Callable[[], Any]
    _count: Callable[[], None]
    _known: States = field(init=False, default_factory=dict)
    _timer: asyncio.TimerHandle | None = None

    def subscribed(self, prefix: str, wanted: bool) -> None:
        """Serve a new subscription to topics that begin with `prefix` (not `wanted`: its end)."""
        if wanted and prefix.startswith(SNAPSHOT):
            self._publisher.respond(prefix, self.snapshot())
        if wanted and prefix.startswith(SEQUENCES):
            self._publisher.number(prefix)
        if wanted and prefix.startswith(RECENT):
            self._publisher.repeat(prefix)
        if self._timer is None:
            self._tick()

    def models_changed(self) -> None:
        """Publish the difference of the models' states since the last look."""
        before, self._known = self._known, self._models()
        for event in changes(before, self._known):
            self._publisher.publish(event)

    def snapshot(self) -> Iterator[Any]:
        """The server's state, as events."""
        yield self._health()
        yield from changes({}, self._models())
        for child in self._processes():
            yield ProcessStarted(child.pid, child.title)
        for region in self._regions():
            yield region.registered()

    def _tick(self) -> None:
        self._timer = None
        if self._publisher.wants(COUNTERS):
            self._count()
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_COUNTERS_EVERY_S, self._tick)


def changes(before: States, after: States) -> Iterator[ModelChanged]:
    """The difference of two snapshots of the models' states, as events."""
    for name, version in before.keys() - after.keys():
        yield ModelChanged(name, version, "", "")
    for (name, version), state in after.items():
        if before.get((name, version)) != state:
            yield ModelChanged(name, version, *state)


_COUNTED = ("success", "fail", "inference_count", "execution_count", "pending", "executing")
_DURATIONS = ("queue_ns", "compute_input_ns", "compute_infer_ns", "compute_output_ns")


def counted(name: str, version: str, statistics: dict[str, Any]) -> ModelCounted:
    """The event for a scheduler's snapshot; times are those of all requests together, in ns."""
    counters = {
        **{name: statistics[name] for name in _COUNTED},
        "request_ns": statistics["success_ns"],
        **{name: statistics[name] for name in _DURATIONS},
    }
    return ModelCounted(name, version, counters)
