"""`shmserve perf MODEL`: throughput and latency of any server of the v2 protocol."""

from __future__ import annotations

import argparse
import contextlib
import platform
import sys
import time
from collections.abc import Callable, Sequence

from shmserve import __version__
from shmserve.cli.arguments import add_flags, check_files, write_file
from shmserve.errors import Unavailable
from shmserve.perf import measure, report, targets
from shmserve.perf.load import SCHEDULES, LoadGenerator, parse_loads
from shmserve.protocols.connection import EventLoop


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    parser.add_argument("model", metavar="MODEL", help="the name of the model")
    add_flags(parser, "server")


def run(args: argparse.Namespace) -> int:
    """Measure the load given on the command line, and print and write the report.

    Ctrl-C and a failure of the server end the measurement; the report has the loads so far.

    Returns:
        0, 1 if no request succeeded, or 130 if the measurement was interrupted.

    Raises:
        InvalidArgument: A flag, a file or the model is invalid.
        Unavailable: The server is unreachable or exits.
    """
    kind, values = _parse_loads(args)
    tolerance = args.stability / 100
    plan = measure.MeasurementPlan(args.warm_up, args.window, args.windows, tolerance)
    check_files(args, "json", "csv", "plot")
    old_report = report.read_report(args.compare) if args.compare else None
    with contextlib.ExitStack() as stack:
        loop = stack.enter_context(contextlib.closing(EventLoop()))
        target = targets.connect(args, loop, stack)
        points: list[measure.Point] = []
        stop_error = None
        try:
            for value in values:
                points.append(_measure(args, plan, loop, target, kind, value))
                if was_interrupted := points[-1].interrupted:
                    break
        except KeyboardInterrupt:  # the interrupt arrived between two loads
            was_interrupted = True
        except Unavailable as error:  # the report has the loads before the server's failure
            if not points:
                raise
            stop_error = error
    if not points:
        return 130
    print(f"{args.model} at {target.title}\n{report.format_table(points)}")
    if old_report is not None:
        print(f"\n{report.comparison(old_report, points)}")
    _write_files(args, target.title, points)
    if stop_error:
        raise stop_error
    if was_interrupted:
        return 130
    return 0 if all(point.requests for point in points) else 1


def _parse_loads(args: argparse.Namespace) -> tuple[str, list[float]]:
    if args.rate:
        return "rate", parse_loads(args.rate, "rate", float)
    return "concurrency", parse_loads(args.concurrency or "1", "concurrency", int)


def _measure(
    args: argparse.Namespace,
    plan: measure.MeasurementPlan,
    loop: EventLoop,
    target: targets.LoadTarget,
    load_kind: str,
    load_value: float,
) -> measure.Point:
    send_times, in_flight = None, int(load_value)
    if load_kind == "rate":
        send_times = SCHEDULES[args.arrivals](load_value, args.seed)
        in_flight = args.max_in_flight
    requests = target.requests(in_flight)
    load = LoadGenerator(loop, target.lane_factory, requests, in_flight, send_times, args.patience)
    with contextlib.closing(load):
        point = measure.measure_load(load, plan, load_kind, load_value, target.statistics)
    print(f"{point.name}: {point.per_second:,.1f} requests/s", file=sys.stderr)
    return point


def _write_files(args: argparse.Namespace, server: str, points: Sequence[measure.Point]) -> None:
    metadata = {
        "model": args.model,
        "server": server,
        "at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "shmserve": __version__,
        "machine": {"processor": platform.machine(), "system": platform.platform()},
        "settings": {key: value for key, value in vars(args).items() if key != "header"},
    }
    writers: dict[str, Callable[[], str]] = {
        "json": lambda: report.as_json(metadata, points),
        "csv": lambda: report.as_csv(points),
        "plot": lambda: report.draw(f"{args.model} at {server}", points),
    }
    for flag, render_report in writers.items():
        path = getattr(args, flag)
        if path:
            write_file(flag, path, render_report())
