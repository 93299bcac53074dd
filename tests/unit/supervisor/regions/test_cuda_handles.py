"""CUDA regions as clients and the supervisor see them; no device is touched on this side."""

import asyncio
import base64
import gc
import os
import re
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import posix_ipc
import pytest
import tritonclient.http as triton
import uvloop

from shmserve.common.host import Accelerators, accelerators, cuda_devices
from shmserve.common.peers import EVERYONE, NO_GROUP, NOBODY, Peer, unix_pid
from shmserve.errors import AlreadyExists, InvalidArgument, NotFound, ShmserveError, Unavailable
from shmserve.gateway.api.shared_memory import decode_uuid
from shmserve.gateway.grpc.admin import AdminCall
from shmserve.gateway.inference.infer_request import RegionRange
from shmserve.gateway.region_table import RegionReferences, RegionTable
from shmserve.gateway.settings import GatewaySettings
from shmserve.ipc.messages import publications as m
from shmserve.ipc.messages.control_requests import RegisterCudaRegion, UnregisterRegion
from shmserve.ipc.messages.supervision import CheckMemory, MemoryChecked
from shmserve.ipc.tensors.descriptors import (
    CudaHandle,
    Memory,
    Range,
    TensorRef,
    pack_range,
    unpack_range,
)
from shmserve.ipc.tensors.schemas import Inference
from shmserve.proto import grpc_service_pb2 as pb
from shmserve.supervisor.regions import opener
from shmserve.supervisor.regions.opener import HandleCheck
from tests.rigs.gateway_rig import Rig, Scheduler, echo, identity_config, rig
from tests.rigs.region_rig import RegionRig, policy, unchecked_handles
from tests.support.leaks import open_descriptors
from tests.support.messages import inference_of
from tests.support.wire.raw_http import in_region, json_input, shm_input

HANDLE = bytes(range(64))
OTHER = bytes(reversed(HANDLE))
UUID = bytes(range(16))
POLICY = policy(
    max_regions=8, max_regions_per_uid=4, max_byte_size=1 << 20, max_byte_size_per_uid=1 << 20
)
ME = Peer(os.getuid(), (os.getgid(),))
BOB = Peer(os.getuid() + 1)
PATH = "/v2/cudasharedmemory"


def b64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


# --- the registry


class CudaRegionRig(RegionRig):
    """A registry whose checks of handles and withdrawals are recorded."""

    def __init__(self, devices: int = 2, check_fault: ShmserveError | None = None) -> None:
        check = unchecked_handles(devices)
        super().__init__(POLICY, check)
        self.checked: list[Memory] = []
        self.check_fault = check_fault
        self.withdrawn: asyncio.Queue[str] = asyncio.Queue()
        check.check = self.check  # type: ignore[method-assign]

    async def check(self, memory: Memory) -> None:
        self.checked.append(memory)
        if self.check_fault is not None:
            raise self.check_fault

    async def publish(self, make: Callable[[int], Any], *roles: str) -> None:
        await super().publish(make, *roles)
        if isinstance(self.published[-1], m.RegionWithdrawn):
            self.withdrawn.put_nowait(self.published[-1].name)


async def test_register_and_unregister() -> None:
    rig = CudaRegionRig()
    handle = CudaHandle(HANDLE, 1, UUID)
    await rig.registry.register_cuda("r", handle, 100, 1000, ME)
    (checked_memory,) = rig.checked
    assert (checked_memory.cuda, checked_memory.byte_size) == (handle, 1100)
    (published,) = rig.published
    extent = unpack_range(published.memory_range)
    memory = extent.memory
    assert memory.cuda == CudaHandle(HANDLE, 1, UUID)
    assert (extent.offset, extent.byte_size, memory.byte_size) == (100, 1000, 1100)
    await rig.registry.unregister("r", ME)
    assert len(rig.registry.active_regions()) == 1, "it is no system memory"
    await rig.registry.unregister("r", ME, is_cuda=True)
    assert rig.published[1:] == [
        m.RegionRetired(memory.id, 1),
        m.RegionWithdrawn("r", memory.id, 1),
        replace(published, draining=True),
    ]
    assert list(rig.registry.publications()) == [replace(published, draining=True, ack_number=0)]
    assert rig.workers == [], "a gateway may still have requests that use it"
    rig.registry.draining.record_release(7, memory.id)
    assert rig.workers == [m.MemoryDropped(memory.id)]
    assert list(rig.registry.publications()) == []
    await asyncio.sleep(0)
    assert rig.published[-1] == m.RegionDrained(memory.id, 1)


async def test_an_equal_registration_is_accepted_and_another_refused() -> None:
    rig = CudaRegionRig()
    handle = CudaHandle(HANDLE, 0)
    for _ in range(2):
        await rig.registry.register_cuda("r", handle, 0, 64, ME)
    assert len(rig.published) == 1
    for other_handle, offset, size in (
        (CudaHandle(OTHER, 0), 0, 64),
        (CudaHandle(HANDLE, 1), 0, 64),
        (handle, 0, 63),
        (handle, 1, 64),
    ):
        with pytest.raises(AlreadyExists, match="shared memory region 'r' already in manager"):
            await rig.registry.register_cuda("r", other_handle, offset, size, ME)


async def test_both_kinds_of_regions_share_their_names() -> None:
    key = f"/test-{os.getpid()}-cuda"
    posix_ipc.SharedMemory(key, posix_ipc.O_CREX, size=4096).close_fd()
    registry = CudaRegionRig().registry
    name_taken = pytest.raises(AlreadyExists, match="already in manager")
    try:
        await registry.register_cuda("device", CudaHandle(HANDLE, 0), 0, 64, ME)
        await registry.register("host", key, 0, 4096, ME)
        with name_taken:
            await registry.register("device", key, 0, 4096, ME)
        with name_taken:
            await registry.register_cuda("host", CudaHandle(HANDLE, 0), 0, 64, ME)
        await registry.unregister("host", ME, is_cuda=True)
        await registry.unregister("device", ME, is_cuda=False)
        assert len(registry.active_regions()) == 2
        await registry.unregister("", ME, is_cuda=True)
        assert [region.name for region in registry.active_regions()] == ["host"]
        await registry.unregister("", ME)
        assert registry.active_regions() == []
        registry.draining.gateway_exited(7)
    finally:
        posix_ipc.unlink_shared_memory(key)


async def test_a_region_belongs_to_its_user() -> None:
    rig = CudaRegionRig()
    registry = rig.registry
    handle = CudaHandle(HANDLE, 0)
    await registry.register_cuda("r", handle, 0, 64, ME)
    memory = unpack_range(rig.published[0].memory_range).memory
    assert (rig.published[0].uid, memory.copied) == (ME.uid, False)
    with pytest.raises(AlreadyExists, match="shared memory region 'r' already in manager"):
        await registry.register_cuda("r", handle, 0, 64, BOB)
    for name in ("r", ""):
        await registry.unregister(name, BOB, is_cuda=True)
    assert len(registry.active_regions()) == 1
    await registry.unregister("", Peer(EVERYONE), is_cuda=True)
    assert registry.active_regions() == []


async def test_the_limits_of_a_user() -> None:
    registry = CudaRegionRig().registry
    handle = CudaHandle(HANDLE, 0)
    with pytest.raises(InvalidArgument, match="--shm-max-byte-size"):
        await registry.register_cuda("r", handle, 0, (1 << 20) + 1, ME)
    for number in range(4):
        await registry.register_cuda(f"r{number}", handle, 0, 64, ME)
    with pytest.raises(InvalidArgument, match="--shm-max-regions-per-uid"):
        await registry.register_cuda("r", handle, 0, 64, ME)
    await registry.register_cuda("r", handle, 0, 64, BOB)
    await registry.unregister("r0", ME, is_cuda=True)
    registry.draining.gateway_exited(7)
    with pytest.raises(InvalidArgument, match="the process that exported it has exited"):
        await registry.register_cuda("r0", handle, 0, 64, ME, 2**22 + 1)
    await registry.register_cuda("r0", handle, 0, 64, ME)


async def test_a_handle_that_no_worker_can_open_is_not_registered() -> None:
    rig = CudaRegionRig(check_fault=InvalidArgument("no"))
    with pytest.raises(InvalidArgument, match="no"):
        await rig.registry.register_cuda("r", CudaHandle(HANDLE, 0), 0, 64, ME)
    assert rig.published == [] and rig.registry.active_regions() == []


async def test_a_slow_check_of_one_handle_delays_no_other_registration() -> None:
    rig = CudaRegionRig()
    registry, check_sent, was_answered = rig.registry, asyncio.Event(), asyncio.Event()

    async def check_slowly(memory: Memory) -> None:
        check_sent.set()
        await was_answered.wait()

    await registry.register_cuda("mine", CudaHandle(HANDLE, 0), 0, 64, ME)
    assert registry._opener.handles is not None
    registry._opener.handles.check = check_slowly  # type: ignore[method-assign]
    registrations = [
        asyncio.create_task(registry.register_cuda("theirs", CudaHandle(OTHER, 0), 0, 64, BOB))
        for _ in range(2)
    ]
    await check_sent.wait()
    async with asyncio.timeout(10):
        await registry.register_cuda("mine", CudaHandle(HANDLE, 0), 0, 64, ME)
        await registry.unregister("mine", ME, is_cuda=True)
    was_answered.set()
    await asyncio.gather(*registrations)
    assert [region.name for region in registry.active_regions()] == ["theirs"]
    usable_regions = [
        region
        for region in rig.published
        if isinstance(region, m.RegionPublished) and not region.draining
    ]
    assert len(usable_regions) == 2


async def test_without_gpus() -> None:
    registry = RegionRig(POLICY).registry
    text = "failed to register CUDA shared memory region: 'r', GPUs not supported"
    with pytest.raises(InvalidArgument, match=text):
        await registry.register_cuda("r", CudaHandle(HANDLE, 0), 0, 64, ME)
    await registry.unregister("r", ME, is_cuda=True)


@pytest.fixture
def exporters() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Three processes that sleep; what they export is up to the test."""
    sleepers = [subprocess.Popen(["sleep", "60"]) for _ in range(3)]
    yield sleepers
    for process in sleepers:
        process.kill()
        process.wait()


async def test_a_region_ends_with_its_exporter(exporters: list[subprocess.Popen[bytes]]) -> None:
    rig = CudaRegionRig()
    registry = rig.registry
    gc.collect()  # objects of earlier tests are finalized now and not during this test
    fds_before = open_descriptors()
    for number, exporter in enumerate(exporters):
        handle = CudaHandle(HANDLE, number)
        await registry.register_cuda(f"r{number}", handle, 0, 64, ME, exporter.pid)
    await registry.register_cuda("of nobody known", CudaHandle(OTHER, 0), 0, 64, ME)
    await registry.unregister("r1", ME, is_cuda=True)
    exporters[0].kill()
    assert [await asyncio.wait_for(rig.withdrawn.get(), 10) for _ in range(2)] == [*("r1", "r0")]
    assert [region.name for region in registry.active_regions()] == ["r2", "of nobody known"]
    assert rig.workers == [], "requests in flight finish"
    registry.draining.gateway_exited(7)
    assert len(rig.workers) == 2
    assert len(open_descriptors() - fds_before) == 1
    exporters[0].wait()
    with pytest.raises(InvalidArgument, match="the process that exported it has exited"):
        await registry.register_cuda("r", CudaHandle(OTHER, 0), 0, 64, ME, exporters[0].pid)
    registry.close()
    assert open_descriptors() <= fds_before


# --- the workers' checks of a handle


class Workers:
    """Workers by device, and what each answers: an error's code, "" or None for never."""

    def __init__(self, devices: dict[int, list[int]], answers: dict[int, str | None]) -> None:
        self._devices = devices
        self._answers = answers
        self.sent: list[tuple[int, CheckMemory]] = []
        self.handles = HandleCheck(2, lambda device: self._devices.get(device, []), self._send)

    def _send(self, pid: int, check: CheckMemory) -> None:
        self.sent.append((pid, check))
        code = self._answers[pid]
        if code is not None:
            loop = asyncio.get_running_loop()
            loop.call_soon(
                self.handles.handle_response, pid, MemoryChecked(check.id, code, "reason")
            )

    def check(self, device: int, uuid: bytes = b"") -> None:
        memory = Memory.on_device(1, 64, CudaHandle(HANDLE, device, uuid))
        asyncio.run(self.handles.check(memory))


def test_workers_on_the_device_check_the_handle() -> None:
    workers = Workers({0: [10, 11], 1: [12]}, {10: None, 11: "", 12: ""})
    workers.check(0, UUID)
    assert [pid for pid, _ in workers.sent] == [10, 11]
    assert workers.sent[0][1] == CheckMemory(0, HANDLE, 0, UUID, 64)
    workers.check(1)
    assert workers.sent[-1][0] == 12
    workers.handles.handle_response(
        10, MemoryChecked(1, "", "")
    )  # a late answer that no request waits for


def test_an_answer_of_a_worker_that_was_not_asked_is_ignored() -> None:
    """A worker responds about a handle for which only other workers were asked."""
    workers = Workers({0: [10]}, {10: ""})
    send = workers.handles._send

    def answer_falsely(pid: int, message: CheckMemory) -> None:
        workers.handles.handle_response(12, MemoryChecked(message.id, "INVALID_ARG", "a lie"))
        send(pid, message)

    workers.handles._send = answer_falsely
    workers.check(0)


def test_a_worker_that_cannot_use_the_device_does_not_decide() -> None:
    Workers({0: [10, 11]}, {10: "UNAVAILABLE", 11: ""}).check(0)
    with pytest.raises(InvalidArgument, match="reason"):
        Workers({0: [10, 11]}, {10: "UNAVAILABLE", 11: "INVALID_ARG"}).check(0)
    with pytest.raises(Unavailable, match="reason"):
        Workers({0: [10, 11]}, {10: "UNAVAILABLE", 11: "UNAVAILABLE"}).check(0)


def test_a_handle_that_workers_refuse_is_refused() -> None:
    text = r"failed to register shared memory region: invalid args \(reason\)"
    with pytest.raises(InvalidArgument, match=text):
        Workers({0: [10]}, {10: "INVALID_ARG"}).check(0)
    with pytest.raises(Unavailable, match=r"^reason$"):
        Workers({0: [10]}, {10: "UNAVAILABLE"}).check(0)
    text = r"failed to register shared memory region: invalid args \(the server has 2 CUDA devices"
    with pytest.raises(InvalidArgument, match=text):
        Workers({}, {}).check(2)


def test_an_unchecked_handle_opens_at_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    Workers({}, {}).check(0)
    monkeypatch.setattr(opener, "_CHECK_TIMEOUT_S", 0.0)
    Workers({0: [10]}, {10: None}).check(0)


# --- a gateway


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """Yield a gateway of a server that seems to have two CUDA devices."""
    with rig(tmp_path_factory.mktemp("run"), cuda_devices=2) as model_rig:
        model_rig.payloads = {RegisterCudaRegion: {}, UnregisterRegion: {}}
        model_rig.open()
        yield model_rig


@pytest.fixture(scope="module")
def scheduler(gateway: Rig) -> Scheduler:
    scheduler = gateway.serve(identity_config("identity", "FP32", [4]), echo)
    return scheduler


def region_published(
    name: str, memory_id: int, number: int = 0, handle: bytes = HANDLE
) -> m.RegionPublished:
    memory = Memory.on_device(memory_id, 1100, CudaHandle(handle, 1, UUID))
    memory_range = list(pack_range(Range(memory, 100, 1000)))
    return m.RegionPublished(name, "", memory_range, os.getuid(), NO_GROUP, number)


def host_region(memory_id: int, number: int) -> m.RegionPublished:
    memory_range = list(pack_range(Range(Memory(memory_id, 1, 3, 9, 100, sealed=False), 0, 100)))
    return m.RegionPublished("host", "/h", memory_range, os.getuid(), NO_GROUP, number)


def body(**changed_fields: Any) -> dict[str, Any]:
    """Return a valid registration with changes; a None removes a member."""
    body = {"raw_handle": {"b64": b64(HANDLE)}, "device_id": 1, "byte_size": 64, **changed_fields}
    return {key: value for key, value in body.items() if value is not None}


def test_registrations_are_sent_to_the_supervisor(gateway: Rig) -> None:
    gateway.received.clear()
    reply = gateway.http.post(f"{PATH}/region/r/register", body())
    assert (reply.status, reply.body) == (200, b"")
    uuid = "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
    gateway.http.post(f"{PATH}/region/r/register", body(offset=8, device_uuid=uuid)).ok()
    registrations = gateway.received_of(RegisterCudaRegion)
    groups = registrations[0].groups
    assert os.getgid() in groups
    assert registrations == [
        RegisterCudaRegion(registrations[0].id, "r", HANDLE, 1, b"", 0, 64, os.getuid(), groups, 0),
        RegisterCudaRegion(
            registrations[1].id, "r", HANDLE, 1, UUID, 8, 64, os.getuid(), groups, 0
        ),
    ]
    for name in ("r", ""):
        part = f"/region/{name}" if name else ""
        gateway.http.post(f"{PATH}{part}/unregister").ok()
        (messages,) = gateway.received_of(UnregisterRegion)
        assert (messages.name, messages.is_cuda) == (name, True)
        gateway.received.clear()


# The answers of a real Triton 2.51 that was built with GPU support and has no GPU; the last ones
# are ours.
BAD_HANDLE = "'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t"
INVALID = "failed to register shared memory region: invalid args"
UNSIGNED = "attempt to access JSON non-unsigned-integer as unsigned-integer"


@pytest.mark.parametrize(
    ("sent_body", "status", "error"),
    [
        ({}, 400, "Shared memory register request has no 'raw_handle' field"),
        (body(raw_handle={}), 500, "attempt to access non-existing object member 'b64'"),
        (body(raw_handle="x"), 500, "attempt to access non-existing object member 'b64'"),
        (body(raw_handle={"b64": 5}), 500, "attempt to access JSON non-string as string"),
        (body(device_id=None, byte_size=None), 500,
         "attempt to access non-existing object member 'byte_size'"),
        (body(device_id=None), 500, "attempt to access non-existing object member 'device_id'"),
        (body(device_id="0"), 500, UNSIGNED),
        (body(device_id=-1), 500, UNSIGNED),
        (body(byte_size=-1), 500, UNSIGNED),
        (body(byte_size=True), 500, UNSIGNED),
        (body(device_id=99), 400, INVALID),
        (body(byte_size=0), 400, INVALID),
        (body(device_id=2), 400, INVALID),
        (body(byte_size=2**63), 400, "'byte_size' must be an integer in [0, 92233720368547758"),
        (body(byte_size=2**63 - 1, offset=1), 400, INVALID),
        (body(device_uuid="GPU-1"), 400, "'device_uuid' must be a UUID such as GPU-0000"),
        *((body(raw_handle={"b64": text}), 400,
            BAD_HANDLE) for text in (*(b64(bytes(size)) for size in (0, 1, 63, 65, 128)),
            "!!!!", b64(HANDLE)[:-1], b64(HANDLE) + "\n", "é" * 88)),
    ],
)  # fmt: skip
def test_wrong_cuda_registrations_are_refused(
    gateway: Rig, sent_body: dict[str, Any], status: int, error: str
) -> None:
    gateway.received.clear()
    reply = gateway.http.post(f"{PATH}/region/r/register", sent_body)
    assert reply.status == status
    assert reply.error.startswith(error) if status == 400 else reply.error == error
    assert gateway.received_of(RegisterCudaRegion) == []


def test_a_region_needs_a_name(gateway: Rig) -> None:
    reply = gateway.http.post(f"{PATH}/register", body())
    text = "'region name' is necessary to register cuda shared memory region"
    assert (reply.status, reply.error) == (400, text)


def test_refusals_of_the_supervisor_reach_the_client(gateway: Rig) -> None:
    text = "shared memory region 'r' already in manager"
    gateway.refusals = {RegisterCudaRegion: ("ALREADY_EXISTS", text)}
    reply = gateway.http.post(f"{PATH}/region/r/register", body())
    assert (reply.status, reply.error) == (400, text)
    gateway.refusals.clear()


def test_status_and_requests(gateway: Rig, scheduler: Scheduler) -> None:
    http = gateway.http
    gateway.apply(lambda number: region_published("device", 5, number))
    gateway.apply(lambda number: host_region(6, number))
    listed_regions = [{"name": "device", "device_id": 1, "byte_size": 1000}]
    assert http.get(f"{PATH}/status").ok().json() == listed_regions
    assert http.get(f"{PATH}/region/device/status").ok().json() == listed_regions
    assert [entry["name"] for entry in http.regions().ok().json()] == ["host"]
    for path, error in (
        (f"{PATH}/region/x/status", "Unable to find cuda shared memory region: 'x'"),
        (
            f"{PATH}/region/host/status",
            "The region named 'host' is registered as system shared memory, not CUDA shared memory",
        ),
        (
            "/v2/systemsharedmemory/region/device/status",
            "The region named 'device' is registered as CUDA shared memory, "
            "not system shared memory",
        ),
    ):
        reply = http.get(path)
        assert (reply.status, reply.error) == (404, error)
    # A request contains memory ranges of the region; the gateway reads none of its bytes.
    scheduler.compute = lambda request: echo(Inference((json_tensor(),)))
    request = {
        "inputs": [shm_input("IN", "FP32", [4], "device", 16, 984)],
        "outputs": [{"name": "OUT", "parameters": in_region("device", 16)}],
    }
    http.infer("identity", request).ok()
    inference = inference_of(scheduler.submits[-1])
    memory = Memory.on_device(5, 1100, CudaHandle(HANDLE, 1, UUID))
    assert inference.inputs[0].data == Range(memory, 1084, 16)
    assert inference.outputs[0].memory_range == Range(memory, 100, 16)
    for offset, size, error in (
        (1000, 16, "Invalid offset for shared memory region: 'device' (offset 1000; "),
        (
            985,
            16,
            "Invalid offset + byte size for shared memory region: 'device' (byte_size 16 at ",
        ),
    ):
        request["inputs"] = [shm_input("IN", "FP32", [4], "device", size, offset)]
        reply = http.infer("identity", request)
        assert (reply.status, error in reply.error) == (400, True)
    gateway.apply(lambda number: m.RegionWithdrawn("device", 5, number))
    gateway.apply(lambda number: m.RegionWithdrawn("host", 6, number))
    assert http.get(f"{PATH}/status").ok().json() == []


def test_outputs_overlap_in_one_allocation_only() -> None:
    table = RegionTable(lambda memory_id: None, "error")
    for number, handle in enumerate((HANDLE, HANDLE, OTHER)):
        table.publish(region_published(f"r{number}", number + 1, handle=handle))
    references = RegionReferences(table)
    references.reference_range(RegionRange("r0", 0, 16), is_output=True)
    references.reference_range(RegionRange("r2", 0, 16), is_output=True)
    with pytest.raises(AlreadyExists, match="'r1' overlaps"):
        RegionReferences(table).reference_range(RegionRange("r1", 8, 16), is_output=True)
    references.release()
    for number in range(3):
        table.withdraw(number + 1)


def test_other_users_do_not_see_a_users_regions() -> None:
    table = RegionTable(lambda memory_id: None)
    table.publish(region_published("r", 1))
    assert [region.name for region in table.visible_regions("", ME, is_cuda=True)] == ["r"]
    assert table.visible_regions("", ME, is_cuda=False) == []
    for peer in (BOB, NOBODY):
        assert table.visible_regions("", peer, is_cuda=True) == []
        with pytest.raises(NotFound, match="Unable to find cuda shared memory region: 'r'"):
            table.visible_regions("r", peer, is_cuda=True)
        # The kinds of the other user's regions are not revealed either.
        with pytest.raises(NotFound, match="Unable to find system shared memory region: 'r'"):
            table.visible_regions("r", peer, is_cuda=False)


def json_tensor() -> TensorRef:
    return TensorRef("IN", "FP32", (4,), np.zeros(4, np.float32).tobytes())


def test_without_a_device_errors_equal_tritons(tmp_path: Path) -> None:
    with rig(tmp_path) as gateway:
        gateway.payloads = {UnregisterRegion: {}}
        gateway.open()
        no_gpus = "(failed to register CUDA shared memory region: 'r', GPUs not supported)"
        for sent_body, text in (
            (body(), f"{INVALID} {no_gpus}"),
            ({}, "Shared memory register request has no 'raw_handle' field"),
            (body(raw_handle={"b64": "!"}), BAD_HANDLE),
        ):
            reply = gateway.http.post(f"{PATH}/region/r/register", sent_body)
            assert (reply.status, reply.error) == (400, text)
        assert gateway.http.get(f"{PATH}/status").ok().json() == []
        missing_region = gateway.http.get(f"{PATH}/region/r/status")
        text = "Unable to find cuda shared memory region: 'r'"
        assert (missing_region.status, missing_region.error) == (404, text)
        gateway.http.post(f"{PATH}/region/r/unregister").ok()
        gateway.http.post(f"{PATH}/unregister").ok()
        request = {"inputs": [json_input("IN", np.zeros(4, np.float32))]}
        assert gateway.http.infer("identity", request).status == 404


def test_tritonclient(gateway: Rig) -> None:
    gateway.received.clear()
    with triton.InferenceServerClient(f"127.0.0.1:{gateway.port}") as client:
        client.register_cuda_shared_memory("r", base64.b64encode(HANDLE), 0, 64)
        assert client.get_cuda_shared_memory_status() == []
        client.unregister_cuda_shared_memory("r")
    (registration,) = gateway.received_of(RegisterCudaRegion)
    assert (registration.handle, registration.device_id, registration.byte_size) == (HANDLE, 0, 64)


class Stub:
    """As much of a gateway as the calls of gRPC need, and their caller."""

    def __init__(self) -> None:
        self.settings = GatewaySettings(cuda_devices=2)
        self.regions = RegionTable(lambda memory_id: None)
        self.regions.publish(region_published("device", 5))
        self.regions.publish(host_region(6, 0))
        self.sent: list[Any] = []
        self.supervisor = self
        self.listener = self
        self.allows_shm = True

    async def send_request(self, kind: Callable[..., Any], *fields: Any) -> dict[str, Any]:
        self.sent.append(kind(1, *fields))
        return {}

    def peer(self) -> Peer:
        return ME

    administrator_peer = peer


async def test_grpc() -> None:
    stub: Any = Stub()
    call = AdminCall(stub, stub)
    for name in ("", "device"):
        status = pb.CudaSharedMemoryStatusRequest(name=name)
        (region_status,) = (await call.cuda_status(status)).regions.values()
        assert region_status.name == "device"
        assert region_status.device_id == 1
        assert region_status.byte_size == 1000
        await call.cuda_unregister(pb.CudaSharedMemoryUnregisterRequest(name=name))
        assert stub.sent.pop() == UnregisterRegion(1, name, ME.uid, list(ME.groups), True)
    status_request = pb.SystemSharedMemoryStatusRequest()
    system = await call.system_status(status_request)
    assert list(system.regions) == ["host"]
    with pytest.raises(NotFound, match="'host' is registered as system shared memory"):
        await call.cuda_status(pb.CudaSharedMemoryStatusRequest(name="host"))
    sent = pb.CudaSharedMemoryRegisterRequest(
        name="r", raw_handle=HANDLE, device_id=1, byte_size=64
    )
    await call.cuda_register(sent)
    owner_fields = (ME.uid, list(ME.groups))
    assert stub.sent == [RegisterCudaRegion(1, "r", HANDLE, 1, b"", 0, 64, *owner_fields, 0)]
    for changed_fields in ({"raw_handle": b"x"}, {"device_id": 2}, {"byte_size": 0}, {"name": ""}):
        bad_request = pb.CudaSharedMemoryRegisterRequest()
        bad_request.CopyFrom(sent)
        for field, value in changed_fields.items():
            setattr(bad_request, field, value)
        with pytest.raises(InvalidArgument, match=re.escape(f"{INVALID} (")):
            await call.cuda_register(bad_request)
    stub.settings = GatewaySettings()
    with pytest.raises(InvalidArgument, match="GPUs not supported"):
        await call.cuda_register(sent)
    stub.allows_shm = False
    assert not (await call.system_status(status_request)).regions


# --- small parts


def test_uuids() -> None:
    for text in (
        "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f",
        "00010203-0405-0607-0809-0a0b0c0d0e0f",
        "000102030405060708090a0b0c0d0e0f",
    ):
        assert decode_uuid(text) == UUID
    for text in ("", "GPU-", "g" * 32, "0" * 33, "MIG-" + "0" * 32):
        with pytest.raises(InvalidArgument, match="'device_uuid'"):
            decode_uuid(text)


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_the_peer_of_a_unix_socket_is_known(
    tmp_path: Path, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    path = str(tmp_path / "socket")

    async def scenario() -> None:
        handle: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        class Protocol(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                handle.set_result(unix_pid(transport))
                transport.close()

        server = await asyncio.get_running_loop().create_unix_server(Protocol, path)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
            assert await handle == os.getpid()
        server.close()
        await server.wait_closed()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(scenario())


def test_other_connections_have_no_known_peer() -> None:
    assert unix_pid(None) == 0

    class Transport(asyncio.Transport):
        def get_extra_info(self, name: str, default: Any = None) -> Any:
            return sock

    with socket.socket() as sock:
        assert unix_pid(Transport()) == 0


def test_devices_of_this_host() -> None:
    assert cuda_devices("") == 0


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 2), ("", 0), ("1", 1), ("0, 1", 2), ("1,7,0", 1), ("-1", 0), ("0,-1,1", 1),
        ("NoDevFiles", 0), ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", 1),
        ("MIG-8932f937-d72c-4106-c12f-20bd9faed9f6", 1), ("0,1,0", 2),
    ],
)  # fmt: skip
def test_devices_that_the_driver_shows(tmp_path: Path, visible: str | None, count: int) -> None:
    """CUDA_VISIBLE_DEVICES, as the driver reads it; "-1" is how people turn a GPU off."""
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert accelerators(tmp_path, visible) == Accelerators("cuda" if count else "", count)
