"""Parsing a configuration: config.pbtxt text, or the JSON of a load request; and where a class that
is a model writes its own."""

from __future__ import annotations

from typing import Any

from shmserve.common.duplicate_keys import members
from shmserve.errors import InvalidArgument
from shmserve.ipc.model_settings import (
    MAX_INSTANCES,
    MAX_STREAMS,
    MIN_INSTANCES,
    PADDING,
    STRATEGY,
    TARGET,
)
from shmserve.ipc.model_spec import source_positions
from shmserve.model_config.diagnostics import Key, Source, located, member
from shmserve.model_config.syntax import Malformed, MessageValue
from shmserve.model_config.syntax.json_format import decode_json, tree_from_json
from shmserve.model_config.syntax.message_builder import Builder
from shmserve.model_config.syntax.text_format import parse
from shmserve.proto.model_config_pb2 import ModelConfig


def read_pbtxt(text: str, file_name: str = "config.pbtxt") -> tuple[ModelConfig, Source]:
    """The message that protobuf text says, as far as it can be read, and what is where in it.

    What does not fit the schema is among the problems of the source, for `validate` to tell beside
    its own. Raises InvalidArgument for text that is not even well formed, with one line for the
    place where reading stopped.
    """
    try:
        return _filled(Builder(), parse(text), file_name)
    except Malformed as malformed:
        raise _refusal(file_name, malformed) from None


def read_json(value: str | dict[str, Any], origin: str = "config") -> tuple[ModelConfig, Source]:
    """As `read_pbtxt`, of proto3 JSON, which is taken as leniently as protobuf's reader does:
    snake_case or camelCase, numbers and booleans also as strings, one value for a list of one,
    names without quotes, a comma behind the last member.

    Positions are those in `value`, and none where that is no text but decoded already.
    """
    text = value if isinstance(value, str) else ""
    try:
        decoded = decode_json(value, members) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidArgument(f"{origin}: not valid JSON: {reason}") from None
    if not isinstance(decoded, dict):
        raise InvalidArgument(f"{origin}: expected a JSON object")
    try:
        return _filled(Builder(json=True), tree_from_json(decoded, text), origin)
    except Malformed as malformed:
        raise _refusal(origin, malformed) from None


def parse_pbtxt(text: str, file_name: str = "config.pbtxt") -> ModelConfig:
    """The message that protobuf text says.

    Raises InvalidArgument with one line for each mistake, all of them at once:
    `file_name:LINE:COLUMN: key.path[0]: what is wrong, what was found, the nearest known name`.
    """
    config, source = read_pbtxt(text, file_name)
    source.check(config)
    return config


def from_json(value: str | dict[str, Any], origin: str = "config") -> ModelConfig:
    """The message that proto3 JSON says; refuses as `parse_pbtxt` does."""
    config, source = read_json(value, origin)
    source.check(config)
    return config


def _filled(builder: Builder, tree: MessageValue, origin: str) -> tuple[ModelConfig, Source]:
    config = ModelConfig()
    builder.fill(config, tree)
    return config, Source(origin, builder.places, tuple(builder.problems))


def _refusal(origin: str, malformed: Malformed) -> InvalidArgument:
    return InvalidArgument(f"{located(origin, malformed.at)} {malformed.message}")


# Attribute or method -> the keys of a configuration that it makes; others are keys themselves.
_KEYS: dict[str, tuple[Key, ...]] = {
    "instances": (("instance_group",),),
    "max_queue_delay_us": (("dynamic_batching", "max_queue_delay_microseconds"),),
    "predict": (("input",), ("output",)),
    **{
        name: (("parameters", member(name)),)
        for name in (STRATEGY, TARGET, MAX_STREAMS, MIN_INSTANCES, MAX_INSTANCES, PADDING)
    },
}


def class_source(text: str, name: str, origin: str) -> Source:
    """The places of a class `name` in the text of its file (pure); `origin` names the file."""
    places: dict[Key, str] = {}
    for attribute, place in source_positions(text, name).items():
        for key in _KEYS.get(attribute, ((attribute,),)):
            places[key] = place
    return Source(origin, places)
