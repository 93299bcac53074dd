"""The strategies "direct" and "oldest", without processes."""

import pytest

from shmserve.ipc.messages import supervision as m
from tests.rigs.scheduler_rig import MS
from tests.rigs.sequence_rig import END, START, SequenceRig

US = 1_000


def test_the_worked_example_of_two_instances_with_two_slots() -> None:
    """Sequences 0 to 5 (ids 1 to 6): four have slots, two wait; an end frees a slot."""
    rig = SequenceRig(rows=2, instances=2)
    for sequence in range(1, 7):
        rig.request(sequence, START)
    # Sequences are spread over the instances. An idle instance runs at once.
    assert rig.batches() == {0: [1], 1: [2]}
    rig.finish_batch(0)
    rig.finish_batch(1)
    assert rig.batches() == {0: [None, 3], 1: [None, 4]}
    rig.request(4, END)
    rig.finish_batch(1)
    # The END of sequence 3 has run, so sequence 5 has its slot.
    assert rig.batches() == {1: [None, 4]}
    rig.finish_batch(1)
    assert rig.batches() == {1: [None, 5]}
    rig.finish_batch(0)
    rig.request(2, END)
    rig.finish_batch(1)
    assert rig.batches() == {1: [2]}
    rig.finish_batch(1)
    assert rig.batches() == {1: [6]}


def test_the_worked_example_of_one_instance() -> None:
    """A lone first request is one row; the next of slot 0 and first of slot 1 run together."""
    rig = SequenceRig(rows=2)
    rig.request(1, START)
    assert [(row.slot, row.key > 0, row.flags) for row in rig.rows()] == [(0, True, START)]
    rig.request(1)
    rig.request(2, START)
    rig.finish_batch()
    rows = rig.rows()
    assert [row.key > 0 for row in rows] == [True, True]  # both rows have the control READY
    assert [row.flags & START for row in rows] == [0, 1]


def test_a_batch_has_a_row_for_each_slot_up_to_the_highest_with_a_request() -> None:
    rig = SequenceRig(rows=4)
    for sequence in (1, 2, 3):
        rig.request(sequence, START)
        if sequence == 1:
            assert rig.batches() == {0: [1]}
    rig.finish_batch()
    assert rig.batches() == {0: [None, 2, 3]}
    null_row = rig.rows()[0]
    assert null_row.key == 0
    assert null_row.flags == 0
    assert null_row.correlation_id == 0
    assert null_row.correlation_text == ""
    rig.request(2)
    rig.finish_batch()
    assert rig.batches() == {0: [None, 2]}


def test_the_longest_waiting_request_determines_the_shape() -> None:
    rig = SequenceRig(rows=3)
    for sequence in (1, 2, 3):
        rig.request(sequence, START)
        rig.batches()
    rig.finish_batch()
    rig.finish_batch()
    rig.batches()
    rig.request(3)  # keeps the instance busy
    rig.batches()
    rig.request(2, shape_key=b"b")
    rig.pass_time(1)
    rig.request(1, shape_key=b"a")
    rig.request(3, shape_key=b"b")
    rig.finish_batch()
    assert rig.batches() == {0: [None, 2, 3]}
    rig.finish_batch()
    assert rig.batches() == {0: [1]}


def test_the_next_batch_is_formed_when_the_last_has_returned() -> None:
    rig = SequenceRig(rows=2)
    rig.request(1, START)
    rig.batches()
    for _ in range(3):
        rig.request(1)
    assert rig.batches() == {}
    for _ in range(3):
        rig.finish_batch()
        assert rig.batches() == {0: [1]}
    rig.finish_batch()
    assert rig.batches() == {}


@pytest.mark.parametrize(
    ("fields", "must_wait"),
    [
        ({"max_queue_delay_microseconds": 5000, "minimum_slot_utilization": 1.0}, True),
        ({"max_queue_delay_microseconds": 5000, "minimum_slot_utilization": 0.5}, False),
        ({"max_queue_delay_microseconds": 5000}, False),
        ({"minimum_slot_utilization": 1.0}, False),
    ],
)
def test_delay_and_minimum_utilization_apply_only_together(
    fields: dict[str, float], must_wait: bool
) -> None:
    rig = SequenceRig(rows=2, strategy_fields=fields)
    rig.request(1, START)
    assert rig.batches() == ({} if must_wait else {0: [1]})
    if must_wait:
        assert rig.wake_ns == rig.now + 5000 * US + 1
        rig.pass_time(5000 * US)
        assert rig.batches() == {}
        rig.pass_time(1)
        assert rig.batches() == {0: [1]}


def test_enough_filled_slots_or_a_deadline_end_the_wait() -> None:
    fields = {"max_queue_delay_microseconds": 500_000, "minimum_slot_utilization": 0.75}
    rig = SequenceRig(rows=4, strategy_fields=fields)
    for sequence in (1, 2):
        rig.request(sequence, START)
    assert rig.batches() == {}
    rig.request(3, START)
    assert rig.batches() == {0: [1, 2, 3]}
    rig.finish_batch()
    rig.request(1, timeout_ns=100 * MS)
    assert rig.now < rig.wake_ns < rig.now + 100 * MS
    rig.pass_time(rig.wake_ns - rig.now)
    assert rig.batches() == {0: [1]}


def test_null_rows_count_in_the_batch_size_but_not_as_inferences() -> None:
    """As in Triton, `inference_count` counts requests, and `batch_stats` counts executed rows."""
    rig = SequenceRig(rows=3)
    for sequence in (1, 2, 3):
        rig.request(sequence, START)
        rig.batches()
    rig.finish_batch()
    rig.finish_batch()
    report = rig.report()
    assert report["inference_count"] == 3
    assert [entry["batch_size"] for entry in report["batch_stats"]] == [1, 3]


def test_delay_scheduler_counts_slots_and_backlog() -> None:
    """Batches wait for the numbers of slots and of waiting requests that the settings demand."""
    rig = SequenceRig(rows=2, delay_scheduler=3, backlog_delay_scheduler=2)
    rig.request(1, START)
    rig.request(2, START)
    rig.request(2)
    rig.request(3, START)
    assert rig.batches() == {}
    rig.request(4, START)
    assert rig.batches() == {0: [1, 2]}
    rig.finish_batch()
    rig.supervisor(m.Drain())
    assert rig.batches() == {0: [None, 2]}


CANDIDATES = {"max_candidate_sequences": 4}


def test_the_worked_example() -> None:
    """Four candidates in batches of two, which never have two requests of one sequence."""
    rig = SequenceRig("oldest", rows=2, strategy_fields=CANDIDATES)
    rig.request("A", START)
    assert rig.batches() == {0: ["A"]}
    for name in "BCD":
        rig.request(name, START)
    rig.request("E", START)  # no free slot remains
    rig.request("A")
    rig.request("D")
    rig.request("D", END)
    batches: list[list[str]] = []
    for _ in range(6):
        rig.finish_batch()
        batches += rig.batches().values()
    assert batches == [["B", "C"], ["D", "A"], ["D"], ["D"], ["E"]]


@pytest.mark.parametrize(("fields", "slots"), [(CANDIDATES, 4), ({}, 2)])
def test_slots_are_the_candidates_or_the_batch_size(fields: dict[str, int], slots: int) -> None:
    rig = SequenceRig("oldest", rows=2, strategy_fields=fields)
    for sequence in range(1, 7):
        rig.request(sequence, START)
    sizes: list[int] = []
    while rig.is_running():
        sizes += rig.batches()[0]
        rig.finish_batch()
    assert sorted(sizes) == list(range(1, slots + 1))


def test_the_oldest_strategy_forms_the_dynamic_batchers_batches() -> None:
    fields = {
        "max_candidate_sequences": 8,
        "preferred_batch_size": [3],
        "max_queue_delay_microseconds": 1000,
    }
    rig = SequenceRig("oldest", rows=4, strategy_fields=fields)
    for sequence in (1, 2):
        rig.request(sequence, START)
    assert rig.batches() == {}
    rig.request(3, START)
    assert rig.batches() == {0: [1, 2, 3]}
    rig.finish_batch()
    rig.request(1)
    assert rig.batches() == {}
    rig.pass_time(1_000_000)
    assert rig.batches() == {0: [1]}


def test_at_most_one_request_of_a_sequence_runs() -> None:
    rig = SequenceRig("oldest", rows=4, strategy_fields={"max_candidate_sequences": 4})
    rig.request(1, START)
    for _ in range(3):
        rig.request(1)
    for _ in range(4):
        assert rig.batches() == {0: [1]}
        rig.finish_batch()


def test_the_oldest_strategy_has_no_null_rows_and_passes_the_slot_of_the_state() -> None:
    rig = SequenceRig("oldest", rows=4, strategy_fields=CANDIDATES)
    for sequence in (1, 2, 3):
        rig.request(sequence, START)
        rig.batches()
    rig.finish_batch()
    assert [(row.slot, row.correlation_id) for row in rig.rows()] == [(1, 2), (2, 3)]


@pytest.mark.parametrize("rows", [0, 1])
def test_the_oldest_strategy_without_batching(rows: int) -> None:
    rig = SequenceRig("oldest", rows=rows, strategy_fields=CANDIDATES)
    rig.submit(flags=START, correlation_id=1, batch_size=rows)
    rig.submit(flags=START, correlation_id=2, batch_size=rows)
    assert rig.batches() == {0: [1]}
    rig.finish_batch()
    assert rig.batches() == {0: [2]}
