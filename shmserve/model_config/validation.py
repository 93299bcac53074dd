"""The rules a normalised configuration must keep, in Triton's words; all broken ones at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePath

from shmserve.errors import InvalidArgument
from shmserve.model_config.composition_rules import ensemble_problems, sequence_problems
from shmserve.model_config.normalise import ENSEMBLE, LIBTORCH
from shmserve.model_config.tensor_rules import batch_io_problems, tensor_problems
from shmserve.proto.model_config_pb2 import (
    ModelConfig,
    ModelDynamicBatching,
    ModelInstanceGroup,
    ModelQueuePolicy,
)

# Of one group: each is a process, and the supervisor keeps a place for it before it is started.
_MOST_INSTANCES = 4096


class LoadProblem(InvalidArgument):
    """Broken rules that Triton looks at only when it loads a version; the file is in order."""


def validate(
    config: ModelConfig, *, gpu_count: int, complete: bool, model_dir: Path | None = None
) -> None:
    """Check a configuration that `normalise` returned.

    `complete` is False before the model has completed its configuration: tensors may then lack
    datatype and dims, or be absent. `model_dir` is where label files must lie (None: not checked).
    `gpu_count` is the host's.

    Raises InvalidArgument with one line for each broken rule; LoadProblem where all of them concern
    tensors, instances and label files.
    """
    of_file = list(_file_problems(config))
    problems = [*of_file, *_load_problems(config, gpu_count, complete, model_dir)]
    if problems:
        kind = InvalidArgument if of_file else LoadProblem
        raise kind("\n".join(dict.fromkeys(problems)))


def _file_problems(config: ModelConfig) -> Iterator[str]:
    if not config.name:
        yield "model configuration must specify 'name'"
    yield from _platform_problems(config)
    if config.max_batch_size < 0:
        yield f"'max_batch_size' must be non-negative value for {config.name}"
    if config.HasField("dynamic_batching"):
        yield from _dynamic_problems(config)
    if config.HasField("sequence_batching"):
        yield from sequence_problems(config)
    if _is_ensemble(config):
        yield from ensemble_problems(config)
    yield from _cache_problems(config)
    yield from _name_problems(config)


def _load_problems(
    config: ModelConfig, gpu_count: int, complete: bool, model_dir: Path | None
) -> Iterator[str]:
    for problem in tensor_problems(config, complete=complete):
        yield f"{problem} for {config.name}"
    if complete:
        for problem in batch_io_problems(config):
            yield f"{problem} for {config.name}"
    if not _is_ensemble(config):
        yield from _instance_problems(config, gpu_count)
    if model_dir is not None:
        yield from _label_problems(config, model_dir)


def _is_ensemble(config: ModelConfig) -> bool:
    return config.platform == ENSEMBLE or config.HasField("ensemble_scheduling")


def _platform_problems(config: ModelConfig) -> Iterator[str]:
    name, platform, backend = config.name, config.platform, config.backend
    if platform == ENSEMBLE:
        if backend:
            yield (
                f"Ensemble model '{name}' must have platform type '{platform}' and empty backend "
                "type"
            )
    elif not platform and not backend and not config.HasField("ensemble_scheduling"):
        yield f"must specify 'platform' or 'backend' for '{name}'"
    elif platform and not backend:
        yield f"unexpected platform type '{platform}' for {name}"
    elif backend == "pytorch" and platform not in ("", LIBTORCH):
        yield f"unexpected 'platform' and 'backend' pair, got:{platform}, {backend}"


def _dynamic_problems(config: ModelConfig) -> Iterator[str]:
    name, batching = config.name, config.dynamic_batching
    for size in batching.preferred_batch_size:
        if size <= 0:
            yield f"dynamic batching preferred size must be positive for {name}"
        if size > config.max_batch_size:
            yield f"dynamic batching preferred size must be <= max batch size for {name}"
    levels = batching.priority_levels
    if levels:
        if not 1 <= batching.default_priority_level <= levels:
            yield f"default priority level must be in range [1, {levels}] for {name}"
        if not all(1 <= level <= levels for level in batching.priority_queue_policy):
            yield (
                f"priority queue policy must have priority level in range [1, {levels}] for {name}"
            )
    if batching.preserve_ordering:
        if levels > 1:
            yield f"Only one priority level is allowed when 'preserve_ordering' is true for {name}"
        if _delays(batching):
            yield (
                "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is "
                f"true for {name}"
            )


def _delays(batching: ModelDynamicBatching) -> bool:
    policies = [batching.default_queue_policy, *batching.priority_queue_policy.values()]
    return any(
        policy.timeout_action == ModelQueuePolicy.DELAY and policy.default_timeout_microseconds
        for policy in policies
    )


def _instance_problems(config: ModelConfig, gpu_count: int) -> Iterator[str]:
    if not config.instance_group:
        yield f"must specify one or more 'instance group's for {config.name}"
    names = Counter(group.name for group in config.instance_group)
    for name, count in names.items():
        if count > 1:
            yield f"instance group {name} of model {config.name} is specified more than once"
    for group in config.instance_group:
        for problem in _group_problems(group, gpu_count):
            yield f"instance group {group.name} of model {config.name} {problem}"
        if group.profile:
            platform = f"platform {config.platform}".rstrip()
            yield (
                f"instance group {group.name} of model {config.name} and {platform} specifies "
                "profile field which is only supported for TensorRT models"
            )


def _group_problems(group: ModelInstanceGroup, gpu_count: int) -> Iterator[str]:
    if group.count > _MOST_INSTANCES:
        yield f"has count {group.count}, more than {_MOST_INSTANCES}"
    if group.kind != ModelInstanceGroup.KIND_GPU:
        if group.gpus:
            kind = ModelInstanceGroup.Kind.Name(group.kind)
            yield f"has kind {kind} but specifies one or more GPUs"
        return
    if not group.gpus:
        yield "has kind KIND_GPU but no GPUs are available"
    for gpu in group.gpus:
        if not 0 <= gpu < gpu_count:
            available = ", ".join(map(str, range(gpu_count)))
            yield f"specifies invalid or unsupported gpu id {gpu}. Available GPUs are: {available}"


def _cache_problems(config: ModelConfig) -> Iterator[str]:
    if not config.response_cache.enable:
        return
    for reason, holds in (
        ("sequence batching scheduler", config.HasField("sequence_batching")),
        ("'decoupled' transaction policy", config.model_transaction_policy.decoupled),
    ):
        if holds:
            yield (
                f"Response Cache does not currently support model {config.name} with {reason}. "
                "Please disable the response cache."
            )


def _name_problems(config: ModelConfig) -> Iterator[str]:
    for field in ("default_model_filename", "runtime"):
        file = PurePath(getattr(config, field))
        if file.is_absolute() or ".." in file.parts or "\0" in str(file):
            yield f"'{field}' for {config.name} must be inside the version folder, got: {file}"


def _label_problems(config: ModelConfig, model_dir: Path) -> Iterator[str]:
    inside = model_dir.resolve()
    for output in config.output:
        if not output.label_filename:
            continue
        label = output.label_filename
        subject = f"label file '{label}' of output '{output.name}' for {config.name}"
        try:
            path = (inside / label).resolve()
            readable = path.is_file()
        except (OSError, ValueError):
            yield f"{subject} is not a valid path"
            continue
        if not path.is_relative_to(inside):
            yield f"{subject} must be inside the model directory"
        elif not readable:
            yield f"{subject} does not exist"
