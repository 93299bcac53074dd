"""The run directory that a client finds when none is named."""

import os
import re
from pathlib import Path

import pytest

from shmserve.client.errors import Disconnected
from shmserve.client.server import discovery
from shmserve.errors import InvalidArgument
from shmserve.ipc import endpoints
from shmserve.supervisor.host import run_directory
from shmserve.supervisor.host.run_directory import RunDirectory


@pytest.fixture
def usual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a first server goes."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("SHMSERVE_RUN_DIR", raising=False)
    monkeypatch.setattr(run_directory, "_USUAL_PATIENCE_S", 0.0)
    return tmp_path / "shmserve"


def ended(server: RunDirectory) -> None:
    """Its files are left, as where it was killed."""
    os.close(server.lock_fd)


def test_none(usual: Path) -> None:
    with pytest.raises(Disconnected, match=f"no server .* there is no run directory {usual}$"):
        discovery.find(None)


def test_one_that_has_ended(usual: Path) -> None:
    ended(RunDirectory.usual())
    for named in (None, usual):
        with pytest.raises(Disconnected, match=f"no server: the one of .* {usual} has ended"):
            discovery.find(named)


def test_of_two_one_must_be_named(usual: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = RunDirectory.usual(), RunDirectory.usual()
    file = endpoints.addresses(second.path)
    file.parent.mkdir()
    file.write_text("http://127.0.0.1:8000\ngrpc://127.0.0.1:8001\n")
    shown = f"{first.path}; {second.path} http://127.0.0.1:8000 grpc://127.0.0.1:8001"
    with pytest.raises(InvalidArgument, match=f"^2 servers .*: {re.escape(shown)}$"):
        discovery.find(None)
    assert discovery.find(second.path) == second.path
    monkeypatch.setenv("SHMSERVE_RUN_DIR", str(first.path))
    assert discovery.find(None) == first.path
    monkeypatch.delenv("SHMSERVE_RUN_DIR")
    # Who was there before goes on there.
    assert discovery.find(None, second.path) == second.path
    ended(first)
    assert discovery.find(None) == second.path
    ended(second)


def test_what_need_not_be_this_users(usual: Path, tmp_path: Path) -> None:
    usual.symlink_to(tmp_path)
    with pytest.raises(InvalidArgument, match=f"{usual} belongs to another user: name it"):
        discovery.find(None)
