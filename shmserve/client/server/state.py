"""The state of the server by its listener: the models that may be called, losses, and the memory of
its workers."""

from __future__ import annotations

import itertools
import threading
from abc import abstractmethod
from typing import Any, Never, Protocol

from shmserve.client.request.prepared import RequestTemplate
from shmserve.errors import InvalidArgument, NotFound, Unavailable
from shmserve.ipc.memory.mappings import Mappings
from shmserve.ipc.messages.publications import ModelPublished
from shmserve.ipc.scheduler_client import Successors
from shmserve.ipc.tensors.descriptors import Place
from shmserve.ipc.tensors.inference import ResponseSchema
from shmserve.ipc.tensors.schemas import BoundedCache, Schemas
from shmserve.ipc.tensors.signature import Signature

_MOST_PREPARED = 64
_MOST_RESPONSES = 64


class ClientModel:
    """One version of a model: where its scheduler is, and what it takes.

    Attributes:
        prepared: Templates of the requests that the client has made.
        responses: The schemas of the responses that it has read.
        source: The models that this model belongs to.
        decoupled: The model gives any number of responses to a request.
        may_lack: A response may lack outputs that were requested.
        closed: The version was withdrawn, or has another scheduler.
    """

    def __init__(self, published: ModelPublished, source: ClientModels | None = None) -> None:
        self.source = source
        self.name = published.name
        self.version = published.version
        self.endpoint = published.endpoint
        self.signature = Signature(published.config, published.version)
        self.decoupled = published.config.decoupled
        self.may_lack = published.config.ensemble_scheduling is not None
        self.prepared: BoundedCache[Any, RequestTemplate] = BoundedCache(
            _MOST_PREPARED, RequestTemplate.close
        )
        self.responses = Schemas(ResponseSchema, _MOST_RESPONSES)
        self.closed = False

    @property
    def key(self) -> tuple[str, str]:
        """Its name and version."""
        return self.name, self.version

    def remember(self, key: Any, prepared: RequestTemplate) -> RequestTemplate:
        """Keep a prepared request; gives the one that is used, which another thread may have made
        meanwhile."""
        used = self.prepared.share(key, prepared)
        if self.closed:
            self.close()
        return used

    def close(self) -> None:
        """Forget the prepared requests; their memory comes back."""
        self.closed = True
        self.prepared.clear()


class ClientModels:
    """(name, version) -> model; version "" is the latest. One thread writes, any may read.

    `on_demand` are the names of those that are loaded for a request, loaded or not. `ready`: the
    server is; as long as it is not, models may be on their way.
    """

    def __init__(self) -> None:
        self._models: dict[tuple[str, str], ClientModel] = {}
        self.on_demand: set[str] = set()
        self.ready = True

    def publish(self, message: ModelPublished) -> None:
        """A version may be called, or changed."""
        key = (message.name, message.version)
        old = self._models.get(key)
        model = self._models[key] = ClientModel(message, self)
        latest = self._models.get((message.name, ""))
        if old is not None:
            old.close()
        if message.latest or (old is not None and latest is old):
            self._models[message.name, ""] = model

    def withdraw(self, name: str, version: str) -> None:
        """A version must not be called any more; "": the model is not on demand."""
        if not version:
            self.on_demand.discard(name)
            return
        model = self._models.pop((name, version), None)
        if model is not None:
            model.close()
        if model is not None and self._models.get((name, "")) is model:
            del self._models[name, ""]

    def find(self, name: str, version: str) -> ClientModel | None:
        """A model, if it is there."""
        return self._models.get((name, version))

    def has(self, name: str) -> bool:
        """Whether any version of a model may be called."""
        return any(key[0] == name for key in list(self._models))

    def awaits_load(self, name: str, version: str) -> bool:
        """Whether a model does not serve, and is loaded for whoever asks for it."""
        return name in self.on_demand and (name, version) not in self._models

    def resolve(self, name: str, version: str) -> ClientModel:
        """A model. Raises NotFound, with Triton's texts, Unavailable when it may come yet, or
        InvalidArgument for a version that is no string."""
        return self._models.get((name, version)) or self._absent(name, version)

    def _absent(self, name: str, version: str) -> Never:
        if not isinstance(version, str):
            raise InvalidArgument(f"version must be a string, got {version!r:.80}")
        unknown = f"Request for unknown model: '{name}'"
        versions = [key for key in list(self._models) if key[0] == name]
        if not versions and not self.ready:
            raise Unavailable(f"{unknown} is not found, and the server is not ready yet")
        if not versions:
            raise NotFound(f"{unknown} is not found")
        if not version:
            raise Unavailable(f"{unknown} has no available versions")
        raise NotFound(f"{unknown} version {version} is not found")

    def names(self) -> list[tuple[str, str]]:
        """Name and version of each, in order; without a version those that are not loaded yet."""
        loaded = [key for key in list(self._models) if key[1]]
        return sorted([*loaded, *((n, "") for n in self.on_demand - {name for name, _ in loaded})])

    def close(self) -> None:
        """Forget all."""
        for model in list(self._models.values()):
            model.close()
        self._models.clear()
        self.on_demand.clear()


class Wakeable(Protocol):
    """A channel that looks around when it is woken."""

    def wake(self) -> None:
        """Have whoever waits look around; for any thread."""


class ServerState:
    """`models`, `lost` (endpoint -> successor or "") and `alive` are written by one thread, and
    read by all: the channels that have joined are woken when something is lost."""

    def __init__(self) -> None:
        self.models = ClientModels()
        self.lost = Successors()
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
        self.lost.add(endpoint, successor)
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
