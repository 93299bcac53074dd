"""`shmserve tune MODEL --p99 30ms`: the configuration with the highest throughput at a latency."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shmserve.cli.arguments import add_flags, check_files, write_file
from shmserve.errors import InvalidArgument, printable_line
from shmserve.perf import measure, report, search, targets
from shmserve.perf.load import LoadGenerator
from shmserve.perf.search import Candidate, Search, Trial
from shmserve.protocols import AdminTransport, TransportError, servers
from shmserve.protocols.connection import EventLoop

_TIME_PATTERN = re.compile(r"([0-9]+(?:\.[0-9]+)?)(us|ms|s)?")
_MS_PER_UNIT = {"us": 0.001, "ms": 1.0, "s": 1000.0}
_MIN_WINDOW_S = 0.7
_MIN_WINDOW_LATENCIES = 10  # minimum window, in multiples of the target latency
_MAX_WINDOWS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    parser.add_argument("model", metavar="MODEL", help="the name of the model")
    add_flags(parser, "perf", "the requests")
    add_flags(parser, "server")
    parser.add_argument("--openai", help=argparse.SUPPRESS)  # rejected with the reason
    # Defaults of the flags that only `shmserve perf` has.
    parser.set_defaults(model_version="", sequence_length=0, seed=0, patience=30.0)


def run(args: argparse.Namespace) -> int:
    """Search, print and write the best configuration.

    Ctrl-C ends the search; the best configuration so far is printed, but not applied.

    Returns:
        0, 1 if no configuration meets the target, or 130 if the search was interrupted.

    Raises:
        InvalidArgument: A flag or the model is invalid.
        Unavailable: The server rejects configurations, or exits.
    """
    target_ms = _parse_milliseconds(args.p99)
    if args.openai:
        raise InvalidArgument("--openai is not supported; tune generative models in engine.yaml")
    check_files(args, "plot", "write")
    with contextlib.ExitStack() as stack:
        return _tune(args, target_ms, stack)


def _parse_milliseconds(text: str) -> float:
    match = _TIME_PATTERN.fullmatch(text)
    value = float(match[1]) * _MS_PER_UNIT[match[2] or "ms"] if match else 0.0
    if not 0 < value < math.inf:
        raise InvalidArgument(f"--p99: '{text}' is not a time (for example, 30ms, 1.5s or 800us)")
    return value


def _tune(args: argparse.Namespace, target_ms: float, stack: contextlib.ExitStack) -> int:
    server = stack.enter_context(contextlib.closing(servers.create_admin_transport(args)))
    with targets.prefix_errors(server):
        config = server.config(args.model, "")
    first_candidate = search.current_candidate(config)
    cpu_count = len(os.sched_getaffinity(0))
    max_instances = args.most_instances or cpu_count
    space = search.search_space(config, target_ms, cpu_count, max_instances, args.largest_batch)
    loop = stack.enter_context(contextlib.closing(EventLoop()))
    target = targets.connect(args, loop, stack)
    runner = _TrialRunner(args, server, loop, target, config, target_ms)
    candidate_search = Search(runner.run_trial, target_ms, space, args.runs)
    was_interrupted = False
    with targets.prefix_errors(server), _restore_at_end(server, args.model, config):
        try:
            best_trial = candidate_search.run(first_candidate)
        except KeyboardInterrupt:
            best_trial, was_interrupted = candidate_search.best, True
            print("interrupted: the model's configuration is restored", file=sys.stderr)
    trials = list(candidate_search.trials.values())
    if not trials:
        return 130
    if args.plot:
        title = f"{args.model} at {target.title}, p99 within {target_ms:g} ms"
        write_file("plot", args.plot, report.draw_trials(title, trials, target_ms))
    if best_trial is None:
        print(search.format_table(trials, target_ms))
        print(f"no tested configuration has a p99 within {target_ms:g} ms", file=sys.stderr)
        return 130 if was_interrupted else 1
    if args.apply and not was_interrupted:
        server.load(args.model, search.with_candidate(config, best_trial.candidate, target_ms))
    text = search.recommendation(config, trials, best_trial, target_ms)
    if was_interrupted:
        text = f"# interrupted after {len(trials)} runs: the best so far, measured once\n{text}"
    if args.write:
        write_file("write", args.write, text)
    else:
        print(text, end="")
    return 130 if was_interrupted else 0


@contextlib.contextmanager
def _restore_at_end(server: AdminTransport, model: str, config: dict[str, Any]) -> Iterator[None]:
    """Restore the model's configuration at the end of the block.

    The model is loaded from its folder, and with `config` if the folder has another configuration.
    """
    try:
        yield
    finally:
        try:
            server.load(model)
            if server.config(model, "") != config:
                server.load(model, config)
        except BaseException as error:  # also a second interrupt
            if not (isinstance(error, TransportError) and _has_config(server, model, config)):
                text = f"{model} has a tested configuration"
                remedy = f"`shmserve client load {model}` restores it"
                print(f"{text}; {remedy}", file=sys.stderr)
            raise


def _has_config(server: AdminTransport, model: str, config: dict[str, Any]) -> bool:
    try:
        return server.config(model, "") == config
    except TransportError:
        return False


@dataclass
class _TrialRunner:
    """A runner of trials, which loads the model with each candidate's configuration."""

    args: argparse.Namespace
    server: AdminTransport
    loop: EventLoop
    target: targets.LoadTarget
    config: dict[str, Any]
    target_ms: float
    trial_count: int = 0

    def run_trial(self, candidate: Candidate) -> Trial:
        """Measure a candidate.

        If the model cannot be loaded with this configuration, the trial has an error and no
        throughput. For the first candidate, TransportError is raised instead.
        """
        self.trial_count += 1
        try:
            config = search.with_candidate(self.config, candidate, self.target_ms)
            self.server.load(self.args.model, config)
        except TransportError as error:
            if self.trial_count == 1:
                raise
            print(f"{search.describe(candidate)}: {printable_line(str(error))}", file=sys.stderr)
            return Trial(candidate, 0.0, math.inf, 1)
        point = self._measure_point(candidate.in_flight)
        if point.interrupted:
            raise KeyboardInterrupt
        trial = Trial(candidate, point.per_second, point.latency["p99"], point.errors)
        print(
            f"{self.trial_count}. {search.describe(candidate)}, {candidate.in_flight} in flight: "
            f"{trial.per_second:,.1f} requests/s, p99 {trial.p99_ms:.2f} ms",
            file=sys.stderr,
        )
        return trial

    def _measure_point(self, in_flight: int) -> measure.Point:
        default_window_s = max(_MIN_WINDOW_S, _MIN_WINDOW_LATENCIES * self.target_ms / 1000)
        window_s = self.args.window or default_window_s
        plan = measure.MeasurementPlan(window_s / 2, window_s, _MAX_WINDOWS)
        requests = self.target.requests(in_flight)
        patience_s = self.args.patience
        lane_factory = self.target.lane_factory
        load = LoadGenerator(self.loop, lane_factory, requests, in_flight, None, patience_s)
        with contextlib.closing(load):
            return measure.measure_load(load, plan, "concurrency", in_flight, dict)
