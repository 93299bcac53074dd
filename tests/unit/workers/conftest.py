"""Fixtures of the workers' tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from shmserve.workers.backends.python import server
from tests.rigs.worker_rig import Rig, rig


@pytest.fixture(autouse=True)
def closed_backend() -> Iterator[None]:
    """Close the Python backend that a test has created, since a process has only one."""
    yield
    server.install(None)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Rig]:
    with rig(tmp_path) as model_rig:
        yield model_rig
