"""Parsers of configurations: config.pbtxt, JSON of load requests, and positions in a class."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from shmserve.common.names import reject_duplicate_keys
from shmserve.errors import InvalidArgument
from shmserve.ipc.class_source import source_positions
from shmserve.ipc.model_spec import MODEL_SETTINGS
from shmserve.model_config.diagnostics import Key, Source, map_key, position_text
from shmserve.model_config.message_builder import Builder
from shmserve.model_config.syntax import Malformed, MessageValue, decode_json, parse, tree_from_json
from shmserve.proto.model_config_pb2 import ModelConfig


def read_pbtxt(text: str, file_name: str = "config.pbtxt") -> tuple[ModelConfig, Source]:
    """Return the configuration in a protobuf text as far as it can be read, and its source.

    Values that do not fit the schema become problems of the source, so that `validate` reports them
    together with its own.

    Raises:
        InvalidArgument: The text is malformed. The message has one line, for the position where the
            parser stopped.
    """
    return _build(Builder(), partial(parse, text), file_name)


def read_json(value: str | dict[str, Any], origin: str = "config") -> tuple[ModelConfig, Source]:
    """Return the configuration in proto3 JSON as far as it can be read, and its source.

    The reader is as lenient as protobuf's. It accepts snake_case and camelCase names, numbers and
    booleans in strings, a single value for a list, names without quotes, and trailing commas.

    Args:
        value: JSON text, or a decoded object, whose keys have no positions.
        origin: The name of the text in error texts.

    Raises:
        InvalidArgument: `value` is not a JSON object.
    """
    text = value if isinstance(value, str) else ""
    try:
        decoded = decode_json(value, reject_duplicate_keys) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidArgument(f"{origin}: not valid JSON: {reason}") from None
    if not isinstance(decoded, dict):
        raise InvalidArgument(f"{origin}: expected a JSON object, found {type(decoded).__name__}")
    return _build(Builder(is_json=True), partial(tree_from_json, decoded, text), origin)


def parse_pbtxt(text: str, file_name: str = "config.pbtxt") -> ModelConfig:
    """Return the configuration in a protobuf text.

    Raises:
        InvalidArgument: The text has mistakes. Each has a line in the message:
            `file_name:LINE:COLUMN: key.path[0]: problem, value found, nearest known name`.
    """
    config, source = read_pbtxt(text, file_name)
    source.raise_for_problems(config)
    return config


def from_json(value: str | dict[str, Any], origin: str = "config") -> ModelConfig:
    """Return the configuration in proto3 JSON; see `read_json` and `parse_pbtxt`."""
    config, source = read_json(value, origin)
    source.raise_for_problems(config)
    return config


def _build(
    builder: Builder, read_tree: Callable[[], MessageValue], origin: str
) -> tuple[ModelConfig, Source]:
    config = ModelConfig()
    try:
        builder.fill(config, read_tree())
    except Malformed as error:
        raise InvalidArgument(f"{position_text(origin, error.at)} {error.message}") from None
    return config, Source(origin, builder.positions, tuple(builder.problems))


# The keys of a configuration that an attribute or method of a class sets. All other attributes set
# the key of their own name.
_KEYS_OF_ATTRIBUTE: dict[str, tuple[Key, ...]] = {
    "instances": (("instance_group",),),
    "max_queue_delay_us": (("dynamic_batching", "max_queue_delay_microseconds"),),
    "predict": (("input",), ("output",)),
    **{name: (("parameters", map_key(name)),) for name in MODEL_SETTINGS},
}


def class_source(text: str | bytes, name: str, origin: str) -> Source:
    """Return the positions of the attributes of class `name` in the text of the file `origin`."""
    positions: dict[Key, str] = {}
    for attribute, position in source_positions(text, name).items():
        for key in _KEYS_OF_ATTRIBUTE.get(attribute, ((attribute,),)):
            positions[key] = position
    return Source(origin, positions)
