"""POSIX shared memory objects of clients, without a client library."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import secrets
from pathlib import Path

import numpy as np

_FOLDER = Path("/dev/shm")
_LIBC = ctypes.CDLL(None, use_errno=True)
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_numbers = itertools.count()
# Random, because a killed run leaves its objects, and pids are reused.
_TOKEN = secrets.token_hex(4)


class SharedObject:
    """An object of `byte_size` bytes within the with block; `key` is its name for a server."""

    def __init__(self, byte_size: int) -> None:
        self.name = f"test-{os.getpid()}-{_TOKEN}-{next(_numbers)}"
        self.byte_size = byte_size
        self.path = _FOLDER / self.name
        self.fd = -1

    @property
    def key(self) -> str:
        return "/" + self.name

    def __enter__(self) -> SharedObject:
        self.create()
        return self

    def create(self) -> None:
        """Create the object; after `unlink`, this creates a new object."""
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.ftruncate(self.fd, self.byte_size)

    def __exit__(self, *exc_info: object) -> None:
        self.unlink()

    def unlink(self) -> None:
        """Remove the name and close the object."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def truncate(self, byte_size: int) -> None:
        os.ftruncate(self.fd, byte_size)

    def punch(self) -> None:
        punch(self.fd, self.byte_size)

    def write(self, array: np.ndarray | bytes, offset: int = 0) -> None:
        """Copy an array or bytes into the object through a mapping, like clients."""
        data = array if isinstance(array, bytes) else array.tobytes()
        with mmap.mmap(self.fd, self.byte_size) as mapped:
            mapped[offset : offset + len(data)] = data

    def read(self, dtype: type | np.dtype, count: int, offset: int = 0) -> np.ndarray:
        with mmap.mmap(self.fd, self.byte_size) as mapped:
            size = count * np.dtype(dtype).itemsize
            return np.frombuffer(mapped[offset : offset + size], dtype)


def punch(fd: int, size: int) -> None:
    """Punch a hole into the first `size` bytes of a file."""
    _LIBC.fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, ctypes.c_long(0), ctypes.c_long(size))
