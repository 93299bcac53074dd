"""Where a server's sockets are: all names derive from one private run directory, so two servers
never collide."""

from __future__ import annotations

from pathlib import Path

# sockaddr_un holds 107 bytes; the longest name below takes 20.
LONGEST_RUN_DIRECTORY = 85


def control(run_dir: Path) -> str:
    """The supervisor's socket."""
    return f"ipc://{run_dir}/control"


def scheduler(run_dir: Path, number: int) -> str:
    """The socket of scheduler `number` for whoever submits requests."""
    return f"ipc://{run_dir}/s{number}"


def instances(run_dir: Path, number: int) -> str:
    """The socket of scheduler `number` for its workers."""
    return f"ipc://{run_dir}/w{number}"
