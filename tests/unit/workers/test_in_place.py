"""Outputs that torch models compute in the client's memory: when, and when not."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shmserve.ipc.memory.mappings import Mappings
from shmserve.ipc.tensors.descriptors import Place
from shmserve.ipc.tensors.inference import RequestedOutput
from shmserve.workers.backends.native import NativeBackend
from shmserve.workers.backends.pytorch import PytorchBackend
from tests.rigs.fake_cuda import FakeCuda, FakeDevice
from tests.rigs.worker_rig import (
    MIB,
    Region,
    Rig,
    inference,
    model_config,
    rig,
    tensor,
    tensor_config,
)

F32 = np.float32
SIDE = 512  # FP32 [SIDE, SIDE] is 1 MiB
X = np.random.default_rng(0).standard_normal((SIDE, SIDE)).astype(F32)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Rig]:
    with rig(tmp_path) as made:
        yield made


@pytest.fixture
def region() -> Iterator[Region]:
    made = Region(4 * MIB)
    made.write(0, X)
    yield made
    made.close()


def serve(worker: Rig, body: str, layers: str = "", outputs: tuple[str, ...] = ("y",)) -> Rig:
    """A module; `body` is its forward of x, `layers` its constructor."""
    text = (
        "import torch\nfrom torch import nn\n"
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        torch.manual_seed(0)\n"
        f"        self.last = None\n        {layers}\n"
        f"    def forward(self, x):\n        {body}\n"
    )
    (worker.context.version_dir / "model.py").write_text(text)
    config = model_config(
        [tensor_config("x", "FP32", [-1, SIDE])],
        [tensor_config(name, "FP32", [-1, -1]) for name in outputs],
    )
    return worker.serve(PytorchBackend(worker.context), config)


def ask(
    worker: Rig, region: Any, array: np.ndarray[Any, Any] = X, at: int = 0, to: int = MIB
) -> tuple[np.ndarray[Any, Any], tuple[int, int]]:
    """The output y, from where it was written, and the bytes copied (in, out)."""
    place = Place(region.memory, at, array.nbytes)
    room = RequestedOutput("y", Place(region.memory, to, MIB))
    (reply,) = worker.batch(inference(tensor("x", array, place), outputs=(room,)))
    assert reply.code == "", reply.message
    assert reply.answer is not None
    (output,) = reply.answer.outputs
    assert isinstance(output.data, Place)
    raw = region.read(output.data.offset, output.data.byte_size)
    found = np.frombuffer(raw, F32).reshape(output.shape)
    return found, (worker.finished.copied_in, worker.finished.copied_out)


LINEAR = f"self.layer = nn.Linear({SIDE}, {SIDE})"


def linear(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    torch.manual_seed(0)
    with torch.inference_mode():
        result: np.ndarray[Any, Any] = torch.nn.Linear(SIDE, SIDE)(torch.from_numpy(x)).numpy()
    return result


@pytest.mark.parametrize(
    ("body", "layers"),
    [
        ("return self.layer(x)", LINEAR),
        ("return self.layer(x.view(1, *x.shape)).squeeze(0)", LINEAR),
        ("return {'y': torch.sigmoid(self.layer(x))}", LINEAR),
        ("y = self.layer(x); y.add_(1); return y", LINEAR),
        ("return x @ x", ""),
        ("return x * 2", ""),
    ],
)
def test_nothing_is_copied(worker: Rig, region: Region, body: str, layers: str) -> None:
    serve(worker, body, layers)
    expected, copied = ask(worker, region)
    assert copied == (MIB, MIB), "the first time it is not known what the model does"
    for turn in range(3):
        again = X + turn
        region.write(0, again)
        found, copied = ask(worker, region, again)
        assert copied == (0, 0)
        if not turn:
            assert np.array_equal(found, expected)


def test_the_result_is_the_same(worker: Rig, region: Region) -> None:
    serve(worker, "return self.layer(x)", LINEAR)
    for turn in range(3):
        again = X * (turn + 1)
        region.write(0, again)
        found, _ = ask(worker, region, again)
        assert np.array_equal(found, linear(again))


@pytest.mark.parametrize(
    ("body", "layers"),
    [
        ("return x.view(x.shape)", ""),  # an output that is its input
        ("return self.layer(x)[1:]", LINEAR),  # a part of what an operation made
        ("return self.layer(x).t()", LINEAR),  # not row-major
        ("self.last = x * 2; return self.last", ""),  # kept
        ("self.last = self.last or [x * 2]; return self.last[0]", ""),  # made once
        ("return torch.relu(x)", ""),  # an operation without the other form
        ("return (x.to_sparse() * 2).to_dense()", ""),  # by way of a tensor without a storage
        ("return " + "(x * 2)" * 1 + " + 0" * 20, ""),  # many operations, for one small output
    ],
)
def test_what_is_copied_all_the_same(worker: Rig, region: Region, body: str, layers: str) -> None:
    serve(worker, body, layers)
    expected, _ = ask(worker, region)
    for _ in range(3):
        found, (_, copied_out) = ask(worker, region)
        assert np.array_equal(found, expected)
        assert copied_out == found.nbytes


def test_a_model_that_keeps_what_it_made_keeps_it(worker: Rig, region: Region) -> None:
    serve(
        worker,
        "before = self.last; self.last = x * 2; return before if before is not None else x + 0",
    )
    results = []
    for turn in range(5):
        again = X + turn
        region.write(0, again)
        results.append(ask(worker, region, again)[0].copy())
    for turn in range(1, 5):
        assert np.array_equal(results[turn], (X + (turn - 1)) * 2)


def test_a_place_that_overlaps_the_input(worker: Rig, region: Region) -> None:
    serve(worker, "return self.layer(x)", LINEAR)
    for _ in range(3):
        region.write(0, X)
        found, copied = ask(worker, region, to=0)
        assert np.array_equal(found, linear(X))
        assert copied[1] == MIB


def test_memory_that_is_not_to_be_mapped(worker: Rig, region: Region) -> None:
    """Whoever may truncate it could have the model die of a page that is gone."""
    serve(worker, "return self.layer(x)", LINEAR)
    region.memory = dataclasses.replace(region.memory, copied=True)
    for _ in range(3):
        found, copied = ask(worker, region)
        assert np.array_equal(found, linear(X))
        assert copied[1] == MIB
    assert copied[0] == MIB, "it is read once"


def test_the_same_object_under_another_name(worker: Rig, region: Region) -> None:
    serve(worker, "return self.layer(x)", LINEAR)
    other = dataclasses.replace(region.memory, id=region.memory.id + 1)
    for _ in range(3):
        region.write(0, X)
        wanted = RequestedOutput("y", Place(other, 64, MIB))
        given = tensor("x", X, Place(region.memory, 0, MIB))
        (reply,) = worker.batch(inference(given, outputs=(wanted,)))
        assert reply.code == ""
        found = np.frombuffer(region.read(64, MIB), F32).reshape(X.shape)
        assert np.array_equal(found, linear(X))


def test_shapes_that_come_and_go(worker: Rig, region: Region) -> None:
    serve(worker, "return self.layer(x)", LINEAR)
    for rows in (SIDE, 300, SIDE, 300, 7, SIDE):
        part = np.ascontiguousarray(X[:rows])
        found, _ = ask(worker, region, part)
        assert np.array_equal(found, linear(part))
    assert ask(worker, region, X[:300])[1] == (0, 0)


def test_a_shape_that_depends_on_the_data(worker: Rig, region: Region) -> None:
    serve(worker, "return x[x[:, 0] > 0] * 2")
    for turn in range(4):
        again = np.roll(X, turn, 1)
        region.write(0, again)
        found, _ = ask(worker, region, again)
        assert np.array_equal(found, again[again[:, 0] > 0] * 2)


def test_a_way_through_the_model_that_depends_on_the_data(worker: Rig, region: Region) -> None:
    serve(worker, "return x * 2 if x[0, 0] > 0 else x + 1")
    for sign in (1, 1, -1, 1, -1):
        again = np.abs(X) * sign
        region.write(0, again)
        found, _ = ask(worker, region, again)
        assert np.array_equal(found, again * 2 if sign > 0 else again + 1)


def test_two_outputs_and_a_place_too_small(worker: Rig, region: Region) -> None:
    serve(worker, "return {'y': x * 2, 'z': x + 1}", outputs=("y", "z"))
    given = tensor("x", X, Place(region.memory, 0, MIB))
    for size, code in ((MIB, ""), (MIB, ""), (MIB - 4, "INTERNAL"), (MIB, "")):
        wanted = (
            RequestedOutput("y", Place(region.memory, MIB, MIB)),
            RequestedOutput("z", Place(region.memory, 2 * MIB, size)),
        )
        region.write(3 * MIB - 4, np.array([5], F32))
        (reply,) = worker.batch(inference(given, outputs=wanted))
        assert reply.code == code, reply.message
        if code:
            assert np.frombuffer(region.read(3 * MIB - 4, 4), F32) == 5, "nobody else's bytes"
        else:
            assert np.array_equal(np.frombuffer(region.read(MIB, MIB), F32), X.ravel() * 2)
            assert np.array_equal(np.frombuffer(region.read(2 * MIB, MIB), F32), X.ravel() + 1)
    assert (worker.finished.copied_in, worker.finished.copied_out) == (0, 0)


def test_script_and_exported_programs(worker: Rig, region: Region) -> None:
    module = torch.nn.Linear(SIDE, SIDE).eval()
    torch.export.save(
        torch.export.export(module, (torch.from_numpy(X),)),
        worker.context.version_dir / "model.pt2",
    )
    backend = PytorchBackend(worker.context)
    config = model_config(
        [tensor_config("input", "FP32", [SIDE, SIDE])],
        [tensor_config("y", "FP32", [SIDE, SIDE])],
    )
    worker.serve(backend, config)
    with torch.inference_mode():
        expected = module(torch.from_numpy(X)).numpy()
    for _ in range(3):
        wanted = (RequestedOutput("y", Place(region.memory, MIB, MIB)),)
        given = tensor("input", X, Place(region.memory, 0, MIB))
        (reply,) = worker.batch(inference(given, outputs=wanted))
        assert reply.code == "", reply.message
        found = np.frombuffer(region.read(MIB, MIB), F32).reshape(X.shape)
        assert np.allclose(found, expected, atol=1e-5)
    assert (worker.finished.copied_in, worker.finished.copied_out) == (0, 0)


def test_a_native_model(worker: Rig, region: Region) -> None:
    text = (
        "from torch import Tensor\nfrom shmserve.model import FP32\n"
        "class Model:\n"
        "    max_batch_size = 0\n"
        f"    def predict(self, x: FP32[Tensor, {SIDE}, {SIDE}]) -> FP32[Tensor, {SIDE}, {SIDE}]:\n"
        "        return x * 2\n"
    )
    (worker.context.version_dir / "model.py").write_text(text)
    backend = NativeBackend(worker.context)
    config = backend.complete_config(model_config([], []))
    config["max_batch_size"] = 0
    worker.serve(backend, config)
    name = config["output"][0]["name"]
    for _ in range(3):
        wanted = (RequestedOutput(name, Place(region.memory, MIB, MIB)),)
        given = tensor("x", X, Place(region.memory, 0, MIB))
        (reply,) = worker.batch(inference(given, outputs=wanted))
        assert reply.code == "", reply.message
    assert np.array_equal(np.frombuffer(region.read(MIB, MIB), F32), X.ravel() * 2)
    assert (worker.finished.copied_in, worker.finished.copied_out) == (0, 0)


def test_on_a_device(worker: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in's: the output is computed in the client's device memory."""
    cuda, device = FakeCuda(), FakeDevice()
    memory = cuda.device_memory()
    worker.context = dataclasses.replace(
        worker.context, mappings=Mappings(memory.open), device_memory=memory
    )
    monkeypatch.setattr("shmserve.workers.backends.pytorch.open_device", lambda name: device)
    serve(worker, "return self.layer(x)", LINEAR)
    exported = cuda.export(3 * MIB)
    start = -exported.content.ctypes.data % 64  # as CUDA aligns
    exported.write(start, X)
    place = exported.memory()
    for _ in range(3):
        wanted = (RequestedOutput("y", Place(place, start + MIB, MIB)),)
        given = tensor("x", X, Place(place, start, MIB))
        (reply,) = worker.batch(inference(given, outputs=wanted))
        assert reply.code == "", reply.message
        assert np.array_equal(exported.read(start + MIB, X), linear(X))
    assert (worker.finished.copied_in, worker.finished.copied_out) == (0, 0)
    assert (device.put_bytes, device.fetched_bytes) == (0, 0)
