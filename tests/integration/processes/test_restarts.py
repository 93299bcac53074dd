"""Restarts under load over every protocol; SHMSERVE_RESTARTS sets their number."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.rigs.service_manager import Manager, start
from tests.rigs.systemd_rig import Systemd
from tests.support import repositories
from tests.support.servers import ROOT, Server
from tests.support.waiting import until

RESTART_COUNT = int(os.environ.get("SHMSERVE_RESTARTS", "2"))
CLIENTS = 8  # number of clients per protocol
PROGRAM = (sys.executable, "-m", "tests.rigs.restart_load", str(CLIENTS))


class Load:
    """The program that runs the clients."""

    def __init__(self, command: Sequence[str | Path]) -> None:
        pipe = subprocess.PIPE
        self._program = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)

    def found(self) -> dict[str, dict[str, int]]:
        """Return the results of the clients of each protocol, and their numbers."""
        assert self._program.stdin is not None and self._program.stdout is not None
        with contextlib.suppress(ValueError):  # raised if the program was ended
            self._program.stdin.write("\n")
            self._program.stdin.flush()
        outcomes: dict[str, dict[str, int]] = json.loads(self._program.stdout.readline())
        return outcomes

    def wait_answered(self) -> None:
        """Wait until the clients of each protocol have further responses."""
        found = {p: sum(counts.values()) for p, counts in self.found().items()}

        def has_answered() -> bool:
            later = self.found()
            return all(sum(later[p].values()) - found[p] > 5 * CLIENTS for p in found)

        until("every protocol answers", has_answered)

    def end(self) -> dict[str, dict[str, int]]:
        """Stop the program; return all results."""
        assert self._program.stdin is not None and self._program.stdout is not None
        self._program.stdin.close()
        outcomes: dict[str, dict[str, int]] = json.loads(self._program.stdout.readlines()[-1])
        self._program.wait()
        self._program.stdout.close()
        return outcomes


def assert_unnoticed(counts_by_protocol: dict[str, dict[str, int]]) -> None:
    print(counts_by_protocol)
    assert {protocol: list(counts) for protocol, counts in counts_by_protocol.items()} == {
        protocol: ["right"] for protocol in ("http", "grpc", "native")
    }


@pytest.fixture
def folder(run_dir: Path) -> Path:
    repositories.add(run_dir / "models", "simple", "identity")
    return run_dir


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_restarts_at_lent_sockets(manager: Manager, folder: Path, number: signal.Signals) -> None:
    """Regions outlive the servers: the manager stores their descriptors until they are removed."""
    with (
        socket.create_server(("127.0.0.1", 0), backlog=100) as http,
        socket.create_server(("127.0.0.1", 0), backlog=100) as grpc,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as local,
    ):
        local.bind(str(folder / "local"))
        local.listen(100)
        lent = {"http": [http.fileno()], "grpc": [grpc.fileno()], "local": [local.fileno()]}

        def begin() -> subprocess.Popen[bytes]:
            descriptors = [
                (name, fd) for name, fds in (lent | manager.kept_descriptors).items() for fd in fds
            ]
            names = ":".join(name for name, _ in descriptors)
            environment = {"NOTIFY_SOCKET": manager.address}
            server = start(
                [fd for _, fd in descriptors], names, folder / "models", folder, **environment
            )
            manager.receive("READY=1")
            return server

        server = begin()
        ports = (str(sock.getsockname()[1]) for sock in (http, grpc))
        is_killed = number == signal.SIGKILL
        load = Load([*PROGRAM, *ports, folder / "local", "registering", *["killed"] * is_killed])
        try:
            try:
                load.wait_answered()
                for _ in range(RESTART_COUNT):
                    server.send_signal(number)
                    assert server.wait(40) == (-signal.SIGKILL if is_killed else 0)
                    manager.receive_all()
                    server = begin()
                    load.wait_answered()
                assert len(manager.kept_descriptors) >= CLIENTS // 2
            finally:
                outcomes = load.end()  # each client removes its region
            until("no region is stored", lambda: not manager.kept_descriptors)
        finally:
            server.terminate()
            server.wait()
        assert_unnoticed(outcomes)


def test_restarts_by_takeover(folder: Path) -> None:
    """Each server starts while its predecessor runs, without a service manager."""
    run_dir = folder / "run"
    server = Server([folder / "models"], run_dir=run_dir, grpc=True)
    first_server, load = server, None
    try:
        server.wait_ready()
        ports = str(server.http_port), str(server.grpc_port)
        load = Load([*PROGRAM, *ports, run_dir, "registering"])
        load.wait_answered()
        for _ in range(RESTART_COUNT):
            predecessor, same_ports = server, (first_server.http_port, first_server.metrics_port)
            server = Server(
                [folder / "models"], ["--take-over"], run_dir=run_dir, ports=same_ports, grpc=True
            )
            assert predecessor.wait_exit(60) == 0, predecessor.log() + server.log()
            server.wait_log("the previous server has exited")
            load.wait_answered()
            if predecessor is not first_server:
                predecessor.discard()
    finally:
        if load is not None:
            outcomes = load.end()
        server.stop()
        first_server.discard()
    assert_unnoticed(outcomes)
    assert not run_dir.exists()


# The checkout is not installed at the service's path, and the test has no journal.
_DROP_IN = f"""
[Unit]
StartLimitIntervalSec=0
[Service]
Environment="PYTHONPATH={ROOT}"
StandardOutput=append:/var/lib/log
StandardError=append:/var/lib/log
"""


def test_restarts_by_a_real_systemd(systemd: Systemd) -> None:
    hidden = ("/home", "/root", "/tmp")
    if any(Path(path).is_relative_to(top) for path in (ROOT, sys.executable) for top in hidden):
        pytest.skip("this Python is in a folder that a service does not see")
    systemd.run(sys.executable, "-m", "shmserve", "systemd", "install")
    units = systemd.path("/etc/systemd/system")
    (units / "shmserve.service.d/90-test.conf").write_text(_DROP_IN)
    repositories.add(systemd.path("/var/lib/shmserve/models"), "simple", "identity")
    systemd.run("systemctl", "daemon-reload")
    log = systemd.path("/var/lib/log")
    start_output = systemd.run("systemctl", "enable", "--now", "shmserve.service")
    assert "status" not in start_output, log.read_text() if log.exists() else start_output

    # Run as the server's user, whose shared memory the server may open.
    user = ("setpriv", "--reuid=shmserve", "--regid=shmclients", "--clear-groups")
    path = f"PYTHONPATH={ROOT}"
    inside = ("nsenter", f"--target={systemd.pid}", "--all", *user, "env", path)
    doors = ("8000", "8001", "/run/shmserve/local.sock", "registering")
    for restart_verb in (("restart",), ("kill", "--signal=KILL", "--kill-whom=main")):
        load = Load([*inside, *PROGRAM, *doors, *["killed"] * (restart_verb[0] == "kill")])
        try:
            load.wait_answered()
            for _ in range(RESTART_COUNT):
                assert "status" not in systemd.run("systemctl", *restart_verb, "shmserve.service")
                load.wait_answered()
        finally:
            outcomes = load.end()
        assert_unnoticed(outcomes)
