"""What a class says of itself by its attributes, checked all at once."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from shmserve.errors import InvalidArgument, nearest
from shmserve.ipc.model_settings import (
    MAX_INSTANCES,
    MAX_STREAMS,
    MIN_INSTANCES,
    PADDING,
    STRATEGY,
    TARGET,
)
from shmserve.workers.backends.native.signature import PredictSignature, Where, nowhere, read

logger = logging.getLogger(__name__)

# What of a class means something here.
_KNOWN = (
    *("predict", "load", "unload", "is_ready", "max_batch_size", "max_queue_delay_us"),
    *(STRATEGY, TARGET, MAX_STREAMS, MIN_INSTANCES, MAX_INSTANCES, "instances", "instance_group"),
    *("ragged", "batch_input", "batch_output", PADDING, "sequence_batching"),
)


# Attributes that are parameters of a configuration, what they may be, and that in words.
_PARAMETERS: dict[str, tuple[tuple[type, ...], str]] = {
    STRATEGY: ((str,), "a string"),
    TARGET: ((int, float), "a number of milliseconds"),
    **dict.fromkeys((MIN_INSTANCES, MAX_INSTANCES), ((int,), "a whole number")),
    PADDING: ((dict,), "a mapping as JSON has it"),
}
_WHOLE = ("max_batch_size", "max_queue_delay_us", MAX_STREAMS, "instances")


def check(model: type, at: Where = nowhere) -> PredictSignature:
    """The signature of its `predict`. Raises InvalidArgument with a line for each attribute that is
    wrong, and for each argument; `at` makes the beginning of one by their names."""
    checks: dict[str, Callable[[], Any]] = {
        **{name: partial(whole, model, name, 0) for name in _WHOLE},
        **{name: partial(parameter, model, name) for name in _PARAMETERS},
        **{name: partial(mappings, model, name) for name in ("batch_input", "batch_output")},
        "instance_group": partial(instance_groups, model),
    }
    problems = []
    for name, attempt in checks.items():
        try:
            if getattr(model, name, None) is not None:
                attempt()
        except InvalidArgument as error:
            problems.append(f"{at(name)}{error.message}")
    try:
        predict = read(model, at)
    except InvalidArgument as error:
        problems.append(error.message)
    if problems:
        raise InvalidArgument("\n".join(problems))
    return predict


def instance_groups(model: type) -> list[dict[str, Any]]:
    """The groups that a class asks for, by `instance_group` as in a configuration, or by a number
    of `instances`; none where it says nothing."""
    count = whole(model, "instances", 0)
    groups = getattr(model, "instance_group", [{"count": count}] if count else [])
    if not isinstance(groups, list | tuple) or not all(isinstance(g, dict) for g in groups):
        raise InvalidArgument(
            f"'{model.__name__}.instance_group' must be a list of mappings with the keys of a "
            f"configuration ('count', 'kind', 'gpus'), got {groups!r}"
        )
    return [dict(group) for group in groups]


def warn_of_misspelt(model: type, at: Where) -> None:
    """Log what a class has, means nothing here, and is named almost as what does."""
    for base in model.__mro__:
        own = vars(base) if base.__module__ == model.__module__ else {}
        for name in [name for name in own if name[:1] != "_" and name not in _KNOWN]:
            # Methods are a class's own business more often than not.
            near = nearest(name, _KNOWN, 0.85 if callable(own[name]) else 0.75)
            if near:
                logger.warning(
                    "%s'%s.%s' means nothing here, did you mean '%s'?",
                    *(at(name), model.__name__, name, near),
                )


def whole(model: type, attribute: str, default: int) -> int:
    """A whole number; raises InvalidArgument."""
    value = getattr(model, attribute, default)
    if type(value) is not int or value < 0:
        raise InvalidArgument(
            f"'{model.__name__}.{attribute}' must be an integer >= 0, got {value!r}"
        )
    return value


def own_inputs(
    model: type, inputs: list[dict[str, Any]], ours: frozenset[str], at: Where
) -> list[dict[str, Any]]:
    """The arguments that clients send, the `ragged` ones marked; raises InvalidArgument."""
    ragged = getattr(model, "ragged", ())
    known = {each["name"] for each in inputs} - ours
    if not isinstance(ragged, list | tuple | set | frozenset) or not known.issuperset(ragged):
        raise InvalidArgument(
            f"{at('ragged')}'{model.__name__}.ragged' must be the names of inputs, of "
            f"{sorted(known)}, got {ragged!r}"
        )
    own = [each for each in inputs if each["name"] not in ours]
    return [each | ({"allow_ragged_batch": True} if each["name"] in ragged else {}) for each in own]


def mappings(model: type, attribute: str) -> list[dict[str, Any]]:
    """The value of `batch_input` or `batch_output`; raises InvalidArgument."""
    value = getattr(model, attribute)
    fields = {"target_name", "source_input"}
    if not isinstance(value, list | tuple) or not all(
        isinstance(each, dict)
        and fields <= each.keys()
        and all(isinstance(each[field], list | tuple) for field in fields)
        for each in value
    ):
        raise InvalidArgument(
            f"'{model.__name__}.{attribute}' must be a list of mappings with the keys of a "
            "configuration: 'kind', and the lists 'target_name' and 'source_input', "
            f"got {value!r}"
        )
    return [dict(each) for each in value]


def parameters(model: type) -> dict[str, Any]:
    """The batching strategy, bounds of instances and padding of the class, as parameters of a
    configuration."""
    said = {name: parameter(model, name) for name in _PARAMETERS}
    return {name: {"string_value": text} for name, text in said.items() if text is not None}


def parameter(model: type, name: str) -> str | None:
    """The text of such an attribute, if there is one; raises InvalidArgument."""
    value = getattr(model, name, None)
    kinds, what = _PARAMETERS[name]
    if value is None:
        return None
    if type(value) not in kinds:
        raise InvalidArgument(f"'{model.__name__}.{name}' must be {what}, got {value!r}")
    try:
        return json.dumps(value) if kinds == (dict,) else str(value)
    except TypeError as error:
        raise InvalidArgument(f"'{model.__name__}.{name}' must be {what}: {error}") from None
