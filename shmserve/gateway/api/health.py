"""Liveness and readiness, of the server and of models."""

from __future__ import annotations

from functools import partial

from shmserve.errors import InvalidArgument, ShmserveError, Unavailable
from shmserve.gateway.context import Gateway
from shmserve.ipc.messages import AskReady


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
        ask = partial(AskReady, name=model.name, version=model.version)
        return bool((await gateway.supervisor.ask(ask))["ready"])
    except InvalidArgument:
        raise
    except ShmserveError:
        return False
