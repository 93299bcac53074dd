"""The current figures, computed from two reports of a scheduler, and the list of problems."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shmserve.gateway.api.figures import WINDOW_S, Figures, History, build_row, quantile
from shmserve.scheduler.tables import Histogram

BOUNDS = (0.001, 0.01, 0.1)


def histogram(*counts: int) -> dict[str, Any]:
    return {"buckets": list(BOUNDS), "counts": list(counts), "sum": sum(counts) / 1000}


def report(success: int = 0, **fields: Any) -> dict[str, Any]:
    """Return a scheduler's report of a model that has answered this number of requests singly."""
    flat_counts = dict.fromkeys(
        (
            *("fail", "inference_count", "execution_count", "workers_lost", "retried"),
            *("cache_hit", "cache_miss", "pending", "executing", "open_sequences", "queue_ns"),
            *("compute_input_ns", "compute_infer_ns", "compute_output_ns", "queue_delay_ns"),
        ),
        0,
    )
    sizes = {"buckets": [1, 2, 4], "counts": [success, 0, 0, 0], "sum": success}
    empty_reports: dict[str, Any] = {"failures": {"BACKEND": 0}, "instances": {}, "quantiles": {}}
    return {
        **flat_counts,
        **empty_reports,
        "success": success,
        "cache": {},
        "batches_closed": {"full": success, "idle": 0},
        "batch_size": sizes,
        "request_seconds": histogram(0, success, 0, 0),
        **fields,
    }


def build_rows(*reports: dict[str, Any], every_s: float = 1.0) -> list[dict[str, Any]]:
    figures = Figures()
    return [
        figures.build_rows([{"name": "m", "version": "1", "shmserve": report}], index * every_s)[
            "m/1"
        ]
        for index, report in enumerate(reports)
    ]


def test_the_first_snapshot_has_only_totals() -> None:
    (first_row,) = build_rows(report(7, pending=3, open_sequences=2))
    assert (first_row["success"], first_row["pending"], first_row["sequences"]) == (7, 3, 2)
    assert "recent" not in first_row and first_row["closed"] == {"full": 7}


def test_rates_are_of_the_window() -> None:
    rows = build_rows(*(report(10 * number) for number in range(30)))
    assert [row["recent"]["rate"] for row in rows[1:]] == [10.0] * 29
    assert rows[-1]["recent"]["sizes"] == {"1": 10 * WINDOW_S}
    assert rows[-1]["recent"]["closed"] == {"full": 10 * WINDOW_S}
    assert rows[-1]["recent"]["batch"] == 1.0
    # Within the bucket of 1 to 10 ms.
    assert rows[-1]["recent"]["ms"] == [5.5, 9.1, 9.91]


def test_exact_quantiles_are_preferred() -> None:
    exact_quantiles = {"quantiles": {"request": [[0.5, 2000], [0.9, 3000.4], [0.99, 4000]]}}
    _, second_row = build_rows(report(0), report(5, **exact_quantiles))
    assert second_row["recent"]["ms"] == [2.0, 3.0, 4.0]
    empty_quantiles = {"quantiles": {"request": [[0.5, None], [0.9, None], [0.99, None]]}}
    _, second_row = build_rows(report(0), report(0, **empty_quantiles))
    assert second_row["recent"]["ms"] == []


def test_phases_count_executed_requests_only() -> None:
    counters = {"cache_hit": 5, "queue_ns": 30_000_000, "compute_infer_ns": 50_000_000}
    _, second = build_rows(report(0), report(10, **counters))
    assert second["recent"]["phases"] == {"queue": 3.0, "input": 0.0, "infer": 10.0, "output": 0.0}


def test_restarted_counters_are_not_negative() -> None:
    _, second_row = build_rows(report(100), report(3))
    assert second_row["recent"]["rate"] == 0 and second_row["recent"]["sizes"] == {}


@pytest.mark.parametrize(
    ("fields", "at_least", "problem"),
    [
        ({"workers_lost": 2, "fail": 10},
         *(3000, "50% of requests fail; 2 workers died within an hour")),
        ({"workers_lost": 1}, 3000, "1 worker died within an hour"),
        ({"queue_ns": 210_000_000, "compute_infer_ns": 1_000_000, "queue_delay_ns": 20_000_000},
         *(0, "")),
        ({"queue_ns": 500_000_000, "compute_infer_ns": 1_000_000, "queue_delay_ns": 20_000_000},
         *(1000, "30 of 30.1 ms in the queue, besides the configured 20 ms")),
        ({"fail": 10}, 2000, "50% of requests fail"),
        ({"queue_ns": 90_000_000, "compute_infer_ns": 10_000_000}, 1000, "9 of 10 ms in the queue"),
        ({"queue_ns": 900_000, "compute_infer_ns": 100_000}, 0, ""),
        ({"success": 0, "pending": 3, "executing": 1}, 1000,
         "4 requests in flight, but no responses"),
        ({}, 0, ""),
    ],
)  # fmt: skip
def test_models_are_ranked_by_fault(fields: dict[str, Any], at_least: float, problem: str) -> None:
    _, second_row = build_rows(report(0), report(10) | fields)
    assert second_row["because"] == problem
    assert at_least <= second_row["hurts"] < at_least + 1000


def test_dead_workers_are_shown_for_an_hour_with_their_number() -> None:
    lost_counts = [0] * 5 + [1] * 10 + [3] * 400
    rows = build_rows(*(report(workers_lost=count) for count in lost_counts), every_s=10.0)
    problems = [count["because"].removesuffix(" within an hour") for count in rows]
    assert problems[4:7] == ["", "1 worker died", "1 worker died"]
    assert problems[15:365] == ["3 workers died"] * 350
    assert problems[366] == "2 workers died", "the first one died an hour ago"
    assert problems[375:] == [""] * 40
    (first_row,) = build_rows(report(workers_lost=2))
    assert first_row["because"] == "2 workers died within an hour"
    # Current failures have a higher rank than an old exit.
    assert rows[5]["hurts"] > 2100 > 2000 > rows[100]["hurts"] > 1500


def test_the_history_covers_ten_minutes() -> None:
    history, figures = History(), Figures()
    for second_s in range(1000):
        reports = [report(10 * second_s if second_s > 500 else 0, pending=second_s > 990)]
        models = [{"name": "m", "version": "1", "shmserve": snapshot} for snapshot in reports]
        history.add(1e9 + second_s, figures.build_rows(models, second_s))
    series = history.as_series()
    assert series["at"] == [1e9 + second_s for second_s in range(395, 1000, 5)]
    points = series["models"]["m/1"]
    assert points[:20] == [0] * 20 and points[-1][0] == 10.0 and points[-1][4:] == (1, 0)
    history.add(1e9 - 50, {})  # the clock was set back
    assert history.as_series() == {"at": [1e9 - 50], "models": {}}


def test_a_generative_model_has_token_rates() -> None:
    generation = {"sequences": {"running": 2}, "blocks": {"free": 9}, "utilization": 0.5}
    fields = {"generation": generation, "preemptions": {"swap": 1, "recompute": 2}, "prefilled": 0}
    latencies = dict.fromkeys(("first_token_seconds", "inter_token_seconds"), histogram(0, 0, 0, 0))
    first_report = report(0, generated=10, **fields, **latencies)
    row = build_row(report(1, generated=40, **fields, **latencies), first_report, 2.0)
    assert row["generation"]["blocks"] == {"free": 9} and row["generation"]["preemptions"] == 3
    assert row["recent"]["tokens_rate"] == 15.0 and row["recent"]["first_token_ms"] == []
    # The model has replaced a version that did not generate text.
    assert "tokens_rate" not in build_row(first_report, report(5), 2.0)["recent"]


@example([1] * 8 + [1_000_001, 10_000_001], 0.9)  # the last digit of the sum exceeds the quantile
@given(
    st.lists(st.integers(1, 200_000_000), min_size=1, max_size=50),
    st.sampled_from((0.5, 0.9, 0.99)),
)
def test_a_quantile_lies_in_its_true_bucket(times_ns: list[int], quantile_rank: float) -> None:
    histogram = Histogram(BOUNDS, 1_000_000_000)
    histogram.observe(*times_ns)
    estimate = quantile(quantile_rank, BOUNDS, histogram.report()["counts"])
    rank = min(
        int(quantile_rank * len(times_ns))
        if quantile_rank * len(times_ns) % 1
        else int(quantile_rank * len(times_ns)) - 1,
        len(times_ns) - 1,
    )
    true_s = sorted(times_ns)[max(rank, 0)] / 1e9
    bucket = next((index for index, bound in enumerate(BOUNDS) if true_s <= bound), len(BOUNDS))
    lower_bound = BOUNDS[bucket - 1] if bucket else 0.0
    assert lower_bound <= estimate <= BOUNDS[min(bucket, len(BOUNDS) - 1)]
