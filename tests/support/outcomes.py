"""The outcomes of a pytest process in lines of JSON: `-p tests.support.outcomes --outcomes FILE`.

A line is written at the end of each phase of a test, so that a crash loses no earlier outcome. The
last line states that the process has completed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import pytest

_ENDED = "ended"


@dataclass
class Outcomes:
    """The outcomes of a process's tests, by node id."""

    passed: set[str] = field(default_factory=set)
    skipped: set[str] = field(default_factory=set)
    # Failed tests, including failures in set-up and tear-down, and files that could not be
    # imported, with the text of their first failure.
    failed: dict[str, str] = field(default_factory=dict)
    # Whether the process exited by itself after all tests.
    complete: bool = False

    @classmethod
    def read(cls, file: Path) -> Outcomes:
        """Read a file, which may be truncated or missing."""
        outcomes = cls()
        for test, outcome, text in _lines(file):
            if outcome == _ENDED:
                outcomes.complete = True
            elif outcome == "failed":
                outcomes.failed.setdefault(test, text)
            else:
                getattr(outcomes, outcome).add(test)
        outcomes.passed -= outcomes.failed.keys()
        outcomes.skipped -= outcomes.failed.keys()
        return outcomes


def _lines(file: Path) -> Iterator[tuple[str, str, str]]:
    if not file.exists():
        return
    for line in file.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            test, outcome, text = json.loads(line)
            yield test, outcome, text


class Writer:
    """A pytest plugin that writes the outcomes."""

    def __init__(self, file: TextIO, root: Path) -> None:
        self._file = file
        self._root = root

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record a file that cannot be imported as failed."""
        if report.failed:
            self._write(report.nodeid, report.outcome, report.longreprtext)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a phase: a test passes in its call phase, and fails or is skipped in any phase."""
        if report.when == "call" or not report.passed:
            self._write(report.nodeid, report.outcome, report.longreprtext)

    def pytest_sessionfinish(self) -> None:
        """Record that the process has completed, with its exit status."""
        self._write("", _ENDED, "")

    def pytest_unconfigure(self) -> None:
        self._file.close()

    def _write(self, nodeid: str, outcome: str, text: str) -> None:
        print(json.dumps([f"{self._root}/{nodeid}", outcome, text]), file=self._file, flush=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, help="file for the outcomes of tests, as JSON lines")


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("--outcomes"):
        config.pluginmanager.register(Writer(path.open("w"), config.rootpath))
