"""Who may call what: each RPC belongs to a scope, and one function decides before it starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from shmserve.errors import ShmserveError

Scope = Literal[
    "health",
    "metadata",
    "inference",
    "shared-memory",
    "repository",
    "statistics",
    "settings",
]
Metadata = Sequence[tuple[str, str | bytes]]
# The error that the client gets, or None to let it pass.
Authorise = Callable[[Scope, Metadata], ShmserveError | None]


def anyone(scope: Scope, metadata: Metadata) -> ShmserveError | None:
    """Everybody may call everything."""
    return None
