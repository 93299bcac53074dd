"""Names in requests and configurations: model names, and duplicate keys of JSON objects (pure).

JSON parsers silently keep one of the values of a duplicate key, so that two parsers may read
different requests.
"""

from __future__ import annotations

import os
import re
from typing import Any

from shmserve.errors import InvalidArgument, clip

_MAX_BYTES = 255  # maximum bytes of a folder's name
CLASS_IN_FILE = re.compile(r"(?P<file>.+\.py):(?P<name>[^\W\d]\w*)")


def check_model_name(name: str) -> None:
    """Raise InvalidArgument unless `name` is one folder's name and fits on one line of the log."""
    if not name.strip():
        raise InvalidArgument("Model name cannot be empty. Please enter a valid name to deploy.")
    shown_name = clip(name, 128)
    if is_traversal(name):
        raise InvalidArgument(
            f"invalid model name '{shown_name}', model name must not contain path traversal "
            "characters"
        )
    # Undecodable bytes are surrogates, which are not printable, or were replaced by U+FFFD.
    if not name.isprintable() or "\ufffd" in name or len(name.encode()) > _MAX_BYTES:
        raise InvalidArgument(
            f"invalid model name '{shown_name}', model name must be 1 to {_MAX_BYTES} bytes of "
            "printable UTF-8 text"
        )


def is_traversal(name: str) -> bool:
    """Check whether a model name, used as a path, could select a folder outside the model's."""
    return name.strip() in (".", "..") or any(character in name for character in "/\\\0")


def names_one_model(text: str) -> bool:
    """Check whether an argument names a model ("path/file.py:Class", a checkpoint's folder).

    Other arguments name repositories.
    """
    return CLASS_IN_FILE.fullmatch(text) is not None or is_checkpoint(text)


def is_checkpoint(path: str) -> bool:
    """Check whether a folder is a Hugging Face checkpoint, which contains config.json."""
    return os.path.isfile(os.path.join(path, "config.json"))


_MAX_SHOWN_CHARS = 64


class DuplicateKeyError(ValueError):
    """The error for a JSON object with a duplicate key; `name` is None if the key is unknown."""

    def __init__(self, name: str | None) -> None:
        self.name = name
        if name is None:
            super().__init__("duplicate keys in an object")
            return
        clipped_name = name if len(name) <= _MAX_SHOWN_CHARS else f"{name[:_MAX_SHOWN_CHARS]}..."
        super().__init__(f"duplicate key '{clipped_name}' in an object")


def reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object's members by name; raise DuplicateKeyError if a name is repeated.

    This function is an `object_pairs_hook` of the module json.
    """
    members: dict[str, Any] = {}
    for name, value in pairs:
        if name in members:
            raise DuplicateKeyError(name)
        members[name] = value
    return members
