"""The operator's console: stderr, which --log-file redirects, and the start-up report."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import shlex
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from shmserve.errors import convert_os_errors
from shmserve.ipc.model_spec import ModelSpec, TensorSpec

_MAX_ELEMENTS = 64  # maximum number of elements of the inputs in an example
_STATUS_WIDTH = 80  # maximum width of a state in the table of models


@contextlib.contextmanager
def redirect_stderr(path: str) -> Iterator[None]:
    """Redirect stderr of this process and its children to the file at `path`.

    If `path` is empty, nothing is redirected.

    Raises:
        InvalidArgument: The file cannot be written.
    """
    if not path:
        yield
        return
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    with convert_os_errors(f"--log-file: cannot write '{path}'", "not a path"):
        log_fd = os.open(path, flags, 0o640)
    console_fd = os.dup(2)
    os.dup2(log_fd, 2)
    os.close(log_fd)
    try:
        yield
    finally:
        os.dup2(console_fd, 2)
        os.close(console_fd)


def has_terminal() -> bool:
    """Return whether this process has an open controlling terminal."""
    with contextlib.suppress(OSError):
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
        return True
    return False


logger = logging.getLogger(__name__)


@dataclass(eq=False)
class StartupReport:
    """A context manager that reports the progress of the loads at the start.

    `_read_progress()` returns the progress by model. The callbacks in `_observers` are called when
    the progress may have changed; the report adds its own callback.
    """

    _read_progress: Callable[[], dict[str, str]]
    _observers: list[Callable[[], None]]

    def __post_init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._started_at: dict[str, float] = {}
        self._states: dict[str, str] = {}

    def __enter__(self) -> None:
        self._observers.append(self._update)

    def __exit__(self, *_: object) -> None:
        self._observers.remove(self._update)
        self._write("")

    def _update(self) -> None:
        """Report the loads whose state has changed, and show the loads in progress."""
        old_states, self._states = self._states, self._read_progress()
        for model, state in self._states.items():
            if old_states.get(model) != state:
                self._report(model, state)
        loading_models = [model for model, state in self._states.items() if state == "loading"]
        completed_count, model_count = len(self._states) - len(loading_models), len(self._states)
        line = f"[{completed_count}/{model_count} models] loading {', '.join(loading_models)}"
        self._write(line[:110] if loading_models else "")

    def _report(self, model: str, state: str) -> None:
        started_at = self._started_at.setdefault(model, time.monotonic())
        self._write("")
        if state == "loading":
            logger.info("model %s: loading", model)
        else:
            level = logging.ERROR if state.startswith("failed") else logging.INFO
            logger.log(level, "model %s: %s (%.2f s)", model, state, time.monotonic() - started_at)

    def _write(self, line: str) -> None:
        """Replace the last line of a terminal. A long line is not wrapped, but cut off."""
        if self._is_terminal:
            sys.stderr.write(f"\r\x1b[K\x1b[?7l{line}\x1b[?7h" if line else "\r\x1b[K")
            sys.stderr.flush()


def model_table(repository_index: Iterable[dict[str, Any]]) -> list[str]:
    """Format a table of models and states as Triton prints it, with long states in several rows."""
    rows = [("Model", "Version", "Status")]
    for model in repository_index:
        status = ": ".join(filter(None, (model.get("state", ""), model.get("reason", ""))))
        first_line, *other_lines = textwrap.wrap(status, _STATUS_WIDTH) or ["-"]
        rows.append((model["name"], model.get("version", "-"), first_line))
        rows += [("", "", line) for line in other_lines]
    clean_rows = [[" ".join(cell.split()) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in clean_rows) for i in range(3)]
    separator = "+" + "+".join("-" * (width + 2) for width in widths) + "+"
    cells = ([f" {c:<{w}} " for c, w in zip(row, widths, strict=True)] for row in clean_rows)
    header, *lines = (f"|{'|'.join(row)}|" for row in cells)
    return [separator, header, separator, *lines, separator]


def example_command(models: Iterable[ModelSpec], url: str, *, needs_token: bool) -> str:
    """Return a command for the shell that sends a request to one of the models, or ""."""
    options = f"--url {url}{' --token-file FILE' if needs_token else ''}"
    candidates = [spec for spec in models if spec.input and spec.sequence_batching is None]
    for spec in candidates:
        tensors = [tensor for tensor in spec.input if not tensor.optional] or list(spec.input[:1])
        if sum(math.prod(map(abs, tensor.dims)) for tensor in tensors) <= _MAX_ELEMENTS:
            inputs = " ".join(f"--input {shlex.quote(_example_input(item))}" for item in tensors)
            return f"shmserve client infer {_operands(spec, f'{options} {inputs}')}"
    return f"shmserve perf {_operands(candidates[0], options)}" if candidates else ""


def _operands(spec: ModelSpec, options: str) -> str:
    name = shlex.quote(spec.name)
    return f"{options} -- {name}" if name.startswith("-") else f"{name} {options}"


def _example_input(tensor: TensorSpec) -> str:
    value: Any = {"BYTES": "text", "BOOL": True}.get(tensor.datatype, 1)
    for size in reversed(tensor.dims):
        value = [value] * abs(size)  # a dimension of any size (-1) becomes 1
    return f"{tensor.name}={json.dumps(value, separators=(',', ':'))}"
