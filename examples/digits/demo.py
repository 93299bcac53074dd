"""Trains a network on handwritten digits, serves it beside a model of frames, and measures both.

Run it from any folder: `python examples/digits/demo.py`. It measures with and without dynamic
batching and shared memory, ends by itself, leaves nothing behind and needs no network.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse
from dataclasses import asdict
from pathlib import Path

import load
import numpy as np
from sklearn.datasets import load_digits
from sklearn.neural_network import MLPClassifier

import shmserve
from shmserve.serving import LocalServer

_HERE = Path(__file__).resolve().parent
_MODELS = [f"{_HERE / 'models.py'}:{name}" for name in ("Digits", "DigitsOneByOne", "Negative")]
_TRANSPORTS = ("HTTP bodies", "HTTP, shared memory", "shmserve.client")
_IN_PLACE = "the same, in place"
_PROCESSES = 4
_CLIENTS_EACH = 4
_SECONDS = 1.2
_FRAMES = ((480, 720), (720, 1280), (1080, 1920), (1080, 2560))
_ROW = "{:<12}{:<21}{:>10}{:>9}{:>9}{:>9}   {}"
_NOTE = """
HTTP bodies          tensors are sent in the requests and responses, as by clients on other hosts
HTTP, shared memory  tritonclient: tensors are in memory that the client registered once, which
                     pays for large tensors only
shmserve.client      the Python client of this host: it copies arrays to shared memory
the same, in place   frames and negatives are in memory that the client has allocated
"""


def main() -> None:
    """Train and serve the models, and print the measurements."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    # Exits through the clean-up that stops the server.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="shmserve-demo-") as folder:
        scratch = Path(folder)
        train(scratch)
        start_s = time.perf_counter()
        with shmserve.serve(_MODELS, set=f"weights={scratch / 'weights.npz'}") as server:
            print(f"the server is ready after {time.perf_counter() - start_s:.1f} s")
            measure_digits(server, scratch)
            measure_frames(server, scratch)
    print(_NOTE, end="")


def train(scratch: Path) -> None:
    """Train on two thirds of scikit-learn's 1,797 images, and save the weights and the others."""
    print("training a small network on handwritten digits ...", flush=True)
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    held_out = np.arange(len(images)) % 3 == 0
    network = MLPClassifier(64, learning_rate_init=0.01, max_iter=500, random_state=0)
    network.fit(images[~held_out], labels[~held_out])
    layers = zip(network.coefs_, network.intercepts_, strict=True)
    np.savez(scratch / "weights.npz", *(np.float32(array) for layer in layers for array in layer))
    np.savez(scratch / "digits.npz", images=images[held_out, None], expected=labels[held_out])
    print(f"trained on {np.sum(~held_out):,} images; the other {held_out.sum()} are requests")


def measure_digits(server: LocalServer, scratch: Path) -> None:
    """Print the throughput of small requests with and without dynamic batching."""
    print(f"\n{_PROCESSES * _CLIENTS_EACH} clients send one image of 256 bytes at a time:\n")
    print(_ROW.format("batches of", "transport", "images/s", "p50 ms", "p90 ms", "p99 ms", ""))
    for model, batch in (("digits", "up to 32"), ("digitsonebyone", "one image")):
        for transport in _TRANSPORTS:
            counts_before = count_executions(server, model)
            order = make_order(server, model, scratch / "digits.npz", transport, _CLIENTS_EACH)
            measured = run_processes(order)
            inferences, batches = count_executions(server, model) - counts_before
            correct = sum(client.correct for client in measured)
            accuracy = correct / sum(len(client.latencies) for client in measured)
            note = f"accuracy {accuracy:.1%}, mean batch {inferences / batches:.1f}"
            print(row(batch, transport, measured, note), flush=True)


def measure_frames(server: LocalServer, scratch: Path) -> None:
    """Print the throughput of frames of 1 to 8 MB with and without shared memory."""
    print("\none client sends a camera's frame and receives its negative:\n")
    print(_ROW.format("frame", "transport", "frames/s", "p50 ms", "p90 ms", "p99 ms", ""))
    for height, width in _FRAMES:
        frames = np.random.default_rng(0).integers(256, size=(3, height, width, 3), dtype=np.uint8)
        np.savez(scratch / "frames.npz", images=frames, expected=255 - frames[:, 0])
        name = f"{frames[0].nbytes / 1e6:.1f} MB"
        in_bodies = 0
        for transport in (*_TRANSPORTS, _IN_PLACE):
            order = make_order(server, "negative", scratch / "frames.npz", transport, 1)
            (measured,) = load.run(order)
            if measured.correct < len(measured.latencies):
                raise SystemExit("the server returned a wrong frame")
            in_bodies = in_bodies or len(measured.latencies)
            note = f"{len(measured.latencies) / in_bodies:.1f} x"
            print(row(name, transport, [measured], note), flush=True)


def make_order(
    server: LocalServer, model: str, data: Path, transport: str, clients: int
) -> load.Order:
    """Return the order of a load of one process."""
    port = urllib.parse.urlsplit(server.url).port or 0
    run_dir = str(server.run_dir)
    return load.Order(port, run_dir, model, str(data), transport, clients, 0.3, _SECONDS)


def run_processes(order: load.Order) -> list[load.Measured]:
    """Run a load in several processes at once."""
    command = [sys.executable, str(_HERE / "load.py"), json.dumps(asdict(order))]
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
            for _ in range(_PROCESSES)
        ]
        reports = [process.communicate()[0] for process in processes]
        if any(process.returncode for process in processes):
            raise SystemExit("a client failed; its error is above")
    return [load.Measured(**client) for report in reports for client in json.loads(report)]


def row(name: str, transport: str, measured: list[load.Measured], note: str) -> str:
    """Return the row of a load for the table; rates are per second, latencies in ms."""
    latencies = np.concatenate([client.latencies for client in measured])
    percentiles = (f"{p:.2f}" for p in np.percentile(latencies, [50, 90, 99]) * 1000)
    return _ROW.format(name, transport, f"{len(latencies) / _SECONDS:,.0f}", *percentiles, note)


def count_executions(server: LocalServer, model: str) -> np.ndarray:
    """Return the numbers of inferences and of executions of a model."""
    (statistics,) = server.statistics(model)
    return np.array([int(statistics["inference_count"]), int(statistics["execution_count"])])


if __name__ == "__main__":
    main()
