"""Native models that yield responses, over every protocol: the example, disconnects, errors."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

import shmserve.client
from tests.support import repositories
from tests.support.servers import ROOT, Server, run_command
from tests.support.wire.grpc_calls import stub

LASTING_MODEL = """
import asyncio, pathlib
from collections.abc import AsyncIterator, Iterator
from numpy import ndarray
from shmserve.model import FP32

class Plain:
    def load(self, context):
        self.note = context.directory / "closed"

    def predict(self, x: FP32[ndarray, 1]) -> Iterator[FP32[ndarray, 1]]:
        try:
            while True:
                yield x
                if x[0] < 0:
                    raise ValueError("enough")
        finally:
            self.note.touch()

class Asynchronous(Plain):
    async def predict(self, x: FP32[ndarray, 1]) -> AsyncIterator[FP32[ndarray, 1]]:
        try:
            yield x
            if x[0] < 0:
                raise ValueError("enough")
            await asyncio.Event().wait()
        finally:
            self.note.touch()
"""
NATIVE = 'backend: "native"\nparameters {{ key: "class" value {{ string_value: "{}" }} }}\n'


@pytest.fixture(scope="module")
def served(
    models: Path, serve_models: Callable[[Path], Server], explicit_server: tuple[Server, Path]
) -> tuple[Server, Path]:
    repositories.write(
        models,
        "words",
        NATIVE.format("Words"),
        (ROOT / "examples" / "native_stream.py").read_text(),
    )
    for kind in ("Plain", "Asynchronous"):
        repositories.write(models, kind.lower(), NATIVE.format(kind), LASTING_MODEL)
    return serve_models(models), explicit_server[1]


@pytest.fixture
def client(served: tuple[Server, Path]) -> Iterator[shmserve.client.Server]:
    with shmserve.client.connect(served[0].run_dir) as native_client:
        yield native_client


def words(responses: Any) -> list[bytes]:
    return [response["output"][0] for response in responses]


def test_the_example_streams(client: shmserve.client.Server) -> None:
    text = np.array([b"one two three"], object)
    assert words(client.stream("words", text=text)) == [b"one", b"two", b"three"]
    assert words(client.stream("words", text=np.array([b""], object))) == []


def test_the_example_over_grpc(served: tuple[Server, Path]) -> None:
    text = b"one two three"
    request = pb.ModelInferRequest(model_name="words", id="w")
    request.inputs.add(name="text", datatype="BYTES", shape=[1])
    request.raw_input_contents.append(len(text).to_bytes(4, "little") + text)
    with stub(served[0]) as call:
        responses = list(call.ModelStreamInfer(iter([request]), timeout=30))
    assert [r.infer_response.raw_output_contents[0][4:] for r in responses] == text.split()


@pytest.mark.parametrize("listener", ["native", "http", "grpc"])
def test_the_shells_client_prints_responses(served: tuple[Server, Path], listener: str) -> None:
    server, _ = served
    option = {
        "native": f"--run-dir={server.run_dir}",
        "http": f"--url=http://{server.url}",
        "grpc": f"--url=grpc://{server.grpc_url}",
    }[listener]
    result = run_command(
        "client", "infer", "words", '--input=text="one two"', "--request-id=q", option
    )
    assert (result.returncode, result.stderr) == (0, "")
    responses = [json.loads(line) for line in result.stdout.splitlines()]
    assert [response["outputs"][0]["data"] for response in responses] == [["one"], ["two"]]
    assert {response["id"] for response in responses} == {"q"}
    failing = run_command("client", "infer", "plain", "--input=x=-1", option)
    assert failing.returncode == 1
    assert json.loads(failing.stdout)["outputs"][0]["data"] == [-1.0]
    assert failing.stderr.count("\n") == 1 and "enough" in failing.stderr
