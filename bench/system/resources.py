"""The memory, descriptors and threads of a server's processes, and their growth."""

from __future__ import annotations

import contextlib
import os
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.system import processes

_SHM = Path("/dev/shm")
_TITLE = "shmserve: "
_ESTABLISHED = "01"


@dataclass
class Sample:
    """The resources of a server's processes at one moment, by process title.

    Processes with the same title are added. The memory is the proportional set size in MB without
    mapped files, which other programs also map. Descriptors are counted without the TCP connections
    of clients. `shm_mb` is the size of /dev/shm in MB, for all programs.
    """

    memory_mb: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    descriptors: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    threads: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    shm_mb: float = 0.0


def sample(root: int) -> Sample:
    """Return the current resources of the process tree of `root`."""
    resources = Sample()
    established_connections = _established_connections()
    for process in processes.tree(root):
        folder = Path(f"/proc/{process.pid}")
        with contextlib.suppress(OSError):
            title = (folder / "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
            title = title.removeprefix(_TITLE)
            resources.memory_mb[title] += processes.pss_of(process.pid, "Pss_Anon", "Pss_Shmem")
            resources.descriptors[title] += sum(
                _is_counted(fd, established_connections) for fd in os.scandir(folder / "fd")
            )
            resources.threads[title] += len(os.listdir(folder / "task"))
    for entry in os.scandir(_SHM):
        with contextlib.suppress(OSError):
            resources.shm_mb += entry.stat().st_blocks * 512 / 1e6
    return resources


def _established_connections() -> set[str]:
    """Return the established TCP sockets, as "socket:[INODE]"; these are of client connections."""
    sockets = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            rows = (row.split() for row in Path(table).read_text().splitlines()[1:])
            sockets |= {f"socket:[{row[9]}]" for row in rows if row[3] == _ESTABLISHED}
    return sockets


def _is_counted(fd: os.DirEntry[str], established_connections: set[str]) -> bool:
    with contextlib.suppress(OSError):
        return os.readlink(fd) not in established_connections
    return False


# The allowed absolute growth between two parts of a run, in addition to the allowed share.
_SLACK = {"memory_mb": 2.0, "descriptors": 2, "threads": 1}
_SHARE = 0.05
_SHM_SLACK_MB = 1.0


def growth(samples: Sequence[Sample]) -> list[str]:
    """Return a line for each resource that has grown.

    The last third of `samples` is compared with the second third, since caches fill during the
    first third. Processes that did not run during all samples are omitted.
    """
    third_count = len(samples) // 3
    if not third_count:
        return ["the run was too short to say what grew"]
    second_third, last_third = samples[-2 * third_count : -third_count], samples[-third_count:]
    lines = []
    for name, slack in _SLACK.items():
        tables = [getattr(sample, name) for sample in (*second_third, *last_third)]
        for title in sorted(set.intersection(*map(set, tables))):
            old, new = (
                statistics.median(getattr(sample, name)[title] for sample in part)
                for part in (second_third, last_third)
            )
            if new - old > max(slack, _SHARE * old):
                lines.append(f"{title}: {name} {old:,.1f} -> {new:,.1f}")
    old, new = (
        statistics.median(sample.shm_mb for sample in part) for part in (second_third, last_third)
    )
    if new - old > _SHM_SLACK_MB:
        lines.append(f"/dev/shm: MB {old:,.1f} -> {new:,.1f}")
    return lines
