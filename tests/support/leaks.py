"""The leak guard for /dev/shm, processes, descriptors and sockets."""

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
# The names that tests/support/regions.py creates. Several test runs may be active at once.
_TEST_OBJECT = re.compile(r"test-(\d+)-")


@dataclass(frozen=True)
class Snapshot:
    """The resources that a test could leak, at one moment.

    `children` are the test process's own. Processes of servers that outlive the test are counted by
    title instead.
    """

    shm: frozenset[str]
    children: frozenset[Entry]
    titles: dict[int, Counter[str]]
    descriptors: Counter[str]

    @staticmethod
    def take() -> Snapshot:
        processes = table()
        trees = {
            server.pid: [
                server.pid,
                *(descendant.pid for descendant in descendants(server.pid, processes)),
            ]
            for server in servers.RUNNING_SERVERS
        }
        return Snapshot(
            frozenset(os.listdir(_SHM)),
            _children(processes, {pid for tree in trees.values() for pid in tree}),
            {pid: Counter(map(servers.title_of, tree)) for pid, tree in trees.items()},
            descriptors(os.getpid()),
        )

    def assert_restored(self) -> None:
        leaks: list[str] = []

        def nothing_leaks() -> bool:
            leaks[:] = self._leaks(Snapshot.take())
            return not leaks

        try:
            until("nothing is left behind", nothing_leaks)
        except AssertionError:
            raise AssertionError("left behind: " + "; ".join(leaks)) from None

    def _leaks(self, later: Snapshot) -> list[str]:
        found = [
            f"/dev/shm/{name}" for name in later.shm - self.shm if not _is_used_elsewhere(name)
        ]
        new_children = later.children - self.children
        found += [f"process {p.pid} ({servers.title_of(p.pid)})" for p in new_children]
        for pid, titles in later.titles.items():
            titles_before = self.titles.get(pid)
            if titles_before is not None and servers.without_short_lived(titles_before) != titles:
                found.append(f"server {pid} had {dict(titles_before)}, has {dict(titles)}")
        if later.descriptors - self.descriptors:
            gc.collect()
            found += [f"descriptor {fd}" for fd in descriptors(os.getpid()) - self.descriptors]
        return found


def _children(processes: dict[int, Entry], servers_own: set[int]) -> frozenset[Entry]:
    return frozenset(
        entry
        for entry in descendants(os.getpid(), processes)
        # Python's own resource tracker, which starts with the first shared memory object and never
        # exits.
        if entry.pid not in servers_own and "resource_tracker" not in servers.title_of(entry.pid)
    )


def open_descriptors() -> set[str]:
    """Return this process's descriptors, one of which is that of the listing.

    A test compares them by `open_descriptors() <= fds_before`, because threads of earlier tests may
    close descriptors at any time.
    """
    return set(os.listdir("/proc/self/fd"))


def descriptor_count(fd: int) -> int:
    """Return the number of this process's descriptors of the file that `fd` refers to."""
    file, count = os.fstat(fd), 0
    for other_fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # a thread of an earlier test has closed it
            count += os.path.samestat(os.fstat(int(other_fd)), file)
    return count


def descriptors(pid: int) -> Counter[str]:
    """Return the number of a process's descriptors by path, or by type if they have none."""
    counter: Counter[str] = Counter()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/{pid}/fd/{name}")
            if f"/proc/{pid}/fd" not in target:
                counter[target.split(":[")[0]] += 1
    return counter


def created_since(names_before: set[str]) -> set[str]:
    """Return the new objects in /dev/shm, except those of other test runs."""
    return {name for name in set(os.listdir(_SHM)) - names_before if not name.startswith("test-")}


def _is_used_elsewhere(name: str) -> bool:
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
    own_pids = {os.getpid(), *(descendant.pid for descendant in descendants(os.getpid(), table()))}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) not in own_pids:
            with contextlib.suppress(OSError), open(f"/proc/{entry}/maps") as maps:
                if any(mapping in line for line in maps):
                    return True
    return not (_SHM / name).exists()


def server_descriptors(server: servers.Server) -> dict[str, int]:
    """Return the number of descriptors of a server's processes, summed by title."""
    counter: Counter[str] = Counter()
    for process in server.tree():
        with contextlib.suppress(OSError):
            counter[servers.title(process)] += len(os.listdir(f"/proc/{process.pid}/fd"))
    return dict(counter)


def unix_sockets(folder: Path) -> int:
    """Return the number of Unix sockets (listening and accepted) bound to names below a folder."""
    with open("/proc/net/unix") as table:
        return sum(f"{folder}/" in line for line in table)


def resident_bytes(server: servers.Server) -> dict[str, int]:
    """Return the proportional memory of a server's processes in bytes, summed by title.

    Shared pages count once. Pages of files are excluded, because their share depends on other
    programs on the machine that map the same libraries.
    """
    counter: Counter[str] = Counter()
    for process in server.tree():
        with contextlib.suppress(OSError), open(f"/proc/{process.pid}/smaps_rollup") as rollup:
            sizes = [
                int(row.split()[1]) for row in rollup if row.startswith(("Pss_Anon", "Pss_Shm"))
            ]
            counter[servers.title(process)] += 1024 * sum(sizes)
    return dict(counter)


def cpu_seconds(server: servers.Server) -> dict[str, float]:
    """Return the CPU time of each process of a server in seconds, by title."""
    files = {}
    for process in server.tree():
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            files[servers.title(process)] = times.user + times.system
    return files
