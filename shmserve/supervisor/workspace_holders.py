"""The processes that hold the workspace pools of CUDA devices (resources/workspaces.py):
started before models are loaded, and again when one dies. Its memory is lost then: leases wait
for the next.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from shmserve.errors import ShmserveError, Unavailable
from shmserve.ipc.messages.start import WorkspaceStart, encode
from shmserve.ipc.messages.supervision import WorkspaceAllocated
from shmserve.ipc.tensors.descriptors import CudaHandle, Memory
from shmserve.supervisor.context import SupervisorContext
from shmserve.supervisor.processes.table import Child, RestartBackoff

logger = logging.getLogger(__name__)

_ENTRY = "shmserve.supervisor.resources.workspaces:run"


@dataclass(slots=True, eq=False)
class _Holder:
    device: str
    byte_size: int
    allocated: asyncio.Future[None]  # for the first time
    child: Child | None = None
    started: float = 0.0
    backoff: RestartBackoff = field(default_factory=RestartBackoff)

    @property
    def device_id(self) -> int:
        return int(self.device.partition(":")[2])


class WorkspaceHolders:
    """One for each CUDA device that has a pool."""

    def __init__(self, context: SupervisorContext) -> None:
        loop = asyncio.get_running_loop()
        self._context = context
        self._holders = [
            _Holder(device, size, loop.create_future())
            for device, size in context.config.workspace_byte_sizes.items()
            if device != "cpu"
        ]
        self._stopping = False

    async def start(self) -> None:
        """Start them; returns when all have their memory.

        Raises Unavailable when one cannot have it; its log says why.
        """
        await asyncio.gather(*map(self._start, self._holders))
        await asyncio.gather(*(holder.allocated for holder in self._holders))

    async def _start(self, holder: _Holder) -> None:
        context = self._context
        holder.started = time.monotonic()
        start = WorkspaceStart(holder.device_id, holder.byte_size, context.run_dir, context.log)
        child = await context.front_zygote.spawn(
            f"workspace {holder.device}", _ENTRY, encode(start)
        )
        holder.child = child
        context.enrol(child.pid, "workspace", partial(self._allocated, holder))

    def _allocated(self, holder: _Holder, message: Any) -> None:
        match message:
            case WorkspaceAllocated(raw, uuid):
                assert holder.child is not None
                handle = CudaHandle(raw, holder.device_id, uuid)
                memory = Memory.on_device(
                    secrets.randbits(62), holder.byte_size, handle, holder.child.pid
                )
                self._context.workspaces.allocated(holder.device, memory)
                if not holder.allocated.done():
                    holder.allocated.set_result(None)

    def process_exited(self, child: Child) -> None:
        """Start a holder again if `child` was one."""
        for holder in self._holders:
            if holder.child is not child or self._stopping:
                continue
            self._context.workspaces.lost(holder.device)
            if holder.allocated.done():
                logger.error("%s ended (%s); starting it again", child.title, child.reason)
                self._context.background(self._restart(holder))
            else:
                text = f"{child.title} ended at its start"
                holder.allocated.set_exception(Unavailable(text))
                holder.allocated.exception()  # retrieved, also when nobody waits any more

    async def _restart(self, holder: _Holder) -> None:
        await asyncio.sleep(holder.backoff.pause_s(time.monotonic() - holder.started))
        if self._stopping:
            return
        try:
            await self._start(holder)
        except (ShmserveError, OSError) as error:  # of no descriptor or memory left, too
            logger.error("workspace %s could not be started: %s", holder.device, error)
            self._context.background(self._restart(holder))

    def retire(self) -> None:
        """Start none again: the server ends."""
        self._stopping = True
