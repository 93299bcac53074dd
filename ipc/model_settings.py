"""Settings in a model's configuration that several packages read.

These are the parameters of the batching strategy, the bounds of the number of instances, and the
buckets of the first-response histogram.
"""

from __future__ import annotations

import math
import re
from enum import StrEnum

STRATEGY = "batching_strategy"
TARGET = "target_p99_ms"
MAX_STREAMS = "max_streams"
MIN_INSTANCES = "min_instances"
MAX_INSTANCES = "max_instances"
IDLE_UNLOAD = "idle_unload_secs"
EXECUTION_TIMEOUT = "execution_timeout_seconds"
PADDING = "padding"
ENVIRONMENT = "environment"  # of a class; a configuration has ENVIRONMENT_PATH
ENVIRONMENT_PATH = "EXECUTION_ENV_PATH"
# Parameters that the server reads for every backend.
KNOWN_SETTINGS = (
    *(STRATEGY, TARGET, MAX_STREAMS, MIN_INSTANCES, MAX_INSTANCES, IDLE_UNLOAD, EXECUTION_TIMEOUT),
    *(PADDING, ENVIRONMENT_PATH),
)
KNOWN_PARAMETERS = (
    *KNOWN_SETTINGS,
    *("class", ENVIRONMENT),
    *("FORCE_CPU_ONLY_INPUT_TENSORS", "TORCH_COMPILE_OPTIONAL_PARAMETERS", "INFERENCE_MODE"),
    *("DISABLE_OPTIMIZED_EXECUTION", "INTRA_OP_THREAD_COUNT", "INTER_OP_THREAD_COUNT"),
    *("NUM_THREADS", "NUM_INTEROP_THREADS", "intra_op_thread_count", "inter_op_thread_count"),
    *("execution_mode", "engine", "device_id"),
)
MOST_STREAMS = 65_536
MOST_INSTANCES = 4096  # each is a process, with an entry in the supervisor
SHORTEST_TARGET_MS = 0.001
LONGEST_TARGET_MS = 86_400_000.0
LONGEST_IDLE_S = 1_000_000.0
# The time to the first response of decoupled models. `model_metrics` in a configuration refers to
# it by its family, and may replace the buckets.
FIRST_RESPONSE_FAMILY = "nv_inference_first_response_histogram_ms"
FIRST_RESPONSE_BUCKETS_MS = (100.0, 500.0, 2000.0, 5000.0)
_NUMBER = re.compile(r"[-+.0-9eE]+")  # stricter than float()


class Strategy(StrEnum):
    """A batching strategy; the first is the default."""

    PREFER_BATCH = "prefer_batch"  # wait up to the maximum delay for a fuller batch
    PREFER_LATENCY = "prefer_latency"  # execute queued requests as soon as an instance is free
    ADAPTIVE = "adaptive"  # wait only if that pays and the target is met


def strategy(text: str) -> Strategy | None:
    """Return the strategy of this name, or None."""
    return Strategy(text) if text in set(Strategy) else None


def target_ms(text: str) -> float | None:
    """Return a target in milliseconds, from a microsecond to a day; None if invalid."""
    return _between(SHORTEST_TARGET_MS, LONGEST_TARGET_MS, text)


def idle_unload_s(text: str) -> float | None:
    """Return the idle seconds after which a model on demand is unloaded; None if invalid.

    0 means never; the maximum is about ten days.
    """
    return _between(0, LONGEST_IDLE_S, text)


def max_streams(text: str) -> int | None:
    """Return a limit of concurrent decoupled requests per instance; None if invalid."""
    return _from_1_to(MOST_STREAMS, text)


def instance_bound(text: str) -> int | None:
    """Return a minimum or maximum number of instances; None if invalid."""
    return _from_1_to(MOST_INSTANCES, text)


def _between(least: float, most: float, text: str) -> float | None:
    try:
        value = float(text) if _NUMBER.fullmatch(text) else math.nan
    except ValueError:
        return None
    return value if least <= value <= most else None


def _from_1_to(most: int, text: str) -> int | None:
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(most))):
        return None
    return int(text) if 1 <= int(text) <= most else None
