"""The metric families of the response cache, for models that have one."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from shmserve.gateway.api.metrics.latency_families import Reports

_COUNTERS = (
    # name, text, counter, its part
    ("num_hits", "Number of cache hits per model", "cache_hit", "count"),
    ("num_misses", "Number of cache misses per model", "cache_miss", "count"),
    (
        "hit_duration",
        "Total cache hit duration per model, in microseconds",
        "cache_hit",
        "ns",
    ),
    (
        "miss_duration",
        "Total cache miss duration per model, in microseconds",
        "cache_miss",
        "ns",
    ),
)
_GAUGES = (
    ("bytes", "Bytes of responses in the cache of a model"),
    ("entries", "Responses in the cache of a model"),
)


def cached(reports: Reports, latencies: bool) -> Iterator[Metric]:
    """Nothing where no model has a cache; times only with `latencies`."""
    reports = [(labels, report) for labels, report in reports if report.get("cache")]
    if not reports:
        return
    for name, text, counter, part in _COUNTERS:
        if part == "ns" and not latencies:
            continue
        family = Metric(f"nv_cache_{name}_per_model", text, "counter")
        for labels, report in reports:
            value = report["inference_stats"][counter][part]
            family.add_sample(family.name, labels, value // 1000 if part == "ns" else value)
        yield family
    for name, text in _GAUGES:
        gauge = Metric(f"shmserve_cache_{name}", text, "gauge")
        for labels, report in reports:
            gauge.add_sample(gauge.name, labels, report["cache"][name])
        yield gauge
