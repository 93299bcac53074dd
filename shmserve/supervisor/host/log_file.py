"""The log file: stderr of all of the server's processes, redirected (--log-file)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from shmserve.errors import InvalidArgument


@contextlib.contextmanager
def written_to(path: str) -> Iterator[None]:
    """Append what this process, and those that it starts, write to stderr to the file at `path`;
    an empty path changes nothing.

    Raises InvalidArgument when the file cannot be written.
    """
    if not path:
        yield
        return
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    try:
        file = os.open(path, flags, 0o640)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a path"
        raise InvalidArgument(f"--log-file: cannot write '{path}': {reason}") from None
    console = os.dup(2)
    os.dup2(file, 2)
    os.close(file)
    try:
        yield
    finally:
        os.dup2(console, 2)
        os.close(console)
