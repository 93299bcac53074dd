"""Hangs of a model's code: where it is, in the log and in errors, and an end of a load that takes
too long.

A worker writes the stacks of its threads when it is asked to, whatever a model's code does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

from shmserve.errors import Unavailable
from shmserve.supervisor.models.version.instances import Instance
from shmserve.supervisor.processes.table import Child

logger = logging.getLogger(__name__)

FIRST_REPORT_S = 30.0
_MOMENTS = 10  # of 0.1 s each, in which it writes
_MOST_BYTES = 1 << 20
_FRAME = re.compile(r'File "(.+)", line (\d+) in (.+)')

T = TypeVar("T")


async def stacks_of(instance: Instance) -> str:
    """The stacks of a worker's threads, as faulthandler writes them: innermost frames first. Empty
    where it does not write them."""
    child = instance.child
    if child is None or not child.alive:  # another process may have its pid
        return ""
    try:
        path = f"/proc/{child.pid}/fd/{instance.stacks_fd}"
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:  # it has ended, or its model has closed the file
        return ""
    try:
        os.ftruncate(fd, 0)
        child.kill(signal.SIGUSR2)
        await _written(child, fd)
        return os.read(fd, _MOST_BYTES).decode(errors="replace")
    except OSError:  # it has something else there by now
        return ""
    finally:
        os.close(fd)


async def _written(child: Child, fd: int) -> None:
    """It writes piece by piece, and nobody hears of that: it has ended where nothing more came."""
    size = 0
    for _ in range(_MOMENTS):
        await asyncio.sleep(0.1)
        before, size = size, os.fstat(fd).st_size
        if not child.alive or 0 < size == before:
            return


def place(stacks: str, folder: Path) -> str:
    """The innermost frame of code in a model's `folder`, of the thread that loads it where that is
    known: "initialize, line 7 of 1/model.py". Empty where there is none."""
    threads = sorted(stacks.split("\n\n"), key=_loads_nothing)
    for path, line, function in _FRAME.findall("\n".join(threads)):
        if path.startswith(f"{folder}/"):
            return f"{function}, line {line} of {path.removeprefix(f'{folder}/')}"
    return ""


def _loads_nothing(thread: str) -> bool:
    return "/workers/main.py" not in thread


def in_a_line(stacks: str) -> str:
    """Stacks as a line of the log has them: threads apart, innermost frames first."""
    threads = [
        " < ".join(f"{function} ({path}:{line})" for path, line, function in frames)
        for thread in stacks.split("\n\n")
        if (frames := _FRAME.findall(thread))
    ]
    return " | ".join(threads) or "what cannot be seen"


async def watched(loaded: Awaitable[T], instance: Instance, folder: Path, limit_s: float) -> T:
    """What `loaded` gives, once an instance has loaded its model from `folder`. Until then the log
    says where it is, after 30 s and again after pauses that double.

    Raises Unavailable, which says where it hangs, after `limit_s` seconds (0: no limit).
    """
    reports = asyncio.ensure_future(_report(instance))
    try:
        async with asyncio.timeout(limit_s or None):
            return await loaded
    except TimeoutError:
        stacks = await stacks_of(instance)
        text = "instance '%s' has not loaded within %g s; it is in %s"
        logger.error(text, instance.name, limit_s, in_a_line(stacks))
        where = place(stacks, folder)
        raise Unavailable(
            f"the model has not loaded within {limit_s:g} s (--load-timeout-secs)"
            + (f": it hangs in {where}" if where else "")
        ) from None
    finally:
        reports.cancel()


async def _report(instance: Instance) -> None:
    pause_s, total_s = FIRST_REPORT_S, 0.0
    while True:
        await asyncio.sleep(pause_s)
        total_s, pause_s = total_s + pause_s, 2 * pause_s
        stacks = in_a_line(await stacks_of(instance))
        text = "instance '%s' has been loading for %g s; it is in %s"
        logger.warning(text, instance.name, total_s, stacks)
