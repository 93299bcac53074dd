"""The operator's console: stderr of all of the server's processes, redirected to a log file
(--log-file), and the start-up report."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, Self

from shmserve.errors import refused


@contextlib.contextmanager
def written_to(path: str) -> Iterator[None]:
    """Append what this process, and those that it starts, write to stderr to the file at `path`;
    an empty path changes nothing.

    Raises InvalidArgument when the file cannot be written.
    """
    if not path:
        yield
        return
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    with refused(f"--log-file: cannot write '{path}'", "not a path"):
        file = os.open(path, flags, 0o640)
    console = os.dup(2)
    os.dup2(file, 2)
    os.close(file)
    try:
        yield
    finally:
        os.dup2(console, 2)
        os.close(console)


logger = logging.getLogger(__name__)


class StartupReport:
    """Reports phases of models by name; `with StartupReport() as progress: progress.phase("m",
    "loading")`."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._began: dict[str, float] = {}
        self._phase: dict[str, str] = {}
        self._done = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def phase(self, model: str, phase: str) -> None:
        """`model` enters a phase ("loading", "ready", "failed: ...")."""
        phase = phase.rstrip("; \n")  # how Triton's texts of several reasons end
        began = self._began.setdefault(model, time.monotonic())
        self._phase[model] = phase
        self._done = sum(not value.startswith("loading") for value in self._phase.values())
        if self._live:
            sys.stderr.write("\r\x1b[K")
        if phase.startswith("loading"):
            logger.info("model %s: %s", model, phase)
        else:
            level = logging.ERROR if phase.startswith("failed") else logging.INFO
            logger.log(level, "model %s: %s (%.2f s)", model, phase, time.monotonic() - began)
        if self._live and self._done < len(self._phase):
            busy = ", ".join(k for k, v in self._phase.items() if v.startswith("loading"))
            sys.stderr.write(f"[{self._done}/{len(self._phase)} models] loading {busy}"[:110])
            sys.stderr.flush()


def model_table(index: Iterable[dict[str, Any]]) -> list[str]:
    """The lines of a table of models and states, as Triton prints it."""
    rows = [("Model", "Version", "Status")]
    for item in index:
        state = item.get("state", "")
        reason = item.get("reason", "")
        rows.append(
            (
                item["name"],
                item.get("version", "-"),
                f"{state}: {reason}" if reason else state or "-",
            )
        )
    flat = [[" ".join(cell.split()) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in flat) for i in range(3)]
    rule = "+" + "+".join("-" * (width + 2) for width in widths) + "+"
    lines = [rule]
    for number, row in enumerate(flat):
        lines.append("|" + "|".join(f" {c:<{w}} " for c, w in zip(row, widths, strict=True)) + "|")
        if number == 0:
            lines.append(rule)
    return [*lines, rule]
