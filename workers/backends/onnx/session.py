"""The session that runs an ONNX file, with its threads and optimisations on a CPU or a GPU, and
what the file says of inputs and outputs.

Of a configuration: `optimization.graph.level` (-1: basic, 1: extended, 2: none; else all),
`optimization.execution_accelerators` (below), and the parameters intra_op_thread_count,
inter_op_thread_count, execution_mode (0: sequential, 1: parallel), enable_mem_arena and
enable_mem_pattern (0 or 1); what begins with "session." or "ep." goes to onnxruntime as it is.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from shmserve.errors import InvalidArgument, Unavailable
from shmserve.ipc.model_spec import ModelSpec, TensorSpec
from shmserve.ipc.tensors.arrays import STORED
from shmserve.ipc.tensors.datatypes import TO_CONFIG
from shmserve.ipc.tensors.signature import Signature, agree, shape_text
from shmserve.workers.backends import ModelContext
from shmserve.workers.backends.described import Described, Description

_SWITCHES = {"enable_mem_arena": "enable_cpu_mem_arena", "enable_mem_pattern": "enable_mem_pattern"}
# What a configuration calls the providers that onnxruntime may have besides these two.
_ACCELERATORS = {
    "tensorrt": "TensorrtExecutionProvider",
    "openvino": "OpenVINOExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "migraphx": "MIGraphXExecutionProvider",
    "dnnl": "DnnlExecutionProvider",
}
_CUDA, _CPU = "CUDAExecutionProvider", "CPUExecutionProvider"


def import_onnxruntime() -> Any:
    """The package. Raises Unavailable when it is missing, or cannot be imported."""
    try:
        runtime = importlib.import_module("onnxruntime")
    except ImportError as error:
        raise Unavailable(
            "backend 'onnxruntime' needs the package onnxruntime, which cannot be imported "
            f"({error}): pip install 'shmserve[onnx]', or onnxruntime-gpu for CUDA"
        ) from None
    runtime.disable_telemetry_events()  # what the environment says is read on import, if at all
    return runtime


def open_session(context: ModelContext, config: ModelSpec, path: Path) -> Any:
    """A session of the file on the instance's device.

    Raises InvalidArgument for an option with a value that it cannot have, Unavailable where
    onnxruntime lacks what the device needs, and what onnxruntime raises.
    """
    runtime = import_onnxruntime()
    options = session_options(runtime, config, context.threads)
    wanted = providers(config, context.kind, context.device_id)
    present = runtime.get_available_providers()
    for name, _ in wanted:
        if name not in present:
            raise Unavailable(
                f"model '{context.model_name}' needs {name}, and the onnxruntime that is installed "
                f"has {', '.join(present)} only" + _HINTS.get(name, "")
            )
    session = runtime.InferenceSession(str(path), options, providers=wanted)
    used = session.get_providers()
    for name, _ in wanted:
        if name not in used:  # onnxruntime goes on with the CPU where a library does not load
            raise Unavailable(f"{name} of onnxruntime cannot be used on {context.device}: see log")
    return session


_HINTS = {_CUDA: ": pip install onnxruntime-gpu, or set instance_group to KIND_CPU"}


def session_options(runtime: Any, config: ModelSpec, threads: int) -> Any:
    """onnxruntime's SessionOptions for a configuration; `threads` where it says nothing of them."""
    options = runtime.SessionOptions()
    given = config.parameters
    options.intra_op_num_threads = _whole(given, "intra_op_thread_count", threads)
    options.inter_op_num_threads = _whole(given, "inter_op_thread_count", 0)
    modes = runtime.ExecutionMode
    parallel = _switch(given, "execution_mode", False)
    options.execution_mode = modes.ORT_PARALLEL if parallel else modes.ORT_SEQUENTIAL
    for key, attribute in _SWITCHES.items():
        setattr(options, attribute, _switch(given, key, True))
    levels = runtime.GraphOptimizationLevel
    options.graph_optimization_level = {
        -1: levels.ORT_ENABLE_BASIC,
        1: levels.ORT_ENABLE_EXTENDED,
        2: levels.ORT_DISABLE_ALL,
    }.get(config.optimization.graph_level, levels.ORT_ENABLE_ALL)
    for key, value in given.items():
        if key.startswith(("session.", "ep.")):
            options.add_session_config_entry(key, value)
    return options


def providers(config: ModelSpec, kind: str, device_id: int) -> list[tuple[str, dict[str, str]]]:
    """onnxruntime's providers, the preferred first, with their options.

    Raises InvalidArgument for an accelerator of a name that is none.
    """
    side = "gpu" if kind == "GPU" else "cpu"
    accelerators = config.optimization.execution_accelerators
    found: dict[str, dict[str, str]] = {}
    device = {"device_id": str(device_id)} if side == "gpu" else {}
    for accelerator in accelerators.get(f"{side}_execution_accelerator", ()):
        name = _ACCELERATORS.get(accelerator.name)
        if name is None:
            raise InvalidArgument(
                f"unknown execution accelerator '{accelerator.name}' of model "
                f"'{config.name}', known are {', '.join(_ACCELERATORS)}"
            )
        found[name] = {**device, **accelerator.parameters}
    if side == "gpu":
        found.setdefault(_CUDA, device)
    found[_CPU] = {}
    return list(found.items())


def _whole(given: dict[str, str], key: str, default: int) -> int:
    value = given.get(key)
    if value is None:
        return default
    if not value.isdecimal():
        raise InvalidArgument(f"parameter '{key}' must be an integer >= 0, got '{value}'")
    return int(value)


def _switch(given: dict[str, str], key: str, default: bool) -> bool:
    value = given.get(key)
    if value is None:
        return default
    if value not in ("0", "1"):
        raise InvalidArgument(f"parameter '{key}' must be 0 or 1, got '{value}'")
    return value == "1"


# onnxruntime's names of the datatypes: numpy's, but for these.
_OWN_NAMES = {"FP32": "float", "FP64": "double", "BF16": "bfloat16", "BYTES": "string"}
_DATATYPES = {f"tensor({_OWN_NAMES.get(name, kind.name)})": name for name, kind in STORED.items()}
_UNBOUNDED = 2**31


def describe(session: Any) -> Description:
    """Read a session's file. Raises InvalidArgument for what the protocol has no datatype for."""
    inputs = tuple(_described("input", node) for node in session.get_inputs())
    outputs = tuple(_described("output", node) for node in session.get_outputs())
    return Description(inputs, outputs, _largest_batch([*inputs, *outputs]))


def _described(what: str, node: Any) -> Described:
    datatype = _DATATYPES.get(node.type)
    if datatype is None:
        raise InvalidArgument(f"{what} '{node.name}' of the ONNX file is a {node.type}")
    shape = list(node.shape)
    dims = tuple(size if isinstance(size, int) and size >= 0 else -1 for size in shape)
    symbols = tuple(size if isinstance(size, str) else "" for size in shape)
    return Described(node.name, datatype, dims, symbols)


def _largest_batch(tensors: Sequence[Described]) -> int:
    """Files seldom say which dimension is the batch's: the first one, if it varies everywhere."""
    return _UNBOUNDED if all(tensor.dims[:1] == (-1,) for tensor in tensors) else 0


def check(
    signature: Signature, description: Description, made: Collection[str] = frozenset()
) -> None:
    """Raises InvalidArgument when a configuration promises what the file cannot do. `made`: inputs
    that are made of the batch, which clients do not send, and outputs that are cut."""
    name, most = signature.name, signature.max_batch_size
    for tensor in (*description.inputs, *filter(_ranked, description.outputs)) if most > 0 else ():
        if tensor.dims[:1] != (-1,):
            raise InvalidArgument(
                f"model '{name}' has max_batch_size {most}, but the first dimension of its tensor "
                f"'{tensor.name}', {shape_text(tensor.dims)}, is no batch dimension, which is one "
                "that varies in all"
            )
    sides: tuple[tuple[str, dict[str, TensorSpec], tuple[Described, ...]], ...] = (
        ("input", signature.inputs, description.inputs),
        ("output", signature.outputs, description.outputs),
    )
    for what, specs, tensors in sides:
        known = {tensor.name: tensor for tensor in tensors}
        for spec in specs.values():
            if spec.name not in known:
                raise InvalidArgument(
                    f"unexpected inference {what} '{spec.name}', allowed {what}s are: "
                    f"{', '.join(sorted(known))}"
                )
            if spec.name not in made:
                _check_tensor(what, spec, known[spec.name], signature)
    lost = sorted({tensor.name for tensor in description.inputs} - {*signature.inputs, *made})
    if lost:
        raise InvalidArgument(
            f"unable to load model '{name}', configuration expects {len(signature.inputs)} inputs, "
            f"model provides {len(description.inputs)}: '{lost[0]}' is missing"
        )


def _ranked(output: Described) -> bool:
    """Whether an output has dimensions: onnxruntime says of a scalar what it says of one that it
    does not know the rank of."""
    return bool(output.dims)


def _check_tensor(what: str, spec: TensorSpec, tensor: Described, signature: Signature) -> None:
    if spec.datatype != tensor.datatype:
        raise InvalidArgument(
            f"unable to load model '{signature.name}', configuration expects datatype "
            f"{TO_CONFIG[spec.datatype]} for {what} '{spec.name}', model provides "
            f"{TO_CONFIG[tensor.datatype]}"
        )
    dims = spec.model_dims
    want = tensor.dims[1:] if signature.max_batch_size > 0 else tensor.dims
    if (what == "input" or _ranked(tensor)) and not spec.ragged and not agree(dims, want):
        raise InvalidArgument(
            f"model '{signature.name}', tensor '{spec.name}': the model expects "
            f"{len(want)} dimensions (shape {shape_text(want)}) but the model configuration "
            f"specifies {len(dims)} dimensions (shape {shape_text(dims)})"
        )
