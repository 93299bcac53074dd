"""Validation of a normalised configuration, in Triton's words; all problems at once."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import inf
from pathlib import Path, PurePath

from shmserve.errors import InvalidArgument
from shmserve.ipc.model_settings import (
    IDLE_UNLOAD,
    LONGEST_IDLE_S,
    MOST_INSTANCES,
    idle_unload_s,
)
from shmserve.model_config.diagnostics import UNWRITTEN, Key, Problem, Source, member, repeats
from shmserve.model_config.normalise import ENSEMBLE, PLATFORMS
from shmserve.model_config.rules.batching import dynamic_problems, strategy_problems
from shmserve.model_config.rules.ensembles import ensemble_problems
from shmserve.model_config.rules.instances import bound_problems
from shmserve.model_config.rules.padding import padding_problems
from shmserve.model_config.rules.sequences import sequence_problems
from shmserve.model_config.rules.tensors import batch_io_problems, tensor_problems, warmup_problems
from shmserve.proto.model_config_pb2 import ModelConfig, ModelInstanceGroup

_GROUP: Key = ("instance_group",)


class LoadProblem(InvalidArgument):
    """Broken rules that Triton looks at only when it loads a version; the file is in order."""


def validate(
    config: ModelConfig,
    *,
    gpu_count: int,
    complete: bool,
    model_dir: Path | None = None,
    source: Source = UNWRITTEN,
) -> None:
    """Check a configuration that `normalise` returned, and that its `source` could be read.

    `complete` is False before the model has completed its configuration: tensors may then lack
    datatype and dims, or be absent. `model_dir` is where label files must lie (None: not checked).
    `gpu_count` is the host's.

    Raises InvalidArgument with one line for each broken rule, as `Source.check` writes it;
    LoadProblem where all of them concern tensors, instances and label files.
    """
    of_file = [*_file_problems(config), *strategy_problems(config, complete=complete)]
    of_file += _idle_problems(config)
    of_file += padding_problems(config, complete=complete)
    of_file += bound_problems(config, complete=complete)
    problems = [*of_file, *_load_problems(config, gpu_count, complete, model_dir)]
    kind = InvalidArgument if of_file or source.problems else LoadProblem
    source.check(config, problems, kind)


def _file_problems(config: ModelConfig) -> Iterator[Problem]:
    if not config.name:
        yield Problem(("name",), "model configuration must specify 'name'")
    yield from _platform_problems(config)
    if config.max_batch_size < 0:
        text = f"'max_batch_size' must be non-negative value for {config.name}"
        yield Problem(("max_batch_size",), text)
    if config.HasField("dynamic_batching"):
        yield from dynamic_problems(config)
    if config.HasField("sequence_batching"):
        yield from sequence_problems(config)
    if _is_ensemble(config):
        yield from ensemble_problems(config)
    yield from _cache_problems(config)
    yield from _metric_problems(config)
    yield from _name_problems(config)


def _idle_problems(config: ModelConfig) -> Iterator[Problem]:
    given = config.parameters[IDLE_UNLOAD].string_value if IDLE_UNLOAD in config.parameters else "0"
    if idle_unload_s(given) is None:
        text = (
            f"parameter '{IDLE_UNLOAD}' must be a number of seconds from 0 to {LONGEST_IDLE_S:.0f} "
            f"for {config.name}, found '{given}'"
        )
        yield Problem(("parameters", member(IDLE_UNLOAD)), text)


def _load_problems(
    config: ModelConfig, gpu_count: int, complete: bool, model_dir: Path | None
) -> Iterator[Problem]:
    of_tensors = list(tensor_problems(config, complete=complete))
    if complete:
        of_tensors += batch_io_problems(config)
    for problem in of_tensors:
        yield problem._replace(text=f"{problem.text} for {config.name}")
    for problem in warmup_problems(config):
        yield problem._replace(text=f"{problem.text} for {config.name}")
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
        needs = (("platform",), ("ensemble_scheduling",), ("default_model_filename",))
        yield Problem(("backend",), text, needs)
    elif platform and not backend:
        text = f"unexpected platform type '{platform}' for {name}"
        yield Problem(("platform",), text, (("backend",),))
    elif platform and backend in PLATFORMS.values() and PLATFORMS.get(platform) != backend:
        text = f"unexpected 'platform' and 'backend' pair, got:{platform}, {backend}"
        yield Problem(("platform",), text, (("backend",),))


def _instance_problems(config: ModelConfig, gpu_count: int) -> Iterator[Problem]:
    if not config.instance_group:
        text = f"must specify one or more 'instance group's for {config.name}"
        yield Problem(_GROUP, text)
    named = (((*_GROUP, i, "name"), group.name) for i, group in enumerate(config.instance_group))
    for key, name, first in repeats(named):
        text = f"instance group {name} of model {config.name} is specified more than once"
        yield Problem(key, text, (first,))
    for index, group in enumerate(config.instance_group):
        at, subject = (*_GROUP, index), f"instance group {group.name} of model {config.name}"
        for problem in _group_problems(at, group, gpu_count):
            yield problem._replace(text=f"{subject} {problem.text}")
        if group.profile:
            platform = f"platform {config.platform}".rstrip()
            text = (
                f"{subject} and {platform} specifies profile field which is only supported for "
                "TensorRT models"
            )
            yield Problem((*at, "profile"), text)


def _group_problems(at: Key, group: ModelInstanceGroup, gpu_count: int) -> Iterator[Problem]:
    kind_at, gpus_at = (*at, "kind"), (*at, "gpus")
    if group.count > MOST_INSTANCES:
        yield Problem((*at, "count"), f"has count {group.count}, more than {MOST_INSTANCES}")
    if group.kind != ModelInstanceGroup.KIND_GPU:
        if group.gpus:
            kind = ModelInstanceGroup.Kind.Name(group.kind)
            text = f"has kind {kind} but specifies one or more GPUs"
            yield Problem(gpus_at, text, (kind_at,))
        return
    if not group.gpus:
        yield Problem(kind_at, "has kind KIND_GPU but no GPUs are available", (gpus_at,))
    for index, gpu in enumerate(group.gpus):
        if not 0 <= gpu < gpu_count:
            available = ", ".join(map(str, range(gpu_count)))
            # Triton's words, and its least capability: what the host has is not asked for its own.
            text = (
                f"specifies invalid or unsupported gpu id {gpu}. GPUs with at least the minimum "
                f"required CUDA compute compatibility of 6.000000 are: {available}"
            )
            yield Problem((*gpus_at, index), text)


def _cache_problems(config: ModelConfig) -> Iterator[Problem]:
    if not config.response_cache.enable:
        return
    for reason, holds in (
        ("sequence batching scheduler", config.HasField("sequence_batching")),
        ("'decoupled' transaction policy", config.model_transaction_policy.decoupled),
    ):
        if holds:
            text = (
                f"Response Cache does not currently support model {config.name} with {reason}. "
                "Please disable the response cache."
            )
            yield Problem(("response_cache", "enable"), text)


def _metric_problems(config: ModelConfig) -> Iterator[Problem]:
    for index, control in enumerate(config.model_metrics.metric_control):
        buckets = list(control.histogram_options.buckets)
        at: Key = ("model_metrics", "metric_control", index, "histogram_options", "buckets")
        for place, (low, high) in enumerate(pairwise([-inf, *buckets, inf])):
            if not low < high:
                text = f"histogram buckets must be finite and in ascending order for {config.name}"
                yield Problem((*at, min(place, len(buckets) - 1)), text)
                break


def _name_problems(config: ModelConfig) -> Iterator[Problem]:
    for field in ("default_model_filename", "runtime"):
        file = PurePath(getattr(config, field))
        if file.is_absolute() or ".." in file.parts or "\0" in str(file):
            text = f"'{field}' for {config.name} must be inside the version folder, got: {file}"
            yield Problem((field,), text)


def _label_problems(config: ModelConfig, model_dir: Path) -> Iterator[Problem]:
    inside = model_dir.resolve()
    for index, output in enumerate(config.output):
        if not output.label_filename:
            continue
        problem = _label_problem(inside, output.label_filename)
        if problem:
            subject = f"label file '{output.label_filename}' of output '{output.name}'"
            key = ("output", index, "label_filename")
            yield Problem(key, f"{subject} for {config.name} {problem}")


def _label_problem(inside: Path, label: str) -> str:
    try:
        path = (inside / label).resolve()
        readable = path.is_file()
    except (OSError, ValueError):
        return "is not a valid path"
    if not path.is_relative_to(inside):
        return "must be inside the model directory"
    return "" if readable else "does not exist"
