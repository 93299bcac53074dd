"""Triton's extensions that are not supported: each is refused by its name."""

from __future__ import annotations

from shmserve.errors import Unavailable


def no_trace() -> Unavailable:
    """What Triton says when it was built without tracing."""
    return Unavailable("the server does not support trace")
