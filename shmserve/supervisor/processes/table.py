"""The process table: every child of the supervisor, reaped on exit, killed when it stays stopped;
and the backoff of restarts.

Everything here runs in the supervisor's event loop. SIGCHLD is the one event: the kernel says who
ended or was stopped.
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

# A child that stays stopped longer serves nobody: it is killed, which its owner handles like any
# death.
STOPPED_LIMIT_S = 0.4
# Peers know a process by its pid, which the kernel reuses. A new process must not have a pid that a
# peer still remembers as exited. The factor covers exits that are reported late (see `Supervisor`).
_RESERVED_PIDS = 2 * processes.REMEMBERED_EXITS


@dataclass(slots=True, eq=False)
class Child:
    """A running process; `exited` resolves to why it ended ("exit status 1", "signal 9"). It is
    shared: whoever waits for it alone awaits `gone`, and may be cancelled."""

    pid: int
    title: str
    exited: asyncio.Future[str]
    stop_timer: asyncio.TimerHandle | None = field(default=None)
    cause: str = ""  # why it is killed, where the server does that
    stops: bool = False  # it was told to, and has nothing in flight

    @property
    def alive(self) -> bool:
        """Whether it has not been seen to end."""
        return not self.exited.done()

    @property
    def reason(self) -> str:
        """Why it ended, once it has: its exit status or signal, and the cause."""
        reason = self.exited.result()
        return f"{reason}: {self.cause}" if self.cause else reason

    @property
    def was_killed(self) -> bool:
        """Whether somebody else has killed it: an operator, or the kernel for memory."""
        return self.reason == f"signal {signal.SIGKILL.value}"

    async def gone(self) -> str:
        """Wait for its end; why it ended."""
        return await asyncio.shield(self.exited)

    def kill(self, signal_number: int = signal.SIGKILL) -> None:
        """Send a signal, if it is still there."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal_number)


class ProcessTable:
    """All processes of this server. `on_start(child)` is called for each that is entered, and
    watchers for each that ends, before its `exited` waiters run."""

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
        """Have `on_exit(child)` called for each that ends from now on."""
        self._watching.append(on_exit)

    def all(self) -> list[Child]:
        """Every running child."""
        return list(self._known.values())

    def adopt(self, pid: int, title: str) -> Child:
        """Enter a process that was just started."""
        child = Child(pid, title, self._loop.create_future())
        self._known[pid] = child
        self._on_start(child)
        if pid in self._early:
            # Whoever started it enters it first, and hears of its end then.
            self._loop.call_soon(self._ended, pid, self._early.pop(pid))
        return child

    def remembers(self, pid: int) -> bool:
        """Whether a process that has ended lately had this pid: others would take one for it."""
        return pid in self._ended_lately

    @contextlib.contextmanager
    def spawning(self) -> Iterator[None]:
        """While a process is started: a child that is not known may be that one."""
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
            except Exception:  # others may have ended, too
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
        self._reap()  # this loop may have been the one that stood still
        if child.stop_timer is timer:
            child.cause = f"it was stopped for {STOPPED_LIMIT_S} s"
            child.kill()

    def _kill_strays(self) -> None:
        """Kill what a worker's model started and left behind when it died: the supervisor has
        adopted it."""
        if self._spawning:
            return
        self._early.clear()
        for pid in processes.children(os.getpid()):
            if pid not in self._known:
                # It may be what a zygote that died had start one of ours, and about to end itself.
                processes.kill_tree(pid, spared=self._known)

    def close(self) -> None:
        """Stop watching."""
        self._loop.remove_signal_handler(signal.SIGCHLD)


# Pauses before a start after the n-th death in a row.
_PAUSES_S = (0.0, 0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8)
_HEALTHY_S = 30.0
_MOST_OF_THE_USEFUL = 4  # deaths in a row that count of what has worked since the last


@dataclass(slots=True)
class RestartBackoff:
    """Deaths in a row; a life of more than 30 seconds ends the row."""

    deaths: int = 0

    def worked(self) -> None:
        """What was started has done something: after the next death it waits a little only."""
        self.deaths = min(self.deaths, _MOST_OF_THE_USEFUL)

    def pause_s(self, lived_s: float) -> float:
        """Seconds to wait before the next start, after a death; 0 seconds are lived by what did not
        come up at all."""
        self.deaths = 1 if lived_s > _HEALTHY_S else self.deaths + 1
        return _PAUSES_S[min(self.deaths, len(_PAUSES_S)) - 1]
