"""The metric families of models that generate text, shmserve_llm_*, made of what their schedulers
report (shmserve/scheduler/statistics/generation_stats.py has what is counted)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client.core import Metric

from shmserve.gateway.api.metric_families import ReportFamily, Reports, histogram

_FAMILIES = tuple(
    ReportFamily(kind, f"shmserve_llm_{name}", path, text, label)
    for kind, name, path, text, label in (
        ("counter", "requests", "requests", "Requests by how they ended", "outcome"),
        ("gauge", "requests_queued", "queued", "Sequences that wait for their first step", ""),
        ("gauge", "requests_running", "sequences.running", "Sequences in the batch", ""),
        ("gauge", "requests_swapped", "sequences.swapped", "Sequences in the host's blocks", ""),
        (
            "gauge",
            "batch_utilization",
            "utilization",
            "Rows of the step, of the most there are",
            "",
        ),
        ("gauge", "kv_blocks", "blocks", "Blocks of the KV pool by state", "state"),
        ("counter", "preemption", "preemptions", "Sequences that made room for others", "mode"),
        ("counter", "swap_in", "swapped_in", "Blocks copied back from the host", ""),
        ("counter", "swap_out", "swapped_out", "Blocks copied to the host", ""),
        ("counter", "copy_on_write", "copied_on_write", "Shared blocks copied to be written", ""),
        ("counter", "recomputed_tokens", "recomputed", "Tokens thrown away by preemption", ""),
        ("counter", "tokens_generated", "generated", "Tokens that were generated", ""),
        ("counter", "prefill_tokens", "prefilled", "Tokens of prompts that were computed", ""),
        ("counter", "decode_tokens", "decoded", "Tokens computed one by one, drafts too", ""),
        ("counter", "prefix_cache_queries", "prefix_queries", "Prompt tokens looked for", ""),
        ("counter", "prefix_cache_hits", "prefix_hits", "Prompt tokens found in the cache", ""),
        ("counter", "speculative_drafted", "drafted", "Tokens that were proposed", ""),
        ("counter", "speculative_accepted", "accepted", "Proposed tokens that were accepted", ""),
        ("gauge", "speculative_accept_rate", "accept_rate", "Share of proposals accepted", ""),
        ("gauge", "speculative_speedup", "speedup", "Tokens a row of a speculative step", ""),
        ("counter", "step_seconds", "seconds", "Time of steps by phase, and beside them", "phase"),
        ("counter", "finished", "finished", "Sequences by why they ended", "reason"),
    )
)
_HISTOGRAMS = (
    ("request_latency_seconds", "request_seconds", "Time from arrival to the last response"),
    ("batch_size", "batch_size", "Sequences in a step"),
    ("batch_tokens", "batch_tokens", "Tokens computed in a step"),
    ("iteration_latency_seconds", "iteration_seconds", "Time of a step in its worker"),
    ("scheduler_overhead_seconds", "scheduler_seconds", "Time to plan a step"),
    ("time_to_first_token_seconds", "first_token_seconds", "From arrival to the first token"),
    ("inter_token_latency_seconds", "inter_token_seconds", "Between two tokens of a sequence"),
    ("prompt_tokens", "prompt_tokens", "Tokens of a prompt"),
    ("generation_tokens", "generation_tokens", "Tokens generated in a sequence"),
)


def families(reports: Reports) -> Iterator[Metric]:
    """The families of those models that generate text; nothing where there is none."""
    generative = [
        (labels, {**report, **_derived(report)})
        for labels, report in reports
        if "generated" in report
    ]
    if not generative:
        return
    for family in _FAMILIES:
        yield family.metric(generative)
    for name, path, text in _HISTOGRAMS:
        yield histogram(f"shmserve_llm_{name}", path, text, generative)


def _derived(report: dict[str, Any]) -> dict[str, Any]:
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
