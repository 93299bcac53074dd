"""The routing table of models: name and version to a scheduler, as the supervisor publishes it."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any, Never

import orjson

from shmserve.errors import InvalidArgument, NotFound, Unavailable
from shmserve.gateway.links import GatewaySchedulers
from shmserve.ipc.engine_settings import GENERATIVE, PARAMETER, EngineSettings
from shmserve.ipc.messages.publications import ModelPublished
from shmserve.ipc.tensors.descriptors import LARGEST
from shmserve.ipc.tensors.schemas import BoundedCache
from shmserve.ipc.tensors.signature import Signature

_MOST_PREPARED = 256
_NO_VERSION = (
    "failed to get model version from specified version string '{text}' (details: stol), version "
    "should be an integral value > 0"
)
_NO_LABEL = re.compile(r"[^a-zA-Z0-9_]")


class GatewayModel:
    """One version of a model, with its cache of request templates.

    Attributes:
        published: Whether the version was neither withdrawn nor replaced.
        ready: The readiness for health requests. A version that restarts accepts requests, too.
        tags: Additional labels of the version's nv_* metrics.
        labels: The classification labels of each output, by index.
        prepared: The templates of HTTP requests by fingerprint.
        steps: The models of an ensemble's steps.
    """

    def __init__(self, published: ModelPublished) -> None:
        self.published = True
        self.name = published.name
        self.version = published.version
        self.config: bytes = orjson.dumps(published.config.source)
        self.immutable_config = orjson.dumps(published.config.immutable_config)
        self.metadata = published.metadata
        self.labels: dict[str, list[str]] = published.metadata.get("labels", {})
        self.ready = published.ready
        self.checks_ready = bool(published.metadata.get("checks_ready"))
        self.load_seconds = published.load_seconds
        self.endpoint = published.endpoint  # the endpoint of the model's scheduler
        self.prepared: BoundedCache[Any, Any] = BoundedCache(_MOST_PREPARED)
        self.signature = Signature(published.config, published.version)
        self.stateful = published.config.sequence_batching is not None
        ensemble = published.config.ensemble_scheduling
        self.steps = [step.model_name for step in ensemble.step] if ensemble else []
        # The prefix of error messages.
        self.prefix = f"in ensemble '{self.name}', " if ensemble else ""
        # A key that is no label would make all of the metrics unreadable.
        self.tags = {
            "_" + _NO_LABEL.sub("_", key): value
            for key, value in published.config.metric_tags.items()
        }
        self.decoupled = published.config.decoupled
        self.backend = published.config.backend
        # The settings of an engine that generates text.
        engine = EngineSettings()
        # Other backends may have a parameter of this name.
        with suppress(ValueError, InvalidArgument):
            engine = EngineSettings.of(json.loads(published.config.parameters.get(PARAMETER, "{}")))
        self.max_model_len = engine.max_model_len or None
        self.aliases = list(engine.aliases)
        vllm = published.config.backend == "vllm"
        if vllm:
            longest = published.config.parameters.get("max_model_len", "")
            self.max_model_len = int(longest) if longest.isdecimal() else None
        # whether the model converts text by the parameter `task`
        self.converts = vllm or published.config.backend == GENERATIVE
        # Whether texts may contain reasoning. An engine of vLLM has this output only with a parser.
        self.reasons = vllm or engine.reasoning_parser not in ("", "none")


_MOST_WITHDRAWN = 4096  # names of withdrawn models, which errors mention


class ModelTable:
    """The models by name and version.

    Attributes:
        on_demand: The names of models that are loaded on demand, loaded or not.
        revision: A number that changes when a version is published or withdrawn.
    """

    def __init__(self, schedulers: GatewaySchedulers) -> None:
        self._schedulers = schedulers
        self._models: dict[str, dict[str, GatewayModel]] = {}
        self._latest: dict[str, GatewayModel] = {}
        self._withdrawn: dict[str, set[str]] = {}
        self.revision = 0
        self.on_demand: set[str] = set()
        self._aliases: dict[str, str] = {}

    def publish(self, message: ModelPublished) -> None:
        """Register a version, or replace it."""
        self.revision += 1
        self._schedulers.open(message.endpoint)
        versions = self._models.setdefault(message.name, {})
        old = versions.get(message.version)
        model = versions[message.version] = GatewayModel(message)
        withdrawn = self._withdrawn.get(message.name, set())
        withdrawn -= {message.version, ""}
        if not withdrawn:
            self._withdrawn.pop(message.name, None)
        if message.latest or (old is not None and self._latest.get(message.name) is old):
            self._latest[message.name] = model
        if old is not None:
            old.published = False
        self._name()

    def set_ready(self, name: str, version: str, ready: bool) -> None:
        """Set the readiness of a version; its prepared requests are kept."""
        model = self._models.get(name, {}).get(version)
        if model is not None:
            model.ready = ready

    def withdraw(self, name: str, version: str) -> None:
        """Remove a version; requests in flight on it finish.

        Version "" means that the model exists without versions and is not loaded on demand.
        """
        self.revision += 1
        if not version:
            self.on_demand.discard(name)
        versions = self._models.get(name, {})
        model = versions.pop(version, None)
        if not versions:
            self._models.pop(name, None)
        self._withdrawn.setdefault(name, set()).add(version)
        if len(self._withdrawn) > _MOST_WITHDRAWN:
            del self._withdrawn[next(iter(self._withdrawn))]
        if model is not None:
            model.published = False
            if self._latest.get(name) is model:
                del self._latest[name]
        self._name()

    def _name(self) -> None:
        latest = sorted(self._latest.items(), reverse=True)
        self._aliases = {alias: name for name, model in latest for alias in model.aliases}

    def resolve_alias(self, name: str) -> str:
        """Return the name of the model that has an alias; other names are returned as they are.

        A model's own name precedes the aliases of other models.
        """
        return name if name in self else self._aliases.get(name, name)

    def __contains__(self, name: str) -> bool:
        """Return whether a model has this name, loaded or on demand."""
        return name in self._models or name in self.on_demand

    def resolve(self, name: str, version: str) -> GatewayModel:
        """Return the model for a request; version "" means the latest.

        Raises:
            NotFound: The model or version is unknown.
            Unavailable: The model is not available at present.
        """
        return self.find(name, version) or self._absent(name, version)

    def find(self, name: str, version: str) -> GatewayModel | None:
        """Return the model like `resolve`, or None."""
        if not version:
            return self._latest.get(name)
        versions = self._models.get(name, {})
        return versions.get(version) or versions.get(canonical_version(version))

    def current(self, model: GatewayModel) -> GatewayModel:
        """Return the version that serves now in place of `model`, which a request refers to.

        Raises:
            NotFound: There is no such version any more.
            Unavailable: No version serves at present, or its configuration has changed since the
                request was validated.
        """
        if model.published:
            return model
        now = self._models.get(model.name, {}).get(model.version)
        if now is None:
            self._absent(model.name, model.version)
        if now.immutable_config != model.immutable_config:
            raise Unavailable(
                f"model '{model.name}' was loaded with another configuration while the request "
                "arrived"
            )
        return now

    def _absent(self, name: str, version: str) -> Never:
        unknown = f"Request for unknown model: '{name}'"
        version = canonical_version(version) if version else ""
        was = self._withdrawn.get(name, ())
        if version and version in was:
            raise Unavailable(f"{unknown} version {version} is not at ready state")
        if not was and name not in self._models:
            raise NotFound(f"{unknown} is not found")
        if version:
            raise NotFound(f"{unknown} version {version} is not found")
        raise NotFound(f"{unknown} has no available versions")

    def versions(self, name: str) -> list[str]:
        """Return the versions of a model, ascending."""
        return sorted(self._models.get(name, ()), key=int)

    def all(self) -> list[GatewayModel]:
        """Return every version of every model, sorted by name and version."""
        return [
            self._models[name][version]
            for name in sorted(self._models)
            for version in self.versions(name)
        ]


def checked_version(text: str) -> str:
    """Return the version in a request message, or "" for the latest.

    Raises:
        InvalidArgument: The text is not a version. The message is that of Triton.
    """
    if not text or (text.isascii() and text.isdecimal()):
        return text
    if text.isascii() and text[0] == "-" and text[1:].isdecimal():
        raise InvalidArgument(
            f"invalid model version specified '{text}' , version should be an integral value > 0"
        )
    raise InvalidArgument(_NO_VERSION.format(text=text))


def canonical_version(text: str) -> str:
    """Return a version in canonical form: "01" becomes "1".

    Raises:
        InvalidArgument: The version exceeds 63 bits.
    """
    if len(text) > 19 or int(text) > LARGEST:
        raise InvalidArgument(_NO_VERSION.format(text=text))
    return str(int(text))


def describe(model: GatewayModel, versions: list[str]) -> dict[str, Any]:
    """Return the metadata of a model with these versions, as for GET /v2/models/NAME."""
    metadata = model.metadata
    return {
        "name": model.name,
        "versions": versions,
        "platform": metadata.get("platform", ""),
        "inputs": metadata.get("inputs", []),
        "outputs": metadata.get("outputs", []),
    }
