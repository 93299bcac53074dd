"""ONNX models: without a configuration, in batches, with an older configuration, with state."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as triton

from tests.support.onnx_models import FLOAT, save
from tests.support.servers import Server
from tests.support.wire.triton import infer_inputs

ACCUMULATOR_CONFIG = """
platform: "onnxruntime_onnx"
max_batch_size: 4
input [ { name: "x" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 2 ] } ]
sequence_batching {
  direct { }
  control_input [
    { name: "start" control [ { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } ] }
  ]
  state [ { input_name: "state" output_name: "next" data_type: TYPE_FP32 dims: [ 2 ]
            initial_state { name: "zero" data_type: TYPE_FP32 dims: [ 2 ] zero_data: true } } ]
}
"""


@pytest.fixture(scope="module")
def server(models: Path, serve_models: Callable[[Path], Server]) -> Server:
    """Start a server of a model without a configuration and one with an older configuration."""
    save(
        models / "large" / "1",
        [("Add", "x x", "y")],
        [("x", FLOAT, ("batch", "n"))],
        [("y", FLOAT, ("batch", "n"))],
    )
    dims = ("batch", 2)
    # y = state + x + start * 100, so the output shows all inputs of the model.
    save(
        models / "accumulator" / "1",
        [
            ("Constant", "", "hundred", {"value_float": 100.0}),
            ("Mul", "start hundred", "bonus"),
            ("Add", "x bonus", "more"),
            ("Add", "state more", "next"),
            ("Identity", "next", "y"),
        ],
        [("x", FLOAT, dims), ("state", FLOAT, dims), ("start", FLOAT, ("batch", 1))],
        [("next", FLOAT, dims), ("y", FLOAT, dims)],
    )
    (models / "accumulator" / "config.pbtxt").write_text(ACCUMULATOR_CONFIG)
    return serve_models(models)


@pytest.fixture
def client(server: Server) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.url) as inference_server_client:
        yield inference_server_client


def test_a_file_without_a_configuration_is_a_model(client: triton.InferenceServerClient) -> None:
    config = client.get_model_config("large")
    assert (config["backend"], config["platform"]) == ("onnxruntime", "onnxruntime_onnx")
    assert config["max_batch_size"] == 4
    # Triton's default number of instances for this backend on a CPU.
    assert config["instance_group"][0]["count"] == 2
    x = np.arange(300_000, dtype=np.float32)[None]
    for part in (x, x[:, :8]):
        result = client.infer("large", infer_inputs(triton, x=part))
        np.testing.assert_array_equal(result.as_numpy("y"), part + part)


def test_states_and_controls_of_sequences(client: triton.InferenceServerClient) -> None:
    responses = []
    for step in range(3):
        result = client.infer(
            "accumulator",
            infer_inputs(triton, x=np.full((1, 2), step + 1, np.float32)),
            sequence_id=7,
            sequence_start=step == 0,
            sequence_end=step == 2,
        )
        responses.append(result.as_numpy("y")[0, 0])
    assert responses == [101.0, 103.0, 106.0]
    metadata = client.get_model_metadata("accumulator")
    assert [tensor["name"] for tensor in metadata["inputs"]] == ["x"]
