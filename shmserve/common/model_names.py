"""Names of models: which are valid, and those of models that are classes in files (pure)."""

from __future__ import annotations

import os
import re

from shmserve.errors import InvalidArgument, clip

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
CLASS_IN_FILE = re.compile(r"(?P<file>.+\.py):(?P<name>[A-Za-z_][A-Za-z0-9_]*)")


def is_model_name(name: str) -> bool:
    """Whether a model can have this name."""
    return _NAME.fullmatch(name) is not None


def check_model_name(name: str) -> None:
    """Raise InvalidArgument unless `name` may be a model's; it becomes part of paths."""
    if not name:
        raise InvalidArgument("Model name cannot be empty. Please enter a valid name to deploy.")
    shown = clip(name, 128)
    if name in (".", "..") or any(mark in name for mark in "/\\\0"):
        raise InvalidArgument(
            f"invalid model name '{shown}', model name must not contain path traversal characters"
        )
    if not is_model_name(name):
        raise InvalidArgument(
            f"invalid model name '{shown}', model name must be 1 to 128 letters, digits, '.', '_' "
            "or '-', the first a letter, digit or '_'"
        )


def is_inline(text: str) -> bool:
    """Whether a command-line argument is a model itself and no repository: "path/file.py:Class", or
    the folder of a checkpoint."""
    return CLASS_IN_FILE.fullmatch(text) is not None or is_checkpoint(text)


def is_checkpoint(path: str) -> bool:
    """Whether a folder is a model of Hugging Face's: its description lies in it."""
    return os.path.isfile(os.path.join(path, "config.json"))
