"""No import at a model's first request: it would be slow, and its memory not shared."""

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from tests.support.onnx_models import FLOAT, save

SIZE = 1 << 18  # number of floats; a tensor of this size is passed in a region
# Each program runs like a worker that was forked from its zygote: packages are imported, the model
# is not loaded.
PROGRAM = f"""
import os, sys
from pathlib import Path
import numpy, onnxruntime, torch
from shmserve.workers import backends
from tests.rigs import worker_rig as rigs

def first_request(name, folder):
    tensor = rigs.tensor_config
    config = rigs.model_config(
        [tensor("x", "FP32", [{SIZE}])], [tensor("output", "FP32", [{SIZE}])], backend=name
    )
    region = rigs.Region(2 * 4 * {SIZE})
    place = region.write(0, numpy.ones({SIZE}, numpy.float32))
    x = rigs.tensor("x", numpy.ones({SIZE}, numpy.float32), place)
    asked = [rigs.RequestedOutput("output", region.memory_range(4 * {SIZE}, 4 * {SIZE}))]
    with rigs.rig(Path(folder)) as worker:
        backend = backends.find(rigs.ModelSpec.of(config))(worker.context)
        worker.serve(backend, config)
        before = set(sys.modules)
        (reply,) = worker.batch(rigs.inference(x, outputs=asked))
        assert not reply.code, reply.message
        print(folder, *sorted(set(sys.modules) - before), flush=True)

for case in sys.argv[1:]:
    if not os.fork():
        first_request(*case.split(":"))
        os._exit(0)
    os.wait()
"""
PYTHON_MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("output", x.as_numpy() * 2)])
            for x in (pb_utils.get_input_tensor_by_name(each, "x") for each in requests)
        ]
"""
NATIVE_MODEL = """
import torch
from shmserve.model import FP32

class Model:
    def predict(self, x: FP32[torch.Tensor, -1]) -> FP32[torch.Tensor, -1]:
        return x * 2
"""
CLASS = """
import torch

class Net(torch.nn.Module):
    def forward(self, x):
        return x * 2
"""


class Doubling(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def save_script(folder: Path) -> None:
    torch.jit.save(torch.jit.script(Doubling()), folder / "model.pt")


def save_exported(folder: Path) -> None:
    torch.export.save(torch.export.export(Doubling(), (torch.ones(SIZE),)), folder / "model.pt2")


def write_code(code: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "model.py").write_text(code)

    return write


def save_onnx(folder: Path) -> None:
    save(folder, [("Add", "x x", "output")], [("x", FLOAT, [SIZE])], [("output", FLOAT, [SIZE])])


MODEL_CASES = {
    "python": ("python", write_code(PYTHON_MODEL)),
    "native": ("native", write_code(NATIVE_MODEL)),
    "scripted": ("pytorch", save_script),
    "exported": ("pytorch", save_exported),
    "class": ("pytorch", write_code(CLASS)),
    "onnx": ("onnxruntime", save_onnx),
}


def test_a_first_request_imports_nothing(tmp_path: Path) -> None:
    for name, (_, write) in MODEL_CASES.items():
        folder = tmp_path / name / "m" / "1"
        folder.mkdir(parents=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            write(folder)
    cases = [f"{backend}:{tmp_path / name}" for name, (backend, _) in MODEL_CASES.items()]
    command = [sys.executable, "-c", PROGRAM, *cases]
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert result.stdout.splitlines() == [str(tmp_path / name) for name in MODEL_CASES], (
        result.stderr
    )
