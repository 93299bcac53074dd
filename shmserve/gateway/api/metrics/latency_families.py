"""The metric families of latencies that --metrics-config switches on: the histogram of times to the
first response, and summaries with the quantiles of the last minute; with Triton's names and labels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client.core import Metric

from shmserve.common.model_settings import FIRST_RESPONSE_FAMILY

# What a report has of each model, by its labels.
Reports = list[tuple[dict[str, str], dict[str, Any]]]

_EXECUTED = "(does not include cached requests)"
_SUMMARIES = (
    # name, text, counter of the same time
    (
        "request",
        "Summary of inference request duration in microseconds (includes cached requests)",
        "success",
    ),
    (
        "queue",
        "Summary of inference queuing duration in microseconds (includes cached requests)",
        "queue",
    ),
    (
        "compute_input",
        f"Summary of compute input duration in microseconds {_EXECUTED}",
        "compute_input",
    ),
    (
        "compute_infer",
        f"Summary of compute inference duration in microseconds {_EXECUTED}",
        "compute_infer",
    ),
    (
        "compute_output",
        f"Summary of inference compute output duration in microseconds {_EXECUTED}",
        "compute_output",
    ),
)


_OF_CACHE = (
    ("cache_hit", "Summary of cache hit duration in microseconds"),
    ("cache_miss", "Summary of cache miss duration in microseconds"),
)


def summaries(reports: Reports) -> Iterator[Metric]:
    """Of each model all that succeeded, and the quantiles of those of the last minute."""
    for name, text, counter in _SUMMARIES:
        yield _summary(f"nv_inference_{name}_summary_us", text, reports, name, counter)
    cached = [(labels, report) for labels, report in reports if report.get("cache")]
    for name, text in _OF_CACHE if cached else ():
        yield _summary(f"nv_{name}_summary_per_model", text, cached, name, name)


def _summary(full_name: str, text: str, reports: Reports, name: str, counter: str) -> Metric:
    family = Metric(full_name, text, "summary")
    for labels, report in reports:
        total = report["inference_stats"][counter]
        family.add_sample(f"{family.name}_count", labels, total["count"])
        family.add_sample(f"{family.name}_sum", labels, total["ns"] // 1000)
        for quantile, value in report.get("quantiles", {}).get(name, ()):
            number = float("nan") if value is None else value
            family.add_sample(family.name, {**labels, "quantile": f"{quantile:g}"}, number)
    return family


def first_responses(reports: Reports) -> Iterator[Metric]:
    """Of each decoupled model; nothing where there is none."""
    text = "Duration from request to first response in milliseconds"
    family = Metric(FIRST_RESPONSE_FAMILY, text, "histogram")
    for labels, report in reports:
        histogram = report["histograms"].get("first_response_ms")
        if histogram is not None:
            _add_histogram(family, labels, histogram)
    if family.samples:
        yield family


def _add_histogram(family: Metric, labels: dict[str, str], raw: dict[str, Any]) -> None:
    cumulative = 0
    for bound, count in zip([*raw["buckets"], "+Inf"], raw["counts"], strict=True):
        cumulative += count
        shown = str(bound).removesuffix(".0")
        family.add_sample(f"{family.name}_bucket", {**labels, "le": shown}, cumulative)
    family.add_sample(f"{family.name}_count", labels, cumulative)
    family.add_sample(f"{family.name}_sum", labels, raw["sum"])
