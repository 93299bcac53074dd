"""A counter of calls and allocations in the processes of a server.

The server is started with this folder on PYTHONPATH. Python imports this module at every start, and
the server's processes are forked from a process that has imported it.

Each SIGUSR1 begins the next step of `nothing -> allocations -> calls -> nothing`.
The file PID.STEP in $COUNTS_DIR exists once the step has begun, and has the counts at its end.
"""

from __future__ import annotations

import cProfile
import ctypes
import json
import os
import signal
from collections import Counter
from pathlib import Path

_FOLDER = Path(os.environ["COUNTS_DIR"])


def _allocations() -> int:
    """Return the number of blocks allocated for Python objects; 0 without a compiler."""
    return _counter.value if _counter is not None else 0


def _load() -> ctypes.c_long | None:
    library = _FOLDER / "allocations.so"
    if not library.exists():
        return None
    library_object = ctypes.PyDLL(str(library))
    library_object.install()
    return ctypes.c_long.in_dll(library_object, "allocations")


class _Steps:
    def __init__(self) -> None:
        self._step = 0
        self._before = 0
        self._allocated_blocks = 0
        self._profile = cProfile.Profile()

    def next(self, *signalled: object) -> None:
        self._step += 1
        if self._step == 1:
            self._before = _allocations()
        elif self._step == 2:
            self._allocated_blocks = _allocations() - self._before
            self._profile.enable()
        else:
            self._profile.disable()
        path = _FOLDER / f"{os.getpid()}.{self._step}"
        # The file is renamed at the end, so that a waiting process never reads a part of it.
        path.with_suffix(".part").write_text(self._text() if self._step == 3 else "")
        path.with_suffix(".part").rename(path)

    def _text(self) -> str:
        calls: Counter[str] = Counter()
        python = 0
        for entry in self._profile.getstats():
            if isinstance(entry.code, str):  # a C function, and the function that called it
                continue
            python += entry.callcount
            of_c = [callee for callee in entry.calls or () if isinstance(callee.code, str)]
            name = f"{entry.code.co_filename}:{entry.code.co_firstlineno} {entry.code.co_qualname}"
            calls[name] += entry.callcount + sum(callee.callcount for callee in of_c)
        return json.dumps({"allocations": self._allocated_blocks, "python": python, "calls": calls})


_counter = _load()
signal.signal(signal.SIGUSR1, _Steps().next)
