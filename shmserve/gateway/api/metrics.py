"""The Prometheus exporter: a page of metrics, created for each scrape from the schedulers' reports.

No state is kept on disk or in a gateway. The families of models are tables of counters, gauges,
histograms, and summaries with the quantiles of the last minute. Names and labels of nv_* are
Triton's. Other metrics are called shmserve_*, and those of generative models shmserve_llm_*
(shmserve/scheduler/statistics.py documents the counters).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from shmserve.common import model_metrics
from shmserve.common.host import CpuUtilization, memory_bytes, processes
from shmserve.gateway.api import management
from shmserve.gateway.context import Gateway
from shmserve.ipc.model_spec import FIRST_RESPONSE_FAMILY

logger = logging.getLogger(__name__)


# The report of each model, with its labels.
Reports = list[tuple[dict[str, str], dict[str, Any]]]

# Triton sorts all other labels, and appends these two.
_TRAILING_LABELS = ("le", "quantile")


@dataclass(slots=True)
class ExpositionFamily:
    """A metric family of the page.

    prometheus_client is not used: it appends _total to the names of Triton's counters and takes
    twice the time.
    """

    name: str
    help_text: str
    kind: str
    samples: list[str] = field(default_factory=list)

    def add(self, labels: dict[str, str], value: float, suffix: str = "") -> None:
        """Record a sample."""
        ordered = sorted(labels.items(), key=_label_sort_key)
        self.samples.append(model_metrics.sample(self.name + suffix, ordered, value))

    def lines(self) -> Iterator[str]:
        """Yield the lines of the page."""
        yield from model_metrics.head(self.name, self.help_text, self.kind)
        yield from self.samples


class ReportFamily(NamedTuple):
    """A metric family with a sample for each model, read from the schedulers' reports.

    Attributes:
        kind: The Prometheus type.
        name: The family's name.
        path: The path of the number in a report ("cache.bytes"); nanoseconds become microseconds.
        help_text: The help text.
        label: The label whose values the numbers are keyed by; "": a single number.
    """

    kind: str
    name: str
    path: str
    help_text: str
    label: str = ""

    @property
    def is_latency(self) -> bool:
        """Return whether the family is a latency, which settings can disable."""
        return self.path.endswith("_ns")

    def to_exposition(self, reports: Reports) -> ExpositionFamily:
        """Return the family with its samples."""
        keeps_name = self.kind != "counter" or self.name.startswith("nv_")
        name = self.name if keeps_name else f"{self.name}_total"
        family = ExpositionFamily(name, self.help_text, self.kind)
        for labels, report in reports:
            measurement = _find(report, self.path)
            if self.label:
                for label_value, count in measurement.items():
                    family.add({**labels, self.label: label_value}, count)
            else:
                family.add(labels, measurement // 1000 if self.is_latency else measurement)
        return family


def _find(report: dict[str, Any], path: str) -> Any:
    """Return the entry of a report at a path of keys, which are separated by dots."""
    entry: Any = report
    for key in path.split("."):
        entry = entry[key]
    return entry


def _report_families(prefix: str, *rows: tuple[str, ...]) -> tuple[ReportFamily, ...]:
    """Return a `ReportFamily` for each row; an empty path means the name without the prefix."""
    return tuple(
        ReportFamily(kind, prefix + name, path or name, *labels)
        for kind, name, path, *labels in rows
    )


_ALL_REQUESTS = "inference requests, all batch sizes"
_EXCLUDES_CACHED = "(does not include cached requests)"
_INCLUDES_CACHED = "(includes cached requests)"
_LATENCIES = (
    # each row: name, help text, and the counter of requests with the same duration
    ("request", f"inference request duration in microseconds {_INCLUDES_CACHED}", "success"),
    ("queue", f"inference queuing duration in microseconds {_INCLUDES_CACHED}", "queue"),
    (
        "compute_input",
        f"compute input duration in microseconds {_EXCLUDES_CACHED}",
        "compute_input",
    ),
    (
        "compute_infer",
        f"compute inference duration in microseconds {_EXCLUDES_CACHED}",
        "compute_infer",
    ),
    (
        *(
            "compute_output",
            f"inference compute output duration in microseconds {_EXCLUDES_CACHED}",
        ),
        "compute_output",
    ),
)
_TRITON_FAMILIES = _report_families(
    "",
    ("counter", "nv_inference_request_success", "success", f"Number of successful {_ALL_REQUESTS}"),
    (
        *("counter", "nv_inference_count", "inference_count"),
        f"Number of inferences performed {_EXCLUDES_CACHED}",
    ),
    (
        *("counter", "nv_inference_exec_count", "execution_count"),
        f"Number of model executions performed {_EXCLUDES_CACHED}",
    ),
    *(
        ("counter", f"nv_inference_{name}_duration_us", f"{counter}_ns", f"Cumulative {text}")
        for name, text, counter in _LATENCIES
    ),
    (
        *("gauge", "nv_inference_pending_request_count", "pending"),
        "Instantaneous number of pending requests awaiting execution per-model.",
    ),
)
# Families of models with a response cache.
_CACHE_FAMILIES = _report_families(
    "",
    ("counter", "nv_cache_num_hits_per_model", "cache_hit", "Number of cache hits per model"),
    ("counter", "nv_cache_num_misses_per_model", "cache_miss", "Number of cache misses per model"),
    *(
        (
            *("counter", f"nv_cache_{kind}_duration_per_model", f"cache_{kind}_ns"),
            f"Total cache {kind} duration per model, in microseconds",
        )
        for kind in ("hit", "miss")
    ),
    ("gauge", "shmserve_cache_bytes", "cache.bytes", "Bytes of responses in the cache of a model"),
    ("gauge", "shmserve_cache_entries", "cache.entries", "Responses in the cache of a model"),
)
# Gauges of the whole response cache: each is the sum over the models with a cache.
_TOTAL_CACHE_GAUGES = (
    # each row: name, help text, and the paths of the summands in a report
    ("entries", "Number of responses stored in response cache", ("cache.entries",)),
    ("lookups", "Number of cache lookups in response cache", ("cache_hit", "cache_miss")),
    ("hits", "Number of cache hits in response cache", ("cache_hit",)),
    ("misses", "Number of cache misses in response cache", ("cache_miss",)),
    ("evictions", "Number of cache evictions in response cache", ("cache.evicted",)),
)
_OWN_FAMILIES = _report_families(
    "shmserve_",
    ("counter", "workers_lost", "", "Deaths of instance processes that were serving"),
    ("counter", "retried", "", "Requests retried alone after their worker died"),
    ("counter", "overruns", "", "Executions that exceeded their time limit"),
    ("counter", "malformed", "", "Messages that were dropped because they were malformed"),
    (
        *("counter", "batches_closed", ""),
        *("Executions by the reason that limited their batch", "reason"),
    ),
    ("gauge", "instances", "", "Instances by state", "state"),
    ("counter", "instance_changes", "", "Instances added or removed by autoscaling", "change"),
    ("gauge", "executing_requests", "executing", "Requests in execution"),
    ("gauge", "open_sequences", "", "Open sequences"),
    ("counter", "copied_bytes", "", "Bytes of tensors that workers copied", "direction"),
)
_OWN_HISTOGRAMS = (
    ("request_seconds", "Time from arrival to response of a successful request"),
    ("queue_seconds", "Queue time of a successful request"),
    ("compute_seconds", "Duration of an execution, including input and output"),
    ("batch_size", "Batch size of an execution"),
)
_PADDING_COUNTERS = (
    ("shmserve_padded_elements", "Elements of padded inputs that models received"),
    ("shmserve_padding_elements", "Padding elements of padded inputs"),
)
_FAILURE_REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")


def triton_families(reports: Reports, *, latencies: bool) -> Iterator[ExpositionFamily]:
    """Yield Triton's counters and gauges; durations only with `latencies`.

    The families of the response cache are included if a model has one.
    """
    for family in _TRITON_FAMILIES:
        if latencies or not family.is_latency:
            yield family.to_exposition(reports)
    failures = ExpositionFamily(
        "nv_inference_request_failure", f"Number of failed {_ALL_REQUESTS}", "counter"
    )
    for labels, report in reports:
        for reason in _FAILURE_REASONS:
            # Triton counts the failure of a step and the resulting failure of the ensemble.
            weight = 2 if reason == "OTHER" and report.get("is_ensemble") else 1
            number = weight * report["failures"].get(reason, 0)
            failures.add({**labels, "reason": reason}, number)
    yield failures
    cached_reports = _select_cached(reports)
    for family in _CACHE_FAMILIES if cached_reports else ():
        if latencies or not family.is_latency:
            yield family.to_exposition(cached_reports)
    if cached_reports:
        yield from _total_cache_families([report for _, report in cached_reports])


def _total_cache_families(reports: list[dict[str, Any]]) -> Iterator[ExpositionFamily]:
    """Yield Triton's gauges of the server's response cache."""
    for name, text, paths in _TOTAL_CACHE_GAUGES:
        count = sum(_find(report, path) for report in reports for path in paths)
        yield _create_gauge(f"nv_cache_num_{name}", text, count)
    used, size = (sum(report["cache"][key] for report in reports) for key in ("bytes", "bound"))
    utilization = used / size if size else 0.0
    yield _create_gauge("nv_cache_util", "Cache utilization [0.0 - 1.0]", utilization)


def own_families(reports: Reports) -> Iterator[ExpositionFamily]:
    """Yield histograms, counters and gauges that Triton does not have."""
    for name, text in _OWN_HISTOGRAMS:
        yield histogram_family(f"shmserve_{name}", name, text, reports)
    for family in _OWN_FAMILIES:
        yield family.to_exposition(reports)
    yield from _padding_families(reports)


def summary_families(reports: Reports) -> Iterator[ExpositionFamily]:
    """Yield Triton's latency summaries of successful requests.

    The quantiles are those of the last minute. As in Triton, models with a response cache have no
    summary of the request duration.
    """
    cached_reports = _select_cached(reports)
    uncached_reports = [entry for entry in reports if not entry[1].get("cache")]
    for name, text, counter in _LATENCIES:
        full_name = f"nv_inference_{name}_summary_us"
        summarised_reports = uncached_reports if name == "request" else reports
        yield _summary_family(full_name, f"Summary of {text}", summarised_reports, name, counter)
    for name in ("cache_hit", "cache_miss") if cached_reports else ():
        text = f"Summary of {name.replace('_', ' ')} duration in microseconds"
        yield _summary_family(f"nv_{name}_summary_per_model", text, cached_reports, name, name)


def first_response_families(reports: Reports) -> Iterator[ExpositionFamily]:
    """Yield the histogram of times to first response, if there are decoupled models."""
    help_text = "Duration from request to first response in milliseconds"
    family = ExpositionFamily(FIRST_RESPONSE_FAMILY, help_text, "histogram")
    for labels, report in reports:
        histogram = report.get("first_response_ms")
        if histogram is None:
            continue
        for bound, cumulative in _cumulative_buckets(histogram):
            bucket_labels = {**labels, "le": str(bound).removesuffix(".0")}
            family.add(bucket_labels, cumulative, "_bucket")
        family.add(labels, cumulative, "_count")
        family.add(labels, histogram["sum"], "_sum")
    yield family


def _select_cached(reports: Reports) -> Reports:
    return [(labels, report) for labels, report in reports if report.get("cache")]


def _summary_family(
    full_name: str, help_text: str, reports: Reports, name: str, counter: str
) -> ExpositionFamily:
    family = ExpositionFamily(full_name, help_text, "summary")
    for labels, report in reports:
        count = report["success"]
        if counter in ("cache_hit", "cache_miss"):
            count = report[counter]
        elif counter.startswith("compute"):
            count -= report["cache_hit"]
        family.add(labels, count, "_count")
        family.add(labels, report[f"{counter}_ns"] // 1000, "_sum")
        for quantile, value in report.get("quantiles", {}).get(name, ()):
            rounded = float("nan") if value is None else round(value)
            family.add({**labels, "quantile": f"{quantile:g}"}, rounded)
    return family


def histogram_family(name: str, path: str, help_text: str, reports: Reports) -> ExpositionFamily:
    """Return a histogram family from the histogram at `path` of each report."""
    family = ExpositionFamily(name, help_text, "histogram")
    for labels, report in reports:
        histogram = report[path]
        for bound, cumulative in _cumulative_buckets(histogram):
            bound_text = bound if isinstance(bound, str) else repr(float(bound))
            family.add({**labels, "le": bound_text}, cumulative, "_bucket")
        family.add(labels, cumulative, "_count")
        family.add(labels, histogram["sum"], "_sum")
    return family


def _cumulative_buckets(histogram: dict[str, Any]) -> Iterator[tuple[float | str, int]]:
    """Yield the upper bound (the last one is "+Inf") and the cumulative count of each bucket."""
    return zip([*histogram["buckets"], "+Inf"], accumulate(histogram["counts"]), strict=True)


def _padding_families(reports: Reports) -> Iterator[ExpositionFamily]:
    """Yield two counters for each padded input; their ratio is the share of padding."""
    for index, (name, help_text) in enumerate(_PADDING_COUNTERS):
        family = ExpositionFamily(f"{name}_total", help_text, "counter")
        for labels, report in reports:
            for tensor, counts in report["padding"].items():
                family.add({**labels, "input": tensor}, counts[index])
        yield family


_GENERATIVE_FAMILIES = _report_families(
    "shmserve_llm_",
    ("counter", "requests", "", "Requests by finish reason", "outcome"),
    ("gauge", "requests_queued", "queued", "Sequences waiting for their first step"),
    ("gauge", "requests_running", "sequences.running", "Sequences in the batch"),
    ("gauge", "requests_swapped", "sequences.swapped", "Sequences swapped out to host blocks"),
    ("gauge", "batch_utilization", "utilization", "Rows of the step as a share of the maximum"),
    ("gauge", "kv_blocks", "blocks", "Blocks of the KV pool by state", "state"),
    ("counter", "preemption", "preemptions", "Preempted sequences", "mode"),
    ("counter", "swap_in", "swapped_in", "Blocks copied back from the host"),
    ("counter", "swap_out", "swapped_out", "Blocks copied to the host"),
    ("counter", "copy_on_write", "copied_on_write", "Shared blocks copied to be written"),
    ("counter", "recomputed_tokens", "recomputed", "Tokens discarded by preemption"),
    ("counter", "tokens_generated", "generated", "Tokens that were generated"),
    ("counter", "prefill_tokens", "prefilled", "Tokens of prompts that were computed"),
    ("counter", "decode_tokens", "decoded", "Tokens computed one by one, drafts too"),
    ("counter", "prefix_cache_queries", "prefix_queries", "Prompt tokens looked up in the cache"),
    ("counter", "prefix_cache_hits", "prefix_hits", "Prompt tokens found in the cache"),
    ("counter", "speculative_drafted", "drafted", "Tokens that were proposed"),
    ("counter", "speculative_accepted", "accepted", "Proposed tokens that were accepted"),
    ("gauge", "speculative_accept_rate", "accept_rate", "Share of proposals accepted"),
    ("gauge", "speculative_speedup", "speedup", "Tokens per row of a speculative step"),
    (
        *("counter", "step_seconds", "seconds"),
        *("Time of steps by phase, and of work outside of steps", "phase"),
    ),
    ("counter", "finished", "", "Sequences by finish reason", "reason"),
)
_GENERATIVE_HISTOGRAMS = (
    ("request_latency_seconds", "request_seconds", "Time from arrival to the last response"),
    ("batch_size", "batch_size", "Sequences in a step"),
    ("batch_tokens", "batch_tokens", "Tokens computed in a step"),
    ("iteration_latency_seconds", "iteration_seconds", "Time of a step in its worker"),
    ("scheduler_overhead_seconds", "scheduler_seconds", "Time to plan a step"),
    ("time_to_first_token_seconds", "first_token_seconds", "Time from arrival to the first token"),
    ("inter_token_latency_seconds", "inter_token_seconds", "Time between two tokens of a sequence"),
    ("prompt_tokens", "prompt_tokens", "Tokens of a prompt"),
    ("generation_tokens", "generation_tokens", "Tokens generated in a sequence"),
)


def generative_families(reports: Reports) -> Iterator[ExpositionFamily]:
    """Yield the families of generative models, if there are any."""
    generative_reports = [
        (labels, {**report, **_derive_values(report)})
        for labels, report in reports
        if "generated" in report
    ]
    if not generative_reports:
        return
    for family in _GENERATIVE_FAMILIES:
        yield family.to_exposition(generative_reports)
    for name, path, text in _GENERATIVE_HISTOGRAMS:
        yield histogram_family(f"shmserve_llm_{name}", path, text, generative_reports)


def _derive_values(report: dict[str, Any]) -> dict[str, Any]:
    gauges: dict[str, Any] = report["generation"]
    drafted, rows = report["drafted"], report["speculative_steps"]
    return {
        **gauges,
        "queued": gauges["sequences"]["waiting"] + report["pending"],
        "requests": {"success": report["success"], "failure": report["fail"]},
        "seconds": {phase: ns / 1e9 for phase, ns in report["phases"].items()},
        "accept_rate": report["accepted"] / drafted if drafted else 0.0,
        "speedup": 1 + report["accepted"] / rows if rows else 1.0,
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
        families = list(self._all_families(reports))
        server_names = {family.name for family in families}
        return (_exposition_text(families) + _model_families(reports, server_names)).encode()

    def _all_families(self, reports: list[dict[str, Any]]) -> Iterator[ExpositionFamily]:
        """Yield all families of the server."""
        settings, models = self._gateway.settings, self._gateway.models
        plain_reports: Reports = []
        tagged: Reports = []
        for report in reports:
            labels = {"model": str(report["name"]), "version": str(report["version"])}
            model = models.find(labels["model"], labels["version"])
            plain_reports.append((labels, report["shmserve"]))
            tagged.append((labels if model is None else labels | model.tags, report["shmserve"]))
        yield from triton_families(tagged, latencies=settings.counter_latencies)
        if settings.histogram_latencies:
            yield from first_response_families(tagged)
        if settings.summary_latencies:
            yield from summary_families(tagged)
        yield from self._load_families()
        yield from own_families(plain_reports)
        yield from generative_families(plain_reports)
        yield from self._region_families()
        yield from self._host_families()
        yield from _process_families()

    def _load_families(self) -> Iterator[ExpositionFamily]:
        failures, models = self._gateway.failures, self._gateway.models.all_versions()
        yield _create_family(
            *("gauge", "nv_model_load_duration_secs", "Model load time in seconds"),
            *(
                ({"model": model.name, "version": model.version, **model.tags}, model.load_seconds)
                for model in models
            ),
        )
        yield _create_family(
            *(
                "gauge",
                "shmserve_model_failed",
                "Model versions that do not serve: their load failed",
            ),
            *(({"model": name, "version": version}, 1) for name, version in failures.models),
        )
        yield _create_family(
            *("gauge", "shmserve_models", "Model versions by state"),
            ({"state": "failed"}, len(failures.models)),
            ({"state": "ready"}, sum(model.ready for model in models)),
        )
        name = "shmserve_load_failures_total"
        yield _create_family("counter", name, "Loads that failed", ({}, failures.count))

    def _region_families(self) -> Iterator[ExpositionFamily]:
        table = self._gateway.regions
        for kind, regions, text in (
            ("", table.named_regions(), "registered regions of shared memory"),
            (
                *("unnamed_", table.unnamed_regions()),
                "regions that shmserve.client shares, or that are unregistered but still in use",
            ),
        ):
            sizes = [region.byte_size for region in regions]
            yield _create_gauge(f"shmserve_shm_{kind}regions", f"Number of {text}", len(sizes))
            yield _create_gauge(f"shmserve_shm_{kind}region_bytes", f"Bytes of {text}", sum(sizes))

    def _host_families(self) -> Iterator[ExpositionFamily]:
        total, used = memory_bytes()
        yield _create_gauge(
            "nv_cpu_utilization", "CPU utilization rate [0.0 - 1.0]", self._cpu.read()
        )
        yield _create_gauge("nv_cpu_memory_total_bytes", "CPU total memory (RAM), in bytes", total)
        yield _create_gauge("nv_cpu_memory_used_bytes", "CPU used memory (RAM), in bytes", used)
        # Triton's pool of pinned memory does not exist here, because memory is pinned in place.
        for part in ("total", "used"):
            help_text = f"Pinned memory pool {part} memory size, in bytes"
            yield _create_gauge(f"nv_pinned_memory_pool_{part}_bytes", help_text, 0)


def _exposition_text(families: Iterable[ExpositionFamily]) -> str:
    # As in Triton, families without samples are omitted.
    shown_families = (family for family in families if family.samples)
    return "".join(f"{line}\n" for family in shown_families for line in family.lines())


def _label_sort_key(label: tuple[str, str]) -> tuple[bool, str]:
    return label[0] in _TRAILING_LABELS, label[0]


def _model_families(reports: list[dict[str, Any]], server_names: set[str]) -> str:
    parsed_reports = [
        model_metrics.parse(report["shmserve"].get("families", [])) for report in reports
    ]
    families = model_metrics.sum_families(parsed_reports)
    unique = {name: family for name, family in families.items() if name not in server_names}
    if len(unique) < len(families):
        logger.warning(
            "metrics of models that have the names of the server's metrics are not shown: %s",
            ", ".join(sorted(families.keys() - unique.keys())),
        )
    return model_metrics.exposition(unique)


_PROCESS_FAMILIES = (
    # each row: kind, name, help text, and the attribute of a process
    ("gauge", "shmserve_process_resident_bytes", "Resident memory of a process", "resident_bytes"),
    ("gauge", "shmserve_process_open_fds", "Open file descriptors of a process", "open_fds"),
    ("counter", "shmserve_process_cpu_seconds_total", "CPU time of a process", "cpu_seconds"),
)


def _process_families() -> Iterator[ExpositionFamily]:
    running = list(processes(os.getppid()))
    for kind, name, text, attribute in _PROCESS_FAMILIES:
        samples = (({"process": process.title}, getattr(process, attribute)) for process in running)
        yield _create_family(kind, name, text, *samples)


def _create_gauge(name: str, help_text: str, value: float) -> ExpositionFamily:
    return _create_family("gauge", name, help_text, ({}, value))


def _create_family(
    kind: str, name: str, help_text: str, *samples: tuple[dict[str, str], float]
) -> ExpositionFamily:
    family = ExpositionFamily(name, help_text, kind)
    for labels, value in samples:
        family.add(labels, value)
    return family
