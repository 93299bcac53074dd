"""Replacement of a model's generation while processes die; its published state is correct."""

import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmserve.ipc.messages import publications as m
from tests.rigs.local_clients import Guest
from tests.support import repositories
from tests.support.request_pool import RequestPool, request_pool, values
from tests.support.servers import Server, Start
from tests.support.waiting import until
from tests.support.wire.raw_http import Reply, binary_request


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the models of all tests, none of which is loaded initially."""
    folder = tmp_path_factory.mktemp("generations") / "models"
    repositories.add(folder, "simple", "gated", "identity")
    repositories.add_slow(folder, "slow")
    config = repositories.add_slow(folder, "twin") / "config.pbtxt"
    config.write_text(config.read_text().replace("count: 1", "count: 2"))
    model_folder = repositories.add_as(folder, "two", "gated")
    (model_folder / "1").rename(model_folder / "2")
    repositories.add_as(folder, "once", "gated")
    return folder


@pytest.fixture(scope="module")
def server(repository: Path, start: Start) -> Server:
    """Start a server with one gateway of each protocol, both of which receive publications."""
    flags = ("--model-control-mode=explicit", "--load-model=simple")
    return start(repository, *flags, grpc=True)


def change(pool: RequestPool, name: str, verb: str = "load", body: Any = None) -> Future[Reply]:
    """Request a load or an unload."""
    return pool.send(lambda http: http.post(f"/v2/repository/models/{name}/{verb}", body))


def state(server: Server, name: str, version: str = "1") -> str:
    with server.http() as http:
        rows = http.post("/v2/repository/index").ok().json()
    (row,) = (row for row in rows if (row["name"], row.get("version")) == (name, version))
    return str(row["state"])


def count_attached(server: Server) -> int:
    """Return the number of connections between workers and schedulers."""
    with open("/proc/net/unix") as table:
        rows = [line.split() for line in table]
    start = f"{server.run_dir}/w"
    return sum(row[-1].startswith(start) and row[5] == "03" for row in rows)


@contextlib.contextmanager
def silent_local_client(server: Server) -> Iterator[Callable[[str], None]]:
    """Yield a function that waits until a change awaits this client, which acknowledges none."""
    with contextlib.closing(Guest(server).hello()) as local_client:

        def wait(model: str) -> None:
            while True:
                match local_client.next():
                    case m.ModelPublished(name=name, ack_number=number) if number:
                        if name == model:
                            break
            state(server, model)  # the reply is sent after earlier messages

        yield wait


@pytest.mark.parametrize("process", ["worker", "scheduler"])
@pytest.mark.parametrize("verb", ["load", "unload"])
def test_a_process_that_dies_while_its_generation_drains(
    server: Server, pool: RequestPool, verb: str, process: str
) -> None:
    """Requests are retried by another worker, but are rejected if no scheduler is left."""
    change(pool, "gated").result().ok()
    pending = pool.number("gated", 7)
    visit = server.gate.next()
    scheduler = server.find_one("scheduler gated")
    change(pool, "gated", verb).result().ok()
    os.kill(visit.pid if process == "worker" else scheduler.pid, signal.SIGKILL)
    if (process, verb) == ("scheduler", "unload"):
        assert pending.result().status == 503
    else:
        next_visit = server.gate.next()
        assert next_visit.pid != visit.pid
        next_visit.release()
        assert values(pending.result()) == [7]
    change(pool, "gated", "unload").result().ok()
    until("it has ended", lambda: state(server, "gated") == "UNAVAILABLE")
    assert not server.find("scheduler gated")


def test_an_instance_that_dies_while_another_loads(server: Server, pool: RequestPool) -> None:
    """The instance restarts, and the load succeeds with both instances."""
    pending = change(pool, "twin")
    first_visit, second_visit = server.gate.next(), server.gate.next()
    before = count_attached(server)
    first_visit.release()
    until("the first offers itself to its scheduler", lambda: count_attached(server) > before)
    state(server, "twin")  # the supervisor has received the worker's registration, too
    os.kill(first_visit.pid, signal.SIGKILL)
    server.gate.next().release()
    second_visit.release()
    pending.result().ok()
    assert server.answers("/v2/models/twin/ready")
    until("both are there", lambda: len(server.find("worker twin")) == 2)
    change(pool, "twin", "unload").result().ok()


def test_a_load_while_the_last_generation_drains(server: Server, pool: RequestPool) -> None:
    """The end of the old generation must not mark the new one as unloaded."""
    change(pool, "slow")
    server.gate.next().release()
    until("it is there", lambda: server.answers("/v2/models/slow/ready"))
    pending = pool.number("slow", 7)
    executing = server.gate.next()
    change(pool, "slow", "unload").result().ok()
    assert state(server, "slow") == "UNLOADING"
    load_request = change(pool, "slow")
    loading = server.gate.next()
    executing.release()
    assert values(pending.result()) == [7]
    until("the old one has ended", lambda: len(server.find("scheduler slow")) == 1)
    assert state(server, "slow") == "LOADING"
    loading.release()
    load_request.result().ok()
    assert server.answers("/v2/models/slow/ready") and state(server, "slow") == "READY"
    change(pool, "slow", "unload").result().ok()


def test_a_version_replaces_another_while_models_change(server: Server, repository: Path) -> None:
    """Readiness can be queried at every moment of the replacement."""
    with request_pool(server) as pool:
        log_length = len(server.log())
        change(pool, "two").result().ok()
        (repository / "two" / "2").rename(repository / "two" / "1")
        with silent_local_client(server) as changes:
            pending = change(pool, "two")
            changes("two")
            assert len(server.find("scheduler two")) == 2
            server.find_one("worker simple").kill()
            until(  # the worker may run again before the next query
                "its death is known",
                lambda: (
                    not server.answers("/v2/models/simple/ready")
                    or "worker simple.0 cpu runs again" in server.log()[log_length:]
                ),
            )
        pending.result().ok()
        assert "Traceback" not in server.log()[log_length:]
        assert state(server, "two", "1") == "READY"
        until("the old one has ended", lambda: state(server, "two", "2") == "UNAVAILABLE")
        change(pool, "two", "unload").result().ok()
    until("it is ready", lambda: server.answers("/v2/health/ready"))


def test_a_broken_model_is_reloaded(server: Server, pool: RequestPool, repository: Path) -> None:
    """The model and the server are ready afterwards."""
    code = repository / "once" / "1" / "model.py"
    good_code = code.read_text()
    change(pool, "once").result().ok()
    code.write_text("raise SystemError('not again')")
    server.find_one("worker once").kill()
    until("it has failed", lambda: state(server, "once") == "UNAVAILABLE")
    assert not server.answers("/v2/health/ready")
    code.write_text(good_code)
    change(pool, "once").result().ok()
    assert state(server, "once") == "READY" and server.answers("/v2/models/once/ready")
    assert server.answers("/v2/health/ready")
    change(pool, "once", "unload").result().ok()


def test_a_generation_that_fails_during_takeover(
    server: Server, pool: RequestPool, repository: Path
) -> None:
    """The load fails, and the old generation continues to serve."""
    code = repository / "slow" / "1" / "model.py"
    good_code = code.read_text()
    loading = change(pool, "slow")
    old_visit = server.gate.next()
    old_visit.release()
    loading.result().ok()
    loading = change(pool, "slow")
    new_visit = server.gate.next()
    code.write_text("raise SystemError('not again')")
    # The new client does not wait for changes published earlier.
    with silent_local_client(server) as changes:
        new_visit.release()
        changes("slow")
        pending = pool.number("slow", 7)
        assert server.gate.next().pid == new_visit.pid
        os.kill(new_visit.pid, signal.SIGKILL)
        until("it is known", lambda: not server.answers("/v2/models/slow/ready"))
    assert loading.result().status == 400, "all know it, and the model is broken"
    assert pending.result().status == 503
    assert state(server, "slow") == "READY" and server.answers("/v2/models/slow/ready")
    pending = pool.number("slow", 8)
    visit = server.gate.next()
    assert visit.pid == old_visit.pid
    visit.release()
    assert values(pending.result()) == [8]
    code.write_text(good_code)
    change(pool, "slow", "unload").result().ok()
    until("both have ended", lambda: not server.find("scheduler slow"))


def test_a_request_that_arrives_slowly_while_its_model_is_loaded_again(server: Server) -> None:
    data = np.arange(1 << 20, dtype=np.float32).tobytes()
    body, headers = binary_request([("INPUT0", "FP32", [len(data) // 4], data)])
    with (
        request_pool(server) as pool,
        socket.create_connection(("127.0.0.1", server.http_port)) as link,
    ):
        change(pool, "identity").result().ok()
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = f"POST /v2/models/identity/infer HTTP/1.1\r\nHost: {server.url}\r\n{lines}"
        link.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:100_000])
        change(pool, "identity").result().ok()
        until("the old one has ended", lambda: len(server.find("scheduler identity")) == 1)
        link.sendall(body[100_000:])
        link.settimeout(10)
        with link.makefile("rb") as answer:
            assert answer.readline().split()[1] == b"200"
        change(pool, "identity", "unload").result().ok()
