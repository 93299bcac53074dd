"""Validation of normalised configurations with Triton's messages; warnings; label files.

ensembles.py       rules for ensembles
parameters.py      rules for parameters that the server interprets
scheduling.py      rules for the dynamic batcher, the sequence batcher and the response cache
tensors.py         rules for inputs, outputs and warm-up samples
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator
from itertools import pairwise
from math import inf
from pathlib import Path, PurePath
from typing import Any

from shmserve.errors import InvalidArgument, clip, convert_os_errors, nearest
from shmserve.ipc.model_spec import (
    FIRST_RESPONSE_FAMILY,
    KNOWN_PARAMETERS,
    KNOWN_SETTINGS,
    LARGEST_INSTANCE_BOUND,
)
from shmserve.model_config.completion import ENSEMBLE, PLATFORMS
from shmserve.model_config.rules.ensembles import ensemble_problems
from shmserve.model_config.rules.parameters import parameter_problems
from shmserve.model_config.rules.scheduling import (
    cache_problems,
    dynamic_problems,
    initial_state_problems,
    sequence_problems,
)
from shmserve.model_config.rules.tensors import batch_io_problems, tensor_problems, warmup_problems
from shmserve.model_config.source import UNWRITTEN, Key, Problem, Source
from shmserve.proto.model_config_pb2 import ModelConfig, ModelInstanceGroup, ModelOptimizationPolicy

_GROUPS: Key = ("instance_group",)  # the key of the instance groups
_MAX_LABEL_FILE_BYTES = 4 * 1024 * 1024
_IGNORED_GROUP_FIELDS = ("secondary_devices", "profile", "host_policy")
_OPTIMIZATION_FIELDS = (
    *("graph", "cuda", "execution_accelerators", "gather_kernel_buffer_threshold"),
    "eager_batching",
)
# The optimization fields that each backend supports.
_OPTIMIZATIONS = {"onnxruntime": ("graph", "execution_accelerators"), "pytorch": ("cuda",)}
_BATCH_FIELDS = ("batch_input", "batch_output")
# The backends that use `_BATCH_FIELDS`; others receive the tensors of each request separately.
_BATCH_BACKENDS = ("pytorch", "onnxruntime", "native")
# The backend for which each of these fields has an effect ("": none).
_BACKEND_OF_FIELD = {
    "cc_model_filenames": "",
    "metric_tags": "",
    "model_operations": "onnxruntime",
    "runtime": "pytorch",
}
# Parameters of Triton's pytorch and onnxruntime backends that have an effect in this server. Other
# parameters cause a warning.
_BACKEND_PARAMETERS = {
    "onnxruntime": (
        *("intra_op_thread_count", "inter_op_thread_count", "execution_mode"),
        *("enable_mem_arena", "enable_mem_pattern", "memory.enable_memory_arena_shrinkage"),
    ),
    "pytorch": (
        *("INFERENCE_MODE", "DISABLE_OPTIMIZED_EXECUTION", "TORCH_COMPILE_OPTIONAL_PARAMETERS"),
        *("INTRA_OP_THREAD_COUNT", "INTER_OP_THREAD_COUNT", "NUM_THREADS", "NUM_INTEROP_THREADS"),
        *("ENABLE_JIT_EXECUTOR", "ENABLE_JIT_PROFILING", "ENABLE_TENSOR_FUSER"),
    ),
}
_GPU_PARAMETERS = {
    "onnxruntime": (
        *("cudnn_conv_algo_search", "gpu_mem_limit", "arena_extend_strategy"),
        "do_copy_in_default_stream",
    ),
    "pytorch": ("ENABLE_CACHE_CLEANING", "DISABLE_CUDNN"),
}
_SETTING_PREFIXES = ("session.", "ep.")  # prefixes of onnxruntime's own settings


class LoadProblem(InvalidArgument):
    """An invalid configuration whose errors Triton detects only when it loads a model version."""


def validate(
    config: ModelConfig,
    *,
    gpu_count: int,
    is_complete: bool,
    model_dir: Path | None = None,
    source: Source = UNWRITTEN,
) -> None:
    """Check a configuration that `normalise` returned, and the problems of its `source`.

    Args:
        config: The normalised configuration.
        gpu_count: The number of accelerators of the host.
        is_complete: Whether the model has completed its configuration. Before that, tensors may be
            absent or lack datatype and dims.
        model_dir: The folder of label files; None: label files are not checked.
        source: The text of the configuration.

    Raises:
        InvalidArgument: A rule is violated. The message has one line per violation, in the format
            of `Source.raise_for_problems`.
        LoadProblem: All violations concern tensors, initial states, instances and label files.
    """
    file_problems = [
        *_file_problems(config, is_complete),
        *parameter_problems(config, is_complete=is_complete),
    ]
    problems = [*file_problems, *_load_problems(config, gpu_count, is_complete, model_dir)]
    error_type = InvalidArgument if file_problems or source.problems else LoadProblem
    source.raise_for_problems(config, problems, error_type)


def _file_problems(config: ModelConfig, is_complete: bool) -> Iterator[Problem]:
    if not config.name:
        yield Problem(("name",), "model configuration must specify 'name'")
    yield from _platform_problems(config)
    if config.max_batch_size < 0:
        text = f"'max_batch_size' must be non-negative value for {config.name}"
        yield Problem(("max_batch_size",), text)
    if config.HasField("dynamic_batching"):
        yield from dynamic_problems(config, is_complete=is_complete)
    if config.HasField("sequence_batching"):
        yield from sequence_problems(config, is_complete=is_complete)
    if _is_ensemble(config):
        yield from ensemble_problems(config)
    yield from cache_problems(config)
    yield from _metric_problems(config)
    yield from _name_problems(config)


def _load_problems(
    config: ModelConfig, gpu_count: int, is_complete: bool, model_dir: Path | None
) -> Iterator[Problem]:
    problems = list(tensor_problems(config, is_complete=is_complete))
    if is_complete:
        problems += batch_io_problems(config)
    for problem in (*problems, *warmup_problems(config, is_complete=is_complete)):
        yield problem._replace(text=f"{problem.text} for {config.name}")
    yield from initial_state_problems(config)
    if not _is_ensemble(config):
        yield from _instance_problems(config, gpu_count)
    if model_dir is not None:
        yield from _label_problems(config, model_dir)


def _is_ensemble(config: ModelConfig) -> bool:
    return config.platform == ENSEMBLE or config.HasField("ensemble_scheduling")


def _platform_problems(config: ModelConfig) -> Iterator[Problem]:
    name, platform, backend = config.name, config.platform, config.backend
    if platform == ENSEMBLE:
        if backend:
            text = (
                f"Ensemble model '{name}' must have platform type '{platform}' and empty backend "
                "type"
            )
            yield Problem(("backend",), text, (("platform",),))
    elif not platform and not backend and not config.HasField("ensemble_scheduling"):
        text = f"must specify 'platform' or 'backend' for '{name}'"
        related_keys = (("platform",), ("ensemble_scheduling",), ("default_model_filename",))
        yield Problem(("backend",), text, related_keys)
    elif platform and not backend:
        text = f"unexpected platform type '{platform}' for {name}"
        yield Problem(("platform",), text, (("backend",),))
    elif platform and backend in PLATFORMS.values() and PLATFORMS.get(platform) != backend:
        text = f"unexpected 'platform' and 'backend' pair, got:{platform}, {backend}"
        yield Problem(("platform",), text, (("backend",),))


def _instance_problems(config: ModelConfig, gpu_count: int) -> Iterator[Problem]:
    if not config.instance_group:
        text = f"must specify one or more 'instance group's for {config.name}"
        yield Problem(_GROUPS, text)
    for index, group in enumerate(config.instance_group):
        path, subject = (*_GROUPS, index), f"instance group {group.name} of model {config.name}"
        for problem in _group_problems(path, group, gpu_count):
            yield problem._replace(text=f"{subject} {problem.text}")
        if group.profile:
            platform = f"platform {config.platform}".rstrip()
            text = (
                f"{subject} and {platform} specifies profile field which is only supported for "
                "TensorRT models"
            )
            yield Problem((*path, "profile"), text)


def _group_problems(path: Key, group: ModelInstanceGroup, gpu_count: int) -> Iterator[Problem]:
    kind_key, gpus_key = (*path, "kind"), (*path, "gpus")
    if group.count > LARGEST_INSTANCE_BOUND:
        text = f"has count {group.count}, more than {LARGEST_INSTANCE_BOUND}"
        yield Problem((*path, "count"), text)
    if group.kind != ModelInstanceGroup.KIND_GPU:
        if group.gpus:
            kind = ModelInstanceGroup.Kind.Name(group.kind)
            text = f"has kind {kind} but specifies one or more GPUs"
            yield Problem(gpus_key, text, (kind_key,))
        return
    if not group.gpus:
        yield Problem(kind_key, "has kind KIND_GPU but no GPUs are available", (gpus_key,))
    for index, gpu in enumerate(group.gpus):
        if not 0 <= gpu < gpu_count:
            available_gpus = ", ".join(map(str, range(gpu_count)))
            # Triton's message includes its minimum compute capability; the host's is not queried.
            text = (
                f"specifies invalid or unsupported gpu id {gpu}. GPUs with at least the minimum "
                f"required CUDA compute compatibility of 6.000000 are: {available_gpus}"
            )
            yield Problem((*gpus_key, index), text)


def _metric_problems(config: ModelConfig) -> Iterator[Problem]:
    for index, control in enumerate(config.model_metrics.metric_control):
        buckets = list(control.histogram_options.buckets)
        control_key: Key = ("model_metrics", "metric_control", index)
        for field in ("metric_identifier", "histogram_options"):
            if not control.HasField(field):
                text = f"metric control must specify '{field}' for {config.name}"
                yield Problem(control_key, text)
        if control.HasField("metric_identifier") and not control.metric_identifier.family:
            text = f"metric identifier must specify non-empty 'family' for {config.name}"
            yield Problem((*control_key, "metric_identifier"), text)
        path = (*control_key, "histogram_options", "buckets")
        if control.HasField("histogram_options") and not buckets:
            text = f"histogram options must specify non-empty 'buckets' for {config.name}"
            yield Problem(path, text)
        for position, (lower_bound, upper_bound) in enumerate(pairwise([-inf, *buckets, inf])):
            if not lower_bound < upper_bound:
                text = f"histogram buckets must be finite and in ascending order for {config.name}"
                yield Problem((*path, min(position, len(buckets) - 1)), text)
                break


def _name_problems(config: ModelConfig) -> Iterator[Problem]:
    for field in ("default_model_filename", "runtime"):
        file = PurePath(getattr(config, field))
        if file.is_absolute() or ".." in file.parts or "\0" in str(file):
            text = f"'{field}' for {config.name} must be inside the version folder, got: {file}"
            yield Problem((field,), text)


def _label_problems(config: ModelConfig, model_dir: Path) -> Iterator[Problem]:
    absolute_dir = model_dir.absolute()
    for index, output in enumerate(config.output):
        if not output.label_filename:
            continue
        problem = _label_problem(absolute_dir, output.label_filename)
        if problem:
            subject = f"label file '{output.label_filename}' of output '{output.name}'"
            key = ("output", index, "label_filename")
            yield Problem(key, f"{subject} for {config.name} {problem}")


def _label_problem(model_dir: Path, filename: str) -> str:
    try:
        # The path is normalised as text, because links may point anywhere.
        path = Path(os.path.normpath(model_dir / filename))
        is_file = stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        is_file = False
    except (OSError, ValueError):
        return "is not a valid path"
    if not path.is_relative_to(model_dir):
        return "must be inside the model directory"
    return "" if is_file else "does not exist"


def read_labels(config: ModelConfig, model_dir: Path) -> dict[str, list[str]]:
    """Return the labels in a validated configuration, by output name, in the order of indices.

    A label file has one label per line. An empty line is an index without a label.

    Raises:
        InvalidArgument: A file cannot be read or is larger than 4 MiB.
    """
    outputs = (output for output in config.output if output.label_filename)
    return {o.name: _read_label_lines(model_dir / o.label_filename, o.name) for o in outputs}


def _read_label_lines(path: Path, output: str) -> list[str]:
    description = f"label file '{path.name}' of output '{output}'"
    with convert_os_errors(f"{description} cannot be read"), path.open("rb") as file:
        content = file.read(_MAX_LABEL_FILE_BYTES + 1)
    if len(content) > _MAX_LABEL_FILE_BYTES:
        raise InvalidArgument(f"{description} has more than {_MAX_LABEL_FILE_BYTES} bytes")
    return [line.removesuffix("\r") for line in content.decode(errors="replace").split("\n")]


def ignored_fields(config: ModelConfig) -> list[str]:
    """Return the paths of fields that are set but have no effect, for one log line per model."""
    return list(_find_ignored(config))


def warnings_of(written_config: ModelConfig, final_config: ModelConfig) -> list[str]:
    """Return warnings about valid settings that are probably mistakes, one log line each.

    Args:
        written_config: The configuration as its author wrote it.
        final_config: The completed configuration.
    """
    counts = ((i, group.count) for i, group in enumerate(written_config.instance_group))
    text = "is replaced by the default, because a count must be at least 1"
    warnings = [f"instance_group[{i}].count: {count} {text}" for i, count in counts if count < 0]
    passive_indices = (i for i, group in enumerate(written_config.instance_group) if group.passive)
    text = "no effect: the instances receive requests, unlike passive instances of Triton"
    warnings += (f"instance_group[{i}].passive: {text}" for i in passive_indices)
    for name in sorted(set(written_config.parameters).difference(KNOWN_PARAMETERS)):
        similar_name = nearest(name, KNOWN_PARAMETERS, 0.8)
        if similar_name:
            warnings.append(
                f"parameters: '{clip(name)}' is unknown; did you mean '{similar_name}'?"
            )
    for name, parameter in sorted(written_config.parameters.items()):
        if parameter.string_value.startswith("${"):
            text = f"'{clip(parameter.string_value)}' is a placeholder of a template; fill it in"
            warnings.append(f"parameters['{clip(name)}']: {text}")
    for index, control_input in enumerate(written_config.sequence_batching.control_input):
        if len(control_input.control) > 1:
            key = f"sequence_batching.control_input[{index}]"
            text = "only one kind can set a tensor: CORRID before READY, END and START"
            warnings.append(f"{key}.control: {text}")
    skipped_samples = (i for i, s in enumerate(written_config.model_warmup) if not s.batch_size)
    warnings += (f"model_warmup[{i}]: no effect because batch_size is 0" for i in skipped_samples)
    if written_config.HasField("dynamic_batching") and final_config.max_batch_size < 1:
        warnings.append("dynamic_batching: no effect because max_batch_size is 0")
    return warnings


def _find_ignored(config: ModelConfig) -> Iterator[str]:
    if config.backend not in _BATCH_BACKENDS:
        yield from (name for name in _BATCH_FIELDS if _is_set(config, name))
    for name, backend in _BACKEND_OF_FIELD.items():
        if _is_set(config, name) and config.backend != backend:
            yield name
    yield from _ignored_parameters(config)
    for index, control in enumerate(config.model_metrics.metric_control):
        if control.metric_identifier.family != FIRST_RESPONSE_FAMILY:
            yield f"model_metrics.metric_control[{index}]"
    on_gpu = _is_on_gpu(config)
    needs_gpu = config.backend == "pytorch"
    supported_fields = _OPTIMIZATIONS.get(config.backend, ()) if on_gpu or not needs_gpu else ()
    yield from _ignored_optimization(config.optimization, supported_fields)
    accelerators = config.optimization.execution_accelerators
    unused_field = f"{'cpu' if on_gpu else 'gpu'}_execution_accelerator"
    if "execution_accelerators" in supported_fields and _is_set(accelerators, unused_field):
        yield f"optimization.execution_accelerators.{unused_field}"
    for index, state in enumerate(config.sequence_batching.state):
        if state.use_growable_memory:
            yield f"sequence_batching.state[{index}].use_growable_memory"
    for index, group in enumerate(config.instance_group):
        for name in _IGNORED_GROUP_FIELDS:
            if _is_set(group, name):
                yield f"instance_group[{index}].{name}"


def _is_on_gpu(config: ModelConfig) -> bool:
    return any(group.kind == ModelInstanceGroup.KIND_GPU for group in config.instance_group)


def _ignored_parameters(config: ModelConfig) -> Iterator[str]:
    backend = config.backend
    if backend not in _BACKEND_PARAMETERS:
        return
    effective_names = {*KNOWN_SETTINGS, *_BACKEND_PARAMETERS[backend]}
    if _is_on_gpu(config):
        effective_names.update(_GPU_PARAMETERS[backend])
    for name in sorted(config.parameters):
        is_setting = backend == "onnxruntime" and name.startswith(_SETTING_PREFIXES)
        if name not in effective_names and not is_setting:
            yield f"parameters['{clip(name)}']"


def _ignored_optimization(
    optimization: ModelOptimizationPolicy, effective_names: Collection[str]
) -> Iterator[str]:
    for name in _OPTIMIZATION_FIELDS:
        if name not in effective_names and _is_set(optimization, name):
            yield f"optimization.{name}"
    if optimization.priority != ModelOptimizationPolicy.PRIORITY_DEFAULT:
        yield "optimization.priority"
    for name in ("input_pinned_memory", "output_pinned_memory"):
        # Memory is pinned in any case, so only a setting that disables pinning has no effect.
        if optimization.HasField(name) and not getattr(optimization, name).enable:
            yield f"optimization.{name}"


def _is_set(message: Any, name: str) -> bool:
    return any(field.name == name for field, _ in message.ListFields())
