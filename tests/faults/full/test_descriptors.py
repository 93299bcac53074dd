"""Connections up to the descriptor limit: clients are served or rejected, no process spins."""

import contextlib
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmserve.ipc import endpoints
from tests.faults.scene import RECOVERY_S, State, assert_recovers, scene, wait_replaced
from tests.support import repositories
from tests.support.leaks import cpu_seconds
from tests.support.regions import SharedObject
from tests.support.servers import Server, Start
from tests.support.waiting import until
from tests.support.wire.grpc_calls import is_right, simple_request, stub

_LIMIT = 300
_CONNECTION_COUNT = 2 * _LIMIT
_STARTED_S = 15.0
_IDLE_CORE_SHARE = 0.5  # share of a core that an idle process may use
_SOCKET_NAMES = ("http", "unix http", "metrics", "grpc", "control", "door", "guests", "gateways")


@pytest.fixture(scope="module")
def server(models: Path, folder: Path, start: Start) -> Server:
    """Start a server whose processes have a low descriptor limit."""
    repositories.add(models, "simple", "identity")
    limit = ["prlimit", f"--nofile={_LIMIT}:{_LIMIT}"]
    flags = [f"--http-unix-socket={folder / 'socket'}"]
    return start(models, *flags, grpc=True, prefix=limit)


def address(server: Server, name: str) -> tuple[int, int, str | tuple[str, int]]:
    """Return the family, type and address of one of the server's sockets."""
    ports = {"http": server.http_port, "metrics": server.metrics_port, "grpc": server.grpc_port}
    if name in ports:
        return socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", ports[name])
    local_clients = endpoints.local_client_folder(server.run_dir)
    failures = {
        "control": lambda: server.run_dir / "control",
        "door": lambda: local_clients / "door",
        "guests": lambda: next(
            path for path in sorted(local_clients.iterdir()) if path.name != "door"
        ),
        "gateways": lambda: next(
            path for path in sorted(server.run_dir.glob("s*")) if stat.S_ISSOCK(path.stat().st_mode)
        ),
        "unix http": lambda: Path(
            next(f for f in server.command if f.startswith("--http-unix")).partition("=")[2]
        ),
    }[name]()
    kind = socket.SOCK_SEQPACKET if name == "door" else socket.SOCK_STREAM
    return socket.AF_UNIX, kind, str(failures)


@contextlib.contextmanager
def crowded(server: Server, name: str) -> Iterator[None]:
    """Open as many silent connections as the server accepts."""
    family, kind, socket_address = address(server, name)
    with contextlib.ExitStack() as stack:
        for _ in range(_CONNECTION_COUNT):
            sock = stack.enter_context(socket.socket(family, kind))
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):  # raised if the listen queue is full
                sock.connect(socket_address)
        yield


@pytest.mark.parametrize("name", _SOCKET_NAMES)
def test_many_silent_connections(server: Server, name: str) -> None:
    state_before = State.of(server)
    with scene(server) as stage:
        with crowded(server, name):
            assert_recovers(stage, time.monotonic())
            with stub(server) as call:
                assert is_right(call.ModelInfer(simple_request(), timeout=10, wait_for_ready=True))
            # New connections are accepted again: health checks open a connection each.
            until("it is ready", lambda: server.answers("/v2/health/ready"), RECOVERY_S)
        assert_recovers(stage, time.monotonic())
    with crowded(server, name):
        until("all have come", lambda: are_idle(server))
        cpu_before = cpu_seconds(server)
        time.sleep(1.0)
        used = {title: cpu_s - cpu_before[title] for title, cpu_s in cpu_seconds(server).items()}
        assert max(used.values()) < _IDLE_CORE_SHARE, used
    until("it is what it was", lambda: not state_before.differences(State.of(server), 0))
    with stub(server) as call:
        assert is_right(call.ModelInfer(simple_request(), timeout=10, wait_for_ready=True))


def test_grpc_connections_leave_some(server: Server) -> None:
    """Connected clients are still served, also by a new scheduler."""
    state_before = State.of(server)
    with stub(server) as call:
        assert is_right(call.ModelInfer(simple_request(), timeout=10, wait_for_ready=True))
        with crowded(server, "grpc"):
            until("all have come", lambda: are_idle(server))
            assert server.find_one("gateway grpc").num_fds() < _LIMIT - 50
            victim = server.find_one("scheduler simple")
            victim.kill()
            wait_replaced(server, victim, "scheduler simple", _STARTED_S)
            assert is_right(call.ModelInfer(simple_request(), timeout=10))
    until("it is what it was", lambda: not state_before.differences(State.of(server), 0))


def test_registrations_leave_some(server: Server) -> None:
    """Regions and local clients use all descriptors; dead processes are still replaced."""
    with scene(server) as stage, SharedObject(4096) as shared, contextlib.ExitStack() as stack:
        replies = [stage.http.register(f"r{n}", shared.key, 4096) for n in range(_LIMIT)]
        refused_reply = replies[-1]
        assert refused_reply.status == 400 and "can be registered" in refused_reply.error
        for _ in range(_LIMIT):
            unix_socket = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            unix_socket.connect(str(endpoints.listener(server.run_dir)))
        for title in ("worker simple.0", "scheduler simple", "gateway http 0"):
            victim = server.find_one(title)
            victim.kill()
            wait_replaced(server, victim, title, _STARTED_S)
            assert_recovers(stage, time.monotonic(), _STARTED_S)
        with server.http() as second_client:
            for number in range(_LIMIT):
                second_client.unregister(f"r{number}").ok()
    assert [answer for answer in stage.load.troubles() if not answer.is_disconnected] == []


def are_idle(server: Server) -> bool:
    cpu_before = cpu_seconds(server)
    time.sleep(0.05)
    return all(cpu_s - cpu_before[title] < 0.05 for title, cpu_s in cpu_seconds(server).items())
