"""The counters of a model version as an event."""

from __future__ import annotations

from typing import Any

from shmserve.ipc.messages import ModelCounted

_DURATIONS = ("queue", "compute_input", "compute_infer", "compute_output")


def counted(statistics: dict[str, Any]) -> ModelCounted:
    """The event for a scheduler's statistics; times are those of all requests together, in ns."""
    stats, own = statistics["inference_stats"], statistics["shmserve"]
    counters = {
        "success": stats["success"]["count"],
        "fail": stats["fail"]["count"],
        "inference_count": statistics["inference_count"],
        "execution_count": statistics["execution_count"],
        "pending": own["pending"],
        "executing": own["executing"],
        "request_ns": stats["success"]["ns"],
        **{f"{name}_ns": stats[name]["ns"] for name in _DURATIONS},
    }
    return ModelCounted(statistics["name"], statistics["version"], counters)
