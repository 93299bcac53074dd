"""`python -m bench.device [--seconds S] [--repeats N]`: the cost of a request on a GPU.

The model is a `torch.nn.Linear` on 16 MiB. The native client sends requests with tensors on the
device, in pinned host memory, in ordinary host memory, and inside messages. The same layer also
runs in a process of its own, up to the end of the device's work. The table has the median, the
smallest and the largest sample in microseconds. A CUDA device is required; there is no peer.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import shmserve.client
from bench.system.servers import Shmserve, running

SIDE = 2048  # SIDE * SIDE float32 are 16 MiB
_WARM_UP_S = 0.5
_MODEL = f"""
import torch

class Model(torch.nn.Linear):
    def __init__(self):
        super().__init__({SIDE}, {SIDE})
"""
_CONFIG = f"""
backend: "pytorch"
input [ {{ name: "input" data_type: TYPE_FP32 dims: [ {SIDE}, {SIDE} ] }} ]
output [ {{ name: "output" data_type: TYPE_FP32 dims: [ {SIDE}, {SIDE} ] }} ]
instance_group [ {{ kind: KIND_GPU gpus: [ 0 ] count: 1 }} ]
"""


def _median_us(call: Callable[[], object], seconds: float) -> float:
    times = []
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        start_ns = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - start_ns)
    return statistics.median(times) / 1000


def _local_layer() -> Callable[[], object]:
    """Return a function that runs the layer in this process, with its output in place."""
    import torch

    with torch.inference_mode():
        layer = torch.nn.Linear(SIDE, SIDE).to("cuda:0")
        x = torch.rand(SIDE, SIDE, device="cuda:0")

    @torch.inference_mode()
    def call() -> None:
        layer(x)
        torch.cuda.synchronize()

    return call


def _client_calls(client: shmserve.client.Server) -> dict[str, Callable[[], object]]:
    spec = ((SIDE, SIDE), "FP32")
    values = np.random.default_rng(0).random((SIDE, SIDE), np.float32)
    specs = {"input": spec, "output": spec}
    device = client.allocate(specs, device="cuda:0")
    device["input"].fill(values)
    pinned_region, unpinned_region = client.allocate(specs, pin=True), client.allocate(specs)
    pinned_region["input"][:] = unpinned_region["input"][:] = values
    kinds: dict[str, Any] = {
        "in place on the device": device,
        "in pinned host memory": pinned_region,
        "in host memory": unpinned_region,
        "given as an array": {"input": values},
    }
    return {name: partial(client.infer, "linear", inputs) for name, inputs in kinds.items()}


def main() -> int:
    """Measure and print the table.

    Returns:
        The exit status: 2 if torch finds no CUDA device.
    """
    parser = argparse.ArgumentParser(prog="python -m bench.device", description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds of each sample (2)")
    parser.add_argument("--repeats", type=int, default=5, help="samples of each case (5)")
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("bench.device: torch finds no CUDA device here", file=sys.stderr)
        return 2
    notes: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "linear"
        (model / "1").mkdir(parents=True)
        (model / "1" / "model.py").write_text(_MODEL)
        (model / "config.pbtxt").write_text(_CONFIG)
        with (
            running(Shmserve(), [model], notes=notes) as server,
            shmserve.client.connect(server.run_dir) as client,
        ):
            cases = {"the layer alone, in one process": _local_layer(), **_client_calls(client)}
            samples: dict[str, list[float]] = {name: [] for name in cases}
            for call in cases.values():
                _median_us(call, _WARM_UP_S)
            for _ in range(options.repeats):
                for name, call in cases.items():
                    samples[name].append(_median_us(call, options.seconds))
    print(f"torch.nn.Linear on 16 MiB, {torch.cuda.get_device_name(0)}, torch {torch.__version__}")
    for name, values in samples.items():
        median = statistics.median(values)
        print(f"{name:34} {median:8,.0f} µs  [{min(values):,.0f} .. {max(values):,.0f}]")
    for note in notes:
        print(note)
    return 0


if __name__ == "__main__":
    sys.exit(main())
