"""Calls of other models: submission, responses, memory, and schedulers that exit meanwhile."""

import asyncio
import errno
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import numpy as np
import pytest

from shmserve.errors import (
    Cancelled,
    Internal,
    InvalidArgument,
    NotFound,
    ShmserveError,
    Unavailable,
)
from shmserve.ipc.memory.arena import Arena
from shmserve.ipc.memory.mappings import Mappings
from shmserve.ipc.messages import inference as m
from shmserve.ipc.messages.control_requests import FindModel, Refused
from shmserve.ipc.messages.publications import ModelWithdrawn, ProcessExited, SchedulerLost
from shmserve.ipc.messages.supervision import WorkerStarted
from shmserve.ipc.tensors.descriptors import Range, TensorRef
from shmserve.ipc.tensors.schemas import INLINE_LIMIT
from shmserve.ipc.transport import zmtp
from shmserve.workers.bls.calls import UnaryBlsCall
from shmserve.workers.bls.request import CallInput, CallRequest, CallResponse
from shmserve.workers.bls.router import CallRouter
from tests.rigs.called_models import CalledModels, Peer, finished, work
from tests.rigs.worker_rig import MIB, Region, Rig, tensor
from tests.support.leaks import descriptor_count
from tests.support.waiting import until


@pytest.fixture
def callees(worker: Rig, tmp_path: Path) -> Iterator[CalledModels]:
    called_models = CalledModels(tmp_path, worker.supervisor)
    worker.context.control.send(WorkerStarted(1))
    called_models.supervisor.next(WorkerStarted)  # type: ignore[type-var]
    yield called_models
    called_models.close()


@pytest.fixture
def router(worker: Rig) -> Iterator[CallRouter]:
    call_router = CallRouter(worker.context.control, 64 * MIB)
    yield call_router
    call_router.close()


def request(values: object = (1.0, 2.0), model: str = "other", **fields: object) -> CallRequest:
    array = np.array([values], dtype=np.float32)
    return CallRequest(
        model,
        "",
        [CallInput("X", "FP32", array.shape, array.tobytes())],
        **fields,  # type: ignore[arg-type]
    )


def call(calls: CallRouter, call_request: CallRequest) -> CallResponse:
    return calls.submit_now(UnaryBlsCall(calls, call_request)).wait()


def begin(
    calls: CallRouter,
    callees: CalledModels,
    scheduler: Peer,
    call_request: CallRequest | None = None,
) -> tuple[Future[CallResponse], m.Submit]:
    """Begin a call whose model is found at `scheduler`; return it and its submission there."""
    running_call = callees.run(call, calls, call_request or request())
    callees.answer_find(scheduler.name)
    return running_call, scheduler.next(m.Submit)


def call_soon(calls: CallRouter, call_request: CallRequest) -> asyncio.Future[CallResponse]:
    future: asyncio.Future[CallResponse] = asyncio.get_running_loop().create_future()
    calls.submit_soon(UnaryBlsCall(calls, call_request, future), future)
    return future


def values(reply: CallResponse) -> list[float]:
    (output,) = reply.outputs
    return output.numpy().ravel().tolist()


def doubled_response(submit: m.Submit, memory_range: Range | None = None) -> m.Finished:
    (call_input,) = work(submit).inputs
    assert isinstance(call_input.data, bytes)
    array = np.frombuffer(call_input.data, np.float32).reshape(call_input.shape)
    return finished(submit, tensor("Y", 2 * array, memory_range), note="doubled")


def test_a_call_and_its_answer(router: CallRouter, callees: CalledModels) -> None:
    scheduler = callees.scheduler("s1")
    call_request = request(
        outputs=["Y"],
        request_id="me",
        parameters={"a": 1, "deadline_us": 20},
        correlation_id=7,
        flags=1,
        timeout_us=10,
    )
    running_call = callees.run(call, router, call_request)
    find_question = callees.answer_find("s1")
    assert (find_question.name, find_question.version) == ("other", "")
    submit = scheduler.next(m.Submit)
    assert (submit.request_id, submit.timeout_us) == ("me", 10)
    assert submit.deadline_ns == submit.arrived_ns + 20_000
    inference = work(submit)
    assert [output.name for output in inference.outputs] == ["Y"]
    assert inference.parameters == call_request.parameters
    assert submit.correlation_id == 7
    assert submit.flags == 1
    scheduler.send(doubled_response(submit))
    reply = running_call.result(10)
    assert values(reply) == [2.0, 4.0] and reply.parameters == {"note": "doubled"}
    reply.outputs[0].numpy()[:] = 0  # writable, because the memory belongs to the model


def test_a_models_endpoint_is_looked_up_once(router: CallRouter, callees: CalledModels) -> None:
    scheduler = callees.scheduler("s1")
    for iteration in range(3):
        running_call = callees.run(call, router, request())
        if not iteration:
            callees.answer_find("s1")
        scheduler.send(doubled_response(scheduler.next(m.Submit)))
        running_call.result(10)
    router.invalidate("other")
    running_call, submit = begin(router, callees, scheduler)
    scheduler.send(doubled_response(submit))
    running_call.result(10)


@pytest.mark.parametrize("own_us", [0, 10**9])
def test_calls_end_with_callers(router: CallRouter, callees: CalledModels, own_us: int) -> None:
    scheduler = callees.scheduler("s1")
    deadline_ns = time.monotonic_ns() + 10**9
    running_call, submit = begin(
        router, callees, scheduler, request(timeout_us=own_us, deadline_ns=deadline_ns)
    )
    assert submit.deadline_ns == deadline_ns
    scheduler.send(m.Failed(submit.id, "UNAVAILABLE", "Request timeout expired", 0, True))
    with pytest.raises(Unavailable, match="Request timeout expired"):
        running_call.result(10)


def test_errors(router: CallRouter, callees: CalledModels) -> None:
    scheduler = callees.scheduler("s1")
    running_call = callees.run(call, router, request(model="nobody"))
    find_question = callees.supervisor.next(FindModel)
    callees.supervisor.send(Refused(find_question.id, "NOT_FOUND", "no such model"))
    with pytest.raises(NotFound, match="no such model"):
        running_call.result(10)

    running_call = callees.run(call, router, request(outputs=["Z"]))
    callees.answer_find("s1")
    with pytest.raises(InvalidArgument, match="unexpected inference output 'Z'"):
        running_call.result(10)

    running_call = callees.run(call, router, request())
    submit = scheduler.next(m.Submit)
    scheduler.send(m.Failed(submit.id, "INVALID_ARG", "not these numbers", 0, False))
    with pytest.raises(InvalidArgument, match="not these numbers"):
        running_call.result(10)

    running_call = callees.run(call, router, request())
    submit = scheduler.next(m.Submit)
    scheduler.send(m.Failed(submit.id, "INVALID_ARG", "no id", 0, False, is_refused=True))
    with pytest.raises(Internal, match="Model other - Error when running inference: no id"):
        running_call.result(10)


def test_a_malformed_answer_is_an_error(router: CallRouter, callees: CalledModels) -> None:
    scheduler = callees.scheduler("s1")
    running_call, submit = begin(router, callees, scheduler)
    scheduler.send(m.Finished(submit.id, b"garbage", []))
    with pytest.raises(ShmserveError, match="internal error"):
        running_call.result(10)


def test_large_tensors_lie_in_memory(router: CallRouter, callees: CalledModels) -> None:
    """The arena holds the input until the response; the output is copied and released."""
    scheduler = callees.scheduler("s1")
    caller_arena, mappings = Arena(MIB), Mappings()
    big_array = np.arange(INLINE_LIMIT, dtype=np.float32)
    for iteration in range(3):
        running_call = callees.run(call, router, request(big_array))
        if not iteration:
            callees.answer_find("s1")
        submit = scheduler.next(m.Submit)
        (call_input,) = work(submit).inputs
        assert isinstance(call_input.data, Range)
        assert call_input.data.offset == 0  # the range is free again after each call
        array = np.frombuffer(mappings.view(call_input.data), np.float32)
        assert (array == big_array).all()
        memory_range = caller_arena.allocate(big_array.nbytes)
        caller_arena.view(memory_range)[:] = (array + iteration).tobytes()
        scheduler.send(finished(submit, TensorRef("Y", "FP32", call_input.shape, memory_range)))
        assert values(running_call.result(10)) == (big_array + iteration).tolist()
        release_message = scheduler.next(m.Release)
        assert release_message == m.Release(caller_arena.memory.pid, [memory_range.offset])
        caller_arena.free(memory_range.offset)


def test_inputs_in_the_requests_memory_stay(
    router: CallRouter, callees: CalledModels, region: Region
) -> None:
    scheduler = callees.scheduler("s1")
    memory_range = region.write(64, np.array([1, 2], dtype=np.float32))
    call_request = CallRequest("other", "", [CallInput("X", "FP32", (1, 2), memory_range)])
    running_call, submit = begin(router, callees, scheduler, call_request)
    assert work(submit).inputs[0].data == memory_range
    scheduler.send(finished(submit))
    running_call.result(10)


def test_memory_of_an_early_failure_is_kept_until_it_is_settled(
    router: CallRouter, callees: CalledModels
) -> None:
    scheduler = callees.scheduler("s1")
    big_array = np.zeros(INLINE_LIMIT)

    def find_offset(expect_question: bool, *settled_first: m.Settled) -> tuple[int, int]:
        running_call = callees.run(call, router, request(big_array))
        if expect_question:
            callees.answer_find("s1")
        submit = scheduler.next(m.Submit)
        memory_range = work(submit).inputs[0].data
        assert isinstance(memory_range, Range)
        scheduler.send(m.Failed(submit.id, "UNAVAILABLE", "too late", 0, True))
        with pytest.raises(Unavailable):
            running_call.result(10)
        return submit.id, memory_range.offset

    first_id, first_offset = find_offset(True)
    _, second_offset = find_offset(False)
    assert first_offset == 0 < second_offset
    scheduler.send(m.Settled(first_id))
    while True:  # the release is processed by the next call, or by the call after it
        _, third_offset = find_offset(False)
        if third_offset == 0:
            return


def test_a_full_arena_fails_the_call(worker: Rig, callees: CalledModels) -> None:
    calls = CallRouter(worker.context.control, MIB)
    callees.scheduler("s1")
    running_call = callees.run(call, calls, request(np.zeros(MIB)))
    callees.answer_find("s1")
    arena_error = r"4194304 bytes .* --arena-byte-size allows 1048576"
    with pytest.raises(InvalidArgument, match=arena_error):
        running_call.result(10)
    calls.close()


def test_a_lost_schedulers_calls_are_moved(router: CallRouter, callees: CalledModels) -> None:
    first_scheduler, second_scheduler = callees.scheduler("s1"), callees.scheduler("s2")
    running_call, lost_submit = begin(router, callees, first_scheduler)
    callees.supervisor.send(SchedulerLost(callees.endpoint("s1"), callees.endpoint("s2")))
    resubmit = second_scheduler.next(m.Submit)
    assert resubmit == lost_submit
    second_scheduler.send(doubled_response(resubmit))
    assert values(running_call.result(10)) == [2.0, 4.0]
    # New calls are sent to the scheduler that the supervisor names.
    running_call, submit = begin(router, callees, second_scheduler)
    second_scheduler.send(doubled_response(submit))
    running_call.result(10)


def test_a_call_fails_without_a_descriptor_for_the_successor(
    router: CallRouter, callees: CalledModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call fails at once, instead of waiting for a response that cannot arrive."""

    def raise_no_descriptors(endpoint: str, identity: str) -> NoReturn:
        raise OSError(errno.EMFILE, "Too many open files")

    scheduler = callees.scheduler("s1")
    running_call, _ = begin(router, callees, scheduler)
    monkeypatch.setattr(zmtp, "Dealer", raise_no_descriptors)
    callees.supervisor.send(SchedulerLost(callees.endpoint("s1"), callees.endpoint("s2")))
    with pytest.raises(Unavailable, match="cannot connect to a scheduler: Too many open"):
        running_call.result(10)
    running_call = callees.run(call, router, request())
    callees.answer_find("s2")
    with pytest.raises(Unavailable, match="cannot connect"):
        running_call.result(10)
    assert not router.schedulers


def test_calls_too_late_for_a_retired_version(router: CallRouter, callees: CalledModels) -> None:
    """The old scheduler rejects the calls or exits; the new version serves them."""
    first, second, third = (callees.scheduler(name) for name in ("s1", "s2", "s3"))
    running_call, submit = begin(router, callees, first)
    first.send(m.Failed(submit.id, "UNAVAILABLE", "Server is stopping", 0, False))
    callees.answer_find("s2")
    second.next(m.Submit)
    callees.supervisor.send(SchedulerLost(callees.endpoint("s2"), ""))
    callees.answer_find("s3")
    third.send(doubled_response(third.next(m.Submit)))
    assert values(running_call.result(10)) == [2.0, 4.0]


def test_a_call_fails_if_none_serves_its_model(router: CallRouter, callees: CalledModels) -> None:
    scheduler = callees.scheduler("s1")
    running_call, _ = begin(router, callees, scheduler)
    callees.supervisor.send(SchedulerLost(callees.endpoint("s1"), ""))
    find_question = callees.supervisor.next(FindModel)
    callees.supervisor.send(Refused(find_question.id, "NOT_FOUND", "it is not loaded"))
    with pytest.raises(Internal, match="Model 'other' is not ready"):
        running_call.result(10)


def test_an_unavailable_model_is_looked_up_again(router: CallRouter, callees: CalledModels) -> None:
    scheduler = callees.scheduler("s1")
    running_call, submit = begin(router, callees, scheduler)
    scheduler.send(m.Failed(submit.id, "UNAVAILABLE", "too many", 1, False, is_refused=True))
    callees.answer_find("s1")
    with pytest.raises(Unavailable, match="Model other - Error when running inference: too many"):
        running_call.result(10)
    assert scheduler.is_silent()


def test_news_of_a_withdrawn_model(router: CallRouter, callees: CalledModels) -> None:
    first_scheduler, second_scheduler = callees.scheduler("s1"), callees.scheduler("s2")
    running_call, submit = begin(router, callees, first_scheduler)
    callees.supervisor.send(ModelWithdrawn("other", "1", 0), ModelWithdrawn("third", "1", 0))
    until("it is heard", lambda: not router._targets)
    # A call in flight is answered by its old scheduler.
    first_scheduler.send(doubled_response(submit))
    running_call.result(10)
    running_call, submit = begin(router, callees, second_scheduler)
    second_scheduler.send(doubled_response(submit))
    running_call.result(10)


def test_callers_are_checked_without_the_lock(router: CallRouter, callees: CalledModels) -> None:
    """The check takes the lock of the instance's link, whose holder may wait for the router's."""
    scheduler = callees.scheduler("s1")
    were_locked: list[bool] = []

    def is_cancelled() -> bool:
        were_locked.append(router._lock.locked())
        return True

    origin = SimpleNamespace(is_cancelled=is_cancelled)
    running_call, submit = begin(router, callees, scheduler, request(origins=[origin]))
    router.on_cancelled()
    assert scheduler.next(m.Cancel) == m.Cancel(submit.id)
    scheduler.send(m.Failed(submit.id, "CANCELLED", "request cancelled", 0, False))
    with pytest.raises(Cancelled):
        running_call.result(10)
    assert were_locked == [False]


def test_a_coroutine_makes_many_calls_at_once(router: CallRouter, callees: CalledModels) -> None:
    scheduler = callees.scheduler("s1")

    async def call_many() -> list[list[float]]:
        replies = [call_soon(router, request([n])) for n in range(20)]
        return [values(reply) for reply in await asyncio.gather(*replies)]

    running_calls = callees.run(asyncio.run, call_many())
    callees.answer_find("s1")
    for submit in reversed([scheduler.next(m.Submit) for _ in range(20)]):
        scheduler.send(doubled_response(submit))
    assert running_calls.result(10) == [[2.0 * n] for n in range(20)]


def test_a_coroutine_not_waiting_cancels(router: CallRouter, callees: CalledModels) -> None:
    scheduler = callees.scheduler("s1")

    async def call_impatiently() -> list[float]:
        reply = call_soon(router, request())
        await asyncio.sleep(0)
        reply.cancel()
        return values(await call_soon(router, request([5])))

    running_call = callees.run(asyncio.run, call_impatiently())
    callees.answer_find("s1")
    first_submit = scheduler.next(m.Submit)
    # The loop detects the cancellation one iteration later, after the second call has begun.
    second_submit = scheduler.next(m.Submit)
    assert scheduler.next(m.Cancel) == m.Cancel(first_submit.id)
    scheduler.send(
        m.Failed(first_submit.id, "CANCELLED", "request cancelled", 0, False),
        doubled_response(second_submit),
    )
    assert running_call.result(10) == [10.0]


def test_coroutines_learn_of_losses_and_errors(router: CallRouter, callees: CalledModels) -> None:
    first_scheduler, second = callees.scheduler("s1"), callees.scheduler("s2")

    async def call_both() -> tuple[list[float], str]:
        first_call, second_call = call_soon(router, request()), call_soon(router, request())
        reply = await first_call
        with pytest.raises(InvalidArgument) as caught:
            await second_call
        return values(reply), str(caught.value)

    running_calls = callees.run(asyncio.run, call_both())
    callees.answer_find("s1")
    first_scheduler.next(m.Submit)
    first_scheduler.next(m.Submit)
    callees.supervisor.send(SchedulerLost(callees.endpoint("s1"), callees.endpoint("s2")))
    second.send(doubled_response(second.next(m.Submit)))
    second.send(m.Failed(second.next(m.Submit).id, "INVALID_ARG", "no", 0, False))
    assert running_calls.result(10) == ([2.0, 4.0], "no")


def test_threads_take_answers_for_each_other(router: CallRouter, callees: CalledModels) -> None:
    scheduler = callees.scheduler("s1")
    running_calls = [callees.run(call, router, request([n])) for n in range(6)]
    query_count = 0
    submits: list[m.Submit] = []

    def all_are_submitted() -> bool:
        nonlocal query_count
        # Each thread that begins before the first lookup is answered looks up the endpoint itself.
        if not callees.supervisor.is_silent():
            callees.answer_find("s1")
            query_count += 1
        if not scheduler.is_silent():
            submits.append(scheduler.next(m.Submit))
        return len(submits) == 6

    until("all are submitted", all_are_submitted)
    assert query_count <= 6
    for submit in submits:
        scheduler.send(doubled_response(submit))
    assert [values(future.result()) for future in running_calls] == [[2.0 * n] for n in range(6)]


def test_a_thread_and_a_coroutine_wait_for_the_same_scheduler(
    router: CallRouter, callees: CalledModels
) -> None:
    scheduler = callees.scheduler("s1")
    running_call, first_submit = begin(router, callees, scheduler, request([1]))

    async def call_once() -> list[float]:
        return values(await call_soon(router, request([2])))

    coroutine_result = callees.run(asyncio.run, call_once())
    scheduler.send(doubled_response(scheduler.next(m.Submit)), doubled_response(first_submit))
    assert coroutine_result.result() == [4.0]
    assert values(running_call.result(10)) == [2.0]


def test_memory_of_an_exited_process_is_unmapped(router: CallRouter, callees: CalledModels) -> None:
    scheduler, exited_arena = callees.scheduler("s1"), Arena(MIB)
    memory_range = exited_arena.allocate(8)
    count_before = descriptor_count(exited_arena.memory.fd)

    running_call, submit = begin(router, callees, scheduler)
    answer = TensorRef("Y", "FP32", (1, 2), memory_range)
    scheduler.send(finished(submit, answer))
    running_call.result(10)
    scheduler.next(m.Release)
    assert descriptor_count(exited_arena.memory.fd) > count_before

    running_call = callees.run(call, router, request())
    submit = scheduler.next(m.Submit)
    callees.supervisor.send(ProcessExited(exited_arena.memory.pid, ""))
    until("it is heard", lambda: not router.mappings._mappings_by_id)
    scheduler.send(doubled_response(submit))
    running_call.result(10)
    assert descriptor_count(exited_arena.memory.fd) == count_before
    exited_arena.close()
