"""How the dynamic batcher decides: a model's parameters `batching_strategy` and `target_p99_ms`."""

from __future__ import annotations

import math
from enum import StrEnum

STRATEGY = "batching_strategy"
TARGET = "target_p99_ms"
LONGEST_TARGET_MS = 86_400_000.0


class Strategy(StrEnum):
    """What a model may say of it; the first is what holds where it says nothing."""

    PREFER_BATCH = "prefer_batch"  # an instance waits up to the delay for a fuller batch
    PREFER_LATENCY = "prefer_latency"  # what is there runs as soon as an instance is free
    ADAPTIVE = "adaptive"  # waits where that pays, and only as long as the target can be held


def strategy(text: str) -> Strategy | None:
    """The strategy of this name, if it is one."""
    return Strategy(text) if text in set(Strategy) else None


def target_ms(text: str) -> float | None:
    """A target in milliseconds, above 0 and of a day at most, if it is one."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and 0 < value <= LONGEST_TARGET_MS else None
