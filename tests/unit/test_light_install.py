"""The features of an installation without extras, and its messages about the missing ones."""

import pytest

from tests.support.servers import run_python

# As where neither torch nor the packages of text models are installed.
_WITHOUT_PACKAGES = """
import sys
for name in ("torch", "jinja2", "tokenizers", "safetensors", "onnxruntime"):
    sys.modules[name] = None
"""
_RUN_MODEL = """
import asyncio
import numpy as np
import shmserve.workers.main, shmserve.workers.backends.native, shmserve.workers.backends.onnx
from shmserve.workers.device import Device, inference_mode
buffer = Device("cpu").host_buffer(100)
assert len(buffer) == 100 and np.frombuffer(buffer, np.uint8).ctypes.data % 64 == 0
buffer[0] = 1
with inference_mode():
    pass
"""
_FIND_BACKEND = """
import sys
from shmserve.ipc.model_spec import ModelSpec
from shmserve.errors import Unavailable
from shmserve.workers import backends
try:
    backends.find(ModelSpec.of({"name": "m", "backend": sys.argv[1]}))
except Unavailable as error:
    print(error.message)
"""
_CLIENT = "import shmserve.client, shmserve.client.aio, sys; print(*sys.modules)"


def test_classes_and_onnx_need_no_torch() -> None:
    run_python("-c", _WITHOUT_PACKAGES + _RUN_MODEL, check=True)


@pytest.mark.parametrize(
    ("backend", "package", "command"),
    [
        ("pytorch", "torch", "pip install 'shmserve[torch]', or for the CPU only first: pip"),
        ("llm", "", "pip install 'shmserve[llm]'"),
        ("vllm", "", "pip install 'shmserve[vllm]'"),
    ],
)
def test_a_backend_without_packages_names_it(backend: str, package: str, command: str) -> None:
    output = run_python("-c", _WITHOUT_PACKAGES + _FIND_BACKEND, backend, check=True).stdout
    assert output.startswith(f"backend '{backend}' needs the package {package}")
    assert command in output and "Traceback" not in output


def test_a_client_loads_no_part_of_the_server() -> None:
    """The client's modules load faster than numpy."""
    loaded_modules = set(run_python("-c", _CLIENT, check=True).stdout.split())
    heavy = ("generation", "supervision", "unions")
    assert loaded_modules.isdisjoint(f"shmserve.ipc.messages.{name}" for name in heavy)
    assert not {"torch", "hashlib", "hmac", "secrets", "difflib", "zmq", "yaml"} & loaded_modules
    loaded = [name for name in loaded_modules if name.startswith("shmserve.")]
    assert not [name for name in loaded if name.split(".")[1] not in ("client", "errors", "ipc")]
