"""A request in the scheduler, from submission to its end, and every cause of an early end."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.errors import Internal
from shmserve.ipc.messages import inference as m
from shmserve.ipc.messages.publications import ProcessExited
from shmserve.ipc.messages.supervision import (
    Drain,
    Drained,
    InstanceExpected,
    InstanceGone,
    InstanceRetired,
    InstanceServed,
    KillInstance,
    RetireInstance,
    StatisticsSnapshot,
    Stop,
)
from shmserve.ipc.processes import REMEMBERED_EXITS
from shmserve.ipc.trace import TraceContext, unpack_spans
from shmserve.scheduler.requests.scheduled import NEVER
from tests.rigs.scheduler_rig import (
    GATEWAY,
    MS,
    Rig,
    in_place_work,
    ok_reply,
    ready_rig,
    response_in_arena,
    schema_of,
)
from tests.support.texts import EXPIRED_TEXT

OTHER_PEER = b"7001.cd"


def failure(number: int, code: str, message: str, is_early: bool = False) -> m.Failed:
    """Return an error without a retry hint."""
    return m.Failed(number, code, message, 0, is_early)


def done(number: int) -> m.Finished:
    """Return the answer to a request that `Rig.finish` has completed."""
    return m.Finished(number, b"done", [b"done"])


# --- default scheduling ---------------------------------------------------------------------------


def test_the_default_scheduler_runs_one_request_an_execution_in_order() -> None:
    rig, peer = ready_rig()
    (first_id, second_id), batch = rig.submit_batch(2)
    assert [request.data[0] for request in batch.requests] == [b"w1"]
    assert (batch.requests[0].client_pid, batch.in_flight) == (7000, 2)
    rig.finish(peer, batch)
    assert rig.answers() == [done(first_id)]
    _, batch = rig.execute()
    assert batch.in_flight == 1
    rig.finish(peer, batch)
    assert rig.answers() == [done(second_id)]
    assert rig.wake_ns == NEVER


def test_each_instance_gets_a_batch() -> None:
    rig = Rig({})
    peers = rig.start_two()
    rig.submit(9)
    assert [(p, len(b.requests)) for p, b in rig.take_batches()] == [(peers[0], 8), (peers[1], 1)]


def test_the_delay_is_waited_out_once_an_instance_is_free() -> None:
    rig = Rig({"max_queue_delay_microseconds": 100})
    rig.submit()
    assert rig.wake_ns == NEVER
    rig.start()
    assert rig.wake_ns == rig.now + 100_000
    rig.pass_time(99_999)
    assert rig.take_batches() == []
    rig.pass_time(1)
    assert len(rig.execute()[1].requests) == 1


def test_replies_may_arrive_in_any_order_and_fail_individually() -> None:
    rig, peer = ready_rig({})
    (a, b), batch = rig.submit_batch(2)
    keys = [request.key for request in batch.requests]
    rig.finish(peer, batch, m.Reply(keys[1], "INVALID_ARG", "bad row"), ok_reply(keys[0]))
    assert rig.answers() == [done(a), failure(b, "INVALID_ARG", "bad row")]


def test_the_delay_hook_holds_batches_until_enough_requests_arrived() -> None:
    rig, peer = ready_rig({}, delay_scheduler=3)
    rig.submit(2)
    assert rig.take_batches() == []
    _, batch = rig.submit_batch(1)
    assert len(batch.requests) == 3
    rig.finish(peer, batch)
    rig.submit(1)
    assert len(rig.execute()[1].requests) == 1


def test_an_ordered_response_does_not_wait_for_a_cancelled_request() -> None:
    rig = Rig({"preserve_ordering": True, "preferred_batch_size": [1]})
    rig.start_two()
    (first_id,) = rig.submit(timeout_ns=5 * MS)
    (second_id,) = rig.submit()
    _, (peer2, batch2) = rig.take_batches()
    rig.finish(peer2, batch2)
    assert rig.answers() == []
    rig.pass_time(6 * MS)
    assert rig.answers() == [
        failure(first_id, "UNAVAILABLE", EXPIRED_TEXT, is_early=True),
        done(second_id),
    ]


def test_ordered_responses_have_different_times_in_traces() -> None:
    """A response that was held until another is sent is later than this one, as in Triton."""
    rig = Rig({"preserve_ordering": True, "preferred_batch_size": [1]})
    rig.start_two()
    rig.submit(2, trace=TraceContext.new().encoded)
    for peer, batch in reversed(rig.take_batches()):
        rig.finish(peer, batch)
    first, second = (unpack_spans(finished.spans)[0] for finished in rig.answers())
    assert first.responded_ns < second.responded_ns


def test_a_held_response_that_is_discarded_releases_its_outputs() -> None:
    rig = Rig({"preserve_ordering": True, "preferred_batch_size": [1]})
    rig.start_two()
    rig.submit()
    (second_id,) = rig.submit(timeout_ns=5 * MS)
    (third_id,) = rig.submit()
    _, (peer2, batch2) = rig.take_batches()
    rig.finish(peer2, batch2, ok_reply(batch2.requests[0].key, response_in_arena(101, 64, 192)))
    ((peer2, batch3),) = rig.take_batches()
    rig.finish(peer2, batch3, ok_reply(batch3.requests[0].key, response_in_arena(101, 256)))
    rig.pass_time(6 * MS)
    assert rig.answers() == [failure(second_id, "UNAVAILABLE", EXPIRED_TEXT)]
    rig.client(m.Cancel(third_id))
    assert rig.answers() == [failure(third_id, "CANCELLED", "request cancelled")]
    assert rig.workers.take() == [(peer2, m.ReleaseOutputs(7000, at)) for at in ([64, 192], [256])]


def test_read_outputs_are_released_to_the_worker_that_made_them() -> None:
    rig = Rig()
    rig.start(0, 100)
    peer = rig.start(1, 101)
    rig.client(m.Release(101, [0, 64]))
    rig.client(m.Release(999, [0]))
    assert rig.workers.take() == [(peer, m.ReleaseOutputs(7000, [0, 64]))]


def test_cancelled_requests_behind_a_long_one_are_removed() -> None:
    rig, peer = ready_rig({"preserve_ordering": True, "preferred_batch_size": [1]})
    first, batch = rig.submit_and_take_batch()
    for _ in range(3000):
        (cancelled_id,) = rig.submit()
        rig.client(m.Cancel(cancelled_id))
    (last,) = rig.submit()
    assert len(rig.core._responses._ordered_requests) < 2000
    rig.answers()
    rig.finish(peer, batch)
    rig.finish(*rig.execute())
    assert rig.answers() == [done(number) for number in (first, last)]


def test_outputs_read_before_their_worker_reconnects_are_released() -> None:
    """The worker of a predecessor scheduler connects later."""
    rig = Rig()
    rig.supervisor(InstanceExpected(0, 100), InstanceExpected(1, 101))
    rig.client(m.Release(100, [64, 0]))
    rig.client(m.Release(101, [128]))
    rig.client(m.Release(102, [0]))
    rig.client(m.Release(100, list(range(9000))), OTHER_PEER)
    assert rig.workers.take() == []
    peer = rig.start(0, 100)
    worker_messages = rig.workers.take()
    assert worker_messages[:2] == [(peer, m.ReleaseOutputs(7000, [offset])) for offset in (64, 0)]
    assert len(worker_messages) == 4096
    rig.supervisor(ProcessExited(101, ""))
    assert rig.workers.take() == [(peer, m.ReaderExited(101))]
    rig.start(1, 101)
    assert rig.workers.take() == [] and rig.core.executions._early_releases == {}


def test_outputs_read_before_a_successor_has_instances_are_released() -> None:
    """Releases for unknown pids are bounded, and displace none of announced instances."""
    rig = Rig()
    rig.client(m.Release(100, [64]))
    rig.supervisor(InstanceExpected(0, 100), InstanceExpected(1, 101))
    rig.client(m.Release(101, [128]))
    rig.client(m.Release(102, [192, 256]))
    for pid in range(1000, 6000):
        rig.client(m.Release(pid, [0]))
    rig.client(m.Release(103, list(range(9000))))
    assert len(rig.core.executions._unknown_releases) == 4096
    rig.client(m.Release(102, [320, 384]))
    rig.supervisor(InstanceExpected(2, 102))
    for index, pid, offsets in ((0, 100, [64]), (1, 101, [128]), (2, 102, [320, 384])):
        peer = rig.start(index, pid)
        assert rig.workers.take() == [(peer, m.ReleaseOutputs(7000, [at])) for at in offsets]
    rig.supervisor(ProcessExited(103, ""))
    assert not rig.core.executions._early_releases and not rig.core.executions._unknown_releases


def test_a_ready_worker_receives_the_messages_from_before_its_announcement() -> None:
    rig = Rig()
    rig.client(m.Release(100, [64]))
    rig.worker(b"0.100", m.InstanceReady(0, 100))
    assert rig.workers.take() == []
    rig.supervisor(InstanceExpected(0, 100))
    assert rig.workers.take() == [(b"0.100", m.ReleaseOutputs(7000, [64]))]
    assert rig.core.executions._early_releases == {}


def test_an_unregistered_worker_is_notified_of_a_readers_exit() -> None:
    """The worker still executes requests of a predecessor for the exited client."""
    rig = Rig()
    first_worker = rig.start(0, 100)
    rig.supervisor(InstanceExpected(1, 101), ProcessExited(7000, ""))
    assert rig.workers.take() == [(first_worker, m.ReaderExited(7000))]
    second_worker = rig.start(1, 101)
    assert rig.workers.take() == [(second_worker, m.ReaderExited(7000))]
    assert rig.core.executions._early_releases == {}


def test_an_instance_announced_during_a_retirement_is_new() -> None:
    """The retiring instance's worker had died, so its index is free."""
    rig = Rig()
    rig.start_two()
    rig.supervisor(ProcessExited(101, "killed"))
    rig.supervisor(RetireInstance(1), InstanceExpected(1, 102))
    assert rig.control.take() == [(b"", InstanceRetired(0))]
    rig.worker(b"1.102", m.InstanceReady(1, 102))
    assert rig.core.gauges()["instances"]["idle"] == 2


# --- admission ------------------------------------------------------------------------------------


def test_a_full_queue_reports_when_to_retry() -> None:
    rig, peer = ready_rig(max_queue_size=4)
    _, batch = rig.submit_batch()
    rig.pass_time(2_000 * MS)
    rig.finish(peer, batch)
    # All requests of one turn: requests that an idle instance can take at once do not count as
    # queued.
    *_, number = rig.submit(6, request_id="mine")
    assert len(rig.take_batches()) == 1
    (answer,) = rig.answers()[1:]
    text = "[request id: mine] Exceeds maximum queue size"
    assert isinstance(answer, m.Failed) and answer.is_refused
    assert answer == m.Failed(number, "UNAVAILABLE", text, 8, False)


def test_expired_requests_are_removed_from_a_full_queue() -> None:
    """Holds also within a turn, when an instance has just become free."""
    rig = Rig(max_queue_size=1)
    (expiring_id,) = rig.submit(timeout_ns=5 * MS)
    rig.now += 6 * MS
    rig.core.handle_control_message(InstanceExpected(0, 100), rig.now)
    rig.core.results.handle(b"0.100", m.InstanceReady(0, 100), rig.now)
    (number,) = rig.submit()
    assert rig.answers() == [failure(expiring_id, "UNAVAILABLE", EXPIRED_TEXT)]
    rig.finish(*rig.execute())
    assert rig.answers() == [done(number)]


def test_overload_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(max_queue_size=4)
    for wait_s, refusal_count in ((0, 2), (1, 3), (58, 0), (1, 0), (59, 1), (1, 0)):
        rig.pass_time(wait_s * 1_000 * MS)
        rig.submit((0 if caplog.messages else 4) + refusal_count)
    rig.submit(1)
    rig.supervisor(Stop())
    assert caplog.messages == [
        f"model 'm' is overloaded: its queue is full, and {count} more requests were rejected"
        for count in (2, 3, 1, 1)
    ]


def test_a_duplicate_id_is_dropped_but_other_clients_may_use_it() -> None:
    rig = Rig()
    (number,) = rig.submit()
    rig.submit(id=number)
    rig.submit(id=number, peer=OTHER_PEER)
    peer = rig.start()
    for _ in range(2):
        rig.finish(peer, rig.execute()[1])
    assert rig.clients.take() == [(GATEWAY, done(number)), (OTHER_PEER, done(number))]
    assert rig.report()["shmserve"]["malformed"] == 1


def test_a_failed_pool_rejects_queued_and_new_requests() -> None:
    rig = Rig()
    rig.supervisor(InstanceExpected(0, 100))
    (waiting_id,) = rig.submit()
    rig.supervisor(InstanceGone(0, "model 'm' failed"))
    assert rig.answers() == [failure(waiting_id, "UNAVAILABLE", "model 'm' failed")]
    (new_id,) = rig.submit()
    assert rig.answers() == [failure(new_id, "UNAVAILABLE", "model 'm' failed")]
    rig.start()
    rig.submit()
    assert rig.execute()


def test_the_supervisor_is_notified_of_the_first_execution_of_each_process() -> None:
    rig = Rig()
    for pid in (100, 101):
        peer = rig.start(0, pid)
        rig.submit(2)
        for _ in range(2):
            rig.finish(peer, rig.execute()[1])
        assert rig.take_supervisor_messages(InstanceServed) == [InstanceServed(pid)]
        rig.supervisor(ProcessExited(pid, "signal 11"))


def test_an_instance_that_dies_during_its_first_stream_has_served_nothing() -> None:
    rig, peer = ready_rig(decoupled=True)
    _, batch = rig.submit_batch()
    rig.report_returned(peer, batch)
    rig.respond(peer, batch.requests[0].key)
    assert rig.take_supervisor_messages(InstanceServed) == []
    rig.supervisor(ProcessExited(100, "signal 11"))
    assert rig.take_supervisor_messages(InstanceServed) == []


def test_many_idle_clients_are_forgotten() -> None:
    rig = Rig()
    (number,) = rig.submit()
    for index in range(3000):
        rig.client(m.Cancel(1), peer=b"%d.x" % index)
    assert len(rig.scheduler._clients) <= 1025
    rig.client(m.Cancel(number))
    assert rig.answers() == [failure(number, "CANCELLED", "request cancelled")]


# --- time -----------------------------------------------------------------------------------------


def test_a_deadline_passes_in_the_queue() -> None:
    rig = Rig()
    (number,) = rig.submit(timeout_ns=5 * MS)
    assert rig.wake_ns == rig.now + 5 * MS + 1
    rig.pass_time(5 * MS)
    assert rig.answers() == []
    rig.pass_time(1)
    assert rig.answers() == [failure(number, "UNAVAILABLE", EXPIRED_TEXT)]
    assert rig.wake_ns == NEVER


def test_a_deadline_passes_at_the_worker_and_the_late_result_is_dropped() -> None:
    rig, peer = ready_rig({})
    number, batch = rig.submit_and_take_batch(timeout_ns=5 * MS)
    rig.pass_time(5 * MS + 1)
    assert rig.answers() == [failure(number, "UNAVAILABLE", EXPIRED_TEXT, is_early=True)]
    assert rig.workers.take() == [(peer, m.CancelExecution(batch.requests[0].key))]
    rig.client(m.Cancel(number))
    rig.finish(peer, batch, ok_reply(batch.requests[0].key, response_in_arena(100, 64)))
    assert rig.answers() == [m.Settled(number)]
    assert rig.workers.take() == [(peer, m.ReleaseOutputs(7000, [64]))]


def test_frames_of_a_client_that_exited_are_dropped_after_many_other_exits() -> None:
    """A pid is not reused so soon, so a frame with it is never one of a new process."""
    rig = Rig()
    rig.submit()
    rig.supervisor(ProcessExited(7000, "signal 9"))
    rig.supervisor(*(ProcessExited(20_000 + pid, "") for pid in range(REMEMBERED_EXITS - 1)))
    rig.submit()
    assert rig.core.live_count == 0


def test_a_prefetched_request_that_returns_is_first_in_the_queue() -> None:
    rig, _ = ready_rig({})
    rig.core.executions.service_time.pipeline_depth = 2
    (running_id,) = rig.submit()
    ids, later_ids = rig.submit(8), rig.submit(3)
    _, (_, batch) = rig.take_batches()
    assert [r.data[0] for r in batch.requests] == [b"w%d" % n for n in ids]
    rig.supervisor(ProcessExited(100, "signal 9"))
    peer = rig.start(0, 101)
    executed = []
    while execute_messages := rig.take_batches():
        for _, batch in execute_messages:
            executed.append([r.data[0] for r in batch.requests])
            rig.finish(peer, batch)
    assert executed == [[b"w%d" % n for n in r] for r in ([running_id], ids, later_ids)]


@pytest.mark.parametrize(
    ("busy_ns", "instances", "expected_count"),
    [(MS // 10, 2, 8), (2 * MS, 1, 2), (2 * MS, 2, 2), (50 * MS, 1, 1)],
)
def test_a_single_instance_receives_its_next_batch_while_it_computes(
    busy_ns: int, instances: int, expected_count: int
) -> None:
    """Several instances have one ahead only if messages take as long as executions."""
    rig = Rig({}, max_batch_size=1)
    for index in range(instances):
        rig.start(index, 100 + index)
    for _ in range(20):
        rig.core.executions.service_time.observe(busy_ns, busy_ns, 1)
    rig.submit(12)
    assert len(rig.take_batches()) == expected_count


def test_a_waiting_batch_hurries_for_a_deadline() -> None:
    rig, peer = ready_rig({"max_queue_delay_microseconds": 1_000_000})
    (number,) = rig.submit(timeout_ns=50 * MS)
    assert rig.now < rig.wake_ns < rig.now + 50 * MS
    rig.pass_time(rig.wake_ns - rig.now)
    rig.finish(peer, rig.execute()[1])
    assert rig.answers() == [done(number)]
    assert rig.report()["shmserve"]["batches_closed"]["deadline"] == 1


def test_a_lone_request_over_the_execution_limit_fails_at_once() -> None:
    limit = {"execution_timeout_seconds": "0.5"}
    rig, peer = ready_rig({}, parameters=limit, execution_timeout_s=60)
    number, batch = rig.submit_and_take_batch()
    assert rig.wake_ns == rig.now + 500 * MS
    rig.pass_time(500 * MS)
    text = "execution of the request exceeded the limit of 0.5 seconds"
    assert rig.answers() == [failure(number, "INTERNAL", text, is_early=True)]
    ((_, kill),) = rig.control.take()
    assert isinstance(kill, KillInstance) and kill.process == 100
    (waiting_id,) = rig.submit()
    rig.pass_time(1_000 * MS)
    rig.supervisor(ProcessExited(100, "signal 9"))
    assert rig.answers() == [m.Settled(number)]
    assert rig.control.take() == [] and rig.take_batches() == []
    peer = rig.start(0, 101)
    rig.finish(peer, rig.execute()[1])
    assert rig.answers() == [done(waiting_id)]
    assert batch.batch


def test_members_of_a_batch_over_the_limit_run_again_alone() -> None:
    rig, _ = ready_rig({}, execution_timeout_s=2)
    first_id, second_id = rig.submit(2)
    rig.execute()
    rig.pass_time(2_000 * MS)
    assert rig.answers() == []
    rig.supervisor(ProcessExited(100, "signal 9"))
    rig.finish(rig.start(0, 101), rig.execute()[1])
    assert rig.answers() == [done(first_id)]
    rig.pass_time(2_000 * MS)
    text = "execution of the request exceeded the limit of 2 seconds"
    assert rig.answers() == [failure(second_id, "INTERNAL", text, is_early=True)]
    assert rig.report()["shmserve"]["overruns"] == 2


@pytest.mark.parametrize("batch_size", [9, -1])
def test_a_request_that_does_not_fit_the_model_is_refused(batch_size: int) -> None:
    rig, _ = ready_rig()
    (number,) = rig.submit(batch_size=batch_size, request_id="me")
    text = "[request id: me] inference request batch-size must be <= 8 for 'm'"
    assert rig.answers() == [failure(number, "INVALID_ARG", text)]
    rig.submit(batch_size=0)
    assert rig.take_batches()


def test_a_schema_that_cannot_be_read_is_an_internal_error() -> None:
    rig, _ = ready_rig()
    (number,) = rig.submit(work=(b"\xc1", [b"data"]))
    assert rig.answers() == [failure(number, "INTERNAL", Internal().message)]


# --- endings --------------------------------------------------------------------------------------


def test_a_queued_request_is_cancelled() -> None:
    rig = Rig()
    first_id, second_id = rig.submit(2)
    rig.client(m.Cancel(first_id))
    rig.client(m.Cancel(first_id))
    rig.client(m.Cancel(99))
    assert rig.answers() == [failure(first_id, "CANCELLED", "request cancelled")]
    rig.start()
    assert rig.execute()[1].requests[0].data == [b"w2"]
    assert second_id


def test_cancelling_an_executing_request_does_not_affect_other_requests() -> None:
    rig, peer = ready_rig({})
    (first_id, second_id), batch = rig.submit_batch(2, timeout_ns=50 * MS)
    keys = [request.key for request in batch.requests]
    rig.client(m.Cancel(first_id))
    assert rig.answers() == []
    assert rig.workers.take() == [(peer, m.CancelExecution(keys[0]))]
    rig.finish(peer, batch, ok_reply(keys[0], response_in_arena(100, 0)), ok_reply(keys[1]))
    assert rig.answers() == [failure(first_id, "CANCELLED", "request cancelled"), done(second_id)]
    assert rig.workers.take() == [(peer, m.ReleaseOutputs(7000, [0]))]


def test_an_exited_client_receives_nothing() -> None:
    rig, peer = ready_rig({}, max_batch_size=2)
    rig.submit(1)
    rig.submit(2, peer=OTHER_PEER)
    client_id, batch = rig.submit_and_take_batch()
    rig.supervisor(ProcessExited(7001, ""))
    rig.finish(peer, batch)
    assert [message.id for message in rig.answers()] == [1]
    _, batch = rig.execute()
    assert len(batch.requests) == 1
    rig.finish(peer, batch)
    assert rig.answers() == [done(client_id)]
    rig.submit(1, peer=OTHER_PEER)
    assert rig.take_batches() == [] and rig.answers() == []


def test_a_client_disconnects_while_its_requests_execute() -> None:
    rig, peer = ready_rig({})
    (first_id, second_id), batch = rig.submit_batch(2, timeout_ns=5 * MS)
    keys = [r.key for r in batch.requests]
    rig.client(m.Cancel(first_id))
    rig.supervisor(ProcessExited(7000, ""))
    messages = rig.take_worker_messages()
    assert m.ReaderExited(7000) in messages
    assert {r.key for r in messages if isinstance(r, m.CancelExecution)} == set(keys)
    rig.pass_time(6 * MS)
    rig.finish(peer, batch, ok_reply(keys[0]), ok_reply(keys[1], response_in_arena(100, 64)))
    assert rig.answers() == [] and second_id
    assert rig.workers.take() == [(peer, m.ReleaseOutputs(7000, [64]))]
    assert rig.report()["shmserve"]["failures"]["CANCELED"] == 2


def test_after_a_death_each_member_of_the_batch_runs_again_alone_and_first() -> None:
    rig, _ = ready_rig({})
    numbers = rig.submit(3)
    rig.execute()
    (later_id,) = rig.submit()
    rig.supervisor(ProcessExited(100, "signal 11"))
    peer = rig.start(0, 101)
    for number in [*numbers, later_id]:
        _, batch = rig.execute()
        assert len(batch.requests) == 1
        rig.finish(peer, batch)
        assert rig.answers() == [done(number)]
    counters = rig.report()["shmserve"]
    assert counters["retried"] == 3 and counters["workers_lost"] == 1
    assert counters["batches_closed"]["retry"] == 3


def test_a_request_that_kills_two_workers_fails_and_the_others_do_not() -> None:
    rig = Rig({})
    rig.start(0, 100)
    fatal_id, harmless_id = rig.submit(2)
    rig.execute()
    rig.supervisor(ProcessExited(100, "signal 11"))
    rig.start(0, 101)
    rig.execute()
    rig.supervisor(ProcessExited(101, "signal 11"))
    text = "the model's worker died while running this request (signal 11)"
    assert rig.answers() == [failure(fatal_id, "INTERNAL", text)]
    rig.finish(rig.start(0, 102), rig.execute()[1])
    assert rig.answers() == [done(harmless_id)]


def test_a_request_whose_input_may_be_overwritten_is_not_retried() -> None:
    """A retry could return a different result."""
    rig = Rig({})
    rig.start(0, 100)
    executing_ids = rig.submit(2, work=in_place_work())
    rig.execute()
    (waiting_id,) = rig.submit(work=in_place_work())
    rig.supervisor(ProcessExited(100, "signal 9"))
    text = (
        "the model's worker died while running this request (signal 9); its outputs overlap "
        "its inputs, which may have changed"
    )
    assert rig.answers() == [failure(number, "INTERNAL", text) for number in executing_ids]
    rig.finish(rig.start(0, 101), rig.execute()[1])
    assert rig.answers() == [done(waiting_id)]


def test_a_cancelled_request_is_not_retried() -> None:
    rig = Rig({}, max_batch_size=3)
    for number in range(3):
        rig.submit(timeout_ns=5 * MS if number == 0 else 0)
    rig.start()
    assert len(rig.execute()[1].requests) == 3
    rig.pass_time(6 * MS)
    rig.client(m.Cancel(2))
    rig.answers()
    rig.supervisor(ProcessExited(100, "signal 9"))
    assert rig.answers() == [m.Settled(1), failure(2, "CANCELLED", "request cancelled")]
    rig.start(0, 101)
    assert [request.data[0] for request in rig.execute()[1].requests] == [b"w3"]


# --- garbage --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda replies: [],
        lambda replies: replies[:1],
        lambda replies: [*replies, replies[0]],
        lambda replies: [replies[0], replies[0]],
        lambda replies: [replies[0], m.Reply(999, "", "")],
    ],
)
def test_replies_that_do_not_match_fail_only_their_batch(corrupt) -> None:
    rig, peer = ready_rig({})
    (first_id, second_id), batch = rig.submit_batch(2)
    replies = corrupt([ok_reply(request.key) for request in batch.requests])
    rig.worker(peer, m.BatchFinished(batch.batch, 0, 0, 0, 0, replies))
    text = Internal().message
    assert rig.answers() == [failure(number, "INTERNAL", text) for number in (first_id, second_id)]
    rig.submit()
    rig.finish(peer, rig.execute()[1])
    assert len(rig.answers()) == 1


def test_a_worker_that_returns_an_unknown_batch_is_replaced() -> None:
    rig, peer = ready_rig()
    number, batch = rig.submit_and_take_batch()
    for wrong_value in (batch.batch + 1, -5, 0):
        rig.worker(peer, m.BatchFinished(wrong_value, 0, 0, 0, 0, []))
    assert rig.answers() == [failure(number, "INTERNAL", Internal().message, is_early=True)]
    ((_, kill),) = rig.control.take()
    assert isinstance(kill, KillInstance)
    rig.supervisor(ProcessExited(100, "signal 9"))
    assert rig.answers() == [m.Settled(number)]


def test_unknown_peers_at_the_workers_listener_are_ignored() -> None:
    rig = Rig()
    rig.supervisor(InstanceExpected(0, 100))
    rig.submit()
    rig.worker(b"\x00abcd", m.InstanceReady(0, 100))
    rig.worker(b"0.99", m.InstanceReady(0, 100))
    rig.worker(b"-1.5", m.InstanceReady(-1, 5))
    rig.worker(b"1.100", m.InstanceReady(1, 100))
    rig.worker(b"0.100", m.BatchFinished(1, 0, 0, 0, 0, []))
    assert rig.take_batches() == []
    peer = rig.start()
    rig.worker(b"0.101", m.BatchFinished(1, 0, 0, 0, 0, []))
    rig.finish(peer, rig.execute()[1])
    assert len(rig.answers()) == 1


EXTREME_NUMBERS = st.sampled_from([-(2**63), -1, 0, 1, 2**31, 2**62, 2**63 - 1, 2**64 - 1])


@given(st.lists(EXTREME_NUMBERS, min_size=6, max_size=6), st.sampled_from([None, {}]))
def test_every_request_id_receives_one_answer(
    numbers: list[int], dynamic_batching: dict[str, int] | None
) -> None:
    rig, peer = ready_rig(dynamic_batching, execution_timeout_s=1)
    number, batch_size, arrived, deadline, timeout, priority = numbers
    schema = schema_of(batch_size)
    rig.client(m.Submit(number, schema, [b""], arrived, deadline, timeout, priority))
    rig.client(m.Release(batch_size, numbers))
    for _, message in rig.take_batches():
        start, input_end, output_start, output_end = numbers[:4]
        reply = m.Reply(message.requests[0].key, "", "")
        rig.worker(peer, m.BatchFinished(1, start, input_end, output_start, output_end, [reply]))
    (answer,) = rig.answers()
    assert answer.id == number
    rig.report()


def test_a_client_without_a_pid_in_its_name_is_served() -> None:
    rig, _ = ready_rig()
    for peer in (b"\x00\x01\x02\x03\x04", b"", b".", b"12x.y", b"99999999999999.a"):
        rig.submit(peer=peer)
    assert rig.execute()[1].requests[0].client_pid == 0


# --- shutdown -------------------------------------------------------------------------------------


def test_draining_rejects_new_requests_and_completes_accepted_ones() -> None:
    rig, peer = ready_rig({"max_queue_delay_microseconds": 10_000_000}, delay_scheduler=9)
    (number,) = rig.submit()
    assert rig.take_batches() == []
    rig.supervisor(Drain())
    _, batch = rig.execute()
    (refused_id,) = rig.submit(request_id="late")
    text = (
        "[request id: late] Server is stopping, scheduler for model has stopped accepting new "
        "inference requests"
    )
    assert rig.answers() == [failure(refused_id, "UNAVAILABLE", text)]
    assert not has_drained(rig)
    rig.finish(peer, batch)
    assert rig.answers() == [done(number)]
    assert has_drained(rig)
    rig.supervisor(Drain())
    assert has_drained(rig)


def test_draining_waits_for_requests_that_are_not_settled() -> None:
    rig, peer = ready_rig()
    _, batch = rig.submit_batch(timeout_ns=MS)
    rig.pass_time(2 * MS)
    rig.supervisor(Drain())
    assert not has_drained(rig)
    rig.finish(peer, batch)
    assert has_drained(rig)


def has_drained(rig: Rig) -> bool:
    """Return whether `Drained` was sent since the last call; the counts must precede it."""
    messages = rig.take_supervisor_messages()
    assert {type(message) for message in messages[:-1]} <= {InstanceServed, StatisticsSnapshot}
    return bool(messages) and messages[-1] == Drained()


def test_stopping_responds_to_every_request() -> None:
    rig, _ = ready_rig({}, max_batch_size=2)
    expiring_id, cancelled_id = (rig.submit(timeout_ns=limit)[0] for limit in (MS, 0))
    rig.pass_time(2 * MS)
    (queued_id,) = rig.submit()
    rig.client(m.Cancel(cancelled_id))
    rig.answers()
    rig.supervisor(Stop())
    assert rig.scheduler.has_stopped
    answer_types = {answer.id: type(answer) for answer in rig.answers()}
    assert answer_types[expiring_id] is m.Settled and answer_types[queued_id] is m.Failed
    assert rig.core._responses.live_count == 0


# --- models' own metrics -------------------------------------------------------------------------


def test_metrics_are_an_instances_own_and_stay_counted() -> None:
    rig = Rig()
    peers = rig.start_two()
    for number, peer in enumerate(peers, 1):
        rig.worker(peer, m.MetricsReported([["c", "", "COUNTER", [[[], [number], []]]]]))
    assert reported_families(rig) == [["c", "", "COUNTER", [[[], [3], []]]]]
    rig.supervisor(ProcessExited(100, ""))
    rig.worker(peers[0], m.MetricsReported([["c", "", "COUNTER", [[[], [50], []]]]]))
    assert reported_families(rig) == [["c", "", "COUNTER", [[[], [3], []]]]]


def test_metrics_of_unknown_instances_are_dropped() -> None:
    rig, peer = ready_rig()
    rig.worker(b"x.y", m.MetricsReported([["c", "", "COUNTER", [[[], [1], []]]]]))
    rig.worker(peer, m.MetricsReported([["c", "", "NONSENSE", [[[], [1], []]]]]))
    assert reported_families(rig) == [] and rig.report()["shmserve"]["malformed"] == 2


def reported_families(rig: Rig) -> Any:
    return rig.report()["shmserve"]["families"]


def test_request_options_reach_the_worker() -> None:
    rig, _ = ready_rig({})
    fields: dict[str, Any] = {"request_id": "me", "flags": 3, "timeout_us": 9, "priority": 1}
    fields |= {"correlation_id": 4, "correlation_text": "text"}
    _, batch = rig.submit_batch(work=(schema_of(), [b"packed"]), timeout_ns=MS, **fields)
    (w,) = batch.requests
    pid = int(GATEWAY.split(b".")[0])
    assert w == m.Work(w.key, pid, schema_of(), [b"packed"], **fields, deadline_ns=rig.now + MS)
