"""The native client's memory on a stand-in for CUDA, with listener, scheduler and worker."""

import asyncio
import ctypes
import dataclasses
import gc
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shmserve.client
from shmserve.client.memory import cuda as client_device
from shmserve.client.memory.cuda import DeviceView
from shmserve.client.sync import Server
from shmserve.common.peers import NO_GROUP
from shmserve.errors import InvalidArgument, PermissionDenied, Unavailable
from shmserve.ipc import endpoints
from shmserve.ipc.endpoints import FIRST_LOCAL_CLIENT, Capabilities
from shmserve.ipc.memory.mappings import Mappings
from shmserve.ipc.messages import inference as m
from shmserve.ipc.messages.control_requests import ShareDeviceMemory
from shmserve.ipc.messages.publications import HealthChanged, MemoryDropped, ModelPublished
from shmserve.ipc.messages.supervision import CheckMemory
from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.tensors.descriptors import CudaHandle, Memory, Range, pack_range
from shmserve.ipc.tensors.schemas import RequestedOutput, pack_inference
from shmserve.ipc.tensors.signature import Signature
from shmserve.scheduler.hosting.local_clients import LocalClientListener
from shmserve.supervisor.local_clients.server import LocalClientServer, LocalMemory
from shmserve.supervisor.processes.control_socket import Acknowledgements
from shmserve.supervisor.regions.opener import HandleCheck, RegionOpener
from shmserve.workers.backends.pytorch import PytorchBackend
from tests.rigs.fake_cuda import FakeCuda, FakeDevice, FakeExporting
from tests.rigs.process_rig import RecordedProcesses
from tests.rigs.region_rig import policy
from tests.rigs.worker_rig import Rig, inference, model_config, rig, tensor, tensor_config
from tests.support.waiting import until

F32 = np.float32
ROW = np.arange(4, dtype=F32).reshape(1, 4)
CONFIG = model_config([tensor_config("x", "FP32", [4])], [tensor_config("y", "FP32", [4])], 8)
POLICY = policy(max_regions=8, max_regions_per_uid=4)
SEALS = Capabilities(bytes(32))
TENSORS = {"x": ((1, 4), "FP32"), "y": ((1, 4), "FP32")}


class SupervisorContext:
    """A server in one process: its listener in a thread, its scheduler and worker in the test's."""

    def __init__(self, folder: Path, worker: Rig, cuda: FakeCuda, devices: int) -> None:
        self.folder = folder
        self.worker = worker
        self._cuda = cuda
        self._devices = devices
        self.processes = RecordedProcesses()
        self.events: list[Any] = []
        self.looking = False  # whether a worker looks at handles
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._ready.wait(10)
        self.listener = LocalClientListener(
            endpoints.local_clients(folder, 1), SEALS, Signature(ModelSpec.of(CONFIG), "1")
        )
        self.link = self.listener.router

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopped = asyncio.Event()
        checker = self._cuda.device_memory()

        def look(_: int, question: CheckMemory) -> None:
            self._loop.call_soon(handles.handle_response, 1, checker.check(question))

        handles = HandleCheck(self._devices, lambda _: [1] if self.looking else [], look)
        opener = RegionOpener(POLICY, handles if self._devices else None)
        self.registry = registry = LocalMemory(SEALS, opener, self.processes, self.events.append)

        unused: Any = None

        def models() -> Iterator[Any]:
            endpoint = endpoints.scheduler(self.folder, 1)
            yield ModelPublished("m", "1", ModelSpec.of(CONFIG), {}, endpoint, True, True, 0.0, 0)
            yield HealthChanged(True, True, False)

        local_clients = LocalClientServer(
            *(self.folder, NO_GROUP, SEALS, registry, models, Acknowledgements()),
            on_disconnect=registry.release,
            load_on_demand=unused,
        )
        self._ready.set()
        await self._stopped.wait()
        local_clients.connections.close()
        registry.close()

    def serve(self, is_answered: Callable[[], bool]) -> None:
        """Play scheduler and worker until a condition holds."""
        while not is_answered():
            self.unmap_dropped()
            self.link.wait(0.05)
            for peer, message in self.link.receive():
                checked_message = self.listener.check(peer, message, time.monotonic_ns())
                if type(checked_message) is m.Submit:
                    self.link.post(peer, self._run(checked_message))
            self.link.flush()

    def _run(self, submit: m.Submit) -> m.Finished | m.Failed:
        (reply,) = self.worker.raw_batch([(submit.schema, submit.data)])
        (worker_reply,) = self.worker.finished.replies
        assert reply.code == worker_reply.code
        if worker_reply.code:
            return m.Failed(submit.id, worker_reply.code, worker_reply.message, 0, False)
        return m.Finished(submit.id, worker_reply.schema, worker_reply.data)

    def unmap_dropped(self) -> None:
        """Handle the messages that a worker receives from the supervisor."""
        while self.processes.workers:
            dropped: MemoryDropped = self.processes.workers.pop(0)
            self.worker.context.mappings.unmap(dropped.memory_id)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join()
        self.link.close()


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def exporting(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> FakeExporting:
    """Return the driver as the client uses it; the memory that it allocates is host memory."""
    export = cuda.exporting()
    monkeypatch.setattr("shmserve.client.session.open_exporter", lambda: export)
    monkeypatch.setattr(DeviceView, "__dlpack_device__", lambda view: (1, 0))
    return export


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    fake_device = FakeDevice()
    monkeypatch.setattr("shmserve.workers.backends.pytorch.open_device", lambda name: fake_device)
    return fake_device


def start_server(folder: Path, cuda: FakeCuda, devices: int = 2) -> Iterator[SupervisorContext]:
    with rig(folder) as worker:
        memory = cuda.device_memory()
        worker.context = dataclasses.replace(
            worker.context,
            mappings=Mappings(memory.open, partial(memory.pin, device=0)),
            device_memory=memory,
        )
        text = "import torch\nclass Model(torch.nn.Module):\n    def forward(self, x):\n"
        (worker.context.version_dir / "model.py").write_text(text + "        return x * 2\n")
        worker.serve(PytorchBackend(worker.context), CONFIG)
        host = SupervisorContext(folder, worker, cuda, devices)
        yield host
        host.close()


@pytest.fixture
def context(tmp_path: Path, cuda: FakeCuda, device: FakeDevice) -> Iterator[SupervisorContext]:
    yield from start_server(tmp_path, cuda)


@pytest.fixture
def client(context: SupervisorContext, exporting: FakeExporting) -> Iterator[Server]:
    with shmserve.client.connect(context.folder) as native_client:
        yield native_client


def infer(
    context: SupervisorContext, client: Server, *args: Any, **more: Any
) -> shmserve.client.Result:
    future: Future[Any] = client.infer_async("m", *args, **more)
    context.serve(future.done)
    result: shmserve.client.Result = future.result()
    return result


def test_a_region_on_the_device_is_used_in_place(
    context: SupervisorContext, client: Server, cuda: FakeCuda, device: FakeDevice
) -> None:
    with client.allocate(TENSORS, device="cuda:1") as region:
        assert repr(region["x"]) == "<FP32 (1, 4) on cuda:1>"
        for iteration in range(3):
            region["x"].fill(ROW + iteration)
            result = infer(context, client, region)
            assert type(result["y"]) is DeviceView
            assert (region["y"].numpy() == (ROW + iteration) * 2).all()
            assert (result["y"].numpy() == (ROW + iteration) * 2).all()
            # Inputs are copied on the device until the model is known not to write to them.
            assert context.worker.finished.copied_input_bytes == (0 if iteration else 16)
            assert cuda.calls[-1] == ("synchronize", 1)
        assert (device.put_bytes, device.fetched_bytes) == (0, 0), "nothing passes by host memory"
        assert cuda.opened == 1


def test_a_view_as_an_input_and_an_output(context: SupervisorContext, client: Server) -> None:
    region = client.allocate({"in": ((4, 4), "FP32"), "out": ((4, 4), "FP32")}, device="cuda")
    region["in"].fill(7)
    second_view = region.view("in", (2, 4))
    result = infer(context, client, x=second_view, outputs={"y": region.view("out", (2, 4))})
    assert result["y"].shape == (2, 4)
    assert region["out"].numpy().tolist() == [[14] * 4] * 2 + [[0] * 4] * 2
    # From the device to a message, and from a message to the device.
    assert (infer(context, client, x=second_view)["y"] == 14).all()
    infer(context, client, x=ROW, outputs={"y": region.view("out", (1, 4))})
    assert (region["out"].numpy()[0] == ROW * 2).all()
    with pytest.raises(InvalidArgument, match="unexpected shape"):
        infer(context, client, x=region.view("in", (2, 3)))


def test_torch_and_numpy_use_a_region_without_a_copy(client: Server) -> None:
    tensors = {"a": ((2, 3), "FP32"), "b": ((4,), "BF16"), "c": ((2,), "BOOL"), "d": ((), "INT64")}
    region = client.allocate(tensors, device="cuda:0")
    region["a"].torch().copy_(torch.arange(6).view(2, 3))
    assert region["a"].numpy().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert np.from_dlpack(region["a"])[1, 2] == 5
    region["b"].torch().fill_(1.5)
    assert region["b"].torch().dtype == torch.bfloat16
    assert (region["b"].numpy() == 0x3FC0).all()
    region["c"].fill([True, False])
    assert region["c"].torch().tolist() == [True, False]
    region["d"].fill(-3)
    assert region["d"].torch().item() == -3
    interface = region["a"].__cuda_array_interface__
    assert (interface["shape"], interface["typestr"]) == ((2, 3), "<f4")
    assert ctypes.c_float.from_address(interface["data"][0] + 4).value == 1
    for wrong_value in ([1, 2, 3, 4], "word"):
        with pytest.raises(InvalidArgument, match="the values cannot be converted to"):
            region["a"].fill(wrong_value)
    with pytest.raises(BufferError):
        region["a"].__dlpack__(copy=True)
    unused = region["a"].__dlpack__()
    del unused


def test_a_released_region_raises_and_is_freed_with_its_last_tensor(
    client: Server, exporting: FakeExporting, context: SupervisorContext
) -> None:
    region = client.allocate(TENSORS, device="cuda:0")
    view = region["x"]
    kept_tensor = view.torch()
    kept_tensor.fill_(5)
    region.release()
    for use in (view.torch, view.numpy, view.memory_range, view.__dlpack__, partial(view.fill, 1)):
        with pytest.raises(shmserve.client.Released):
            use()
    del use
    with pytest.raises(shmserve.client.Released):
        infer(context, client, x=view)
    with pytest.raises(shmserve.client.Released):
        region.view("x")
    del view, region
    gc.collect()
    client._session.memories.free_recycled()
    assert len(exporting.allocated) == 1 and kept_tensor.tolist() == [[5] * 4]
    del kept_tensor
    client._session.memories.free_recycled()
    assert not exporting.allocated
    until("workers are told", lambda: bool(context.processes.workers))


def test_memory_on_a_device_stays_with_its_client(
    context: SupervisorContext, exporting: FakeExporting
) -> None:
    with (
        shmserve.client.connect(context.folder) as client,
        shmserve.client.connect(context.folder) as other_client,
    ):
        region = client.allocate(TENSORS, device="cuda:0")
        for attempt in (pickle.dumps, client.attach, partial(other_client.infer, "m")):
            with pytest.raises(shmserve.client.Unsupported, match="cannot be sent"):
                attempt(region)


def test_workers_unmap_the_region_when_the_connection_ends(
    context: SupervisorContext, exporting: FakeExporting, cuda: FakeCuda
) -> None:
    client = shmserve.client.connect(context.folder)
    region = client.allocate(TENSORS, device="cuda:0")
    infer(context, client, region)
    assert cuda.opened == 1
    packed = pack_inference(
        inference(tensor("x", ROW, region.memory_range("x")), outputs=(RequestedOutput("y"),))
    )
    view = region["y"]
    client.close()
    with pytest.raises(shmserve.client.Released, match="closed"):
        region.view("x")
    until("workers are told", lambda: bool(context.processes.workers))
    context.unmap_dropped()
    assert cuda.opened == 0
    # A request that a worker had not begun by then is not run, since no process would close the
    # handle.
    (reply,) = context.worker.raw_batch([packed])
    assert reply.code == "UNAVAILABLE" and cuda.opened == 0
    assert len(exporting.allocated) == 1 and (view.numpy() == 0).all(), "it is the program's"
    del region, view
    gc.collect()
    assert not exporting.allocated


def test_a_handle_is_mapped_once_for_all_requests(
    context: SupervisorContext, client: Server, cuda: FakeCuda
) -> None:
    first_region = client.allocate(TENSORS, device="cuda:0")
    second_region = client.allocate(TENSORS, device="cuda:0")
    for region in (first_region, second_region, first_region, second_region):
        infer(context, client, region)
    assert cuda.opened == 2 and cuda.calls.count(("open", 0)) == 2


def test_a_dead_exporter_fails_its_own_requests_only(
    context: SupervisorContext, client: Server, exporting: FakeExporting, cuda: FakeCuda
) -> None:
    dead_region, live_region = (client.allocate(TENSORS, device="cuda:0") for _ in range(2))
    cuda.revoke(exporting.allocated[dead_region.segment.address])
    with pytest.raises(InvalidArgument, match="cannot be opened: its owner has exited"):
        infer(context, client, dead_region)
    infer(context, client, live_region)


def test_pinned_host_memory(
    context: SupervisorContext, client: Server, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client.allocate(TENSORS, pin=True) as region:
        region["x"][:] = ROW
        infer(context, client, region)
        assert (region["y"] == ROW * 2).all()
        assert list(cuda.pinned.values()) == [4096]
        limits = (8191, 8191)
        monkeypatch.setattr("resource.getrlimit", lambda kind: limits)
        with pytest.raises(InvalidArgument, match="RLIMIT_MEMLOCK"):
            client.allocate(TENSORS, pin=True)
        forged_memory = dataclasses.replace(region.memory_range("x").memory, pinned=False)
        with pytest.raises(InvalidArgument, match="has not shared"):
            context.listener._rules._check_range(
                FIRST_LOCAL_CLIENT, pack_range(Range(forged_memory, 0, 16))
            )
    until("workers are told", lambda: bool(context.processes.workers))
    context.unmap_dropped()
    assert not cuda.pinned
    client.allocate(TENSORS, pin=True)
    for wrong_value in ({"pin": True}, {"huge_pages": True}):
        with pytest.raises(InvalidArgument, match="only host memory"):
            client.allocate(TENSORS, device="cuda:0", **wrong_value)


# --- refused tensors and requests


def test_invalid_allocations_are_rejected(
    context: SupervisorContext, client: Server, exporting: FakeExporting, cuda: FakeCuda
) -> None:
    for name in ("gpu:0", "cuda:x", "cuda:", "npu:0", "", None, 0, torch.device("meta")):
        with pytest.raises(InvalidArgument, match="is unknown"):
            client.allocate(TENSORS, device=name)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="has no device 'cuda:2'"):
        client.allocate(TENSORS, device="cuda:2")
    exporting.byte_limit = 0
    with pytest.raises(Unavailable, match="cannot be allocated on 'cuda:0'"):
        client.allocate(TENSORS, device="cuda:0")
    exporting.byte_limit = 1 << 30
    context.looking = True
    cuda.uuid = lambda device: bytes(16)  # type: ignore[method-assign]
    original_uuid = exporting.uuid
    exporting.uuid = lambda device: bytes([9]) * 16  # type: ignore[method-assign]
    with pytest.raises(InvalidArgument, match="'device_uuid'"):
        client.allocate(TENSORS, device="cuda:0")
    exporting.uuid = original_uuid  # type: ignore[method-assign]
    gc.collect()
    assert not exporting.allocated, "what the server refused is freed"
    for _ in range(4):
        client.allocate(TENSORS, device="cuda:0").release()
    kept_regions = [client.allocate(TENSORS, device="cuda:0") for _ in range(4)]
    with pytest.raises(InvalidArgument, match="--shm-max-regions-per-uid"):
        client.allocate(TENSORS, device="cuda:0")
    del kept_regions


def test_a_server_without_a_device(
    tmp_path: Path, cuda: FakeCuda, exporting: FakeExporting, device: FakeDevice
) -> None:
    for host in start_server(tmp_path, cuda, devices=0):
        with (
            shmserve.client.connect(host.folder) as client,
            pytest.raises(InvalidArgument, match="the server has no CUDA device"),
        ):
            client.allocate(TENSORS, device="cuda:0")
    gc.collect()
    assert not exporting.allocated


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has a CUDA device")
def test_a_program_without_a_device(context: SupervisorContext) -> None:
    with shmserve.client.connect(context.folder) as client:
        with pytest.raises(Unavailable, match=r"cannot allocate device memory: .*GPU"):
            client.allocate(TENSORS, device="cuda:0")
        assert client.allocate(TENSORS)["x"].shape == (1, 4)


def test_a_program_without_cuda_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings.driver", None)
    with pytest.raises(Unavailable, match=r"\[cuda]"):
        client_device.open_exporter()


def test_a_local_client_uses_no_handle_that_it_did_not_share(
    context: SupervisorContext, client: Server
) -> None:
    region = client.allocate(TENSORS, device="cuda:0")
    memory = region.memory_range("x").memory
    assert memory.cuda is not None
    number = int(client._session.connection().identity.partition(".")[0])
    assert SEALS.owns(number, memory) and not SEALS.owns(number + 1, memory)
    raw, device = memory.cuda.raw, memory.cuda.device
    for forged_memory in (
        Memory.on_device(memory.id, memory.byte_size + 1, memory.cuda),
        Memory.on_device(memory.id + 1, memory.byte_size, memory.cuda),
        Memory.on_device(memory.id, memory.byte_size, CudaHandle(bytes(64), device)),
        Memory.on_device(memory.id, memory.byte_size, CudaHandle(raw, device + 1, bytes(16))),
        Memory.on_device(memory.id + (1 << 41), memory.byte_size, memory.cuda),
    ):
        assert not SEALS.owns(number, forged_memory)
        with pytest.raises(InvalidArgument, match="has not shared"):
            context.listener._rules._check_range(number, pack_range(Range(forged_memory, 0, 16)))


def test_the_same_handle_shared_again_is_another_memory() -> None:
    handle = CudaHandle(bytes(64), 0)
    ids = {SEALS.device_memory_id(FIRST_LOCAL_CLIENT, serial, 64, handle) for serial in (1, 2, 3)}
    assert len(ids) == 3 and all(0 < memory_id < 1 << 62 for memory_id in ids)


@pytest.mark.parametrize(
    ("handle", "device", "uuid", "size", "text"),
    [
        (bytes(63), 0, b"", 64, "64 bytes"),
        (bytes(64), 0, bytes(15), 64, "16"),
        (bytes(64), 0, b"", 0, "got 0; "),
        (bytes(64), 0, b"", -1, "byte_size"),
        (bytes(64), -1, b"", 64, "at least 0, got -1"),
        (bytes(64), 2, b"", 64, "the server has 2 CUDA devices"),
        (bytes(64), 0, b"", 1 << 40, "--shm-max-byte-size-per-uid"),
    ],
    ids=[
        *("a handle too short", "a uuid too short", "no bytes", "a negative size"),
        *("a negative device", "a device that is not there", "more than a user may have"),
    ],
)
def test_invalid_handles_are_rejected(
    context: SupervisorContext,
    client: Server,
    handle: bytes,
    device: int,
    uuid: bytes,
    size: int,
    text: str,
) -> None:
    connection = client._session.connection()

    class ShareRequester:
        def make_share_request(self, number: int) -> Any:
            return ShareDeviceMemory(number, size, handle, device, uuid), ()

        def set_memory(self, memory: Any) -> None:
            raise AssertionError(memory)

    with pytest.raises((InvalidArgument, PermissionDenied), match=text):
        connection.share(ShareRequester())  # type: ignore[arg-type]


def test_a_fork_frees_nothing(client: Server, exporting: FakeExporting) -> None:
    region = client.allocate(TENSORS, device="cuda:0")
    address = region.segment.address
    child = os.fork()
    if not child:
        region.segment.close()
        del region
        gc.collect()
        os._exit(0 if address in exporting.allocated else 1)
    assert os.waitpid(child, 0)[1] == 0
