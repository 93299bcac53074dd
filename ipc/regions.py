"""A process's mappings of memory that other processes hold, opened on first use and kept.

Only workers map clients' regions: a client that truncates its object kills whoever touches the
lost pages. Those of clients who are not trusted are not mapped at all, but read and written by
system calls. Gateways map workers' arenas, which are sealed.
"""

from __future__ import annotations

import mmap
import os

from shmserve.errors import InvalidArgument, Unavailable
from shmserve.ipc.ranges import fits
from shmserve.ipc.tensors import Memory, Place


def _truncated() -> InvalidArgument:
    return InvalidArgument(
        "the shared memory object of a region was truncated after it was registered"
    )


class _Mapping:
    __slots__ = ("copied", "fd", "map", "pid", "view")

    map: mmap.mmap
    view: memoryview

    def __init__(self, memory: Memory) -> None:
        self.pid = memory.pid
        self.copied = memory.copied
        try:
            self.fd = os.open(f"/proc/{memory.pid}/fd/{memory.fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise Unavailable("the memory of a tensor is gone") from error
        try:
            status = os.fstat(self.fd)
            if status.st_ino != memory.inode:
                raise Unavailable("the memory of a tensor is gone")
            if status.st_size < memory.byte_size:
                raise _truncated()
            if not self.copied:
                self.map = mmap.mmap(self.fd, memory.byte_size)
                self.view = memoryview(self.map)
        except BaseException:
            os.close(self.fd)
            raise


class Mappings:
    """Maps `Memory`s once each and gives views of `Place`s in them."""

    def __init__(self) -> None:
        self._known: dict[int, _Mapping] = {}

    def __len__(self) -> int:
        return len(self._known)

    def view(self, place: Place) -> memoryview:
        """The bytes at `place`, writable.

        Raises Unavailable when the object is gone, InvalidArgument when it is smaller than the
        place needs.
        """
        mapping = self._mapping(place)
        assert not mapping.copied, "this memory is not to be mapped"
        return mapping.view[place.offset : place.offset + place.byte_size]

    def _mapping(self, place: Place) -> _Mapping:
        memory = place.memory
        mapping = self._known.get(memory.id)
        if mapping is None:
            mapping = self._known[memory.id] = _Mapping(memory)
        if not memory.sealed and os.fstat(mapping.fd).st_size < place.offset + place.byte_size:
            raise _truncated()
        if not fits(place.offset, place.byte_size, memory.byte_size):
            raise InvalidArgument("a tensor lies outside its shared memory region")
        return mapping

    def read(self, place: Place) -> memoryview:
        """A copy of the bytes at `place` of a memory that is not to be mapped; raises as `view`."""
        mapping = self._mapping(place)
        copy = memoryview(bytearray(place.byte_size))
        at = 0
        while at < len(copy):
            count = os.preadv(mapping.fd, [copy[at:]], place.offset + at)
            if not count:
                raise _truncated()
            at += count
        return copy

    def write(self, place: Place, data: bytes | memoryview) -> None:
        """Write `data` at `place` of a memory that is not to be mapped; raises as `view`."""
        mapping = self._mapping(place)
        rest = memoryview(data).cast("B")
        at = place.offset
        while rest:
            try:
                count = os.pwrite(mapping.fd, rest, at)
            except OSError as error:
                # Pages that were taken at registration may have been given back since.
                raise Unavailable("shared memory is full") from error
            rest, at = rest[count:], at + count

    def drop(self, memory_id: int) -> None:
        """Forget a memory. Its pages go when the last view of it does (a model may still hold
        one)."""
        mapping = self._known.pop(memory_id, None)
        if mapping is not None:
            os.close(mapping.fd)

    def drop_process(self, pid: int) -> None:
        """Forget every memory that process `pid` held: it is gone."""
        for memory_id in [key for key, mapping in self._known.items() if mapping.pid == pid]:
            self.drop(memory_id)

    def drop_all(self) -> None:
        """Forget every memory."""
        for memory_id in list(self._known):
            self.drop(memory_id)
