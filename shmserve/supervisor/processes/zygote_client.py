"""The client of a zygote: requests forks of it, and replaces one that dies."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgpack

import shmserve
from shmserve.errors import Unavailable
from shmserve.supervisor.host.run_directory import RunDirectory
from shmserve.supervisor.processes.table import Child, ProcessTable
from shmserve.supervisor.processes.zygote import encode_request

logger = logging.getLogger(__name__)

_MOST_FAILED_STARTS = 3
_MOST_REQUESTS = 64  # at a zygote: a socket that is full takes no more


def _no_process(number: int | None) -> Unavailable:
    return Unavailable(f"no process can be started: {os.strerror(number or 0)}")


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@dataclass(eq=False)
class Zygote:
    """The supervisor's end of a zygote; it is started again when it dies (its children live on)."""

    _table: ProcessTable
    _run_dir: RunDirectory
    _title: str
    _modules: Sequence[str]
    _environment: Mapping[str, str]

    def __post_init__(self) -> None:
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[int]] = {}
        self._room = asyncio.Semaphore(_MOST_REQUESTS)
        self._link: socket.socket | None = None
        self._child: Child | None = None
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._stopping = False
        self._failed_starts = 0

    def start(self) -> None:
        """Start the process; `spawn` waits until it has imported what it preloads.

        Raises Unavailable when the host has no room for one process more.
        """
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                try:
                    pid = self._process(theirs)
                except OSError:
                    ours.close()
                    raise
        except OSError as error:
            raise _no_process(error.errno) from None
        ours.setblocking(False)
        self._link = ours
        self._child = self._table.adopt(pid, self._title)
        self._child.exited.add_done_callback(self._died)
        self._loop.add_reader(ours.fileno(), self._read)

    def _process(self, theirs: socket.socket) -> int:
        root = str(Path(shmserve.__file__).resolve().parent.parent)
        boot = (
            f"import sys; sys.path.append({root!r}); "
            "from shmserve.supervisor.processes.zygote import main; sys.exit(main(sys.argv[1:]))"
        )
        os.set_inheritable(theirs.fileno(), True)
        os.set_inheritable(self._run_dir.lock_fd, True)
        try:
            # -P: the current folder is not a place to import from; it may hold a `workers`.
            return os.posix_spawn(
                sys.executable,
                [
                    *(sys.executable, "-P", "-c", boot),
                    *(str(theirs.fileno()), str(self._run_dir.lock_fd), str(os.getpid())),
                    *(str(self._run_dir.path), self._title),
                    *self._modules,
                ],
                self._environment,
                file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)],
                # Until it ignores them: Ctrl-C is for us.
                setsigmask=[signal.SIGINT, signal.SIGTERM],
            )
        finally:
            os.set_inheritable(self._run_dir.lock_fd, False)

    def _read(self) -> None:
        assert self._link is not None
        while True:
            try:
                data = self._link.recv(4096)
            except (BlockingIOError, ConnectionError):
                return
            if not data:
                return
            number, pid = msgpack.unpackb(data)
            if number == 0:
                if not self._ready.done():
                    self._ready.set_result(None)
                continue
            waiter = self._waiting.pop(number, None)
            if waiter is None or waiter.done():
                if pid > 0:  # whoever asked for it has been cancelled: nobody else knows of it
                    _kill(pid)
            elif pid > 0:
                waiter.set_result(pid)
            else:
                waiter.set_exception(_no_process(-pid))

    def _died(self, exited: asyncio.Future[str]) -> None:
        assert self._link is not None
        self._read()
        self._loop.remove_reader(self._link.fileno())
        self._link.close()
        if self._stopping:
            return
        logger.error("%s ended (%s)", self._title, exited.result())
        if self._ready.done():
            self._ready = self._loop.create_future()
            self._failed_starts = 0
        else:
            self._failed_starts += 1
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_result(0)
        self._waiting.clear()
        if self._failed_starts == _MOST_FAILED_STARTS:  # a broken installation
            self._ready.set_exception(Unavailable(f"the {self._title} process cannot start"))
            self._ready.exception()  # retrieved, also when nobody spawns
            return
        self._loop.call_later(0.2, self._start_again)

    def _start_again(self) -> None:
        if self._stopping:
            return
        try:
            self.start()
        except Unavailable as error:
            logger.error("%s: %s", self._title, error.message)
            self._loop.call_later(1.0, self._start_again)

    async def spawn(self, title: str, entry: str, start: bytes, fds: Sequence[int] = ()) -> Child:
        """Fork a process that runs `entry` ("module:function") with `start`, an encoded start
        record, and the numbers that `fds` have there. Its pid is none that others may remember.

        When the zygote dies meanwhile, the next one does it. Raises Unavailable when there is none,
        and when the host has no room for one process more.
        """
        while not self._stopping:
            await asyncio.shield(self._ready)
            zygote = self._child
            assert zygote is not None
            with self._table.spawning():
                pid = await self._forked(entry, start, fds)
                if pid and not self._table.remembers(pid):
                    return self._table.adopt(pid, title)
            if pid:
                _kill(pid)
                continue
            await zygote.gone()
            await asyncio.sleep(0)  # `_died` runs first
        raise Unavailable("the server is stopping")

    async def _forked(self, entry: str, start: bytes, fds: Sequence[int]) -> int:
        """The pid of a new process; 0 when the zygote has ended, noticed or not."""
        async with self._room:
            number = next(self._numbers)
            waiter: asyncio.Future[int] = self._loop.create_future()
            self._waiting[number] = waiter
            try:
                self._request(encode_request(number, entry, start), fds)
            except ConnectionError:
                del self._waiting[number]
                return 0
            except OSError as error:
                del self._waiting[number]
                raise _no_process(error.errno) from None
            return await waiter

    def _request(self, memory: int, fds: Sequence[int]) -> None:
        assert self._link is not None
        try:
            socket.send_fds(self._link, [b"fork"], [memory, *fds])
        finally:
            os.close(memory)

    def stop(self) -> None:
        """Let it end: it removes the run directory when its link closes."""
        self._stopping = True
        if self._link is not None and self._child is not None and self._child.alive:
            self._loop.remove_reader(self._link.fileno())
            self._link.shutdown(socket.SHUT_RDWR)
