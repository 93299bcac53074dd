"""Parallel copies, one by several threads: a single core moves bytes slower than the memory takes
them.

The copying thread cuts the copy into pieces and takes one after the other; its helpers, once they
run, take from the same pieces. Where no core is free for them, nothing is lost but their wake-up.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import SimpleQueue

import numpy as np

from shmserve.ipc.processes import LARGE_COPY
from shmserve.workers.batch.request import Array

_WORTH_HELP = 4 * 1024 * 1024  # bytes; below it the wake-up costs as much as it saves
_PIECE = LARGE_COPY  # smaller ones would go through the caches
_MOST_HELPERS = 3


class _Job:
    """A copy of bytes in pieces: `numbers` gives each of them to one thread."""

    __slots__ = ("_lock", "_source", "_target", "_unfinished", "finished", "numbers")

    def __init__(self, target: Array, source: Array) -> None:
        self._target = target
        self._source = source
        self._unfinished = -(-len(target) // _PIECE)
        self._lock = threading.Lock()
        self.finished = threading.Lock()
        self.finished.acquire()
        self.numbers: Iterator[int] = iter(range(self._unfinished))

    def help(self) -> None:
        """Copy pieces until none is left to take."""
        for number in self.numbers:  # each step is one for the interpreter, whoever takes it
            piece = slice(number * _PIECE, (number + 1) * _PIECE)
            np.copyto(self._target[piece], self._source[piece])
            with self._lock:
                self._unfinished -= 1
                if not self._unfinished:
                    self.finished.release()


class Copier:
    """Copies arrays with up to `threads` threads, of which the caller is one."""

    def __init__(self, threads: int) -> None:
        self._helpers = max(0, min(threads - 1, _MOST_HELPERS))
        self._jobs: SimpleQueue[_Job] | None = None  # until the first copy that is worth it

    def copy(self, target: Array, source: Array) -> None:
        """`target[...] = source`; both have the same shape and type, and do not overlap."""
        flat = source.flags.c_contiguous and target.flags.c_contiguous
        if target.nbytes < _WORTH_HELP or not self._helpers or not flat:
            target[...] = source
            return
        if self._jobs is None:
            self._jobs = self._started()
        job = _Job(_flat(target), _flat(source))
        for _ in range(self._helpers):
            self._jobs.put(job)
        job.help()
        job.finished.acquire()

    def _started(self) -> SimpleQueue[_Job]:
        jobs: SimpleQueue[_Job] = SimpleQueue()
        for _ in range(self._helpers):
            threading.Thread(target=_serve, args=(jobs,), name="copier", daemon=True).start()
        return jobs


def _flat(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)


def _serve(jobs: SimpleQueue[_Job]) -> None:
    while True:
        job: _Job | None = jobs.get()
        assert job is not None
        job.help()
        job = None
