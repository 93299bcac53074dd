"""What the system offers a parent and its children: names, parent death, orphans, privileges,
timers."""

from __future__ import annotations

import ctypes
import os
import signal

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1
_PR_SET_TIMERSLACK = 29
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38


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


def renounce_privileges() -> None:
    """Neither this process nor what it starts gains rights from a program that it runs (setuid)."""
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def exact_timers() -> None:
    """Let this thread's sleeps end on time: the default slack of 50 us is half of a 100 us queue
    delay."""
    _libc.prctl(_PR_SET_TIMERSLACK, 1)


def name_process(title: str) -> None:
    """What `ps` shows for this process."""
    from setproctitle import setproctitle

    setproctitle(f"shmserve: {title}")
