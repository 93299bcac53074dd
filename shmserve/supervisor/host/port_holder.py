"""Who has a port: the process that listens there, for whoever wanted to."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_LISTENS = "0A"


def port_holders(port: int) -> list[tuple[int, str]]:
    """The processes (pid, name) that listen at a TCP port, those that can be seen, the eldest
    first; a listening socket may be several processes'."""
    sockets = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split(None, 10)
                if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                    sockets.add(f"socket:[{fields[9]}]")
    pids = sorted(int(name) for name in os.listdir("/proc") if name.isdecimal())
    return [(pid, _name(pid)) for pid in pids if sockets and _has(pid, sockets)]


def _has(pid: int, sockets: set[str]) -> bool:
    folder = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):
        for fd in os.listdir(folder):
            with contextlib.suppress(OSError):
                if os.readlink(f"{folder}/{fd}") in sockets:
                    return True
    return False


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return "?"
