"""Checks of another process: whether it can share memory with the server, and reach it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from shmserve.common.accelerators import cuda_devices
from shmserve.config.server import ServerConfig
from shmserve.errors import InvalidArgument
from shmserve.supervisor.checks.places import server_pid, wanted_run_directory
from shmserve.supervisor.checks.verdict import Verdict, ok, warning, wrong


class PeerFacts(NamedTuple):
    """A process: `sees` are the device and inode of its /dev/shm, its run directory of the server
    (None: none there) and its namespaces, by name; `visible` its CUDA_VISIBLE_DEVICES."""

    uid: int
    groups: frozenset[int]
    sees: dict[str, tuple[int, int] | None]
    visible: str | None = None


class ServerFacts(NamedTuple):
    """The server, or what stands for it where none `runs`; its --shm-group (-1: none), and the
    number of its CUDA devices."""

    process: PeerFacts
    runs: bool
    group: int
    devices: int


def gather(config: ServerConfig, pid: int) -> tuple[ServerFacts, PeerFacts]:
    """The facts; where no server runs this process stands for it.

    Raises InvalidArgument where there is no such process, or it may not be looked at.
    """
    run_dir = wanted_run_directory(config)
    server = server_pid(run_dir)
    devices = cuda_devices(config.visible_devices)
    ours = _process(server or os.getpid(), run_dir)
    return ServerFacts(ours, bool(server), config.shm.group, devices), _process(pid, run_dir)


def _process(pid: int, run_dir: Path) -> PeerFacts:
    folder = Path(f"/proc/{pid}")
    try:
        lines = (folder / "status").read_text().splitlines()
        status = {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}
        words = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
        environment = dict(word.split("=", 1) for word in words if "=" in word)
        paths = {"/dev/shm": "root/dev/shm", "run directory": f"root{run_dir}"}
        paths |= {kind: f"ns/{kind}" for kind in ("user", "net", "ipc", "pid")}
        return PeerFacts(
            int(status["Uid"][1]),
            frozenset(map(int, (status["Gid"][1], *status["Groups"]))),
            {name: _identity(folder / path) for name, path in paths.items()},
            environment.get("CUDA_VISIBLE_DEVICES"),
        )
    except PermissionError:
        found = f"--peer: uid {os.geteuid()} may not look at process {pid}: be root, or its user"
        raise InvalidArgument(found) from None
    except (FileNotFoundError, ProcessLookupError):
        raise InvalidArgument(f"--peer: there is no process {pid} here") from None


def _identity(path: Path) -> tuple[int, int] | None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        status = path.stat()
        return status.st_dev, status.st_ino
    return None


def judge(server: ServerFacts, peer: PeerFacts) -> Iterator[tuple[str, Verdict]]:
    """Every check's name and verdict (pure)."""
    ours = server.process
    apart = {name for name, seen in peer.sees.items() if seen != ours.sees[name]}
    yield "peer's /dev/shm", _shm(apart)
    yield "peer's user", _user(server, peer, apart)
    yield "peer's run dir", _run_directory(server, apart)
    yield "peer's network", _network(apart)
    yield "peer's devices", _devices(server, peer, apart)


def _shm(apart: set[str]) -> Verdict:
    if "/dev/shm" not in apart:
        return ok("the server's: regions are found by their keys")
    return wrong(
        "not the server's: regions are not found by their keys",
        "docker run --ipc=host or --ipc=container:SERVER, one emptyDir for all of a pod; or "
        "shmserve.client, which hands memory over without a name",
    )


def _user(server: ServerFacts, peer: PeerFacts, apart: set[str]) -> Verdict:
    if "user" in apart:
        return warning("in another user namespace: uids differ", "docker run --userns=host")
    if peer.uid == server.process.uid:
        return ok(f"uid {peer.uid}, as the server")
    found = f"uid {peer.uid}, the server is uid {server.process.uid}"
    if server.process.uid == 0:
        return ok(f"{found}, which may open its objects")
    if server.group in peer.groups:
        return ok(f"{found}; it is of --shm-group, which its objects must let read and write")
    return wrong(f"{found}, which may not open its objects", "one user for both, or --shm-group")


def _run_directory(server: ServerFacts, apart: set[str]) -> Verdict:
    if not server.runs:
        return ok("no server runs there; one would be started as this user")
    if "run directory" not in apart:
        return ok("the server's: shmserve.client finds it")
    fix = "docker run --volume, and SHMSERVE_RUN_DIR where it has another path"
    return warning("the server's is not there: shmserve.client does not find it", fix)


def _network(apart: set[str]) -> Verdict:
    if "net" not in apart:
        return ok("127.0.0.1 is the server's")
    fix = "docker run --network=host, or --http-unix-socket and --grpc-unix-socket"
    return warning("127.0.0.1 is another, and from elsewhere no memory is shared", fix)


def _devices(server: ServerFacts, peer: PeerFacts, apart: set[str]) -> Verdict:
    if not server.devices:
        return ok("the server has no CUDA device")
    if spaces := " and ".join(sorted(apart & {"ipc", "pid"})):
        fix = "docker run --ipc=host --pid=host for both"
        return warning(f"in another {spaces} namespace, so handles cannot be opened", fix)
    if peer.visible != server.process.visible:
        found = f"its CUDA_VISIBLE_DEVICES is {peer.visible}, the server's {server.process.visible}"
        fix = "the same for both, or a device's UUID with its handle, as shmserve.client sends"
        return warning(f"{found}: cuda:0 may be another device there", fix)
    return ok("the server's")
