"""The benchmark's command line: measure, or compare two results."""

from __future__ import annotations

import argparse
import datetime
import signal
import sys
from pathlib import Path

from bench.cases.native import NATIVE
from bench.cases.streams import STREAMS
from bench.cases.tables import NAMES
from bench.cases.tracing import TRACES
from bench.context import Context, Settings
from bench.peers import measure as peers
from bench.report import rendering, results
from bench.runner import Runner
from bench.system.servers import BENCH, stop_on_signal

_PEER_FOLDER = "~/.cache/shmserve-peers"


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark.

    Returns:
        0: success. 1: a measurement failed. 2: invalid arguments.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["compare"]:
        return _compare(arguments[1:])
    if arguments[:1] == ["peers"]:
        return peers.main(arguments[1:])
    return _measure(arguments)


def _measure(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Measure shmserve beside a real Triton, with Triton's perf_analyzer.",
        epilog="`python -m bench compare A.json B.json` prints what changed between two results; "
        "`python -m bench peers` measures other Python servers.",
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        choices=(names := (*NAMES, *(case.name for case in (*NATIVE, *STREAMS, *TRACES)))),
        metavar="CASE",
        help="measure this case only (repeatable): " + ", ".join(names),
    )
    parser.add_argument("--repeats", type=_positive, default=5, help="samples of each figure (5)")
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds of each sample (5)")
    parser.add_argument(
        "--peer",
        type=Path,
        default=Path(_PEER_FOLDER),
        metavar="DIR",
        help=f"folder in which bench/peer_setup.sh installed Triton ({_PEER_FOLDER})",
    )
    parser.add_argument("--no-peer", action="store_true", help="do not start Triton")
    parser.add_argument(
        "--json",
        type=Path,
        metavar="PATH",
        help="file for the results; the chart is written beside it",
    )
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, stop_on_signal)
    settings = Settings(
        peer=options.peer.expanduser().resolve(),
        with_peer=not options.no_peer,
        repeats=options.repeats,
        seconds=options.seconds,
        only=frozenset(options.only),
    )
    run_results = Runner(Context(settings, _print_progress)).run()
    return _publish(run_results, options.json or _default_path())


def _publish(run_results: results.Results, path: Path) -> int:
    run_results.save(path)
    picture = path.with_suffix(".svg")
    if reason := rendering.draw(run_results, picture):
        _print_progress(f"no picture: {reason}")
    else:
        _print_progress(f"picture: {picture}")
    _print_progress(f"results: {path}\n")
    sys.stdout.write(rendering.render(run_results))
    return 1 if any(item.failed for item in run_results.not_run) else 0


def _compare(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench compare", description="Print what changed between two results."
    )
    parser.add_argument("before", type=Path, metavar="A.json")
    parser.add_argument("after", type=Path, metavar="B.json")
    options = parser.parse_args(arguments)
    try:
        results_before, results_after = results.load(options.before), results.load(options.after)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    sys.stdout.write(rendering.compare(results_before, results_after))
    return 0


def _default_path() -> Path:
    stamp = datetime.datetime.now().astimezone().strftime("%Y-%m-%dT%H%M%S")
    return BENCH / "results" / f"{stamp}.json"


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return value


def _print_progress(text: str) -> None:
    sys.stderr.write(text + "\n")
