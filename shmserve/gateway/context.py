"""The state of one gateway process, and the lookup of a request's model."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from functools import partial

from shmserve.gateway.inference.body_arrival import BodyBudget, MallocTrim
from shmserve.gateway.links import GatewaySchedulers, GatewaySupervisorLink
from shmserve.gateway.model_table import GatewayModel, ModelTable
from shmserve.gateway.region_table import RegionTable
from shmserve.gateway.settings import GatewaySettings
from shmserve.gateway.tracer import Tracer
from shmserve.ipc.memory.arena import Arena
from shmserve.ipc.memory.mappings import Mappings
from shmserve.ipc.messages.control_requests import WantModel
from shmserve.ipc.messages.publications import HealthChanged
from shmserve.ipc.messages.supervision import LoadsFailed


@dataclass(slots=True, eq=False)
class Gateway:
    """The objects that the handlers of one gateway process share.

    Attributes:
        schedulers: The links to the schedulers.
        arena: The shared memory for request bodies.
        body_budget: The memory limit of bodies that are arriving.
        mappings: The mappings of workers' arenas, but not of clients' regions.
        health: The health that the supervisor has published.
        health_changed: An event that is set at the next change of `health`, and then replaced.
        failures: The models that failed to load, as the supervisor has published them.
        malloc_trim: The timer that returns freed memory to the system.
        draining: Whether connections end with their next response.
        refusing: Whether every client was notified of the drain. Requests of open streams are then
            refused.
    """

    settings: GatewaySettings
    schedulers: GatewaySchedulers
    models: ModelTable
    regions: RegionTable
    supervisor: GatewaySupervisorLink
    arena: Arena
    body_budget: BodyBudget
    malloc_trim: MallocTrim
    mappings: Mappings
    health: HealthChanged
    health_changed: asyncio.Event = field(default_factory=asyncio.Event)
    draining: bool = False
    refusing: bool = False
    failures: LoadsFailed = field(default_factory=partial(LoadsFailed, [], 0))
    tracer: Tracer = field(default_factory=Tracer)


def needs_load(gateway: Gateway, name: str, version: str) -> bool:
    """Return whether a request must first load the model: it is on demand, and not loaded."""
    models = gateway.models
    return name in models.on_demand and models.find(name, version) is None


# A limit in microseconds from a request's arrival (0: none), and the origin of the limit.
TimeLimit = tuple[int, str]
UNLIMITED: TimeLimit = (0, "")


async def resolve_model(gateway: Gateway, name: str, version: str, *limits_us: int) -> GatewayModel:
    """Return the model for a request, loaded on demand; version "" means the latest.

    The wait is limited by the shortest of `limits_us` and the server's limit (0: no limit).

    Raises:
        NotFound: There is no such model.
        Unavailable: The model is not ready, or the wait was too long.
        ShmserveError: The load failed.
    """
    limits = [limit for limit in (*limits_us, gateway.settings.request_timeout_us) if limit > 0]
    deadline = time.monotonic() + min(limits, default=0) / 1e6
    # If the loaded model lacks the version, loading again is useless. A model that was unloaded
    # during the wait has no versions, and is loaded again.
    attempts = 0
    while needs_load(gateway, name, version):
        if attempts and gateway.models.versions(name):
            break
        attempts += 1
        limit_s = max(1e-6, deadline - time.monotonic()) if limits else 0.0
        await gateway.supervisor.send_request(WantModel, name, limit_s)
    return gateway.models.resolve(name, version)
