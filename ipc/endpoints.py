"""Endpoints, the paths of a server's sockets: all derive from one private run directory, so two
servers never collide."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

# sockaddr_un holds 107 bytes; the longest name below takes 20.
LONGEST_RUN_DIRECTORY = 85


def usual_run_directory(environment: Mapping[str, str]) -> Path:
    """Where this user's server is when nobody says otherwise: there clients look for it."""
    runtime = environment.get("XDG_RUNTIME_DIR", "")
    return Path(runtime, "shmserve") if runtime else Path(f"/tmp/shmserve-{os.getuid()}")


def beside(usual: Path, name: str) -> Path:
    """The run directory of another server of this user's; `name` may be a pattern."""
    return usual.with_name(f"{usual.name}-{name}")


def control(run_dir: Path) -> str:
    """The supervisor's socket."""
    return f"ipc://{run_dir}/control"


def events(run_dir: Path) -> str:
    """The socket (ZeroMQ XPUB) where the supervisor tells what happens."""
    return f"ipc://{run_dir}/events"


def scheduler(run_dir: Path, number: int) -> str:
    """The socket of scheduler `number` for whoever submits requests."""
    return f"ipc://{run_dir}/s{number}"


def instances(run_dir: Path, number: int) -> str:
    """The socket of scheduler `number` for its workers."""
    return f"ipc://{run_dir}/w{number}"


def local_client_folder(run_dir: Path) -> Path:
    """The folder of what programs outside the server may reach."""
    return run_dir / "guests"


def listener(run_dir: Path) -> Path:
    """The socket (SOCK_SEQPACKET) where a program becomes a local client."""
    return local_client_folder(run_dir) / "door"


def addresses(run_dir: Path) -> Path:
    """The file of the URLs where the server listens for HTTP and gRPC, one a line."""
    return local_client_folder(run_dir) / "addresses"


def handover(run_dir: Path) -> Path:
    """The socket (SOCK_SEQPACKET) where a server that is to take over from this one connects."""
    return run_dir / "handover"


def local_clients(run_dir: Path, number: int) -> str:
    """The socket of scheduler `number` for local clients."""
    return f"ipc://{local_client_folder(run_dir)}/{number}"


def for_local_clients(endpoint: str) -> str:
    """The endpoint for local clients of the scheduler at `endpoint`; "" stays ""."""
    if not endpoint:
        return ""
    folder, _, name = endpoint.rpartition("/")
    return f"{folder}/guests/{name.removeprefix('s')}"
