"""A model's `is_ready`: readiness over HTTP and gRPC."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpc

from tests.support import repositories
from tests.support.servers import Server, running
from tests.support.waiting import until
from tests.support.wire.raw_http import json_input, raw_connection

MODEL = """
import pathlib
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.file = pathlib.Path(args["model_repository"]) / "state"

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        ready = np.array([pb_utils.is_model_ready("moody")], np.int32)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", ready)])
"""
PLAIN_METHOD = """
    def is_ready(self):
        return self.said()
"""
COROUTINE_METHOD = """
    async def is_ready(self):
        import asyncio
        await asyncio.sleep(0)
        return self.said()
"""
READY_METHOD = """
    def said(self):
        return {"yes": True, "no": False, "odd": 1}[self.file.read_text()]
"""


@pytest.mark.parametrize(
    "method_prefix", [PLAIN_METHOD, COROUTINE_METHOD], ids=["plain", "coroutine"]
)
def test_a_model_reports_whether_it_is_ready(repository: Path, method_prefix: str) -> None:
    for name, code in (("moody", MODEL + method_prefix + READY_METHOD), ("asker", MODEL)):
        repositories.write(repository, name, repositories.identity_config(name, "INT32", [1]), code)
    state = repository / "moody" / "state"
    state.write_text("yes")
    with (
        running(repository, grpc=True) as server,
        server.http() as http,
        grpc.InferenceServerClient(server.grpc_url) as client,
    ):
        # With "odd" the method returns no bool, and with "none" it raises: both count as not ready
        # and are logged.
        for reply_text, ready in (("yes", 1), ("no", 0), ("odd", 0), ("none", 0), ("yes", 1)):
            state.write_text(reply_text)
            assert (http.get("/v2/models/moody/ready").status == 200) == bool(ready)
            assert client.is_model_ready("moody") == bool(ready)
            body = {"inputs": [json_input("INPUT0", np.zeros(1, np.int32))]}
            assert http.infer("asker", body).ok().json()["outputs"][0]["data"] == [ready]
        assert "`is_ready` must return a bool, found type '<class 'int'>'" in server.log()
        assert "KeyError: 'none'" in server.log()
        assert http.get("/v2/health/ready").status == 200


def test_queries_share_a_long_check(empty_server: tuple[Server, Path], tmp_path: Path) -> None:
    """The first query times out as "not ready", and the next query waits for the same call."""
    server, repository = empty_server
    called_path, goes_on = tmp_path / "called", tmp_path / "goes_on"
    slow_method = f"""
    def is_ready(self):
        import os, time
        with open({str(called_path)!r}, "a") as file:
            file.write("once ")
        while not os.path.exists({str(goes_on)!r}):
            time.sleep(0.01)
        return True
"""
    config = repositories.identity_config("slow", "INT32", [1])
    repositories.write(repository, "slow", config, MODEL + slow_method)
    ready = "/v2/models/slow/ready"
    with server.http() as http, raw_connection(server.http_port) as other_connection:
        http.load("slow").ok()
        with ThreadPoolExecutor() as pool:
            first_reply = pool.submit(http.get, ready)
            until("it is asked", called_path.exists)
            body = {"inputs": [json_input("INPUT0", np.zeros(1, np.int32))]}
            start_s = time.monotonic()
            with server.http() as third:
                third.infer("slow", body).ok()
            assert time.monotonic() - start_s < 3, "it executes meanwhile"
            assert first_reply.result().status == 400
            other_connection.sendall(f"GET {ready} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
            for _ in range(2):  # the supervisor replies after the readiness request has reached it
                http.post("/v2/repository/index", {}).ok()
            goes_on.touch()
            assert other_connection.recv(65536).startswith(b"HTTP/1.1 200 ")
    assert called_path.read_text() == "once "
