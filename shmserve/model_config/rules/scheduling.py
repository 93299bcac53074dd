"""Rules for the dynamic batcher, the sequence batcher and the response cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shmserve.model_config.source import Key, Problem, find_repeats
from shmserve.proto.model_config_pb2 import (
    DataType,
    ModelConfig,
    ModelDynamicBatching,
    ModelQueuePolicy,
    ModelSequenceBatching,
)

_DYNAMIC_KEY: Key = ("dynamic_batching",)
_Control = ModelSequenceBatching.Control
_SEQUENCE_KEY: Key = ("sequence_batching",)
_FALSE_TRUE_FIELDS = ("int32_false_true", "fp32_false_true", "bool_false_true")
_FIELDS_FORMAT = "'int32_false_true', 'fp32_false_true' {} 'bool_false_true'"
_CORRELATION_TYPES = (
    *(DataType.TYPE_UINT64, DataType.TYPE_INT64, DataType.TYPE_UINT32, DataType.TYPE_INT32),
    DataType.TYPE_STRING,
)


def dynamic_problems(config: ModelConfig, *, is_complete: bool) -> Iterator[Problem]:
    """Yield the problems of `dynamic_batching`; `is_complete` as for `validate`."""
    name, batching = config.name, config.dynamic_batching
    sizes = batching.preferred_batch_size
    subject = "dynamic batching preferred size"
    yield from _preferred_problems(config, _DYNAMIC_KEY, sizes, subject, is_complete)
    level_count, levels_key = batching.priority_levels, (*_DYNAMIC_KEY, "priority_levels")
    if level_count:
        if not 1 <= batching.default_priority_level <= level_count:
            text = f"default priority level must be in range [1, {level_count}] for {name}"
            yield Problem((*_DYNAMIC_KEY, "default_priority_level"), text, (levels_key,))
        for level in sorted(batching.priority_queue_policy):
            if not 1 <= level <= level_count:
                text = (
                    f"priority queue policy must have priority level in range [1, {level_count}] "
                    f"for {name}"
                )
                yield Problem((*_DYNAMIC_KEY, "priority_queue_policy", level), text, (levels_key,))
    if batching.preserve_ordering:
        if level_count > 1:
            text = f"Only one priority level is allowed when 'preserve_ordering' is true for {name}"
            yield Problem(levels_key, text)
        for key in _find_delays(batching):
            text = (
                "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is "
                f"true for {name}"
            )
            yield Problem(key, text)


def _preferred_problems(
    config: ModelConfig, path: Key, sizes: Iterable[int], subject: str, is_complete: bool
) -> Iterator[Problem]:
    """Yield the problems of a batcher's `preferred_batch_size`."""
    has_bound = is_complete or config.HasField("max_batch_size")
    for index, size in enumerate(sizes):
        key = (*path, "preferred_batch_size", index)
        if size <= 0:
            yield Problem(key, f"{subject} must be positive for {config.name}")
        if has_bound and size > config.max_batch_size:
            text = f"{subject} must be <= max batch size for {config.name}"
            yield Problem(key, text, (("max_batch_size",),))


def _find_delays(batching: ModelDynamicBatching) -> Iterator[Key]:
    """Yield the keys of queue policies with a timeout and the action DELAY, not REJECT."""
    path = (*_DYNAMIC_KEY, "default_queue_policy")
    policies: dict[Key, ModelQueuePolicy] = {path: batching.default_queue_policy}
    for level, policy in sorted(batching.priority_queue_policy.items()):
        policies[*_DYNAMIC_KEY, "priority_queue_policy", level] = policy
    for key, policy in policies.items():
        if policy.timeout_action == ModelQueuePolicy.DELAY and policy.default_timeout_microseconds:
            yield key


def sequence_problems(config: ModelConfig, *, is_complete: bool) -> Iterator[Problem]:
    """Yield the problems of `sequence_batching`; `is_complete` as for `validate`."""
    name, batching = config.name, config.sequence_batching
    controls = [
        ((*_SEQUENCE_KEY, "control_input", input_index, "control", control_index), control)
        for input_index, control_input in enumerate(batching.control_input)
        for control_index, control in enumerate(control_input.control)
    ]
    control_kinds = (((*path, "kind"), control.kind) for path, control in controls)
    for key, kind, first_key in find_repeats(control_kinds):
        kind_name = _Control.Kind.Name(kind)
        text = f"sequence batching specifies multiple {kind_name} tensors for {name}"
        yield Problem(key, text, (first_key,))
    yield from _control_name_problems(config)
    for path, control in controls:
        yield from _control_problems(path, control, name)
    subject, sizes = "sequence batching preferred batch size", batching.oldest.preferred_batch_size
    yield from _preferred_problems(config, (*_SEQUENCE_KEY, "oldest"), sizes, subject, is_complete)
    if not 0 <= batching.direct.minimum_slot_utilization <= 1:
        key = (*_SEQUENCE_KEY, "direct", "minimum_slot_utilization")
        text = f"sequence batching minimum slot utilization must be in range (0.0, 1.0] for {name}"
        yield Problem(key, text)
    if batching.oldest.max_candidate_sequences < 0:
        key = (*_SEQUENCE_KEY, "oldest", "max_candidate_sequences")
        yield Problem(key, f"sequence batching max candidate sequences must be >= 0 for {name}")
    for index, state in enumerate(batching.state):
        yield from _state_problems((*_SEQUENCE_KEY, "state", index), state, name)


def _control_name_problems(config: ModelConfig) -> Iterator[Problem]:
    """Yield the problems of control inputs that have no name, or the same name."""
    name = config.name
    names: list[tuple[Key, str]] = []
    for index, control_input in enumerate(config.sequence_batching.control_input):
        key = (*_SEQUENCE_KEY, "control_input", index, "name")
        if not control_input.name:
            yield Problem(key, f"sequence batching control tensor must have a name for {name}")
        else:
            names.append((key, control_input.name))
    for key, tensor, first_key in find_repeats(names):
        text = (
            f"sequence batching control tensor '{tensor}' is specified for multiple control kinds"
        )
        yield Problem(key, f"{text} for {name}", (first_key,))


def _control_problems(path: Key, control: _Control, name: str) -> Iterator[Problem]:
    kind = _Control.Kind.Name(control.kind)
    related_keys = ((*path, "kind"),)
    set_fields = [field for field in _FALSE_TRUE_FIELDS if len(getattr(control, field))]
    if control.kind == _Control.CONTROL_SEQUENCE_CORRID:
        if control.data_type not in _CORRELATION_TYPES:
            text = (
                f"unexpected data type for control {kind} for {name}. Allowed data types are "
                "TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING"
            )
            yield Problem((*path, "data_type"), text, related_keys)
        if set_fields:
            fields_text = _FIELDS_FORMAT.format("or")
            text = f"sequence batching must not specify either {fields_text} for {kind} for {name}"
            yield Problem((*path, set_fields[0]), text, related_keys)
        return
    if not set_fields:
        fields_text = _FIELDS_FORMAT.format("or")
        text = f"sequence batching must specify either {fields_text} for {kind} for {name}"
        yield Problem(path, text, related_keys)
    if len(set_fields) > 1:
        fields_text = _FIELDS_FORMAT.format("and")
        text = f"sequence batching specifies more than one from {fields_text} for {kind} for {name}"
        yield Problem((*path, set_fields[1]), text, related_keys)
    for field in set_fields:
        if len(getattr(control, field)) != 2:
            text = (
                f"sequence batching control '{field}' must have exactly 2 entries for {kind} "
                f"for {name}"
            )
            yield Problem((*path, field), text, related_keys)


def _state_problems(path: Key, state: ModelSequenceBatching.State, name: str) -> Iterator[Problem]:
    input_name = state.input_name
    for field in ("input_name", "output_name", "data_type", "dims"):
        if not getattr(state, field):
            text = f"sequence batching state must specify '{field}' for {name}"
            yield Problem((*path, field), text)
    for index, dim in enumerate(state.dims):
        if dim < 1 and dim != -1:
            text = (
                f"sequence batching state '{input_name}' dimension must be integer >= 1, or -1 to "
                f"indicate a variable-size dimension for {name}"
            )
            yield Problem((*path, "dims", index), text)


def initial_state_problems(config: ModelConfig) -> Iterator[Problem]:
    """Yield the problems of the initial values of `sequence_batching.state`."""
    for position, state in enumerate(config.sequence_batching.state):
        path: Key = (*_SEQUENCE_KEY, "state", position)
        if len(state.initial_state) > 1:
            text = (
                f"initial_state field for state input '{state.input_name}' must contain exactly "
                f"one or zero element. Found '{len(state.initial_state)}' elements."
            )
            yield Problem((*path, "initial_state"), text)
        for index, initial in enumerate(state.initial_state):
            yield from _initial_problems(path, (*path, "initial_state", index), state, initial)


def _initial_problems(
    state_key: Key,
    path: Key,
    state: ModelSequenceBatching.State,
    initial: ModelSequenceBatching.InitialState,
) -> Iterator[Problem]:
    tensor = state.input_name
    if not initial.name:
        text = f"Field 'name' must be set when using initial_state for state input '{tensor}'."
        yield Problem((*path, "name"), text)
    if initial.data_type != state.data_type:
        text = (
            f"The data type used for 'initial_state' field of state '{tensor}' does not match "
            "the state data type."
        )
        yield Problem((*path, "data_type"), text, ((*state_key, "data_type"),))
    if initial.WhichOneof("state_data") is None:
        yield Problem(path, f"initial_state setting expects state'{tensor}' to have state_data set")
    dims, related_keys = (*path, "dims"), ((*state_key, "dims"),)
    if len(initial.dims) != len(state.dims):
        text = (
            "Number of dimensions in 'initial_state' doesn't match the size of 'state' "
            f"dimensions for state input '{tensor}'. {len(initial.dims)} != {len(state.dims)}"
        )
        yield Problem(dims, text, related_keys)
        return
    for index, (initial_size, state_size) in enumerate(zip(initial.dims, state.dims, strict=True)):
        if initial_size < 1:
            text = (
                f"'initial_state' field for state input name '{tensor}' contains variable "
                "dimensions."
            )
            yield Problem((*dims, index), text)
        if state_size not in (-1, initial_size):
            text = (
                f"'initial_state' dim for input name '{tensor}' doesn't match 'state' dim "
                f"description. {initial_size} != {state_size}"
            )
            yield Problem((*dims, index), text, related_keys)


def cache_problems(config: ModelConfig) -> Iterator[Problem]:
    """Yield the problems of `response_cache`: models with streams or sequences cannot have it."""
    if not config.response_cache.enable:
        return
    for reason, is_excluded in (
        ("sequence batching scheduler", config.HasField("sequence_batching")),
        ("'decoupled' transaction policy", config.model_transaction_policy.decoupled),
    ):
        if is_excluded:
            text = (
                f"Response Cache does not currently support model {config.name} with {reason}. "
                "Please disable the response cache."
            )
            yield Problem(("response_cache", "enable"), text)
