"""Compressed requests and responses, and requests whose whole body is one tensor."""

import gzip
import json
import zlib
from collections.abc import Callable

import numpy as np
import pytest
import tritonclient.http as triton

from tests.support.servers import Server
from tests.support.wire.raw_http import Http, binary_request, json_input

VALUES = np.arange(64, dtype=np.float32)
REQUEST = {"inputs": [json_input("INPUT0", VALUES)]}
COMPRESS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress}
DECOMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.decompress,
    "deflate": zlib.decompress,
}


@pytest.mark.parametrize("coding", COMPRESS)
def test_compressed_request(http: Http, coding: str) -> None:
    body = COMPRESS[coding](json.dumps(REQUEST).encode())
    reply = http.infer("identity", body, {"Content-Encoding": coding})
    assert (reply.tensors()["OUTPUT0"] == VALUES).all()
    plain, headers = binary_request([("INPUT0", "FP32", [64], VALUES.tobytes())])
    reply = http.infer("identity", COMPRESS[coding](plain), {**headers, "Content-Encoding": coding})
    assert (reply.tensors()["OUTPUT0"] == VALUES).all()


@pytest.mark.parametrize("coding", [*COMPRESS, "identity"])
def test_a_body_in_chunks_whose_coding_is_named(http: Http, coding: str) -> None:
    body = COMPRESS.get(coding, bytes)(json.dumps(REQUEST).encode())
    chunks = (body[begin : begin + 50] for begin in range(0, len(body), 50))
    headers = {"Content-Encoding": coding}  # http.client adds the other
    assert (http.infer("identity", chunks, headers).tensors()["OUTPUT0"] == VALUES).all()


@pytest.mark.parametrize("coding", COMPRESS)
def test_compressed_response(http: Http, coding: str) -> None:
    reply = http.infer("identity", REQUEST, {"Accept-Encoding": coding}).ok()
    assert reply.headers["Content-Encoding"] == coding
    assert json.loads(DECOMPRESS[coding](reply.body))["outputs"][0]["data"] == VALUES.tolist()


@pytest.mark.parametrize("coding", COMPRESS)
def test_a_body_that_is_not_compressed_as_declared_is_an_error(http: Http, coding: str) -> None:
    assert http.infer("identity", REQUEST, {"Content-Encoding": coding}).status == 400
    packed = COMPRESS[coding](json.dumps(REQUEST).encode())
    assert http.infer("identity", packed[:-9], {"Content-Encoding": coding}).status == 400
    assert http.infer("identity", b"", {"Content-Encoding": coding}).status == 400


def test_a_bomb_is_refused(http: Http) -> None:
    """The shared server's limit is 8 MiB."""
    reply = http.infer("identity", gzip.compress(b" " * 20_000_000), {"Content-Encoding": "gzip"})
    assert reply.status == 400
    assert "Use --http-max-input-size to increase the limit." in reply.error


@pytest.mark.parametrize("coding", COMPRESS)
def test_tritonclient_compression(server: Server, coding: str) -> None:
    with triton.InferenceServerClient(server.url) as client:
        tensor = triton.InferInput("INPUT0", [64], "FP32")
        tensor.set_data_from_numpy(VALUES)
        result = client.infer(
            "identity",
            [tensor],
            request_compression_algorithm=coding,
            response_compression_algorithm=coding,
        )
        assert (result.as_numpy("OUTPUT0") == VALUES).all()


RAW_HEADERS = {"Inference-Header-Content-Length": "0"}


def test_raw_binary(http: Http) -> None:
    reply = http.infer("identity", VALUES.tobytes(), RAW_HEADERS).ok()
    assert (reply.tensors()["OUTPUT0"] == VALUES).all()
    assert reply.body.endswith(VALUES.tobytes())


def test_raw_binary_with_batching(http: Http) -> None:
    values = np.arange(4, dtype=np.float32)
    output = http.infer("completed", values.tobytes(), RAW_HEADERS).tensors()["OUTPUT0"]
    assert output.shape == (1, 4) and (output == 2 * values).all()


def test_raw_binary_needs_one_input(http: Http) -> None:
    reply = http.infer("simple", b"\0" * 64, RAW_HEADERS)
    assert reply.status == 400
    assert reply.error.endswith(
        "Raw request must only have 1 input (found 1) to be deduced but got 2 inputs in 'simple' "
        "model configuration"
    )


def test_raw_bytes_is_one_element_of_shape_1(http: Http) -> None:
    reply = http.infer("text", b"whatever", RAW_HEADERS)
    assert reply.status == 400
    assert reply.error.endswith(
        "For BYTE datatype raw input 'INPUT0', the model must have input shape [1]"
    )
