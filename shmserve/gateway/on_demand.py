"""Models on demand: a request for one that is not loaded waits until it is."""

from __future__ import annotations

import time

from shmserve.gateway.context import Gateway
from shmserve.gateway.model_table import GatewayModel
from shmserve.ipc.messages.control_requests import WantModel


def awaits_load(gateway: Gateway, name: str, version: str) -> bool:
    """Whether a model does not serve, and is loaded for whoever asks for it."""
    models = gateway.models
    return name in models.on_demand and models.find(name, version) is None


async def loaded(gateway: Gateway, name: str, version: str, *limits_us: int) -> GatewayModel:
    """The model for a request; version "" means the latest. One on demand is waited for, at most
    for the shortest of `limits_us` and of the server's limit (0: none).

    Raises NotFound or Unavailable, and what the load fails with.
    """
    limits = [limit for limit in (*limits_us, gateway.settings.request_timeout_us) if limit > 0]
    ends = time.monotonic() + min(limits, default=0) / 1e6
    # Whether there is such a version is known once it is loaded; it may be unloaded meanwhile.
    asked = 0
    while awaits_load(gateway, name, version) and (not asked or not gateway.models.versions(name)):
        asked += 1
        patience_s = max(1e-6, ends - time.monotonic()) if limits else 0.0
        await gateway.supervisor.ask(WantModel, name, patience_s)
    return gateway.models.resolve(name, version)
