"""Discovery of a running server by its run directory."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from shmserve.errors import Disconnected, InvalidArgument
from shmserve.ipc import endpoints

RUN_DIR_VARIABLE = "SHMSERVE_RUN_DIR"


def find(run_dir: str | os.PathLike[str] | None, previous_path: Path | None = None) -> Path:
    """Return the server's run directory.

    This is `run_dir`, else $SHMSERVE_RUN_DIR, else the run directory of this user's server. If
    several servers run, and `previous_path` is the directory of one of them, it is returned. A
    discovered directory must belong to this user or to root, so that a program does not connect to
    another user's server by accident.

    Raises:
        Disconnected: There is no server.
        InvalidArgument: `run_dir` is a URL or another user's directory, or several servers run.
    """
    requested_dir = run_dir or os.environ.get(RUN_DIR_VARIABLE)
    if requested_dir:
        path = Path(requested_dir)
        if "://" in str(requested_dir) or re.fullmatch(r"[^/]+:\d+", str(requested_dir)):
            raise InvalidArgument(
                f"'{requested_dir}' is a URL; give the run directory of a server on this host, or "
                "use tritonclient or `shmserve client --url`"
            )
        if not os.path.lexists(path):
            origin = "" if run_dir else f" (from {RUN_DIR_VARIABLE}; a server needs --run-dir)"
            raise Disconnected(f"no server is running: there is no run directory {path}{origin}")
        if os.path.lexists(path / "lock") and not _is_locked(path):
            raise _server_exited(path)
        return path
    default_dir = endpoints.default_run_directory(os.environ)
    run_dirs = list(_candidates(default_dir))
    running_dirs = [path for path in run_dirs if _is_locked(path)]
    if previous_path in running_dirs:
        return previous_path
    if len(running_dirs) > 1:
        server_list = "; ".join(" ".join([str(path), *addresses(path)]) for path in running_dirs)
        raise InvalidArgument(
            f"{len(running_dirs)} servers are running for this user; choose one with --run-dir, "
            f"{RUN_DIR_VARIABLE} or connect(DIR): {server_list}"
        )
    if running_dirs:
        return running_dirs[0]
    if default_dir in run_dirs:
        raise _server_exited(default_dir)
    if os.path.lexists(default_dir):
        raise InvalidArgument(
            f"{default_dir} belongs to another user; name it explicitly to use it"
        )
    runtime_dir = os.environ.get("XDG_RUNTIME_DIR") or "not set"
    raise Disconnected(
        f"no server of this user is running: there is no run directory {default_dir} or "
        f"{default_dir}-*; start one by `shmserve serve`, or choose another by --run-dir, --url, "
        f"{RUN_DIR_VARIABLE} or connect(DIR), for instance if the server has another "
        f"XDG_RUNTIME_DIR than this program ({runtime_dir})"
    )


def _server_exited(path: Path) -> Disconnected:
    return Disconnected(f"no server is running: the server of the run directory {path} has exited")


def _candidates(default: Path) -> Iterator[Path]:
    """Yield the existing default run directories that belong to this user or to root."""
    siblings = sorted(default.parent.glob(endpoints.sibling_run_directory(default, "*").name))
    for path in [default, *siblings]:
        with contextlib.suppress(OSError):
            folder_status = path.lstat()
            if stat.S_ISDIR(folder_status.st_mode) and folder_status.st_uid in (0, os.getuid()):
                yield path


def _is_locked(run_dir: Path) -> bool:
    """Check whether a server runs, by its lock: a killed server leaves its files, but no lock."""
    try:
        with (run_dir / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:  # the directory is locked, or not readable
        return True
    return False


def addresses(run_dir: Path) -> list[str]:
    """Return the URLs of the server's HTTP and gRPC listeners; empty if it publishes none."""
    try:
        return endpoints.addresses(run_dir).read_text().split()
    except OSError:
        return []
