"""The search for the configuration with the highest throughput within a latency target.

The method is coordinate descent (Wright, Coordinate descent algorithms, 2015): over the number of
instances, then over the batching methods and thread counts. A second sweep follows if the first one
increased the throughput. At each point, exponential and binary search finds the largest batch size
within the target (Bentley and Yao, An almost optimal algorithm for unbounded searching, 1976).

With as many requests in flight as fit into the batches, latency and throughput both grow with the
batch size. A batch size that misses the target without exceeding the best throughput therefore ends
its search, since smaller batches have a lower throughput.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, NamedTuple

from shmserve.errors import InvalidArgument
from shmserve.ipc.model_spec import STRATEGY_PARAMETER, TARGET_PARAMETER, Strategy

_MIN_GAIN = 1.02  # a smaller increase of the throughput counts as noise
_EQUAL_SIZE_RATIO = 1.04  # ratio up to which batch sizes are considered equal
_MIN_SHARE_OF_PEAK = 0.9  # share of the best throughput below which larger batches are not tried
_MAX_SWEEPS = 2
# The parameter for the number of threads per instance, by backend.
_THREAD_PARAMETERS = {"pytorch": "INTRA_OP_THREAD_COUNT", "onnxruntime": "intra_op_thread_count"}
_DELAY_SHARES = (0.02, 0.1)  # queue delays to try, as shares of the latency target
_DEPTHS = (1, 2, 4)  # requests in flight per instance of models that do not batch

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A configuration and the load to measure it with.

    Attributes:
        instances: The number of instances.
        batch: The maximum batch size; 0: no batching.
        strategy: The batching strategy; "": as in the model's configuration.
        delay_us: The maximum queue delay.
        threads: The number of threads per instance; 0: as in the model's configuration.
        depth: The number of full batches (or of requests without batching) in flight per instance:
            1 if a batch waits until it is full, 2 if the next one fills during an execution.
    """

    instances: int
    batch: int
    strategy: str = ""
    delay_us: int = 0
    threads: int = 0
    depth: int = 2

    @property
    def in_flight(self) -> int:
        """Return the number of requests in flight during the measurement."""
        return self.instances * max(self.batch, 1) * self.depth


class Trial(NamedTuple):
    """The measured throughput, p99 latency and number of errors of a candidate."""

    candidate: Candidate
    per_second: float  # successful requests per second
    p99_ms: float
    errors: int = 0  # number of failed requests


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """The configurations among which a search selects.

    Attributes:
        instances: Numbers of instances, ascending.
        variants: Alternative batching methods or thread counts, as fields of a candidate.
        largest_batch: The largest batch size.
    """

    instances: Sequence[int]
    variants: Sequence[Mapping[str, Any]]
    largest_batch: int


class _OutOfTrials(Exception):
    """Raised when the maximum number of trials is reached."""


@dataclass(slots=True, eq=False)
class Search:
    """A search for the best configuration; `trials` are its measurements, at most `_max_runs`."""

    _measure: Callable[[Candidate], Trial]  # measures a candidate
    _target_ms: float
    _space: SearchSpace
    _max_runs: int
    trials: dict[Candidate, Trial] = field(init=False, default_factory=dict)  # by candidate

    def meets_target(self, trial: Trial) -> bool:
        """Check whether a trial meets the target without errors."""
        return trial.p99_ms <= self._target_ms and not trial.errors

    @property
    def best(self) -> Trial | None:
        """Return the trial with the highest throughput within the target, or None."""
        trials_within = filter(self.meets_target, self.trials.values())
        return max(trials_within, key=attrgetter("per_second"), default=None)

    def run(self, start: Candidate) -> Trial | None:
        """Search from `start`, which is measured first.

        Returns:
            The best trial, measured a second time; None if no candidate meets the target.
        """
        try:
            self._search_batch(start)
            for _ in range(_MAX_SWEEPS):
                previous_rate = self._best_rate
                self._sweep(start)
                if self._best_rate <= previous_rate * _MIN_GAIN:
                    break
        except _OutOfTrials:
            pass
        return self._confirm_best()

    @property
    def _best_rate(self) -> float:
        return self.best.per_second if self.best else 0.0

    def _best_candidate(self, start: Candidate) -> Candidate:
        return self.best.candidate if self.best else start

    def _sweep(self, start: Candidate) -> None:
        instances = self._best_candidate(start).instances
        larger_counts = [number for number in self._space.instances if number > instances]
        smaller_counts = [number for number in self._space.instances if number < instances]
        if self.best and not self._try_instances(start, larger_counts):
            self._try_instances(start, smaller_counts[::-1])
        for settings in self._space.variants:
            self._search_batch(replace(self._best_candidate(start), **settings))

    def _try_instances(self, start: Candidate, counts: Sequence[int]) -> bool:
        """Try these numbers of instances while the throughput grows; return whether it grew."""
        for step_count, count in enumerate(counts):
            previous_rate = self._best_rate
            self._search_batch(replace(self._best_candidate(start), instances=count))
            if self._best_rate <= previous_rate * _MIN_GAIN:
                return step_count > 0
        return bool(counts)

    def _search_batch(self, base: Candidate) -> None:
        """Search for the largest batch size within the target, starting with that of `base`."""
        low, high, batch_size, peak_rate = 0, self._space.largest_batch + 1, base.batch, 0.0
        while True:
            trial, previous_rate = self._run_trial(replace(base, batch=batch_size)), self._best_rate
            if self.meets_target(trial):
                low, throughput_fell = batch_size, trial.per_second < peak_rate * _MIN_SHARE_OF_PEAK
                peak_rate = max(peak_rate, trial.per_second)
                if throughput_fell:
                    return
            else:
                high = batch_size
                if not trial.errors and trial.per_second <= previous_rate * _MIN_GAIN:
                    return
            batch_size = self._next_size(low, high) if base.batch else 0
            if not batch_size:
                return

    def _next_size(self, low: int, high: int) -> int:
        """Return the batch size to try next; 0: the search is finished.

        Args:
            low: The largest size known to meet the target; 0: none.
            high: The smallest size that misses the target or exceeds the maximum.
        """
        max_size = self._space.largest_batch
        if not low:
            return high // 2
        if high > max_size:
            return min(low * 2, max_size) if low < max_size else 0
        if high - low <= 1 or high <= low * _EQUAL_SIZE_RATIO:
            return 0
        return min(max(round(math.sqrt(low * high)), low + 1), high - 1)

    def _run_trial(self, candidate: Candidate) -> Trial:
        if candidate not in self.trials:
            if len(self.trials) >= self._max_runs:
                raise _OutOfTrials
            self.trials[candidate] = self._measure(candidate)
        return self.trials[candidate]

    def _confirm_best(self) -> Trial | None:
        """Return the best trial, after the best candidates were measured a second time."""
        measured_twice: set[Candidate] = set()
        while (best_trial := self.best) is not None and best_trial.candidate not in measured_twice:
            measured_twice.add(best_trial.candidate)
            self.trials[best_trial.candidate] = self._measure(best_trial.candidate)
        return best_trial


def current_candidate(config: Config) -> Candidate:
    """Return the candidate that corresponds to a model's current configuration.

    Raises:
        InvalidArgument: The model cannot be tuned.
    """
    name = config["name"]
    for is_set, reason in (
        (config.get("sequence_batching"), "each of its sequences is bound to an instance"),
        (config.get("ensemble_scheduling"), "it is an ensemble: tune the models of its steps"),
        (
            config.get("backend") == "llm",
            "engine.yaml has its settings (shmserve guide generation)",
        ),
    ):
        if is_set:
            raise InvalidArgument(f"model '{name}' cannot be tuned: {reason}")
    batch = int(config.get("max_batch_size", 0))
    instances = sum(int(group["count"]) for group in config["instance_group"])
    if not batch or "dynamic_batching" not in config:
        return Candidate(instances, batch)
    delay_us = int(config["dynamic_batching"].get("max_queue_delay_microseconds", 0))
    strategy = _parameter(config, STRATEGY_PARAMETER) or Strategy.PREFER_BATCH
    waits_for_batch = strategy == Strategy.PREFER_BATCH and delay_us > 0
    return Candidate(instances, batch, str(strategy), delay_us, depth=1 if waits_for_batch else 2)


def search_space(
    config: Config, target_ms: float, cpu_count: int, max_instances: int, largest_batch: int
) -> SearchSpace:
    """Return the search space of a model, with at most `max_instances` instances.

    `largest_batch` bounds the batch size; 0: the configuration's maximum. `cpu_count` bounds the
    number of threads.
    """
    batch = int(config.get("max_batch_size", 0))
    variants: list[Mapping[str, Any]] = []
    if batch:
        delays = [max(1, round(target_ms * 1000 * share)) for share in _DELAY_SHARES]
        variants += [
            {"strategy": str(Strategy.PREFER_LATENCY), "delay_us": 0, "depth": 2},
            *({"strategy": str(Strategy.PREFER_BATCH), "delay_us": d, "depth": 1} for d in delays),
            {"strategy": str(Strategy.ADAPTIVE), "delay_us": 0, "depth": 2},
        ]
    else:
        variants += [{"depth": depth} for depth in _DEPTHS]
    if config.get("backend") in _THREAD_PARAMETERS:
        variants += [{"threads": number} for number in _powers(cpu_count)]
    return SearchSpace(_powers(max_instances), variants, (largest_batch or batch) if batch else 0)


def with_candidate(config: Config, candidate: Candidate, target_ms: float) -> dict[str, Any]:
    """Return the model's configuration with a candidate's settings."""
    result = copy.deepcopy(dict(config))
    parameters = result.setdefault("parameters", {})
    groups = result["instance_group"]
    if candidate.instances != sum(int(group["count"]) for group in groups):
        result["instance_group"] = [{**groups[0], "count": candidate.instances}]
    if candidate.threads:
        parameters[_THREAD_PARAMETERS[result["backend"]]] = {"string_value": str(candidate.threads)}
    if candidate.batch:
        result["max_batch_size"] = candidate.batch
    if candidate.strategy:
        batching = result.setdefault("dynamic_batching", {})
        batching["preferred_batch_size"] = []
        batching["max_queue_delay_microseconds"] = candidate.delay_us
        parameters[STRATEGY_PARAMETER] = {"string_value": candidate.strategy}
        parameters.pop(TARGET_PARAMETER, None)
        if candidate.strategy == Strategy.ADAPTIVE:
            parameters[TARGET_PARAMETER] = {"string_value": f"{target_ms:g}"}
    return result


def describe(candidate: Candidate) -> str:
    """Return the settings of a candidate as text: "2 instances, batch 8, 100 us"."""
    phrases = [_with_count(candidate.instances, "instance")]
    if candidate.batch:
        phrases.append(f"batch {candidate.batch}")
    if candidate.strategy:
        phrases.append(candidate.strategy)
    if candidate.delay_us:
        phrases.append(f"{candidate.delay_us} us")
    if candidate.threads:
        phrases.append(_with_count(candidate.threads, "thread"))
    return ", ".join(phrases)


def _with_count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def format_table(trials: Sequence[Trial], target_ms: float) -> str:
    """Return a table with a row for each trial, in order."""
    lines = [f"{'requests/s':>12}{'p99 ms':>10}{'in flight':>11}  configuration"]
    for trial in trials:
        note = "" if trial.p99_ms <= target_ms else "  above the target"
        failed_text = f"  {trial.errors} errors" if trial.errors else ""
        lines.append(
            f"{trial.per_second:>12,.1f}{trial.p99_ms:>10.2f}{trial.candidate.in_flight:>11}  "
            f"{describe(trial.candidate)}{note}{failed_text}"
        )
    return "\n".join(lines)


def recommendation(config: Config, trials: Sequence[Trial], best: Trial, target_ms: float) -> str:
    """Return the recommended fields for config.pbtxt, with the measurements as comments."""
    before = trials[0]
    lines = [
        f"# {config['name']}, p99 within {target_ms:g} ms: {best.per_second:,.1f} requests/s, p99 "
        f"{best.p99_ms:.2f} ms, with {best.candidate.in_flight} in flight",
        f"# before: {before.per_second:,.1f} requests/s, p99 {before.p99_ms:.2f} ms, with "
        f"{before.candidate.in_flight} in flight",
        *(f"# {line}" for line in format_table(trials, target_ms).splitlines()),
        *_fields(with_candidate(config, best.candidate, target_ms), best.candidate),
    ]
    return "\n".join(lines) + "\n"


def _fields(config: Mapping[str, Any], candidate: Candidate) -> Iterator[str]:
    if candidate.batch:
        yield f"max_batch_size: {candidate.batch}"
    if candidate.strategy:
        delay = f"max_queue_delay_microseconds: {candidate.delay_us} " if candidate.delay_us else ""
        yield f"dynamic_batching {{ {delay}}}"
    for group in config["instance_group"]:
        gpus_text = f" gpus: {group['gpus']}" if group.get("gpus") else ""
        yield f"instance_group {{ kind: {group['kind']} count: {group['count']}{gpus_text} }}"
    for name in (STRATEGY_PARAMETER, TARGET_PARAMETER, *_THREAD_PARAMETERS.values()):
        text = _parameter(config, name)
        if text and text != Strategy.PREFER_BATCH:  # the default is omitted
            yield f'parameters {{ key: "{name}" value {{ string_value: {json.dumps(text)} }} }}'


def _parameter(config: Config, name: str) -> str:
    return str(config.get("parameters", {}).get(name, {}).get("string_value", ""))


def _powers(limit: int) -> list[int]:
    """Return 1, 2, 4, ... and `limit`."""
    return sorted({*(2**power for power in range(limit.bit_length()) if 2**power <= limit), limit})
