"""Decisions of the gRPC listener without a call: the permission of each RPC, and request ids."""

import pytest

from shmserve.common.auth_tokens import RESTRICTABLE, SIGNATURE
from shmserve.gateway.grpc.service import (
    HEALTH_WATCH,
    MODEL_INFER,
    MODEL_STREAM_INFER,
    REFLECTION_METHODS,
    RPCS,
)
from shmserve.gateway.grpc.wire.fingerprint import split_message
from shmserve.gateway.inference.request import ANONYMOUS, RequestIdentity
from shmserve.proto import grpc_service_pb2 as pb
from shmserve.proto import health_pb2

SERVICES = [s for f in (pb.DESCRIPTOR, health_pb2.DESCRIPTOR) for s in f.services_by_name.values()]
ALL_RPCS = {f"/{s.full_name}/{m.name}" for s in SERVICES for m in s.methods}


def test_every_rpc_has_a_scope() -> None:
    """The table has exactly the methods of the protocol, and each belongs to an API."""
    assert len(ALL_RPCS) == 22
    assert set(RPCS) == {*ALL_RPCS, *REFLECTION_METHODS}
    for path, rpc in RPCS.items():
        assert rpc.scope in (*RESTRICTABLE, SIGNATURE), path


def test_every_rpc_has_a_handler() -> None:
    unhandled_paths = {path for path, rpc in RPCS.items() if rpc.handler is None}
    assert unhandled_paths == {MODEL_INFER, MODEL_STREAM_INFER, HEALTH_WATCH, *REFLECTION_METHODS}
    assert all(rpc.request is not None for path, rpc in RPCS.items() if path not in unhandled_paths)


def request(ident: str = "one") -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name="simple", id=ident)
    for name in ("INPUT0", "INPUT1"):
        message.inputs.add(name=name, datatype="INT32", shape=[1, 16])
    message.outputs.add(name="OUTPUT0").parameters["classification"].int64_param = 1
    message.parameters["key"].string_param = "value"
    return message


def test_a_fingerprint_excludes_the_tensors() -> None:
    first_request = request()
    first_request.raw_input_contents.extend([b"a" * 64, b"b" * 200])
    second_request = request()
    second_request.raw_input_contents.extend([b"c" * 64, b"d" * 200])
    key, identical_key = (
        split_message(first_request.SerializeToString()),
        split_message(second_request.SerializeToString()),
    )
    assert key is not None and identical_key is not None and key[0] == identical_key[0]
    assert key[1] == [b"a" * 64, b"b" * 200]
    longer_request = request()
    longer_request.raw_input_contents.extend([b"a" * 65, b"b" * 199])
    with_other_parameter = request()
    with_other_parameter.parameters["key"].string_param = "other"
    for changed_request in (longer_request, with_other_parameter):
        key = split_message(changed_request.SerializeToString())
        assert key is not None and key[0] != identical_key[0]


def test_a_fingerprint_without_raw_contents_is_the_whole_message() -> None:
    raw = request("").SerializeToString()
    assert split_message(raw) == ((raw, ()), [], ANONYMOUS)
    assert split_message(request("one").SerializeToString()) == (
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
def test_other_notations_have_no_fingerprint(junk: bytes) -> None:
    assert split_message(junk) is None


def test_fields_after_the_tensors_have_no_fingerprint() -> None:
    message = pb.ModelInferRequest(raw_input_contents=[b"abcd"])
    assert split_message(message.SerializeToString() + request().SerializeToString()) is None
