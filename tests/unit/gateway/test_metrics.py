"""The families of the metrics page."""

import asyncio
from collections.abc import Iterator
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from shmserve.common.host import Process
from shmserve.gateway.api import management, metrics
from shmserve.gateway.settings import GatewaySettings

HISTOGRAM = {"buckets": [100.0], "counts": [0, 0], "sum": 0, "count": 0}
COUNTS = ("success", "inference_count", "execution_count", "pending", "cache_hit", "cache_miss")
LATENCY_NAMES = ("success", "queue", "compute_input", "compute_infer", "compute_output")


def report(**fields: Any) -> tuple[dict[str, str], dict[str, Any]]:
    counts = dict.fromkeys((*COUNTS, *(f"{name}_ns" for name in LATENCY_NAMES)), 0)
    cache_ns = {"cache_hit_ns": 0, "cache_miss_ns": 0}
    failures = {"OTHER": 2, "CANCELED": 1}
    return {"model": "m"}, {**counts, **cache_ns, "failures": failures, "cache": {}, **fields}


@pytest.mark.parametrize(("fields", "count"), [({}, 2), ({"is_ensemble": True}, 4)])
def test_a_failure_of_an_ensemble_counts_once(fields: dict[str, Any], count: int) -> None:
    families = metrics.triton_families([report(**fields)], shows_latencies=False)
    failures = next(family for family in families if family.name == "nv_inference_request_failure")
    assert f'nv_inference_request_failure{{model="m",reason="OTHER"}} {count}' in failures.samples
    assert 'nv_inference_request_failure{model="m",reason="CANCELED"} 1' in failures.samples


def test_a_cached_model_has_every_summary_except_whole_requests() -> None:
    page = metrics._exposition_text(
        metrics.summary_families([report(cache={"bytes": 0, "entries": 0})])
    )
    assert "nv_inference_request_summary" not in page
    for part in LATENCY_NAMES[1:]:
        assert f"nv_inference_{part}_summary_us_count" in page
    page = metrics._exposition_text(
        metrics.summary_families([report(), report(cache={"bytes": 0, "entries": 0})])
    )
    assert page.count("nv_inference_request_summary_us_count") == 1


def test_the_gauges_of_the_whole_cache_are_sums_over_the_models() -> None:
    full = {"bytes": 30, "bound": 60, "entries": 3, "evicted": 2}
    empty = {"bytes": 0, "bound": 60, "entries": 0, "evicted": 0}
    reports = [report(cache=full, cache_hit=4, cache_miss=5), report(cache=empty, cache_miss=1)]
    page = metrics._exposition_text(
        metrics.triton_families([*reports, report()], shows_latencies=False)
    )
    counts = {"entries": 3, "lookups": 10, "hits": 4, "misses": 6, "evictions": 2}
    for name, count in counts.items():
        assert f"# TYPE nv_cache_num_{name} gauge\nnv_cache_num_{name} {count}\n" in page
    assert "\nnv_cache_util 0.25\n" in page
    page = metrics._exposition_text(metrics.triton_families([report()], shows_latencies=False))
    assert "nv_cache" not in page


def test_processes_of_the_same_title_have_one_sample() -> None:
    running = [Process(pid, "worker m.0 cpu", 1000 * pid, pid, 0.5) for pid in (1, 2)]
    page = metrics._exposition_text(metrics._process_families(running))
    samples = [line for line in page.splitlines() if not line.startswith("#")]
    assert [sample.split()[-1] for sample in samples] == ["3000", "3", "1"]


def test_the_first_response_of_decoupled_models() -> None:
    page = metrics._exposition_text(
        metrics.first_response_families([report(), report(first_response_ms=HISTOGRAM)])
    )
    for part in ('_bucket{model="m",le="+Inf"}', '_count{model="m"}', '_sum{model="m"}'):
        assert page.count(f"nv_inference_first_response_histogram_ms{part} 0\n") == 1
    assert metrics._exposition_text(metrics.first_response_families([report()])) == ""


@pytest.mark.parametrize("allowed", [True, False])
def test_metrics_of_the_host_can_be_switched_off(allowed: bool) -> None:
    gateway = Mock(settings=GatewaySettings(allow_cpu_metrics=allowed))
    page = metrics._exposition_text(metrics.MetricsExporter(gateway)._host_families())
    for name in ("nv_cpu_utilization", "nv_cpu_memory_total_bytes", "nv_cpu_memory_used_bytes"):
        assert (f"\n{name} " in page) == allowed, name
    assert page.count("nv_cpu") == (9 if allowed else 0)
    assert "\nnv_pinned_memory_pool_total_bytes 0\n" in page


def test_other_requests_are_handled_between_families(monkeypatch: pytest.MonkeyPatch) -> None:
    handled: list[int] = []

    def families(*_: Any) -> Iterator[metrics.ExpositionFamily]:
        for number in range(3):
            asyncio.get_running_loop().call_soon(handled.append, number)
            yield metrics.ExpositionFamily("a", "", "gauge")
        assert handled == [0, 1, 2]

    monkeypatch.setattr(management, "collect_reports", AsyncMock(return_value=[]))
    monkeypatch.setattr(metrics.MetricsExporter, "_all_families", families)
    asyncio.run(metrics.MetricsExporter(Mock()).render_page())
    assert handled
