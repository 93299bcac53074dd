"""The search for the best configuration, on models whose best can be computed."""

import random
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from shmserve.errors import InvalidArgument
from shmserve.model_config import normalise, to_dict, validate
from shmserve.perf import report, search
from shmserve.perf.search import Candidate, Search, SearchSpace, Trial
from tests.rigs.marked_configs import parse_pbtxt

TARGET_MS = 30.0
MAX_BATCH = 64
VARIANTS: tuple[Mapping[str, Any], ...] = (
    {"strategy": "prefer_latency", "delay_us": 0, "depth": 2},
    {"strategy": "prefer_batch", "delay_us": 600, "depth": 1},
    {"strategy": "prefer_batch", "delay_us": 3000, "depth": 1},
)
SEARCH_SPACE = SearchSpace((1, 2, 3, 4, 6, 8), VARIANTS, MAX_BATCH)
START_CANDIDATE = Candidate(1, 8, "prefer_latency")


def model(
    a: float, b: float, cores: int, noise: float = 0.0, seed: int = 0
) -> Callable[[Candidate], Trial]:
    """Return throughput and latency of a model of a + b * rows ms on some processors."""
    rng = random.Random(seed)

    def measure(candidate: Candidate) -> Trial:
        instances, rows = candidate.instances, max(candidate.batch, 1)
        took_ms = (a + b * rows) * max(instances / cores, 1)
        latency = took_ms * candidate.depth
        if candidate.depth == 1 and candidate.delay_us < 500:  # the delay is too short for all
            latency *= 2
        noises = [1 + rng.uniform(-noise, noise) for _ in range(2)]
        return Trial(candidate, instances * rows / took_ms * 1000 * noises[0], latency * noises[1])

    return measure


def optimum(measure: Callable[[Candidate], Trial]) -> float:
    """Return the highest throughput of all configurations, each of which is tried."""
    trials = (
        measure(replace(START_CANDIDATE, instances=instances, batch=batch, **variant))
        for instances in SEARCH_SPACE.instances
        for batch in range(1, MAX_BATCH + 1)
        for variant in VARIANTS
    )
    return max(trial.per_second for trial in trials if trial.p99_ms <= TARGET_MS)


@pytest.mark.parametrize("cores", [1, 2, 4, 8])
@pytest.mark.parametrize(("a", "b"), [(4, 0.4), (1, 1), (10, 0.1), (0.5, 3), (12, 2), (28, 0.5)])
def test_the_search_finds_the_best_in_few_runs(a: float, b: float, cores: int) -> None:
    measure = model(a, b, cores)
    search = Search(measure, TARGET_MS, SEARCH_SPACE, 60)
    best_trial = search.run(START_CANDIDATE)
    assert best_trial is not None and best_trial.p99_ms <= TARGET_MS
    assert best_trial.per_second >= 0.95 * optimum(measure)
    assert len(search.trials) <= 40


@pytest.mark.parametrize("seed", range(20))
def test_noise_costs_little(seed: int) -> None:
    search = Search(model(4, 0.4, 2, 0.02, seed), TARGET_MS, SEARCH_SPACE, 60)
    best_trial = search.run(START_CANDIDATE)
    assert best_trial is not None
    assert model(4, 0.4, 2)(best_trial.candidate).per_second >= 0.9 * optimum(model(4, 0.4, 2))


def test_the_search_stays_below_a_cliff_of_execution_time() -> None:
    smooth = model(4, 0.1, 1)

    def measure(candidate: Candidate) -> Trial:
        trial = smooth(candidate)
        slower = 2.5 if candidate.batch > 16 else 1
        return trial._replace(per_second=trial.per_second / slower, p99_ms=trial.p99_ms * slower)

    best_trial = Search(measure, TARGET_MS, SEARCH_SPACE, 60).run(START_CANDIDATE)
    assert best_trial is not None and best_trial.candidate.batch == 16


def test_models_without_batching_get_more_instances() -> None:
    space = SearchSpace((1, 2, 4, 8), [{"depth": depth} for depth in (1, 2, 4)], 0)
    search = Search(model(4, 1, 4), TARGET_MS, space, 40)
    best_trial = search.run(Candidate(1, 0))
    assert best_trial is not None
    assert (best_trial.candidate.instances, best_trial.candidate.batch) == (4, 0)
    assert all(trial.candidate.batch == 0 for trial in search.trials.values())


def test_an_unreachable_target_is_reported() -> None:
    search = Search(model(40, 1, 2), TARGET_MS, SEARCH_SPACE, 40)
    assert search.run(START_CANDIDATE) is None and search.trials


def test_failed_requests_are_no_throughput() -> None:
    measure = model(4, 0.4, 2)
    fails = lambda candidate: measure(candidate)._replace(errors=int(candidate.batch > 10))  # noqa: E731
    best_trial = Search(fails, TARGET_MS, SEARCH_SPACE, 60).run(START_CANDIDATE)
    assert best_trial is not None and 8 <= best_trial.candidate.batch <= 10


@pytest.mark.parametrize("max_runs", [1, 5, 12])
def test_the_number_of_runs_is_bounded(max_runs: int) -> None:
    search = Search(model(4, 0.4, 2), TARGET_MS, SEARCH_SPACE, max_runs)
    search.run(START_CANDIDATE)
    assert len(search.trials) == max_runs


def test_the_best_trial_is_repeated_and_may_be_rejected() -> None:
    measure = model(4, 0.4, 1)
    measurements: dict[Candidate, int] = {}
    lucky_trial = Search(measure, TARGET_MS, SEARCH_SPACE, 60).run(START_CANDIDATE)
    assert lucky_trial is not None

    def measure_once(candidate: Candidate) -> Trial:
        measurements[candidate] = measurements.get(candidate, 0) + 1
        is_repeated = candidate == lucky_trial.candidate and measurements[candidate] > 1
        return measure(candidate)._replace(p99_ms=99.0) if is_repeated else measure(candidate)

    best_trial = Search(measure_once, TARGET_MS, SEARCH_SPACE, 60).run(START_CANDIDATE)
    assert best_trial is not None and best_trial.candidate != lucky_trial.candidate
    assert measurements[best_trial.candidate] == 2


def test_a_best_run_that_is_slower_when_repeated_is_not_preferred() -> None:
    rates = {4: [100.0], 8: [200.0, 200.0], 16: [300.0, 150.0]}

    def measure(candidate: Candidate) -> Trial:
        return Trial(candidate, rates.get(candidate.batch, [0.0]).pop(0), 1.0)

    best_trial = Search(measure, TARGET_MS, SearchSpace((1,), (), 16), 60).run(Candidate(1, 4))
    assert best_trial is not None
    assert (best_trial.candidate.batch, best_trial.per_second) == (8, 200.0)


TENSORS = """
input { name: "I" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "O" data_type: TYPE_FP32 dims: [ 4 ] }
"""
BATCHING = f"""
backend: "python" max_batch_size: 8 dynamic_batching {{ preferred_batch_size: 4 }}
instance_group {{ kind: KIND_CPU count: 2 }} {TENSORS}
"""


def normalised(text: str) -> dict[str, Any]:
    return to_dict(normalise(parse_pbtxt(text), "m", 0))


CONFIG = normalised(BATCHING)


@pytest.mark.parametrize(
    "candidate",
    [
        Candidate(2, 8, "prefer_batch"),
        Candidate(1, 32, "prefer_batch", 600, depth=1),
        Candidate(4, 1, "prefer_latency"),
        Candidate(1, 5, "adaptive"),
    ],
    ids=search.describe,
)
def test_a_candidate_round_trips_as_a_configuration(candidate: Candidate) -> None:
    configured = search.with_candidate(CONFIG, candidate, 12.5)
    assert search.current_candidate(configured) == candidate
    best = Trial(candidate, 100.0, 9.0)
    text = search.recommendation(CONFIG, [best._replace(per_second=50.0), best], best, 12.5)
    assert "p99 within 12.5 ms: 100.0 requests/s" in text
    assert "before: 50.0 requests/s" in text
    config = normalise(parse_pbtxt(f'backend: "python" {TENSORS}\n{text}'), "m", 0)
    validate(config, gpu_count=0, is_complete=True)
    assert search.current_candidate(to_dict(config)) == candidate
    assert ("target_p99_ms" in text) == (candidate.strategy == "adaptive")
    assert normalised(BATCHING) == CONFIG  # the former configuration is not changed


def test_models_without_batching_keep_that_setting() -> None:
    config = normalised(f'backend: "onnxruntime" platform: "onnxruntime_onnx" {TENSORS}')
    start = search.current_candidate(config)
    assert (start.batch, start.strategy) == (0, "")
    space = search.search_space(config, 30, 4, 3, 64)
    assert (space.instances, space.largest_batch) == ([1, 2, 3], 0)
    assert [v.get("threads") for v in space.variants if "threads" in v] == [1, 2, 4]
    configured = search.with_candidate(config, replace(start, instances=3, threads=2), 30)
    assert configured["parameters"]["intra_op_thread_count"] == {"string_value": "2"}
    assert configured["instance_group"][0]["count"] == 3
    assert "dynamic_batching" not in configured


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"sequence_batching": {"direct": {}}}, "its sequences"),
        ({"ensemble_scheduling": {"step": []}}, "tune the models of its steps"),
        ({"backend": "llm"}, "engine.yaml"),
    ],
)
def test_models_that_cannot_be_tuned_are_rejected(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidArgument, match=f"model 'm' cannot be tuned: .*{reason}"):
        search.current_candidate({**CONFIG, **fields})


def test_the_picture_has_every_run_and_the_target() -> None:
    trials = [Trial(Candidate(1, n), 100.0 * n, 10.0 * n) for n in range(1, 6)]
    failed_trial = Trial(Candidate(1, 9), 0.0, float("inf"), 1)
    root = ET.fromstring(report.draw_trials("a & b", [*trials, failed_trial], 30.0))
    circles = [element for element in root.iter() if element.tag.endswith("circle")]
    assert len(circles) == len(trials) + 2
    assert sum(element.tag.endswith("polyline") for element in root.iter()) == 1


def test_descriptions_of_candidates_use_correct_plurals() -> None:
    start = replace(START_CANDIDATE, batch=0, strategy="", delay_us=0)
    assert search.describe(replace(start, instances=1, threads=1)) == "1 instance, 1 thread"
    assert search.describe(replace(start, instances=2, threads=3)) == "2 instances, 3 threads"
