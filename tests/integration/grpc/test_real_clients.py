"""Programs' gRPC clients over every way: Python, Triton, grpcio, Go, Node, C++, grpcurl."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import InferenceServerException

from bench.load import perf
from bench.system.peer import Analyzer
from tests.support import clients
from tests.support.waiting import until
from tests.support.wire.grpc_calls import A, B, is_right, request_of, simple_request
from tests.support.wire.http2 import SERVICE
from tests.support.wire.triton import infer_inputs

if TYPE_CHECKING:
    from tests.integration.grpc.conftest import Endpoint

LARGE_ARRAY = np.arange(150_000, dtype=np.float32)  # 600 KB
STREAMED_COUNT = 200
SUCCESS_TEXT = "all is right\n"


def options(endpoint: Endpoint) -> dict[str, Any]:
    root = None if endpoint.root is None else str(endpoint.root)
    return {"url": endpoint.target, "ssl": endpoint.root is not None, "root_certificates": root}


def simple() -> list[triton.InferInput]:
    return infer_inputs(triton, INPUT0=A, INPUT1=B)


def large() -> list[triton.InferInput]:
    return infer_inputs(triton, INPUT0=LARGE_ARRAY)


def check(result: triton.InferResult) -> None:
    assert (result.as_numpy("OUTPUT0") == A + B).all()
    assert (result.as_numpy("OUTPUT1") == A - B).all()


def test_tritonclient(any_endpoint: Endpoint) -> None:
    with triton.InferenceServerClient(**options(any_endpoint)) as client:
        assert client.is_server_live() and client.is_model_ready("simple")
        assert client.get_model_metadata("simple").name == "simple"
        for number in range(50):
            check(client.infer("simple", simple(), request_id=str(number)))
        for algorithm in (None, "gzip", "deflate"):
            result = client.infer("identity", large(), compression_algorithm=algorithm)
            assert (result.as_numpy("OUTPUT0") == LARGE_ARRAY).all()
        with pytest.raises(InferenceServerException, match="'模型' is not found") as error_info:
            client.infer("模型", simple())
        assert error_info.value.status() == "StatusCode.NOT_FOUND"
        answers: list[object] = []
        for _ in range(20):
            client.async_infer(
                "simple", simple(), callback=lambda result, error: answers.append(error)
            )
        until("all are answered", lambda: len(answers) == 20)
        assert answers == [None] * 20


def test_tritonclients_stream(any_endpoint: Endpoint) -> None:
    answers: list[tuple[Any, Any]] = []
    with triton.InferenceServerClient(**options(any_endpoint)) as client:
        client.start_stream(lambda result, error: answers.append((result, error)))
        for number in range(STREAMED_COUNT):
            client.async_stream_infer("simple", simple(), request_id=str(number))
        until("all are answered", lambda: len(answers) == STREAMED_COUNT)
        client.stop_stream()
    for number, (result, error) in enumerate(answers):
        assert error is None and result.get_response().id == str(number)
        check(result)


def test_tritonclient_with_asyncio(any_endpoint: Endpoint) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        for number in range(STREAMED_COUNT):
            yield {"model_name": "simple", "inputs": simple(), "request_id": str(number)}

    async def infer_all() -> None:
        async with triton_aio.InferenceServerClient(**options(any_endpoint)) as client:
            assert await client.is_server_ready()
            for answer in await asyncio.gather(
                *(client.infer("simple", simple()) for _ in range(100))
            ):
                check(answer)
            answer = await client.infer("identity", large(), compression_algorithm="gzip")
            assert (answer.as_numpy("OUTPUT0") == LARGE_ARRAY).all()
            number = 0
            async for answer, error in client.stream_infer(requests()):
                assert error is None and answer.get_response().id == str(number)
                check(answer)
                number += 1
            assert number == STREAMED_COUNT

    asyncio.run(infer_all())


@pytest.mark.parametrize("way", list(grpc.Compression))
def test_grpcios_generic_client(any_endpoint: Endpoint, way: grpc.Compression) -> None:
    """Bytes in, bytes out, as a program without generated code has them."""
    raw = simple_request().SerializeToString()
    with any_endpoint.channel() as channel:
        infer = channel.unary_unary(f"{SERVICE}ModelInfer")
        with ThreadPoolExecutor(8) as pool:
            calls = [pool.submit(infer, raw, timeout=30, compression=way) for _ in range(200)]
            for call in calls:
                assert is_right(pb.ModelInferResponse.FromString(call.result()))
        stream = channel.stream_stream(f"{SERVICE}ModelStreamInfer")
        answers = list(stream(iter([raw] * STREAMED_COUNT), timeout=30, compression=way))
        assert len(answers) == STREAMED_COUNT
        for answer in answers:
            assert is_right(pb.ModelStreamInferResponse.FromString(answer).infer_response)


def test_the_largest_messages(endpoint: Endpoint) -> None:
    array = np.arange(4 << 20, dtype=np.float32)
    request = request_of("identity", array, "FP32").SerializeToString()
    with endpoint.channel() as channel:
        answer = channel.unary_unary(f"{SERVICE}ModelInfer")(request, timeout=60)
    assert pb.ModelInferResponse.FromString(answer).raw_output_contents == [array.tobytes()]


def test_ends_of_calls(any_endpoint: Endpoint) -> None:
    """A deadline, a cancelled call, a stream that its client leaves."""
    gated_request = request_of("gated", np.zeros((1, 1), np.int32), "INT32").SerializeToString()
    with any_endpoint.channel() as channel:
        infer = channel.unary_unary(f"{SERVICE}ModelInfer")
        with pytest.raises(grpc.RpcError) as error_info:
            infer(gated_request, timeout=0.3)
        assert error_info.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        visit = any_endpoint.server.gate.next()
        waiting = infer.future(gated_request, timeout=30)
        any_endpoint.server.wait_pending("gated", 1)
        waiting.cancel()
        any_endpoint.server.wait_pending("gated", 0)
        visit.release()

        stream = channel.stream_stream(f"{SERVICE}ModelStreamInfer")
        raw = simple_request().SerializeToString()

        def requests() -> Iterator[bytes]:
            for _ in range(100_000):  # far more than it waits for
                yield raw

        answers = stream(requests())
        for _ in range(3):
            assert is_right(pb.ModelStreamInferResponse.FromString(next(answers)).infer_response)
        answers.cancel()
    until("it is over", lambda: any_endpoint.server.metric("shmserve_executing_requests") == 0)


@pytest.fixture(scope="module")
def go_client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clients.build_go(tmp_path_factory.mktemp("go") / "client")


@pytest.fixture(scope="module")
def node_client() -> list[str]:
    return clients.find_node()


def test_the_go_client(go_client: Path, any_endpoint: Endpoint) -> None:
    root = () if any_endpoint.root is None else (f"-root={any_endpoint.root}",)
    assert clients.run([str(go_client), f"-target={any_endpoint.target}", *root]) == SUCCESS_TEXT
    any_endpoint.server.gate.next().release()
    assert any_endpoint.server.gate.is_idle()


def test_the_node_client(node_client: list[str], any_endpoint: Endpoint) -> None:
    root = () if any_endpoint.root is None else (str(any_endpoint.root),)
    assert clients.run_node([*node_client, any_endpoint.target, *root]) == SUCCESS_TEXT
    any_endpoint.server.gate.next().release()
    assert any_endpoint.server.gate.is_idle()


@pytest.fixture(scope="module")
def grpcurl() -> str:
    return clients.find_grpcurl()


def test_grpcurl(grpcurl: str, any_endpoint: Endpoint) -> None:
    """grpcurl has no .proto file: the server describes its messages by reflection."""
    scheme, _, path = any_endpoint.target.partition(":")
    trust = ("-plaintext",) if any_endpoint.root is None else ("-cacert", str(any_endpoint.root))
    target = ("-unix", path) if scheme == "unix" else (any_endpoint.target,)

    def run(*arguments: str, data: Any = None) -> str:
        data_arguments = () if data is None else ("-d", json.dumps(data))
        return clients.run([grpcurl, *trust, *data_arguments, *target, *arguments])

    service = SERVICE.strip("/")
    assert service in run("list").split()
    assert "rpc ModelInfer ( .inference.ModelInferRequest )" in run("describe", service)
    assert json.loads(run("grpc.health.v1.Health/Check")) == {"status": "SERVING"}
    tensors = [
        {"name": name, "datatype": "INT32", "shape": array.shape, "contents": {"int_contents": row}}
        for name, array in (("INPUT0", A), ("INPUT1", B))
        for row in array.tolist()
    ]
    answer = json.loads(
        run(f"{service}/ModelInfer", data={"model_name": "simple", "inputs": tensors})
    )
    total = np.frombuffer(base64.b64decode(answer["rawOutputContents"][0]), np.int32)
    assert (total == (A + B)[0]).all()


@pytest.fixture(scope="module")
def analyzer() -> Analyzer:
    return clients.find_analyzer()


@pytest.mark.parametrize("streaming", [(), ("--async", "--streaming")], ids=["calls", "stream"])
def test_perf_analyzer(
    analyzer: Analyzer, any_endpoint: Endpoint, streaming: Sequence[str]
) -> None:
    tls = ("--ssl-grpc-use-ssl", f"--ssl-grpc-root-certifications-file={any_endpoint.root}")
    load = perf.Load("simple", 8, (*streaming, *(tls if any_endpoint.root else ())), "grpc")
    assert perf.measure(analyzer, load, any_endpoint.target, 0.3)[perf.THROUGHPUT] > 0
