"""The cases of a model that sends many responses to a request.

The same load generator measures both servers in turns.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from bench.load.perf import run_shmserve_perf
from bench.report.results import SHMSERVE, Figure, Row, Target
from bench.system.servers import BENCH, Server, running

if TYPE_CHECKING:
    from bench.context import Context


MODEL = "repeat"
RATE_UNIT, LATENCY_UNIT = "responses/s", "µs"


@dataclass(frozen=True)
class StreamCase:
    """A case with concurrent streams of requests that have many responses each.

    Attributes:
        streams: The number of concurrent streams. Each sends its requests one after the other.
        count: The number of responses to a request.
        transport: The transport to shmserve; the transport to Triton is gRPC.
    """

    name: str
    transport: Literal["grpc", "native"]
    streams: int
    count: int
    figures: tuple[Figure, ...]


def _rate(name: str, title: str, must: float, aim: float) -> Figure:
    return Figure(name, title, RATE_UNIT, "higher", Target("ratio", must, aim))


_STREAM_TITLE = "1,000 responses of 16 bytes a request, one gRPC stream"

STREAMS = (
    StreamCase(
        "stream",
        "grpc",
        1,
        1000,
        (
            _rate("stream", _STREAM_TITLE, 1.0, 2.0),
            Figure(
                "stream-first",
                "the same: time to the first response, p50",
                LATENCY_UNIT,
                "lower",
                Target("ratio", 1.2, 0.8),
            ),
        ),
    ),
    StreamCase(
        "streams-16",
        "grpc",
        16,
        100,
        (_rate("streams-16", "100 responses a request, 16 gRPC streams at once", 1.0, 2.0),),
    ),
    StreamCase(
        "native-stream",
        "native",
        1,
        1000,
        (_rate("native-stream", "native client, 1,000 responses a request", 3.0, 6.0),),
    ),
)


def run(case: StreamCase, context: Context) -> list[Row]:
    """Return samples of both servers, measured in turns. Raises the error of either load."""
    rows = [Row(figure, {}) for figure in case.figures]
    with ExitStack() as stack:
        servers: list[Server] = []
        for product in context.products():
            context.log(f"{case.name}: starting {product.name}")
            server = stack.enter_context(
                running(product, [BENCH / "models" / MODEL], notes=context.results.notes)
            )
            servers.append(server)
        for turn in range(context.settings.repeats):
            for server in servers[:: -1 if turn % 2 else 1]:
                sample = _sample(case, server, context.settings.seconds)
                for row in rows:
                    row.samples.setdefault(server.name, []).append(sample[row.figure.unit])
                unit = rows[0].figure.unit
                context.log(f"{case.name}: {server.name} {sample[unit]:,.0f} {unit}")
    return rows


def _sample(case: StreamCase, server: Server, seconds: float) -> dict[str, float]:
    """Run the load generator once; raise LoadFailed if it fails."""
    native = case.transport == "native" and server.name == SHMSERVE
    address = f"--run-dir={server.run_dir}" if native else f"--url=grpc://{server.address('grpc')}"
    load = (f"--concurrency={case.streams}", f"--input=COUNT=[{case.count}]")
    point = run_shmserve_perf(MODEL, address, *load, seconds=seconds)
    return {RATE_UNIT: point["responses_per_second"], LATENCY_UNIT: point["first"]["p50"] * 1000}
