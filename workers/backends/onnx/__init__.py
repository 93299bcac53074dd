"""Backend `onnxruntime`: ONNX files on the CPU or, with onnxruntime-gpu, on a GPU.

The file is `default_model_filename` (model.onnx) in the version folder. Inputs, outputs and batch
size need no configuration. A model batches if the first dimension of all its tensors varies, up to
4 rows or --backend-config=onnxruntime,default-max-batch-size=N.

These settings of a configuration have an effect:

    optimization.graph.level                 -1: basic, 1: extended, 2: none; else all
    optimization.execution_accelerators      tensorrt, openvino, cuda, migraphx, dnnl
    model_operations.op_library_filename     libraries of custom operators
    parameters                               intra_op_thread_count, inter_op_thread_count,
                                             execution_mode (0: sequential, 1: parallel),
                                             enable_mem_arena, enable_mem_pattern (a boolean),
                                             memory.enable_memory_arena_shrinkage,
                                             cudnn_conv_algo_search, gpu_mem_limit,
                                             arena_extend_strategy, do_copy_in_default_stream
                                             (on a GPU)

Parameters that begin with "session." or "ep." are passed to onnxruntime unchanged. The thread
counts may also be set for all models, with
--backend-config=onnxruntime,intra_op_thread_count=N.

An initializer that the file lists as an input may be configured as an optional input.
A tensor of rank 0 has one element for clients. Outputs are returned with their true shape.

binding.py      binds inputs and outputs of the session to memory of the server
"""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shmserve.errors import Internal, InvalidArgument, Unavailable, missing_package
from shmserve.ipc.model_spec import ModelSpec, TensorSpec
from shmserve.ipc.tensors.arrays import STORAGE_DTYPES
from shmserve.ipc.tensors.datatypes import TO_CONFIG
from shmserve.ipc.tensors.signature import Signature, shape_text, shapes_match
from shmserve.workers.backends import (
    Backend,
    ModelContext,
    Request,
    Response,
    parse_boolean,
    parse_integer,
)
from shmserve.workers.backends.onnx.binding import DeviceBinding, HostBinding
from shmserve.workers.batch.ragged import RaggedRules
from shmserve.workers.batch.runner import Runner
from shmserve.workers.device import Device, open_device
from shmserve.workers.tensor_specs import (
    FileDescription,
    FileTensor,
    as_configured,
    as_scalars,
    complete,
    fits_scalar,
    generated_names,
    with_generated_tensors,
)

_SWITCHES = {"enable_mem_arena": "enable_cpu_mem_arena", "enable_mem_pattern": "enable_mem_pattern"}
# The configuration's names of further execution providers.
_ACCELERATORS = {
    "tensorrt": "TensorrtExecutionProvider",
    "openvino": "OpenVINOExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "migraphx": "MIGraphXExecutionProvider",
    "dnnl": "DnnlExecutionProvider",
}
# Parameters of a configuration that are options of the CUDA provider.
_CUDA_PARAMETERS = (
    *("cudnn_conv_algo_search", "gpu_mem_limit", "arena_extend_strategy"),
    "do_copy_in_default_stream",
)
# onnxruntime's option names by Triton's names, and onnxruntime's values by Triton's numbers.
_OPTION_NAMES = {
    "max_workspace_size_bytes": "trt_max_workspace_size",
    "int8_calibration_table_name": "trt_int8_calibration_table_name",
    "int8_use_native_calibration_table": "trt_int8_use_native_calibration_table",
}
_OPTION_VALUES = {
    "cudnn_conv_algo_search": {"0": "EXHAUSTIVE", "1": "HEURISTIC", "2": "DEFAULT"},
    "arena_extend_strategy": {"0": "kNextPowerOfTwo", "1": "kSameAsRequested"},
}
_PRECISIONS = {"FP32": {}, "FP16": {"trt_fp16_enable": "1"}, "INT8": {"trt_int8_enable": "1"}}
_SHRINKAGE_KEY = "memory.enable_memory_arena_shrinkage"
_CUDA, _CPU = "CUDAExecutionProvider", "CPUExecutionProvider"


def import_onnxruntime() -> Any:
    """Return the package onnxruntime; raise Unavailable if it cannot be imported."""
    try:
        runtime = importlib.import_module("onnxruntime")
    except ImportError as error:
        message = missing_package("backend 'onnxruntime'", error, "onnx")
        raise Unavailable(f"{message}, or onnxruntime-gpu for CUDA") from None
    # The environment variable for this would have to be set before the import.
    runtime.disable_telemetry_events()
    return runtime


def open_session(context: ModelContext, config: ModelSpec, path: Path) -> Any:
    """Return a session of the file on the instance's device. Errors of onnxruntime are passed on.

    Raises:
        InvalidArgument: An option has an invalid value.
        Unavailable: onnxruntime does not support the device.
    """
    runtime = import_onnxruntime()
    server_settings = context.backend_config
    defaults = {key: server_settings[key] for key in _THREAD_PARAMETERS if key in server_settings}
    config = replace(config, parameters={**defaults, **config.parameters})
    options = session_options(runtime, config, context.threads)
    for name in (config.source.get("model_operations") or {}).get("op_library_filename", ()):
        folders = (context.version_dir, context.model_dir)
        library_paths = (str(folder / name) for folder in folders if (folder / name).exists())
        options.register_custom_ops_library(next(library_paths, name))
    selected_providers = providers(config, context.kind, context.device_id)
    available_providers = runtime.get_available_providers()
    for name, _ in selected_providers:
        if name not in available_providers:
            raise Unavailable(
                f"model '{context.model_name}' needs {name}, but the installed onnxruntime only "
                f"has {', '.join(available_providers)}" + _INSTALL_HINTS.get(name, "")
            )
    session = runtime.InferenceSession(str(path), options, providers=selected_providers)
    active_providers = session.get_providers()
    for name, _ in selected_providers:
        if name not in active_providers:  # onnxruntime uses the CPU if a library does not load
            text = f"{name} of onnxruntime cannot be used on {context.device}; see the server's log"
            raise Unavailable(text)
    return session


_THREAD_PARAMETERS = ("intra_op_thread_count", "inter_op_thread_count")
_INSTALL_HINTS = {_CUDA: ": pip install onnxruntime-gpu, or set instance_group to KIND_CPU"}


def session_options(runtime: Any, config: ModelSpec, threads: int) -> Any:
    """Return the SessionOptions for a configuration; `threads` is the default number of threads."""
    options = runtime.SessionOptions()
    parameters = config.parameters
    options.intra_op_num_threads = parse_integer(parameters, "intra_op_thread_count", threads)
    options.inter_op_num_threads = parse_integer(parameters, "inter_op_thread_count", 0)
    modes = runtime.ExecutionMode
    is_parallel = parse_boolean(parameters, "execution_mode", False)
    options.execution_mode = modes.ORT_PARALLEL if is_parallel else modes.ORT_SEQUENTIAL
    for parameter_name, attribute in _SWITCHES.items():
        setattr(options, attribute, parse_boolean(parameters, parameter_name, True))
    optimization_levels = runtime.GraphOptimizationLevel
    options.graph_optimization_level = {
        -1: optimization_levels.ORT_ENABLE_BASIC,
        1: optimization_levels.ORT_ENABLE_EXTENDED,
        2: optimization_levels.ORT_DISABLE_ALL,
    }.get(config.optimization.graph_level, optimization_levels.ORT_ENABLE_ALL)
    for parameter_name, value in parameters.items():
        if parameter_name.startswith(("session.", "ep.")):
            options.add_session_config_entry(parameter_name, value)
    return options


def providers(config: ModelSpec, kind: str, device_id: int) -> list[tuple[str, dict[str, str]]]:
    """Return the execution providers with their options, in order of preference.

    Raises:
        InvalidArgument: An accelerator or its precision is unknown.
    """
    side = "gpu" if kind == "GPU" else "cpu"
    accelerators = config.optimization.execution_accelerators
    options: dict[str, dict[str, str]] = {}
    device_option = {"device_id": str(device_id)} if side == "gpu" else {}
    for accelerator in accelerators.get(f"{side}_execution_accelerator", ()):
        name = _ACCELERATORS.get(accelerator.name)
        if name is None:
            raise InvalidArgument(
                f"unknown execution accelerator '{accelerator.name}' of model "
                f"'{config.name}', known are {', '.join(_ACCELERATORS)}"
            )
        options[name] = {**device_option, **_provider_options(accelerator.parameters)}
    if side == "gpu":
        settings = {k: config.parameters[k] for k in _CUDA_PARAMETERS if k in config.parameters}
        options[_CUDA] = {**device_option, **_provider_options(settings), **options.get(_CUDA, {})}
    options[_CPU] = {}
    return list(options.items())


def _provider_options(parameters: Mapping[str, str]) -> dict[str, str]:
    """Return onnxruntime's options of an execution provider, from a configuration's parameters."""
    options: dict[str, str] = {}
    for key, value in parameters.items():
        if key == "precision_mode":
            if value not in _PRECISIONS:
                raise InvalidArgument(
                    f"parameter 'precision_mode' must be {', '.join(_PRECISIONS)}, got '{value}'"
                )
            options |= _PRECISIONS[value]
        else:
            options[_OPTION_NAMES.get(key, key)] = _OPTION_VALUES.get(key, {}).get(value, value)
    return options


# onnxruntime's names of the datatypes where they differ from numpy's.
_ONNX_NAMES = {"FP32": "float", "FP64": "double", "BF16": "bfloat16", "BYTES": "string"}
_DATATYPES = {f"tensor({_ONNX_NAMES.get(n, kind.name)})": n for n, kind in STORAGE_DTYPES.items()}
_UNBOUNDED = 2**31  # the batch size of a file without a limit


def describe(
    session: Any, output_names: Collection[str] = (), configured_inputs: Collection[str] = ()
) -> FileDescription:
    """Describe the tensors of a session.

    An output that is not in `output_names` is omitted if its datatype is not supported. An input in
    `configured_inputs` may be an initializer whose value requests replace.

    Raises:
        InvalidArgument: A datatype is not supported.
    """
    initializers = session.get_overridable_initializers()
    nodes = [*session.get_inputs(), *(n for n in initializers if n.name in configured_inputs)]
    inputs = tuple(_describe_tensor("input", node) for node in nodes)
    nodes = session.get_outputs()
    if output_names:  # unconfigured outputs may be sequences or maps
        nodes = [node for node in nodes if node.name in output_names or node.type in _DATATYPES]
    outputs = tuple(_describe_tensor("output", node) for node in nodes)
    return FileDescription(inputs, outputs, _largest_batch([*inputs, *outputs]))


def _describe_tensor(side: str, node: Any) -> FileTensor:
    datatype = _DATATYPES.get(node.type)
    if datatype is None:
        problem = f"{side} '{node.name}' of the ONNX file is a {node.type}"
        raise InvalidArgument(problem + _export_advice(side, node))
    shape = list(node.shape)
    dims = tuple(size if isinstance(size, int) and size >= 0 else -1 for size in shape)
    symbols = tuple(size if isinstance(size, str) else "" for size in shape)
    return FileTensor(node.name, datatype, dims, symbols)


def _export_advice(side: str, node: Any) -> str:
    """Return advice to export the model without a datatype that no client can send or receive."""
    if side == "input" and node.type.startswith("seq("):
        return (
            ", which no client can send: export the model with a tensor in its place (operator "
            "SplitToSequence)"
        )
    if "map(" in node.type:
        return (
            ", which no client can receive: convert the model without ZipMap (skl2onnx: "
            "options={'zipmap': False}), or list only its other outputs in config.pbtxt"
        )
    if node.type.startswith("seq("):
        return (
            ", which no client can receive: export the model with a tensor in its place "
            "(operator ConcatFromSequence), or list only its other outputs in config.pbtxt"
        )
    if not node.type.startswith("tensor("):
        return ", which no client can send or receive: export the model with a tensor in its place"
    return ", a datatype that no client can send or receive: add a Cast to the model"


def _largest_batch(tensors: Sequence[FileTensor]) -> int:
    """Return the largest batch size: unlimited if each tensor's first dimension varies, else 0.

    The batch dimension is not recognised by its name, because files rarely name it.
    """
    return _UNBOUNDED if all(tensor.dims[:1] == (-1,) for tensor in tensors) else 0


def check(
    signature: Signature,
    description: FileDescription,
    worker_tensors: Collection[str] = frozenset(),
) -> None:
    """Check a configuration against the file's tensors.

    `worker_tensors` has the names of inputs that the worker generates for a batch, and of outputs
    that it splits.

    Raises:
        InvalidArgument: The configuration contradicts the file.
    """
    name, max_batch_size = signature.name, signature.max_batch_size
    # An output without dimensions is a scalar, or its rank is unknown.
    tensors = (*description.inputs, *(output for output in description.outputs if output.dims))
    for tensor in tensors if max_batch_size > 0 else ():
        if tensor.dims[:1] != (-1,):
            raise InvalidArgument(
                f"model '{name}', tensor '{tensor.name}': for the model to support batching the "
                "shape should have at least 1 dimension and the first dimension must be -1; but "
                f"shape expected by the model is {shape_text(tensor.dims)}"
            )
    checked_sides: tuple[tuple[str, dict[str, TensorSpec], tuple[FileTensor, ...]], ...] = (
        ("input", signature.inputs, description.inputs),
        ("output", signature.outputs, description.outputs),
    )
    for side, specs, tensors in checked_sides:
        file_tensors = {tensor.name: tensor for tensor in tensors}
        for spec in specs.values():
            if spec.name not in file_tensors:
                raise InvalidArgument(
                    f"unexpected inference {side} '{spec.name}', allowed {side}s are: "
                    f"{', '.join(sorted(file_tensors))}"
                )
            if spec.name not in worker_tensors:
                _check_tensor(side, spec, file_tensors[spec.name], signature)
    missing_inputs = sorted(
        {i.name for i in description.inputs} - {*signature.inputs, *worker_tensors}
    )
    if missing_inputs:
        raise InvalidArgument(
            f"unable to load model '{name}', configuration expects {len(signature.inputs)} inputs, "
            f"model provides {len(description.inputs)}: '{missing_inputs[0]}' is missing"
        )


def _check_tensor(side: str, spec: TensorSpec, tensor: FileTensor, signature: Signature) -> None:
    if spec.datatype != tensor.datatype:
        raise InvalidArgument(
            f"unable to load model '{signature.name}', configuration expects datatype "
            f"{TO_CONFIG[spec.datatype]} for {side} '{spec.name}', model provides "
            f"{TO_CONFIG[tensor.datatype]}"
        )
    if fits_scalar(spec, tensor) and signature.max_batch_size == 0:
        return
    dims = spec.model_dims
    expected_dims = tensor.dims[1:] if signature.max_batch_size > 0 else tensor.dims
    if side == "input" and not spec.ragged and not shapes_match(dims, expected_dims):
        raise InvalidArgument(
            f"model '{signature.name}', tensor '{spec.name}': the model expects "
            f"{len(expected_dims)} dimensions (shape {shape_text(expected_dims)}) but the model "
            f"configuration specifies {len(dims)} dimensions (shape {shape_text(dims)})"
        )


_ERROR_PATTERN = re.compile(r"\[ONNXRuntimeError\] : (\d+) : \w+ : (.*)", re.DOTALL)


class OnnxRuntimeError(Exception):
    """An error of onnxruntime, with the message in Triton's format."""


class OnnxBackend(Backend):
    """The backend of one session of an ONNX file."""

    strict_shapes = False
    read_only_inputs = False  # a session does not write to its inputs, so they need no protection

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        self._opened_file: tuple[Any, FileDescription] | None = None

    def complete_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """Add the inputs, outputs and batch size of the file to the configuration."""
        spec = ModelSpec.of(config)
        _, description = self._open_file(spec)
        generated_tensors = generated_names(spec)
        client_description = FileDescription(
            tuple(tensor for tensor in description.inputs if tensor.name not in generated_tensors),
            tuple(tensor for tensor in description.outputs if tensor.name not in generated_tensors),
            description.largest_batch,
        )
        inputs = client_description.inputs
        if spec.max_batch_size > 0 and any(tensor.dims[:1] != (-1,) for tensor in inputs):
            raise InvalidArgument(
                f"autofill failed for model '{spec.name}': model does not support batching while "
                "non-zero max_batch_size is specified (the first dimension of an input is not -1)"
            )
        return complete(config, client_description, self.context.backend_config)

    def load(self, config: ModelSpec) -> None:
        """Open the file and check it against the configuration."""
        session, description = self._open_file(config)
        signature = Signature(with_generated_tensors(config), self.context.version)
        ragged_rules = RaggedRules(config)
        batch_rules = (*config.batch_input, *config.batch_output)
        generated_inputs = {name for rule in batch_rules for name in rule.target_name}
        check(signature, description, generated_inputs)
        self._signature = signature
        specs = signature.inputs
        self._scalar_inputs = {t.name for t in description.inputs if t.name in specs and not t.dims}
        self._names = [tensor.name for tensor in description.outputs]  # of outputs
        run_options = import_onnxruntime().RunOptions()
        if _SHRINKAGE_KEY in config.parameters:
            run_options.add_run_config_entry(_SHRINKAGE_KEY, config.parameters[_SHRINKAGE_KEY])
        on_gpu = self.context.kind == "GPU"
        device = open_device(self.context.device) if on_gpu else Device("cpu")
        numpy_inputs = frozenset() if on_gpu else frozenset(signature.inputs) | generated_inputs
        self._runner = Runner(self.context, signature, device, numpy_inputs, ragged_rules)
        self._binding: DeviceBinding | HostBinding
        if on_gpu:
            tensors = (*description.inputs, *description.outputs)
            strings = [tensor.name for tensor in tensors if tensor.datatype == "BYTES"]
            if strings:
                raise InvalidArgument(
                    f"tensor '{strings[0]}' of model '{signature.name}' has data_type TYPE_STRING, "
                    "which no GPU can hold: set instance_group to KIND_CPU"
                )
            self.device_inputs = True
            self._binding = DeviceBinding(session, description, device, run_options)
        else:
            self._binding = HostBinding(self.context, session, description, run_options)

    def execute(self, requests: list[Request]) -> list[Response]:
        """Run the session once for the whole batch."""
        inputs = as_scalars(self._runner.inputs(requests), self._scalar_inputs)
        needed_names = {name for request in requests for name in request.requested_outputs}
        needed_names.update(requests[0].states)
        names = [name for name in self._names if name in needed_names] or self._names[:1]
        with _convert_errors():
            outputs = self._binding.run(inputs, names, requests)
        return self._runner.responses(requests, as_configured(outputs, self._signature))

    def _open_file(self, config: ModelSpec) -> tuple[Any, FileDescription]:
        if self._opened_file is None:
            file_name = config.default_model_filename or "model.onnx"
            path = self.context.model_file([file_name], file_name)
            if path.is_dir():  # a folder is the layout for files with external data
                names = [f"{file_name}/{path.name}", f"{file_name}/model.onnx"]
                path = self.context.model_file(names, names[0])
            with _convert_errors(path):
                session = open_session(self.context, config, path)
            outputs, inputs = ({t.name for t in side} for side in (config.output, config.input))
            self._opened_file = session, describe(session, outputs, inputs)
        return self._opened_file


@contextlib.contextmanager
def _convert_errors(path: Path | None = None) -> Iterator[None]:
    """Convert errors of onnxruntime to errors for clients, without the folder of `path`.

    An error of the load (with `path`) is Internal, whose traceback is not logged.
    """
    try:
        yield
    except Exception as error:
        match = _ERROR_PATTERN.search(str(error))
        if match is None:
            raise
        text = match[2].strip()
        if path is not None:
            text = text.replace(str(path), path.name)
        error_class = OnnxRuntimeError if path is None else Internal
        raise error_class(f"onnx runtime error {match[1]}: {text}") from None
