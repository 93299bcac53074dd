"""Decoupled models of the Python backend: any number of responses, from any thread at any time."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from textwrap import dedent
from typing import Any

import numpy as np
import pytest

from shmserve.ipc.credit import FIRST_CREDIT, MAX_UNREAD_BYTES
from shmserve.ipc.messages import inference as m
from shmserve.ipc.tensors.descriptors import Range
from shmserve.workers import links
from shmserve.workers.backends.python import PythonBackend, log_thread_exception
from shmserve.workers.batch import response_stream
from shmserve.workers.links import wait_readable
from shmserve.workers.user_code import EventLoopThread
from tests.rigs.stream_rig import DECOUPLED_CONFIG, Streams
from tests.rigs.worker_rig import Region, Rig
from tests.support.messages import inferred_of
from tests.support.waiting import until

FAILED_REQUEST = "Failed to process the request(s) for model 'm_0_0', message: "
CLOSED_SENDER = "Unable to send response. Response sender has been closed."
MODULE_HEAD = """
import asyncio, gc, threading
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

def given(request):
    return pb_utils.get_input_tensor_by_name(request, "X").as_numpy()

def response(*values, error=None):
    error = pb_utils.TritonError(error) if error else None
    return pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array(values, "f4").ravel())], error)

def error_of(call):
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"

class TritonPythonModel:
    records = []
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=(request,)).start()
"""


def sends(first: int, last: int, method: str = "") -> str:
    """Return a model whose thread, or `execute`, sends the numbers from `first` to `last`."""
    return (
        method
        + f"""
def answer(self, request):
    sender = self.sender = request.get_response_sender()
    for n in range({first}, {last + 1}):
        sender.send(response(n))
    sender.send(flags=FINAL)
"""
    )


IN_EXECUTE = "def execute(self, requests): self.answer(requests[0])"


class Model(Streams):
    """A decoupled model whose class has the given body."""

    def __init__(self, worker_rig: Rig) -> None:
        super().__init__(worker_rig)
        self.backend = PythonBackend(worker_rig.context)

    def serve(self, body: str) -> Model:
        path = self.rig.context.version_dir / "model.py"
        path.write_text(MODULE_HEAD + "".join(f"    {row}\n" for row in dedent(body).splitlines()))
        self.rig.serve(self.backend, {**DECOUPLED_CONFIG, "backend": "python"})
        return self

    @property
    def records(self) -> list[Any]:
        records: list[Any] = self.backend._model.records
        return records


@pytest.fixture
def model(worker: Rig) -> Iterator[Model]:
    model = Model(worker)
    yield model
    model.backend.unload()


@pytest.fixture
def start_pump(model: Model) -> Iterator[Callable[[], None]]:
    """Yield a function that starts to read the socket, as the idle loop does."""
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(model.pumping())


# --- sent responses


@pytest.mark.parametrize(
    ("send_statements", "expected"),
    [
        ("send(flags=FINAL)", ["end"]),
        ("send(response(1), FINAL)", [[1], "end"]),
        ("send(response(1)); send(flags=FINAL)", [[1], "end"]),
        ("send(response(1)); send(response(2, 3)); send(response(4), flags=FINAL)",
         [[1], [2, 3], [4], "end"]),
        ("send(response(1)); send(response(error='mid')); send(response(2)); send(flags=FINAL)",
         [[1], "mid", [2], "end"]),
        ("send(response(1)); send(response(5, error='last'), flags=FINAL)", [[1], "last", "end"]),
    ],
)  # fmt: skip
def test_responses_in_order(model: Model, send_statements: str, expected: list[Any]) -> None:
    model.serve(f"""
        def execute(self, requests):
            send = requests[0].get_response_sender().send
            {send_statements}
        """)
    model.begin(0)
    assert model.responses(1) == expected
    assert model.rig.finished.replies == [] and model.rig.finished.executed


def test_a_thread_responds_after_execute_has_returned(model: Model) -> None:
    """The thread can still read the inputs, which belong to the model."""
    model.serve("""
        go = threading.Event()
        def answer(self, request):
            self.go.wait(10)
            array = given(request)
            array += 1
            sender = request.get_response_sender()
            assert sender is request.get_response_sender()
            for n in range(3):
                sender.send(response(array[0], n))
            sender.send(flags=FINAL)
        """)
    model.begin(1, 5)
    assert model.rig.finished.replies == []
    model.backend._model.go.set()
    assert model.responses(1) == [[2, 0], [2, 1], [2, 2], "end"]
    assert model.responses(2) == [[6, 0], [6, 1], [6, 2], "end"]


def test_inputs_in_memory_of_a_client_are_the_models_own(model: Model, region: Region) -> None:
    memory_range = region.write(0, np.array([3], np.float32))
    model.serve("""
        def execute(self, requests):
            array = given(requests[0])
            array[:] = 7
            requests[0].get_response_sender().send(response(*array), FINAL)
        """)
    model.begin(3, memory_range=memory_range)
    assert model.responses(1) == [[7], "end"]
    assert region.read(0, 4) == np.array([3], np.float32).tobytes()


def test_large_responses_use_the_arena_and_are_released(model: Model) -> None:
    model.serve("""
        def execute(self, requests):
            sender = requests[0].get_response_sender()
            for n in range(3):
                sender.send(response(*[n] * 10_000))
            sender.send(flags=FINAL)
        """)
    model.begin(0)
    assert [response[0] for response in model.responses(1)[:-1]] == [0, 1, 2]
    arena = model.rig.context.arena
    assert arena.used_bytes >= 3 * 40_000
    offsets = [
        output.data.offset
        for message in model.messages
        if isinstance(message, m.ExecutionResponded) and message.schema
        for output in inferred_of(message).outputs
        if isinstance(output.data, Range)
    ]
    model.rig.release(offsets)
    model.rig.instance.link.pump()
    assert arena.used_bytes == 0


def test_a_response_that_cannot_be_written_is_an_error_and_no_end(
    model: Model, region: Region, start_pump: Callable[[], None]
) -> None:
    model.serve("""
        def answer(self, request):
            sender = request.get_response_sender()
            sender.send(response(1, 2))
            sender.send(response(3))
            sender.send(flags=FINAL)
        """)
    model.begin(0, output=region.memory_range(0, 4))
    start_pump()
    (text,) = model.responses(1, 1)
    assert "shared memory size specified with the request for output 'Y' (4 bytes)" in text
    model.credit(1, 1)
    assert model.responses(1) == [text, "in its place", "end"]
    assert region.read(0, 4) == np.float32(3).tobytes()


# --- rejected calls


def test_errors_of_refused_sends(model: Model) -> None:
    model.serve("""
        def execute(self, requests):
            sender = requests[0].get_response_sender()
            send = sender.send
            self.records += [
                error_of(lambda: send()),
                error_of(lambda: send(None, 0)),
                error_of(lambda: send(flags=2)),
                error_of(lambda: send("x")),
                error_of(lambda: send(response(1), "x")),
                error_of(lambda: send(response(1), -1)),
                error_of(lambda: send(response(1), None)),
                error_of(lambda: send(response(1), FINAL)),
                error_of(lambda: send(response(1))),
                error_of(lambda: send(flags=FINAL)),
            ]
        """)
    model.begin(0)
    assert model.responses(1) == [[1], "end"]
    missing = "Inference Response object must be provided when the response flags is set to zero."
    *refusals, sent, retried, ended = model.records
    assert refusals[:3] == [
        f"TritonModelException: {missing}",
        f"TritonModelException: {missing}",
        "TritonModelException: Unable to send response. Unsupported flag provided.",
    ]
    assert all(
        text.startswith("TypeError: send(): incompatible function arguments. The following")
        for text in refusals[3:]
    )
    assert (sent, retried, ended) == (None, *[f"TritonModelException: {CLOSED_SENDER}"] * 2)


# --- streams without a final flag


@pytest.mark.parametrize("returned_value", ["[]", "0", "'text'", "requests"])
def test_execute_must_return_none(model: Model, returned_value: str) -> None:
    model.serve(f"""
        def execute(self, requests):
            self.kept = [request.get_response_sender() for request in requests]
            self.kept[0].send(response(1), FINAL)
            self.kept[1].send(response(2))
            return {returned_value}
        """)
    model.begin(0, 0, 0)
    text = (
        f"{FAILED_REQUEST}Python model 'm_0_0' is using the decoupled mode and the execute "
        "function must return None."
    )
    assert model.replies == [text] and model.responses(1) == [[1], "end"]
    assert model.responses(2) == [[2], text, "end"]
    assert model.backend._model.kept[2]._channel._stream.is_closed


def test_an_exception_of_execute_fails_the_request(model: Model) -> None:
    """Ended requests are not affected, and none is retried."""
    model.serve("""
        calls = []
        def execute(self, requests):
            self.calls.append(len(requests))
            self.kept = [request.get_response_sender() for request in requests]
            self.kept[0].send(response(1), FINAL)
            self.kept[1].send(response(2))
            raise ValueError("early")
        """)
    model.begin(0, 0, 0)
    assert model.replies == [f"{FAILED_REQUEST}ValueError: early"]
    assert model.responses(1) == [[1], "end"]
    assert model.responses(2) == [[2], f"{FAILED_REQUEST}ValueError: early", "end"]
    assert model.backend._model.calls == [3]
    with pytest.raises(Exception, match="has been closed"):
        model.backend._model.kept[2].send(flags=1)


LET_GO = "the model released the request's response sender without a final response"


def test_a_collected_sender_ends_its_request(model: Model) -> None:
    """A request whose sender was garbage-collected fails, with or without earlier responses."""
    model.serve("""
        def execute(self, requests):
            requests[1].get_response_sender().send(response(5))
        """)
    model.begin(0, 0)
    model.rig.instance._writer.end_abandoned()
    assert model.responses(1) == [LET_GO, "end"]
    assert model.responses(2) == [[5], LET_GO, "end"]


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_request_ends_once(model: Model, is_kept: bool) -> None:
    """A cancelled request ends when it is collected, a kept request when the model ends it."""
    model.serve("""
        def execute(self, requests):
            self.kept = requests
        """)
    model.begin(0)
    kept_requests = model.backend._model.kept
    if not is_kept:
        model.cancel(1)
        kept_requests.clear()
    model.rig.instance._writer.end_abandoned()
    if is_kept:
        kept_requests[0].get_response_sender().send(flags=1)
    assert model.responses(1) == ["end"]


@pytest.mark.parametrize("keep_statement", ["", "why = "])
def test_a_thread_that_raises(
    model: Model,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    keep_statement: str,
) -> None:
    """Its requests fail at once, even if one of its variables holds a sender."""
    monkeypatch.setattr(threading, "excepthook", log_thread_exception)
    model.serve(f"""
        def execute(self, requests):
            for request in requests:
                thread = threading.Thread(target=self.respond, args=(request,), name="mine")
                thread.start()
                thread.join()
            self.thread = thread

        def respond(self, request):
            sender = request.get_response_sender()
            sender.send(response(1))
            try:
                raise ValueError("mine")
            except ValueError as error:
                {keep_statement}error
                raise
        """)
    gc.disable()
    try:
        model.begin(0, 0)
        model.rig.instance._writer.end_abandoned()
    finally:
        gc.enable()
    for key in (1, 2):
        assert model.responses(key) == [[1], f"{FAILED_REQUEST}ValueError: mine", "end"]
    assert "thread 'mine' of the model failed" in caplog.text


def test_rescheduling_is_refused_without_an_end(model: Model) -> None:
    model.serve("""
        def execute(self, requests):
            for request in requests:
                request.get_response_sender().send(response(1))
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            requests[1].get_response_sender().send(flags=FINAL)
        """)
    model.begin(0, 0)
    (value, text, end_record) = model.responses(1)
    assert (value, end_record) == ([1], "end")
    assert text.startswith("Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE")
    assert model.responses(2) == [[1], "end"]


# --- coroutines


def test_coroutines_run_on_after_their_batch(model: Model) -> None:
    """Two batches share one event loop, in which tasks of earlier `execute` calls continue."""
    model.serve("""
        tasks = set()
        async def execute(self, requests):
            for request in requests:
                self.tasks.add(asyncio.create_task(self.answer(request)))
        async def answer(self, request):
            sender = request.get_response_sender()
            for n in range(3):
                await asyncio.sleep(0.01)
                sender.send(response(*given(request), n))
            sender.send(flags=FINAL)
        """)
    model.begin(1, 2)
    assert model.responses(1) == [[1, 0], [1, 1], [1, 2], "end"]
    assert model.responses(2) == [[2, 0], [2, 1], [2, 2], "end"]


def test_a_coroutine_raises(model: Model) -> None:
    model.serve("""
        async def execute(self, requests):
            requests[0].get_response_sender().send(response(1))
            await asyncio.sleep(0)
            raise ValueError("late")
        """)
    model.begin(0, 0)
    assert model.responses(1) == [[1], f"{FAILED_REQUEST}ValueError: late", "end"]
    assert model.responses(2) == [f"{FAILED_REQUEST}ValueError: late", "end"]


# --- cancellation


def test_a_thread_sees_that_its_request_is_cancelled(model: Model) -> None:
    """`is_cancelled` reads the socket itself while the loop is busy."""
    model.serve("""
        def answer(self, request):
            sender = request.get_response_sender()
            self.records.append((request.is_cancelled(), sender.is_cancelled()))
            while not request.is_cancelled():
                pass
            self.records.append(sender.is_cancelled())
            self.records.append(sender.send(response(1)))
            self.records.append(sender.send(flags=FINAL))
        """)
    model.begin(0)
    until("it has begun", lambda: bool(model.records))
    model.cancel(1)
    assert model.responses(1) == ["end"]
    until("it is over", lambda: len(model.records) == 4)
    assert model.records == [(False, False), True, None, None]


def test_a_lost_scheduler_cancels_requests(model: Model) -> None:
    """The successor's keys must not be confused with those of remaining requests."""
    model.serve("""
        def execute(self, requests):
            self.kept = requests[0].get_response_sender()
        """)
    model.begin(0)
    old_request = model.backend._model.kept
    model.rig.scheduler.close()
    assert old_request.is_cancelled()
    model.rig.attach()
    model.begin(0)
    new_request = model.backend._model.kept
    assert not new_request.is_cancelled()
    old_request.send(flags=1)
    new_request.send(flags=1)
    assert model.responses(1) == ["end"]


# --- back-pressure


@pytest.mark.parametrize(
    ("size", "count", "most_unread"),
    [(1, 100, FIRST_CREDIT), (MAX_UNREAD_BYTES // 8, 4, 2)],
    ids=["responses", "bytes"],
)
def test_a_client_that_does_not_read_stops_send(
    model: Model, start_pump: Callable[[], None], size: int, count: int, most_unread: int
) -> None:
    model.serve(f"""
        def answer(self, request):
            sender = request.get_response_sender()
            for n in range({count}):
                self.records.append(n)
                sender.send(response(np.full({size}, n, "f4")))
            sender.send(flags=FINAL)
        """)
    model.begin(0)
    start_pump()
    assert len(model.responses(1, most_unread)) == most_unread
    assert model.rig.sent(0.1) == [] and len(model.records) == most_unread + 1
    for granted_count in range(most_unread + 2, count + 1, 2):
        model.credit(1, 2)
        model.responses(1, granted_count)
    *responses, end_record = model.responses(1)
    assert [values[0] for values in responses] == list(range(count)) and end_record == "end"


def test_send_waits_for_credit_in_execute_itself(model: Model) -> None:
    """The loop's thread reads the socket while it waits for credit within `execute`."""
    model.serve(sends(0, 39, IN_EXECUTE))

    def grant() -> None:
        model.responses(1, FIRST_CREDIT)
        model.credit(1, 8)

    reader = threading.Thread(target=grant)
    reader.start()
    model.begin(0)
    reader.join()
    assert len(model.responses(1)) == 41


def test_responses_to_one_memory_range_are_sent_one_at_a_time(
    model: Model, region: Region, start_pump: Callable[[], None]
) -> None:
    model.serve(sends(1, 3))
    model.begin(0, output=region.memory_range(0, 4))
    start_pump()
    for n in (1, 2):
        assert model.responses(1, n) == ["in its place"] * n
        assert model.rig.sent(0.1) == []
        assert np.frombuffer(region.read(0, 4), "f4")[0] == n
        model.credit(1, 1)
    assert model.responses(1) == ["in its place"] * 3 + ["end"]


def test_a_client_that_never_reads_is_disconnected(
    model: Model, start_pump: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_stream, "MAX_CREDIT_WAIT_S", 0.2)
    model.serve(sends(0, 99, IN_EXECUTE))
    model.begin(0)
    assert model.replies == []
    *_, response, end_record = model.responses(1)
    assert response == "the client has read no response for 0.2 s; no more responses are sent"
    assert end_record == "end"
    assert model.backend._model.sender.is_cancelled()


def test_a_cancelled_request_does_not_wait(model: Model, start_pump: Callable[[], None]) -> None:
    model.serve(sends(0, 99))
    model.begin(0)
    model.responses(1, FIRST_CREDIT)
    model.cancel(1)
    assert model.responses(1)[FIRST_CREDIT:] == ["end"]


@pytest.mark.parametrize("loop_reads", [True, False])
def test_each_waiting_sender_is_notified_of_its_own_credit(model: Model, loop_reads: bool) -> None:
    """One waiting thread reads the socket for all, until it has its credit."""
    count = FIRST_CREDIT + 4
    model.serve(sends(1, count))
    model.begin(*range(8))
    for key in range(1, 9):
        assert len(model.responses(key, FIRST_CREDIT)) == FIRST_CREDIT
    link = model.rig.instance.link
    until("all of them wait", lambda: len(link._waiting_by_eventfd) == 8)
    with contextlib.ExitStack() as stack:
        if loop_reads:
            link.loop_reads = True
            stack.enter_context(model.pumping())
        for key in (3, 1, 8, 2):
            model.credit(key, 4)
            assert len(model.responses(key)) == count + 1
        if loop_reads:
            stack.close()  # the loop is busy and no longer reads messages
            link.loop_stops_reading()
        for key in (7, 4, 6, 5):
            model.credit(key, 4)
            assert len(model.responses(key)) == count + 1


def test_waits_for_enough_credit_do_not_spin(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A response is credited, but the other responses' bytes still exceed the limit."""
    model.serve("""
        def execute(self, requests):
            self.sender = requests[0].get_response_sender()
        """)
    model.begin(0)
    link = model.rig.instance.link
    (open_request,) = link._open_requests.values()
    open_request.window.record_sent(1)
    open_request.window.record_sent(MAX_UNREAD_BYTES)
    timeouts_s: list[float] = []

    def record_timeout(*fds: int, timeout_s: float) -> None:
        timeouts_s.append(timeout_s)
        wait_readable(*fds, timeout_s=min(timeout_s, 0.05))

    monkeypatch.setattr(links, "wait_readable", record_timeout)
    waiter = threading.Thread(target=lambda: link.wait_for_credit(open_request, 30.0))
    waiter.start()
    until("it waits", lambda: bool(link._waiting_by_eventfd))
    model.credit(1, 1)
    until("it was granted", lambda: len(open_request.window._unread) == 1)
    timeouts_s.clear()
    until("it has looked again", lambda: len(timeouts_s) > 2)
    assert waiter.is_alive()
    assert len(timeouts_s) < 100, "each time it sleeps"
    model.credit(1, 1)
    waiter.join(10)
    assert not waiter.is_alive()
    model.backend._model.sender.send(flags=1)
    assert model.responses(1) == ["end"]


def test_two_threads_with_the_first_coroutines_share_a_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are the threads of batches and of readiness checks."""
    loop, is_locked = EventLoopThread(), []
    create_loop = asyncio.new_event_loop

    def check_lock() -> asyncio.AbstractEventLoop:
        is_locked.append(loop._start_lock.locked())
        return create_loop()

    async def running_loop() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    monkeypatch.setattr(asyncio, "new_event_loop", check_lock)
    assert loop.wait(running_loop()) is loop.wait(running_loop())
    assert is_locked == [True]
    loop.close()


def test_a_coroutine_that_begins_while_its_loop_closes_is_cancelled() -> None:
    loop, is_cancelled = EventLoopThread(), threading.Event()

    async def wait_forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            is_cancelled.set()

    async def close() -> None:
        loop.run(wait_forever(), print)
        with contextlib.suppress(RuntimeError):  # a thread cannot wait for its own end
            loop.close()

    loop.run(close(), print)
    assert is_cancelled.wait(10)
