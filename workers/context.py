"""The context of an instance: what its worker was started with, and the resources it has."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from shmserve.errors import Unavailable
from shmserve.ipc.memory.arena import Arena
from shmserve.ipc.memory.mappings import Mappings
from shmserve.ipc.messages.supervision import WorkerStart
from shmserve.workers.batch.request import Copied
from shmserve.workers.links.supervisor import SupervisorLink
from shmserve.workers.links.workspace import Workspace
from shmserve.workers.memory.device_memory import DeviceMemory
from shmserve.workers.memory.outputs import OutputMemory


@dataclass(slots=True)
class Stopwatch:
    """The two moments of an execution that only a backend knows, monotonic ns; 0: not taken.

    A backend that does not take them is measured around `execute`.
    """

    input_end_ns: int = 0
    output_start_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelContext(WorkerStart):
    """The identity and the resources of an instance, given to its backend once: what it was started
    with, and what it made of that.

    `repository` and `model_dir` (repository/model) hold the files. `kind` is "CPU" or "GPU",
    `device` what torch calls it ("cpu", "cuda:0", "npu:1"), `device_id` its number (0 on a CPU).
    `backend_config` is what --backend-config said for this backend. `control` asks the supervisor.
    `arena` and `mappings` are this process's memory for tensors it makes and its views of others',
    `output_memory` has the arena's blocks for outputs. `workspace` leases the device's shared
    workspace. `copied` counts the bytes of tensors that are copied on the way. `spans` are of what
    its model has asked others since the last batch ended, as ipc/trace.py has them.
    """

    control: SupervisorLink
    arena: Arena
    output_memory: OutputMemory
    mappings: Mappings
    workspace: Workspace
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    device_memory: DeviceMemory | None = None
    copied: Copied = field(default_factory=Copied)
    spans: list[bytes] = field(default_factory=list)

    @property
    def version_dir(self) -> Path:
        """The folder of the version's files: model_dir/version."""
        return self.model_dir / self.version

    def model_file(self, names: Iterable[str], wanted: str) -> Path:
        """The first of these files that the version has. Raises Unavailable for `wanted` where it
        has none."""
        for name in names:
            path = self.version_dir / name
            if path.exists():
                return path
        raise Unavailable(
            f"unable to find '{self.version}/{wanted}' for model instance '{self.instance_name}'"
        )
