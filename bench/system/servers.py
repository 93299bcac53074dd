"""The servers under test, each of which runs in its own session with its own ports."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from bench.load.client import Client
from bench.system import processes
from tests.support import watchdog

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bench.system.peer import TritonFiles

BENCH = Path(__file__).resolve().parents[1]
_READY_S = 300.0  # long enough to load hundreds of models
_STOP_S = 45.0
_ORPHANS_S = 2.0
_POLL_MS = 5


class ServerFailed(Exception):
    """The server did not start, or exited; the text has the end of its log."""


@dataclass(frozen=True)
class Ports:
    """Three free ports on the loopback interface."""

    http: int
    grpc: int
    metrics: int

    def flags(self) -> list[str]:
        """Return the command-line flags of both products for these ports."""
        listeners = (("http", self.http), ("grpc", self.grpc), ("metrics", self.metrics))
        addresses = [f"--{listener}-address=127.0.0.1" for listener, _ in listeners]
        return addresses + [f"--{listener}-port={port}" for listener, port in listeners]


class Product(Protocol):
    """A server program to start; subclasses have the differences between shmserve and Triton."""

    @property
    def name(self) -> str:
        """Return the product's name in the report."""

    def command(self, repository: Path, ports: Ports, scratch: Path) -> list[str]:
        """Return the command line that serves `repository`; `scratch` is a private folder."""

    def environment(self) -> dict[str, str]:
        """Return the environment of the server's processes."""


@dataclass(frozen=True)
class Shmserve:
    """This checkout's server, in this interpreter."""

    name: str = "shmserve"

    def command(self, repository: Path, ports: Ports, scratch: Path) -> list[str]:
        """Return `python -m shmserve serve ...`, with a run directory in `scratch`."""
        flags = [f"--model-repository={repository}", f"--run-dir={scratch / 'run'}"]
        return [sys.executable, "-m", "shmserve", "serve", *flags, *ports.flags()]

    def environment(self) -> dict[str, str]:
        """Return this process's environment."""
        return dict(os.environ)


@dataclass(frozen=True)
class Triton:
    """A real Triton Inference Server with its Python backend."""

    files: TritonFiles
    name: str = "triton"

    def command(self, repository: Path, ports: Ports, scratch: Path) -> list[str]:
        """Return `tritonserver` with its defaults, on the same ports."""
        flags = [f"--model-repository={repository}", f"--backend-directory={self.files.backends}"]
        return [str(self.files.binary), *flags, *ports.flags()]

    def environment(self) -> dict[str, str]:
        """Return the environment variables of the Triton installation."""
        return self.files.environment()


@dataclass
class Server:
    """A started server; `ready_s` is the time from its start to its first ready response."""

    product: Product
    process: subprocess.Popen[bytes]
    ports: Ports
    log: Path
    ready_s: float = 0.0

    @property
    def name(self) -> str:
        """Return the product's name."""
        return self.product.name

    @property
    def pid(self) -> int:
        """Return the pid of the root of the server's process tree, which the benchmark started."""
        return self.process.pid

    def address(self, listener: str) -> str:
        """Return HOST:PORT of the server's listener "http" or "grpc"."""
        return f"127.0.0.1:{self.ports.grpc if listener == 'grpc' else self.ports.http}"

    @property
    def run_dir(self) -> Path:
        """Return the run directory of a shmserve server."""
        return self.log.parent / "run"

    def client(self) -> Client:
        """Return a new connection to the server."""
        return Client(self.ports.http)


@contextlib.contextmanager
def running(
    product: Product, models: Sequence[Path], flags: Sequence[str] = (), *, notes: list[str]
) -> Iterator[Server]:
    """Start a server with these model folders, and yield it when it is ready.

    Files that the server leaves behind are listed in `notes`. Raises `ServerFailed` if it does not
    become ready.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        scratch = Path(folder)
        repository = scratch / "models"
        for model in models:
            shutil.copytree(model, repository / model.name, ignore=_compiled)
        ports = Ports(*free_ports(3))
        command = [*product.command(repository, ports, scratch), *flags]
        start_s = time.perf_counter()
        with (scratch / "log").open("wb") as log:
            process = subprocess.Popen(
                command,
                env=product.environment(),
                cwd=BENCH.parent,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        watchdog.register(process.pid, folder)
        server = Server(product, process, ports, scratch / "log")
        try:
            _wait_ready(server, start_s)
            yield server
        finally:
            _stop(server, notes)
            watchdog.unregister(process.pid)


_compiled = shutil.ignore_patterns("__pycache__")


def free_ports(count: int) -> list[int]:
    """Return TCP ports of the loopback interface that no process listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [int(sock.getsockname()[1]) for sock in sockets]


def stop_on_signal(number: int, frame: object) -> None:
    """Convert SIGTERM to an exception, so that the code that stops the servers runs."""
    raise SystemExit(128 + number)


def _wait_ready(server: Server, start_s: float) -> None:
    """Poll the server until it is ready, or until its process has exited."""
    with server.client() as client, _exit_poll(server.process) as exit_poll:
        while not client.is_ready():
            if exit_poll.poll(_POLL_MS):
                raise ServerFailed(f"{server.name} ended while starting: {_tail(server.log)}")
            if time.perf_counter() - start_s > _READY_S:
                raise ServerFailed(f"{server.name} not ready in {_READY_S} s: {_tail(server.log)}")
    server.ready_s = time.perf_counter() - start_s


@contextlib.contextmanager
def _exit_poll(process: subprocess.Popen[bytes]) -> Iterator[select.poll]:
    """Yield a poll object that becomes ready when the process exits."""
    descriptor = os.pidfd_open(process.pid)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        yield poll
    finally:
        os.close(descriptor)


def _stop(server: Server, notes: list[str]) -> None:
    """Stop the server by SIGTERM, later SIGKILL; record and remove files that it leaves behind."""
    members = processes.tree(server.pid)
    shm_paths = processes.shm_files(members)
    with _exit_poll(server.process) as exit_poll:
        server.process.terminate()
        if not exit_poll.poll(_STOP_S * 1000):
            notes.append(f"{server.name} did not stop within {_STOP_S:.0f} s of SIGTERM: killed")
            server.process.kill()
    server.process.wait()
    if not processes.wait_exited(members, _ORPHANS_S):
        survivors = processes.signal_all(members, signal.SIGKILL)
        notes.append(f"{server.name} left {len(survivors)} processes behind: killed")
    for path in shm_paths:
        if path.exists():
            notes.append(f"{server.name} left {path} behind: removed")
            path.unlink(missing_ok=True)


def _tail(log: Path, lines: int = 15) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
