"""Capabilities of local clients, as MACs: who a program is, and which memory is its own.

The server's processes share a key that no local client knows, so a scheduler needs to ask nobody:

    token      MAC of the local client's number: part of the identity of its links to schedulers
    memory id  MAC of the local client's number and of all that describes the memory; for that of
               a device, a number that is never used twice, and a MAC

A local client that makes one up, or uses another one's memory, has the wrong one.
"""

from __future__ import annotations

import hashlib
import hmac
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shmserve.ipc.tensors.descriptors import CudaHandle, Memory

KEY_SIZE = 32

# A local client's number stands where others have their pid, and is never one: those end at 2**22.
# All have nine digits.
FIRST = 100_000_000
# What a scheduler takes of one local client: links at a time, and bytes of a packed request.
MOST_LINKS = 16
LARGEST_WORK = 1 << 20
_TOKEN_SIZE = 16
_MAC_BITS = 40
_DESCRIBED = attrgetter("pid", "fd", "inode", "byte_size", "sealed", "pinned")  # of a memory


class Capabilities:
    """Makes and checks what local clients prove themselves with."""

    def __init__(self, key: bytes) -> None:
        self.key = key

    def _mac(self, text: str, size: int) -> bytes:
        return hashlib.blake2b(text.encode(), key=self.key, digest_size=size).digest()

    def token(self, number: int) -> str:
        """The token of local client `number`."""
        return self._mac(f"guest {number}", _TOKEN_SIZE).hex()

    def local_client(self, identity: bytes) -> int:
        """The number of the local client whose link has this identity; 0 when it is none's."""
        number, _, rest = identity.partition(b".")
        if len(number) != 9 or not number.isdigit() or int(number) < FIRST:
            return 0
        token = rest.partition(b".")[0]
        true = hmac.compare_digest(token, self.token(int(number)).encode())
        return int(number) if true else 0

    def memory_id(self, number: int, *described: int) -> int:
        """The id of a memory of local client `number`: 62 bits that cannot be guessed. It is
        `described` by its pid, fd, inode, byte_size, and whether it is sealed and pinned."""
        text = " ".join(map(str, ("memory", number, *described)))
        return int.from_bytes(self._mac(text, 8), "little") >> 2

    def device_memory_id(self, number: int, serial: int, byte_size: int, handle: CudaHandle) -> int:
        """The id of a device memory of local client `number`.

        Shared once more, the same handle has another `serial` and id, so that workers can refuse
        what was withdrawn.
        """
        serial %= 1 << (62 - _MAC_BITS)
        device, raw, uuid = handle.device, handle.raw.hex(), handle.uuid.hex()
        text = f"device memory {number} {serial} {byte_size} {device} {raw} {uuid}"
        return serial << _MAC_BITS | int.from_bytes(self._mac(text, _MAC_BITS // 8), "little")

    def owns(self, number: int, memory: Memory) -> bool:
        """Whether the memory is one of local client `number`'s, described as it is."""
        if memory.cuda is not None:
            serial = memory.id >> _MAC_BITS
            return memory.id == self.device_memory_id(number, serial, memory.byte_size, memory.cuda)
        return not memory.copied and memory.id == self.memory_id(number, *_DESCRIBED(memory))
