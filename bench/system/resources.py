"""What each process of a server has at a moment: memory, descriptors, threads; and of two moments,
what has grown."""

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
    """By a process's title (several of one are added): MB of proportional memory without
    that of files, which other programs map, too; descriptors but
    for clients' connections over TCP, threads. `shm` is what lies in /dev/shm, MB, of everybody."""

    memory_mb: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    descriptors: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    threads: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    shm_mb: float = 0.0


def sample(root: int) -> Sample:
    """Of the tree of `root`, now."""
    found = Sample()
    established = _established()
    for process in processes.tree(root):
        folder = Path(f"/proc/{process.pid}")
        with contextlib.suppress(OSError):
            title = (folder / "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
            title = title.removeprefix(_TITLE)
            found.memory_mb[title] += processes.pss_of(process.pid, "Pss_Anon", "Pss_Shmem")
            found.descriptors[title] += sum(
                _counts(fd, established) for fd in os.scandir(folder / "fd")
            )
            found.threads[title] += len(os.listdir(folder / "task"))
    for entry in os.scandir(_SHM):
        with contextlib.suppress(OSError):
            found.shm_mb += entry.stat().st_blocks * 512 / 1e6
    return found


def _established() -> set[str]:
    """Connections over TCP whose other end is there: how many there are is the clients' affair."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            rows = (row.split() for row in Path(table).read_text().splitlines()[1:])
            found |= {f"socket:[{row[9]}]" for row in rows if row[3] == _ESTABLISHED}
    return found


def _counts(fd: os.DirEntry[str], established: set[str]) -> bool:
    with contextlib.suppress(OSError):
        return os.readlink(fd) not in established
    return False


# What may differ between two halves of a run, beside its share, before it is called growth.
_SLACK = {"memory_mb": 2.0, "descriptors": 2, "threads": 1}
_SHARE = 0.05
_SHM_SLACK_MB = 1.0


def growth(samples: Sequence[Sample]) -> list[str]:
    """What grew, a line each: the last third of `samples` against the third before it, since in the
    first one caches fill; processes that were not there all the time are left out."""
    third = len(samples) // 3
    if not third:
        return ["the run was too short to say what grew"]
    before, after = samples[-2 * third : -third], samples[-third:]
    grown = []
    for name, slack in _SLACK.items():
        tables = [getattr(each, name) for each in (*before, *after)]
        for title in sorted(set.intersection(*map(set, tables))):
            first, last = (
                statistics.median(getattr(each, name)[title] for each in half)
                for half in (before, after)
            )
            if last - first > max(slack, _SHARE * first):
                grown.append(f"{title}: {name} {first:,.1f} -> {last:,.1f}")
    first, last = (statistics.median(each.shm_mb for each in half) for half in (before, after))
    if last - first > _SHM_SLACK_MB:
        grown.append(f"/dev/shm: MB {first:,.1f} -> {last:,.1f}")
    return grown
