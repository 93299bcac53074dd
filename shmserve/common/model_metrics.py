"""Metrics of models across instances and reloads, exposed as Prometheus text (pure).

A model's custom metrics are aggregated over its instances:

    counters, histograms   the sum over all instances, including those that have exited
    gauges                 the last value that a live instance set, plus all increments of
                           live instances

Families with the same name are merged across models, as in Triton.

The server's counters of a model continue after a reload. Each scheduler has a table of counters:
{name: number, list of numbers, numbers by key, or histogram}. Its snapshot has this table, current
values and, as "base", the sum of the tables of earlier schedulers of this version. Metrics show
table plus base, so no counter decreases. Requests that an earlier scheduler completes after its
successor has started are included.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

# The entries of a snapshot that are not counters. `sum_counters` omits them.
_NOT_IN_BASE = (
    *("base", "last_ns", "batch_sizes", "responses"),
    *("pending", "executing", "open_sequences", "live", "instances"),
)
Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Series:
    """A time series of a metric. The content of `state` depends on the kind of the metric.

    COUNTER    [value]
    GAUGE      [value set, time of setting (monotonic ns; 0: never), increments since]
    HISTOGRAM  [sum, observations per bucket (not cumulative), observations above all `buckets`]
    """

    state: tuple[float, ...]  # values, depending on the kind
    buckets: tuple[float, ...] = ()  # upper bounds


@dataclass(frozen=True, slots=True)
class Family:
    """The series of one metric name, by their sorted labels."""

    description: str
    kind: str
    values: Mapping[Labels, Series]  # series by labels


Families = dict[str, Family]


def parse(items: list[Any]) -> Families:
    """Return the families that `to_lists` encoded as `items`. Raises ValueError for other lists."""
    try:
        return {
            str(name): Family(
                str(description), kind, {_decode_labels(v[0]): _decode_value(kind, v) for v in rows}
            )
            for name, description, kind, rows in items
        }
    except (TypeError, IndexError, KeyError) as error:
        raise ValueError(f"the list of metric families is malformed: {error}") from None


def _decode_labels(items: list[Any]) -> Labels:
    return tuple((str(name), str(value)) for name, value in items)


def _decode_value(kind: str, row: list[Any]) -> Series:
    _, state, buckets = row
    size = {"COUNTER": 1, "GAUGE": 3, "HISTOGRAM": len(buckets) + 2}[kind]
    if len(state) != size or not all(type(n) in (int, float) for n in (*state, *buckets)):
        raise ValueError(f"a {kind} must have {size} values and numeric bounds, got {row!r:.200}")
    return Series(tuple(state), tuple(buckets))


def to_lists(families: Families) -> list[Any]:
    """Encode families as [[name, description, kind, [[labels, state, buckets], ...]], ...]."""
    return [
        [
            *(name, family.description, family.kind),
            [[list(labels), v.state, v.buckets] for labels, v in family.values.items()],
        ]
        for name, family in families.items()
    ]


def sum_families(families_of_instances: Iterable[Families]) -> Families:
    """Return the sum of the families in `families_of_instances`.

    If families differ in kind or buckets, the first one is kept.
    """
    sums: Families = {}
    for families in families_of_instances:
        for name, family in families.items():
            first_family = sums.get(name)
            if first_family is None:
                sums[name] = family
            elif first_family.kind == family.kind:
                values = dict(first_family.values)
                for labels, value in family.values.items():
                    earlier_value = values.get(labels)
                    if earlier_value:
                        value = _add(family.kind, earlier_value, value)
                    values[labels] = value
                sums[name] = replace(first_family, values=values)
    return sums


def _add(kind: str, first: Series, second: Series) -> Series:
    if first.buckets != second.buckets:
        return first
    if kind == "GAUGE":
        latest_series = first if first.state[1] >= second.state[1] else second
        return Series((*latest_series.state[:2], first.state[2] + second.state[2]))
    pairs = zip(first.state, second.state, strict=True)
    return Series(tuple(a + b for a, b in pairs), first.buckets)


class ModelMetrics:
    """The families of all instances of a model version, including instances that have ended."""

    def __init__(self) -> None:
        self._exited_families: Families = {}
        self._families_by_pid: dict[int, Families] = {}

    def snapshot(self) -> list[Any]:
        """Return the families of all instances as a checkpoint, from which `restore` continues."""
        instances = [[pid, to_lists(families)] for pid, families in self._families_by_pid.items()]
        return [to_lists(self._exited_families), *instances]

    def restore(self, snapshot: list[Any], alive_pids: Iterable[int]) -> None:
        """Continue from the checkpoint of a predecessor, whose live instances are `alive_pids`.

        Raises:
            ValueError: `snapshot` has another format.
        """
        exited_families, *instances = snapshot
        self._exited_families = parse(exited_families)
        self._families_by_pid = {int(pid): parse(families) for pid, families in instances}
        for pid in self._families_by_pid.keys() - set(alive_pids):
            self.process_exited(pid)

    def report(self, pid: int, families: Families) -> None:
        """Replace the families of the instance in process `pid`, which count since its start."""
        self._families_by_pid[pid] = families

    def process_exited(self, pid: int) -> None:
        """Remove an instance that has exited, and keep its counters and histograms."""
        families = self._families_by_pid.pop(pid, None)
        if families is not None:
            counters = {name: f for name, f in families.items() if f.kind != "GAUGE"}
            self._exited_families = sum_families((self._exited_families, counters))

    def total(self) -> Families:
        """Return the families, summed over all instances of the version."""
        return sum_families((self._exited_families, *self._families_by_pid.values()))


def exposition(families: Families) -> str:
    """Return Prometheus text in Triton's form: names are unchanged, labels are sorted."""
    lines: list[str] = []
    for name, family in families.items():
        if family.values:
            lines += header_lines(name, family.description, family.kind.lower())
            for labels, value in family.values.items():
                lines += _sample_lines(name, family.kind, labels, value)
    return "".join(f"{line}\n" for line in lines)


def _sample_lines(name: str, kind: str, labels: Labels, value: Series) -> Iterable[str]:
    state = value.state
    if kind == "HISTOGRAM":
        total, *counts = state
        yield sample_line(f"{name}_count", labels, sum(counts))
        yield sample_line(f"{name}_sum", labels, total)
        cumulative_count = 0.0
        for bound, count in zip((*value.buckets, float("inf")), counts, strict=True):
            cumulative_count += count
            bucket_labels = (*labels, ("le", _as_text(bound)))
            yield sample_line(f"{name}_bucket", bucket_labels, cumulative_count)
    else:
        number = state[0] + state[2] if kind == "GAUGE" else state[0]
        yield sample_line(name, labels, number)


def header_lines(name: str, description: str, kind: str) -> tuple[str, str]:
    """Return the HELP and TYPE lines above the samples of a family of a Prometheus `kind`."""
    return f"# HELP {name} {_escape(description)}", f"# TYPE {name} {kind}"


def sample_line(name: str, labels: Iterable[tuple[str, str]], value: float) -> str:
    """Return the line of a sample, with labels in this order; integers have no decimal point."""
    pairs = ",".join(f'{label}="{_escape(text, escapes_quotes=True)}"' for label, text in labels)
    return f"{name}{{{pairs}}} {_as_text(value)}" if pairs else f"{name} {_as_text(value)}"


def _escape(text: str, escapes_quotes: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if escapes_quotes else text


def _as_text(value: float) -> str:
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "+Inf" if value > 0 else "-Inf"
    is_integer = isinstance(value, int) or (value == int(value) and abs(value) < 1e15)
    return str(int(value)) if is_integer else repr(float(value))


def sum_counters(snapshot: dict[str, Any]) -> dict[str, Any]:
    """Return each counter of a snapshot plus its value in the snapshot's "base".

    The result is the base of the successor. Raises KeyError if the snapshot has no base.
    """
    counts = {name: value for name, value in snapshot.items() if name not in _NOT_IN_BASE}
    counters: dict[str, Any] = add_tables(counts, snapshot["base"])
    return counters


def add_tables(table: Any, base: Any) -> Any:
    """Return the entries of `table` plus the counts of the same entries in `base`.

    A histogram whose bounds have changed starts at zero.

    Raises:
        AttributeError: The entries of `table` and `base` have different types; also TypeError and
            ValueError.
    """
    if isinstance(table, dict):
        if table.get("buckets") != base.get("buckets"):
            return table
        return {
            # The bounds of a histogram are not counts.
            key: value if key == "buckets" or key not in base else add_tables(value, base[key])
            for key, value in table.items()
        }
    if isinstance(table, list):
        return [add_tables(a, b) for a, b in zip(table, base, strict=True)]
    return table + base
