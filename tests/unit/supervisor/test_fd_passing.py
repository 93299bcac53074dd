"""Descriptors that programs outside the server send."""

import os
from pathlib import Path

import pytest

from shmserve.supervisor.local_clients import connections
from tests.support.waiting import until


def test_a_descriptor_that_fails_to_close_keeps_no_other_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file fails to close if its file system cannot write the remaining data."""
    close = os.close
    fds = [os.open(tmp_path / str(number), os.O_CREAT | os.O_RDWR) for number in range(4)]

    def fail_to_close(fd: int) -> None:
        close(fd)
        if fd == fds[0]:
            raise OSError(5, "Input/output error")

    def all_closed() -> bool:
        return not any(os.path.exists(f"/proc/self/fd/{fd}") for fd in fds)

    monkeypatch.setattr(os, "close", fail_to_close)
    connections.close_all(fds)
    until("all are closed", all_closed)
