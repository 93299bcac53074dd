"""The leak guard: what a test found is what it leaves, in /dev/shm, processes, descriptors and
sockets.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support import servers
from tests.support.process_table import Entry, descendants, table
from tests.support.waiting import until

_SHM = Path("/dev/shm")
_SETTLE_S = 3.0
# The names that tests/support/regions.py creates. Several test runs may be active at once.
_TEST_OBJECT = re.compile(r"test-(\d+)-")


@dataclass(frozen=True)
class Snapshot:
    """What a test could leak, at one moment.

    `children` are the test process's own, without the servers that live on, whose processes are
    counted by title.
    """

    shm: frozenset[str]
    children: frozenset[Entry]
    titles: dict[int, Counter[str]]
    descriptors: Counter[str]

    @staticmethod
    def take() -> Snapshot:
        processes = table()
        trees = {
            server.pid: [server.pid, *(each.pid for each in descendants(server.pid, processes))]
            for server in servers.RUNNING
        }
        return Snapshot(
            frozenset(os.listdir(_SHM)),
            _children(processes, {pid for tree in trees.values() for pid in tree}),
            {pid: Counter(map(servers.title_of, tree)) for pid, tree in trees.items()},
            descriptors(os.getpid()),
        )

    def assert_restored(self) -> None:
        leaks: list[str] = []

        def nothing_left() -> bool:
            leaks[:] = self._leaks(Snapshot.take())
            return not leaks

        try:
            until("nothing is left behind", nothing_left, _SETTLE_S)
        except AssertionError:
            raise AssertionError("left behind: " + "; ".join(leaks)) from None

    def _leaks(self, now: Snapshot) -> list[str]:
        found = [f"/dev/shm/{name}" for name in now.shm - self.shm if not _in_foreign_use(name)]
        new = now.children - self.children
        found += [f"process {each.pid} ({servers.title_of(each.pid)})" for each in new]
        for pid, titles in now.titles.items():
            before = self.titles.get(pid)
            if before is not None and servers.lasting(before) != titles:
                found.append(f"server {pid} had {dict(before)}, has {dict(titles)}")
        if now.descriptors - self.descriptors:
            gc.collect()
            found += [f"descriptor {what}" for what in descriptors(os.getpid()) - self.descriptors]
        return found


def _children(processes: dict[int, Entry], servers_own: set[int]) -> frozenset[Entry]:
    return frozenset(
        entry
        for entry in descendants(os.getpid(), processes)
        # Python's own resource tracker, which starts with the first shared memory object and never
        # exits.
        if entry.pid not in servers_own and "resource_tracker" not in servers.title_of(entry.pid)
    )


def descriptors(pid: int) -> Counter[str]:
    """How many descriptors of each kind a process has: files by path, the rest by what they are."""
    found: Counter[str] = Counter()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/{pid}/fd/{name}")
            if f"/proc/{pid}/fd" not in target:
                found[target.split(":[")[0]] += 1
    return found


def created_since(before: set[str]) -> set[str]:
    """The objects in /dev/shm that were not there before, but for those of tests: several runs of
    these may go on at once."""
    return {name for name in set(os.listdir(_SHM)) - before if not name.startswith("test-")}


def _in_foreign_use(name: str) -> bool:
    """Return whether a process of another run of the tests, or of another program, maps an object.

    Mappings are compared by device and inode: the C library creates a semaphore under a temporary
    name, which is the name that the mapping of its creator shows.
    """
    if (match := _TEST_OBJECT.match(name)) and int(match[1]) != os.getpid():
        return True
    try:
        status = (_SHM / name).stat()
    except FileNotFoundError:
        return True
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    mapping = f" {device} {status.st_ino} "
    ours = {os.getpid(), *(each.pid for each in descendants(os.getpid(), table()))}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) not in ours:
            with contextlib.suppress(OSError), open(f"/proc/{entry}/maps") as maps:
                if any(mapping in line for line in maps):
                    return True
    return not (_SHM / name).exists()


def server_descriptors(server: servers.Server) -> dict[str, int]:
    """How many descriptors each process of a server has, by title; of several with one title, all
    together.
    """
    found: Counter[str] = Counter()
    for process in server.tree():
        with contextlib.suppress(OSError):
            found[servers.title(process)] += len(os.listdir(f"/proc/{process.pid}/fd"))
    return dict(found)


def unix_sockets(folder: Path) -> int:
    """How many unix sockets (listening and accepted) are bound to names under a folder."""
    with open("/proc/net/unix") as table:
        return sum(f"{folder}/" in line for line in table)


def resident_bytes(server: servers.Server) -> dict[str, int]:
    """The proportional memory of a server's processes, in bytes, by title: shared pages count
    once; of several with one title, all together.

    Without pages of files: those of libraries count for less while other programs on the machine
    have them too, and for more when one of those ends.
    """
    found: Counter[str] = Counter()
    for process in server.tree():
        with contextlib.suppress(OSError), open(f"/proc/{process.pid}/smaps_rollup") as rollup:
            kilobytes = [
                int(line.split()[1]) for line in rollup if line.startswith(("Pss_Anon", "Pss_Shm"))
            ]
            found[servers.title(process)] += 1024 * sum(kilobytes)
    return dict(found)


def cpu_seconds(server: servers.Server) -> dict[str, float]:
    """How long each process of a server has computed so far, by title."""
    found = {}
    for process in server.tree():
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            found[servers.title(process)] = times.user + times.system
    return found
