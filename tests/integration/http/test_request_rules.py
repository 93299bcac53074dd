"""Invalid requests: each has the protocol's status and text; the connection stays open."""

import json
from typing import Any

import numpy as np
import pytest

from tests.support.wire.raw_http import Http, binary_request, json_input

NO_ID = "[request id: <id_unknown>] "
ROW = np.zeros((1, 16), np.int32)


def simple_body(**changes: Any) -> dict[str, Any]:
    """Return a valid request for "simple" with changes to its first input."""
    return {"inputs": [{**json_input("INPUT0", ROW), **changes}, json_input("INPUT1", ROW)]}


def body_without_member(member: str) -> dict[str, Any]:
    request = simple_body()
    del request["inputs"][0][member]
    return request


def simple(*inputs: dict[str, Any], **members: Any) -> dict[str, Any]:
    return {"inputs": [*inputs], **members}


FIRST_INPUT, SECOND_INPUT = json_input("INPUT0", ROW), json_input("INPUT1", ROW)
BATCH_NOTE = (
    " NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be "
    "prepended to each input shape. If you want to specify the full shape including the batch dim "
    "in your input dims config, try setting max_batch_size to zero. See the model configuration "
    "docs for more info on max_batch_size."
)

WRONG_REQUESTS: dict[str, tuple[Any, int, str]] = {
    "no inputs member": ({}, 500,
        "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'"),
    "a missing input": (simple(FIRST_INPUT), 400,
        NO_ID + "expected 2 inputs but got 1 inputs for model 'simple'. Got input(s) ['INPUT0'], "
        "but missing required input(s) ['INPUT1']. Please provide all required input(s)."),
    "an unknown input": (simple(FIRST_INPUT, {**SECOND_INPUT, "name": "X"}), 400,
        "unexpected inference input 'X' for model 'simple'"),
    "an input twice": (simple(FIRST_INPUT, FIRST_INPUT), 400,
        "input 'INPUT0' already exists in request"),
    "an unknown output": (simple_body() | {"outputs": [{"name": "X"}]}, 400,
        "unexpected inference output 'X' for model 'simple'"),
    "an output twice": (simple_body() | {"outputs": [{"name": "OUTPUT0"}, {"name": "OUTPUT0"}]},
        400, "output 'OUTPUT0' already exists in request"),
    "another datatype": (simple_body(datatype="FP32"), 400,
        "inference input 'INPUT0' data-type is 'FP32', but model 'simple' expects 'INT32'"),
    "another shape": (
        simple_body(shape=[1, 8], data=[0] * 8),
        400,
        NO_ID
        + "unexpected shape for input 'INPUT0' for model 'simple'. Expected [-1,16], got [1,8]."
        + BATCH_NOTE,
    ),
    "too large a batch": (simple(json_input("INPUT0", np.zeros((9, 16), np.int32)),
        json_input("INPUT1", np.zeros((9, 16), np.int32))), 400,
        "inference request batch-size must be <= 8 for 'simple'"),
    "a batch dimension forgotten": (simple_body(shape=[9], data=[0] * 9), 400,
        NO_ID + "input 'INPUT1' batch size does not match other inputs for 'simple'"),
    "batch dimensions forgotten": (simple(json_input("INPUT0", np.zeros(16, np.int32)),
        json_input("INPUT1", np.zeros(16, np.int32))), 400,
        NO_ID + "inference request batch-size must be <= 8 for 'simple'"),
    "batches that differ": (simple(json_input("INPUT0", np.zeros((2, 16), np.int32)), SECOND_INPUT),
        400, "batch size does not match other inputs for 'simple'"),
    "a negative dimension": (simple_body(shape=[1, -16]), 500,
        "attempt to access JSON non-unsigned-integer as unsigned-integer (input 'INPUT0')"),
    "a huge shape": (simple_body(shape=[2**40, 2**40]), 400, "invalid shape for input 'INPUT0'"),
    "less data than the shape": (simple_body(data=[0] * 15), 500, "hape does not match true shape"),
    "more data than the shape": (simple_body(data=[0] * 17), 500,
        "Unable to parse 'data': Shape does not match true shape of 'data' field"),
    "words for numbers": (simple_body(data=["a"] * 16), 500,
        "attempt to access JSON non-signed-integer as signed-integer (input 'INPUT0' has \"a\")"),
    "a number for a name": (simple_body(name=7), 500,
        "Unable to parse 'name': attempt to access JSON non-string as string"),
    "a word for a shape": (simple_body(shape="x"), 500,
        "Unable to parse 'shape': attempt to access JSON non-array as array"),
    "a number for the id": (simple_body() | {"id": 5}, 500,
        "Unable to parse 'id': attempt to access JSON non-string as string"),
    "no data at all": (body_without_member("data"), 400,
        "Input must set only one of the following fields: 'data', 'binary_data_size' in "
        "'parameters', " "'shared_memory_region' in 'parameters'. But no field is set"),
    "data twice": (simple_body(parameters={"binary_data_size": 64}), 400,
        "Input must set only one of the following fields: 'data', 'binary_data_size' in "
        "'parameters', "
        "'shared_memory_region' in 'parameters'. But set 'data' 'binary_data_size'"),
    "a reserved parameter": (simple_body() | {"parameters": {"triton_x": 1}}, 400,
        "parameter keys starting with 'triton_' are reserved for Triton usage and should not be "
        "specified."),
    "a parameter that is a list": (simple_body() | {"parameters": {"x": []}}, 400,
        "parameter 'x' has invalid type. It should be either 'int', 'bool', or 'string'."),
    "an unknown region": (simple({"name": "INPUT0", "datatype": "INT32", "shape": [1, 16],
        "parameters": {"shared_memory_region": "nowhere", "shared_memory_byte_size": 64}},
        SECOND_INPUT), 404, "Unable to find shared memory region: 'nowhere'"),
    "an output that is binary and in a region": (simple_body() | {"outputs": [{"name": "OUTPUT0",
        "parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 64,
        "binary_data": True}}]}, 400,
        "Output can't set both 'shared_memory_region' and 'binary_data'"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_REQUESTS)
def test_wrong_request(http: Http, case: str) -> None:
    request, status, error = WRONG_REQUESTS[case]
    reply = http.infer("simple", request)
    assert error in reply.error
    assert reply.status == status
    assert http.infer("simple", simple_body()).status == 200


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b"7", b'"x"', b'{"inputs":{}}', b'{"inputs":[7]}', b"\xff\xfe",
        b"{}garbage",
    ],
)  # fmt: skip
def test_a_body_that_is_no_request(http: Http, body: bytes) -> None:
    reply = http.infer("simple", body)
    assert reply.status in (400, 500) and reply.error
    assert http.infer("simple", simple_body()).status == 200


BINARY_INPUTS = [
    ("INPUT0", "INT32", [1, 16], ROW.tobytes()),
    ("INPUT1", "INT32", [1, 16], ROW.tobytes()),
]


def test_wrong_binary_sizes(http: Http) -> None:
    body, headers = binary_request(BINARY_INPUTS)
    reply = http.infer("simple", body[:-4], headers)
    assert reply.status == 400
    assert reply.error.endswith(
        "unexpected size for input 'INPUT1', expecting 4 additional bytes for model 'simple'"
    )
    reply = http.infer("simple", body + b"1234", headers)
    assert reply.status == 400
    assert reply.error.endswith("unexpected additional input data for model 'simple'")
    reply = http.infer("simple", body, {})  # without the header of the binary format
    assert reply.error.endswith("Inference-Header-Content-Length is the size of the JSON)")
    reply = http.infer_binary(
        "simple", [("INPUT0", "INT32", [1, 16], b"\0" * 60), BINARY_INPUTS[1]]
    )
    assert reply.status == 400 and "INPUT0" in reply.error


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ("x", "Unable to parse Inference-Header-Content-Length, got: x"),
        ("99999999999", "value is out of range [ -2147483648, 2147483647 ], got: 99999999999"),
        (str(2**64), f"value is out of range [ -2147483648, 2147483647 ], got: {2**64}"),
        *(
            (word, f"Unable to parse Inference-Header-Content-Length, got: {word}")
            for word in ("1e3", "+1", "0x10", "1 1", "1,1", "1.0", "")
        ),
        ("-1", "inference header size should be in range (0, "),
        ("100000", "inference header size should be in range (0, "),
    ],
)
def test_wrong_header_length(http: Http, value: str, error: str) -> None:
    body, _ = binary_request(BINARY_INPUTS)
    reply = http.infer("simple", body, {"Inference-Header-Content-Length": value})
    assert reply.status == 400
    assert error in reply.error


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"\x02\0\0\0ab",
         "expected 2 string elements for inference input 'INPUT0' for model 'text', got 1"),
        (b"\0\0\0\0\0\0\0\0\0\0\0\0",
         "unexpected number of string elements 3 for inference input 'INPUT0' for model 'text', "
         "expecting 2"),
        (b"\0\0\0\0ab",
         "incomplete string length indicator for inference input 'INPUT0' for model 'text', "
         "expecting 4 bytes but only 2 bytes available. Please make sure the string length "
         "indicator is in one buffer."),
        (b"\xff\xff\xff\xffab", "INPUT0"),
    ],
)  # fmt: skip
def test_wrong_bytes(http: Http, data: bytes, error: str) -> None:
    reply = http.infer_binary("text", [("INPUT0", "BYTES", [1, 2], data)])
    assert reply.status == 400 and reply.error.startswith("[request id: <id_unknown>] ")
    assert error in reply.error
    named_reply = http.infer_binary("text", [("INPUT0", "BYTES", [1, 2], data)], id="my id")
    assert named_reply.error == reply.error.replace("<id_unknown>", "my id")


def test_nesting(http: Http) -> None:
    assert http.infer("simple", b'{"inputs":' + b"[" * 100_000).status in (400, 500)
    deep_value = json.loads("[" * 90 + "]" * 90)
    assert http.infer("simple", simple_body() | {"parameters": {"deep": deep_value}}).status == 400


def test_unknown_model(http: Http) -> None:
    reply = http.infer("nothing", simple_body())
    assert (reply.status, reply.error) == (404, "Request for unknown model: 'nothing' is not found")


def test_limits(http: Http) -> None:
    """The shared server's limit is 8 MiB, for JSON; binary tensors may be larger."""
    values = b"1," * 5_000_000
    body = b'{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1],"data":[' + values + b"1]}]}"
    reply = http.infer("identity", body)
    assert reply.status == 400
    assert reply.error.endswith(
        f"request JSON size of {len(body)} bytes exceeds the maximum allowed input size of "
        "8388608 bytes. Use --http-max-input-size to increase the limit."
    )
    large_array = np.zeros(3_000_000, np.float32)
    outputs = [{"name": "OUTPUT0", "parameters": {"binary_data": True}}]
    assert (
        http.infer_binary(
            "identity",
            [("INPUT0", "FP32", [len(large_array)], large_array.tobytes())],
            outputs=outputs,
        ).status
        == 200
    )
