"""An ensemble's decisions, message by message."""

from typing import Any

import pytest

from shmserve.ipc.credit import FIRST_CREDIT
from shmserve.ipc.messages import inference as m
from shmserve.ipc.messages.publications import ProcessExited, SchedulerLost
from shmserve.ipc.messages.supervision import Drain, Drained
from shmserve.ipc.tensors.descriptors import Memory, Range, TensorRef
from shmserve.ipc.tensors.schemas import (
    Inference,
    Inferred,
    pack_inference,
    pack_inferred,
)
from tests.rigs.ensemble_rig import EnsembleRig, inputs_of, io, model, packed_output, step
from tests.support.messages import inference_of, inferred_of
from tests.support.texts import Beginning

CHAIN = [step("a", {"X": "IN"}, "m"), step("b", {"X": "m"}, "OUT")]
FORK = [
    step("a", {"X": "IN"}, "m"),
    step("b", {"X": "IN"}, "n"),
    step("c", {"X": "m", "Z": "n"}, "OUT"),
]
MODELS = [model("a"), model("b"), model("c")]

_EXPIRED_ERROR = Beginning("in ensemble 'e', Request timeout expired (")


def begin(
    steps: Any = CHAIN, models: Any = MODELS, **request: Any
) -> tuple[EnsembleRig, dict[str, m.Submit]]:
    """Return a rig that has one request, and the requests of its first steps by endpoint."""
    rig = EnsembleRig(steps, models)
    rig.submit(**request)
    return rig, dict(rig.take_sent())


def only_message(messages: list[Any], kind: type[Any]) -> Any:
    (message,) = messages
    assert type(message) is kind, message
    return message


def test_steps_run_one_after_the_other() -> None:
    rig, steps = begin()
    assert steps.keys() == {"a"}
    rig.finish("a", steps["a"].id, b"abcd")
    ((endpoint, second_step),) = rig.take_sent()
    assert (endpoint, inputs_of(second_step)) == ("b", {"X": b"abcd"})
    rig.finish("b", second_step.id, b"efgh")
    (output,) = inferred_of(only_message(rig.take_client_messages(), m.Finished)).outputs
    assert (output.name, output.data) == ("OUT", b"efgh")
    assert rig.core.live_count == 0


def test_every_step_has_the_priority_of_the_request() -> None:
    """A step receives any priority, even if its model has no such level."""
    rig = EnsembleRig(CHAIN, MODELS)
    rig.submit(priority=7)
    for endpoint in ("a", "b"):
        ((_, submit),) = rig.take_sent()
        assert submit.priority == 7
        rig.finish(endpoint, submit.id)


def test_an_error_waits_for_the_steps_that_run() -> None:
    """The error is sent once all running steps have ended; no new step begins."""
    rig, steps = begin(FORK)
    rig.from_step("a", m.Failed(steps["a"].id, "INTERNAL", "boom", 0, False))
    assert rig.take_client_messages() == []
    rig.finish("b", steps["b"].id)
    failed_message = only_message(rig.take_client_messages(), m.Failed)
    assert (failed_message.code, failed_message.message) == ("INTERNAL", "in ensemble 'e', boom")
    assert {reason: n for reason, n in rig.core.statistics.failures.items() if n} == {"OTHER": 1}
    assert rig.take_submits() == {}


def test_the_error_of_a_steps_full_queue_reaches_the_client() -> None:
    """As in Triton, the ensemble counts the failure as OTHER, the step as REJECTED."""
    rig = EnsembleRig(CHAIN, MODELS)
    rig.submit()
    text = "[request id: <id_unknown>] Exceeds maximum queue size"
    rig.from_step("a", m.Failed(rig.take_submits()["a"], "UNAVAILABLE", text, 2, False))
    failed_message = only_message(rig.take_client_messages(), m.Failed)
    assert (failed_message.code, failed_message.retry_after_s) == ("UNAVAILABLE", 2)
    assert failed_message.message == f"in ensemble 'e', {text}"
    assert {reason: n for reason, n in rig.core.statistics.failures.items() if n} == {"OTHER": 1}


def test_the_first_error_counts() -> None:
    rig, steps = begin(FORK)
    for name in ("b", "a"):
        rig.from_step(name, m.Failed(steps[name].id, "INTERNAL", name, 0, False))
    assert only_message(rig.take_client_messages(), m.Failed).message == "in ensemble 'e', b"


def test_a_cancelled_request_begins_no_step() -> None:
    """Cancellation is checked before each step. Running steps are cancelled."""
    rig, steps = begin()
    rig.from_client(m.Cancel(1))
    assert rig.take_sent(m.Cancel) == [("a", m.Cancel(steps["a"].id))]
    assert rig.take_client_messages() == []
    rig.finish("a", steps["a"].id)
    assert only_message(rig.take_client_messages(), m.Failed).code == "CANCELLED"
    assert rig.take_submits() == {}


def test_a_deadline_is_reported_at_once_and_memory_is_settled_later() -> None:
    rig, steps = begin(deadline_ms=10)
    assert steps["a"].deadline_ns == rig.now_ns + 10_000_000
    rig.pass_ms(11)
    failed_message = only_message(rig.take_client_messages(), m.Failed)
    assert (failed_message.early, failed_message.message) == (True, _EXPIRED_ERROR)
    assert rig.take_sent(m.Cancel) == [("a", m.Cancel(steps["a"].id))]
    rig.from_step("a", m.Failed(steps["a"].id, "CANCELLED", "request cancelled", 0, False))
    only_message(rig.take_client_messages(), m.Settled)
    assert rig.core.live_count == 0


def test_a_missing_output_is_a_deadlock() -> None:
    """The error text is Triton's."""
    rig = EnsembleRig([step("a", {"X": "IN"}, "OUT")], [model("a", decoupled=True)])
    plain_rig = EnsembleRig([step("a", {"X": "IN"}, "OUT")], [model("a")])
    for core in (rig, plain_rig):
        core.submit()
        core.respond("a", core.take_submits()["a"], b"", final=True)
    # The end of a stream without the output is no error.
    only_message(rig.take_client_messages(), m.Responded)
    assert only_message(plain_rig.take_client_messages(), m.Failed).message == (
        "in ensemble 'e', [request id: <id_unknown>] unexpected deadlock, at least one output is "
        "not set while no more ensemble steps can be made"
    )


def test_an_output_that_no_step_made_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    rig = EnsembleRig([step("a", {"X": "IN"}, "OUT")], [model("a")])
    for _ in range(2):
        rig.submit()
        rig.from_step("a", m.Finished(rig.take_submits()["a"], *pack_inferred(Inferred(()))))
        assert only_message(rig.take_client_messages(), m.Finished)
    assert caplog.messages == ["in ensemble 'e', composing models did not output tensor OUT"]


def test_a_conditionally_omitted_output_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    rig = EnsembleRig([step("a", {"X": "IN"}, "OUT")], [model("a")], conditions={0: "IN"})
    rig.submit(data=b"")
    assert only_message(rig.take_client_messages(), m.Finished) and not caplog.messages


def test_a_step_that_is_reloaded_as_decoupled_fails_its_requests_alone() -> None:
    rig = EnsembleRig(CHAIN, MODELS)
    rig.publish(model("a", decoupled=True))
    rig.submit()
    number = rig.take_submits()["a"]
    for final in (False, False, True):
        rig.respond("a", number, b"" if final else b"\0" * 4, final)
    for endpoint, submit in rig.take_sent():
        rig.finish(endpoint, submit.id)
    failure = only_message(rig.take_client_messages(), m.Failed)
    assert (failure.code, rig.core.live_count, rig.used_bytes) == ("UNSUPPORTED", 0, 0)
    assert "has become decoupled" in failure.message


def test_a_step_that_is_reloaded_without_an_output_fails_its_requests() -> None:
    rig = EnsembleRig(CHAIN, MODELS)
    rig.publish({**model("a"), "output": [io("W", (4,))]})
    rig.submit()
    failure = only_message(rig.take_client_messages(), m.Failed)
    assert "unexpected inference output 'Y'" in failure.message


def test_a_request_that_began_before_its_step_was_decoupled_has_the_first_response() -> None:
    rig = EnsembleRig(CHAIN, MODELS)
    rig.submit()
    rig.publish(model("a", decoupled=True))
    number = rig.take_submits()["a"]
    for final in (False, False, True):
        rig.respond("a", number, b"" if final else b"\0" * 4, final)
    rig.finish("b", rig.take_submits()["b"])
    only_message(rig.take_client_messages(), m.Finished)
    assert rig.core.live_count == 0


def test_requests_of_a_step_are_limited() -> None:
    """`max_inflight_requests` limits all requests in order, unlike in Triton without timeout."""
    rig = EnsembleRig(CHAIN, MODELS, max_inflight=1)
    for number in (1, 2, 3):
        rig.submit(number)
    first_runs = rig.take_submits()
    rig.pass_ms(400_000)
    assert rig.take_submits() == {}
    rig.finish("a", first_runs["a"])
    assert rig.take_submits().keys() == {"a", "b"}
    rig.from_client(m.Cancel(3))  # cancelled while the request waits
    assert only_message(rig.take_client_messages(), m.Failed).id == 3


def test_a_client_that_exits_after_its_error_was_sent_early_is_sent_nothing() -> None:
    rig, steps = begin(deadline_ms=10)
    rig.pass_ms(11)
    assert only_message(rig.take_client_messages(), m.Failed).early
    rig.from_control(ProcessExited(7000, ""))
    rig.from_step("a", m.Failed(steps["a"].id, "CANCELLED", "request cancelled", 0, False))
    assert (rig.take_client_messages(), rig.core.live_count) == ([], 0)


def test_requests_waiting_for_capacity_are_bounded() -> None:
    rig = EnsembleRig(CHAIN, MODELS, max_inflight=1, max_queue_size=2)
    for number in (1, 2, 3, 4):
        rig.submit(number)
    refusal = only_message(rig.take_client_messages(), m.Failed)
    assert (refusal.id, refusal.code, refusal.retry_after_s) == (4, "UNAVAILABLE", 1)
    assert "Exceeds maximum queue size" in refusal.message
    rig.from_client(m.Cancel(3))  # the cancellation frees a place in the queue
    assert only_message(rig.take_client_messages(), m.Failed).id == 3
    rig.submit(5)
    assert rig.take_client_messages() == []


def test_requests_of_an_exited_client_do_not_run() -> None:
    """Frames of a client may arrive after the notification of its exit."""
    rig = EnsembleRig(CHAIN, MODELS)
    rig.from_control(ProcessExited(7000, ""))  # the pid of the gateway
    rig.submit()
    assert (rig.take_submits(), rig.take_client_messages(), rig.core.live_count) == ({}, [], 0)


def test_endpoints_of_withdrawn_models_are_removed() -> None:
    rig = EnsembleRig(CHAIN, MODELS)
    endpoint_count = len(rig.core._endpoints)
    for number in range(50):
        rig.publish(model("other"), f"other.{number}")
        rig.from_control(SchedulerLost(f"other.{number}", ""))
    assert len(rig.core._endpoints) == endpoint_count


def test_a_stream_receives_credit_as_its_client_reads() -> None:
    """A producer receives credit only as fast as the slowest reader of its responses."""
    rig, steps = begin(CHAIN, [model("a", decoupled=True), model("b")])
    for index in range(FIRST_CREDIT + 1):
        rig.respond("a", steps["a"].id, b"%04d" % index)
        rig.finish("b", rig.take_submits()["b"])
    assert len(rig.take_client_messages()) == FIRST_CREDIT
    rig.from_client(m.Credit(1, 1))
    only_message(rig.take_client_messages(), m.Responded)
    rig.respond("a", steps["a"].id, b"", final=True)
    assert only_message(rig.take_client_messages(), m.Responded).final


def test_a_steps_stream_is_read_to_its_end_after_its_request_failed() -> None:
    """Its responses waited for an output of the failed step, so they are discarded."""
    rig, steps = begin(FORK, [model("a", decoupled=True), model("b"), model("c")])
    for index in range(FIRST_CREDIT):
        rig.respond("a", steps["a"].id, b"%04d" % index)
    assert rig.take_sent(m.Credit) == []
    rig.from_step("b", m.Failed(steps["b"].id, "INTERNAL", "boom", 0, False))
    assert rig.take_sent(m.Credit) == [("a", m.Credit(steps["a"].id, 1))] * FIRST_CREDIT
    rig.respond("a", steps["a"].id, b"more")
    assert rig.take_sent(m.Credit) == [("a", m.Credit(steps["a"].id, 1))]
    assert rig.take_client_messages() == []
    rig.respond("a", steps["a"].id, b"", final=True)
    assert only_message(rig.take_client_messages(), m.Failed).message == "in ensemble 'e', boom"


LARGE = 10_000  # elements of a tensor that is too large for a message


def large_rig(steps: Any = CHAIN, outputs: Any = ("OUT",), **options: Any) -> EnsembleRig:
    models = [model(name, dims=(LARGE,)) for name in "ab"]
    return EnsembleRig(steps, models, outputs, dims=(LARGE,), **options)


def take_step(rig: EnsembleRig) -> tuple[m.Submit, Range, bool]:
    """Return the only request of a step, its output's memory range, and `may_reuse_input`."""
    ((_, submit),) = rig.take_sent()
    (output,) = inference_of(submit).outputs
    assert output.memory_range is not None
    return submit, output.memory_range, output.may_reuse_input


def finish_in_place(rig: EnsembleRig, endpoint: str, number: int, memory_range: Range) -> None:
    """Report that a step has written its output to a memory range."""
    tensor = TensorRef("Y", "FP32", (memory_range.byte_size // 4,), memory_range)
    rig.from_step(endpoint, m.Finished(number, *pack_inferred(Inferred((tensor,)))))


def take_output(rig: EnsembleRig) -> Range:
    """Return the memory range of the output that the client receives."""
    (output,) = inferred_of(only_message(rig.take_client_messages(), m.Finished)).outputs
    assert isinstance(output.data, Range)
    return output.data


def release(rig: EnsembleRig, read: Range) -> None:
    rig.from_client(m.Release(read.memory.pid, [read.offset], read.memory.id))


def test_outputs_of_known_size_are_placed() -> None:
    """The outputs are written where the next step reads them, and released by the last reader."""
    rig = large_rig()
    rig.submit(data=bytes(4 * LARGE))
    first_step, first_range, _ = take_step(rig)
    assert rig.used_bytes >= 4 * LARGE
    finish_in_place(rig, "a", first_step.id, first_range)
    second_step, last_range, _ = take_step(rig)
    assert inputs_of(second_step)["X"] == first_range
    finish_in_place(rig, "b", second_step.id, last_range)
    assert take_output(rig) == last_range
    assert 0 < rig.used_bytes < 8 * LARGE
    release(rig, last_range)
    assert rig.used_bytes == 0


def test_an_input_that_a_step_returns_is_not_written_again() -> None:
    """The output stays in the input's memory until it is read; the reserved block is freed."""
    rig = large_rig()
    rig.submit(data=bytes(4 * LARGE))
    first_step, first_range, may_reuse = take_step(rig)
    assert may_reuse
    finish_in_place(rig, "a", first_step.id, first_range)
    second_step, last_range, may_reuse = take_step(rig)
    assert last_range != first_range and may_reuse
    finish_in_place(rig, "b", second_step.id, first_range)
    assert take_output(rig) == first_range
    assert 0 < rig.used_bytes < 8 * LARGE
    release(rig, first_range)
    assert rig.used_bytes == 0


def test_an_input_in_memory_of_the_clients_is_no_output() -> None:
    """The client may write to this memory once it has its response."""
    rig = large_rig()
    memory = Memory(id=7, pid=7000, fd=3, inode=1, byte_size=1 << 20, sealed=True)
    tensor = TensorRef("IN", "FP32", (LARGE,), Range(memory, 0, 4 * LARGE))
    rig.from_client(m.Submit(1, *pack_inference(Inference((tensor,))), rig.now_ns, 0, 0, 0))
    _, _, may_reuse = take_step(rig)
    assert not may_reuse


def test_memory_of_an_exited_client_is_freed() -> None:
    rig = large_rig(CHAIN[:1], ["m"])
    rig.submit(data=bytes(4 * LARGE))
    submit, memory_range, _ = take_step(rig)
    finish_in_place(rig, "a", submit.id, memory_range)
    rig.from_control(ProcessExited(7000, ""))
    assert rig.used_bytes == 0


def test_blocks_of_the_cache_and_of_steps_are_freed() -> None:
    """Both are in the memory of the process; a release has the offset."""
    rig = large_rig(CHAIN[:1], ["m"], cache_bytes=1 << 20)
    for number, (byte, is_hit) in enumerate([(b"x", False), (b"x", True), (b"y", False)], 1):
        rig.submit(number, data=byte * 4 * LARGE)
        if not is_hit:
            submit, memory_range, _ = take_step(rig)
            finish_in_place(rig, "a", submit.id, memory_range)
        assert rig.take_sent() == []
        output_range = take_output(rig)
        assert rig.used_bytes
        release(rig, output_range)
        assert rig.used_bytes == 0


def test_steps_of_a_lost_scheduler_are_resubmitted() -> None:
    """Its steps are resubmitted to the successor. Without a successor they fail."""
    rig, steps = begin()
    rig.from_control(SchedulerLost("a", "a2"))
    assert rig.take_sent() == [("a2", steps["a"])]
    rig.from_control(SchedulerLost("a2", ""))
    assert only_message(rig.take_client_messages(), m.Failed).code == "UNAVAILABLE"


def test_messages_of_a_former_scheduler_of_a_step_are_ignored() -> None:
    """The step's model has moved to another scheduler, and the former one stops."""
    rig, steps = begin()
    rig.from_control(SchedulerLost("a", "a2"))
    rig.from_step("a", m.Failed(steps["a"].id, "UNAVAILABLE", "stopping", 0, False))
    assert rig.take_client_messages() == [] and rig.take_sent() == [("a2", steps["a"])]
    rig.finish("a2", steps["a"].id)
    assert rig.take_submits().keys() == {"b"}


def test_a_rejected_step_is_sent_to_the_current_scheduler() -> None:
    rig, steps = begin()
    rig.publish(model("a"), "anew")
    rig.from_step("a", m.Failed(steps["a"].id, "UNAVAILABLE", "stopping", 0, False))
    assert rig.take_sent() == [("anew", steps["a"])]


def test_a_final_rejection_of_a_step_keeps_its_retry_hint() -> None:
    rig = EnsembleRig(CHAIN, MODELS)
    rig.submit()
    rig.from_step("a", m.Failed(rig.take_submits()["a"], "UNAVAILABLE", "full", 7, False))
    assert only_message(rig.take_client_messages(), m.Failed).retry_after_s == 7


def test_a_draining_ensemble_ends_when_it_has_responded() -> None:
    rig = EnsembleRig(CHAIN[:1], MODELS, ["m"])
    rig.submit()
    rig.from_control(Drain())
    rig.submit(2)
    assert only_message(rig.take_client_messages(), m.Failed).code == "UNAVAILABLE"
    rig.finish("a", rig.take_submits()["a"])
    kinds = [type(message) for _, message in rig.control.take()]
    assert kinds[-1] is Drained


def test_compute_times_are_summed_over_steps() -> None:
    rig = EnsembleRig(CHAIN, MODELS)
    rig.submit()
    for name in ("a", "b"):
        number = rig.take_submits()[name]
        rig.from_step(name, m.Finished(number, *packed_output(b"\0" * 4), 1, 20, 300))
    (finished_message,) = rig.take_client_messages()
    times_ns = finished_message.input_ns, finished_message.infer_ns, finished_message.output_ns
    assert times_ns == (2, 40, 600)
