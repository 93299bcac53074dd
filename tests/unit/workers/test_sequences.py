"""Control inputs and implicit state in a worker."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shmserve.errors import InvalidArgument
from shmserve.ipc.messages.inference import EndSequences, Execute, SequenceRow, Work
from shmserve.ipc.model_spec import ModelSpec, TensorSpec
from shmserve.ipc.tensors.schemas import Inference, RequestSchema, pack_inference
from shmserve.workers import sequences as sequence_inputs
from shmserve.workers.backends.native import NativeBackend
from shmserve.workers.batch.backend_request import Output, Request, Response
from shmserve.workers.tensor_specs import generated_names, with_generated_tensors
from tests.rigs.worker_rig import (
    CLIENT_PID,
    Rig,
    inference,
    model_config,
    tensor,
    tensor_config,
)

START_FLAG, END_FLAG = 1, 2
NUMBERS = {"UINT64": np.uint64, "INT64": np.int64, "UINT32": np.uint32, "INT32": np.int32}


def config(batched: bool = True, **batching: Any) -> dict[str, Any]:
    x, y = (tensor_config(name, "FP32", [1]) for name in "XY")
    return model_config([x], [y], 4 if batched else 0, sequence_batching=batching)


def control(kind: str, **control_values: Any) -> dict[str, Any]:
    return {"name": kind, "control": [{"kind": f"CONTROL_SEQUENCE_{kind}", **control_values}]}


def values(row: SequenceRow, *tensors: dict[str, Any], batched: bool = True) -> dict[str, Any]:
    controls = sequence_inputs.control_inputs(
        sequence_inputs.read_controls(ModelSpec.of(config(batched, control_input=list(tensors)))),
        row,
        batched,
    )
    shapes = {item.shape for item in controls.values()}
    assert shapes <= {(1, 1) if batched else (1,)}
    return {name: item.numpy().reshape(-1)[0] for name, item in controls.items()}


PAIRS: dict[str, tuple[list[Any], Any]] = {
    "int32_false_true": ([3, 4], np.int32),
    "fp32_false_true": ([0.5, 1.5], np.float32),
    "bool_false_true": ([False, True], np.bool_),
}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("kind", ["START", "END", "READY"])
@pytest.mark.parametrize("batched", [True, False])
def test_control_pairs(pair: str, kind: str, batched: bool) -> None:
    (off, on), dtype = PAIRS[pair]
    for row, control_values in (
        (SequenceRow(0, 1, START_FLAG), {"START"}),
        (SequenceRow(0, 1, END_FLAG), {"END"}),
        (SequenceRow(0, 1, START_FLAG | END_FLAG), {"START", "END"}),
        (SequenceRow(0, 1), set[str]()),
    ):
        value = values(row, control(kind, **{pair: [off, on]}), batched=batched)[kind]
        assert value.dtype == dtype
        assert value == (on if kind in control_values or kind == "READY" else off)
    empty = values(SequenceRow(1, 0, START_FLAG | END_FLAG), control(kind, **{pair: [off, on]}))
    assert empty[kind] == off


def test_the_last_kind_sets_a_control_tensor_of_several_kinds() -> None:
    pairs = {"READY": [3, 4], "START": [5, 6]}
    kinds = [control(kind, int32_false_true=pair)["control"][0] for kind, pair in pairs.items()]
    assert values(SequenceRow(0, 1), {"name": "C", "control": kinds})["C"] == 4


@pytest.mark.parametrize("datatype", NUMBERS)
@given(number=st.integers(1, 2**64 - 1))
def test_ids_are_truncated_to_the_width_of_the_control(datatype: str, number: int) -> None:
    row = SequenceRow(0, 1, 0, number)
    value = values(row, control("CORRID", data_type=f"TYPE_{datatype}"))["CORRID"]
    assert value == np.array([number], np.uint64).view(NUMBERS[datatype])[0]
    assert values(SequenceRow(0, 0), control("CORRID", data_type=f"TYPE_{datatype}"))["CORRID"] == 0


@given(text=st.text(max_size=128))
def test_string_ids(text: str) -> None:
    row = SequenceRow(0, 1, 0, 0, text)
    assert values(row, control("CORRID", data_type="TYPE_STRING"))["CORRID"] == text.encode()
    assert values(SequenceRow(0, 0), control("CORRID", data_type="TYPE_STRING"))["CORRID"] == b""


def test_the_model_sees_controls_and_states_and_clients_do_not() -> None:
    first = {"input_name": "I", "output_name": "O", "data_type": "TYPE_INT64", "dims": [-1, 2]}
    second = {"input_name": "J", "output_name": "Y", "data_type": "TYPE_FP32", "dims": [1]}
    fields = config(
        control_input=[control("START", bool_false_true=[False, True])], state=[first, second]
    )
    model_spec = ModelSpec.of(fields)
    generated_spec = with_generated_tensors(model_spec)
    assert [tensor.name for tensor in generated_spec.input] == ["X", "START", "I", "J"]
    assert [tensor.name for tensor in generated_spec.output] == ["Y", "O"]
    assert generated_spec.input[1] == TensorSpec("START", "BOOL", (1,))
    assert generated_spec.input[2] == TensorSpec("I", "INT64", (-1, 2))
    assert generated_names(model_spec) == {"START", "I", "O", "J", "Y"}


def spec(**fields: Any) -> dict[str, Any]:
    """Return the specification of a state of one FP32."""
    state_fields = {"input_name": "I", "output_name": "O", "data_type": "TYPE_FP32", "dims": [1]}
    return {**state_fields, **fields}


class Model:
    def __init__(
        self, *specs: dict[str, Any], folder: Path = Path(), batch: bool = True, copies: bool = True
    ) -> None:
        states = sequence_inputs.read_states(ModelSpec.of(config(batch, state=list(specs))), folder)
        self.states = sequence_inputs.States(states, copies)

    def add_inputs(self, slot: int = 0, flags: int = 0) -> Request:
        packed_request = pack_inference(Inference(()))
        request = Request(Work(1, 1, *packed_request), RequestSchema(packed_request[0]), 1, {}, {})
        self.row = SequenceRow(slot, 1, flags, 7)
        self.states.add_inputs(request, self.row)
        return request

    def value(self, slot: int = 0, flags: int = 0) -> Any:
        """Return the state "I" that a request in a slot receives."""
        return self.add_inputs(slot, flags).inputs["I"].numpy().tolist()

    def complete_request(
        self, *outputs: Output, error: Any = None, returned_names: tuple[str, ...] = ()
    ) -> Response:
        response = Response(list(outputs), error=error)
        self.states.store(self.row, response, frozenset(returned_names))
        return response


def new_state(*numbers: float, name: str = "O") -> Output:
    return Output(name, "FP32", np.array([numbers], np.float32))


def test_a_state_begins_with_zero_at_each_start() -> None:
    model = Model(spec())
    assert model.value(0, START_FLAG) == [[0.0]]
    model.complete_request(new_state(5))
    assert model.value(0) == [[5.0]] and model.value(1, START_FLAG) == [[0.0]]
    assert model.value(0) == [[5.0]] and model.value(0, START_FLAG) == [[0.0]]


def test_missing_and_failed_updates_keep_the_state() -> None:
    model = Model(spec())
    model.add_inputs(0, START_FLAG)
    model.complete_request(new_state(5))
    model.add_inputs()
    model.complete_request(new_state(9), error=InvalidArgument("no"))
    model.add_inputs()
    model.complete_request(Output("Y", "FP32", np.zeros((1, 1), np.float32)))
    assert model.value() == [[5.0]]


def test_a_state_has_the_shape_and_datatype_of_the_last_output() -> None:
    model = Model(spec(dims=[-1, 2]))
    assert model.value(0, START_FLAG) == [[[0.0, 0.0]]]
    model.complete_request(Output("O", "INT64", np.arange(6).reshape(1, 3, 2)))
    request = model.add_inputs()
    assert request.inputs["I"].datatype == "INT64"
    assert request.inputs["I"].numpy().tolist() == [[[0, 1], [2, 3], [4, 5]]]


def test_state_outputs_are_returned_only_if_they_are_outputs() -> None:
    model = Model(spec())
    answer = new_state(1, name="Y")
    model.add_inputs(0, START_FLAG)
    assert model.complete_request(answer, new_state(5)).outputs == [answer]
    model.add_inputs()
    response = model.complete_request(answer, new_state(6), returned_names=("O",))
    assert [output.name for output in response.outputs] == ["Y", "O"]
    assert model.value() == [[6.0]]


def test_initial_states_come_from_a_file_or_zeros(tmp_path: Path) -> None:
    folder = tmp_path / "initial_state"
    folder.mkdir()
    (folder / "f").write_bytes(np.arange(3, dtype=np.float32).tobytes())
    (folder / "s").write_bytes(b"\x02\x00\x00\x00hi")
    initial: dict[str, Any] = {"name": "n", "data_type": "TYPE_FP32", "dims": [2]}
    initial["data_file"] = "f"
    text = {"name": "n", "data_type": "TYPE_STRING", "dims": [1], "data_file": "s"}
    model = Model(
        spec(dims=[-1], initial_state=[initial]),
        spec(input_name="S", output_name="T", data_type="TYPE_STRING", initial_state=[text]),
        folder=tmp_path,
    )
    request = model.add_inputs(0, START_FLAG)
    assert request.inputs["I"].numpy().tolist() == [[0.0, 1.0]]
    assert request.inputs["S"].numpy().tolist() == [[b"hi"]]
    initial["zero_data"], initial["data_file"] = True, ""
    assert Model(spec(dims=[-1], initial_state=[initial])).value(0, START_FLAG) == [[0.0, 0.0]]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "f",
            "initial_state setting expects 8 bytes, but the data provided from f only has 4 bytes",
        ),
        ("g", "the data file of state 'I' cannot be read: No such file or directory"),
        ("../f", "the data file of state 'I' must lie in the model's folder 'initial_state'"),
    ],
)
def test_invalid_initial_state_files_are_rejected(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "initial_state").mkdir()
    (tmp_path / "initial_state" / "f").write_bytes(b"1234")
    initial = {"name": "n", "data_type": "TYPE_FP32", "dims": [2], "data_file": name}
    with pytest.raises(InvalidArgument) as caught:
        Model(spec(dims=[2], initial_state=[initial]), folder=tmp_path)
    assert caught.value.message == text


def test_the_input_and_output_of_a_state_share_one_buffer() -> None:
    """Without the setting the model receives a copy if it may write."""
    model = Model(spec(use_same_buffer_for_input_output=True))
    array = model.add_inputs(0, START_FLAG).inputs["I"].numpy()
    array += 3
    model.complete_request(Output("O", "FP32", array))
    reused_input = model.add_inputs().inputs["I"].numpy()
    assert reused_input.tolist() == [[3.0]]
    assert reused_input.ctypes.data == array.ctypes.data
    other_model = Model(spec())
    other_model.add_inputs(0, START_FLAG).inputs["I"].numpy()[:] = 9
    assert other_model.value() == [[0.0]]


def test_tensors_of_torch_are_kept_as_bytes() -> None:
    model = Model(spec(), copies=False)
    model.add_inputs(0, START_FLAG)
    with torch.inference_mode():
        model.complete_request(Output("O", "FP32", torch.full((1, 1), 4.0)))
    assert model.value() == [[4.0]]
    model.complete_request(Output("O", "BF16", torch.full((1, 1), 1.5, dtype=torch.bfloat16)))
    assert model.add_inputs().inputs["I"].torch().tolist() == [[1.5]]
    texts = Model(spec(data_type="TYPE_STRING"))
    texts.add_inputs(0, START_FLAG)
    texts.complete_request(Output("O", "BYTES", np.array([[b"ab"]], object)))
    assert texts.value() == [[b"ab"]]


NATIVE_MODEL = """
from typing import NotRequired, TypedDict
from numpy import ndarray
from shmserve.model import FP32

class Result(TypedDict):
    y: FP32[ndarray, 1]
    state_out: NotRequired[FP32[ndarray, 1]]

class Model:
    sequence_batching = {"state": [
        {"input_name": "state", "output_name": "state_out", "data_type": "TYPE_FP32", "dims": [1]},
    ]}

    def predict(self, x: FP32[ndarray, 1], state: FP32[ndarray, 1]) -> Result:
        return {"y": x + state}
"""


class Sequences:
    """An instance whose model adds its input to its state, and the messages of its scheduler."""

    def __init__(self, worker_rig: Rig) -> None:
        self.fails = self.reschedules = False
        self.state: Any = None  # the state to return; None: the sum of state and input
        self._worker_rig = worker_rig
        self._keys = itertools.count(1)
        worker_rig.serve_function(self._execute, config(state=[spec()], direct={}))
        self.states: sequence_inputs.States = worker_rig.instance._executor._states  # type: ignore[attr-defined]

    def _execute(self, requests: list[Request]) -> list[Response]:
        if self.fails:
            raise ValueError("no")
        if self.reschedules:
            return [Response(is_rescheduled=True) for _ in requests]
        if self.state is not None:
            return [Response(states=[self.state]) for _ in requests]
        return [
            Response(states=[Output("O", "FP32", r.inputs["I"].numpy() + r.inputs["X"].numpy())])
            for r in requests
        ]

    def run(self, *rows: tuple[int, int]) -> None:
        """Execute a batch of requests in these slots, with these flags."""
        keyed_rows = [(next(self._keys), *row) for row in rows]
        packed_request = pack_inference(inference(tensor("X", np.ones((1, 1), np.float32))))
        executed_work = [Work(key, CLIENT_PID, *packed_request) for key, *_ in keyed_rows]
        sequence_rows = [SequenceRow(slot, key, flags, 7) for key, slot, flags in keyed_rows]
        self.receive(Execute(1, executed_work, rows=sequence_rows))

    def receive(self, message: Any) -> None:
        self._worker_rig.instance.link._dispatch(message)
        self._worker_rig.instance.serve_commands()


@pytest.fixture
def sequences(worker: Rig) -> Sequences:
    return Sequences(worker)


@pytest.mark.parametrize("fails", [False, True])
def test_an_executed_end_releases_the_state(sequences: Sequences, fails: bool) -> None:
    sequences.run((0, START_FLAG), (1, START_FLAG))
    assert len(sequences.states) == 2
    sequences.fails = fails
    sequences.run((0, END_FLAG), (1, 0))
    assert len(sequences.states) == 1
    sequences.run((1, END_FLAG))
    assert len(sequences.states) == 0


def test_a_rescheduled_end_keeps_the_state(sequences: Sequences) -> None:
    """The request runs again, and needs the state of its first run."""
    sequences.reschedules = True
    sequences.run((0, START_FLAG | END_FLAG))
    assert len(sequences.states) == 1


def test_a_state_that_cannot_be_stored_fails_its_request(sequences: Sequences) -> None:
    sequences.state = Output("O", "BYTES", np.array([["\ud800"]], object))
    sequences.run((0, START_FLAG))
    (finished,) = sequences._worker_rig.sent()
    assert [reply.code for reply in finished.replies] == ["INTERNAL"]
    assert "UnicodeEncodeError" in finished.replies[0].message


def test_a_native_model_may_omit_a_state(worker: Rig) -> None:
    """The old value of the state is kept."""
    (worker.context.version_dir / "model.py").write_text(NATIVE_MODEL)
    backend = NativeBackend(worker.context)
    worker.serve(backend, backend.complete_config(model_config([], [])))
    packed_request = pack_inference(inference(tensor("x", np.ones((1, 1), np.float32))))
    rows = [SequenceRow(0, 1, START_FLAG, 7)]
    execution = Execute(1, [Work(1, CLIENT_PID, *packed_request)], rows=rows)
    worker.instance.link._dispatch(execution)
    worker.instance.serve_commands()
    (finished,) = worker.sent()
    assert [reply.message for reply in finished.replies] == [""]


def test_sequences_that_the_scheduler_ends_release_their_state(sequences: Sequences) -> None:
    sequences.run((0, START_FLAG), (1, START_FLAG), (2, START_FLAG))
    sequences.receive(EndSequences([0, 2]))
    assert len(sequences.states) == 1
    sequences.receive(EndSequences([0]))  # slot 0 has no state any more
    assert len(sequences.states) == 1


def test_a_successor_scheduler_knows_no_sequence(sequences: Sequences) -> None:
    sequences.run((0, START_FLAG))
    sequences._worker_rig.attach()
    assert len(sequences.states) == 0
