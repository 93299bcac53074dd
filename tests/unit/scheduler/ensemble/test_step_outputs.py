"""Responses of steps that are unread, discarded, or delayed, and steps that waited."""

import os
import time
from typing import Any

from shmserve.ipc.credit import FIRST_CREDIT
from shmserve.ipc.memory.arena import Arena
from shmserve.ipc.memory.mappings import Mappings
from shmserve.ipc.messages import inference as m
from shmserve.ipc.tensors.descriptors import Memory, Range, TensorRef
from shmserve.ipc.tensors.schemas import Inferred, pack_inferred
from tests.rigs.ensemble_rig import EnsembleRig, inputs_of, model, packed_output, step
from tests.support.messages import inferred_of

STREAM = [step("a", {"X": "IN"}, "m"), step("b", {"X": "m"}, "OUT")]
STREAM_MODELS = [model("a", decoupled=True), model("b")]
# The pid of no process.
GONE_MEMORY = Memory(id=7, pid=2**22 + 1, fd=3, inode=1, byte_size=1 << 20, sealed=True)


def only_failure(rig: EnsembleRig) -> m.Failed:
    (message,) = rig.take_client_messages()
    assert isinstance(message, m.Failed)
    return message


def begin_stream(**settings: Any) -> tuple[EnsembleRig, int]:
    """Return a rig whose request has begun a decoupled first step, and the step's number."""
    rig = EnsembleRig(STREAM, STREAM_MODELS, **settings)
    rig.submit()
    return rig, rig.take_submits()["a"]


def test_a_producer_waits_for_the_client_behind_another_step() -> None:
    """Credit-based flow control works end to end, so the outputs of later steps are bounded."""
    rig, number = begin_stream()
    for index in range(FIRST_CREDIT):
        rig.respond("a", number, b"%04d" % index)
        rig.finish("b", rig.take_submits()["b"])
    assert rig.take_sent(m.Credit) == []
    assert len(rig.take_client_messages()) == FIRST_CREDIT
    rig.from_client(m.Credit(1, 2))
    assert rig.take_sent(m.Credit) == [("a", m.Credit(number, 1))] * 2


def test_a_producer_receives_credit_after_a_failure() -> None:
    """The request ends with its producer, so discarded responses are credited at once."""
    rig, number = begin_stream()
    rig.respond("a", number, b"0000")
    rig.from_step("b", m.Failed(rig.take_submits()["b"], "INTERNAL", "boom", 0, False))
    assert rig.take_sent(m.Credit) == [("a", m.Credit(number, 1))]
    for _ in range(2 * FIRST_CREDIT):
        rig.respond("a", number, b"0000")
        assert rig.take_sent(m.Credit) == [("a", m.Credit(number, 1))]
    rig.respond("a", number, b"", final=True)
    assert only_failure(rig).code == "INTERNAL" and rig.core.live_count == 0


def test_an_error_response_returns_credit() -> None:
    rig, number = begin_stream()
    rig.from_step("a", m.Responded(number, "INTERNAL", "boom", b"", [], False))
    assert rig.take_sent(m.Credit) == [("a", m.Credit(number, 1))]


def test_an_output_of_an_exited_worker_fails_its_request() -> None:
    """The worker has exited right after its response. Other requests continue."""
    rig = EnsembleRig(STREAM, [model("a"), model("b")])
    rig.submit()
    tensor = TensorRef("Y", "FP32", (1,), Range(GONE_MEMORY, 0, 4))
    rig.from_step("a", m.Finished(rig.take_submits()["a"], *pack_inferred(Inferred((tensor,)))))
    assert only_failure(rig).code == "UNAVAILABLE"
    assert (rig.core.live_count, rig.memory._held_arenas) == (0, {})
    rig.submit(2)
    assert "a" in rig.take_submits()


def test_a_response_that_cannot_be_read_is_counted() -> None:
    """The request fails, and a producer of further responses receives its credit."""
    for schema, data in ((b"\xc1", []), (packed_output(b"")[0], [b"", b""])):
        rig, number = begin_stream()
        rig.from_step("a", m.Responded(number, "", "", schema, data, False))
        assert rig.take_sent(m.Credit) == [("a", m.Credit(number, 1))]
        assert rig.core.gauges()["malformed"] == 1
        rig.respond("a", number, b"", final=True)
        assert (only_failure(rig).code, rig.core.live_count) == ("INTERNAL", 0)


def test_an_unreadable_condition_fails_its_request() -> None:
    """The condition is on a device, or in a client's memory."""
    second_step = {**STREAM[1], "input_map": {"X": "IN"}}
    rig = EnsembleRig([STREAM[0], second_step], [model("a"), model("b")], conditions={1: "m"})
    rig.submit()
    unsealed_memory = Memory(id=8, pid=1, fd=3, inode=1, byte_size=1 << 20, sealed=False)
    tensor = TensorRef("Y", "BOOL", (4,), Range(unsealed_memory, 0, 4))
    rig.from_step("a", m.Finished(rig.take_submits()["a"], *pack_inferred(Inferred((tensor,)))))
    assert only_failure(rig).code == "INVALID_ARG" and rig.core.live_count == 0


def test_a_large_condition_is_read_fast() -> None:
    """Less than 4 ns per byte: the scheduler handles no other request meanwhile."""
    arena = Arena(1 << 26)
    memory_range = arena.allocate(1 << 26)
    memory = EnsembleRig(STREAM, [model("a"), model("b")]).core._memory
    started = time.process_time()
    assert not memory.any_true("x", memory_range)
    assert time.process_time() - started < 0.25
    arena.view(memory_range)[-1] = 1
    assert memory.any_true("x", memory_range) and memory.any_true("x", b"\0\1")
    assert not memory.any_true("x", b"\0\0") and not memory.any_true("x", b"")
    memory.close()


def test_no_step_that_waited_begins_after_a_failure() -> None:
    """No new step begins; the failed request frees its place for another request."""
    rig, number = begin_stream(max_inflight=1)
    rig.respond("a", number, b"0000")
    rig.respond("a", number, b"0001")
    ((_, first_step),) = rig.take_sent()
    rig.from_step("b", m.Failed(first_step.id, "INTERNAL", "boom", 0, False))
    assert rig.take_submits() == {}
    rig.respond("a", number, b"", final=True)
    assert only_failure(rig).code == "INTERNAL"


def test_deadlines_of_completed_requests_are_removed() -> None:
    """The timer of a long deadline does not keep a completed request and its tensors alive."""
    rig = EnsembleRig(STREAM[:1], [model("a")], ["m"])
    for number in range(5000):
        rig.submit(number, deadline_ms=3_600_000 + number)
        if number:
            rig.finish("a", rig.take_submits()["a"])
        else:
            rig.take_sent()  # the request remains open, and so does its timer
    assert len(rig.core._requests.timers._heap) < 2000


class WorkerArena:
    """A worker's arena with one output of a step, and the releases that the ensemble has sent."""

    def __init__(self, content: bytes) -> None:
        self.arena = Arena(1 << 16)
        self.memory_range = self.arena.allocate(len(content))
        self.arena.view(self.memory_range)[:] = content
        self.packed = pack_inferred(
            Inferred((TensorRef("Y", "FP32", (len(content) // 4,), self.memory_range),))
        )
        self.release = m.Release(
            self.memory_range.memory.pid, [self.memory_range.offset], self.memory_range.memory.id
        )

    def reuse(self) -> None:
        self.arena.view(self.memory_range)[:] = bytes(self.memory_range.byte_size)


def test_clients_read_memory_of_the_ensemble() -> None:
    """Clients read a copy, since workers free memory when the ensemble exits."""
    rig = EnsembleRig([step("a", {"X": "IN"}, "OUT")], [model("a")])
    rig.submit()
    worker_arena = WorkerArena(b"abcd" * 5000)
    rig.from_step("a", m.Finished(rig.take_submits()["a"], *worker_arena.packed))
    assert rig.take_sent(m.Release) == [("a", worker_arena.release)]
    worker_arena.reuse()
    (finished_message,) = rig.take_client_messages()
    (output,) = inferred_of(finished_message).outputs
    assert isinstance(output.data, Range)
    assert output.data.memory.id != worker_arena.memory_range.memory.id
    mappings = Mappings()
    assert bytes(mappings.view(output.data)) == b"abcd" * 5000
    mappings.unmap_all()
    rig.from_client(m.Release(os.getpid(), [output.data.offset], output.data.memory.id))
    assert rig.used_bytes == 0


def test_the_first_of_repeated_outputs_counts() -> None:
    rig = EnsembleRig(STREAM, [model("a"), model("b")])
    rig.submit()
    outputs = [TensorRef("Y", "FP32", (1,), data) for data in (b"abcd", b"efgh")]
    packed = pack_inferred(Inferred(tuple(outputs)))
    rig.from_step("a", m.Finished(rig.take_submits()["a"], *packed))
    ((_, submit),) = rig.take_sent()
    assert inputs_of(submit) == {"X": b"abcd"}
    rig.from_step("b", m.Finished(submit.id, *packed))
    (finished_message,) = rig.take_client_messages()
    assert [output.data for output in inferred_of(finished_message).outputs] == [b"abcd"]
    assert rig.core.live_count == 0


def test_a_step_is_planned_by_the_shapes_of_its_own_inputs() -> None:
    """Requests of a step have the same kind if only tensors of earlier steps differ in shape."""
    rig = EnsembleRig(STREAM, [model("a"), model("b")])
    for number in range(1, 6):
        rig.submit(number, data=bytes(4 * number))
        rig.finish("a", rig.take_submits()["a"])
        rig.finish("b", rig.take_submits()["b"])
    (plan,) = rig.core._plans.values()
    assert [len(planned_step.templates) for planned_step in plan.steps.values()] == [5, 1]


def test_tensors_between_two_steps_are_not_copied() -> None:
    """The next step's worker reads the tensor in place."""
    rig = EnsembleRig(STREAM, [model("a"), model("b")])
    rig.submit()
    worker_arena = WorkerArena(b"abcd" * 5000)
    rig.from_step("a", m.Finished(rig.take_submits()["a"], *worker_arena.packed))
    ((_, submit),) = rig.take_sent()
    data = inputs_of(submit)["X"]
    assert data.memory.id == worker_arena.memory_range.memory.id
    assert data.offset == worker_arena.memory_range.offset
    assert rig.used_bytes == 0
    rig.finish("b", submit.id)
    assert rig.take_sent(m.Release) == [("a", worker_arena.release)]


def test_an_output_without_space_for_its_copy_fails_its_request() -> None:
    """The worker's block is released, too."""
    rig = EnsembleRig([step("a", {"X": "IN"}, "OUT")], [model("a")], arena_bytes=4096)
    rig.submit()
    worker_arena = WorkerArena(b"abcd" * 5000)
    rig.from_step("a", m.Finished(rig.take_submits()["a"], *worker_arena.packed))
    assert rig.take_sent(m.Release) == [("a", worker_arena.release)]
    assert only_failure(rig).code == "INVALID_ARG" and rig.used_bytes == 0
