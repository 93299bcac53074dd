"""A real worker process; the test acts as its supervisor and its scheduler."""

import asyncio
import contextlib
import os
import queue
import signal
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import pytest

from shmserve.errors import Internal
from shmserve.ipc.memory.mappings import Mappings
from shmserve.ipc.messages import supervision as m
from shmserve.ipc.messages.inference import (
    BatchFinished,
    CancelExecution,
    Execute,
    InstanceReady,
    ReaderExited,
    ReleaseOutputs,
    Reply,
    Work,
)
from shmserve.ipc.messages.publications import MemoryDropped, ProcessExited
from shmserve.ipc.messages.supervision import WorkerStart, encode_start
from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.tensors.schemas import Inferred, pack_inference
from shmserve.ipc.transport.router import Router
from shmserve.supervisor.models.instance import Instance, find_model_frame, stacks_of
from shmserve.supervisor.processes.children import Child
from tests.rigs.arrivals import encode_zmtp, receive_arrived, send_raw
from tests.rigs.forker import WORKER, Forked, forker
from tests.rigs.worker_rig import Region, inference, model_config, tensor
from tests.support.messages import inferred_of
from tests.support.waiting import until

T = TypeVar("T")
_PATIENCE_MS = 20_000
MODEL = """
import os, sys, time
import torch
from numpy import ndarray
from torch import Tensor
from shmserve.model import FP32

class Model:
    max_batch_size = 8
    def load(self, context):
        self.log = context.directory / "log"
    def predict(self, x: FP32[ndarray, -1]) -> FP32[ndarray, -1]:
        match x[0, 0]:
            case -1: raise ValueError("no")
            case -2: sys.exit(1)
            case -3: os._exit(7)
            case -4: time.sleep(60)
        return x * 2
    def unload(self):
        self.log.write_text("unloaded")
"""


class Worker:
    """The worker process and the test's ends of its links."""

    def __init__(self, folder: Path, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.version_dir = folder / "m" / "1"
        self.version_dir.mkdir(parents=True)
        (self.version_dir / "model.py").write_text(textwrap.dedent(MODEL))
        self.control = Router(f"ipc://{run_dir}/control")
        self.schedulers: dict[str, Router] = {}
        self.log = folder / "stderr"
        self.process: Forked | None = None
        self.batches = 0

    def start(self, **changes: Any) -> None:
        """Start the process like the zygote does."""
        args: dict[str, Any] = {
            "number": 5,
            "index": 0,
            "model_name": "m",
            "version": "1",
            "model_dir": self.version_dir.parent,
            "run_dir": self.run_dir,
            "device": "cpu",
            "kind": "CPU",
            "device_id": 0,
            "instance_name": "m_0_0",
            "backend_config": {},
            "arena_byte_size": 64 << 20,
            "threads": 1,
            **changes,
        }
        with self.log.open("wb") as log:
            self.process = forker(WORKER).fork(encode_start(WorkerStart(**args)), log.fileno(), [])
        self.pid = self.process.pid
        started_message = self.expect(m.WorkerStarted)
        assert started_message.pid == self.pid
        self.stacks_fd = started_message.stacks_fd

    def expect(self, kind: type[T], router: Router | None = None) -> T:
        router = router or self.control
        messages = receive_arrived(router, _PATIENCE_MS / 1000)
        assert messages, f"no {kind.__name__}: {self.log.read_text()}"
        ((self.peer, message),) = messages
        assert isinstance(message, kind), message
        return message

    def send(self, message: Any) -> None:
        self.control.post(b"worker.5.0.%d" % self.pid, message)
        self.control.flush()

    def complete(self, **changes: Any) -> None:
        """Ask for the completed configuration; start the process if it has not been started."""
        if self.process is None:
            self.start()
        self.send(m.CompleteConfig(ModelSpec.of(model_config([], [], backend="native", **changes))))

    def begin_load(self, **changes: Any) -> None:
        self.complete(**changes)
        self.config = self.expect(m.ConfigCompleted).config
        self.send(m.LoadInstance(ModelSpec.of(self.config), self.scheduler("w1")))

    def load(self, **changes: Any) -> None:
        """Complete the configuration, load the model, and accept the instance's registration."""
        self.begin_load(**changes)
        self.expect(m.InstanceLoaded)
        self.expect_offer("w1")

    def scheduler(self, name: str) -> str:
        endpoint = f"ipc://{self.run_dir}/{name}"
        self.schedulers[name] = Router(endpoint)
        return endpoint

    def expect_offer(self, name: str) -> None:
        """Wait until the instance has registered with this scheduler."""
        assert self.expect(InstanceReady, self.schedulers[name]) == InstanceReady(0, self.pid)
        assert self.peer == b"0.%d" % self.pid

    def execute(
        self, *values: float, name: str = "w1", size: int = 1, memory_range: Any = None
    ) -> None:
        self.batches += 1
        work = [
            Work(
                key,
                os.getpid(),
                *pack_inference(
                    inference(tensor("x", np.full((1, size), value, "f4"), memory_range))
                ),
            )
            for key, value in enumerate(values, 1)
        ]
        router = self.schedulers[name]
        router.post(b"0.%d" % self.pid, Execute(self.batches, work))
        router.flush()

    def finished(self, name: str = "w1") -> list[Reply]:
        """Return the replies to the last batch, in order of their keys."""
        batch_finished = self.expect(BatchFinished, self.schedulers[name])
        assert batch_finished.batch == self.batches
        return sorted(batch_finished.replies, key=lambda reply: reply.key)

    def answer(self, reply: Reply) -> Inferred:
        assert reply.code == "", reply.message
        return inferred_of(reply)

    def wait(self) -> int:
        assert self.process is not None
        return self.process.wait(_PATIENCE_MS / 1000)

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        for router in (self.control, *self.schedulers.values()):
            router.close()


@pytest.fixture(scope="module")
def zygote() -> None:
    forker(WORKER)


@pytest.fixture
def worker(zygote: None, tmp_path: Path) -> Iterator[Worker]:
    # The path of a Unix socket must be short.
    with (
        tempfile.TemporaryDirectory(prefix="w-", dir="/tmp") as run_dir,
        contextlib.closing(Worker(tmp_path, Path(run_dir))) as new_worker,
    ):
        yield new_worker


def value(answer: Inferred) -> float:
    (output,) = answer.outputs
    assert isinstance(output.data, bytes)
    return float(np.frombuffer(output.data, "f4")[0])


def test_from_start_to_stop(worker: Worker) -> None:
    worker.load()
    assert worker.config["max_batch_size"] == 8
    assert psutil.Process(worker.pid).cmdline()[0].startswith("shmserve: worker m.0 cpu")
    worker.execute(1, 2, 3)
    assert [value(worker.answer(reply)) for reply in worker.finished()] == [2, 4, 6]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(worker.pid, number)
    worker.execute(4)
    assert [value(worker.answer(reply)) for reply in worker.finished()] == [8]
    worker.send(m.Stop())
    assert worker.wait() == 0
    assert (worker.version_dir / "log").read_text() == "unloaded"


def test_malformed_work_and_messages(worker: Worker) -> None:
    worker.load()
    router = worker.schedulers["w1"]
    peer = b"0.%d" % worker.pid
    send_raw(router, peer, encode_zmtp(b"garbage") + b"\1\4more\0\6frames")
    router.post(peer, ProcessExited(1, ""))
    router.post(peer, Execute(1, [Work(1, 1, b"garbage", [])]))
    router.flush()
    worker.batches = 1
    assert worker.finished() == [Reply(1, "INTERNAL", Internal().message)]


def test_large_outputs_are_released_by_their_reader_or_by_its_death(worker: Worker) -> None:
    worker.load()
    size = 12 << 20 >> 2
    mappings = Mappings()
    peer, router = b"0.%d" % worker.pid, worker.schedulers["w1"]
    # Two outputs of 48 MiB do not fit into 64 MiB: each must be released before the next.
    for give_back in (
        lambda memory_range: router.post(
            peer, ReleaseOutputs(os.getpid(), [memory_range.offset], memory_range.memory.id)
        ),
        lambda memory_range: router.post(peer, ReaderExited(os.getpid())),
        # A release for a predecessor with the same pid has no effect.
        lambda memory_range: router.post(
            peer, ReleaseOutputs(os.getpid(), [memory_range.offset], 1)
        ),
    ):
        worker.execute(1, size=4 * size)
        (output,) = worker.answer(worker.finished()[0]).outputs
        assert not isinstance(output.data, bytes)
        assert (np.frombuffer(mappings.view(output.data), "f4") == 2).all()
        give_back(output.data)
        router.flush()
    worker.execute(1, size=4 * size)
    assert worker.finished()[0].code == "UNAVAILABLE"
    mappings.unmap_process(worker.pid)


def test_regions_are_mapped_once_and_dropped(worker: Worker) -> None:
    worker.load()
    region = Region(1 << 20)
    memory_range = region.write(4096, np.full((1, 1), 3, "f4"))

    def count_mappings() -> int:
        return Path(f"/proc/{worker.pid}/maps").read_text().count("memfd:test-region")

    for _ in range(3):
        worker.execute(0, memory_range=memory_range)
        assert value(worker.answer(worker.finished()[0])) == 6
        assert count_mappings() == 1
    worker.send(MemoryDropped(region.memory.id))
    until("the region is unmapped", lambda: count_mappings() == 0)
    region.close()


@pytest.mark.parametrize("is_late", [True, False])
def test_a_successor_scheduler_takes_over(worker: Worker, is_late: bool) -> None:
    """The successor assigns keys anew, so a key cancelled by its predecessor is another request."""
    worker.load()
    worker.execute(1)
    if is_late:
        worker.finished()
    worker.schedulers["w1"].post(b"0.%d" % worker.pid, CancelExecution(1))
    worker.schedulers["w1"].flush()
    if not is_late:
        worker.finished()
    worker.schedulers["w1"].close()
    worker.send(m.Attach(worker.scheduler("w2")))
    worker.expect_offer("w2")
    worker.execute(5, name="w2")
    assert value(worker.answer(worker.finished("w2")[0])) == 10


def test_a_scheduler_announced_twice_receives_its_batches(worker: Worker) -> None:
    """The instance was loaded while its scheduler was replaced, and knows the successor."""
    worker.load()
    os.kill(worker.pid, signal.SIGSTOP)  # the worker receives both messages at once
    worker.send(m.Attach(f"ipc://{worker.run_dir}/w1"))
    worker.execute(5)
    os.kill(worker.pid, signal.SIGCONT)
    assert value(worker.answer(worker.finished()[0])) == 10


def test_a_scheduler_lost_in_the_middle_of_a_batch(worker: Worker) -> None:
    gate = worker.version_dir / "gate"
    os.mkfifo(gate)
    blocked = f"(self.log.write_text('x'), open({str(gate)!r}).read())"
    (worker.version_dir / "model.py").write_text(MODEL.replace("time.sleep(60)", blocked))
    worker.load()
    worker.execute(-4)
    until("it runs", lambda: (worker.version_dir / "log").exists())
    worker.schedulers["w1"].close()
    worker.send(m.Attach(worker.scheduler("w2")))
    gate.write_text("")  # the batch ends only now
    worker.expect_offer("w2")
    worker.execute(5, name="w2")
    assert value(worker.answer(worker.finished("w2")[0])) == 10


@pytest.mark.parametrize(
    ("bad_code", "code", "expected_text"),
    [
        ("raise KeyError('gone')", "INTERNAL", "KeyError: 'gone' (model.py:1)"),
        ("import sys; sys.exit(4)", "INTERNAL", "SystemExit: 4 (model.py:1)"),
        (
            "import queue; queue.ONE",
            "INTERNAL",
            "AttributeError: module 'queue' has no attribute 'ONE' "
            f"({queue.__file__}) (model.py:1)",
        ),
        (
            "raise type('Speechless', (Exception,), {'__str__': None})",
            "INTERNAL",
            "Speechless (model.py:1)",
        ),
        ("Model = 1", "INVALID_ARG", "'model.py' does not define a class 'Model'"),
    ],
)
def test_models_do_not_load(worker: Worker, bad_code: str, code: str, expected_text: str) -> None:
    (worker.version_dir / "model.py").write_text(bad_code)
    worker.complete()
    failed = worker.expect(m.LoadFailed)
    assert (failed.code, failed.message) == (code, expected_text)
    assert worker.wait() == 0
    assert (bad_code in failed.frames) == (code == "INTERNAL"), "the supervisor logs the frames"
    assert f'File "{worker.version_dir}/model.py", line 1' in failed.frames or code != "INTERNAL"
    assert "importlib" not in failed.frames and worker.log.read_text() == ""


@pytest.mark.parametrize("end", ["pass", "sys.exit(1)", "raise ValueError"])
def test_a_forked_child_of_a_model_sends_no_report(worker: Worker, end: str) -> None:
    """The model's code is run to its end by its worker, and by the child that it forks."""
    fork = f"if os.fork() == 0:\n    {end}\nelse:\n    os.wait()\nimport torch"
    (worker.version_dir / "model.py").write_text(MODEL.replace("import torch", fork))
    worker.load()


def test_a_model_that_fails_in_load(worker: Worker) -> None:
    model = MODEL.replace(
        "self.log = context", "raise RuntimeError('boom')\n        self.log = context"
    )
    (worker.version_dir / "model.py").write_text(model)
    worker.begin_load()
    text = "RuntimeError: boom (model.py:11)"
    load_failed = worker.expect(m.LoadFailed)
    assert (load_failed.code, load_failed.message) == ("INTERNAL", text)
    assert load_failed.frames.splitlines()[1].endswith('/model.py", line 11, in load')
    assert worker.wait() == 0


@pytest.mark.parametrize(("name", "count"), [("m_0_0", 1), ("m_0_1", 0)])
def test_one_instance_of_a_group_logs_warnings(worker: Worker, name: str, count: int) -> None:
    warning = "__import__('logging').getLogger('shmserve.workers').warning('a warning')"
    model = MODEL.replace("self.log = context", f"{warning}\n        self.log = context")
    (worker.version_dir / "model.py").write_text(model)
    worker.start(instance_name=name)
    worker.load()
    assert worker.log.read_text().count("a warning") == count


@pytest.mark.skipif(os.getuid() != 0, reason="only root can change these")
@pytest.mark.parametrize("change", ["os.setuid(65534)", "os.chroot('/var')"])
def test_a_model_that_removes_its_own_access(worker: Worker, change: str) -> None:
    model = MODEL.replace("self.log = context", f"{change}\n        self.log = context")
    (worker.version_dir / "model.py").write_text(model)
    worker.begin_load()
    load_failed = worker.expect(m.LoadFailed)
    assert "cannot access the server's sockets and memory" in load_failed.message
    assert worker.wait() == 0


def test_a_missing_device(worker: Worker) -> None:
    worker.start(device="npu:0", kind="GPU")
    worker.complete()
    load_failed = worker.expect(m.LoadFailed)
    assert load_failed.code == "UNAVAILABLE" and "torch_npu" in load_failed.message


def test_stop_before_anything_is_loaded(worker: Worker) -> None:
    worker.start()
    worker.send(m.Stop())
    assert worker.wait() == 0


def test_an_idle_worker_does_nothing(worker: Worker) -> None:
    worker.load()
    worker.execute(1)
    worker.finished()
    process = psutil.Process(worker.pid)
    switches: Callable[[], int] = lambda: sum(  # noqa: E731
        int(line.split()[1])
        for task in Path(f"/proc/{worker.pid}/task").iterdir()
        for line in (task / "status").read_text().splitlines()
        if "ctxt_switches" in line
    )
    until("it has settled", lambda: process.status() == psutil.STATUS_SLEEPING)
    switches_before = switches()
    time.sleep(0.5)
    assert switches() - switches_before < 5


def test_a_hanging_worker_logs_its_stack(worker: Worker) -> None:
    worker.load()
    worker.execute(-4)
    until("it hangs", lambda: psutil.Process(worker.pid).status() == psutil.STATUS_SLEEPING)

    async def dump_stacks_twice() -> list[str]:
        child = Child(worker.pid, "it", asyncio.get_running_loop().create_future())
        instance = Instance(0, "m_0", "cpu", "CPU", 0, child=child, stacks_fd=worker.stacks_fd)
        return [await stacks_of(instance), await stacks_of(instance)]

    hangs = 1 + next(n for n, line in enumerate(MODEL.splitlines()) if "sleep(60)" in line)
    for stacks in asyncio.run(dump_stacks_twice()):
        assert stacks.count("in predict") == 1
        assert find_model_frame(stacks, worker.version_dir) == f"predict, line {hangs} of model.py"
