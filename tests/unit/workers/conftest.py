"""What tests of the workers' room share."""

from collections.abc import Iterator

import pytest

from shmserve.workers.backends.python import server


@pytest.fixture(autouse=True)
def no_server_is_left() -> Iterator[None]:
    """A Python backend that a test makes is this process's: it ends with the test."""
    yield
    server.install(None)
