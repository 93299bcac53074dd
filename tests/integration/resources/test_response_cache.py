"""The response cache of a real server, as its users see it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton

import shmserve.client
from tests.rigs.pipelines import add_ensemble, add_model, step, xy_step
from tests.support.servers import Server, Start, running
from tests.support.wire.raw_http import Http
from tests.support.wire.triton import infer_inputs

SIZE = 4 << 20
LARGE_COUNT = 100_000  # elements: 400 KB
CACHED = "response_cache { enable: true }"
# Adds the number of its executions, so that no two executions give the same output.
COUNTING_METHOD = """
self.count = getattr(self, "count", 0) + 1
return self.response(Y=self.input(request, "X") + np.float32(self.count))
"""


@pytest.fixture(scope="module")
def server(models: Path, start: Start) -> Server:
    for name in ("counting", "batched", "native", "other"):
        settings = CACHED + (" dynamic_batching {}" if name == "batched" else "")
        add_model(models, name, COUNTING_METHOD, settings=settings)
    add_model(models, "plain", COUNTING_METHOD)
    steps = [xy_step("plain", "IN", "mid"), xy_step("plain", "mid", "OUT")]
    add_ensemble(models, "pipeline", steps, settings=CACHED)
    flags = [f"--cache-config=local,size={SIZE}", "--metrics-config=summary_latencies=true"]
    return start(models, *flags)


def infer(server: Server, model: str, array: np.ndarray, **options: Any) -> triton.InferResult:
    name = "IN" if model == "pipeline" else "X"
    with triton.InferenceServerClient(server.url) as client:
        return client.infer(model, infer_inputs(triton, **{name: array}), **options)


@pytest.mark.parametrize("model", ["counting", "batched"])
@pytest.mark.parametrize("size", [3, LARGE_COUNT])
def test_a_repeated_request_is_answered_from_the_cache(
    server: Server, http: Http, model: str, size: int
) -> None:
    """A cached response is the same except for its id, which is that of the new request."""
    array = np.arange(size, dtype=np.float32)
    before = http.statistics(model)
    first_result = infer(server, model, array, request_id="one")
    for _ in range(3):
        second_result = infer(server, model, array, request_id="two")
        assert (second_result.as_numpy("Y") == first_result.as_numpy("Y")).all()
        assert second_result.get_response()["id"] == "two"
    after = http.statistics(model)
    for part, expected_count in (("cache_hit", 3), ("cache_miss", 1), ("success", 4), ("queue", 4)):
        counts = [row["inference_stats"][part]["count"] for row in (before, after)]
        assert counts[1] - counts[0] == expected_count, part
    assert after["execution_count"] - before["execution_count"] == 1
    assert after["inference_count"] - before["inference_count"] == 1


def test_a_hit_of_an_ensemble_runs_no_step(server: Server, http: Http) -> None:
    for size in (3, LARGE_COUNT):
        array = np.ones(size, np.float32)
        first_output = infer(server, "pipeline", array).as_numpy("OUT")
        execution_count = http.statistics("plain")["execution_count"]
        for _ in range(3):
            assert (infer(server, "pipeline", array).as_numpy("OUT") == first_output).all()
        assert http.statistics("plain")["execution_count"] == execution_count
    assert http.statistics("pipeline")["inference_stats"]["cache_hit"]["count"] == 6


def test_a_reloaded_step_invalidates_cached_responses_of_its_ensemble(tmp_path: Path) -> None:
    """The step may itself be a step of an inner ensemble."""
    times = "return self.response(Y=self.input(request, 'X') * np.float32({}))"
    add_model(tmp_path, "plain", times.format(2))
    add_ensemble(tmp_path, "inner", [xy_step("plain", "IN", "OUT")])
    add_ensemble(
        tmp_path, "pipeline", [step("inner", {"IN": "IN"}, {"OUT": "OUT"})], settings=CACHED
    )
    flags = [f"--cache-config=local,size={SIZE}", "--model-control-mode=explicit"]
    with running(tmp_path, *flags, "--load-model=pipeline") as server:
        array = np.ones(3, np.float32)
        for _ in range(2):
            assert infer(server, "pipeline", array).as_numpy("OUT").tolist() == [2, 2, 2]
        source = tmp_path / "plain" / "1" / "model.py"
        source.write_text(source.read_text().replace("np.float32(2)", "np.float32(1000)"))
        server.load("plain")
        assert infer(server, "pipeline", array).as_numpy("OUT").tolist() == [1000] * 3


def test_a_local_clients_small_tensors_are_cached(server: Server, http: Http) -> None:
    """Tensors in messages are cached, those in the client's memory are not."""
    with shmserve.client.connect(server.run_dir) as client:
        small_array = np.full(4, 5, np.float32)
        first, second = (client.infer("native", X=small_array)["Y"] for _ in range(2))
        assert (np.asarray(first) == np.asarray(second)).all()
        large = np.full(LARGE_COUNT, 5, np.float32)
        first, second = (np.asarray(client.infer("native", X=large)["Y"]).copy() for _ in range(2))
        assert (first != second).all()
    assert http.statistics("native")["inference_stats"]["cache_hit"]["count"] == 1


def test_only_models_with_a_cache_have_cache_metrics(server: Server) -> None:
    """Hits, misses and their times, and no summary of whole requests."""
    array = np.full(3, 11, np.float32)
    for _ in range(3):
        infer(server, "other", array)
    assert server.metric("nv_cache_num_hits_per_model", model="other") == 2
    assert server.metric("nv_cache_num_misses_per_model", model="other") == 1
    assert server.metric("nv_cache_hit_duration_per_model", model="other") > 0
    assert server.metric("nv_cache_miss_duration_per_model", model="other") > 0
    assert server.metric("nv_cache_hit_summary_per_model_count", model="other") == 2
    assert server.metric("nv_cache_miss_summary_per_model_count", model="other") == 1
    assert server.metric("nv_inference_queue_summary_us_count", model="other") == 3
    samples = server.samples("nv_inference_request_summary_us_count")
    assert [labels["model"] for labels, _ in samples] == ["plain"]
    assert server.metric("shmserve_cache_entries", model="other") == 1
    models = {labels["model"] for labels, _ in server.samples("nv_cache_num_hits_per_model")}
    assert "plain" not in models and len(models) == 5


def test_the_bound_is_the_servers(server: Server) -> None:
    """Five models share 4 MB in the cache, whichever of them are used."""
    for model in ("counting", "batched", "other"):
        for number in range(8):
            infer(server, model, np.full(60_000, number, np.float32))
    used = server.metric("shmserve_cache_bytes")
    assert 0 < used <= SIZE
    assert server.metric("nv_cache_util") == pytest.approx(used / SIZE, rel=0.001)
    assert server.metric("nv_cache_num_entries") == server.metric("shmserve_cache_entries")
    assert server.metric("shmserve_cache_bytes", model="counting") <= SIZE // 5


def test_a_cached_model_without_a_server_cache_serves(empty_server: tuple[Server, Path]) -> None:
    server, repository = empty_server
    add_model(repository, "alone", COUNTING_METHOD, settings=CACHED)
    server.load("alone")
    array = np.ones(2, np.float32)
    first_output, second_output = (infer(server, "alone", array).as_numpy("Y") for _ in range(2))
    assert (first_output != second_output).all()
    server.wait_log("has a response_cache")
    assert not server.samples("nv_cache_num_hits_per_model")
