"""The service managers that start a server."""

from collections.abc import Iterator

import pytest

from tests.rigs.service_manager import Manager, run_manager
from tests.rigs.systemd_rig import Systemd, Unavailable, booted


@pytest.fixture
def manager() -> Iterator[Manager]:
    """Yield a fake service manager."""
    with run_manager() as manager:
        yield manager


@pytest.fixture
def systemd() -> Iterator[Systemd]:
    """Yield a real systemd; skip the test if none can be booted."""
    try:
        with booted() as manager:
            yield manager
    except Unavailable as reason:
        pytest.skip(str(reason))
