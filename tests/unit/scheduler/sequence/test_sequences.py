"""Rules for both sequence strategies: ids, slots, backlog, idle sequences."""

from typing import Any

import pytest

from shmserve.ipc.messages import inference as m
from shmserve.ipc.messages.publications import ProcessExited
from shmserve.ipc.messages.supervision import (
    Drain,
    Drained,
    InstanceGone,
    InstanceRetired,
    RetireInstance,
)
from tests.rigs.scheduler_rig import MS, Rig, schema_of
from tests.rigs.sequence_rig import END, START, SequenceRig
from tests.support.texts import EXPIRED_TEXT, Beginning

US = 1_000
STRATEGIES = ["direct", "oldest"]


@pytest.fixture(params=STRATEGIES)
def rig(request: pytest.FixtureRequest) -> SequenceRig:
    return SequenceRig(request.param)


def only_error(rig: Rig) -> str:
    (answer,) = rig.answers()
    assert isinstance(answer, m.Failed) and answer.code == "INVALID_ARG"
    return answer.message


# --- 3.3: rejected requests -----------------------------------------------------------------------


@pytest.mark.parametrize("sequence", [0, ""])
def test_a_sequence_id_is_required(rig: SequenceRig, sequence: int | str) -> None:
    rig.request(sequence, START)
    assert only_error(rig) == (
        "inference request to model 'm' must specify a non-zero or non-empty correlation ID"
    )


@pytest.mark.parametrize(("sequence", "rows"), [(1, 0), (1, 2), (0, 2)])
def test_the_batch_size_of_a_sequence_request_must_be_one(
    rig: SequenceRig, sequence: int, rows: int
) -> None:
    rig.request(sequence, START, batch_size=rows)
    assert only_error(rig) == (
        "inference request to model 'm' must specify batch-size 1 due to requirements of sequence "
        "batcher"
    )


def test_the_first_request_needs_the_start_flag(rig: SequenceRig) -> None:
    text = (
        "inference request for sequence {} to model 'm' must specify the START flag on the first "
        "request of the sequence"
    )
    for sequence in (7, "seven"):
        rig.request(sequence)
        assert only_error(rig) == text.format(sequence)
    rig.request(7, START | END)
    rig.answers()
    rig.request(7)
    assert only_error(rig) == text.format(7)


def test_the_type_of_an_id_must_be_that_of_the_control() -> None:
    texts: dict[str, tuple[int | str, str, str]] = {
        "TYPE_UINT64": ("x", "BYTES", "UINT64"),
        "TYPE_STRING": (5, "UINT64", "BYTES"),
    }
    for data_type, (sequence, sent_value, expected) in texts.items():
        control = {"kind": "CONTROL_SEQUENCE_CORRID", "data_type": data_type}
        rig = SequenceRig(control_input=[{"name": "C", "control": [control]}])
        rig.request(sequence, START)
        assert only_error(rig) == (
            f"[request id: <id_unknown>] sequence batching control 'C' data-type is '{sent_value}',"
            f" but model 'm' expects '{expected}'"
        )


def test_a_number_and_a_string_are_different_ids(rig: SequenceRig) -> None:
    rig.request(1, START)
    rig.request("1", START)
    rig.finish_batch()
    assert rig.batches() or rig.is_running()
    rig.request(1, END)
    rig.answers()
    rig.request("1")
    assert rig.answers() == []


def test_rejected_sequence_requests_are_not_counted_as_failures(rig: SequenceRig) -> None:
    rig.request(7)
    assert rig.report()["inference_stats"]["fail"]["count"] == 0


# --- 3.3: slots and the backlog -------------------------------------------------------------------


def test_the_lowest_free_slot_of_all_instances_is_used() -> None:
    rig = SequenceRig(rows=2, instances=3)
    for sequence in range(1, 7):
        rig.request(sequence, START)
    assert rig.batches() == {0: [1], 1: [2], 2: [3]}
    for index in range(3):
        rig.finish_batch(index)
    assert rig.batches() == {0: [None, 4], 1: [None, 5], 2: [None, 6]}


def test_the_backlog_is_first_in_first_out(rig: SequenceRig) -> None:
    for sequence in (1, 2, 3, 4):
        rig.request(sequence, START)
    rig.request(3)
    rig.finish_batch()
    rig.request(1, END)
    answer_count = 0
    while rig.is_running():
        rig.finish_batch()
        answer_count += 1
    outcomes = rig.outcomes()
    assert len(outcomes) == 5  # requests of 1, 2 and 3 and the end of 1; sequence 4 still waits
    rig.request(2, END)
    while rig.is_running():
        rig.finish_batch()
    assert len(rig.outcomes()) == 2


def test_an_ended_sequence_in_the_backlog_may_be_restarted(rig: SequenceRig) -> None:
    for sequence in (1, 2):
        rig.request(sequence, START)
    first_requests = [rig.request(3, START), rig.request(3, END)]
    restarted = rig.request(3, START)
    rig.request(1, END)
    rig.request(2, END)
    order = []
    while rig.is_running():
        rig.finish_batch()
        order += list(rig.outcomes())
    assert order.index(first_requests[0]) < order.index(first_requests[1]) and restarted in order


def test_a_start_on_an_open_sequence_restarts_it_in_its_slot(rig: SequenceRig) -> None:
    rig.request(1, START)
    rig.request(2, START)
    rig.finish_batch()
    rig.finish_batch()
    rig.batches()
    rig.request(1, START)
    (row,) = rig.rows()
    assert (row.slot, row.flags, row.correlation_id) == (0, START, 1)


def test_an_id_may_start_again_while_its_end_runs() -> None:
    rig = SequenceRig(rows=2)
    rig.request(1, START)
    rig.finish_batch()
    rig.request(1, END)
    rig.request(1, START)
    rig.finish_batch()
    assert [(row.slot, row.flags) for row in rig.rows()] == [(0, START)]


# --- 3.3: idle sequences --------------------------------------------------------------------------


def test_an_idle_sequence_is_evicted_without_a_call_of_the_model() -> None:
    rig = SequenceRig(rows=1, max_sequence_idle_microseconds=5000)
    rig.request(1, START)
    rig.request(2, START)
    rig.finish_batch()
    assert rig.wake_ns == rig.now + 5000 * US
    rig.batches()
    rig.pass_time(5000 * US - 1)
    assert rig.batches() == {}
    rig.pass_time(1)
    assert rig.batches() == {0: [2]}
    rig.answers()
    rig.request(1)
    assert "must specify the START flag" in only_error(rig)


def test_running_and_waiting_sequences_are_not_idle() -> None:
    """The idle time begins with the last response: a model may compute for any time."""
    rig = SequenceRig(rows=1, max_sequence_idle_microseconds=5000)
    rig.request(1, START)
    rig.pass_time(50_000 * US)
    rig.finish_batch()
    rig.request(1)
    assert rig.is_running()
    rig.finish_batch()
    rig.pass_time(4999 * US)
    rig.request(1)
    assert rig.is_running()


def test_the_default_idle_time_is_a_second_and_the_backlog_waits() -> None:
    rig = SequenceRig(rows=1)
    rig.request(1, START)
    backlogged_start = rig.request(2, START)
    rig.pass_time(60_000 * MS)
    rig.finish_batch()
    rig.outcomes()
    rig.pass_time(1000 * MS)
    rig.finish_batch()
    assert rig.outcomes() == {backlogged_start: None}


# --- 3.3: time and cancellation -------------------------------------------------------------------


def test_a_timeout_in_the_backlog_rejects_the_whole_sequence() -> None:
    rig = SequenceRig(rows=1)
    rig.request(1, START)
    numbers = [rig.request(2, START), rig.request(2, timeout_ns=5 * MS), rig.request(2)]
    rig.pass_time(6 * MS)
    text = "timeout of the corresponding sequence has been expired"
    details = " (5000 microseconds, from the caller)"
    assert rig.outcomes() == dict(zip(numbers, (text, text + details, text), strict=True))
    rig.request(2)
    assert "must specify the START flag" in only_error(rig)
    assert rig.report()["inference_stats"]["fail"]["count"] == 3


def test_the_parameter_timeout_applies_in_the_backlog_only() -> None:
    rig = SequenceRig(rows=1)
    running_requests = [rig.request(1, START), rig.request(1, timeout_us=5000)]
    numbers = [rig.request(2, START), rig.request(2, timeout_us=5000)]
    rig.pass_time(6 * MS)
    text = "timeout of the corresponding sequence has been expired"
    assert rig.outcomes() == dict.fromkeys(numbers, text)
    rig.finish_batch()
    rig.finish_batch()
    assert rig.outcomes() == dict.fromkeys(running_requests)


def test_the_timeout_also_rejects_restarted_sequences() -> None:
    rig = SequenceRig(rows=1)
    rig.request(1, START)
    ids = [
        rig.request(2, START),
        rig.request(2),
        rig.request(2, START),
        rig.request(2, timeout_ns=5 * MS),
    ]
    rig.pass_time(6 * MS)
    text = Beginning("timeout of the corresponding sequence has been expired")
    assert rig.outcomes() == dict.fromkeys(ids, text)
    rig.request(1, END)
    rig.finish_batch()
    rig.finish_batch()
    assert not rig.is_running() and rig.core.live_count == 0


def test_a_timeout_in_a_slot_fails_later_requests_of_the_sequence(rig: SequenceRig) -> None:
    rig.request(1, START)
    expired_request = rig.request(1, timeout_ns=5 * MS)
    later_request = rig.request(1)
    rig.pass_time(6 * MS)
    outcomes = rig.outcomes()
    assert outcomes[expired_request] == EXPIRED_TEXT
    assert "an earlier request of the sequence" in outcomes[later_request]
    rig.finish_batch()
    assert not rig.is_running()
    rig.answers()
    rig.request(1)
    assert "must specify the START flag" in only_error(rig)


@pytest.mark.parametrize("slots", [0, 1])
def test_cancelling_a_request_cancels_later_requests_of_its_sequence(slots: int) -> None:
    """Holds in the backlog and in a slot. Earlier requests of the sequence still run."""
    rig = SequenceRig(rows=1)
    if not slots:
        rig.request(9, START)
    first_request = rig.request(1, START)
    second_request, third_request = rig.request(1), rig.request(1)
    rig.client(m.Cancel(second_request))
    assert set(rig.outcomes()) == {second_request, third_request}
    if not slots:
        rig.request(9, END)
        rig.finish_batch()
        rig.finish_batch()
    rig.finish_batch()
    assert first_request in rig.outcomes()
    # The slot is free again.
    rig.request(5, START)
    assert rig.batches()[0] == [5]


def test_after_a_cancellation_the_next_start_is_a_new_sequence(rig: SequenceRig) -> None:
    rig.request(1, START)
    second_request = rig.request(1)
    restarted = rig.request(1, START)
    rig.client(m.Cancel(second_request))
    assert set(rig.outcomes()) == {second_request}
    rig.finish_batch()
    assert [row.flags for row in rig.rows()] == [START]
    rig.finish_batch()
    assert restarted in rig.outcomes()


def test_a_disconnecting_client_cancels_its_waiting_requests(rig: SequenceRig) -> None:
    other_client = b"7001.ab"
    rig.request(1, START)
    rig.request(2, START, peer=other_client)
    rig.request(3, START, peer=other_client)
    rig.request(3, peer=other_client)
    rig.supervisor(ProcessExited(7001, ""))
    while rig.is_running():
        rig.finish_batch()
    assert rig.core.live_count == 0


# --- 3.3: the end of a model ----------------------------------------------------------------------


def test_a_drain_rejects_only_new_sequences(rig: SequenceRig) -> None:
    rig.request(1, START)
    rig.finish_batch()
    rig.supervisor(Drain())
    rig.outcomes()
    refused_starts = [rig.request(1, START), rig.request(2, START)]
    assert all("stopped accepting" in text for text in rig.outcomes().values())
    assert len(refused_starts) == 2
    continuing = rig.request(1)
    rig.finish_batch()
    assert rig.outcomes() == {continuing: None}


def test_a_drain_may_wait_for_open_sequences(rig: SequenceRig) -> None:
    """A drained model waits until its last sequence has ended; an unloaded model does not."""
    rig.request(1, START)
    rig.finish_batch()
    rig.supervisor(Drain(awaits_sequences=True))
    assert Drained() not in rig.take_supervisor_messages()
    rig.request(1, END)
    assert Drained() not in rig.take_supervisor_messages()
    rig.finish_batch()
    assert Drained() in rig.take_supervisor_messages()


def test_an_idle_sequence_ends_the_drain(rig: SequenceRig) -> None:
    rig.request(1, START)
    rig.finish_batch()
    rig.supervisor(Drain(awaits_sequences=True))
    rig.pass_time(1001 * MS)
    assert Drained() in rig.take_supervisor_messages()
    rig.supervisor(Drain())
    assert Drained() in rig.take_supervisor_messages()


# --- workers --------------------------------------------------------------------------------------


def test_a_worker_that_dies_loses_the_state_of_its_sequences() -> None:
    """Begun sequences fail with this reason. Others wait for another slot, and new ones start."""
    rig = SequenceRig(rows=2, instances=2)
    running = rig.request(1, START)
    rig.request(2, START)
    rig.finish_batch(1)
    waiting = rig.request(1)
    unstarted_request = rig.request(3, START)  # not begun; assigned to slot 1 of the first instance
    rig.outcomes()
    rig.end_process(0)
    outcomes = rig.outcomes()
    text = "the state of sequence 1 is lost with it: begin the sequence again, with the START flag"
    assert text in outcomes.pop(running) and text in outcomes.pop(waiting) and not outcomes
    rig.request(1)
    assert "the state of this sequence was lost when the model's worker died" in only_error(rig)
    # The other instance runs it at once.
    assert rig.batches()[1] == [None, 3]
    rig.finish_batch(1)
    assert rig.outcomes() == {unstarted_request: None}
    rig.peers[0] = rig.start(0, 200)
    rig.request(1, START)
    assert rig.batches() == {0: [1]}


def test_without_any_instance_sequences_wait_and_fail_with_it() -> None:
    rig = SequenceRig(rows=1)
    rig.end_process()
    numbers = [rig.request(1, START), rig.request(1), rig.request(2, START)]
    rig.supervisor(InstanceGone(0, "it cannot load"))
    assert rig.outcomes() == dict.fromkeys(numbers, "it cannot load")
    rig.peers = [rig.start(0, 300)]
    rig.request(1, START)
    assert rig.batches() == {0: [1]}


def test_many_sequences_that_never_end_are_bounded(rig: SequenceRig) -> None:
    """A limited number waits for a slot, more are rejected, and those in slots continue."""
    rig.request(1, START)
    rig.finish_batch()
    for sequence in range(2, 16_384 + 4):
        rig.scheduler.handle_client_message(b"7009.ab", submit_message(sequence), rig.now)
    refusals = [answer for answer in rig.answers() if isinstance(answer, m.Failed)]
    assert len(refusals) == 1 and refusals[0].retry_after_s
    assert refusals[0].message == (
        "at most 16384 sequences of a client may wait for a slot of model 'm'"
    )
    open_request, new_start = rig.request(1), rig.request(1_000_000, START)
    outcomes = rig.outcomes()
    while new_start not in outcomes:
        # Slots become free when idle sequences lose them. The clients take turns.
        while rig.is_running():
            rig.finish_batch()
        rig.pass_time(1000 * MS)
        outcomes |= rig.outcomes()
    assert outcomes[open_request] is None and outcomes[new_start] is None
    assert len(outcomes) < 10


def test_connections_of_a_gateway_take_turns() -> None:
    """Sequences of other connections run between those of a connection that opens many."""
    rig = SequenceRig(rows=1)
    greedy_requests = [rig.request(number, START | END, source=7) for number in range(1, 7)]
    other_requests = [rig.request(number, START | END, source=8) for number in (11, 12)]
    executed_requests: list[Any] = []
    while rig.is_running():
        executed_requests += rig.batches()[0]
        rig.finish_batch()
    # Sequence 2 had the slot, and 3 was next before 11 arrived.
    assert executed_requests == [1, 2, 3, 11, 4, 12, 5, 6]
    assert rig.outcomes() == dict.fromkeys([*greedy_requests, *other_requests])


def submit_message(sequence: int) -> m.Submit:
    return m.Submit(sequence, schema_of(), [b"w"], 0, 0, 0, 0, "", START, sequence, "")


# --- 3.5: iterative sequences ---------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_iterative_requests_have_an_id_and_are_rescheduled(strategy: str) -> None:
    rig = SequenceRig(strategy, rows=2, iterative_sequence=True)
    number = rig.request(0)
    (row,) = rig.rows()
    assert (row.correlation_id, row.flags) == (1, START)
    for _ in range(3):
        rig.finish_batch(0, m.Reply(row.key, m.RESCHEDULED, ""))
        (row,) = rig.rows()
        assert (row.correlation_id, row.flags) == (1, 0)
    rig.finish_batch()
    assert rig.outcomes() == {number: None}
    # The sequence has ended, so its slot is free at once.
    cancelled_request = rig.request(0)
    (row,) = rig.rows()
    assert (row.correlation_id, row.flags, row.slot) == (2, START, 0)
    rig.client(m.Cancel(cancelled_request))
    rig.finish_batch(0, m.Reply(row.key, m.RESCHEDULED, ""))
    assert rig.outcomes() == {cancelled_request: "request cancelled"}
    assert not rig.is_running()


def test_an_iterative_model_may_be_decoupled() -> None:
    rig = SequenceRig(rows=1, iterative_sequence=True, decoupled=True)
    number = rig.request(0)
    key = rig.rows()[0].key
    peer = rig.peers[0]
    rig.respond(peer, key)
    rig.report_returned(peer, rig._running.pop(peer), m.Reply(key, m.RESCHEDULED, ""))
    assert rig.rows()[0].flags == 0
    rig.respond(peer, key, final=True)
    rig.report_returned(peer, rig._running.pop(peer))
    kinds = [(type(answer).__name__, answer.final) for answer in rig.answers()]
    assert kinds == [("Responded", False), ("Responded", True)]
    assert number and rig.core.live_count == 0
    rig.request(0)
    assert rig.is_running()


# --- retiring instances ---------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_retiring_instance_keeps_its_open_sequences(strategy: str) -> None:
    """New sequences wait for another; the instance retires after its last sequence."""
    fields = {"max_candidate_sequences": 1} if strategy == "oldest" else {}
    rig = SequenceRig(strategy, rows=1, instances=2, strategy_fields=fields)
    rig.request(1, START)
    rig.request(2, START)
    rig.finish_batch(0)
    rig.finish_batch(1)
    rig.batches()
    rig.supervisor(RetireInstance(0))
    rig.request(1)
    rig.request(3, START)
    assert rig.batches() == {0: [1]}
    rig.finish_batch(0)
    rig.request(1, END)
    assert rig.batches() == {0: [1]}
    assert rig.take_supervisor_messages(InstanceRetired) == []
    rig.finish_batch(0)
    assert rig.take_supervisor_messages(InstanceRetired) == [InstanceRetired(100)]
    rig.request(2, END)
    rig.finish_batch(1)
    assert rig.batches() == {1: [3]}


# --- 3.5: states of ended sequences --------------------------------------------------------------


def ended_slots(rig: SequenceRig) -> list[list[int]]:
    all_sent = rig.workers.take()
    rig.workers.posted_messages[:0] = [
        entry for entry in all_sent if not isinstance(entry[1], m.EndSequences)
    ]
    return [message.slots for _, message in all_sent if isinstance(message, m.EndSequences)]


def begin_sequence(rig: SequenceRig, flags: int = START) -> None:
    rig.request(1, flags)
    rig.finish_batch()
    rig.outcomes()


def test_an_executed_end_needs_no_message(rig: SequenceRig) -> None:
    begin_sequence(rig, START | END)
    assert ended_slots(rig) == []


def test_the_worker_is_notified_of_an_end_that_is_not_executed(rig: SequenceRig) -> None:
    begin_sequence(rig)
    rig.request(1)
    rig.client(m.Cancel(rig.request(1, END)))
    assert ended_slots(rig) == []  # the last request of the sequence still runs
    rig.finish_batch()
    assert ended_slots(rig) == [[0]]
    rig.request(2, START)
    assert ended_slots(rig) == [] and rig.batches() == {0: [2]}


def test_the_worker_is_notified_if_the_last_request_was_not_the_end(rig: SequenceRig) -> None:
    begin_sequence(rig)
    rig.request(2, START)  # keeps the instance busy
    rig.request(1)
    rig.client(m.Cancel(rig.request(1)))
    rig.finish_batch()
    assert ended_slots(rig) == []
    rig.finish_batch()
    assert ended_slots(rig) == [[0]]


def test_the_worker_is_notified_of_idle_sequences_before_the_next_begins() -> None:
    rig = SequenceRig(rows=1, max_sequence_idle_microseconds=5000)
    begin_sequence(rig)
    rig.request(2, START)
    rig.pass_time(5000 * US)
    sent_types = [type(message) for _, message in rig.workers.take()]
    assert sent_types == [m.EndSequences, m.Execute]


def test_the_worker_is_notified_of_the_end_of_an_iterative_sequence() -> None:
    rig = SequenceRig(rows=1, iterative_sequence=True)
    rig.request(0)
    rig.finish_batch(0, m.Reply(rig.rows()[0].key, m.RESCHEDULED, ""))
    assert ended_slots(rig) == []
    rig.finish_batch()
    assert ended_slots(rig) == [[0]]


def test_the_worker_is_not_notified_of_a_sequence_that_has_not_begun(rig: SequenceRig) -> None:
    rig.request(1, START)
    rig.request(2, START)
    waiting_request = rig.request(
        3, START
    )  # waits in the backlog or in a slot, depending on the strategy
    rig.client(m.Cancel(waiting_request))
    assert ended_slots(rig) == []
