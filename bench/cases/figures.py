"""The lines of the report, and what each is held against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Better = Literal["higher", "lower"]


@dataclass(frozen=True)
class Target:
    """The target of a figure: of the ratio shmserve / Triton, or of shmserve's own value."""

    of: Literal["ratio", "value", "nothing"] = "nothing"
    must: float | None = None
    aim: float | None = None


@dataclass(frozen=True)
class Figure:
    """One line of the report."""

    name: str
    title: str
    unit: str
    better: Better
    target: Target = Target()
