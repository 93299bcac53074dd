"""What the gRPC listener decides without a call: whose each RPC is, what a request is known by, and
who a peer is.
"""

from __future__ import annotations

import os
import socket

import pytest

from shmserve.common.access.auth_tokens import RESTRICTABLE
from shmserve.gateway.grpc.client_identity import Users
from shmserve.gateway.grpc.core.sockets import address_of
from shmserve.gateway.grpc.service import HEALTH_WATCH, MODEL_INFER, MODEL_STREAM_INFER, RPCS
from shmserve.gateway.grpc.wire.fingerprint import split
from shmserve.gateway.inference.request import ANONYMOUS, RequestIdentity
from shmserve.proto import grpc_service_pb2 as pb
from shmserve.proto import health_pb2

SERVICES = [
    service
    for file in (pb.DESCRIPTOR, health_pb2.DESCRIPTOR)
    for service in file.services_by_name.values()
]
ALL = {f"/{service.full_name}/{method.name}" for service in SERVICES for method in service.methods}


def test_every_rpc_has_a_scope() -> None:
    """R17: what the protocol has is what the table has, and each belongs to an API."""
    assert len(ALL) == 22
    assert set(RPCS) == ALL
    for path, rpc in RPCS.items():
        assert rpc.scope in RESTRICTABLE, path


def test_every_rpc_has_a_handler() -> None:
    own = {path for path, rpc in RPCS.items() if rpc.handler is None}
    assert own == {MODEL_INFER, MODEL_STREAM_INFER, HEALTH_WATCH}
    assert all(rpc.request is not None for path, rpc in RPCS.items() if path not in own)


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:127.0.0.1:4242", ("127.0.0.1", 4242)),
        ("ipv6:%5B::1%5D:4242", ("::1", 4242)),
        ("ipv6:[::1]:4242", ("::1", 4242)),
        ("unix:/tmp/socket", None),
        ("unix:", None),
        ("ipv4:127.0.0.1", None),
        ("", None),
    ],
)
def test_a_peer_is_an_address(peer: str, address: tuple[str, int] | None) -> None:
    assert address_of(peer) == address


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_user_is_known_as_long_as_the_connection_lasts(host: str) -> None:
    users = Users()
    # As gRPC binds: a socket of the newer family for both kinds of addresses.
    with socket.socket(socket.AF_INET6) as listener:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((f"::ffff:{host}" if "." in host else host, 0))
        listener.listen()
        port = listener.getsockname()[1]
        with socket.create_connection((host, port)) as client:
            name = client.getsockname()[:2]
            assert users.at(name) is None
            accepted, _ = listener.accept()
            with accepted:
                for _ in range(2):
                    peer = users.at(name)
                    assert peer is not None and peer.uid == os.geteuid()
            assert users.at(name) is None


def request(ident: str = "one") -> pb.ModelInferRequest:
    made = pb.ModelInferRequest(model_name="simple", id=ident)
    for name in ("INPUT0", "INPUT1"):
        made.inputs.add(name=name, datatype="INT32", shape=[1, 16])
    made.outputs.add(name="OUTPUT0").parameters["classification"].int64_param = 1
    made.parameters["key"].string_param = "value"
    return made


def test_a_request_is_known_by_all_but_its_tensors() -> None:
    plain = request()
    plain.raw_input_contents.extend([b"a" * 64, b"b" * 200])
    other = request()
    other.raw_input_contents.extend([b"c" * 64, b"d" * 200])
    found, same = split(plain.SerializeToString()), split(other.SerializeToString())
    assert found is not None and same is not None
    assert found[0] == same[0]
    assert found[1] == [b"a" * 64, b"b" * 200]
    longer = request()
    longer.raw_input_contents.extend([b"a" * 65, b"b" * 199])
    else_said = request()
    else_said.parameters["key"].string_param = "other"
    for changed in (longer, else_said):
        found = split(changed.SerializeToString())
        assert found is not None and found[0] != same[0]


def test_one_without_raw_contents_is_known_as_a_whole() -> None:
    raw = request("").SerializeToString()
    assert split(raw) == ((raw, ()), [], ANONYMOUS)
    assert split(request("one").SerializeToString()) == (
        (raw, ()),
        [],
        RequestIdentity("one", 0, 0),
    )


@pytest.mark.parametrize(
    "junk",
    [
        *(b"\x3a\x05abc", b"\x08\x01", b"\x3a\xff\xff\xff\xff\xff", b"\xff"),
        *(b"\x3a\x00\x3a", b"\x3a\x80", b"\x3a\x83\x80\x80\x80\x80\x00abc"),
    ],
)
def test_what_is_written_otherwise_takes_the_long_way(junk: bytes) -> None:
    assert split(junk) is None


def test_a_header_behind_the_tensors_takes_the_long_way() -> None:
    made = pb.ModelInferRequest(raw_input_contents=[b"abcd"])
    assert split(made.SerializeToString() + request().SerializeToString()) is None
