"""The rules of the dynamic batcher's block and of the parameters that choose its strategy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shmserve.errors import suggestion
from shmserve.ipc.model_settings import (
    MAX_INSTANCES,
    MAX_STREAMS,
    MOST_STREAMS,
    STRATEGY,
    TARGET,
    Strategy,
    max_streams,
    strategy,
    target_ms,
)
from shmserve.model_config.diagnostics import Key, Problem, member
from shmserve.proto.model_config_pb2 import (
    ModelConfig,
    ModelDynamicBatching,
    ModelQueuePolicy,
)

_DYNAMIC: Key = ("dynamic_batching",)
_STRATEGY: Key = ("parameters", member(STRATEGY))
_TARGET: Key = ("parameters", member(TARGET))


def dynamic_problems(config: ModelConfig) -> Iterator[Problem]:
    """The problems of `dynamic_batching`, in Triton's words."""
    name, batching = config.name, config.dynamic_batching
    sizes = batching.preferred_batch_size
    yield from preferred_problems(config, _DYNAMIC, sizes, "dynamic batching preferred size")
    levels, levels_at = batching.priority_levels, (*_DYNAMIC, "priority_levels")
    if levels:
        if not 1 <= batching.default_priority_level <= levels:
            text = f"default priority level must be in range [1, {levels}] for {name}"
            yield Problem((*_DYNAMIC, "default_priority_level"), text, (levels_at,))
        for level in sorted(batching.priority_queue_policy):
            if not 1 <= level <= levels:
                text = (
                    f"priority queue policy must have priority level in range [1, {levels}] "
                    f"for {name}"
                )
                yield Problem((*_DYNAMIC, "priority_queue_policy", level), text, (levels_at,))
    if batching.preserve_ordering:
        if levels > 1:
            text = f"Only one priority level is allowed when 'preserve_ordering' is true for {name}"
            yield Problem(levels_at, text)
        for key in _delays(batching):
            text = (
                "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is "
                f"true for {name}"
            )
            yield Problem(key, text)


def preferred_problems(
    config: ModelConfig, at: Key, sizes: Iterable[int], subject: str
) -> Iterator[Problem]:
    """The problems of a batcher's `preferred_batch_size`."""
    for index, size in enumerate(sizes):
        key = (*at, "preferred_batch_size", index)
        if size <= 0:
            yield Problem(key, f"{subject} must be positive for {config.name}")
        if size > config.max_batch_size:
            text = f"{subject} must be <= max batch size for {config.name}"
            yield Problem(key, text, (("max_batch_size",),))


def _delays(batching: ModelDynamicBatching) -> Iterator[Key]:
    """The queue policies that let a request wait on after its time."""
    policies: dict[Key, ModelQueuePolicy] = {
        (*_DYNAMIC, "default_queue_policy"): batching.default_queue_policy
    }
    for level, policy in sorted(batching.priority_queue_policy.items()):
        policies[*_DYNAMIC, "priority_queue_policy", level] = policy
    for key, policy in policies.items():
        if policy.timeout_action == ModelQueuePolicy.DELAY and policy.default_timeout_microseconds:
            yield key


def strategy_problems(config: ModelConfig, *, complete: bool) -> Iterator[Problem]:
    """The problems of the parameters of the batching strategy; `complete`: the model has completed
    the configuration."""
    given, target = parameter(config, STRATEGY), parameter(config, TARGET)
    chosen = None if given is None else strategy(given)
    of = f"for {config.name}"
    if given is not None and chosen is None:
        allowed = ", ".join(f"'{name}'" for name in Strategy)
        near = suggestion(given, Strategy)
        text = f"parameter '{STRATEGY}' must be one of {allowed} {of}, found '{given}'{near}"
        yield Problem(_STRATEGY, text)
    if target is not None and target_ms(target) is None:
        text = (
            f"parameter '{TARGET}' must be a number of milliseconds, 0.001 at least and of a day "
            f"at most {of}, found '{target}'"
        )
        yield Problem(_TARGET, text)
    streams = parameter(config, MAX_STREAMS)
    if streams is not None and max_streams(streams) is None:
        text = (
            f"parameter '{MAX_STREAMS}' must be an integer from 1 to {MOST_STREAMS} {of}, found "
            f"'{streams}'"
        )
        yield Problem(("parameters", member(MAX_STREAMS)), text)
    if not complete:
        return
    if chosen is not None and not config.HasField("dynamic_batching"):
        text = (
            f"parameter '{STRATEGY}' is '{chosen}' {of}, which has no 'dynamic_batching': add that "
            "block, or leave the parameter out"
        )
        yield Problem(_STRATEGY, text)
    if chosen is Strategy.ADAPTIVE and target is None:
        text = (
            f"parameter '{STRATEGY}' is '{chosen}' {of}, which needs the parameter '{TARGET}', a "
            "number of milliseconds"
        )
        yield Problem(_STRATEGY, text)
    held = chosen is Strategy.ADAPTIVE or MAX_INSTANCES in config.parameters
    if target is not None and not held and (chosen or given is None):
        found = f"'{chosen}'" if chosen else "not given"
        text = (
            f"parameter '{TARGET}' is for '{STRATEGY}' '{Strategy.ADAPTIVE}' only, which is "
            f"{found} {of}, or for '{MAX_INSTANCES}'"
        )
        yield Problem(_TARGET, text)


def parameter(config: ModelConfig, name: str) -> str | None:
    """The text of a parameter, if it is given."""
    return config.parameters[name].string_value if name in config.parameters else None
