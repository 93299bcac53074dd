"""The cost of large numbers: `python -m bench.large connections|regions|models [--count N]`.

connections   10,000 idle connections over HTTP, then over gRPC: the gateway's memory for each, and
              the latencies of 100 further connections with one request per second each
regions       10,000 regions registered over HTTP: time of each, of a status, of a request; memory
models        200 Python models: time to start, memory of each, time to unload one and all
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import select
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Protocol

from bench.load.attacks import HonestClient, simple_request
from bench.load.client import BODIES, REGIONS_PATH, Client
from bench.soak import quantile
from bench.system import machine, processes, resources, servers
from shmserve.common import fd_limits

_ACTIVE_COUNT = 100  # connections that send requests
_SECONDS = 5
_PAGE = 4096
_EDGE = 500  # number of first and of last regions whose medians are printed
_BODY = json.dumps(BODIES["simple"])


class Connection(Protocol):
    """A connection with at most one request in flight."""

    sock: socket.socket

    def send_request(self) -> None:
        """Send a request."""

    def read(self) -> int:
        """Read available data, and return the number of responses that it completes."""


class Http:
    """An HTTP connection."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._connection.connect()
        self.sock: socket.socket = self._connection.sock

    def send_request(self) -> None:
        """Send a request."""
        self._connection.request("POST", "/v2/models/simple/infer", _BODY)

    def read(self) -> int:
        """Read the response to the only request in flight, and return 1."""
        response = self._connection.getresponse()
        if response.status != 200:
            raise SystemExit(f"HTTP: {response.status} {response.read()!r}")
        response.read()
        return 1


class Grpc(HonestClient):
    """A gRPC connection with one call in flight."""

    def __init__(self, port: int) -> None:
        super().__init__(port, _MESSAGE)

    def read(self) -> int:
        """Read some data, and return the number of responses in it."""
        data = self.sock.recv(1 << 16)
        if not data or b"grpc-message" in data:
            raise SystemExit(f"gRPC: {data!r}")
        return data.endswith(b"grpc-status\x010")


_MESSAGE = simple_request()


def connections(count: int) -> None:
    """Measure `count` idle connections of each protocol in turn."""
    types: dict[str, Callable[[int], Connection]] = {"http": Http, "grpc": Grpc}
    for name, open_connection in types.items():
        with _server([servers.BENCH / "models" / "simple"]) as server:
            port = server.ports.grpc if name == "grpc" else server.ports.http
            gateway = f"gateway {name}"
            active_connections = [open_connection(port) for _ in range(_ACTIVE_COUNT)]
            latencies_before = _latencies(active_connections)
            mb_before = _memory_mb(server, gateway)
            start_s = time.perf_counter()
            idle_connections = [_send_one_request(open_connection(port)) for _ in range(count)]
            took_us = (time.perf_counter() - start_s) / count * 1e6
            kb = (_memory_mb(server, gateway) - mb_before) / count * 1e3
            latencies_after = _latencies(active_connections)
            closed_count = sum(map(_is_closed_by_server, idle_connections))
            print(
                f"{name}: {count:,} idle connections, {closed_count} of them closed by the server; "
                f"{took_us:,.0f} µs and {kb:.1f} KB each; {_ACTIVE_COUNT} active connections: "
                f"without idle ones {_quantiles(latencies_before)}, beside them "
                f"{_quantiles(latencies_after)}",
                flush=True,
            )
            for connection in (*idle_connections, *active_connections):
                connection.sock.close()


def _memory_mb(server: servers.Server, title_prefix: str) -> float:
    """Return the memory of the process whose title begins with a prefix, in MB."""
    memory_mb = resources.sample(server.pid).memory_mb
    return next(mb for title, mb in memory_mb.items() if title.startswith(title_prefix))


def _send_one_request(connection: Connection) -> Connection:
    # The server closes a connection that sends no first request in time.
    connection.send_request()
    while not connection.read():
        pass
    return connection


def _latencies(active: list[Connection]) -> list[float]:
    """Send a request per second on each connection, and return their latencies in ms."""
    by_socket = {connection.sock: connection for connection in active}
    send_times: dict[socket.socket, float] = {}
    latencies_ms = []
    start_s = time.perf_counter()
    schedule_s = [start_s + number / len(active) for number in range(_SECONDS * len(active))]
    while schedule_s or send_times:
        if schedule_s and time.perf_counter() >= schedule_s[0]:
            connection = active[len(schedule_s) % len(active)]
            # A request that is due before the previous response is sent late, after that response.
            if connection.sock not in send_times:
                send_times[connection.sock] = schedule_s.pop(0)
                connection.send_request()
        wait = max(0.0, schedule_s[0] - time.perf_counter()) if schedule_s else 1.0
        for sock in select.select(list(send_times), [], [], wait)[0] if len(send_times) else ():
            if by_socket[sock].read():
                latencies_ms += [(time.perf_counter() - send_times.pop(sock)) * 1e3]
        if not send_times:
            time.sleep(wait)
    return latencies_ms


def _is_closed_by_server(connection: Connection) -> bool:
    connection.sock.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        return not connection.sock.recv(1 << 16, socket.MSG_PEEK)
    return False


def _quantiles(latencies: list[float]) -> str:
    p50, p99 = (quantile(latencies, share) for share in (0.5, 0.99))
    return f"p50 {p50:.1f}, p99 {p99:.1f} ms"


def regions(count: int) -> None:
    """Register `count` regions of one page, one after the other."""
    flags = (f"--shm-max-regions={count}", f"--shm-max-regions-per-uid={count}")
    names = [f"bench-large-{os.getpid()}-{number}" for number in range(count)]
    try:
        for name in names:
            Path("/dev/shm", name).write_bytes(bytes(_PAGE))
        with (
            _server([servers.BENCH / "models" / "simple"], flags) as server,
            server.client() as client,
        ):
            before_mb = processes.pss_mb(server.pid)
            register_ms = [
                _time_ms(partial(client.register_region, name, f"/{name}", _PAGE)) for name in names
            ]
            added_mb = processes.pss_mb(server.pid) - before_mb
            all_ms = _time_ms(partial(client.call, "GET", "/v2/systemsharedmemory/status"))
            one_ms = _time_ms(partial(client.call, "GET", f"{REGIONS_PATH}/{names[-1]}/status"))
            infer_ms = [_time_ms(partial(client.infer, "simple")) for _ in range(100)]
            unregister_ms = [
                _time_ms(partial(client.call, "POST", f"{REGIONS_PATH}/{name}/unregister"))
                for name in names
            ]
            print(
                f"{count:,} regions: {added_mb / count * 1e3:.2f} KB each; register p50 of the "
                f"first {_EDGE} {quantile(register_ms[:_EDGE], 0.5):.2f} ms, of the last "
                f"{quantile(register_ms[-_EDGE:], 0.5):.2f} ms; status of one {one_ms:.1f} ms, "
                f"of all {all_ms:.0f} ms; a request p50 {quantile(infer_ms, 0.5):.2f} ms; "
                f"unregister first {quantile(unregister_ms[:_EDGE], 0.5):.2f} ms, last "
                f"{quantile(unregister_ms[-_EDGE:], 0.5):.2f} ms",
                flush=True,
            )
    finally:
        for name in names:
            Path("/dev/shm", name).unlink(missing_ok=True)


def _time_ms(call: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    call()
    return (time.perf_counter() - start_s) * 1e3


def models(count: int) -> None:
    """Measure servers with copies of one model: one copy, half of them, and all."""
    with tempfile.TemporaryDirectory(prefix="bench-large-") as folder:
        folders = [_copy(Path(folder), number) for number in range(count)]
        first_mb = 0.0
        for loaded in (1, count // 2, count):
            served = folders[:loaded]
            with _server(served, ("--model-control-mode=explicit", "--load-model=*")) as server:
                memory_mb = processes.pss_mb(server.pid)
                first_mb = first_mb or memory_mb
                cpu_s = processes.cpu_s(server.pid)
                added_mb = (memory_mb - first_mb) / max(1, loaded - 1)
                line = f"{loaded} models: start {server.ready_s:.1f} s ({cpu_s:.1f} s of CPU), "
                line += f"{memory_mb:,.0f} MB"
                with server.client() as client:
                    index = _time_ms(partial(client.call, "POST", "/v2/repository/index"))
                    line += f", {added_mb:.1f} MB for one more, index {index:.0f} ms"
                    unload = [_time_ms(partial(_unload, client, model.name)) for model in served]
                total_s = sum(unload) / 1e3
                line += f"; unload p50 {quantile(unload, 0.5):.0f} ms, all {total_s:.1f} s"
                remaining_mb = processes.pss_mb(server.pid)
                start_s = time.perf_counter()
            stopped_s = time.perf_counter() - start_s
            print(f"{line}, {remaining_mb:,.0f} MB left; end {stopped_s:.1f} s", flush=True)


def _unload(client: Client, name: str) -> None:
    client.call("POST", f"/v2/repository/models/{name}/unload")


def _copy(folder: Path, number: int) -> Path:
    target = folder / f"simple{number:03}"
    shutil.copytree(servers.BENCH / "models" / "simple", target)
    config = target / "config.pbtxt"
    config.write_text(config.read_text().replace('"simple"', f'"{target.name}"'))
    return target


@contextlib.contextmanager
def _server(models: list[Path], flags: tuple[str, ...] = ()) -> Iterator[servers.Server]:
    notes: list[str] = []
    with servers.running(servers.Shmserve(), models, flags, notes=notes) as server:
        yield server
    for note in notes:
        print(note)


_CASES: dict[str, tuple[Callable[[int], None], int]] = {
    "connections": (connections, 10_000),
    "regions": (regions, 10_000),
    "models": (models, 200),
}


def main() -> None:
    """Run the measurement that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m bench.large", description=__doc__)
    parser.add_argument("case", choices=_CASES)
    parser.add_argument("--count", type=int)
    options = parser.parse_args()
    fd_limits.raise_limit()
    signal.signal(signal.SIGTERM, servers.stop_on_signal)
    print(machine.describe())
    case, default_count = _CASES[options.case]
    case(options.count or default_count)


if __name__ == "__main__":
    main()
