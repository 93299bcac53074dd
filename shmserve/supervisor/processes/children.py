"""The supervisor's children: how zygotes fork them, their table, and the backoff of restarts.

Children are reaped when they exit, and killed when they stay stopped. The table runs in the
supervisor's event loop and is driven by SIGCHLD. `worker_preloads` selects what the zygote of
workers imports before it forks.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import errno
import importlib.util
import itertools
import logging
import os
import signal
import socket
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgpack

import shmserve
from shmserve.common.host import oom_kills
from shmserve.errors import Unavailable
from shmserve.ipc import processes
from shmserve.supervisor.host.run_directory import RunDirectory
from shmserve.supervisor.processes.zygote import SPARE, TAKE_OVER, encode_request

logger = logging.getLogger(__name__)

# A child that stays stopped for longer is killed, and its owner handles that like any exit.
STOPPED_LIMIT_S = 0.4
# The number of recent pids that no new process may have, since peers identify processes by pid, and
# store recent exits. The factor 2 covers exits that the supervisor reports late.
_RESERVED_PIDS = 2 * processes.REMEMBERED_EXITS
# Seconds until the next attempt to kill a process without a command line, which is in execve(2).
_EXEC_S = 0.01
_OUT_OF_MEMORY = "the kernel killed it for lack of memory"


@dataclass(slots=True, eq=False)
class Child:
    """A child process of the supervisor.

    `exited` resolves to the kind of its exit ("exit status 1", "signal 9"). The future is shared: a
    task that may be cancelled awaits `until_exit` instead.
    """

    pid: int
    title: str
    exited: asyncio.Future[str]
    stop_timer: asyncio.TimerHandle | None = field(default=None)
    kill_reason: str = ""  # the reason why the server or the kernel kills the process
    is_stopping: bool = False  # whether the process was sent `Stop` and has nothing in flight

    @property
    def alive(self) -> bool:
        """Return whether the process is not known to have exited."""
        return not self.exited.done()

    @property
    def reason(self) -> str:
        """Return the exit status or signal, and the cause if it is known."""
        reason = self.exited.result()
        return f"{reason}: {self.kill_reason}" if self.kill_reason else reason

    @property
    def reason_for_clients(self) -> str:
        """Return the exit status or signal; a lack of memory is the only cause that is named."""
        return self.reason if self.kill_reason == _OUT_OF_MEMORY else self.exited.result()

    @property
    def was_killed(self) -> bool:
        """Return whether an operator, or the kernel for lack of memory, has killed the process."""
        killed = self.exited.result() == f"signal {signal.SIGKILL.value}"
        return killed and self.kill_reason in ("", _OUT_OF_MEMORY)

    async def until_exit(self) -> str:
        """Wait until the process exits, and return its exit status or signal as a text."""
        return await asyncio.shield(self.exited)

    def kill(self, signal_number: int = signal.SIGKILL) -> None:
        """Send a signal to the process if it is alive."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal_number)


class ProcessTable:
    """All children of this server.

    `on_start(child)` is called when a child is adopted. `on_exit(child)` is called when a child
    exits, before the waiters of its `exited`.
    """

    def __init__(self, on_start: Callable[[Child], None] = lambda child: None) -> None:
        self._on_start = on_start
        self.on_exit: Callable[[Child], None] = lambda child: None
        self._children: dict[int, Child] = {}
        self._early_exits: dict[int, str] = {}  # reasons of exits before `adopt`, by pid
        self._reserved_pids: deque[int] = deque(maxlen=_RESERVED_PIDS)
        self._spawn_count = 0
        self._stray_timer: asyncio.TimerHandle | None = None
        self._oom_kills = oom_kills()  # number of processes that the kernel has killed
        self._child_exited = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        # A shell may have started processes before it executed this program in its place.
        self._inherited_pids = set(processes.children(os.getpid()))
        processes.adopt_orphans()
        self._loop.add_signal_handler(signal.SIGCHLD, self._reap)

    def all(self) -> list[Child]:
        """Return every running child."""
        return list(self._children.values())

    def adopt(self, pid: int, title: str) -> Child:
        """Register a process that was just started."""
        child = Child(pid, title, self._loop.create_future())
        self._children[pid] = child
        self._on_start(child)
        if pid in self._early_exits:
            # The exit is handled later, so that the caller receives the child before.
            self._loop.call_soon(self._on_child_exit, pid, self._early_exits.pop(pid))
        return child

    def is_reserved(self, pid: int) -> bool:
        """Return whether a pid must not be reused yet, since peers may still store its exit."""
        return pid in self._reserved_pids

    @contextlib.contextmanager
    def spawning(self) -> Iterator[None]:
        """Mark that a process is being started; meanwhile, unknown children are not killed."""
        self._spawn_count += 1
        try:
            yield
        finally:
            self._spawn_count -= 1
            self._kill_strays()

    async def wait_for_trackers(self, timeout_s: float) -> None:
        """Wait until the resource trackers of ended models have removed the models' shared memory.

        When the supervisor exits, systemd and containers kill all processes that are left.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._stray_pids():
                    self._child_exited.clear()
                    await self._child_exited.wait()

    def _reap(self) -> None:
        self._child_exited.set()
        known_kills = self._oom_kills
        with contextlib.suppress(OSError):  # no descriptor is free, but children must be reaped
            self._oom_kills = oom_kills()
        while True:
            try:
                info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
            except ChildProcessError:
                break
            if info is None:
                break
            child = self._children.get(info.si_pid)
            if info.si_code in (os.CLD_EXITED, os.CLD_KILLED, os.CLD_DUMPED):
                status_kind = "exit status" if info.si_code == os.CLD_EXITED else "signal"
                is_killed = status_kind == "signal" and info.si_status == signal.SIGKILL
                if child and is_killed and not child.kill_reason and self._oom_kills > known_kills:
                    child.kill_reason = _OUT_OF_MEMORY
                self._on_child_exit(info.si_pid, f"{status_kind} {info.si_status}")
            elif child is not None and info.si_code == os.CLD_STOPPED:
                self._on_stopped(child)
            elif child is not None and info.si_code == os.CLD_CONTINUED:
                self._cancel_stop_timer(child)
        self._kill_strays()

    def _on_child_exit(self, pid: int, reason: str) -> None:
        child = self._children.pop(pid, None)
        if child is None:
            self._inherited_pids.discard(pid)
            if self._spawn_count:
                self._early_exits[pid] = reason
            return
        self._cancel_stop_timer(child)
        self._reserved_pids.append(pid)
        logger.debug("process %s (pid %d) ended: %s", child.title, pid, reason)
        child.exited.set_result(reason)  # calls its waiters in the loop's next turn
        try:
            self.on_exit(child)
        except Exception:  # any exception, because other processes may have exited, too
            text = "the exit of %s could not be handled; some of its resources may stay reserved"
            logger.exception(text, child.title)

    def _on_stopped(self, child: Child) -> None:
        logger.warning(
            "process %s was stopped by a signal; it is replaced unless it continues within %g s",
            child.title,
            STOPPED_LIMIT_S,
        )
        self._cancel_stop_timer(child)
        child.stop_timer = self._loop.call_later(STOPPED_LIMIT_S, self._kill_stopped, child)

    @staticmethod
    def _cancel_stop_timer(child: Child) -> None:
        if child.stop_timer is not None:
            child.stop_timer.cancel()
            child.stop_timer = None

    def _kill_stopped(self, child: Child) -> None:
        timer = child.stop_timer
        # If the supervisor was stopped, too, the child may have continued meanwhile. `_reap` then
        # reads its new status, and cancels the timer.
        self._reap()
        if child.stop_timer is timer:
            child.kill_reason = f"it was stopped for {STOPPED_LIMIT_S} s"
            child.kill()

    def _kill_strays(self) -> None:
        """Kill the adopted descendants of dead workers, which their models had started."""
        if self._spawn_count:
            return
        self._early_exits.clear()
        if self._stray_timer is not None:
            self._stray_timer.cancel()
        # A stray may be the intermediate process of a dead zygote. Its child is in the table, and
        # must not be killed.
        kill = partial(processes.kill_tree, excluded_pids=self._children)
        if not all([*map(kill, self._stray_pids())]):
            self._stray_timer = self._loop.call_later(_EXEC_S, self._kill_strays)

    def _stray_pids(self) -> list[int]:
        known_pids = self._children.keys() | self._inherited_pids
        return [pid for pid in processes.children(os.getpid()) if pid not in known_pids]

    def close(self) -> None:
        """Stop handling exits of children."""
        self._loop.remove_signal_handler(signal.SIGCHLD)


# Pauses before a start after the n-th exit in a row.
_PAUSES_S = (0.0, 0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8)
_HEALTHY_S = 30.0  # a process that lives longer resets the number of exits
_MAX_EXITS_AFTER_WORK = 4  # useful work lowers the number of consecutive exits to this maximum


@dataclass(slots=True)
class RestartBackoff:
    """The pauses before restarts, by the number of consecutive exits.

    A lifetime of more than 30 seconds resets the number.
    """

    exits: int = 0  # number of consecutive exits

    def record_work(self) -> None:
        """Record that the process has done useful work, which shortens the next pause."""
        self.exits = min(self.exits, _MAX_EXITS_AFTER_WORK)

    def pause_s(self, lifetime_s: float) -> float:
        """Record an exit, and return the seconds to wait before the next start.

        Args:
            lifetime_s: The lifetime in seconds; 0 if the process did not start at all.
        """
        self.exits = 1 if lifetime_s > _HEALTHY_S else self.exits + 1
        return _PAUSES_S[min(self.exits, len(_PAUSES_S)) - 1]


_MAX_FAILED_STARTS = 3
_RESTART_PAUSE_S = 0.2  # seconds before a restart
_RETRY_PAUSE_S = 1.0  # seconds before another attempt, if the host has no resources
# Maximum requests in flight at a zygote, because the socket's buffer is bounded.
_MAX_REQUESTS = 64

_WORKER_MODULE = "shmserve.workers.main"
_TORCH_PRELOADS = ("torch", "shmserve.workers.device:preload_operations")
# Modules that workers import for files that match a pattern: exported programs need torch's
# compiler (1 s and 95 MB), scripted programs a tenth of that, text models 0.2 s and 7 MB.
_PRELOADS_BY_PATTERN = {
    "*/*/*.pt": "shmserve.workers.device:preload_scripted",
    "*/*/*.pt2": "shmserve.workers.device:preload_exported",
    "*/*/config.json": "shmserve.workers.device:preload_text",
}
# Files of models that a backend reads with torch, and the packages that import torch.
_TORCH_FILES = ("*/*.pt", "*/*.pt2", "*/config.json")
_TORCH_PACKAGES = {
    *("torch", "torchvision", "torchaudio", "torchtext", "torch_npu", "torchao", "torchmetrics"),
    *("accelerate", "bitsandbytes", "diffusers", "easyocr", "fairseq", "fastai", "flair", "kornia"),
    *("lightning", "pytorch_lightning", "monai", "mmcv", "mmdet", "open_clip", "peft", "timm"),
    *("sentence_transformers", "speechbrain", "stanza", "transformers", "trl", "TTS", "vllm"),
    *("ultralytics", "whisper", "xformers"),
}


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
        self._ready: asyncio.Future[None] = self._loop.create_future()
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
        process.child.exited.add_done_callback(self._on_exit)
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
                if not self._ready.done():
                    self._ready.set_result(None)
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

    def _on_exit(self, exited: asyncio.Future[str]) -> None:
        assert self._serving_zygote is not None
        self._read_responses()
        self._loop.remove_reader(self._serving_zygote.link.fileno())
        self._serving_zygote.link.close()
        if self._is_stopping:
            return
        logger.error("process %s ended (%s)", self._title, exited.result())
        spare, self._spare = self._spare, None
        if spare is not None:
            self._take_over(spare)
        elif self._ready.done():
            self._ready = self._loop.create_future()
            self._failed_starts = 0
        else:
            self._failed_starts += 1
        for pending_fork in self._pending_forks.values():
            if not pending_fork.done():
                pending_fork.set_result(0)
        self._pending_forks.clear()
        if self._failed_starts == _MAX_FAILED_STARTS:  # the installation is probably broken
            self._ready.set_exception(Unavailable(f"the {self._title} process cannot start"))
            self._ready.exception()  # asyncio would warn of an exception that nothing reads
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
        is_broken = self._ready.done() and self._ready.exception() is not None
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
        child.exited.add_done_callback(partial(self._on_spare_exit, spare))

    def _on_spare_exit(self, spare: _ZygoteProcess, exited: asyncio.Future[str]) -> None:
        if self._spare is spare:
            self._spare = None
            spare.link.close()
            if not self._is_stopping:
                logger.error("process %s ended (%s)", spare.child.title, exited.result())
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
            await asyncio.shield(self._ready)
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


def worker_preloads(
    repositories: Sequence[Path],
    files: Sequence[Path] = (),
    has_devices: bool = False,
    may_add_models: bool = False,
) -> list[str]:
    """Return the modules to import and functions to call, in order, before the zygote forks.

    Importing torch takes a second and about 200 MB. The zygote imports torch if a model's file
    needs it or names it. A worker whose model imports torch in other ways imports it itself.

    Args:
        repositories: The model repositories.
        files: The files of classes, and the folders of checkpoints.
        has_devices: Whether the host has accelerators; workers with ONNX files then import torch.
        may_add_models: Whether models may be added later; then an empty repository imports torch.
    """
    if importlib.util.find_spec("torch") is None:
        return [_WORKER_MODULE]
    model_folders = [model for root in repositories for model in root.glob("*/")]
    patterns = (*_TORCH_FILES, "*/*.onnx") if has_devices else _TORCH_FILES
    is_empty = may_add_models and bool(repositories) and not model_folders
    may_need_torch = is_empty or any(file.is_dir() for file in files)
    sources = {source for file in files for source in _imported_files(file)}
    needs_torch = may_need_torch or any(map(_imports_torch, sources))
    if not needs_torch and not any(_uses_torch(model, patterns) for model in model_folders):
        return [_WORKER_MODULE]
    modules = [
        module
        for pattern, module in _PRELOADS_BY_PATTERN.items()
        if any(_contains_file(root, [pattern]) for root in repositories)
    ]
    return [*_TORCH_PRELOADS, _WORKER_MODULE, *modules]


def _uses_torch(model: Path, patterns: Sequence[str]) -> bool:
    with contextlib.suppress(OSError):
        return _contains_file(model, patterns) or any(map(_imports_torch, model.rglob("*.py")))
    return False


def _contains_file(folder: Path, patterns: Sequence[str]) -> bool:
    with contextlib.suppress(OSError):  # such as a stale mount; the load reports the error
        return any(any(folder.glob(pattern)) for pattern in patterns)
    return False


def _imported_files(file: Path) -> set[Path]:
    """Return a Python file and the files in its folder that it may import, directly or not."""
    imported_files, remaining_files = set[Path](), [file]
    while remaining_files:
        source = remaining_files.pop()
        if source in imported_files:
            continue
        imported_files.add(source)
        for name in _imported_packages(source):
            package = file.parent / name
            with contextlib.suppress(OSError):  # such as a name that is too long for a file
                remaining_files += [package.with_suffix(".py"), *package.glob("*.py")]
    return imported_files


def _imports_torch(source: Path) -> bool:
    """Return whether a Python file names a package that imports torch, in any import."""
    return not _TORCH_PACKAGES.isdisjoint(_imported_packages(source))


def _imported_packages(source: Path) -> Iterator[str]:
    """Yield the packages that a Python file imports anywhere, except relative imports."""
    try:
        with warnings.catch_warnings(action="ignore"):  # loading the file repeats the warnings
            # Only files are read, since the open of a pipe would wait for a writer.
            tree = ast.parse(source.read_bytes() if source.is_file() else b"")
    # Loading the model reports the error.
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name.partition(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]
