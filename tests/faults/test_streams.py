"""Exits of processes in the middle of a stream: its requests fail, others continue."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import repositories
from tests.support.servers import Server, Start
from tests.support.waiting import until
from tests.support.wire.streams import count_responses, final_error, send_repeat, stream

LONG_VALUES = [0] * 3000


@pytest.fixture(scope="module")
def server(models: Path, start: Start) -> Server:
    """Start a server for all of these tests; the last test stops it."""
    repositories.add(models, "repeat")
    flags = ("--model-control-mode=explicit", "--exit-timeout-secs=1")
    return start(models, *flags, grpc=True)


@pytest.fixture
def repeating_server(server: Server) -> Iterator[Server]:
    server.load("repeat")
    yield server
    if server.process.poll() is None:
        server.unload("repeat")


def live(server: Server) -> float:
    return server.metric("shmserve_executing_requests", model="repeat")


@pytest.mark.parametrize(
    ("process", "expected_error"),
    [
        ("worker repeat.0", "the model's worker died before this request's last response"),
        ("scheduler repeat", "the model's scheduler was lost after the request's first response"),
    ],
)
def test_a_process_dies(repeating_server: Server, process: str, expected_error: str) -> None:
    with stream(repeating_server) as (client, results):
        send_repeat(client, LONG_VALUES, delay_ms=10)
        results.get(timeout=30)
        repeating_server.find_one(process).kill()
        assert expected_error in final_error(results)
        # New requests on the same stream reach the successor.
        send_repeat(client, [1, 2, 3])
        assert count_responses(results) == 3
    until("nothing is left at a worker", lambda: live(repeating_server) == 0)


def test_a_disconnecting_client_does_not_affect_another_stream(repeating_server: Server) -> None:
    with stream(repeating_server) as (client, results):
        send_repeat(client, list(range(200)), delay_ms=5)
        results.get(timeout=30)
        with stream(repeating_server) as (other_stream, other_results):
            send_repeat(other_stream, LONG_VALUES, delay_ms=10)
            other_results.get(timeout=30)
            assert live(repeating_server) == 2
        until("its request has ended at the worker", lambda: live(repeating_server) == 1)
        assert count_responses(results) == 199


def test_a_client_that_does_not_read_blocks_only_its_own_stream(repeating_server: Server) -> None:
    gate = threading.Event()

    def take(result: Any, error: Any) -> None:
        gate.wait(20)
        results.put(error or result)

    with stream(repeating_server) as (client, results):
        client.stop_stream()
        client.start_stream(take)
        send_repeat(client, [7] * 5000)
        with stream(repeating_server) as (other_stream, other_results):
            send_repeat(other_stream, list(range(500)))
            assert count_responses(other_results) == 500
        gate.set()
        for _ in range(5001):
            results.get(timeout=30)


def test_unloading_waits_for_the_last_response(repeating_server: Server) -> None:
    with stream(repeating_server) as (client, results), repeating_server.http() as http:
        send_repeat(client, list(range(60)), delay_ms=10)
        results.get(timeout=30)
        http.unload("repeat").ok()
        assert count_responses(results) == 59
    until("its worker is gone", lambda: not repeating_server.find("worker repeat.0"))


def test_stopping_the_server_ends_a_stream(repeating_server: Server) -> None:
    with stream(repeating_server) as (client, results):
        send_repeat(client, LONG_VALUES, delay_ms=20)
        results.get(timeout=30)
        members = repeating_server.tree()
        repeating_server.stop(20)
        assert final_error(results)
    repeating_server.assert_exited(members)
