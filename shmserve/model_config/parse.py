"""Where a configuration comes from: config.pbtxt text, or the JSON of a load request."""

from __future__ import annotations

import json
from typing import Any

from shmserve.doubles import members
from shmserve.errors import InvalidArgument
from shmserve.model_config.build import Builder
from shmserve.model_config.jsonform import tree_from_json
from shmserve.model_config.text import parse
from shmserve.model_config.tree import Malformed
from shmserve.proto.model_config_pb2 import ModelConfig


def parse_pbtxt(text: str, file_name: str = "config.pbtxt") -> ModelConfig:
    """The message that protobuf text says.

    Raises InvalidArgument with one line for each mistake, all of them at once:
    `file_name:LINE:COLUMN: key.path[0]: what is wrong, what was found, the nearest known name`.
    Text that is not even well formed has one line, for the place where reading stopped.
    """
    try:
        tree = parse(text)
    except Malformed as malformed:
        raise InvalidArgument(f"{file_name}:{malformed.at}: {malformed.message}") from None
    builder = Builder(file_name)
    config = ModelConfig()
    builder.fill(config, tree)
    _raise_all(builder.problems)
    return config


def from_json(value: str | dict[str, Any], origin: str = "config") -> ModelConfig:
    """The message that proto3 JSON says; snake_case or camelCase, integers also as strings.

    Raises InvalidArgument with one line for each mistake, `origin: key.path[0]: what is wrong ...`.
    """
    try:
        decoded = json.loads(value, object_pairs_hook=members) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidArgument(f"{origin}: not valid JSON: {reason}") from None
    if not isinstance(decoded, dict):
        raise InvalidArgument(f"{origin}: expected a JSON object")
    builder = Builder(origin, json=True)
    config = ModelConfig()
    try:
        builder.fill(config, tree_from_json(decoded))
    except Malformed as malformed:
        raise InvalidArgument(f"{origin}: {malformed.message}") from None
    _raise_all(builder.problems)
    return config


def _raise_all(problems: list[str]) -> None:
    if problems:
        raise InvalidArgument("\n".join(problems))
