"""Several responses to one request; the worker's slot is free independently of its end."""

import pytest

from shmserve.ipc.messages import inference as m
from shmserve.ipc.messages.publications import ProcessExited
from shmserve.ipc.messages.supervision import Drain, Drained, KillInstance, Stop
from shmserve.scheduler.requests.scheduled import NEVER
from tests.rigs.scheduler_rig import (
    MS,
    Rig,
    pack_response,
    ready_rig,
    response_in_arena,
    stream_rig,
)
from tests.support.texts import EXPIRED_TEXT

DIED_ERROR = "the model's worker died before this request's last response"


def part(number: int, response: bytes = b"part", final: bool = False) -> m.Responded:
    return m.Responded(number, "", "", *pack_response(response), final)


# --- responses ------------------------------------------------------------------------------------


def test_responses_are_relayed_as_they_arrive_and_the_last_ends_the_request() -> None:
    rig, peer, number, key = stream_rig()
    for text in (b"a", b"b"):
        rig.respond(peer, key, text)
        assert rig.answers() == [part(number, text)]
    rig.respond(peer, key, b"c", final=True)
    assert rig.answers() == [part(number, b"c", final=True)]
    rig.respond(peer, key, b"late")
    assert rig.answers() == [] and rig.report()["shmserve"]["malformed"] == 1


def test_an_end_before_execute_returns_contains_the_duration() -> None:
    """An ensemble sums the durations of its steps."""
    rig, peer, _, key = stream_rig()
    rig.pass_time(3 * MS)
    rig.respond(peer, key, b"", final=True)
    (end_message,) = rig.answers()
    assert isinstance(end_message, m.Responded)
    assert (end_message.input_ns, end_message.infer_ns, end_message.output_ns) == (0, 3 * MS, 0)


def test_an_end_may_arrive_without_any_response() -> None:
    rig, peer, number, key = stream_rig()
    rig.respond(peer, key, b"", final=True)
    assert rig.answers() == [part(number, b"", final=True)]


def test_an_error_may_precede_other_responses() -> None:
    rig, peer, number, key = stream_rig()
    rig.respond(peer, key, b"", code="NOT_FOUND", message="not this one")
    rig.respond(peer, key, final=True)
    assert rig.answers() == [
        m.Responded(number, "NOT_FOUND", "not this one", b"", [], False),
        part(number, final=True),
    ]
    stats = rig.report()["inference_stats"]
    assert (stats["success"]["count"], stats["fail"]["count"]) == (1, 0)


@pytest.mark.parametrize("has_failed", [False, True])
def test_a_request_fails_if_its_model_raises_but_not_if_it_sends_an_error(has_failed: bool) -> None:
    rig, peer, number, key = stream_rig()
    rig.respond(peer, key)
    rig.respond(
        peer, key, b"", code="INTERNAL", message="no", final=True, request_failed=has_failed
    )
    assert rig.answers()[-1] == m.Responded(number, "INTERNAL", "no", b"", [], True)
    report = rig.report()
    assert report["shmserve"]["failures"]["BACKEND"] == has_failed
    counts = report["inference_stats"]
    assert (counts["success"]["count"], counts["fail"]["count"]) == (not has_failed, has_failed)
    assert report["response_stats"]["1"]["fail"]["count"] == 1


def test_the_worker_is_free_when_execute_returns_and_responses_go_on() -> None:
    rig, peer, first_id, key = stream_rig()
    (second_id,) = rig.submit()
    assert rig.take_batches() == []
    rig.report_returned(peer, m.Execute(1, []))
    _, batch = rig.execute()
    assert rig.report()["shmserve"]["executing"] == 2
    rig.respond(peer, key, b"of the first")
    rig.respond(peer, batch.requests[0].key, b"of the second")
    rig.respond(peer, key, b"", final=True)
    assert rig.answers() == [
        part(first_id, b"of the first"),
        part(second_id, b"of the second"),
        part(first_id, b"", final=True),
    ]
    assert rig.report()["shmserve"]["executing"] == 1


def test_all_responses_may_arrive_before_execute_returns() -> None:
    rig, peer, number, key = stream_rig()
    rig.respond(peer, key)
    rig.respond(peer, key, final=True)
    rig.report_returned(peer, m.Execute(1, []))
    assert rig.answers() == [part(number), part(number, final=True)]
    rig.submit()
    assert len(rig.execute()[1].requests) == 1


def test_a_reply_ends_a_request_too() -> None:
    rig, peer, number, key = stream_rig()
    rig.report_returned(peer, m.Execute(1, []), m.Reply(key, "INVALID_ARG", "cannot be read"))
    assert rig.answers() == [m.Responded(number, "INVALID_ARG", "cannot be read", b"", [], True)]
    assert rig.core.live_count == 0


def test_a_batch_of_requests_ends_one_by_one() -> None:
    rig, peer = ready_rig({}, decoupled=True)
    numbers, batch = rig.submit_batch(3)
    keys = [request.key for request in batch.requests]
    rig.report_returned(peer, batch, m.Reply(keys[1], "INTERNAL", "no"))
    rig.respond(peer, keys[2], final=True)
    rig.respond(peer, keys[0], final=True)
    assert [answer.id for answer in rig.answers()] == [numbers[1], numbers[2], numbers[0]]


def test_the_order_of_requests_is_not_preserved() -> None:
    rig, peer = ready_rig({"preserve_ordering": True}, decoupled=True)
    (first_id, second_id), batch = rig.submit_batch(2)
    keys = [request.key for request in batch.requests]
    rig.respond(peer, keys[1], final=True)
    rig.respond(peer, keys[0], final=True)
    assert [answer.id for answer in rig.answers()] == [second_id, first_id]


def test_an_ordinary_model_has_one_response() -> None:
    rig, peer = ready_rig()
    _, batch = rig.submit_batch()
    rig.respond(peer, batch.requests[0].key)
    assert rig.answers() == [] and rig.report()["shmserve"]["malformed"] == 1


def test_responses_of_unknown_peers_and_to_foreign_requests_are_dropped() -> None:
    rig, _, number, key = stream_rig()
    other_worker = rig.start(1, 101)
    rig.respond(b"0.77", key)
    rig.respond(other_worker, key)
    rig.respond(other_worker, 999)
    assert rig.answers() == [] and rig.report()["shmserve"]["malformed"] == 3
    assert number == 1


# --- credit ---------------------------------------------------------------------------------------


def test_credit_of_a_client_reaches_the_worker() -> None:
    rig, peer, number, key = stream_rig()
    for _ in range(3):
        rig.respond(peer, key)
    rig.client(m.Credit(number, 2))
    rig.client(m.Credit(number, 1))
    assert rig.take_worker_messages() == [m.CreditExecution(key, 2), m.CreditExecution(key, 1)]


@pytest.mark.parametrize("absurd_count", [1 << 62, (1 << 64) - 1])
def test_credit_is_limited_to_the_responses_sent(absurd_count: int) -> None:
    rig, peer, number, key = stream_rig()
    rig.client(m.Credit(number, 5))
    rig.respond(peer, key)
    for responses in (-3, 0, absurd_count, absurd_count):
        rig.client(m.Credit(number, responses))
    rig.client(m.Credit(77, 1))
    rig.client(m.Credit(number, 1), b"7001.cd")
    assert rig.take_worker_messages() == [m.CreditExecution(key, 1)]


# --- clients that no longer wait ------------------------------------------------------------------


@pytest.mark.parametrize("has_returned", [True, False])
@pytest.mark.parametrize("responses", [0, 2])
def test_a_cancelled_request_ends_when_its_model_does(has_returned: bool, responses: int) -> None:
    rig, peer, number, key = stream_rig()
    for _ in range(responses):
        rig.respond(peer, key)
    if has_returned:
        rig.report_returned(peer, m.Execute(1, []))
    rig.answers()
    rig.client(m.Cancel(number))
    assert rig.take_worker_messages() == [m.CancelExecution(key)]
    rig.respond(peer, key, response_in_arena(100, 4096))
    assert rig.take_worker_messages() == [m.ReleaseOutputs(7000, [4096])]
    assert rig.answers() == []
    rig.respond(peer, key, response_in_arena(100, 8192), final=True)
    assert rig.take_worker_messages() == [m.ReleaseOutputs(7000, [8192])]
    assert rig.answers() == [m.Failed(number, "CANCELLED", "request cancelled", 0, False)]
    assert rig.report()["shmserve"]["failures"]["CANCELED"] == 1


def test_an_exited_client_ends_only_its_own_requests() -> None:
    rig, peer, _, key = stream_rig()
    rig.respond(peer, key)
    rig.report_returned(peer, m.Execute(1, []))
    rig.answers()
    rig.supervisor(ProcessExited(7000, ""))
    assert rig.take_worker_messages() == [m.ReaderExited(7000), m.CancelExecution(key)]
    rig.respond(peer, key)
    assert rig.core.live_count == 1
    rig.respond(peer, key, b"", final=True)
    assert rig.answers() == [] and rig.core.live_count == 0


@pytest.mark.parametrize("has_returned", [True, False])
def test_a_deadline_holds_until_the_last_response(has_returned: bool) -> None:
    rig, peer = ready_rig(decoupled=True)
    number, batch = rig.submit_and_take_batch(timeout_ns=5 * MS)
    key = batch.requests[0].key
    rig.respond(peer, key)
    if has_returned:
        rig.report_returned(peer, batch)
    assert rig.wake_ns < NEVER
    rig.pass_time(6 * MS)
    assert rig.answers() == [part(number), m.Failed(number, "UNAVAILABLE", EXPIRED_TEXT, 0, True)]
    assert rig.take_worker_messages() == [m.CancelExecution(key)]
    rig.respond(peer, key)
    assert rig.answers() == []
    rig.respond(peer, key, b"", final=True)
    assert rig.answers() == [m.Settled(number)]


# --- ends of workers ------------------------------------------------------------------------------


def test_a_request_with_a_response_is_never_retried() -> None:
    rig, peer, number, key = stream_rig()
    rig.respond(peer, key)
    rig.supervisor(ProcessExited(100, "signal 9"))
    assert rig.answers() == [
        part(number),
        m.Failed(number, "INTERNAL", f"{DIED_ERROR} (signal 9)", 0, False),
    ]
    rig.start(0, 101)
    assert rig.take_batches() == []


def test_an_open_request_is_never_retried() -> None:
    rig, peer, number, _ = stream_rig()
    rig.report_returned(peer, m.Execute(1, []))
    rig.supervisor(ProcessExited(100, ""))
    assert rig.answers() == [m.Failed(number, "INTERNAL", DIED_ERROR, 0, False)]
    assert rig.report()["shmserve"]["workers_lost"] == 1


def test_a_request_without_a_response_runs_again_alone_when_its_batch_fails() -> None:
    rig, peer = ready_rig({}, decoupled=True)
    (completed_id, responding_id, silent_id), batch = rig.submit_batch(3)
    keys = [request.key for request in batch.requests]
    rig.respond(peer, keys[0], final=True)
    rig.respond(peer, keys[1])
    rig.supervisor(ProcessExited(100, "signal 9"))
    assert rig.answers() == [
        part(completed_id, final=True),
        part(responding_id),
        m.Failed(responding_id, "INTERNAL", f"{DIED_ERROR} (signal 9)", 0, False),
    ]
    peer = rig.start(0, 101)
    _, retried_batch = rig.execute()
    rig.respond(peer, retried_batch.requests[0].key, final=True)
    assert rig.answers() == [part(silent_id, final=True)]


def test_the_execution_limit_excludes_later_responses() -> None:
    rig, peer, number, key = stream_rig(execution_timeout_s=1)
    rig.pass_time(500 * MS)
    rig.report_returned(peer, m.Execute(1, []))
    rig.pass_time(60_000 * MS)
    assert rig.control.take() == []
    rig.respond(peer, key, final=True)
    assert rig.answers() == [part(number, final=True)]


def test_a_batch_that_passes_the_limit_after_a_response_fails() -> None:
    rig, peer, number, key = stream_rig(execution_timeout_s=1)
    rig.respond(peer, key)
    rig.pass_time(1000 * MS)
    ((_, kill),) = rig.control.take()
    assert isinstance(kill, KillInstance)
    text = "execution of the request exceeded the limit of 1 seconds"
    assert rig.answers()[1:] == [m.Failed(number, "INTERNAL", text, 0, True)]
    rig.supervisor(ProcessExited(100, "signal 9"))
    assert rig.answers() == [m.Settled(number)]


# --- ends of the scheduler ------------------------------------------------------------------------


def test_draining_waits_for_open_requests() -> None:
    rig, peer, _, key = stream_rig()
    rig.report_returned(peer, m.Execute(1, []))
    rig.supervisor(Drain())
    assert not rig.take_supervisor_messages(Drained)
    rig.respond(peer, key, final=True)
    assert rig.take_supervisor_messages(Drained)


def test_stopping_fails_open_requests() -> None:
    rig, peer, number, key = stream_rig()
    rig.respond(peer, key)
    rig.supervisor(Stop())
    _, failed_message = rig.answers()
    assert (failed_message.id, failed_message.code) == (number, "UNAVAILABLE")
    assert rig.core.live_count == 0


# --- counts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("first_event", ["the end", "the return"])
def test_a_request_is_counted_once_in_either_order(first_event: str) -> None:
    rig, peer, _, key = stream_rig()
    rig.pass_time(MS)
    if first_event == "the return":
        rig.report_returned(peer, m.Execute(1, []))
    rig.respond(peer, key)
    rig.respond(peer, key, final=True)
    if first_event == "the end":
        rig.report_returned(peer, m.Execute(1, []))
    report = rig.report()
    assert (report["inference_count"], report["execution_count"]) == (1, 1)
    stats = report["inference_stats"]
    assert stats["success"] == {"count": 1, "ns": MS}
    assert stats["queue"] == {"count": 1, "ns": MS - 4}
    assert stats["compute_infer"] == {"count": 1, "ns": 2}
    assert report["shmserve"]["queue_seconds"]["count"] == 1


def test_one_request_too_many_waits_in_the_queue() -> None:
    """The model has its maximum number of open requests. A waiting request is no execution."""
    rig = Rig(
        decoupled=True, max_batch_size=0, parameters={"max_streams": "2"}, execution_timeout_s=1
    )
    peer = rig.start()
    rig.submit(3, batch_size=0)
    keys = []
    for _ in range(2):
        _, batch = rig.execute()
        (unit_of_work,) = batch.requests
        keys.append(unit_of_work.key)
        rig.report_returned(peer, batch)
    assert rig.take_batches() == []
    rig.pass_time(5_000 * MS)
    assert rig.take_worker_messages() == rig.control.posted_messages == []  # no worker is killed
    rig.respond(peer, keys[0], final=True)
    rig.execute()
