"""Gives memory back to the system after large requests.

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
_timer: asyncio.TimerHandle | None = None


def soon(byte_size: int) -> None:
    """Trim after a pause if so many bytes are large; each further call begins the pause anew."""
    global _timer
    if byte_size < LARGE:
        return
    if _timer is not None:
        _timer.cancel()
    _timer = asyncio.get_running_loop().call_later(_PAUSE_S, _trim)


def _trim() -> None:
    global _timer
    _timer = None
    if _malloc_trim is not None:
        _malloc_trim(0)
