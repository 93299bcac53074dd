"""The server as a process tree: titles, gateways, ports, draining, and the exit status."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import repositories
from tests.support.load import Load
from tests.support.request_pool import request_pool, values
from tests.support.servers import Server, Start, refuses_connections, run_python
from tests.support.waiting import until
from tests.support.wire.raw_http import Http

# The server is terminated as soon as its run directory exists, and again when all other processes
# have exited.
_IMPATIENT_PROGRAM = """
import os, signal, sys
from shmserve import cli
from shmserve.supervisor.host.run_directory import RunDirectory

lock, remove = RunDirectory._lock, RunDirectory.remove

def locked(self, timeout_s):
    fd = lock(self, timeout_s)
    os.kill(os.getpid(), signal.SIGTERM)
    return fd

def removed(self):
    os.kill(os.getpid(), signal.SIGTERM)
    remove(self)

RunDirectory._lock, RunDirectory.remove = locked, removed
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def server(models: Path, start: Start) -> Server:
    repositories.add(models, "simple", "identity")
    return start(models, "--gateways=2")


def test_workers_are_killed_first_when_memory_is_short(server: Server) -> None:
    def score(title: str) -> int:
        return int(Path(f"/proc/{server.find_one(title).pid}/oom_score_adj").read_text())

    supervisor_score = score("supervisor")
    for title in ("front zygote", "gateway http 0", "scheduler simple"):
        assert score(title) == min(1000, supervisor_score + 100)
    assert score("worker simple.0") == min(1000, supervisor_score + 500)


def test_every_process_has_a_descriptive_title(server: Server) -> None:
    titles = server.titles()
    for title in ("worker simple.0 cpu", "scheduler simple", "gateway http 0"):
        assert titles[title] == 1, titles
    # Each model costs the processes that the README states.
    of_models = [t.split()[1].partition(".")[0] for t in titles.elements() if " " in t]
    assert [of_models.count(name) for name in ("simple", "identity")] == [2, 2], titles
    ps = subprocess.run(
        ["ps", "-o", "args=", "-p", str(server.pid)], capture_output=True, text=True, check=True
    )
    assert ps.stdout.startswith("shmserve")
    for process in server.tree():
        assert " ".join(process.cmdline()).startswith("shmserve"), process.cmdline()
        assert process.pid == server.pid or process.ppid() == server.pid


def test_nothing_of_the_server_has_a_name_in_shared_memory(server: Server) -> None:
    """Internal memory has no name, so it cannot be registered."""
    with Load(server, simple=1, memory=0):
        mapped = {m.path for process in server.tree() for m in process.memory_maps()}
        assert not [path for path in mapped if path.startswith("/dev/shm/")]


def test_two_gateways_share_the_port(server: Server) -> None:
    """The kernel assigns connections at random, so the test connects until both have some."""
    gateways = server.find("gateway http")
    assert len(gateways) == 2
    with contextlib.ExitStack() as connections, Load(server, simple=6, memory=3) as load:

        def have_both_connections() -> bool:
            connections.enter_context(socket.create_connection(("127.0.0.1", server.http_port)))
            return all(
                any(
                    c.status == "ESTABLISHED" and c.laddr.port == server.http_port
                    for c in g.net_connections()
                )
                for g in gateways
            )

        until("both have connections", have_both_connections)
    assert load.troubles() == []


def test_models_see_no_sockets_of_clients(server: Server, http: Http) -> None:
    """A worker runs foreign code, so it has no listening socket and no client's connection."""
    http.get("/v2/health/live").ok()
    assert server.find_one("worker simple.0").net_connections("tcp") == []
    assert server.find_one("scheduler simple").net_connections("tcp") == []


def test_no_process_can_gain_privileges(server: Server) -> None:
    """Setuid programs that models run have no more rights than the server."""
    for process in server.tree()[1:]:
        status = Path(f"/proc/{process.pid}/status").read_text()
        assert "NoNewPrivs:\t1\n" in status, process.cmdline()


def test_each_process_has_its_own_process_group(server: Server) -> None:
    """A model that signals its group, for instance by `os.kill(0, SIGKILL)`, ends its worker."""
    members = server.tree()
    assert {os.getpgid(process.pid) for process in members} == {process.pid for process in members}


def errors(server: Server) -> list[str]:
    return [line for line in server.log().splitlines() if line.startswith("E ")]


@contextlib.contextmanager
def ending(repository: Path, model: str, *flags: str) -> Iterator[Server]:
    """Yield a ready server that the with block stops; check that all of its processes exit."""
    repositories.add(repository, model)
    with Server([repository], flags) as server:
        members = server.wait_ready().tree()
        yield server
        server.assert_exited(members)
        assert not errors(server)


def test_sigterm_answers_accepted_requests(repository: Path) -> None:
    with ending(repository, "gated") as server:
        with (
            request_pool(server) as pool,
            socket.create_connection(("127.0.0.1", server.http_port)) as idle,
        ):
            pending_answers = [pool.number("gated", value) for value in range(3)]
            visit = server.gate.next()
            server.wait_pending("gated", 2)
            server.process.terminate()
            until("nobody is let in", lambda: refuses_connections(server.http_port))
            assert idle.recv(1) == b""
            assert server.wait_exit(0.2) is None
            visit.release()
            for _ in range(2):
                server.gate.next().release()
            assert [values(answer.result()) for answer in pending_answers] == [[0], [1], [2]]
        assert server.wait_exit(10) == 0


def test_a_second_signal_is_fast(repository: Path) -> None:
    """A second signal is ignored at once: timeout(1) signals its child, then the group."""
    with ending(repository, "gated") as server, request_pool(server) as pool:
        stuck_request = pool.number("gated", 1)
        server.gate.next()
        server.process.terminate()
        server.wait_log("stopping")  # two pending signals of the same number would be merged
        os.kill(server.pid, signal.SIGINT)
        assert server.wait_exit(1.1) is None
        os.kill(server.pid, signal.SIGINT)
        start_s = time.monotonic()
        assert server.wait_exit(5) is not None
        assert time.monotonic() - start_s < 2
        assert stuck_request.result().status == 503


def test_the_exit_timeout_ends_a_hanging_request(repository: Path) -> None:
    flag = "--exit-timeout-secs=2"
    with ending(repository, "gated", flag) as server, request_pool(server) as pool:
        stuck_request = pool.number("gated", 1)
        server.gate.next()
        start_s = time.monotonic()
        server.process.terminate()
        # The model never ends by itself. Without the flag, the server would wait for 30 s.
        assert server.wait_exit(15) == 0
        assert time.monotonic() - start_s > 1.8
        assert stuck_request.result().status == 503


def test_sigint_ends_the_server(repository: Path) -> None:
    with ending(repository, "constant") as server:
        os.kill(server.pid, signal.SIGINT)
        assert server.wait_exit(10) == 0


def test_sigterm_while_loading(repository: Path) -> None:
    repositories.add_slow(repository, "slow")
    with Server([repository]) as server:
        server.gate.next()
        assert not server.answers("/v2/health/ready")
        members = server.tree()
        server.process.terminate()
        assert server.wait_exit(10) is not None
        server.assert_exited(members)


@pytest.mark.parametrize("verb", ["serve", "check"])
def test_signals_at_the_first_and_at_the_last_moment(tmp_path: Path, verb: str) -> None:
    """At both moments the server has files that it must remove."""
    (tmp_path / "models").mkdir()
    arguments = [f"--model-repository={tmp_path}/models"]
    flags = [*arguments, "--http-port=0", "--metrics-port=0", "--allow-grpc=false"]
    flags = flags if verb == "serve" else [f"{tmp_path}/models"]
    run = run_python("-c", _IMPATIENT_PROGRAM, verb, f"--run-dir={tmp_path}/run", *flags)
    assert run.returncode in ((0,) if verb == "serve" else (2, 143)), run.stderr
    assert os.listdir(tmp_path) == ["models"]
