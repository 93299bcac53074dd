"""The room that the host has for another instance of a model: memory, and processors, against what
its workers were measured to take.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from shmserve.common.host import CpuUtilization, memory_bytes, memory_left

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PRIVATE = re.compile(r"^Private_\w+: +(\d+) kB$", re.MULTILINE)
_SPARE = 0.05  # of the host's memory, which stays available
_KNOWN_S = 0.5  # of executions, after which it is known what they take of a processor
_FADES = 0.98
_READ_EVERY_S = 1.0
_FULL = 0.95
_LITTLE = 0.25  # of a processor: a model that waits for others takes none from anybody
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
    _each: float = field(init=False, default=0.0)  # processors of an instance at work
    _host: CpuUtilization = field(init=False, default_factory=CpuUtilization)
    _busy: float = field(init=False, default=0.0)  # the share of the host's processors
    _read_s: float = field(init=False, default=-math.inf)

    def look(self, pids: list[int], took_s: float, at_s: float) -> None:
        """Measure these workers, whose executions took so long in all until now."""
        if at_s - self._read_s >= _READ_EVERY_S:
            self._busy, self._read_s = self._host.read(), at_s
        seen = {pid: processor_s(pid) for pid in pids}
        if self._seen and took_s >= self._took_s:
            self._used_s += sum(max(0.0, now - self._seen.get(p, now)) for p, now in seen.items())
            self._executed_s += took_s - self._took_s
        self._seen, self._took_s = seen, took_s
        if self._executed_s > _KNOWN_S:
            # Those that wait for processors take less of them: what was seen counts for a while.
            self._each = max(self._used_s / self._executed_s, _FADES * self._each)
            self._used_s = self._executed_s = 0.0

    def lacks(self, count: int) -> str:
        """What the host has too little of for `count` instances, of which one is to be added; ""
        where there is room."""
        if self._each * count > self.processors + _HALF:
            return f"{self.processors:g} processors, an instance at work takes {self._each:.2g}"
        if self._each > _LITTLE and self._busy > _FULL:
            return f"the processors are busy for {100 * self._busy:.0f} % of the time"
        left, largest = memory_left(), max(map(private_bytes, self._seen), default=0)
        if left - largest < _SPARE * memory_bytes()[0]:
            return f"{left >> 20} MiB of memory are left, an instance takes {largest >> 20} MiB"
        return ""
