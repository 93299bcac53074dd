"""Invalid requests over gRPC, case by case: the status and Triton's text."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from tests.support import repositories
from tests.support.servers import Server, Start
from tests.support.wire.grpc_calls import refusal, simple_request, stub

INVALID_CODE = "INVALID_ARGUMENT"


@pytest.fixture(scope="module")
def server(models: Path, start: Start) -> Server:
    repositories.add(models, "simple")
    return start(models, grpc=True)


@pytest.fixture(scope="module")
def call(server: Server) -> Iterator[Any]:
    with stub(server) as grpc_stub:
        yield grpc_stub


def parameter(key: str, kind: str, value: object) -> Callable[[Any], None]:
    return lambda request: setattr(request.parameters[key], kind, value)


def of_input(**fields: tuple[str, object]) -> Callable[[Any], None]:
    """Return a request whose first input has parameters instead of data."""

    def change(request: Any) -> None:
        del request.raw_input_contents[0]
        for key, (kind, value) in fields.items():
            setattr(request.inputs[0].parameters[key], kind, value)

    return change


def of_output(name: str = "OUTPUT0", **fields: tuple[str, object]) -> Callable[[Any], None]:
    def change(request: Any) -> None:
        output = request.outputs.add(name=name)
        for key, (kind, value) in fields.items():
            setattr(output.parameters[key], kind, value)

    return change


def set_typed_contents(field: str, values: list) -> Callable[[Any], None]:
    def change(request: Any) -> None:
        del request.raw_input_contents[:]
        for tensor in request.inputs:
            getattr(tensor.contents, field).extend(values)

    return change


def set_two_contents(request: Any) -> None:
    set_typed_contents("int_contents", [1] * 16)(request)
    request.inputs[0].contents.fp32_contents.append(1.0)


def add_contents(request: Any) -> None:
    request.inputs[0].contents.int_contents.append(1)


def content_and_region(request: Any) -> None:
    of_input(shared_memory_region=REGION, shared_memory_byte_size=SIZE)(request)
    add_contents(request)


REGION = ("string_param", "nowhere")
SIZE = ("int64_param", 64)
RESERVED = (
    "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys "
    "starting with 'triton_' are allowed: triton_enable_empty_final_response"
)
UNKNOWN_MODEL_TEXT = "Request for unknown model: "
VERSION = "version should be an integral value > 0"
NO_VERSION = "failed to get model version from specified version string"
CASES: dict[str, tuple[Callable[[Any], object], str, str]] = {
    "model": (lambda r: setattr(r, "model_name", "x"), "NOT_FOUND",
        UNKNOWN_MODEL_TEXT + "'x' is not found"),
    "version 7": (lambda r: setattr(r, "model_version", "7"), "NOT_FOUND",
        UNKNOWN_MODEL_TEXT + "'simple' version 7 is not found"),
    "version x": (lambda r: setattr(r, "model_version", "x"), INVALID_CODE,
        f"{NO_VERSION} 'x' (details: stol), {VERSION}"),
    "version -1": (lambda r: setattr(r, "model_version", "-1"), INVALID_CODE,
        f"invalid model version specified '-1' , {VERSION}"),
    "version too long": (lambda r: setattr(r, "model_version", "9" * 20), INVALID_CODE,
        f"{NO_VERSION} '{'9' * 20}' (details: stol), {VERSION}"),
    "sequence_id": (parameter("sequence_id", "bool_param", True), INVALID_CODE,
        "invalid value type for 'sequence_id' parameter, expected int64_param or string_param."),
    "sequence_start": (parameter("sequence_start", "int64_param", 1), INVALID_CODE,
        "invalid value type for 'sequence_start' parameter, expected bool_param."),
    "priority kind": (parameter("priority", "string_param", "1"), INVALID_CODE,
        "invalid value type for 'priority' parameter, expected int64_param or uint64_param."),
    "priority": (parameter("priority", "int64_param", -1), INVALID_CODE,
        "invalid value for 'priority', expected value >= 0."),
    "timeout": (parameter("timeout", "uint64_param", 1), INVALID_CODE,
        "invalid value type for 'timeout' parameter, expected int64_param."),
    "custom": (parameter("mine", "uint64_param", 1), INVALID_CODE,
        "invalid value type for 'mine' parameter, "
        "expected int64_param, bool_param, or string_param."),
    "reserved": (parameter("triton_final_response", "bool_param", True), INVALID_CODE, RESERVED),
    "no data": (lambda r: r.raw_input_contents.pop(), INVALID_CODE,
        "unable to find data for input tensor 'INPUT1' for model 'simple' in request."),
    "raw and contents": (add_contents, INVALID_CODE,
        "contents field must not be specified when using raw_input_contents for 'INPUT0' for model "
        "'simple'"),
    "wrong contents": (set_typed_contents("fp32_contents", [1.0] * 16), INVALID_CODE,
        "unexpected explicit tensor data for input tensor 'INPUT0' for model 'simple' of type "
        "'FP32', expected datatype 'INT32'"),
    "contents of two kinds": (set_two_contents, INVALID_CODE,
        "unexpected explicit tensor data for input tensor 'INPUT0' for model 'simple', binary data "
        "was already supplied."),
    "short contents": (set_typed_contents("int_contents", [1] * 15), INVALID_CODE,
        "[request id: <id_unknown>] input byte size mismatch for input 'INPUT0' for model 'simple'."
        " Expected 64, got 60"),
    "datatype": (lambda r: setattr(r.inputs[0], "datatype", "INT33"), INVALID_CODE,
        "[request id: <id_unknown>] inference input 'INPUT0' data-type is '<invalid>', "
        "but model 'simple' expects 'INT32'"),
    "dimension": (lambda r: r.inputs[0].shape.__setitem__(0, -1), INVALID_CODE,
        "invalid shape for input 'INPUT0': shape [-1,16] contains one or more invalid dimensions"),
    "missing input": (lambda r: (r.inputs.pop(), r.raw_input_contents.pop()), INVALID_CODE,
        "[request id: <id_unknown>] expected 2 inputs but got 1 inputs for model 'simple'. "
        "Got input(s) ['INPUT0'], but missing required input(s) ['INPUT1']. "
        "Please provide all required input(s)."),
    "output": (of_output("FOO"), INVALID_CODE,
        "unexpected inference output 'FOO' for model 'simple'"),
    "input region": (of_input(shared_memory_region=REGION, shared_memory_byte_size=SIZE),
        "NOT_FOUND", "Unable to find shared memory region: 'nowhere'"),
    "region and contents": (content_and_region, INVALID_CODE,
        "unexpected 'content' provided when using shared memory for input tensor 'INPUT0' for "
        "model 'simple'"),
    "region kind": (of_input(shared_memory_region=SIZE), INVALID_CODE,
        "invalid value type for 'shared_memory_region' parameter for tensor 'INPUT0', "
        "expected string_param."),
    "offset kind": (of_output(shared_memory_region=REGION, shared_memory_offset=REGION,
        shared_memory_byte_size=SIZE), INVALID_CODE,
        "invalid value type for 'shared_memory_offset' parameter for tensor 'OUTPUT0', "
        "expected int64_param."),
    "no byte size": (of_output(shared_memory_region=REGION), INVALID_CODE,
        "'shared_memory_byte_size' must be specified along with 'shared_memory_region' parameter "
        "for tensor 'OUTPUT0'"),
    "offset alone": (of_output(shared_memory_offset=SIZE), INVALID_CODE,
        "'shared_memory_offset' can not be specified without 'shared_memory_region' parameter for "
        "tensor 'OUTPUT0'"),
    "classification of a region": (of_output(shared_memory_region=REGION,
        shared_memory_byte_size=SIZE, classification=("int64_param", 1)), INVALID_CODE,
        "output can't set both 'shared_memory_region' and 'classification'"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_refused_inference(call: Any, case: str) -> None:
    change, status, text = CASES[case]
    request = simple_request()
    change(request)
    code, message = refusal(call.ModelInfer, request)
    assert (code, message.partition(" (0 are registered")[0]) == (status, text)


def load(**parameters: tuple[str, object]) -> Any:
    request = pb.RepositoryModelLoadRequest(model_name="simple")
    for key, (kind, value) in parameters.items():
        setattr(request.parameters[key], kind, value)
    return request


def unload() -> Any:
    request = pb.RepositoryModelUnloadRequest(model_name="simple")
    request.parameters["unload_dependents"].int64_param = 1
    return request


EXPLICIT = (
    "explicit model load / unload is not allowed if polling is enabled (--model-control-mode is "
    "none; restart the server with explicit)"
)
NO_REPOSITORY = "'repository_name' specification is not supported"
OTHER_ERRORS: dict[str, tuple[str, Any, str, str]] = {
    "metadata": ("ModelMetadata", pb.ModelMetadataRequest(name="x"), "NOT_FOUND",
        UNKNOWN_MODEL_TEXT + "'x' is not found"),
    "config": ("ModelConfig", pb.ModelConfigRequest(name="simple", version="3"), "NOT_FOUND",
        UNKNOWN_MODEL_TEXT + "'simple' version 3 is not found"),
    "ready": ("ModelReady", pb.ModelReadyRequest(name="simple", version="x"), INVALID_CODE,
        f"{NO_VERSION} 'x' (details: stol), {VERSION}"),
    "statistics": ("ModelStatistics", pb.ModelStatisticsRequest(name="x"), INVALID_CODE,
        "requested model 'x' is not available"),
    "statistics of a version": ("ModelStatistics",
        pb.ModelStatisticsRequest(name="simple", version="3"), INVALID_CODE,
        "requested model version is not available for model 'simple'"),
    "index": ("RepositoryIndex", pb.RepositoryIndexRequest(repository_name="x"), "UNIMPLEMENTED",
        NO_REPOSITORY),
    "load": ("RepositoryModelLoad", load(), "UNAVAILABLE", EXPLICIT),
    "load from": ("RepositoryModelLoad",
        pb.RepositoryModelLoadRequest(repository_name="x", model_name="simple"), "UNIMPLEMENTED",
        NO_REPOSITORY),
    "load config": ("RepositoryModelLoad", load(config=("bytes_param", b"{}")), INVALID_CODE,
        "invalid value type for load parameter 'config', expected string_param."),
    "load file": ("RepositoryModelLoad", load(**{"file:1/a": ("string_param", "x")}), INVALID_CODE,
        "invalid value type for load parameter 'file:1/a', expected bytes_param."),
    "load other": ("RepositoryModelLoad", load(mine=("bool_param", True)), INVALID_CODE,
        "unrecognized load parameter 'mine'. Allowed are 'config' and 'file:PATH'"),
    "unload dependents": ("RepositoryModelUnload", unload(), INVALID_CODE,
        "invalid value type for 'unload_dependents' parameter, expected bool_param."),
    "register": ("SystemSharedMemoryRegister",
        pb.SystemSharedMemoryRegisterRequest(name="a", key="/", byte_size=1), INVALID_CODE,
        "cannot register shared memory region 'a' - invalid shm key '/'"),
    "register what is not there": (
        "SystemSharedMemoryRegister",
        pb.SystemSharedMemoryRegisterRequest(name="a", key="/test-not-there", byte_size=1),
        "INTERNAL",
        "Unable to open shared memory region: '/test-not-there' (the server finds no such "
        "object; a client in another container must share its shared memory mount with the server)",
    ),
    "status": ("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest(name="a"),
        "NOT_FOUND", "Unable to find system shared memory region: 'a'"),
    "cuda status": ("CudaSharedMemoryStatus", pb.CudaSharedMemoryStatusRequest(name="a"),
        "NOT_FOUND", "Unable to find cuda shared memory region: 'a'"),
    "cuda register": ("CudaSharedMemoryRegister",
        pb.CudaSharedMemoryRegisterRequest(name="a", raw_handle=bytes(64), byte_size=1),
        INVALID_CODE,
        "failed to register shared memory region: invalid args (failed to register CUDA shared "
        "memory region: 'a', GPUs not supported)"),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHER_ERRORS)
def test_an_unsupported_call_is_refused(call: Any, case: str) -> None:
    method, request, status, text = OTHER_ERRORS[case]
    assert refusal(getattr(call, method), request) == (status, text)


@pytest.mark.parametrize("name", ["n" * 6000, "n" * 9000, "n" * 20000, "\u2603" * 5000])
def test_a_long_error_text_is_truncated_to_the_clients_limit(call: Any, name: str) -> None:
    """They refuse some statuses of more than 8 KB, and all of more than 16."""
    request = simple_request()
    request.outputs.add(name=name)
    message = f"unexpected inference output '{name}' for model 'simple'"
    for _ in range(8):
        status, text = refusal(call.ModelInfer, request)
        assert status == INVALID_CODE
        assert (
            text == message if len(name) == 6000 else message.startswith(text.removesuffix("..."))
        )


def test_bytes_that_are_no_request(server: Server) -> None:
    with grpc.insecure_channel(server.grpc_url) as channel:
        for name in ("ModelInfer", "ServerLive", "ModelConfig"):
            method = channel.unary_unary(f"/inference.GRPCInferenceService/{name}")
            status, text = refusal(method, b"\xff\xff\xff")
            assert (status, text.startswith("malformed")) == (INVALID_CODE, True)
        for name in ("/inference.GRPCInferenceService/Nothing", "/a.B/C"):
            assert refusal(channel.unary_unary(name), b"")[0] == "UNIMPLEMENTED"
    assert "Traceback" not in server.log()


def test_a_request_plan_applies_only_to_its_sizes(call: Any) -> None:
    request = simple_request()
    for _ in range(3):
        call.ModelInfer(request)
    request.raw_input_contents[1] = np.zeros(15, np.int32).tobytes()
    assert refusal(call.ModelInfer, request)[1].endswith("Expected 64, got 60")
