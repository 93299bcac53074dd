"""The processes that hold the workspace pools of CUDA devices (resources/workspaces.py):
started before models are loaded, and again when one dies. Its memory is lost then: leases wait
for the next.
"""

from __future__ import annotations

import secrets
from typing import Any

from shmserve.common.tasks import settle
from shmserve.ipc.messages.memory import WorkspaceAllocated
from shmserve.ipc.messages.start import WorkspaceStart, encode
from shmserve.ipc.tensors.descriptors import CudaHandle, Memory
from shmserve.supervisor.context import SupervisorContext
from shmserve.supervisor.kept.kept_processes import KeptProcess, KeptProcesses
from shmserve.supervisor.processes.table import Child

_ENTRY = "shmserve.supervisor.resources.workspaces:run"


class WorkspaceHolders(KeptProcesses):
    """One for each CUDA device that has a pool, by the device's name."""

    role = "workspace"

    def __init__(self, context: SupervisorContext) -> None:
        self._sizes = context.config.workspace_byte_sizes
        super().__init__(context, [device for device in self._sizes if device != "cpu"])

    async def _spawn(self, name: str, title: str) -> Child:
        context = self._context
        start = WorkspaceStart(_number(name), self._sizes[name], context.run_dir, context.log)
        return await context.front_zygote.spawn(title, _ENTRY, encode(start))

    def _received(self, kept: KeptProcess, child: Child, message: Any) -> None:
        match message:
            case WorkspaceAllocated(raw, uuid):
                handle = CudaHandle(raw, _number(kept.name), uuid)
                size = self._sizes[kept.name]
                memory = Memory.on_device(secrets.randbits(62), size, handle, child.pid)
                self._context.workspaces.allocated(kept.name, memory)
                settle(kept.contact, None)

    def _exited(self, kept: KeptProcess, child: Child, _: object) -> None:
        if not self._stopping:
            self._context.workspaces.lost(kept.name)
        super()._exited(kept, child, _)


def _number(device: str) -> int:
    return int(device.partition(":")[2])
