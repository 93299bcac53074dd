"""Tensors between steps on the same CUDA device: they stay on the device."""

from typing import Any

import numpy as np
import pytest

from shmserve.errors import Unavailable
from shmserve.ipc.memory.cuda_ipc import CudaExporter
from shmserve.ipc.memory.mappings import Mappings
from shmserve.ipc.messages import inference as m
from shmserve.ipc.tensors.descriptors import Range, TensorRef
from shmserve.ipc.tensors.schemas import Inferred, pack_inferred
from shmserve.scheduler.ensemble.memory import DeviceBlocks
from tests.rigs.ensemble_rig import EnsembleRig, inputs_of, model, step, used_device_bytes
from tests.rigs.fake_cuda import FakeCuda, FakeExporting
from tests.support.messages import inference_of

MB = 1 << 20
SIZE = 300_000  # number of elements; the tensor is far too large for a message
CHAIN = [
    step("a", {"X": "IN"}, "first"),
    step("b", {"X": "first"}, "second"),
    step("c", {"X": "second"}, "OUT"),
]


def gpu(name: str, gpus: tuple[int, ...] = (0,), **fields: Any) -> dict[str, Any]:
    group = {"kind": "KIND_GPU", "count": 1, "gpus": list(gpus)}
    config = model(name, dims=(SIZE,))
    return {**config, "backend": "pytorch", "instance_group": [group], **fields}


def cpu_model(name: str) -> dict[str, Any]:
    return gpu(name, instance_group=[{"kind": "KIND_CPU", "count": 1, "gpus": []}])


def last_submitted(rig: EnsembleRig) -> tuple[str, m.Submit, Range | None]:
    """Return the step that was submitted last, and the memory range of its output."""
    ((endpoint, submit),) = rig.take_sent()
    (output,) = inference_of(submit).outputs
    return endpoint, submit, output.memory_range


def finish(rig: EnsembleRig, endpoint: str, submit: m.Submit, memory_range: Range) -> None:
    """Complete a step whose output was written to the requested memory range."""
    tensor_ref = TensorRef("Y", "FP32", (SIZE,), memory_range)
    rig.from_step(endpoint, m.Finished(submit.id, *pack_inferred(Inferred((tensor_ref,)))))


def make_rig(*models: dict[str, Any], exporting: CudaExporter | None = None) -> EnsembleRig:
    cuda = exporting or FakeCuda().exporting()
    return EnsembleRig(CHAIN, models, dims=(SIZE,), cuda=lambda: cuda)


def test_tensors_between_steps_on_one_device_stay_there() -> None:
    cuda = FakeCuda()
    rig = make_rig(gpu("a"), gpu("b"), cpu_model("c"), exporting=cuda.exporting())
    rig.submit(data=bytes(4 * SIZE))
    endpoint, submit, memory_range = last_submitted(rig)
    assert memory_range is not None and memory_range.memory.cuda is not None
    assert (endpoint, memory_range.memory.cuda.device) == ("a", 0)
    # Open the memory and write to it, as a worker on the device does.
    worker = Mappings(cuda.device_memory().open)
    value = np.full(SIZE, 2.5, np.float32)
    worker.view(memory_range).numpy().view(np.float32)[:] = value
    finish(rig, endpoint, submit, memory_range)
    endpoint, submit, step_output = last_submitted(rig)
    step_input = inputs_of(submit)["X"]
    assert endpoint == "b" and step_input == memory_range
    assert np.array_equal(worker.view(step_input).numpy().view(np.float32), value)
    # The next step computes on the CPU.
    assert step_output is not None and step_output.memory.cuda is None
    finish(rig, endpoint, submit, step_output)
    endpoint, submit, step_output = last_submitted(rig)
    assert endpoint == "c" and step_output is not None and step_output.memory.cuda is None
    finish(rig, endpoint, submit, step_output)
    (message,) = rig.take_client_messages()
    assert isinstance(message, m.Finished)
    rig.from_client(m.Release(step_output.memory.pid, [step_output.offset], step_output.memory.id))
    assert rig.used_bytes == 0


def test_a_worker_frees_memory_when_the_ensemble_has_exited() -> None:
    cuda = FakeCuda()
    rig = make_rig(gpu("a"), gpu("b"), gpu("c"), exporting=cuda.exporting())
    rig.submit(data=bytes(4 * SIZE))
    _, _, memory_range = last_submitted(rig)
    assert memory_range is not None
    worker = Mappings(cuda.device_memory().open)
    worker.view(memory_range)
    assert len(worker._mappings_by_id) == cuda.opened == 1
    worker.unmap_process(memory_range.memory.pid)
    assert len(worker._mappings_by_id) == cuda.opened == 0


@pytest.mark.parametrize(
    "second_config", [gpu("b", (1,)), gpu("b", (0, 1)), cpu_model("b"), gpu("b", backend="python")]
)
def test_other_tensors_are_copied_through_the_host(second_config: dict[str, Any]) -> None:
    """The second model has another device, two, none, or its inputs in host memory."""
    rig = make_rig(gpu("a"), second_config, gpu("c"))
    rig.submit(data=bytes(4 * SIZE))
    _, _, memory_range = last_submitted(rig)
    assert memory_range is not None and memory_range.memory.cuda is None


def test_a_python_model_receives_tensors_on_its_device() -> None:
    fields = {"FORCE_CPU_ONLY_INPUT_TENSORS": {"string_value": "no"}}
    rig = make_rig(gpu("a"), gpu("b", backend="python", parameters=fields), gpu("c"))
    rig.submit(data=bytes(4 * SIZE))
    _, _, memory_range = last_submitted(rig)
    assert memory_range is not None and memory_range.memory.cuda is not None


def test_tensors_pass_the_host_without_cuda_or_space(caplog: pytest.LogCaptureFixture) -> None:
    def raise_unavailable() -> CudaExporter:
        raise Unavailable("there is no driver")

    full_cuda = FakeCuda().exporting()
    full_cuda.byte_limit = MB
    for cuda in (raise_unavailable, lambda: full_cuda):
        rig = EnsembleRig(CHAIN, [gpu("a"), gpu("b"), gpu("c")], dims=(SIZE,), cuda=cuda)
        caplog.clear()
        for number in range(1, 4):
            rig.submit(number, data=bytes(4 * SIZE))
            _, _, memory_range = last_submitted(rig)
            assert memory_range is not None and memory_range.memory.cuda is None
        assert not caplog.records  # the warning was logged once, when the ensemble was planned


def test_blocks_are_used_again_and_bounded() -> None:
    cuda: FakeExporting = FakeCuda().exporting()
    blocks = DeviceBlocks(130 * MB, lambda: cuda)
    first_blocks = [blocks.allocate(0, 10 * MB) for _ in range(12)]
    assert all(first_blocks) and len(cuda.allocated) == 2
    assert blocks.allocate(0, 10 * MB) is None  # only 2 MB of the limit remain
    assert blocks.allocate(1, 10 * MB) is not None  # each device has its own limit
    for block in first_blocks:
        assert block is not None
        block.release()
    assert used_device_bytes(blocks) == 10 * MB
    assert all(blocks.allocate(0, 60 * MB) for _ in range(2)) and len(cuda.allocated) == 3
    assert blocks.allocate(0, 200 * MB) is None


def test_no_empty_block_is_allocated_on_a_device_without_free_space() -> None:
    cuda: FakeExporting = FakeCuda().exporting()
    blocks = DeviceBlocks(2 * MB, lambda: cuda)
    assert blocks.allocate(0, 2 * MB) is not None
    assert blocks.allocate(0, 0) is None and len(cuda.allocated) == 1
