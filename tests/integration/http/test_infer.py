"""Inference over HTTP, from a client to a model and back."""

import asyncio
import gzip
import http.client
import json
import time
import zlib
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio

from tests.support.servers import Server
from tests.support.wire.raw_http import Http, binary_request, json_request, raw_connection
from tests.support.wire.triton import infer_inputs

A = np.arange(16, dtype=np.int32).reshape(1, 16)
B = np.full((1, 16), 3, np.int32)
COMPRESS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress}


def test_the_model_receives_all_parts_of_a_request(http: Http) -> None:
    parameters = {
        "word": "w", "number": 7, "truth": False, "half": 0.5, "timeout": 5_000_000, "priority": 1,
    }  # fmt: skip
    request = {"id": "see", "parameters": parameters, **json_request(INPUT0=np.ones(1, np.int32))}
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
            request = json_request(INPUT0=values)
            assert http.infer("identity", request).tensors()["OUTPUT0"].tolist() == values.tolist()
    body, headers = binary_request(inputs, id="n-5", parameters={"binary_data_output": True})
    assert http.infer("identity", body[:-4], headers).status == 400
    assert http.infer("identity", body, headers).ok().tensors()["OUTPUT0"][-1] == values[-1]


def split(data: bytes, *positions: int) -> list[bytes]:
    return [data[a:b] for a, b in pairwise((0, *positions, len(data)))]


def test_large_bodies_that_arrive_in_any_pieces(server: Server) -> None:
    """Requests on one connection are sent in these pieces, with pauses between the pieces.

    The last request is small.
    """
    random = np.random.default_rng(5)
    values = [random.random(size, np.float32) for size in (100_000, 100_000, 10)]
    requests: list[bytes] = []
    for row in values:
        inputs = [("INPUT0", "FP32", [len(row)], row.tobytes())]
        body, headers = binary_request(inputs, parameters={"binary_data_output": True})
        lines = [f"{name}: {value}" for name, value in headers.items()]
        lines += ["Host: localhost", f"Content-Length: {len(body)}", "", ""]
        requests.append("\r\n".join(["POST /v2/models/identity/infer HTTP/1.1", *lines]).encode())
        requests[-1] += body
    size = len(requests[0])
    whole = b"".join(requests)
    with raw_connection(server.http_port) as connection, connection.makefile("rb") as stream:
        for pieces in (
            [whole],
            requests,
            split(whole, 20, 300, 40_000, 300_000, size - 1, size + 1, size + 350),
            split(whole, *sorted(random.integers(0, len(whole), 40).tolist())),
            split(whole, size + 150_000),
        ):
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(0.01)
            for row in values:
                assert stream.readline() == b"HTTP/1.1 200 OK\r\n"
                answer = http.client.parse_headers(stream)
                data = stream.read(int(answer["Content-Length"]))
                assert data[-row.nbytes :] == row.tobytes()


async def test_tritonclient_aio(server: Server) -> None:
    async with triton_aio.InferenceServerClient(server.url) as client:
        assert await client.is_model_ready("simple")
        inputs = infer_inputs(triton, INPUT0=A, INPUT1=B)
        answers = await asyncio.gather(*(client.infer("simple", inputs) for _ in range(20)))
        for result in answers:
            assert (result.as_numpy("OUTPUT1") == A - B).all()


@pytest.mark.parametrize("coding", [*COMPRESS, "identity"])
def test_a_body_in_chunks_whose_coding_is_named(http: Http, coding: str) -> None:
    values = np.arange(64, dtype=np.float32)
    body = COMPRESS.get(coding, bytes)(json.dumps(json_request(INPUT0=values)).encode())
    chunks = (body[begin : begin + 50] for begin in range(0, len(body), 50))
    headers = {"Content-Encoding": coding}  # http.client adds the other
    assert (http.infer("identity", chunks, headers).tensors()["OUTPUT0"] == values).all()


def test_binary_tensors_without_their_header_are_explained(http: Http) -> None:
    body, _ = binary_request([("INPUT0", "FP32", [4], bytes(16))])
    reply = http.infer("identity", body, {})
    assert reply.error.endswith("Inference-Header-Content-Length is the size of the JSON)")


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
