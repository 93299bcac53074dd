"""Memory registered with the server through the protocol: one region each for inputs and outputs.

in     | request 0: input, input | request 1: ...          read by the server
out    | slot 0: output, output | slot 1: ...              written by the server, never read
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import posix_ipc

from shmserve.client.memory.cuda import exporting
from shmserve.errors import Unavailable
from shmserve.ipc.memory.cuda_ipc import DeviceAllocation
from shmserve.perf.data import Item
from shmserve.protocols import AdminTransport, RegionPart, TransportError

_ALIGNMENT = 64


class SystemMemory:
    """A POSIX shared memory object, removed by `close`."""

    kind = "system"

    def __init__(self, name: str, byte_size: int) -> None:
        """Raises Unavailable if memory is exhausted."""
        self._key = f"/{name}"
        try:
            made = posix_ipc.SharedMemory(self._key, posix_ipc.O_CREX, 0o600, byte_size)
            os.posix_fallocate(made.fd, 0, byte_size)
            self._bytes = mmap.mmap(made.fd, byte_size)
        except (OSError, posix_ipc.Error) as error:
            with contextlib.suppress(posix_ipc.Error):
                posix_ipc.unlink_shared_memory(self._key)
            raise Unavailable(f"no {byte_size} bytes of shared memory: {error}") from None
        made.close_fd()
        self.fields: dict[str, Any] = {"key": self._key, "offset": 0, "byte_size": byte_size}

    def write(self, offset: int, raw: bytes) -> None:
        """Write bytes."""
        self._bytes[offset : offset + len(raw)] = raw

    def close(self) -> None:
        """Release the memory."""
        posix_ipc.unlink_shared_memory(self._key)
        self._bytes.close()


class CudaMemory:
    """Memory of CUDA device 0, exported by its handle."""

    kind = "cuda"

    def __init__(self, name: str, byte_size: int) -> None:
        """Raises Unavailable without a device, or if its memory is exhausted."""
        self._memory: DeviceAllocation | None = DeviceAllocation(exporting(), 0, byte_size)
        self._pointer, self._cuda = self._memory.pointer, self._memory.cuda
        raw = self._memory.handle.raw
        self.fields: dict[str, Any] = {"raw_handle": raw, "device_id": 0, "byte_size": byte_size}

    def write(self, offset: int, raw: bytes) -> None:
        """Copy bytes to the device."""
        if raw:
            self._cuda.write(self._pointer + offset, memoryview(raw), 0)

    def close(self) -> None:
        """Release the memory."""
        self._memory = None


KINDS: dict[str, type[SystemMemory] | type[CudaMemory]] = {
    "system": SystemMemory,
    "cuda": CudaMemory,
}


class Regions:
    """The two regions of a run; a context that unregisters and removes them."""

    def __init__(self, transport: AdminTransport, kind: str) -> None:
        self._transport = transport
        self._make = KINDS[kind]
        self._memories: dict[str, SystemMemory | CudaMemory] = {}

    def inputs(self, items: Sequence[Item]) -> list[Item]:
        """Return the same requests with inputs in a region. Raises Unavailable, TransportError."""
        parts: list[RegionPart] = []
        name = self._name("in")
        at = 0
        for tensor in (tensor for item in items for tensor in item):
            parts.append(RegionPart(name, at, len(tensor.raw)))
            at += _aligned(len(tensor.raw))
        memory = self._region(name, at)
        left = iter(parts)
        placed = [[(tensor, next(left)) for tensor in item] for item in items]
        for tensor, part in (pair for item in placed for pair in item):
            memory.write(part.offset, tensor.raw)
        return [[replace(tensor, raw=b"", part=part) for tensor, part in item] for item in placed]

    def outputs(self, sizes: Mapping[str, int], slots: int) -> list[dict[str, RegionPart]]:
        """Reserve space for the outputs of each slot. Raises Unavailable, TransportError."""
        name = self._name(f"out{slots}")
        output_parts: list[dict[str, RegionPart]] = []
        at = 0
        for _ in range(slots):
            output_parts.append({})
            for output, size in sizes.items():
                output_parts[-1][output] = RegionPart(name, at, size)
                at += _aligned(size)
        self._region(name, at)
        return output_parts

    def _name(self, what: str) -> str:
        return f"perf-{os.getpid()}-{what}-{len(self._memories)}"

    def _region(self, name: str, byte_size: int) -> SystemMemory | CudaMemory:
        memory = self._make(name, max(byte_size, _ALIGNMENT))
        self._memories[name] = memory
        self._transport.register(memory.kind, name, memory.fields)
        return memory

    def __enter__(self) -> Regions:
        return self

    def __exit__(self, *error: object) -> None:
        for name, memory in self._memories.items():
            with contextlib.suppress(TransportError):  # exited, or unregistered
                self._transport.unregister(memory.kind, name)
            memory.close()


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
