"""The dynamic batcher of a real server: which requests are executed together."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import repositories
from tests.support.held_queue import Queue
from tests.support.request_pool import RequestPool, request_pool, values
from tests.support.servers import Server
from tests.support.texts import EXPIRED_TEXT

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


def test_waiting_requests_run_together_in_order(queue: Callable[[str], Queue]) -> None:
    held_calls = queue("eager")
    for value in range(1, 12):
        held_calls.add(value)
    assert held_calls.batches(2) == [[1, 2, 3, 4, 5, 6, 7, 8], [9, 10, 11]]


def test_the_queue_delay_gathers_requests(server: Server, pool: RequestPool) -> None:
    start_s = time.monotonic()
    answers = [pool.number("patient", value) for value in (1, 2, 3)]
    visit = server.gate.next()
    waited = time.monotonic() - start_s
    assert sorted(visit.batch) == [1, 2, 3]
    assert 1.5 <= waited < 5
    visit.release()
    for value, answer in enumerate(answers, 1):
        assert values(answer.result()) == [value]


def test_a_full_queue_refuses(server: Server, queue: Callable[[str], Queue]) -> None:
    held_calls = queue("short")
    held_calls.add(1)
    held_calls.add(2)
    refused_reply = held_calls.pool.number("short", 3).result()
    assert refused_reply.status == 503
    assert refused_reply.error == "[request id: <id_unknown>] Exceeds maximum queue size"
    assert int(refused_reply.headers["Retry-After"]) >= 1
    assert held_calls.batches(1) == [[1, 2]]
    assert held_calls.first_response.result().status == 200


def test_a_request_expires_in_the_queue(server: Server, queue: Callable[[str], Queue]) -> None:
    held_calls = queue("timed")
    start_s = time.monotonic()
    late_request = held_calls.pool.number("timed", 1)
    expired_request = held_calls.pool.number("timed", 2, deadline_us=50_000)
    assert (expired_request.result().status, expired_request.result().error) == (503, EXPIRED_TEXT)
    assert not late_request.done(), "the one before it has the queue's timeout"
    assert (late_request.result().status, late_request.result().error) == (503, EXPIRED_TEXT)
    assert 1.5 <= time.monotonic() - start_s < 5
    held_calls.holding_visit.release()
    assert held_calls.first_response.result().status == 200


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


def test_two_instances_run_at_the_same_time(server: Server, pool: RequestPool) -> None:
    answers = [pool.number("two", 1)]
    second_visit = server.gate.next()
    answers.append(pool.number("two", 2))
    other_visit = server.gate.next()
    assert second_visit.pid != other_visit.pid
    for visit in (second_visit, other_visit):
        visit.release()
    assert [values(answer.result()) for answer in answers] == [[1], [2]]


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
