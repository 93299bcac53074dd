"""Process control by functions of Linux and glibc, and the decision to spin before sleeping.

The process control covers titles, the death of parents, orphans, privileges, timers and malloc.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import struct
import time
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shmserve.logs import LogSettings

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1
_PR_SET_TIMERSLACK = 29
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # the values of these names in malloc.h
_MARK_VARIABLE = "SHMSERVE_SERVER"
_MAX_SCANS, _SCAN_PAUSE_S = 50, 0.01  # of `kill_marked_descendants`
# A part of the command line of the resource tracker, a process that Python starts for a program
# with semaphores or shared memory. After all processes of the program have exited, the tracker
# removes the objects that are left, and exits.
_RESOURCE_TRACKER = b"resource_tracker import main"

# The number of exited processes whose pids a process stores. Frames of an exited process may arrive
# after the report of its exit, and must be dropped then.
REMEMBERED_EXITS = 512

MAX_PASSED_FDS = 253  # the kernel's SCM_MAX_FD: the maximum number of descriptors in a message

# glibc writes a large copy with non-temporal stores: it does not read the destination first, which
# saves a third of the copy's memory traffic, and it keeps the caches. glibc derives the threshold
# from the size of the last-level cache. A virtual machine often reports that of the whole host (320
# MB seen), so that no copy is large. With the true size the threshold would be 1 to 3 MB.
LARGE_COPY = 2 * 1024 * 1024  # in bytes
_TUNABLES_VARIABLE = "GLIBC_TUNABLES"
_COPY_TUNABLE = "glibc.cpu.x86_non_temporal_threshold"


def signal_at_parents_death(signal_number: int) -> None:
    """Let the kernel send this process the signal `signal_number` when its parent dies."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal_number)


def die_with_parent(parent_pid: int) -> None:
    """Let the kernel kill this process when its parent dies.

    The process exits at once if `parent_pid` is no longer the parent.
    """
    signal_at_parents_death(signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def adopt_orphans() -> None:
    """Make this process the parent of its descendants whose own parent exits."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children(pid: int) -> Iterator[int]:
    """Yield the children of a process, whichever of its threads started them."""
    with contextlib.suppress(OSError):
        for thread_id in os.listdir(f"/proc/{pid}/task"):
            yield from map(int, Path(f"/proc/{pid}/task/{thread_id}/children").read_text().split())


def kill_tree(pid: int, excluded_pids: Container[int] = ()) -> bool:
    """Kill a process and its descendants, except the `excluded_pids` ones and their descendants.

    Returns:
        False if the process `pid` is in execve(2), and must be killed later.
    """
    child_pids = [child for child in children(pid) if child not in excluded_pids]
    was_handled = _kill(pid)
    for child in child_pids:
        kill_tree(child, excluded_pids)
    return was_handled


def _kill(pid: int) -> bool:
    """Kill a process, unless it is a resource tracker of Python's `multiprocessing`.

    The tracker exits by itself, after it has removed the shared memory of its program.

    Returns:
        False if the process has no command line yet. The process is then in execve(2), for up to
        0.3 s on a busy host, and may become a tracker.
    """
    with contextlib.suppress(OSError):  # the process has exited
        command_line = Path(f"/proc/{pid}/cmdline").read_bytes()
        # A process whose main thread has exited is a zombie without a command line, too, but its
        # other threads may run.
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1]
        if not command_line and state != b"Z":
            return False
        # The kill may fail: if the server is process 1 of a container, processes of other users may
        # be its children.
        if _RESOURCE_TRACKER not in command_line:
            os.kill(pid, signal.SIGKILL)
    return True


def with_mark(environ: Mapping[str, str], supervisor_pid: int, run_dir: object) -> dict[str, str]:
    """Return an environment with the variable by which `kill_marked_descendants` finds processes.

    The descendants of a process inherit the variable.
    """
    # Without SPT_NOENV, setproctitle would overwrite the environment that /proc shows.
    return {**environ, _MARK_VARIABLE: f"{supervisor_pid} {run_dir}", "SPT_NOENV": "1"}


def _environment(pid: int) -> bytes:
    """Return the environment of a process; it may be empty, as in execve(2)."""
    for file in Path(f"/proc/{pid}/task").glob("*/environ"):
        # A thread that has exited, as the first one may, has no environment, or no folder.
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            if environment := file.read_bytes():
                return environment
    return b""


def kill_marked_descendants(supervisor_pid: int, run_dir: object) -> None:
    """Kill all other processes with the mark of `with_mark`, independently of their parents."""
    mark_variable = os.fsencode(f"{_MARK_VARIABLE}={supervisor_pid} {run_dir}")
    known_processes: set[tuple[int, bytes]] = set()  # pids, and the ends of empty environments
    for _ in range(_MAX_SCANS):
        found_processes, is_scan_complete = set[tuple[int, bytes]](), True
        for pid in {int(path.name) for path in Path("/proc").glob("[0-9]*")} - {os.getpid()}:
            with contextlib.suppress(OSError):  # the process belongs to another user, or has exited
                environ = _environment(pid)
                if mark_variable in environ.split(b"\0"):
                    found_processes.add((pid, b""))
                    is_scan_complete &= _kill(pid)
                elif not environ and os.readlink(f"/proc/{pid}/exe"):  # not a thread of the kernel
                    # The address is 0 in execve. Afterwards it has a new random value.
                    env_end = Path(f"/proc/{pid}/stat").read_bytes().split()[-2]
                    found_processes.add((pid, env_end))
                    is_scan_complete &= env_end != b"0"
        # A process may have started another one, or another program, during the scan.
        if is_scan_complete and found_processes <= known_processes:
            return
        known_processes |= found_processes
        time.sleep(_SCAN_PAUSE_S)


def renounce_privileges() -> None:
    """Prevent this process and its children from gaining rights by a setuid program."""
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def raise_oom_score(points: int) -> None:
    """Raise the oom_score_adj of this process and its children by `points`.

    When memory is short, the kernel kills them before their parent. This requires no privilege.
    """
    score_file = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError):
        score_file.write_text(str(min(1000, int(score_file.read_text()) + points)))


def disable_timer_slack() -> None:
    """Disable the timer slack of this thread: 50 us by default, half of a queue delay of 100 us."""
    _libc.prctl(_PR_SET_TIMERSLACK, 1)


class PreciseWait:
    """A wait until one descriptor is readable, with a timeout in nanoseconds.

    The timeouts of epoll_wait(2) and poll(2) are in milliseconds. select(2) has a timeout in
    microseconds, but accepts no descriptor above 1,023.
    """

    def __init__(self, fd: int) -> None:
        self._pollfd = ctypes.create_string_buffer(struct.pack("ihh", fd, select.POLLIN, 0))
        self._timespec = (ctypes.c_long * 2)()

    def wait(self, timeout_ns: int) -> bool:
        """Return whether the descriptor became readable within the timeout."""
        self._timespec[:] = [*divmod(timeout_ns, 10**9)]
        return bool(_libc.ppoll(self._pollfd, 1, self._timespec, None) > 0)


def set_up(log_name: str, title: str, log_settings: LogSettings) -> None:
    """Set up the log and the title of this process, which only the supervisor ends.

    SIGINT and SIGTERM are ignored, because a service manager may send them to every process.
    """
    from shmserve import logs  # not at the top: clients import this module

    logs.configure(log_name, log_settings)
    set_process_title(title)
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, signal.SIG_IGN)


def set_process_title(title: str) -> None:
    """Set the title that `ps` shows for this process."""
    # The environment of a model may have a Python for which no setproctitle is installed.
    with contextlib.suppress(ImportError):
        from setproctitle import setproctitle

        setproctitle(f"shmserve: {title}")


def with_uncached_copies(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which copies of at least `LARGE_COPY` bytes bypass the CPU caches.

    A threshold that `environment` sets is kept. Only glibc on x86 processors has the threshold.
    """
    tunables = environment.get(_TUNABLES_VARIABLE, "")
    if _COPY_TUNABLE in tunables:
        return dict(environment)
    settings = [*filter(None, [tunables]), f"{_COPY_TUNABLE}={LARGE_COPY:#x}"]
    return {**environment, _TUNABLES_VARIABLE: ":".join(settings)}


def reset_eventfd(fd: int) -> None:
    """Reset an eventfd to 0; do nothing if it is 0 already."""
    with contextlib.suppress(BlockingIOError):
        os.eventfd_read(fd)


def trim_heap() -> None:
    """Return freed memory to the operating system; do nothing with a C library other than glibc."""
    with contextlib.suppress(AttributeError):
        _libc.malloc_trim(0)


def unmap_large_blocks_on_free() -> None:
    """Let malloc map each block of 1 MiB and more, and unmap it when it is freed.

    By default glibc raises the threshold when the first such block is freed. From then on the heap
    keeps freed blocks of that size, and the holes between them waste memory.
    """
    with contextlib.suppress(AttributeError):
        _libc.mallopt(_M_MMAP_THRESHOLD, 1 << 20)


def keep_freed_blocks() -> None:
    """Let malloc keep up to 64 MiB of freed memory at the end of the heap, until `trim_heap`.

    By default glibc returns most freed blocks of 128 KiB and more to the operating system. The
    page faults of the next blocks then take half of the time of a large request.
    """
    with contextlib.suppress(AttributeError):
        _libc.mallopt(_M_TRIM_THRESHOLD, 64 << 20)
        _libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)


SPIN_NS = 400_000  # the time for which a process spins before it sleeps
_LONGEST_COUNTED_WAIT_NS = 4 * SPIN_NS  # longer waits count as this maximum
# With more concurrent requests, the cores have other work, and no process spins.
_MAX_REQUESTS_TO_SPIN = 1.5
_NO_SPIN = (False, False)  # a value of `BusyPoll.should_spin`


class BusyPoll:
    """The decision of one process whether to spin before it sleeps, from measured waits.

    `cores` is the number of usable cores; by default the kernel's affinity mask determines it.

    Attributes:
        should_spin: A pair: whether to spin while no request is in flight, and while some are.
    """

    def __init__(self, cores: int = 0) -> None:
        self._has_several_cores = (cores or len(os.sched_getaffinity(0))) > 1
        # The mean wait while no request is in flight, and while some are.
        self._mean_ns = [2.0 * SPIN_NS, 2.0 * SPIN_NS]
        self._recent_requests = 0.0  # recent number of concurrent requests
        self.should_spin = _NO_SPIN  # while no request is in flight, and while some are

    def observe(self, request_count: int, waited_ns: int) -> None:
        """Record that the process waited `waited_ns` for work, with `request_count` in flight."""
        has_requests = request_count > 0
        self._recent_requests -= 1 / 32
        if request_count > self._recent_requests:
            self._recent_requests = request_count
        if waited_ns > _LONGEST_COUNTED_WAIT_NS:
            waited_ns = _LONGEST_COUNTED_WAIT_NS
        mean_ns = self._mean_ns
        mean_ns[has_requests] += (waited_ns - mean_ns[has_requests]) / 8
        if self._recent_requests > _MAX_REQUESTS_TO_SPIN or not self._has_several_cores:
            self.should_spin = _NO_SPIN
        else:
            self.should_spin = (mean_ns[0] < SPIN_NS, mean_ns[1] < SPIN_NS)
