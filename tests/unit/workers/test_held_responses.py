"""Responses that are sent together: which are delayed, for how long, and that none is lost."""

import threading
import time
from itertools import chain
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.ipc.credit import FIRST_CREDIT
from shmserve.workers import links
from shmserve.workers.backends import Output, OutputStream, Response
from shmserve.workers.links import HOLD_NS, InstanceLink, Timer
from tests.rigs.stream_rig import DECOUPLED_CONFIG, Streams
from tests.rigs.worker_rig import FunctionBackend, Rig
from tests.support.waiting import until


class Clock:
    """A fake of `time` and of a link's timer."""

    def __init__(self, link: InstanceLink, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = 10 * HOLD_NS
        self.due_ns: int | None = None
        self._flush = link._timer._on_expiry
        link._timer = cast("Timer", self)
        stands_in = SimpleNamespace(monotonic_ns=lambda: self.now_ns, monotonic=time.monotonic)
        monkeypatch.setattr(links, "time", stands_in)

    def start(self) -> None:
        self.due_ns = self.now_ns + links._MAX_HOLD_NS

    def close(self) -> None:
        pass

    def advance(self, ns: int) -> None:
        """Advance the time; the timer expires if it is due."""
        self.now_ns += ns
        if self.due_ns is not None and self.due_ns <= self.now_ns:
            self.due_ns = None
            self._flush()


class Wire:
    """A fake dealer that records the sent frames as lists of messages."""

    connected = True

    def __init__(self) -> None:
        self.queued: list[Any] = []
        self.frames: list[list[Any]] = []

    def post(self, message: Any) -> None:
        self.queued.append(message)

    def flush(self) -> bool:
        if self.queued:
            self.frames.append(self.queued)
            self.queued = []
        return self.connected

    def send(self, message: Any) -> bool:
        self.post(message)
        return self.flush()


def make_link(monkeypatch: pytest.MonkeyPatch) -> tuple[InstanceLink, Wire, Clock]:
    link, wire = InstanceLink(cast("Any", None), 0, 1, lambda message: None), Wire()
    link._dealer = cast("Any", wire)
    return link, wire, Clock(link, monkeypatch)


@given(st.lists(st.tuples(st.integers(0, 2 * HOLD_NS), st.booleans()), max_size=40))
def test_held_responses_are_sent_in_order_and_in_time(steps: list[tuple[int, bool]]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        link, wire, clock = make_link(monkeypatch)
        posted_ns: list[int] = []
        for number, (pause_ns, at_once) in enumerate(steps):
            clock.advance(pause_ns)
            assert all(
                clock.now_ns - posted_ns[queued_message] < links._MAX_HOLD_NS
                for queued_message in wire.queued
            )
            frames, flushed_ns = len(wire.frames), link._last_flush_ns
            link.post(number)
            posted_ns.append(clock.now_ns)
            assert link.flush() if at_once else link.flush_soon()
            if at_once or clock.now_ns - flushed_ns >= HOLD_NS:
                assert not wire.queued
            assert len(wire.frames) - frames <= 1
        clock.advance(links._MAX_HOLD_NS)
        assert list(chain(*wire.frames)) == list(range(len(steps)))


def test_the_next_message_also_sends_the_delayed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    link, wire, clock = make_link(monkeypatch)
    for number in range(3):
        link.post(number)
        link.flush_soon()
    assert wire.frames == [[0]]
    clock.advance(1)
    link.send("a batch")
    assert wire.frames == [[0], [1, 2, "a batch"]]


def test_a_lost_scheduler_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    link, wire, _ = make_link(monkeypatch)
    link.post(0)
    assert link.flush_soon()
    wire.connected = False
    link.post(1)
    assert not link.flush_soon()


def test_a_timer_is_due_after_its_last_start_and_never_once_closed() -> None:
    was_called = threading.Event()
    threads = threading.active_count()
    timer = Timer(1_000_000, was_called.set)
    assert threading.active_count() == threads
    timer.start()
    timer.start()
    assert was_called.wait(10)
    was_called.clear()
    timer.close()
    until("its thread has ended", lambda: threading.active_count() == threads)
    assert not was_called.is_set()


class Sender(Streams):
    """A decoupled model whose responses the test sends."""

    streams: list[OutputStream]

    def send(self, *values: float, final: bool = False, stream: int = 0) -> None:
        output = Output("Y", "FP32", np.array(values, np.float32))
        self.streams[stream].send(Response([output]) if values else None, final)

    @property
    def new_messages(self) -> list[Any]:
        """Return the messages sent since the last call, by request."""
        router = self.rig.scheduler
        messages = [message for _, message in router.receive()] if router.wait(0) else []
        return [(message.key, *self._show(message, message.key)) for message in messages]


@pytest.fixture
def model(worker: Rig) -> Sender:
    class KeepingBackend(FunctionBackend):
        def execute_decoupled(self, streams: list[OutputStream]) -> None:
            sender.streams = streams

    worker.serve(KeepingBackend(worker.context, None), DECOUPLED_CONFIG)
    sender = Sender(worker)
    return sender


@pytest.fixture
def clock(model: Sender, monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(model.rig.instance.link, monkeypatch)


def test_the_first_response_and_the_end_leave_at_once(model: Sender, clock: Clock) -> None:
    model.begin(0, 0)
    model.send(1)
    assert model.new_messages == [(1, [1])]
    model.send(2)
    model.send(3)
    assert model.new_messages == []
    # The first response of another request is sent at once, together with the held response.
    model.send(7, stream=1)
    assert model.new_messages == [(1, [2]), (1, [3]), (2, [7])]
    model.send(4)
    model.send(final=True)
    assert model.new_messages == [(1, [4]), (1, "end")]
    model.send(8, stream=1)
    assert model.new_messages == []
    clock.advance(HOLD_NS)
    model.send(9, stream=1)
    assert model.new_messages == [(2, [8]), (2, [9])]
    model.send(10, stream=1)
    clock.advance(2 * HOLD_NS)  # the model computes and sends no response in the meantime
    assert model.new_messages == [(2, [10])]


def test_rare_responses_are_sent_at_once(model: Sender, clock: Clock) -> None:
    model.begin(0)
    for number in range(5):
        clock.advance(HOLD_NS)
        model.send(number)
        assert model.new_messages == [(1, [number])]
    assert clock.due_ns is None


def test_responses_with_arena_memory_are_sent_immediately(model: Sender, clock: Clock) -> None:
    """The delivery of such a response decides whether its memory is free again."""
    model.begin(0)
    model.send(1)
    assert model.new_messages == [(1, [1])]
    large_array = np.arange(32 * 1024, dtype=np.float32)
    model.send(*large_array)
    assert model.new_messages == [(1, large_array.tolist())]
    model.send(2)
    assert model.new_messages == []


def test_a_returning_batch_also_sends_held_responses(model: Sender, clock: Clock) -> None:
    model.begin(0)
    model.send(1)
    model.send(2)
    model.rig.instance.send_reply(model.rig.finished)
    router = model.rig.scheduler
    assert router.wait(10)
    kinds = [type(message).__name__ for _, message in router.receive()]
    assert kinds == ["ExecutionResponded", "ExecutionResponded", "BatchFinished"]


def test_nothing_waits_while_credit_is_awaited(model: Sender, clock: Clock) -> None:
    model.begin(0)
    for number in range(FIRST_CREDIT):
        model.send(number)
    assert model.new_messages == [(1, [0])]
    blocked_sender = threading.Thread(target=model.send, args=(99,))
    blocked_sender.start()
    assert model.responses(1, FIRST_CREDIT - 1) == [[n] for n in range(1, FIRST_CREDIT)]
    model.credit(1, 1)
    until("it goes on", lambda: not blocked_sender.is_alive())
