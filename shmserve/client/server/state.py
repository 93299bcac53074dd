"""The state of the server by its listener: models, losses, and the memory of its workers."""

from __future__ import annotations

import itertools
import threading
from abc import abstractmethod
from typing import Protocol

from shmserve.client.server.models import ClientModels
from shmserve.ipc.memory.mappings import Mappings
from shmserve.ipc.tensors.descriptors import Place

# Losses remembered: a thread may sleep through some.
_MOST_LOST = 4096


class Wakeable(Protocol):
    """A channel that looks around when it is woken."""

    def wake(self) -> None:
        """Have whoever waits look around; for any thread."""


class ServerState:
    """`models`, `lost` (endpoint -> successor or "") and `alive` are written by one thread, and
    read by all: the channels that have joined are woken when something is lost."""

    def __init__(self) -> None:
        self.models = ClientModels()
        self.lost: dict[str, str] = {}
        self.losses = 0
        self.alive = True
        self.leaving = False  # another server is to have new requests
        self.identity = ""
        self.mappings = Mappings()
        self._names = itertools.count(1)
        self._channels: set[Wakeable] = set()
        # Again in one thread, because `nudge` may come from where an object is collected.
        self._lock = threading.RLock()

    @abstractmethod
    def is_over(self) -> bool:
        """Whether the connection has ended, though nobody may have seen that yet."""

    def lose(self, endpoint: str, successor: str) -> None:
        """The scheduler at `endpoint` is gone."""
        if len(self.lost) >= _MOST_LOST:
            del self.lost[next(iter(self.lost))]
        self.lost[endpoint] = successor
        self.losses += 1
        self.wake_all()

    def copied(self, place: Place) -> bytes:
        """A copy of bytes in a worker's own memory. Raises Unavailable where it cannot be had."""
        # Without a lock: a signal's handler that asks in the middle of this waits for our thread,
        # which may be about to copy, too.
        return bytes(self.mappings.view(place))

    # --- channels

    def next_link_name(self) -> int:
        """A number that tells the links of this connection apart."""
        return next(self._names)

    def join(self, channel: Wakeable) -> None:
        """Have a channel woken when something is lost."""
        with self._lock:
            self._channels.add(channel)
            if not self.alive:
                channel.wake()

    def part(self, channel: Wakeable) -> None:
        """Forget a channel, whose owner has closed it; with the last one goes the rest."""
        with self._lock:
            self._channels.discard(channel)
            last = not self._channels and not self.alive
        if last:
            self.mappings.drop_all()

    def wake(self, channel: Wakeable) -> None:
        """Have whoever waits for a channel look around, if it is not closed; in any thread."""
        with self._lock:
            if channel in self._channels:
                channel.wake()

    def wake_all(self) -> None:
        """Have whoever waits for any channel look around."""
        with self._lock:
            for channel in self._channels:
                channel.wake()
