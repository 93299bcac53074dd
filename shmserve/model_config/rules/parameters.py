"""Rules for the parameters that the server interprets for every backend.

These parameters set the batching strategy, the bounds of the number of instances, unloading of idle
models, and padding.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from shmserve.common.names import reject_duplicate_keys
from shmserve.errors import clip, suggestion
from shmserve.ipc.engine_settings import LLM_BACKEND
from shmserve.ipc.model_spec import (
    IDLE_UNLOAD,
    LARGEST_INSTANCE_BOUND,
    LARGEST_MAX_STREAMS,
    LONGEST_IDLE_S,
    MAX_INSTANCES,
    MAX_STREAMS,
    MIN_INSTANCES,
    PADDING,
    STRATEGY_PARAMETER,
    TARGET_PARAMETER,
    Strategy,
    parse_idle_unload_s,
    parse_instance_bound,
    parse_max_streams,
    parse_strategy,
    parse_target_ms,
)
from shmserve.model_config.source import Key, Problem, map_key
from shmserve.proto.model_config_pb2 import (
    DataType,
    ModelConfig,
    ModelInput,
    ModelInstanceGroup,
    ModelOutput,
)

_INSTANCE_BOUND = (parse_instance_bound, f"an integer from 1 to {LARGEST_INSTANCE_BOUND}")
# The parser of each parameter, which returns None for an invalid text, and the allowed texts.
_PARAMETERS: Mapping[str, tuple[Callable[[str], Any], str]] = {
    STRATEGY_PARAMETER: (parse_strategy, "one of " + ", ".join(f"'{name}'" for name in Strategy)),
    TARGET_PARAMETER: (parse_target_ms, "a number of milliseconds from 0.001 to 86400000 (a day)"),
    MAX_STREAMS: (parse_max_streams, f"an integer from 1 to {LARGEST_MAX_STREAMS}"),
    IDLE_UNLOAD: (parse_idle_unload_s, f"a number of seconds from 0 to {LONGEST_IDLE_S:.0f}"),
    MIN_INSTANCES: _INSTANCE_BOUND,
    MAX_INSTANCES: _INSTANCE_BOUND,
}
_PADDING_KEYS = ("value", "buckets", "lengths", "mask", "max_waste")
_MAX_ELEMENTS = 1 << 28  # maximum number of elements in a row of a padding bucket
_MAX_SHOWN_CHARS = 64
# The largest finite value of each floating-point datatype.
_FLOAT_MAXIMA: dict[int, float] = {
    DataType.TYPE_FP16: 65504.0,
    DataType.TYPE_BF16: 3.3895313892515355e38,
    DataType.TYPE_FP32: 3.4028234663852886e38,
    DataType.TYPE_FP64: 1.7976931348623157e308,
}
# The range of each integer datatype: (lowest, highest).
_INTEGER_RANGES = {
    DataType.TYPE_BOOL: (0, 1),
    **{DataType.Value(f"TYPE_UINT{n}"): (0, 2**n - 1) for n in (8, 16, 32, 64)},
    **{DataType.Value(f"TYPE_INT{n}"): (-(2**n // 2), 2**n // 2 - 1) for n in (8, 16, 32, 64)},
}


def parameter_problems(config: ModelConfig, *, is_complete: bool) -> Iterator[Problem]:
    """Yield the problems of a configuration's parameters.

    Args:
        config: The configuration.
        is_complete: Whether the model has completed it.
    """
    suffix = f"for {config.name}"
    parameters = config.parameters
    texts = {name: parameters[name].string_value for name in _PARAMETERS if name in parameters}
    values = {name: _PARAMETERS[name][0](text) for name, text in texts.items()}
    for name, text in texts.items():
        if values[name] is None:
            hint = suggestion(text, Strategy) if name == STRATEGY_PARAMETER else ""
            allowed_text = f"parameter '{name}' must be {_PARAMETERS[name][1]} {suffix}"
            yield Problem(_key(name), f"{allowed_text}, found '{text}'{hint}")
    if is_complete:
        yield from _strategy_problems(config, values)
    if PADDING in config.parameters:
        for text in _padding_problems(config, config.parameters[PADDING].string_value, is_complete):
            yield Problem(_key(PADDING), f"parameter '{PADDING}' {suffix}{text}")
    yield from _bound_problems(config, values, is_complete)


def _key(name: str) -> Key:
    return "parameters", map_key(name)


def _strategy_problems(config: ModelConfig, values: Mapping[str, Any]) -> Iterator[Problem]:
    strategy, suffix = values.get(STRATEGY_PARAMETER), f"for {config.name}"
    if strategy is not None and not config.HasField("dynamic_batching"):
        text = (
            f"parameter '{STRATEGY_PARAMETER}' is '{strategy}' {suffix}, which has no "
            "'dynamic_batching': add that block, or remove the parameter"
        )
        yield Problem(_key(STRATEGY_PARAMETER), text)
    if strategy is Strategy.ADAPTIVE and TARGET_PARAMETER not in values:
        text = (
            f"parameter '{STRATEGY_PARAMETER}' is '{strategy}' {suffix}, which needs the parameter "
            f"'{TARGET_PARAMETER}', a number of milliseconds"
        )
        yield Problem(_key(STRATEGY_PARAMETER), text)
    uses_target = strategy is Strategy.ADAPTIVE or MAX_INSTANCES in config.parameters
    may_apply = strategy or STRATEGY_PARAMETER not in values
    if TARGET_PARAMETER in values and not uses_target and may_apply:
        strategy_text = f"'{strategy}'" if strategy else "none"
        text = (
            f"parameter '{TARGET_PARAMETER}' {suffix} requires the parameter '{MAX_INSTANCES}', or "
            f"'{STRATEGY_PARAMETER}' with the value '{Strategy.ADAPTIVE}' (found: {strategy_text})"
        )
        yield Problem(_key(TARGET_PARAMETER), text)


def _bound_problems(
    config: ModelConfig, values: Mapping[str, Any], is_complete: bool
) -> Iterator[Problem]:
    set_bounds = {name: values[name] for name in (MIN_INSTANCES, MAX_INSTANCES) if name in values}
    if not set_bounds or None in set_bounds.values():
        return
    minimum, maximum = set_bounds.get(MIN_INSTANCES) or 1, set_bounds.get(MAX_INSTANCES)
    suffix = f"for {config.name}"
    if maximum is None:
        if is_complete:
            text = f"parameter '{MIN_INSTANCES}' {suffix} requires the parameter '{MAX_INSTANCES}'"
            yield Problem(_key(MIN_INSTANCES), text)
        return
    if minimum > maximum:
        text = f"parameter '{MIN_INSTANCES}' {suffix} must be at most '{MAX_INSTANCES}' ({maximum})"
        yield Problem(_key(MIN_INSTANCES), f"{text}, found {minimum}", (_key(MAX_INSTANCES),))
    yield from _unscalable_problems(config)
    if is_complete:
        yield from _group_problems(config, maximum)


def _unscalable_problems(config: ModelConfig) -> Iterator[Problem]:
    """Yield the problems of `max_instances` for models that cannot be scaled by queueing delay.

    Ensembles have no instances. An instance with sequences or generations does not become free
    after a batch.
    """
    for key, reason, is_unscalable in (
        ("ensemble_scheduling", "an ensemble", config.HasField("ensemble_scheduling")),
        ("sequence_batching", "a model with sequences", config.HasField("sequence_batching")),
        ("backend", "a model that generates text", config.backend == LLM_BACKEND),
    ):
        if is_unscalable:
            text = (
                f"parameter '{MAX_INSTANCES}' requires a model whose requests are independent of "
                f"each other, found {reason}: {config.name}"
            )
            yield Problem(_key(MAX_INSTANCES), text, ((key,),))


def _group_problems(config: ModelConfig, maximum: int) -> Iterator[Problem]:
    groups = config.instance_group
    suffix = f"for {config.name}, which has the parameter '{MAX_INSTANCES}'"
    if len(groups) > 1:
        text = f"only one instance group is allowed {suffix}, found {len(groups)}"
        yield Problem(("instance_group", 1), text, (_key(MAX_INSTANCES),))
        return
    for group in groups:
        count = group.count * (len(group.gpus) if group.kind == ModelInstanceGroup.KIND_GPU else 1)
        if count > maximum:
            text = f"at most {maximum} instances are allowed {suffix}, found {count}"
            yield Problem(("instance_group", 0, "count"), text, (_key(MAX_INSTANCES),))


def _padding_problems(config: ModelConfig, text: str, is_complete: bool) -> Iterator[str]:
    try:
        entries = json.loads(text, object_pairs_hook=reject_duplicate_keys)
    except ValueError as error:
        yield f" must be a JSON object, but cannot be parsed: {error}"
        return
    except RecursionError:
        yield " must be a JSON object, but is nested too deeply"
        return
    if not isinstance(entries, dict) or not all(
        isinstance(entry, dict) for entry in entries.values()
    ):
        example = '{"INPUT": {"value": 0}, "OUTPUT": {"like": "INPUT"}}'
        yield f" must be a JSON object of objects, {example}"
        return
    if not is_complete or not entries:
        return
    if config.max_batch_size < 1:
        yield " requires a max_batch_size of at least 1, because it pads the rows of a batch"
    if config.model_transaction_policy.decoupled:
        yield " is not supported for a decoupled model"
    inputs = {io.name: io for io in config.input}
    outputs = {out.name: out for out in config.output}
    for name, entry in entries.items():
        if "like" in entry:
            problems = _output_errors(name, entry, inputs, outputs, entries)
        else:
            problems = _input_errors(name, entry, inputs)
        for problem in problems:
            yield f": entry '{name}' {problem}"
    for name, problem in _name_errors(entries, inputs):
        yield f": entry '{name}' {problem}"


def _input_errors(name: str, entry: dict[str, Any], inputs: dict[str, ModelInput]) -> Iterator[str]:
    for key in entry:
        if key not in _PADDING_KEYS:
            allowed_keys = ", ".join(map(repr, (*_PADDING_KEYS, "like")))
            hint = suggestion(key, (*_PADDING_KEYS, "like"))
            yield f"has the unknown key '{key}' (allowed: {allowed_keys}){hint}"
    io = inputs.get(name)
    if io is None:
        yield "names neither an input of the model, nor an output with 'like'"
        return
    if -1 not in io.dims:
        yield "names an input without a variable dimension (-1)"
    if io.HasField("reshape") or io.allow_ragged_batch:
        conflicting_field = "allow_ragged_batch" if io.allow_ragged_batch else "reshape"
        yield f"names an input with '{conflicting_field}', which cannot be combined with padding"
    if io.data_type == DataType.TYPE_STRING:
        yield "names an input of strings, which cannot be padded"
    else:
        yield from _value_errors(entry.get("value", 0), io.data_type)
    yield from _bucket_errors(entry.get("buckets", []), list(io.dims))
    waste = entry.get("max_waste", 1)
    if isinstance(waste, bool) or not isinstance(waste, int | float) or not 0 <= waste <= 1:
        yield f"must have a 'max_waste' from 0 to 1, found {waste!r}"


def _value_errors(value: Any, data_type: int) -> Iterator[str]:
    minimum, maximum = _INTEGER_RANGES.get(data_type, (None, None))
    kind = DataType.Name(data_type)
    if minimum is None or maximum is None:
        max_float = _FLOAT_MAXIMA[data_type]
        if isinstance(value, bool) or not isinstance(value, int | float):
            yield f"must have a 'value' that is a number ({kind}), found {value!r}"
        elif abs(value) > max_float and value not in (math.inf, -math.inf):
            yield (
                f"must have a 'value' from {-max_float:.6g} to {max_float:.6g}, or infinity, for "
                f"{kind}, found {clip(repr(value), _MAX_SHOWN_CHARS)}"
            )
    elif not isinstance(value, int) or not minimum <= value <= maximum:
        yield f"must have an integer 'value' from {minimum} to {maximum} ({kind}), found {value!r}"


def _bucket_errors(buckets: Any, dims: list[int]) -> Iterator[str]:
    if not isinstance(buckets, list):
        yield f"must have 'buckets' that are a list of shapes, found {buckets!r}"
        return
    for bucket in buckets:
        sizes = bucket if isinstance(bucket, list) else []
        is_shape = all(type(size) is int and size > 0 for size in sizes)
        if not is_shape or len(sizes) != len(dims):
            yield f"has the bucket {bucket!r}, which is not a shape of {len(dims)} dimensions"
        elif any(dim not in (-1, size) for dim, size in zip(dims, sizes, strict=True)):
            yield f"has the bucket {bucket!r}, which does not match the input's dims {dims}"
        elif math.prod(sizes) > _MAX_ELEMENTS:
            yield (
                f"has the bucket {clip(repr(bucket), _MAX_SHOWN_CHARS)}, which exceeds the "
                f"{_MAX_ELEMENTS} elements that a row may have"
            )


def _output_errors(
    name: str,
    entry: dict[str, Any],
    inputs: dict[str, ModelInput],
    outputs: dict[str, ModelOutput],
    entries: dict[str, Any],
) -> Iterator[str]:
    if set(entry) != {"like"}:
        yield "has keys besides 'like' (allowed: only 'like')"
    output, input_name = outputs.get(name), entry["like"]
    if output is None:
        yield "has 'like', but the model has no output of this name"
        return
    if output.HasField("reshape"):
        yield "names an output with 'reshape', which cannot be combined with padding"
    if (
        not isinstance(input_name, str)
        or input_name not in inputs
        or "like" in entries.get(input_name, {"like": 0})
    ):
        yield f"must have a 'like' that names a padded input, found {input_name!r}"
        return
    output_count, input_count = list(output.dims).count(-1), list(inputs[input_name].dims).count(-1)
    if output_count != input_count:
        yield f"has {output_count} variable dimensions, but its 'like' input has {input_count}"


def _name_errors(
    entries: dict[str, Any], inputs: dict[str, ModelInput]
) -> Iterator[tuple[str, str]]:
    """Yield (name of the padded input, problem) for the names in its 'lengths' and 'mask'."""
    used_names = set(inputs)
    for name, entry in entries.items():
        for key in ("lengths", "mask"):
            tensor_name = entry.get(key)
            if tensor_name is None:
                continue
            if not isinstance(tensor_name, str) or not tensor_name:
                yield name, f"must have a '{key}' that names an input, found {tensor_name!r}"
            elif tensor_name in used_names:
                text = f"creates the input '{tensor_name}' ('{key}'), whose name another input has"
                yield name, text
            else:
                used_names.add(tensor_name)
