"""The Prometheus exporter: a page of metrics, made for each scrape of what the schedulers report.

Nothing is kept on disk, and nothing is lost with a gateway.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric

from shmserve.common import model_metrics
from shmserve.common.host import CpuUtilization, memory_bytes, processes
from shmserve.gateway.api import metric_families, statistics
from shmserve.gateway.context import Gateway

logger = logging.getLogger(__name__)

# Triton writes these behind the labels that say what was measured, which are sorted.
_OF_A_DISTRIBUTION = ("le", "quantile")


class MetricsExporter:
    """Makes the page of a gateway's metrics."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._cpu = CpuUtilization()

    async def page(self) -> bytes:
        """The text of a scrape: what the schedulers report now, and the state of this host."""
        gateway = self._gateway
        reports = await statistics.collect(gateway, gateway.models.all())
        families = list(_Families(gateway, reports, self._cpu.read()).collect())
        taken = set(map(_full_name, families))
        return (_text(families) + _models_own(reports, taken)).encode()


def _full_name(family: Metric) -> str:
    """The name as it is written: the library drops the suffix of counters, which Triton's have
    not."""
    total = family.type == "counter" and not family.name.startswith("nv_")
    return f"{family.name}_total" if total else family.name


def _text(families: Iterable[Metric]) -> str:
    lines: list[str] = []
    for family in families:
        lines += model_metrics.head(_full_name(family), family.documentation, family.type)
        for name, labels, value, *_ in family.samples:
            ordered = sorted(labels.items(), key=_place)
            lines.append(model_metrics.sample(name, ordered, value))
    return "".join(f"{line}\n" for line in lines)


def _place(label: tuple[str, str]) -> tuple[bool, str]:
    return label[0] in _OF_A_DISTRIBUTION, label[0]


def _models_own(reports: list[dict[str, Any]], taken: set[str]) -> str:
    parts = [model_metrics.parse(report["shmserve"].get("families", [])) for report in reports]
    families = model_metrics.added(parts)
    free = {name: family for name, family in families.items() if name not in taken}
    if len(free) < len(families):
        logger.warning(
            "models have metrics with names of the server's, which are not shown: %s",
            ", ".join(sorted(families.keys() - free.keys())),
        )
    return model_metrics.exposition(free)


class _Families:
    """The metric families of one scrape."""

    def __init__(
        self, gateway: Gateway, reports: list[dict[str, Any]], cpu_utilization: float
    ) -> None:
        self._gateway = gateway
        self._cpu_utilization = cpu_utilization
        self._reports = [
            (
                {"model": str(report["name"]), "version": str(report["version"])},
                report["shmserve"],
            )
            for report in reports
        ]

    def collect(self) -> Iterator[Metric]:
        """Every family."""
        settings = self._gateway.settings
        tagged = [
            ({**labels, **self._tags(labels["model"], labels["version"])}, report)
            for labels, report in self._reports
        ]
        yield from metric_families.tritons(tagged, latencies=settings.counter_latencies)
        if settings.histogram_latencies:
            yield from metric_families.first_responses(tagged)
        if settings.summary_latencies:
            yield from metric_families.summaries(tagged)
        yield self._load_seconds()
        yield from metric_families.ours(self._reports)
        yield from metric_families.generative(self._reports)
        yield from self._regions()
        yield from self._host()
        yield from _processes()

    def _tags(self, name: str, version: str) -> dict[str, str]:
        model = self._gateway.models.find(name, version)
        return {} if model is None else model.tags

    def _load_seconds(self) -> Metric:
        family = Metric("nv_model_load_duration_secs", "Model load time in seconds", "gauge")
        for model in self._gateway.models.all():
            labels = {"model": model.name, "version": model.version, **model.tags}
            family.add_sample(family.name, labels, model.load_seconds)
        return family

    def _regions(self) -> Iterator[Metric]:
        table = self._gateway.regions
        for kind, regions, text in (
            ("", table.all(), "registered regions of shared memory"),
            (
                *("unnamed_", table.listed_only()),
                "regions that shmserve.client shares, or that are unregistered and in use still",
            ),
        ):
            sizes = [region.byte_size for region in regions]
            yield _gauge(f"shmserve_shm_{kind}regions", f"Number of {text}", len(sizes))
            yield _gauge(f"shmserve_shm_{kind}region_bytes", f"Bytes of {text}", sum(sizes))

    def _host(self) -> Iterator[Metric]:
        total, used = memory_bytes()
        yield _gauge(
            "nv_cpu_utilization", "CPU utilization rate [0.0 - 1.0]", self._cpu_utilization
        )
        yield _gauge("nv_cpu_memory_total_bytes", "CPU total memory (RAM), in bytes", total)
        yield _gauge("nv_cpu_memory_used_bytes", "CPU used memory (RAM), in bytes", used)
        # There is no such pool here: memory is pinned where it lies.
        for part in ("total", "used"):
            text = f"Pinned memory pool {part} memory size, in bytes"
            yield _gauge(f"nv_pinned_memory_pool_{part}_bytes", text, 0)


def _processes() -> Iterator[Metric]:
    resident = Metric("shmserve_process_resident_bytes", "Resident memory of a process", "gauge")
    descriptors = Metric("shmserve_process_open_fds", "Open file descriptors of a process", "gauge")
    seconds = Metric("shmserve_process_cpu_seconds", "CPU time of a process", "counter")
    for process in processes(os.getppid()):
        labels = {"process": process.title}
        resident.add_sample(resident.name, labels, process.resident_bytes)
        descriptors.add_sample(descriptors.name, labels, process.open_fds)
        seconds.add_sample(seconds.name + "_total", labels, process.cpu_seconds)
    yield from (resident, descriptors, seconds)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)
