"""Process control of Linux (prctl, /proc) for a parent and its children: names, parent death,
orphans, privileges, timers."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Container, Iterator, Mapping
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1
_PR_SET_TIMERSLACK = 29
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_MARK = "SHMSERVE_SERVER"


def signal_at_parents_death(number: int) -> None:
    """Have the kernel send this process a signal when its parent dies."""
    _libc.prctl(_PR_SET_PDEATHSIG, number)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies; exits at once if `parent_pid` is no
    longer the parent."""
    signal_at_parents_death(signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent exits."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children(pid: int) -> Iterator[int]:
    """The children of a process, whichever of its threads started them."""
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            yield from map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())


def kill_tree(pid: int, spared: Container[int] = ()) -> None:
    """Kill a process and its descendants, but those `spared` and what descends from them."""
    below = [child for child in children(pid) if child not in spared]
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    for child in below:
        kill_tree(child, spared)


def marked(environment: Mapping[str, str], supervisor_pid: int, run_dir: object) -> dict[str, str]:
    """The environment of a process whose descendants `kill_marked` finds."""
    # SPT_NOENV: setproctitle would write over the environment that /proc shows.
    return {**environment, _MARK: f"{supervisor_pid} {run_dir}", "SPT_NOENV": "1"}


def kill_marked(supervisor_pid: int, run_dir: object) -> None:
    """Kill what descends from a marked process, whoever its parent is by now."""
    mark = os.fsencode(f"{_MARK}={supervisor_pid} {run_dir}")
    for environ in Path("/proc").glob("[0-9]*/environ"):
        pid = int(environ.parent.name)
        with contextlib.suppress(OSError):  # another user's, or gone
            if pid != os.getpid() and mark in environ.read_bytes().split(b"\0"):
                os.kill(pid, signal.SIGKILL)


def renounce_privileges() -> None:
    """Neither this process nor what it starts gains rights from a program that it runs (setuid)."""
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def end_sooner(by: int) -> None:
    """Where memory is short, have the kernel end this process, and what it starts, sooner than its
    parent: raise its oom_score_adj by so much. Nobody needs a privilege for that."""
    file = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError):
        file.write_text(str(min(1000, int(file.read_text()) + by)))


def exact_timers() -> None:
    """Let this thread's sleeps end on time: the default slack of 50 us is half of a 100 us queue
    delay."""
    _libc.prctl(_PR_SET_TIMERSLACK, 1)


def name_process(title: str) -> None:
    """Set the title that `ps` shows for this process."""
    from setproctitle import setproctitle

    setproctitle(f"shmserve: {title}")
