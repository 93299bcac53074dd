"""CUDA shared memory in small pieces, of programs that stop or free it; a device that is full."""

import contextlib
import importlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from tests.support import repositories
from tests.support.servers import Server, Start
from tests.support.waiting import until

pytestmark = pytest.mark.gpu
N = 16
GPU = """
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        assert x.is_cuda
        return x + 1
"""
HOST = """
import triton_python_backend_utils as pb

class TritonPythonModel:
    def execute(self, requests):
        return [pb.InferenceResponse([pb.Tensor(
            "y", pb.get_input_tensor_by_name(r, "x").as_numpy() + 1)]) for r in requests]
"""
CONFIG = f"""
backend: "%s"
input [ {{ name: "x" data_type: TYPE_INT32 dims: [ {N} ] }} ]
output [ {{ name: "y" data_type: TYPE_INT32 dims: [ {N} ] }} ]
instance_group [ {{ kind: %s count: 1 }} ]
"""
MODELS = {
    "gpu": (GPU, CONFIG % ("pytorch", "KIND_GPU")),
    "host": (HOST, CONFIG % ("python", "KIND_CPU")),
}
# A program that exports memory. On a line of input it frees the memory, allocates the same size
# again, and exports it.
EXPORTER_PROGRAM = """
import sys, tritonclient.utils.cuda_shared_memory as shm, numpy as np
value = 3
while True:
    region = shm.create_shared_memory_region("r", 4096, 0)
    shm.set_shared_memory_region(region, [np.full(1024, value, np.int32)])
    print(shm.get_raw_handle(region).decode(), flush=True)
    if not sys.stdin.readline():
        break
    shm.destroy_shared_memory_region(region)
    value += 1
"""


@pytest.fixture(scope="module")
def shm() -> Any:
    """tritonclient's module; it cannot be imported without cuda-bindings."""
    return importlib.import_module("tritonclient.utils.cuda_shared_memory")


@pytest.fixture(scope="module")
def server(models: Path, start: Start) -> Server:
    for name, (text, config) in MODELS.items():
        repositories.write(models, name, config, text)
    return start(models, gpu=True)


@pytest.fixture
def client(server: Server) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(
        server.url, concurrency=4, network_timeout=120
    ) as triton_client:
        yield triton_client
        triton_client.unregister_cuda_shared_memory()


@pytest.fixture
def exporter() -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-c", EXPORTER_PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield child
    child.send_signal(signal.SIGCONT)
    child.kill()
    child.communicate()


def infer(
    client: Any, model: str, source: str, target: str, offset: int = 0, size: int = N * 4
) -> None:
    x = triton.InferInput("x", [N], "INT32")
    x.set_shared_memory(source, N * 4)
    y = triton.InferRequestedOutput("y")
    y.set_shared_memory(target, size, offset=offset)
    client.infer(model, [x], outputs=[y])


@pytest.mark.parametrize("model", ["gpu", "host"])
def test_regions_of_64_bytes(client: Any, shm: Any, model: str) -> None:
    """The driver puts small regions into one block; each region has its own bytes."""
    regions = [shm.create_shared_memory_region(f"r{k}", N * 4, 0) for k in range(8)]
    handles = [shm.get_raw_handle(region) for region in regions]
    try:
        for k, region in enumerate(regions):
            shm.set_shared_memory_region(region, [np.full(N, 10 * k, np.int32)])
            client.register_cuda_shared_memory(f"r{k}", handles[k], 0, N * 4)
        for k in range(0, 8, 2):
            infer(client, model, f"r{k}", f"r{k + 1}")
        for k in range(0, 8, 2):
            for index, value in ((k, 10 * k), (k + 1, 10 * k + 1)):
                result = shm.get_contents_as_numpy(regions[index], np.int32, [N])
                assert (result == value).all(), (index, result)
        client.unregister_cuda_shared_memory("r0")  # closes one of the regions in the block
        infer(client, model, "r2", "r7")
        assert (shm.get_contents_as_numpy(regions[7], np.int32, [N]) == 21).all()
        client.register_cuda_shared_memory("r0", handles[0], 0, N * 4)
        infer(client, model, "r4", "r0")
        assert (shm.get_contents_as_numpy(regions[0], np.int32, [N]) == 41).all()
        with pytest.raises(InferenceServerException, match="larger than its allocation of"):
            client.register_cuda_shared_memory("long", handles[1], 0, N * 4 + 1)
    finally:
        client.unregister_cuda_shared_memory()
        for region in regions:
            shm.destroy_shared_memory_region(region)


def test_an_exporter_that_is_stopped(client: Any, exporter: subprocess.Popen[str]) -> None:
    assert exporter.stdout
    handle = exporter.stdout.readline().strip()
    exporter.send_signal(signal.SIGSTOP)
    client.register_cuda_shared_memory("theirs", handle, 0, 4096)
    infer(client, "gpu", "theirs", "theirs", offset=64)
    client.unregister_cuda_shared_memory("theirs")


def test_memory_that_is_freed_and_allocated_again(
    server: Server, client: Any, shm: Any, exporter: subprocess.Popen[str]
) -> None:
    """The handle may be the same; a new client reads and writes the new memory."""
    assert exporter.stdout and exporter.stdin
    own_region = shm.create_shared_memory_region("mine", 4096, 0)
    worker_before = server.find_one("worker gpu")
    try:
        client.register_cuda_shared_memory("mine", shm.get_raw_handle(own_region), 0, 4096)
        for value in range(3, 13):
            handle = exporter.stdout.readline().strip()
            client.register_cuda_shared_memory(f"t{value}", handle, 0, 4096)
            infer(client, "gpu", f"t{value}", "mine")
            result = shm.get_contents_as_numpy(own_region, np.int32, [N])
            assert (result == value + 1).all(), (value, result)
            exporter.stdin.write("again\n")
            exporter.stdin.flush()
        for value in range(3, 12):  # all freed: any answer but the death of a worker
            with contextlib.suppress(InferenceServerException):
                infer(client, "gpu", f"t{value}", "mine")
        assert server.find_one("worker gpu") == worker_before
    finally:
        client.unregister_cuda_shared_memory()
        shm.destroy_shared_memory_region(own_region)


def test_a_device_that_is_full(server: Server, client: Any, shm: Any) -> None:
    """A worker without memory for its context responds 503; later requests succeed."""
    region = shm.create_shared_memory_region("r", 4096, 0)
    shm.set_shared_memory_region(region, [np.full(1024, 5, np.int32)])
    client.register_cuda_shared_memory("r", shm.get_raw_handle(region), 0, 4096)
    old_worker = server.find_one("worker host")
    old_worker.kill()
    until(
        "there is another worker",
        lambda: any(process.pid != old_worker.pid for process in server.find("worker host")),
    )
    server.wait_ready()
    allocations: list[Any] = []
    size = 1 << 34
    while size >= 1 << 20:
        try:
            allocations.append(torch.empty(size, dtype=torch.uint8, device="cuda:0"))
        except torch.OutOfMemoryError:
            size //= 2
    try:
        new_worker = server.find_one("worker host")
        with pytest.raises(InferenceServerException) as error_info:
            infer(client, "host", "r", "r", offset=64)
        assert error_info.value.status() == "503"
        assert "cannot use shared memory on device 0 now" in str(error_info.value)
        allocations.clear()
        torch.cuda.empty_cache()
        infer(client, "host", "r", "r", offset=64)
        assert (shm.get_contents_as_numpy(region, np.int32, [1024])[N : 2 * N] == 6).all()
        assert server.find_one("worker host") == new_worker, "the worker died of it"
    finally:
        allocations.clear()
        torch.cuda.empty_cache()
        client.unregister_cuda_shared_memory()
        shm.destroy_shared_memory_region(region)
