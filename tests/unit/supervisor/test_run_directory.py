"""Run directories that must be refused, and one of a killed server."""

import errno
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import pytest

from shmserve.errors import InvalidArgument
from shmserve.supervisor.host import run_directory
from shmserve.supervisor.host.run_directory import RunDirectory


def test_a_new_run_directory_is_private_and_removed_at_the_end() -> None:
    directory = RunDirectory(None)
    assert directory.path.stat().st_mode & 0o777 == 0o700
    directory.remove()
    os.close(directory.lock_fd)
    assert not directory.path.exists()


def test_the_run_directory_of_a_killed_server_is_cleared(tmp_path: Path) -> None:
    stale_dir = tmp_path / "run"
    os.close(RunDirectory(stale_dir).lock_fd)
    with socket.socket(socket.AF_UNIX) as stale_socket:
        stale_socket.bind(str(stale_dir / "control"))
    directory = RunDirectory(stale_dir)
    assert [entry.name for entry in stale_dir.iterdir()] == ["lock"]
    os.close(directory.lock_fd)


def test_a_late_removal_leaves_the_next_servers_run_directory(tmp_path: Path) -> None:
    """As a process of a killed server does that was stopped while another one removed it."""
    first_dir = RunDirectory(tmp_path / "run")
    (first_dir.path / "guests").mkdir()
    (first_dir.path / "guests" / "socket").touch()
    first_dir.remove()
    assert not first_dir.path.exists()
    first_dir.remove()
    second_dir = RunDirectory(tmp_path / "run")
    (second_dir.path / "control").touch()
    first_dir.remove()
    assert sorted(os.listdir(second_dir.path)) == ["control", "lock"]
    second_dir.remove()
    assert not second_dir.path.exists()
    for directory in (first_dir, second_dir):
        os.close(directory.lock_fd)


def test_processes_remove_their_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes exit at the same time, so that a listed entry may be gone."""
    directory = RunDirectory(tmp_path / "run")
    (directory.path / "guests").mkdir()
    for number in range(3):
        (directory.path / "guests" / f"{number}").touch()
        (directory.path / f"{number}").touch()
    unlink = os.unlink

    def unlink_first(*name: Any, **folder: Any) -> None:
        unlink(*name, **folder)
        if "lock" not in str(name[0]):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(os, "unlink", unlink_first)
    directory.remove()
    assert not directory.path.exists()
    os.close(directory.lock_fd)


def test_a_foreign_folder_is_not_touched(tmp_path: Path) -> None:
    """A home folder is private too."""
    home_folder = tmp_path / "home"
    home_folder.mkdir(mode=0o700)
    (home_folder / "thesis").write_text("years of work")
    for lock in (None, "", "another program's"):
        if lock is not None:
            (home_folder / "lock").write_text(lock)
        files_before = sorted(os.listdir(home_folder))
        with pytest.raises(InvalidArgument, match="contains files that do not belong to a server"):
            RunDirectory(home_folder, timeout_s=0.0)
        assert sorted(os.listdir(home_folder)) == files_before


@pytest.mark.parametrize("path", ["/proc/x", "/etc/passwd/x", "a" * 300])
def test_folders_that_cannot_be_created_are_reported(tmp_path: Path, path: str) -> None:
    with pytest.raises(InvalidArgument, match="--run-dir: cannot make"):
        RunDirectory(tmp_path / path)


def test_a_full_file_system_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_no_space(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", raise_no_space)
    with pytest.raises(InvalidArgument, match=r"cannot use .*: No space left on device"):
        RunDirectory(tmp_path / "run", timeout_s=0)
    assert not list(tmp_path.iterdir())


def test_a_missing_temporary_folder_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders are full, or belong to another user."""

    def raise_not_found(prefix: str) -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "mkdtemp", raise_not_found)
    with pytest.raises(InvalidArgument, match=r"--run-dir: required .*No usable temporary"):
        RunDirectory(None)


def test_a_group_without_us_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "chown", refuse)
    with pytest.raises(InvalidArgument, match=r"--shm-group: group 4321 .* not permitted"):
        RunDirectory(tmp_path / "run", 4321)
    assert not (tmp_path / "run").exists()


def test_one_server_at_a_time(tmp_path: Path) -> None:
    first_dir = RunDirectory(tmp_path / "run")
    with pytest.raises(InvalidArgument, match=r"by another server; .* another --run-dir"):
        RunDirectory(tmp_path / "run", timeout_s=0.0)
    os.close(first_dir.lock_fd)


def test_a_second_server_names_the_run_directory_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(run_directory, "_DEFAULT_FOLDER_TIMEOUT_S", 0.0)
    first_dir, second_dir = RunDirectory.default(), RunDirectory.default()
    (message,) = caplog.messages
    assert message == (
        f"run directory: '{first_dir.path}' is in use by another server; clients need "
        f"connect('{second_dir.path}')"
    )
    for directory in (first_dir, second_dir):
        directory.remove()
        os.close(directory.lock_fd)


def test_folders_that_are_not_private_are_refused(tmp_path: Path) -> None:
    """A link, a foreign folder and a folder that others can enter are refused."""
    shared_folder = tmp_path / "shared"
    shared_folder.mkdir(mode=0o755)
    link = tmp_path / "link"
    link.symlink_to(shared_folder)
    plain_file = tmp_path / "plain"
    plain_file.write_text("")
    with pytest.raises(InvalidArgument, match="mode 0755"):
        RunDirectory(shared_folder)
    for bad_path, text in ((link, "is a symbolic link"), (plain_file, "not a directory")):
        with pytest.raises(InvalidArgument, match=text):
            RunDirectory(bad_path)
    with pytest.raises(InvalidArgument, match="longer than"):
        RunDirectory(tmp_path / ("d" * 90))
