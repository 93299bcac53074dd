"""Offline models for Ascend devices, tested against a fake library that records its calls."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmserve.errors import InvalidArgument, Unavailable
from shmserve.ipc.model_spec import ModelSpec
from shmserve.workers import backends
from shmserve.workers.backends.ascend import AclError, AscendBackend, OfflineModel, aligned_layout
from tests.rigs.fake_acl import FakeAcl, write
from tests.rigs.worker_rig import Rig, inference, model_config, rig, tensor, tensor_config

F32 = np.float32
OPENING_CALLS = [
    *("init", "rt.set_device", "rt.create_context", "mdl.query_size", "rt.malloc"),
    *("mdl.load_from_file_with_mem", "mdl.create_desc", "mdl.get_desc", "rt.malloc"),
    *("mdl.create_dataset", "create_data_buffer", "mdl.add_dataset_buffer"),
    *("mdl.create_dataset", "create_data_buffer", "mdl.add_dataset_buffer"),
]
CLOSING_CALLS = [
    *("destroy_data_buffer", "mdl.destroy_dataset", "destroy_data_buffer", "mdl.destroy_dataset"),
    *("rt.free", "mdl.destroy_desc", "mdl.unload", "rt.free"),
    *("rt.destroy_context", "rt.reset_device", "finalize"),
]
# Calls that return no error code.
UNCHECKED_CALLS = {"create_data_buffer", "mdl.create_desc", "mdl.create_dataset"}
BARE_CONFIG: dict[str, Any] = {"name": "m", "max_batch_size": 4, "backend": "ascend"}


@pytest.fixture
def acl(monkeypatch: pytest.MonkeyPatch) -> FakeAcl:
    fake_acl = FakeAcl()
    monkeypatch.setitem(sys.modules, "acl", fake_acl)
    return fake_acl


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Rig]:
    with rig(tmp_path) as model_rig:
        shape = {"type": 0, "dims": [4, 3]}
        path = model_rig.context.version_dir / "model.om"
        write(path, [{"name": "x", **shape}], [{"name": "y", **shape}])
        yield model_rig


def config(
    max_batch_size: int = 4, dims: tuple[int, ...] = (3,), datatype: str = "FP32"
) -> dict[str, Any]:
    inputs = [tensor_config("x", datatype, dims)]
    return model_config(inputs, [tensor_config("y", datatype, dims)], max_batch_size)


def test_the_calls_from_load_to_unload(acl: FakeAcl, worker: Rig) -> None:
    backend = AscendBackend(worker.context)
    worker.serve(backend, backend.complete_config(BARE_CONFIG))
    assert acl.calls == OPENING_CALLS
    acl.calls.clear()
    rows = np.arange(9, dtype=F32).reshape(3, 3)
    replies = worker.batch(inference(tensor("x", rows[:1])), inference(tensor("x", rows[1:])))
    np.testing.assert_array_equal(replies[0].array("y"), rows[:1] * 2)
    np.testing.assert_array_equal(replies[1].array("y"), rows[1:] * 2)
    assert acl.calls == ["rt.memcpy", "rt.memcpy", "mdl.execute", "rt.memcpy"]
    acl.calls.clear()
    backend.unload()
    assert acl.calls == CLOSING_CALLS and not acl.alive


def test_the_file_completes_inputs_and_outputs(acl: FakeAcl, worker: Rig) -> None:
    backend = AscendBackend(worker.context)
    assert backend.complete_config(BARE_CONFIG)["input"] == [tensor_config("x", "FP32", [3])]
    unbatched = backend.complete_config(BARE_CONFIG | {"max_batch_size": 0})
    assert unbatched["output"] == [tensor_config("y", "FP32", [4, 3])]
    backend.unload()


@pytest.mark.parametrize("call", sorted(set(OPENING_CALLS) - UNCHECKED_CALLS))
def test_a_failed_load_leaks_nothing(acl: FakeAcl, worker: Rig, call: str) -> None:
    acl.failing = call
    with pytest.raises(AclError, match=f"^pyACL call acl.{call}.* failed with error 507$"):
        OfflineModel(worker.context.version_dir / "model.om", 0)
    assert not acl.alive and acl.calls[-1] == ("finalize" if call != "init" else "init")


def test_without_cann_the_error_names_the_missing_package(
    worker: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "acl", None)
    with pytest.raises(Unavailable, match=r"needs pyACL.* install CANN .* set_env.sh"):
        AscendBackend(worker.context).load(ModelSpec.of(config()))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (config(max_batch_size=8), "max_batch_size 8, but the file was made for batches of 4"),
        (config(dims=(5,)), r"has the shape \[5\], but the file's has \[3\]"),
        (config(datatype="INT32"), "has data_type TYPE_INT32, but the file's has TYPE_FP32"),
        (
            model_config(
                [tensor_config("x", "FP32", [3], optional=True)], [tensor_config("y", "FP32", [3])]
            ),
            r"required inputs of model 'm' are \[\] in the configuration, but \['x'\] in the file",
        ),
    ],
)
def test_a_configuration_that_promises_too_much(
    acl: FakeAcl, worker: Rig, fields: dict[str, Any], text: str
) -> None:
    with pytest.raises(InvalidArgument, match=text):
        AscendBackend(worker.context).load(ModelSpec.of(fields))


def test_a_scalar_has_no_batch_dimension(acl: FakeAcl, worker: Rig) -> None:
    scalars = ([{"name": name, "type": 0, "dims": []}] for name in "xy")
    write(worker.context.version_dir / "model.om", *scalars)
    with pytest.raises(InvalidArgument, match=r"max_batch_size 4, .* made for batches of 0"):
        AscendBackend(worker.context).load(ModelSpec.of(config(dims=(1,))))


def test_unsupported_tensors_are_refused(acl: FakeAcl, worker: Rig) -> None:
    path = worker.context.version_dir / "model.om"
    for number, dims, text in (
        (0, [-1, 3], "only static shapes"),
        (16, [3], "16 is not supported"),
    ):
        write(path, [{"name": "x", "type": number, "dims": dims}], [])
        with pytest.raises(InvalidArgument, match=text):
            OfflineModel(path, 0)
    assert not acl.alive


def test_the_plan_is_aligned() -> None:
    offsets, size = aligned_layout([1, 512, 513, 7])
    assert (offsets, size) == ([0, 512, 1024, 2048], 2560)


def test_the_backend_is_found_by_name() -> None:
    assert backends.find(ModelSpec.of({"backend": "ascend"})) is AscendBackend
