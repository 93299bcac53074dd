"""The state that the server's listener publishes: models, lost schedulers, workers' memory."""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from typing import Any, Never, Protocol

from shmserve.client.request.client_templates import ClientTemplate
from shmserve.errors import Disconnected, InvalidArgument, NotFound, Unavailable, Unsupported
from shmserve.ipc.memory.mappings import Mappings
from shmserve.ipc.messages.publications import ModelPublished
from shmserve.ipc.scheduler_client import Successors
from shmserve.ipc.tensors.descriptors import Range
from shmserve.ipc.tensors.schemas import BoundedCache, ResponseSchema, Schemas
from shmserve.ipc.tensors.signature import Signature

SERVER_EXITED = "the server is no longer running"
_MAX_TEMPLATES = 64  # maximum number of request templates of a model
_MAX_RESPONSE_SCHEMAS = 64


class ClientModel:
    """One version of a model: its scheduler and its signature.

    Attributes:
        templates: Templates of the client's requests.
        response_schemas: The schemas of received responses.
        source: The table of all published models, which contains this model.
        decoupled: Whether the model sends any number of responses to a request.
        may_omit_outputs: Whether a response may lack requested outputs.
        is_closed: Whether the version was withdrawn or has another scheduler.
    """

    def __init__(self, publication: ModelPublished, source: ClientModels | None = None) -> None:
        self.source = source
        self.name = publication.name
        self.version = publication.version
        self.endpoint = publication.endpoint
        self.signature = Signature(publication.config, publication.version)
        self.decoupled = publication.config.decoupled
        self.may_omit_outputs = publication.config.may_omit_outputs
        self.templates: BoundedCache[Any, ClientTemplate] = BoundedCache(
            _MAX_TEMPLATES, ClientTemplate.close
        )
        self.response_schemas = Schemas(ResponseSchema, _MAX_RESPONSE_SCHEMAS)
        self.is_closed = False

    @property
    def key(self) -> tuple[str, str]:
        """Return the model's name and version."""
        return self.name, self.version

    def store_template(self, key: Any, template: ClientTemplate) -> ClientTemplate:
        """Store a template unless another thread has stored one; return the stored template."""
        stored_template = self.templates.store_if_absent(key, template)
        if self.is_closed:
            self.close()
        return stored_template

    def close(self) -> None:
        """Remove the templates and free their memory."""
        self.is_closed = True
        self.templates.clear()


class ClientModels:
    """The published models by (name, version); version "" is the latest.

    One thread changes this table, and all threads may read it.

    Attributes:
        on_demand_names: The names of models that can be loaded on demand, including loaded ones.
        ready: Whether the server is ready. The failure of a model changes this to False.
        started: Whether the loads at the server's start have ended, successfully or not.
    """

    def __init__(self) -> None:
        self._models: dict[tuple[str, str], ClientModel] = {}
        self.on_demand_names: set[str] = set()
        self.ready = True
        self.started = True
        self._is_closed = False

    def publish(self, message: ModelPublished) -> None:
        """Add a version of a model, or replace it if it is in the table."""
        key = (message.name, message.version)
        old_model = self._models.get(key)
        model = self._models[key] = ClientModel(message, self)
        latest_model = self._models.get((message.name, ""))
        if old_model is not None:
            old_model.close()
        if message.latest or (old_model is not None and latest_model is old_model):
            self._models[message.name, ""] = model

    def withdraw(self, name: str, version: str) -> None:
        """Remove a version, or with version "" the model's entry in `on_demand_names`."""
        if not version:
            self.on_demand_names.discard(name)
            return
        model = self._models.pop((name, version), None)
        if model is not None:
            model.close()
        if model is not None and self._models.get((name, "")) is model:
            del self._models[name, ""]

    def find(self, name: str, version: str) -> ClientModel | None:
        """Return a version of a model, or None. `version` may have leading zeros, as in HTTP."""
        model = self._models.get((name, version))
        if model is None and isinstance(version, str) and version.startswith("0"):
            model = self._models.get((name, version.lstrip("0") or "0"))
        return model

    def has(self, name: str) -> bool:
        """Check whether any version of a model is available."""
        return any(key[0] == name for key in list(self._models))

    def needs_load(self, name: str, version: str) -> bool:
        """Check whether a version is not available but its model can be loaded on demand."""
        return name in self.on_demand_names and self.find(name, version) is None

    def resolve(self, name: str, version: str) -> ClientModel:
        """Return a model.

        Raises:
            NotFound: The model is unknown; the message is Triton's.
            Unavailable: The model may still be loading.
            InvalidArgument: The version is not a string.
            Disconnected: The server has exited.
        """
        return self.find(name, version) or self._raise_not_found(name, version)

    def _raise_not_found(self, name: str, version: str) -> Never:
        if not isinstance(version, str):
            raise InvalidArgument(f"version must be a string, got {version!r:.80}")
        if self._is_closed:
            raise Disconnected(SERVER_EXITED)
        unknown_text = f"Request for unknown model: '{name}'"
        version_keys = [key for key in list(self._models) if key[0] == name]
        if not version_keys and not self.started:
            raise Unavailable(f"{unknown_text} is not found, and the server is not ready yet")
        if not version_keys:
            raise NotFound(f"{unknown_text} is not found")
        if not version:
            raise Unavailable(f"{unknown_text} has no available versions")
        raise NotFound(f"{unknown_text} version {version} is not found")

    def names(self) -> list[tuple[str, str]]:
        """Return name and version of each model, sorted.

        The version of an on-demand model that is not loaded is "".
        """
        loaded_keys = [key for key in list(self._models) if key[1]]
        loaded_names = {name for name, _ in loaded_keys}
        return sorted([*loaded_keys, *((name, "") for name in self.on_demand_names - loaded_names)])

    def close(self) -> None:
        """Remove all models, because the server has exited."""
        self._is_closed = True
        for model in list(self._models.values()):
            model.close()
        self._models.clear()
        self.on_demand_names.clear()


class Wakeable(Protocol):
    """A channel that can be woken to check for changes."""

    def wake(self) -> None:
        """Wake the waiting thread or loop; safe in any thread."""


class ServerState(ABC):
    """The models, lost schedulers and liveness of a server.

    One thread writes the attributes and all threads read them. The registered channels are woken
    after each loss of a scheduler, and when the connection ends.

    Attributes:
        models: The available models.
        successors: The endpoint of the successor, or "", by the endpoint of a lost scheduler.
        loss_count: The number of schedulers lost so far.
        alive: Whether the connection is alive.
        start_ended: Set when `models.started` is true, and when the server drains or exits.
        link_numbers: A counter, which numbers the channels of this connection.
    """

    def __init__(self) -> None:
        self.models = ClientModels()
        self.successors = Successors()
        self.loss_count = 0
        self.alive = True
        self.start_ended = threading.Event()
        self.is_draining = False  # new requests must go to another server
        self.identity = ""  # this client's number and token, by which schedulers identify it
        self.is_in_other_pid_namespace = False  # than the server; set before threads start
        self.mappings = Mappings()
        self.link_numbers = itertools.count(1)
        self._channels: set[Wakeable] = set()
        # Reentrant, since `wake_thread` may be called by the garbage collector in the same thread.
        self._lock = threading.RLock()

    @abstractmethod
    def is_closed(self) -> bool:
        """Check whether the server has disconnected, even if `alive` is not updated yet."""

    def record_lost_scheduler(self, endpoint: str, successor: str) -> None:
        """Record that the scheduler at `endpoint` has exited."""
        self.successors.add(endpoint, successor)
        self.loss_count += 1
        self.wake_all()

    def copy_range(self, memory_range: Range) -> bytearray:
        """Return a copy of bytes in a worker's memory.

        Raises:
            Unavailable: The memory no longer exists, or cannot be mapped.
            Unsupported: Another user, or another PID namespace, owns the memory.
        """
        try:
            return bytearray(self.mappings.view(memory_range))
        except Unavailable as error:
            if not (self.is_in_other_pid_namespace or isinstance(error.__cause__, PermissionError)):
                raise
            text = "an output is too large for a message; pass memory from `allocate` for it"
            if self.is_in_other_pid_namespace:
                text += ", or run this program in the server's PID namespace (docker run --pid)"
            raise Unsupported(text) from None

    # --- channels

    def add_channel(self, channel: Wakeable) -> None:
        """Register a channel, to be woken after the loss of a scheduler or of the connection."""
        with self._lock:
            self._channels.add(channel)
            if not self.alive:
                channel.wake()

    def remove_channel(self, channel: Wakeable) -> None:
        """Remove a channel; unmap the workers' memory if it was the last of a closed connection."""
        with self._lock:
            self._channels.discard(channel)
            is_last = not self._channels and not self.alive
        if is_last:
            self.mappings.unmap_all()

    def wake(self, channel: Wakeable) -> None:
        """Wake a channel unless it is closed; safe in any thread."""
        with self._lock:
            if channel in self._channels:
                channel.wake()

    def wake_all(self) -> None:
        """Wake the threads and event loops of all registered channels."""
        with self._lock:
            for channel in self._channels:
                channel.wake()
