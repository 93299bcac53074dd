"""A server that is started without stdin, stdout or stderr, as daemons are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import repositories
from tests.servers import running


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
def test_no_socket_takes_their_place(repository: Path, closed: tuple[int, ...]) -> None:
    """They are /dev/null in every process: what a model prints must not reach a socket."""
    repositories.add(repository, "simple")
    shut = " ".join(f"{fd}>&-" for fd in closed)
    with running(repository, prefix=("sh", "-c", f'exec "$@" {shut}', "sh")) as server:
        processes = server.tree()
        assert len(processes) > 4
        for process in processes:
            for fd in closed:
                assert os.readlink(f"/proc/{process.pid}/fd/{fd}") == os.devnull
