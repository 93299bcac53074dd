"""What to load: one version of a model, as the repository and its configuration have it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class VersionSpec:
    """What to load. `config` is normalised and validated as far as it goes before auto-completion.

    `complete(completed)` merges what the model says of itself, validates, and returns the
    final configuration. `labels` are those of each output that has any.
    """

    name: str
    version: str
    model_dir: Path
    repository: Path
    config: dict[str, Any]
    complete: Callable[[dict[str, Any]], dict[str, Any]]
    labels: dict[str, list[str]] = field(default_factory=dict)
