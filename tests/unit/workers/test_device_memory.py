"""A worker and clients' device memory, with a fake CUDA driver: open, gather, write, close."""

import dataclasses
import gc
import secrets
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shmserve.errors import InvalidArgument, Unavailable
from shmserve.ipc.memory.cuda_ipc import Driver
from shmserve.ipc.memory.mappings import Mappings
from shmserve.ipc.messages.supervision import CheckMemory
from shmserve.ipc.tensors.descriptors import CudaHandle, Memory, Range, TensorRef, unpack_range
from shmserve.ipc.tensors.schemas import (
    Inference,
    RequestedOutput,
    pack_inference,
    unpack_inference,
)
from shmserve.ipc.transport.frames import MalformedMessage
from shmserve.workers.backends import Output, Request, Response
from shmserve.workers.backends.native import NativeBackend
from shmserve.workers.backends.python import PythonBackend
from shmserve.workers.backends.pytorch import PytorchBackend
from shmserve.workers.memory.device_memory import Allocation, DeviceLost, DeviceMemory
from tests.rigs.fake_cuda import Exported, FakeCuda, FakeDevice
from tests.rigs.worker_rig import (
    Region,
    Rig,
    inference,
    model_config,
    rig,
    tensor,
    tensor_config,
)

F32 = np.float32
ROW = np.arange(4, dtype=F32).reshape(1, 4)


def handle_count(memory: DeviceMemory) -> int:
    """Return the number of open handles, including unused ones that are not closed yet."""
    return len(memory._allocations) + len(memory._unused_allocations)


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def worker(tmp_path: Path, cuda: FakeCuda) -> Iterator[Rig]:
    with rig(tmp_path) as model_rig:
        memory = cuda.device_memory()
        model_rig.context = dataclasses.replace(
            model_rig.context, mappings=Mappings(memory.open), device_memory=memory
        )
        yield model_rig


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    fake = FakeDevice()
    for backend in ("native", "pytorch"):
        monkeypatch.setattr(f"shmserve.workers.backends.{backend}.open_device", lambda name: fake)
    return fake


def row_config(max_batch_size: int = 8, **fields: Any) -> dict[str, Any]:
    inputs, outputs = [tensor_config("x", "FP32", [4])], [tensor_config("y", "FP32", [4])]
    return model_config(inputs, outputs, max_batch_size, **fields)


def serve_doubling(worker: Rig, size: int = 8, body: str = "        return x * 2\n") -> Rig:
    text = f"import torch\nclass Model(torch.nn.Module):\n    def forward(self, x):\n{body}"
    (worker.context.version_dir / "model.py").write_text(text)
    return worker.serve(PytorchBackend(worker.context), row_config(size))


def device_x(memory: Memory, offset: int, rows: np.ndarray[Any, Any]) -> TensorRef:
    return tensor("x", rows, Range(memory, offset, rows.nbytes))


def export_row(cuda: FakeCuda) -> tuple[Exported, Memory]:
    """Return 64 bytes of device memory that begin with ROW."""
    exported_memory = cuda.export(64)
    exported_memory.write(0, ROW)
    return exported_memory, exported_memory.memory()


def on_device(memory: Memory, offset: int, byte_size: int = 16) -> tuple[RequestedOutput, ...]:
    return (RequestedOutput("y", Range(memory, offset, byte_size)),)


# --- handles and bounds


def view(memory: DeviceMemory, region: Memory, offset: int, size: int) -> torch.Tensor:
    view: torch.Tensor = Mappings(memory.open).view(unpack_range((region.packed, offset, size)))
    return view


def test_a_handle_is_mapped_once_under_all_names(cuda: FakeCuda) -> None:
    mappings = Mappings(cuda.device_memory().open)
    exported_memory = cuda.export(64)
    first_memory, second_memory = exported_memory.memory(), exported_memory.memory(32)
    exported_memory.write(0, np.arange(64, dtype=np.uint8))
    assert mappings.view(Range(first_memory, 60, 4)).tolist() == [60, 61, 62, 63]
    assert mappings.view(Range(second_memory, 8, 2)).tolist() == [8, 9]
    mappings.view(Range(first_memory, 0, 1)).fill_(99)
    assert exported_memory.content[0] == 99
    assert cuda.calls == [("open", 0)]
    mappings.unmap(first_memory.id)
    assert cuda.opened == 1
    mappings.unmap(second_memory.id)
    assert cuda.calls == [("open", 0), ("close", 0)]
    mappings.unmap(second_memory.id)  # without effect: the memory is unknown by now


def test_a_view_that_a_model_keeps_keeps_the_mapping(cuda: FakeCuda) -> None:
    memory = cuda.device_memory()
    mappings = Mappings(memory.open)
    region = cuda.export(64).memory()
    kept_view = mappings.view(Range(region, 8, 8)).view(torch.float32)
    mappings.unmap(region.id)
    assert (cuda.opened, handle_count(memory)) == (1, 1)
    # A thread of the model drops the last reference. The main thread closes the handle.
    references = [kept_view]
    del kept_view

    def release_views() -> None:
        references.clear()
        memory.close_unused()

    thread = threading.Thread(target=release_views)
    thread.start()
    thread.join()
    gc.collect()
    assert cuda.opened == 1
    memory.close_unused()
    assert (cuda.opened, handle_count(memory)) == (0, 0)


def test_a_handle_is_closed_before_it_is_opened_again(cuda: FakeCuda) -> None:
    memory = cuda.device_memory()
    exported_memory = cuda.export(64)
    for _ in range(1000):
        mappings = Mappings(memory.open)
        region = exported_memory.memory()
        mappings.view(Range(region, 0, 8))
        mappings.unmap(region.id)
    assert cuda.opened == 0
    assert handle_count(memory) == 0
    assert len(cuda.calls) == 2000


@pytest.mark.parametrize(
    ("allocation_offset", "size", "offset", "length", "is_inside"),
    [
        (0, 64, 0, 64, True),
        (0, 65, 0, 1, False),  # the region is larger than the allocation
        (0, 2**62, 0, 1, False),
        # The handle points into the allocation; the bytes before it are out of bounds.
        (32, 64, 63, 1, True),
        (32, 65, 0, 1, False),
        (0, 64, 64, 1, False),
        (0, 64, 1, 64, False),
        (0, 32, 16, 32, False),  # inside the allocation, but outside the region
    ],
)
def test_ranges_must_lie_in_their_allocation(
    cuda: FakeCuda, allocation_offset: int, size: int, offset: int, length: int, is_inside: bool
) -> None:
    exported_memory = cuda.export(64, inside=allocation_offset)
    memory = cuda.device_memory()
    if is_inside:
        assert len(view(memory, exported_memory.memory(size), offset, length)) == length
    else:
        with pytest.raises((InvalidArgument, MalformedMessage)):
            view(memory, exported_memory.memory(size), offset, length)
    gc.collect()
    memory.close_unused()
    assert cuda.opened == 0, "also a refusal closes what it opened"


def test_handles_without_an_allocation_are_refused(cuda: FakeCuda) -> None:
    memory = cuda.device_memory()
    exported_memory = cuda.export(64, device=1)
    wrong_memory = Memory.on_device(1, 64, CudaHandle(exported_memory.raw_handle, 0))
    with pytest.raises(InvalidArgument, match="is not of device 0 of the server"):
        memory.open(wrong_memory)
    cuda.revoke(exported_memory)
    with pytest.raises(InvalidArgument, match="its owner has exited"):
        memory.open(exported_memory.memory())
    with pytest.raises(InvalidArgument, match="cannot be opened"):
        memory.open(Memory.on_device(1, 64, CudaHandle(exported_memory.raw_handle, 7, bytes(16))))
    assert cuda.opened == 0


def test_the_uuid_is_compared_before_anything_is_opened(cuda: FakeCuda) -> None:
    memory = cuda.device_memory()
    exported_memory = cuda.export(64, device=1)
    memory.open(exported_memory.memory(uuid=cuda.uuid(1))).close()
    cuda.calls.clear()
    with pytest.raises(InvalidArgument, match="device 1 of the server is not the one"):
        memory.open(exported_memory.memory(uuid=cuda.uuid(0)))
    assert cuda.calls == []
    open_already = memory.open(exported_memory.memory())
    with pytest.raises(InvalidArgument, match="device 1 of the server is not the one"):
        memory.open(exported_memory.memory(uuid=cuda.uuid(0)))
    open_already.close()


def test_a_worker_checks_a_handle(cuda: FakeCuda) -> None:
    memory = cuda.device_memory()
    exported_memory = cuda.export(64)
    for handle, size, code in (
        (exported_memory.raw_handle, 64, ""),
        (exported_memory.raw_handle, 65, "INVALID_ARG"),
        (bytes(64), 64, "INVALID_ARG"),
    ):
        answer = memory.check(CheckMemory(7, handle, 0, b"", size))
        assert (answer.id, answer.code) == (7, code)
    assert cuda.opened == 0


def test_handles_without_cuda_are_refused() -> None:
    region = FakeCuda().export(64).memory()
    with pytest.raises(Unavailable, match="in device memory"):
        Mappings().view(Range(region, 0, 1))
    if not torch.cuda.is_available():
        with pytest.raises(Unavailable, match="CUDA shared memory needs"):
            DeviceMemory().open(region)


def test_a_missing_driver_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(Unavailable, match=r"\[cuda]"):
        Driver()


def test_a_torch_without_cuda_costs_a_request_and_no_worker(worker: Rig, cuda: FakeCuda) -> None:
    def refuse(allocation: Allocation) -> torch.Tensor:
        raise AssertionError("Torch not compiled with CUDA enabled")

    memory = DeviceMemory(lambda: cuda, refuse)
    worker.context = dataclasses.replace(
        worker.context, mappings=Mappings(memory.open), device_memory=memory
    )
    worker.serve_function(lambda requests: [], row_config())
    exported = cuda.export(64)
    reply = worker.infer(device_x(exported.memory(), 0, ROW))
    assert (reply.code, "device 0" in reply.message) == ("UNAVAILABLE", True)
    assert memory.check(CheckMemory(7, exported.raw_handle, 0, b"", 64)).code == "UNAVAILABLE"
    gc.collect()
    memory.close_unused()
    assert cuda.opened == 0


def test_a_device_without_memory_for_the_process_is_not_the_handles_fault(cuda: FakeCuda) -> None:
    memory = cuda.device_memory()
    exported_memory = cuda.export(64)
    cuda.revoke(exported_memory)
    cuda.is_broken = True
    with pytest.raises(Unavailable, match="cannot use shared memory on device 0 now"):
        memory.open(exported_memory.memory())
    cuda.is_broken = False
    with pytest.raises(InvalidArgument, match="cannot be opened"):
        memory.open(exported_memory.memory())
    cuda.is_broken = True  # the device fails after it has worked, as when a kernel fails
    with pytest.raises(DeviceLost):
        memory.check(CheckMemory(7, exported_memory.raw_handle, 0, b"", 64))


# --- on the wire


def test_memory_ranges_on_devices_are_packed_and_unpacked() -> None:
    memory = Memory.on_device(2**61, 4096, CudaHandle(secrets.token_bytes(64), 3, bytes(16)))
    sent_inference = Inference(
        (TensorRef("x", "FP32", (4,), Range(memory, 16, 16)),),
        (RequestedOutput("y", Range(memory, 32, 16)),),
    )
    assert unpack_inference(*pack_inference(sent_inference)) == sent_inference


@pytest.mark.parametrize(
    "memory_range",
    [
        Range(Memory.on_device(1, 64, CudaHandle(bytes(64), 0)), 60, 5),
        Range(Memory.on_device(1, 64, CudaHandle(bytes(64), 0)), -1, 5),
        Range(Memory.on_device(1, 64, CudaHandle(bytes(64), "0")), 0, 5),  # type: ignore[arg-type]
        Range(Memory.on_device(1, 64, CudaHandle("0" * 64, 0)), 0, 5),  # type: ignore[arg-type]
        Range(Memory.on_device(1, 64, CudaHandle(bytes(64), 0, 5)), 0, 5),  # type: ignore[arg-type]
    ],
)
def test_malformed_memory_ranges_are_refused(memory_range: Range) -> None:
    with pytest.raises(MalformedMessage):
        unpack_inference(*pack_inference(Inference((TensorRef("x", "FP32", (1,), memory_range),))))


# --- a request


def test_a_batch_of_one_is_on_the_device(worker: Rig, cuda: FakeCuda, device: FakeDevice) -> None:
    serve_doubling(worker)
    exported_memory = cuda.export(64)
    memory = exported_memory.memory()
    for iteration in range(3):
        exported_memory.write(0, ROW + iteration)
        cuda.calls.clear()
        reply = worker.infer(device_x(memory, 0, ROW), outputs=on_device(memory, 32))
        assert reply.code == "", reply.message
        assert reply.outputs[0].data == Range(memory, 32, 16)
        assert (exported_memory.read(32, ROW) == (ROW + iteration) * 2).all()
        # The reply is sent after the device has finished its work.
        assert cuda.calls[-1] == ("synchronize", 0)
        # Inputs are copied on the device until the model is known not to write to them.
        assert worker.finished.copied_input_bytes == (0 if iteration else 16)
    assert (device.put_bytes, device.fetched_bytes) == (0, 0), "nothing passes through the host"
    assert cuda.opened == 1


def test_a_batch_is_gathered_on_the_device(worker: Rig, cuda: FakeCuda, device: FakeDevice) -> None:
    serve_doubling(worker)
    first_export, second_export = cuda.export(64), cuda.export(64)
    first_memory, second_memory = first_export.memory(), second_export.memory()
    first_export.write(0, ROW)
    second_export.write(0, ROW + 10)
    replies = worker.batch(
        inference(device_x(first_memory, 0, ROW), outputs=on_device(first_memory, 32)),
        inference(device_x(second_memory, 0, ROW), outputs=on_device(second_memory, 48)),
    )
    assert [reply.code for reply in replies] == ["", ""], replies
    assert (first_export.read(32, ROW) == ROW * 2).all()
    assert (second_export.read(48, ROW) == (ROW + 10) * 2).all()
    assert (device.put_bytes, device.fetched_bytes) == (0, 0)
    assert worker.finished.copied_input_bytes == 32


def test_rows_beside_each_other_are_a_view(worker: Rig, cuda: FakeCuda, device: FakeDevice) -> None:
    serve_doubling(worker)
    exported_memory = cuda.export(96)
    memory = exported_memory.memory()
    rows = np.arange(8, dtype=F32).reshape(2, 4)
    exported_memory.write(0, rows)
    for _ in range(2):
        replies = worker.batch(
            *(
                inference(device_x(memory, 16 * n, ROW), outputs=on_device(memory, 32 + 16 * n))
                for n in range(2)
            )
        )
        assert [reply.code for reply in replies] == ["", ""], replies
        assert (exported_memory.read(32, rows) == rows * 2).all()
    assert worker.finished.copied_input_bytes == 0


def test_host_and_device_share_a_batch(worker: Rig, cuda: FakeCuda, device: FakeDevice) -> None:
    """One input and one output are on the device, the others on the host."""
    serve_doubling(worker)
    exported_memory, memory = export_row(cuda)
    replies = worker.batch(
        inference(device_x(memory, 0, ROW)),
        inference(tensor("x", ROW + 5), outputs=on_device(memory, 32)),
    )
    assert (replies[0].array("y") == ROW * 2).all() and replies[1].code == ""
    assert (exported_memory.read(32, ROW) == (ROW + 5) * 2).all()


def test_a_region_unregistered_in_flight_stays_mapped(
    worker: Rig, cuda: FakeCuda, device: FakeDevice
) -> None:
    """The worker unmaps a region between batches. Tensors that it keeps remain usable."""
    body = "        self.last = x\n        return x * 2\n"
    serve_doubling(worker, body=body)
    _, memory = export_row(cuda)
    for _ in range(2):
        reply = worker.infer(device_x(memory, 0, ROW), outputs=on_device(memory, 32))
        assert reply.code == ""
    worker.context.mappings.unmap(memory.id)
    assert cuda.opened == 1, "the model still has its input"
    new_export = cuda.export(64)
    for _ in range(2):
        worker.batch(inference(device_x(new_export.memory(), 0, ROW)))
    gc.collect()
    assert worker.context.device_memory is not None
    worker.context.device_memory.close_unused()
    assert ("close", 0) in cuda.calls


def test_a_model_that_writes_into_its_inputs_gets_copies(
    worker: Rig, cuda: FakeCuda, device: FakeDevice
) -> None:
    serve_doubling(worker, body="        return x.mul_(2)\n")
    exported_memory, memory = export_row(cuda)
    for _ in range(3):
        worker.batch(inference(device_x(memory, 0, ROW), outputs=on_device(memory, 32)))
        assert (exported_memory.read(0, ROW) == ROW).all()
        assert (exported_memory.read(32, ROW) == ROW * 2).all()


def test_memory_ranges_that_are_too_small_or_unmapped(
    worker: Rig, cuda: FakeCuda, device: FakeDevice
) -> None:
    serve_doubling(worker)
    exported_memory = cuda.export(64)
    reply = worker.infer(
        device_x(exported_memory.memory(), 0, ROW),
        outputs=on_device(exported_memory.memory(), 32, 8),
    )
    assert (reply.code, reply.message) == (
        "INTERNAL",
        "shared memory size specified with the request for output 'y' (8 bytes) should be at "
        "least 16 bytes to hold the results",
    )
    closed_handle = cuda.export(64)
    cuda.revoke(closed_handle)
    replies = worker.batch(
        inference(device_x(closed_handle.memory(), 0, ROW)),
        inference(tensor("x", ROW)),
        inference(tensor("x", ROW), outputs=on_device(closed_handle.memory(), 0)),
    )
    assert [reply.code for reply in replies] == ["INVALID_ARG", "", "INVALID_ARG"]


def test_an_unaligned_range_and_an_output_that_is_its_input(
    worker: Rig, cuda: FakeCuda, device: FakeDevice
) -> None:
    serve_doubling(worker, body="        return x\n")
    exported_memory = cuda.export(64)
    memory = exported_memory.memory()
    for start in (1, 4):
        for offset in (33, start + 4, start):
            for _ in range(2):
                exported_memory.write(start, ROW)
                worker.batch(
                    inference(device_x(memory, start, ROW), outputs=on_device(memory, offset))
                )
                assert (exported_memory.read(offset, ROW) == ROW).all()


def test_a_failing_device_ends_the_process(worker: Rig, cuda: FakeCuda, device: FakeDevice) -> None:
    serve_doubling(worker)
    exported_memory = cuda.export(64)
    cuda.is_broken = True
    with pytest.raises(DeviceLost):
        worker.batch(
            inference(
                device_x(exported_memory.memory(), 0, ROW),
                outputs=on_device(exported_memory.memory(), 32),
            )
        )


def test_a_device_that_has_failed_ends_the_process_also_by_an_output(
    worker: Rig, cuda: FakeCuda, device: FakeDevice
) -> None:
    serve_doubling(worker)
    closed_handle = cuda.export(64)
    worker.batch(
        inference(
            device_x(closed_handle.memory(), 0, ROW), outputs=on_device(closed_handle.memory(), 32)
        )
    )
    worker.context.mappings.unmap_all()
    cuda.revoke(closed_handle)
    cuda.is_broken = True
    with pytest.raises(DeviceLost):
        worker.batch(inference(tensor("x", ROW), outputs=on_device(closed_handle.memory(), 32)))


# --- other backends


class _AcceleratorError(RuntimeError):
    """An exception like torch's AcceleratorError."""


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_failed_device_ends_the_worker(
    worker: Rig, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    """A worker whose device has failed exits, so that a working process replaces it."""
    worker.serve_function(lambda requests: [], row_config())

    def fail(*arguments: Any, **options: Any) -> Any:
        raise _AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.Tensor, "to", fail)
    request = inference(device_x(cuda.export(64).memory(), 0, ROW))
    if is_lost:
        monkeypatch.setattr(torch, "AcceleratorError", _AcceleratorError, raising=False)
        with pytest.raises(_AcceleratorError):
            worker.batch(request)
    else:
        (reply,) = worker.batch(request)
        assert reply.code == "UNAVAILABLE"


def test_a_backend_of_host_memory_gets_copies(worker: Rig, cuda: FakeCuda) -> None:
    def echo(requests: list[Request]) -> list[Response]:
        inputs = [request.inputs["x"] for request in requests]
        assert not any(item.on_device or item.is_shared for item in inputs)
        return [Response([Output("y", item.datatype, item.numpy())]) for item in inputs]

    worker.serve_function(echo, row_config())
    exported_memory, memory = export_row(cuda)
    reply = worker.infer(device_x(memory, 0, ROW), outputs=on_device(memory, 32))
    assert reply.code == "", reply.message
    assert (exported_memory.read(32, ROW) == ROW).all()
    assert (worker.finished.copied_input_bytes, worker.finished.copied_output_bytes) == (16, 16)


def test_strings_on_a_device(worker: Rig, cuda: FakeCuda) -> None:
    def echo(requests: list[Request]) -> list[Response]:
        return [Response([Output("y", "BYTES", r.inputs["x"].numpy())]) for r in requests]

    config = model_config([tensor_config("x", "STRING", [2])], [tensor_config("y", "STRING", [2])])
    worker.serve_function(echo, config)
    exported_memory = cuda.export(64)
    memory = exported_memory.memory()
    string_array = np.array([b"one", b"three"], dtype=np.object_)
    wire = np.frombuffer(b"\3\0\0\0one\5\0\0\0three", np.uint8)
    exported_memory.write(0, wire)
    input_tensor = tensor("x", string_array, Range(memory, 0, wire.nbytes))
    reply = worker.infer(input_tensor, outputs=on_device(memory, 32, 20))
    assert reply.code == "", reply.message
    assert (exported_memory.read(32, wire) == wire).all()


@pytest.mark.parametrize("stays_on_device", [False, True])
def test_python_models_use_a_device(worker: Rig, cuda: FakeCuda, stays_on_device: bool) -> None:
    """As in Triton, inputs are copied to the host unless the configuration forbids it."""
    source = """
import triton_python_backend_utils as pb
from torch.utils.dlpack import from_dlpack
class TritonPythonModel:
    def execute(self, requests):
        xs = (from_dlpack(request.inputs()[0].to_dlpack()) for request in requests)
        return [pb.InferenceResponse([pb.Tensor.from_dlpack("y", x * 2)]) for x in xs]
"""
    (worker.context.version_dir / "model.py").write_text(source)
    parameters = {"FORCE_CPU_ONLY_INPUT_TENSORS": {"string_value": "no"}} if stays_on_device else {}
    backend = PythonBackend(worker.context)
    worker.serve(backend, row_config(parameters=parameters))
    exported_memory, memory = export_row(cuda)
    reply = worker.infer(device_x(memory, 0, ROW), outputs=on_device(memory, 32))
    backend.unload()  # all backends of a process share the module that models import
    assert reply.code == "", reply.message
    assert (exported_memory.read(32, ROW) == ROW * 2).all()
    assert worker.finished.copied_input_bytes == (0 if stays_on_device else 16)


def test_a_native_model_of_numpy(worker: Rig, cuda: FakeCuda, device: FakeDevice) -> None:
    text = (
        "import numpy as np\n"
        "from shmserve.model import FP32\n"
        "class Model:\n"
        "    def predict(self, x: FP32[np.ndarray, 4]) -> FP32[np.ndarray, 4]:\n"
        "        return x * 2\n"
    )
    (worker.context.version_dir / "model.py").write_text(text)
    backend = NativeBackend(worker.context)
    config = backend.complete_config(model_config([], []))
    worker.serve(backend, config)
    exported_memory, memory = export_row(cuda)
    requested_outputs = (RequestedOutput(config["output"][0]["name"], Range(memory, 32, 16)),)
    reply = worker.infer(device_x(memory, 0, ROW), outputs=requested_outputs)
    assert reply.code == "", reply.message
    assert (exported_memory.read(32, ROW) == ROW * 2).all()


def test_an_exporter_sees_its_own_memory() -> None:
    """Checks the fake driver: both processes see the same bytes, from the handle's offset on."""
    exported_memory = Exported(16, 0, 8)
    exported_memory.write(4, np.array([7], np.int32))
    assert exported_memory.buffer[12] == 7


# --- pinned host memory


def pinned_memory(region: Region) -> Memory:
    return dataclasses.replace(region.memory, pinned=True)


def test_a_region_is_pinned_at_its_first_use_and_unpinned_before_unmapping(cuda: FakeCuda) -> None:
    mappings = Mappings(None, partial(cuda.device_memory().pin, device=1))
    region = Region(8192)
    memory = pinned_memory(region)
    kept_view = mappings.view(Range(memory, 4096, 8))
    mappings.view(Range(memory, 0, 8192))
    assert list(cuda.pinned.values()) == [8192] and cuda.calls == [("pin", 1)]
    plain_region = Region(4096)
    mappings.view(Range(plain_region.memory, 0, 8))
    assert len(cuda.pinned) == 1, "nobody asked for it"
    mappings.unmap(memory.id)
    assert not cuda.pinned and bytes(kept_view) == bytes(8), "a view of it stays valid"
    mappings.unmap_all()
    for block in (region, plain_region):
        block.close()


def test_empty_memory_is_not_pinned(cuda: FakeCuda) -> None:
    cuda.device_memory().pin(memoryview(b""), 0)()
    assert not cuda.calls


def test_memory_that_cannot_be_pinned_is_used_unpinned(cuda: FakeCuda) -> None:
    def raise_unavailable() -> FakeCuda:
        raise Unavailable("there is no driver")

    cuda.is_broken = True
    for memory in (cuda.device_memory(), DeviceMemory(raise_unavailable)):
        mappings = Mappings(None, partial(memory.pin, device=0))
        region = Region(4096)
        assert len(mappings.view(Range(pinned_memory(region), 0, 8))) == 8
        mappings.unmap_all()
        region.close()
    assert not cuda.calls


def test_memory_that_is_not_mapped_is_not_pinned(cuda: FakeCuda) -> None:
    mappings = Mappings(None, partial(cuda.device_memory().pin, device=0))
    region = Region(4096)
    copied_memory = dataclasses.replace(region.memory, pinned=True, copied=True)
    assert len(mappings.read(Range(copied_memory, 0, 8))) == 8
    assert not cuda.calls
    mappings.unmap_all()
    region.close()
