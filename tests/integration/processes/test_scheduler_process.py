"""The scheduler as a process; the test acts as its client, its worker and its supervisor."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import psutil
import pytest

from shmserve.ipc import endpoints
from shmserve.ipc.endpoints import KEY_SIZE
from shmserve.ipc.messages import inference as m
from shmserve.ipc.messages.publications import Acknowledged, HealthChanged, ProcessExited
from shmserve.ipc.messages.supervision import (
    Drain,
    Drained,
    HostStart,
    InstanceExpected,
    InstanceServed,
    OpenScheduler,
    Ping,
    SchedulerClosed,
    SchedulerReady,
    SchedulerStart,
    SchedulingLimits,
    Started,
    StatisticsSnapshot,
    Stop,
    encode_start,
)
from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.tensors.schemas import Inference, Inferred, pack_inference, pack_inferred
from shmserve.ipc.transport import frames
from shmserve.ipc.transport.router import Router
from shmserve.ipc.transport.zmtp import Dealer
from tests.rigs.arrivals import encode_zmtp, receive_arrived, send_raw
from tests.support.texts import EXPIRED_TEXT
from tests.support.waiting import until

PATIENCE_MS = 10_000
HOST_NUMBER = 3
BOOT_MESSAGES = (
    "import ast, sys; from shmserve.scheduler.hosting.host import run; "
    "run(ast.literal_eval(sys.argv[1]))"
)
MODEL = {
    "name": "m",
    "max_batch_size": 8,
    "dynamic_batching": {"max_queue_delay_microseconds": 100},
    "input": [],
    "output": [],
}

WORK = pack_inference(Inference(()))
NO_OUTPUTS = pack_inferred(Inferred(()))

FLOOD_PROGRAM = """
import os, sys
from shmserve.ipc.messages import inference as m
from shmserve.ipc.transport.zmtp import Dealer

link = Dealer(sys.argv[1], f"{os.getpid()}.flood")
for number in range(20_000):
    link.post(m.Submit(number, bytes([0x93, 0x90, 0x90, 0x80]), [], 0, 0, 0, 0))
    if number % 100 == 0:
        link.flush()
link.flush()
sys.stdin.read()
"""


class Stage:
    """A scheduler process with one instance of a model; the test acts as all of its peers."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.links: list[Dealer] = []
        self.control = Router(endpoints.control(run_dir))
        endpoints.local_client_folder(run_dir).mkdir()
        start = SchedulerStart(
            kind="scheduler",
            number=HOST_NUMBER,
            version="1",
            config=ModelSpec.of(MODEL),
            run_dir=run_dir,
            capability_key=bytes(KEY_SIZE),
            limits=SchedulingLimits(max_queue_size=4),
        )
        # Otherwise numpy's threads would spin for a moment after they start.
        env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        host = repr(encode_start(HostStart("scheduler m", run_dir)))
        self.process = subprocess.Popen([sys.executable, "-c", BOOT_MESSAGES, host], env=env)
        self.numbers = itertools.count(1)
        self.host, ready = self.next(self.control)
        assert ready == Started()
        self.control.post(self.host, OpenScheduler(encode_start(start)))
        self.control.flush()
        self.address, ready = self.next(self.control)
        assert ready == SchedulerReady(self.process.pid)
        self.client = self.join(endpoints.scheduler(run_dir, HOST_NUMBER), f"{os.getpid()}.ab")
        self.worker = self.join(endpoints.instances(run_dir, HOST_NUMBER), f"0.{os.getpid()}")
        self.send_message(InstanceExpected(0, os.getpid()))
        self.worker.send(m.InstanceReady(0, os.getpid()))

    def join(self, endpoint: str, identity: str) -> Dealer:
        link = Dealer(endpoint, identity)
        self.links.append(link)
        return link

    def send_message(self, message: Any) -> None:
        self.control.post(self.address, message)
        self.control.flush()

    def all(self, link: Dealer | Router) -> list[Any]:
        """Wait for messages to a peer; return all of them."""
        messages = receive_arrived(link, PATIENCE_MS / 1000)
        assert messages, "the scheduler says nothing"
        return messages

    def next(self, link: Dealer | Router) -> Any:
        (message,) = self.all(link)
        return message

    def end(self) -> int:
        """Stop the scheduler and then its process; return the exit status."""
        self.send_message(Stop())
        while SchedulerClosed(HOST_NUMBER, "") not in [
            message for _, message in self.all(self.control)
        ]:
            pass
        self.control.post(self.host, Stop())
        self.control.flush()
        return self.process.wait(5)

    def until_drained(self) -> None:
        """Wait for `Drained`, after the scheduler's counts and the report of an execution."""
        records: list[Any] = []
        while Drained() not in records:
            records += [message for _, message in self.all(self.control)]
        earlier_types = [type(message) for message in records[:-1]]
        assert earlier_types == [InstanceServed] + [StatisticsSnapshot] * 2

    def submit(self, timeout_ns: int = 0) -> int:
        number, now_ns = next(self.numbers), time.monotonic_ns()
        deadline = now_ns + timeout_ns if timeout_ns else 0
        self.client.send(m.Submit(number, *WORK, now_ns, deadline, 0, 0))
        return number

    def finish(self, batch: m.Execute) -> None:
        now_ns = time.monotonic_ns()
        replies = [m.Reply(key, "", "", *NO_OUTPUTS) for key in (r.key for r in batch.requests)]
        self.worker.send(m.BatchFinished(batch.batch, now_ns, now_ns, now_ns, now_ns, replies))

    def statistics(self) -> dict[str, Any]:
        self.client.send(m.ReportStatistics(0))
        statistics: dict[str, Any] = self.next(self.client).statistics
        return statistics

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.control.close()
        for link in self.links:
            link.close()


@pytest.fixture
def stage() -> Iterator[Stage]:
    with (
        tempfile.TemporaryDirectory(prefix="shmserve-") as run_dir,
        contextlib.closing(Stage(Path(run_dir))) as new_stage,
    ):
        yield new_stage


def test_the_host_ignores_messages_that_are_not_for_hosts(stage: Stage) -> None:
    stage.control.post(stage.host, Drain())
    stage.control.post(stage.host, Ping(7))
    stage.control.flush()
    assert stage.next(stage.control) == (stage.host, Acknowledged(7))


def test_a_scheduler_has_a_title_and_ends_only_on_request(stage: Stage) -> None:
    assert "shmserve: scheduler m" in " ".join(psutil.Process(stage.process.pid).cmdline())
    stage.process.send_signal(signal.SIGTERM)
    stage.process.send_signal(signal.SIGINT)
    stage.submit()
    stage.finish(stage.next(stage.worker))
    assert isinstance(stage.next(stage.client), m.Finished)
    stage.send_message(Drain())
    stage.until_drained()
    assert stage.end() == 0


def test_a_drain_accepts_earlier_requests(stage: Stage) -> None:
    """A busy scheduler may not have read a gateway's last request when the drain begins."""
    stage.submit()
    stage.next(stage.worker)
    stage.process.send_signal(signal.SIGSTOP)
    late_requests = [stage.submit() for _ in range(3)]
    stage.send_message(Drain())
    stage.process.send_signal(signal.SIGCONT)
    until("they are taken", lambda: stage.statistics()["shmserve"]["pending"] == len(late_requests))
    stage.submit()
    refused_message = stage.next(stage.client)
    assert refused_message.code == "UNAVAILABLE"
    assert "Server is stopping" in refused_message.message


def test_a_deadline_holds_while_the_worker_is_silent(stage: Stage) -> None:
    start_s = time.monotonic()
    number = stage.submit(timeout_ns=1_000_000_000)  # long enough for the request to be dispatched
    batch = stage.next(stage.worker)
    answer = stage.next(stage.client)
    duration_s = time.monotonic() - start_s
    assert answer == m.Failed(number, "UNAVAILABLE", EXPIRED_TEXT, 0, True)
    assert 1 <= duration_s < 3
    assert stage.next(stage.worker) == m.CancelExecution(batch.requests[0].key)
    stage.finish(batch)
    assert stage.next(stage.client) == m.Settled(number)


def test_the_queue_delay_is_a_matter_of_microseconds(stage: Stage) -> None:
    """A delay below a millisecond proves that delays are not rounded up."""
    for _ in range(300):
        stage.submit()
        batch = stage.next(stage.worker)
        # An impossible start time is replaced by the time of dispatch. The counted queue time is
        # then that of the scheduler alone.
        replies = [m.Reply(batch.requests[0].key, "", "", *NO_OUTPUTS)]
        stage.worker.send(m.BatchFinished(batch.batch, 0, 0, 0, 0, replies))
        stage.next(stage.client)
    histogram = stage.statistics()["shmserve"]["queue_seconds"]
    up_to = dict(zip(histogram["buckets"], itertools.accumulate(histogram["counts"]), strict=False))
    assert up_to[0.0001] <= 3, "batches left before their delay was over"
    assert up_to[0.001] >= 1, f"a delay of 100 us takes milliseconds: {up_to}"


def test_an_idle_scheduler_uses_no_processor(stage: Stage) -> None:
    stage.submit()
    stage.finish(stage.next(stage.worker))
    stage.next(stage.client)
    process = psutil.Process(stage.process.pid)
    times_before = process.cpu_times()
    switches = process.num_ctx_switches().voluntary
    time.sleep(1.0)
    times_after = process.cpu_times()
    assert times_after.user + times_after.system - times_before.user - times_before.system <= 0.01
    assert process.num_ctx_switches().voluntary - switches <= 2


def _frames_of(tag: str, *values: Any) -> list[bytes]:
    return [msgpack.packb([frames.VERSION, [tag, *values]])]


def test_garbage_on_every_socket_is_dropped_and_counted(stage: Stage) -> None:
    stranger_sockets = [
        stage.join(endpoints.scheduler(stage.run_dir, HOST_NUMBER), f"{os.getpid()}.x"),
        stage.join(endpoints.instances(stage.run_dir, HOST_NUMBER), f"1.{os.getpid()}"),
    ]
    garbage = [
        b"",
        os.urandom(100),
        frames.pack([m.Finished(1, *NO_OUTPUTS)]),
        frames.pack([HealthChanged(True, True, True)]),
        *_frames_of("BatchFinished", 1, 0, 0, 0, 0, [[], [1], ["a", 2]], 0, 0, True),
        frames.pack([m.Execute(1, [])]),
        b"\x92\x01\x91\xa5Drain",
        bytes((0x92, frames.VERSION)) + b"\x91\xa5Nope.",
        b"\xdd\xff\xff\xff\xff",
    ]
    for frame in garbage:
        send_raw(stage.control, stage.address, encode_zmtp(frame))
        for stranger_socket in stranger_sockets:
            send_raw(stranger_socket, b"", encode_zmtp(frame))
            send_raw(stranger_socket, b"", b"\1\4some\0\4more")
    number = stage.submit()
    stage.finish(stage.next(stage.worker))
    assert stage.next(stage.client) == m.Finished(number, *NO_OUTPUTS)
    assert stage.statistics()["shmserve"]["malformed"] > len(garbage)
    assert stage.process.poll() is None


def test_a_deadline_may_be_any_number(stage: Stage) -> None:
    for deadline in (-1, 2**63 - 1, 2**64 - 1):
        stage.client.send(m.Submit(7, *WORK, 0, deadline, 0, 0))
        stage.finish(stage.next(stage.worker))
        assert stage.next(stage.client) == m.Finished(7, *NO_OUTPUTS)


def test_a_flood_on_one_socket_does_not_block_other_sockets(stage: Stage) -> None:
    endpoint = endpoints.scheduler(stage.run_dir, HOST_NUMBER)
    with subprocess.Popen(
        [sys.executable, "-c", FLOOD_PROGRAM, endpoint], stdin=subprocess.PIPE
    ) as flood:
        batch = stage.next(stage.worker)
        stage.send_message(ProcessExited(flood.pid, ""))
        assert 1 <= len(batch.requests) <= 8
        assert stage.end() == 0
