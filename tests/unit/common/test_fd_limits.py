"""The shares of a process's descriptor limit."""

import pytest

from shmserve.common import fd_limits


@pytest.mark.parametrize("limit", [256, 1024, 20_000, 1 << 20])
def test_shares_of_gateways_are_in_limits(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(fd_limits, "limit", lambda: limit)
    for listeners, scraped in ((1, 1), (2, 1), (1, 0), (0, 1)):
        connection_fds = listeners * fd_limits.connections_share(listeners, scraped)
        assert 0 < connection_fds + scraped * fd_limits.scrapes_share() <= limit - 128


def test_most_descriptors_are_for_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand connections fit into a limit of twenty thousand descriptors."""
    monkeypatch.setattr(fd_limits, "limit", lambda: 20_000)
    assert fd_limits.connections_share(1, 1) > 16_384
