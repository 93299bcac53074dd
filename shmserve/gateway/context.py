"""The state of one gateway process, for its handlers."""

from __future__ import annotations

from dataclasses import dataclass, field

from shmserve.gateway.inference.body_arrival import BodyBudget, MallocTrim
from shmserve.gateway.links import RequestDispatcher, SupervisorLink
from shmserve.gateway.model_table import ModelTable
from shmserve.gateway.region_table import RegionTable
from shmserve.gateway.settings import GatewaySettings
from shmserve.gateway.tracing.tracer import Tracer
from shmserve.ipc.memory.arena import Arena
from shmserve.ipc.memory.mappings import Mappings
from shmserve.ipc.messages.publications import HealthChanged


@dataclass(slots=True, eq=False)
class Gateway:
    """`arena` holds request bodies, of which `body_budget` accounts for those that are arriving;
    `mappings` are of workers' arenas, never of clients' regions.

    `health` is the supervisor's verdict. `draining`: connections end with their next response.
    `refusing`: every client knows that, and what comes in streams that stay is refused.
    """

    settings: GatewaySettings
    dispatcher: RequestDispatcher
    models: ModelTable
    regions: RegionTable
    supervisor: SupervisorLink
    arena: Arena
    body_budget: BodyBudget
    malloc_trim: MallocTrim
    mappings: Mappings
    health: HealthChanged
    draining: bool = False
    refusing: bool = False
    tracer: Tracer = field(default_factory=Tracer)
