"""One run of the benchmark: the selected cases, the available products, and the results so far."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.report.results import NotRun, Results
from bench.system import machine
from bench.system.peer import Analyzer, Missing, TritonFiles, find_analyzer, find_triton
from bench.system.servers import Product, Shmserve, Triton

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Settings:
    """The options of a run: `repeats` samples of `seconds` each, of the cases named by `only`.

    If `only` is empty, all cases are measured. `peer` is the folder of Triton's programs.
    """

    peer: Path
    with_peer: bool
    repeats: int
    seconds: float
    only: frozenset[str]

    def selects(self, name: str) -> bool:
        """Return whether the case with this name is selected."""
        return not self.only or name in self.only


class Context:
    """The context of all cases. `log` prints the progress of the run."""

    def __init__(self, settings: Settings, log: Callable[[str], None]) -> None:
        self.settings = settings
        self.log = log
        self.results = Results(
            datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            machine.describe(),
            machine.versions(),
            {"repeats": settings.repeats, "seconds": settings.seconds},
        )
        self.triton = self._find_triton()
        self.analyzer: Analyzer | None = None

    def products(self, with_triton: bool = True) -> list[Product]:
        """Return the measured servers: shmserve, and Triton if it is installed."""
        return [Shmserve(), *([Triton(self.triton)] if self.triton and with_triton else [])]

    def _find_triton(self) -> TritonFiles | None:
        try:
            if not self.settings.with_peer:
                raise Missing("--no-peer")
            return find_triton(self.settings.peer)
        except Missing as missing:
            self.skip("Triton", str(missing))
            return None

    def find_analyzer(self) -> Analyzer | None:
        """Find Triton's load generator and store it in `analyzer`; return None if it is missing."""
        try:
            analyzer = find_analyzer(self.settings.peer)
        except Missing as missing:
            self.skip("everything that perf_analyzer would send", str(missing))
            return None
        self.results.versions["perf_analyzer"] = analyzer.version
        self.analyzer = analyzer
        return analyzer

    def skip(self, subject: str, reason: str, *, failed: bool = False) -> None:
        """Record that a figure is not measured, and why; `failed`: its measurement failed."""
        self.results.not_run.append(NotRun(subject, reason, failed))
        self.log(f"{subject}: not measured: {reason}")
