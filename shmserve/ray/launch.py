"""The processes of a node's server: shmserve, and above it one that Ray may kill.

Ray ends a replica by SIGKILL when its node is lost, or its process fails, and kills the replica's
children, too. Then nobody is left to tell shmserve to end: the kernel does. It ends in order, and
leaves nothing behind.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys

from shmserve.ipc import processes


def main(parent: str, folder: str, *command: str) -> int:
    """Run a command of shmserve until its end, or until this process or `parent` ends; then
    `folder` is removed. Returns its exit status."""
    processes.die_with_parent(int(parent))
    above = os.getpid()
    below = os.fork()
    try:  # whichever of the two is not killed
        return _wait(below) if below else _run(above, command)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wait(below: int) -> int:
    signal.signal(signal.SIGTERM, lambda *_: os.kill(below, signal.SIGTERM))
    status = os.waitstatus_to_exitcode(os.waitpid(below, 0)[1])
    return status if status >= 0 else 128 - status  # as shells tell a signal


def _run(above: int, command: tuple[str, ...]) -> int:
    processes.signal_at_parents_death(signal.SIGTERM)
    if os.getppid() != above:
        return 1
    from shmserve import cli

    return cli.main(command)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
