"""The control API: requests of gateways and models about regions, readiness and settings.

`models/manager.py` handles the other requests about models.
"""

from __future__ import annotations

import asyncio
import itertools
import typing
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from shmserve.common.peers import Peer
from shmserve.ipc.messages import control_requests as m
from shmserve.ipc.messages.control_requests import (
    RegionAbandoned,
    RegionInUse,
    RegionReleased,
    RegisterCudaRegion,
    RegisterRegion,
)
from shmserve.ipc.messages.supervision import CheckReady, MemoryChecked, ReadyChecked, RequestTraced
from shmserve.ipc.tensors.descriptors import CudaHandle
from shmserve.supervisor.context import SupervisorContext
from shmserve.supervisor.models.registry import ModelRegistry
from shmserve.supervisor.regions.opener import HandleCheck
from shmserve.supervisor.regions.region import KeptRegions
from shmserve.supervisor.regions.registry import RegionRegistry

PATIENCE_S = 5.0  # maximum seconds of a readiness check
_Requests = m.RegionRequest | m.AskReady | m.ChangeLogging | m.ChangeTracing
_Notifications = m.RegionUse | MemoryChecked | ReadyChecked


class _Check(NamedTuple):
    """A readiness check in flight; its outcome is None if the worker has ended."""

    number: int
    outcome: asyncio.Future[bool | None]


class ReadinessCheck:
    """The readiness checks of models that implement `is_ready`, by worker.

    A check may take longer than its caller waits, so a worker has at most one check in flight.
    Further callers wait for the response to that check.
    """

    def __init__(self, send: Callable[[int, Any], None]) -> None:
        """Create an empty table of checks; `send(pid, message)` sends a message to a worker."""
        self._send = send
        self._check_numbers = itertools.count(1)
        self._in_flight: dict[int, _Check] = {}

    async def check(self, pids: Sequence[int]) -> bool:
        """Check whether a worker reports the model as ready, and no worker as not ready.

        Workers that end, or send no response within `PATIENCE_S`, are ignored.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + PATIENCE_S
        pending_outcomes = {self._request_readiness(pid) for pid in pids}
        any_ready = False
        while pending_outcomes:
            completed_futures, pending_outcomes = await asyncio.wait(
                pending_outcomes,
                timeout=max(0.0, deadline - loop.time()),
                return_when=asyncio.FIRST_COMPLETED,
            )
            outcomes = {future.result() for future in completed_futures}
            if False in outcomes:
                return False
            any_ready = any_ready or True in outcomes
            if not completed_futures:
                break
        return any_ready

    def _request_readiness(self, pid: int) -> asyncio.Future[bool | None]:
        check = self._in_flight.get(pid)
        if check is None:
            outcome: asyncio.Future[bool | None] = asyncio.get_running_loop().create_future()
            check = self._in_flight[pid] = _Check(next(self._check_numbers), outcome)
            self._send(pid, CheckReady(check.number))
        return check.outcome

    def handle_response(self, pid: int, message: ReadyChecked) -> None:
        """Complete the readiness check of a worker that has responded."""
        check = self._in_flight.get(pid)
        if check is not None and check.number == message.id:
            del self._in_flight[pid]
            check.outcome.set_result(message.ready)

    def process_exited(self, pid: int) -> None:
        """Complete the readiness check of a worker that has ended."""
        check = self._in_flight.pop(pid, None)
        if check is not None:
            check.outcome.set_result(None)


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
