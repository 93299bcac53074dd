"""Metadata of the server and of models, and configurations: served by a gateway alone."""

from __future__ import annotations

from typing import Any

import shmserve
from shmserve.gateway.context import Gateway
from shmserve.gateway.model_table import describe

EXTENSIONS = (
    "classification",
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


def server(gateway: Gateway) -> dict[str, Any]:
    """The server's metadata: its name, version and extensions."""
    return {
        "name": gateway.settings.id,
        "version": shmserve.__version__,
        "extensions": EXTENSIONS,
    }


def model(gateway: Gateway, name: str, version: str) -> dict[str, Any]:
    """A model's metadata; a `version` that is asked for is the only one listed.

    Raises NotFound or Unavailable.
    """
    found = gateway.models.resolve(name, version)
    return describe(found, [found.version] if version else gateway.models.versions(name))


def model_config(gateway: Gateway, name: str, version: str) -> bytes:
    """A model's configuration as JSON; raises NotFound or Unavailable."""
    return gateway.models.resolve(name, version).config
