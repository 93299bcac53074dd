"""A decoupled model over every protocol, with third-party clients."""

import json
import queue
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

from tests.support import repositories
from tests.support.servers import Server, Start
from tests.support.wire.streams import send_repeat
from tests.support.wire.triton import infer_inputs

PATTERN = "^x-my-"
SCORES_CONFIG = """
max_batch_size: 4
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ 3 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 3 ] label_filename: "labels.txt" } ]
"""


@pytest.fixture(scope="module")
def server(models: Path, start: Start) -> Server:
    repositories.add(models, "repeat", "echo_request")
    source = (repositories.MODELS / "identity" / "1" / "model.py").read_text()
    folder = repositories.write(models, "scores", 'backend: "python"' + SCORES_CONFIG, source)
    (folder / "labels.txt").write_text("zero\n\ntwo")
    flags = (f"--http-header-forward-pattern={PATTERN}", f"--grpc-header-forward-pattern={PATTERN}")
    return start(models, *flags, grpc=True)


def test_tritons_stream_client(server: Server) -> None:
    answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    with triton_grpc.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for name in ("a", "b"):
            send_repeat(client, [1, 2, 3], request_id=name)
        responses: dict[str, list[Any]] = {"a": [], "b": []}
        open_requests = 2
        while open_requests:
            result, error = answers.get(timeout=20)
            assert error is None
            response = result.get_response()
            final = response.parameters["triton_final_response"].bool_param
            open_requests -= final
            responses[response.id].append(None if final else int(result.as_numpy("OUT")[0]))
        client.stop_stream()
    assert responses == {"a": [1, 2, 3, None], "b": [1, 2, 3, None]}


def events(body: bytes) -> list[Any]:
    return [json.loads(text.removeprefix("data: ")) for text in body.decode().split("\n\n")[:-1]]


def test_many_streams_at_once(server: Server) -> None:
    responses: list[list[int]] = []

    def read() -> None:
        with server.http() as http:
            body = {"IN": [*range(100)], "DELAY": [0] * 100, "WAIT": 0}
            reply = http.post("/v2/models/repeat/generate_stream", body)
            responses.append([event["OUT"] for event in events(reply.ok().body)])

    readers = [threading.Thread(target=read) for _ in range(8)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(30)
    assert responses == [[*range(100)]] * 8


ROWS = np.array([[0.5, 2.5, 1.0], [9.0, 8.0, 9.0]], np.float32)
BEST_CLASSES = [b"2.500000:1", b"1.000000:2:two", b"9.000000:0:zero", b"9.000000:2:two"]


@pytest.mark.parametrize("client_module", [triton_http, triton_grpc])
def test_classification(server: Server, client_module: Any) -> None:
    url = server.url if client_module is triton_http else server.grpc_url
    with client_module.InferenceServerClient(url) as client:
        assert "classification" in _extensions(client.get_server_metadata())
        inputs = infer_inputs(client_module, INPUT0=ROWS)
        requested = client_module.InferRequestedOutput("OUTPUT0", class_count=2)
        for _ in range(3):  # the schemas of the later requests are cached
            result = client.infer("scores", inputs, outputs=[requested])
            output = result.as_numpy("OUTPUT0")
            assert output.shape == (2, 2) and output.ravel().tolist() == BEST_CLASSES
        plain = client.infer(
            "scores", inputs, outputs=[client_module.InferRequestedOutput("OUTPUT0")]
        )
        assert (plain.as_numpy("OUTPUT0") == ROWS).all()


def _extensions(metadata: Any) -> Any:
    return metadata["extensions"] if isinstance(metadata, dict) else metadata.extensions


def test_headers_of_a_stream_become_parameters(server: Server) -> None:
    answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    with triton_grpc.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(
            lambda result, error: answers.put((result, error)), headers={"x-my-key": "v"}
        )
        client.async_stream_infer(
            "echo_request", infer_inputs(triton_grpc, INPUT0=np.zeros(1, np.int32))
        )
        result, error = answers.get(timeout=20)
        client.stop_stream()
    assert error is None
    assert json.loads(result.as_numpy("OUTPUT0")[0])["parameters"] == {"x-my-key": "v"}
