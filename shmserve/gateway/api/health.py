"""Health: what the supervisor said last, and whether models are ready."""

from __future__ import annotations

from shmserve.errors import InvalidArgument, ShmserveError, Unavailable
from shmserve.gateway.context import Gateway


def check_staying(gateway: Gateway) -> None:
    """Raise Unavailable when the server is on its way out."""
    if is_leaving(gateway):
        raise Unavailable("Server exiting")


def is_leaving(gateway: Gateway) -> bool:
    """Whether the server is on its way out."""
    return gateway.health.exiting or gateway.draining


def is_model_ready(gateway: Gateway, name: str, version: str) -> bool:
    """Whether a model's version is ready; raises InvalidArgument for what is no version."""
    try:
        return gateway.models.resolve(name, version).ready
    except InvalidArgument:
        raise
    except ShmserveError:
        return False
