"""A process with an entry point's imports done, from which gateways or workers of tests are forked.

The imports of a gateway take a new interpreter most of a second, and those of a worker two; one
that is forked takes milliseconds: in the server itself zygotes do the same. One for each entry
point runs beside each pytest process that asks for one.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import msgpack

ROOT = Path(__file__).resolve().parents[2]
GATEWAY = "shmserve.gateway.http.main:run"
GRPC = "shmserve.gateway.grpc.main:run"
WORKER = "shmserve.workers.main:run"
_MAX_MESSAGE_SIZE = 1 << 16
_MAX_FDS = 16


class Forked:
    """A process that was forked: as much of `subprocess.Popen` as tests use."""

    def __init__(self, forker: Forker, pid: int) -> None:
        self.pid = pid
        self._forker = forker
        self._pidfd = os.pidfd_open(pid)
        self._status: int | None = None

    def send_signal(self, number: int) -> None:
        if self._status is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout_s: float | None = None) -> int:
        """Return the exit status when the process has exited; raise TimeoutError after a while."""
        if self._status is None:
            if not select.select([self._pidfd], [], [], timeout_s)[0]:
                raise TimeoutError(f"process {self.pid} has not ended in {timeout_s} s")
            self._status = self._forker.request(["reap", self.pid])
            os.close(self._pidfd)
        return self._status


class Forker:
    """Asks the process, which ends when its socket does."""

    def __init__(self, entry: str) -> None:
        self._link, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        strict = ["-W", "error"] if entry == GATEWAY else []  # torch warns when it is imported
        command = [
            sys.executable, *strict, "-m", "tests.rigs.forker", str(child_end.fileno()), entry,
        ]  # fmt: skip
        self._process = subprocess.Popen(command, cwd=ROOT, pass_fds=[child_end.fileno()])
        child_end.close()

    def close(self) -> None:
        self._link.close()
        self._process.wait()

    def fork(self, start: bytes, stderr: int, fds: Sequence[int]) -> Forked:
        """Fork a process that runs the entry point with an encoded start record and descriptors."""
        return Forked(self, self.request(["fork", start], [stderr, *fds]))

    def request(self, request: list[object], fds: Sequence[int] = ()) -> int:
        socket.send_fds(self._link, [msgpack.packb(request)], fds)
        response = self._link.recv(_MAX_MESSAGE_SIZE)
        assert response, "the process that forks others has ended"
        return int(msgpack.unpackb(response))


@functools.cache
def forker(entry: str = GATEWAY) -> Forker:
    """Return this process's forker for an entry point, "module:function"."""
    new_forker = Forker(entry)
    atexit.register(new_forker.close)
    return new_forker


def main(link_fd: int, entry: str) -> None:
    """Import the entry point, and fork processes until the socket ends."""
    if entry == WORKER:
        with contextlib.suppress(ModuleNotFoundError):  # for models that need it, as a zygote
            importlib.import_module("torch")
    module, _, function = entry.partition(":")
    run = getattr(importlib.import_module(module), function)
    link = socket.socket(fileno=link_fd)
    running_pids: set[int] = set()
    while True:
        data, fds, _, _ = socket.recv_fds(link, _MAX_MESSAGE_SIZE, _MAX_FDS)
        if not data:
            for pid in running_pids:
                os.kill(pid, signal.SIGKILL)
            return
        match msgpack.unpackb(data):
            case ["fork", bytes(start)]:
                pid = os.fork()
                if not pid:
                    link.close()
                    os.dup2(fds[0], sys.stderr.fileno())
                    _run(functools.partial(run, start, *fds[1:]))
                running_pids.add(pid)
                response = pid
            case ["reap", int(pid)]:
                response = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                running_pids.remove(pid)
        for fd in fds:
            os.close(fd)
        link.send(msgpack.packb(response))


def _run(run: functools.partial[None]) -> None:
    status = 1
    try:
        run()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
