"""Fixtures of the workers' tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from shmserve.workers.backends.python import server
from tests.rigs.worker_rig import MIB, Region, Rig, rig


@pytest.fixture(autouse=True)
def closed_backend() -> Iterator[None]:
    """Close the Python backend that a test has created, since a process has only one."""
    yield
    server.install(None)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Rig]:
    with rig(tmp_path) as model_rig:
        yield model_rig


@pytest.fixture
def region() -> Iterator[Region]:
    """Yield a client's region, which is larger than the tensors of any test."""
    client_region = Region(40 * MIB)
    yield client_region
    client_region.close()
