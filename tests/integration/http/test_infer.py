"""Inference over HTTP: JSON and binary tensors, ids, parameters, selection of outputs, versions."""

import asyncio
import json

import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException

from tests.support.servers import Server
from tests.support.wire.raw_http import (
    Http,
    binary_request,
    join_bytes,
    json_input,
)

A = np.arange(16, dtype=np.int32).reshape(1, 16)
B = np.full((1, 16), 3, np.int32)


def simple_request(**members: object) -> dict:
    return {"inputs": [json_input("INPUT0", A), json_input("INPUT1", B)], **members}


def test_json_both_ways(http: Http) -> None:
    reply = http.infer("simple", simple_request(id="r-1")).ok()
    assert reply.headers["Content-Type"] == "application/json"
    assert "Inference-Header-Content-Length" not in reply.headers
    answer = reply.json()
    assert list(answer) == ["id", "model_name", "model_version", "outputs"]
    assert answer["id"] == "r-1" and answer["model_name"] == "simple"
    assert answer["model_version"] == "3"
    assert answer["outputs"] == [
        {
            "name": "OUTPUT0",
            "datatype": "INT32",
            "shape": [1, 16],
            "data": (A + B).ravel().tolist(),
        },
        {
            "name": "OUTPUT1",
            "datatype": "INT32",
            "shape": [1, 16],
            "data": (A - B).ravel().tolist(),
        },
    ]


def test_no_id_in_no_id_out(http: Http) -> None:
    assert "id" not in http.infer("simple", simple_request()).ok().json()
    assert "id" not in http.infer("simple", simple_request(id="")).ok().json()


def test_binary_both_ways(http: Http) -> None:
    inputs = [("INPUT0", "INT32", [1, 16], A.tobytes()), ("INPUT1", "INT32", [1, 16], B.tobytes())]
    reply = http.infer_binary("simple", inputs, parameters={"binary_data_output": True}).ok()
    assert reply.headers["Content-Type"] == "application/octet-stream"
    size = int(reply.headers["Inference-Header-Content-Length"])
    outputs = json.loads(reply.body[:size])["outputs"]
    assert [output["parameters"] for output in outputs] == [{"binary_data_size": 64}] * 2
    assert reply.body[size:] == (A + B).tobytes() + (A - B).tobytes()


def test_binary_inputs_with_json_outputs_and_the_reverse(http: Http) -> None:
    inputs = [("INPUT0", "INT32", [1, 16], A.tobytes()), ("INPUT1", "INT32", [1, 16], B.tobytes())]
    reply = http.infer_binary("simple", inputs).ok()
    assert reply.headers["Content-Type"] == "application/json"
    assert (reply.tensors()["OUTPUT1"] == A - B).all()
    outputs = [{"name": "OUTPUT1", "parameters": {"binary_data": True}}]
    reply = http.infer("simple", simple_request(outputs=outputs)).ok()
    assert list(reply.tensors()) == ["OUTPUT1"]
    assert reply.body.endswith((A - B).tobytes())


def test_mixed_inputs_and_outputs(http: Http) -> None:
    binary = {
        "name": "INPUT1",
        "datatype": "INT32",
        "shape": [1, 16],
        "parameters": {"binary_data_size": 64},
    }
    outputs = [{"name": "OUTPUT0", "parameters": {"binary_data": True}}, {"name": "OUTPUT1"}]
    header = json.dumps({"inputs": [json_input("INPUT0", A), binary], "outputs": outputs}).encode()
    reply = http.infer(
        "simple", header + B.tobytes(), {"Inference-Header-Content-Length": str(len(header))}
    )
    tensors = reply.tensors()
    assert (tensors["OUTPUT0"] == A + B).all() and (tensors["OUTPUT1"] == A - B).all()


def test_a_listed_output_is_json_even_if_the_default_is_binary(http: Http) -> None:
    request = simple_request(outputs=[{"name": "OUTPUT0"}], parameters={"binary_data_output": True})
    reply = http.infer("simple", request).ok()
    assert reply.json()["outputs"][0]["data"] == (A + B).ravel().tolist()


def test_versions(http: Http) -> None:
    for version in ("2", "3"):
        answer = http.infer(f"simple/versions/{version}", simple_request()).ok().json()
        assert answer["model_version"] == version
    reply = http.infer("simple/versions/1", simple_request())
    assert reply.status == 404
    assert reply.error == "Request for unknown model: 'simple' version 1 is not found"


def test_a_batch(http: Http) -> None:
    values = np.arange(48, dtype=np.int32).reshape(3, 16)
    request = {"inputs": [json_input("INPUT0", values), json_input("INPUT1", values)]}
    assert (http.infer("simple", request).tensors()["OUTPUT0"] == 2 * values).all()


def test_the_model_receives_all_parts_of_a_request(http: Http) -> None:
    parameters = {
        "word": "w", "number": 7, "truth": False, "half": 0.5, "timeout": 5_000_000, "priority": 1,
    }  # fmt: skip
    request = {
        "id": "see",
        "inputs": [json_input("INPUT0", np.array([1], np.int32))],
        "parameters": parameters,
    }
    reply = http.infer("echo_request", request).ok()
    assert reply.json()["parameters"] == {"answered": True}
    seen = json.loads(reply.tensors()["OUTPUT0"][0])
    assert seen["id"] == "see"
    assert seen["parameters"] == {"word": "w", "number": 7, "truth": False, "half": 0.5}
    assert seen["timeout"] == 5_000_000
    assert seen["outputs"] == ["OUTPUT0"] and seen["cancelled"] is False
    args = seen["args"]
    assert args["model_name"] == "echo_request" and args["model_version"] == "1"
    assert args["model_instance_kind"] == "CPU"
    assert args["model_instance_device_id"] == "0" and args["greeting"] == "hello"


def test_bytes_json_and_binary(http: Http) -> None:
    words = ["", "a", "grüße", "x" * 1000]
    request = {"inputs": [{"name": "INPUT0", "datatype": "BYTES", "shape": [1, 4], "data": words}]}
    encoded = [word.encode() for word in words]
    assert http.infer("text", request).tensors()["OUTPUT0"] == encoded
    raw = [b"", b"\0\xff\xfe", b"\n", b"z" * 70000]
    reply = http.infer_binary(
        "text",
        [("INPUT0", "BYTES", [2, 2], join_bytes(raw))],
        outputs=[{"name": "OUTPUT0", "parameters": {"binary_data": True}}],
    )
    assert reply.tensors()["OUTPUT0"] == raw


def test_large_tensors(http: Http) -> None:
    values = np.random.default_rng(1).random(1_500_000, dtype=np.float32)
    inputs = [("INPUT0", "FP32", [len(values)], values.tobytes())]
    for _ in range(3):
        reply = http.infer_binary("identity", inputs, parameters={"binary_data_output": True})
        assert (reply.tensors()["OUTPUT0"] == values).all()


@pytest.mark.parametrize("elements", [5_000, 16_384])
def test_like_requests_with_tensors_beside_the_message(http: Http, elements: int) -> None:
    for number in range(5):
        values = np.arange(elements, dtype=np.float32) + number
        inputs = [("INPUT0", "FP32", [elements], values.tobytes())]
        members = {"id": f"n-{number}", "parameters": {"binary_data_output": True}}
        reply = http.infer_binary("identity", inputs, **members).ok()
        assert reply.tensors()["OUTPUT0"].tolist() == values.tolist()
        assert f'"id":"n-{number}"' in reply.body.split(b"}", 1)[0].decode()
        if elements < 10_000:
            tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [elements]}
            request = {"inputs": [{**tensor, "data": values.tolist()}]}
            assert http.infer("identity", request).tensors()["OUTPUT0"].tolist() == values.tolist()
    body, headers = binary_request(inputs, id="n-5", parameters={"binary_data_output": True})
    assert http.infer("identity", body[:-4], headers).status == 400
    assert http.infer("identity", body, headers).ok().tensors()["OUTPUT0"][-1] == values[-1]


def triton_inputs(binary: bool) -> list[triton.InferInput]:
    inputs = [triton.InferInput(name, [1, 16], "INT32") for name in ("INPUT0", "INPUT1")]
    for tensor, values in zip(inputs, (A, B), strict=True):
        tensor.set_data_from_numpy(values, binary_data=binary)
    return inputs


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_tritonclient(server: Server, binary_in: bool, binary_out: bool) -> None:
    with triton.InferenceServerClient(server.url) as client:
        outputs = [triton.InferRequestedOutput("OUTPUT0", binary_data=binary_out)]
        result = client.infer("simple", triton_inputs(binary_in), outputs=outputs, request_id="7")
        assert (result.as_numpy("OUTPUT0") == A + B).all()
        assert result.as_numpy("OUTPUT1") is None and result.get_response()["id"] == "7"
        result = client.infer("simple", triton_inputs(binary_in), model_version="2")
        assert (result.as_numpy("OUTPUT1") == A - B).all()


def test_tritonclient_async_infer(server: Server) -> None:
    with triton.InferenceServerClient(server.url, concurrency=4) as client:
        calls = [client.async_infer("simple", triton_inputs(True)) for _ in range(20)]
        for call in calls:
            assert (call.get_result().as_numpy("OUTPUT0") == A + B).all()


async def test_tritonclient_aio(server: Server) -> None:
    async with triton_aio.InferenceServerClient(server.url) as client:
        assert await client.is_model_ready("simple")
        answers = await asyncio.gather(
            *(client.infer("simple", triton_inputs(True)) for _ in range(20))
        )
        for result in answers:
            assert (result.as_numpy("OUTPUT1") == A - B).all()


def test_tritonclient_sees_errors(server: Server) -> None:
    with triton.InferenceServerClient(server.url) as client:
        with pytest.raises(InferenceServerException) as error_info:
            client.infer("simple", triton_inputs(True)[:1], request_id="e")
        assert error_info.value.status() == "400"
        assert "expected 2 inputs but got 1 inputs for model 'simple'" in error_info.value.message()
        assert "[request id: e]" in error_info.value.message()
