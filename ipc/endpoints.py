"""Endpoints of a server's sockets, and the capabilities of the local clients that connect to them.

All paths derive from one private run directory, so that two servers never collide.

A local client is a program on this host that is no process of the server. The server's processes
share a key that local clients do not have. Each process can therefore verify two MACs by itself:

    token      MAC of the local client's number: part of the identity of its links to schedulers
    memory id  MAC of the local client's number and of the memory's description; the id of device
               memory contains a serial number, which is never reused, and a MAC

A forged token or the id of another client's memory fails the check.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path

from shmserve.ipc.tensors.descriptors import CudaHandle, Memory

# The path of a unix socket has at most 107 bytes (sockaddr_un); the names below take at most 20.
LONGEST_RUN_DIRECTORY = 85

KEY_SIZE = 32  # bytes of the key of `Capabilities`

# Messages contain the number of a local client in place of the pid of a process. Pids end at 2**22,
# so that no number is also a pid. All numbers have nine digits.
FIRST_LOCAL_CLIENT = 100_000_000
# Limits of a scheduler for each local client: links, and bytes of a packed request.
MAX_LINKS = 16
MAX_REQUEST_BYTES = 1 << 20
_TOKEN_SIZE = 16  # of a local client's token
_MAC_BITS = 40  # in the id of a memory
_DESCRIPTION_FIELDS = attrgetter("pid", "fd", "inode", "byte_size", "sealed", "copied", "pinned")


def default_run_directory(environment: Mapping[str, str]) -> Path:
    """Return the default run directory of this user, where clients look for a server."""
    runtime = environment.get("XDG_RUNTIME_DIR", "")
    return Path(runtime, "shmserve") if runtime else Path(f"/tmp/shmserve-{os.getuid()}")


def sibling_run_directory(default_directory: Path, name: str) -> Path:
    """Return the run directory of another server of this user; `name` may be a glob pattern."""
    return default_directory.with_name(f"{default_directory.name}-{name}")


def environments_dir(run_dir: Path) -> Path:
    """Return the folder of the unpacked Python environments of models."""
    return run_dir / "environments"


def control(run_dir: Path) -> str:
    """Return the endpoint of the supervisor."""
    return f"ipc://{run_dir}/control"


def events(run_dir: Path) -> str:
    """Return the endpoint (ZeroMQ XPUB) where the supervisor publishes events."""
    return f"ipc://{run_dir}/events"


def scheduler(run_dir: Path, number: int) -> str:
    """Return the endpoint of scheduler `number` for the server's own clients."""
    return f"ipc://{run_dir}/s{number}"


def instances(run_dir: Path, number: int) -> str:
    """Return the endpoint of scheduler `number` for its workers."""
    return f"ipc://{run_dir}/w{number}"


def local_client_folder(run_dir: Path) -> Path:
    """Return the folder that programs outside the server may access."""
    return run_dir / "guests"


def listener(run_dir: Path) -> Path:
    """Return the path of the socket (SOCK_SEQPACKET) where a program becomes a local client."""
    return local_client_folder(run_dir) / "door"


def addresses(run_dir: Path) -> Path:
    """Return the path of the file with the server's HTTP and gRPC URLs, one on each line."""
    return local_client_folder(run_dir) / "addresses"


def handover(run_dir: Path) -> Path:
    """Return the path of the socket (SOCK_SEQPACKET) where a successor of this server connects."""
    return run_dir / "handover"


def local_clients(run_dir: Path, number: int) -> str:
    """Return the endpoint of scheduler `number` for local clients."""
    return f"ipc://{local_client_folder(run_dir)}/{number}"


def for_local_clients(endpoint: str) -> str:
    """Return the endpoint at which local clients reach the scheduler that listens at `endpoint`.

    The result is "" if `endpoint` is "".
    """
    if not endpoint:
        return ""
    folder, _, name = endpoint.rpartition("/")
    return f"{folder}/guests/{name.removeprefix('s')}"


class Capabilities:
    """The issuer and verifier of the MACs that authenticate local clients."""

    def __init__(self, key: bytes) -> None:
        self.key = key

    def _mac(self, text: str, size: int) -> bytes:
        import hashlib  # imported late, because clients do not need it and it loads OpenSSL

        return hashlib.blake2b(text.encode(), key=self.key, digest_size=size).digest()

    def token(self, client_number: int) -> str:
        """Return the token of local client `client_number`."""
        return self._mac(f"guest {client_number}", _TOKEN_SIZE).hex()

    def local_client(self, identity: bytes) -> int:
        """Return the number of the local client with this link identity, or 0 if it is invalid."""
        import hmac

        number, _, token_and_link = identity.partition(b".")
        if len(number) != 9 or not number.isdigit() or int(number) < FIRST_LOCAL_CLIENT:
            return 0
        token = token_and_link.partition(b".")[0]
        return int(number) if hmac.compare_digest(token, self.token(int(number)).encode()) else 0

    def memory_id(self, client_number: int, *description: int) -> int:
        """Return the id of a local client's memory: 62 bits that cannot be guessed.

        Args:
            client_number: The number of the local client.
            description: The memory's pid, fd, inode, byte_size, sealed, copied and pinned.
        """
        text = " ".join(map(str, ("memory", client_number, *description)))
        return int.from_bytes(self._mac(text, 8), "little") >> 2

    def device_memory_id(
        self, client_number: int, serial: int, byte_size: int, handle: CudaHandle
    ) -> int:
        """Return the id of a device memory of local client `client_number`.

        A memory that is withdrawn and shared again has a new `serial` and therefore a new id, so
        that workers can reject requests with the old id.
        """
        serial %= 1 << (62 - _MAC_BITS)
        ordinal, handle_hex, uuid_hex = handle.device, handle.raw.hex(), handle.uuid.hex()
        text = (
            f"device memory {client_number} {serial} {byte_size} {ordinal} {handle_hex} {uuid_hex}"
        )
        return serial << _MAC_BITS | int.from_bytes(self._mac(text, _MAC_BITS // 8), "little")

    def owns(self, client_number: int, memory: Memory) -> bool:
        """Return whether the id of a memory was issued to this client for this description."""
        if memory.cuda is not None:
            serial = memory.id >> _MAC_BITS
            return memory.id == self.device_memory_id(
                client_number, serial, memory.byte_size, memory.cuda
            )
        return memory.id == self.memory_id(client_number, *_DESCRIPTION_FIELDS(memory))
