"""The effects on gRPC clients when a process of the server dies."""

import socket
import time
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from tests.support import repositories
from tests.support.servers import Server, Start, suspend, wait_exited
from tests.support.waiting import until
from tests.support.wire.grpc_calls import is_right, request_of, simple_request, stub

WITHIN_S = 3.0


@pytest.fixture(scope="module")
def server(models: Path, start: Start) -> Server:
    repositories.add(models, "simple", "gated")
    return start(models, grpc=True)


def answers(call: Any) -> bool:
    try:
        return is_right(call.ModelInfer(simple_request(), timeout=5, wait_for_ready=True))
    except grpc.RpcError:
        return False


@pytest.mark.parametrize("ending", ["kill", "stop"])
def test_the_gateway_dies(server: Server, ending: str) -> None:
    """Its calls fail, a replacement accepts connections on the port, and HTTP is not affected."""
    with stub(server) as call, server.http() as http:
        assert answers(call)
        gateway = server.find_one("gateway grpc")
        pending = call.ModelInfer.future(
            request_of("gated", np.ones((1, 1), np.int32), "INT32"), timeout=20
        )
        visit = server.gate.next()
        gateway.kill() if ending == "kill" else suspend(gateway)
        assert http.get("/v2/health/ready").status == 200
        assert wait_exited(gateway, WITHIN_S)
        assert pending.exception().code() is grpc.StatusCode.UNAVAILABLE
        visit.release()
        until("the next one answers", lambda: answers(call), WITHIN_S)
        assert server.find_one("gateway grpc").pid != gateway.pid
        assert answers(call) and http.get("/v2/health/ready").status == 200
    until("nothing executes", lambda: server.metric("shmserve_executing_requests") == 0)


@pytest.mark.parametrize("victim", ["worker gated.0", "scheduler gated"])
def test_the_process_behind_a_grpc_call_dies(server: Server, victim: str) -> None:
    array = np.full((1, 4), 3, np.int32)
    with stub(server) as call:
        pending = call.ModelInfer.future(request_of("gated", array, "INT32"), timeout=20)
        visit = server.gate.next()
        server.find_one(victim).kill()
        visit.release()
        server.gate.next(10).release()
        assert pending.result().raw_output_contents == [array.tobytes()]
        assert answers(call)


def test_clients_that_speak_no_grpc(server: Server) -> None:
    """Plain bytes on the port close their connection. Other connections are not affected."""
    for data in (
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        b"\0" * 100,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 64,
    ):
        with socket.create_connection(("127.0.0.1", server.grpc_port), timeout=10) as sock:
            sock.sendall(data)
            start_s = time.monotonic()
            while sock.recv(4096):
                assert time.monotonic() - start_s < 10
    with stub(server) as call, server.http() as http:
        assert answers(call) and http.get("/v2/health/live").status == 200
