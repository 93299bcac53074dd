"""Views of a configuration: its JSON, the labels of outputs, the fields without effect."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from shmserve.errors import InvalidArgument, clip, nearest, refused
from shmserve.ipc import model_settings
from shmserve.model_config.syntax.json_format import message_to_dict
from shmserve.proto.model_config_pb2 import (
    ModelConfig,
    ModelOptimizationPolicy,
)

_GROUP_FIELDS = ("secondary_devices", "profile", "passive", "host_policy")
_OPTIMIZATION_FIELDS = (
    "graph",
    "cuda",
    "execution_accelerators",
    "gather_kernel_buffer_threshold",
    "eager_batching",
)
# Of these, what has an effect on the models of a backend.
_EFFECTIVE = {"onnxruntime": ("graph", "execution_accelerators"), "pytorch": ("cuda",)}
_BATCH_FIELDS = ("batch_input", "batch_output")
_BATCH_BACKENDS = (
    "pytorch",
    "onnxruntime",
    "native",
)  # models of others get each request's tensors apart
_TOP_FIELDS = (
    "cc_model_filenames",
    "metric_tags",
    "model_operations",
    "model_repository_agents",
)


def to_dict(config: ModelConfig) -> dict[str, Any]:
    """The configuration as GET /v2/models/NAME/config prints it.

    snake_case names, integers as numbers, enums by name, every primitive field, sub-messages only
    where set.
    """
    return message_to_dict(config)


def ignored_fields(config: ModelConfig) -> list[str]:
    """The paths of what is set, accepted and without effect, for one log line a model."""
    return list(_ignored(config))


def doubts(written: ModelConfig, final: ModelConfig) -> list[str]:
    """What is taken and cannot be meant so, in a configuration as it was written, and completed:
    for a line each in the log."""
    found = [
        f"instance_group[{index}].count: {group.count} is taken as the default; it is 1 or more"
        for index, group in enumerate(written.instance_group)
        if group.count < 0
    ]
    for name in sorted(set(written.parameters).difference(model_settings.KNOWN_PARAMETERS)):
        near = nearest(name, model_settings.KNOWN_PARAMETERS, 0.8)
        if near:
            found.append(f"parameters: '{clip(name)}' means nothing here, did you mean '{near}'?")
    if written.HasField("dynamic_batching") and final.max_batch_size < 1:
        found.append("dynamic_batching: nothing is batched, as max_batch_size is 0")
    return found


def _ignored(config: ModelConfig) -> Iterator[str]:
    if config.backend not in _BATCH_BACKENDS:
        yield from (name for name in _BATCH_FIELDS if _is_set(config, name))
    for name in _TOP_FIELDS:
        if _is_set(config, name):
            yield name
    for index, control in enumerate(config.model_metrics.metric_control):
        if control.metric_identifier.family != model_settings.FIRST_RESPONSE_FAMILY:
            yield f"model_metrics.metric_control[{index}]"
    yield from _ignored_optimization(config.optimization, _EFFECTIVE.get(config.backend, ()))
    for index, state in enumerate(config.sequence_batching.state):
        if state.use_growable_memory:
            yield f"sequence_batching.state[{index}].use_growable_memory"
    for index, group in enumerate(config.instance_group):
        for name in _GROUP_FIELDS:
            if _is_set(group, name):
                yield f"instance_group[{index}].{name}"


def _ignored_optimization(
    optimization: ModelOptimizationPolicy, effective: Collection[str]
) -> Iterator[str]:
    for name in _OPTIMIZATION_FIELDS:
        if name not in effective and _is_set(optimization, name):
            yield f"optimization.{name}"
    if optimization.priority != ModelOptimizationPolicy.PRIORITY_DEFAULT:
        yield "optimization.priority"
    for name in ("input_pinned_memory", "output_pinned_memory"):
        # Pinned memory is the default, used where it helps; only switching it off has no effect.
        if optimization.HasField(name) and not getattr(optimization, name).enable:
            yield f"optimization.{name}"


def _is_set(message: Any, name: str) -> bool:
    return any(target.name == name for target, _ in message.ListFields())


_LARGEST_LABEL_FILE = 4 * 1024 * 1024


def read_labels(config: ModelConfig, model_dir: Path) -> dict[str, list[str]]:
    """The labels of a validated configuration's outputs, from their files: a label a line, by
    index; an empty line is no label.

    Raises InvalidArgument for a file that cannot be read or has more than 4 MiB.
    """
    return {
        output.name: _read_lines(model_dir / output.label_filename, output.name)
        for output in config.output
        if output.label_filename
    }


def _read_lines(path: Path, output: str) -> list[str]:
    what = f"label file '{path.name}' of output '{output}'"
    with refused(f"{what} cannot be read"), path.open("rb") as file:
        raw = file.read(_LARGEST_LABEL_FILE + 1)
    if len(raw) > _LARGEST_LABEL_FILE:
        raise InvalidArgument(f"{what} has more than {_LARGEST_LABEL_FILE} bytes")
    lines = raw.decode(errors="replace").split("\n")
    return [line.removesuffix("\r") for line in lines]
