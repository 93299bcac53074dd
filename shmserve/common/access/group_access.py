"""Letting a group of users reach a server's folder and sockets."""

from __future__ import annotations

import os
from pathlib import Path


def admit_group(path: Path, group: int) -> None:
    """Let a group pass through a folder, or connect to a socket."""
    os.chown(path, -1, group)
    path.chmod(0o710 if path.is_dir() else 0o660)
