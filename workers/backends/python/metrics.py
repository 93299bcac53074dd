"""Metrics of a model's own: families with labelled values, kept in this process.

The values are this instance's, so `Metric.value` is too; `changes` gives them to whoever adds them
up over instances. Names and labels are checked here as in Triton.
"""

from __future__ import annotations

import re
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from shmserve.workers.backends.python.errors import TritonModelException, text

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")


class MetricKind(IntEnum):
    """What a family's values do."""

    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2


Labels = tuple[tuple[str, str], ...]


@dataclass(slots=True)
class _Value:
    buckets: tuple[float, ...]
    # A counter's value; what a gauge was set to, when (monotonic ns, 0: never), and what was added
    # since; the sum of a histogram, then its observations by bucket, and those above the last.
    numbers: list[float]


@dataclass(frozen=True, slots=True)
class _Family:
    name: str
    description: str
    kind: MetricKind
    values: dict[Labels, _Value] = field(default_factory=dict)


_lock = threading.Lock()
_families: dict[str, _Family] = {}
_changed = False
# Called when something changed that `changes` has not given yet, if anybody wants to know.
on_change: Callable[[], None] | None = None


def changes() -> list[list[Any]] | None:
    """Every family if anything changed since the last call, else None.

    [[name, description, kind, [[labels, numbers, buckets], ...]], ...]; labels are sorted pairs.
    """
    global _changed
    if not _changed:
        return None
    with _lock:
        _changed = False
        return [
            [
                *(family.name, family.description, family.kind.name),
                [[labels, value.numbers[:], value.buckets] for labels, value in values],
            ]
            for family in _families.values()
            if (values := list(family.values.items()))
        ]


def _note_change() -> None:
    global _changed
    if not _changed:
        _changed = True
        if on_change is not None:
            on_change()


class MetricFamily:
    """Values of one name, told apart by labels. Families of one name and kind are the same one.

    Raises TritonModelException for a name that Prometheus does not allow, or one of another kind.
    """

    COUNTER = MetricKind.COUNTER
    GAUGE = MetricKind.GAUGE
    HISTOGRAM = MetricKind.HISTOGRAM

    def __init__(self, name: str, description: str, kind: MetricKind) -> None:
        name = text(name, "the name of a metric family")
        if not _NAME.fullmatch(name):
            raise TritonModelException("Error when creating MetricFamily: Invalid metric name")
        description = text(description, "the description of a metric family")
        with _lock:
            family = _families.setdefault(name, _Family(name, description, MetricKind(kind)))
        if family.kind is not kind:
            raise TritonModelException(
                f"Error when creating MetricFamily: '{name}' is a {family.kind.name} already"
            )
        self._family = family

    def Metric(
        self, labels: dict[str, str] | None = None, buckets: Sequence[float] | None = None
    ) -> Metric:
        """The value with these labels; a histogram needs the upper bounds of its buckets.

        Raises TritonModelException for labels or buckets that do not fit.
        """
        failed = "Failed to create metric. "
        if labels is not None and not isinstance(labels, dict):
            raise TritonModelException(failed + "Labels must be a dictionary.")
        if buckets is not None and not isinstance(buckets, list):
            raise TritonModelException(failed + "Buckets must be a list.")
        histogram = self._family.kind is MetricKind.HISTOGRAM
        if buckets is not None and not histogram:
            raise TritonModelException(failed + "Unexpected buckets found.")
        if buckets is None and histogram:
            raise TritonModelException(failed + "Missing required buckets.")
        bounds = tuple(map(float, buckets or ()))
        if list(bounds) != sorted(set(bounds)):
            raise TritonModelException(failed + "Buckets must be in ascending order.")
        key = tuple(sorted((str(name), str(value)) for name, value in (labels or {}).items()))
        for name, _ in key:
            # A histogram's samples have a label "le" of their own.
            if not _LABEL.fullmatch(name) or (histogram and name == "le"):
                raise TritonModelException("Error when creating Metric: Invalid label name")
        size = {MetricKind.COUNTER: 1, MetricKind.GAUGE: 3}.get(self._family.kind, len(bounds) + 2)
        with _lock:
            value = self._family.values.setdefault(key, _Value(bounds, [0] * size))
            _note_change()
        return Metric(self._family.kind, value)


class Metric:
    """One value of a family. Raises TritonModelException for what its kind does not do."""

    def __init__(self, kind: MetricKind, value: _Value) -> None:
        self._kind = kind
        self._value = value

    def increment(self, value: float) -> None:
        """Add to a counter (not less than 0) or a gauge."""
        self._only("increment", "Increment", MetricKind.COUNTER, MetricKind.GAUGE)
        if self._kind is MetricKind.COUNTER and value < 0:
            raise TritonModelException(
                "Failed to increment metric value: TRITONSERVER_METRIC_KIND_COUNTER can only be "
                "incremented monotonically by non-negative values."
            )
        with _lock:
            self._value.numbers[-1] += float(value)
            _note_change()

    def set(self, value: float) -> None:
        """Set a gauge."""
        self._only("set", "Set", MetricKind.GAUGE)
        with _lock:
            self._value.numbers[:] = (float(value), time.monotonic_ns(), 0)
            _note_change()

    def observe(self, value: float) -> None:
        """Count a value in a histogram."""
        self._only("observe", "Observe", MetricKind.HISTOGRAM)
        with _lock:
            self._value.numbers[0] += float(value)
            self._value.numbers[1 + bisect_left(self._value.buckets, float(value))] += 1
            _note_change()

    def value(self) -> float:
        """The value of a counter or a gauge, in this instance."""
        self._only("get", "Value", MetricKind.COUNTER, MetricKind.GAUGE)
        numbers = self._value.numbers
        return float(numbers[0] + numbers[2] if len(numbers) > 1 else numbers[0])

    def _only(self, verb: str, operation: str, *kinds: MetricKind) -> None:
        if self._kind not in kinds:
            raise TritonModelException(
                f"Failed to {verb} metric value: TRITONSERVER_METRIC_KIND_{self._kind.name} does "
                f"not support {operation}"
            )
