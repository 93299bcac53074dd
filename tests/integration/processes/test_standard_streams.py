"""A server that is started without stdin, stdout or stderr, like a daemon."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import repositories
from tests.support.servers import running

_SHOW_STREAMS = (
    "import os, sys; from shmserve.common.fd_limits import fill_standard_streams as fill; fill(); "
    "print('said', file=sys.stdout); print('said', file=sys.stderr); "
    "os.write(3, ' '.join(os.readlink(f'/proc/self/fd/{fd}') for fd in (0, 1, 2)).encode())"
)


@pytest.mark.parametrize("closed", [(), (0,), (1,), (2,), (0, 1, 2)], ids=str)
def test_closed_standard_streams_become_dev_null(closed: tuple[int, ...]) -> None:
    closing_redirections = "".join(f" {fd}>&-" for fd in closed)
    command = (
        "sh", "-c", f'exec "$@" 3>&1 </dev/zero{closing_redirections}', "sh", sys.executable, "-c",
        _SHOW_STREAMS,
    )  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    links = result.stdout.removeprefix("said\n").split()
    assert [link == os.devnull for link in links] == [fd in closed for fd in (0, 1, 2)]


def test_no_socket_takes_their_place(repository: Path) -> None:
    """In every process, the descriptors 0 to 2 are no sockets, to which a model could print."""
    repositories.add(repository, "simple")
    prefix = ("sh", "-c", 'exec "$@" 0>&- 1>&- 2>&-', "sh")
    with running(repository, prefix=prefix) as server:
        processes = server.tree()
        assert len(processes) > 4
        for process in processes:
            for fd in (0, 1, 2):
                assert os.readlink(f"/proc/{process.pid}/fd/{fd}") == os.devnull
