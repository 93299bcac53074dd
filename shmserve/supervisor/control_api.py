"""The control API: requests of gateways and models to the supervisor, and their responses."""

from __future__ import annotations

import logging
import typing
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from shmserve.common.peers import Peer
from shmserve.errors import Internal, ShmserveError
from shmserve.ipc.messages import control_requests as m
from shmserve.ipc.messages.control_requests import (
    RegionAbandoned,
    RegionInUse,
    RegionReleased,
    RegisterCudaRegion,
    RegisterRegion,
)
from shmserve.ipc.messages.supervision import MemoryChecked, ReadyChecked, RequestTraced
from shmserve.ipc.tensors.descriptors import CudaHandle
from shmserve.supervisor.context import SupervisorContext
from shmserve.supervisor.models.manager import ModelManager
from shmserve.supervisor.models.registry import ModelRegistry, ReadinessCheck
from shmserve.supervisor.regions.opener import HandleCheck
from shmserve.supervisor.regions.region import KeptRegions
from shmserve.supervisor.regions.registry import RegionRegistry

logger = logging.getLogger(__name__)

_Requests = m.RegionRequest | m.AdminRequest | m.FindModel | m.WantModel | m.AskReady
_Notifications = m.RegionUse | MemoryChecked | ReadyChecked


@dataclass(slots=True, eq=False)
class ControlApi:
    """The dispatcher of requests from gateways and models to the services of the supervisor.

    The response to each request is `Answered` or `Refused`.
    """

    _context: SupervisorContext
    _regions: RegionRegistry
    _kept: KeptRegions
    _handles: HandleCheck
    _models: ModelManager
    _registry: ModelRegistry
    _readiness: ReadinessCheck

    def __post_init__(self) -> None:
        serve = self._context.control.serve
        serve(typing.get_args(_Notifications), self._on_notification)
        serve(typing.get_args(m.WorkspaceRequest), self._context.workspaces.handle)
        serve([RequestTraced], self._context.tracing.on_traced)
        serve(typing.get_args(_Requests), self._on_request)

    def _on_notification(self, pid: int, message: Any) -> None:
        match message:
            case RegionInUse(memory_id, is_used):
                self._regions.draining.record_use(pid, memory_id, is_used)
            case RegionReleased(memory_id):
                self._regions.draining.record_release(pid, memory_id)
            case RegionAbandoned(memory_id):
                self._context.background(self._regions.withdraw_leased(pid, memory_id))
            case MemoryChecked():
                self._handles.handle_response(pid, message)
            case ReadyChecked():
                self._readiness.handle_response(pid, message)

    def _on_request(self, pid: int, message: Any) -> None:
        self._context.background(self._respond(pid, message))

    async def _respond(self, pid: int, request: Any) -> None:
        number, send = request.id, self._context.control.send
        try:
            payload = await self._handle(pid, request)
        except ShmserveError as error:
            send(pid, m.Refused.of(number, error))
        except Exception:
            logger.exception("the request %s of process %d failed", type(request).__name__, pid)
            send(pid, m.Refused.of(number, Internal()))
        else:
            send(pid, m.Answered(number, payload or {}))

    async def _handle(self, pid: int, request: Any) -> dict[str, Any] | None:
        match request:
            case m.LoadModel(name=name, config=config, files=files):
                await self._models.load_on_request(name, config, files)
            case m.UnloadModel(name=name, unload_dependents=dependents):
                await self._models.unload_on_request(name, dependents)
            case m.IndexRepository(ready=only_ready):
                return {"models": await self._models.index(only_ready)}
            case m.NameModels():
                return {"names": await self._models.list_generative_aliases()}
            case m.ChangeLogging(changes=changes):
                return self._context.logging.change(changes)
            case m.ChangeTracing(model=model, changes=changes):
                return self._context.tracing.change(model, changes)
            case m.WantModel(name=name, timeout_s=timeout_s):
                await self._models.on_demand.load(name, timeout_s)
            case m.FindModel(name=name, version=version, timeout_s=timeout_s):
                self._context.control.add_caller(pid)
                await self._models.on_demand.load(name, timeout_s)
                return self._registry.find(name, version)
            case m.AskReady(name=name, version=version):
                pids = self._registry.readiness_worker_pids(name, version)
                return {"ready": await self._readiness.check(pids)}
            case _:
                payload = await self._handle_region(pid, request)
                # A region counts as registered once it would survive a restart or a handover.
                await self._kept.flush()
                return payload
        return None

    def _handle_region(self, pid: int, request: Any) -> Coroutine[Any, Any, dict[str, Any] | None]:
        peer = Peer(request.uid, tuple(request.groups))
        match request:
            case RegisterRegion(_, name, key, offset, size, leased=leased, pin=pin):
                lease_holder = pid if leased else 0
                return self._regions.register(name, key, offset, size, peer, lease_holder, pin)
            case RegisterCudaRegion(name=name, offset=offset, byte_size=size, exporter_pid=pid):
                handle = CudaHandle(request.handle, request.device_id, request.device_uuid)
                return self._regions.register_cuda(name, handle, offset, size, peer, pid)
            case _:
                return self._regions.unregister(request.name, peer, request.cuda)
