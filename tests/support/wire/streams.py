"""Streams of responses over gRPC, with tritonclient."""

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tritonclient.grpc as triton

from tests.support.servers import Server
from tests.support.wire.triton import infer_inputs

StreamResults = queue.Queue[Any]


@contextmanager
def stream(server: Server) -> Iterator[tuple[triton.InferenceServerClient, StreamResults]]:
    results: StreamResults = queue.Queue()
    with triton.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(lambda result, error: results.put(error or result.get_response()))
        yield client, results
        client.stop_stream(cancel_requests=True)


def send_repeat(
    client: triton.InferenceServerClient,
    values: list[int],
    delay_ms: int = 0,
    model: str = "repeat",
    request_id: str = "",
) -> None:
    """Send a request to a model like "repeat", which sends values at intervals of `delay_ms`."""
    inputs = infer_inputs(
        triton,
        IN=np.array(values, np.int32),
        DELAY=np.full(len(values), delay_ms, np.uint32),
        WAIT=np.zeros(1, np.uint32),
    )
    client.async_stream_infer(
        model, inputs, request_id=request_id, enable_empty_final_response=True
    )


def count_responses(results: StreamResults) -> int:
    """Return the number of responses until the final one, which has no outputs."""
    for count in range(10_000):
        if results.get(timeout=30).parameters["triton_final_response"].bool_param:
            return count
    raise AssertionError("there is no end")


def final_error(results: StreamResults) -> str:
    while not isinstance(result := results.get(timeout=30), triton.InferenceServerException):
        pass
    return str(result)
