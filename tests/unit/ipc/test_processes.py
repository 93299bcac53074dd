"""The settings of the C library for copies and for memory, and killed processes."""

import os
import select
import signal
import sys
import time
from multiprocessing import util
from pathlib import Path
from unittest.mock import Mock

import pytest

from shmserve.ipc.processes import (
    LARGE_COPY,
    _environment,
    kill_marked_descendants,
    kill_tree,
    with_mark,
    with_uncached_copies,
)
from shmserve.workers.memory import outputs
from tests.support.servers import run_python
from tests.support.waiting import until

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


def test_a_marked_process_in_execve_is_killed(tmp_path: Path) -> None:
    """The kernel shows no environment until it has loaded the program."""
    environment = with_mark(os.environ, os.getpid(), tmp_path)
    restart = 'exec /bin/sh -c "$0" "$0"'  # most of the time, the process is in execve
    for _ in range(20):
        pid = os.posix_spawn("/bin/sh", ["sh", "-c", restart, restart], environment)
        kill_marked_descendants(os.getpid(), tmp_path)
        with os.fdopen(os.pidfd_open(pid)) as pidfd:
            ended = select.select([pidfd], [], [], 5)[0]
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert ended


def test_a_process_without_an_environment_does_not_delay_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = os.posix_spawn("/bin/sleep", ["sleep", "60"], {})
    until("execve has ended", Path(f"/proc/{pid}/cmdline").read_bytes)
    pause = Mock(wraps=time.sleep)
    monkeypatch.setattr(time, "sleep", pause)
    kill_marked_descendants(os.getpid(), tmp_path)
    os.kill(pid, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert pause.call_count < 40  # other programs of the host may be in execve


def test_a_marked_process_without_its_main_thread_is_killed(tmp_path: Path) -> None:
    program = """
import ctypes, os, threading, time
threading.Thread(target=time.sleep, args=(10,)).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)
"""
    environment = with_mark(os.environ, os.getpid(), tmp_path)
    pid = os.posix_spawn(sys.executable, ["python", "-c", program], environment)
    stat = Path(f"/proc/{pid}/stat")
    until("the main thread has exited", lambda: ") Z " in stat.read_text())
    kill_marked_descendants(os.getpid(), tmp_path)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def test_the_environment_is_read_although_a_thread_exits_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = [Path("/proc/self/task/0/environ"), Path("/proc/self/environ")]
    monkeypatch.setattr(Path, "glob", lambda *_: iter(files))
    assert _environment(os.getpid()) == files[1].read_bytes()
