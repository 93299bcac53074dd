"""`python -m bench.load.mixed ...`: an open-loop load over every transport, for `bench.soak`.

Requests begin at scheduled times whether earlier ones have completed or not, and a latency counts
from the scheduled time. A line of JSON per second has the latencies (ms) of the requests completed
in it, by transport, and the errors.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp
import grpc
import numpy as np
from tritonclient.grpc import service_pb2 as pb

import shmserve.client.aio
from bench.load.attacks import simple_message
from bench.load.client import BODIES

_METHOD = "/inference.GRPCInferenceService/ModelInfer"
_PATIENCE_S = 20.0
_A = np.arange(16, dtype=np.int32).reshape(1, 16)
_B = np.ones_like(_A)

SendRequest = Callable[[int], Awaitable[Any]]


class Mixed:
    """The clients of all protocols, and the requests completed since the last line."""

    def __init__(self, run_dir: str, http_port: int, grpc_port: int) -> None:
        self._run_dir = run_dir
        self._url = f"http://127.0.0.1:{http_port}/v2/models/simple"
        self._grpc = f"127.0.0.1:{grpc_port}"
        self._latencies_ms: dict[str, list[float]] = {}
        self._failures: list[str] = []

    async def run(self, rate: float, seconds: float) -> None:
        """Send `rate` requests per second over each transport for some seconds."""
        async with (
            aiohttp.ClientSession() as http,
            grpc.aio.insecure_channel(self._grpc) as channel,
            shmserve.client.aio.connect(self._run_dir) as native,
        ):
            infer = channel.unary_unary(
                _METHOD, response_deserializer=pb.ModelInferResponse.FromString
            )
            message = simple_message()
            region = await native.allocate(
                {"INPUT0": ((4096,), "FP32"), "OUTPUT0": ((4096,), "FP32")}
            )

            async def send_http(number: int) -> None:
                async with http.post(f"{self._url}/infer", json=BODIES["simple"]) as response:
                    assert response.status == 200, await response.text()
                    await response.read()

            async def send_on_new_connection(number: int) -> None:
                async with aiohttp.ClientSession() as session, session.get(self._url) as response:
                    assert response.status == 200, await response.text()

            async def send_grpc(number: int) -> None:
                await infer(message, timeout=_PATIENCE_S)

            async def send_native(number: int) -> None:
                result = await native.infer("simple", INPUT0=_A, INPUT1=_B)
                assert (result["OUTPUT0"] == _A + _B).all()

            async def send_region(number: int) -> None:
                await native.infer("identity", region)

            async def send_stream(number: int) -> None:
                async for _ in native.stream("repeat", COUNT=np.array([4], np.int32)):
                    pass

            senders = {
                "http": send_http,
                "http, a new connection": send_on_new_connection,
                "grpc": send_grpc,
                "native": send_native,
                "region": send_region,
                "stream": send_stream,
            }
            await self._drive(senders, rate, seconds)

    async def _drive(self, senders: Mapping[str, SendRequest], rate: float, seconds: float) -> None:
        start_s = time.perf_counter()
        tasks: set[asyncio.Task[None]] = set()
        reported_s = start_s
        for number in range(int(rate * seconds)):
            due_s = start_s + number / rate
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            for protocol, send in senders.items():
                task = asyncio.create_task(self._run_request(protocol, send, number, due_s))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            if time.perf_counter() - reported_s >= 1.0:
                reported_s = time.perf_counter()
                self._report()
        await asyncio.gather(*tasks)
        self._report()

    async def _run_request(
        self, protocol: str, send: SendRequest, number: int, due_s: float
    ) -> None:
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await send(number)
        except Exception as error:
            self._failures.append(f"{protocol}: {error!r}"[:200])
        self._latencies_ms.setdefault(protocol, []).append((time.perf_counter() - due_s) * 1e3)

    def _report(self) -> None:
        latencies = {
            protocol: [round(ms, 2) for ms in times_ms]
            for protocol, times_ms in self._latencies_ms.items()
        }
        print(json.dumps({"ms": latencies, "failures": self._failures}), flush=True)
        self._latencies_ms, self._failures = {}, []


if __name__ == "__main__":
    where, http_port, grpc_port, rate, seconds = sys.argv[1:]
    asyncio.run(Mixed(where, int(http_port), int(grpc_port)).run(float(rate), float(seconds)))
