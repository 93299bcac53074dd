"""The metric families of padded inputs: what models get, and how much of it is waste."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client.core import Metric

_FAMILIES = (
    ("shmserve_padded_elements", "Elements of padded inputs that models were given"),
    ("shmserve_padding_elements", "Elements of padded inputs that were padding, which is waste"),
)


def padding(reports: Sequence[tuple[dict[str, str], dict[str, Any]]]) -> Iterator[Metric]:
    """Two counters for each padded input of a model; the share of the second in the first is what
    padding wastes."""
    for at, (name, text) in enumerate(_FAMILIES):
        family = Metric(name, text, "counter")
        for labels, report in reports:
            for tensor, counts in report["padding"].items():
                family.add_sample(f"{name}_total", {**labels, "input": tensor}, counts[at])
        if family.samples:
            yield family
