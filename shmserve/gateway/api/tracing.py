"""The trace extension: settings of all models, or of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shmserve.common.trace_settings import read_changes
from shmserve.errors import NotFound
from shmserve.gateway.context import Gateway
from shmserve.ipc.messages.supervision import ChangeTracing


async def change(
    gateway: Gateway, model: str, given: Mapping[str, Sequence[str] | None]
) -> dict[str, list[str]]:
    """Have the supervisor change trace settings, as `read_changes` reads them; all of them, as
    texts. Raises NotFound, InvalidArgument or Unsupported."""
    if model and not gateway.models.versions(model):
        raise NotFound(f"Request for unknown model : {model}")
    return await gateway.supervisor.ask(ChangeTracing, model, read_changes(given))
