"""Answers and error texts beside those of a real Triton 2.51, recorded for the same requests."""

import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shmserve.gateway.compression import _FAILURE
from shmserve.ipc.tensors.arrays import NUMPY_DTYPES
from shmserve.ipc.tensors.descriptors import TensorRef
from shmserve.ipc.tensors.schemas import Inference, Inferred
from tests.rigs.gateway_rig import (
    SIMPLE_CONFIG,
    Rig,
    add_sub,
    echo,
    identity_config,
    model_config,
    rig,
    tensor_config,
)
from tests.support.wire.raw_http import Http

RECORDED_CASES = [
    json.loads(line)
    for line in (Path(__file__).parent / "data/triton_answers.jsonl").read_text().splitlines()
]


DATATYPES = "BOOL, UINT8, UINT16, UINT32, UINT64, INT8, INT16, INT32, INT64, FP16, FP32, FP64"
NO_VERSION = " (a version is an integer)"
TOO_MANY = " (input 'INPUT0': its shape has 16 elements, more are given)"
# This server's addition to Triton's text of an error.
BODY_HINT = " (a body that is an input, such as a file, needs Inference-Header-Content-Length: 0)"
ADDED_TEXTS = {
    **dict.fromkeys(("json string", "json null"), BODY_HINT),
    "raw two var": " (send JSON with its shape before the bytes, and the length of the JSON in "
    "Inference-Header-Content-Length)",
    "datatype bad": f" ('FOO'; allowed: {DATATYPES}, BYTES, BF16)",
    "datatype lower": f" ('int32'; allowed: {DATATYPES}, BYTES, BF16)",
    "datatype other bytes": " (input 'INPUT0' has 0)",
    **dict.fromkeys(("shape str", "shape float", "shape bool"), " (input 'INPUT0')"),
    **dict.fromkeys(("data str", "data null", "data obj"), " (input 'INPUT0')"),
    **dict.fromkeys(("data long", "data nested long"), TOO_MANY),
    "data floats": " (input 'INPUT0' has 1.5)",
    "data float ints": " (input 'INPUT0' has 1.0)",
    "data strs": " (input 'INPUT0' has \"1\")",
    **dict.fromkeys(("bad version", "version -1"), NO_VERSION),
    "UINT8 -1": " (input 'IN' has -1)",
    "UINT8 2^64": " (input 'IN' has 1.8446744073709552e+19)",
    "UINT8 1.5": " (input 'IN' has 1.5)",
    "FP32 bool": " (input 'IN' has true)",
    "FP32 str": " (input 'IN' has \"x\")",
    "FP32 null": " (input 'IN' has null)",
    "BOOL int": " (input 'IN' has 1)",
    "BOOL str": " (input 'IN' has \"true\")",
    "BYTES int": " (input 'IN' has 1)",
}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with rig(tmp_path_factory.mktemp("run")) as model_rig:
        model_rig.serve(SIMPLE_CONFIG, add_sub)
        echo_scheduler = model_rig.scheduler(echo)
        for datatype in NUMPY_DTYPES:
            model_rig.publish(identity_config(f"id_{datatype}", datatype, [-1]), echo_scheduler)
        model_rig.publish(identity_config("b_BYTES", "BYTES", [1], batch=4), echo_scheduler)
        model_rig.publish(identity_config("b_FP32", "FP32", [-1], batch=4), echo_scheduler)
        model_rig.publish(identity_config("two", "FP32", [-1, -1]), echo_scheduler)
        model_rig.publish(identity_config("bf", "FP32", [2, 3]), echo_scheduler)
        model_rig.publish(identity_config("bytes2", "BYTES", [1]), echo_scheduler)
        model_rig.open()
        yield model_rig


@pytest.fixture(scope="module")
def http(gateway: Rig) -> Iterator[Http]:
    connection = Http(gateway.port)
    yield connection
    connection.close()


def parse_ordered(text: bytes) -> Any:
    """Return JSON with the order of its keys, and any other body unchanged."""
    try:
        return json.loads(text, object_pairs_hook=list)
    except ValueError:
        return text


def split(body: bytes, header_length: str | None) -> tuple[Any, bytes]:
    head_size = len(body) if header_length is None else int(header_length)
    return parse_ordered(body[:head_size]), body[head_size:]


def extend_error(case: dict[str, Any]) -> str:
    """Return Triton's answer with this server's addition to the text of an error."""
    answer: str = case["answer"]
    if case["name"] not in ADDED_TEXTS:
        return answer
    text = json.loads(answer)["error"] + ADDED_TEXTS[case["name"]]
    return json.dumps({"error": text}, separators=(",", ":"))


@pytest.mark.parametrize("case", RECORDED_CASES, ids=[case["name"] for case in RECORDED_CASES])
def test_responses_equal_those_of_triton(http: Http, case: dict[str, Any]) -> None:
    method = case.get("method", "POST")
    body = case.get("body", "").encode("latin-1") or (b"" if method == "POST" else None)
    reply = http.call(method, case["path"], body, case.get("headers"))
    assert reply.status == case["status"]
    size = case.get("header_length")
    parts = split(reply.body, reply.headers.get("Inference-Header-Content-Length"))
    assert parts == split(extend_error(case).encode("latin-1"), size)
    if reply.status == 200 and size is not None:
        assert reply.headers["Content-Type"] == "application/octet-stream"


def simple(**members: Any) -> dict[str, Any]:
    r = list(range(16))
    inputs = [
        {"name": n, "datatype": "INT32", "shape": [1, 16], "data": r} for n in ("INPUT0", "INPUT1")
    ]
    return {"inputs": inputs, **members}


def one_input_body(datatype: str, size: int, data: list[Any]) -> dict[str, Any]:
    return {"inputs": [{"name": "IN", "datatype": datatype, "shape": [size], "data": data}]}


HEADER_LENGTH = "Inference-Header-Content-Length"
IN_REGION = [{"name": "OUTPUT0", "parameters": {"shared_memory_region": "r"}}]

# Cases in which 2.51 is wrong, or a newer version or a safer choice differs.
OWN_RESPONSES = {
    ("simple", 400,
     "[request id: <id_unknown>] Duplicate output name 'OUTPUT0' is not allowed in a request",
     ): simple(outputs=[{"name": "OUTPUT0"}] * 2),
    (
        "id_INT32",
        400,
        "JSON input 'IN' has a byte_size (4398046511104 bytes) that exceeds the maximum allowed "
        "value of 67108864 bytes. Use --http-max-input-size to increase the limit.",
    ): one_input_body("INT32", 2**40, [1]),
    ("id_INT32", 500,
     "Failed to parse 'data' field: shape does not match true shape (input 'IN': its shape has "
     "2 elements, 1 are given)"): one_input_body("INT32", 2, [1]),
    ("id_BYTES", 500,
     "Unable to parse 'data': shape does not match true shape of 'data' field (input 'IN': its "
     "shape has 1 elements, more are given)"): one_input_body("BYTES", 1, ["a", "b"]),
    ("id_INT32", 400,
     "invalid datatype for input IN ('INT33'; allowed: BOOL, UINT8, UINT16, UINT32, UINT64, "
     "INT8, INT16, INT32, INT64, FP16, FP32, FP64, BYTES, BF16)"): one_input_body("INT33", 1, [1]),
    ("simple", 400,
     "JSON nesting depth exceeds maximum allowed limit (100)"): (b"[" * 101 + b"]" * 101),
    (
        "simple",
        404,
        "Unable to find shared memory region: 'r' (0 are registered; "
        "register it before the request, and again after a restart of the server)",
    ): simple(outputs=IN_REGION),
}  # fmt: skip


@pytest.mark.parametrize("expected", OWN_RESPONSES, ids=lambda expected: expected[2][:40])
def test_documented_differences_from_triton(http: Http, expected: tuple[str, int, str]) -> None:
    model, status, text = expected
    reply = http.infer(model, OWN_RESPONSES[expected])
    assert (reply.status, reply.error) == (status, text)


@pytest.mark.parametrize(
    ("headers", "text"),
    [
        ({HEADER_LENGTH: "0x10"}, f"Unable to parse {HEADER_LENGTH}, got: 0x10"),
        (
            {HEADER_LENGTH: "2147483648"},
            f"Unable to parse {HEADER_LENGTH}, value is out of range [ -2147483648, 2147483647 ], "
            "got: 2147483648",
        ),
        ({"Content-Encoding": "gzip"}, f"{_FAILURE}: it is not gzip or zlib data"),
    ],
)
def test_headers_are_validated(http: Http, headers: dict[str, str], text: str) -> None:
    reply = http.infer("simple", simple(), headers)
    assert (reply.status, reply.error) == (400, text)


def test_escaped_names_are_unescaped(http: Http) -> None:
    http.infer("sim%70le", simple()).ok()
    assert http.infer("a%2Fb", simple()).error == "Request for unknown model: 'a/b' is not found"
    assert http.get("/v2/models/..%2Fsimple").status == 404
    assert http.get("/v2/models/%00").error == "Request for unknown model: '\0' is not found"


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_responses_are_compressed_on_request(http: Http, encoding: str) -> None:
    headers = {"accept-encoding": "identity;q=0.5", "Accept-Encoding": encoding}
    reply = http.infer("simple", simple(parameters={"binary_data_output": True}), headers).ok()
    assert reply.headers["Content-Encoding"] == encoding
    size = int(reply.headers["Inference-Header-Content-Length"])
    body = zlib.decompress(reply.body, 47)
    assert [o["name"] for o in json.loads(body[:size])["outputs"]] == ["OUTPUT0", "OUTPUT1"]
    assert len(body) - size == 128


def test_headers_contain_no_server_details(http: Http) -> None:
    headers = http.infer("simple", simple()).ok().headers
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert not {"Server", "Date", "Access-Control-Allow-Origin"} & set(headers.keys())


def test_pages_of_other_sites_may_not_post(http: Http) -> None:
    headers = {"Sec-Fetch-Site": "cross-site", "Content-Type": "text/plain"}
    assert http.infer("simple", simple(), headers).status == 403
    http.get("/v2", headers).ok()


def test_unsupported_encodings_list_supported_ones(http: Http) -> None:
    reply = http.infer("simple", simple(), {"Content-Encoding": "br"})
    assert (reply.status, reply.headers["Accept-Encoding"]) == (501, "gzip, deflate")


def test_versions_are_distinguished(gateway: Rig, http: Http) -> None:
    def constant_model(v: bytes) -> Any:
        def compute(request: Inference) -> Inferred:
            return Inferred((TensorRef("OUT", "INT8", (1,), v),), {"n": 1.5, "s": "x", "b": True})

        return compute

    tensors = [tensor_config("IN", "INT8", [1])], [tensor_config("OUT", "INT8", [1])]
    config = model_config("many", 0, *tensors)
    for version in (10, 2):
        scheduler = gateway.scheduler(constant_model(bytes([version])))
        gateway.publish(config, scheduler, str(version), latest=version == 10)
    request = {"inputs": [{"name": "IN", "datatype": "INT8", "shape": [1], "data": [0]}]}

    def answer(path: str) -> tuple[Any, Any]:
        answer = http.infer(path, request).ok().json()
        assert answer["parameters"] == {"n": 1.5, "s": "x", "b": True}
        return answer["model_version"], answer["outputs"][0]["data"]

    assert answer("many") == ("10", [10])
    assert answer("many/versions/2") == ("2", [2])
    assert answer("many/versions/0010") == ("10", [10])
    assert http.get("/v2/models/many").json()["versions"] == ["2", "10"]
    assert http.get("/v2/models/many/versions/2").json()["versions"] == ["2"]
    for missing in (http.infer(f"many/versions/{version}", request) for version in ("3", "003")):
        assert missing.error == "Request for unknown model: 'many' version 3 is not found"


def test_bytes_that_are_not_utf8_need_binary_data(http: Http) -> None:
    data = b"\x01\0\0\0\xff"
    inputs = [("IN", "BYTES", [1], data)]
    refusal = http.infer_binary("id_BYTES", inputs)
    assert refusal.status == 400 and "not UTF-8" in refusal.error
    reply = http.infer_binary("id_BYTES", inputs, parameters={"binary_data_output": True})
    assert reply.tensors()["OUT"] == [b"\xff"]


def test_responses_contain_no_internals(gateway: Rig, http: Http) -> None:
    words = [str(gateway.run_dir), "Traceback", "/proc", "shmserve/", "ipc://"]
    # A number that contains the digits of the pid is permitted.
    internals = re.compile(
        rf"(?<![\d.]){gateway.process.pid}(?!\d)|{'|'.join(map(re.escape, words))}"
    )
    for case in RECORDED_CASES[:120]:
        body = case.get("body", "").encode("latin-1")
        reply = http.call(case.get("method", "POST"), case["path"], body, case.get("headers"))
        response_text = reply.body.decode("latin-1") + str(reply.headers)
        assert internals.search(response_text) is None
