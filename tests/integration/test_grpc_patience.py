"""R15: who connects to the gRPC gateway and says nothing, or half of it, is shown out."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import msgpack
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from shmserve.grpc_config import environment
from shmserve.ipc import endpoints
from shmserve.ipc import messages as m
from tests.gateway_rig import Puppet
from tests.http2 import ACK, OPENED, PREFACE, SERVICE, SETTINGS, frame, post
from tests.servers import free_ports
from tests.waiting import until

_BOOT = (
    "import sys, msgpack; from shmserve.gateway.grpc.main import run; "
    "run(msgpack.unpackb(sys.stdin.buffer.read()))"
)
_PATIENCE_S = 1.0


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    """Where a gateway listens that has a second's patience."""
    gateways: list[bytes] = []

    def take(peer: bytes, message: Any) -> None:
        if type(message) is m.GatewayReady:
            puppet.router.post(peer, m.HealthChanged(live=True, ready=True, exiting=False))
        gateways.append(peer)

    puppet = Puppet(endpoints.control(tmp_path), take)
    (number,) = free_ports(1)
    args = {
        "addresses": [["127.0.0.1", number]],
        "grpc": {"compress": False, "tls": None, "options": []},
        "settings": {"header_timeout_s": _PATIENCE_S, "arena_byte_size": 1 << 20},
        "run_dir": str(tmp_path),
        "log": {},
    }
    process = subprocess.Popen(
        [sys.executable, "-c", _BOOT], stdin=subprocess.PIPE, env=environment(os.environ)
    )
    try:
        assert process.stdin is not None
        with process.stdin as pipe:
            pipe.write(msgpack.packb(args))
        until("it is there", lambda: gateways, 20)
        yield number
        puppet.call(lambda: puppet.router.post(gateways[0], m.Stop()))
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
        puppet.close()


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
    "said",
    [
        b"",
        PREFACE[:10],
        OPENED,  # it never acknowledges the server's settings
        OPENED + frame(1, 4, 1, post(f"{SERVICE}ModelInfer")),
    ],
    ids=["nothing", "half a preface", "no acknowledgement", "a call, no acknowledgement"],
)
def test_who_does_not_go_on_is_shown_out(port: int, said: bytes) -> None:
    assert is_served(port)
    with socket.create_connection(("127.0.0.1", port), timeout=20) as silent:
        silent.sendall(said)
        read_all(silent)
    assert is_served(port)


def test_who_goes_on_may_stay(port: int) -> None:
    """A call whose message takes longer than that, on a connection that is one."""
    assert is_served(port)
    with socket.create_connection(("127.0.0.1", port), timeout=2.5 * _PATIENCE_S) as slow:
        slow.sendall(OPENED + frame(SETTINGS, ACK, 0))
        slow.sendall(frame(1, 4, 1, post(f"{SERVICE}ModelInfer")))
        with pytest.raises(TimeoutError):
            read_all(slow)
    assert is_served(port)
