"""The host's memory, processors and accelerators, this process's share, and process statistics.

The figures are read from /proc and /sys. Accelerators are counted by their device files, since the
control plane never loads a driver.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shmserve.errors import InvalidArgument

# Triton's message for a rejected CUDA region.
CUDA_REJECTION = "failed to register shared memory region: invalid args"
_CGROUPS = Path("/sys/fs/cgroup")
_CPU_PERIOD_US = 100_000
_INACTIVE_FILE_BYTES = re.compile(r"^(?:total_)?inactive_file (\d+)$", re.MULTILINE)
_OOM_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


class CpuUtilization:
    """A meter of the utilisation of the host's processors."""

    def __init__(self) -> None:
        self._previous_times = (0, 0)

    def read(self) -> float:
        """Return the share of busy time since the last call; for the first call, since boot."""
        first_line = Path("/proc/stat").read_text().split("\n", 1)[0]
        cpu_times = [int(word) for word in first_line.split()[1:9]]
        total_ticks, idle_ticks = sum(cpu_times), cpu_times[3] + cpu_times[4]
        previous_total, previous_idle = self._previous_times
        self._previous_times = (total_ticks, idle_ticks)
        elapsed_ticks = total_ticks - previous_total
        return 1.0 - (idle_ticks - previous_idle) / elapsed_ticks if elapsed_ticks > 0 else 0.0


def memory_bytes() -> tuple[int, int]:
    """Return the host's memory in bytes, and how many of these bytes are not available."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    byte_counts = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    total_bytes = byte_counts["MemTotal"]
    return total_bytes, total_bytes - byte_counts.get("MemAvailable", byte_counts["MemFree"])


def processors() -> tuple[int, float | None]:
    """Return the number of usable processors, and the CPU quota in processors (None: no quota)."""
    quota = cgroup_limit("cpu", "cpu.max", "cpu.cfs_quota_us")
    return len(os.sched_getaffinity(0)), None if quota is None else quota / _CPU_PERIOD_US


def available_memory() -> int:
    """Return the bytes of memory that can still be allocated.

    The result is the minimum of the host's available memory and the remainder of each control
    group's limit. Inactive file pages count as available.
    """
    total_bytes, unavailable_bytes = memory_bytes()
    byte_limits = [total_bytes - unavailable_bytes]
    for folder, is_v1 in _cgroups("memory"):
        limit = _read_number(folder / ("memory.limit_in_bytes" if is_v1 else "memory.max"))
        used_bytes = _read_number(folder / ("memory.usage_in_bytes" if is_v1 else "memory.current"))
        if limit is not None and used_bytes is not None:
            match = _INACTIVE_FILE_BYTES.search((folder / "memory.stat").read_text())
            byte_limits.append(limit - used_bytes + (int(match[1]) if match else 0))
    return max(0, min(byte_limits))


def oom_kills() -> int:
    """Return how many processes of this control group the kernel has killed for lack of memory."""
    for folder, is_v1 in _cgroups("memory"):
        file = folder / ("memory.oom_control" if is_v1 else "memory.events")
        if file.is_file():
            match = _OOM_KILLS.search(file.read_text())
            return int(match[1]) if match else 0
    return 0


def cgroup_limit(controller: str, name: str, v1_name: str) -> int | None:
    """Return the lowest limit that this process's control groups set; None without a limit.

    A group's limit for `controller` is in the file `name`, or in `v1_name` for cgroup v1.
    """
    limits = (_read_number(group / (v1_name if v1 else name)) for group, v1 in _cgroups(controller))
    return min((limit for limit in limits if limit is not None), default=None)


def _cgroups(controller: str) -> Iterator[tuple[Path, bool]]:
    """Yield the folders of this process's control groups, and whether each is of cgroup v1."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        controllers, path = line.split(":", 2)[1:]
        if controllers and controller not in controllers.split(","):
            continue
        root = _CGROUPS / controller if controllers else _CGROUPS
        cgroup_dir = root / path.lstrip("/")
        for folder in (cgroup_dir, *cgroup_dir.parents):
            if folder.is_relative_to(root):
                yield folder, bool(controllers)


def _read_number(file: Path) -> int | None:
    number = re.match(r"\d{1,18}\b", file.read_text()) if file.is_file() else None
    return None if number is None else int(number[0])


_TITLE_PREFIX = "shmserve: "
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PSS = re.compile(r"^Pss:\s+(\d+) kB$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Process:
    """The statistics of a process of the server."""

    pid: int
    title: str
    resident_bytes: int
    open_fds: int  # number
    cpu_seconds: float  # used so far


def proportional_sizes(supervisor_pid: int) -> Iterator[int]:
    """Yield the memory of each process of the server as proportional set size, in bytes.

    A page shared by N processes counts 1/N in each of them, so that the sum is the server's use.
    If the kernel does not report this size, resident memory is counted. Reading one process's size
    takes about 1 ms.
    """
    yield from map(_proportional_bytes, processes(supervisor_pid))


def _proportional_bytes(process: Process) -> int:
    with contextlib.suppress(OSError):
        pss = _PSS.search(Path(f"/proc/{process.pid}/smaps_rollup").read_text())
        if pss is not None:
            return int(pss[1]) * 1024
    return process.resident_bytes


def processes(supervisor_pid: int) -> Iterator[Process]:
    """Yield the supervisor and its children, except those that exit meanwhile."""
    try:
        pids = Path(f"/proc/{supervisor_pid}/task/{supervisor_pid}/children").read_text().split()
    except OSError:
        return
    for pid in (str(supervisor_pid), *pids):
        try:
            yield _read_process(Path("/proc") / pid)
        except (OSError, ValueError, IndexError):
            continue


def _read_process(folder: Path) -> Process:
    command_line = (folder / "cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ")
    title = command_line.decode(errors="replace")
    if not title.startswith(_TITLE_PREFIX):
        raise ValueError(f"{folder} is not a process of shmserve: its title is '{title}'")
    # The command name in parentheses may contain any character, so fields are split after it.
    fields = (folder / "stat").read_text().rpartition(")")[2].split()
    return Process(
        pid=int(folder.name),
        title=title.removeprefix(_TITLE_PREFIX).strip(),
        resident_bytes=int(fields[21]) * _PAGE_BYTES,
        open_fds=len(os.listdir(folder / "fd")),
        cpu_seconds=(int(fields[11]) + int(fields[12])) / _TICKS_PER_S,
    )


@dataclass(frozen=True, slots=True)
class Accelerators:
    """The accelerators of the host; `kind` is torch's device type ("cuda", "npu"), or ""."""

    kind: str
    count: int


def accelerators(folder: Path = Path("/dev"), visible_devices: str | None = None) -> Accelerators:
    """Return the host's accelerators by their device files.

    Args:
        folder: The folder of device files.
        visible_devices: CUDA_VISIBLE_DEVICES, if set.
    """
    for kind, pattern in (("cuda", r"nvidia\d+"), ("npu", r"davinci\d+")):
        count = sum(bool(re.fullmatch(pattern, entry.name)) for entry in folder.iterdir())
        if count:
            if kind == "cuda" and visible_devices is not None:
                count = _count_visible(visible_devices, count)
            return Accelerators(kind if count else "", count)
    return Accelerators("", 0)


def _count_visible(visible_devices: str, count: int) -> int:
    # Like the driver, ignore the first invalid name and all names after it ("-1": no device).
    names = [device_name.strip() for device_name in visible_devices.split(",")]

    def is_device(name: str) -> bool:
        return name.startswith(("GPU-", "MIG-")) or (name.isdecimal() and int(name) < count)

    return min(count, len(list(itertools.takewhile(is_device, names))))


def cuda_devices(visible_devices: str | None = None) -> int:
    """Return the number of CUDA devices; `visible_devices` is CUDA_VISIBLE_DEVICES, if set."""
    devices = accelerators(visible_devices=visible_devices)
    return devices.count if devices.kind == "cuda" else 0


def cuda_not_supported(name: str) -> InvalidArgument:
    """Return the error of registering region `name` without a CUDA device, in Triton's words."""
    return InvalidArgument(
        f"{CUDA_REJECTION} (failed to register CUDA shared memory region: '{name}', GPUs not "
        "supported)"
    )
