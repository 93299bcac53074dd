"""Cumulative counters, which survive a reload of their model (pure).

A scheduler reports what it has counted itself, as GET /v2/models/NAME/stats shows it, and with it
what those before it under the same name and version had counted. Metrics show both together: a
request that the old one finishes after the switch is counted, and no counter ever goes back.
"""

from __future__ import annotations

from typing import Any

_SHOWN = ("inference_count", "execution_count", "inference_stats")
_OURS = (
    *("failures", "batches_closed", "histograms", "copied_bytes"),
    *("workers_lost", "retried", "overruns", "malformed"),
)


def total_counters(report: dict[str, Any]) -> dict[str, Any]:
    """All counters of a scheduler's report, and of what was before it, in one dictionary under the
    keys that shmserve/scheduler/statistics gives them.

    Raises KeyError or TypeError for what is no report.
    """
    ours = report["shmserve"]
    own = {key: report[key] for key in _SHOWN} | {key: ours[key] for key in _OURS}
    own["padding"] = ours.get("padding", {})
    base = ours.get("base")
    return _added(own, base) if base else own


def with_base(report: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """A scheduler's report, with the latest of the one before it as its base.

    Raises KeyError or TypeError for what is no report.
    """
    return {**report, "shmserve": {**report["shmserve"], "base": total_counters(base)}}


def _added(one: Any, other: Any) -> Any:
    if isinstance(one, dict):
        if one.get("buckets") != other.get("buckets"):
            return one  # a histogram whose bounds have changed starts anew
        return {
            # The bounds of a histogram are no counts.
            key: value if key == "buckets" or key not in other else _added(value, other[key])
            for key, value in one.items()
        }
    if isinstance(one, list):
        return [_added(a, b) for a, b in zip(one, other, strict=True)]
    return one + other
