"""Completion of a configuration: the server's defaults, and fields that a loaded model reports."""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from shmserve.errors import suggestion
from shmserve.ipc.engine_settings import ENGINE_PARAMETER as ENGINE
from shmserve.ipc.engine_settings import LLM_BACKEND
from shmserve.ipc.model_spec import BACKEND_GROUP, BUILT_IN_BACKENDS, MODEL_SETTINGS
from shmserve.model_config.message_builder import from_json
from shmserve.model_config.source import UNWRITTEN, Key, Problem, Source
from shmserve.proto.model_config_pb2 import (
    DataType,
    ModelConfig,
    ModelInput,
    ModelInstanceGroup,
    ModelOutput,
)

LIBTORCH = "pytorch_libtorch"
ONNX = "onnxruntime_onnx"
# The backend of each platform. Platform is Triton's older term for a backend.
PLATFORMS = {LIBTORCH: "pytorch", ONNX: "onnxruntime"}  # backends by platform
# Platforms and files of Triton's backends that this server lacks, for errors that name the backend.
_FOREIGN_PLATFORMS = {
    "tensorrt_plan": "tensorrt",
    "tensorflow_graphdef": "tensorflow",
    "tensorflow_savedmodel": "tensorflow",
    "caffe2_netdef": "caffe2",
}
_FOREIGN_FILES = {
    "model.plan": "tensorrt",
    "model.graphdef": "tensorflow",
    "model.savedmodel": "tensorflow",
    "model.netdef": "caffe2",
    "model.xml": "openvino",
    "model.dali": "dali",
}
ENSEMBLE = "ensemble"
_DEFAULT_SEQUENCE_IDLE_US = 1_000_000
_TORCH_FILES = ("model.pt", "model.pt2")
_ONNX_FILE = "model.onnx"
_VLLM_FILE = "model.json"  # the arguments of vLLM's engine
CHECKPOINT_FILE = "config.json"  # the file of a Hugging Face model, in the folder of its weights
# A checkpoint has files with one of these suffixes. The backend `llm` loads only the first, and its
# error names files with the others.
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf", ".pth")
_ONNX_CPU_INSTANCES = 2
_COMPLETABLE_FIELDS = (
    *("max_batch_size", "input", "output", "dynamic_batching", "sequence_batching"),
    *("model_transaction_policy", "batch_input", "batch_output", "instance_group"),
)
# The parameters that a model or its backend may add to a configuration.
_PARAMETERS = (*MODEL_SETTINGS, ENGINE, "max_model_len", "adapters")


@dataclass(frozen=True, slots=True)
class ModelDefaults:
    """The server's defaults for fields that a model's configuration does not set.

    Attributes:
        dynamic_batching: Whether a model that batches gets the dynamic batcher if its configuration
            sets no scheduler.
        max_batch_size: The default of `max_batch_size`; None: 0.
        max_queue_delay_us: The default of `max_queue_delay_microseconds`; None: 0.
    """

    dynamic_batching: bool = False
    max_batch_size: int | None = None
    max_queue_delay_us: int | None = None


def detect_backend(config: ModelConfig, model_name: str, files: Collection[str]) -> ModelConfig:
    """Return `config` with name, backend, platform and default_model_filename, as far as known.

    The result may still lack some of these fields; `validate` reports them.

    Args:
        config: The configuration.
        model_name: The name for a configuration without one.
        files: The file names in the model's newest version folder.
    """
    result = copy.deepcopy(config)
    if not result.name:
        result.name = model_name
    if result.platform == ENSEMBLE:
        return result
    if not result.backend:
        result.backend = _detect_backend_name(result, files)
    if result.backend == "pytorch":
        _fill_torch(result, files)
    elif result.backend == "python" and not result.default_model_filename:
        result.default_model_filename = "model.py"
    elif result.backend == "onnxruntime":
        result.platform = result.platform or ONNX
        result.default_model_filename = result.default_model_filename or _ONNX_FILE
    return result


def normalise(
    config: ModelConfig, model_name: str, gpu_count: int, defaults: ModelDefaults | None = None
) -> ModelConfig:
    """Return a copy of `config` in which every unset field has its default.

    This function is idempotent. It is called without `defaults` before the model completes its
    configuration, and with them afterwards, because the model's fields take precedence.

    Args:
        config: The configuration; fields that are set do not change.
        model_name: The name for a configuration without one.
        gpu_count: The number of accelerators of the host.
        defaults: The server's defaults, if they apply already.
    """
    normal_config = copy.deepcopy(config)
    if not normal_config.name:
        normal_config.name = model_name
    if defaults is not None and not normal_config.HasField("ensemble_scheduling"):
        _apply_defaults(normal_config, defaults)
    if not normal_config.HasField("version_policy"):
        normal_config.version_policy.latest.num_versions = 1
    _fill_scheduling(normal_config)
    if not normal_config.HasField("ensemble_scheduling"):
        _fill_pinned_memory(normal_config)
        _fill_instances(normal_config, gpu_count)
    return normal_config


def _detect_backend_name(config: ModelConfig, files: Collection[str]) -> str:
    if config.platform:
        return PLATFORMS.get(config.platform) or _FOREIGN_PLATFORMS.get(config.platform, "")
    filename = config.default_model_filename
    model_files = [name for name in (*_TORCH_FILES, _ONNX_FILE, "model.py") if name in files]
    file = filename or (model_files[0] if model_files else "")
    if not file and _VLLM_FILE in files:
        return "vllm"
    if file.endswith((".pt", ".pt2")):
        return "pytorch"
    if file.endswith(".onnx"):
        return "onnxruntime"
    if file.endswith(".py"):
        return "python"
    backends = [_FOREIGN_FILES[name] for name in (file, *sorted(files)) if name in _FOREIGN_FILES]
    has_weights = any(name.endswith(_WEIGHT_SUFFIXES) for name in files)
    if not (file or backends) and CHECKPOINT_FILE in files and has_weights:
        return LLM_BACKEND
    return backends[0] if backends else ""


def plugin_backends() -> set[str]:
    """Return the names of the backends that other packages register by entry points."""
    names = {entry.name for entry in entry_points(group=BACKEND_GROUP)}
    return names - BUILT_IN_BACKENDS.keys()


def unknown_backend_error(config: ModelConfig) -> str:
    """Return the error text for a backend that this server does not have, or ""."""
    name = config.backend
    if not name or name in BUILT_IN_BACKENDS:
        return ""
    backend_names = BUILT_IN_BACKENDS.keys() | plugin_backends()
    if name in backend_names:
        return ""
    hint = f", use platform: '{ENSEMBLE}'" if name == ENSEMBLE else suggestion(name, backend_names)
    return (
        f"unable to find backend library for backend '{name}' of model '{config.name}', "
        f"known are {', '.join(sorted(backend_names))}{hint}"
    )


def merge_duplicates(config: ModelConfig) -> list[str]:
    """Remove repeated equal inputs and outputs; return their names as text ("input 'x'")."""
    removed_names = []
    for noun, tensors in (("input", config.input), ("output", config.output)):
        names = [tensor.name for tensor in tensors]
        for index in reversed(range(len(names))):
            first_index = names.index(names[index])
            if first_index < index and tensors[first_index] == tensors[index]:
                removed_names.append(f"{noun} '{names[index]}'")
                del tensors[index]
    return removed_names


def _fill_torch(config: ModelConfig, files: Collection[str]) -> None:
    if not config.platform and config.runtime != "model.py":
        config.platform = LIBTORCH
    if not config.default_model_filename:
        candidates = ["model.py"] if config.runtime == "model.py" else [*_TORCH_FILES, "model.py"]
        model_files = [name for name in candidates if name in files]
        config.default_model_filename = (model_files or candidates)[0]


def _apply_defaults(config: ModelConfig, defaults: ModelDefaults) -> None:
    if defaults.max_batch_size is not None and not config.HasField("max_batch_size"):
        config.max_batch_size = defaults.max_batch_size
    has_no_scheduler = config.WhichOneof("scheduling_choice") is None
    if defaults.dynamic_batching and has_no_scheduler and config.max_batch_size > 0:
        config.dynamic_batching.SetInParent()
    if not config.HasField("dynamic_batching") or defaults.max_queue_delay_us is None:
        return
    if not config.dynamic_batching.HasField("max_queue_delay_microseconds"):
        config.dynamic_batching.max_queue_delay_microseconds = defaults.max_queue_delay_us


def _fill_scheduling(config: ModelConfig) -> None:
    preferred_sizes = [config.max_batch_size] if config.max_batch_size > 0 else []
    if config.HasField("dynamic_batching"):
        if not config.dynamic_batching.preferred_batch_size:
            config.dynamic_batching.preferred_batch_size.extend(preferred_sizes)
    elif config.HasField("sequence_batching"):
        batching = config.sequence_batching
        if batching.max_sequence_idle_microseconds == 0:
            batching.max_sequence_idle_microseconds = _DEFAULT_SEQUENCE_IDLE_US
        if batching.HasField("oldest") and not batching.oldest.preferred_batch_size:
            batching.oldest.preferred_batch_size.extend(preferred_sizes)


def _fill_pinned_memory(config: ModelConfig) -> None:
    optimization = config.optimization
    if not optimization.HasField("input_pinned_memory"):
        optimization.input_pinned_memory.enable = True
    if not optimization.HasField("output_pinned_memory"):
        optimization.output_pinned_memory.enable = True


def _fill_instances(config: ModelConfig, gpu_count: int) -> None:
    if not config.instance_group:
        config.instance_group.add(name=config.name)
    for index, group in enumerate(config.instance_group):
        if not group.name:
            group.name = f"{config.name}_{index}"
        if group.kind == ModelInstanceGroup.KIND_AUTO:
            gpus_exist = gpu_count > 0 and all(0 <= gpu < gpu_count for gpu in group.gpus)
            group.kind = ModelInstanceGroup.KIND_GPU if gpus_exist else ModelInstanceGroup.KIND_CPU
        if group.count < 1:
            is_on_cpu = group.kind == ModelInstanceGroup.KIND_CPU
            # Triton's onnxruntime backend has two instances per group on a CPU.
            is_doubled = is_on_cpu and config.backend == "onnxruntime"
            group.count = _ONNX_CPU_INSTANCES if is_doubled else 1
        if group.kind == ModelInstanceGroup.KIND_GPU and not group.gpus:
            group.gpus.extend(range(gpu_count))


def merge_autocomplete(
    config: ModelConfig, completed: dict[str, Any], source: Source = UNWRITTEN
) -> ModelConfig:
    """Return a copy of `config` with the missing fields taken from `completed`.

    These fields of `completed` are used: max_batch_size, input, output, batch_input, batch_output,
    model_transaction_policy, dynamic_batching and sequence_batching (only if `config` has no
    scheduler), instance_group (only of a Python class), and these parameters: `batching_strategy`,
    `target_p99_ms`, `max_streams`, `min_instances`, `max_instances`, `padding`, `engine`,
    `max_model_len` and `adapters`. A field in `source` is not replaced, except for a max_batch_size
    that the model raises.

    Args:
        config: The configuration.
        completed: A configuration in JSON form, complete or only with the model's additions.
        source: The text of `config`.

    Raises:
        InvalidArgument: The model contradicts `config`. The message has one line per conflict, in
            the format of `Source.raise_for_problems`.
    """
    fields = {name: completed[name] for name in _COMPLETABLE_FIELDS if name in completed}
    parameters = completed.get("parameters") or {}
    fields["parameters"] = {name: parameters[name] for name in _PARAMETERS if name in parameters}
    model = from_json(fields, "auto-completed configuration")
    merged_config = copy.deepcopy(config)
    conflicts = _merge_batching(merged_config, model, is_size_written="max_batch_size" in fields)
    for name in model.parameters:
        if name not in merged_config.parameters:
            merged_config.parameters[name].CopyFrom(model.parameters[name])
    has_default_groups = not any(key[0] == "instance_group" for key in source.positions)
    if config.backend == "native" and has_default_groups and model.instance_group:
        # The instance groups in `config` are defaults, which the class overrides.
        merged_config.ClearField("instance_group")
        merged_config.instance_group.extend(model.instance_group)
    if not merged_config.batch_input:
        merged_config.batch_input.extend(model.batch_input)
    if not merged_config.batch_output:
        merged_config.batch_output.extend(model.batch_output)
    for kind, written_tensors, model_tensors in (
        ("input", merged_config.input, model.input),
        ("output", merged_config.output, model.output),
    ):
        indices: dict[str, int] = {}
        for index, name in enumerate([tensor.name for tensor in written_tensors]):
            indices.setdefault(name, index)
        for tensor in model_tensors:
            index = indices.setdefault(tensor.name, len(written_tensors))
            if index < len(written_tensors):
                path = (kind, index)
                conflicts += _merge_tensor(config.name, path, written_tensors[index], tensor)
            else:
                written_tensors.add().CopyFrom(tensor)  # type: ignore[arg-type]
    source.raise_for_problems(merged_config, conflicts)
    return merged_config


def _merge_batching(
    merged_config: ModelConfig, model: ModelConfig, *, is_size_written: bool
) -> list[Problem]:
    conflicts = []
    name = merged_config.name
    if is_size_written and merged_config.max_batch_size > model.max_batch_size:
        text = (
            f"configuration specified max_batch_size {merged_config.max_batch_size}, but in "
            f"auto-complete-config function for model '{name}' specified max_batch_size "
            f"{model.max_batch_size}"
        )
        conflicts.append(Problem(("max_batch_size",), text))
    elif model.max_batch_size > merged_config.max_batch_size or (
        is_size_written and merged_config.backend == "native"
    ):  # The 0 of a class is a setting, which the server's default must not replace.
        merged_config.max_batch_size = model.max_batch_size
    scheduler_kind = merged_config.WhichOneof("scheduling_choice")
    if model.HasField("dynamic_batching"):
        if scheduler_kind is None:
            merged_config.dynamic_batching.CopyFrom(model.dynamic_batching)
        elif scheduler_kind != "dynamic_batching":
            text = (
                f"Configuration specified scheduling_choice as '{scheduler_kind}', but "
                f"auto-complete-config function for model '{name}' tries to set "
                f"scheduling_choice as 'dynamic_batching'"
            )
            conflicts.append(Problem((scheduler_kind,), text))
    if model.HasField("sequence_batching") and scheduler_kind is None:
        merged_config.sequence_batching.CopyFrom(model.sequence_batching)
    if model.HasField("model_transaction_policy"):
        is_decoupled = merged_config.model_transaction_policy.decoupled
        if not merged_config.HasField("model_transaction_policy"):
            merged_config.model_transaction_policy.CopyFrom(model.model_transaction_policy)
        elif is_decoupled != model.model_transaction_policy.decoupled:
            text = (
                f"trying to change decoupled property in auto-complete-config for model '{name}', "
                f"which is already set to '{is_decoupled}'."
            )
            conflicts.append(Problem(("model_transaction_policy", "decoupled"), text))
    return conflicts


def _merge_tensor(
    model_name: str,
    path: Key,
    written_tensor: ModelInput | ModelOutput,
    model_tensor: ModelInput | ModelOutput,
) -> list[Problem]:
    data_types = (written_tensor.data_type, model_tensor.data_type)
    if all(data_types) and data_types[0] != data_types[1]:
        text = (
            f"unable to load model '{model_name}', configuration expects datatype "
            f"{DataType.Name(written_tensor.data_type)} for {path[0]} '{written_tensor.name}', "
            f"model provides {DataType.Name(model_tensor.data_type)}"
        )
        return [Problem((*path, "data_type"), text)]
    if written_tensor.dims and model_tensor.dims and written_tensor.dims != model_tensor.dims:
        text = (
            f"model '{model_name}', tensor '{written_tensor.name}': the model expects dims "
            f"{list(model_tensor.dims)} but the model configuration specifies dims "
            f"{list(written_tensor.dims)}"
        )
        return [Problem((*path, "dims"), text)]
    if not written_tensor.data_type:
        written_tensor.data_type = model_tensor.data_type
    if not written_tensor.dims:
        written_tensor.dims.extend(model_tensor.dims)
    if isinstance(written_tensor, ModelInput) and isinstance(model_tensor, ModelInput):
        written_tensor.optional |= model_tensor.optional
        written_tensor.allow_ragged_batch |= model_tensor.allow_ragged_batch
    return []
