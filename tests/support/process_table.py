"""A table of all processes of this host and their parents; one scan for many queries."""

import contextlib
import os
from collections import defaultdict
from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """A process; `started` (clock ticks) distinguishes processes with the same pid."""

    pid: int
    parent: int
    started: int


def table() -> dict[int, Entry]:
    """Return every process by pid, including zombies."""
    processes = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                with open(f"/proc/{name}/stat", "rb") as stat:
                    # The second field, the name of the program, may contain any character.
                    fields = stat.read().rpartition(b")")[2].split()
                processes[int(name)] = Entry(int(name), int(fields[1]), int(fields[19]))
    return processes


def descendants(pid: int, processes: dict[int, Entry]) -> list[Entry]:
    children = defaultdict(list)
    for entry in processes.values():
        children[entry.parent].append(entry)
    entries: list[Entry] = []
    generation = children[pid]
    while generation:
        entries += generation
        generation = [child for entry in generation for child in children[entry.pid]]
    return entries
