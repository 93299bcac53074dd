"""Checks of the access to a server: run directory, ports, model repositories, and peer processes.

A peer is a process that uses the server's sockets and shares memory with it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import stat
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from shmserve.common.host import cuda_devices
from shmserve.common.peers import credentials
from shmserve.config.server import ServerConfig
from shmserve.errors import InvalidArgument
from shmserve.ipc import endpoints
from shmserve.supervisor.checks import Verdict, megabytes, ok, warning, wrong
from shmserve.supervisor.checks.memory import filesystem_space
from shmserve.supervisor.host.listeners import listen, port_users
from shmserve.supervisor.host.run_directory import unsafe_reason

_MIN_FREE_BYTES = 16 * 2**20


def configured_run_directory(config: ServerConfig) -> Path:
    """Return the run directory of a server with this configuration."""
    path = config.run_dir or endpoints.default_run_directory(os.environ)
    return Path(os.path.abspath(path))


def server_pid(run_dir: Path) -> int:
    """Return the pid of the server that uses a run directory, or 0 if none can be reached."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
        link.connect(os.fspath(endpoints.listener(run_dir)))
        return credentials(link)[0]
    return 0


class RunDirectoryFacts(NamedTuple):
    """The facts about a run directory.

    `problem` is the reason why it cannot be used, or "". `server_pid` is 0 if no server uses it.
    """

    path: Path
    problem: str = ""
    server_pid: int = 0
    free_bytes: int = 0


def gather_run_directory(config: ServerConfig) -> RunDirectoryFacts:
    """Collect the facts about the configured run directory, which may not exist yet."""
    path, problem = configured_run_directory(config), ""
    with contextlib.suppress(FileNotFoundError):
        problem = unsafe_reason(
            path, path.lstat(), group_bits=0o010 if config.shm.group >= 0 else 0
        )
    parent = next(folder for folder in (path, *path.parents) if folder.exists())
    if parent != path and not os.access(parent, os.W_OK | os.X_OK):
        problem = f"'{path}' cannot be created: this user may not write to '{parent}'"
    return RunDirectoryFacts(path, problem, server_pid(path), filesystem_space(parent)[1])


def judge_run_directory(facts: RunDirectoryFacts) -> Verdict:
    """Return WRONG if no server can use the run directory, and WARNING if its disk is full."""
    if facts.problem:
        return wrong(facts.problem, "correct this folder, or choose another --run-dir")
    if facts.server_pid:
        return ok(f"{facts.path}, in use by a server (pid {facts.server_pid})")
    if facts.free_bytes < _MIN_FREE_BYTES:
        finding = f"{facts.path}: only {megabytes(facts.free_bytes)} are free"
        return warning(finding, "free space in its file system, or choose another --run-dir")
    return ok(str(facts.path))


def tcp_listeners(config: ServerConfig) -> Iterator[tuple[str, str, int, str]]:
    """Yield (protocol, address, port, flag that sets the address) of each TCP listener."""
    if config.http.allow:
        yield "http", config.http.address, config.http.port, "--http-address"
    if config.allow_metrics:
        yield "metrics", config.metrics_address, config.metrics_port, "--metrics-address"
    if config.grpc is not None:
        yield "grpc", config.grpc.address, config.grpc.port, "--grpc-address"


class PortFacts(NamedTuple):
    """The addresses of a server's listeners: `free_endpoints` can be opened, the others not.

    `refused_endpoints` contains (address, error, pids of the processes that use the port) of each
    address that cannot be opened. `server_pid` is the server that uses the run directory, or 0.
    """

    free_endpoints: tuple[str, ...]
    refused_endpoints: tuple[tuple[str, str, tuple[int, ...]], ...] = ()  # with errors and pids
    server_pid: int = 0


def gather_ports(config: ServerConfig) -> PortFacts:
    """Collect the facts about the listeners' addresses, by opening each for a moment."""
    ports, failures = [], []
    for _, address, port, flag in tcp_listeners(config):
        endpoint = f"{address}:{port}"
        try:
            for sock in listen(address, port, flag, config.allows_remote):
                sock.close()
            ports.append(endpoint)
        except InvalidArgument as error:
            pids = tuple(pid for pid, _ in port_users(port))
            failures.append((endpoint, error.message, pids))
    return PortFacts(tuple(ports), tuple(failures), server_pid(configured_run_directory(config)))


def judge_ports(ports: PortFacts) -> Verdict:
    """Return WRONG if a port cannot be opened, unless the running server uses this port."""
    pid = ports.server_pid
    problems = [error for _, error, pids in ports.refused_endpoints if not pid or pid not in pids]
    if problems:
        fix = "stop the process that listens there, or choose another port"
        return wrong("; ".join(problems), fix)
    used_endpoints = [endpoint for endpoint, *_ in ports.refused_endpoints]
    states = {
        "free": ports.free_endpoints,
        f"in use by the running server (pid {pid})": used_endpoints,
    }
    texts = [f"{', '.join(endpoints)}: {state}" for state, endpoints in states.items() if endpoints]
    return ok("; ".join(texts) or "all listeners are disabled")


def gather_repositories(config: ServerConfig) -> list[tuple[str, int, bool]]:
    """Return (path, number of folders or -1 if unreadable, world-writable) of each repository."""
    repositories = []
    for path in config.model_repositories:
        folder_count, mode = -1, 0
        with contextlib.suppress(OSError):
            folder_count = sum(entry.is_dir() for entry in path.iterdir())
            mode = path.stat().st_mode
        repositories.append((str(path), folder_count, bool(mode & stat.S_IWOTH)))
    return repositories


def judge_repositories(repositories: list[tuple[str, int, bool]]) -> Verdict:
    """Return the verdict on the repositories.

    They must be readable, and only the owner may write to them, because models are code.
    """
    for path, folder_count, is_world_writable in sorted(repositories, key=itemgetter(1)):
        if folder_count < 0:
            return wrong(f"{path} cannot be read", f"run chmod -R u=rX {shlex.quote(path)}")
        if is_world_writable:
            text = f"every user can write to {path}, and the code of its models runs as this user"
            return warning(text, f"run chmod o-w {shlex.quote(path)}")
        if not folder_count:
            return warning(f"{path} contains no model", "add a folder for each model")
    summary = ", ".join(f"{path}: {count} folders" for path, count, _ in repositories)
    return ok(summary or "no --model-repository was given")


class PeerFacts(NamedTuple):
    """A process that may share memory with the server.

    `identities` are the device and inode of its /dev/shm, of the server's run directory (None:
    missing) and of its namespaces, by name. `visible_devices` is its CUDA_VISIBLE_DEVICES.
    """

    uid: int
    groups: frozenset[int]
    identities: dict[str, tuple[int, int] | None]  # (device, inode)
    visible_devices: str | None = None


class ServerFacts(NamedTuple):
    """The facts about the running server, or about this process if no server runs.

    `is_running` is whether a server runs. `group` is its --shm-group (-1: none). `device_count` is
    the number of its CUDA devices.
    """

    process: PeerFacts
    is_running: bool
    group: int  # --shm-group; -1: none
    device_count: int


def gather_peer(config: ServerConfig, pid: int) -> tuple[ServerFacts, PeerFacts]:
    """Collect the facts about the server and process `pid`.

    Raises:
        InvalidArgument: There is no such process, or this user may not inspect it.
    """
    run_dir = configured_run_directory(config)
    running_pid = server_pid(run_dir)
    device_count = cuda_devices(config.visible_devices)
    server_process = _gather_process(running_pid or os.getpid(), run_dir)
    facts = ServerFacts(server_process, bool(running_pid), config.shm.group, device_count)
    return facts, _gather_process(pid, run_dir)


def _gather_process(pid: int, run_dir: Path) -> PeerFacts:
    folder = Path(f"/proc/{pid}")
    try:
        lines = (line.partition(":") for line in (folder / "status").read_text().splitlines())
        status = {name: values.split() for name, _, values in lines}
        variables = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
        environment = dict(text.split("=", 1) for text in variables if "=" in text)
        paths = {"/dev/shm": "root/dev/shm", "run directory": f"root{run_dir}"}
        paths |= {name: f"ns/{name}" for name in ("user", "net", "ipc", "pid")}
        return PeerFacts(
            int(status["Uid"][1]),
            frozenset(map(int, (status["Gid"][1], *status["Groups"]))),
            {name: _file_identity(folder / path) for name, path in paths.items()},
            environment.get("CUDA_VISIBLE_DEVICES"),
        )
    except PermissionError:
        raise InvalidArgument(
            f"--peer: uid {os.geteuid()} may not inspect process {pid}; run this command as "
            "root or as the user of that process"
        ) from None
    except (FileNotFoundError, ProcessLookupError):
        raise InvalidArgument(f"--peer: there is no process {pid}") from None


def _file_identity(path: Path) -> tuple[int, int] | None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        status = path.stat()
        return status.st_dev, status.st_ino
    return None


def judge_peer(server: ServerFacts, peer: PeerFacts) -> Iterator[tuple[str, Verdict]]:
    """Yield the name and verdict of each check that compares a peer with the server."""
    server_identities = server.process.identities.items()
    different_kinds = {name for name, _ in peer.identities.items() - server_identities}
    yield "peer's /dev/shm", _judge_peer_shm(different_kinds)
    yield "peer's user", _judge_peer_user(server, peer, different_kinds)
    yield "peer's run dir", _judge_peer_run_directory(server, different_kinds)
    yield "peer's network", _judge_peer_network(different_kinds)
    yield "peer's devices", _judge_peer_devices(server, peer, different_kinds)


def _judge_peer_shm(different_kinds: set[str]) -> Verdict:
    if "/dev/shm" not in different_kinds:
        return ok("same as the server's: the server finds regions by their keys")
    return wrong(
        "different from the server's: the server cannot find regions by their keys",
        "use docker run --ipc=host or --ipc=container:SERVER, or one emptyDir for all containers "
        "of a pod, or shmserve.client, which shares memory without a name",
    )


def _judge_peer_user(server: ServerFacts, peer: PeerFacts, different_kinds: set[str]) -> Verdict:
    if "user" in different_kinds:
        return warning(
            "the client's user namespace differs from the server's, so the server sees other uids",
            "use docker run --userns=host",
        )
    if peer.uid == server.process.uid:
        return ok(f"uid {peer.uid}, same as the server's")
    text = f"uid {peer.uid}, and the server has uid {server.process.uid}"
    if server.process.uid == 0:
        return ok(f"{text}, which can open all objects")
    if server.group in peer.groups:
        return ok(f"{text}; it is in --shm-group, which must be able to read and write its objects")
    fix = "run both as one user, or set --shm-group"
    return wrong(f"{text}, which may not open its objects", fix)


def _judge_peer_run_directory(server: ServerFacts, different_kinds: set[str]) -> Verdict:
    if not server.is_running:
        return ok("no server is running; a server of this user is assumed")
    if "run directory" not in different_kinds:
        return ok("same as the server's: shmserve.client finds it")
    fix = "mount it (docker run --volume), and set SHMSERVE_RUN_DIR if its path differs"
    return warning("the server's run directory is not visible: shmserve.client cannot find it", fix)


def _judge_peer_network(different_kinds: set[str]) -> Verdict:
    if "net" not in different_kinds:
        return ok("same as the server's: 127.0.0.1 reaches it")
    fix = "use docker run --network=host, or --http-unix-socket and --grpc-unix-socket"
    return warning(
        "the client's network namespace differs from the server's: 127.0.0.1 does not reach the "
        "server, and other addresses do not accept shared memory",
        fix,
    )


def _judge_peer_devices(server: ServerFacts, peer: PeerFacts, different_kinds: set[str]) -> Verdict:
    if not server.device_count:
        return ok("the server has no CUDA device")
    if namespaces := " and ".join(sorted(different_kinds & {"ipc", "pid"})):
        fix = "run both with docker run --ipc=host --pid=host"
        text = f"the client's {namespaces} namespace differs: CUDA handles cannot be opened"
        return warning(text, fix)
    if peer.visible_devices != server.process.visible_devices:
        devices = server.process.visible_devices
        finding = f"its CUDA_VISIBLE_DEVICES is {peer.visible_devices}, the server's {devices}"
        fix = (
            "use the same value for both, or send the device's UUID with a handle, as "
            "shmserve.client does"
        )
        return warning(f"{finding}: cuda:0 may be a different device for each process", fix)
    return ok("same as the server's")
