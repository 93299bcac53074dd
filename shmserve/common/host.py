"""The host's memory, read from /proc."""

from __future__ import annotations

from pathlib import Path


def memory_bytes() -> tuple[int, int]:
    """The host's memory and how much of it is not available, in bytes."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    found = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    total = found["MemTotal"]
    return total, total - found.get("MemAvailable", found["MemFree"])
