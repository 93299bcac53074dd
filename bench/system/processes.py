"""The cost of a process tree, from /proc: proportional memory, CPU, shared-memory files."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Fields of /proc/PID/stat, counted from the one after the process's name.
_STATE, _PPID, _SESSION, _UTIME, _STIME, _STARTED = 0, 1, 3, 11, 12, 19
_WAIT_S = 0.01


@dataclass(frozen=True)
class Process:
    """A process at one moment; (pid, started_ticks) identifies it even after the pid is reused."""

    pid: int
    parent: int
    session: int
    cpu_s: float
    started_ticks: int


def _read(pid: int) -> Process | None:
    try:
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    if fields[_STATE] in "ZX":
        return None
    cpu = (int(fields[_UTIME]) + int(fields[_STIME])) / _TICKS_PER_S
    return Process(pid, int(fields[_PPID]), int(fields[_SESSION]), cpu, int(fields[_STARTED]))


def tree(root: int) -> list[Process]:
    """Return `root`, its descendants, and the other processes of its session."""
    all_processes = [p for p in map(_read, _pids()) if p is not None]
    members = {p.pid: p for p in all_processes if p.pid == root or p.session == root}
    while children := [p for p in all_processes if p.parent in members and p.pid not in members]:
        members.update({p.pid: p for p in children})
    return list(members.values())


def cpu_s(root: int) -> float:
    """Return the CPU seconds that the process tree of `root` has used so far."""
    return sum(p.cpu_s for p in tree(root))


def pss_mb(root: int) -> float:
    """Return the proportional set size of the tree of `root`, in MB (10**6 bytes).

    A page that n processes share counts 1/n to each.
    """
    return sum(pss_of(p.pid) for p in tree(root))


def pss_of(pid: int, *kinds: str) -> float:
    """Return the proportional set size of a process in MB; 0 if the process has ended.

    Args:
        pid: The process.
        kinds: The fields of smaps_rollup to add, such as "Pss_Anon"; by default the total.
    """
    return sum(_pss_kib(pid, kind) for kind in kinds or ("Pss",)) * 1024 / 1e6


def _pss_kib(pid: int, kind: str) -> int:
    try:
        rollup = (_PROC / str(pid) / "smaps_rollup").read_text()
    except OSError:
        return 0
    return next(
        (int(row.split()[1]) for row in rollup.splitlines() if row.startswith(f"{kind}:")), 0
    )


def shm_files(members: list[Process]) -> set[Path]:
    """Return the files of /dev/shm that these processes have mapped and that still have a name."""
    mapped_files = {
        path for p in members for path in _mapped_paths(p.pid) if path.startswith("/dev/shm/")
    }
    return {Path(path) for path in mapped_files if os.path.exists(path)}


def outsiders_mapping(library: str, root: int) -> int:
    """Return the number of processes outside the tree of `root` that have mapped a library.

    They share its pages, so the tree's proportional memory is smaller than it would be alone.
    """
    pids = {p.pid for p in tree(root)}
    return sum(
        any(path.endswith(library) for path in _mapped_paths(pid))
        for pid in _pids()
        if pid not in pids
    )


def running_processes(members: list[Process]) -> list[Process]:
    """Return the processes of `members` that still run; a reused pid does not count."""
    return [p for p in members if (new := _read(p.pid)) and new.started_ticks == p.started_ticks]


def wait_exited(members: list[Process], timeout_s: float) -> bool:
    """Wait until all of `members` have exited; return False after the time limit."""
    deadline = time.monotonic() + timeout_s
    while running_processes(members):
        if time.monotonic() > deadline:
            return False
        time.sleep(_WAIT_S)
    return True


def signal_all(members: list[Process], number: int) -> list[Process]:
    """Send a signal to the processes of `members` that still run, and return these."""
    remaining_processes = running_processes(members)
    for process in remaining_processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)
    return remaining_processes


def _pids() -> list[int]:
    return [int(name) for name in os.listdir(_PROC) if name.isdigit()]


def _mapped_paths(pid: int) -> set[str]:
    try:
        rows = (_PROC / str(pid) / "maps").read_text().splitlines()
    except OSError:
        return set()
    return {fields[5] for row in rows if len(fields := row.split(maxsplit=5)) == 6}
