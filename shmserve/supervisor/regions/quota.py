"""Quotas of registered shared memory: by user, in all, of pages that the server allocates, and of
pinned memory (pure but for one look at /dev/shm).

A page of a shared memory object is charged to whoever touches it first. What a client did not
allocate before it registered is allocated by the server, and counts against a budget until the
object is gone: unregistering does not give the pages back, removing the object does.
"""

from __future__ import annotations

import os
import resource
from collections import Counter

from shmserve.common.access.shm_access import ShmPolicy
from shmserve.errors import InvalidArgument

_FOLDER = "/dev/shm"


class RegionQuota:
    """The counts behind the limits of a policy. Sizes in bytes."""

    def __init__(self, policy: ShmPolicy) -> None:
        self.policy = policy
        self._regions: Counter[int] = Counter()  # by uid
        self._bytes: Counter[int] = Counter()
        self._held: Counter[tuple[int, int]] = Counter()  # regions by (device, inode)
        # (device, inode) -> key, bytes
        self._allocated: dict[tuple[int, int], tuple[str, int]] = {}

    def enter(self, uid: int, byte_size: int, file: tuple[int, int] | None = None) -> None:
        """A user's region of an object, `file` (device, inode), or of a device's memory.

        Raises InvalidArgument, and enters nothing, when it is one too many or its bytes are.
        """
        policy = self.policy
        for count, most, flag in (
            (self._regions[uid], policy.max_regions_per_uid, "--shm-max-regions-per-uid"),
            (self._regions.total(), policy.max_regions, "--shm-max-regions"),
        ):
            if count >= most:
                raise InvalidArgument(
                    f"at most {most} shared memory regions can be registered ({flag})"
                )
        for size, most, flag in (
            (self._bytes[uid], policy.max_byte_size_per_uid, "--shm-max-byte-size-per-uid"),
            (self._bytes.total(), policy.max_byte_size, "--shm-max-byte-size"),
        ):
            if byte_size > most - size:
                raise InvalidArgument(
                    f"a region of {byte_size} bytes is too large: {size} of the {most} bytes that "
                    f"can be registered are ({flag})"
                )
        self._regions[uid] += 1
        self._bytes[uid] += byte_size
        if file is not None:
            self._held[file] += 1

    def release(self, uid: int, byte_size: int, file: tuple[int, int] | None = None) -> None:
        """Count a region no more that was entered."""
        self._regions[uid] -= 1
        self._bytes[uid] -= byte_size
        if not self._regions[uid]:
            del self._regions[uid], self._bytes[uid]
        if file is not None:
            self._held[file] -= 1
            if not self._held[file]:
                del self._held[file]

    def charge(self, key: str, file: tuple[int, int], byte_size: int) -> None:
        """The server is about to allocate `byte_size` bytes of an object.

        Raises InvalidArgument when the budget does not reach.
        """
        most = self.policy.sparse_byte_size
        if byte_size > most - self._in_use():
            self._drop_removed()
        if byte_size > most - self._in_use():
            raise InvalidArgument(
                f"{byte_size} bytes of shared memory object '{key}' are not allocated, and "
                f"{self._in_use()} of the {most} bytes that the server allocates for clients are "
                "in use (--shm-sparse-byte-size): allocate it with posix_fallocate, or write to "
                "it, before it is registered"
            )
        if byte_size:
            _, before = self._allocated.get(file, (key, 0))
            self._allocated[file] = (key, before + byte_size)

    def refund(self, file: tuple[int, int], byte_size: int) -> None:
        """Return so much of what was charged last: it was not allocated."""
        key, charged = self._allocated.get(file, ("", 0))
        if charged > byte_size:
            self._allocated[file] = (key, charged - byte_size)
        else:
            self._allocated.pop(file, None)

    def _in_use(self) -> int:
        return sum(size for _, size in self._allocated.values())

    def _drop_removed(self) -> None:
        for file, (key, _) in list(self._allocated.items()):
            if file in self._held:
                continue
            try:
                status = os.stat(_FOLDER + key, follow_symlinks=False)
            except OSError:
                del self._allocated[file]
                continue
            if (status.st_dev, status.st_ino) != file:
                del self._allocated[file]


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

    def release(self, byte_size: int) -> None:
        """Pin so much less."""
        self._taken -= byte_size
