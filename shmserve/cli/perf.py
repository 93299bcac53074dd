"""`shmserve perf MODEL`: how many requests a second, and how fast, of any server of the v2
protocol."""

from __future__ import annotations

import argparse
import contextlib
import math
import platform
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from shmserve import __version__
from shmserve.errors import InvalidArgument, refused
from shmserve.perf import measure, report, targets
from shmserve.perf.load import KINDS, LoadGenerator, loads_of
from shmserve.protocols import servers
from shmserve.protocols.connection import Poller

_ROUTES = ("chat", "completions")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags to its parser."""
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--model-version", default="", metavar="V", help="[the latest]")
    _add_load(parser.add_argument_group("the load"))
    add_data(parser.add_argument_group("what is sent"))
    _add_measuring(parser.add_argument_group("the measurement"))
    servers.add_arguments(parser)


def _add_load(group: Any) -> None:
    how = group.add_mutually_exclusive_group()
    how.add_argument(
        "--concurrency",
        metavar="N",
        help="requests in flight: N, N,N,... or FIRST:LAST[:STEP]; each is measured [1]",
    )
    how.add_argument(
        "--rate",
        metavar="N",
        help="requests a second, whether or not others have been answered; as --concurrency",
    )
    group.add_argument(
        "--arrivals", choices=tuple(KINDS), default="poisson", help="of --rate [poisson]"
    )
    group.add_argument(
        "--max-in-flight",
        type=int,
        default=256,
        metavar="N",
        help="of --rate: more wait in the client, and their time counts [256]",
    )
    group.add_argument(
        "--sequence-length",
        type=int,
        default=0,
        metavar="N",
        help="each in flight is a sequence of N requests, then another one [none]",
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of random arrivals [0]")


def add_data(group: Any) -> None:
    """Add the flags that say what is sent."""
    group.add_argument("--batch", type=int, default=1, metavar="N", help="rows a request [1]")
    group.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar="NAME:N,N,...",
        help="of an input of any size, without the batch's dimension (repeatable)",
    )
    group.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an input (repeatable): a JSON number, text or list, @FILE.npy, or @FILE",
    )
    group.add_argument(
        "--data",
        default="random",
        metavar="random|zero|FILE",
        help="inputs without --input: FILE.json as of perf_analyzer, or FILE.py with a function "
        "`requests(inputs)` that yields arrays by name [random]",
    )
    group.add_argument("--text-length", type=int, default=128, metavar="N", help="of texts [128]")
    group.add_argument(
        "--shared-memory",
        choices=("none", "system", "cuda"),
        default="none",
        help="where tensors are: in the messages, or in registered memory [none]",
    )
    group.add_argument(
        "--output-byte-size",
        type=int,
        default=102_400,
        metavar="N",
        help="room in shared memory for an output whose size the model does not say [102400]",
    )
    group.add_argument(
        "--openai",
        choices=_ROUTES,
        help="ask the model to generate text by this route, streamed; --data may have bodies",
    )
    group.add_argument("--prompt-words", type=int, default=64, metavar="N", help="of --openai [64]")
    group.add_argument("--max-tokens", type=int, default=64, metavar="N", help="of --openai [64]")


def _add_measuring(group: Any) -> None:
    plan = measure.MeasurementPlan()
    for flag, default, text in (
        ("warm-up", plan.warm_up_s, "seconds before the first window"),
        ("window", plan.window_s, "seconds of a window"),
    ):
        group.add_argument(
            f"--{flag}", type=float, default=default, metavar="S", help=f"{text} [{default:g}]"
        )
    group.add_argument(
        "--windows",
        type=int,
        default=plan.most_windows,
        metavar="N",
        help=f"at most; it ends when three agree [{plan.most_windows}]",
    )
    group.add_argument(
        "--stability",
        type=float,
        default=plan.within * 100,
        metavar="PERCENT",
        help=f"windows agree when rate and mean latency are within it [{plan.within * 100:g}]",
    )
    group.add_argument(
        "--patience", type=float, default=30.0, metavar="S", help="without any response [30]"
    )
    group.add_argument("--json", metavar="FILE", help="write the report as JSON")
    group.add_argument("--csv", metavar="FILE", help="write the report as CSV")
    group.add_argument("--plot", metavar="FILE.svg", help="draw latency over throughput")
    group.add_argument("--compare", metavar="OLD.json", help="beside an older report of --json")


def run(args: argparse.Namespace) -> int:
    """Measure what the command line says, print it, and write it; returns 0, or 1 where no request
    was answered well.

    Raises InvalidArgument for a flag, a file or a model that is not what it must be, and
    Unavailable when the server is none, or goes.
    """
    kind, values = _loads(args)
    plan = _plan(args)
    old = report.older(args.compare) if args.compare else None
    with contextlib.ExitStack() as stack:
        poller = stack.enter_context(contextlib.closing(Poller()))
        target = targets.target(args, poller, stack)
        measured = partial(_measured, args, plan, poller, target, kind)
        found = list(map(measured, values))
    print(f"{args.model} at {target.where}\n{report.table(found)}")
    if old is not None:
        print(f"\n{report.comparison(old, found)}")
    _write(args, target.where, found)
    return 0 if all(point.requests for point in found) else 1


def _loads(args: argparse.Namespace) -> tuple[str, list[float]]:
    for name, least in (("batch", 1), ("windows", 1), ("sequence_length", 0), ("max_in_flight", 1)):
        if getattr(args, name) < least:
            flag = name.replace("_", "-")
            raise InvalidArgument(f"--{flag}: {getattr(args, name)} is less than {least}")
    if args.rate:
        return "rate", loads_of(args.rate, "rate", float)
    return "concurrency", loads_of(args.concurrency or "1", "concurrency", int)


def _plan(args: argparse.Namespace) -> measure.MeasurementPlan:
    for flag, value in (
        *(("window", args.window), ("stability", args.stability), ("patience", args.patience)),
    ):
        if not 0 < value < math.inf:
            raise InvalidArgument(f"--{flag}: {value:g} is not more than 0")
    if not 0 <= args.warm_up < math.inf:
        raise InvalidArgument(f"--warm-up: {args.warm_up:g} is less than 0")
    return measure.MeasurementPlan(args.warm_up, args.window, args.windows, args.stability / 100)


def _measured(
    args: argparse.Namespace,
    plan: measure.MeasurementPlan,
    poller: Poller,
    target: targets.LoadTarget,
    kind: str,
    value: float,
) -> measure.Point:
    due, slots = None, int(value)
    if kind == "rate":
        due = KINDS[args.arrivals](value, args.seed)
        slots = args.max_in_flight
    requests = target.requests(slots)
    load = LoadGenerator(poller, target.door, requests, slots, due, args.patience)
    with contextlib.closing(load):
        found = measure.measured(load, plan, kind, value, target.streams, target.statistics)
    print(f"{found.name}: {found.per_second:,.1f} requests/s", file=sys.stderr)
    return found


def _write(args: argparse.Namespace, where: str, found: Sequence[measure.Point]) -> None:
    about = {
        "model": args.model,
        "server": where,
        "at": measure.now(),
        "shmserve": __version__,
        "machine": {"processor": platform.machine(), "system": platform.platform()},
        "settings": {key: value for key, value in vars(args).items() if key != "headers"},
    }
    made: dict[str, Callable[[], str]] = {
        "json": lambda: report.document(about, found),
        "csv": lambda: report.rows(found),
        "plot": lambda: report.draw(f"{args.model} at {where}", found),
    }
    for flag, text in made.items():
        path = getattr(args, flag)
        if path:
            with refused(f"--{flag}: cannot write '{path}'"):
                Path(path).write_text(text())
