"""Names of models: which are valid, and those of models that are classes in files (pure)."""

from __future__ import annotations

import os
import re

from shmserve.errors import InvalidArgument, clip

_MOST_BYTES = 255  # of the name of a folder
CLASS_IN_FILE = re.compile(r"(?P<file>.+\.py):(?P<name>[A-Za-z_][A-Za-z0-9_]*)")


def check_model_name(name: str) -> None:
    """Raise InvalidArgument unless `name` may be a model's: that of one folder, in one line of the
    log."""
    if not name.strip():
        raise InvalidArgument("Model name cannot be empty. Please enter a valid name to deploy.")
    shown = clip(name, 128)
    if name in (".", "..") or any(mark in name for mark in "/\\\0"):
        raise InvalidArgument(
            f"invalid model name '{shown}', model name must not contain path traversal characters"
        )
    # What is no text is not printable, either.
    if not name.isprintable() or len(name.encode()) > _MOST_BYTES:
        raise InvalidArgument(
            f"invalid model name '{shown}', model name must be 1 to {_MOST_BYTES} bytes of "
            "printable UTF-8 text"
        )


def is_inline(text: str) -> bool:
    """Whether a command-line argument is a model itself and no repository: "path/file.py:Class", or
    the folder of a checkpoint."""
    return CLASS_IN_FILE.fullmatch(text) is not None or is_checkpoint(text)


def is_checkpoint(path: str) -> bool:
    """Whether a folder is a model of Hugging Face's: its description lies in it."""
    return os.path.isfile(os.path.join(path, "config.json"))
