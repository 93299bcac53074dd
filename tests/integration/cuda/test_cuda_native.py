"""The native client's memory on a real device, and pinned host memory."""

import asyncio
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

import shmserve.client
from shmserve.client import aio
from tests.support import repositories, servers
from tests.support.gates import DOUBLING_CUDA_MODEL, holding
from tests.support.regions import SharedObject
from tests.support.servers import ROOT, Server, Start
from tests.support.waiting import until
from tests.support.wire.raw_http import in_region, shm_input

pytestmark = pytest.mark.gpu

SIDE = 1024
SIZE = SIDE * SIDE * 4
LINEAR_MODEL = f"""
import torch

class Model(torch.nn.Linear):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__({SIDE}, {SIDE})
"""
CONFIG = f"""
backend: "pytorch"
input [ {{ name: "%s" data_type: TYPE_FP32 dims: [ -1, {SIDE} ] }} ]
output [ {{ name: "y" data_type: TYPE_FP32 dims: [ -1, {SIDE} ] }} ]
instance_group [ {{ kind: KIND_GPU gpus: [ 0 ] count: 1 }} ]
"""
# A program that creates a region, uses it, and reports it.
PROGRAM = f"""
import sys, shmserve.client
client = shmserve.client.connect(sys.argv[1])
region = client.allocate({{"x": (({SIDE}, {SIDE}), "FP32"), "y": (({SIDE}, {SIDE}), "FP32")}},
    device="cuda:0")
region["x"].fill(3)
client.infer("twice", region)
assert (region["y"].numpy() == 6).all()
print("used", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def server(models: Path, start: Start) -> Server:
    for name, text, x in (("linear", LINEAR_MODEL, "input"), ("twice", DOUBLING_CUDA_MODEL, "x")):
        repositories.write(models, name, CONFIG % x, text)
    return start(models, gpu=True)


@pytest.fixture
def client(server: Server) -> Iterator[shmserve.client.Server]:
    with shmserve.client.connect(server.run_dir) as native_client:
        yield native_client
    gc.collect()


def forms(input_name: str = "x") -> dict[str, tuple[tuple[int, int], str]]:
    return {input_name: ((SIDE, SIDE), "FP32"), "y": ((SIDE, SIDE), "FP32")}


def copied_bytes(server: Server) -> float:
    return server.metric("shmserve_copied_bytes_total")


def used_device_bytes() -> int:
    free_bytes, total = torch.cuda.mem_get_info()
    return total - free_bytes


def test_torch_tensors_in_place(server: Server, client: shmserve.client.Server) -> None:
    with client.allocate(forms(), device="cuda:0") as region:
        x, y = region["x"].torch(), region["y"].torch()
        assert x.is_cuda and x.data_ptr() == region["x"].__cuda_array_interface__["data"][0]
        for turn in range(3):
            x.copy_(torch.arange(SIDE).expand(SIDE, SIDE) + turn)
            torch.cuda.synchronize()
            copied_before = copied_bytes(server)
            result = client.infer("twice", region)
            assert torch.equal(y, x * 2) and torch.equal(result["y"].torch(), x * 2)
        assert copied_bytes(server) - copied_before <= SIZE  # the output, to its region
        alias = x
    with pytest.raises(shmserve.client.Released):
        result["y"].torch()
    assert alias.sum().item() > 0, "what was made of it keeps the memory"


def test_a_linear_layer_copies_no_input(server: Server, client: shmserve.client.Server) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(SIDE, SIDE).to("cuda:0")
    with client.allocate(forms("input"), device="cuda:0") as region, torch.inference_mode():
        x = region["input"].torch()
        x.normal_()
        torch.cuda.synchronize()
        client.infer("linear", region)  # until the model is known
        before = server.metric("shmserve_copied_bytes_total", direction="in")
        for _ in range(3):
            region["y"].fill(0)
            client.infer("linear", region)
            assert torch.allclose(region["y"].torch(), layer(x), atol=1e-4)
        after = server.metric("shmserve_copied_bytes_total", direction="in")
        assert after == before, "no byte in; the output is copied to the region, on the device"


def test_without_torch_in_the_program(client: shmserve.client.Server) -> None:
    x = np.random.default_rng(0).standard_normal((SIDE, SIDE), np.float32)
    with client.allocate(forms(), device="cuda") as region:
        assert (region["y"].numpy() == 0).all(), "fresh memory is full of zeros"
        region["x"].fill(x)
        client.infer("twice", region)
        assert (region["y"].numpy() == x * 2).all()
        assert (client.infer("twice", x=region.view("x", (2, SIDE)))["y"] == x[:2] * 2).all()


def test_missing_devices(client: shmserve.client.Server) -> None:
    with pytest.raises(shmserve.client.InvalidArgument, match="has no device"):
        client.allocate(forms(), device=f"cuda:{torch.cuda.device_count()}")
    with pytest.raises(shmserve.client.Unavailable, match="cannot be allocated"):
        client.allocate({"x": ((1 << 40,), "FP32")}, device="cuda:0")


def test_a_region_released_in_flight(server: Server, client: shmserve.client.Server) -> None:
    region = client.allocate(forms(), device="cuda:0")
    region["x"].fill(1)
    y = region["y"].torch()
    with holding(server.gate) as until_it_runs:
        future = client.infer_async("twice", region)
        until_it_runs()
        region.release()
    assert future.result(30) is not None
    assert bool((y == 2).all())


def test_a_killed_program_leaks_no_device_memory(server: Server) -> None:
    with shmserve.client.connect(server.run_dir) as client:
        # The first request allocates the memory of the worker itself.
        client.infer("twice", x=np.ones((1, SIDE), np.float32))
    used_before = used_device_bytes()
    line = [sys.executable, "-c", PROGRAM, str(server.run_dir)]
    for _ in range(2):
        with subprocess.Popen(
            line, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as p:
            assert p.stdout and p.stdout.readline() == "used\n"
            p.kill()
        until("its memory is back", lambda: used_device_bytes() - used_before < 8 * 2**20)
    with shmserve.client.connect(server.run_dir) as client:
        assert client.infer("twice", x=np.ones((1, SIDE), np.float32))


def test_many_threads_and_tasks(server: Server, client: shmserve.client.Server) -> None:
    mismatches: list[int] = []

    def send_requests(number: int) -> None:
        with client.allocate(forms(), device="cuda:0") as region:
            region["x"].fill(number)
            for _ in range(5):
                client.infer("twice", region)
                if not (region["y"].numpy() == 2 * number).all():
                    mismatches.append(number)

    threads = [threading.Thread(target=send_requests, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not mismatches

    async def talk() -> None:
        async with aio.connect(server.run_dir) as second_client:
            with await second_client.allocate(forms(), device="cuda:0") as region:
                region["x"].fill(4)
                await second_client.infer("twice", region)
                assert (region["y"].numpy() == 8).all()

    asyncio.run(talk())


def test_a_thousand_regions_take_no_memory(server: Server, client: shmserve.client.Server) -> None:
    def allocate_and_infer() -> None:
        with client.allocate(forms(), device="cuda:0") as region:
            client.infer("twice", region)

    def resource_use() -> tuple[int, int, int]:
        process = next(p for p in server.tree() if servers.title(p).startswith("worker twice"))
        return used_device_bytes(), _rss(process), len(os.listdir(f"/proc/{process.pid}/fd"))

    for _ in range(20):
        allocate_and_infer()
    device, host, descriptors = resource_use()
    for _ in range(1000):
        allocate_and_infer()
    until("the device's memory is back", lambda: used_device_bytes() - device < 32 * 2**20)
    use_after = resource_use()
    assert use_after[1] - host < 32 * 2**20
    assert use_after[2] <= descriptors + 2


def _rss(process: psutil.Process) -> int:
    return int(process.memory_info().rss)


def test_pinned_host_memory(server: Server, client: shmserve.client.Server) -> None:
    """Memory is pinned within RLIMIT_MEMLOCK; a worker that cannot pin logs it."""
    few_rows = {"x": ((16, SIDE), "FP32"), "y": ((16, SIDE), "FP32")}
    for _ in range(20):
        with client.allocate(few_rows, pin=True) as region:
            region["x"][:] = 3
            client.infer("twice", region)
            assert (region["y"] == 6).all()
    size = 16 * SIDE * 4
    with SharedObject(2 * size) as shared_object, server.http() as http:
        shared_object.write(np.full(16 * SIDE, 5, np.float32))
        body = {"key": shared_object.key, "byte_size": 2 * size, "pin": True}
        http.post("/v2/systemsharedmemory/region/pinned/register", body).ok()
        request = {
            "inputs": [shm_input("x", "FP32", [16, SIDE], "pinned", size)],
            "outputs": [{"name": "y", "parameters": in_region("pinned", size, size)}],
        }
        http.infer("twice", request).ok()
        assert (shared_object.read(np.float32, 16 * SIDE, size) == 10).all()
        http.unregister().ok()
    assert "could not be pinned" not in server.log()
