"""A run directory that is full or removed, and processes with a very low descriptor limit."""

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.faults.full.small_shm import can_mount
from tests.faults.scene import assert_recovers, scene
from tests.support.servers import Server
from tests.support.waiting import until
from tests.support.wire.raw_http import json_input

_MOUNT_COMMAND = 'mount -t tmpfs -o mode=700,nr_inodes="$0" tmpfs "$1" && shift && exec "$@"'
# A program with the native client, which is rejected twice.
_NATIVE = """
import sys, numpy, shmserve.client
with shmserve.client.connect(sys.argv[1]) as client:
    for _ in range(2):
        try:
            client.infer("identity", INPUT0=numpy.ones(4, numpy.float32))
        except shmserve.client.Unavailable as error:
            assert "no other scheduler serves it" in str(error), error
        else:
            raise AssertionError("answered")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the mount point of the small file system of `small_mount_command`."""
    if not can_mount():
        pytest.skip("needs the right to mount a small file system (unshare -m)")
    return tmp_path


def small_mount_command(folder: Path, inodes: int) -> list[str]:
    return ["unshare", "-m", "sh", "-c", _MOUNT_COMMAND, str(inodes), str(folder)]


def test_a_full_run_directory_at_the_start(repository: Path, folder: Path) -> None:
    with Server(
        [repository], run_dir=folder / "run", prefix=small_mount_command(folder, 4)
    ) as server:
        assert server.wait_exit(30) == 1
        assert server.log() == (
            "shmserve: cannot create a socket in the run directory: No space left on device\n"
        )


def test_a_full_run_directory_for_a_new_scheduler(repository: Path, folder: Path) -> None:
    """The affected model is not ready until there is space, and its requests do not wait."""
    with Server(
        [repository], run_dir=folder / "run", prefix=small_mount_command(folder, 60)
    ) as server:
        server.wait_ready()
        filler_paths = list(fill(Path(f"/proc/{server.pid}/root{folder}")))
        server.find_one("scheduler identity").kill()
        server.wait_log("cannot start: cannot create a socket in the run directory: No space left")
        assert not server.answers("/v2/models/identity/ready")
        with server.http() as http:
            array = np.arange(16, dtype=np.int32).reshape(1, 16)
            inputs = [json_input(name, array) for name in ("INPUT0", "INPUT1")]
            assert http.infer("simple", {"inputs": inputs}).status == 200
            body = {"inputs": [json_input("INPUT0", np.arange(4, dtype=np.float32))]}
            for _ in range(2):  # the request that waited, and a later one
                assert (reply := http.infer("identity", body)).status == 503
                assert "the model's scheduler ended before its response" in reply.error
        namespace = f"--mount=/proc/{server.pid}/ns/mnt"
        command = [sys.executable, "-c", _NATIVE, str(server.run_dir)]
        subprocess.run(["nsenter", namespace, *command], check=True, timeout=30)
        assert "Traceback" not in server.log()
        for path in filler_paths:
            path.unlink()
        until("identity is ready", lambda: server.answers("/v2/models/identity/ready"))
        with scene(server) as stage:
            assert_recovers(stage, time.monotonic())
        server.stop()


@pytest.mark.parametrize("title", ["worker identity", "gateway http"])
def test_a_removed_run_directory(repository: Path, tmp_path: Path, title: str) -> None:
    """The server cannot replace a process, and exits as soon as one dies."""
    server = Server([repository], run_dir=tmp_path / "run")
    try:
        server.wait_ready()
        shutil.rmtree(server.run_dir)
        assert server.answers("/v2/models/identity/ready")
        server.find_one(title).kill()
        assert server.wait_exit(30) == 1
        assert f"the sockets in its run directory '{server.run_dir}' were removed" in server.log()
    finally:
        server.discard()


def fill(folder: Path) -> Iterator[Path]:
    """Create files until the file system is full."""
    for number in range(1000):
        path = folder / f"file-{number}"
        try:
            path.touch()
        except OSError:
            return
        yield path


def test_too_few_descriptors(repository: Path) -> None:
    """The server must not start: it would report readiness but accept only one connection."""
    with Server([repository], prefix=["prlimit", "--nofile=100:100"]) as server:
        assert server.wait_exit(30) == 2
        assert server.log() == (
            "shmserve: open files: a process may open 100 files, but at least 256 are required "
            "(set LimitNOFILE=65536 in the unit, or run ulimit -Hn 65536, or docker run --ulimit "
            "nofile=65536)\n"
        )
        assert not server.run_dir.exists()
