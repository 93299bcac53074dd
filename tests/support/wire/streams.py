"""Streams of responses over gRPC, by tritonclient."""

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tritonclient.grpc as triton

from tests.support.servers import Server

Told = queue.Queue[Any]


@contextmanager
def stream(server: Server) -> Iterator[tuple[triton.InferenceServerClient, Told]]:
    """A stream, and what comes over it: responses and errors."""
    told: Told = queue.Queue()
    with triton.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(lambda result, error: told.put(error or result.get_response()))
        yield client, told
        client.stop_stream(cancel_requests=True)


def send_repeat(
    client: triton.InferenceServerClient,
    values: list[int],
    delay_ms: int = 0,
    model: str = "repeat",
) -> None:
    """A request for these of the model "repeat", or of one like it, `delay_ms` apart, whose end is
    told even if it comes alone."""
    arrays = {
        "IN": np.array(values, np.int32),
        "DELAY": np.full(len(values), delay_ms, np.uint32),
        "WAIT": np.zeros(1, np.uint32),
    }
    inputs = []
    for name, array in arrays.items():
        tensor = triton.InferInput(name, array.shape, triton.np_to_triton_dtype(array.dtype))
        inputs.append(tensor.set_data_from_numpy(array))
    client.async_stream_infer(model, inputs, enable_empty_final_response=True)


def ended(told: Told) -> int:
    """The number of responses until the last one, which is the end alone."""
    for count in range(10_000):
        if told.get(timeout=30).parameters["triton_final_response"].bool_param:
            return count
    raise AssertionError("there is no end")


def failed(told: Told) -> str:
    """The error that comes after any number of responses."""
    while not isinstance(found := told.get(timeout=30), triton.InferenceServerException):
        pass
    return str(found)
