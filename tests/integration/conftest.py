"""One server for the tests that only send requests, and a fixture that starts others."""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import repositories
from tests.support.servers import Server, running, unload_all

SHARED_MODELS = (
    "simple", "identity", "types", "text", "echo_request", "caller", "async_caller", "completed",
)  # fmt: skip


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start a server that tests share and must leave unchanged."""
    repository = tmp_path_factory.mktemp("shared") / "models"
    repositories.add(repository, *SHARED_MODELS)
    # "simple" in three versions of the same code, of which two are served.
    for version in ("2", "3"):
        (repository / "simple" / version).mkdir()
        model = (repository / "simple" / "1" / "model.py").read_text()
        (repository / "simple" / version / "model.py").write_text(model)
    with (repository / "simple" / "config.pbtxt").open("a") as config:
        config.write("version_policy: { latest { num_versions: 2 } }\n")
    with running(repository, "--id=shared", "--http-max-input-size=8388608") as running_server:
        yield running_server


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    return folder


@pytest.fixture(scope="session")
def explicit_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    """See `empty_server`."""
    folder = tmp_path_factory.mktemp("explicit") / "models"
    folder.mkdir()
    with running(folder, "--model-control-mode=explicit", grpc=True) as running_server:
        yield running_server, folder


@pytest.fixture(scope="module")
def serve_models(explicit_server: tuple[Server, Path]) -> Iterator[Callable[[Path], Server]]:
    """Load all models of a repository into the server of `empty_server`, for a module's tests."""
    server, folder = explicit_server

    def load(repository: Path) -> Server:
        names = sorted(path.name for path in repository.iterdir())
        for name in names:
            shutil.move(repository / name, folder / name)
        with server.http() as http:
            for name in names:
                # An ensemble has loaded its steps; a second load would leave a process that exits.
                if http.get(f"/v2/models/{name}/ready").status != 200:
                    server.load(name)
        return server

    yield load
    unload_all(server, folder)


@pytest.fixture
def empty_server(explicit_server: tuple[Server, Path]) -> Iterator[tuple[Server, Path]]:
    """Start a server in explicit mode; its tests add models with names of their own."""
    yield explicit_server
    unload_all(*explicit_server)


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    """Start ready servers for a test: `serve(repository, *flags, environment={...}, grpc=True)`."""
    with contextlib.ExitStack() as stack:

        def start(repository: Path, *flags: str, **options: Any) -> Server:
            return stack.enter_context(running(repository, *flags, **options))

        yield start
