"""The cost of a server without load: start, memory, instances, idling, the queue delay.

Each measurement returns one list of samples for every figure of its case in tables.py, in that
order, and appends warnings for the reader to `notes`.
"""

from __future__ import annotations

import json
import socket
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from bench.system import processes
from bench.system.servers import Product, Server, ServerFailed, running

if TYPE_CHECKING:
    from pathlib import Path

    from bench.load.client import Client


@dataclass(frozen=True)
class Measured:
    """The samples of a measurement, one list for each figure; `raw` has further raw values."""

    samples: tuple[list[float], ...]
    raw: list[float] = field(default_factory=list)


class Measure(Protocol):
    """A function that measures a product with one model folder, `repeats` times."""

    def __call__(
        self, product: Product, model: Path, repeats: int, notes: list[str], /
    ) -> Measured:
        """Start the server, measure it, and stop it. Raises the error of the server."""


_EXPLICIT = ("--model-control-mode=explicit",)
_INSTANCES = (1, 2, 3, 4)
_CONNECTIONS = 64
_IDLE_S = 10.0
# An idle server is measured after the effects of the last request (allocators, timers) have
# ended.
_SETTLE_S = 2.0
_DEADLINE_S = 30.0
_DELAY_REQUESTS = 300


def startup(product: Product, model: Path, repeats: int, notes: list[str]) -> Measured:
    """Return the seconds from the start of the server's process to its first ready response."""
    times = []
    for _ in range(repeats):
        with running(product, [model], notes=notes) as server:
            times.append(server.ready_s)
    return Measured((times,))


def instance(product: Product, model: Path, repeats: int, notes: list[str]) -> Measured:
    """Return the MB of proportional memory and the ms of loading that a further instance adds.

    The model is loaded with 1 to 4 instances, each used; a figure is the slope through the four.
    """
    slopes_mb, slopes_ms = [], []
    with running(product, [model], _EXPLICIT, notes=notes) as server, server.client() as client:
        client.call("POST", f"/v2/repository/models/{model.name}/load")
        config = client.call("GET", f"/v2/models/{model.name}/config")
        client.call("POST", f"/v2/repository/models/{model.name}/unload")
        # A process that the first load starts for later loads, such as a spare zygote, remains.
        process_count = _settled_processes(server)
        for _ in range(repeats):
            megabytes, milliseconds = [], []
            for count in _INSTANCES:
                milliseconds.append(_load(client, config, count))
                _use(server, model.name, count)
                megabytes.append(processes.pss_mb(server.pid))
                _unload(server, client, model.name, process_count)
            slopes_mb.append(statistics.linear_regression(_INSTANCES, megabytes).slope)
            slopes_ms.append(statistics.linear_regression(_INSTANCES, milliseconds).slope)
        _note_shared_torch(server, notes)
    return Measured((slopes_mb, slopes_ms))


def idle(product: Product, model: Path, repeats: int, notes: list[str]) -> Measured:
    """Return CPU (% of a core, over 10 s) and PSS (MB) with one idle model, after a few requests.

    The same figures with 64 idle connections follow: their CPU in all, and the PSS that they add.
    """
    windows = min(repeats, 2)
    with running(product, [model], notes=notes) as server, ExitStack() as stack:
        _use(server, model.name, 1)
        without_connections = [_window(server) for _ in range(windows)]
        for _ in range(_CONNECTIONS):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.ports.http)))
        with_connections = [_window(server) for _ in range(windows)]
        _note_shared_torch(server, notes)
    median_mb = statistics.median(memory for _, memory in without_connections)
    return Measured(
        (
            [cpu for cpu, _ in without_connections],
            [memory for _, memory in without_connections],
            [cpu for cpu, _ in with_connections],
            [memory - median_mb for _, memory in with_connections],
        )
    )


def delay(product: Product, model: Path, repeats: int, notes: list[str]) -> Measured:
    """Return the µs for which a lone request was queued: p50, p90, p99, and all samples.

    No other request was there to join its batch. The time is the difference in the model's
    statistics before and after each request.
    """
    quantiles: tuple[list[float], ...] = ([], [], [])
    all_delays: list[float] = []
    with running(product, [model], notes=notes) as server, server.client() as client:
        _queue_delays(client, model.name, _DELAY_REQUESTS // 10)
        for _ in range(repeats):
            delays = _queue_delays(client, model.name, _DELAY_REQUESTS)
            percentiles = statistics.quantiles(delays, n=100)
            for samples, percent in zip(quantiles, (50, 90, 99), strict=True):
                samples.append(percentiles[percent - 1])
            all_delays += delays
    return Measured(quantiles, all_delays)


def _queue_delays(client: Client, model: str, requests: int) -> list[float]:
    delays = []
    count, total_ns = client.queue_time(model)
    for _ in range(requests):
        client.infer(model)
        # The statistics may be updated shortly after the response.
        deadline = time.monotonic() + _DEADLINE_S
        while (new_totals := client.queue_time(model))[0] == count:
            if time.monotonic() > deadline:
                raise ServerFailed("the statistics do not count the requests")
        delays.append((new_totals[1] - total_ns) / (new_totals[0] - count) / 1000)
        count, total_ns = new_totals
    return delays


def _window(server: Server) -> tuple[float, float]:
    """Return the CPU (% of a core) and PSS (MB) over some seconds without requests."""
    time.sleep(_SETTLE_S)
    start_s, cpu_before_s = time.perf_counter(), processes.cpu_s(server.pid)
    time.sleep(_IDLE_S)
    used_s = processes.cpu_s(server.pid) - cpu_before_s
    return 100 * used_s / (time.perf_counter() - start_s), processes.pss_mb(server.pid)


def _load(client: Client, config: dict[str, Any], count: int) -> float:
    """Return the milliseconds of loading the model with `count` instances."""
    groups = [group | {"count": count} for group in config["instance_group"]]
    override = json.dumps(config | {"instance_group": groups})
    start_s = time.perf_counter()
    path = f"/v2/repository/models/{config['name']}/load"
    client.call("POST", path, {"parameters": {"config": override}})
    return (time.perf_counter() - start_s) * 1000


def _settled_processes(server: Server) -> int:
    """Return the number of the server's processes once it has been the same for a while."""
    count, since_s = -1, time.monotonic()
    while time.monotonic() - since_s < _SETTLE_S:
        if (new_count := len(processes.tree(server.pid))) != count:
            count, since_s = new_count, time.monotonic()
        time.sleep(0.05)
    return count


def _unload(server: Server, client: Client, model: str, process_count: int) -> None:
    """Unload a model, and wait until its processes have exited."""
    client.call("POST", f"/v2/repository/models/{model}/unload")
    deadline = time.monotonic() + _DEADLINE_S
    while len(processes.tree(server.pid)) > process_count:
        if time.monotonic() > deadline:
            raise ServerFailed(f"the processes of {model} outlive its unloading")
        time.sleep(0.01)


def _use(server: Server, model: str, instances: int) -> None:
    """Send enough concurrent requests that every instance executes one."""

    def send_requests(_: int) -> None:
        with server.client() as client:
            for _ in range(20):
                client.infer(model)

    with ThreadPoolExecutor(2 * instances) as pool:
        list(pool.map(send_requests, range(2 * instances)))


def _note_shared_torch(server: Server, notes: list[str]) -> None:
    other_count = processes.outsiders_mapping("libtorch_cpu.so", server.pid)
    if other_count and server.name == "shmserve":
        notes.append(
            f"{other_count} other processes share torch's pages: memory alone would be higher"
        )
