"""The control API: requests of gateways and models about regions, readiness and settings.

`models/manager.py` handles the requests about models.
"""

from __future__ import annotations

import typing
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from shmserve.common.peers import Peer
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
from shmserve.supervisor.models.registry import ModelRegistry, ReadinessCheck
from shmserve.supervisor.regions.opener import HandleCheck
from shmserve.supervisor.regions.region import KeptRegions
from shmserve.supervisor.regions.registry import RegionRegistry

_Requests = m.RegionRequest | m.AskReady | m.ChangeLogging | m.ChangeTracing
_Notifications = m.RegionUse | MemoryChecked | ReadyChecked


@dataclass(slots=True, eq=False)
class ControlApi:
    """The dispatcher of requests about regions, readiness checks, log and trace settings."""

    _context: SupervisorContext
    _regions: RegionRegistry
    _kept_regions: KeptRegions
    _handle_check: HandleCheck
    _registry: ModelRegistry
    _readiness_check: ReadinessCheck

    def __post_init__(self) -> None:
        serve = self._context.control.serve
        serve(typing.get_args(_Notifications), self._on_notification)
        serve(typing.get_args(m.WorkspaceRequest), self._context.workspaces.handle)
        serve([RequestTraced], self._context.tracing.on_traced)
        self._context.control.serve_requests(typing.get_args(_Requests), self._handle)

    def _on_notification(self, pid: int, message: Any) -> None:
        match message:
            case RegionInUse(memory_id, is_used):
                self._regions.draining.record_use(pid, memory_id, is_used)
            case RegionReleased(memory_id):
                self._regions.draining.record_release(pid, memory_id)
            case RegionAbandoned(memory_id):
                self._context.background(self._regions.withdraw_leased(pid, memory_id))
            case MemoryChecked():
                self._handle_check.handle_response(pid, message)
            case ReadyChecked():
                self._readiness_check.handle_response(pid, message)

    async def _handle(self, pid: int, request: Any) -> dict[str, Any] | None:
        match request:
            case m.ChangeLogging(changes=changes):
                return self._context.logging.change(changes)
            case m.ChangeTracing(model=model, changes=changes):
                return self._context.tracing.change(model, changes)
            case m.AskReady(name=name, version=version):
                pids = self._registry.pids_with_readiness_check(name, version)
                return {"ready": await self._readiness_check.check(pids)}
            case _:
                payload = await self._handle_region(pid, request)
                # The response confirms that the region will survive a restart or a handover.
                await self._kept_regions.flush()
                return payload

    def _handle_region(self, pid: int, request: Any) -> Coroutine[Any, Any, dict[str, Any] | None]:
        peer = Peer(request.uid, tuple(request.groups))
        match request:
            case RegisterRegion(_, name, key, offset, size, is_leased=leased, pin=pin):
                lease_holder = pid if leased else 0
                return self._regions.register(name, key, offset, size, peer, lease_holder, pin)
            case RegisterCudaRegion(name=name, offset=offset, byte_size=size, exporter_pid=pid):
                handle = CudaHandle(request.handle, request.device_id, request.device_uuid)
                return self._regions.register_cuda(name, handle, offset, size, peer, pid)
            case _:
                return self._regions.unregister(request.name, peer, request.is_cuda)
