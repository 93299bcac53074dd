"""The settings of the C library for copies and for memory, and killed processes."""

import os
import sys
from multiprocessing import util
from unittest.mock import Mock

import pytest

from shmserve.ipc.processes import LARGE_COPY, kill_tree, with_uncached_copies
from shmserve.workers.memory import outputs
from tests.support.servers import run_python

_COPY_SETTING = "glibc.cpu.x86_non_temporal_threshold=0x200000"

# Halves of frames arrive on several connections at a time, each beside small allocations.
_FRAMES = """
from pathlib import Path
from shmserve.ipc.processes import unmap_large_blocks_on_free

def resident():
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) << 10

unmap_large_blocks_on_free()
chunk, small, before = bytes(1 << 20), [], resident()
for _ in range(3):
    frames = [bytearray() for _ in range(12)]
    for _ in range(8):
        for frame in frames:
            frame += chunk
            small.append(bytes(600))
    held = resident() - before
    del frames, frame
print(held, resident() - before)
"""


def test_freed_large_memory_is_unmapped() -> None:
    held_pid, kept_bytes = map(int, run_python("-c", _FRAMES, check=True).stdout.split())
    assert held_pid >= 12 * 8 << 20
    assert kept_bytes < 4 << 20


def test_other_environment_variables_are_kept() -> None:
    environment = {"HOME": "/root"}
    assert with_uncached_copies(environment) == {"HOME": "/root", "GLIBC_TUNABLES": _COPY_SETTING}
    assert environment == {"HOME": "/root"}


def test_other_tunables_are_kept() -> None:
    environment = {"GLIBC_TUNABLES": "glibc.malloc.arena_max=1"}
    assert (
        with_uncached_copies(environment)["GLIBC_TUNABLES"]
        == f"glibc.malloc.arena_max=1:{_COPY_SETTING}"
    )


def test_an_operators_own_threshold_is_kept() -> None:
    environment = {"GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x1000000"}
    assert with_uncached_copies(environment) == environment


def test_the_pieces_of_a_large_copy_are_large() -> None:
    assert outputs._PIECE_BYTES >= LARGE_COPY


def test_a_process_of_another_user_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "kill", Mock(side_effect=PermissionError))
    kill_tree(os.getppid(), excluded_pids=[os.getpid()])


def test_a_resource_tracker_that_is_starting_continues() -> None:
    """The kernel shows no command line until it has loaded the program."""
    for _ in range(20):
        read_end, write_end = os.pipe()
        code = f"from multiprocessing.resource_tracker import main;main({read_end})"
        path = os.fsencode(sys.executable)
        pid = util.spawnv_passfds(path, [path, "-c", code], [read_end])
        kill_tree(pid)
        os.close(read_end)
        os.close(write_end)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
