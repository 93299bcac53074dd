"""Throughput over p99 latency by batching strategy.

    python -m bench.strategies [--seconds S] [--repeats N] [--out PATH.svg]

One model runs with the three batching strategies, and in a real Triton with several fixed delays if
Triton is installed. Each runs under the same loads of 1 to 48 requests in flight, in turns. The
model sleeps 4 ms and 0.4 ms per row; like a model on a device it does not use the CPU. The result
is a picture of the medians, and a JSON file with all numbers. The best delay of Triton is the one
with the most requests per second over all loads whose p99 is within the target.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.context import Context, Settings
from bench.load import perf
from bench.system import machine
from bench.system.peer import Analyzer
from bench.system.servers import BENCH, Server, Shmserve, running

SETUP_MS, ROW_MS, MAX_BATCH = 4.0, 0.4, 32
TARGET_MS = 30
PREFER_BATCH_DELAY_US = 5_000
IN_FLIGHT = (1, 2, 4, 8, 16, 32, 48)
TRITON_DELAYS_US = (0, 1_000, 2_000, 5_000, 10_000)
_WARM_UP_S = 1.0
_COLOURS = {"prefer_batch": "#c0392b", "prefer_latency": "#2e8b57", "adaptive": "#2a6fbb"}
_GREY, _LIGHT = "#555555", "#c8c8c8"

_MODEL = f"""
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(r, "INPUT0").as_numpy() for r in requests]
        time.sleep(({SETUP_MS} + {ROW_MS} * sum(map(len, inputs))) / 1000)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", x)]) for x in inputs]
"""
_CONFIG = """
backend: "python"
max_batch_size: %d
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ 16 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 16 ] } ]
instance_group [ { kind: KIND_CPU count: 1 } ]
dynamic_batching { max_queue_delay_microseconds: %d }
"""
_PARAMETER = 'parameters { key: "%s" value { string_value: "%s" } }\n'


@dataclass(frozen=True)
class Point:
    """The result of one load: requests in flight, requests/s, and p99 in ms."""

    in_flight: int
    per_second: float
    p99_ms: float


def _model(folder: Path, name: str, delay_us: int, **parameters: object) -> Path:
    model = folder / name
    (model / "1").mkdir(parents=True)
    (model / "1" / "model.py").write_text(_MODEL)
    config = _CONFIG % (MAX_BATCH, delay_us)
    config += "".join(_PARAMETER % item for item in parameters.items())
    (model / "config.pbtxt").write_text(config)
    return model


def _shmserve_models(folder: Path) -> list[Path]:
    return [
        _model(folder, "prefer_batch", PREFER_BATCH_DELAY_US, batching_strategy="prefer_batch"),
        _model(folder, "prefer_latency", 0, batching_strategy="prefer_latency"),
        _model(folder, "adaptive", 0, batching_strategy="adaptive", target_p99_ms=TARGET_MS),
    ]


def _triton_models(folder: Path) -> list[Path]:
    return [_model(folder, f"delay_{delay}", delay) for delay in TRITON_DELAYS_US]


def _measure(
    served_models: list[tuple[Server, str]], analyzer: Analyzer, seconds: float, repeats: int
) -> dict[str, list[Point]]:
    """Measure each model under each load, and return a curve for each model.

    The models take turns at each load, so that a slow moment of the machine affects all of them.
    """
    curves: dict[str, list[Point]] = {model: [] for _, model in served_models}
    for in_flight in IN_FLIGHT:
        samples: dict[str, list[Point]] = {model: [] for _, model in served_models}
        for turn in range(repeats + 1):
            for server, model in served_models[:: -1 if turn % 2 else 1]:
                load = perf.Load(model, in_flight)
                address = server.address("http")
                report = perf.measure(analyzer, load, address, seconds if turn else _WARM_UP_S)
                if turn:
                    rate, p99_ms = report[perf.THROUGHPUT], report[perf.P99] / 1000
                    samples[model].append(Point(in_flight, rate, p99_ms))
        for model, points in samples.items():
            rate = statistics.median(point.per_second for point in points)
            p99_ms = statistics.median(point.p99_ms for point in points)
            curves[model].append(Point(in_flight, rate, p99_ms))
            print(f"{model}: {curves[model][-1]}", file=sys.stderr)
    return curves


def best(curves: dict[str, list[Point]]) -> str:
    """Return the name of the curve with the most requests/s at a p99 within the target."""

    def within(name: str) -> float:
        return sum(curve.per_second for curve in curves[name] if curve.p99_ms <= TARGET_MS)

    return max(curves, key=within)


def _draw(all_curves: dict[str, list[Point]], path: Path) -> None:
    curves = {name: all_curves[name] for name in _COLOURS}
    triton = {name: points for name, points in all_curves.items() if name not in curves}
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    best_name = best(triton) if triton else ""
    for name, points in triton.items():
        if name == best_name:
            delay_ms = int(name.removeprefix("delay_")) / 1000
            label = f"Triton, its best fixed delay ({delay_ms:g} ms)"
            style = {"color": _GREY, "lw": 2, "marker": "s", "label": label, "zorder": 2}
        else:
            is_first = name == next(n for n in triton if n != best_name)
            label = "Triton, other delays" if is_first else ""
            style = {"color": _LIGHT, "lw": 1, "marker": ".", "label": label or None, "zorder": 1}
        axes.plot([p.per_second for p in points], [p.p99_ms for p in points], **style)  # type: ignore[arg-type]
    for name, points in curves.items():
        title = f"{name}, {PREFER_BATCH_DELAY_US / 1000:g} ms" if name == "prefer_batch" else name
        xs, ys = [p.per_second for p in points], [p.p99_ms for p in points]
        axes.plot(xs, ys, color=_COLOURS[name], lw=2, marker="o", label=title, zorder=3)
    axes.axhline(TARGET_MS, color="#888888", ls=":", lw=1, label="target_p99_ms")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_xlabel("requests a second")
    axes.set_ylabel("p99 in ms")
    in_flight = ", ".join(map(str, IN_FLIGHT))
    axes.set_title(
        f"{SETUP_MS:g} ms + {ROW_MS:g} ms a row, batches up to {MAX_BATCH}; {in_flight} in flight",
        fontsize="medium",
    )
    axes.legend(frameon=False, fontsize="small")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def main() -> int:
    """Run the comparison; exit status 2 if perf_analyzer is missing."""
    parser = argparse.ArgumentParser(prog="python -m bench.strategies", description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds of each sample (2)")
    parser.add_argument("--repeats", type=int, default=3, help="samples of each point (3)")
    parser.add_argument("--peer", type=Path, default=Path("~/.cache/shmserve-peers"))
    parser.add_argument("--no-peer", action="store_true", help="do not start Triton")
    parser.add_argument("--out", type=Path, default=BENCH / "results" / "strategies.svg")
    options = parser.parse_args()
    peer = options.peer.expanduser().resolve()
    settings = Settings(peer, not options.no_peer, 1, options.seconds, frozenset())
    context = Context(settings, lambda text: print(text, file=sys.stderr))
    analyzer = context.find_analyzer()
    if analyzer is None:
        return 2
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, contextlib.ExitStack() as stack:
        served_models = []
        for product in context.products():
            write_models = _shmserve_models if isinstance(product, Shmserve) else _triton_models
            models = write_models(Path(folder))
            server = stack.enter_context(running(product, models, notes=[]))
            served_models += [(server, model.name) for model in models]
        curves = _measure(served_models, analyzer, options.seconds, options.repeats)
    options.out.parent.mkdir(exist_ok=True)
    curve_points = {name: [asdict(point) for point in points] for name, points in curves.items()}
    metadata = {"machine": machine.describe(), "versions": machine.versions()}
    options.out.with_suffix(".json").write_text(
        json.dumps({**metadata, "curves": curve_points}, indent=1)
    )
    _draw(curves, options.out)
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
