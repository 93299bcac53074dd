"""The logging extension: what is logged by the server's processes, shown and changed; and that of
tracing, which is not supported.

Gateways keep no settings: the supervisor has them, and tells every process of a change.
"""

from __future__ import annotations

from typing import Any

from shmserve.errors import Unavailable, Unsupported
from shmserve.gateway.context import Gateway
from shmserve.ipc.messages.supervision import ChangeLogging

SWITCHES = ("log_info", "log_warning", "log_error")
LEVEL, FORMAT, FILE = "log_verbose_level", "log_format", "log_file"


async def change_settings(gateway: Gateway, changes: dict[str, Any]) -> dict[str, Any]:
    """Have the supervisor change settings; all of them, in Triton's order."""
    return await gateway.supervisor.ask(ChangeLogging, changes)


def refuse_file() -> Unsupported:
    """The refusal of another log file."""
    return Unsupported("log file location can not be updated through network protocol")


def no_trace() -> Unavailable:
    """The refusal of tracing, as from a Triton that was built without it."""
    return Unavailable("the server does not support trace")
