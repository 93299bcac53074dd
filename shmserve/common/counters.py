"""A flat table of counters, and what survives a reload of their model (pure).

A table is {name: number, list of numbers, numbers by key, or histogram}. A scheduler's snapshot is
its table, with rows that are its own alone and, as "base", the table of those before it under the
same name and version. Metrics show both together: a request that the old one finishes after the
switch is counted, and no counter ever goes back.
"""

from __future__ import annotations

from typing import Any

# Of a snapshot, what no successor adds to its own.
_NOT_IN_BASE = (
    *("base", "last_ns", "batch_sizes", "responses"),
    *("pending", "executing", "open_sequences", "live", "instances"),
)


def total(snapshot: dict[str, Any]) -> dict[str, Any]:
    """The table of a snapshot with its base: the base of what comes next. Raises KeyError."""
    table = {name: value for name, value in snapshot.items() if name not in _NOT_IN_BASE}
    both: dict[str, Any] = plus(table, snapshot["base"])
    return both


def plus(table: Any, base: Any) -> Any:
    """The entries of `table`, those that `base` has too with what that counted; a histogram whose
    bounds have changed starts anew.

    Raises AttributeError, TypeError or ValueError where an entry is of another shape.
    """
    if isinstance(table, dict):
        if table.get("buckets") != base.get("buckets"):
            return table
        return {
            # The bounds of a histogram are no counts.
            key: value if key == "buckets" or key not in base else plus(value, base[key])
            for key, value in table.items()
        }
    if isinstance(table, list):
        return [plus(a, b) for a, b in zip(table, base, strict=True)]
    return table + base
