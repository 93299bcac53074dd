"""The machine and the versions of a measurement."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

_PACKAGES = ("shmserve", "torch", "numpy", "pyzmq", "msgpack", "aiohttp", "uvloop", "orjson")


def describe() -> dict[str, str | float]:
    """Return a description of the machine before the benchmark.

    Returns:
        The processor, cores, memory (GiB), kernel, and the load average of 1 minute.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory, 1),
        "kernel": platform.release(),
        "system": platform.freedesktop_os_release().get("PRETTY_NAME", platform.system()),
        "load_before": round(os.getloadavg()[0], 2),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python, this checkout and the packages on the hot path."""
    result = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            result[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if commit := _commit():
        result["commit"] = commit
    return result


def _processor() -> str:
    for row in Path("/proc/cpuinfo").read_text().splitlines():
        if row.startswith("model name"):
            return row.partition(":")[2].strip()
    return platform.machine()


def _commit() -> str | None:
    completed_process = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return completed_process.stdout.strip() or None
