"""Requests that no client waits for: expired deadlines, and clients that disconnect."""

import json
import socket
import time
from collections.abc import Callable, Generator
from pathlib import Path

import numpy as np
import pytest

import shmserve.client
from tests.support import repositories
from tests.support.request_pool import RequestPool, request_pool, values
from tests.support.servers import Server
from tests.support.wire.raw_http import json_input, raw_connection

DYNAMIC_BATCHING = "dynamic_batching { }"


@pytest.fixture(scope="module")
def server(models: Path, serve_models: Callable[[Path], Server]) -> Server:
    """The gated model, with and without batching."""
    repositories.add_as(models, "plain", "gated")
    repositories.add_as(models, "batching", "gated", DYNAMIC_BATCHING)
    return serve_models(models)


def hang_up_after(server: Server, model: str, value: int) -> Generator[socket.socket]:
    """Send a request on a connection, and close it when resumed."""
    body = json.dumps({"inputs": [json_input("INPUT0", np.full((1, 1), value, np.int32))]}).encode()
    with raw_connection(server.http_port) as connection:
        head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: localhost\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        yield connection


@pytest.mark.parametrize("half", [False, True])
def test_a_client_disconnects_while_its_request_executes(
    server: Server, pool: RequestPool, *, half: bool
) -> None:
    """A half-close counts as a disconnect, since TCP does not distinguish them."""
    leaving_client = hang_up_after(server, "batching", 1)
    connection = next(leaving_client)
    visit = server.gate.next()
    if half:
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""
    leaving_client.close()
    next_request = pool.number("batching", 2)
    server.wait_pending("batching", 1)
    visit.release()
    other_visit = server.gate.next()
    assert other_visit.batch == [2]
    other_visit.release()
    assert values(next_request.result()) == [2]


def test_a_deadline_of_the_server(repository: Path, serve: Callable[..., Server]) -> None:
    repositories.add(repository, "gated")
    server = serve(repository, "--request-timeout-us=1500000", "--request-timeout-is-deadline=true")
    with request_pool(server) as pool:
        start_s = time.monotonic()
        late_request = pool.number("gated", 1)
        visit = server.gate.next()
        assert late_request.result().status == 503
        assert 1.5 <= time.monotonic() - start_s < 5
        with shmserve.client.connect(server.run_dir) as local_client:
            start_s = time.monotonic()
            with pytest.raises(shmserve.client.Unavailable, match="Request timeout expired"):
                local_client.infer("gated", INPUT0=np.zeros((1, 4), np.int32), timeout=10)
            assert 1.5 <= time.monotonic() - start_s < 5
        waiting_request = pool.number("gated", 2)
        expired_reply = pool.number("gated", 3, timeout=50_000).result()
        assert expired_reply.status == 503
        assert "(50000 microseconds, from the request's parameter 'timeout')" in expired_reply.error
        assert not waiting_request.done()
        visit.release()
