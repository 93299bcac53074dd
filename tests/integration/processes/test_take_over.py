"""Failures while a server takes over; for uninterrupted clients see test_restarts.py."""

import contextlib
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import shmserve.client
from shmserve.client.events import EventReader
from shmserve.errors import InvalidArgument
from shmserve.ipc.messages.publications import ProcessStarted
from shmserve.supervisor.checks.access import server_pid
from shmserve.supervisor.host.handover_link import Offer
from tests.rigs.service_manager import run_manager
from tests.support import repositories
from tests.support.load import InferInMemory
from tests.support.servers import Server
from tests.support.users import ALICE, as_user, needs_users
from tests.support.waiting import until
from tests.support.wire.raw_http import UnixHttp

TAKE_OVER = "--take-over"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    repositories.add(tmp_path, "simple", "identity")
    return tmp_path


@pytest.fixture
def slow_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a repository whose model waits at the gate while it is loaded."""
    folder = tmp_path_factory.mktemp("slow")
    repositories.add_slow(folder, "slow")
    return folder


@pytest.fixture
def run_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="st-") as folder:
        yield Path(folder) / "run"


@contextlib.contextmanager
def first(repository: Path, run_dir: Path, *flags: str, **environment: str) -> Iterator[Server]:
    """Yield the server that another server replaces."""
    with Server([repository], flags, run_dir=run_dir, environment=environment) as server:
        yield server.wait_ready()
        server.stop()


def start_successor(server: Server, repository: Path, *flags: str) -> Server:
    ports = server.http_port, server.metrics_port
    return Server([repository], [TAKE_OVER, *flags], run_dir=server.run_dir, ports=ports)


def refusal(run_dir: Path, repository: Path) -> str:
    """Return the one-line error of a server that cannot take over."""
    with Server([repository], [TAKE_OVER], run_dir=run_dir) as server:
        assert server.wait_exit(30) not in (0, None)
        (line,) = server.log().splitlines()
        return line.replace(str(run_dir), "RUN_DIR")


def assert_untouched(server: Server) -> None:
    with server.http() as http, shmserve.client.connect(server.run_dir) as native:
        http.get("/v2/health/ready").ok()
        assert native.models()
    assert not list(server.run_dir.glob("g[0-9]*"))


def test_no_predecessor_can_be_taken_over(repository: Path, run_dir: Path) -> None:
    expected_text = "no server runs in 'RUN_DIR': start this one without --take-over"
    assert expected_text in refusal(run_dir, repository)
    assert not run_dir.exists()
    with first(repository, run_dir) as server:
        (run_dir / "handover").rename(run_dir / "hidden")
        text = refusal(run_dir, repository)
        assert "the server of 'RUN_DIR' has a version that cannot hand over: stop it, and" in text
        (run_dir / "hidden").rename(run_dir / "handover")
        assert_untouched(server)


def test_a_service_managers(repository: Path, run_dir: Path) -> None:
    with (
        run_manager() as manager,
        first(repository, run_dir, NOTIFY_SOCKET=manager.address) as server,
    ):
        text = refusal(run_dir, repository)
        assert (
            "cannot be taken over: a service manager started the server and must restart it" in text
        )
        assert_untouched(server)


@needs_users
def test_another_users(repository: Path, run_dir: Path) -> None:
    with first(repository, run_dir) as server:
        text = f"--take-over: '{run_dir}' belongs to another user"
        run_dir.parent.chmod(0o755)
        with pytest.raises(InvalidArgument, match=text):
            as_user(ALICE, lambda: Offer.of(run_dir))
        for path in (run_dir, run_dir / "handover"):
            path.chmod(0o777)  # insecure permissions: the old and the new server both check them
        with pytest.raises(InvalidArgument, match=text):
            as_user(ALICE, lambda: Offer.of(run_dir))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
            as_user(ALICE, lambda: link.connect(str(run_dir / "handover")))
            assert b"another user" in link.recv(1000) and not link.recv(1000)
        run_dir.chmod(0o700)
        assert_untouched(server)


def test_a_successor_fails_early(repository: Path, slow_models: Path, run_dir: Path) -> None:
    """The successor is killed, terminated, or has no model; another one can still take over."""
    with first(repository, run_dir) as server, server.http() as http:
        infer_in_memory = InferInMemory(http)
        for number in (signal.SIGKILL, signal.SIGTERM):
            failing = start_successor(server, slow_models)
            failing.gate.next()
            assert "another successor is taking over" in refusal(run_dir, repository)
            failing.process.send_signal(number)
            assert failing.wait_exit(20) is not None
            until("its folder is gone", lambda: not list(run_dir.glob("g[0-9]*")))
            failing.discard()
            server.wait_log("this server continues")
            assert_untouched(server)
        (slow_models / "slow" / "1" / "model.py").write_text("raise ValueError('not today')")
        failing = start_successor(server, slow_models)
        assert failing.wait_exit(60) == 1
        failing.discard()
        assert infer_in_memory(http, 1) == ""
        infer_in_memory.close(http)
        assert_untouched(server)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_first_one_ends_meanwhile(
    repository: Path, slow_models: Path, run_dir: Path, number: signal.Signals
) -> None:
    """The successor exits at once, although its model still loads."""
    with first(repository, run_dir) as server:
        following = start_successor(server, slow_models)
        following.gate.next()
        server.process.send_signal(number)
        assert server.wait_exit(30) is not None
        assert following.wait_exit(30) == 1
        following.gate.close()
        assert "the previous server has exited" in following.log()
        following.discard()


def test_a_successor_takes_over_sockets_and_regions(repository: Path, run_dir: Path) -> None:
    """Unix sockets, addresses and regions are taken over twice; the last server leaves nothing."""
    path = run_dir.parent / "http.sock"
    flags = (f"--http-unix-socket={path}", "--gateways=1")
    server = Server([repository], flags, run_dir=run_dir)
    servers = [server.wait_ready()]
    try:
        with server.http() as http:
            infer_in_memory = InferInMemory(http)
        addresses = (run_dir / "guests" / "addresses").read_text()
        for _ in range(2):
            following = start_successor(server, repository, *flags)
            servers.append(following)
            assert servers[-2].wait_exit(60) == 0, following.log()
            following.wait_log("the previous server has exited")
            assert (run_dir / "guests" / "addresses").read_text() == addresses
            with contextlib.closing(UnixHttp(path)) as unix, server.http() as http:
                unix.get("/v2/health/ready").ok()
                assert infer_in_memory(http, 1) == ""
            with shmserve.client.connect(run_dir) as native:
                assert native.models()
            with EventReader(run_dir) as reader:
                events = [received.event for received in reader.snapshot()]
            pids = {event.pid for event in events if isinstance(event, ProcessStarted)}
            assert {process.pid for process in following.find("gateway")} <= pids
            assert server_pid(run_dir) == following.pid
            server = following
            assert len(list(run_dir.glob("g[0-9]*"))) == 1
            for process in following.find("worker"):
                assert not process.net_connections("inet"), "it has no listening socket"
        with server.http() as http:
            infer_in_memory.close(http)
        server.stop()
        assert not run_dir.exists()
        assert not path.exists()
    finally:
        for started_server in servers:
            started_server.discard()
