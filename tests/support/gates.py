"""A gate for executions: a test receives each batch and decides when the execution continues.

The model "gated" connects to the gate on every execution, sends the batch that it received, and
waits for a byte. `holding` stops a model that runs freely in most tests.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.support.waiting import DEADLINE_S, until

# The first lines of a model's file. `wait` blocks until the test stops holding.
WAITING_CODE = """
import os

def wait():
    path = os.environ["GATE"] + ".held"
    if os.path.exists(path):
        with open(path) as held:
            open(path + ".seen", "w").close()
            held.read()  # until nobody has it open for writing
"""
# A `pytorch` model of a device that doubles its input.
DOUBLING_CUDA_MODEL = f"""
{WAITING_CODE}
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        assert x.is_cuda
        wait()
        return x * 2
"""


@contextlib.contextmanager
def holding(gate: Gate) -> Iterator[Callable[[], None]]:
    """Block executions in `wait` of `WAITING_CODE` while the with block runs.

    Yields:
        A function that returns once an execution is blocked.
    """
    path = gate.path.with_name(gate.path.name + ".held")
    seen_file = path.with_name(path.name + ".seen")
    os.mkfifo(path)
    pipe_fd = os.open(path, os.O_RDWR)
    try:
        yield lambda: until("the model runs", seen_file.exists)
    finally:
        path.unlink()
        os.close(pipe_fd)
        seen_file.unlink(missing_ok=True)


class Visit:
    """An execution that waits at a gate: values of INPUT0, rows of requests, pid."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._connection.settimeout(DEADLINE_S)
        with connection.makefile("rb") as stream:
            self.message: dict[str, Any] = json.loads(stream.readline())
        self.batch: list[Any] = self.message["batch"]
        self.rows: list[int] = self.message["rows"]
        self.pid: int = self.message["pid"]

    def release(self, word: bytes = b"\n") -> None:
        with contextlib.suppress(OSError):
            self._connection.sendall(word)
        self._connection.close()


class Gate:
    """A listening socket at which executions wait; once it is closed, none waits any more."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(64)
        self._visits: list[Visit] = []

    def next(self, within_s: float = DEADLINE_S) -> Visit:
        """Return the next execution that arrives; raise TimeoutError after `within_s`."""
        self._listener.settimeout(within_s)
        connection, _ = self._listener.accept()
        visit = Visit(connection)
        self._visits.append(visit)
        return visit

    def is_idle(self, for_s: float = 0.05) -> bool:
        """Return whether no execution arrives for `for_s` seconds."""
        try:
            self.next(for_s)
        except TimeoutError:
            return True
        return False

    def release_all(self) -> None:
        """Continue all executions that `next` has returned."""
        for visit in self._visits:
            visit.release()
        self._visits.clear()

    def release_arrivals(self, for_s: float) -> None:
        """Continue all executions that `next` has returned, and one that arrives within `for_s`."""
        self.release_all()
        with contextlib.suppress(OSError):
            self.next(for_s).release()

    def close(self) -> None:
        """Release all executions, now and later, also those in the listener's backlog."""
        self.path.unlink(missing_ok=True)
        with contextlib.suppress(OSError, ValueError):  # raised once no connection remains
            while True:
                self.next(0)
        self._listener.close()
        self.release_all()
