"""Keys of clients' shared memory objects, and opening the objects."""

import contextlib
import fcntl
import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import posix_ipc
import pytest

from shmserve.errors import Internal, InvalidArgument, Unavailable
from shmserve.ipc.memory import posix_shm
from shmserve.ipc.memory.mappings import Mappings
from shmserve.ipc.tensors.descriptors import Memory, Range
from tests.support.leaks import open_descriptors

KEY = f"/test-{os.getpid()}-posix"


@pytest.fixture
def sparse() -> Iterator[str]:
    posix_ipc.SharedMemory(KEY, posix_ipc.O_CREX, size=1 << 20).close_fd()
    yield KEY
    posix_ipc.unlink_shared_memory(KEY)


@pytest.mark.parametrize("key", ["x", "/x", "//x"])
def test_a_key_has_one_leading_slash(key: str) -> None:
    assert posix_shm.normalize_key("r", key) == "/x"


@pytest.mark.parametrize(
    "key",
    ["", "/", "///", "/.", "/..", "/a/b", "/x\0y", "a b", "/" + "a" * 251, "/ünicode", "/../etc"],
)
def test_keys_of_other_objects_are_refused(key: str) -> None:
    """A key names a plain shared memory object."""
    with pytest.raises(InvalidArgument, match="invalid shm key"):
        posix_shm.normalize_key("r", key)


@pytest.mark.parametrize("key", ["/sem.x", "/nccl-1", "/triton_python_backend_shm_region_1"])
def test_reserved_keys_are_refused(key: str) -> None:
    with pytest.raises(InvalidArgument, match="reserved prefix"):
        posix_shm.normalize_key("r", key)


def test_pages_are_allocated_at_registration(sparse: str) -> None:
    shared_object = posix_shm.open_object(sparse)
    try:
        assert os.fstat(shared_object.fd).st_blocks == 0
        assert posix_shm.unallocated_bytes(shared_object, 8192) == 8192
        assert posix_shm.allocate_pages("r", shared_object, 4096, 8192) == 8192
        assert posix_shm.allocate_pages("r", shared_object, 4096, 8192) == 0
        assert os.fstat(shared_object.fd).st_blocks * 512 == 8192
        assert os.fstat(shared_object.fd).st_size == 1 << 20
    finally:
        os.close(shared_object.fd)


@pytest.mark.parametrize(
    ("offset", "size"), [(0, 0), (0, (1 << 20) + 1), (1 << 20, 1), (2**62, 2**62), (-1, 1)]
)
def test_ranges_outside_the_object_are_refused(sparse: str, offset: int, size: int) -> None:
    shared_object = posix_shm.open_object(sparse)
    try:
        with pytest.raises(InvalidArgument) as caught:
            posix_shm.check_range("r", shared_object, offset, size)
        assert caught.value.message == (
            f"failed to register shared memory region 'r': invalid args (byte_size {size} at "
            f"offset {offset}; the object has 1048576 bytes)"
        )
    finally:
        os.close(shared_object.fd)


def test_missing_and_wrong_objects_leave_no_descriptor() -> None:
    gc.collect()  # close the descriptors of earlier tests now, not in the middle of this test
    fds_before = open_descriptors()
    link = f"/dev/shm{KEY}-link"
    fifo = f"/dev/shm{KEY}-fifo"
    os.symlink("/etc/passwd", link)
    os.mkfifo(fifo)
    try:
        for _ in range(100):
            for key in (KEY + "-none", KEY + "-link", KEY + "-fifo"):
                with pytest.raises(Internal):
                    posix_shm.open_object(key)
    finally:
        os.unlink(link)
        os.unlink(fifo)
    assert open_descriptors() <= fds_before


@contextlib.contextmanager
def hold_lease(path: str) -> Iterator[None]:
    """Hold a lease on a file and do not react to requests to release it."""
    previous_handler = signal.signal(signal.SIGIO, signal.SIG_IGN)
    fd = os.open(path, os.O_RDWR)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        yield
    finally:
        os.close(fd)
        signal.signal(signal.SIGIO, previous_handler)


def test_opening_does_not_wait_for_a_lease(sparse: str) -> None:
    """Without O_NONBLOCK all registrations would wait up to 45 s for any user's lease."""
    with hold_lease(f"/dev/shm{sparse}"), pytest.raises(Internal, match="Unable to open"):
        posix_shm.open_object(sparse)


def test_opening_shared_memory_does_not_wait_for_a_lease() -> None:
    fd = os.memfd_create("leased")
    try:
        os.ftruncate(fd, 4096)
        first = Range(Memory(1, os.getpid(), fd, os.fstat(fd).st_ino, 4096, sealed=True), 0, 4096)
        with (
            hold_lease(f"/proc/self/fd/{fd}"),
            pytest.raises(Unavailable, match="has been released"),
        ):
            Mappings().view(first)
        assert len(Mappings().view(first)) == 4096
    finally:
        os.close(fd)


def test_a_folder_is_no_object() -> None:
    folder = Path("/dev/shm") / f"test-{os.getpid()}-folder"
    folder.mkdir()
    try:
        with pytest.raises(Internal, match="Unable to open shared memory region"):
            posix_shm.open_object(f"/{folder.name}")
    finally:
        folder.rmdir()
