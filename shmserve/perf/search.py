"""The search for a configuration that answers most requests a second within a latency target, in
few runs (pure: `measure` runs one).

Coordinate descent (Wright, Coordinate descent algorithms, 2015): instances, then the ways to make
batches and to use threads, and once more where that gained anything. For each point of these it
finds the largest batch within the target by exponential and binary search (Bentley and Yao, An
almost optimal algorithm for unbounded searching, 1976): with as many requests in flight as batches
have room for, latency and throughput both grow with the batch. So a batch that is too slow and does
not answer more than the best that is known ends its search: smaller ones answer less.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from shmserve.errors import InvalidArgument
from shmserve.ipc.model_settings import STRATEGY, TARGET, Strategy

_GAIN = 1.02  # what is less is noise
_NEAR = 1.04  # sizes of batches that need not be told apart
_FALL = 0.9  # of the throughput, after which larger batches are not tried
_SWEEPS = 2
# The parameter that says how many threads an instance has, by backend.
_THREADS = {"pytorch": "INTRA_OP_THREAD_COUNT", "onnxruntime": "intra_op_thread_count"}
_DELAYS = (0.02, 0.1)  # parts of the target
_DEPTHS = (1, 2, 4)  # of what does not batch

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A configuration, and how it is loaded.

    `batch` 0: it does not batch; `strategy` "": what the model has; `threads` 0: as many as it has.
    `depth`: requests in flight for each row of a batch: 1 where a batch waits until it is full, 2
    where the next one is to fill while one is executed.
    """

    instances: int
    batch: int
    strategy: str = ""
    delay_us: int = 0
    threads: int = 0
    depth: int = 2

    @property
    def in_flight(self) -> int:
        """The requests that it is measured with."""
        return self.instances * max(self.batch, 1) * self.depth


class Trial(NamedTuple):
    """What a run came to."""

    candidate: Candidate
    per_second: float
    p99_ms: float
    errors: int = 0


@dataclass(frozen=True, slots=True)
class Space:
    """What may be tried: numbers of instances, ascending; ways to make batches, or to use threads,
    as fields of a candidate; and sizes of batches, up to the largest."""

    instances: Sequence[int]
    ways: Sequence[Mapping[str, Any]]
    largest_batch: int


class _Spent(Exception):
    """There have been as many runs as there may be."""


class Search:
    """One search. `trials` are its runs, in their order."""

    def __init__(
        self, measure: Callable[[Candidate], Trial], target_ms: float, space: Space, most_runs: int
    ) -> None:
        self.trials: dict[Candidate, Trial] = {}
        self._measure = measure
        self._target_ms = target_ms
        self._space = space
        self._most_runs = most_runs

    def holds(self, trial: Trial) -> bool:
        """Whether it is within the target."""
        return trial.p99_ms <= self._target_ms and not trial.errors

    @property
    def best(self) -> Trial | None:
        """What answers most within the target; None where nothing is."""
        within = filter(self.holds, self.trials.values())
        return max(within, key=lambda trial: trial.per_second, default=None)

    def run(self, start: Candidate) -> Trial | None:
        """Search from `start`, which is measured first; the best, measured once more. None: nothing
        that was tried is within the target."""
        try:
            self._largest_batch(start)
            for _ in range(_SWEEPS):
                before = self._reached
                self._sweep(start)
                if self._reached <= before * _GAIN:
                    break
        except _Spent:
            pass
        return self._confirmed()

    @property
    def _reached(self) -> float:
        return self.best.per_second if self.best else 0.0

    def _from(self, start: Candidate) -> Candidate:
        return self.best.candidate if self.best else start

    def _sweep(self, start: Candidate) -> None:
        here = self._from(start).instances
        more = [number for number in self._space.instances if number > here]
        fewer = [number for number in self._space.instances if number < here]
        if self.best and not self._climb(start, more):
            self._climb(start, fewer[::-1])
        for way in self._space.ways:
            self._largest_batch(replace(self._from(start), **way))

    def _climb(self, start: Candidate, ahead: Sequence[int]) -> bool:
        """Take these numbers of instances while that gains; whether it did."""
        for taken, number in enumerate(ahead):
            before = self._reached
            self._largest_batch(replace(self._from(start), instances=number))
            if self._reached <= before * _GAIN:
                return taken > 0
        return bool(ahead)

    def _largest_batch(self, at: Candidate) -> None:
        """Try batches, from that of `at`, for the largest within the target."""
        low, high, size, peak = 0, self._space.largest_batch + 1, at.batch, 0.0
        while True:
            trial, known = self._try(replace(at, batch=size)), self._reached
            if self.holds(trial):
                low, fell = size, trial.per_second < peak * _FALL
                peak = max(peak, trial.per_second)
                if fell:
                    return
            else:
                high = size
                if not trial.errors and trial.per_second <= known * _GAIN:
                    return
            size = self._between(low, high) if at.batch else 0
            if not size:
                return

    def _between(self, low: int, high: int) -> int:
        """The size to try next where `low` is within the target (0: none is known), and `high` is
        not, or more than may be; 0: none."""
        most = self._space.largest_batch
        if not low:
            return high // 2
        if high > most:
            return min(low * 2, most) if low < most else 0
        if high - low <= 1 or high <= low * _NEAR:
            return 0
        return min(max(round(math.sqrt(low * high)), low + 1), high - 1)

    def _try(self, candidate: Candidate) -> Trial:
        if candidate not in self.trials:
            if len(self.trials) >= self._most_runs:
                raise _Spent
            self.trials[candidate] = self._measure(candidate)
        return self.trials[candidate]

    def _confirmed(self) -> Trial | None:
        """The best that is within the target once more."""
        while (best := self.best) is not None:
            again = self.trials[best.candidate] = self._measure(best.candidate)
            if self.holds(again):
                return again
        return None


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
