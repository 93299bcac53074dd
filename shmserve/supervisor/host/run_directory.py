"""The run directory, the private folder of a server's sockets.

One server at a time locks it, and removes the files of a killed server.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Container, Iterator
from pathlib import Path

from shmserve.common.peers import admit_group
from shmserve.errors import InvalidArgument, convert_os_errors
from shmserve.ipc import endpoints
from shmserve.ipc.endpoints import LONGEST_RUN_DIRECTORY

logger = logging.getLogger(__name__)

# The last process of a killed server clears the folder and ends within milliseconds.
_LOCK_TIMEOUT_S = 3.0
_DEFAULT_FOLDER_TIMEOUT_S = 0.5  # short, because a second server can use another folder
_REMEDY = "; stop that server, replace it with --take-over, or set another --run-dir"
_LOCK_PAUSE_S = 0.02  # pause between attempts to lock, because flock has no timeout
# The contents of a lock file, by which a folder's other files are recognised as a server's.
_LOCK_CONTENTS = b"shmserve run directory\n"
# The files that clients and a successor use.
_SHARED_FILES = ("events", "handover", "guests/addresses")


class RunDirectory:
    """A locked run directory at the absolute `path`; `lock_fd` holds the lock.

    Clients use `shared_path`: the same folder, or the parent folder for a successor in a handover.
    """

    def __init__(
        self, folder: Path | None, group: int = -1, timeout_s: float = _LOCK_TIMEOUT_S
    ) -> None:
        """Lock `folder` (created with mode 0700 if it is missing), or a new temporary folder.

        Args:
            folder: The folder, or None for a temporary folder.
            group: A group whose programs may traverse the folder, or -1.
            timeout_s: The time in seconds to wait for a server that ends.

        Raises:
            InvalidArgument: The folder cannot be created or used: it is a link, owned by another
                user, accessible to other users, in use, or contains foreign files. Or its path is
                too long, or this user may not grant access to the group.
        """
        if folder is None:
            with convert_os_errors("--run-dir: required because no temporary folder is usable"):
                self.path = Path(tempfile.mkdtemp(prefix="shmserve-"))
        else:
            self.path = Path(os.path.abspath(folder))
            mkdir_errors = convert_os_errors(f"--run-dir: cannot make '{self.path}'")
            # If the path exists and is not a folder, the next check reports it.
            with mkdir_errors, contextlib.suppress(FileExistsError):
                self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        group_bits = 0o010 if group >= 0 else 0
        if reason := unsafe_reason(self.path, self.path.lstat(), group_bits):
            raise InvalidArgument(f"--run-dir: {reason}")
        with convert_os_errors(f"--run-dir: cannot use '{self.path}'"):
            self.lock_fd = self._lock(timeout_s)
        if group >= 0:
            text = f"--shm-group: group {group} cannot be given access to '{self.path}'"
            with convert_os_errors(text):
                try:
                    admit_group(self.path, group)
                except OSError:
                    self.remove()
                    raise
        _delete_contents(self.path)
        self.shared_path = self.path

    @classmethod
    def for_successor(cls, shared_path: Path, group: int = -1) -> RunDirectory:
        """Create a folder for the successor of the server in `shared_path`.

        Raises:
            InvalidArgument: As in `__init__`.
        """
        run_dir = cls(shared_path / f"g{os.getpid()}", group)
        run_dir.shared_path = run_dir.path.parent
        return run_dir

    @classmethod
    def default(cls, group: int = -1) -> RunDirectory:
        """Lock the folder that clients use by default; if that fails, lock a new folder."""
        default_path = endpoints.default_run_directory(os.environ)
        try:
            return cls(default_path, group, _DEFAULT_FOLDER_TIMEOUT_S)
        except (InvalidArgument, OSError) as error:
            try:
                sibling = endpoints.sibling_run_directory(default_path, secrets.token_hex(4))
                fallback = cls(sibling, group)
            except (InvalidArgument, OSError):
                fallback = cls(None, group)
            reason = str(error).removeprefix("--run-dir: ").removesuffix(_REMEDY)
            logger.warning("run directory: %s; clients need connect('%s')", reason, fallback.path)
            return fallback

    def _lock(self, timeout_s: float) -> int:
        deadline = time.monotonic() + timeout_s
        while True:
            self.path.mkdir(mode=0o700, exist_ok=True)
            try:
                return self._lock_now()
            except (InvalidArgument, FileNotFoundError):
                if time.monotonic() > deadline:
                    raise
            time.sleep(_LOCK_PAUSE_S)

    def _lock_now(self) -> int:
        # `_lock` retries, since the last process of a killed server may still be deleting files.
        if self._has_foreign_files():
            raise InvalidArgument(
                f"--run-dir: '{self.path}' contains files that do not belong to a "
                "server; it must be empty, or the run directory of a killed server"
            )
        # Another process may just have removed the folder, which raises FileNotFoundError.
        fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The last process of a killed server may have removed the file before it was locked.
            with contextlib.suppress(FileNotFoundError):
                if os.stat(self.path / "lock").st_ino == os.fstat(fd).st_ino:
                    self._write_lock_contents(fd)
                    return fd
        os.close(fd)
        raise InvalidArgument(f"--run-dir: '{self.path}' is in use by another server{_REMEDY}")

    def _write_lock_contents(self, fd: int) -> None:
        try:
            os.pwrite(fd, _LOCK_CONTENTS, 0)
        except OSError:  # the disk may be full
            os.close(fd)
            (self.path / "lock").unlink()
            with contextlib.suppress(OSError):
                self.path.rmdir()
            raise

    def _has_foreign_files(self) -> bool:
        with contextlib.suppress(OSError):
            if not set(os.listdir(self.path)) - {"lock"}:
                return False
            return (self.path / "lock").read_bytes() != _LOCK_CONTENTS
        return True

    def replace_predecessor(self) -> None:
        """Replace the predecessor's files in the shared folder, including its lock.

        Raises:
            OSError: A file cannot be replaced.
        """
        os.replace(self.path / "lock", self.shared_path / "lock")
        self._link_shared_files()

    def _link_shared_files(self) -> None:
        for file in map(Path, _SHARED_FILES):
            link = self.path / "link"
            link.symlink_to(self.path / file)
            os.replace(link, self.shared_path / file)

    def clear_predecessor(self) -> None:
        """Delete the files of the predecessor, which has ended; raise OSError if that fails."""
        shared_names = map(os.path.basename, _SHARED_FILES)
        own_files = {"lock", "guests", "door", self.path.name, *shared_names}
        for folder in (self.shared_path, self.shared_path / "guests"):
            _delete_contents(folder, own_files)
        self._link_shared_files()  # create the links that the predecessor has removed

    def remove(self) -> None:
        """Delete the folder and its contents."""
        with contextlib.suppress(OSError), exclusive(self.lock_fd):
            clear(self.path, self.lock_fd)


def unsafe_reason(path: Path, status: os.stat_result, group_bits: int) -> str:
    """Return the reason why a folder is unsafe as a run directory, or "".

    `group_bits` are the mode bits that are allowed in addition to the owner's.
    """
    if stat.S_ISLNK(status.st_mode):
        return f"'{path}' is a symbolic link; name the directory itself"
    if not stat.S_ISDIR(status.st_mode):
        return f"'{path}' is not a directory"
    if status.st_uid != os.geteuid():
        return f"'{path}' belongs to uid {status.st_uid}, not to this server's {os.geteuid()}"
    if status.st_mode & 0o077 & ~group_bits:
        return (
            f"'{path}' has mode {status.st_mode & 0o777:04o}; it must be 0700, open to its owner "
            "alone"
        )
    if len(os.fsencode(path)) > LONGEST_RUN_DIRECTORY:
        return (
            f"'{path}' is longer than {LONGEST_RUN_DIRECTORY} bytes, the limit for the path "
            "of a socket"
        )
    return ""


@contextlib.contextmanager
def exclusive(lock_fd: int) -> Iterator[None]:
    """Lock out other processes that have inherited `lock_fd`, a server's lock, during a block."""
    fcntl.lockf(lock_fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.lockf(lock_fd, fcntl.LOCK_UN)


def clear(path: Path, lock_fd: int) -> None:
    """Delete a server's folder and its contents; raise OSError if that fails.

    Each process that outlives the server calls this within `exclusive`, with the inherited lock.
    Only a folder that contains this lock is deleted, so a second call deletes nothing. After a
    handover, the lock is in the parent folder, which is deleted, too.
    """
    for folder in (path, path.parent):
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(folder / "lock"), os.fstat(lock_fd)):
                _delete_contents(folder)
                # The lock is deleted last: no server starts in a folder with files and no lock.
                if os.listdir(folder) == ["lock"]:
                    (folder / "lock").unlink()
                    folder.rmdir()


def _delete_contents(path: Path, kept_names: Container[str] = ("lock",)) -> None:
    for entry in path.iterdir():
        if entry.name not in kept_names:
            # Another process that is exiting may already have removed its own files.
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)
