"""A run as its cases see it: what is asked for, who is measured, and where what is found goes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bench.peer import Analyzer
from bench.results import Results
from bench.servers import Product


@dataclass(frozen=True)
class Settings:
    """What to measure: `repeats` samples a figure, of `seconds` of load; `only` names cases."""

    peer: Path
    with_peer: bool
    repeats: int
    seconds: float
    only: frozenset[str]

    def wants(self, name: str) -> bool:
        """Whether this case was asked for."""
        return not self.only or name in self.only


class Run(Protocol):
    """What measures cases."""

    settings: Settings
    results: Results
    analyzer: Analyzer | None

    def say(self, text: str, /) -> None:
        """Tell whoever waits."""

    def products(self, with_triton: bool = True) -> list[Product]:
        """What is measured: ourselves, and Triton where there is one."""
