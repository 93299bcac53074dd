"""Several gRPC gateways on one port and one Unix socket: their exits, titles and access rules."""

import contextlib
import os
import random
import socket
import stat
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from tests.support import repositories
from tests.support.regions import SharedObject
from tests.support.servers import Server, running, write_tokens
from tests.support.users import ALICE, BOB, FRIENDS_GID, as_user, needs_users
from tests.support.waiting import repeating, until
from tests.support.wire.cutting_proxy import CuttingProxy, connect_unix
from tests.support.wire.grpc_calls import is_right, refusal, set_region_range, simple_request
from tests.support.wire.http2 import (
    CLIENT_OPENING,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    SERVICE,
    frame,
    message,
    post,
)

TITLES = ["gateway grpc", "gateway grpc1", "gateway grpc2"]
TOKEN = "0123456789abcdef-all"
DEATH_COUNT, CALLER_COUNT = 10, 6
VALUES = np.arange(1024, dtype=np.float32)
SIZE = VALUES.nbytes


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    """Over TCP it takes a token for all but health."""
    repositories.add(folder / "models", "simple", "identity")
    tokens = write_tokens(folder / "tokens", TOKEN)
    flags = (
        "--grpc-workers=3",
        f"--grpc-unix-socket={folder / 'socket'}",
        f"--shm-group={FRIENDS_GID}",
        f"--auth-token-file={tokens}",
    )
    with running(folder / "models", *flags, grpc=True) as running_server:
        until("all are there", lambda: gateways(running_server) == TITLES)
        yield running_server
    assert not (folder / "socket").exists()


def gateways(server: Server) -> list[str]:
    return sorted(title for title in server.titles().elements() if title.startswith(TITLES[0]))


def test_the_gateway_processes(server: Server) -> None:
    assert gateways(server) == TITLES
    for gateway in server.find(TITLES[0]):
        ports = {c.laddr.port for c in gateway.net_connections("tcp") if c.status == "LISTEN"}
        assert ports == {server.grpc_port}


def live(port: int, outcomes: Counter[str]) -> None:
    """Query liveness on a new connection; repeat it if the connection is lost."""
    while True:
        try:
            # No connection is refused, and an accepted one is answered unless the gateway exits.
            with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
                head = frame(HEADERS, END_HEADERS, 1, post(f"{SERVICE}ServerLive"))
                sock.sendall(CLIENT_OPENING + head + frame(DATA, END_STREAM, 1, message(b"")))
                received_bytes = b""
                while b"grpc-status\x010" not in received_bytes:
                    piece = sock.recv(65536)
                    if not piece:
                        raise ConnectionResetError
                    received_bytes += piece
        except (ConnectionResetError, BrokenPipeError):
            outcomes["cut off"] += 1
        else:
            outcomes["answered"] += 1
            return


def test_no_death_refuses_a_connection(server: Server) -> None:
    outcomes: Counter[str] = Counter()

    def kill(victims: list[psutil.Process]) -> None:
        for victim in victims:
            victim.kill()
        psutil.wait_procs(victims)
        answered_before = outcomes["answered"]
        until("all are back", lambda: gateways(server) == TITLES)
        until("calls go on", lambda: outcomes["answered"] > answered_before)

    choice = random.Random(1)
    with repeating(*[partial(live, server.grpc_port, outcomes)] * CALLER_COUNT):
        for _ in range(DEATH_COUNT):
            kill([choice.choice(server.find(TITLES[0]))])
        kill(server.find(TITLES[0]))
    assert outcomes["cut off"] <= CALLER_COUNT * (DEATH_COUNT + 3)


def test_calls_of_a_client_go_on(server: Server) -> None:
    """A client that connects again by itself has one error at most."""
    metadata = (("authorization", f"Bearer {TOKEN}"),)
    with grpc.insecure_channel(server.grpc_url) as channel:
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for _ in range(3):
            for victim in server.find(TITLES[0]):
                with contextlib.suppress(grpc.RpcError):
                    call.ModelInfer(simple_request(), metadata=metadata, timeout=20)
                victim.kill()
                psutil.wait_procs([victim])
            until("all are back", lambda: gateways(server) == TITLES)
            failed_codes: list[grpc.StatusCode] = []
            while True:
                try:
                    response = call.ModelInfer(
                        simple_request(), metadata=metadata, timeout=20, wait_for_ready=True
                    )
                except grpc.RpcError as error:
                    failed_codes.append(error.code())
                    assert failed_codes == [grpc.StatusCode.UNAVAILABLE]
                else:
                    assert is_right(response)
                    break


@contextlib.contextmanager
def unix(path: Path, uid: int, *groups: int) -> Iterator[Any]:
    """Yield Triton's stub on a connection to a Unix socket by user `uid`."""

    with (
        CuttingProxy(lambda: as_user(uid, lambda: connect_unix(path), groups), 3) as proxy,
        grpc.insecure_channel(f"127.0.0.1:{proxy.port}") as channel,
    ):
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def register(name: str, shared: SharedObject) -> Any:
    return pb.SystemSharedMemoryRegisterRequest(name=name, key=shared.key, byte_size=2 * SIZE)


def region_request(name: str) -> Any:
    """Run identity from the first half of a region to the second."""
    built = pb.ModelInferRequest(model_name="identity")
    set_region_range(
        built.inputs.add(name="INPUT0", datatype="FP32", shape=VALUES.shape), name, SIZE
    )
    set_region_range(built.outputs.add(name="OUTPUT0"), name, SIZE, SIZE)
    return built


def test_the_sockets_mode(server: Server, folder: Path) -> None:
    stat_result = (folder / "socket").stat()
    assert stat.S_IMODE(stat_result.st_mode) == 0o660 and stat_result.st_gid == FRIENDS_GID
    assert f"gRPC service at unix socket {folder / 'socket'}" in server.log()


def test_the_servers_user_needs_no_token(server: Server, folder: Path) -> None:
    for target, code in ((server.grpc_url, "UNAUTHENTICATED"), (f"unix:{folder}/socket", "")):
        with grpc.insecure_channel(target) as channel:
            call = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            if code:
                assert refusal(call.ModelInfer, simple_request())[0] == code
            else:
                assert is_right(call.ModelInfer(simple_request(), timeout=20))


@needs_users
def test_a_client_is_identified_by_its_uid(server: Server, folder: Path) -> None:
    """A client sees only its own regions, and registers only objects that it owns."""
    path, more = folder / "socket", {"metadata": (("authorization", f"Bearer {TOKEN}"),)}
    status = pb.SystemSharedMemoryStatusRequest()
    with pytest.raises(PermissionError):
        as_user(BOB, lambda: connect_unix(path))
    with (
        SharedObject(2 * SIZE) as her_object,
        SharedObject(2 * SIZE) as own_object,
        unix(path, ALICE, FRIENDS_GID) as alice,
        unix(path, BOB, FRIENDS_GID) as bob,
        unix(path, os.geteuid()) as root,
    ):
        os.chown(her_object.path, ALICE, -1)
        her_object.write(VALUES)
        assert refusal(alice.ModelInfer, region_request("hers"))[0] == "UNAUTHENTICATED"
        refused = refusal(alice.SystemSharedMemoryRegister, register("ours", own_object), **more)
        assert refused[0] == "PERMISSION_DENIED"
        alice.SystemSharedMemoryRegister(register("hers", her_object), timeout=20, **more)
        alice.ModelInfer(region_request("hers"), timeout=20, **more)
        assert (her_object.read(np.float32, VALUES.size, SIZE) == VALUES).all()
        for user, visible_names in ((alice, ["hers"]), (bob, []), (root, ["hers"])):
            regions = user.SystemSharedMemoryStatus(status, timeout=20, **more)
            assert sorted(regions.regions) == visible_names
        assert refusal(bob.ModelInfer, region_request("hers"), **more)[0] == "NOT_FOUND"
        alice.SystemSharedMemoryUnregister(
            pb.SystemSharedMemoryUnregisterRequest(name="hers"), timeout=20, **more
        )
        assert not root.SystemSharedMemoryStatus(status, timeout=20).regions
