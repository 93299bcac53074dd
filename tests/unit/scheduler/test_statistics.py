"""The scheduler's statistics and their representation."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from shmserve.common.model_metrics import add_tables, sum_counters
from shmserve.gateway.api import figures
from shmserve.ipc.messages import inference as m
from shmserve.ipc.messages.supervision import (
    BaseCounters,
    Drain,
    InstanceExpected,
    StatisticsSnapshot,
)
from shmserve.scheduler.instances.dispatch import ServiceTime
from shmserve.scheduler.requests.scheduled import Timing
from shmserve.scheduler.tables import Histogram
from tests.rigs.scheduler_rig import MS, WALL_NS, Rig, ok_reply, ready_rig


def test_nothing_is_counted_before_the_first_request() -> None:
    report = Rig({}).report()
    zero_counts = {"count": 0, "ns": 0}
    shmserve = report.pop("shmserve")
    assert report == {
        "name": "m",
        "version": "1",
        "last_inference": 0,
        "inference_count": 0,
        "execution_count": 0,
        "inference_stats": dict.fromkeys(
            (
                *("success", "fail", "queue", "compute_input", "compute_infer"),
                *("compute_output", "cache_hit", "cache_miss"),
            ),
            zero_counts,
        ),
        "response_stats": {},
        "batch_stats": [],
        "memory_usage": [],
    }
    assert shmserve["failures"] == {"REJECTED": 0, "CANCELED": 0, "BACKEND": 0, "OTHER": 0}
    assert set(shmserve["batches_closed"].values()) == {0}
    entries_that_gateways_read = {*figures._COPIED_FIGURES, *figures._COUNTS_BY_LABEL.values()}
    assert not entries_that_gateways_read - shmserve.keys()


def test_a_batch_is_counted_once_and_its_requests_one_by_one() -> None:
    rig, peer = ready_rig({})
    rig.submit(1, batch_size=3)
    rig.pass_time(0)
    _, batch = rig.execute()
    rig.submit(1, batch_size=3, arrived_ns=rig.now - MS)
    rig.submit(2, batch_size=1)
    rig.pass_time(5 * MS)
    rig.finish(peer, batch)
    _, batch = rig.execute()
    k = [request.key for request in batch.requests]
    rig.pass_time(MS)
    rig.finish(peer, batch, ok_reply(k[0]), m.Reply(k[1], "INTERNAL", "no"), ok_reply(k[2]))
    report = rig.report()
    assert report["execution_count"] == 2 and report["inference_count"] == 3 + 3 + 1
    assert report["last_inference"] == WALL_NS // 1_000_000
    stats = report["inference_stats"]
    # The first request ran for 5 ms. The others waited for 5 ms and ran for 1 ms; one of them had
    # spent 1 ms more in transit.
    assert stats["success"] == {"count": 3, "ns": 5 * MS + 7 * MS + 6 * MS}
    assert stats["fail"] == {"count": 1, "ns": 6 * MS}
    # The computation began 4 ns before the end. Its three phases took 1, 2 and 1 ns.
    assert stats["queue"] == {"count": 3, "ns": 5 * MS - 4 + 2 * (6 * MS - 4)}
    assert stats["compute_input"] == {"count": 3, "ns": 3}
    assert stats["compute_infer"] == {"count": 3, "ns": 6}
    assert stats["compute_output"] == {"count": 3, "ns": 3}
    assert [row["batch_size"] for row in report["batch_stats"]] == [3, 5]
    assert report["batch_stats"][1] == {
        "batch_size": 5,
        "compute_input": {"count": 1, "ns": 1},
        "compute_infer": {"count": 1, "ns": 2},
        "compute_output": {"count": 1, "ns": 1},
    }
    extension = report["shmserve"]
    assert extension["failures"]["BACKEND"] == 1
    assert extension["batches_closed"]["idle"] == 2
    assert extension["batch_size"]["sum"] == 8
    assert extension["request_seconds"]["count"] == 3
    assert extension["instances"]["idle"] == 1


def test_batches_that_were_sent_ahead_are_counted_with_the_times_they_took() -> None:
    """Results of several batches may arrive together."""
    rig, peer = ready_rig()
    for _ in range(50):  # executions so short that a worker may have more than one
        rig.submit()
        rig.pass_time(4)
        rig.finish(peer, rig.execute()[1])
    rig.submit(3)
    batches = [batch for _, batch in rig.take_batches()]
    assert len(batches) == 3
    sent_ns = rig.now + 1_000
    rig.now += 40_000
    for number, batch in enumerate(batches):
        start = sent_ns + number * 10_000
        times_ns = (start, start + 1_000, start + 8_000, start + 10_000)
        replies = [ok_reply(request.key) for request in batch.requests]
        rig.worker(peer, m.BatchFinished(batch.batch, *times_ns, replies, 0, 0))
    stats = rig.report()["inference_stats"]
    assert stats["compute_input"]["ns"] == 50 + 3 * 1_000
    assert stats["compute_infer"]["ns"] == 50 * 2 + 3 * 7_000
    assert stats["compute_output"]["ns"] == 50 + 3 * 2_000
    assert stats["queue"]["ns"] == (1 + 11 + 21) * 1_000


def test_a_request_that_fails_before_the_model_is_no_execution() -> None:
    rig, peer = ready_rig({})
    _, batch = rig.submit_batch()
    (request,) = batch.requests
    replies = [m.Reply(request.key, "INVALID_ARG", "incomplete string")]
    now = rig.now
    rig.worker(peer, m.BatchFinished(batch.batch, now, now, now, now, replies, executed=False))
    report = rig.report()
    assert (report["execution_count"], report["last_inference"]) == (0, 0)
    assert report["batch_stats"] == []
    assert report["inference_stats"]["fail"]["count"] == 1
    assert report["shmserve"]["compute_seconds"]["count"] == 0


def test_failures_by_reason() -> None:
    rig, _ = ready_rig({"default_queue_policy": {"max_queue_size": 2}}, max_batch_size=1)
    rig.submit(1, timeout_ns=2 * MS)
    (cancelled_id,) = rig.submit()
    rig.submit(1, timeout_ns=MS)
    rig.submit(1)
    rig.client(m.Cancel(cancelled_id))
    rig.submit(1, batch_size=2)
    rig.pass_time(3 * MS)
    failures = rig.report()["shmserve"]["failures"]
    assert failures == {"REJECTED": 2, "CANCELED": 1, "BACKEND": 0, "OTHER": 1}


def test_gauges_show_the_current_state() -> None:
    rig, _ = ready_rig({}, max_batch_size=2)
    rig.submit(2)
    rig.submit(3)
    rig.supervisor(InstanceExpected(1, 0))
    rig.clients.malformed_messages = 2
    extension = rig.report()["shmserve"]
    assert (extension["pending"], extension["executing"], extension["malformed"]) == (3, 2, 2)
    assert extension["instances"]["busy"] == 1 == extension["instances"]["expected"]


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=4, max_size=4), st.integers(0, 50))
def test_reported_times_are_clamped(reported_times: list[int], duration_ns: int) -> None:
    start_ns, now_ns = 1000, 1000 + duration_ns
    start, input_end, output_start, output_end = reported_times
    message = m.BatchFinished(1, start, input_end, output_start, output_end, [])
    timing = Timing.from_worker(message, start_ns, now_ns)
    assert start_ns <= timing.compute_start_ns <= now_ns
    assert min(timing[1:4]) >= 0
    assert timing.compute_start_ns + sum(timing[1:4]) <= now_ns


def test_a_histogram_counts_a_bound_inclusively() -> None:
    counted = Histogram((0.5, 2.0), 10)
    for value in (0, 5, 6, 20, 21):
        counted.observe(value)
    assert counted.report() == {"buckets": [0.5, 2.0], "counts": [2, 2, 1], "sum": 5.2, "count": 5}


def test_service_time_determines_when_to_retry() -> None:
    service_time = ServiceTime()
    assert service_time.drain_s(1000, 1) == 1
    for _ in range(100):
        service_time.observe(500 * MS, 500 * MS, 4)
    assert service_time.drain_s(0, 1) == 1 and service_time.drain_s(40, 1) == 5
    assert service_time.drain_s(40, 5) == 1 and service_time.drain_s(40, 0) == 5
    assert service_time.drain_s(10**9, 1) == 60


def test_service_time_reserves_more_where_executions_vary() -> None:
    steady_service, unsteady_service = ServiceTime(), ServiceTime()
    assert steady_service.reserve_ns > 0
    for index in range(200):
        steady_service.observe(10 * MS, MS, 1)
        unsteady_service.observe((5 if index % 2 else 15) * MS, MS, 1)
    assert 10 * MS < steady_service.reserve_ns < 12 * MS
    assert unsteady_service.reserve_ns > 20 * MS


def test_a_successor_continues_the_counts() -> None:
    rig, peer = ready_rig({})
    rig.submit(3, batch_size=2)
    rig.submit(1, timeout_ns=MS)
    rig.client(m.Cancel(3))
    _, batch = rig.execute()
    rig.pass_time(2 * MS)
    rig.worker(peer, m.MetricsReported([["c", "", "COUNTER", [[[], [4], []]]]]))
    rig.worker(b"x", m.MetricsReported([]))
    rig.finish(peer, batch)
    report = rig.report()
    assert report["shmserve"]["copied_bytes"] == {"in": 5, "out": 6}
    (snapshot,) = [sent for _, sent in rig.control.take() if type(sent) is StatisticsSnapshot]
    assert sum_counters(snapshot.statistics).items() <= report["shmserve"].items()

    successor = Rig({})
    successor.scheduler.restore([snapshot.statistics, snapshot.metrics], [100])
    report_now = successor.report()
    assert report_now["last_inference"] > 0
    del report_now["last_inference"], report["last_inference"]
    assert report["inference_count"] > 0
    for counts in (report_now, report):  # current values, not counts
        del counts["shmserve"]["instances"], counts["shmserve"]["executing"]
    assert report_now == report


def test_the_successor_of_a_version_continues_its_metrics_only() -> None:
    old_rig = Rig({})
    peer = old_rig.start()
    old_rig.submit(2)
    _, batch = old_rig.execute()
    old_rig.supervisor(Drain())
    old_report = last_snapshot(old_rig)
    assert old_report["inference_count"] == 0
    new_rig = Rig({})
    new_rig.supervisor(BaseCounters(sum_counters(old_report)))
    new_rig.finish(new_rig.start(), run_one(new_rig))
    old_rig.pass_time(MS)
    old_rig.finish(peer, batch)
    new_rig.supervisor(BaseCounters(sum_counters(last_snapshot(old_rig))))
    report = new_rig.report()
    assert report["inference_count"] == 1
    snapshot = last_snapshot(new_rig)
    totals = sum_counters(snapshot)
    assert totals.items() <= report["shmserve"].items()
    assert totals["inference_count"] == 3 and totals["success"] == 3
    assert totals["batch_size"]["counts"][:2] == [1, 1]
    assert totals["batch_size"]["buckets"] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
    assert totals["batches_closed"]["idle"] == 2
    assert totals["copied_bytes"] == {"in": 10, "out": 12}
    # A successor after a death or a planned replacement continues from both snapshots.
    after_a_death = Rig({})
    after_a_death.scheduler.restore([snapshot, [[]]], [])
    assert sum_counters(after_a_death.snapshot()) == totals
    after_a_reload = Rig({})
    after_a_reload.supervisor(BaseCounters(totals))
    assert sum_counters(after_a_reload.snapshot()) == totals
    after_a_reload.supervisor(BaseCounters({"nonsense": 1}))
    assert sum_counters(after_a_reload.snapshot()) == totals


def test_the_scheduler_of_a_moved_version_continues_its_counts() -> None:
    old_rig, new_rig = Rig({}), Rig({})
    old_rig.supervisor(BaseCounters(sum_counters(drained(Rig({})))))
    old_snapshot = drained(old_rig)
    new_rig.supervisor(BaseCounters(sum_counters(old_snapshot)))
    totals = sum_counters(drained(new_rig))
    new_rig.supervisor(BaseCounters({}, old_snapshot))
    report = new_rig.report()
    assert (report["inference_count"], report["execution_count"]) == (4, 2)
    assert [row["compute_infer"]["count"] for row in report["batch_stats"]] == [2]
    assert sum_counters(last_snapshot(new_rig)) == totals and totals["inference_count"] == 6


def test_a_histogram_with_changed_bounds_restarts() -> None:
    reports = []
    for bounds in ([1.0, 2.0], [1.0, 2.0], [1.0]):
        rig = Rig({}, decoupled=True, buckets_ms=bounds)
        peer = rig.start()
        rig.submit()
        rig.respond(peer, rig.execute()[1].requests[0].key)
        reports.append(sum_counters(rig.snapshot()))
    assert reports[0]["first_response_ms"]["counts"] == [1, 0, 0]
    same_sum, changed_sum = (add_tables(later_report, reports[0]) for later_report in reports[1:])
    assert same_sum["first_response_ms"]["counts"] == [2, 0, 0]
    assert changed_sum["first_response_ms"]["counts"] == [1, 0]


def last_snapshot(rig: Rig) -> dict[str, Any]:
    snapshots = [sent for _, sent in rig.control.take() if type(sent) is StatisticsSnapshot]
    return dict(snapshots[-1].statistics)


def drained(rig: Rig) -> dict[str, Any]:
    """Return the snapshot of a scheduler that has executed a batch of two, and drained."""
    peer = rig.start()
    _, batch = rig.submit_batch(2)
    rig.finish(peer, batch)
    rig.supervisor(Drain())
    return last_snapshot(rig)


def run_one(rig: Rig) -> m.Execute:
    """Return a batch of one request, sent once an instance is free."""
    rig.submit()
    return rig.execute()[1]


def test_a_successor_restarts_unreadable_counts() -> None:
    rig = Rig({})
    rig.scheduler.restore([{"last_ns": 3}, []], [])
    assert rig.report()["inference_count"] == 0
