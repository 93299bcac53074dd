"""Clients' POSIX shared memory objects: checked by name, opened once, described by what they are.

    key "/frames" --open--> fd: (device, inode), size

From here on the object is meant, whatever the key names later.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from dataclasses import dataclass

import posix_ipc

from shmserve.errors import Internal, InvalidArgument, Unavailable
from shmserve.ipc.tensors.ranges import fits

_KEY = re.compile(r"/[A-Za-z0-9._+=@:-]{1,250}")
# Names of others' machinery: never a client's tensors.
_RESERVED = ("triton_python_backend_shm_region_", "sem.", "nccl-")


@dataclass(frozen=True, slots=True)
class SharedObject:
    """An open shared memory object; `fd` is owned by whoever opened it. Sizes in bytes."""

    fd: int
    device: int
    inode: int
    uid: int
    gid: int
    mode: int
    size: int

    @property
    def file(self) -> tuple[int, int]:
        """The identity that tells it from every other object."""
        return self.device, self.inode


def normal_key(region: str, key: str) -> str:
    """`key` with exactly one leading slash.

    Raises InvalidArgument for a key that is empty, reserved, or could name something other than a
    plain object.
    """
    bare = key.lstrip("/")
    if not bare or bare in (".", "..") or not _KEY.fullmatch("/" + bare):
        raise InvalidArgument(
            f"cannot register shared memory region '{region}' - invalid shm key '{key[:256]}'"
        )
    for prefix in _RESERVED:
        if bare.startswith(prefix):
            raise InvalidArgument(
                f"cannot register shared memory region '{region}' with key '{key}' as the key "
                f"contains the reserved prefix '{prefix}'"
            )
    return "/" + bare


def open_object(key: str) -> SharedObject:
    """Open an existing object for reading and writing; `key` comes from `normal_key`.

    Raises Internal with Triton's texts when there is none, it may not be used, or it is no plain
    object.
    """
    try:
        # shm_open itself refuses to follow links. Without O_NONBLOCK whoever holds a lease on its
        # object (fcntl(2), F_SETLEASE) has us wait for as long as the kernel lets it, 45 s.
        fd = posix_ipc.SharedMemory(key, flags=os.O_NONBLOCK, size=0).fd
    except posix_ipc.ExistentialError:
        raise Internal(
            f"Unable to open shared memory region: '{key}' (there is none where the server looks; "
            "a client in another container must share its shared memory mount with the server)"
        ) from None
    except posix_ipc.PermissionsError:
        raise Internal(
            f"Unable to open shared memory region: '{key}' (the server may not read and write it)"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: EINVAL, as for a folder
        if getattr(error, "errno", 0) in (errno.ENFILE, errno.EMFILE):
            raise Unavailable("the server has no descriptor left for another region") from None
        raise Internal(f"Unable to open shared memory region: '{key}'") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise Internal(f"Invalid shared memory region: '{key}'")
    return described(fd)


def described(fd: int) -> SharedObject:
    """The object that is open as `fd`."""
    status = os.fstat(fd)
    return SharedObject(
        fd,
        status.st_dev,
        status.st_ino,
        status.st_uid,
        status.st_gid,
        stat.S_IMODE(status.st_mode),
        status.st_size,
    )


def check_range(region: str, shared: SharedObject, offset: int, byte_size: int) -> None:
    """Raise InvalidArgument when [offset, offset + byte_size) is empty or not in the object."""
    if byte_size == 0 or not fits(offset, byte_size, shared.size):
        raise InvalidArgument(
            f"failed to register shared memory region '{region}': invalid args (byte_size "
            f"{byte_size} at offset {offset}; the object has {shared.size} bytes)"
        )


def unallocated(shared: SharedObject, byte_size: int) -> int:
    """An upper bound on how many of the object's `byte_size` bytes have no memory behind them."""
    status = os.fstat(shared.fd)
    return max(0, min(byte_size, status.st_size - status.st_blocks * 512))


def reserve(region: str, shared: SharedObject, offset: int, byte_size: int) -> int:
    """Take memory for [offset, offset + byte_size) of the object where there is none; returns how
    many bytes that took.

    A sparse object costs nothing until it is touched, and a touch with /dev/shm full is a signal
    that kills; so the pages are taken now, where a lack of them is an error. Does nothing to pages
    that are there. Raises Unavailable when /dev/shm is full.
    """
    if not unallocated(shared, byte_size):
        return 0
    before = os.fstat(shared.fd).st_blocks
    try:
        os.posix_fallocate(shared.fd, offset, byte_size)
    except OSError as error:
        raise Unavailable(
            f"failed to register shared memory region '{region}': shared memory is full, "
            f"{byte_size} bytes are needed"
        ) from error
    return max(0, os.fstat(shared.fd).st_blocks - before) * 512
