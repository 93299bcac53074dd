"""The table of the RPCs: the permission and the handler of each."""

from shmserve.common.auth_tokens import MODEL_METADATA, RESTRICTABLE
from shmserve.gateway.grpc.service import (
    HEALTH_WATCH,
    MODEL_INFER,
    MODEL_STREAM_INFER,
    REFLECTION_METHODS,
    RPCS,
)
from shmserve.proto import grpc_service_pb2 as pb
from shmserve.proto import health_pb2

SERVICES = [s for f in (pb.DESCRIPTOR, health_pb2.DESCRIPTOR) for s in f.services_by_name.values()]
ALL_RPCS = {f"/{s.full_name}/{m.name}" for s in SERVICES for m in s.methods}


def test_every_rpc_has_a_scope() -> None:
    """The table has exactly the methods of the protocol, and each belongs to an API."""
    assert len(ALL_RPCS) == 22
    assert set(RPCS) == {*ALL_RPCS, *REFLECTION_METHODS}
    for path, rpc in RPCS.items():
        assert rpc.scope in (*RESTRICTABLE, MODEL_METADATA), path


def test_every_rpc_has_a_handler() -> None:
    unhandled = {path for path, rpc in RPCS.items() if rpc.handler is None}
    assert unhandled == {MODEL_INFER, MODEL_STREAM_INFER, HEALTH_WATCH, *REFLECTION_METHODS}
    assert all(rpc.request_class is not None for path, rpc in RPCS.items() if path not in unhandled)
