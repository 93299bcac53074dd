"""Discovery of the server: a run directory that may be trusted."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from shmserve.client.errors import Disconnected
from shmserve.errors import InvalidArgument
from shmserve.ipc.endpoints import usual_run_directory

VARIABLE = "SHMSERVE_RUN_DIR"


def find(run_dir: str | os.PathLike[str] | None) -> Path:
    """The run directory: the one given, else $SHMSERVE_RUN_DIR, else where this user's server is.

    A directory that was not named must belong to this user or to root: a stranger's server is not
    talked to by accident. Raises Disconnected when there is none, InvalidArgument for a stranger's.
    """
    named = run_dir or os.environ.get(VARIABLE)
    path = Path(named) if named else usual_run_directory(os.environ)
    try:
        status = path.lstat()
    except OSError:
        raise Disconnected(f"no server: there is no run directory {path}") from None
    if not named and (not stat.S_ISDIR(status.st_mode) or status.st_uid not in (0, os.getuid())):
        raise InvalidArgument(f"{path} belongs to another user: name it if that is meant")
    return path
