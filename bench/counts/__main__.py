"""`python -m bench.counts`: calls, allocations and system calls per request, by process."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from bench.load.closed_loop import Connections
from bench.system import processes
from bench.system.servers import BENCH, Server, Shmserve, running

_HOOK = Path(__file__).parent / "hook"
_ROLES = ("gateway", "scheduler", "worker")
_WARM_UP = 800
_IN_FLIGHT = 16
_TENSOR_BYTES = 600_000  # byte size of a tensor in the region
_WAIT_S = 20.0
_STRACE_ROW = re.compile(r"^ *\d+\.\d+ +\d+\.\d+ +\d+ +(\d+)(?: +\d+)? +(\w+)$", re.MULTILINE)


@dataclass
class Counts:
    """The counts of one process for a number of requests."""

    role: str
    requests: int
    calls: Counter[str]  # calls by function; calls of C functions are counted at their caller
    python: int  # calls of functions in Python, included in `calls`
    allocations: int
    system_calls: Counter[str]

    def row(self) -> str:
        """Return a line of the table, with figures per request."""
        counters = (self.calls, self.system_calls)
        calls, system_calls = (total.total() for total in counters)
        figures = (calls, self.python, self.allocations, system_calls)
        texts = [f"{total / self.requests:9.1f}" if total else "        -" for total in figures]
        return f"{self.role:10}" + "".join(texts)


class CountedShmserve(Shmserve):
    """This checkout's server with counters in its processes, which write to `COUNTS_DIR`."""

    def environment(self) -> dict[str, str]:
        """Return this process's environment with the counting hook on PYTHONPATH."""
        path = os.pathsep.join(filter(None, (str(_HOOK), os.environ.get("PYTHONPATH"))))
        return {**os.environ, "PYTHONPATH": path}


def _roles(server: Server) -> dict[str, int]:
    """Return the processes on the path of a request: role -> pid."""
    pids: dict[str, int] = {}
    for process in processes.tree(server.pid):
        title = Path(f"/proc/{process.pid}/cmdline").read_text().split("\0")[0].split()
        if title[:1] == ["shmserve:"] and title[1] in _ROLES and title[2] != "grpc":
            pids[title[1]] = process.pid
    return pids


def _wait_for(path: Path) -> Path:
    deadline = time.monotonic() + _WAIT_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {path.name}")
        time.sleep(0.01)
    return path


def _begin_step(folder: Path, pids: Sequence[int], step: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGUSR1)
    for pid in pids:
        _wait_for(folder / f"{pid}.{step}")


def count(server: Server, folder: Path, requests: Sequence[bytes], number: int) -> list[Counts]:
    """Send `number` requests for each kind of count, and return the counts of each process."""
    pids = _roles(server)
    with Connections(server.ports.http, requests) as connections:
        connections.run(lambda sent_count: sent_count < _WARM_UP)
        for step in (1, 2):
            _begin_step(folder, list(pids.values()), step)
            connections.run(lambda sent_count: sent_count < number)
        _begin_step(folder, list(pids.values()), 3)
        with _trace(folder, pids) as system_calls:
            connections.run(lambda sent_count: sent_count < number)
    counts = []
    for role in _ROLES:
        report = json.loads((folder / f"{pids[role]}.3").read_text())
        calls = Counter(report["calls"])
        figures = (report["python"], report["allocations"])
        counts.append(Counts(role, number, calls, *figures, system_calls[role]))
    return counts


@contextlib.contextmanager
def _trace(folder: Path, pids: dict[str, int]) -> Iterator[dict[str, Counter[str]]]:
    """Count the system calls of processes during the block; the counts are empty without strace."""
    calls_by_role: dict[str, Counter[str]] = {role: Counter() for role in pids}
    if shutil.which("strace") is None:
        yield calls_by_role
        return
    traces: dict[str, subprocess.Popen[bytes]] = {}
    for role, pid in pids.items():
        command = ["strace", "-c", "-f", "-qq", "-o", str(folder / role), "-p", str(pid)]
        traces[role] = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        while not _is_traced(pid) and traces[role].poll() is None:
            time.sleep(0.01)
    yield calls_by_role
    for role, trace in traces.items():
        trace.send_signal(signal.SIGINT)
        trace.wait()
        with contextlib.suppress(OSError):
            for times, name in _STRACE_ROW.findall((folder / role).read_text()):
                if name != "total":
                    calls_by_role[role][name] += int(times)


def _is_traced(pid: int) -> bool:
    return "TracerPid:\t0" not in Path(f"/proc/{pid}/status").read_text()


def _post(path: str, body: object) -> bytes:
    text = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(text)}\r\n\r\n"
    return head.encode() + text


def _in_bodies() -> list[bytes]:
    """Return requests of equal length with different content."""
    return [
        _post(
            "/v2/models/simple/infer",
            {
                "inputs": [
                    {"name": name, "datatype": "INT32", "shape": [1, 16], "data": [10 + index] * 16}
                    for name in ("INPUT0", "INPUT1")
                ]
            },
        )
        for index in range(_IN_FLIGHT)
    ]


@contextlib.contextmanager
def _in_region(server: Server) -> Iterator[list[bytes]]:
    """Yield requests whose input and output are in one registered region."""
    memory = SharedMemory(create=True, size=2 * _IN_FLIGHT * _TENSOR_BYTES)
    try:
        with server.client() as client:
            client.register_region("counts", f"/{memory.name}", memory.size)

        def tensor(name: str, index: int, **fields: object) -> dict[str, object]:
            region = {"shared_memory_region": "counts", "shared_memory_byte_size": _TENSOR_BYTES}
            if index:
                region["shared_memory_offset"] = index * _TENSOR_BYTES
            return {"name": name, "parameters": region, **fields}

        shape = {"datatype": "FP32", "shape": [_TENSOR_BYTES // 4]}
        yield [
            _post(
                "/v2/models/identity/infer",
                {
                    "inputs": [tensor("INPUT0", 2 * number, **shape)],
                    "outputs": [tensor("OUTPUT0", 2 * number + 1)],
                },
            )
            for number in range(_IN_FLIGHT)
        ]
    finally:
        memory.close()
        memory.unlink()


def _compile(folder: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        sys.stderr.write("no C compiler: allocations are not counted\n")
        return
    source, library = _HOOK / "allocations.c", folder / "allocations.so"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, source], check=True)


def main() -> None:
    """Count, and print a table for each case."""
    parser = argparse.ArgumentParser(prog="python -m bench.counts", description=__doc__)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--top", type=int, default=0, help="functions to show per process")
    parser.add_argument("--case", choices=("simple", "shm600k"), action="append")
    options = parser.parse_args()
    for case in options.case or ("simple", "shm600k"):
        with tempfile.TemporaryDirectory(prefix="bench-") as temporary_directory:
            folder = Path(temporary_directory)
            os.environ["COUNTS_DIR"] = temporary_directory
            _compile(folder)
            model = BENCH / "models" / ("simple" if case == "simple" else "identity")
            notes: list[str] = []
            with running(CountedShmserve(), [model], notes=notes) as server:
                simple = contextlib.nullcontext(_in_bodies())
                load = simple if case == "simple" else _in_region(server)
                with load as requests:
                    counts = count(server, folder, requests, options.requests)
            _print(case, counts, options.top)
            for note in notes:
                print(note, file=sys.stderr)


def _print(case: str, counts: list[Counts], shown_functions: int) -> None:
    print(f"\n{case}     calls   python   allocs syscalls   per request")
    for process in counts:
        print(process.row())
    for process in counts if shown_functions else ():
        print(f"\n{process.role}")
        for counter in (process.calls, process.system_calls):
            for name, times in counter.most_common(shown_functions):
                print(f"{times / process.requests:9.2f}  {name.removeprefix(str(BENCH.parent))}")


if __name__ == "__main__":
    main()
