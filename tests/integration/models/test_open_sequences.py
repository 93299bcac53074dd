"""Sequences that are open when their server or their model ends."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path

import numpy as np

from tests.support import repositories
from tests.support.sequence_models import controls, instances
from tests.support.servers import Server, running
from tests.support.waiting import repeating, until
from tests.support.wire.raw_http import Reply, json_request

_LONG_S, _SHORT_S = 600, 2


def add_sums(repository: Path) -> Path:
    idle = f"max_sequence_idle_microseconds: {_LONG_S * 1_000_000}"
    config = f"sequence_batching {{ direct {{ }} {idle} {controls()} }} {instances(1)}"
    return repositories.add_as(repository, "sums", "sequencer", config)


@contextmanager
def ending(repository: Path, *flags: str) -> Iterator[Server]:
    """Yield a terminating server with the open sequence 1 of its model "sums"."""
    add_sums(repository)
    with running(repository, *flags) as server:
        server.gate.close()
        assert total(send_step(server, 1, start=True)) == 1
        members = server.tree()
        server.process.terminate()
        server.wait_log("model 'sums': waiting until all open sequences (1) have ended")
        yield server
        assert server.wait_exit(10) == 0
        server.assert_exited(members)


def send_step(server: Server, sequence: int, start: bool = False, end: bool = False) -> Reply:
    parameters = {"sequence_id": sequence, "sequence_start": start, "sequence_end": end}
    body = json_request(INPUT0=np.ones((1, 1), np.int32)) | {"parameters": parameters}
    with server.http() as http:
        return http.infer("sums", body)


def total(reply: Reply) -> int:
    return int(reply.ok().json()["outputs"][0]["data"][0])


def test_a_server_that_exits_waits_for_open_sequences(tmp_path: Path) -> None:
    """The server is no longer ready and rejects a START. Open sequences continue until their END.
    A model without sequences accepts requests meanwhile."""
    repositories.add_identity(tmp_path, "other", "INT32", [1])
    with ending(tmp_path) as server:
        assert not server.answers("/v2/health/ready")
        with server.http() as http:
            http.infer("other", json_request(INPUT0=np.ones(1, np.int32))).ok()
        refused = send_step(server, 2, start=True)
        assert refused.status == 503 and "stopped accepting new inference" in refused.error
        assert [total(send_step(server, 1)) for _ in range(3)] == [2, 3, 4]
        assert server.wait_exit(0.2) is None
        assert total(send_step(server, 1, end=True)) == 5


def test_a_drain_ends_at_the_exit_timeout(tmp_path: Path) -> None:
    with ending(tmp_path, f"--exit-timeout-secs={_SHORT_S}") as server:
        server.wait_log("open sequences have not ended within")


def test_a_model_that_is_unloaded_or_loaded_again_forgets_its_sequences(tmp_path: Path) -> None:
    """As in Triton, the old version ends at once, and its sequences no longer exist."""
    folder = add_sums(tmp_path)
    flags = ("--model-control-mode=explicit", "--load-model=*", f"--exit-timeout-secs={_SHORT_S}")
    with running(tmp_path, *flags) as server, server.http() as http:
        server.gate.close()
        (first_worker,) = server.find("worker sums")
        assert total(send_step(server, 1, start=True)) == 1
        with (folder / "config.pbtxt").open("a") as text:
            text.write('parameters { key: "changed" value { string_value: "yes" } }\n')
        http.load("sums").ok()
        until("the old one has ended", lambda: not first_worker.is_running())
        forgotten = send_step(server, 1)
        assert forgotten.status == 400 and "must specify the START flag" in forgotten.error
        assert total(send_step(server, 1, start=True)) == 1
        http.unload("sums").ok()
        assert send_step(server, 1).status == 404
        until("it has ended", lambda: not server.find("worker sums"))


def test_a_successor_server_takes_over(tmp_path: Path) -> None:
    """The successor accepts clients once the old sequences end; one server is always ready."""
    add_sums(tmp_path)
    server = Server([tmp_path])
    servers = [server]
    ports = server.http_port, server.metrics_port
    try:
        server.wait_ready().gate.close()
        with always_ready(server):
            assert total(send_step(server, 1, start=True)) == 1
            servers.append(Server([tmp_path], ["--take-over"], run_dir=server.run_dir, ports=ports))
            servers[1].gate.close()
            server.wait_log("model 'sums': waiting until all open sequences (1) have ended")
            assert [total(send_step(server, 1)) for _ in range(3)] == [2, 3, 4]
            assert total(send_step(server, 1, end=True)) == 5
            assert server.wait_exit(20) == 0
            assert total(send_step(server, 1, start=True)) == 1
        servers[1].stop()
    finally:
        for started_server in servers:
            started_server.discard()


@contextmanager
def always_ready(server: Server) -> Iterator[None]:
    """Check readiness continuously during the block, on one connection if possible."""
    outcomes = Counter[int]()
    with server.http() as http:

        def ask() -> None:
            with suppress(ConnectionError, HTTPException):
                outcomes[http.get("/v2/health/ready").status] += 1
            time.sleep(0.01)

        with repeating(ask):
            yield
    assert list(outcomes) == [200]
