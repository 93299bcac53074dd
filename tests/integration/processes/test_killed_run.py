"""A killed test run or benchmark: its servers are ended and leave nothing."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.support import repositories
from tests.support.leaks import created_since
from tests.support.servers import python_program, tree
from tests.support.waiting import until

_TEST_PROGRAM = """
import sys
from pathlib import Path
from tests.support.leaks import created_since
from tests.support.servers import Server

server = Server([Path(sys.argv[1])])
server.wait_ready()
print(server.pid, server.folder, flush=True)
sys.stdin.read()
"""
_BENCHMARK_PROGRAM = """
import sys
from pathlib import Path
from bench.system.servers import Shmserve, running

with running(Shmserve(), [Path(sys.argv[1]) / "simple"], notes=[]) as server:
    print(server.pid, server.log.parent, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("program", "number"),
    [(_TEST_PROGRAM, signal.SIGTERM), (_BENCHMARK_PROGRAM, signal.SIGKILL)],
    ids=["test-SIGTERM", "benchmark-SIGKILL"],
)
def test_servers_of_a_killed_run_end(tmp_path: Path, program: str, number: signal.Signals) -> None:
    repositories.add(tmp_path, "simple")
    names_before = set(os.listdir("/dev/shm"))
    with python_program(program, tmp_path) as run:
        assert run.stdout is not None
        pid, folder = run.stdout.readline().split()
        members = tree(int(pid))
        assert len(members) > 3
        run.send_signal(number)
        run.wait()
    _, alive = psutil.wait_procs(members, timeout=15)
    assert not alive
    until("the folder is removed", lambda: not Path(folder).exists())
    # The resource tracker of multiprocessing removes the semaphores of a killed process.
    until("nothing remains in /dev/shm", lambda: not created_since(names_before))
