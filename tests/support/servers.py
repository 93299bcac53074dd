"""A real server for a test, with its own ports and run directory."""

from __future__ import annotations

import contextlib
import http.client
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests.support import watchdog
from tests.support.gates import Gate
from tests.support.process_table import descendants, table
from tests.support.waiting import DEADLINE_S, until
from tests.support.wire.raw_http import Http

ROOT = Path(__file__).resolve().parents[2]
_STOP_S = 40.0
_TITLE = "shmserve: "
_GONE_TITLE = "(gone)"

# The running servers: the leak guard and the report of a failed test use them.
RUNNING_SERVERS: list[Server] = []


class Server:
    """A server of a repository.

    `folder` is a short, private path for its run directory, log and gate. Without `grpc` it serves
    only HTTP, which starts faster. Without `gpu` it sees no GPU, so that tests behave alike on
    every host.
    """

    def __init__(
        self,
        repositories: Sequence[Path | str],
        flags: Sequence[str] = (),
        *,
        environment: Mapping[str, str] | None = None,
        run_dir: Path | None = None,
        ports: tuple[int, int] | None = None,
        prefix: Sequence[str] = (),
        program: Sequence[str | Path] = (sys.executable, "-m", "shmserve", "serve"),
        grpc: bool = False,
        gpu: bool = False,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="st-"))
        self.run_dir = run_dir or self.folder / "run"
        self.log_path = self.folder / "log"
        self._held = hold_ports(3)
        port_numbers = [port_of(sock) for sock in self._held]
        self.http_port, self.metrics_port = ports or port_numbers[:2]
        self.grpc_port = port_numbers[2] if grpc else 0
        self.gate = Gate(self.folder / "gate")
        # Each server has its own gate and its own folder for temporary files.
        self.environment = {
            **os.environ,
            "GATE": str(self.gate.path),
            "TMPDIR": str(self.folder),
            **({} if gpu else {"CUDA_VISIBLE_DEVICES": ""}),
            **(environment or {}),
        }
        self.command = [
            *prefix,
            *map(str, program),
            *(f"--model-repository={repository}" for repository in repositories),
            *("--http-address=127.0.0.1", f"--http-port={self.http_port}"),
            *("--metrics-address=127.0.0.1", f"--metrics-port={self.metrics_port}"),
            # GRPC is off by default, which saves a process.
            *(
                ("--grpc-address=127.0.0.1", f"--grpc-port={self.grpc_port}")
                if grpc
                else ("--allow-grpc=false",)
            ),
            f"--run-dir={self.run_dir}",
            *flags,
        ]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                cwd=ROOT,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        watchdog.register(self.pid, str(self.folder))
        RUNNING_SERVERS.append(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def url(self) -> str:
        return f"127.0.0.1:{self.http_port}"

    @property
    def grpc_url(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    @contextlib.contextmanager
    def http(self, timeout_s: float = 30.0) -> Iterator[Http]:
        with contextlib.closing(Http(self.http_port, timeout_s)) as http:
            yield http

    def load(self, *models: str) -> None:
        with self.http() as http:
            for model in models:
                http.load(model).ok()

    def unload(self, model: str) -> None:
        with self.http() as http:
            http.unload(model).ok()

    # --- waiting ---

    def wait_ready(self, path: str = "/v2/health/ready", within_s: float = DEADLINE_S) -> Server:
        """Wait until `path` returns 200; raise AssertionError with the log otherwise."""
        deadline = time.monotonic() + within_s
        while not self.answers(path):
            if self.wait_exit(0.02) is not None:
                raise AssertionError(
                    f"the server ended with {self.process.returncode}:\n{self.log()}"
                )
            if time.monotonic() > deadline:
                raise AssertionError(f"the server was not ready within {within_s} s:\n{self.log()}")
        return self

    def answers(self, path: str, status: int = 200) -> bool:
        try:
            with self.http(timeout_s=5) as http:
                return http.get(path).status == status
        except (OSError, http_client_error):
            return False

    def wait_listening(self) -> None:
        """Wait until a process accepts connections on gRPC's port."""

        def accepts_connections() -> bool:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self.grpc_port)).close()
                return True
            return False

        until(f"gRPC listens:\n{self.log()}", accepts_connections)

    def wait_named(self) -> None:
        """Wait until each process has its own title, by which the leak guard identifies it."""
        # A process forked by a zygote has the zygote's title for a moment.
        own_titles = [
            prefix + title
            for prefix in ("", "spare ")
            for title in ("front zygote", "worker zygote")
        ]

        def have_names() -> bool:
            titles = self.titles()
            return all(titles[title] == 1 for title in own_titles)

        until(f"its processes are named:\n{self.log()}", have_names)

    def wait_exit(self, within_s: float) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(within_s)
        return None

    def wait_log(self, text: str, after: int = 0) -> None:
        """Wait until the log has a text after its first `after` characters."""
        until(f"the log says {text!r}:\n{self.log()}", lambda: text in self.log()[after:])

    # --- inspection ---

    def tree(self) -> list[psutil.Process]:
        return tree(self.pid)

    def titles(self) -> Counter[str]:
        """Return the number of processes by title, without the common prefix."""
        return Counter(map(title, self.tree()))

    def find(self, start: str) -> list[psutil.Process]:
        """Return the processes whose title, without the common prefix, starts with `start`."""
        return [process for process in self.tree() if title(process).startswith(start)]

    def find_one(self, start: str) -> psutil.Process:
        (process,) = self.find(start)
        return process

    def metric(self, name: str, **labels: str) -> float:
        return sum(value for found, value in self.samples(name) if labels.items() <= found.items())

    def samples(self, name: str) -> list[tuple[dict[str, str], float]]:
        return [
            (sample.labels, sample.value)
            for family in text_string_to_metric_families(self.metrics())
            for sample in family.samples
            if sample.name in (name, f"{name}_total")
        ]

    def metrics(self) -> str:
        with contextlib.closing(Http(self.metrics_port)) as http:
            return http.get("/metrics").ok().body.decode()

    def wait_pending(self, model: str, count: int) -> None:
        until(
            f"{count} requests of {model} are pending",
            lambda: self.metric("nv_inference_pending_request_count", model=model) == count,
        )

    # --- ending ---

    def stop(self, within_s: float = _STOP_S) -> None:
        """Stop the server by SIGTERM; check its status and what it leaves; remove its folder."""
        members = self.tree()
        try:
            if self.process.poll() is None:
                self.gate.close()
                self.process.terminate()
                status = self.wait_exit(within_s)
                assert status == 0, f"exit status {status} after SIGTERM:\n{self.log()[-6000:]}"
            self.assert_exited(members)
        finally:
            self.discard(members)

    def assert_exited(self, members: Sequence[psutil.Process], within_s: float = 3.0) -> None:
        _, alive = psutil.wait_procs(members, timeout=within_s)
        alive = list(filter(is_running, alive))
        assert not alive, f"left behind: {list(map(title, alive))}\n{self.log()[-6000:]}"
        until("the run directory is gone", lambda: not self.run_dir.exists(), within_s)
        with open("/proc/net/unix") as table:
            assert str(self.run_dir) not in table.read()
        pids = (
            os.listdir(self.folder) if self.folder.exists() else []
        )  # the folder is missing if the server was stopped before
        leftovers = [n for n in pids if n.startswith((".ses", "torchinductor"))]
        assert not leftovers, f"left behind in $TMPDIR: {leftovers}"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def discard(self, members: Sequence[psutil.Process] = ()) -> None:
        """End remaining processes and unregister the server, after a test has checked its end."""
        self.gate.close()
        for process in {*members, *self.tree()}:
            # Python's resource trackers exit after their programs, whose shared memory they remove.
            if "resource_tracker" not in title(process):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.wait()
        watchdog.unregister(self.pid)
        for port_socket in self._held:
            port_socket.close()
        if self in RUNNING_SERVERS:
            RUNNING_SERVERS.remove(self)
        shutil.rmtree(self.folder, ignore_errors=True)


http_client_error = http.client.HTTPException


def without_short_lived(titles: Counter[str]) -> Counter[str]:
    """Return the counts without zombies and just forked processes without a title."""
    return Counter(
        {
            title: 1 if title.endswith("zygote") else count
            for title, count in titles.items()
            if title != _GONE_TITLE
        }
    )


def tree(pid: int) -> list[psutil.Process]:
    members = []
    for member_pid in (pid, *(entry.pid for entry in descendants(pid, table()))):
        with contextlib.suppress(psutil.NoSuchProcess):
            members.append(psutil.Process(member_pid))
    return members


def title(process: psutil.Process) -> str:
    """Return the title of a process in `ps`, without the common prefix."""
    with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        return _short_title(" ".join(process.cmdline()))
    return _GONE_TITLE


def title_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        # The command line of a zombie is empty.
        return (
            _short_title(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")) or _GONE_TITLE
        )
    return _GONE_TITLE


def _short_title(line: str) -> str:
    return line.removeprefix(_TITLE).strip()


def hold_ports(count: int) -> list[socket.socket]:
    """Return sockets that reserve one port each until they are closed.

    The kernel assigns a reserved port to no other socket, but a server may still listen there
    explicitly.
    """
    port_sockets = [socket.socket() for _ in range(count)]
    for port_socket in port_sockets:
        port_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port_socket.bind(("127.0.0.1", 0))
    return port_sockets


def refuses_connections(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except ConnectionError as error:  # a connection is reset if its listener is closed meanwhile
        return isinstance(error, ConnectionRefusedError)
    return False


def port_of(port_socket: socket.socket) -> int:
    return int(port_socket.getsockname()[1])


def unload_all(server: Server, repository: Path) -> None:
    """Unload every model of a server, empty its repository, and wait for its processes."""
    with server.http() as http:
        for model in http.post("/v2/repository/index").ok().json():
            http.unload(model["name"]).ok()
    for folder in repository.iterdir():
        shutil.rmtree(folder)
    hosts = ("scheduler", "ensemble")  # the roles of a model's processes that end last
    until("all have ended", lambda: not any(map(server.find, hosts)))


@contextlib.contextmanager
def running(
    repository: Path | Sequence[Path],
    *flags: str,
    environment: Mapping[str, str] | None = None,
    grpc: bool = False,
    gpu: bool = False,
    **options: Any,
) -> Iterator[Server]:
    """Yield a ready server, with `grpc` and `gpu` if asked, that is stopped at the end."""
    repositories = [repository] if isinstance(repository, Path) else repository
    server = Server(repositories, flags, environment=environment, grpc=grpc, gpu=gpu, **options)
    try:
        server.wait_ready()
        if grpc:
            server.wait_listening()
        server.wait_named()
        yield server
    except BaseException:
        # The test has failed already. Only the end of the server matters, not how it ends.
        server.discard()
        raise
    else:
        server.stop()


# The type of `running` as a fixture: the server lives as long as the fixture.
Start = Callable[..., Server]


def write_tokens(path: Path, *lines: str) -> Path:
    """Write a file of tokens that only its owner reads, and return its path."""
    path.write_text("".join(f"{line}\n" for line in lines))
    path.chmod(0o600)
    return path


def run_command(
    *arguments: str, timeout_s: float = 60.0, **options: object
) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "shmserve", *arguments, timeout_s=timeout_s, **options)


def run_python(
    *arguments: str | Path, timeout_s: float = 60.0, **options: object
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments in the project's root; return its output."""
    fields: dict[str, Any] = {"cwd": ROOT, "stdin": subprocess.DEVNULL, "check": False, **options}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, **fields)


@contextlib.contextmanager
def python_program(code: str, *arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
    """Run a program with pipes as its input and its output; kill it at the end."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as program:
        try:
            yield program
        finally:
            program.kill()


@contextlib.contextmanager
def reply_once(reply: bytes) -> Iterator[int]:
    """Answer the first connection to a port with these bytes; yield the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        listener.settimeout(10)

        def respond() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(reply)
                connection.shutdown(socket.SHUT_WR)
                connection.recv(1 << 16)

        response_future = pool.submit(respond)
        yield int(listener.getsockname()[1])
        response_future.result()


def is_running(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def kill_together(members: Sequence[psutil.Process]) -> None:
    """Kill all processes of a `tree` at once: each is stopped before the first is killed."""
    for process in members:
        process.suspend()
    for process in reversed(members):
        process.kill()


def suspend(process: psutil.Process) -> None:
    os.kill(process.pid, signal.SIGSTOP)


def wait_exited(process: psutil.Process, within_s: float) -> bool:
    """Return whether a process (not necessarily a child) exits within `within_s` seconds."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], within_s)[0])
    finally:
        os.close(descriptor)
