"""Rules about ensembles: what shows in their own configuration, and what with their steps' models.

Triton's (model_config_utils.cc and ensemble_utils.cc), in its words; conditions are ours.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from shmserve.model_config.diagnostics import Key, Problem, member, repeats
from shmserve.proto.model_config_pb2 import ModelConfig, ModelInput, ModelOutput

_STEP: Key = ("ensemble_scheduling", "step")
_CONDITION = re.compile(r"step\[([0-9]+)\]\.condition")


def ensemble_problems(config: ModelConfig) -> list[Problem]:
    """The problems of an ensemble, as far as it shows without the models it calls."""
    return list(_problems(config)) or list(_connections(config))


def _problems(config: ModelConfig) -> Iterator[Problem]:
    name, platform = config.name, config.platform
    if not platform:
        yield Problem(("platform",), f"unexpected platform type '' for {name}")
    if not config.HasField("ensemble_scheduling"):
        text = f"ensemble scheduling must be set for ensemble {name} whose platform is {platform}"
        yield Problem(("ensemble_scheduling",), text, (("platform",),))
        return
    if config.instance_group:
        text = f"instance group should not be specified for ensemble '{name}'"
        yield Problem(("instance_group",), text)
    if config.HasField("optimization"):
        text = f"optimization should not be specified for ensemble '{name}'"
        yield Problem(("optimization",), text)
    if config.model_warmup:
        text = f"model_warmup can not be specified for ensemble '{name}'"
        yield Problem(("model_warmup",), text)
    steps = config.ensemble_scheduling.step
    if not steps:
        yield Problem(_STEP, f"must specify 'step' for ensemble '{name}'")
    for index, step in enumerate(steps):
        for field in ("model_name", "input_map", "output_map"):
            if not getattr(step, field):
                text = f"must specify '{field}' in step {index} of ensemble '{name}'"
                yield Problem((*_STEP, index, field), text)
    yield from _conditions(config)
    yield from _links(config)


def _links(config: ModelConfig) -> Iterator[Problem]:
    """Every tensor of the graph is written once, and both ends of the ensemble are connected."""
    name, steps = config.name, config.ensemble_scheduling.step
    read = _read(config)
    written = {
        (*_STEP, index, "output_map", member(output)): tensor
        for index, step in enumerate(steps)
        for output, tensor in sorted(step.output_map.items())
    }
    for key, tensor, first in repeats(written.items()):
        text = (
            f"ensemble tensor '{tensor}' can appear in an output map only once for "
            f"ensemble '{name}' step {key[len(_STEP)]}"
        )
        yield Problem(key, text, (first,))
    inputs = {io.name for io in config.input}
    for key, tensor in written.items():
        if tensor in inputs:
            text = (
                f"ensemble input '{tensor}' can not appear in an output map for ensemble '{name}'"
            )
            yield Problem(key, text, (("input",),))
    yield from _unused(config, "input", config.input, read)
    yield from _unused(config, "output", config.output, set(written.values()))


def _read(config: ModelConfig) -> set[str]:
    """The tensors that steps wait for."""
    steps = config.ensemble_scheduling.step
    read = {tensor for step in steps for tensor in step.input_map.values()}
    return read | set(conditions(config).values())


def conditions(config: ModelConfig) -> dict[int, str]:
    """The tensors that say whether a step runs, by the step's index."""
    return {
        int(found[1]): parameter.string_value
        for key, parameter in config.parameters.items()
        if (found := _CONDITION.fullmatch(key))
    }


def _conditions(config: ModelConfig) -> Iterator[Problem]:
    name, steps = config.name, config.ensemble_scheduling.step
    known = {io.name for io in config.input}
    known |= {tensor for step in steps for tensor in step.output_map.values()}
    for key, parameter in sorted(config.parameters.items()):
        at: Key = ("parameters", member(key))
        found = _CONDITION.fullmatch(key)
        if not found:
            if key.startswith("step["):
                text = f"parameter '{key}' of ensemble '{name}' is not known: step[N].condition is"
                yield Problem(at, text)
        elif int(found[1]) >= len(steps):
            text = f"parameter '{key}': ensemble '{name}' has {len(steps)} steps, from 0"
            yield Problem(at, text, (_STEP,))
        elif parameter.string_value not in known:
            text = (
                f"parameter '{key}': ensemble '{name}' has no tensor "
                f"'{parameter.string_value}', which is to be its condition"
            )
            yield Problem(at, text, (_STEP,))


def _connections(config: ModelConfig) -> Iterator[Problem]:
    """Every output can be computed from the inputs, and every tensor is for an output."""
    name, steps = config.name, config.ensemble_scheduling.step
    conditional = conditions(config)
    reads = [
        [*sorted(step.input_map.values()), *([conditional[i]] if i in conditional else [])]
        for i, step in enumerate(steps)
    ]
    there = {io.name for io in config.input}
    waiting = list(range(len(steps)))
    while ready := [index for index in waiting if there.issuperset(reads[index])]:
        waiting = [index for index in waiting if index not in ready]
        there.update(tensor for index in ready for tensor in steps[index].output_map.values())
    writers = {t: i for i, step in enumerate(steps) for t in step.output_map.values()}
    if there.issuperset(output.name for output in config.output):
        for index in waiting:  # in a circle, or behind one
            missing = next(tensor for tensor in reads[index] if tensor not in there)
            text = (
                f"step {index} of ensemble '{name}', of model '{steps[index].model_name}', can "
                f"never run: its tensor '{missing}' is made only by steps that wait for it"
            )
            yield Problem((*_STEP, index), text)
    for index, output in enumerate(config.output):
        if output.name not in there:
            missing = next(t for t in reads[writers[output.name]] if t not in there)
            text = (
                f"output '{output.name}' for ensemble '{name}' is not written: at least one of "
                f"its depending tensors, '{missing}', is not connected"
            )
            yield Problem(("output", index, "name"), text, (_STEP,))
    used = _read(config) | {io.name for io in config.output}
    for index, step in enumerate(steps):
        for output_name, tensor in sorted(step.output_map.items()):
            if tensor not in used:
                text = f"ensemble tensor '{tensor}' is unused in ensemble '{name}'"
                yield Problem((*_STEP, index, "output_map", member(output_name)), text)


def _unused(
    config: ModelConfig, end: str, tensors: Sequence[ModelInput | ModelOutput], linked: set[str]
) -> Iterator[Problem]:
    for index, io in enumerate(tensors):
        if io.name and io.name not in linked:
            text = f"ensemble {end} '{io.name}' for ensemble {config.name}' is not used"
            yield Problem((end, index, "name"), text, (_STEP,))
