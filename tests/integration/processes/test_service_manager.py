"""A server started by a service manager: readiness notifications and inherited sockets."""

import contextlib
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from grpc import insecure_channel as grpc_channel
from tritonclient.grpc import service_pb2_grpc

from tests.rigs.service_manager import Manager, start
from tests.support import repositories
from tests.support.gates import Gate
from tests.support.servers import Server, running
from tests.support.waiting import until
from tests.support.wire.grpc_calls import is_right, simple_request
from tests.support.wire.raw_http import Http, UnixHttp, raw_connection, read_reply


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    repositories.add(folder, "simple")
    return folder


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Return a folder whose path leaves room for the names of sockets."""
    with tempfile.TemporaryDirectory(prefix="st-") as path:
        yield Path(path)


def test_a_service_manager_learns_of_start_and_stop(manager: Manager, repository: Path) -> None:
    repositories.add_slow(repository, "slow")
    with Server([repository], environment={"NOTIFY_SOCKET": manager.address}) as server:
        message = manager.receive("loading slow")
        assert any(line.startswith("EXTEND_TIMEOUT_USEC=") for line in message)
        assert not any("READY=1" in line for line in message)
        server.gate.next().release()
        assert manager.receive("READY=1")[-1] == "READY=1\nSTATUS=2/2 models ready"
        for child in server.tree()[1:]:
            assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC"} & child.environ().keys()
        server.process.send_signal(signal.SIGTERM)
        manager.receive("STOPPING=1")
        assert server.wait_exit(20) == 0


def test_a_sign_of_life_is_one_of_all_processes(manager: Manager, repository: Path) -> None:
    request = {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "200000"}
    with running(repository, "--gateways=2", environment=request, grpc=True) as server:
        manager.receive("WATCHDOG=1")
        for title in ("gateway http 1", "gateway grpc", "scheduler simple"):
            victim, logged = server.find_one(title), len(server.log())
            victim.suspend()  # the supervisor soon kills and replaces the suspended process
            # The line may name a replacement that is starting, too.
            server.wait_log(f"{title.replace('http ', '')} (pid {victim.pid})", after=logged)
            server.wait_log("all processes respond again", after=logged)
            manager.receive("WATCHDOG=1")


def test_a_reload(manager: Manager, repository: Path) -> None:
    """Changed settings take effect, and the log names the changes that need a restart."""
    file, tokens = repository.parent / "flags", repository.parent / "tokens"
    tokens.write_text("the-first-of-tokens\n")
    file.write_text(f"auth-token-file: {tokens}\nid: one\n")
    flags = (f"--config={file}",)
    notified = {"NOTIFY_SOCKET": manager.address}
    with running(repository, *flags, environment=notified, grpc=True) as server:
        manager.receive("READY=1")

        def reload(log_text: str) -> None:
            server.process.send_signal(signal.SIGHUP)
            assert "\nMONOTONIC_USEC=" in manager.receive("RELOADING=1")[-1]
            manager.receive("READY=1")
            server.wait_log(log_text)

        def status(token: str) -> int:
            return client.get("/v2/models/simple", {"Authorization": f"Bearer {token}"}).status

        with server.http() as client:  # a keep-alive connection
            assert status("another-of-tokens") == 401
            # The result for a repeated request head is cached, but no longer than its token is
            # valid.
            assert [status("the-first-of-tokens") for _ in range(4)] == [200] * 4
            tokens.write_text("another-of-tokens\n")
            file.write_text(f"auth-token-file: {tokens}\nid: two\nlog-verbose: 1\n")
            repositories.add_as(repository, "later", "simple")
            reload("--id has changed, and takes effect after a restart: two, was one")
            assert "--auth-token-file has changed: 1 tokens, was 1 tokens" in server.log()
            assert "--log-verbose has changed: 1, was 0" in server.log()
            assert "log_verbose_level=1" in server.log()
            assert (status("the-first-of-tokens"), status("another-of-tokens")) == (401, 200)
            assert server.find("worker later.0")
            with grpc_channel(server.grpc_url) as channel:
                infer = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer
                new_metadata = (("authorization", "Bearer another-of-tokens"),)
                assert is_right(infer(simple_request(), timeout=20, metadata=new_metadata))
            # A replacement gateway has the new tokens, too.
            server.find_one("gateway http 0").kill()
            until("a gateway", lambda: server.answers("/v2/health/ready"))
        with server.http() as client:
            assert (status("the-first-of-tokens"), status("another-of-tokens")) == (401, 200)
            file.write_text(f"auth-token-file: {tokens}\ngateways: x\nlog-verbos: 0\n")
            reload(f"configuration not reloaded: --config: '{file}' line 3: log-verbos: there")
            assert f"'{file}' line 2: gateways: 'x' is not an integer" in server.log()
            tokens.write_text("short\n")
            file.write_text(f"auth-token-file: {tokens}\n")
            reload(f"configuration not reloaded: --config: '{file}' line 1: --auth-token-file: ")
            file.write_text("")
            reload(
                "--auth-token-file has changed, and takes effect after a restart: 0 tokens, was 1"
            )
            assert (status("the-first-of-tokens"), status("another-of-tokens")) == (401, 200)


def test_a_server_on_inherited_sockets(repository: Path, short_folder: Path) -> None:
    """The sockets are open before the start and after the exit, so clients wait meanwhile."""
    with (
        socket.create_server(("127.0.0.1", 0)) as http,
        socket.create_server(("127.0.0.1", 0)) as grpc,
        socket.socket(socket.AF_UNIX) as unix,
    ):
        unix.bind(str(short_folder / "http"))
        unix.listen()
        descriptors = [http.fileno(), grpc.fileno(), unix.fileno()]
        port = http.getsockname()[1]
        early_client = Http(port)
        for _ in range(2):
            server = start(descriptors, "http:grpc:http", repository, short_folder)
            try:
                early_client.get(
                    "/v2/health/live"
                ).ok()  # the client connected before the server started
                until("it is ready", lambda: ready(port))
                with contextlib.closing(UnixHttp(short_folder / "http")) as local:
                    local.get("/v2/health/ready").ok()
                url = f"127.0.0.1:{grpc.getsockname()[1]}"
                with grpc_channel(url) as channel:
                    call = service_pb2_grpc.GRPCInferenceServiceStub(channel)
                    assert is_right(call.ModelInfer(simple_request(), timeout=20))
            finally:
                server.send_signal(signal.SIGTERM)
                assert server.wait(30) == 0
            early_client.close()
        assert (short_folder / "http").is_socket()
        socket.create_connection(("127.0.0.1", port)).close()
    (short_folder / "http").unlink()


def test_a_client_connected_in_a_load_is_answered_after(tmp_path: Path, short_folder: Path) -> None:
    repository = tmp_path / "models"
    repositories.add_slow(repository, "slow")
    gate = Gate(short_folder / "gate")
    with socket.create_server(("127.0.0.1", 0)) as http:
        server = start([http.fileno()], "http", repository, short_folder, GATE=str(gate.path))
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


def ready(port: int) -> bool:
    with contextlib.closing(Http(port)) as http:
        return http.get("/v2/health/ready").status == 200
