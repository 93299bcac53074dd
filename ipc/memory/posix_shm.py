"""POSIX shared memory objects of clients: checked by name, opened once, identified by their inode.

    key "/frames" --open--> fd: (device, inode), size

The server uses the opened object, even if the key names another object later.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from dataclasses import dataclass

import posix_ipc

from shmserve.errors import Internal, InvalidArgument, Unavailable
from shmserve.ipc.tensors.descriptors import is_within

_KEY_FORMAT = re.compile(r"/[A-Za-z0-9._+=@:-]{1,250}")
# Names that other libraries use for their own objects, which never contain tensors of clients.
_RESERVED_PREFIXES = ("triton_python_backend_shm_region_", "sem.", "nccl-")


@dataclass(frozen=True, slots=True)
class SharedObject:
    """An open shared memory object; the caller that opened it owns `fd`. Sizes are in bytes."""

    fd: int  # descriptor
    device: int  # of the file system
    inode: int
    uid: int
    gid: int
    mode: int  # permission bits
    size: int  # bytes

    @property
    def file(self) -> tuple[int, int]:
        """Return the device and the inode, which identify the object."""
        return self.device, self.inode


def normalize_key(region: str, key: str) -> str:
    """Return `key` with exactly one leading slash.

    Raises:
        InvalidArgument: The key is empty, reserved, or may name something else than a plain object.
    """
    bare_key = key.lstrip("/")
    if not bare_key or bare_key in (".", "..") or not _KEY_FORMAT.fullmatch("/" + bare_key):
        text = f"cannot register shared memory region '{region}' - invalid shm key '{key[:256]}'"
        raise InvalidArgument(text)
    for prefix in _RESERVED_PREFIXES:
        if bare_key.startswith(prefix):
            raise InvalidArgument(
                f"cannot register shared memory region '{region}' with key '{key}' as the key "
                f"contains the reserved prefix '{prefix}'"
            )
    return "/" + bare_key


def open_object(key: str) -> SharedObject:
    """Open an existing object for reading and writing; `key` was returned by `normalize_key`.

    Raises:
        Internal: The object does not exist, may not be used or is no plain object; the texts are
            Triton's.
        Unavailable: The process is out of descriptors.
    """
    try:
        # shm_open does not follow links. Without O_NONBLOCK, a lease on the object (fcntl(2),
        # F_SETLEASE) would block the server for up to 45 s, the limit of the kernel.
        fd = posix_ipc.SharedMemory(key, flags=os.O_NONBLOCK, size=0).fd
    except posix_ipc.ExistentialError:
        raise Internal(
            f"Unable to open shared memory region: '{key}' (the server finds no such object; "
            "a client in another container must share its shared memory mount with the server)"
        ) from None
    except posix_ipc.PermissionsError:
        raise Internal(
            f"Unable to open shared memory region: '{key}' (the server may not read and write it)"
        ) from None
    # posix_ipc raises ValueError for the error EINVAL, which the system call returns for a folder.
    except (OSError, ValueError) as error:
        if getattr(error, "errno", 0) in (errno.ENFILE, errno.EMFILE):
            text = f"no descriptor is free for shared memory '{key}': raise ulimit -n"
            raise Unavailable(text) from None
        raise Internal(f"Unable to open shared memory region: '{key}'") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise Internal(f"Invalid shared memory region: '{key}'")
    return describe_object(fd)


def describe_object(fd: int) -> SharedObject:
    """Return the description of the object that is open as `fd`."""
    status = os.fstat(fd)
    owner_ids, mode = (status.st_uid, status.st_gid), stat.S_IMODE(status.st_mode)
    return SharedObject(fd, status.st_dev, status.st_ino, *owner_ids, mode, status.st_size)


def check_range(region: str, shared_object: SharedObject, offset: int, byte_size: int) -> None:
    """Check the range of a region in its object.

    Raises:
        InvalidArgument: The range is empty or not within the object.
    """
    if byte_size == 0 or not is_within(offset, byte_size, shared_object.size):
        raise InvalidArgument(
            f"failed to register shared memory region '{region}': invalid args (byte_size "
            f"{byte_size} at offset {offset}; the object has {shared_object.size} bytes)"
        )


def unallocated_bytes(shared_object: SharedObject, byte_size: int) -> int:
    """Return an upper bound on the number of bytes of the object without allocated memory."""
    status = os.fstat(shared_object.fd)
    return max(0, min(byte_size, status.st_size - status.st_blocks * 512))


def allocate_pages(region: str, shared_object: SharedObject, offset: int, byte_size: int) -> int:
    """Allocate the missing memory of [offset, offset + byte_size) of the object.

    The first access to a page of a sparse object allocates it; if /dev/shm is full then, the
    process is killed by a signal. The pages are therefore allocated now, so that a lack of memory
    is an error. Existing pages are not changed.

    Returns:
        The number of allocated bytes.

    Raises:
        Unavailable: /dev/shm is full.
    """
    if not unallocated_bytes(shared_object, byte_size):
        return 0
    old_blocks = os.fstat(shared_object.fd).st_blocks
    try:
        os.posix_fallocate(shared_object.fd, offset, byte_size)
    except OSError as error:
        raise Unavailable(
            f"failed to register shared memory region '{region}': shared memory is full, "
            f"{byte_size} bytes are needed"
        ) from error
    return max(0, os.fstat(shared_object.fd).st_blocks - old_blocks) * 512
