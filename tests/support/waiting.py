"""Waiting for what has no event of its own, with a deadline and a reason."""

from __future__ import annotations

import time
from collections.abc import Callable

_SHORTEST_S, _LONGEST_S = 0.005, 0.05


def until(what: str, holds: Callable[[], object], within_s: float = 5.0) -> None:
    """Return soon after `holds()` is true, a tenth of the time later at most; raises AssertionError
    that names `what` after `within_s` seconds.

    To look all the time would take the processor from those who are waited for.
    """
    began = time.monotonic()
    while not holds():
        waited_s = time.monotonic() - began
        if waited_s > within_s:
            raise AssertionError(f"not within {within_s} s: {what}")
        time.sleep(min(_LONGEST_S, max(_SHORTEST_S, waited_s / 10)))
