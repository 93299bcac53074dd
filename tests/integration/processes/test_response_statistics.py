"""Statistics and metrics of a decoupled model, over tritonclient and in a scrape."""

import re
from pathlib import Path

import pytest

from tests.support import repositories
from tests.support.servers import Server, Start
from tests.support.waiting import until
from tests.support.wire.streams import count_responses, send_repeat, stream

FIRST_RESPONSE = "nv_inference_first_response_histogram_ms"
BUCKETS = f"""
model_metrics {{ metric_control {{
    metric_identifier {{ family: "{FIRST_RESPONSE}" }}
    histogram_options {{ buckets: [ 0.001, 60000 ] }}
}} }}
"""


@pytest.fixture(scope="module")
def repeating(models: Path, start: Start) -> Server:
    """Start a server with models that repeat each input element as a response."""
    repositories.add(models, "repeat", config=BUCKETS)
    for name in ("standard", "cancelled", "killed"):
        repositories.add_as(models, name, "repeat")
    return start(models, "--metrics-config=histogram_latencies=true", grpc=True)


def test_responses_are_counted_by_their_index(repeating: Server) -> None:
    with stream(repeating) as (client, results):
        for count in (3, 1):
            # The statistics count the first-response time in whole ms.
            send_repeat(client, list(range(count)), delay_ms=2)
            assert count_responses(results) == count
        (over_grpc,) = client.get_inference_statistics("repeat").model_stats
    with repeating.http() as http:
        statistics = http.statistics("repeat")
    rows = statistics["response_stats"]
    counts = {index: {name: e["count"] for name, e in r.items()} for index, r in rows.items()}
    zeros = dict.fromkeys(
        ("compute_infer", "compute_output", "success", "fail", "empty_response", "cancel"), 0
    )
    good_counts = {"compute_infer": 1, "compute_output": 1, "success": 1}
    empty_counts = {"compute_infer": 1, "empty_response": 1}
    assert counts == {
        "0": {**zeros, "compute_infer": 2, "compute_output": 2, "success": 2},
        "1": {**zeros, "compute_infer": 2, "compute_output": 1, "success": 1}
        | {"empty_response": 1},
        "2": {**zeros, **good_counts},
        "3": {**zeros, **empty_counts},
    }
    for r in rows.values():
        parts = r["compute_infer"]["ns"] + r["compute_output"]["ns"]
        assert parts == r["success"]["ns"] + r["empty_response"]["ns"]
    assert statistics["inference_count"] == 2
    assert statistics["inference_stats"]["success"]["count"] == 2
    over_grpc_too = {index: r.success.count for index, r in over_grpc.response_stats.items()}
    assert over_grpc_too == {"0": 2, "1": 1, "2": 1, "3": 0}
    first_buckets = {
        labels["le"]: n
        for labels, n in repeating.samples(f"{FIRST_RESPONSE}_bucket")
        if labels["model"] == "repeat"
    }
    assert first_buckets == {"0.001": 0, "60000": 2, "+Inf": 2}
    assert repeating.metric(f"{FIRST_RESPONSE}_count", model="repeat") == 2
    lines = [line for line in repeating.metrics().splitlines() if line.startswith(FIRST_RESPONSE)]
    full_text = rf'{FIRST_RESPONSE}_sum{{model="repeat",version="1"}} [0-9]+'
    assert sum(re.fullmatch(full_text, line) is not None for line in lines) == 1
    assert f'{FIRST_RESPONSE}_bucket{{model="repeat",version="1",le="60000"}} 2' in lines
    standard = {
        labels["le"]
        for labels, _ in repeating.samples(f"{FIRST_RESPONSE}_bucket")
        if labels["model"] == "standard"
    }
    assert standard == {"100", "500", "2000", "5000", "+Inf"}


def test_a_cancelled_request_is_counted_at_its_response(repeating: Server) -> None:
    with stream(repeating) as (client, results):
        send_repeat(client, [0] * 2000, delay_ms=20, model="cancelled")
        for _ in range(2):
            results.get(timeout=30)

    def cancelled_statistics() -> int:
        with repeating.http() as http:
            rows = http.statistics("cancelled")["response_stats"].values()
        return sum(row["cancel"]["count"] for row in rows)

    until("the cancellation is counted", lambda: cancelled_statistics() == 1)
    labels = {"model": "cancelled", "reason": "CANCELED"}
    assert repeating.metric("nv_inference_request_failure", **labels) == 1
