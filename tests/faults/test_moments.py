"""Processes that die at a bad moment: while a model loads, or while the server drains."""

import time
from pathlib import Path

import psutil
import pytest

from tests.faults.scene import RECOVERY_S, wait_replaced
from tests.support import repositories
from tests.support.gates import Visit
from tests.support.load import Load
from tests.support.request_pool import RequestPool, request_pool, values
from tests.support.servers import Server, Start, wait_exited
from tests.support.waiting import until

LOADING_VICTIMS = ("worker", "scheduler", "gateway http 0", "worker zygote", "front zygote")
DRAINING_VICTIMS = (
    "worker gated.0", "scheduler gated", "gateway http 0", "worker zygote", "front zygote",
)  # fmt: skip


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model that waits at the gate while loading, one that does not, one for requests."""
    folder = tmp_path_factory.mktemp("moments") / "models"
    repositories.add_slow(folder, "slow")
    repositories.add(folder, "gated", "simple")
    return folder


@pytest.fixture(scope="module")
def server(repository: Path, start: Start) -> Server:
    """Start a server in explicit mode, in which the slow model is not loaded."""
    flags = ("--model-control-mode=explicit", "--load-model=simple", "--load-model=gated")
    return start(repository, *flags)


@pytest.mark.parametrize("victim", LOADING_VICTIMS)
@pytest.mark.parametrize("load_phase", ["loading", "reloading"])
def test_while_loading(server: Server, load_phase: str, victim: str) -> None:
    """Other models are served. The load returns a correct result and can be repeated."""
    with request_pool(server) as pool, Load(server, memory=0) as load:
        if load_phase == "reloading":
            load_slow(server, pool)
            assert ask_slow(server, pool, 1) == [1]
        else:
            unload_slow(pool)
        pending = pool.send(lambda http: http.load("slow"))
        visit = server.gate.next()
        dying = find(server, victim, visit)
        dying.kill()
        if victim in ("gateway http 0", "worker zygote", "front zygote"):
            wait_replaced(server, dying, victim)
        else:
            assert wait_exited(dying, RECOVERY_S), "a signal is only sent; it takes a moment to die"
        visit.release()
        while not pending.done():
            server.gate.release_arrivals(0.05)
        if victim == "gateway http 0":
            assert isinstance(pending.exception(), Exception)
            until_ready(server)
        elif pending.result().status == 200:
            assert server.answers("/v2/models/slow/ready")
            assert ask_slow(server, pool, 1) == [1]
        else:
            assert pending.result().error
            if load_phase == "loading":
                assert not server.answers("/v2/models/slow/ready")
        if load_phase == "reloading":
            assert ask_slow(server, pool, 2) == [2], "the old one is there while no new one is"
        load_slow(server, pool)
        assert ask_slow(server, pool, 3) == [3]
        unload_slow(pool)
        load.wait_answered(time.monotonic(), RECOVERY_S)
        found = [
            a for a in load.troubles() if not (victim == "gateway http 0" and a.is_disconnected)
        ]
        assert found == []
    until("it is unloaded", lambda: not server.find("worker slow") + server.find("scheduler slow"))
    assert max(server.titles().values()) == 1


def find(server: Server, victim: str, visit: Visit) -> psutil.Process:
    """Return the process to kill; of two generations, the one of the generation that loads."""
    if victim == "worker":
        return psutil.Process(visit.pid)
    if victim == "scheduler":
        return max(server.find("scheduler slow"), key=psutil.Process.create_time)
    return server.find_one(victim)


def until_ready(server: Server) -> None:
    """Release all executions at the gate until the slow model is ready."""

    def ready() -> bool:
        server.gate.release_arrivals(0.02)
        return server.answers("/v2/models/slow/ready")

    until("the model is there", ready)


def load_slow(server: Server, pool: RequestPool) -> None:
    pending = pool.send(lambda http: http.load("slow"))
    while not pending.done():
        server.gate.release_arrivals(0.02)
    pending.result().ok()


def unload_slow(pool: RequestPool) -> None:
    pool.send(lambda http: http.unload("slow")).result().ok()


def ask_slow(server: Server, pool: RequestPool, value: int) -> list[int]:
    pending = pool.number("slow", value)
    while not pending.done():
        server.gate.release_arrivals(0.02)
    return values(pending.result())


@pytest.mark.parametrize("victim", DRAINING_VICTIMS)
def test_while_draining(repository: Path, victim: str) -> None:
    """The server exits in time with status 0 and leaves no resources."""
    flags = ("--model-control-mode=explicit", "--load-model=simple", "--load-model=gated")
    with Server([repository], flags) as server:
        server.wait_ready()
        members = server.tree()
        with request_pool(server) as pool:
            pending = pool.number("gated", 1)
            visit = server.gate.next()
            server.process.terminate()
            until("it is not ready any more", lambda: not server.answers("/v2/health/ready"))
            server.find_one(victim).kill()
            visit.release()
            while not pending.done():
                server.gate.release_arrivals(0.05)
            if pending.exception() is None:
                assert pending.result().status in (200, 503)
            else:
                assert victim == "gateway http 0"
        assert server.wait_exit(20) == 0, server.log()
        server.assert_exited(members)
        assert "Traceback" not in server.log()


def test_the_supervisor_while_draining(repository: Path) -> None:
    """The draining processes exit, too."""
    with Server([repository], ("--model-control-mode=explicit", "--load-model=gated")) as server:
        server.wait_ready()
        members = server.tree()
        with request_pool(server) as pool:
            pool.number("gated", 1)
            server.gate.next()
            server.process.terminate()
            until("it is not ready any more", lambda: not server.answers("/v2/health/ready"))
            server.kill()
            server.assert_exited(members)
