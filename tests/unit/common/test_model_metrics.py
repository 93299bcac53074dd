"""Custom metrics of models: sums over instances and models, and the text format."""

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from shmserve.common.model_metrics import (
    Families,
    ModelMetrics,
    exposition,
    parse,
    sum_families,
    to_lists,
)

LABELS = [["a", "1"]]


def counter(value: float, name: str = "c") -> Families:
    return parse([[name, "what it is", "COUNTER", [[LABELS, [value], []]]]])


def gauge(*numbers: float) -> Families:
    return parse([["g", "", "GAUGE", [[[], list(numbers), []]]]])


def histogram(numbers: list[float], buckets: list[float]) -> Families:
    return parse([["h", "", "HISTOGRAM", [[LABELS, numbers, buckets]]]])


def exposed_value(families: Families) -> str:
    return exposition(families).splitlines()[-1].split()[-1]


def test_counters_are_summed_and_outlive_their_instance() -> None:
    metrics = ModelMetrics()
    metrics.report(7, counter(1.5))
    metrics.report(8, counter(2))
    metrics.report(7, counter(2.5))
    assert exposed_value(metrics.total()) == "4.5"
    metrics.process_exited(7)
    metrics.process_exited(99)
    assert exposed_value(metrics.total()) == "4.5"
    metrics.report(9, counter(1))
    assert exposed_value(metrics.total()) == "5.5"


def test_a_successor_continues_the_counts() -> None:
    metrics = ModelMetrics()
    for pid in (1, 2, 3):
        metrics.report(pid, sum_families((counter(pid), gauge(pid, pid, 0))))
    metrics.process_exited(1)
    successor = ModelMetrics()
    successor.restore(metrics.snapshot(), alive_pids=[2, 9])
    assert to_lists(successor.total())[0] == to_lists(metrics.total())[0]
    assert successor.total()["g"] == gauge(2, 2, 0)["g"]
    successor.report(2, counter(5))
    assert exposed_value(successor.total()) == "9"


def test_a_gauge_is_its_last_value_plus_increments() -> None:
    metrics = ModelMetrics()
    metrics.report(1, gauge(10, 50, 1))
    metrics.report(2, gauge(20, 40, 0.5))
    assert exposed_value(metrics.total()) == "11.5"
    metrics.process_exited(1)
    assert exposed_value(metrics.total()) == "20.5"
    metrics.process_exited(2)
    assert metrics.total() == {}


def test_histograms_are_summed_if_they_have_the_same_buckets() -> None:
    first, second = (histogram([3, 1, 0, 2], [1, 2]), histogram([4, 1, 1, 1], [1, 2]))
    assert sum_families((first, second)) == histogram([7, 2, 1, 3], [1, 2])
    assert sum_families((first, histogram([1, 1, 0], [5]))) == first


def test_families_of_several_models_are_merged() -> None:
    total = sum_families((counter(1), counter(2, "d"), counter(3)))
    assert list(total) == ["c", "d"]
    assert exposed_value({"c": total["c"]}) == "4"
    gauge_family = parse([["c", "", "GAUGE", [[LABELS, [9, 1, 0], []]]]])
    assert sum_families((counter(1), gauge_family)) == counter(1)


def test_the_plain_form_is_parsed_to_the_same_families() -> None:
    families = sum_families((counter(1), gauge(1, 2, 3), histogram([1, 0, 1], [5])))
    assert parse(to_lists(families)) == families


@pytest.mark.parametrize(
    "raw",
    [
        [3],
        [["c", "", "COUNTER"]],
        [["c", "", "SUMMARY", [[[], [1], []]]]],
        [["c", "", "COUNTER", [[[], [1, 2], []]]]],
        [["c", "", "COUNTER", [[[], ["1"], []]]]],
        [["c", "", "COUNTER", [[[["a"]], [1], []]]]],
        [["h", "", "HISTOGRAM", [[[], [1, 2], [1]]]]],
        [["h", "", "HISTOGRAM", [[[], [1, 2, 3], ["x"]]]]],
        [["h", "", "HISTOGRAM", [[[], [1, 2, 3]]]]],
        [["h", "", "HISTOGRAM", 4]],
    ],
)
def test_malformed_reports_are_refused(raw: list[Any]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - whatever the text
        parse(raw)


def test_the_exposition_equals_tritons() -> None:
    labels = [["by", 'a "b"\\\n'], ["unit", "é"]]
    families = parse(
        [
            ["metering_total", "A\nB", "COUNTER", [[labels, [1e17], []]]],
            ["level", "", "GAUGE", [[[], [-1.5, 1, 0.25], []], [LABELS, [float("nan"), 1, 0], []]]],
            ["sizes", "", "HISTOGRAM", [[LABELS, [8.75, 2, 0, 1], [0.5, 10.0]]]],
            ["never", "used", "COUNTER", []],
        ]
    )
    text = exposition(families)
    assert text == (
        "# HELP metering_total A\\nB\n"
        "# TYPE metering_total counter\n"
        'metering_total{by="a \\"b\\"\\\\\\n",unit="é"} 1e+17\n'
        "# HELP level \n"
        "# TYPE level gauge\n"
        "level -1.25\n"
        'level{a="1"} NaN\n'
        "# HELP sizes \n"
        "# TYPE sizes histogram\n"
        'sizes_count{a="1"} 3\n'
        'sizes_sum{a="1"} 8.75\n'
        'sizes_bucket{a="1",le="0.5"} 2\n'
        'sizes_bucket{a="1",le="10"} 2\n'
        'sizes_bucket{a="1",le="+Inf"} 3\n'
    )
    assert [f.name for f in text_string_to_metric_families(text)] == ["metering", "level", "sizes"]
