"""Discovery of the server: a run directory that may be trusted."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from shmserve.client.errors import Disconnected
from shmserve.errors import InvalidArgument
from shmserve.ipc import endpoints

VARIABLE = "SHMSERVE_RUN_DIR"


def find(run_dir: str | os.PathLike[str] | None, latest: Path | None = None) -> Path:
    """The run directory: the one given, else $SHMSERVE_RUN_DIR, else that of this user's server;
    of several, the one found `latest`.

    A directory that was not named must belong to this user or to root: a stranger's server is not
    talked to by accident. Raises Disconnected when there is none, InvalidArgument for a stranger's,
    or where several run.
    """
    named = run_dir or os.environ.get(VARIABLE)
    if named:
        path = Path(named)
        if not os.path.lexists(path):
            raise Disconnected(f"no server: there is no run directory {path}")
        if os.path.lexists(path / "lock") and not _is_locked(path):
            raise _ended(path)
        return path
    usual = endpoints.usual_run_directory(os.environ)
    found = list(_candidates(usual))
    running = [path for path in found if _is_locked(path)]
    if latest in running:
        return latest
    if len(running) > 1:
        shown = "; ".join(" ".join([str(path), *addresses(path)]) for path in running)
        raise InvalidArgument(
            f"{len(running)} servers of this user's run, so the run directory of one must be named "
            f"(--run-dir, {VARIABLE} or connect(DIR)): {shown}"
        )
    if running:
        return running[0]
    if usual in found:
        raise _ended(usual)
    if os.path.lexists(usual):
        raise InvalidArgument(f"{usual} belongs to another user: name it if that is meant")
    raise Disconnected(f"no server of this user's runs: there is no run directory {usual}")


def _ended(run_dir: Path) -> Disconnected:
    return Disconnected(f"no server: the one of the run directory {run_dir} has ended")


def _candidates(usual: Path) -> Iterator[Path]:
    """This user's run directories that nobody has to name."""
    for path in [usual, *sorted(usual.parent.glob(endpoints.beside(usual, "*").name))]:
        with contextlib.suppress(OSError):
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid in (0, os.getuid()):
                yield path


def _is_locked(run_dir: Path) -> bool:
    """Whether a server has a run directory now; one that was killed may have left its files."""
    try:
        with (run_dir / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:  # locked, or root's
        return True
    return False


def addresses(run_dir: Path) -> list[str]:
    """The URLs where the server listens for HTTP and gRPC; none where it does not say."""
    try:
        return endpoints.addresses(run_dir).read_text().split()
    except OSError:
        return []
