"""The tables of a scheduler's statistics: quantiles of the last minute, and responses by index."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from shmserve.ipc.messages import inference as m
from shmserve.ipc.messages.supervision import SnapshotStatistics, StatisticsSnapshot
from shmserve.scheduler.tables import ACCURACY, LAST_RESPONSE_INDEX, Quantiles
from shmserve.supervisor.models.scheduler_process import CarriedCounters
from tests.rigs.scheduler_rig import MS, Rig, ready_rig, stream_rig

ZERO_ENTRY = {"count": 0, "ns": 0}


def stats(rig: Rig) -> dict[str, dict[str, tuple[int, int]]]:
    """Return the non-zero entries as (count, ns)."""
    return stats_of(rig.report())


def stats_of(report: dict[str, Any]) -> dict[str, dict[str, tuple[int, int]]]:
    return {
        index: {
            name: (entry["count"], entry["ns"])
            for name, entry in row.items()
            if entry != ZERO_ENTRY
        }
        for index, row in report["response_stats"].items()
    }


def send_response(
    rig: Rig, peer: bytes, key: int, infer_ns: int, sent_ns: int, **fields: Any
) -> None:
    rig.now += infer_ns + sent_ns
    elapsed_ns = rig.now - sent_ns
    rig.respond(peer, key, computed_ns=elapsed_ns, written_ns=rig.now, **fields)


def test_each_response_is_measured_from_the_previous_one() -> None:
    rig, peer, _, key = stream_rig()
    send_response(rig, peer, key, 3 * MS, 1)
    send_response(rig, peer, key, 2 * MS, 2)
    send_response(rig, peer, key, 5 * MS, 0, response=b"", final=True)
    assert stats(rig) == {
        "0": {"compute_infer": (1, 3 * MS), "compute_output": (1, 1), "success": (1, 3 * MS + 1)},
        "1": {"compute_infer": (1, 2 * MS), "compute_output": (1, 2), "success": (1, 2 * MS + 2)},
        "2": {"compute_infer": (1, 5 * MS), "empty_response": (1, 5 * MS)},
    }
    assert set(rig.report()["response_stats"]["0"]) == {
        *("compute_infer", "compute_output", "success", "fail", "empty_response", "cancel")
    }


def test_the_last_response_may_also_end_the_request() -> None:
    rig, peer, _, key = stream_rig()
    send_response(rig, peer, key, MS, 1, final=True)
    (row,) = stats(rig).values()
    assert row["success"] == (1, MS + 1)


def test_an_error_is_a_response_that_failed() -> None:
    rig, peer, _, key = stream_rig()
    send_response(rig, peer, key, MS, 0, response=b"", code="INTERNAL", message="no")
    rig.respond(peer, key, final=True)
    assert stats(rig)["0"] == {"compute_infer": (1, MS), "fail": (1, MS)}


def test_a_cancelled_request_is_counted_once_by_its_state() -> None:
    rig, peer, number, key = stream_rig()
    send_response(rig, peer, key, MS, 0)
    rig.client(m.Cancel(number))
    rig.respond(peer, key)
    rig.pass_time(MS)
    rig.respond(peer, key, b"", final=True)
    assert stats(rig)["1"] == {"cancel": (1, MS)}


def test_a_model_may_report_its_own_cancellation() -> None:
    rig, peer, _, key = stream_rig()
    send_response(rig, peer, key, MS, 0)
    cancellation = {"code": "CANCELLED", "message": "no more"}
    send_response(rig, peer, key, MS, 0, response=b"", final=True, **cancellation)
    assert stats(rig)["1"] == {"cancel": (1, MS)}


def test_requests_add_up_by_index() -> None:
    rig, peer, _, key = stream_rig()
    for batch, count in ((1, 3), (2, 2)):
        for _ in range(count):
            send_response(rig, peer, key, 10, 1)
        rig.respond(peer, key, b"", final=True)
        rig.report_returned(peer, m.Execute(batch, []))
        rig.submit()
        key = rig.execute()[1].requests[0].key
    figures = stats(rig)
    for name, expected in (("success", [2, 2, 1, 0]), ("empty_response", [0, 0, 1, 1])):
        assert [figures[index].get(name, (0, 0))[0] for index in sorted(figures)] == expected


def test_impossible_times_are_clamped() -> None:
    rig, peer, _, key = stream_rig()
    for computed_ns, written_ns in ((-(2**63), 2**63 - 1), (2**63 - 1, -5), (0, 0)):
        rig.pass_time(10)
        rig.respond(peer, key, computed_ns=computed_ns, written_ns=written_ns)
    figures = stats(rig)
    assert figures["0"]["success"] == (1, 10)
    assert all(ns >= 0 for row in figures.values() for _, ns in row.values())


def test_the_table_is_bounded() -> None:
    rig, peer, _, key = stream_rig()
    for _ in range(LAST_RESPONSE_INDEX + 5):
        rig.respond(peer, key)
    figures = stats(rig)
    assert len(figures) == LAST_RESPONSE_INDEX + 1
    assert figures[str(LAST_RESPONSE_INDEX)]["success"][0] == 5


def test_counts_are_carried_to_the_next_scheduler() -> None:
    rig, peer, _, key = stream_rig()
    send_response(rig, peer, key, MS, 1)
    counts = CarriedCounters(lambda _: None)
    first_report, first_snapshot = rig.report(), rig.snapshot()
    send_response(rig, peer, key, MS, 1, final=True)
    rig.control.take()
    rig.scheduler.handle_control_message(SnapshotStatistics(), rig.now)
    ((_, snapshot),) = rig.control.take()
    assert "responses" not in snapshot.statistics
    assert snapshot.statistics.keys() == first_snapshot.keys() - {"responses"}
    for known_snapshots in ([], [StatisticsSnapshot(first_snapshot, [])]):
        for row in (*known_snapshots, snapshot):
            counts.update(row.statistics, row.metrics)
        successor = Rig(decoupled=True)
        successor.scheduler.restore(counts.snapshot, [])
        assert successor.report()["inference_stats"]["success"]["count"] == 1
        assert stats(successor) == (stats_of(first_report) if known_snapshots else {})


def test_ordinary_models_have_no_response_statistics() -> None:
    rig, peer = ready_rig()
    rig.submit()
    rig.finish(peer, rig.execute()[1])
    report = rig.report()
    assert report["response_stats"] == {}
    assert "first_response_ms" not in report["shmserve"]


def test_the_first_response_of_a_request_is_observed() -> None:
    rig, peer, _, key = stream_rig()
    send_response(rig, peer, key, 300 * MS, 0)
    send_response(rig, peer, key, 9_000 * MS, 0, final=True)
    assert rig.report()["shmserve"]["first_response_ms"] == {
        "buckets": [100, 500, 2000, 5000],
        "counts": [0, 1, 0, 0, 0],
        "sum": 300,
        "count": 1,
    }


def test_an_end_without_a_response_is_no_first_response() -> None:
    rig, peer, _, key = stream_rig()
    rig.respond(peer, key, b"", final=True)
    assert rig.report()["shmserve"]["first_response_ms"]["count"] == 0


def test_a_successor_continues_the_counts() -> None:
    rig, peer, number, key = stream_rig()
    send_response(rig, peer, key, MS, 1)
    send_response(rig, peer, key, MS, 0, response=b"", code="INTERNAL", message="no")
    rig.client(m.Cancel(number))
    rig.respond(peer, key, b"", final=True)
    report, snapshot = rig.report(), rig.snapshot()
    successor = Rig(decoupled=True)
    successor.scheduler.restore([snapshot, [[]]], [])
    report_now = successor.report()
    assert report_now["response_stats"] == report["response_stats"]
    assert report_now["shmserve"]["first_response_ms"] == report["shmserve"]["first_response_ms"]


def test_quantiles_of_the_last_minute_are_kept_on_request() -> None:
    rig, peer = ready_rig(quantiles=[0.5, 1.0])
    for ms in (2, 4, 30):
        rig.submit()
        rig.pass_time(ms * MS)
        rig.finish(peer, rig.execute()[1])
    quantiles = rig.report()["shmserve"]["quantiles"]
    assert set(quantiles) == {
        "request", "queue", "compute_input", "compute_infer", "compute_output",
    }  # fmt: skip
    (median_rank, median), (_, highest) = quantiles["request"]
    assert median_rank == 0.5
    assert 3_980 < median < 4_020 and 29_800 < highest < 30_200
    assert quantiles["compute_infer"] == [[0.5, 0.0], [1.0, 0.0]]
    rig.pass_time(61_000 * MS)
    assert rig.report()["shmserve"]["quantiles"]["request"] == [[0.5, None], [1.0, None]]
    assert Rig().report()["shmserve"]["quantiles"] == {}


SECOND_NS = 1_000_000_000
ALL_RANKS = (0.0, 0.5, 0.9, 0.99, 0.999, 1.0)


@given(st.lists(st.integers(-5, 10**12), min_size=1, max_size=300))
def test_a_quantile_is_near_the_value_of_its_rank(values: list[int]) -> None:
    sketch = Quantiles()
    for value in values:
        sketch.observe(value, 5)
    ranked_values = sorted(max(0, value) for value in values)
    for quantile, estimate in sketch.report(ALL_RANKS, 6):
        assert quantile is not None and estimate is not None
        exact_value = ranked_values[int(quantile * (len(ranked_values) - 1))]
        assert abs(estimate - exact_value) <= ACCURACY * exact_value * 1.000001


def test_without_observations_there_is_no_quantile() -> None:
    assert Quantiles().report((0.5, 0.9), 77) == [[0.5, None], [0.9, None]]


def test_observations_older_than_a_minute_are_dropped() -> None:
    sketch = Quantiles()
    observed_ns = 1_000 * SECOND_NS
    sketch.observe(100, observed_ns)
    sketch.observe(7_000, observed_ns + 30 * SECOND_NS)

    def median(now_ns: int) -> int:
        ((_, value),) = sketch.report((1.0,), now_ns)
        return 0 if value is None else int(round(value, -2))

    assert median(observed_ns + 47 * SECOND_NS) == 7_000
    ((_, lowest),) = sketch.report((0.0,), observed_ns + 47 * SECOND_NS)
    assert lowest is not None and round(lowest) == 100
    ((_, lowest),) = sketch.report((0.0,), observed_ns + 61 * SECOND_NS)
    assert lowest is not None and round(lowest, -2) == 7_000
    assert median(observed_ns + 91 * SECOND_NS) == 0
    sketch.observe(300, observed_ns + 3_600 * SECOND_NS)
    assert median(observed_ns + 3_600 * SECOND_NS) == 300
