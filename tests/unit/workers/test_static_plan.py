"""Models with fixed shapes: buffers are allocated at load, and none during a steady stream."""

import contextlib
import logging
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.tensors.descriptors import TensorRef
from shmserve.ipc.tensors.schemas import RequestedOutput
from shmserve.ipc.tensors.signature import Signature
from shmserve.workers.backends.native import NativeBackend
from shmserve.workers.backends.pytorch import PytorchBackend
from shmserve.workers.device import Device
from shmserve.workers.memory.static_plan import MemoryPlan, Recorder, Tensors, buckets
from tests.rigs.worker_rig import Region, Rig, inference, model_config, tensor, tensor_config

F32 = np.float32
ROW = 256 * 1024  # number of floats in a row


def config(dims: tuple[int, ...] = (3,), max_batch_size: int = 8, **fields: Any) -> dict[str, Any]:
    return model_config(
        [tensor_config("X", "FP32", dims)],
        [tensor_config("Y", "FP32", dims)],
        max_batch_size,
        dynamic_batching={},
        **fields,
    )


def plan(config_fields: dict[str, Any], weights: int = 0) -> MemoryPlan | None:
    spec = ModelSpec.of(config_fields)
    return MemoryPlan.of(spec, Signature(spec, "1"), weights)


def test_the_plan_in_mb() -> None:
    static_plan = plan(config((1000, 250), 4), 3_000_000)
    assert static_plan is not None and static_plan.buckets == (1, 2, 4)
    assert static_plan.byte_size(2) == (2_000_000, 2_000_000)
    assert replace(static_plan, workspace=500_000).text() == (
        "11.50 MB: weights 3.00, inputs + outputs by batch "
        "(1: 1.00 + 1.00, 2: 2.00 + 2.00, 4: 4.00 + 4.00), workspace 0.50"
    )
    assert static_plan.text().endswith("workspace not known")


@pytest.mark.parametrize(
    "free_dims",
    [
        {"dims": [-1]},
        {"data_type": "TYPE_STRING"},
        {"optional": True},
        {"allow_ragged_batch": True},
    ],
)
def test_requests_of_variable_size_are_not_planned(free_dims: dict[str, Any]) -> None:
    configuration = config()
    configuration["input"] = [configuration["input"][0] | free_dims]
    assert plan(configuration) is None


@given(st.integers(0, 100), st.sets(st.integers(1, 120), max_size=4), st.booleans())
def test_every_batch_has_the_smallest_bucket_that_holds_it(
    max_batch_size: int, named_sizes: set[int], by_graph: bool
) -> None:
    configuration = config(max_batch_size=max_batch_size) | {
        "dynamic_batching": {"preferred_batch_size": sorted(named_sizes)}
    }
    if by_graph:
        specs = [{"batch_size": size} for size in named_sizes]
        configuration["optimization"] = {"cuda": {"graph_spec": specs}}
    sizes = buckets(ModelSpec.of(configuration))
    static_plan = plan(configuration)
    assert static_plan is not None and static_plan.buckets == sizes
    assert list(sizes) == sorted(set(sizes)) and sizes[-1] == max(1, max_batch_size)
    for rows in range(1, sizes[-1] + 1):
        assert static_plan.bucket_of(rows) == min(size for size in sizes if size >= rows)
    with pytest.raises(ValueError, match="exceeds the largest bucket"):
        static_plan.bucket_of(sizes[-1] + 1)


NUMPY = """
import numpy as np
from numpy import ndarray
from shmserve.model import FP32

class Model:
    max_batch_size = 4
    def load(self, context):
        self.out = np.empty((4, 262144), np.float32)
    def predict(self, X: FP32[ndarray, 262144]) -> FP32[ndarray, 262144]:
        return np.add(X, 1, out=self.out[: len(X)])
"""
TORCH_MODEL = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(1000))
    def forward(self, X):
        return X + self.w[0]
"""


def count_buffers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the sizes of all host buffers allocated from now on."""
    allocations: list[int] = []
    original = Device.host_buffer

    def host_buffer(self: Device, byte_size: int) -> memoryview:
        allocations.append(byte_size)
        return original(self, byte_size)

    monkeypatch.setattr(Device, "host_buffer", host_buffer)
    return allocations


@pytest.mark.parametrize("model_kind", ["native", "pytorch"])
def test_a_steady_stream_allocates_nothing(
    worker: Rig, model_kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After the load no buffer, arena block or object of a tensor's size is allocated."""
    allocations = count_buffers(monkeypatch)
    caplog.set_level(logging.INFO)
    path = worker.context.version_dir / "model.py"
    y = "output" if model_kind == "native" else "Y"
    if model_kind == "native":
        path.write_text(NUMPY)
        backend = NativeBackend(worker.context)
        worker.serve(backend, backend.complete_config(model_config([], [])))
    else:
        path.write_text(TORCH_MODEL)
        worker.serve(PytorchBackend(worker.context), config((ROW,), 4))
        assert "weights 0.00, inputs" in caplog.text
    assert ": 8.39 MB: weights" in caplog.text
    assert allocations == [4 * ROW * 4], "the input of the largest batch, at load"
    with contextlib.closing(Region(8 * ROW * 4)) as region:
        requests = []
        for index in range(4):
            # In reverse order, so that no row is adjacent to the next row of the batch.
            place = region.write((3 - index) * ROW * 4, np.full(ROW, index, F32))
            requested = RequestedOutput(y, region.memory_range((4 + index) * ROW * 4, ROW * 4))
            requests.append(inference(TensorRef("X", "FP32", (1, ROW), place), outputs=[requested]))

        def send_requests(count: int) -> None:
            for _ in range(count):
                for rows in (4, 1, 3, 2):
                    for reply in worker.batch(*requests[:rows]):
                        assert not reply.code, reply

        send_requests(3)
        used_bytes = worker.context.arena.used_bytes
        tracemalloc.start()
        send_requests(20)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(allocations) == 1 and worker.context.arena.used_bytes == used_bytes
        assert peak < ROW * 4 // 2, "less than half of a tensor: messages"
        result = np.frombuffer(region.read(4 * ROW * 4, 4 * ROW * 4), F32).reshape(4, ROW)
        assert (result == np.arange(1, 5, dtype=F32)[:, None]).all()


class FakeRecorder:
    """A fake CUDA graph recorder: a replay repeats the recorded call on the same memory."""

    def __init__(self) -> None:
        self.replayed: list[int] = []
        self.addresses: set[int] = set()
        self._reserved = 0

    def record(self, call: Callable[[], Tensors]) -> tuple[Callable[[], None], Tensors]:
        results = {name: value.clone() for name, value in call().items()}
        self._reserved += 1_000_000

        def replay() -> None:
            (rows,) = {len(value) for value in results.values()}
            self.replayed.append(rows)
            for name, value in call().items():
                results[name].copy_(value)

        return replay, results

    def reserved_bytes(self) -> int:
        return self._reserved


class RecordedBackend(PytorchBackend):
    """A backend whose device records with a fake recorder."""

    def __init__(self, context: Any, recorder: Any) -> None:
        super().__init__(context)
        self.fake_recorder = recorder

    def _recorder(self) -> Recorder | None:
        recorder: Recorder = self.fake_recorder
        return recorder


GRAPHS: dict[str, Any] = {"optimization": {"cuda": {"graphs": True}}}


def test_a_graph_of_each_bucket_is_recorded_at_load_and_replayed(
    worker: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """Uses a fake recorder; a real GPU is not tested here."""
    caplog.set_level(logging.INFO)
    (worker.context.version_dir / "model.py").write_text(TORCH_MODEL)
    fake_recorder = FakeRecorder()
    worker.serve(RecordedBackend(worker.context, fake_recorder), config((3,), 5, **GRAPHS))
    assert (
        not fake_recorder.replayed and "workspace 4.00" in caplog.text
    )  # graphs for 1, 2, 4 and 5 rows
    rows = [np.full((n, 3), n, F32) for n in (1, 2)]
    for sizes, bucket in (((0, 1), 4), ((1, 1), 4), ((0,), 1), ((0, 1, 1), 5), ((1,), 2)):
        found = worker.batch(*(inference(tensor("X", rows[size])) for size in sizes))
        assert [r.array("Y").tolist() for r in found] == [
            (rows[size] + 1).tolist() for size in sizes
        ]
        assert fake_recorder.replayed.pop() == bucket and not fake_recorder.replayed


def test_a_model_that_cannot_be_recorded_runs_without_graphs(
    worker: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    class FailingRecorder(FakeRecorder):
        def record(self, call: Callable[[], Tensors]) -> tuple[Callable[[], None], Tensors]:
            raise RuntimeError("operation not permitted when stream is capturing")

    (worker.context.version_dir / "model.py").write_text(TORCH_MODEL)
    worker.serve(RecordedBackend(worker.context, FailingRecorder()), config((3,), 5, **GRAPHS))
    assert "runs without CUDA graphs: " in caplog.text and "capturing" in caplog.text
    reply = worker.infer(tensor("X", np.zeros((1, 3), F32)))
    assert reply.array("Y").tolist() == [[1, 1, 1]]


def test_an_impossible_plan_is_reported(worker: Rig, caplog: pytest.LogCaptureFixture) -> None:
    (worker.context.version_dir / "model.py").write_text(TORCH_MODEL)
    PytorchBackend(worker.context).load(ModelSpec.of(config((3,), 5, **GRAPHS)))
    assert "runs without CUDA graphs: its device does not support them" in caplog.text
    RecordedBackend(worker.context, FakeRecorder()).load(ModelSpec.of(config((-1,), 5, **GRAPHS)))
    assert "runs without CUDA graphs: its shapes are not fixed" in caplog.text


def test_graphs_are_recorded_only_on_request(worker: Rig) -> None:
    (worker.context.version_dir / "model.py").write_text(TORCH_MODEL)
    fake_recorder = FakeRecorder()
    worker.serve(RecordedBackend(worker.context, fake_recorder), config((3,), 5))
    reply = worker.infer(tensor("X", np.zeros((1, 3), F32)))
    assert reply.array("Y").tolist() == [[1, 1, 1]] and fake_recorder.reserved_bytes() == 0
    assert torch.cuda.CUDAGraph is not None  # torch is replaced by a fake under this name
