"""A region: one generation of a shared memory name, what is published of it, and the lifetime of
the process that exported its memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from shmserve.common.host import CUDA_INVALID
from shmserve.common.peers import Ownership
from shmserve.errors import InvalidArgument
from shmserve.ipc.memory import posix_shm
from shmserve.ipc.messages.publications import RegionPublished, RegionRegistered
from shmserve.ipc.tensors.descriptors import CudaHandle, Memory, Place, pack_place


class ExporterWatch:
    """The process that owns a region's memory; `on_exit` is called in the loop when it ends."""

    def __init__(self, pid: int, on_exit: Callable[[], None]) -> None:
        try:
            self._fd = os.pidfd_open(pid)
        except OSError as error:
            raise InvalidArgument(
                f"{CUDA_INVALID} (the process that exported it is gone)"
            ) from error
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._ended, on_exit)

    def _ended(self, on_exit: Callable[[], None]) -> None:
        self._loop.remove_reader(self._fd)
        on_exit()

    def close(self) -> None:
        """Stop watching."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.remove_reader(self._fd)
        os.close(self._fd)


@dataclass(slots=True, eq=False)
class OpenRegion:
    """One generation. `offset` and `byte_size` are the registered extent in the object, in
    bytes.

    System memory has a `key` and is open as `shared`; CUDA memory has a handle.
    """

    name: str
    key: str
    memory_id: int
    shared: posix_shm.SharedObject | None
    offset: int
    byte_size: int
    owner: Ownership
    users: set[int] = field(default_factory=set)  # gateways with requests of a withdrawn one
    listed: bool = False  # in every gateway, while requests use the withdrawn one
    blocks: int = 0  # of the object, when its pages had been taken
    lessor: int = 0  # the process through which it is leased, or the local client it is of, or 0
    cuda: CudaHandle | None = None
    exporter: ExporterWatch | None = None
    pinned: bool = False
    kept_as: str = ""  # the name by which its registration outlives the server

    def shrank(self) -> bool:
        """Whether pages of the object have been given back since (it may be as long as before)."""
        if self.shared is None:
            return False
        status = os.fstat(self.shared.fd)
        return status.st_size < self.offset + self.byte_size or status.st_blocks < self.blocks

    def published(self, acknowledge: int) -> RegionPublished:
        """The message to gateways."""
        place = list(pack_place(Place(self._memory(), self.offset, self.byte_size)))
        owner = self.owner
        return RegionPublished(self.name, self.key, place, owner.uid, owner.group, acknowledge)

    def listed_only(self, acknowledge: int) -> RegionPublished:
        """The message to gateways of one whose name no request may use."""
        return replace(self.published(acknowledge), draining=True)

    def _memory(self) -> Memory:
        shared, end = self.shared, self.offset + self.byte_size
        if self.cuda is not None:
            return Memory.on_device(self.memory_id, end, self.cuda)
        assert shared is not None
        return Memory(
            *(self.memory_id, os.getpid(), shared.fd, shared.inode, min(shared.size, end)),
            sealed=False,
            copied=self.owner.copied,
            pinned=self.pinned,
        )

    def registered(self) -> RegionRegistered:
        """The event."""
        device = -1 if self.cuda is None else self.cuda.device
        return RegionRegistered(
            self.name, self.key, self.offset, self.byte_size, self.owner.uid, device
        )

    @property
    def orphaned(self) -> bool:
        """Whether the owner of the object removed it: a name for it can be taken over."""
        return self.shared is not None and os.fstat(self.shared.fd).st_nlink == 0

    def close(self) -> None:
        """Close the object, and watch its owner no more."""
        if self.shared is not None:
            os.close(self.shared.fd)
        if self.exporter is not None:
            self.exporter.close()
