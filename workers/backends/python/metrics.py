"""Metrics of a model: families with labelled values, kept in this process.

Families belong to this module, because Triton's API creates them without a reference to the server.
All values, also `Metric.value`, are this instance's; `changes` returns them to be summed over
instances. Names and labels are checked as in Triton.
"""

from __future__ import annotations

import contextlib
import math
import re
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from shmserve.workers.backends.python.errors import NO_CAST, TritonModelException, as_text
from shmserve.workers.backends.python.server import refusal_text

_METRIC_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL_NAME = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")


class MetricKind(int, Enum):
    """The kind of a metric family."""

    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2


Labels = tuple[tuple[str, str], ...]


@dataclass(slots=True)
class _MetricValue:
    buckets: tuple[float, ...]
    # A counter: its value. A gauge: the value that was set, the time of setting (monotonic ns, 0:
    # never), and the sum of later increments. A histogram: the sum, the observations by bucket, and
    # the observations above the last bucket.
    state: list[float]
    owners: int = 0  # number of live `MetricFamily` objects that created this value


@dataclass(slots=True)
class _Family:
    name: str
    description: str
    kind: MetricKind
    values: dict[Labels, _MetricValue] = field(default_factory=dict)  # by labels
    owners: int = 0  # number of live `MetricFamily` objects


_CREATE_FAILED = "Error when creating Metric: "
_FAMILY_DELETED = (
    "Invalid metric operation as the corresponding 'MetricFamily' has been deleted. The "
    "'MetricFamily' object should be deleted AFTER its corresponding 'Metric' objects have been "
    "deleted."
)

_lock = threading.Lock()
_families: dict[str, _Family] = {}
_has_changed = False
# Called after a change that `changes` has not returned yet. The argument is False during a garbage
# collection, when an immediate report is not safe.
_on_change: Callable[[bool], None] | None = None


def set_listener(on_change: Callable[[bool], None]) -> None:
    """Register `on_change`, which is called after a change of the metrics (see `_on_change`)."""
    global _on_change
    _on_change = on_change


def changes() -> list[list[Any]] | None:
    """Return all families if anything changed since the last call, else None.

    The form is [[name, description, kind, [[labels, state, buckets], ...]], ...]; labels are
    sorted pairs.
    """
    global _has_changed
    if not _has_changed:
        return None
    with _lock:
        _has_changed = False
        _remove_collected()
        return [
            [
                *(family.name, family.description, family.kind.name),
                [[labels, value.state[:], value.buckets] for labels, value in values],
            ]
            for family in _families.values()
            if (values := list(family.values.items()))
        ]


def _report_change(at_once: bool) -> None:
    """Report a change; must be called without the lock."""
    global _has_changed
    if not _has_changed:
        _has_changed = True
        if _on_change is not None:
            _on_change(at_once)


@contextlib.contextmanager
def _locked_for_change() -> Iterator[None]:
    """Hold the lock for a change, and report it after its release."""
    with _lock:
        yield
    _report_change(at_once=True)


class _Owner:
    """The metrics of one `MetricFamily` object; `is_alive`: the object exists."""

    def __init__(self, family: _Family) -> None:
        self.family = family
        self.labels: set[Labels] = set()  # of the metrics that the object has created
        self.is_alive = True


# Owners whose object was collected. Since a collection may happen while the lock is held,
# `_remove_collected` removes them later.
_collected_owners: deque[_Owner] = deque()


def _remove_collected() -> None:
    """Remove the values and families whose last object was collected.

    Must be called with the lock.
    """
    while _collected_owners:
        owner = _collected_owners.popleft()
        for labels in owner.labels:
            metric_value = owner.family.values[labels]
            metric_value.owners -= 1
            if not metric_value.owners:
                del owner.family.values[labels]
        owner.family.owners -= 1
        if not owner.family.owners:
            _families.pop(owner.family.name, None)


class MetricFamily:
    """Values of one name with different labels.

    Objects of the same name and kind share their values, which are removed with the last object.

    Raises:
        TritonModelException: Prometheus does not allow the name, or a family of this name has
            another kind.
        TypeError: An argument has a wrong type.
    """

    COUNTER = MetricKind.COUNTER
    GAUGE = MetricKind.GAUGE
    HISTOGRAM = MetricKind.HISTOGRAM

    def __init__(self, name: str, description: str, kind: MetricKind) -> None:
        name = as_text(name, "the name of a metric family")
        description = as_text(description, "the description of a metric family")
        if not isinstance(kind, MetricKind):
            raise TypeError(f"kind must be MetricFamily.COUNTER, GAUGE or HISTOGRAM, not {kind!r}")
        prefix = "Error when creating MetricFamily: "
        if not _METRIC_NAME.fullmatch(name):
            raise TritonModelException(prefix + refusal_text("Invalid metric name"))
        with _lock:
            _remove_collected()
            family = _families.setdefault(name, _Family(name, description, kind))
            if family.kind is not kind:
                reason = "Family name already exists with different type"
                raise TritonModelException(prefix + refusal_text(reason))
            family.owners += 1
        self._owner = _Owner(family)

    def __del__(self) -> None:
        owner = getattr(self, "_owner", None)
        if owner is not None:
            owner.is_alive = False
            _collected_owners.append(owner)
            _report_change(at_once=False)

    def Metric(
        self, labels: dict[str, str] | None = None, buckets: Sequence[float] | None = None
    ) -> Metric:
        """Return the value with these labels; a histogram needs the upper bounds of buckets.

        Raises:
            TritonModelException: The labels or buckets do not fit.
        """
        family = self._owner.family
        bounds = _check_buckets(family.kind, buckets)
        label_key = _check_labels(family.kind, labels)
        state_size = {MetricKind.COUNTER: 1, MetricKind.GAUGE: 3}.get(family.kind, len(bounds) + 2)
        with _locked_for_change():
            _remove_collected()
            value = family.values.setdefault(label_key, _MetricValue(bounds, [0] * state_size))
            if label_key not in self._owner.labels:
                self._owner.labels.add(label_key)
                value.owners += 1
        return Metric(self._owner, value)


def _check_buckets(kind: MetricKind, buckets: Sequence[float] | None) -> tuple[float, ...]:
    prefix = "Failed to create metric. "
    if buckets is not None and not isinstance(buckets, list):
        raise TritonModelException(prefix + "Buckets must be a list.")
    if buckets is not None and kind is not MetricKind.HISTOGRAM:
        raise TritonModelException(prefix + "Unexpected buckets found.")
    if buckets is None and kind is MetricKind.HISTOGRAM:
        raise TritonModelException(prefix + "Missing required buckets.")
    try:
        bounds = tuple(map(_as_float, buckets or ()))
    except TypeError:
        raise RuntimeError(NO_CAST) from None
    if list(bounds) != sorted(set(bounds)):
        text = refusal_text("Bucket Boundaries must be strictly sorted")
        raise TritonModelException(_CREATE_FAILED + text)
    # The bucket le="+Inf" is always present and must not be duplicated.
    return bounds[:-1] if bounds and bounds[-1] == math.inf else bounds


def _check_labels(kind: MetricKind, labels: dict[str, str] | None) -> Labels:
    if labels is not None and not isinstance(labels, dict):
        raise TritonModelException("Failed to create metric. Labels must be a dictionary.")
    label_pairs: list[tuple[str, str]] = []
    for name, value in (labels or {}).items():
        if not isinstance(value, str):
            reason = "attempt to access JSON non-string as string"
            raise TritonModelException(_CREATE_FAILED + refusal_text(reason))
        label_pairs.append((str(name), value))
        # Histograms reserve the label "le".
        if not _LABEL_NAME.fullmatch(str(name)) or (kind is MetricKind.HISTOGRAM and name == "le"):
            raise TritonModelException(_CREATE_FAILED + refusal_text("Invalid label name"))
    return tuple(sorted(label_pairs))


def _as_float(value: object) -> float:
    """Return a number, which may be numpy's, as a float.

    Raises:
        TypeError: The value is not a number.
    """
    if isinstance(value, str | bytes):
        raise TypeError(f"the value of a metric must be a number, not {type(value).__name__}")
    return float(value)  # type: ignore[arg-type]


class Metric:
    """A value of a family.

    The methods raise TritonModelException if the metric's kind lacks the operation or the family
    was deleted, and TypeError if an argument is not a number.
    """

    def __init__(self, owner: _Owner, value: _MetricValue) -> None:
        self._owner = owner
        self._value = value

    def increment(self, value: float) -> None:
        """Add a number to a gauge, or a number of at least 0 to a counter."""
        amount = _as_float(value)
        self._require_kind("increment", "Increment", MetricKind.COUNTER, MetricKind.GAUGE)
        if self._owner.family.kind is MetricKind.COUNTER and amount < 0:
            reason = (
                "TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically by "
                "non-negative values."
            )
            raise TritonModelException("Failed to increment metric value: " + refusal_text(reason))
        with _locked_for_change():
            self._value.state[-1] += amount

    def set(self, value: float) -> None:
        """Set a gauge."""
        number = _as_float(value)
        self._require_kind("set", "Set", MetricKind.GAUGE)
        with _locked_for_change():
            self._value.state[:] = (number, time.monotonic_ns(), 0)

    def observe(self, value: float) -> None:
        """Count a value in a histogram."""
        number = _as_float(value)
        self._require_kind("observe", "Observe", MetricKind.HISTOGRAM)
        with _locked_for_change():
            self._value.state[0] += number
            self._value.state[1 + bisect_left(self._value.buckets, number)] += 1

    def value(self) -> float:
        """Return the value of a counter or a gauge in this instance."""
        self._require_kind("get", "Value", MetricKind.COUNTER, MetricKind.GAUGE)
        state = self._value.state
        return float(state[0] + state[2] if len(state) > 1 else state[0])

    def _require_kind(self, verb: str, operation: str, *kinds: MetricKind) -> None:
        prefix = f"Failed to {verb} metric value: "
        if not self._owner.is_alive:
            raise TritonModelException(prefix + _FAMILY_DELETED)
        kind = self._owner.family.kind
        if kind not in kinds:
            reason = f"TRITONSERVER_METRIC_KIND_{kind.name} does not support {operation}"
            raise TritonModelException(prefix + refusal_text(reason))
