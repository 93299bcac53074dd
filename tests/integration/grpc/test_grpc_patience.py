"""Clients that keep the gRPC gateway waiting for a preface or a request are disconnected."""

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from shmserve.common.fd_limits import max_connections_per_peer
from shmserve.gateway.settings import GatewaySettings, GatewayStart, GrpcSettings
from shmserve.ipc import endpoints
from shmserve.ipc.messages import supervision as m
from shmserve.ipc.messages.publications import HealthChanged
from shmserve.ipc.messages.supervision import encode_start
from tests.rigs.gateway_rig import Puppet
from tests.support.waiting import until
from tests.support.wire.http2 import ACK, CLIENT_OPENING, PREFACE, SERVICE, SETTINGS, frame, post

_BOOT_MESSAGES = (
    "import sys; from shmserve.gateway.grpc.main import run;"
    "run(sys.stdin.buffer.read(), int(sys.argv[1]))"
)
_PATIENCE_S = 1.0


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Yield the port of a gateway whose timeout for headers is one second."""
    folder = tmp_path_factory.mktemp("gateway")
    with run_gateway(folder, "127.0.0.1", header_timeout_s=_PATIENCE_S) as number:
        yield number


@contextlib.contextmanager
def run_gateway(tmp_path: Path, host: str, **settings: Any) -> Iterator[int]:
    gateways: list[bytes] = []
    ready_peers: list[bytes] = []

    def take(peer: bytes, message: Any) -> None:
        if type(message) is m.Started:
            puppet.router.post(peer, HealthChanged(live=True, ready=True, exiting=False))
        gateways.append(peer)
        ready_peers.extend([peer] if type(message) is m.GatewayReady else [])

    puppet = Puppet(endpoints.control(tmp_path), take)
    listener = socket.create_server((host, 0))
    number = listener.getsockname()[1]
    limits = {"body_timeout_s": _PATIENCE_S, "arena_byte_size": 1 << 20, **settings}
    start = GatewayStart(
        gateway_name="grpc",
        run_dir=tmp_path,
        settings=GatewaySettings(**limits),
        http_sockets=0,
        grpc=GrpcSettings(),
    )
    fd = listener.fileno()
    process = subprocess.Popen(
        [sys.executable, "-c", _BOOT_MESSAGES, str(fd)], stdin=subprocess.PIPE, pass_fds=(fd,)
    )
    try:
        assert process.stdin is not None
        with process.stdin as pipe:
            pipe.write(encode_start(start))
        until("it is there", lambda: ready_peers)
        socket.create_connection((host, number)).close()
        assert is_served(number)
        yield number
        puppet.call(lambda: puppet.router.post(gateways[0], m.Stop()))
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
        puppet.close()
        listener.close()


def is_served(port: int) -> bool:
    with grpc.insecure_channel(
        f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)]
    ) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        return bool(stub.ServerLive(pb.ServerLiveRequest(), timeout=20, wait_for_ready=True).live)


def read_all(sock: socket.socket) -> None:
    """Read until the server ends the connection; raises TimeoutError when it does not."""
    while sock.recv(65536):
        pass


@pytest.mark.parametrize(
    "partial_bytes",
    [
        b"",
        PREFACE[:10],
        CLIENT_OPENING,  # the client never acknowledges the SETTINGS
        CLIENT_OPENING + frame(1, 4, 1, post(f"{SERVICE}ModelInfer")),
    ],
    ids=["nothing", "half a preface", "no acknowledgement", "a call, no acknowledgement"],
)
def test_a_client_that_stops_sending_is_disconnected(port: int, partial_bytes: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as silent_socket:
        silent_socket.sendall(partial_bytes)
        read_all(silent_socket)
    assert is_served(port)


@pytest.mark.parametrize("method", ["ModelInfer", "ServerLive", "Watch"])
def test_a_request_that_does_not_arrive_ends_its_call(port: int, method: str) -> None:
    """And no other call of its connection."""
    path = f"{SERVICE}{method}" if method != "Watch" else "/grpc.health.v1.Health/Watch"
    never_set = threading.Event()

    def wait_silently() -> Iterator[bytes]:
        never_set.wait(30)
        yield from ()

    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        grpc.channel_ready_future(channel).result(20)
        calls = [channel.stream_stream(path)(wait_silently(), timeout=20) for _ in range(100)]
        for call in calls:
            with pytest.raises(grpc.RpcError):
                next(call)
            assert call.code() is grpc.StatusCode.UNAVAILABLE
            assert call.details() == "the request did not arrive in time"
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        assert stub.ServerLive(pb.ServerLiveRequest(), timeout=20).live
    never_set.set()


@pytest.mark.parametrize("method", ["ModelInfer", "ServerLive"])
def test_a_call_without_a_request_is_refused(port: int, method: str) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.RpcError) as error:
            channel.stream_unary(f"{SERVICE}{method}")(iter(()), timeout=20, wait_for_ready=True)
        assert error.value.code() is grpc.StatusCode.INTERNAL
        assert error.value.details() == "Unable to parse request"


def test_a_stream_may_be_silent(port: int) -> None:
    may_continue = threading.Event()

    def late_requests() -> Iterator[pb.ModelInferRequest]:
        assert may_continue.wait(30)
        yield pb.ModelInferRequest(model_name="none", id="one")

    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        answers = stub.ModelStreamInfer(late_requests(), timeout=30, wait_for_ready=True)
        threading.Timer(2.5 * _PATIENCE_S, may_continue.set).start()
        assert "unknown model" in next(answers).error_message


def test_no_peer_takes_all_connections(tmp_path: Path) -> None:
    """Idle connections of an address above its quota are closed; other clients are served."""
    limit = 40
    with (
        run_gateway(tmp_path, "0.0.0.0", max_connections=limit) as port,
        contextlib.ExitStack() as stack,
    ):
        idle = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
        idle.sendall(CLIENT_OPENING + frame(SETTINGS, ACK, 0))
        crowd = [
            stack.enter_context(
                socket.create_connection(("127.0.0.1", port), 20, source_address=("127.0.0.2", 0))
            )
            for _ in range(2 * limit)
        ]
        for sock in crowd:
            with contextlib.suppress(OSError):
                sock.sendall(CLIENT_OPENING + frame(SETTINGS, ACK, 0))
        until(
            "they have their share",
            lambda: 0 < sum(map(is_open, crowd)) <= max_connections_per_peer(limit),
        )
        assert is_served(port)
        assert is_open(idle)


def is_open(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        while sock.recv(65536):
            pass
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
