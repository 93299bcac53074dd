"""The processes of a node's server: shmserve, and a parent process that Ray may kill.

When a node is lost or a replica fails, Ray kills the replica and its children with SIGKILL. The
kernel then signals shmserve, which stops in order and removes its files.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys

from shmserve.ipc import processes


def main(replica_pid: str, folder: str, *command: str) -> int:
    """Run a command of shmserve, then remove `folder`.

    The command is terminated when this process, or the process `replica_pid`, exits.

    Returns:
        The exit status of the command.
    """
    processes.die_with_parent(int(replica_pid))
    parent_pid = os.getpid()
    child_pid = os.fork()
    try:  # done in both processes, since one of them may be killed
        return _wait(child_pid) if child_pid else _run(parent_pid, command)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wait(child_pid: int) -> int:
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child_pid, signal.SIGTERM))
    status = os.waitstatus_to_exitcode(os.waitpid(child_pid, 0)[1])
    return status if status >= 0 else 128 - status  # shells report a signal in this way


def _run(parent_pid: int, command: tuple[str, ...]) -> int:
    processes.signal_at_parents_death(signal.SIGTERM)
    if os.getppid() != parent_pid:
        return 1
    from shmserve import cli

    return cli.main(command)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
