"""The dynamic batcher of a real server: which requests are executed together."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import repositories
from tests.support.held_queue import Queue
from tests.support.request_pool import request_pool, values
from tests.support.servers import Server

DYNAMIC_BATCHING = "dynamic_batching { %s }"
# Long enough for several requests to arrive within it, even if the machine pauses for a moment.
LONG_DELAY_US = 1_500_000

MODELS = {
    "eager": DYNAMIC_BATCHING % "",
    "patient": DYNAMIC_BATCHING % f"max_queue_delay_microseconds: {LONG_DELAY_US}",
    "short": DYNAMIC_BATCHING % "default_queue_policy { max_queue_size: 2 }",
    "timed": DYNAMIC_BATCHING
    % "default_queue_policy { default_timeout_microseconds: 1500000 allow_timeout_override: true }",
}


@pytest.fixture(scope="module")
def server(models: Path, serve_models: Callable[[Path], Server]) -> Server:
    """Start a server of the model "gated" with several batching configurations."""
    for name, config in MODELS.items():
        repositories.add_as(models, name, "gated", config)
    two = repositories.add_as(models, "two", "gated", MODELS["eager"]) / "config.pbtxt"
    two.write_text(two.read_text().replace("count: 1", "count: 2"))
    return serve_models(models)


@pytest.fixture
def queue(server: Server) -> Iterator[Callable[[str], Queue]]:
    """Return a function that holds a model, such as `queue("eager")`."""
    with request_pool(server) as pool:
        yield lambda model: Queue(server, pool, model)


def test_delay_scheduler_gives_exact_counts(repository: Path, serve: Callable[..., Server]) -> None:
    """The schedulers start once twelve requests are queued."""
    preferred = f"preferred_batch_size: [ 4, 7 ] max_queue_delay_microseconds: {LONG_DELAY_US}"
    repositories.add_as(repository, "eager", "gated", MODELS["eager"])
    repositories.add_as(repository, "preferred", "gated", DYNAMIC_BATCHING % preferred)
    server = serve(repository, environment={"TRITONSERVER_DELAY_SCHEDULER": "12"})
    server.gate.close()
    for model, executed in (("eager", {8: 1, 4: 1}), ("preferred", {7: 1, 4: 1, 1: 1})):
        with request_pool(server) as pool, server.http() as http:
            answers = [pool.number(model, value) for value in range(12)]
            assert [values(reply.result()) for reply in answers] == [[value] for value in range(12)]
            (stats,) = http.get(f"/v2/models/{model}/stats").ok().json()["model_stats"]
        batches = stats["batch_stats"]
        assert {b["batch_size"]: b["compute_infer"]["count"] for b in batches} == executed


def test_server_wide_defaults(repository: Path, serve: Callable[..., Server]) -> None:
    repositories.add_as(repository, "model", "gated")
    server = serve(repository, "--dynamic-batching", f"--max-queue-delay-us={LONG_DELAY_US}")
    with server.http() as http:
        config = http.get("/v2/models/model/config").ok().json()
    assert config["dynamic_batching"]["max_queue_delay_microseconds"] == LONG_DELAY_US
    with request_pool(server) as pool:
        answers = [pool.number("model", value) for value in (1, 2, 3)]
        visit = server.gate.next()
        assert sorted(visit.batch) == [1, 2, 3]
        visit.release()
        assert all(answer.result().status == 200 for answer in answers)
