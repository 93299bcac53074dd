"""Model repositories for tests: copies of the folders in tests/models, and generated models."""

import shutil
from collections.abc import Sequence
from pathlib import Path

MODELS = Path(__file__).resolve().parents[1] / "models"

DATATYPES = {
    "BOOL": "TYPE_BOOL", "UINT8": "TYPE_UINT8", "UINT16": "TYPE_UINT16", "UINT32": "TYPE_UINT32",
    "UINT64": "TYPE_UINT64", "INT8": "TYPE_INT8", "INT16": "TYPE_INT16", "INT32": "TYPE_INT32",
    "INT64": "TYPE_INT64", "FP16": "TYPE_FP16", "FP32": "TYPE_FP32", "FP64": "TYPE_FP64",
    "BYTES": "TYPE_STRING", "BF16": "TYPE_BF16",
}  # fmt: skip


_PYTHON_MODEL = """\
import asyncio, gc, json, os, sys, threading, time

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
{before}

class TritonPythonModel:
    def initialize(self, args):
        self.name = args["model_name"]

    def execute(self, requests):
        return [self.one(request) for request in requests]

    def input(self, request, name):
        tensor = pb_utils.get_input_tensor_by_name(request, name)
        return None if tensor is None else tensor.as_numpy()

    def response(self, **outputs):
        return pb_utils.InferenceResponse([pb_utils.Tensor(*item) for item in outputs.items()])

    def failure(self, text):
        return pb_utils.InferenceResponse([], pb_utils.TritonError(text))

{methods}
"""


def python_model(methods: str, before: str = "") -> str:
    """Return a model's source: `one`, which answers a request, or others of the class's methods.

    They may be indented as in a class; the lines `before` come before the class.
    """
    return _PYTHON_MODEL.replace("{before}", before).replace("{methods}", methods)


def add(repository: Path, *names: str, config: str = "") -> None:
    """Copy models of tests/models into `repository`; `config` is appended to each config.pbtxt."""
    for name in names:
        add_as(repository, name, name, config)


def add_as(repository: Path, name: str, source: str, config: str = "") -> Path:
    """Copy the model `source` as `name` with more `config`; return its folder.

    A source without code has the code of "identity".
    """
    folder = repository / name
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(MODELS / source, folder, ignore=ignored)
    if not (folder / "1").exists():
        shutil.copytree(MODELS / "identity" / "1", folder / "1", ignore=ignored)
    path = folder / "config.pbtxt"
    if path.exists():
        path.write_text(
            path.read_text().replace(f'name: "{source}"', f'name: "{name}"') + config + "\n"
        )
    return folder


_LOADS_AT_THE_GATE = """\
    def initialize(self, args):
        self.wait({"batch": ["load"], "rows": [], "pid": os.getpid()})

    def execute("""


def add_slow(repository: Path, name: str) -> Path:
    """Add the model "gated", which also waits at the gate while it is loaded; return its folder."""
    folder = add_as(repository, name, "gated")
    insert(folder, _LOADS_AT_THE_GATE)
    return folder


def insert(folder: Path, before_execute: str) -> None:
    """Insert code before `execute` in a model; the code must end with `    def execute(`."""
    code = folder / "1" / "model.py"
    code.write_text(code.read_text().replace("    def execute(", before_execute, 1))


def identity_config(
    name: str,
    datatype: str,
    dims: Sequence[int],
    max_batch_size: int = 0,
    inputs: int = 1,
    settings: str = "",
) -> str:
    """Return the configuration of a Python model with OUTPUTn like INPUTn."""
    kind = DATATYPES[datatype]
    shape = ", ".join(map(str, dims))

    def tensors(section: str) -> str:
        rows = (
            f'{{ name: "{section.upper()}{n}" data_type: {kind} dims: [ {shape} ] }}'
            for n in range(inputs)
        )
        return f"{section} [ {', '.join(rows)} ]"

    return (
        f'name: "{name}"\nbackend: "python"\nmax_batch_size: {max_batch_size}\n'
        f"{tensors('input')}\n{tensors('output')}\n{settings}\n"
    )


def add_identity(
    repository: Path,
    name: str,
    datatype: str,
    dims: Sequence[int],
    max_batch_size: int = 0,
    inputs: int = 1,
    settings: str = "",
    source: str = "identity",
) -> None:
    """Add a model with the interface of `identity_config` and the code of tests/models/`source`."""
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    shutil.copy(MODELS / source / "1" / "model.py", folder / "1" / "model.py")
    (folder / "config.pbtxt").write_text(
        identity_config(name, datatype, dims, max_batch_size, inputs, settings)
    )


def write(repository: Path, name: str, config: str, source: str, version: int = 1) -> Path:
    """Write a model from text; return its folder. Without `config` it has no config.pbtxt."""
    folder = repository / name
    (folder / str(version)).mkdir(parents=True, exist_ok=True)
    (folder / str(version) / "model.py").write_text(source)
    if config:
        (folder / "config.pbtxt").write_text(config)
    return folder
