"""Times as the statistics report them: counts with nanoseconds, buckets in seconds."""

from __future__ import annotations

NS_PER_S = 1_000_000_000

# Upper bounds of a histogram of times, in seconds.
SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)


def duration(count: int, ns: int) -> dict[str, int]:
    """A count and the time of all that it counts together, as Triton reports them."""
    return {"count": count, "ns": ns}


def taken(reported: dict[str, int]) -> tuple[int, int]:
    """(count, ns) of a reported duration; raises KeyError, TypeError or ValueError."""
    return int(reported["count"]), int(reported["ns"])
