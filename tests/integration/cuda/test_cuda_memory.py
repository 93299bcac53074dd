"""CUDA shared memory on a real device with tritonclient; the exporter is another process."""

import base64
import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from tests.support import repositories, servers
from tests.support.gates import DOUBLING_CUDA_MODEL, holding
from tests.support.servers import Server, Start
from tests.support.waiting import until
from tests.support.wire.raw_http import Http

pytestmark = pytest.mark.gpu

SIDE = 512
SIZE = SIDE * SIDE * 4
X = np.arange(SIDE * SIDE, dtype=np.float32).reshape(SIDE, SIDE) % 97
CONFIG = f"""
backend: "pytorch"
input [ {{ name: "x" data_type: TYPE_FP32 dims: [ {SIDE}, {SIDE} ] }} ]
output [ {{ name: "y" data_type: TYPE_FP32 dims: [ {SIDE}, {SIDE} ] }} ]
instance_group [ {{ kind: KIND_GPU gpus: [ 0 ] count: 1 }} ]
"""
EXPORTER_PROGRAM = """
import sys, tritonclient.utils.cuda_shared_memory as shm, numpy as np
region = shm.create_shared_memory_region("r", int(sys.argv[1]), 0)
shm.set_shared_memory_region(region, [np.full(int(sys.argv[1]) // 4, 3, np.float32)])
print(shm.get_raw_handle(region).decode(), flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def shm() -> Any:
    """tritonclient's module; it cannot be imported without cuda-bindings."""
    return importlib.import_module("tritonclient.utils.cuda_shared_memory")


@pytest.fixture(scope="module")
def server(models: Path, start: Start) -> Server:
    repositories.write(models, "twice", CONFIG, DOUBLING_CUDA_MODEL)
    return start(models, gpu=True)


@pytest.fixture
def client(server: Server) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.url, concurrency=4) as triton_client:
        yield triton_client
        triton_client.unregister_cuda_shared_memory()


@pytest.fixture
def region(shm: Any) -> Iterator[Any]:
    """Room for X and twice X."""
    handle = shm.create_shared_memory_region("r", 2 * SIZE, 0)
    shm.set_shared_memory_region(handle, [X])
    yield handle
    shm.destroy_shared_memory_region(handle)


class Child:
    """A process that exports memory full of threes."""

    def __init__(self, byte_size: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", EXPORTER_PROGRAM, str(byte_size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        self.handle = self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def exporter() -> Iterator[Callable[[int], Child]]:
    children: list[Child] = []

    def start(byte_size: int) -> Child:
        children.append(Child(byte_size))
        return children[-1]

    yield start
    for child in children:
        child.end()


def arguments(source: str, target: str, offset: int = SIZE) -> tuple[list[Any], list[Any]]:
    x = triton.InferInput("x", [SIDE, SIDE], "FP32")
    x.set_shared_memory(source, SIZE)
    y = triton.InferRequestedOutput("y")
    y.set_shared_memory(target, SIZE, offset=offset)
    return [x], [y]


def infer(client: triton.InferenceServerClient, source: str = "r", target: str = "r") -> None:
    inputs, outputs = arguments(source, target)
    client.infer("twice", inputs, outputs=outputs)


def second_half(shm: Any, region: Any) -> np.ndarray:
    result: np.ndarray = shm.get_contents_as_numpy(region, np.float32, [2 * SIDE, SIDE])[SIDE:]
    return result


def copied_bytes(server: Server) -> float:
    """Return the number of copied input bytes; an output is copied on the device."""
    return server.metric("shmserve_copied_bytes_total", direction="in")


def worker(server: Server) -> psutil.Process:
    return next(p for p in server.tree() if servers.title(p).startswith("worker twice"))


def test_register_and_infer(
    server: Server, client: triton.InferenceServerClient, shm: Any, region: Any
) -> None:
    client.register_cuda_shared_memory("r", shm.get_raw_handle(region), 0, 2 * SIZE)
    expected_regions = [{"name": "r", "device_id": 0, "byte_size": 2 * SIZE}]
    assert client.get_cuda_shared_memory_status() == expected_regions
    assert client.get_cuda_shared_memory_status("r") == expected_regions
    for turn in range(3):
        shm.set_shared_memory_region(region, [X + turn])
        copied_before = copied_bytes(server)
        infer(client)
        assert (second_half(shm, region) == (X + turn) * 2).all()
    assert copied_bytes(server) == copied_before, "no input is copied once the model is known"
    client.unregister_cuda_shared_memory("r")
    assert client.get_cuda_shared_memory_status() == []
    with pytest.raises(InferenceServerException, match="Unable to find shared memory region: 'r'"):
        infer(client)


def test_invalid_cuda_handles_are_refused(
    client: triton.InferenceServerClient, shm: Any, region: Any
) -> None:
    handle = shm.get_raw_handle(region)
    invalid = "failed to register shared memory region: invalid args"
    for raw, device, size in (
        (base64.b64encode(bytes(64)), 0, 64),  # no handle at all
        (handle, torch.cuda.device_count(), 2 * SIZE),
        (handle, 0, 2**40),  # more than the allocation
    ):
        with pytest.raises(InferenceServerException, match=invalid):
            client.register_cuda_shared_memory("bad", raw, device, size)
    client.register_cuda_shared_memory("r", handle, 0, 2 * SIZE)
    with pytest.raises(InferenceServerException, match="'r' already in manager"):
        client.register_cuda_shared_memory("r", handle, 0, SIZE)
    infer(client)


def test_the_device_is_checked_by_its_uuid(http: Http, shm: Any, region: Any) -> None:
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    body = {
        "raw_handle": {"b64": shm.get_raw_handle(region).decode()},
        "device_id": 0,
        "byte_size": SIZE,
    }
    path = "/v2/cudasharedmemory/region/u/register"
    wrong_uuid = "GPU-00000000-0000-0000-0000-000000000000"
    reply = http.post(path, {**body, "device_uuid": wrong_uuid})
    assert (reply.status, "'device_uuid'" in reply.error) == (400, True)
    http.post(path, {**body, "device_uuid": uuid}).ok()
    http.post("/v2/cudasharedmemory/unregister").ok()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch finds no second CUDA device here")
def test_memory_of_another_device(client: triton.InferenceServerClient, shm: Any) -> None:
    """It is copied from device to device, for the instance that runs elsewhere."""
    other_region = shm.create_shared_memory_region("other", 2 * SIZE, 1)
    try:
        shm.set_shared_memory_region(other_region, [X])
        client.register_cuda_shared_memory("other", shm.get_raw_handle(other_region), 1, 2 * SIZE)
        infer(client, "other", "other")
        assert (second_half(shm, other_region) == X * 2).all()
    finally:
        client.unregister_cuda_shared_memory()
        shm.destroy_shared_memory_region(other_region)


def test_unregister_in_flight(
    server: Server, client: triton.InferenceServerClient, shm: Any, region: Any
) -> None:
    client.register_cuda_shared_memory("r", shm.get_raw_handle(region), 0, 2 * SIZE)
    with holding(server.gate) as until_it_runs:
        inputs, outputs = arguments("r", "r")
        call = client.async_infer("twice", inputs, outputs=outputs)
        until_it_runs()
        client.unregister_cuda_shared_memory("r")
        (listed,) = client.get_cuda_shared_memory_status()  # the region is in use
        assert listed["name"] == "r"
        with pytest.raises(InferenceServerException, match="Unable to find"):
            infer(client)
    call.get_result()
    assert (second_half(shm, region) == X * 2).all()
    until("it is listed no more", lambda: client.get_cuda_shared_memory_status() == [])


def test_two_processes(
    client: triton.InferenceServerClient, shm: Any, region: Any, exporter: Callable[[int], Child]
) -> None:
    """The input is one process's, the output another's."""
    client.register_cuda_shared_memory("theirs", exporter(SIZE).handle, 0, SIZE)
    client.register_cuda_shared_memory("mine", shm.get_raw_handle(region), 0, 2 * SIZE)
    infer(client, "theirs", "mine")
    assert (second_half(shm, region) == 6).all()


def test_an_exporter_that_is_killed(
    server: Server,
    client: triton.InferenceServerClient,
    shm: Any,
    region: Any,
    exporter: Callable[[int], Child],
) -> None:
    """All other clients are served, possibly by a new worker."""
    child = exporter(SIZE)
    client.register_cuda_shared_memory("theirs", child.handle, 0, SIZE)
    client.register_cuda_shared_memory("mine", shm.get_raw_handle(region), 0, 2 * SIZE)
    infer(client, "theirs", "mine")
    child.end()
    try:
        infer(client, "theirs", "mine")
    except InferenceServerException as error:
        status = error.status()
        assert status in ("400", "500", "503"), status
    server.wait_ready()
    shm.set_shared_memory_region(region, [X])
    infer(client, "mine", "mine")
    assert (second_half(shm, region) == X * 2).all()
    client.unregister_cuda_shared_memory("theirs")
    with pytest.raises(InferenceServerException, match="invalid args"):
        client.register_cuda_shared_memory("theirs", child.handle, 0, SIZE)


def test_a_thousand_registrations_take_no_memory(
    server: Server, client: triton.InferenceServerClient, shm: Any, region: Any
) -> None:
    handle = shm.get_raw_handle(region)

    def register_and_infer() -> None:
        client.register_cuda_shared_memory("r", handle, 0, 2 * SIZE)
        infer(client)
        client.unregister_cuda_shared_memory("r")

    def resource_use() -> tuple[int, int, int]:
        free, total = torch.cuda.mem_get_info()
        process = worker(server)
        return (total - free, process.memory_info().rss, len(os.listdir(f"/proc/{process.pid}/fd")))

    for _ in range(20):
        register_and_infer()
    device, host, descriptors = resource_use()
    for _ in range(1000):
        register_and_infer()
    use_after = resource_use()
    assert use_after[0] - device < 16 * 2**20
    assert use_after[1] - host < 32 * 2**20
    assert use_after[2] <= descriptors + 2
