"""Rules for ensembles: of their own configuration, and of the models that their steps call.

The rules and messages are those of Triton's model_config_utils.cc and ensemble_utils.cc. Conditions
of steps are an extension of this server.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shmserve.errors import InvalidArgument
from shmserve.ipc.tensors.signature import shape_text, shapes_match
from shmserve.model_config.rules.scheduling import cache_problems
from shmserve.model_config.source import Key, Problem, find_repeats, map_key
from shmserve.proto.model_config_pb2 import DataType, ModelConfig, ModelInput, ModelOutput

_STEP_KEY: Key = ("ensemble_scheduling", "step")
_CONDITION = re.compile(r"step\[(0|[1-9][0-9]{0,8})\]\.condition")


def ensemble_problems(config: ModelConfig) -> list[Problem]:
    """Return the problems that are visible in an ensemble's own configuration."""
    return list(_config_problems(config)) or list(_connection_problems(config))


def _config_problems(config: ModelConfig) -> Iterator[Problem]:
    name, platform = config.name, config.platform
    if not platform:
        yield Problem(("platform",), f"unexpected platform type '' for {name}")
    if not config.HasField("ensemble_scheduling"):
        text = f"ensemble scheduling must be set for ensemble {name} whose platform is {platform}"
        yield Problem(("ensemble_scheduling",), text, (("platform",),))
        return
    for field, is_set, state_text in (
        ("instance_group", config.instance_group, "instance group should not"),
        ("optimization", config.HasField("optimization"), "optimization should not"),
        ("model_warmup", config.model_warmup, "model_warmup can not"),
    ):
        if is_set:
            yield Problem((field,), f"{state_text} be specified for ensemble '{name}'")
    steps = config.ensemble_scheduling.step
    if not steps:
        yield Problem(_STEP_KEY, f"must specify 'step' for ensemble '{name}'")
    for index, step in enumerate(steps):
        for field in ("model_name", "input_map", "output_map"):
            if not getattr(step, field):
                text = f"must specify '{field}' in step {index} of ensemble '{name}'"
                yield Problem((*_STEP_KEY, index, field), text)
    yield from _condition_problems(config)
    yield from _link_problems(config)


def _link_problems(config: ModelConfig) -> Iterator[Problem]:
    """Yield the problems of tensors with several sources, and of unconnected inputs and outputs."""
    name, steps = config.name, config.ensemble_scheduling.step
    read_tensors = _used_tensors(config)
    written_tensors = {
        (*_STEP_KEY, index, "output_map", map_key(output)): tensor
        for index, step in enumerate(steps)
        for output, tensor in sorted(step.output_map.items())
    }
    for key, tensor, first_key in find_repeats(written_tensors.items()):
        text = (
            f"ensemble tensor '{tensor}' can appear in an output map only once for "
            f"ensemble '{name}' step {key[len(_STEP_KEY)]}"
        )
        yield Problem(key, text, (first_key,))
    inputs = {io.name for io in config.input}
    for key, tensor in written_tensors.items():
        if tensor in inputs:
            text = (
                f"ensemble input '{tensor}' can not appear in an output map for ensemble '{name}'"
            )
            yield Problem(key, text, (("input",),))
    yield from _unused_problems(config, "input", config.input, read_tensors)
    yield from _unused_problems(config, "output", config.output, set(written_tensors.values()))


def _used_tensors(config: ModelConfig) -> set[str]:
    """Return the names of the tensors that steps read."""
    steps = config.ensemble_scheduling.step
    tensors = {tensor for step in steps for tensor in step.input_map.values()}
    return tensors | set(conditions(config).values())


def conditions(config: ModelConfig) -> dict[int, str]:
    """Return the condition tensor of each conditional step, by the step's index."""
    matches = ((_CONDITION.fullmatch(key), value) for key, value in config.parameters.items())
    return {int(match[1]): value.string_value for match, value in matches if match}


def _condition_problems(config: ModelConfig) -> Iterator[Problem]:
    name, steps = config.name, config.ensemble_scheduling.step
    tensors = {io.name for io in config.input}
    tensors |= {tensor for step in steps for tensor in step.output_map.values()}
    for key, parameter in sorted(config.parameters.items()):
        path: Key = ("parameters", map_key(key))
        match = _CONDITION.fullmatch(key)
        if not match:
            if key.startswith("step["):
                text = (
                    f"parameter '{key}' of ensemble '{name}' is unknown (allowed: "
                    "step[N].condition)"
                )
                yield Problem(path, text)
        elif int(match[1]) >= len(steps):
            text = f"parameter '{key}': ensemble '{name}' has {len(steps)} steps, numbered from 0"
            yield Problem(path, text, (_STEP_KEY,))
        elif parameter.string_value not in tensors:
            text = (
                f"parameter '{key}': expected the name of a tensor of ensemble '{name}', found "
                f"'{parameter.string_value}'"
            )
            yield Problem(path, text, (_STEP_KEY,))


def _connection_problems(config: ModelConfig) -> Iterator[Problem]:
    """Yield the problems of outputs that cannot be computed and of tensors that no output needs."""
    name, steps = config.name, config.ensemble_scheduling.step
    conditional = conditions(config)  # condition tensors by step
    reads = [
        [*sorted(step.input_map.values()), *([conditional[i]] if i in conditional else [])]
        for i, step in enumerate(steps)
    ]
    known_tensors = {io.name for io in config.input}
    waiting_indices = list(range(len(steps)))
    while ready_indices := [
        index for index in waiting_indices if known_tensors.issuperset(reads[index])
    ]:
        waiting_indices = [index for index in waiting_indices if index not in ready_indices]
        known_tensors.update(t for index in ready_indices for t in steps[index].output_map.values())
    writer_indices = {t: i for i, step in enumerate(steps) for t in step.output_map.values()}
    if known_tensors.issuperset(output.name for output in config.output):
        for index in waiting_indices:  # these steps are in a cycle, or depend on a cycle
            missing_tensor = next(tensor for tensor in reads[index] if tensor not in known_tensors)
            text = (
                f"step {index} of ensemble '{name}', model '{steps[index].model_name}', can "
                f"never run: its input tensor '{missing_tensor}' is produced only by steps that "
                "depend on it"
            )
            yield Problem((*_STEP_KEY, index), text)
    for index, output in enumerate(config.output):
        if output.name not in known_tensors:
            missing_tensor = next(
                t for t in reads[writer_indices[output.name]] if t not in known_tensors
            )
            text = (
                f"output '{output.name}' for ensemble '{name}' is not written: at least one of "
                f"its depending tensors, '{missing_tensor}', is not connected"
            )
            yield Problem(("output", index, "name"), text, (_STEP_KEY,))
    used_tensors = _used_tensors(config) | {io.name for io in config.output}
    for index, step in enumerate(steps):
        for output_name, tensor in sorted(step.output_map.items()):
            if tensor not in used_tensors:
                text = f"ensemble tensor '{tensor}' is unused in ensemble '{name}'"
                yield Problem((*_STEP_KEY, index, "output_map", map_key(output_name)), text)


def _unused_problems(
    config: ModelConfig, noun: str, specs: Sequence[ModelInput | ModelOutput], used_names: set[str]
) -> Iterator[Problem]:
    for index, io in enumerate(specs):
        if io.name and io.name not in used_names:
            text = f"ensemble {noun} '{io.name}' for ensemble {config.name}' is not used"
            yield Problem((noun, index, "name"), text, (_STEP_KEY,))


class GraphProblem(InvalidArgument):
    """A mismatch between an ensemble, at `key`, and the models that its steps call."""

    def __init__(self, text: str, key: Key = _STEP_KEY) -> None:
        super().__init__(text)
        self.key = key


def compose(
    config: ModelConfig,
    models: Sequence[ModelConfig | None],
    has_any_version: Sequence[bool],
    failures: Sequence[str],
) -> ModelConfig:
    """Return the final configuration of an ensemble.

    Args:
        config: The ensemble's configuration.
        models: The configuration of each step's model; None: the model is not available.
        has_any_version: For each step, whether any version of its model serves.
        failures: For each step, why its model could not be loaded; empty if no load failed.

    Raises:
        GraphProblem: The ensemble does not fit the models.
    """
    available_models = _available_models(config, models, has_any_version, failures)
    _check_mappings(config, available_models)
    _check_streams(config, available_models)
    full_config = copy.deepcopy(config)
    full_config.model_transaction_policy.decoupled = any(map(_is_decoupled, available_models))
    for problem in cache_problems(full_config):
        raise GraphProblem(problem.text, problem.key)
    return full_config


def _available_models(
    config: ModelConfig,
    models: Sequence[ModelConfig | None],
    has_versions: Sequence[bool],
    failures: Sequence[str],
) -> list[ModelConfig]:
    name, steps = config.name, config.ensemble_scheduling.step
    missing_models: dict[str, Key] = {}
    for index, (step, model, is_loaded) in enumerate(zip(steps, models, has_versions, strict=True)):
        if model is None and is_loaded:
            raise GraphProblem(
                f"ensemble '{name}' depends on '{step.model_name}' whose required version "
                f"{step.model_version} is not loaded.",
                (*_STEP_KEY, index, "model_version"),
            )
        if model is None and failures[index]:
            raise GraphProblem(
                f"ensemble '{name}' depends on '{step.model_name}' which has no loaded version. "
                f"Model '{step.model_name}' loading failed with error: {failures[index]}",
                (*_STEP_KEY, index, "model_name"),
            )
        if model is None:
            missing_models.setdefault(step.model_name, (*_STEP_KEY, index, "model_name"))
    if missing_models:
        raise GraphProblem(
            f"ensemble {name} contains models that are not available or ambiguous: "
            f"{', '.join(missing_models)}",
            next(iter(missing_models.values())),
        )
    return [model for model in models if model is not None]


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor's datatype and shape as one model declares them."""

    model: str
    data_type: int
    dims: tuple[int, ...]
    is_batched: bool

    @classmethod
    def of(cls, config: ModelConfig, io: ModelInput | ModelOutput) -> _Tensor:
        return cls(config.name, io.data_type, tuple(io.dims), config.max_batch_size > 0)

    @classmethod
    def seen_by_steps(cls, config: ModelConfig, io: ModelInput | ModelOutput) -> _Tensor:
        """Return an ensemble's input or output with the shape that its steps use (`reshape`)."""
        tensor = cls.of(config, io)
        return replace(tensor, dims=tuple(io.reshape.shape)) if io.HasField("reshape") else tensor

    @property
    def full_dims(self) -> tuple[int, ...]:
        return (-1, *self.dims) if self.is_batched else self.dims


def _check_mappings(config: ModelConfig, models: Sequence[ModelConfig]) -> None:
    """Raise GraphProblem if a step maps an unknown tensor, or lacks one that its model requires."""
    tensors = {io.name: _Tensor.seen_by_steps(config, io) for io in config.input}
    tensors.update({io.name: _Tensor.seen_by_steps(config, io) for io in config.output})
    for step_index, model in enumerate(models):
        if 0 < model.max_batch_size < config.max_batch_size:
            raise GraphProblem(
                f"ensemble {config.name} allows maximum batch size {config.max_batch_size}, but it "
                f"contains model {model.name} which only allows maximum batch size to be "
                f"{model.max_batch_size}",
                ("max_batch_size",),
            )
        for key, tensor, model_tensor in _mapped_tensors(config, step_index, model):
            first_tensor = tensors.setdefault(tensor, model_tensor)
            context = f"in ensemble {config.name}, ensemble tensor {tensor}: "
            if problem := _describe_mismatch(first_tensor, model_tensor):
                raise GraphProblem(context + problem, key)
    for index, condition in conditions(config).items():
        model_tensor = tensors[condition]
        if model_tensor.data_type != DataType.TYPE_BOOL:
            raise GraphProblem(
                f"in ensemble {config.name}, the condition of step {index}, ensemble tensor "
                f"{condition}, is {DataType.Name(model_tensor.data_type)} and not TYPE_BOOL",
                ("parameters", map_key(f"step[{index}].condition")),
            )


def _mapped_tensors(
    config: ModelConfig, step_index: int, model: ModelConfig
) -> Iterator[tuple[Key, str, _Tensor]]:
    """Yield the key, the ensemble tensor and the model's tensor of each mapping of a step."""
    step = config.ensemble_scheduling.step[step_index]
    context = f"in ensemble {config.name}, "
    inputs = {io.name: io for io in model.input}
    outputs = {io.name: io for io in model.output}
    for name, tensor in sorted(step.input_map.items()):
        key: Key = (*_STEP_KEY, step_index, "input_map", map_key(name))
        if name not in inputs:
            raise GraphProblem(
                f"{context}ensemble tensor {tensor} is mapping to non-existing input {name} in "
                f"model {step.model_name}",
                key,
            )
        yield key, tensor, _Tensor.of(model, inputs[name])
    for io in model.input:
        if io.name not in step.input_map and not io.optional:
            raise GraphProblem(
                f"{context}input {io.name} in model {model.name} is not mapped to any ensemble "
                "tensors",
                (*_STEP_KEY, step_index, "input_map"),
            )
    for name, tensor in sorted(step.output_map.items()):
        key = (*_STEP_KEY, step_index, "output_map", map_key(name))
        if name not in outputs:
            raise GraphProblem(
                f"{context}ensemble tensor {tensor} is mapped from non-existing output {name} in "
                f"model {step.model_name}",
                key,
            )
        yield key, tensor, _Tensor.of(model, outputs[name])


def _describe_mismatch(first: _Tensor, second: _Tensor) -> str:
    """Return the message about a tensor that two models declare differently, or "".

    If only one of the models batches, the dimensions are compared with and without the batch
    dimension.
    """
    if first.data_type != second.data_type:
        kind, names = "data type", [DataType.Name(tensor.data_type) for tensor in (first, second)]
    elif shapes_match(first.dims, second.dims) or shapes_match(first.full_dims, second.full_dims):
        return ""
    else:
        kind, names = "shape", [shape_text(tensor.full_dims) for tensor in (first, second)]
    return (
        f"inconsistent {kind}: {names[0]} is inferred from model {first.model} while {names[1]} is "
        f"inferred from model {second.model}"
    )


def _is_decoupled(model: ModelConfig) -> bool:
    return model.model_transaction_policy.decoupled


def _check_streams(config: ModelConfig, models: Sequence[ModelConfig]) -> None:
    """Raise GraphProblem if a step reads tensors of two decoupled models.

    The correspondence between the responses of two such models is undefined.
    """
    steps = config.ensemble_scheduling.step
    conditional = conditions(config)
    # For each tensor, the index of the decoupled step whose responses it comes from; -1: none.
    stream_steps: dict[str, int] = {io.name: -1 for io in config.input}
    reads = [set(step.input_map.values()) for step in steps]
    for index, condition in conditional.items():
        reads[index].add(condition)
    waiting_indices = set(range(len(steps)))
    while ready_indices := sorted(i for i in waiting_indices if reads[i] <= stream_steps.keys()):
        waiting_indices.difference_update(ready_indices)
        for index in ready_indices:
            stream_origins = {stream_steps[tensor] for tensor in reads[index]} - {-1}
            if len(stream_origins) > 1:
                raise GraphProblem(
                    f"in ensemble {config.name}, step of model '{steps[index].model_name}' "
                    "receives inputs originated from different decoupled models",
                    (*_STEP_KEY, index),
                )
            stream_step = index if _is_decoupled(models[index]) else max(stream_origins, default=-1)
            stream_steps.update(dict.fromkeys(steps[index].output_map.values(), stream_step))
