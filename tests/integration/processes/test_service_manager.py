"""A server that a service manager has started: told when it is ready, given its sockets."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from grpc import insecure_channel as grpc_channel
from tritonclient.grpc import service_pb2_grpc

from tests.support import repositories
from tests.support.gates import Gate
from tests.support.servers import ROOT, Server
from tests.support.waiting import until
from tests.support.wire.grpc_calls import is_right, simple_request
from tests.support.wire.raw_http import Http, UnixHttp, raw_connection, read_reply


def test_a_service_manager_hears_of_the_start_and_the_end(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    repository.mkdir()
    repositories.add(repository, "simple")
    repositories.add_slow(repository, "slow")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        address = tempfile.mktemp(prefix="notify-")
        manager.bind(address)
        manager.settimeout(60)
        server = Server([repository], environment={"NOTIFY_SOCKET": address})
        try:
            heard = [manager.recv(4096).decode()]
            while "loading slow" not in heard[-1]:
                heard.append(manager.recv(4096).decode())
            assert any(said.startswith("EXTEND_TIMEOUT_USEC=") for said in heard)
            assert not any("READY=1" in said for said in heard)
            server.gate.next().release()
            while "READY=1" not in heard[-1]:
                heard.append(manager.recv(4096).decode())
            assert heard[-1] == "READY=1\nSTATUS=2/2 models loaded"
            for child in server.tree()[1:]:
                assert "NOTIFY_SOCKET" not in child.environ()
            server.process.send_signal(signal.SIGTERM)
            while "STOPPING=1" not in heard[-1]:
                heard.append(manager.recv(4096).decode())
            assert server.wait_exit(20) == 0
        finally:
            server.discard()
            os.unlink(address)


def test_a_server_on_sockets_that_it_is_given(tmp_path: Path) -> None:
    """They are open before it starts and after it has ended: whoever connects meanwhile waits."""
    repository = tmp_path / "models"
    repository.mkdir()
    repositories.add(repository, "simple")
    folder = Path(tempfile.mkdtemp(prefix="st-"))
    with (
        socket.create_server(("127.0.0.1", 0)) as http,
        socket.create_server(("127.0.0.1", 0)) as grpc,
        socket.socket(socket.AF_UNIX) as unix,
    ):
        unix.bind(str(folder / "http"))
        unix.listen()
        given = (http, grpc, unix)
        port = http.getsockname()[1]
        early = Http(port)
        for _ in range(2):
            server = start(given, "http:grpc:http", repository, folder)
            try:
                early.get("/v2/health/live").ok()  # it came before there was a server
                until("it is ready", lambda: ready(port), 60)
                with contextlib.closing(UnixHttp(folder / "http")) as local:
                    local.get("/v2/health/ready").ok()
                url = f"127.0.0.1:{grpc.getsockname()[1]}"
                with grpc_channel(url) as channel:
                    call = service_pb2_grpc.GRPCInferenceServiceStub(channel)
                    assert is_right(call.ModelInfer(simple_request(), timeout=20))
            finally:
                server.send_signal(signal.SIGTERM)
                assert server.wait(30) == 0
            early.close()
        assert (folder / "http").is_socket()
        socket.create_connection(("127.0.0.1", port)).close()
    (folder / "http").unlink()


def test_who_comes_while_models_load_waits_and_is_answered(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    repository.mkdir()
    repositories.add_slow(repository, "slow")
    folder = Path(tempfile.mkdtemp(prefix="st-"))
    gate = Gate(folder / "gate")
    with socket.create_server(("127.0.0.1", 0)) as http:
        server = start((http,), "http", repository, folder, GATE=str(gate.path))
        try:
            visit = gate.next()
            with raw_connection(http.getsockname()[1]) as early:
                early.sendall(b"GET /v2/models/slow/ready HTTP/1.1\r\nHost: localhost\r\n\r\n")
                visit.release()
                gate.close()
                read_reply(early).ok()
        finally:
            server.send_signal(signal.SIGTERM)
            assert server.wait(30) == 0


def start(
    given: tuple[socket.socket, ...],
    names: str,
    repository: Path,
    folder: Path,
    **environment: str,
) -> subprocess.Popen[bytes]:
    """A server that finds these from descriptor 3 on."""

    def place() -> None:
        copies = [fcntl.fcntl(each, fcntl.F_DUPFD, 100) for each in given]  # beyond their places
        for number, copy in enumerate(copies):
            os.dup2(copy, 3 + number)

    place_pid = 'LISTEN_PID=$$ exec "$@"'
    return subprocess.Popen(
        [
            *("sh", "-c", place_pid, "sh", sys.executable, "-m", "shmserve", "serve"),
            *(f"--model-repository={repository}", f"--run-dir={folder / 'run'}"),
            *("--metrics-port=0",),
        ],
        cwd=ROOT,
        env={**os.environ, **environment, "LISTEN_FDS": str(len(given)), "LISTEN_FDNAMES": names},
        pass_fds=range(3, 3 + len(given)),
        preexec_fn=place,
    )


def ready(port: int) -> bool:
    """Whether the server there says so."""
    with contextlib.closing(Http(port)) as http:
        return http.get("/v2/health/ready").status == 200
