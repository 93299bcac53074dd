"""The rules of the bounds between which a model's instances follow its load."""

from __future__ import annotations

from collections.abc import Iterator

from shmserve.ipc.engine_settings import GENERATIVE
from shmserve.ipc.model_settings import (
    MAX_INSTANCES,
    MIN_INSTANCES,
    MOST_INSTANCES,
    instance_bound,
)
from shmserve.model_config.diagnostics import Key, Problem, member
from shmserve.model_config.rules.batching import parameter
from shmserve.proto.model_config_pb2 import ModelConfig, ModelInstanceGroup

_LEAST: Key = ("parameters", member(MIN_INSTANCES))
_MOST: Key = ("parameters", member(MAX_INSTANCES))


def bound_problems(config: ModelConfig, *, complete: bool) -> Iterator[Problem]:
    """The problems of `min_instances` and `max_instances`; `complete`: the model has completed the
    configuration."""
    of, bounds = f"for {config.name}", {}
    for name, key in ((MIN_INSTANCES, _LEAST), (MAX_INSTANCES, _MOST)):
        given = parameter(config, name)
        if given is not None:
            bounds[name] = instance_bound(given)
            if bounds[name] is None:
                allowed = f"an integer from 1 to {MOST_INSTANCES}"
                yield Problem(key, f"parameter '{name}' must be {allowed} {of}, found '{given}'")
    if not bounds or None in bounds.values():
        return
    least, most = bounds.get(MIN_INSTANCES) or 1, bounds.get(MAX_INSTANCES)
    if most is None:
        if complete:
            text = f"parameter '{MIN_INSTANCES}' is {least} {of}, which needs '{MAX_INSTANCES}'"
            yield Problem(_LEAST, text)
        return
    if least > most:
        text = f"parameter '{MIN_INSTANCES}' must be at most '{MAX_INSTANCES}', {most}, {of}"
        yield Problem(_LEAST, f"{text}, found {least}", (_MOST,))
    yield from _of_its_kind(config)
    if complete:
        yield from _of_groups(config, most)


def _of_its_kind(config: ModelConfig) -> Iterator[Problem]:
    """What has no instances of its own, or gives one more than a batch: its load does not show in
    how long requests wait, and an instance does not end with a batch."""
    for key, found, is_there in (
        ("ensemble_scheduling", "an ensemble", config.HasField("ensemble_scheduling")),
        ("sequence_batching", "a model with sequences", config.HasField("sequence_batching")),
        ("backend", "a model that generates text", config.backend == GENERATIVE),
    ):
        if is_there:
            text = (
                f"parameter '{MAX_INSTANCES}' is for models whose requests are independent of one "
                f"another, found {found}: {config.name}"
            )
            yield Problem(_MOST, text, ((key,),))


def _of_groups(config: ModelConfig, most: int) -> Iterator[Problem]:
    groups = config.instance_group
    of = f"for {config.name}, which has the parameter '{MAX_INSTANCES}'"
    if len(groups) > 1:
        text = f"one instance group is allowed {of}, found {len(groups)}"
        yield Problem(("instance_group", 1), text, (_MOST,))
        return
    for group in groups:
        count = group.count * (len(group.gpus) if group.kind == ModelInstanceGroup.KIND_GPU else 1)
        if count > most:
            text = f"at most {most} instances are allowed {of}, found {count}"
            yield Problem(("instance_group", 0, "count"), text, (_MOST,))
