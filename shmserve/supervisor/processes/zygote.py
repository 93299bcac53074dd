"""A zygote: a process with all imports done, which forks the server's processes in milliseconds.

`Zygote` is the supervisor's client of a zygote, whose process runs `main`:

    supervisor ─ request (record in a memfd, descriptors) ─> zygote ─ fork ─> A ─ fork ─> B
        ^                                                                                 the new
        ├───────────── [number, pid of B], then A exits ────────────────────────────────┘ process
        └── parent of B, because the supervisor adopts orphans

    or [number, -errno] from the zygote, if there are no resources for another process.

A zygote also forks a spare zygote with all imports done. The spare takes over when the zygote dies,
so that torch is not imported again.

The double fork makes the supervisor the parent of B. The supervisor reaps B and detects that B is
stopped, and B dies with the supervisor, independently of the zygote. A zygote has no threads and
opens no device. The zygote exits after the supervisor. When its socket is closed, the zygote kills
the remaining processes that models have started, and removes the run directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import importlib
import itertools
import logging
import os
import pkgutil
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgpack

import shmserve
from shmserve.errors import ShmserveError, Unavailable
from shmserve.ipc.processes import (
    MAX_PASSED_FDS,
    die_with_parent,
    kill_marked_descendants,
    raise_oom_score,
    renounce_privileges,
    set_process_title,
    signal_at_parents_death,
)
from shmserve.supervisor.host.run_directory import RunDirectory, clear, exclusive
from shmserve.supervisor.processes.children import Child, ProcessTable, RestartBackoff

logger = logging.getLogger(__name__)

# The kernel should kill forked processes, which are restarted, before the supervisor.
OOM_SCORE_ADJ = 100
BOOT_FAILED = 3  # exit status of a process whose entry point raised
SPARE = "spare"  # the entry point that requests a spare; its link is the second descriptor
TAKE_OVER = b"take over"  # the message by which a spare replaces the zygote
_MAX_FAILED_STARTS = 3
_RESTART_PAUSE_S = 0.2  # seconds before a restart
_RETRY_PAUSE_S = 1.0  # seconds before another attempt, if the host has no resources
# Maximum requests in flight at a zygote, because the socket's buffer is bounded.
_MAX_REQUESTS = 64


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


# --- in the supervisor


def _start_failure(error_number: int | None) -> Unavailable:
    text = f"no process can be started: {os.strerror(error_number or 0)}"
    if error_number == errno.EAGAIN:
        text += " (raise TasksMax= in the unit, ulimit -u, or docker run --pids-limit)"
    return Unavailable(text)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@dataclass(slots=True, eq=False)
class _ZygoteProcess:
    """A zygote's process, and the supervisor's end of its link."""

    child: Child
    link: socket.socket
    started_at: float = field(default_factory=time.monotonic)


def _create_link() -> tuple[socket.socket, socket.socket]:
    own_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    own_end.setblocking(False)
    return own_end, child_end


@dataclass(eq=False)
class Zygote:
    """The supervisor's client of a zygote process and of its spare.

    A zygote forks its spare once its imports are done. When the zygote dies, the spare takes over
    and forks the next spare. Without a spare, the zygote is restarted. The forked processes
    continue to run.
    """

    _process_table: ProcessTable
    _run_dir: RunDirectory
    _title: str
    _modules: Sequence[str]
    _environment: Mapping[str, str]

    def __post_init__(self) -> None:
        self._fork_numbers = itertools.count(1)
        self._pending_forks: dict[int, asyncio.Future[int]] = {}
        self._request_slots = asyncio.Semaphore(_MAX_REQUESTS)
        self._serving_zygote: _ZygoteProcess | None = None
        self._spare: _ZygoteProcess | None = None
        self._backoff = RestartBackoff()  # determines the pauses before spares are restarted
        self._forking_spare: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._ready_future: asyncio.Future[None] = self._loop.create_future()
        self._is_stopping = False
        self._failed_starts = 0

    def start(self) -> None:
        """Start the process; `spawn` waits until its imports are done.

        Raises:
            Unavailable: The host has no resources for another process.
        """
        try:
            own_end, child_end = _create_link()
            with child_end:
                try:
                    pid = self._spawn_process(child_end)
                except OSError:
                    own_end.close()
                    raise
        except OSError as error:
            raise _start_failure(error.errno) from None
        self._serve(_ZygoteProcess(self._process_table.adopt(pid, self._title), own_end))

    def _serve(self, process: _ZygoteProcess) -> None:
        """Send all further requests to this process, which is the zygote or its former spare."""
        self._serving_zygote = process
        process.child.exit_future.add_done_callback(self._on_exit)
        self._loop.add_reader(process.link.fileno(), self._read_responses)

    def _spawn_process(self, child_end: socket.socket) -> int:
        package_root = str(Path(shmserve.__file__).resolve().parent.parent)
        boot_code = (
            f"import sys; sys.path.append({package_root!r}); "
            "from shmserve.supervisor.processes.zygote import main; sys.exit(main(sys.argv[1:]))"
        )
        os.set_inheritable(child_end.fileno(), True)
        os.set_inheritable(self._run_dir.lock_fd, True)
        try:
            # -P prevents imports from the current folder, which may contain a module `workers`.
            return os.posix_spawn(
                sys.executable,
                [
                    *(sys.executable, "-P", "-c", boot_code),
                    *(str(child_end.fileno()), str(self._run_dir.lock_fd), str(os.getpid())),
                    *(str(self._run_dir.path), self._title),
                    *self._modules,
                ],
                self._environment,
                file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)],
                setpgroup=0,  # a signal to the server's group must not prevent the zygote's cleanup
                # Blocked until the zygote ignores these signals: only the supervisor ends it.
                setsigmask=[signal.SIGINT, signal.SIGTERM],
            )
        finally:
            os.set_inheritable(self._run_dir.lock_fd, False)

    def _read_responses(self) -> None:
        assert self._serving_zygote is not None
        while True:
            try:
                data = self._serving_zygote.link.recv(4096)
            except (BlockingIOError, ConnectionError):
                return
            if not data:
                return
            number, pid = msgpack.unpackb(data)
            if number == 0:
                if not self._ready_future.done():
                    self._ready_future.set_result(None)
                    self._fork_spare()
                continue
            waiter = self._pending_forks.pop(number, None)
            if waiter is None or waiter.done():
                if pid > 0:  # the caller was cancelled, so nothing else refers to this process
                    _kill(pid)
            elif pid > 0:
                waiter.set_result(pid)
            else:
                waiter.set_exception(_start_failure(-pid))

    def _on_exit(self, exit_reason: asyncio.Future[str]) -> None:
        assert self._serving_zygote is not None
        self._read_responses()
        self._loop.remove_reader(self._serving_zygote.link.fileno())
        self._serving_zygote.link.close()
        if self._is_stopping:
            return
        logger.error("process %s ended (%s)", self._title, exit_reason.result())
        spare, self._spare = self._spare, None
        if spare is not None:
            self._take_over(spare)
        elif self._ready_future.done():
            self._ready_future = self._loop.create_future()
            self._failed_starts = 0
        else:
            self._failed_starts += 1
        for pending_fork in self._pending_forks.values():
            if not pending_fork.done():
                pending_fork.set_result(0)
        self._pending_forks.clear()
        if self._failed_starts == _MAX_FAILED_STARTS:  # the installation is probably broken
            self._ready_future.set_exception(Unavailable(f"the {self._title} process cannot start"))
            self._ready_future.exception()  # asyncio would warn of an exception that nothing reads
        elif spare is None:
            self._loop.call_later(_RESTART_PAUSE_S, self._restart)

    # --- the spare

    def _take_over(self, spare: _ZygoteProcess) -> None:
        spare.child.title = self._title
        with contextlib.suppress(OSError):  # the spare has exited, too, which is reported next
            spare.link.send(TAKE_OVER)
        self._serve(spare)
        self._fork_spare()

    def _fork_spare(self) -> None:
        is_forking = self._forking_spare is not None and not self._forking_spare.done()
        is_broken = self._ready_future.done() and self._ready_future.exception() is not None
        if not (self._is_stopping or self._spare or is_forking or is_broken):
            self._forking_spare = self._loop.create_task(self._start_spare())

    async def _start_spare(self) -> None:
        with contextlib.ExitStack() as stack:
            try:
                own_end, child_end = map(stack.enter_context, _create_link())
                child = await self.spawn(f"spare {self._title}", SPARE, b"", [child_end.fileno()])
            except (OSError, Unavailable) as error:
                text = "a spare process %s could not be started; the next attempt is in %g s: %s"
                logger.warning(text, self._title, _RETRY_PAUSE_S, error)
                self._loop.call_later(_RETRY_PAUSE_S, self._fork_spare)
                return
            child_end.close()
            stack.pop_all()
        spare = self._spare = _ZygoteProcess(child, own_end)
        child.exit_future.add_done_callback(partial(self._on_spare_exit, spare))

    def _on_spare_exit(self, spare: _ZygoteProcess, exit_reason: asyncio.Future[str]) -> None:
        if self._spare is spare:
            self._spare = None
            spare.link.close()
            if not self._is_stopping:
                logger.error("process %s ended (%s)", spare.child.title, exit_reason.result())
                pause_s = self._backoff.pause_s(time.monotonic() - spare.started_at)
                self._loop.call_later(pause_s, self._fork_spare)

    # --- requests to fork

    def _restart(self) -> None:
        if self._is_stopping:
            return
        try:
            self.start()
        except Unavailable as error:
            text = "process %s could not be restarted; the next attempt is in %g s: %s"
            logger.error(text, self._title, _RETRY_PAUSE_S, error.message)
            self._loop.call_later(_RETRY_PAUSE_S, self._restart)

    async def spawn(self, title: str, entry: str, start: bytes, fds: Sequence[int] = ()) -> Child:
        """Fork a process that calls `entry` with `start` and the numbers of its copies of `fds`.

        The request is repeated if the zygote dies, and if the pid of the new process was recently
        used by a process that peers may still refer to.

        Args:
            title: The title of the process.
            entry: The function, as "module:function".
            start: An encoded start record.
            fds: Descriptors to pass.

        Raises:
            Unavailable: There is no zygote, or the host has no resources for another process.
        """
        while not self._is_stopping:
            await asyncio.shield(self._ready_future)
            assert self._serving_zygote is not None
            zygote_child = self._serving_zygote.child
            with self._process_table.spawning():
                pid = await self._fork(entry, start, fds)
                if pid and not self._process_table.is_reserved(pid):
                    return self._process_table.adopt(pid, title)
            if pid:
                _kill(pid)
                continue
            await zygote_child.until_exit()
            await asyncio.sleep(0)  # let the event loop call `_on_exit` first
        raise Unavailable("the server is stopping")

    async def _fork(self, entry: str, start: bytes, fds: Sequence[int]) -> int:
        """Fork a process; return its pid, or 0 if the zygote has exited."""
        async with self._request_slots:
            number = next(self._fork_numbers)
            waiter: asyncio.Future[int] = self._loop.create_future()
            self._pending_forks[number] = waiter
            try:
                self._send_request(encode_request(number, entry, start), fds)
            except ConnectionError:
                del self._pending_forks[number]
                return 0
            except OSError as error:
                del self._pending_forks[number]
                raise _start_failure(error.errno) from None
            return await waiter

    def _send_request(self, request_fd: int, fds: Sequence[int]) -> None:
        assert self._serving_zygote is not None
        try:
            socket.send_fds(self._serving_zygote.link, [b"fork"], [request_fd, *fds])
        finally:
            os.close(request_fd)

    def stop(self) -> None:
        """Close the links; the zygote then removes the run directory and exits."""
        self._is_stopping = True
        if self._forking_spare is not None:
            self._forking_spare.cancel()
        for process in (self._serving_zygote, self._spare):
            if process is not None and process.child.alive:
                self._loop.remove_reader(process.link.fileno())
                process.link.shutdown(socket.SHUT_RDWR)


# --- in the zygote


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
