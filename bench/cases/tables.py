"""The tables of cases: loads of both servers, and measurements of one server without load."""

from __future__ import annotations

from dataclasses import dataclass

from bench.cases import standing
from bench.load.perf import P50, P99, THROUGHPUT, Load
from bench.report.results import Better, Figure, Target
from bench.system.ensembles import CHAIN, DIAMOND, NAPS


@dataclass(frozen=True)
class LoadCase:
    """A load for perf_analyzer, and the column of its report that is the figure.

    Attributes:
        further_figures: Further columns of the same reports, which are separate figures.
    """

    name: str
    load: Load
    column: str
    figure: Figure
    further_figures: tuple[tuple[str, Figure], ...] = ()


@dataclass(frozen=True)
class StandingCase:
    """A measurement of one server without load, and the figures that it returns, in order."""

    name: str
    model: str
    measure: standing.Measure
    figures: tuple[Figure, ...]
    with_triton: bool = True


def _load(name: str, title: str, load: Load, column: str, must: float, aim: float) -> LoadCase:
    better: Better = "higher" if column == THROUGHPUT else "lower"
    unit = "infer/s" if column == THROUGHPUT else "µs"
    figure = Figure(name, title, unit, better, Target("ratio", must, aim))
    return LoadCase(name, load, column, figure)


_JSON = ("--input-tensor-format", "json", "--output-tensor-format", "json")


def through_shm(elements: int, in_flight: int, listener: str = "http") -> Load:
    """Return a load of `elements` FP32 values in and out through system shared memory."""
    flags = ("--shared-memory", "system", "--output-shared-memory-size", str(4 * elements))
    return Load("identity", in_flight, (*flags, "--shape", f"INPUT0:{elements}"), listener)


def _simple_grpc(in_flight: int) -> Load:
    return Load("simple", in_flight, listener="grpc")


def _in_messages(elements: int, in_flight: int, listener: str = "grpc") -> Load:
    """Return a load of `elements` FP32 values in and out in messages."""
    return Load("identity", in_flight, ("--shape", f"INPUT0:{elements}"), listener)


LOADS = (
    _load("binary", "simple, binary, 16 in flight", Load("simple", 16), THROUGHPUT, 0.8, 1.2),
    _load("json", "simple, JSON, 16 in flight", Load("simple", 16, _JSON), THROUGHPUT, 0.8, 1.5),
    _load("grpc", "simple, gRPC, 16 in flight", _simple_grpc(16), THROUGHPUT, 1.1, 1.3),
    _load("grpc-64", "simple, gRPC, 64 in flight", _simple_grpc(64), THROUGHPUT, 1.1, 1.3),
    _load("grpc-p50", "simple, gRPC, 1 in flight: p50", _simple_grpc(1), P50, 0.75, 0.7),
    _load(
        "grpc-shm600k",
        "identity, gRPC, 600 KB by shared memory, 8 in flight",
        through_shm(153_600, 8, "grpc"),
        THROUGHPUT,
        1.2,
        2.0,
    ),
    _load(
        "grpc-600k",
        "identity, gRPC, 600 KB in messages, 8 in flight",
        _in_messages(153_600, 8),
        THROUGHPUT,
        1.0,
        1.2,
    ),
    _load(
        "grpc-16m",
        "identity, gRPC, 16 MiB in messages, 1 in flight: p50",
        _in_messages(4_194_304, 1),
        P50,
        1.0,
        0.8,
    ),
    _load("latency", "simple, binary, 1 in flight: p50", Load("simple", 1), P50, 1.2, 0.8),
    _load(
        "shm600k",
        "identity, 600 KB by shared memory, 8 in flight",
        through_shm(153_600, 8),
        THROUGHPUT,
        1.5,
        3.0,
    ),
    _load(
        "http-600k",
        "identity, 600 KB in HTTP messages, 8 in flight",
        _in_messages(153_600, 8, "http"),
        THROUGHPUT,
        1.0,
        1.2,
    ),
    _load(
        "shm16m",
        "identity, 16 MiB by shared memory, 1 in flight: p50",
        through_shm(4_194_304, 1),
        P50,
        0.5,
        0.25,
    ),
    _load(
        "sequences",
        "direct sequences of 20 requests, 8 at once",
        Load("accumulate", 8, ("--sequence-length", "20")),
        THROUGHPUT,
        1.0,
        1.5,
    ),
    _load(
        "ensemble",
        "ensemble of three steps with 1 MiB between them, 4 in flight",
        Load("pipeline", 4, steps=("grow", "pass", "shrink")),
        THROUGHPUT,
        1.5,
        3.0,
    ),
    *(
        _load(name, title, Load(model, in_flight, steps=steps), column, must, aim)
        for name, title, (model, steps), in_flight, column, must, aim in (
            ("chain", "three steps of 64 bytes, 8 in flight", CHAIN, 8, THROUGHPUT, 1.1, 2.0),
            ("chain-p50", "three steps of 64 bytes, 1 in flight: p50", CHAIN, 1, P50, 1.1, 0.7),
            ("diamond", "a diamond of four steps, 4 in flight", DIAMOND, 4, THROUGHPUT, 1.2, 2.0),
            ("naps-4", "three steps that sleep 2 ms, 4 in flight", NAPS, 4, THROUGHPUT, 1.0, 1.0),
            ("naps-8", "three steps that sleep 2 ms, 8 in flight", NAPS, 8, THROUGHPUT, 1.0, 1.0),
        )
    ),
)


def _dynamic(batch: int) -> LoadCase:
    """Return a case of the dynamic batcher: twenty clients with requests of `batch` rows."""
    title = f"simple, 20 in flight, {batch} a request"
    throughput = Figure(f"dynamic-{batch}", title, "infer/s", "higher", Target("ratio", 1.0, 1.5))
    tail = Figure(
        f"dynamic-{batch}-p99", f"{title}: p99", "µs", "lower", Target("ratio", 1.0, 1 / 1.5)
    )
    load = Load("simple", 20, batch=batch)
    return LoadCase(throughput.name, load, THROUGHPUT, throughput, ((P99, tail),))


DYNAMIC = tuple(map(_dynamic, (1, 4, 8)))

QUEUE_COST = {
    queued: Figure(
        f"queue-cost-{queued}", f"scheduler, {queued:,} queued: a request", "µs", "lower"
    )
    for queued in (10, 1_000, 100_000)
}

MEMCPY = Figure("memcpy", "one memcpy of 16 MiB", "µs", "lower")


def _cost(name: str, title: str, unit: str, must: float | None = None) -> Figure:
    return Figure(name, title, unit, "lower", Target("value", must) if must else Target())


def _standing(model: str, suffix: str, with_triton: bool) -> tuple[StandingCase, ...]:
    """Return the cases that are measured with a Python model and with a torch model."""
    subject = "torch model" if model == "torch" else "Python model"
    start = (_cost(f"startup{suffix}", f"start to ready, {subject}", "s", 3.0),)
    further = f"one more instance, {subject}"
    instance = (
        _cost(f"instance-memory{suffix}", f"{further}: PSS", "MB", 100.0),
        _cost(f"instance-time{suffix}", f"{further}: load time", "ms", 100.0),
    )
    silent_connections = f"64 silent connections, {subject}"
    idle = (
        _cost(f"idle-cpu{suffix}", f"idle, {subject}: CPU", "% core", 1.0),
        _cost(f"idle-memory{suffix}", f"idle, {subject}: PSS in all", "MB", 450.0),
        _cost(f"connections-cpu{suffix}", f"{silent_connections}: CPU in all", "% core", 1.0),
        _cost(f"connections-memory{suffix}", f"{silent_connections}: PSS they add", "MB"),
    )
    return (
        StandingCase(f"startup{suffix}", model, standing.startup, start, with_triton),
        StandingCase(f"instance{suffix}", model, standing.instance, instance, with_triton),
        StandingCase(f"idle{suffix}", model, standing.idle, idle, with_triton),
    )


_DELAY = tuple(
    _cost(f"delay-{quantile}", f"time in the queue for a delay of 100 µs: {quantile}", "µs")
    for quantile in ("p50", "p90", "p99")
)

STANDING = (
    *_standing("simple", "", with_triton=True),
    *_standing("torch", "-torch", with_triton=False),
    StandingCase("delay", "simple", standing.delay, _DELAY),
)

QUEUE = "queue-cost"

NAMES = (
    *(case.name for case in (*LOADS, *DYNAMIC)),
    MEMCPY.name,
    QUEUE,
    *(case.name for case in STANDING),
)
