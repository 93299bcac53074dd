"""The load of a program that reads many responses to a request: `python -m bench.stream_load ...`.

A process of its own, the same for both servers: over gRPC it takes the responses as bytes, and so
costs little beside them. Prints one line of JSON: responses a second, and the median time from a
request to its first response in microseconds.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

MODEL = "repeat"
RESPONSES, FIRST = "responses/s", "µs"

_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
_WARM_UP_S = 0.5


@dataclass
class Counted:
    """What has come: `first_us` of each request."""

    responses: int = 0
    first_us: list[float] = field(default_factory=list)


def request(count: int) -> bytes:
    """A ModelInferRequest for so many responses."""
    import tritonclient.grpc as triton
    from tritonclient.grpc import service_pb2 as pb

    asked = triton.InferInput("COUNT", [1], "INT32")
    asked.set_data_from_numpy(np.array([count], np.int32))
    message = pb.ModelInferRequest(model_name=MODEL, inputs=[asked._get_tensor()])
    message.raw_input_contents.append(asked._get_content())
    packed: bytes = message.SerializeToString()
    return packed


async def stream(channel: Any, packed: bytes, count: int, until: float, counted: Counted) -> None:
    """One stream: request after request, each when all responses to the one before it are read."""
    call = channel.stream_stream(_METHOD)()
    while time.perf_counter() < until:
        began = time.perf_counter_ns()
        await call.write(packed)
        await refused_if_error(await call.read())
        counted.first_us.append((time.perf_counter_ns() - began) / 1000)
        for _ in range(count - 1):
            await call.read()
        counted.responses += count
    await call.done_writing()
    if await call.read():
        raise SystemExit("there were more responses than that")


async def refused_if_error(response: bytes) -> None:
    """End where the first response to a request is an error."""
    from tritonclient.grpc import service_pb2 as pb

    found = pb.ModelStreamInferResponse.FromString(response)
    if found.error_message:
        raise SystemExit(found.error_message)


async def over_grpc(address: str, streams: int, count: int, seconds: float) -> dict[str, float]:
    """So many streams at once, on one connection."""
    import grpc

    packed = request(count)
    async with grpc.aio.insecure_channel(address) as channel:
        for s in (_WARM_UP_S, seconds):
            counted, began = Counted(), time.perf_counter()
            work = (stream(channel, packed, count, began + s, counted) for _ in range(streams))
            await asyncio.gather(*work)
            took = time.perf_counter() - began
    return {RESPONSES: counted.responses / took, FIRST: statistics.median(counted.first_us)}


def natively(run_dir: str, count: int, seconds: float) -> dict[str, float]:
    """One stream of `shmserve.client` after the other."""
    import shmserve.client

    asked = np.array([count], np.int32)
    with shmserve.client.connect(run_dir) as server:
        for s in (_WARM_UP_S, seconds):
            counted, started = Counted(), time.perf_counter()
            while time.perf_counter() < started + s:
                began = time.perf_counter_ns()
                with server.stream(MODEL, COUNT=asked) as responses:
                    next(responses)
                    counted.first_us.append((time.perf_counter_ns() - began) / 1000)
                    counted.responses += 1 + sum(1 for _ in responses)
            took = time.perf_counter() - started
    return {RESPONSES: counted.responses / took, FIRST: statistics.median(counted.first_us)}


def main(arguments: list[str]) -> None:
    """`grpc` HOST:PORT or `native` RUN_DIR; STREAMS COUNT SECONDS."""
    kind, where, streams, count, seconds = arguments
    if kind == "grpc":
        found = asyncio.run(over_grpc(where, int(streams), int(count), float(seconds)))
    else:
        found = natively(where, int(count), float(seconds))
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
