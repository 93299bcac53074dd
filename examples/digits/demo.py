"""Trains a small network on handwritten digits, serves it, and measures it.

Run it from anywhere: `python examples/digits/demo.py`. It measures with and without dynamic
batching and shared memory, ends by itself, leaves nothing behind and needs no network.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import train
from load import Orders

_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parent.parent
_PROCESSES = 4
_CLIENTS_EACH = 5
_BATCH_SIZES = [1, 4, 8]
_SECONDS = 2.5
_WARM_UP_SECONDS = 1.0
_READY_WITHIN_S = 60.0
_COLUMNS = "{:<20}{:^10}{:^5}{:>9}{:>8}{:>10}{:>8}{:>8}{:>8}   {}"
_HEADER = (
    "model",
    "batching",
    "shm",
    "images/s",
    "req/s",
    "accuracy",
    "p50 ms",
    "p90 ms",
    "p99 ms",
)
_NOTE = """
batching  requests that wait are run together, up to 32 images (max_queue_delay 500 µs)
shm       tensors lie in system shared memory that the client registered, not in HTTP bodies;
          an image of this size is 256 bytes, so there is little to save: large tensors gain most
"""


@dataclass
class Result:
    """One load, measured: latencies in seconds, and how often a batch of each size was run."""

    latencies: np.ndarray
    images: int
    correct: int
    seconds: float
    formed: Counter[int]


def main() -> None:
    """Train, serve, measure, print."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    ports = free_ports(3)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server is ended, too
    with tempfile.TemporaryDirectory(prefix="shmserve-demo-") as folder:
        scratch = Path(folder)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(scratch / "torch")  # else one is left behind
        print("training a small convolutional network on handwritten digits ...", flush=True)
        began = time.perf_counter()
        digits = train.load()
        network = train.train(digits)
        models = train.write_repository(network, scratch / "models")
        data = scratch / "held_out.npz"
        np.savez(data, images=digits.held_out_images, labels=digits.held_out_labels)
        print(f"trained on {len(digits.train_images):,} images", end=" ")
        print(f"and exported twice in {time.perf_counter() - began:.1f} s")
        began = time.perf_counter()
        with server(scratch, ports) as port:
            print(f"the server is ready after {time.perf_counter() - began:.1f} s\n")
            measure_all(port, models, data, len(digits.held_out_images))


def measure_all(port: int, models: list[str], data: Path, images: int) -> None:
    """Every model with both switches on and off, one row of the table each."""
    sizes = ", ".join(map(str, _BATCH_SIZES[:-1])) + f" and {_BATCH_SIZES[-1]}"
    print(f"{_PROCESSES * _CLIENTS_EACH} clients send {images} held-out images", end=" ")
    print(f"in requests of {sizes}, {_SECONDS:.1f} s a row:\n")
    print(_COLUMNS.format(*_HEADER, "images in a batch that the server formed"), flush=True)
    for model in models:
        for batching, shared_memory in ((True, True), (True, False), (False, True), (False, False)):
            name = model if batching else f"{model}_unbatched"
            result = measure(port, name, data, shared_memory)
            print(_row(model, batching, shared_memory, result), flush=True)
    print(_NOTE, end="")


def _row(model: str, batching: bool, shared_memory: bool, result: Result) -> str:
    p50, p90, p99 = np.percentile(result.latencies, [50, 90, 99]) * 1000
    return _COLUMNS.format(
        model,
        "yes" if batching else "no",
        "yes" if shared_memory else "no",
        f"{result.images / result.seconds:,.0f}",
        f"{len(result.latencies) / result.seconds:,.0f}",
        f"{result.correct / result.images:.2%}",
        *(f"{p:.2f}" for p in (p50, p90, p99)),
        _formed(result.formed),
    )


def _formed(formed: Counter[int]) -> str:
    """The mean size, and the share of batches in four classes of size."""
    batches = sum(formed.values())
    shares = []
    for name, low, high in (("1", 1, 1), ("2-8", 2, 8), ("9-16", 9, 16), ("17-32", 17, 32)):
        count = sum(count for size, count in formed.items() if low <= size <= high)
        if count:
            shares.append(f"{name}: {count / batches:.0%}")
    mean = sum(size * count for size, count in formed.items()) / batches
    return f"mean {mean:4.1f}  ({', '.join(shares)})"


def measure(port: int, model: str, data: Path, shared_memory: bool) -> Result:
    """Run one load against one model and add up what its processes saw."""
    orders = Orders(
        port=port,
        model=model,
        data=str(data),
        clients=_CLIENTS_EACH,
        shared_memory=shared_memory,
        warm_up=_WARM_UP_SECONDS,
        seconds=_SECONDS,
        batch_sizes=_BATCH_SIZES,
    )
    before = formed_batches(port, model)
    clients = run_load(orders)
    return Result(
        latencies=np.concatenate([client["latencies"] for client in clients]),
        images=sum(client["images"] for client in clients),
        correct=sum(client["correct"] for client in clients),
        seconds=_SECONDS,
        formed=formed_batches(port, model) - before,
    )


def run_load(orders: Orders) -> list[dict[str, Any]]:
    """Start the processes of a load, wait for them, and return what each client measured."""
    command = [sys.executable, str(_HERE / "load.py")]
    text = json.dumps(asdict(orders))
    with contextlib.ExitStack() as stack:
        processes = []
        for _ in range(_PROCESSES):
            process = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            stack.callback(process.kill)
            assert process.stdin is not None
            process.stdin.write(text)
            process.stdin.close()
            processes.append(process)
        reports = [process.stdout.read() for process in processes if process.stdout is not None]
        if any(process.wait() for process in processes):
            raise SystemExit("a client failed; see above")
        return [client for report in reports for client in json.loads(report)]


def formed_batches(port: int, model: str) -> Counter[int]:
    """How often the server has run a batch of each size, from its statistics."""
    status, body = get(port, f"/v2/models/{model}/stats")
    if status != 200:
        raise SystemExit(f"the server does not tell its statistics: {body!r}")
    batches = json.loads(body)["model_stats"][0]["batch_stats"]
    return Counter(
        {int(batch["batch_size"]): int(batch["compute_infer"]["count"]) for batch in batches}
    )


@contextlib.contextmanager
def server(scratch: Path, ports: list[int]) -> Iterator[int]:
    """A server of the repository in `scratch`, on these ports; its log is shown if it fails."""
    http_port, grpc_port, metrics_port = ports
    command = [
        *(sys.executable, "-m", "shmserve", "serve", f"--model-repository={scratch / 'models'}"),
        *("--http-address=127.0.0.1", f"--http-port={http_port}"),
        *("--grpc-address=127.0.0.1", f"--grpc-port={grpc_port}"),
        *("--metrics-address=127.0.0.1", f"--metrics-port={metrics_port}"),
        f"--run-dir={scratch / 'run'}",
    ]
    log = scratch / "log"
    with log.open("wb") as output:
        # A session of its own: Ctrl-C ends this program, which then ends the server.
        process = subprocess.Popen(
            command, cwd=_ROOT, stdout=output, stderr=output, start_new_session=True
        )
    try:
        wait_ready(process, http_port, log)
        yield http_port
    finally:
        process.terminate()
        process.wait()


def wait_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Ask until the server is ready; leave with its log if it ends, or takes too long."""
    deadline = time.monotonic() + _READY_WITHIN_S
    ended = os.pidfd_open(process.pid)
    try:
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if get(port, "/v2/health/ready")[0] == 200:
                    return
            if select.select([ended], [], [], 0.02)[0] or time.monotonic() > deadline:
                raise SystemExit(
                    f"the server did not become ready:\n{log.read_text(errors='replace')}"
                )
    finally:
        os.close(ended)


def get(port: int, path: str) -> tuple[int, bytes]:
    """Status and body of a GET."""
    with contextlib.closing(
        http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    ) as connection:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for free in sockets:
            free.bind(("127.0.0.1", 0))
        return [free.getsockname()[1] for free in sockets]


if __name__ == "__main__":
    main()
