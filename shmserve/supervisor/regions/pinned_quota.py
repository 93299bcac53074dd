"""The quota of pinned (page-locked) client memory, which workers on CUDA devices lock for DMA.

A process may lock so much as RLIMIT_MEMLOCK says, and a worker may come to use every region.
"""

from __future__ import annotations

import resource

from shmserve.errors import InvalidArgument


class PinnedQuota:
    """Bytes that are pinned; `cuda`: whether there is a device to pin for."""

    def __init__(self, cuda: bool) -> None:
        self._cuda = cuda
        self._taken = 0

    def take(self, byte_size: int, copied: bool) -> None:
        """Pin so much more; `copied`: of memory that is never mapped.

        Raises InvalidArgument, and pins nothing, when that cannot be.
        """
        if not self._cuda:
            raise InvalidArgument("memory is pinned for CUDA devices, and the server has none")
        if copied:
            raise InvalidArgument("memory that others may truncate is not mapped, nor pinned")
        most, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        if most != resource.RLIM_INFINITY and byte_size > most - self._taken:
            raise InvalidArgument(
                f"{byte_size} bytes cannot be pinned: {self._taken} of the {most} bytes that a "
                "process may lock are (RLIMIT_MEMLOCK; ulimit -l, LimitMEMLOCK=)"
            )
        self._taken += byte_size

    def give(self, byte_size: int) -> None:
        """So much is pinned no more."""
        self._taken -= byte_size
