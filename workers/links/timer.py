"""A timer of the kernel's, with the thread that waits for it: to start it wakes nobody."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable

# With the interpreter held: they never wait, and are called as often as responses are sent.
_libc = ctypes.PyDLL(None, use_errno=True)


class Timer:
    """Calls `due` in a thread of its own, `delay_ns` after the last `start` (less than a second).

    The thread begins with the first `start`. See timerfd_create(2).
    """

    def __init__(self, delay_ns: int, due: Callable[[], object]) -> None:
        self._due = due
        self._fd = -1
        # struct itimerspec: no interval, then the first expiration, in s and ns
        self._expiration = (ctypes.c_long * 4)(0, 0, 0, delay_ns)
        self._closed = False

    def start(self) -> None:
        """Be due in `delay_ns`, and at no time that was set before. Raises OSError."""
        if self._fd < 0:
            self._begin()
        if _libc.timerfd_settime(self._fd, 0, self._expiration, None) < 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def close(self) -> None:
        """Be never due again, and have the thread end."""
        self._closed = True
        if self._fd >= 0:
            self.start()

    def _begin(self) -> None:
        self._fd = _libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        threading.Thread(target=self._run, name="timer", daemon=True).start()

    def _run(self) -> None:
        while os.read(self._fd, 8) and not self._closed:
            self._due()
        os.close(self._fd)
