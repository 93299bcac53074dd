"""Readiness: a model is ready if, and only if, a request would be answered."""

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.faults.scene import RECOVERY_S
from tests.support import repositories
from tests.support.load import infer_simple
from tests.support.request_pool import request_pool, values
from tests.support.servers import Server, running
from tests.support.waiting import until
from tests.support.wire.raw_http import json_request


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    repository = tmp_path / "models"
    repositories.add_slow(repository, "gated")
    repositories.add(repository, "simple")
    running_server = Server([repository])
    try:
        yield running_server
    finally:
        running_server.stop()


def test_ready_only_when_a_request_would_be_answered(server: Server) -> None:
    loading = server.gate.next()
    assert loading.batch == ["load"]
    assert not server.answers("/v2/health/ready")
    loading.release()
    server.wait_ready()
    victim = server.find_one("worker gated.0")
    victim.kill()
    loading = server.gate.next(within_s=RECOVERY_S)
    assert loading.pid != victim.pid
    with server.http() as http, request_pool(server) as pool:
        assert http.get("/v2/health/live").status == 200
        assert http.get("/v2/health/ready").status == 400
        assert http.get("/v2/models/gated/ready").status == 400
        assert http.get("/v2/models/simple/ready").status == 200
        # The model restarts, so new requests wait for it.
        pending = pool.number("gated", 7)
        server.wait_pending("gated", 1)
        loading.release()
        server.gate.next().release()
        assert values(pending.result()) == [7]
        until("it is ready again", lambda: http.get("/v2/health/ready").status == 200, RECOVERY_S)


def test_a_crash_loop_fails_the_model_and_not_the_server(tmp_path: Path) -> None:
    """Requests of the model are rejected, and those of other models are answered."""
    repository = tmp_path / "models"
    folder = repositories.add_as(repository, "once", "gated")
    repositories.add(repository, "simple")
    mark = tmp_path / "loaded"
    crashing_code = f"""\
    def initialize(self, args):
        if os.path.exists({str(mark)!r}):
            os._exit(9)
        open({str(mark)!r}, "w").close()

    def execute("""
    repositories.insert(folder, crashing_code)
    with running(repository) as server, server.http() as http, request_pool(server) as pool:
        server.gate.close()
        assert values(pool.number("once", 1).result()) == [1]
        server.find_one("worker once.0").kill()
        until("it has failed", lambda: pool.number("once", 1).result().status == 503)
        assert http.get("/v2/health/live").status == 200
        assert http.get("/v2/health/ready").status == 400
        assert http.get("/v2/models/once/ready").status == 400
        assert infer_simple(http, 1) == ""
        states = {item["name"]: item for item in http.post("/v2/repository/index").json()}
        assert states["once"]["state"] == "UNAVAILABLE" and states["once"]["reason"]
        start_s = time.monotonic()
        assert pool.number("once", 1).result().status == 503
        assert time.monotonic() - start_s < RECOVERY_S


@pytest.mark.parametrize("mode", ["explicit", "poll"])
def test_a_model_that_crashes_every_time_becomes_unavailable(tmp_path: Path, mode: str) -> None:
    """After ten crashes in a row the model is unavailable until it is loaded again or changes."""
    repository = tmp_path / "models"
    folder = repositories.add_as(repository, "bad", "simple")
    code = folder / "1" / "model.py"
    good_code = code.read_text()
    repositories.insert(folder, "    def execute(self, _):\n        os.abort()\n\n    def was(")
    code.write_text(f"import os\n{code.read_text()}")
    repositories.add(repository, "simple")
    row = np.zeros((1, 16), np.int32)
    request = json_request(INPUT0=row, INPUT1=row)
    flags = ["--load-model=*"] if mode == "explicit" else ["--repository-poll-secs=1"]
    with running(repository, f"--model-control-mode={mode}", *flags) as server:
        server.gate.close()
        with server.http() as http:
            statuses: list[int] = []

            def is_given_up() -> bool:
                statuses.append(http.infer("bad", request).status)
                assert http.infer("simple", request).status == 200
                return statuses[-1] == 503

            until("it is given up", is_given_up)
            assert statuses == [500] * 5 + [503]  # each request is retried once
            rows = {row["name"]: row for row in http.post("/v2/repository/index").json()}
            assert rows["bad"]["state"] == "UNAVAILABLE"
            reason = "its process ended 10 times in a row (signal 6), and it executed no request"
            assert reason in rows["bad"]["reason"]
            assert f"instance 'bad_0_0' is not restarted any more: {reason}" in server.log()
            assert http.get("/v2/models/bad/ready").status == 400
            code.write_text(good_code)
            if mode == "explicit":
                http.load("bad").ok()
            until("it serves", lambda: http.infer("bad", request).status == 200)
