"""The load of a program that uses `shmserve.client`: `python -m bench.load.native RUN_DIR ...`.

A process of its own, as perf_analyzer is. Prints one line of JSON: inferences a second, and the
median time of one in microseconds.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

import shmserve.client

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shmserve.client import Server

_WARM_UP_S = 0.5


def _simple(server: Server, in_flight: int, elements: int) -> list[Mapping[str, Any]]:
    numbers = np.arange(16, dtype=np.int32).reshape(1, 16)
    return [{"INPUT0": numbers, "INPUT1": np.ones_like(numbers)}]


def _plain(server: Server, in_flight: int, elements: int) -> list[Mapping[str, Any]]:
    return [{"INPUT0": np.arange(elements, dtype=np.float32)}]


def _in_place(server: Server, in_flight: int, elements: int) -> list[Mapping[str, Any]]:
    """A region a request in flight: inputs are read and outputs written where they are."""
    form = ((elements,), "FP32")
    regions = [server.allocate({"INPUT0": form, "OUTPUT0": form}) for _ in range(in_flight)]
    for region in regions:
        region["INPUT0"][:] = 1.0
        region["OUTPUT0"][:] = 0.0
    return list(regions)


_INPUTS = {"simple": _simple, "plain": _plain, "in-place": _in_place}


def _throughput(server: Server, model: str, inputs: list[Any], in_flight: int, s: float) -> float:
    began = time.perf_counter()

    def given() -> Iterator[Any]:
        for one in itertools.cycle(inputs):
            if time.perf_counter() - began > s:
                return
            yield one

    count = sum(1 for _ in server.map(model, given(), in_flight=in_flight))
    return count / (time.perf_counter() - began)


def _median_us(server: Server, model: str, inputs: list[Any], s: float) -> float:
    times: list[int] = []
    end = time.perf_counter() + s
    while time.perf_counter() < end:
        began = time.perf_counter_ns()
        server.infer(model, inputs[0])
        times.append(time.perf_counter_ns() - began)
    return statistics.median(times) / 1000


def main(arguments: list[str]) -> None:
    """RUN_DIR MODEL KIND IN_FLIGHT ELEMENTS SECONDS."""
    run_dir, model, kind = arguments[:3]
    in_flight, elements = int(arguments[3]), int(arguments[4])
    seconds = float(arguments[5])
    with shmserve.client.connect(run_dir) as server:
        inputs = _INPUTS[kind](server, in_flight, elements)
        if in_flight > 1:
            _throughput(server, model, inputs, in_flight, _WARM_UP_S)
            found = {"infer/s": _throughput(server, model, inputs, in_flight, seconds)}
        else:
            _median_us(server, model, inputs, _WARM_UP_S)
            found = {"µs": _median_us(server, model, inputs, seconds)}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
