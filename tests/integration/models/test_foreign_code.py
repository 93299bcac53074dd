"""A model's code may connect to workers' sockets, but can affect only its own model."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import repositories
from tests.support.regions import SharedObject
from tests.support.servers import Server, running
from tests.support.waiting import until
from tests.support.wire.raw_http import Http, json_request

ROW = json_request(INPUT0=np.array([1], np.int32))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    repositories.add(tmp_path, "constant", "intruder")
    with running(tmp_path, grpc=True) as running_server:
        yield running_server


def intrude(server: Server, http: Http) -> dict[str, Any]:
    plan = {"run_dir": str(server.run_dir), "pids": [process.pid for process in server.tree()]}
    reply = http.infer("intruder", json_request(PLAN=np.array([json.dumps(plan)], object))).ok()
    report: dict[str, Any] = json.loads(reply.tensors()["REPORT"][0])
    return report


def constant(http: Http) -> int:
    return int(http.infer("constant", ROW).ok().tensors()["OUTPUT0"][0])


def state(http: Http) -> tuple[Any, ...]:
    return tuple(
        http.call(method, path).ok().json()
        for method, path in (
            ("POST", "/v2/repository/index"),
            ("GET", "/v2/logging"),
            ("GET", "/v2/systemsharedmemory/status"),
        )
    )


def test_a_hostile_model_is_refused_at_every_socket(server: Server) -> None:
    """With its own identity it is accepted only as a worker of its own model."""
    with server.http() as http, SharedObject(4096) as shared_object:
        http.register("kept", shared_object.key, 4096).ok()
        assert constant(http) == 1
        state_before = state(http), sorted(process.pid for process in server.tree())
        own_pid = str(server.find_one("worker intruder.0").pid)
        report = intrude(server, http)
        sockets = {key.split()[0] for key in report}
        assert "control" in sockets and len(sockets) >= 8
        assert report.pop("door") is False, "a guest who says such things is shown out"
        for key, let_in in report.items():
            if not key.endswith(f" {own_pid}"):
                assert not any(let_in), (key, let_in)
        assert (state(http), sorted(process.pid for process in server.tree())) == state_before
        assert server.answers("/v2/health/ready")
        assert constant(http) == 1
        # The processes have kept their sockets, and connect once the descriptor limit permits it.
        for title in ("worker constant.0", "scheduler constant"):
            old_process = server.find_one(title)
            old_process.kill()
            until("another takes over", lambda: _is_new(server, title, old_process.pid))  # noqa: B023
            assert constant(http) == 1
            intrude(server, http)
            assert constant(http) == 1
        assert state(http) == state_before[0]
        assert "Traceback" not in server.log()


def _is_new(server: Server, title: str, pid: int) -> bool:
    return any(process.pid != pid for process in server.find(title))
