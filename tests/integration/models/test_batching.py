"""The dynamic batcher of a real server: which requests are executed together."""

from collections.abc import Callable
from pathlib import Path

from tests.support import repositories
from tests.support.request_pool import request_pool, values
from tests.support.servers import Server

DYNAMIC_BATCHING = "dynamic_batching { %s }"
# Long enough for several requests to arrive within it, even if the machine pauses for a moment.
LONG_DELAY_US = 1_500_000


def test_delay_scheduler_gives_exact_counts(repository: Path, serve: Callable[..., Server]) -> None:
    """The schedulers start once twelve requests are queued."""
    preferred = f"preferred_batch_size: [ 4, 7 ] max_queue_delay_microseconds: {LONG_DELAY_US}"
    repositories.add_as(repository, "eager", "gated", DYNAMIC_BATCHING % "")
    repositories.add_as(repository, "preferred", "gated", DYNAMIC_BATCHING % preferred)
    server = serve(repository, environment={"TRITONSERVER_DELAY_SCHEDULER": "12"})
    server.gate.close()
    for model, executed in (("eager", {8: 1, 4: 1}), ("preferred", {7: 1, 4: 1, 1: 1})):
        with request_pool(server) as pool, server.http() as http:
            answers = [pool.number(model, value) for value in range(12)]
            assert [values(reply.result()) for reply in answers] == [[value] for value in range(12)]
            batches = http.statistics(model)["batch_stats"]
        assert {b["batch_size"]: b["compute_infer"]["count"] for b in batches} == executed


def test_server_wide_defaults(repository: Path, serve: Callable[..., Server]) -> None:
    repositories.add_as(repository, "model", "gated")
    server = serve(repository, "--dynamic-batching", f"--max-queue-delay-us={LONG_DELAY_US}")
    with server.http() as http:
        config = http.config("model")
    assert config["dynamic_batching"]["max_queue_delay_microseconds"] == LONG_DELAY_US
    with request_pool(server) as pool:
        answers = [pool.number("model", value) for value in (1, 2, 3)]
        visit = server.gate.next()
        assert sorted(visit.batch) == [1, 2, 3]
        visit.release()
        assert all(answer.result().status == 200 for answer in answers)
