"""The process table: every child of the supervisor, and the backoff of restarts.

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

from shmserve.ipc import processes

logger = logging.getLogger(__name__)

# A child that stays stopped for longer is killed, and its owner handles that like any exit.
STOPPED_LIMIT_S = 0.4
# Peers know a process by its pid, which the kernel reuses. A new process must not have a pid that a
# peer still remembers as exited. The factor covers exits that are reported late (see `Supervisor`).
_RESERVED_PIDS = 2 * processes.REMEMBERED_EXITS


@dataclass(slots=True, eq=False)
class Child:
    """A child process. `exited` resolves to the kind of its exit ("exit status 1", "signal 9").

    The future is shared: a task that may be cancelled awaits `gone` instead.
    """

    pid: int
    title: str
    exited: asyncio.Future[str]
    stop_timer: asyncio.TimerHandle | None = field(default=None)
    cause: str = ""  # why the server kills it
    stops: bool = False  # it was sent `Stop`, and has nothing in flight

    @property
    def alive(self) -> bool:
        """Return whether its exit has not been detected."""
        return not self.exited.done()

    @property
    def reason(self) -> str:
        """Return the exit status or signal, and the cause if the server killed it."""
        reason = self.exited.result()
        return f"{reason}: {self.cause}" if self.cause else reason

    @property
    def was_killed(self) -> bool:
        """Return whether an operator, or the kernel for lack of memory, has killed it."""
        return self.reason == f"signal {signal.SIGKILL.value}"

    def stop_expected(self) -> None:
        """Record that it was sent `Stop`, and has nothing in flight."""
        self.stops = True

    async def gone(self) -> str:
        """Wait for its exit and return the kind of it."""
        return await asyncio.shield(self.exited)

    def kill(self, signal_number: int = signal.SIGKILL) -> None:
        """Send a signal if it is alive."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal_number)


class ProcessTable:
    """All children of this server.

    `on_start(child)` is called when a child is adopted. Watchers are called when a child exits,
    before the waiters of its `exited`.
    """

    def __init__(
        self,
        on_start: Callable[[Child], None] = lambda child: None,
    ) -> None:
        self._on_start = on_start
        self._watching: list[Callable[[Child], None]] = []
        self._known: dict[int, Child] = {}
        self._early: dict[int, str] = {}
        self._ended_lately: deque[int] = deque(maxlen=_RESERVED_PIDS)
        self._spawning = 0
        self._loop = asyncio.get_running_loop()
        processes.adopt_orphans()
        self._loop.add_signal_handler(signal.SIGCHLD, self._reap)

    def watch(self, on_exit: Callable[[Child], None]) -> None:
        """Call `on_exit(child)` for each later exit."""
        self._watching.append(on_exit)

    def all(self) -> list[Child]:
        """Return every running child."""
        return list(self._known.values())

    def adopt(self, pid: int, title: str) -> Child:
        """Add a process that was just started."""
        child = Child(pid, title, self._loop.create_future())
        self._known[pid] = child
        self._on_start(child)
        if pid in self._early:
            # Its caller receives the child first, and the exit afterwards.
            self._loop.call_soon(self._ended, pid, self._early.pop(pid))
        return child

    def remembers(self, pid: int) -> bool:
        """Return whether a peer may remember an exited process with this pid."""
        return pid in self._ended_lately

    @contextlib.contextmanager
    def spawning(self) -> Iterator[None]:
        """Mark that a process is being started: an unknown child may be that process."""
        self._spawning += 1
        try:
            yield
        finally:
            self._spawning -= 1
            self._kill_strays()

    def _reap(self) -> None:
        while True:
            try:
                event = os.waitid(
                    os.P_ALL, 0, os.WEXITED | os.WSTOPPED | os.WCONTINUED | os.WNOHANG
                )
            except ChildProcessError:
                break
            if event is None:
                break
            child = self._known.get(event.si_pid)
            if event.si_code in (os.CLD_EXITED, os.CLD_KILLED, os.CLD_DUMPED):
                kind = "exit status" if event.si_code == os.CLD_EXITED else "signal"
                self._ended(event.si_pid, f"{kind} {event.si_status}")
            elif child is not None and event.si_code == os.CLD_STOPPED:
                self._stopped(child)
            elif child is not None and event.si_code == os.CLD_CONTINUED:
                self._continued(child)
        self._kill_strays()

    def _ended(self, pid: int, reason: str) -> None:
        child = self._known.pop(pid, None)
        if child is None:
            if self._spawning:
                self._early[pid] = reason
            return
        self._continued(child)
        self._ended_lately.append(pid)
        logger.debug("%s (pid %d) ended: %s", child.title, pid, reason)
        child.exited.set_result(reason)
        for on_exit in self._watching:
            try:
                on_exit(child)
            except Exception:  # other processes may have exited, too
                logger.exception("the end of %s could not be dealt with", child.title)

    def _stopped(self, child: Child) -> None:
        logger.warning("%s is stopped; it is replaced if it stays so", child.title)
        self._continued(child)
        child.stop_timer = self._loop.call_later(STOPPED_LIMIT_S, self._stays_stopped, child)

    @staticmethod
    def _continued(child: Child) -> None:
        if child.stop_timer is not None:
            child.stop_timer.cancel()
            child.stop_timer = None

    def _stays_stopped(self, child: Child) -> None:
        timer = child.stop_timer
        self._reap()  # this loop may have been stopped itself
        if child.stop_timer is timer:
            child.cause = f"it was stopped for {STOPPED_LIMIT_S} s"
            child.kill()

    def _kill_strays(self) -> None:
        """Kill the adopted descendants of dead workers, which their models had started."""
        if self._spawning:
            return
        self._early.clear()
        for pid in processes.children(os.getpid()):
            if pid not in self._known:
                # The pid may be the intermediate process of a dead zygote, which is the parent of a
                # child.
                processes.kill_tree(pid, spared=self._known)

    def close(self) -> None:
        """Stop watching."""
        self._loop.remove_signal_handler(signal.SIGCHLD)


# Pauses before a start after the n-th death in a row.
_PAUSES_S = (0.0, 0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8)
_HEALTHY_S = 30.0
_MOST_OF_THE_USEFUL = 4  # deaths in a row that count after useful work


@dataclass(slots=True)
class RestartBackoff:
    """The number of deaths in a row. A life of more than 30 seconds resets it."""

    deaths: int = 0

    def worked(self) -> None:
        """Record that the process has done useful work, which shortens the next pause."""
        self.deaths = min(self.deaths, _MOST_OF_THE_USEFUL)

    def pause_s(self, lived_s: float) -> float:
        """Record a death, and return the seconds to wait before the next start.

        Args:
            lived_s: The lifetime in seconds; 0 if the process did not start at all.
        """
        self.deaths = 1 if lived_s > _HEALTHY_S else self.deaths + 1
        return _PAUSES_S[min(self.deaths, len(_PAUSES_S)) - 1]
