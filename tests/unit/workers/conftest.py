"""What tests of the workers' room share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from shmserve.workers.backends.python import server
from tests.rigs.worker_rig import Rig, rig


@pytest.fixture(autouse=True)
def no_server_is_left() -> Iterator[None]:
    """A Python backend that a test makes is this process's: it ends with the test."""
    yield
    server.install(None)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Rig]:
    with rig(tmp_path) as made:
        yield made
