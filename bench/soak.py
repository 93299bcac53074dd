"""A long run at a steady rate that detects growth: `python -m bench.soak [--minutes N] [--rate N]`.

An open loop in a process of its own sends `--rate` requests per second over every transport. Every
few seconds a model is reloaded, and a region is registered and unregistered. The program prints a
line per window: memory, descriptors and threads of all processes, /dev/shm, latencies. The exit
status is 1 if a request failed, or if a process's memory, descriptors or threads or /dev/shm have
grown.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.load.client import REGIONS_PATH, Client
from bench.system import machine, resources, servers

_MODELS = ("simple", "identity", "repeat", "pass")
_RELOADED_MODEL = "pass"
_WINDOWS = 30
_REGION_BYTES = 1 << 20
_LOAD_COMMAND = [sys.executable, "-m", "bench.load.mixed"]


@dataclass
class Run:
    """The figures of a soak run so far."""

    samples: list[resources.Sample] = field(default_factory=list)
    medians: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    latencies: dict[str, list[float]] = field(default_factory=dict)

    def record(self, line: str) -> None:
        """Record a line of the load generator."""
        report = json.loads(line)
        self.failures += report["failures"]
        for protocol, times_ms in report["ms"].items():
            self.latencies.setdefault(protocol, []).extend(times_ms)

    def close_window(self, server: servers.Server) -> str:
        """Take a sample of the server's resources, and return it in one line with the latencies."""
        sample = resources.sample(server.pid)
        self.samples.append(sample)
        latencies = sorted(ms for latency in self.latencies.values() for ms in latency)
        slowest = max(self.latencies, key=lambda protocol: quantile(self.latencies[protocol], 0.99))
        self.latencies = {}
        p50, p99, p999 = (quantile(latencies, q) for q in (0.5, 0.99, 0.999))
        self.medians.append(p50)
        return (
            f"{len(latencies):7,} requests  p50 {p50:6.1f}  p99 {p99:7.1f}  p99.9 {p999:7.1f} ms "
            f"(slowest: {slowest})  PSS {sum(sample.memory_mb.values()):6.1f} MB  fds "
            f"{sum(sample.descriptors.values()):5}  threads {sum(sample.threads.values()):4}  "
            f"/dev/shm {sample.shm_mb:5.1f} MB"
        )


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value that this share of the samples does not exceed, or 0 without samples."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def churn(client: Client) -> None:
    """Run the rare operations: register a region, reload a model, and read the statistics."""
    path = Path(f"/dev/shm/bench-soak-{os.getpid()}")
    path.write_bytes(bytes(_REGION_BYTES))
    client.register_region(path.name, path.name, _REGION_BYTES)
    path.unlink()
    client.call("POST", f"{REGIONS_PATH}/{path.name}/unregister")
    client.call("POST", f"/v2/repository/models/{_RELOADED_MODEL}/unload")
    client.call("POST", f"/v2/repository/models/{_RELOADED_MODEL}/load")
    client.call("POST", "/v2/repository/index")
    client.call("GET", "/v2/models/stats")


def soak(seconds: float, rate: float) -> int:
    """Run for `seconds` at `rate` requests per second, and return the exit status."""
    run, window = Run(), seconds / _WINDOWS
    models = [servers.BENCH / "models" / name for name in _MODELS]
    print(f"{machine.describe()}", flush=True)
    flags = ("--model-control-mode=explicit", "--load-model=*")
    notes: list[str] = []
    with servers.running(servers.Shmserve(), models, flags, notes=notes) as server:
        ports = (str(server.ports.http), str(server.ports.grpc))
        command = [*_LOAD_COMMAND, str(server.run_dir), *ports, str(rate), str(seconds)]
        with (
            subprocess.Popen(
                command, stdout=subprocess.PIPE, text=True, cwd=servers.BENCH.parent
            ) as load,
            server.client() as client,
        ):
            assert load.stdout is not None
            window_end = time.monotonic() + window
            for line in load.stdout:
                run.record(line)
                if time.monotonic() >= window_end:
                    churn(client)
                    print(f"{len(run.samples):3} {run.close_window(server)}", flush=True)
                    window_end += window
        if load.returncode:
            run.failures.append(f"the load ended with status {load.returncode}")
    return report(run, notes)


def report(run: Run, notes: Sequence[str]) -> int:
    """Print the growth, the failures and the leftovers, and return the exit status."""
    growth = resources.growth(run.samples)
    third = len(run.medians) // 3
    if third:
        previous_median = statistics.median(run.medians[-2 * third : -third])
        print(f"p50 of the last third {statistics.median(run.medians[-third:]):.1f} ms, ", end="")
        print(f"of the one before {previous_median:.1f} ms")
    for line in (*(f"grew: {resource}" for resource in growth), *run.failures[:20], *notes):
        print(line)
    print(f"{len(growth)} grew, {len(run.failures)} requests failed")
    return int(bool(growth or run.failures or notes))


def main() -> int:
    """Run the command and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--rate", type=float, default=20.0, help="requests/s of each protocol")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, servers.stop_on_signal)
    return soak(options.minutes * 60, options.rate)


if __name__ == "__main__":
    sys.exit(main())
