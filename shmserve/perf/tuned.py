"""A candidate of the search as a model's configuration, and back (pure)."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shmserve.common.model_settings import STRATEGY, TARGET, Strategy
from shmserve.errors import InvalidArgument
from shmserve.perf.search import Candidate, Space, Trial

# The parameter that says how many threads an instance has, by backend.
_THREADS = {"pytorch": "INTRA_OP_THREAD_COUNT", "onnxruntime": "intra_op_thread_count"}
_DELAYS = (0.02, 0.1)  # parts of the target
_DEPTHS = (1, 2, 4)  # of what does not batch

Config = Mapping[str, Any]


def start(config: Config) -> Candidate:
    """The candidate that a configuration in force is. Raises InvalidArgument for a model whose
    requests are not for any instance, or that has none."""
    name = config["name"]
    for wrong, why in (
        (config.get("sequence_batching"), "its sequences belong to instances"),
        (config.get("ensemble_scheduling"), "it is an ensemble: tune the models of its steps"),
        (
            config.get("backend") == "llm",
            "engine.yaml has its settings (shmserve guide generation)",
        ),
    ):
        if wrong:
            raise InvalidArgument(f"model '{name}' cannot be tuned: {why}")
    batch = int(config.get("max_batch_size", 0))
    instances = sum(int(group["count"]) for group in config["instance_group"])
    if not batch or "dynamic_batching" not in config:
        return Candidate(instances, batch)
    delay_us = int(config["dynamic_batching"].get("max_queue_delay_microseconds", 0))
    strategy = _parameter(config, STRATEGY) or Strategy.PREFER_BATCH
    waits = strategy == Strategy.PREFER_BATCH and delay_us > 0
    return Candidate(instances, batch, str(strategy), delay_us, depth=1 if waits else 2)


def space(
    config: Config, target_ms: float, processors: int, most_instances: int, largest_batch: int
) -> Space:
    """What may be tried of a model; `largest_batch` 0: the configuration's."""
    batch = int(config.get("max_batch_size", 0))
    ways: list[Mapping[str, Any]] = []
    if batch:
        delays = [max(1, round(target_ms * 1000 * part)) for part in _DELAYS]
        ways += [
            {"strategy": str(Strategy.PREFER_LATENCY), "delay_us": 0, "depth": 2},
            *({"strategy": str(Strategy.PREFER_BATCH), "delay_us": d, "depth": 1} for d in delays),
            {"strategy": str(Strategy.ADAPTIVE), "delay_us": 0, "depth": 2},
        ]
    else:
        ways += [{"depth": depth} for depth in _DEPTHS]
    if config.get("backend") in _THREADS:
        ways += [{"threads": number} for number in _ladder(processors)]
    return Space(_ladder(most_instances), ways, (largest_batch or batch) if batch else 0)


def configured(config: Config, candidate: Candidate, target_ms: float) -> dict[str, Any]:
    """The configuration of a candidate: that of the model, but for what is tuned."""
    made = copy.deepcopy(dict(config))
    parameters = made.setdefault("parameters", {})
    groups = made["instance_group"]
    if candidate.instances != sum(int(group["count"]) for group in groups):
        made["instance_group"] = [{**groups[0], "count": candidate.instances}]
    if candidate.threads:
        parameters[_THREADS[made["backend"]]] = {"string_value": str(candidate.threads)}
    if candidate.batch:
        made["max_batch_size"] = candidate.batch
    if candidate.strategy:
        batching = made.setdefault("dynamic_batching", {})
        batching["preferred_batch_size"] = []
        batching["max_queue_delay_microseconds"] = candidate.delay_us
        parameters[STRATEGY] = {"string_value": candidate.strategy}
        parameters.pop(TARGET, None)
        if candidate.strategy == Strategy.ADAPTIVE:
            parameters[TARGET] = {"string_value": f"{target_ms:g}"}
    return made


def described(candidate: Candidate) -> str:
    """A candidate in a few words."""
    words = [f"{candidate.instances} instances"]
    if candidate.batch:
        words.append(f"batch {candidate.batch}")
    if candidate.strategy:
        words.append(candidate.strategy)
    if candidate.delay_us:
        words.append(f"{candidate.delay_us} us")
    if candidate.threads:
        words.append(f"{candidate.threads} threads")
    return ", ".join(words)


def table(trials: Sequence[Trial], target_ms: float) -> str:
    """A row for each run, in their order."""
    lines = [f"{'requests/s':>12}{'p99 ms':>10}{'in flight':>11}  configuration"]
    for trial in trials:
        late = "" if trial.p99_ms <= target_ms else "  above the target"
        failed = f"  {trial.errors} errors" if trial.errors else ""
        lines.append(
            f"{trial.per_second:>12,.1f}{trial.p99_ms:>10.2f}{trial.candidate.in_flight:>11}  "
            f"{described(trial.candidate)}{late}{failed}"
        )
    return "\n".join(lines)


def recommendation(config: Config, trials: Sequence[Trial], best: Trial, target_ms: float) -> str:
    """What to write into config.pbtxt, and in comments the figures that say why."""
    before = trials[0]
    lines = [
        f"# {config['name']}, p99 within {target_ms:g} ms: {best.per_second:,.1f} requests/s, p99 "
        f"{best.p99_ms:.2f} ms, with {best.candidate.in_flight} in flight",
        f"# as it was: {before.per_second:,.1f} requests/s, p99 {before.p99_ms:.2f} ms, with "
        f"{before.candidate.in_flight} in flight",
        *(f"# {line}" for line in table(trials, target_ms).splitlines()),
        *_fields(configured(config, best.candidate, target_ms), best.candidate),
    ]
    return "\n".join(lines) + "\n"


def _fields(made: Mapping[str, Any], candidate: Candidate) -> Iterator[str]:
    if candidate.batch:
        yield f"max_batch_size: {candidate.batch}"
    if candidate.strategy:
        delay = f"max_queue_delay_microseconds: {candidate.delay_us} " if candidate.delay_us else ""
        yield f"dynamic_batching {{ {delay}}}"
    for group in made["instance_group"]:
        gpus = f" gpus: {group['gpus']}" if group.get("gpus") else ""
        yield f"instance_group {{ kind: {group['kind']} count: {group['count']}{gpus} }}"
    for name in (STRATEGY, TARGET, *_THREADS.values()):
        text = _parameter(made, name)
        if text and text != Strategy.PREFER_BATCH:  # which is the default
            yield f'parameters {{ key: "{name}" value {{ string_value: {json.dumps(text)} }} }}'


def _parameter(config: Config, name: str) -> str:
    return str(config.get("parameters", {}).get(name, {}).get("string_value", ""))


def _ladder(most: int) -> list[int]:
    """1, 2, 4, ... and the most."""
    return sorted({*(2**power for power in range(most.bit_length()) if 2**power <= most), most})
