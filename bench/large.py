"""The cost of large numbers: `python -m bench.large connections|regions|models [--count N]`.

connections   10,000 idle connections over HTTP, then over gRPC, and 100 beside them that send a
              request per second: the gateway's memory for each, and the latency of the requests
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

from bench.load.attacks import Honest, simple_request
from bench.load.client import BODIES, Client
from bench.soak import quantile
from bench.system import machine, processes, resources, servers
from shmserve.common import fd_limits

_ASKING = 100
_SECONDS = 5
_PAGE = 4096
_FEW = 500
_BODY = json.dumps(BODIES["simple"])


class Connection(Protocol):
    """A connection with at most one request in flight."""

    sock: socket.socket

    def ask(self) -> None:
        """Send a request."""

    def read(self) -> int:
        """Read the available part of the response, and return whether it is complete."""


class Http:
    """An HTTP connection."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._connection.connect()
        self.sock: socket.socket = self._connection.sock

    def ask(self) -> None:
        """Send a request."""
        self._connection.request("POST", "/v2/models/simple/infer", _BODY)

    def read(self) -> int:
        """Read a response, and return the number of responses."""
        response = self._connection.getresponse()
        if response.status != 200:
            raise SystemExit(f"HTTP: {response.status} {response.read()!r}")
        response.read()
        return 1


class Grpc(Honest):
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
    kinds: dict[str, Callable[[int], Connection]] = {"http": Http, "grpc": Grpc}
    for name, make in kinds.items():
        with _server([servers.BENCH / "models" / "simple"]) as server:
            port = server.ports.grpc if name == "grpc" else server.ports.http
            gateway = f"gateway {name} 0"
            asking = [make(port) for _ in range(_ASKING)]
            alone = _latencies(asking)
            before = resources.sample(server.pid).memory_mb
            began = time.perf_counter()
            idle = [_used(make(port)) for _ in range(count)]
            took = time.perf_counter() - began
            after = resources.sample(server.pid).memory_mb
            crowded = _latencies(asking)
            gone = sum(map(_ended, idle))
            added = (after[_found(after, gateway)] - before[_found(before, gateway)]) / count * 1e3
            print(
                f"{name}: {count:,} idle, {gone} of them ended; {took / count * 1e6:,.0f} µs and "
                f"{added:.1f} KB each; {_ASKING} that ask: alone {_shown(alone)}, beside them "
                f"{_shown(crowded)}",
                flush=True,
            )
            for each in (*idle, *asking):
                each.sock.close()


def _found(table: dict[str, float], start: str) -> str:
    return next(title for title in table if title.startswith(start[:-2]))


def _used(connection: Connection) -> Connection:
    # The server closes a connection that sends no first request in time.
    connection.ask()
    while not connection.read():
        pass
    return connection


def _latencies(asking: list[Connection]) -> list[float]:
    """Send a request per second on each connection, and return their latencies in ms."""
    by_fd = {each.sock: each for each in asking}
    sent: dict[socket.socket, float] = {}
    latencies_ms = []
    began = time.perf_counter()
    due = [began + number / len(asking) for number in range(_SECONDS * len(asking))]
    while due or sent:
        if due and time.perf_counter() >= due[0]:
            connection = asking[len(due) % len(asking)]
            # Otherwise the request is late, and is sent after the response to the previous request.
            if connection.sock not in sent:
                sent[connection.sock] = due.pop(0)
                connection.ask()
        wait = max(0.0, due[0] - time.perf_counter()) if due else 1.0
        for sock in select.select(list(sent), [], [], wait)[0] if len(sent) else ():
            if by_fd[sock].read():
                latencies_ms += [(time.perf_counter() - sent.pop(sock)) * 1e3]
        if not sent:
            time.sleep(wait)
    return latencies_ms


def _ended(connection: Connection) -> bool:
    connection.sock.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        return not connection.sock.recv(1 << 16, socket.MSG_PEEK)
    return False


def _shown(latencies: list[float]) -> str:
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
            before = processes.pss_mb(server.pid)
            registered = [_timed(partial(_register, client, name)) for name in names]
            memory = processes.pss_mb(server.pid) - before
            status = _timed(partial(client.call, "GET", "/v2/systemsharedmemory/status"))
            one = _timed(partial(client.call, "GET", f"{_REGION}/{names[-1]}/status"))
            infer = [_timed(partial(client.infer, "simple")) for _ in range(100)]
            removed = [
                _timed(partial(client.call, "POST", f"{_REGION}/{name}/unregister"))
                for name in names
            ]
            print(
                f"{count:,} regions: {memory / count * 1e3:.2f} KB each; register p50 of the first "
                f"{_FEW} {quantile(registered[:_FEW], 0.5):.2f} ms, of the last "
                f"{quantile(registered[-_FEW:], 0.5):.2f} ms; status of one {one:.1f} ms, of all "
                f"{status:.0f} ms; a request p50 {quantile(infer, 0.5):.2f} ms; unregister first "
                f"{quantile(removed[:_FEW], 0.5):.2f} ms, last "
                f"{quantile(removed[-_FEW:], 0.5):.2f} ms",
                flush=True,
            )
    finally:
        for name in names:
            Path("/dev/shm", name).unlink(missing_ok=True)


_REGION = "/v2/systemsharedmemory/region"


def _register(client: Client, name: str) -> None:
    where = {"key": f"/{name}", "offset": 0, "byte_size": _PAGE}
    client.call("POST", f"{_REGION}/{name}/register", where)


def _timed(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return (time.perf_counter() - began) * 1e3


def models(count: int) -> None:
    """Measure servers with copies of one model: one copy, half of them, and all."""
    with tempfile.TemporaryDirectory(prefix="bench-large-") as folder:
        named = [_copy(Path(folder), number) for number in range(count)]
        lone = 0.0
        for several in (1, count // 2, count):
            served = named[:several]
            with _server(served, ("--model-control-mode=explicit", "--load-model=*")) as server:
                memory = processes.pss_mb(server.pid)
                lone = lone or memory
                cpu = processes.cpu_s(server.pid)
                more = (memory - lone) / max(1, several - 1)
                line = f"{several} models: start {server.ready_s:.1f} s ({cpu:.1f} s of CPU), "
                line += f"{memory:,.0f} MB"
                with server.client() as client:
                    index = _timed(partial(client.call, "POST", "/v2/repository/index"))
                    line += f", {more:.1f} MB for one more, index {index:.0f} ms"
                    times = [_timed(partial(_unload, client, each.name)) for each in served]
                line += f"; unload p50 {quantile(times, 0.5):.0f} ms, all {sum(times) / 1e3:.1f} s"
                remaining_mb = processes.pss_mb(server.pid)
                began = time.perf_counter()
            stopped = time.perf_counter() - began
            print(f"{line}, {remaining_mb:,.0f} MB left; end {stopped:.1f} s", flush=True)


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
    signal.signal(signal.SIGTERM, servers.leave)
    print(machine.describe())
    case, usual = _CASES[options.case]
    case(options.count or usual)


if __name__ == "__main__":
    main()
