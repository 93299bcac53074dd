"""Executions of batches: how many of which size, what they cost, and why each was begun."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shmserve.scheduler.batchers.base import Closed
from shmserve.scheduler.statistics.histograms import Histogram
from shmserve.scheduler.statistics.timing import NS_PER_S, SECONDS, Timing, duration, taken

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class ExecutionStats:
    """Counters of executions since the version was loaded; times in ns."""

    def __init__(self) -> None:
        self.count = 0
        self._last_ns = 0
        self._by_size: dict[int, list[int]] = {}  # count, and ns of the three phases
        self._closed = dict.fromkeys(Closed, 0)
        self._compute_times = Histogram(SECONDS, NS_PER_S)
        self._sizes = Histogram(_SIZES)
        self._copied = [0, 0]
        self._padded: dict[str, list[int]] = {}  # by input: elements, and of these padding

    def executed(self, reason: Closed, units: int, timing: Timing, now_ns: int) -> None:
        """An execution of requests that sum up to `units` came back."""
        self.count += 1
        self._last_ns = now_ns
        self._closed[reason] += 1
        _, input_ns, infer_ns, output_ns = timing
        row = self._by_size.get(units)
        if row is None:
            row = self._by_size[units] = [0, 0, 0, 0]
        row[0] += 1
        row[1] += input_ns
        row[2] += infer_ns
        row[3] += output_ns
        self._compute_times.observe(input_ns + infer_ns + output_ns)
        self._sizes.observe(units)

    def copied(self, into: int, out: int) -> None:
        """So many bytes of tensors were copied by a worker."""
        self._copied[0] += into
        self._copied[1] += out

    def padded(self, elements: Mapping[str, tuple[int, int]]) -> None:
        """A batch was sent whose padded inputs have (elements, of these padding), by name."""
        for name, counts in elements.items():
            before = self._padded.get(name, (0, 0))
            self._padded[name] = [a + b for a, b in zip(before, counts, strict=True)]

    def restore(self, report: dict[str, Any], now_ns: int, wall_ns: int) -> None:
        """Go on from a report; raises KeyError, TypeError or ValueError for what is none."""
        last_ms = int(report["last_inference"])
        self._last_ns = now_ns - (wall_ns - last_ms * 1_000_000) if last_ms else 0
        self.count = int(report["execution_count"])
        for row in report["batch_stats"]:
            count, input_ns = taken(row["compute_input"])
            _, infer_ns = taken(row["compute_infer"])
            _, output_ns = taken(row["compute_output"])
            self._by_size[int(row["batch_size"])] = [count, input_ns, infer_ns, output_ns]
        ours = report["shmserve"]
        self._closed.update({Closed(key): int(n) for key, n in ours["batches_closed"].items()})
        self._compute_times.restore(ours["histograms"]["compute_seconds"])
        self._sizes.restore(ours["histograms"]["batch_size"])
        self._copied = [int(ours["copied_bytes"][direction]) for direction in ("in", "out")]
        padded = ours.get("padding", {}).items()
        self._padded = {str(name): [int(n) for n in counts] for name, counts in padded}

    def last_ms(self, now_ns: int, wall_ns: int) -> int:
        """When the last one came back, ms since the epoch; 0: there was none."""
        return (wall_ns - (now_ns - self._last_ns)) // 1_000_000 if self._last_ns else 0

    def by_size(self) -> list[dict[str, Any]]:
        """`batch_stats` of the report."""
        return [
            {
                "batch_size": size,
                "compute_input": duration(row[0], row[1]),
                "compute_infer": duration(row[0], row[2]),
                "compute_output": duration(row[0], row[3]),
            }
            for size, row in sorted(self._by_size.items())
        ]

    def closed(self) -> dict[str, int]:
        """`batches_closed` of the report."""
        return {str(reason): n for reason, n in self._closed.items()}

    def histograms(self) -> dict[str, Any]:
        """Those of the report's that observe executions."""
        return {
            "compute_seconds": self._compute_times.report(),
            "batch_size": self._sizes.report(),
        }

    def copied_bytes(self) -> dict[str, int]:
        """`copied_bytes` of the report."""
        return {"in": self._copied[0], "out": self._copied[1]}

    def padding(self) -> dict[str, list[int]]:
        """`padding` of the report: (elements, of these padding) of each padded input."""
        return {name: list(counts) for name, counts in self._padded.items()}
