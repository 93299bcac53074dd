"""Large numbers over gRPC: calls, connections, stream messages, large messages, metadata."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from shmserve.proto import grpc_service_pb2, reflection_pb2
from tests.support.wire.cutting_proxy import CuttingProxy
from tests.support.wire.grpc_calls import is_right, request_of, simple_request
from tests.support.wire.http2 import SERVICE

if TYPE_CHECKING:
    from tests.integration.grpc.conftest import Endpoint

CALL_COUNT, CONCURRENT_CALLS = 10_000, 100
CONNECTIONS = 1000
STREAMED_COUNT = 10_000
RAW_REQUEST = simple_request().SerializeToString()
OWN = [("grpc.use_local_subchannel_pool", 1)]
ENCODINGS = {  # gRPC's numbers of the encodings
    "gzip": (grpc.Compression.Gzip, 0b101),
    "deflate": (grpc.Compression.Deflate, 0b011),
}


def is_answer(raw: bytes) -> bool:
    return is_right(pb.ModelInferResponse.FromString(raw))


def test_ten_thousand_calls_on_a_connection(plain_endpoint: Endpoint) -> None:
    port = plain_endpoint.server.grpc_port
    with (
        CuttingProxy(lambda: socket.create_connection(("127.0.0.1", port)), 1) as proxy,
        grpc.insecure_channel(f"127.0.0.1:{proxy.port}") as channel,
    ):
        infer = channel.unary_unary(f"{SERVICE}ModelInfer")
        for _ in range(CALL_COUNT // CONCURRENT_CALLS):
            pending_calls = [infer.future(RAW_REQUEST, timeout=30) for _ in range(CONCURRENT_CALLS)]
            assert all(is_answer(call.result()) for call in pending_calls)
        assert proxy.connections == 1


async def test_a_thousand_connections(plain_endpoint: Endpoint) -> None:
    links = [grpc.aio.insecure_channel(plain_endpoint.target, OWN) for _ in range(CONNECTIONS)]
    try:
        await asyncio.gather(*(channel.channel_ready() for channel in links))
        (gateway,) = plain_endpoint.server.find("gateway grpc")
        connections = [c for c in gateway.net_connections("tcp") if c.status == "ESTABLISHED"]
        assert len(connections) >= CONNECTIONS
        calls = [channel.unary_unary(f"{SERVICE}ModelInfer")(RAW_REQUEST) for channel in links]
        assert all(map(is_answer, await asyncio.gather(*calls)))
    finally:
        await asyncio.gather(*(channel.close() for channel in links))


def test_a_long_stream(plain_endpoint: Endpoint) -> None:
    def requests() -> Iterator[bytes]:
        for number in range(STREAMED_COUNT):
            yield simple_request(str(number)).SerializeToString()

    with plain_endpoint.channel() as channel:
        number = 0
        for raw in channel.stream_stream(f"{SERVICE}ModelStreamInfer")(requests(), timeout=60):
            response = pb.ModelStreamInferResponse.FromString(raw).infer_response
            assert response.id == str(number) and is_right(response)
            number += 1
    assert number == STREAMED_COUNT


@pytest.mark.parametrize("encoding", [None, *ENCODINGS])
@pytest.mark.parametrize("size", [600 * 1024, 16 << 20])
def test_large_messages(plain_endpoint: Endpoint, size: int, encoding: str | None) -> None:
    """Compressed both ways, if at all."""
    port = plain_endpoint.server.grpc_port
    array = np.tile(np.arange(1024, dtype=np.float32), size // 4096)
    raw = request_of("identity", array, "FP32").SerializeToString()
    compression, accepted_algorithms = ENCODINGS.get(encoding or "", (None, 0b001))
    arguments = [
        ("grpc.compression_enabled_algorithms_bitset", accepted_algorithms),
        ("grpc.max_receive_message_length", -1),
    ]
    with (
        CuttingProxy(lambda: socket.create_connection(("127.0.0.1", port)), 2) as proxy,
        grpc.insecure_channel(f"127.0.0.1:{proxy.port}", arguments) as channel,
    ):
        infer = channel.unary_unary(f"{SERVICE}ModelInfer")
        answer = pb.ModelInferResponse.FromString(infer(raw, timeout=60, compression=compression))
        assert answer.raw_output_contents == [array.tobytes()]
        are_compressed = [byte_count < size // 2 for byte_count in (proxy.sent, proxy.received)]
    assert are_compressed == [encoding is not None] * 2


@pytest.mark.parametrize("size", [17_000, 60_000])
def test_too_large_metadata_fails_only_its_call(plain_endpoint: Endpoint, size: int) -> None:
    with plain_endpoint.channel() as channel:
        infer = channel.unary_unary(f"{SERVICE}ModelInfer")
        stream = channel.stream_stream(f"{SERVICE}ModelStreamInfer")
        requests: SimpleQueue[bytes | None] = SimpleQueue()
        requests.put(RAW_REQUEST)
        answers = stream(iter(requests.get, None), timeout=30)
        next(answers)
        with pytest.raises(grpc.RpcError) as error_info:
            infer(RAW_REQUEST, timeout=20, metadata=[("large", "x" * size)])
        assert error_info.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        requests.put(RAW_REQUEST)
        next(answers)
        requests.put(None)
        assert list(answers) == []


SERVICES = [
    "grpc.health.v1.Health",
    "grpc.reflection.v1.ServerReflection",
    "inference.GRPCInferenceService",
]


def reflect(endpoint: Endpoint, version: str, *questions: dict[str, Any]) -> list[Any]:
    request, response = (
        reflection_pb2.ServerReflectionRequest,
        reflection_pb2.ServerReflectionResponse,
    )
    with endpoint.channel() as channel:
        call = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request.SerializeToString,
            response.FromString,
        )
        return list(call(iter([request(**question) for question in questions]), timeout=20))


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflection(plain_endpoint: Endpoint, version: str) -> None:
    pending_calls: list[dict[str, Any]] = [
        {"list_services": "", "host": "here"},
        {"file_containing_symbol": "inference.GRPCInferenceService"},
        {"file_containing_symbol": "inference.ModelInferRequest.InferInputTensor"},
        {"file_containing_symbol": "inference.GRPCInferenceService.ModelInfer"},
        {"file_by_filename": "grpc_service.proto"},
        {"file_containing_symbol": "grpc.health.v1.Health"},
        {"file_containing_symbol": "nobody.Knows"},
        {"file_by_filename": "nothing.proto"},
        {"all_extension_numbers_of_type": "inference.ModelInferRequest"},
        {"file_containing_extension": {"containing_type": "x", "extension_number": 1}},
        {},
    ]
    answers = reflect(plain_endpoint, version, *pending_calls)
    assert [answer.original_request for answer in answers] == [
        reflection_pb2.ServerReflectionRequest(**question) for question in pending_calls
    ]
    (services, *by_symbol, by_name, health, unknown, no_file, numbers, extension, empty) = answers
    assert services.valid_host == "here"
    assert [service.name for service in services.list_services_response.service] == SERVICES
    for answer in (*by_symbol, by_name):
        service_descriptor, *needed = answer.file_descriptor_response.file_descriptor_proto
        assert service_descriptor == grpc_service_pb2.DESCRIPTOR.serialized_pb and needed
    assert b"HealthCheckRequest" in health.file_descriptor_response.file_descriptor_proto[0]
    for answer in (unknown, no_file, extension):
        assert answer.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
        assert answer.error_response.error_message
    assert numbers.all_extension_numbers_response.base_type_name == "inference.ModelInferRequest"
    assert empty.error_response.error_code == grpc.StatusCode.INVALID_ARGUMENT.value[0]


def test_reflection_of_no_request(plain_endpoint: Endpoint) -> None:
    path = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
    with plain_endpoint.channel() as channel, pytest.raises(grpc.RpcError) as error_info:
        list(channel.stream_stream(path)(iter([b"\xff"]), timeout=20))
    assert error_info.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert reflect(plain_endpoint, "v1") == []
