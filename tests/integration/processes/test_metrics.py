"""Statistics and metrics: every counter has the expected value after a known set of requests."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import repositories
from tests.support.load import infer_simple
from tests.support.request_pool import request_pool
from tests.support.servers import Server, Start
from tests.support.waiting import until
from tests.support.wire.raw_http import Http, json_request

COUNTERS = (
    "nv_inference_request_success",
    "nv_inference_count",
    "nv_inference_exec_count",
    "nv_inference_request_duration_us",
    "nv_inference_queue_duration_us",
    "nv_inference_compute_input_duration_us",
    "nv_inference_compute_infer_duration_us",
    "nv_inference_compute_output_duration_us",
)
REASONS = {"REJECTED", "CANCELED", "BACKEND", "OTHER"}


@pytest.fixture(scope="module")
def metrics_server(models: Path, start: Start) -> Server:
    """Start a server with separate models for each test."""
    repositories.add(models, "simple", "crimes")
    for name in ("untouched", "closing"):
        repositories.add_as(models, name, "simple")
    return start(models)


def rows(count: int) -> dict[str, Any]:
    zeros = np.zeros((count, 16), np.int32)
    return json_request(INPUT0=zeros, INPUT1=zeros)


def test_every_metric_exists_with_the_value_zero(metrics_server: Server) -> None:
    for name in COUNTERS:
        samples = metrics_server.samples(name)
        assert all(labels["version"] == "1" for labels, _ in samples), name
        assert [n for labels, n in samples if labels["model"] == "untouched"] == [0], name
    failures = metrics_server.samples("nv_inference_request_failure")
    reasons = {labels["reason"]: n for labels, n in failures if labels["model"] == "untouched"}
    assert reasons == dict.fromkeys(REASONS, 0)
    assert metrics_server.metric("nv_inference_pending_request_count", model="untouched") == 0
    assert metrics_server.metric("nv_model_load_duration_secs", model="untouched") > 0
    for name in ("nv_cpu_utilization", "nv_cpu_memory_total_bytes", "nv_cpu_memory_used_bytes"):
        assert len(metrics_server.samples(name)) == 1, name
    for name in ("nv_pinned_memory_pool_total_bytes", "nv_pinned_memory_pool_used_bytes"):
        assert metrics_server.samples(name) == [({}, 0)], name


def test_counts(metrics_server: Server) -> None:
    with metrics_server.http() as http:
        for number in range(5):
            assert infer_simple(http, number) == ""
        http.infer("simple", rows(2)).ok()
        http.infer("simple", {"inputs": []})
        until("all is counted", lambda: http.statistics("simple")["inference_count"] == 7)
        statistics = http.statistics("simple")
        assert statistics["name"] == "simple" and statistics["version"] == "1"
        assert statistics["execution_count"] == 6
        assert statistics["last_inference"] > 1_600_000_000_000
        inference = statistics["inference_stats"]
        for part in ("success", "queue", "compute_input", "compute_infer", "compute_output"):
            assert inference[part]["count"] == 6, part
            assert inference[part]["ns"] > 0, part
        assert inference["fail"] == {"count": 0, "ns": 0}
        parts = sum(
            inference[part]["ns"]
            for part in ("queue", "compute_input", "compute_infer", "compute_output")
        )
        assert parts <= inference["success"]["ns"]
        assert [
            (batch["batch_size"], batch["compute_infer"]["count"])
            for batch in statistics["batch_stats"]
        ] == [(1, 5), (2, 1)]
        all_statistics = http.get("/v2/models/stats").ok().json()["model_stats"]
        names = ["closing", "crimes", "simple", "untouched"]
        assert sorted(item["name"] for item in all_statistics) == names
    assert metrics_server.metric("nv_inference_request_success", model="simple") == 6
    assert metrics_server.metric("nv_inference_count", model="simple") == 7
    assert metrics_server.metric("nv_inference_exec_count", model="simple") == 6
    assert metrics_server.metric("nv_inference_request_duration_us", model="simple") > 0
    assert metrics_server.metric("nv_inference_count", model="untouched") == 0


def test_counters_survive_gateways_workers(repository: Path, serve: Callable[..., Server]) -> None:
    repositories.add(repository, "simple")
    server = serve(repository, "--gateways=2")
    with request_pool(server, 8) as pool:
        pending_calls = [pool.send(lambda http: http.get("/v2/health/live")) for _ in range(8)]
        assert all(answer.result().status == 200 for answer in pending_calls)
        for _ in range(40):
            pool.infer("simple", rows(1))
    until("all is counted", lambda: server.metric("nv_inference_count", model="simple") == 40)
    for process in (server.find_one("worker simple.0"), server.find("gateway")[0]):
        process.kill()
        process.wait(5)
        until("it is ready again", lambda: server.answers("/v2/health/ready"))
        assert server.metric("nv_inference_count", model="simple") == 40


def test_no_metrics(repository: Path, serve: Callable[..., Server]) -> None:
    repositories.add(repository, "constant")
    server = serve(repository, "--allow-metrics=false")
    with pytest.raises(ConnectionRefusedError), closing(Http(server.metrics_port)) as metrics:
        metrics.get("/metrics")


def test_latencies_appear_as_configured(repository: Path, serve: Callable[..., Server]) -> None:
    repositories.add(repository, "simple")
    server = serve(
        repository,
        "--metrics-config=counter_latencies=false",
        "--metrics-config=summary_latencies=true",
        "--metrics-config=histogram_latencies=true",
        "--metrics-config=summary_quantiles=0.5:0.05,0.99:0.001",
    )
    name = "nv_inference_request_summary_us"
    unknown = {labels["quantile"]: n for labels, n in server.samples(name) if "quantile" in labels}
    assert set(unknown) == {"0.5", "0.99"}
    assert all(n != n for n in unknown.values()), "not a number, before anything was observed"
    with server.http() as http:
        for _ in range(3):
            http.infer("simple", rows(1)).ok()
    for part in ("request", "queue", "compute_input", "compute_infer", "compute_output"):
        name = f"nv_inference_{part}_summary_us"
        assert server.metric(f"{name}_count", model="simple") == 3
        assert server.metric(f"{name}_sum", model="simple") >= 0
        low_quantile, high_quantile = (server.metric(name, quantile=q) for q in ("0.5", "0.99"))
        assert 0 <= low_quantile <= high_quantile
    page = server.metrics()
    assert "_duration_us" not in page, "these counters are switched off"
    assert server.metric("nv_inference_request_success", model="simple") == 3
    assert "first_response" not in page, "only decoupled models have it"


def test_summaries_are_off_by_default(metrics_server: Server) -> None:
    page = metrics_server.metrics()
    assert "_summary_us" not in page and "first_response" not in page
