"""The run directory that a client finds when none is named."""

import os
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgpack
import pytest

import shmserve.client
from shmserve.client import discovery
from shmserve.errors import Disconnected, InvalidArgument
from shmserve.ipc import endpoints
from shmserve.supervisor.host import run_directory
from shmserve.supervisor.host.run_directory import RunDirectory


@pytest.fixture
def default_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("SHMSERVE_RUN_DIR", raising=False)
    monkeypatch.setattr(run_directory, "_DEFAULT_FOLDER_TIMEOUT_S", 0.0)
    return tmp_path / "shmserve"


def kill_server(server: RunDirectory) -> None:
    """Return the run directory of a killed server, whose files still exist."""
    os.close(server.lock_fd)


def test_without_a_run_directory_the_error_names_the_command(default_dir: Path) -> None:
    with pytest.raises(
        Disconnected,
        match=f"no server .* there is no run directory {default_dir} or {default_dir}-\\*; "
        rf"start one by `shmserve serve`, .* XDG_RUNTIME_DIR .*\({default_dir.parent}\)$",
    ):
        discovery.find(None)


@pytest.mark.parametrize("url", ["http://localhost:8000", "localhost:8001"])
def test_a_url_is_no_run_directory(url: str) -> None:
    with pytest.raises(InvalidArgument, match=f"'{url}' is a URL; give the run dir"):
        discovery.find(url)


def test_a_run_directory_whose_server_has_ended_is_disconnected(default_dir: Path) -> None:
    kill_server(RunDirectory.default())
    for run_dir in (None, default_dir):
        with pytest.raises(
            Disconnected,
            match=(
                f"no server is running: the server of the run directory {default_dir} has exited"
            ),
        ):
            discovery.find(run_dir)


def test_one_of_two_servers_is_named(default_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first_dir, second_dir = RunDirectory.default(), RunDirectory.default()
    file = endpoints.addresses(second_dir.path)
    file.parent.mkdir()
    file.write_text("http://127.0.0.1:8000\ngrpc://127.0.0.1:8001\n")
    shown = f"{first_dir.path}; {second_dir.path} http://127.0.0.1:8000 grpc://127.0.0.1:8001"
    with pytest.raises(InvalidArgument, match=f"^2 servers .*: {re.escape(shown)}$"):
        discovery.find(None)
    assert discovery.find(second_dir.path) == second_dir.path
    monkeypatch.setenv("SHMSERVE_RUN_DIR", str(first_dir.path))
    assert discovery.find(None) == first_dir.path
    monkeypatch.delenv("SHMSERVE_RUN_DIR")
    # A program that knew the former server continues with it.
    assert discovery.find(None, second_dir.path) == second_dir.path
    kill_server(first_dir)
    assert discovery.find(None) == second_dir.path
    kill_server(second_dir)


def test_the_default_directory_of_others_is_rejected(default_dir: Path, tmp_path: Path) -> None:
    default_dir.symlink_to(tmp_path)
    with pytest.raises(InvalidArgument, match=f"{default_dir} belongs to another user; name it"):
        discovery.find(None)


def test_a_missing_server_is_disconnected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(shmserve.client.Disconnected, match="no run directory"):
        shmserve.client.connect(tmp_path / "nothing")
    monkeypatch.setenv("SHMSERVE_RUN_DIR", str(tmp_path))
    with pytest.raises(shmserve.client.Disconnected, match="no server answers"):
        shmserve.client.connect()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"", "the limit of clients"),
        (
            msgpack.packb([2, ["Welcome", 1, "token"]]),
            "the peer has protocol version 2, this process has version 3",
        ),
    ],
)
def test_a_server_that_refuses_users_is_found(tmp_path: Path, answer: bytes, reason: str) -> None:
    """The error names the server that was found, so that a reader need not search for it."""
    (tmp_path / "guests").mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "guests" / "door"))
        listener.listen()

        def refuse_client() -> None:
            link, _ = listener.accept()
            with link:
                assert link.recv(1024)
                link.send(answer)

        with ThreadPoolExecutor(1) as pool:
            shown_out = pool.submit(refuse_client)
            with pytest.raises(shmserve.client.Disconnected, match=reason):
                shmserve.client.connect(tmp_path)
            shown_out.result()
