"""The oldest strategy (reference 3.5), in a scheduler without processes."""

import pytest

from tests.rigs.sequence_rig import END, START, SequenceRig

CANDIDATES = {"max_candidate_sequences": 4}


def test_the_worked_example() -> None:
    """Four candidates, batches of at most two: never two of one sequence, the last two of D one
    after the other, and who ends makes room at once."""
    rig = SequenceRig("oldest", rows=2, given=CANDIDATES)
    rig.ask("A", START)
    assert rig.batches() == {0: ["A"]}
    for name in "BCD":
        rig.ask(name, START)
    rig.ask("E", START)  # no slot is left
    rig.ask("A")
    rig.ask("D")
    rig.ask("D", END)
    seen: list[list[str]] = []
    for _ in range(6):
        rig.done()
        seen += rig.batches().values()
    assert seen == [["B", "C"], ["D", "A"], ["D"], ["D"], ["E"]]


@pytest.mark.parametrize(("given", "slots"), [(CANDIDATES, 4), ({}, 2)])
def test_3_5_slots_are_those_of_the_candidates_or_of_the_batch(
    given: dict[str, int], slots: int
) -> None:
    rig = SequenceRig("oldest", rows=2, given=given)
    for sequence in range(1, 7):
        rig.ask(sequence, START)
    seen: list[int] = []
    while rig.runs():
        seen += rig.batches()[0]
        rig.done()
    assert sorted(seen) == list(range(1, slots + 1))


def test_3_5_the_batches_are_the_dynamic_batchers() -> None:
    given = {
        "max_candidate_sequences": 8,
        "preferred_batch_size": [3],
        "max_queue_delay_microseconds": 1000,
    }
    rig = SequenceRig("oldest", rows=4, given=given)
    for sequence in (1, 2):
        rig.ask(sequence, START)
    assert rig.batches() == {}
    rig.ask(3, START)
    assert rig.batches() == {0: [1, 2, 3]}
    rig.done()
    rig.ask(1)
    assert rig.batches() == {}
    rig.pass_time(1_000_000)
    assert rig.batches() == {0: [1]}


def test_3_5_at_most_one_request_of_a_sequence_runs() -> None:
    rig = SequenceRig("oldest", rows=4, given={"max_candidate_sequences": 4})
    rig.ask(1, START)
    for _ in range(3):
        rig.ask(1)
    for _ in range(4):
        assert rig.batches() == {0: [1]}
        rig.done()


def test_3_5_no_null_rows_and_the_slot_says_where_the_state_is() -> None:
    rig = SequenceRig("oldest", rows=4, given=CANDIDATES)
    for sequence in (1, 2, 3):
        rig.ask(sequence, START)
        rig.batches()
    rig.done()
    assert [(row.slot, row.correlation_id) for row in rig.rows()] == [(1, 2), (2, 3)]


@pytest.mark.parametrize("rows", [0, 1])
def test_3_5_without_batching(rows: int) -> None:
    rig = SequenceRig("oldest", rows=rows, given=CANDIDATES)
    rig.submit(flags=START, correlation_id=1, batch_size=rows)
    rig.submit(flags=START, correlation_id=2, batch_size=rows)
    assert rig.batches() == {0: [1]}
    rig.done()
    assert rig.batches() == {0: [2]}
