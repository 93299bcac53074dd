"""Sequences over every protocol: ids and flags, controls of every datatype, iterative sequences."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

import shmserve.client
from tests.support import repositories
from tests.support.sequence_models import IDLE_TIME, control, controls, instances
from tests.support.servers import Server, run_command, running
from tests.support.wire.raw_http import Http, json_request
from tests.support.wire.triton import infer_inputs

ITERATIVE_MODEL = repositories.python_model('''
    def initialize(self, args):
        self.seen = {}  # by correlation id

    def execute(self, requests):
        """Ask for each once more until it has come COUNT times."""
        responses = []
        for request in requests:
            wanted = int(self.input(request, "COUNT").flat[0])
            seen = self.seen.setdefault(request.correlation_id(), [])
            seen.append(request.flags())
            response = self.response(FLAGS=np.array([seen], np.int32))
            if DECOUPLED:
                request.get_response_sender().send(response)
            if len(seen) < wanted:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                responses.append(None)
            else:
                del self.seen[request.correlation_id()]
                responses.append(response)
                if DECOUPLED:
                    request.get_response_sender().send(flags=FINAL)
        return None if DECOUPLED else responses
''')
ITERATIVE_CONFIG = """
name: "{name}"
backend: "python"
max_batch_size: 4
input [ {{ name: "COUNT" data_type: TYPE_INT32 dims: [ 1 ] }} ]
output [ {{ name: "FLAGS" data_type: TYPE_INT32 dims: [ -1 ] }} ]
sequence_batching {{ iterative_sequence: true {strategy} }}
{more}
"""
CALLER_MODEL = repositories.python_model('''
    def one(self, request):
        """Call the model "plain" for each of VALUES, as one sequence whose id is ID."""
        values = self.input(request, "VALUES")
        name = self.input(request, "ID")[0].decode()
        for at, value in enumerate(values):
            call = pb_utils.InferenceRequest(
                model_name="plain",
                requested_output_names=["OUTPUT0"],
                inputs=[pb_utils.Tensor("INPUT0", np.full((1, 1), value, np.int32))],
                correlation_id=name,
                flags=(at == 0) * 1 | (at == len(values) - 1) * 2,
            )
            response = call.exec()
            if response.has_error():
                return pb_utils.InferenceResponse(error=response.error())
        output = response.output_tensors()[0].as_numpy().reshape(-1)
        return self.response(SUM=output)
''')
CALLER_CONFIG = """
name: "calling"
backend: "python"
max_batch_size: 0
input [ { name: "VALUES" data_type: TYPE_INT32 dims: [ -1 ] },
        { name: "ID" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "SUM" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""
ID_TYPES = ("UINT64", "INT64", "UINT32", "INT32", "STRING")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("sequences")
    for id_type in ID_TYPES:
        config = f"sequence_batching {{ direct {{ }} {IDLE_TIME} {controls('TYPE_' + id_type)} }}"
        repositories.add_as(repository, f"id_{id_type}", "sequencer", config + instances(1))
    start_control = control("START", "START", "int32_false_true: [ 5, 7 ]")
    config = f"sequence_batching {{ {IDLE_TIME} control_input [ {start_control} ] }}"
    repositories.add_as(repository, "plain", "sequencer", config + instances(2))
    for name, strategy, settings in (
        ("again", "direct { }", ""),
        ("again_oldest", "oldest { max_candidate_sequences: 8 }", ""),
        ("again_streams", "", "model_transaction_policy { decoupled: true }"),
    ):
        code = ITERATIVE_MODEL.replace("DECOUPLED", str(bool(settings)))
        config = ITERATIVE_CONFIG.format(name=name, strategy=strategy, more=settings)
        repositories.write(repository, name, config, code)
    repositories.write(repository, "calling", CALLER_CONFIG, CALLER_MODEL)
    with running(repository, "--exit-timeout-secs=2", grpc=True) as running_server:
        running_server.gate.close()
        yield running_server


def add_value(
    http: Http,
    model: str,
    sequence: int | str,
    value: int = 1,
    flags: int = 0,
    shape: tuple[int, ...] = (1, 1),
) -> Any:
    """Return the status and the sum, or the error text."""
    parameters = {"sequence_id": sequence, "sequence_start": bool(flags & 1)}
    parameters["sequence_end"] = bool(flags & 2)
    body = json_request(INPUT0=np.full(shape, value, np.int32))
    reply = http.infer(model, body | {"parameters": parameters})
    answer = reply.json()
    return reply.status, answer["outputs"][0]["data"][0] if reply.status == 200 else answer["error"]


@pytest.mark.parametrize("id_type", ID_TYPES)
def test_correlation_ids_of_every_datatype(http: Http, id_type: str) -> None:
    """The model stores state by `correlation_id()`. Numbers and texts are different ids."""
    sequence_ids: list[int | str] = [5, 2**40 + 6] if id_type != "STRING" else ["5", "a text"]
    for sequence in sequence_ids:
        assert add_value(http, f"id_{id_type}", sequence, 3, 1) == (200, 3)
    for sequence in sequence_ids:
        assert add_value(http, f"id_{id_type}", sequence, 4, 2) == (200, 7)
    wrong_id: int | str = "text" if id_type != "STRING" else 9
    status, text = add_value(http, f"id_{id_type}", wrong_id, 1, 1)
    kinds = ("BYTES", id_type) if id_type != "STRING" else ("UINT64", "BYTES")
    assert (status, text) == (
        400,
        f"[request id: <id_unknown>] sequence batching control 'CORRID' data-type is "
        f"'{kinds[0]}', but model 'id_{id_type}' expects '{kinds[1]}'",
    )


def test_tritonclient_over_both_protocols(server: Server) -> None:
    """All protocols share one name space of ids."""
    for sequence in (17, "seventeen"):
        sums = []
        for index, module, url in (
            (0, tritonclient.http, server.url),
            (1, tritonclient.grpc, server.grpc_url),
            (2, tritonclient.http, server.url),
        ):
            with module.InferenceServerClient(url) as client:
                result = client.infer(
                    "plain",
                    infer_inputs(module, INPUT0=np.full((1, 1), 2, np.int32)),
                    sequence_id=sequence,
                    sequence_start=index == 0,
                    sequence_end=index == 2,
                )
                sums.append(int(result.as_numpy("OUTPUT0")[0, 0]))
        assert sums == [2, 4, 6]


def test_the_native_client(server: Server) -> None:
    array = np.full((1, 1), 1, np.int32)
    with shmserve.client.connect(server.run_dir) as client:
        for sequence in (99, "ninety-nine"):
            sums = [
                int(
                    client.infer(
                        "plain", INPUT0=array, sequence=sequence, start=index == 0, end=index == 2
                    )["OUTPUT0"][0, 0]
                )
                for index in range(3)
            ]
            assert sums == [1, 2, 3]
            with pytest.raises(shmserve.client.InvalidArgument, match="must specify the START"):
                client.infer("plain", INPUT0=array, sequence=sequence)
        with pytest.raises(shmserve.client.InvalidArgument, match="non-zero or non-empty"):
            client.infer("plain", INPUT0=array, start=True)
        for wrong_value in (-1, 1 << 64, "x" * 129, 1.5):
            with pytest.raises(shmserve.client.InvalidArgument, match="sequence must be"):
                client.infer("plain", INPUT0=array, sequence=wrong_value)  # type: ignore[arg-type]


def test_a_model_that_calls_one_with_sequences(server: Server) -> None:
    """The calls contain the id and the flags."""
    with shmserve.client.connect(server.run_dir) as client:
        values = np.array([3, 4, 5], np.int32)
        result = client.infer("calling", VALUES=values, ID=np.array([b"called"], object))
        assert result["SUM"].tolist() == [12]
        text = "Model plain - Error when running inference: .* must specify a non-zero"
        with pytest.raises(shmserve.client.Internal, match=text):
            client.infer("calling", VALUES=values, ID=np.array([b""], object))


@pytest.mark.parametrize("model", ["again", "again_oldest"])
def test_an_iterative_sequence_needs_no_id(http: Http, model: str) -> None:
    """Each request has a generated id, and is rescheduled without START until it is answered."""
    for count in (1, 4, 2):
        body = json_request(COUNT=np.full((1, 1), count, np.int32))
        answer = http.infer(model, body).ok().json()
        assert answer["outputs"][0]["data"] == [1] + [0] * (count - 1)
    stats = http.statistics(model)
    assert stats["inference_stats"]["success"]["count"] == 3
    assert stats["execution_count"] == 7


def test_an_iterative_sequence_may_stream_responses(server: Server) -> None:
    """Each round sends responses, and the last round the end."""
    with shmserve.client.connect(server.run_dir) as client:
        for count in (3, 1):
            array = np.full((1, 1), count, np.int32)
            flags = [r["FLAGS"][0].tolist() for r in client.stream("again_streams", COUNT=array)]
            assert flags == [[1, 0, 0][: index + 1] for index in range(count)]


def test_generate_takes_the_parameters_of_a_sequence(http: Http) -> None:
    """Triton passes these parameters to the model, so such a model cannot be used."""
    sums = []
    for flags in ({"sequence_start": True}, {}, {"sequence_end": True}):
        body = {"INPUT0": 4, "parameters": {"sequence_id": "generated", **flags}}
        sums.append(http.post("/v2/models/plain/generate", body).ok().json()["OUTPUT0"])
    assert sums == [4, 8, 12]
    assert http.post("/v2/models/plain/generate", {"INPUT0": 4}).status == 400


@pytest.mark.parametrize("sequence", ["31", "from a shell", str(2**64 - 2)])
def test_the_shells_client(server: Server, sequence: str) -> None:
    """One sequence uses all three protocols."""
    urls = [f"--url=http://{server.url}", f"--url=grpc://{server.grpc_url}"]
    urls.append(f"--run-dir={server.run_dir}")
    sums = []
    for url, flags in zip(urls, (["--start"], [], ["--end"]), strict=True):
        arguments = ["--input=INPUT0=[2]", f"--sequence={sequence}", *flags]
        result = run_command("client", "infer", "plain", url, *arguments)
        assert result.returncode == 0, result.stderr
        sums.append(json.loads(result.stdout)["outputs"][0]["data"])
    assert sums == [[[2]], [[4]], [[6]]]
