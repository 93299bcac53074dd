"""The context of an instance: its start parameters and its resources."""

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
    """The timestamps within an execution that only a backend can take, in monotonic ns.

    0: not taken.

    Missing timestamps are replaced by those around `execute`.
    """

    input_end_ns: int = 0
    output_start_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelContext(WorkerStart):
    """The identity and the resources of an instance, for its backend.

    Attributes:
        control: The link to the supervisor.
        arena: The memory for tensors of this process.
        output_memory: The blocks of the arena for outputs.
        mappings: The views of other processes' memory.
        workspace: Leases of the device's shared workspace.
        copied: Counts the bytes of tensors that are copied.
        spans: The spans of the model's calls of others since the last batch, encoded as in
            ipc/trace.py.
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
        """Return the folder of the version's files: model_dir/version."""
        return self.model_dir / self.version

    def model_file(self, names: Iterable[str], wanted: str) -> Path:
        """Return the first of these files that exists in the version folder.

        Raises:
            Unavailable: None exists; the message names `wanted`.
        """
        for name in names:
            path = self.version_dir / name
            if path.exists():
                return path
        raise Unavailable(
            f"unable to find '{self.version}/{wanted}' for model instance '{self.instance_name}'"
        )
