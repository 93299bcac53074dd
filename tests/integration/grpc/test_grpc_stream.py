"""ModelStreamInfer: order, errors in the stream, strict mode, cancellation."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from tests.support import repositories
from tests.support.servers import Server
from tests.support.wire.grpc_calls import request_of, simple_request, stub

STRICT_METADATA = (("triton_grpc_error", "true"),)


@pytest.fixture(scope="module")
def server(models: Path, serve_models: Callable[[Path], Server]) -> Server:
    repositories.add(models, "simple", "gated")
    return serve_models(models)


def gated_request(value: int) -> Any:
    return request_of("gated", np.full((1, 4), value, np.int32), "INT32", f"g{value}")


def unknown_version_request(request_id: str) -> Any:
    return simple_request(request_id, model_version="9")


def test_a_fast_request_waits_for_the_slow_request_before_it(server: Server) -> None:
    with stub(server) as call:
        stream = call.ModelStreamInfer(iter([gated_request(1), simple_request("fast")]), timeout=30)
        server.gate.next().release()
        assert [r.infer_response.id for r in stream] == ["g1", "fast"]


def test_an_error_is_a_response(server: Server) -> None:
    requests = [simple_request("a"), unknown_version_request("b"), simple_request("c", raw=False)]
    requests += [simple_request("d"), unknown_version_request("")]
    with stub(server) as call:
        responses = list(call.ModelStreamInfer(iter(requests), timeout=30))
        assert list(call.ModelStreamInfer(iter(()), timeout=30)) == []
    assert [(r.infer_response.id, r.error_message) for r in responses] == [
        ("a", ""),
        ("b", "Request for unknown model: 'simple' version 9 is not found"),
        ("c", "unable to find data for input tensor 'INPUT0' for model 'simple' in request."),
        ("d", ""),
        ("", "Request for unknown model: 'simple' version 9 is not found"),
    ]


def test_strict_mode_ends_with_the_first_error(server: Server) -> None:
    requests = [simple_request("a"), unknown_version_request("b"), simple_request("c")]
    with stub(server) as call:
        stream = call.ModelStreamInfer(iter(requests), timeout=30, metadata=STRICT_METADATA)
        assert next(stream).infer_response.id == "a"
        with pytest.raises(grpc.RpcError) as error_info:
            next(stream)
        assert error_info.value.code() is grpc.StatusCode.NOT_FOUND
        assert "version 9 is not found" in error_info.value.details()


def test_malformed_requests(server: Server) -> None:
    path = "/inference.GRPCInferenceService/ModelStreamInfer"
    with grpc.insecure_channel(server.grpc_url) as channel:
        answers = list(channel.stream_stream(path)(iter([b"\xff", b"\x0a", b""]), timeout=10))
    assert [b"malformed ModelInferRequest" in answer for answer in answers] == [True, True, False]
