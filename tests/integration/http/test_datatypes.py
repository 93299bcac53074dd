"""All 14 datatypes, extreme and empty, through a model that returns its inputs."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.http as triton

from tests.support.repositories import DATATYPES
from tests.support.servers import Server
from tests.support.wire.raw_http import Http, join_bytes


def integer_samples(bits: int, signed: bool) -> np.ndarray:
    """Return the smallest and the largest value of a datatype, and values between them."""
    dtype = np.dtype(f"{'i' if signed else 'u'}{bits // 8}")
    return np.array([np.iinfo(dtype).min, 0, 1, np.iinfo(dtype).max], dtype)


VALUES: dict[str, np.ndarray] = {
    "BOOL": np.array([True, False, True]),
    **{f"UINT{bits}": integer_samples(bits, signed=False) for bits in (8, 16, 32, 64)},
    **{f"INT{bits}": integer_samples(bits, signed=True) for bits in (8, 16, 32, 64)},
    "FP16": np.array([0, -1.5, 65504, np.inf], np.float16),
    "FP32": np.array([0, -1.5, 3.4e38, 1e-45], np.float32),
    "FP64": np.array([0, -1.5, 1.7e308, 5e-324], np.float64),
    "BF16": np.array([0x0000, 0xBFC0, 0x7F7F, 0x7F80], np.uint16),
}
WORDS = [b"", b"\x00\xff", "ü".encode(), b"long" * 100]


def raw(kind: str) -> bytes:
    return join_bytes(WORDS) if kind == "BYTES" else VALUES[kind].tobytes()


def count(kind: str) -> int:
    return len(WORDS) if kind == "BYTES" else len(VALUES[kind])


def all_inputs(filled_kind: str) -> list[tuple[str, str, list[int], bytes]]:
    """Return every input of the model: values for this datatype, and size zero for all others."""
    return [
        (
            f"INPUT_{kind}",
            kind,
            [count(kind)] if kind == filled_kind else [0],
            raw(kind) if kind == filled_kind else b"",
        )
        for kind in DATATYPES
    ]


@pytest.mark.parametrize("kind", DATATYPES)
def test_binary(http: Http, kind: str) -> None:
    outputs = [{"name": f"OUTPUT_{kind}", "parameters": {"binary_data": True}}]
    reply = http.infer_binary("types", all_inputs(kind), outputs=outputs)
    expected: Any = WORDS if kind == "BYTES" else VALUES[kind]
    output = reply.tensors()[f"OUTPUT_{kind}"]
    assert output == expected if kind == "BYTES" else output.tobytes() == expected.tobytes()


@pytest.mark.parametrize("kind", [kind for kind in DATATYPES if kind not in ("FP16", "BF16")])
def test_json(http: Http, kind: str) -> None:
    inputs: list[dict[str, Any]] = [
        {
            "name": f"INPUT_{datatype}",
            "datatype": datatype,
            "shape": [0],
            "parameters": {"binary_data_size": 0},
        }
        for datatype in DATATYPES
        if datatype != kind
    ]
    data = ["", "a", "ü"] if kind == "BYTES" else VALUES[kind].tolist()
    inputs.append({"name": f"INPUT_{kind}", "datatype": kind, "shape": [len(data)], "data": data})
    reply = http.infer("types", {"inputs": inputs, "outputs": [{"name": f"OUTPUT_{kind}"}]})
    assert reply.ok().json()["outputs"][0]["data"] == data


@pytest.mark.parametrize("kind", ["FP16", "BF16"])
def test_half_precision_is_binary_only(http: Http, kind: str) -> None:
    inputs = [
        {
            "name": f"INPUT_{datatype}",
            "datatype": datatype,
            "shape": [0],
            "parameters": {"binary_data_size": 0},
        }
        for datatype in DATATYPES
        if datatype != kind
    ]
    tensor = {"name": f"INPUT_{kind}", "datatype": kind, "shape": [1], "data": [1.0]}
    reply = http.infer("types", {"inputs": [*inputs, tensor]})
    assert reply.status == 400
    assert reply.error.endswith(
        f"receiving {kind} data via JSON is not supported. Please use the binary data format for "
        f"input INPUT_{kind}"
    )
    reply = http.infer_binary("types", all_inputs(kind), outputs=[{"name": f"OUTPUT_{kind}"}])
    assert reply.status == 400
    assert (
        f"sending {kind} data via JSON is not supported. Please use the binary data format for "
        "output" in reply.error
    )


def test_all_of_size_zero(http: Http) -> None:
    reply = http.infer_binary(
        "types", all_inputs("none"), parameters={"binary_data_output": True}
    ).ok()
    assert "Inference-Header-Content-Length" not in reply.headers
    assert reply.headers["Content-Type"] == "application/json"
    assert [output["shape"] for output in reply.json()["outputs"]] == [[0]] * len(DATATYPES)


def test_not_a_number_in_json(http: Http) -> None:
    tensor_json = b'{"name":"INPUT0","datatype":"FP32","shape":[3],"data":[NaN,Infinity,-Infinity]}'
    body = b'{"inputs":[' + tensor_json + b"]}"
    reply = http.infer("identity", body).ok()
    assert b"NaN" in reply.body and b"-Infinity" in reply.body
    binary = np.array([np.nan, np.inf], np.float32)
    reply = http.infer_binary("identity", [("INPUT0", "FP32", [2], binary.tobytes())]).ok()
    assert b"NaN" in reply.body


@pytest.mark.parametrize("kind", [kind for kind in DATATYPES if kind != "BF16"])
def test_tritonclient(server: Server, kind: str) -> None:
    values = np.array(WORDS, object) if kind == "BYTES" else VALUES[kind]
    with triton.InferenceServerClient(server.url) as client:
        inputs = []
        for other in DATATYPES:
            tensor = triton.InferInput(
                f"INPUT_{other}", [len(values)] if other == kind else [0], other
            )
            if other == kind:
                tensor.set_data_from_numpy(values)
            elif other == "BYTES":
                tensor.set_data_from_numpy(np.array([], object))
            elif other == "BF16":
                tensor.set_data_from_numpy(np.array([], ml_dtypes.bfloat16))
            else:
                tensor.set_data_from_numpy(VALUES[other][:0])
            inputs.append(tensor)
        outputs = [triton.InferRequestedOutput(f"OUTPUT_{kind}")]
        output = client.infer("types", inputs, outputs=outputs).as_numpy(f"OUTPUT_{kind}")
        assert output.tolist() == values.tolist()
