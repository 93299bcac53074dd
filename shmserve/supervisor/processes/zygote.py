"""A zygote: a process with all imports done, which forks the server's processes in milliseconds.

    supervisor ─ request (record in a memfd, descriptors) ─> zygote ─ fork ─> A ─ fork ─> B
        ^                                                                                 the new
        ├───────────── [number, pid of B], then A exits ────────────────────────────────┘ process
        └── parent of B, because the supervisor adopts orphans

    or [number, -errno] from the zygote, if there are no resources for another process.

A zygote also forks a spare zygote with all imports done. The spare takes over when the zygote dies
(`children.py`), so that torch is not imported again.

The double fork makes the supervisor the parent of B. The supervisor reaps B and detects that B is
stopped, and B dies with the supervisor, independently of the zygote. A zygote has no threads and
opens no device. The zygote exits after the supervisor. When its socket is closed, the zygote kills
the remaining processes that models have started, and removes the run directory.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import logging
import os
import pkgutil
import select
import signal
import socket
import sys
import traceback
from pathlib import Path

import msgpack

from shmserve.errors import ShmserveError
from shmserve.ipc.processes import (
    MAX_PASSED_FDS,
    die_with_parent,
    kill_marked_descendants,
    raise_oom_score,
    renounce_privileges,
    set_process_title,
    signal_at_parents_death,
)
from shmserve.supervisor.host.run_directory import clear, exclusive

logger = logging.getLogger(__name__)

# The kernel should kill forked processes, which are restarted, before the supervisor.
OOM_SCORE_ADJ = 100
BOOT_FAILED = 3  # exit status of a process whose entry point raised
SPARE = "spare"  # the entry point that requests a spare; its link is the second descriptor
TAKE_OVER = b"take over"  # the message by which a spare replaces the zygote


def encode_request(request_number: int, entry: str, start: bytes) -> int:
    """Return a memfd with a request to fork a process; the caller closes the memfd.

    Args:
        request_number: The number of the request, which the response repeats.
        entry: The function that the process calls, as "module:function".
        start: The encoded start record, which is the function's argument.
    """
    fd = os.memfd_create("shmserve-spawn", os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as file:
        file.write(msgpack.packb([request_number, entry, start]))
    return fd


def main(argv: list[str]) -> int:
    """Run a zygote: preload, then fork processes on request.

    Args:
        argv: SOCKET_FD LOCK_FD SUPERVISOR_PID RUN_DIR TITLE PRELOAD... A preload is a module to
            import, or MODULE:FUNCTION, a function to call.
    """
    link = socket.socket(fileno=int(argv[0]))
    # The lock is held until the run directory is removed; processes of models do not inherit it.
    for fd in map(int, argv[:2]):
        os.set_inheritable(fd, False)
    lock_fd, supervisor_pid, run_dir, title = int(argv[1]), int(argv[2]), Path(argv[3]), argv[4]
    zygote_pid = os.getpid()

    def on_supervisor_end() -> None:
        # With the lock, no zygote kills another zygote that is clearing the directory.
        with contextlib.suppress(OSError), exclusive(lock_fd):
            # The first zygote reports the death and removes the directory.
            if os.getppid() != supervisor_pid and run_dir.exists():
                text = (
                    f"shmserve: the supervisor (pid {supervisor_pid}) was killed: the server ends"
                )
                print(text, file=sys.stderr, flush=True)
            kill_marked_descendants(supervisor_pid, run_dir)
            clear(run_dir, lock_fd)
        os._exit(0)

    def on_hangup(*_: object) -> None:
        # SIGHUP is ignored while the supervisor runs: a closed terminal sends it, too, also under
        # `nohup`. Forked processes inherit this handler, so the pid is compared.
        if os.getpid() == zygote_pid and os.getppid() != supervisor_pid:
            on_supervisor_end()

    # SIGTTOU: with `stty tostop`, a terminal stops processes outside its group that write to it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # SIGHUP reports the supervisor's exit even during the imports, when nothing reads the link.
    signal.signal(signal.SIGHUP, on_hangup)
    signal_at_parents_death(signal.SIGHUP)
    renounce_privileges()
    raise_oom_score(OOM_SCORE_ADJ)
    if os.getppid() != supervisor_pid:
        on_supervisor_end()
    set_process_title(title)
    gc.disable()  # nearly all objects stay alive, and collections take a tenth of the import time
    for preload_name in argv[5:]:
        loaded_object = pkgutil.resolve_name(preload_name)
        if callable(loaded_object):
            loaded_object()
    # A collection in a child would otherwise copy all pages of the imported objects.
    gc.collect()
    gc.freeze()
    gc.enable()
    try:
        link.send(msgpack.packb([0, os.getpid()]))
    except OSError:
        on_supervisor_end()
    while True:
        data, fds, _, _ = socket.recv_fds(link, 16, MAX_PASSED_FDS)
        if not data:
            on_supervisor_end()
        if data == TAKE_OVER:
            set_process_title(title)
            continue
        link = _fork(link, supervisor_pid, fds)
        if os.getpid() != zygote_pid:
            zygote_pid = os.getpid()
            set_process_title(f"spare {title}")
            signal_at_parents_death(signal.SIGHUP)
            if os.getppid() != supervisor_pid:
                on_supervisor_end()


def _fork(link: socket.socket, supervisor_pid: int, fds: list[int]) -> socket.socket:
    """Fork the requested process.

    Returns:
        The link. A new spare also returns from this function, with a link of its own.
    """
    with open(fds[0], "rb") as file:
        file.seek(0)
        number, entry, start = msgpack.unpackb(file.read())
    try:
        intermediate_pid = os.fork()
    except OSError as error:
        failure_errno = error.errno or errno.EAGAIN
    else:
        if not intermediate_pid:
            _fork_child(link, number, supervisor_pid)
            if entry == SPARE:
                return socket.socket(fileno=fds[1])
            os._exit(_run(entry, start, fds[1:]))
        status = os.waitstatus_to_exitcode(os.waitpid(intermediate_pid, 0)[1])
        # An intermediate process that was killed has reported nothing; EAGAIN stands for this.
        failure_errno = status if status >= 0 else errno.EAGAIN
    for fd in fds[1:]:
        os.close(fd)
    if failure_errno:
        with contextlib.suppress(OSError):
            link.send(msgpack.packb([number, -failure_errno]))
    return link


def _fork_child(link: socket.socket, request_number: int, supervisor_pid: int) -> None:
    """Fork again and exit; return only in the new process, whose parent is the supervisor."""
    intermediate_pid = os.getpid()
    read_end, write_end = os.pipe()
    try:
        child_pid = os.fork()
    except OSError as error:
        os._exit(error.errno or errno.EAGAIN)
    if child_pid:
        os.close(write_end)
        os._exit(0 if os.read(read_end, 1) else errno.EAGAIN)
    os.setpgid(0, 0)  # a model may signal its group
    # The new process, not its parent, reports the pid: when the zygote dies, the intermediate
    # process is killed, but a process whose pid was reported must continue to run.
    try:
        link.send(msgpack.packb([request_number, os.getpid()]))
    except OSError:
        # The supervisor has closed the link and starts another process instead of this one.
        os._exit(BOOT_FAILED)
    link.close()
    os.write(write_end, b"1")
    os.close(read_end)
    os.close(write_end)
    _become_child_of(supervisor_pid, intermediate_pid)


def _become_child_of(supervisor_pid: int, intermediate_pid: int) -> None:
    # A pidfd is readable once its process has exited and its children have their new parent.
    try:
        pidfd = os.pidfd_open(intermediate_pid)
    except ProcessLookupError:
        pass
    else:
        exit_poll = select.poll()
        exit_poll.register(pidfd, select.POLLIN)
        exit_poll.poll()
        os.close(pidfd)
    die_with_parent(supervisor_pid)


def _reseed() -> None:
    # Otherwise all forked processes would draw the same random numbers.
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].seed()


def _run(entry: str, start: bytes, fds: list[int]) -> int:
    try:
        _reseed()
        module, _, function = entry.partition(":")
        getattr(importlib.import_module(module), function)(start, *fds)
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else 1
    except ShmserveError as error:  # expected errors, which need no traceback
        logger.error("this process cannot start: %s", error.message)
        return BOOT_FAILED
    except BaseException:
        traceback.print_exc()
        return BOOT_FAILED
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError, ValueError):  # closed by a model
                stream.flush()
    return 0
