"""Clients' texts with control characters, or too long: no line is forged, no process ends."""

import base64
import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from shmserve.ipc.messages import inference as m
from shmserve.ipc.tensors.arrays import encode_bytes
from shmserve.ipc.tensors.descriptors import TensorRef
from shmserve.ipc.tensors.schemas import Inference, RequestedOutput, pack_inference
from tests.rigs.local_clients import Guest, answer
from tests.support import repositories
from tests.support.servers import Server, Start
from tests.support.wire.grpc_calls import refusal, simple_request, stub
from tests.support.wire.raw_http import Http, json_request, raw_connection

FORGED_LINE = "E 2026-01-01T00:00:00.000Z supervisor[1] forged"
SHORT_WORD = f"x\r\n{FORGED_LINE}\n\x1b[31mred\x1b[0m\x00\u2028{FORGED_LINE}"
LONG_WORD = SHORT_WORD + "y" * (1 << 20)
LOG_LINE = re.compile(
    r"[DIWE] \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z "
    r"(supervisor|gateway (0|grpc)|scheduler \w+|worker \w+\.0)\[\d+\] .*"
)
SHOUTING_MODEL = repositories.python_model("""
    def execute(self, requests):
        word = self.input(requests[0], "INPUT0").flat[0]
        word = word.decode(errors="surrogateescape")
        pb_utils.Logger.log_warn(word)
        if requests[0].request_id() == "error":
            raise pb_utils.TritonModelException(word)
        raise ValueError(word)
""")
ONES = np.ones((1, 16), np.int32)


@pytest.fixture(scope="module")
def server(models: Path, start: Start) -> Server:
    repositories.add(models, "simple")
    config = repositories.identity_config("shouter", "BYTES", [1])
    repositories.write(models, "shouter", config, SHOUTING_MODEL)
    flags = ["--model-control-mode=explicit", "--load-model=simple", "--load-model=shouter"]
    return start(models, *flags, "--log-verbose=1", grpc=True)


@pytest.fixture(autouse=True)
def log_stays_ours(server: Server) -> Iterator[None]:
    """Check that the lines of a test in the log have the server's format, printable and short."""
    log_length = len(server.log())
    yield
    with server.http() as http:
        assert http.infer("simple", request_body()).ok()
    added = server.log()[log_length:]
    assert added, "nothing was logged, so nothing was shown"
    for line in added.split("\n")[:-1]:
        assert line.isprintable(), line[:300]
        assert LOG_LINE.fullmatch(line) or line.startswith("    "), line[:300]
        assert len(line) < 20_000
    assert not re.search(rf"(?m)^{re.escape(FORGED_LINE)}", added)


def request_body(**members: Any) -> dict[str, Any]:
    return {**json_request(INPUT0=ONES, INPUT1=ONES), **members}


@pytest.mark.parametrize("word", [SHORT_WORD, LONG_WORD], ids=["short", "long"])
def test_hostile_words_in_the_json_of_a_request(http: Http, word: str) -> None:
    first_input, second_input = request_body()["inputs"]
    assert http.infer("simple", request_body(id=word)).ok().json()["id"] == word
    for request in (
        request_body(id=word, outputs=[{"name": word}]),
        request_body(parameters={"timeout": word}),
        request_body(parameters={"triton_" + word: 1}),
        request_body(outputs=[{"name": "OUTPUT0", "parameters": {"shared_memory_region": word}}]),
        *(
            {"id": word, "inputs": [{**first_input, member: word}, second_input]}
            for member in ("name", "datatype", "shape", "data")
        ),
    ):
        refused = http.infer("simple", request)
        assert refused.status in (400, 404, 500), (refused.status, refused.body[:200])
        assert refused.error


@pytest.mark.parametrize("word", [SHORT_WORD, LONG_WORD], ids=["short", "long"])
@pytest.mark.parametrize("request_id", ["error", "exception"])
def test_hostile_text_in_outputs_and_model_errors(http: Http, word: str, request_id: str) -> None:
    request = {"id": request_id, **json_request(INPUT0=np.array([word], object))}
    assert http.infer("shouter", request).status == 500


@pytest.mark.parametrize("request_id", ["error", "exception"])
def test_hostile_bytes_that_are_not_text(server: Server, request_id: str) -> None:
    """The model writes half a character to stderr; the log shows it escaped."""
    request = pb.ModelInferRequest(model_name="shouter", id=request_id)
    request.inputs.add(name="INPUT0", datatype="BYTES", shape=[1])
    request.raw_input_contents.append(b"\3\0\0\0a\xffb")
    with stub(server) as call:
        status, text = refusal(call.ModelInfer, request)
    assert (status, text.endswith(r": a\udcffb")) == ("INTERNAL", True), text


def test_hostile_words_in_paths(http: Http) -> None:
    word = quote(SHORT_WORD, safe="")
    for method, path in (
        ("GET", f"/{word}"),
        ("POST", f"/v2/models/{word}/infer"),
        ("GET", f"/v2/models/{word}/config"),
        ("GET", f"/v2/models/{word}/stats"),
        ("POST", f"/v2/repository/models/{word}/load"),
        ("POST", f"/v2/systemsharedmemory/region/{word}/register"),
        ("GET", f"/v2/systemsharedmemory/region/{word}/status"),
    ):
        refused = http.call(method, path, {})
        assert refused.status in (400, 404, 500), (path, refused.status, refused.body[:200])
    http.post(f"/v2/repository/models/{word}/unload", {}).ok()  # also succeeds for unknown models


@pytest.mark.parametrize("word", [SHORT_WORD, LONG_WORD], ids=["short", "long"])
def test_hostile_words_in_requests_to_the_control_plane(http: Http, word: str) -> None:
    encoded = base64.b64encode(b"x").decode()
    path = "/v2/repository/models/simple/load"
    region = "/v2/systemsharedmemory/region/r/register"
    for request_path, body in (
        (path, {"parameters": {"config": word}}),
        (path, {"parameters": {"config": json.dumps({"name": word})}}),
        (path, {"parameters": {"config": "{}", f"file:{word}": encoded}}),
        (path, {"parameters": {word: word}}),
        (region, {"key": word, "byte_size": 64}),
        (region, {"key": "/" + word, "byte_size": 64}),
        ("/v2/logging", {"log_format": word}),
        ("/v2/logging", {"log_file": word}),
    ):
        refused = http.post(request_path, body)
        assert refused.status in (400, 404, 500, 501, 503), (request_path, refused.body[:200])
    http.post("/v2/logging", {word: True, "log_verbose_level": 2}).ok()


def test_hostile_words_in_headers_and_malformed_requests(server: Server) -> None:
    start = b"GET /v2 HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    for text in (
        b"\x1b[31m" + FORGED_LINE.encode() + b"\r\n\r\n",
        b"GET /\x1b[31m HTTP/1.1\r\nHost: \x1b\r\n\r\n",
        start + b"Authorization: Bearer \x1b[31m\r\n\r\n",
        start + b"X\x1b: 1\r\n\r\n",
        start + b"X: 1\r\n" + FORGED_LINE.encode() + b"\r\n\r\n",
        start + b"Inference-Header-Content-Length: \x1b[31m\r\nContent-Length: 0\r\n\r\n",
        b"GET /v2 HTTP/1.1\r\nHost: " + b"e" * 9000 + b"\r\n\r\n",
    ):
        with raw_connection(server.http_port) as connection, contextlib.suppress(OSError):
            connection.sendall(text)
            assert connection.recv(65536)[:9] == b"HTTP/1.1 "


@pytest.mark.parametrize("word", [SHORT_WORD, LONG_WORD], ids=["short", "long"])
def test_over_grpc(server: Server, word: str) -> None:
    with stub(server) as call:
        assert call.ModelInfer(simple_request(word), timeout=20).id == word
        for send_call, request in (
            (call.ModelInfer, simple_request(word, model_version=word)),
            (call.ModelInfer, request_with_input_name(word)),
            (call.ModelInfer, pb.ModelInferRequest(model_name=word, id=word)),
            (call.ModelConfig, pb.ModelConfigRequest(name=word)),
            (call.ModelMetadata, pb.ModelMetadataRequest(name=word, version=word)),
            (call.ModelStatistics, pb.ModelStatisticsRequest(name=word)),
            (call.RepositoryModelLoad, pb.RepositoryModelLoadRequest(model_name=word)),
            (
                call.SystemSharedMemoryRegister,
                pb.SystemSharedMemoryRegisterRequest(name=word, key=word, byte_size=64),
            ),
            (call.SystemSharedMemoryStatus, pb.SystemSharedMemoryStatusRequest(name=word)),
            (call.LogSettings, log_format(word)),
        ):
            with pytest.raises(grpc.RpcError) as error_info:
                send_call(request, timeout=20)
            # The text of an error is in a header, whose size is limited.
            assert error_info.value.code() is not grpc.StatusCode.UNKNOWN
            assert error_info.value.code() is not grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("word", [SHORT_WORD, LONG_WORD[: 1 << 18]], ids=["short", "long"])
def test_hostile_words_over_the_native_listener(server: Server, word: str) -> None:
    input_refs = (TensorRef("INPUT0", "INT32", (1, 16), ONES.tobytes()),)
    with contextlib.closing(Guest(server).hello()) as local_client:
        link = local_client.link("simple")
        for number, request in enumerate(
            (
                Inference((TensorRef(word, "INT32", (1, 16), ONES.tobytes()),), ()),
                Inference((TensorRef("INPUT0", word, (1, 16), b""),), ()),
                Inference(input_refs, (RequestedOutput(word),)),
                Inference(input_refs, (), {word: word}),
            )
        ):
            work = pack_inference(request)
            link.send(m.Submit(number, *work, 0, 0, 0, 0, word))
            assert isinstance(answer(link), m.Failed)
        shouter_link = local_client.link("shouter", f"{local_client.number}.{local_client.token}.2")
        tensor = TensorRef("INPUT0", "BYTES", (1,), encode_bytes(np.array([word.encode()], object)))
        for number, name in enumerate(("error", word)):
            work = pack_inference(Inference((tensor,), ()))
            shouter_link.send(m.Submit(number, *work, 0, 0, 0, 0, name))
            assert isinstance(answer(shouter_link), m.Failed)


def request_with_input_name(name: str) -> Any:
    request = simple_request(name)
    request.inputs[0].name = name
    return request


def log_format(text: str) -> Any:
    request = pb.LogSettingsRequest()
    request.settings["log_format"].string_param = text
    return request
