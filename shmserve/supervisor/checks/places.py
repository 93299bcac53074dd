"""Checks of where a server is: its run directory, its ports, its model repositories."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from shmserve.common.access.peer_credentials import credentials
from shmserve.config.server import ServerConfig
from shmserve.errors import InvalidArgument
from shmserve.ipc import endpoints
from shmserve.supervisor.checks.memory import room
from shmserve.supervisor.checks.verdict import Verdict, megabytes, ok, warning, wrong
from shmserve.supervisor.host.listeners import listen, port_holders
from shmserve.supervisor.host.run_directory import objection

_LITTLE = 16 * 2**20


def wanted_run_directory(config: ServerConfig) -> Path:
    """Where a server with these settings would be."""
    wanted = config.run_dir or endpoints.usual_run_directory(os.environ)
    return Path(os.path.abspath(wanted))


def server_pid(run_dir: Path) -> int:
    """The supervisor of the server that runs there; 0: none that can be asked."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.connect(os.fspath(endpoints.listener(run_dir)))
        return credentials(door)[0]
    return 0


class RunPlace(NamedTuple):
    """A run directory: what stands against it, the pid of its server, the bytes that are free."""

    path: Path
    against: str = ""
    server: int = 0
    free: int = 0


def gather_run_directory(config: ServerConfig) -> RunPlace:
    """By the rules of a server's start."""
    path, against = wanted_run_directory(config), ""
    with contextlib.suppress(FileNotFoundError):
        against = objection(path, path.lstat(), through=0o010 if config.shm.group >= 0 else 0)
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    if there != path and not os.access(there, os.W_OK | os.X_OK):
        against = f"'{path}' cannot be made: this user may not write to '{there}'"
    return RunPlace(path, against, server_pid(path), room(there)[1])


def judge_run_directory(place: RunPlace) -> Verdict:
    """One server at a time has it."""
    if place.against:
        return wrong(place.against, "another --run-dir, or mend this one")
    if place.server:
        return ok(f"{place.path}, where a server runs (pid {place.server})")
    if place.free < _LITTLE:
        found = f"{place.path}, where {megabytes(place.free)} are free"
        return warning(found, "make room there, or --run-dir elsewhere")
    return ok(str(place.path))


def tcp_listeners(config: ServerConfig) -> Iterator[tuple[str, str, int, str]]:
    """(protocol, address, port, the address's flag) of each place where a server is to listen."""
    if config.http.allow:
        yield "http", config.http.address, config.http.port, "--http-address"
    if config.allow_metrics:
        yield "metrics", config.metrics_address, config.metrics_port, "--metrics-address"
    if config.grpc is not None:
        yield "grpc", config.grpc.address, config.grpc.port, "--grpc-address"


class WantedPorts(NamedTuple):
    """Where a server is to listen; of what it cannot have, why, and the pids of those that have it;
    and the pid of the server that has the run directory already."""

    wanted: tuple[str, ...]
    refused: tuple[tuple[str, tuple[int, ...]], ...] = ()
    server: int = 0


def gather_ports(config: ServerConfig) -> WantedPorts:
    """Listens at each, for a moment."""
    wanted, refused = [], []
    for _, address, port, flag in tcp_listeners(config):
        wanted.append(f"{address}:{port}")
        try:
            for sock in listen(address, port, flag, config.guarded):
                sock.close()
        except InvalidArgument as error:
            refused.append((error.message, tuple(pid for pid, _ in port_holders(port))))
    return WantedPorts(tuple(wanted), tuple(refused), server_pid(wanted_run_directory(config)))


def judge_ports(ports: WantedPorts) -> Verdict:
    """All of them, or no start."""
    lost = [text for text, pids in ports.refused if not ports.server or ports.server not in pids]
    if lost:
        return wrong("; ".join(lost), "end who listens there, or choose another port")
    who = f"of the server that runs (pid {ports.server})" if ports.refused else "free"
    return ok(f"{', '.join(ports.wanted)}: {who}" if ports.wanted else "none are wanted")


def gather_repositories(config: ServerConfig) -> list[tuple[str, int, bool]]:
    """(path, folders in it, whether everybody may write there) of each; -1: it cannot be read."""
    found = []
    for path in config.model_repositories:
        folders, mode = -1, 0
        with contextlib.suppress(OSError):
            folders = sum(entry.is_dir() for entry in os.scandir(path))
            mode = path.stat().st_mode
        found.append((str(path), folders, bool(mode & stat.S_IWOTH)))
    return found


def judge_repositories(repositories: list[tuple[str, int, bool]]) -> Verdict:
    """Models are code, which runs as the server's user."""
    for path, folders, open_to_all in sorted(repositories, key=itemgetter(1)):
        if folders < 0:
            return wrong(f"{path} cannot be read", f"chmod -R u=rX {path}")
        if open_to_all:
            found = f"everybody may write to {path}, and what is there runs as this user"
            return warning(found, f"chmod o-w {path}")
        if not folders:
            return warning(f"{path} has no model in it", "a folder for each model")
    shown = ", ".join(f"{path}: {folders} folders" for path, folders, _ in repositories)
    return ok(shown or "none were named (--model-repository)")
