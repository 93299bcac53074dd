"""The Prometheus exporter: a page of metrics, made for each scrape of what the schedulers report.

Nothing is kept on disk, and nothing is lost with a gateway. Names and labels of nv_* are Triton's;
what Triton does not have is called shmserve_*.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from shmserve.common import cumulative_counters, model_metrics
from shmserve.gateway.api import statistics
from shmserve.gateway.api.metrics.cache_families import cached
from shmserve.gateway.api.metrics.latency_families import first_responses, summaries
from shmserve.gateway.api.metrics.padding_families import padding
from shmserve.gateway.api.metrics.process_stats import CpuUtilization, memory_bytes, processes
from shmserve.gateway.context import Gateway

logger = logging.getLogger(__name__)

# The library names counters NAME_total; Triton does not.
_SUFFIX = re.compile(rb"^(# (?:HELP|TYPE) nv_\w+)_total ", re.MULTILINE)
# Whole numbers are written as such, however large.
_FAMILY = re.compile(rb"^# TYPE (\S+) ", re.MULTILINE)
_WHOLE = re.compile(rb" ([0-9]+\.0|[0-9](?:\.[0-9]+)?e\+[0-9]+)$", re.MULTILINE)

_ALL = "inference requests, all batch sizes"
_EXECUTED = "(does not include cached requests)"
_CACHED = "(includes cached requests)"
_COUNTERS = (
    # name, text, where the report has it
    ("request_success", f"Number of successful {_ALL}", ("inference_stats", "success", "count")),
    ("count", f"Number of inferences performed {_EXECUTED}", ("inference_count",)),
    ("exec_count", f"Number of model executions performed {_EXECUTED}", ("execution_count",)),
    (
        "request_duration_us",
        f"Cumulative inference request duration in microseconds {_CACHED}",
        ("inference_stats", "success", "ns"),
    ),
    (
        "queue_duration_us",
        f"Cumulative inference queuing duration in microseconds {_CACHED}",
        ("inference_stats", "queue", "ns"),
    ),
    (
        "compute_input_duration_us",
        f"Cumulative compute input duration in microseconds {_EXECUTED}",
        ("inference_stats", "compute_input", "ns"),
    ),
    (
        "compute_infer_duration_us",
        f"Cumulative compute inference duration in microseconds {_EXECUTED}",
        ("inference_stats", "compute_infer", "ns"),
    ),
    (
        "compute_output_duration_us",
        f"Cumulative inference compute output duration in microseconds {_EXECUTED}",
        ("inference_stats", "compute_output", "ns"),
    ),
)
_REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")
_HISTOGRAMS = (
    ("request_seconds", "Time from arrival to answer of a request that succeeded"),
    ("queue_seconds", "Time that a request that succeeded waited for its execution"),
    ("compute_seconds", "Time of an execution, input and output included"),
    ("batch_size", "Batch size of an execution"),
)
_EVENTS = (
    ("workers_lost", "Instances that died or were killed while they were in use"),
    ("retried", "Requests that ran again, alone, after their worker died"),
    ("overruns", "Executions that passed their time limit"),
    ("malformed", "Messages that were dropped because they were malformed"),
)


class MetricsExporter:
    """Makes the page of a gateway's metrics."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._cpu = CpuUtilization()

    async def page(self) -> bytes:
        """The text of a scrape: what the schedulers report now, and the state of this host."""
        gateway = self._gateway
        reports = await statistics.collect(gateway, gateway.models.all())
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Families(gateway, reports, self._cpu.read()))
        text = _SUFFIX.sub(rb"\1 ", generate_latest(registry))
        return _WHOLE.sub(_plain, text) + _models_own(reports, set(_FAMILY.findall(text)))


def _models_own(reports: list[dict[str, Any]], taken: set[bytes]) -> bytes:
    parts = [model_metrics.parse(report["shmserve"].get("families", [])) for report in reports]
    families = model_metrics.added(parts)
    free = {name: family for name, family in families.items() if name.encode() not in taken}
    if len(free) < len(families):
        logger.warning(
            "models have metrics with names of the server's, which are not shown: %s",
            ", ".join(sorted(families.keys() - free.keys())),
        )
    return model_metrics.exposition(free).encode()


def _plain(match: re.Match[bytes]) -> bytes:
    value = float(match[1])
    return b" %d" % value if value.is_integer() else match[0]


class _Families(Collector):
    """The metric families of one scrape."""

    def __init__(
        self, gateway: Gateway, reports: list[dict[str, Any]], cpu_utilization: float
    ) -> None:
        self._gateway = gateway
        self._cpu_utilization = cpu_utilization
        self._reports = [
            (
                {"model": str(report["name"]), "version": str(report["version"])},
                {**report["shmserve"], **cumulative_counters.lasting(report)},
            )
            for report in reports
        ]
        self._tagged = [
            ({**labels, **self._tags(labels["model"], labels["version"])}, report)
            for labels, report in self._reports
        ]

    def _tags(self, name: str, version: str) -> dict[str, str]:
        model = self._gateway.models.find(name, version)
        return {} if model is None else model.tags

    def collect(self) -> Iterator[Metric]:
        """Every family."""
        yield from self._tritons()
        yield from self._ours()
        yield from self._hosts()

    def _tritons(self) -> Iterator[Metric]:
        settings = self._gateway.settings
        for name, text, path in _COUNTERS:
            if name.endswith("_us") and not settings.counter_latencies:
                continue
            family = Metric(f"nv_inference_{name}", text, "counter")
            for labels, report in self._tagged:
                value: Any = report
                for key in path:
                    value = value[key]
                value = value // 1000 if name.endswith("_us") else value
                family.add_sample(family.name, labels, value)
            yield family
        family = Metric("nv_inference_request_failure", f"Number of failed {_ALL}", "counter")
        for labels, report in self._tagged:
            for reason in _REASONS:
                labelled = {**labels, "reason": reason}
                family.add_sample(family.name, labelled, report["failures"].get(reason, 0))
        yield family
        pending = Metric(
            "nv_inference_pending_request_count",
            "Instantaneous number of pending requests awaiting execution per-model.",
            "gauge",
        )
        for labels, report in self._tagged:
            pending.add_sample(pending.name, labels, report["pending"])
        yield pending
        yield from cached(self._tagged, settings.counter_latencies)
        if settings.histogram_latencies:
            yield from first_responses(self._tagged)
        if settings.summary_latencies:
            yield from summaries(self._tagged)
        loading = Metric("nv_model_load_duration_secs", "Model load time in seconds", "gauge")
        for model in self._gateway.models.all():
            labels = {"model": model.name, "version": model.version, **model.tags}
            loading.add_sample(loading.name, labels, model.load_seconds)
        yield loading

    def _ours(self) -> Iterator[Metric]:
        for name, text in _HISTOGRAMS:
            histogram = HistogramMetricFamily(f"shmserve_{name}", text, labels=("model", "version"))
            for labels, report in self._reports:
                _add_histogram(histogram, labels, report["histograms"][name])
            yield histogram
        for name, text in _EVENTS:
            counter = Metric(f"shmserve_{name}", text, "counter")
            for labels, report in self._reports:
                counter.add_sample(f"shmserve_{name}_total", labels, report[name])
            yield counter
        closed = Metric(
            "shmserve_batches_closed", "Executions by why their batch took no more", "counter"
        )
        instances = Metric("shmserve_instances", "Instances by state", "gauge")
        executing = Metric("shmserve_executing_requests", "Requests at workers now", "gauge")
        copied = Metric("shmserve_copied_bytes", "Bytes of tensors that workers copied", "counter")
        for labels, report in self._reports:
            for reason, count in report["batches_closed"].items():
                closed.add_sample(closed.name + "_total", {**labels, "reason": reason}, count)
            for state, count in report["instances"].items():
                instances.add_sample(instances.name, {**labels, "state": state}, count)
            executing.add_sample(executing.name, labels, report["executing"])
            for direction, count in report["copied_bytes"].items():
                there = {**labels, "direction": direction}
                copied.add_sample(copied.name + "_total", there, count)
        yield from (closed, instances, executing, copied)
        yield from padding(self._reports)
        regions = list(self._gateway.regions.all())
        yield _gauge("shmserve_shm_regions", "Registered shared memory regions", len(regions))
        yield _gauge(
            "shmserve_shm_region_bytes",
            "Bytes of registered shared memory regions",
            sum(region.byte_size for region in regions),
        )

    def _hosts(self) -> Iterator[Metric]:
        total, used = memory_bytes()
        yield _gauge(
            "nv_cpu_utilization", "CPU utilization rate [0.0 - 1.0]", self._cpu_utilization
        )
        yield _gauge("nv_cpu_memory_total_bytes", "CPU total memory (RAM), in bytes", total)
        yield _gauge("nv_cpu_memory_used_bytes", "CPU used memory (RAM), in bytes", used)
        # There is no such pool here: memory is pinned where it lies.
        for what, text in (
            ("total_bytes", "total memory size"),
            ("used_bytes", "used memory size"),
        ):
            name = f"nv_pinned_memory_pool_{what}"
            yield _gauge(name, f"Pinned memory pool {text}, in bytes", 0)
        resident = GaugeMetricFamily(
            "shmserve_process_resident_bytes", "Resident memory of a process", labels=("process",)
        )
        descriptors = GaugeMetricFamily(
            "shmserve_process_open_fds", "Open file descriptors of a process", labels=("process",)
        )
        seconds = Metric("shmserve_process_cpu_seconds", "CPU time of a process", "counter")
        for process in processes(os.getppid()):
            resident.add_metric((process.title,), process.resident_bytes)
            descriptors.add_metric((process.title,), process.open_fds)
            seconds.add_sample(
                seconds.name + "_total", {"process": process.title}, process.cpu_seconds
            )
        yield from (resident, descriptors, seconds)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)


def _add_histogram(
    family: HistogramMetricFamily, labels: dict[str, str], raw: dict[str, Any]
) -> None:
    cumulative = 0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip([*raw["buckets"], "+Inf"], raw["counts"], strict=True):
        cumulative += count
        buckets.append((bound if isinstance(bound, str) else repr(float(bound)), cumulative))
    family.add_metric((labels["model"], labels["version"]), buckets, raw["sum"])
