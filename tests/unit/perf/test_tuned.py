"""A candidate of the search as a configuration, and back; what may be tried; what is written."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace
from typing import Any

import pytest

from shmserve.errors import InvalidArgument
from shmserve.model_config import normalise, parse_pbtxt, to_dict, validate
from shmserve.perf import plot, tuned
from shmserve.perf.search import Candidate, Trial

IO = """
input { name: "I" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "O" data_type: TYPE_FP32 dims: [ 4 ] }
"""
BATCHING = f"""
backend: "python" max_batch_size: 8 dynamic_batching {{ preferred_batch_size: 4 }}
instance_group {{ kind: KIND_CPU count: 2 }} {IO}
"""


def in_force(text: str) -> dict[str, Any]:
    return to_dict(normalise(parse_pbtxt(text), "m", 0))


CONFIG = in_force(BATCHING)


@pytest.mark.parametrize(
    "candidate",
    [
        Candidate(2, 8, "prefer_batch"),
        Candidate(1, 32, "prefer_batch", 600, depth=1),
        Candidate(4, 1, "prefer_latency"),
        Candidate(1, 5, "adaptive"),
    ],
    ids=tuned.described,
)
def test_a_candidate_is_a_valid_configuration_and_back(candidate: Candidate) -> None:
    made = tuned.configured(CONFIG, candidate, 12.5)
    assert tuned.start(made) == candidate
    best = Trial(candidate, 100.0, 9.0)
    written = tuned.recommendation(CONFIG, [best._replace(per_second=50.0), best], best, 12.5)
    assert "p99 within 12.5 ms: 100.0 requests/s" in written
    assert "as it was: 50.0 requests/s" in written
    config = normalise(parse_pbtxt(f'backend: "python" {IO}\n{written}'), "m", 0)
    validate(config, gpu_count=0, complete=True)
    assert tuned.start(to_dict(config)) == candidate
    assert ("target_p99_ms" in written) == (candidate.strategy == "adaptive")
    assert in_force(BATCHING) == CONFIG  # which is not touched


def test_what_does_not_batch_keeps_it_so() -> None:
    config = in_force(f'backend: "onnxruntime" platform: "onnxruntime_onnx" {IO}')
    start = tuned.start(config)
    assert (start.batch, start.strategy) == (0, "")
    space = tuned.space(config, 30, 4, 3, 64)
    assert (space.instances, space.largest_batch) == ([1, 2, 3], 0)
    assert [way.get("threads") for way in space.ways if "threads" in way] == [1, 2, 4]
    made = tuned.configured(config, replace(start, instances=3, threads=2), 30)
    assert made["parameters"]["intra_op_thread_count"] == {"string_value": "2"}
    assert made["instance_group"][0]["count"] == 3
    assert "dynamic_batching" not in made


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"sequence_batching": {"direct": {}}}, "its sequences"),
        ({"ensemble_scheduling": {"step": []}}, "tune the models of its steps"),
        ({"backend": "llm"}, "engine.yaml"),
    ],
)
def test_what_cannot_be_tuned_is_refused(more: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidArgument, match=f"model 'm' cannot be tuned: .*{why}"):
        tuned.start({**CONFIG, **more})


def test_the_picture_has_every_run_and_the_target() -> None:
    trials = [Trial(Candidate(1, n), 100.0 * n, 10.0 * n) for n in range(1, 6)]
    failed = Trial(Candidate(1, 9), 0.0, float("inf"), 1)
    root = ET.fromstring(plot.draw_trials("a & b", [*trials, failed], 30.0))
    circles = [each for each in root.iter() if each.tag.endswith("circle")]
    assert len(circles) == len(trials) + 2
    assert sum(each.tag.endswith("polyline") for each in root.iter()) == 1
