"""Host and process statistics, read from /proc."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_TITLE = "shmserve: "
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Process:
    """A process of the server, by what `ps` shows."""

    title: str
    resident_bytes: int
    open_fds: int
    cpu_seconds: float


def processes(supervisor: int) -> Iterator[Process]:
    """The supervisor and its children; those that end meanwhile are left out."""
    try:
        children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    except OSError:
        return
    for pid in (str(supervisor), *children):
        try:
            yield _process(Path("/proc") / pid)
        except (OSError, ValueError, IndexError):
            continue


def _process(folder: Path) -> Process:
    title = (
        (folder / "cmdline")
        .read_bytes()
        .rstrip(b"\0")
        .replace(b"\0", b" ")
        .decode(errors="replace")
    )
    if not title.startswith(_TITLE):
        raise ValueError("not a process of the server")
    # The name in parentheses may hold anything; the fields count from behind it.
    fields = (folder / "stat").read_text().rpartition(")")[2].split()
    return Process(
        title=title.removeprefix(_TITLE).strip(),
        resident_bytes=int(fields[21]) * _PAGE,
        open_fds=len(os.listdir(folder / "fd")),
        cpu_seconds=(int(fields[11]) + int(fields[12])) / _TICKS_PER_S,
    )
