"""Returns freed heap memory to the system after large requests: `malloc_trim`, debounced.

A large body comes in pieces, and what is made of it is many small values; malloc keeps all that is
freed below anything that still lives, for good: one body of 20 MB costs 70 MB. `malloc_trim` gives
back whole free pages wherever they lie, in milliseconds, once the large requests are over.
"""

from __future__ import annotations

import asyncio
import ctypes

LARGE = 1024 * 1024
_PAUSE_S = 0.5

_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's only


class MallocTrim:
    """The timer of the next `malloc_trim` of this process."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None

    def soon(self, byte_size: int) -> None:
        """Trim after a pause if so many bytes are large; each further call begins the pause
        anew."""
        if byte_size < LARGE:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(_PAUSE_S, self._trim)

    def _trim(self) -> None:
        self._timer = None
        if _malloc_trim is not None:
            _malloc_trim(0)
