"""How the C library (glibc) copies and keeps memory, where its own choice is not ours."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Mapping

_libc = ctypes.CDLL(None)
_M_MMAP_THRESHOLD = -3  # malloc.h

# The C library writes a large copy with non-temporal stores: the memory that is written is not read
# first, which is a third of what such a copy moves, and what is in the caches stays there. Where
# "large" begins it takes from the processor's description of its last-level cache, and inside a
# virtual machine that is often the whole host's (320 MB seen): then it never does. Told the truth
# of most processors, it would begin at a core's share, 1 to 3 MB.
LARGE_COPY = 2 * 1024 * 1024  # bytes
_VARIABLE = "GLIBC_TUNABLES"
_TUNABLE = "glibc.cpu.x86_non_temporal_threshold"


def past_the_caches(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process to be started, in which copies from `LARGE_COPY` on go past the
    caches, unless it says something of that already. Other processors and C libraries ignore it.
    """
    said = environment.get(_VARIABLE, "")
    if _TUNABLE in said:
        return dict(environment)
    settings = [*filter(None, [said]), f"{_TUNABLE}={LARGE_COPY:#x}"]
    return {**environment, _VARIABLE: ":".join(settings)}


def keep_no_large_memory() -> None:
    """Have malloc (glibc's) take each block of 1 MiB and more from the system, and give it back
    when it is freed. By itself it does so until the first is freed, and from then on keeps in its
    heap what is as large: half a frame of each of some clients, with holes between them."""
    with contextlib.suppress(AttributeError):
        _libc.mallopt(_M_MMAP_THRESHOLD, 1 << 20)
