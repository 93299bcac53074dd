"""Executions of batches: how many of which size, what they cost, and why each was begun."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from shmserve.scheduler.batchers.base import Closed
from shmserve.scheduler.statistics.histograms import Histogram
from shmserve.scheduler.statistics.table import Table
from shmserve.scheduler.statistics.timing import NS_PER_S, SECONDS, Timing, duration

# What is noted of executions, and of requests that have ended, is counted when somebody asks, or
# when there is so much: together it costs half, and no request waits for it.
MOST_NOTED = 64

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class ExecutionStats(Table):
    """Counters of executions since the version was loaded; times in ns."""

    def __init__(self) -> None:
        self.execution_count = 0
        self.last_ns = 0
        self.batch_sizes: dict[int, list[int]] = {}  # count, and ns of the three phases
        self.batches_closed = dict.fromkeys(Closed, 0)
        self.compute_seconds = Histogram(SECONDS, NS_PER_S)
        self.batch_size = Histogram(_SIZES)
        self._copied = [0, 0]
        self.padding: dict[str, list[int]] = {}  # by input: elements, and of these padding
        self._noted: list[tuple[Closed, int, int, int, int]] = []

    def executed(self, reason: Closed, units: int, timing: Timing, now_ns: int) -> None:
        """An execution of requests that sum up to `units` came back."""
        self.last_ns = now_ns
        self._noted.append((reason, units, *timing[1:4]))
        if len(self._noted) >= MOST_NOTED:
            self.count()

    def count(self) -> None:
        """Count what was noted, before anything is read here."""
        noted, self._noted = self._noted, []
        if not noted:
            return
        reasons, units, *phases = zip(*noted, strict=True)
        self.execution_count += len(noted)
        for reason, count in Counter(reasons).items():
            self.batches_closed[reason] += count
        for size, input_ns, infer_ns, output_ns in zip(units, *phases, strict=True):
            row = self.batch_sizes.get(size)
            if row is None:
                row = self.batch_sizes[size] = [0, 0, 0, 0]
            row[0] += 1
            row[1] += input_ns
            row[2] += infer_ns
            row[3] += output_ns
        self.compute_seconds.observe(*map(sum, zip(*phases, strict=True)))
        self.batch_size.observe(*units)

    def copied(self, into: int, out: int) -> None:
        """So many bytes of tensors were copied by a worker."""
        self._copied[0] += into
        self._copied[1] += out

    def padded(self, elements: Mapping[str, tuple[int, int]]) -> None:
        """A batch was sent whose padded inputs have (elements, of these padding), by name."""
        for name, counts in elements.items():
            before = self.padding.get(name, (0, 0))
            self.padding[name] = [a + b for a, b in zip(before, counts, strict=True)]

    def table(self) -> dict[str, Any]:
        """The entries; rows by batch size are [size, executions, ns of the three phases]."""
        rows = [[size, *row] for size, row in self.batch_sizes.items()]
        copied = dict(zip(("in", "out"), self._copied, strict=True))
        return {**super().table(), "batch_sizes": rows, "copied_bytes": copied}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """As `Table.restore`."""
        rows = {int(size): [int(n) for n in row] for size, *row in snapshot["batch_sizes"]}
        super().restore({**snapshot, "batch_sizes": {}})
        self.batch_sizes = rows
        self._copied = [int(snapshot["copied_bytes"][direction]) for direction in ("in", "out")]

    def last_ms(self, now_ns: int, wall_ns: int) -> int:
        """When the last one came back, ms since the epoch; 0: there was none."""
        return (wall_ns - (now_ns - self.last_ns)) // 1_000_000 if self.last_ns else 0

    def by_size(self) -> list[dict[str, Any]]:
        """`batch_stats` of the report."""
        return [
            {
                "batch_size": size,
                "compute_input": duration(row[0], row[1]),
                "compute_infer": duration(row[0], row[2]),
                "compute_output": duration(row[0], row[3]),
            }
            for size, row in sorted(self.batch_sizes.items())
        ]
