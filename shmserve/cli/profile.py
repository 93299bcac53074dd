"""`shmserve profile MODEL`: the time spent in each phase of a generative model's steps.

The result is a table and, with --plot, a chart.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from typing import NamedTuple
from urllib.parse import urlsplit
from urllib.request import Request

from prometheus_client.parser import text_string_to_metric_families

from shmserve.cli.arguments import with_scheme
from shmserve.cli.top import create_request, open_page
from shmserve.errors import InvalidArgument, Unavailable, convert_os_errors

_PREFIX = "shmserve_llm_"
_BAR_WIDTH = 40  # width of a bar in characters
_PHASES = {
    "schedule": "plan the step (scheduler)",
    "gather": "block tables and copies",
    "draft": "propose tokens",
    "forward": "run the model",
    "sample": "choose tokens",
    "text": "tokenize prompts and decode tokens (outside of the steps)",
}


class Profile(NamedTuple):
    """The steps of a model in a time interval.

    Attributes:
        seconds: The length of the interval.
        steps: The number of steps.
        tokens: The number of tokens generated.
        rows: The number of sequences computed, over all steps.
        phases: The total seconds of each phase.
        throughput: The tokens per second in each second.
        was_interrupted: Whether the interval was ended by a signal.
    """

    seconds: float
    steps: float
    tokens: float
    rows: float
    phases: dict[str, float]
    throughput: list[float]
    was_interrupted: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    parser.add_argument("model", metavar="MODEL", help="the name of the model")


def run(args: argparse.Namespace) -> int:
    """Observe a server for some seconds and print the profile.

    Returns:
        0, or 130 if the observation was interrupted.

    Raises:
        InvalidArgument: The model is unknown.
        Unavailable: The server is unreachable.
    """
    url = with_scheme(args.metrics_url)
    if urlsplit(url).path in ("", "/") and url.startswith("http"):
        url = url.rstrip("/") + "/metrics"
    profile = watch(create_request(url, args.token_file), args.model, args.seconds)
    print(format_table(args.model, profile))
    if args.plot and profile.steps:
        plot(args.plot, args.model, profile)
    return 130 if profile.was_interrupted else 0


def watch(request: Request, model: str, seconds: float) -> Profile:
    """Observe a model for `seconds`, or until KeyboardInterrupt, and return its profile."""
    first_sample = _scrape(request, model)
    began_s = last_s = time.monotonic()
    last_sample, throughput = first_sample, []
    was_interrupted = False
    while (remaining_s := began_s + seconds - last_s) > 0 and not was_interrupted:
        try:
            time.sleep(min(1.0, remaining_s))
        except KeyboardInterrupt:
            was_interrupted = True
        sample, sampled_s = _scrape(request, model), time.monotonic()
        generated_tokens = sample["tokens_generated_total"] - last_sample["tokens_generated_total"]
        throughput.append(generated_tokens / (sampled_s - last_s))
        last_sample, last_s = sample, sampled_s

    def delta(name: str) -> float:
        return last_sample[name] - first_sample[name]

    counts = (delta("batch_size_count"), delta("tokens_generated_total"), delta("batch_size_sum"))
    phases = {phase: delta(f"step_seconds_total.{phase}") for phase in _PHASES}
    return Profile(last_s - began_s, *counts, phases, throughput, was_interrupted)


def _scrape(request: Request, model: str) -> defaultdict[str, float]:
    """Return the current metrics of a model by name; absent metrics are 0.

    A metric of a phase has the name NAME.PHASE.
    """
    with open_page(request, timeout_s=30) as response:
        metrics_text = response.read().decode()
    try:
        families = list(text_string_to_metric_families(metrics_text))
    except ValueError as error:
        text = f"--metrics-url: {request.full_url} does not return metrics: {error}"
        raise InvalidArgument(text) from None
    samples: defaultdict[str, float] = defaultdict(float)
    for family in families:
        for sample in family.samples if family.name.startswith(_PREFIX) else ():
            if sample.labels.get("model") == model and "le" not in sample.labels:
                name = sample.name.removeprefix(_PREFIX)
                phase = sample.labels.get("phase")
                name = f"{name}.{phase}" if phase else name
                samples[name] += sample.value
    if not samples:
        text = f"{request.full_url} has no metrics of a model '{model}' that generates text"
        raise InvalidArgument(text)
    return samples


def format_table(model: str, profile: Profile) -> str:
    """Return the profile as a table with a bar for each phase, or one line if no step ran."""
    if not profile.steps:
        return (
            f"{model}: 0 steps in {profile.seconds:.1f} s: the model generated nothing in this "
            f"time. Send it prompts while it is profiled, for example with\n"
            f"    shmserve perf {model} --openai chat --concurrency 4 --url http://HOST:PORT"
        )
    steps = profile.steps
    rates = sorted(profile.throughput)
    lines = [
        f"{model}: {profile.steps:,.0f} steps in {profile.seconds:.1f} s, "
        f"{profile.rows / steps:.1f} sequences per step, "
        f"{profile.tokens / profile.seconds:,.1f} tokens/s "
        f"(per second: {rates[0]:,.1f} to {rates[-1]:,.1f}, median {rates[len(rates) // 2]:,.1f})",
        f"{'phase':<10}{'ms per step':>11}{'share':>8}",
    ]
    total_s = sum(seconds for phase, seconds in profile.phases.items() if phase != "text")
    for phase, meaning in _PHASES.items():
        seconds = profile.phases[phase]
        share = seconds / total_s if total_s else 0.0
        bar = "#" * round(share * _BAR_WIDTH)
        lines.append(f"{phase:<10}{seconds / steps * 1e3:>11.3f}{share:>8.1%}  {bar}  {meaning}")
    return "\n".join(lines)


def plot(path: str, model: str, profile: Profile) -> None:
    """Write a chart of the phases and of the tokens per second to a file.

    Raise Unavailable without matplotlib.
    """
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise Unavailable("--plot needs matplotlib: pip install matplotlib") from None
    figure, (bars_axes, line_axes) = pyplot.subplots(1, 2, figsize=(11, 4))
    steps = max(profile.steps, 1)
    phase_ms = [profile.phases[phase] / steps * 1e3 for phase in _PHASES]
    bars_axes.barh(list(_PHASES), phase_ms)
    bars_axes.invert_yaxis()
    bars_axes.set_xlabel("ms a step")
    bars_axes.set_title(f"{model}: a step")
    line_axes.plot(range(1, len(profile.throughput) + 1), profile.throughput)
    line_axes.set_xlabel("second")
    line_axes.set_ylabel("tokens/s")
    line_axes.set_ylim(bottom=0)
    figure.tight_layout()
    with convert_os_errors(f"--plot: cannot write '{path}'", "the format must be .png or .svg"):
        figure.savefig(path)
    pyplot.close(figure)
