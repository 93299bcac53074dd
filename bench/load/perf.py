"""One run of perf_analyzer, and the numbers in its CSV report."""

from __future__ import annotations

import csv
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.system import processes

if TYPE_CHECKING:
    from bench.system.peer import Analyzer

# perf_analyzer reports the mean of its last three windows, once these agree to within a percentage.
# One measurement here is always exactly three windows: the repeats' spread says how stable it was.
_WINDOWS = 3
_ANY_DEVIATION = "100000"
_GRACE_S = 60.0

THROUGHPUT = "Inferences/Second"
P50 = "p50 latency"
P99 = "p99 latency"


class LoadFailed(Exception):
    """perf_analyzer ended with an error; the text is the end of what it said."""


@dataclass(frozen=True)
class Load:
    """What perf_analyzer sends: to which model, how many in flight, its flags for the tensors, at
    which listener ("http" or "grpc"), and how many rows a request has. `steps` are the models that
    this one needs."""

    model: str
    in_flight: int
    flags: tuple[str, ...] = ()
    listener: str = "http"
    batch: int = 1
    steps: tuple[str, ...] = ()


def measure(analyzer: Analyzer, load: Load, url: str, seconds: float) -> dict[str, float]:
    """The columns of perf_analyzer's report (inferences/s, microseconds) for `seconds` of load.

    Raises `LoadFailed`.
    """
    window_ms = max(100, round(seconds * 1000 / _WINDOWS))
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        report = Path(folder) / "report.csv"
        command = [
            str(analyzer.binary),
            "-m",
            load.model,
            "-u",
            url,
            "-i",
            load.listener,
            "-b",
            str(load.batch),
        ]
        command += ["--concurrency-range", str(load.in_flight), *load.flags]
        command += ["--measurement-mode", "time_windows", "-p", str(window_ms)]
        command += ["-r", str(_WINDOWS), "-s", _ANY_DEVIATION, "-f", str(report)]
        said = _run(command, analyzer, seconds + _GRACE_S)
        if not report.exists():
            raise LoadFailed(f"perf_analyzer wrote no report: {said}")
        return parse(report.read_text())


def parse(report: str) -> dict[str, float]:
    """The one row of a CSV report of one concurrency, by column; raises `LoadFailed`."""
    rows = list(csv.DictReader(report.splitlines()))
    if len(rows) != 1 or THROUGHPUT not in rows[0] or P50 not in rows[0]:
        raise LoadFailed(f"not a report of one concurrency: {report[:300]!r}")
    return {name: float(value) for name, value in rows[0].items() if value}


def _run(command: list[str], analyzer: Analyzer, timeout_s: float) -> str:
    process = subprocess.Popen(
        command,
        env=analyzer.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
    )
    try:
        said = process.communicate(timeout=timeout_s)[0]
    except subprocess.TimeoutExpired:
        raise LoadFailed(f"perf_analyzer did not end within {timeout_s:.0f} s") from None
    finally:
        _end(process)
    if process.returncode != 0:
        raise LoadFailed(f"perf_analyzer ended with {process.returncode}: {said.strip()[-600:]}")
    return said.strip()[-600:]


def _end(process: subprocess.Popen[str]) -> None:
    """Kill it if it still runs, and remove the shared memory that it then leaves behind."""
    if process.poll() is not None:
        return
    members = processes.tree(process.pid)
    named = processes.shm_files(members)
    processes.signal_all(members, signal.SIGKILL)
    process.communicate()
    for path in named:
        path.unlink(missing_ok=True)
