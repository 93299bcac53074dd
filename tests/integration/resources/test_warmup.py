"""Warm-up of real models: what they have seen before the first client's request."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.repositories import python_model
from tests.support.servers import Server, Start

# Notes each execution, and gives all that was noted before as JSON.
_MODEL = python_model("""
    def initialize(self, args):
        self.seen = []
        self.name = args["model_instance_name"]

    def execute(self, requests):
        told = json.dumps(self.seen)
        self.seen.append([
            {t.name(): [list(t.shape()), t.as_numpy().reshape(-1)[:4].astype(str).tolist()]
             for t in request.inputs()}
            for request in requests
        ])
        return self.respond(requests, self.response(SEEN=np.array([[told]], object)))

    def respond(self, requests, response):
        if self.name.startswith("broken"):
            return [self.failure(f"not {len(self.seen)}") for _ in requests]
        if self.name.startswith("raising"):
            raise ValueError("cold")
        if not self.name.startswith("many"):
            return [response for _ in requests]
        for request in requests:
            sender = request.get_response_sender()
            sender.send(response)
            sender.send(flags=FINAL)
""")
_FP32 = '{ name: "X" data_type: TYPE_FP32 dims: [ -1 ] }'
_SAMPLE_FIELDS = (
    'model_warmup { name: "s" batch_size: %d count: %d '
    'inputs { key: "X" value { data_type: TYPE_FP32 dims: [ 3 ] %s } } }'
)


def add(
    repository: Path,
    name: str,
    warmup: str,
    inputs: str = _FP32,
    settings: str = "",
    max_batch_size: int = 4,
    **files: bytes,
) -> None:
    """Add a model that records its requests; `files` are in its folder "warmup"."""
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(_MODEL)
    (folder / "warmup").mkdir()
    for file, data in files.items():
        (folder / "warmup" / file).write_bytes(data)
    output = '{ name: "SEEN" data_type: TYPE_STRING dims: [ 1 ] }'
    (folder / "config.pbtxt").write_text(
        f'name: "{name}" backend: "python" max_batch_size: {max_batch_size}\n'
        f"input [ {inputs} ] output [ {output} ] instance_group [ {{ kind: KIND_CPU }} ]\n"
        f"{settings}\n{warmup}\n"
    )


_TYPED_CONFIG = """
model_warmup { name: "typed" batch_size: 1
  inputs { key: "X" value { data_type: TYPE_FP32 dims: [ 4 ] random_data: true } }
  inputs { key: "I" value { data_type: TYPE_INT8 dims: [ 2, 2 ] random_data: true } }
  inputs { key: "B" value { data_type: TYPE_BOOL dims: [ 4 ] random_data: true } }
  inputs { key: "S" value { data_type: TYPE_STRING dims: [ 2 ] random_data: true } }
  inputs { key: "F" value { data_type: TYPE_STRING dims: [ 1 ] input_data_file: "texts" } }
}
"""
_TYPE_INPUTS = ", ".join(
    f'{{ name: "{name}" data_type: TYPE_{kind} dims: {dims} }}'
    for name, kind, dims in (
        ("X", "FP32", [-1]),
        ("I", "INT8", [2, -1]),
        ("B", "BOOL", [4]),
        ("S", "STRING", [-1]),
        ("F", "STRING", [1]),
    )
)
_CONTROLLED_CONFIG = """
sequence_batching { control_input [
  { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] },
  { name: "READY" control [ { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] } ] } ] }
"""
_CONTROL_INPUT = (
    'inputs { key: "READY" value { data_type: TYPE_INT32 dims: [ 1 ] random_data: true } } }'
)
_DECOUPLED = "model_transaction_policy { decoupled: true }"


@pytest.fixture(scope="module")
def server(models: Path, start: Start) -> Server:
    add(models, "zeros", _SAMPLE_FIELDS % (1, 0, "zero_data: true"))
    add(models, "batched", _SAMPLE_FIELDS % (3, 2, "zero_data: true"))
    add(models, "skipped", _SAMPLE_FIELDS % (0, 1, "zero_data: true"))
    add(models, "plain", _SAMPLE_FIELDS % (1, 1, "random_data: true"), max_batch_size=0)
    add(
        models,
        "filed",
        _SAMPLE_FIELDS % (1, 1, 'input_data_file: "values"'),
        values=np.arange(5, dtype=np.float32).tobytes(),  # more than is wanted
    )
    add(models, "typed", _TYPED_CONFIG, _TYPE_INPUTS, texts=struct.pack("<I", 2) + b"hi")
    add(
        models,
        "controlled",
        (_SAMPLE_FIELDS % (1, 1, "zero_data: true")).rstrip("} ") + " } } " + _CONTROL_INPUT,
        settings=_CONTROLLED_CONFIG,
    )
    add(models, "many", _SAMPLE_FIELDS % (2, 1, "zero_data: true"), settings=_DECOUPLED)
    return start(models)


def warmup_requests(server: Server, model: str, **fields: Any) -> list[Any]:
    inputs = fields.pop("inputs", {"X": ("FP32", [1, 1], [7.0])})
    request = {
        "inputs": [
            {"name": name, "datatype": kind, "shape": shape, "data": data}
            for name, (kind, shape, data) in inputs.items()
        ],
        **fields,
    }
    route = "generate" if model == "many" else "infer"
    with server.http() as http:
        if route == "generate":
            reply = http.post(f"/v2/models/{model}/generate", {"X": [7.0]}).ok().json()
            return list(json.loads(reply["SEEN"]))
        reply = http.infer(model, request).ok().json()
    return list(json.loads(reply["outputs"][0]["data"][0]))


ROW = {"X": [[1, 3], ["0.0"] * 3]}


def test_zeros_once_where_no_count_is_given(server: Server) -> None:
    assert warmup_requests(server, "zeros") == [[ROW]]


def test_a_warmup_batch_is_executed_as_single_row_requests(server: Server) -> None:
    assert warmup_requests(server, "batched") == [[ROW] * 3] * 2


def test_a_batch_size_of_zero_is_skipped(server: Server) -> None:
    assert warmup_requests(server, "skipped") == []


def test_without_batching_shapes_are_used_unchanged(server: Server) -> None:
    ((request,),) = warmup_requests(server, "plain", inputs={"X": ("FP32", [1], [7.0])})
    shape, values = request["X"]
    assert shape == [3]
    assert all(0 <= float(value) < 1 for value in values) and len(set(values)) == 3


def test_warmup_data_are_read_from_the_models_folder(server: Server) -> None:
    assert warmup_requests(server, "filed") == [[{"X": [[1, 3], ["0.0", "1.0", "2.0"]]}]]


def test_random_data_of_each_type_and_empty_texts(server: Server) -> None:
    inputs = {
        "X": ("FP32", [1, 1], [7.0]),
        "I": ("INT8", [1, 2, 1], [1, 2]),
        "B": ("BOOL", [1, 4], [True] * 4),
        "S": ("BYTES", [1, 1], ["a"]),
        "F": ("BYTES", [1, 1], ["b"]),
    }
    ((request,),) = warmup_requests(server, "typed", inputs=inputs)
    assert request["I"][0] == [1, 2, 2] and all(0 <= int(n) < 128 for n in request["I"][1])
    assert request["B"][0] == [1, 4] and set(request["B"][1]) <= {"True", "False"}
    assert request["S"] == [[1, 2], ["", ""]] and request["F"] == [[1, 1], ["hi"]]


def test_sequence_controls_of_a_warmup_sample(server: Server) -> None:
    """Others are those of a whole sequence."""
    start = {"sequence_id": 5, "sequence_start": True, "sequence_end": True}
    ((request,),) = warmup_requests(server, "controlled", parameters=start)[-1:]
    assert request["X"] == ROW["X"] and request["START"] == [[1, 1], ["1"]]
    assert request["READY"][0] == [1, 1] and request["READY"][1] != ["1"]


def test_decoupled_models_are_warmed_up(server: Server) -> None:
    assert warmup_requests(server, "many") == [[ROW] * 2]


def test_warmup_requests_are_not_counted(server: Server) -> None:
    with server.http() as http:
        count_before = http.statistics("skipped")["execution_count"]
    warmup_requests(server, "skipped")
    with server.http() as http:
        assert http.statistics("skipped")["execution_count"] - count_before == 1
        assert http.statistics("zeros")["execution_count"] <= 1


@pytest.mark.parametrize(
    ("name", "warmup", "expected_error"),
    [
        ("broken", _SAMPLE_FIELDS % (2, 1, "zero_data: true"),
         "Invalid argument: failed to run warmup sample 's': not 1; "
         "failed to run warmup sample 's': not 1; "),
        ("raising", _SAMPLE_FIELDS % (1, 1, "zero_data: true"),
         "Invalid argument: failed to run warmup sample 's': "),
        ("missing", 'model_warmup { name: "s" batch_size: 1 }',
         "expected 1 inputs but got 0 inputs for model 'missing'. Got input(s) [], but missing"),
        ("short", _SAMPLE_FIELDS % (1, 1, 'input_data_file: "values"'),
         "warmup setting expects 12 bytes, but the data provided from values only has 4 bytes"),
        ("absent", _SAMPLE_FIELDS % (1, 1, 'input_data_file: "nothing"'), "cannot read 'nothing'"),
        ("outside", _SAMPLE_FIELDS % (1, 1, 'input_data_file: "../config.pbtxt"'),
         "is not in the model's folder 'warmup'"),
        ("variable", (_SAMPLE_FIELDS % (1, 1, "zero_data: true")).replace("[ 3 ]", "[ -1 ]"),
         "warmup setting expects all variable-size dimensions are specified for input 'X'"),
        ("huge", (_SAMPLE_FIELDS % (1, 1, "zero_data: true")).replace("[ 3 ]", "[ 1000000000000 ]"),
         "warmup setting of input 'X' has dims [1000000000000], which are 4000000000000 bytes"),
        ("nothing", _SAMPLE_FIELDS % (1, 1, ""),
         "warmup setting expects input 'X' to have input_data_type set"),
    ],
)  # fmt: skip
def test_a_sample_that_fails_fails_the_load(
    empty_server: tuple[Server, Path], name: str, warmup: str, expected_error: str
) -> None:
    server, repository = empty_server
    add(repository, name, warmup, values=b"1234")
    with server.http() as http:
        http.post("/v2/logging", {"log_verbose_level": 1}).ok()
        assert expected_error in http.load(name).error
        assert http.get(f"/v2/models/{name}/ready").status == 400
        http.post("/v2/logging", {"log_verbose_level": 0}).ok()
    if "failed to run" in expected_error:
        log_prefix = f"model '{name}' instance {name}_0_0"
        for t in ("is running warmup sample 's' for iteration 1", "failed to run warmup sample"):
            assert f"{log_prefix} {t}" in server.log()


def test_a_restarted_instance_is_warmed_up(empty_server: tuple[Server, Path]) -> None:
    """Per instance: each process has seen the sample before it serves."""
    server, repository = empty_server
    add(repository, "again", _SAMPLE_FIELDS % (1, 1, "zero_data: true"))
    server.load("again")
    assert warmup_requests(server, "again") == [[ROW]]
    server.find_one("worker again.0").kill()
    assert warmup_requests(server, "again") == [[ROW]]
