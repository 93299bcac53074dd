"""The room that the host has for another instance of a model: memory, and processors, against what
its workers were measured to take.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from shmserve.common.host import memory_bytes, memory_left

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PRIVATE = re.compile(r"^Private_\w+: +(\d+) kB$", re.MULTILINE)
_SPARE = 0.05  # of the host's memory, which stays available
_KNOWN_S = 0.5  # of executions, after which it is known what they take of a processor
_FORGOTTEN_S = 60.0
_HALF = 0.5  # a processor: so little may be missing


def private_bytes(pid: int) -> int:
    """The memory of a process that it shares with no other; 0 where it has ended, or is not ours
    to look at."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return 1024 * sum(map(int, _PRIVATE.findall(text)))


def processor_s(pid: int) -> float:
    """The processor time of a process, in seconds; 0 where it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0.0
    # The name in parentheses may hold anything; the fields count from behind it.
    fields = text.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


@dataclass(slots=True, eq=False)
class Room:
    """What the workers of a model take, on a host with so many `processors`, or a part of one."""

    processors: float
    _seen: dict[int, float] = field(init=False, default_factory=dict)
    _took_s: float = field(init=False, default=0.0)  # as of the last look
    _used_s: float = field(init=False, default=0.0)  # of processors, and in how long executions
    _executed_s: float = field(init=False, default=0.0)

    def look(self, pids: list[int], took_s: float) -> None:
        """Measure these workers, whose executions took so long in all until now."""
        seen = {pid: processor_s(pid) for pid in pids}
        used_s = sum(max(0.0, now - self._seen.get(pid, now)) for pid, now in seen.items())
        if self._seen and took_s >= self._took_s:
            self._used_s += used_s
            self._executed_s += took_s - self._took_s
        if self._executed_s > _FORGOTTEN_S:
            self._used_s, self._executed_s = self._used_s / 2, self._executed_s / 2
        self._seen, self._took_s = seen, took_s

    def lacks(self, count: int) -> str:
        """What the host has too little of for `count` instances, of which one is to be added; ""
        where there is room."""
        if self._executed_s > _KNOWN_S:
            each = self._used_s / self._executed_s
            if each * count > self.processors + _HALF:
                return f"{self.processors:g} processors, an instance at work takes {each:.2g}"
        left, largest = memory_left(), max(map(private_bytes, self._seen), default=0)
        if left - largest < _SPARE * memory_bytes()[0]:
            return f"{left >> 20} MiB of memory are left, an instance takes {largest >> 20} MiB"
        return ""
