"""Messages between the supervisor and local clients: programs on this host that are no process of
the server."""

from __future__ import annotations

from typing import ClassVar

from shmserve.ipc.transport.frames import message


@message
class Hello:
    """A program asks to be a local client; `version` is the protocol's."""

    version: int


@message
class Welcome:
    """The program is local client `number`. A link to a scheduler has the identity
    "NUMBER.TOKEN.LINK"."""

    number: int
    token: str


@message
class OwnerExited:
    """Process `pid` has ended: what it owned of memory is of no use any more."""

    TAG: ClassVar[str] = "ProcessExited"  # the protocol's name for it since its first version

    pid: int


@message
class ShareMemory:
    """Let requests of this local client use the first `byte_size` bytes of the attached descriptor:
    a sealed memfd. `pin`: have workers on CUDA devices lock its pages.

    Answered with {"memory": [id, pid, fd, inode, byte_size, sealed, copied, pinned]}, as places
    have it.
    """

    id: int
    byte_size: int
    pin: bool


@message
class ShareDeviceMemory:
    """Let requests of this local client use the first `byte_size` bytes of what `handle` opens on
    the server's device `device_id`.

    Answered with {"memory": [id, byte_size, device_id, handle, device_uuid]}, as places have it.
    """

    id: int
    byte_size: int
    handle: bytes
    device_id: int
    device_uuid: bytes


@message
class ServerEnding:
    """The server ends, and another one will let programs in at the same listener: requests are for
    that from now on, those that are here are answered. Say `Acknowledged`."""

    acknowledge: int


@message
class WithdrawMemory:
    """No request of this local client uses the memory any more."""

    memory_id: int
