"""Servers for fault tests. Tests whose faults end no process of the server share one server."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.scene import State
from tests.support import repositories
from tests.support.load import Load
from tests.support.servers import Server, running

MODELS = ("simple", "identity", "crimes", "gated")


def make_repository(folder: Path) -> Path:
    repository = folder / "models"
    repositories.add(repository, *MODELS)
    return repository


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_repository(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[Server]:
    with running(repository, "--gateways=2", "--execution-timeout-secs=3") as running_server:
        with Load(running_server):
            pass  # memory that the first requests allocate permanently is not a leak
        yield running_server


@pytest.fixture(scope="module")
def state_before(server: Server) -> State:
    return State.of(server)


@pytest.fixture
def serve(repository: Path) -> Iterator[Callable[..., Server]]:
    """Yield a function that starts a server for one test: `serve("--flag=value")`."""
    servers: list[Server] = []

    def start(*flags: str, **options: Any) -> Server:
        servers.append(Server([repository], flags, **options))
        return servers[-1].wait_ready()

    yield start
    for server in reversed(servers):
        if server.process.poll() is None:
            server.stop()
        else:
            server.discard()
