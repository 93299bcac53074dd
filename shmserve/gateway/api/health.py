"""Liveness and readiness, of the server and of models."""

from __future__ import annotations

from shmserve.errors import InvalidArgument, ShmserveError, Unavailable
from shmserve.gateway.context import Gateway
from shmserve.ipc.messages.supervision import AskReady


def check_staying(gateway: Gateway) -> None:
    """Raise Unavailable when the server drains or exits."""
    if is_leaving(gateway):
        raise Unavailable("Server exiting")


def is_leaving(gateway: Gateway) -> bool:
    """Whether the server drains or exits."""
    return gateway.health.exiting or gateway.draining


async def is_model_ready(gateway: Gateway, name: str, version: str) -> bool:
    """Whether a model's version is ready, and says so itself where it defines `is_ready`; raises
    InvalidArgument for what is no version."""
    try:
        model = gateway.models.resolve(name, version)
        if not (model.ready and model.checks_ready):
            return model.ready
        return bool((await gateway.supervisor.ask(AskReady, model.name, model.version))["ready"])
    except InvalidArgument:
        raise
    except ShmserveError:
        return False
