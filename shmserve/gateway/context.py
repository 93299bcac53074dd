"""The objects that the handlers of a gateway share, and the lookup of a model for a request.

`ModelTable` maps names and versions to the models that the supervisor has published.
"""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Never

from shmserve.errors import InvalidArgument, NotFound, Unavailable
from shmserve.gateway.inference.body_arrival import BodyBudget, MallocTrim
from shmserve.gateway.links import GatewaySchedulers, GatewaySupervisorLink
from shmserve.gateway.region_table import RegionTable
from shmserve.gateway.settings import GatewaySettings
from shmserve.gateway.tracer import Tracer
from shmserve.ipc.engine_settings import ENGINE_PARAMETER, LLM_BACKEND, EngineSettings
from shmserve.ipc.memory.arena import Arena
from shmserve.ipc.memory.mappings import Mappings
from shmserve.ipc.messages.control_requests import WantModel
from shmserve.ipc.messages.publications import HealthChanged, ModelPublished
from shmserve.ipc.messages.supervision import LoadsFailed
from shmserve.ipc.tensors.descriptors import MAX_INT64
from shmserve.ipc.tensors.schemas import BoundedCache
from shmserve.ipc.tensors.signature import Signature

_MAX_TEMPLATES = 256  # maximum number of request templates of a model version
_INVALID_VERSION = (
    "failed to get model version from specified version string '{text}' (details: stol), version "
    "should be an integral value > 0"
)
_NON_LABEL_CHARACTER = re.compile(r"[^a-zA-Z0-9_]")


class GatewayModel:
    """One version of a model, with its cache of request templates.

    Attributes:
        is_published: False once the version was withdrawn or replaced.
        is_ready: The readiness in health responses. A version that is not ready still accepts
            requests.
        has_ready_check: Whether the model's code defines `is_ready`.
        config: The configuration, as `GET /v2/models/NAME/config` returns it.
        immutable_config: The part of the configuration that is fixed while the version serves.
        tags: Additional labels of the version's nv_* metrics.
        labels: The classification labels of each output, by index.
        templates: The templates of HTTP requests by fingerprint.
        steps: The models of an ensemble's steps.
        aliases: Further names of the model in OpenAI's API, with those of its LoRA adapters.
        adapters: The names of its LoRA adapters.
    """

    def __init__(self, publication: ModelPublished) -> None:
        self.is_published = True
        self.name = publication.name
        self.version = publication.version
        self.config: dict[str, Any] = publication.config.source
        self.immutable_config = publication.config.immutable_config
        self.metadata = publication.metadata
        self.labels: dict[str, list[str]] = publication.metadata.get("labels", {})
        self.is_ready = publication.ready
        self.has_ready_check = bool(publication.metadata.get("checks_ready"))
        self.load_seconds = publication.load_seconds
        self.endpoint = publication.endpoint  # the endpoint of the model's scheduler
        self.templates: BoundedCache[Any, Any] = BoundedCache(_MAX_TEMPLATES)
        self.signature = Signature(publication.config, publication.version)
        self.is_stateful = publication.config.sequence_batching is not None
        ensemble = publication.config.ensemble_scheduling
        self.steps = [step.model_name for step in ensemble.step] if ensemble else []
        self.error_prefix = f"in ensemble '{self.name}', " if ensemble else ""
        # Prometheus rejects the whole page if the name of a label has an invalid character.
        tags = publication.config.metric_tags.items()
        self.tags = {"_" + _NON_LABEL_CHARACTER.sub("_", key): value for key, value in tags}
        self.decoupled = publication.config.decoupled
        self.backend = publication.config.backend
        # The settings of an engine that generates text.
        engine_settings = EngineSettings()
        if engine_json := publication.config.parameters.get(ENGINE_PARAMETER):
            # Other backends may have a parameter of this name.
            with suppress(ValueError, InvalidArgument):
                engine_settings = EngineSettings.read(engine_json)
        self.max_model_len = engine_settings.max_model_len or None
        self.aliases = list(engine_settings.aliases)
        self.adapters: list[str] = []  # names of LoRA adapters
        is_vllm = publication.config.backend == "vllm"
        if is_vllm:
            max_len_text = publication.config.parameters.get("max_model_len", "")
            self.max_model_len = int(max_len_text) if max_len_text.isdecimal() else None
            self.adapters = publication.config.parameters.get("adapters", "").splitlines()
            self.aliases += self.adapters
        # Whether requests with the parameter `task` convert between texts and tokens.
        self.has_task_parameter = is_vllm or publication.config.backend == LLM_BACKEND
        # Whether texts may contain reasoning. vLLM's engine separates it only with a parser.
        self.may_reason = is_vllm or engine_settings.reasoning_parser not in ("", "none")


_MAX_WITHDRAWN_NAMES = 4096  # names of withdrawn models, which errors mention


class ModelTable:
    """The models by name and version.

    Attributes:
        on_demand_names: The names of models that are loaded on demand, loaded or not.
        revision: A number that changes when a version is published or withdrawn.
        is_server_live: False if the start of the server failed.
    """

    def __init__(self, schedulers: GatewaySchedulers) -> None:
        self._schedulers = schedulers
        self._models: dict[str, dict[str, GatewayModel]] = {}  # by name and version
        self._latest_models: dict[str, GatewayModel] = {}  # by name
        self._withdrawn_versions: dict[str, set[str]] = {}  # by name
        self.revision = 0  # changes when a version is published or withdrawn
        self.is_server_live = True
        self.on_demand_names: set[str] = set()
        self._aliases: dict[str, str] = {}  # alias -> model name

    def publish(self, message: ModelPublished) -> None:
        """Register a version of a model, or replace the registered version."""
        self.revision += 1
        with suppress(Unavailable):  # without a free descriptor, the first request opens the link
            self._schedulers.open(message.endpoint)
        versions = self._models.setdefault(message.name, {})
        previous_model = versions.get(message.version)
        model = versions[message.version] = GatewayModel(message)
        withdrawn_versions = self._withdrawn_versions.get(message.name, set())
        withdrawn_versions -= {message.version, ""}
        if not withdrawn_versions:
            self._withdrawn_versions.pop(message.name, None)
        was_latest = (
            previous_model is not None and self._latest_models.get(message.name) is previous_model
        )
        if message.latest or was_latest:
            self._latest_models[message.name] = model
        if previous_model is not None:
            previous_model.is_published = False
        self._update_aliases()

    def set_ready(self, name: str, version: str, is_ready: bool) -> None:
        """Set the readiness of a version, which keeps its request templates."""
        model = self._models.get(name, {}).get(version)
        if model is not None:
            model.is_ready = is_ready

    def withdraw(self, name: str, version: str) -> None:
        """Remove a version of a model; its requests in flight still finish.

        Version "" records that the model exists, but is no longer loaded on demand.
        """
        self.revision += 1
        if not version:
            self.on_demand_names.discard(name)
        versions = self._models.get(name, {})
        model = versions.pop(version, None)
        if not versions:
            self._models.pop(name, None)
        self._withdrawn_versions.setdefault(name, set()).add(version)
        if len(self._withdrawn_versions) > _MAX_WITHDRAWN_NAMES:
            del self._withdrawn_versions[next(iter(self._withdrawn_versions))]
        if model is not None:
            model.is_published = False
            if self._latest_models.get(name) is model:
                del self._latest_models[name]
        self._update_aliases()

    def _update_aliases(self) -> None:
        models = sorted(self._latest_models.items(), reverse=True)
        self._aliases = {alias: name for name, model in models for alias in model.aliases}

    def resolve_alias(self, name: str) -> str:
        """Return the name of the model that an alias stands for; return other names unchanged.

        A model's own name takes precedence over the aliases of other models.
        """
        return name if name in self else self._aliases.get(name, name)

    def __contains__(self, name: str) -> bool:
        """Return whether a model has this name, loaded or on demand."""
        return name in self._models or name in self.on_demand_names

    def resolve(self, name: str, version: str) -> GatewayModel:
        """Return the model for a request; version "" means the latest.

        Raises:
            NotFound: The model or version is unknown.
            Unavailable: The model is not available at present, or the start of the server failed.
        """
        return self.find(name, version) or self._raise_missing(name, version)

    def find(self, name: str, version: str) -> GatewayModel | None:
        """Return the model like `resolve`, or None."""
        if not version:
            return self._latest_models.get(name)
        versions = self._models.get(name, {})
        return versions.get(version) or versions.get(canonical_version(version))

    def current(self, model: GatewayModel) -> GatewayModel:
        """Return `model`, or the object that has replaced it while a request was read.

        Raises:
            NotFound: The version no longer exists.
            Unavailable: The version does not serve at present, or its configuration has changed
                since the request was validated.
        """
        if model.is_published:
            return model
        current_model = self._models.get(model.name, {}).get(model.version)
        if current_model is None:
            self._raise_missing(model.name, model.version)
        if current_model.immutable_config != model.immutable_config:
            raise Unavailable(
                f"model '{model.name}' was loaded with another configuration while the request "
                "arrived; send it again"
            )
        return current_model

    def check_server_live(self) -> None:
        """Raise Unavailable, with Triton's message, if the start of the server failed."""
        if not self.is_server_live:
            raise Unavailable("Server not ready")

    def _raise_missing(self, name: str, version: str) -> Never:
        self.check_server_live()
        error_prefix = f"Request for unknown model: '{name}'"
        version = canonical_version(version) if version else ""
        withdrawn_versions = self._withdrawn_versions.get(name, ())
        if version and version in withdrawn_versions:
            raise Unavailable(f"{error_prefix} version {version} is not at ready state")
        if not withdrawn_versions and name not in self._models:
            raise NotFound(f"{error_prefix} is not found")
        if version:
            raise NotFound(f"{error_prefix} version {version} is not found")
        raise NotFound(f"{error_prefix} has no available versions")

    def versions(self, name: str) -> list[str]:
        """Return the versions of a model, ascending."""
        return sorted(self._models.get(name, ()), key=int)

    def all_versions(self) -> list[GatewayModel]:
        """Return every version of every model, sorted by name and version."""
        return [self._models[name][v] for name in sorted(self._models) for v in self.versions(name)]


def checked_version(version: str) -> str:
    """Return the version in a request message, or "" for the latest.

    Raises:
        InvalidArgument: The text is not a version. The message is Triton's.
    """
    if not version or (version.isascii() and version.isdecimal()):
        return version
    if version.isascii() and version[0] == "-" and version[1:].isdecimal():
        raise InvalidArgument(
            f"invalid model version specified '{version}' , version should be an integral value > 0"
        )
    raise InvalidArgument(_INVALID_VERSION.format(text=version))


def canonical_version(version: str) -> str:
    """Return a version in canonical form: "01" becomes "1".

    Raises:
        InvalidArgument: The version exceeds 63 bits.
    """
    if len(version) > 19 or int(version) > MAX_INT64:
        raise InvalidArgument(_INVALID_VERSION.format(text=version))
    return str(int(version))


@dataclass(slots=True, eq=False)
class Gateway:
    """The objects that the handlers of one gateway process share.

    Attributes:
        schedulers: The links to the schedulers.
        arena: The shared memory for request bodies.
        body_budget: The memory limit of bodies that are arriving.
        mappings: The mappings of workers' arenas, but not of clients' regions.
        health: The health that the supervisor has published.
        health_changed: An event that is set at the next change of `health`, and then replaced.
        failures: The models that failed to load, as the supervisor has published them.
        malloc_trim: The timer that returns freed memory to the system.
        is_draining: Whether connections end with their next response.
        refuses_requests: Whether requests of open streams are refused, because every client was
            notified of the drain.
    """

    settings: GatewaySettings
    schedulers: GatewaySchedulers
    models: ModelTable
    regions: RegionTable
    supervisor: GatewaySupervisorLink
    arena: Arena
    body_budget: BodyBudget
    malloc_trim: MallocTrim
    mappings: Mappings
    health: HealthChanged
    health_changed: asyncio.Event = field(default_factory=asyncio.Event)
    is_draining: bool = False
    refuses_requests: bool = False
    failures: LoadsFailed = field(default_factory=partial(LoadsFailed, [], 0))
    tracer: Tracer = field(default_factory=Tracer)


def needs_load(gateway: Gateway, name: str, version: str) -> bool:
    """Return whether a model is loaded on demand, and not loaded yet."""
    models = gateway.models
    return name in models.on_demand_names and models.find(name, version) is None


# A limit in microseconds from a request's arrival (0: none), and the origin of the limit.
TimeLimit = tuple[int, str]
UNLIMITED: TimeLimit = (0, "")


async def resolve_model(gateway: Gateway, name: str, version: str, *limits_us: int) -> GatewayModel:
    """Return the model for a request, loaded on demand; version "" means the latest.

    The wait is limited by the shortest of `limits_us` and the server's limit (0: no limit).

    Raises:
        NotFound: There is no such model.
        Unavailable: The model is not ready, or the wait was too long.
        ShmserveError: The load failed.
    """
    limits = [limit for limit in (*limits_us, gateway.settings.request_timeout_us) if limit > 0]
    deadline = time.monotonic() + min(limits, default=0) / 1e6
    # If the loaded model lacks the version, loading again is useless. A model that was unloaded
    # during the wait has no versions, and is loaded again.
    was_loaded = False
    while needs_load(gateway, name, version):
        if was_loaded and gateway.models.versions(name):
            break
        limit_s = max(1e-6, deadline - time.monotonic()) if limits else 0.0
        await gateway.supervisor.send_request(WantModel, name, limit_s)
        was_loaded = True
    return gateway.models.resolve(name, version)
