"""Clients of ensembles, like those of users."""

import contextlib
import queue
from typing import Any

import numpy as np
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton

from tests.support.servers import Server
from tests.support.wire.triton import infer_inputs


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def infer(server: Server, model: str, /, **arrays: np.ndarray) -> triton.InferResult:
    with contextlib.closing(triton.InferenceServerClient(server.url)) as client:
        return client.infer(model, infer_inputs(triton, **arrays), request_id="rid")


def stream(server: Server, model: str, /, **arrays: np.ndarray) -> list[list[float]]:
    """Return the first elements of OUT of each response on a gRPC stream."""
    responses: queue.Queue[Any] = queue.Queue()
    client = triton_grpc.InferenceServerClient(server.grpc_url)
    client.start_stream(lambda result, error: responses.put(error or result))
    inputs = infer_inputs(triton_grpc, **arrays)
    client.async_stream_infer(model, inputs, enable_empty_final_response=True)
    pairs = []
    while True:
        result = responses.get(timeout=20)
        assert not isinstance(result, Exception), result
        response = result.get_response()
        if response.outputs:
            pairs.append(result.as_numpy("OUT")[:2].tolist())
        if response.parameters["triton_final_response"].bool_param:
            client.stop_stream()
            client.close()
            return pairs
