"""The model repository extension: index, load, unload, asked of the supervisor.

A client that leaves in the middle changes nothing: the supervisor finishes what it was asked for.
"""

from __future__ import annotations

from typing import Any

from shmserve.common.model_names import check_model_name
from shmserve.errors import PermissionDenied, Unsupported
from shmserve.gateway.client_identity import ClientIdentity
from shmserve.gateway.context import Gateway
from shmserve.ipc.messages.control_requests import IndexRepository, LoadModel, UnloadModel


async def index(gateway: Gateway, *, only_ready: bool) -> list[dict[str, Any]]:
    """Every version of every model in the repositories, or those that are ready."""
    payload = await gateway.supervisor.ask(IndexRepository, only_ready)
    models: list[dict[str, Any]] = payload.get("models", [])
    return models


async def load(
    gateway: Gateway, client: ClientIdentity, name: str, config: str, files: dict[str, Any]
) -> None:
    """Load a model, with a configuration and files of the client's where it sent any.

    Returns when it is ready; raises PermissionDenied or why it is not.
    """
    if config or files:
        check_may_send(client)
    await gateway.supervisor.ask(LoadModel, name, config, files)


def check_may_send(client: ClientIdentity) -> None:
    """Raise PermissionDenied unless the server may run what this client sends as model files.

    It runs as the server's user, so it is that user's to send, or whoever's has a token for it.
    """
    if not (client.listener.authorisation.asks_for_tokens or client.runs_the_server()):
        raise PermissionDenied(
            "a configuration or files for a model may come only from the user who runs the server, "
            "or with a token"
        )


async def unload(gateway: Gateway, name: str, *, dependents: bool) -> None:
    """Unload a model, and those that only it needs if its `dependents` are to go as well."""
    await gateway.supervisor.ask(UnloadModel, name, dependents)


def check_names(repository: str | None, name: str) -> None:
    """Raise Unsupported for a repository, of which none can be chosen, as in Triton, and
    InvalidArgument for what cannot be a model's name."""
    check_repository(repository)
    check_model_name(name)


def check_repository(repository: str | None) -> None:
    """Raise Unsupported for a repository's name."""
    if repository:
        raise Unsupported("'repository_name' specification is not supported")
