"""Liveness and readiness, metadata and configurations, of the server and of models; the logging and
tracing of the server's processes, shown and changed.

Gateways keep no log settings: the supervisor has them, and tells every process of a change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import shmserve
from shmserve.common.trace_settings import read_changes
from shmserve.errors import InvalidArgument, NotFound, ShmserveError, Unavailable, Unsupported
from shmserve.gateway.context import Gateway
from shmserve.gateway.model_table import describe
from shmserve.gateway.on_demand import loaded
from shmserve.ipc.messages.control_requests import AskReady, ChangeLogging, ChangeTracing

EXTENSIONS = (
    "classification",
    "sequence",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "cuda_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "logging",
)


def check_staying(gateway: Gateway) -> None:
    """Raise Unavailable when the server exits, and no other one goes on."""
    if is_leaving(gateway):
        raise Unavailable("Server exiting")


def is_leaving(gateway: Gateway) -> bool:
    """Whether the server exits, and no other one goes on."""
    return gateway.health.exiting


async def is_model_ready(gateway: Gateway, name: str, version: str) -> bool:
    """Whether a model's version is ready, and says so itself where it defines `is_ready`; one on
    demand that is not loaded is. Raises InvalidArgument for what is no version."""
    if name in gateway.models.on_demand and not gateway.models.versions(name):
        return True
    try:
        model = gateway.models.resolve(name, version)
        if not (model.ready and model.checks_ready):
            return model.ready
        return bool((await gateway.supervisor.ask(AskReady, model.name, model.version))["ready"])
    except InvalidArgument:
        raise
    except ShmserveError:
        return False


def server(gateway: Gateway) -> dict[str, Any]:
    """The server's metadata: its name, version and extensions."""
    return {
        "name": gateway.settings.id,
        "version": shmserve.__version__,
        "extensions": EXTENSIONS,
    }


async def model(gateway: Gateway, name: str, version: str) -> dict[str, Any]:
    """A model's metadata; a `version` that is asked for is the only one listed.

    Raises as `loaded` does, for which it waits.
    """
    found = await loaded(gateway, name, version)
    return describe(found, [found.version] if version else gateway.models.versions(name))


async def model_config(gateway: Gateway, name: str, version: str) -> bytes:
    """A model's configuration as JSON; raises as `loaded` does, for which it waits."""
    return (await loaded(gateway, name, version)).config


SWITCHES = ("log_info", "log_warning", "log_error")
LEVEL, FORMAT, FILE = "log_verbose_level", "log_format", "log_file"


async def change_log_settings(gateway: Gateway, changes: dict[str, Any]) -> dict[str, Any]:
    """Have the supervisor change log settings; all of them, in Triton's order."""
    return await gateway.supervisor.ask(ChangeLogging, changes)


def refuse_file() -> Unsupported:
    """The refusal of another log file."""
    return Unsupported("log file location can not be updated through network protocol")


async def change_trace_settings(
    gateway: Gateway, model: str, given: Mapping[str, Sequence[str] | None]
) -> dict[str, list[str]]:
    """Have the supervisor change trace settings, as `read_changes` reads them; all of them, as
    texts. Raises NotFound, InvalidArgument or Unsupported."""
    if model and not gateway.models.versions(model):
        raise NotFound(f"Request for unknown model : {model}")
    return await gateway.supervisor.ask(ChangeTracing, model, read_changes(given))
