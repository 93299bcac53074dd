"""The Prometheus exporter: a page of metrics, created for each scrape from the schedulers' reports.

No state is kept on disk or in a gateway. The families of models are listed in metrics.txt:
counters, gauges, histograms, and summaries with the quantiles of the last minute. Names and labels
of nv_* are Triton's. Other metrics are called shmserve_*, and those of generative models
shmserve_llm_* (shmserve/scheduler/statistics.py documents the counters).
"""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import reduce
from itertools import accumulate, pairwise
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple

from shmserve.common import model_metrics
from shmserve.common.host import CpuUtilization, Process, memory_bytes, processes
from shmserve.common.tasks import collect
from shmserve.gateway.api import management
from shmserve.gateway.context import Gateway
from shmserve.ipc.model_spec import FIRST_RESPONSE_FAMILY

logger = logging.getLogger(__name__)

# Reports with the labels of their samples: a scheduler's report of a model, or a host's figures.
Reports = list[tuple[dict[str, str], dict[str, Any]]]

# Triton sorts all other labels, and appends these two.
_TRAILING_LABELS = ("le", "quantile")


@dataclass(slots=True)
class ExpositionFamily:
    """A metric family of the page; `samples` has the lines of its samples.

    prometheus_client is not used: it appends _total to the names of Triton's counters and takes
    twice the time.
    """

    name: str
    help_text: str
    kind: str  # Prometheus's type: counter, gauge, histogram or summary
    samples: list[str] = field(default_factory=list)

    def add(self, labels: dict[str, str], value: float, suffix: str = "") -> None:
        """Add a sample of the metric whose name is the family's with this suffix."""
        ordered_labels = sorted(labels.items(), key=_label_sort_key)
        self.samples.append(model_metrics.sample_line(self.name + suffix, ordered_labels, value))

    def add_histogram(
        self, labels: dict[str, str], histogram: dict[str, Any], *, has_integer_bounds: bool = False
    ) -> None:
        """Record the samples of a histogram; `has_integer_bounds` omits decimal points."""
        texts = [str(float(bound)) for bound in histogram["buckets"]]
        bounds = [text.removesuffix(".0") if has_integer_bounds else text for text in texts]
        cumulative_count = 0
        pairs = zip([*bounds, "+Inf"], accumulate(histogram["counts"]), strict=True)
        for bound, cumulative_count in pairs:
            self.add({**labels, "le": bound}, cumulative_count, "_bucket")
        self.add(labels, cumulative_count, "_count")
        self.add(labels, histogram["sum"], "_sum")

    def lines(self) -> Iterator[str]:
        """Yield the family's lines of the page: help, type and samples."""
        yield from model_metrics.header_lines(self.name, self.help_text, self.kind)
        yield from self.samples


class ReportFamily(NamedTuple):
    """A metric family with samples from reports; metrics.txt explains the fields."""

    kind: str  # Prometheus's type
    name: str
    value_path: str  # the path of the number in a report: "cache.bytes"; "a+b" is a sum
    key: str  # the label whose values are the numbers' keys; for summaries: the quantiles' key
    help_text: str

    @property
    def is_latency(self) -> bool:
        """Return whether the family measures a latency; settings can disable these families."""
        return self.value_path.endswith("_ns")

    def value_in(self, report: dict[str, Any]) -> Any:
        """Return the family's value in a report: a number, numbers by label, or a histogram."""
        paths = [path.split(".") for path in self.value_path.split("+")]
        values: list[Any] = [reduce(getitem, path, report) for path in paths]
        return values[0] if len(values) == 1 else sum(values)

    def to_exposition(self, reports: Reports) -> ExpositionFamily:
        """Return the family with a sample for each value in the reports."""
        family = ExpositionFamily(self.name, self.help_text, self.kind)
        for labels, report in reports:
            measurement = self.value_in(report)
            if self.kind == "histogram":
                family.add_histogram(labels, measurement)
            elif self.key:
                for label_value, count in measurement.items():
                    family.add({**labels, self.key: label_value}, count)
            else:
                family.add(labels, measurement // 1000 if self.is_latency else measurement)
        return family


_FAMILY_LINE = re.compile(r"(\w+) (\w+)(?: = (\S+))?(?: by (\w+))?")


def _read_table() -> dict[str, list[ReportFamily]]:
    """Return the metric families of metrics.txt, by group."""
    groups: dict[str, list[ReportFamily]] = {}
    lines = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines()
    for line, next_line in pairwise(lines):
        if line.startswith("["):
            families = groups[line.strip("[]")] = []
        elif row_match := _FAMILY_LINE.fullmatch(line):
            kind, name, path, key = row_match.groups(default="")
            field_name = name.removeprefix("shmserve_").removeprefix("llm_").removesuffix("_total")
            families.append(ReportFamily(kind, name, path or field_name, key, next_line.strip()))
    return groups


_FAMILIES = _read_table()  # by the groups of metrics.txt
_PADDING_COUNTERS = (
    ("shmserve_padded_elements", "Elements of padded inputs that models received"),
    ("shmserve_padding_elements", "Padding elements of padded inputs"),
)
_CACHE_COUNTERS = ("cache_hit", "cache_miss")
_CACHE_FIGURES = ("bytes", "bound", "entries", "evicted")
_FAILURE_REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")


def _families(
    group: str, reports: Reports, *, shows_latencies: bool = True
) -> Iterator[ExpositionFamily]:
    """Yield the families of a group of metrics.txt, with samples from the reports."""
    for family in _FAMILIES[group]:
        if shows_latencies or not family.is_latency:
            yield family.to_exposition(reports)


def triton_families(reports: Reports, *, shows_latencies: bool) -> Iterator[ExpositionFamily]:
    """Yield Triton's counters and gauges; durations only with `shows_latencies`.

    The families of the response cache are included if a model has one.
    """
    yield from _families("triton", reports, shows_latencies=shows_latencies)
    help_text = "Number of failed inference requests, all batch sizes"
    failures = ExpositionFamily("nv_inference_request_failure", help_text, "counter")
    for labels, report in reports:
        for reason in _FAILURE_REASONS:
            # Triton counts the failure of a step and the resulting failure of the ensemble.
            weight = 2 if reason == "OTHER" and report.get("is_ensemble") else 1
            count = weight * report["failures"].get(reason, 0)
            failures.add({**labels, "reason": reason}, count)
    yield failures
    cached_reports = _select_cached(reports)
    yield from _families("cache", cached_reports, shows_latencies=shows_latencies)
    if cached_reports:
        yield from _total_cache_families([report for _, report in cached_reports])


def _total_cache_families(reports: list[dict[str, Any]]) -> Iterator[ExpositionFamily]:
    """Yield Triton's gauges of the server's response cache."""
    totals: dict[str, Any] = {key: sum(r[key] for r in reports) for key in _CACHE_COUNTERS}
    cache = {key: sum(report["cache"][key] for report in reports) for key in _CACHE_FIGURES}
    utilization = cache["bytes"] / cache["bound"] if cache["bound"] else 0.0
    report = {**totals, "cache": cache, "utilization": utilization}
    yield from _families("cache totals", [({}, report)])


def own_families(reports: Reports) -> Iterator[ExpositionFamily]:
    """Yield histograms, counters and gauges that Triton does not have."""
    yield from _families("own", reports)
    yield from _padding_families(reports)


def summary_families(reports: Reports) -> Iterator[ExpositionFamily]:
    """Yield Triton's latency summaries of successful requests.

    The quantiles are those of the last minute. As in Triton, models with a response cache have no
    summary of the request duration.
    """
    cached_reports = _select_cached(reports)
    uncached_reports = [pair for pair in reports if not pair[1].get("cache")]
    reports_by_key = {"request": uncached_reports} | dict.fromkeys(_CACHE_COUNTERS, cached_reports)
    for family in _FAMILIES["summaries"]:
        yield _summary_family(family, reports_by_key.get(family.key, reports))


def first_response_families(reports: Reports) -> Iterator[ExpositionFamily]:
    """Yield the histogram of times to first response, if there are decoupled models."""
    help_text = "Duration from request to first response in milliseconds"
    family = ExpositionFamily(FIRST_RESPONSE_FAMILY, help_text, "histogram")
    for labels, report in reports:
        histogram = report.get("first_response_ms")
        if histogram is not None:
            family.add_histogram(labels, histogram, has_integer_bounds=True)
    yield family


def _select_cached(reports: Reports) -> Reports:
    return [(labels, report) for labels, report in reports if report.get("cache")]


def _summary_family(summary: ReportFamily, reports: Reports) -> ExpositionFamily:
    family = ExpositionFamily(summary.name, summary.help_text, "summary")
    counter_name = summary.value_path
    for labels, report in reports:
        count = report["success"]
        if counter_name in _CACHE_COUNTERS:
            count = report[counter_name]
        elif counter_name.startswith("compute"):
            count -= report["cache_hit"]
        family.add(labels, count, "_count")
        family.add(labels, report[f"{counter_name}_ns"] // 1000, "_sum")
        for quantile, value in report.get("quantiles", {}).get(summary.key, ()):
            rounded_us = float("nan") if value is None else round(value)
            family.add({**labels, "quantile": f"{quantile:g}"}, rounded_us)
    return family


def _padding_families(reports: Reports) -> Iterator[ExpositionFamily]:
    """Yield two counters for each padded input; their ratio is the share of padding."""
    for index, (name, help_text) in enumerate(_PADDING_COUNTERS):
        family = ExpositionFamily(f"{name}_total", help_text, "counter")
        for labels, report in reports:
            for tensor, counts in report["padding"].items():
                family.add({**labels, "input": tensor}, counts[index])
        yield family


def generative_families(reports: Reports) -> Iterator[ExpositionFamily]:
    """Yield the families of generative models, if there are any."""
    generative_pairs = (pair for pair in reports if "generated" in pair[1])
    generative_reports = [(labels, {**r, **_derive_values(r)}) for labels, r in generative_pairs]
    yield from _families("generative", generative_reports)


def _derive_values(report: dict[str, Any]) -> dict[str, Any]:
    """Return the values in metrics.txt that are derived from a generative model's report."""
    gauges: dict[str, Any] = report["generation"]
    drafted_tokens, speculative_steps = report["drafted"], report["speculative_steps"]
    return {
        **gauges,
        "queued": gauges["sequences"]["waiting"] + report["pending"],
        "requests": {"success": report["success"], "failure": report["fail"]},
        "seconds": {phase: ns / 1e9 for phase, ns in report["phases"].items()},
        "accept_rate": report["accepted"] / drafted_tokens if drafted_tokens else 0.0,
        "speedup": 1 + report["accepted"] / speculative_steps if speculative_steps else 1.0,
    }


class MetricsExporter:
    """The exporter of a gateway's metrics page."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._cpu = CpuUtilization()

    async def render_page(self) -> bytes:
        """Return the metrics page of a scrape: the schedulers' reports and this host's state."""
        gateway = self._gateway
        reports = await management.collect_reports(gateway, gateway.models.all_versions())
        server_processes = await collect(processes(os.getppid()))
        families = await collect(self._all_families(reports, server_processes))
        taken_names = {family.name for family in families}
        return (_exposition_text(families) + _model_families(reports, taken_names)).encode()

    def _all_families(
        self, reports: list[dict[str, Any]], server_processes: list[Process]
    ) -> Iterator[ExpositionFamily]:
        """Yield all families of the page, given the reports and the server's processes."""
        settings, models = self._gateway.settings, self._gateway.models
        untagged_reports: Reports = []
        tagged_reports: Reports = []
        for report in reports:
            labels = {"model": str(report["name"]), "version": str(report["version"])}
            model = models.find(labels["model"], labels["version"])
            untagged_reports.append((labels, report["shmserve"]))
            tagged_reports.append(
                (labels if model is None else labels | model.tags, report["shmserve"])
            )
        yield from triton_families(tagged_reports, shows_latencies=settings.counter_latencies)
        if settings.histogram_latencies:
            yield from first_response_families(tagged_reports)
        if settings.summary_latencies:
            yield from summary_families(tagged_reports)
        yield from self._load_families()
        yield from own_families(untagged_reports)
        yield from generative_families(untagged_reports)
        yield from self._region_families()
        yield from self._host_families()
        yield from _process_families(server_processes)

    def _load_families(self) -> Iterator[ExpositionFamily]:
        failures, models = self._gateway.failures, self._gateway.models.all_versions()
        loads: Reports = [
            ({"model": m.name, "version": m.version, **m.tags}, {"load_seconds": m.load_seconds})
            for m in models
        ]
        failed_loads: Reports = [
            ({"model": name, "version": version}, {"failed": 1})
            for name, version in failures.models
        ]
        counts = {"failed": len(failures.models), "ready": sum(model.is_ready for model in models)}
        yield from _families("loads", loads)
        yield from _families("failed loads", failed_loads)
        totals = {"models": counts, "load_failures": failures.count}
        yield from _families("load totals", [({}, totals)])

    def _region_families(self) -> Iterator[ExpositionFamily]:
        table = self._gateway.regions
        report: dict[str, int] = {}
        for prefix, regions in (
            ("shm_", table.named_regions()),
            ("shm_unnamed_", table.unnamed_regions()),
        ):
            sizes = [region.byte_size for region in regions]
            report |= {f"{prefix}regions": len(sizes), f"{prefix}region_bytes": sum(sizes)}
        yield from _families("regions", [({}, report)])

    def _host_families(self) -> Iterator[ExpositionFamily]:
        if self._gateway.settings.allow_cpu_metrics:
            total_bytes, used_bytes = memory_bytes()
            report = {"cpu": self._cpu.read(), "total_bytes": total_bytes, "used_bytes": used_bytes}
            yield from _families("host", [({}, report)])
        # shmserve pins memory in place. Triton's metrics of its pinned memory pool are therefore 0.
        yield from _families("pinned memory", [({}, {"pool_bytes": 0})])


def _exposition_text(families: Iterable[ExpositionFamily]) -> str:
    # As in Triton, families without samples are omitted.
    nonempty_families = (family for family in families if family.samples)
    return "".join(f"{line}\n" for family in nonempty_families for line in family.lines())


def _label_sort_key(label: tuple[str, str]) -> tuple[bool, str]:
    return label[0] in _TRAILING_LABELS, label[0]


def _model_families(reports: list[dict[str, Any]], taken_names: set[str]) -> str:
    parsed_reports = [model_metrics.parse(r["shmserve"].get("families", [])) for r in reports]
    families = model_metrics.sum_families(parsed_reports)
    shown_families = {name: family for name, family in families.items() if name not in taken_names}
    if len(shown_families) < len(families):
        names = ", ".join(sorted(families.keys() - shown_families.keys()))
        logger.warning(
            "metrics of models with the name of a server's metric are not shown (rename them): %s",
            names,
        )
    return model_metrics.exposition(shown_families)


def _process_families(server_processes: list[Process]) -> Iterator[ExpositionFamily]:
    # Prometheus rejects samples with equal labels. Processes of the same title, such as the workers
    # of two versions of a model, are therefore added up.
    report: dict[str, Counter[str]] = {}
    for name in ("resident_bytes", "open_fds", "cpu_seconds"):
        by_title = report[f"process_{name}"] = Counter()
        for process in server_processes:
            by_title[process.title] += getattr(process, name)
    yield from _families("processes", [({}, report)])
