"""The rules of the parameter `padding`: inputs filled up to one shape, outputs cut back."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from shmserve.common.duplicate_keys import members
from shmserve.errors import suggestion
from shmserve.model_config.diagnostics import Key, Problem, member
from shmserve.proto.model_config_pb2 import DataType, ModelConfig, ModelInput, ModelOutput

PADDING = "padding"
_AT: Key = ("parameters", member(PADDING))
_OF_INPUT = ("value", "buckets", "lengths", "mask", "max_waste")
_MOST_ELEMENTS = 1 << 28  # of a row in a bucket
_LONGEST_SHOWN = 64
# The largest finite number of each floating type.
_LARGEST: dict[int, float] = {
    DataType.TYPE_FP16: 65504.0,
    DataType.TYPE_BF16: 3.3895313892515355e38,
    DataType.TYPE_FP32: 3.4028234663852886e38,
    DataType.TYPE_FP64: 1.7976931348623157e308,
}
# Whole numbers: (lowest, highest).
_RANGES = {
    DataType.TYPE_BOOL: (0, 1),
    **{DataType.Value(f"TYPE_UINT{n}"): (0, 2**n - 1) for n in (8, 16, 32, 64)},
    **{
        DataType.Value(f"TYPE_INT{n}"): (-(2 ** (n - 1)), 2 ** (n - 1) - 1) for n in (8, 16, 32, 64)
    },
}


def padding_problems(config: ModelConfig, *, complete: bool) -> Iterator[Problem]:
    """The problems of `padding`; `complete`: the model has completed its inputs."""
    if PADDING not in config.parameters:
        return
    for text in _problems(config, config.parameters[PADDING].string_value, complete):
        yield Problem(_AT, f"parameter '{PADDING}' {text} for {config.name}")


def _problems(config: ModelConfig, text: str, complete: bool) -> Iterator[str]:
    try:
        said = json.loads(text, object_pairs_hook=members)
    except ValueError as error:
        yield f"must be a JSON object, and cannot be read: {error}"
        return
    except RecursionError:
        yield "must be a JSON object, and cannot be read: it is nested too deeply"
        return
    if not isinstance(said, dict) or not all(isinstance(each, dict) for each in said.values()):
        form = '{"INPUT": {"value": 0}, "OUTPUT": {"like": "INPUT"}}'
        yield f"must be a JSON object of objects, {form}"
        return
    if not complete or not said:
        return
    if config.max_batch_size < 1:
        yield "needs a max_batch_size of 1 at least, as it fills up the rows of a batch"
    if config.model_transaction_policy.decoupled:
        yield "needs a model that is not decoupled"
    inputs = {io.name: io for io in config.input}
    outputs = {out.name: out for out in config.output}
    for name, entry in said.items():
        if "like" in entry:
            problems = _of_output(name, entry, inputs, outputs, said)
        else:
            problems = _of_input(name, entry, inputs)
        for problem in problems:
            yield f"{problem}, of '{name}',"
    yield from _names(said, inputs)


def _of_input(name: str, entry: dict[str, Any], inputs: dict[str, ModelInput]) -> Iterator[str]:
    for key in entry:
        if key not in _OF_INPUT:
            allowed = ", ".join(map(repr, (*_OF_INPUT, "like")))
            near = suggestion(key, (*_OF_INPUT, "like"))
            yield f"has the key '{key}', which is none of {allowed}{near}"
    io = inputs.get(name)
    if io is None:
        yield "is for no input of the model, nor has it 'like' for an output"
        return
    if -1 not in io.dims:
        yield "is for an input without a dimension of any size (-1)"
    if io.HasField("reshape") or io.allow_ragged_batch:
        other = "allow_ragged_batch" if io.allow_ragged_batch else "reshape"
        yield f"is for an input with '{other}': it can have one of the two"
    if io.data_type == DataType.TYPE_STRING:
        yield "is for an input of strings, which have no padding"
    else:
        yield from _value(entry.get("value", 0), io.data_type)
    yield from _buckets(entry.get("buckets", []), list(io.dims))
    most = entry.get("max_waste", 1)
    if isinstance(most, bool) or not isinstance(most, int | float) or not 0 <= most <= 1:
        yield f"must have as 'max_waste' a share, from 0 to 1, found {most!r}"


def _value(value: Any, data_type: int) -> Iterator[str]:
    low, high = _RANGES.get(data_type, (None, None))
    kind = DataType.Name(data_type)
    if low is None or high is None:
        largest = _LARGEST[data_type]
        if isinstance(value, bool) or not isinstance(value, int | float):
            yield f"must have as 'value' a number for {kind}, found {value!r}"
        elif abs(value) > largest and value not in (math.inf, -math.inf):
            yield (
                f"must have as 'value' a number from {-largest:.6g} to {largest:.6g}, or an "
                f"infinite one, for {kind}, found {_shown(value)}"
            )
    elif not isinstance(value, int) or not low <= value <= high:
        yield f"must have as 'value' an integer from {low} to {high} for {kind}, found {value!r}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def _buckets(buckets: Any, dims: list[int]) -> Iterator[str]:
    if not isinstance(buckets, list):
        yield f"must have as 'buckets' a list of shapes, found {buckets!r}"
        return
    for bucket in buckets:
        sizes = bucket if isinstance(bucket, list) else []
        whole = all(type(size) is int and size > 0 for size in sizes)
        if not whole or len(sizes) != len(dims):
            yield f"has the bucket {bucket!r}, which is no shape of {len(dims)} sizes"
        elif any(dim not in (-1, size) for dim, size in zip(dims, sizes, strict=True)):
            yield f"has the bucket {bucket!r}, which does not agree with the input's dims {dims}"
        elif math.prod(sizes) > _MOST_ELEMENTS:
            yield (
                f"has the bucket {_shown(bucket)} of more elements than a row may have, "
                f"{_MOST_ELEMENTS}"
            )


def _of_output(
    name: str,
    entry: dict[str, Any],
    inputs: dict[str, ModelInput],
    outputs: dict[str, ModelOutput],
    said: dict[str, Any],
) -> Iterator[str]:
    if set(entry) != {"like"}:
        yield "has other keys beside 'like'"
    output, source = outputs.get(name), entry["like"]
    if output is None:
        yield "has 'like' for what is no output of the model"
        return
    if output.HasField("reshape"):
        yield "is for an output with 'reshape': it can have one of the two"
    if (
        not isinstance(source, str)
        or source not in inputs
        or "like" in said.get(source, {"like": 0})
    ):
        yield f"must have as 'like' an input that is padded, found {source!r}"
        return
    free, known = list(output.dims).count(-1), list(inputs[source].dims).count(-1)
    if free != known or not free:
        yield f"cuts an output with {free} dimensions of any size like an input with {known}"


def _names(said: dict[str, Any], inputs: dict[str, ModelInput]) -> Iterator[str]:
    taken = set(inputs)
    for name, entry in said.items():
        for key in ("lengths", "mask"):
            made = entry.get(key)
            if made is None:
                continue
            if not isinstance(made, str) or not made:
                yield f"must have as '{key}' the name of an input, found {made!r}, of '{name}',"
            elif made in taken:
                yield (
                    f"makes the input '{made}' as '{key}', which is another input's name already, "
                    f"of '{name}',"
                )
            else:
                taken.add(made)
