"""Models and their clients' tensors on a real device: batches, backends, streams, failures."""

import gc
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shmserve.client
from tests.support import repositories
from tests.support.gates import DOUBLING_CUDA_MODEL, holding
from tests.support.servers import ROOT, Server, Start
from tests.support.waiting import until

pytestmark = pytest.mark.gpu

SIDE = 4096
ROW = SIDE * 4
# Long on the device, and no time at all to ask for.
SLOW_MODEL = """
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        torch.cuda._sleep(300_000_000)
        return x * 2
"""
# The first value selects the fault: 1 asks for more memory than any device has, 2 breaks CUDA in
# this process.
FRAGILE_MODEL = """
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        what = int(x[0, 0])
        if what == 1:
            torch.empty(1 << 45, dtype=torch.uint8, device=x.device)
        if what == 2:
            torch.arange(4, device=x.device)[(x + 100).long()]
        return x * 2
"""
PYTHON = """
import triton_python_backend_utils as pb
from torch.utils.dlpack import from_dlpack

class TritonPythonModel:
    def execute(self, requests):
        made = []
        for request in requests:
            given = pb.get_input_tensor_by_name(request, "x")
            assert not given.is_cpu()
            x = from_dlpack(given.to_dlpack())
            asked = pb.InferenceRequest(
                model_name="twice",
                requested_output_names=["y"],
                inputs=[pb.Tensor.from_dlpack("x", x + 1)],
            )
            found = pb.get_output_tensor_by_name(asked.exec(), "y")
            y = from_dlpack(found.to_dlpack()).to(x.device)
            made.append(pb.InferenceResponse([pb.Tensor.from_dlpack("y", y)]))
        return made
"""
# The model's tensors are in host memory, wherever the client's are.
HOST = """
import triton_python_backend_utils as pb

class TritonPythonModel:
    def execute(self, requests):
        made = []
        for request in requests:
            x = pb.get_input_tensor_by_name(request, "x")
            assert x.is_cpu()
            words = pb.get_input_tensor_by_name(request, "words").as_numpy()
            made.append(pb.InferenceResponse([
                pb.Tensor("y", x.as_numpy() * 2), pb.Tensor("again", words[:, ::-1])
            ]))
        return made
"""
NATIVE = f"""
from torch import Tensor
from shmserve.model import FP32

class Model:
    def predict(self, x: FP32[Tensor, {SIDE}]) -> FP32[Tensor, {SIDE}]:
        assert x.is_cuda
        return x * 2
"""
CONFIG = f"""
backend: "%s"
max_batch_size: 8
input [ {{ name: "x" data_type: TYPE_FP32 dims: [ {SIDE} ] }} ]
output [ {{ name: "y" data_type: TYPE_FP32 dims: [ {SIDE} ] }} ]
"""
STRING_MODEL = """
input [ { name: "words" data_type: TYPE_STRING dims: [ 2 ] } ]
output [ { name: "again" data_type: TYPE_STRING dims: [ 2 ] } ]
"""
ON_CPU = "instance_group [ { kind: KIND_CPU count: 1 } ]\n"
ON_GPU = "instance_group [ { kind: KIND_GPU gpus: [ 0 ] count: 1 } ]\n"
DYNAMIC_BATCHING = "dynamic_batching { }\n"
KEEPS_ON_DEVICE = (
    'parameters { key: "FORCE_CPU_ONLY_INPUT_TENSORS" value { string_value: "no" } }\n'
)
MODELS = {
    "twice": (DOUBLING_CUDA_MODEL, CONFIG % "pytorch" + ON_GPU + DYNAMIC_BATCHING),
    "slow": (SLOW_MODEL, CONFIG % "pytorch" + ON_GPU),
    "fragile": (FRAGILE_MODEL, CONFIG % "pytorch" + ON_GPU),
    "python": (PYTHON, CONFIG % "python" + ON_GPU + KEEPS_ON_DEVICE),
    "host": (HOST, CONFIG % "python" + STRING_MODEL + ON_CPU),
    "anywhere": (DOUBLING_CUDA_MODEL, CONFIG % "pytorch"),
    "native": (NATIVE, 'backend: "native"\n'),
}
PROGRAM = f"""
import sys, shmserve.client
client = shmserve.client.connect(sys.argv[1])
region = client.allocate({{"x": ((1, {SIDE}), "FP32"), "y": ((1, {SIDE}), "FP32")}}, device="cuda")
region["x"].fill(3)
print("asks", flush=True)
client.infer("twice", region)
"""


@pytest.fixture(scope="module")
def server(models: Path, start: Start) -> Server:
    for name, (text, config) in MODELS.items():
        repositories.write(models, name, config, text)
    return start(models, grpc=True, gpu=True)


@pytest.fixture
def client(server: Server) -> Iterator[shmserve.client.Server]:
    with shmserve.client.connect(server.run_dir) as native_client:
        yield native_client
    gc.collect()


def forms(rows: int = 1) -> dict[str, tuple[tuple[int, int], str]]:
    return {"x": ((rows, SIDE), "FP32"), "y": ((rows, SIDE), "FP32")}


def batch(rows: int = 1, first_value: int = 0) -> np.ndarray[Any, Any]:
    values = np.arange(rows * SIDE, dtype=np.float32).reshape(rows, SIDE) % 1009
    return values + np.float32(first_value)


def executions(server: Server, model: str) -> float:
    return server.metric("nv_inference_exec_count", model=model)


def copied_bytes(server: Server) -> float:
    return server.metric("shmserve_copied_bytes_total")


def test_a_batch_is_gathered_from_all_sides(server: Server, client: shmserve.client.Server) -> None:
    """Rows of three allocations and of a message, answered into two of them and by messages."""
    with (
        client.allocate(forms(), device="cuda:0") as first,
        client.allocate(forms(2), device="cuda:0") as second,
        client.allocate(forms(), device="cuda:0") as third,
    ):
        for region, rows, first_value in ((first, 1, 1), (second, 2, 2), (third, 1, 3)):
            region["x"].fill(batch(rows, first_value))
        executions_before = executions(server, "twice")
        with holding(server.gate) as until_it_runs:
            running_future = client.infer_async("twice", x=batch())
            until_it_runs()
            futures = [
                client.infer_async("twice", first),
                client.infer_async("twice", second),
                client.infer_async("twice", x=third["x"]),
                client.infer_async("twice", x=batch(2, 4)),
            ]
            server.wait_pending("twice", 4)
        assert (running_future.result(30)["y"] == batch() * 2).all()
        results = [future.result(30) for future in futures]
        assert executions(server, "twice") == executions_before + 2
        assert (first["y"].numpy() == batch(1, 1) * 2).all()
        assert (second["y"].numpy() == batch(2, 2) * 2).all()
        assert (results[2]["y"] == batch(1, 3) * 2).all()
        assert (results[3]["y"] == batch(2, 4) * 2).all()


def test_adjacent_rows_are_batched_uncopied(server: Server, client: shmserve.client.Server) -> None:
    """The inputs are not gathered. Only the outputs are copied, on the device, to their ranges."""
    half = ((2, SIDE), "FP32")
    with client.allocate({"a": half, "b": half, "c": half, "d": half}, device="cuda:0") as region:
        region["a"].fill(batch(4)[:2])
        region["b"].fill(batch(4)[2:])
        client.infer("twice", x=batch())  # until the model is known
        copied_before = copied_bytes(server)
        client.infer("twice", x=batch())
        single_copied = copied_bytes(server) - copied_before
        with holding(server.gate) as until_it_runs:
            running_future = client.infer_async("twice", x=batch())
            until_it_runs()
            joint_futures = [
                client.infer_async("twice", {"x": region[x]}, outputs={"y": region[y]})
                for x, y in (("a", "c"), ("b", "d"))
            ]
            server.wait_pending("twice", 2)
        for future in (running_future, *joint_futures):
            future.result(30)
        result = np.concatenate([region["c"].numpy(), region["d"].numpy()])
        assert (result == batch(4) * 2).all()
        assert copied_bytes(server) - copied_before == 2 * single_copied + 4 * ROW


@pytest.mark.parametrize("model", ["twice", "slow", "anywhere", "native"])
def test_the_response_follows_the_devices_work(client: shmserve.client.Server, model: str) -> None:
    """The device's work of the model is visible to every process when the response has arrived."""
    with client.allocate(forms(), device="cuda:0") as region:
        name = "output" if model == "native" else "y"
        for turn in range(3):
            region["x"].fill(batch(1, turn))
            region["y"].fill(0)
            client.infer(model, {"x": region["x"]}, outputs={name: region["y"]})
            assert (region["y"].numpy() == batch(1, turn) * 2).all()


def test_a_python_model_that_calls_another_model(client: shmserve.client.Server) -> None:
    """Its tensors stay on the device; those of its call travel in host memory."""
    with client.allocate(forms(2), device="cuda:0") as region:
        region["x"].fill(batch(2))
        assert (client.infer("python", x=region["x"])["y"] == (batch(2) + 1) * 2).all()
        client.infer("python", region)
        assert (region["y"].numpy() == (batch(2) + 1) * 2).all()


def test_a_model_on_the_cpu(server: Server) -> None:
    """Tensors on the device come to it, and go back there, through host memory; strings, too."""
    grpc = importlib.import_module("tritonclient.grpc")
    shm = importlib.import_module("tritonclient.utils.cuda_shared_memory")
    wire = np.frombuffer(b"\3\0\0\0one\5\0\0\0three", np.uint8)
    numbers = shm.create_shared_memory_region("numbers", 2 * ROW, 0)
    strings = shm.create_shared_memory_region("strings", 2 * wire.nbytes, 0)
    try:
        shm.set_shared_memory_region(numbers, [batch()])
        shm.set_shared_memory_region(strings, [wire])
        with grpc.InferenceServerClient(server.grpc_url) as client:
            for name, region in (("numbers", numbers), ("strings", strings)):
                handle = shm.get_raw_handle(region)
                client.register_cuda_shared_memory(name, handle, 0, region._byte_size)
            x = grpc.InferInput("x", [1, SIDE], "FP32")
            x.set_shared_memory("numbers", ROW)
            tensor = grpc.InferInput("words", [1, 2], "BYTES")
            tensor.set_shared_memory("strings", wire.nbytes)
            y = grpc.InferRequestedOutput("y")
            y.set_shared_memory("numbers", ROW, offset=ROW)
            requested_output = grpc.InferRequestedOutput("again")
            requested_output.set_shared_memory("strings", wire.nbytes, offset=wire.nbytes)
            client.infer("host", [x, tensor], outputs=[y, requested_output])
            client.unregister_cuda_shared_memory()
        result = shm.get_contents_as_numpy(numbers, np.float32, [2, SIDE])
        assert (result[1:] == batch() * 2).all()
        turned = shm.get_contents_as_numpy(strings, np.uint8, [2 * wire.nbytes])[wire.nbytes :]
        assert turned.tobytes() == b"\5\0\0\0three\3\0\0\0one"
    finally:
        shm.destroy_shared_memory_region(numbers)
        shm.destroy_shared_memory_region(strings)


def test_instances_are_placed_on_existing_devices(server: Server) -> None:
    """The default is Triton's: one instance on each device."""
    with server.http() as http:
        groups = http.get("/v2/models/anywhere/config").ok().json()["instance_group"]
    assert [(group["kind"], group["count"], group["gpus"]) for group in groups] == [
        ("KIND_GPU", 1, list(range(torch.cuda.device_count())))
    ]


def test_a_full_device_fails_the_request_alone(client: shmserve.client.Server) -> None:
    with pytest.raises(shmserve.client.Unavailable, match="not enough memory on device 'cuda:0'"):
        client.infer("fragile", x=np.full((1, SIDE), 1, np.float32))
    assert (client.infer("fragile", x=batch())["y"] == batch() * 2).all()


def test_a_failing_device_costs_one_worker(server: Server, client: shmserve.client.Server) -> None:
    """An invalid access breaks CUDA for good in its process; no other client notices."""
    with client.allocate(forms(), device="cuda:0") as region:
        region["x"].fill(batch())
        client.infer("fragile", region)
        old_worker = server.find_one("worker fragile")
        with pytest.raises(shmserve.client.Internal, match="worker died while running"):
            client.infer("fragile", x=np.full((1, SIDE), 2, np.float32))
        client.infer("twice", region)
        until("there is another worker", lambda: old_worker not in server.find("worker fragile"))
        region["y"].fill(0)
        client.infer("fragile", region, timeout=60)
        assert (region["y"].numpy() == batch() * 2).all()


def test_a_program_that_is_killed_while_its_request_runs(
    server: Server, client: shmserve.client.Server
) -> None:
    command = [sys.executable, "-c", PROGRAM, str(server.run_dir)]
    with (
        holding(server.gate) as until_it_runs,
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as program,
    ):
        assert program.stdout and program.stdout.readline() == "asks\n"
        until_it_runs()
        program.kill()
        program.wait()
    with client.allocate(forms(), device="cuda:0") as region:
        region["x"].fill(batch())
        client.infer("twice", region, timeout=60)
        assert (region["y"].numpy() == batch() * 2).all()


def test_over_grpc(server: Server) -> None:
    """A region is registered over one protocol and used over the other."""
    grpc = importlib.import_module("tritonclient.grpc")
    http = importlib.import_module("tritonclient.http")
    shm = importlib.import_module("tritonclient.utils.cuda_shared_memory")
    region = shm.create_shared_memory_region("g", 2 * ROW, 0)
    try:
        shm.set_shared_memory_region(region, [batch()])
        with (
            grpc.InferenceServerClient(server.grpc_url) as grpc_client,
            http.InferenceServerClient(server.url) as http_client,
        ):
            grpc_client.register_cuda_shared_memory("g", shm.get_raw_handle(region), 0, 2 * ROW)
            region_statuses = grpc_client.get_cuda_shared_memory_status(as_json=True)
            assert region_statuses["regions"]["g"]["byte_size"] == str(2 * ROW)
            for listener, kind in ((grpc_client, grpc), (http_client, http)):
                shm.set_shared_memory_region(region, [np.zeros((2, SIDE), np.float32)])
                shm.set_shared_memory_region(region, [batch()])
                x = kind.InferInput("x", [1, SIDE], "FP32")
                x.set_shared_memory("g", ROW)
                y = kind.InferRequestedOutput("y")
                y.set_shared_memory("g", ROW, offset=ROW)
                listener.infer("twice", [x], outputs=[y])
                result = shm.get_contents_as_numpy(region, np.float32, [2, SIDE])
                assert (result[1:] == batch() * 2).all()
            http_client.unregister_cuda_shared_memory("g")
            with pytest.raises(grpc.InferenceServerException, match="Unable to find"):
                grpc_client.infer("twice", [_shared_input(grpc)])
            with pytest.raises(grpc.InferenceServerException, match="invalid args"):
                grpc_client.register_cuda_shared_memory("g", bytes(64), 0, ROW)
    finally:
        shm.destroy_shared_memory_region(region)


def _shared_input(kind: Any) -> Any:
    x = kind.InferInput("x", [1, SIDE], "FP32")
    x.set_shared_memory("g", ROW)
    return x
