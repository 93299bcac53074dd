"""gRPC requests that client libraries would not send, and their responses."""

import contextlib
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from tests.support.servers import Server

A = np.arange(16, dtype=np.int32).reshape(1, 16)
B = np.full((1, 16), 3, np.int32)


@contextlib.contextmanager
def stub(server: Server, url: str = "") -> Iterator[Any]:
    """Yield the stub generated from Triton's protocol, on its own channel; `url` is the address."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(url or server.grpc_url, options) as channel:
        grpc_stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        # Connects the channel.
        grpc_stub.ServerLive(pb.ServerLiveRequest(), timeout=20, wait_for_ready=True)
        yield grpc_stub


def simple_request(request_id: str = "", *, raw: bool = True, **members: Any) -> Any:
    request = pb.ModelInferRequest(model_name="simple", id=request_id, **members)
    for name, array in (("INPUT0", A), ("INPUT1", B)):
        request.inputs.add(name=name, datatype="INT32", shape=array.shape)
        if raw:
            request.raw_input_contents.append(array.tobytes())
    return request


def request_of(model: str, array: np.ndarray, datatype: str, request_id: str = "") -> Any:
    request = pb.ModelInferRequest(model_name=model, id=request_id)
    request.inputs.add(name="INPUT0", datatype=datatype, shape=array.shape)
    request.raw_input_contents.append(array.tobytes())
    return request


def set_region_range(tensor: Any, region: str, byte_size: int, offset: int = 0) -> None:
    tensor.parameters["shared_memory_region"].string_param = region
    tensor.parameters["shared_memory_byte_size"].int64_param = byte_size
    if offset:
        tensor.parameters["shared_memory_offset"].int64_param = offset


def is_right(response: Any) -> bool:
    """Return whether a response to `simple_request` is correct."""
    total, difference = (np.frombuffer(raw, np.int32) for raw in response.raw_output_contents)
    return bool((total == (A + B)[0]).all() and (difference == (A - B)[0]).all())


def refusal(call: Any, request: Any, **options: Any) -> tuple[str, str]:
    try:
        answer = call(request, timeout=20, **options)
    except grpc.RpcError as error:
        return error.code().name, error.details()
    raise AssertionError(f"answered: {answer}")
