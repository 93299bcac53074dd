"""Normalisation: defaults for what a configuration leaves open. Backend, version policy,
instances."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from shmserve.ipc.engine_settings import GENERATIVE
from shmserve.proto.model_config_pb2 import ModelConfig, ModelInstanceGroup

LIBTORCH = "pytorch_libtorch"
ONNX = "onnxruntime_onnx"
# Of platforms and their backends: Triton's older field for the same.
PLATFORMS = {LIBTORCH: "pytorch", ONNX: "onnxruntime"}
ENSEMBLE = "ensemble"
_DEFAULT_SEQUENCE_IDLE_US = 1_000_000
_TORCH_FILES = ("model.pt", "model.pt2")
_ONNX_FILE = "model.onnx"
CHECKPOINT = "config.json"  # of a model of Hugging Face's, beside its weights
_WEIGHTS = ".safetensors"
_ONNX_CPU_INSTANCES = 2


@dataclass(frozen=True, slots=True)
class ModelDefaults:
    """The server's values for what a model does not set itself.

    `dynamic_batching`: models that batch and name no scheduler get the dynamic batcher.
    `max_batch_size` and `max_queue_delay_us` (microseconds) are for models that do not write that
    field; None leaves them at 0.
    """

    dynamic_batching: bool = False
    max_batch_size: int | None = None
    max_queue_delay_us: int | None = None


def detect_backend(config: ModelConfig, model_name: str, files: Collection[str]) -> ModelConfig:
    """`config` with name, backend, platform and default_model_filename, as far as they are known.

    `files` are the names in the model's newest version folder. What is still empty afterwards is
    for `validate` to report.
    """
    found = _copy(config)
    if not found.name:
        found.name = model_name
    if found.platform == ENSEMBLE:
        return found
    if not found.backend:
        found.backend = _backend(found, files)
    if found.backend == "pytorch":
        _fill_torch(found, files)
    elif found.backend == "python" and not found.default_model_filename:
        found.default_model_filename = "model.py"
    elif found.backend == "onnxruntime":
        found.platform = found.platform or ONNX
        found.default_model_filename = found.default_model_filename or _ONNX_FILE
    return found


def normalise(
    config: ModelConfig, model_name: str, gpu_count: int, defaults: ModelDefaults | None = None
) -> ModelConfig:
    """`config` with every default written out; what the model sets itself stays.

    Done before the model completes its configuration (without `defaults`: a model's own word
    counts for more than the server's) and again after (with them). Idempotent. `gpu_count` is the
    number of accelerators of the host.
    """
    full = _copy(config)
    if not full.name:
        full.name = model_name
    if defaults is not None and not full.HasField("ensemble_scheduling"):
        _apply_defaults(full, defaults)
    if not full.HasField("version_policy"):
        full.version_policy.latest.num_versions = 1
    _fill_scheduling(full)
    if not full.HasField("ensemble_scheduling"):
        _fill_pinned_memory(full)
        _fill_instances(full, gpu_count)
    return full


def _copy(config: ModelConfig) -> ModelConfig:
    duplicate = ModelConfig()
    duplicate.CopyFrom(config)
    return duplicate


def _backend(config: ModelConfig, files: Collection[str]) -> str:
    if config.platform:
        return PLATFORMS.get(config.platform, "")
    named = config.default_model_filename
    present = [name for name in (*_TORCH_FILES, _ONNX_FILE, "model.py") if name in files]
    file = named or (present[0] if present else "")
    if not file and CHECKPOINT in files and any(name.endswith(_WEIGHTS) for name in files):
        return GENERATIVE
    if file.endswith((".pt", ".pt2")):
        return "pytorch"
    if file.endswith(".onnx"):
        return "onnxruntime"
    return "python" if file.endswith(".py") else ""


def _fill_torch(config: ModelConfig, files: Collection[str]) -> None:
    if not config.platform and config.runtime != "model.py":
        config.platform = LIBTORCH
    if not config.default_model_filename:
        candidates = ["model.py"] if config.runtime == "model.py" else [*_TORCH_FILES, "model.py"]
        present = [name for name in candidates if name in files]
        config.default_model_filename = (present or candidates)[0]


def _apply_defaults(config: ModelConfig, defaults: ModelDefaults) -> None:
    if defaults.max_batch_size is not None and not config.HasField("max_batch_size"):
        config.max_batch_size = defaults.max_batch_size
    undecided = config.WhichOneof("scheduling_choice") is None
    if defaults.dynamic_batching and undecided and config.max_batch_size > 0:
        config.dynamic_batching.SetInParent()
    if not config.HasField("dynamic_batching") or defaults.max_queue_delay_us is None:
        return
    if not config.dynamic_batching.HasField("max_queue_delay_microseconds"):
        config.dynamic_batching.max_queue_delay_microseconds = defaults.max_queue_delay_us


def _fill_scheduling(config: ModelConfig) -> None:
    largest = [config.max_batch_size] if config.max_batch_size > 0 else []
    if config.HasField("dynamic_batching"):
        if not config.dynamic_batching.preferred_batch_size:
            config.dynamic_batching.preferred_batch_size.extend(largest)
    elif config.HasField("sequence_batching"):
        batching = config.sequence_batching
        if batching.max_sequence_idle_microseconds == 0:
            batching.max_sequence_idle_microseconds = _DEFAULT_SEQUENCE_IDLE_US
        if batching.HasField("oldest") and not batching.oldest.preferred_batch_size:
            batching.oldest.preferred_batch_size.extend(largest)


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
            usable = gpu_count > 0 and all(0 <= gpu < gpu_count for gpu in group.gpus)
            group.kind = ModelInstanceGroup.KIND_GPU if usable else ModelInstanceGroup.KIND_CPU
        if group.count < 1:
            on_cpu = group.kind == ModelInstanceGroup.KIND_CPU
            twice = on_cpu and config.backend == "onnxruntime"  # as Triton has it
            group.count = _ONNX_CPU_INSTANCES if twice else 1
        if group.kind == ModelInstanceGroup.KIND_GPU and not group.gpus:
            group.gpus.extend(range(gpu_count))
