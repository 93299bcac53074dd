"""The server as a tree of processes: titles, gateways, ports, draining, and the exit status."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import repositories
from tests.crowd import crowd, values
from tests.load import Load
from tests.servers import ROOT, Server, free_ports
from tests.waiting import until

Serve = Callable[..., Server]


def test_every_process_says_what_it_is(repository: Path, serve: Serve) -> None:
    repositories.add(repository, "simple")
    server = serve(repository)
    titles = server.titles()
    for title in ("worker simple.0 cpu", "scheduler simple", "gateway http 0"):
        assert titles[title] == 1, titles
    listed = subprocess.run(
        ["ps", "-o", "args=", "-p", str(server.pid)], capture_output=True, text=True, check=True
    )
    assert listed.stdout.startswith("shmserve")
    for process in server.tree():
        assert " ".join(process.cmdline()).startswith("shmserve"), process.cmdline()
        assert process.pid == server.pid or process.ppid() == server.pid


def test_the_run_directory_is_private(repository: Path, serve: Serve) -> None:
    repositories.add(repository, "simple")
    server = serve(repository)
    assert stat.S_IMODE(server.run_dir.stat().st_mode) == 0o700


def test_nothing_of_the_server_has_a_name_in_shared_memory(repository: Path, serve: Serve) -> None:
    """R7: internal memory cannot be registered, for it has no name."""
    repositories.add(repository, "simple", "identity")
    before = set(os.listdir("/dev/shm"))
    server = serve(repository)
    with Load(server, simple=1, memory=0):
        mapped = {m.path for process in server.tree() for m in process.memory_maps()}
        assert not [
            path
            for path in mapped
            if path.startswith("/dev/shm/") and Path(path).name not in before
        ]


def test_two_gateways_share_the_port(repository: Path, serve: Serve) -> None:
    repositories.add(repository, "simple", "identity")
    server = serve(repository, "--gateways=2")
    gateways = server.find("gateway http")
    assert len(gateways) == 2
    with Load(server, simple=6, memory=3) as asking:
        until(
            "both have connections",
            lambda: all(
                any(
                    c.status == "ESTABLISHED" and c.laddr.port == server.http_port
                    for c in g.net_connections()
                )
                for g in gateways
            ),
        )
    assert asking.troubles() == []


def test_models_see_no_sockets_of_clients(repository: Path, serve: Serve) -> None:
    """A worker runs foreign code: it holds no listening socket, and none of a client."""
    repositories.add(repository, "simple")
    server = serve(repository)
    with server.http() as http:
        http.get("/v2/health/live").ok()
        assert server.one("worker simple.0").net_connections("tcp") == []
        assert server.one("scheduler simple").net_connections("tcp") == []


def test_no_process_can_gain_privileges(repository: Path, serve: Serve) -> None:
    """R24: what models run (setuid programs) has no more rights than the server."""
    repositories.add(repository, "simple")
    for process in serve(repository).tree()[1:]:
        status = Path(f"/proc/{process.pid}/status").read_text()
        assert "NoNewPrivs:\t1\n" in status, process.cmdline()


def test_sigterm_loses_nothing_that_was_taken(repository: Path) -> None:
    repositories.add(repository, "gated")
    server = Server([repository])
    try:
        server.wait_ready()
        members = server.tree()
        with crowd(server) as people:
            taken = [people.number("gated", value) for value in range(3)]
            visit = server.gate.next()
            server.wait_pending("gated", 2)
            server.process.terminate()
            until("it is not ready any more", lambda: not server.answers("/v2/health/ready"))
            assert server.wait_exit(0.2) is None
            visit.release()
            for _ in range(2):
                server.gate.next().release()
            assert [values(answer.result()) for answer in taken] == [[0], [1], [2]]
        assert server.wait_exit(10) == 0
        server.assert_gone(members)
    finally:
        server.discard()


def test_sigterm_under_load(repository: Path) -> None:
    repositories.add(repository, "simple", "identity")
    server = Server([repository])
    try:
        server.wait_ready()
        members = server.tree()
        with Load(server) as asking:
            server.process.terminate()
            assert server.wait_exit(15) == 0
        for trouble in asking.troubles():
            # After it stopped listening there is nobody to answer; whoever was heard was answered.
            assert trouble.lost or trouble.trouble.startswith("503"), trouble
        assert not [trouble for trouble in asking.troubles() if "wrong" in trouble.trouble]
        server.assert_gone(members)
    finally:
        server.discard()


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_is_fast(repository: Path, second: signal.Signals) -> None:
    repositories.add(repository, "gated")
    server = Server([repository])
    try:
        server.wait_ready()
        members = server.tree()
        with crowd(server) as people:
            stuck = people.number("gated", 1)
            server.gate.next()
            server.process.terminate()
            assert server.wait_exit(0.5) is None
            os.kill(server.pid, second)
            began = time.monotonic()
            assert server.wait_exit(5) is not None
            assert time.monotonic() - began < 2
            assert stuck.exception() or stuck.result().status == 503
        server.assert_gone(members)
    finally:
        server.discard()


def test_the_exit_timeout_ends_what_does_not_end(repository: Path) -> None:
    repositories.add(repository, "gated")
    server = Server([repository], ["--exit-timeout-secs=2"])
    try:
        server.wait_ready()
        members = server.tree()
        with crowd(server) as people:
            stuck = people.number("gated", 1)
            server.gate.next()
            began = time.monotonic()
            server.process.terminate()
            assert server.wait_exit(10) == 0
            assert 0.8 < time.monotonic() - began < 3
            assert stuck.exception() or stuck.result().status == 503
        server.assert_gone(members)
    finally:
        server.discard()


def test_sigint_ends_it_too(repository: Path) -> None:
    repositories.add(repository, "constant")
    server = Server([repository])
    try:
        server.wait_ready()
        members = server.tree()
        os.kill(server.pid, signal.SIGINT)
        assert server.wait_exit(10) == 0
        server.assert_gone(members)
    finally:
        server.discard()


def test_sigterm_while_loading(repository: Path) -> None:
    repositories.add(repository, "constant")
    code = repository / "constant" / "1" / "model.py"
    waiting = (
        "import os, socket\ngate = socket.socket(socket.AF_UNIX)\n"
        "gate.connect(os.environ['GATE'])\n"
        'gate.sendall(b\'{"batch": [], "rows": [], "pid": 0}\\n\')\ngate.recv(1)\n'
    )
    code.write_text(code.read_text().replace("import numpy", waiting + "import numpy", 1))
    server = Server([repository])
    try:
        server.gate.next()
        assert not server.answers("/v2/health/ready")
        members = server.tree()
        server.process.terminate()
        assert server.wait_exit(10) is not None
        server.assert_gone(members)
    finally:
        server.discard()


def test_a_taken_port_is_a_clear_error(repository: Path, serve: Serve) -> None:
    repositories.add(repository, "constant")
    server = serve(repository)
    (metrics,) = free_ports(1)
    other = subprocess.run(
        [
            *(sys.executable, "-m", "shmserve", "serve", f"--model-repository={repository}"),
            *(
                "--http-address=127.0.0.1",
                f"--http-port={server.http_port}",
                "--allow-grpc=false",
                f"--metrics-port={metrics}",
                "--allow-grpc=false",
            ),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert other.returncode not in (0, -9)
    assert str(server.http_port) in other.stderr
    assert "Traceback" not in other.stderr


def test_a_run_directory_in_use_is_a_clear_error(repository: Path, serve: Serve) -> None:
    repositories.add(repository, "constant")
    server = serve(repository)
    other = Server([repository], run_dir=server.run_dir)
    try:
        assert other.wait_exit(20) not in (0, None)
        assert "in use by another server" in other.log()
        assert "Traceback" not in other.log()
    finally:
        other.discard()
    assert server.answers("/v2/health/ready")
