"""One run of perf_analyzer or of `shmserve perf`, and the numbers in its report."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.system import processes
from bench.system.servers import BENCH

if TYPE_CHECKING:
    from bench.system.peer import Analyzer


# perf_analyzer reports the mean of its last three windows, once these agree to within a percentage.
# One measurement of either program is three windows, whether or not they agree: the spread of the
# repeats shows how stable it was.
_WINDOWS = 3
_ANY_DEVIATION = "100000"
_GRACE_S = 60.0

THROUGHPUT = "Inferences/Second"
P50 = "p50 latency"
P99 = "p99 latency"


class LoadFailed(Exception):
    """perf_analyzer ended with an error; the text is the end of its output."""


@dataclass(frozen=True)
class Load:
    """The requests of perf_analyzer.

    Attributes:
        model: The model.
        in_flight: The number of requests in flight.
        flags: The flags of perf_analyzer for the tensors.
        listener: The listener, "http" or "grpc".
        batch: The number of rows of a request.
        steps: The models that the model, an ensemble, needs.
    """

    model: str
    in_flight: int
    flags: tuple[str, ...] = ()
    listener: str = "http"
    batch: int = 1
    steps: tuple[str, ...] = ()


def measure(analyzer: Analyzer, load: Load, url: str, seconds: float) -> dict[str, float]:
    """Run perf_analyzer for some seconds; return its columns (inferences/s, microseconds).

    Raises `LoadFailed`.
    """
    window_ms = max(100, round(seconds * 1000 / _WINDOWS))
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        report = Path(folder) / "report.csv"
        command = [str(analyzer.binary), "-m", load.model, "-u", url]
        command += ["-i", load.listener, "-b", str(load.batch)]
        command += ["--concurrency-range", str(load.in_flight), *load.flags]
        command += ["--measurement-mode", "time_windows", "-p", str(window_ms)]
        command += ["-r", str(_WINDOWS), "-s", _ANY_DEVIATION, "-f", str(report)]
        output = _run(command, analyzer, seconds + _GRACE_S)
        if not report.exists():
            raise LoadFailed(f"perf_analyzer wrote no report: {output}")
        return parse(report.read_text())


def parse(report: str) -> dict[str, float]:
    """Return the row of a CSV report with one concurrency, by column; raise LoadFailed."""
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
        output = process.communicate(timeout=timeout_s)[0]
    except subprocess.TimeoutExpired:
        raise LoadFailed(f"perf_analyzer did not end within {timeout_s:.0f} s") from None
    finally:
        _kill(process)
    if process.returncode != 0:
        raise LoadFailed(f"perf_analyzer ended with {process.returncode}: {output.strip()[-600:]}")
    return output.strip()[-600:]


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill the process if it still runs, and remove the shared memory that it leaves behind."""
    if process.poll() is not None:
        return
    members = processes.tree(process.pid)
    shm_paths = processes.shm_files(members)
    processes.signal_all(members, signal.SIGKILL)
    process.communicate()
    for path in shm_paths:
        path.unlink(missing_ok=True)


_WARM_UP_S = 0.5


def run_shmserve_perf(*arguments: object, seconds: float) -> dict[str, Any]:
    """Run `shmserve perf ARGUMENTS` for some seconds, and return the point of its report.

    Raises LoadFailed if the program fails, reports errors, or runs a minute longer than expected.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "shmserve", "perf", *map(str, arguments)]
        command += [f"--windows={_WINDOWS}", f"--window={seconds / _WINDOWS}"]
        command += [f"--warm-up={_WARM_UP_S}", f"--json={report}"]
        try:
            completed_process = subprocess.run(
                command,
                cwd=BENCH.parent,
                capture_output=True,
                text=True,
                check=False,
                timeout=seconds + _GRACE_S,
            )
        except subprocess.TimeoutExpired:
            raise LoadFailed("shmserve perf did not end in time") from None
        if completed_process.returncode != 0:
            raise LoadFailed(f"shmserve perf failed: {completed_process.stderr.strip()[-600:]}")
        point: dict[str, Any] = json.loads(report.read_text())["points"][0]
    if point["errors"]:
        raise LoadFailed(f"{point['errors']} requests failed: {point['error']}")
    return point
