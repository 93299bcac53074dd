"""The supervisor's children: their table, and the backoff of restarts.

Children are reaped when they exit, and killed when they stay stopped. The table runs in the
supervisor's event loop and is driven by SIGCHLD.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from shmserve.common.host import oom_kills
from shmserve.ipc import processes

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

    `exit_future` resolves to the kind of its exit ("exit status 1", "signal 9"). The future is
    shared: a task that may be cancelled awaits `until_exit` instead.
    """

    pid: int
    title: str
    exit_future: asyncio.Future[str]
    stop_timer: asyncio.TimerHandle | None = field(default=None)
    kill_reason: str = ""  # the reason why the server or the kernel kills the process
    is_stopping: bool = False  # whether the process was sent `Stop` and has nothing in flight

    @property
    def alive(self) -> bool:
        """Return whether the process is not known to have exited."""
        return not self.exit_future.done()

    @property
    def reason(self) -> str:
        """Return the exit status or signal, and the cause if it is known."""
        reason = self.exit_future.result()
        return f"{reason}: {self.kill_reason}" if self.kill_reason else reason

    @property
    def reason_for_clients(self) -> str:
        """Return the exit status or signal; a lack of memory is the only cause that is named."""
        return self.reason if self.kill_reason == _OUT_OF_MEMORY else self.exit_future.result()

    @property
    def was_killed(self) -> bool:
        """Return whether an operator, or the kernel for lack of memory, has killed the process."""
        was_sigkilled = self.exit_future.result() == f"signal {signal.SIGKILL.value}"
        return was_sigkilled and self.kill_reason in ("", _OUT_OF_MEMORY)

    async def until_exit(self) -> str:
        """Wait until the process exits, and return its exit status or signal as a text."""
        return await asyncio.shield(self.exit_future)

    def kill(self, signal_number: int = signal.SIGKILL) -> None:
        """Send a signal to the process if it is alive."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal_number)

    async def end(self, patience_s: float) -> bool:
        """Wait for the exit of the process, which was sent `Stop`; kill it after `patience_s`.

        Returns:
            Whether the process exited by itself.
        """
        if not self.alive:
            return True
        self.is_stopping = True
        try:
            async with asyncio.timeout(patience_s):
                await self.until_exit()
        except TimeoutError:
            self.kill()
            await self.until_exit()
            return False
        return True


class ProcessTable:
    """All children of this server.

    `on_start(child)` is called when a child is adopted. `on_exit(child)` is called when a child
    exits, before the waiters of its `exit_future`.
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
        child.exit_future.set_result(reason)  # calls its waiters in the loop's next turn
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
        """Record that the process has done useful work; the pause before its restart is shorter."""
        self.exits = min(self.exits, _MAX_EXITS_AFTER_WORK)

    def pause_s(self, lifetime_s: float) -> float:
        """Record an exit, and return the seconds to wait before the next start.

        Args:
            lifetime_s: The lifetime in seconds; 0 if the process did not start at all.
        """
        self.exits = 1 if lifetime_s > _HEALTHY_S else self.exits + 1
        return _PAUSES_S[min(self.exits, len(_PAUSES_S)) - 1]
