"""The cases of the native client.

`shmserve perf` measures shmserve and perf_analyzer measures Triton, in turns. Triton's figure is
that of its best listener for the same work (HTTP or gRPC with binary tensors, or system shared
memory). For 16 MiB, the figure beside shmserve's is one memcpy.
"""

from __future__ import annotations

import mmap
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bench.cases.tables import through_shm
from bench.load import perf
from bench.load.perf import P50, THROUGHPUT, Load, run_shmserve_perf
from bench.report.results import SHMSERVE, TRITON, Figure, Row, Target
from bench.system.servers import BENCH, Server, running

if TYPE_CHECKING:
    from bench.context import Context


_COPY_BYTES = 16 << 20
_COPIES = 60


def memcpy_sample() -> float:
    """Return the median µs of one memcpy of 16 MiB between two touched shared mappings."""
    with mmap.mmap(-1, _COPY_BYTES) as source, mmap.mmap(-1, _COPY_BYTES) as target:
        source.write(b"\1" * _COPY_BYTES)
        target.write(b"\2" * _COPY_BYTES)
        with memoryview(source) as source_view, memoryview(target) as target_view:
            return statistics.median(_copy(source_view, target_view) for _ in range(_COPIES))


def _copy(source_view: memoryview, target_view: memoryview) -> float:
    start_ns = time.perf_counter_ns()
    target_view[:] = source_view
    return (time.perf_counter_ns() - start_ns) / 1000


@dataclass(frozen=True)
class NativeCase:
    """A case of the native client, and the equivalent load for Triton.

    Attributes:
        elements: The number of elements of a tensor; 0 for the model's own shape.
        in_place: Whether inputs and outputs are in regions.
        peer: The load for Triton. Without it, the other column is one memcpy of 16 MiB.
    """

    name: str
    model: str
    in_place: bool
    in_flight: int
    elements: int
    peer: Load | None
    listeners: tuple[str, ...]
    figure: Figure

    @property
    def column(self) -> str:
        """Return the name of perf_analyzer's column for this figure."""
        return THROUGHPUT if self.in_flight > 1 else P50


def _case(
    name: str,
    title: str,
    model: str,
    in_place: bool,
    in_flight: int,
    elements: int,
    must: float,
    aim: float,
    *,
    flags: tuple[str, ...] = (),
    peer: Load | None = None,
    without_triton: bool = False,
    listeners: tuple[str, ...] = ("http", "grpc"),
) -> NativeCase:
    has_concurrency = in_flight > 1
    figure = Figure(
        name,
        f"native client, {title}",
        "infer/s" if has_concurrency else "µs",
        "higher" if has_concurrency else "lower",
        Target("ratio", must, aim),
    )
    peer_load = None if without_triton else peer or Load(model, in_flight, flags)
    return NativeCase(name, model, in_place, in_flight, elements, peer_load, listeners, figure)


NATIVE = (
    _case("native", "simple, 16 in flight", "simple", False, 16, 0, 2.5, 4.0),
    _case("native-latency", "simple, 1 in flight: p50", "simple", False, 1, 0, 0.8, 0.5),
    _case(
        "native-1k",
        "1 KB identity, 1 in flight: p50",
        *("identity", False, 1, 256, 1.2, 0.8),
        flags=("--shape", "INPUT0:256"),
        listeners=("http",),
    ),
    _case(
        "native-600k",
        "600 KB identity in place, 8 in flight",
        *("identity", True, 8, 153_600, 3.0, 5.0),
        peer=through_shm(153_600, 8),
        listeners=("http",),
    ),
    _case(
        "native-16m",
        "16 MiB identity in place: p50 / one memcpy",
        *("identity", True, 1, 4_194_304, 1.6, 1.15),
        without_triton=True,
    ),
)


def run(case: NativeCase, context: Context) -> list[Row]:
    """Return samples of both servers, measured in turns. Raises the error of either load."""
    row = Row(case.figure, {})
    analyzer = context.analyzer if case.peer is not None else None
    with ExitStack() as stack:
        servers: dict[str, Server] = {}
        for product in context.products(with_triton=analyzer is not None):
            context.log(f"{case.name}: starting {product.name}")
            model = BENCH / "models" / case.model
            server = running(product, [model], notes=context.results.notes)
            servers[product.name] = stack.enter_context(server)
        for _ in range(context.settings.repeats):
            value = _run_perf(case, servers[SHMSERVE], context.settings.seconds)
            row.samples.setdefault(SHMSERVE, []).append(value)
            if case.peer is None:
                row.samples.setdefault(TRITON, []).append(memcpy_sample())
            elif TRITON in servers and analyzer is not None:
                triton_figures = [
                    perf.measure(
                        analyzer,
                        replace(case.peer, listener=listener),
                        servers[TRITON].address(listener),
                        context.settings.seconds,
                    )[case.column]
                    for listener in case.listeners
                ]
                best_figure = max(triton_figures) if case.in_flight > 1 else min(triton_figures)
                row.samples.setdefault(TRITON, []).append(best_figure)
            figures = [f"{name} {values[-1]:,.0f}" for name, values in row.samples.items()]
            context.log(f"{case.name}: {', '.join(figures)} {case.figure.unit}")
    return [row]


def _run_perf(case: NativeCase, server: Server, seconds: float) -> float:
    """Run `shmserve perf` once and return the figure; raise LoadFailed if it fails."""
    load = [f"--run-dir={server.run_dir}", f"--concurrency={case.in_flight}"]
    if case.elements:
        load.append(f"--shape=INPUT0:{case.elements}")
    if case.in_place:
        load += ["--shared-memory=system", f"--output-byte-size={4 * case.elements}"]
    point = run_shmserve_perf(case.model, *load, seconds=seconds)
    return float(point["per_second"] if case.in_flight > 1 else point["latency"]["p50"] * 1000)
