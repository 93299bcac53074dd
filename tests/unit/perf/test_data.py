"""Inputs by shape, from values, files and programs, and the errors for wrong ones."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmserve.errors import InvalidArgument
from shmserve.ipc.tensors.datatypes import ITEM_SIZE
from shmserve.perf import data
from shmserve.perf.data import DataOptions, ModelInterface
from shmserve.protocols import TransportError
from shmserve.protocols.tensors import ModelTensor

BATCHED = ModelInterface(
    {"X": ModelTensor("X", "INT32", (-1, 2))}, {"Y": ("FP32", (3,))}, supports_batching=True
)
ALONE = ModelInterface(
    {"X": ModelTensor("X", "FP32", (-1, 2)), "T": ModelTensor("T", "BYTES", (1,))}
)


def values(item: data.Inputs) -> dict[str, Any]:
    return {
        tensor.name: np.frombuffer(tensor.raw, "<i4" if tensor.datatype == "INT32" else "<f4")
        .reshape(tensor.shape)
        .tolist()
        for tensor in item
        if tensor.datatype != "BYTES"
    }


@pytest.mark.parametrize("datatype", sorted(ITEM_SIZE))
def test_every_datatype_is_generated_by_shape(datatype: str) -> None:
    model = ModelInterface({"X": ModelTensor("X", datatype, (2, 3))})
    for source in ("random", "zero"):
        ((tensor,),) = data.read_requests(model, DataOptions(source=source, text_length=5))
        size = ITEM_SIZE[datatype] or (4 + 5 * (source == "random"))
        assert (tensor.shape, len(tensor.raw)) == ([2, 3], 6 * size)


def test_inputs_of_batching_models_get_a_batch_dimension() -> None:
    ((tensor,),) = data.read_requests(BATCHED, DataOptions(batch=4))
    assert tensor.shape == [4, 2]
    with pytest.raises(
        InvalidArgument, match=("--batch: 4 rows, but the model does not support batches")
    ):
        data.read_requests(ALONE, DataOptions(batch=4))


def test_a_variable_shape_must_be_given() -> None:
    with pytest.raises(InvalidArgument, match=r"\[-1,2\], .* with --shape X:N,2"):
        data.read_requests(ALONE, DataOptions())
    quantised, _ = data.read_requests(ALONE, DataOptions(shapes=["X:3,2"]))[0]
    assert quantised.shape == [3, 2]


def test_a_shape_without_a_configuration_may_begin_with_the_batch_dimension() -> None:
    class RefusingTransport:
        def config(self, *_: str) -> dict[str, Any]:
            raise TransportError("this token has no access to 'model-config'")

        def inputs(self, *_: str) -> dict[str, ModelTensor]:
            return dict(ALONE.inputs)

    model = data.read_interface(RefusingTransport(), "m", "")
    with pytest.raises(InvalidArgument) as caught:
        data.read_requests(model, DataOptions())
    assert str(caught.value).endswith(
        "with --shape X:N,2. The server sent no configuration of the model (this token has no "
        "access to 'model-config'): if the model has a batch dimension, leave out the first number"
    )
    assert data.read_requests(model, DataOptions(shapes=["X:3,2"]))[0][0].shape == [3, 2]


@pytest.mark.parametrize("text", ["X", "X:a", "X:-1", "3"])
def test_a_shape_flag_is_a_name_and_numbers(text: str) -> None:
    with pytest.raises(InvalidArgument, match="--shape: expected NAME:N,N"):
        data.read_requests(ALONE, DataOptions(shapes=[text]))


def test_a_shape_that_no_memory_holds_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=f"input 'X': the shape .*{2**70}.* is too large"):
        data.read_requests(ALONE, DataOptions(shapes=[f"X:{2**70}"]))


@pytest.mark.parametrize("options", [DataOptions(["Z=1"]), DataOptions(shapes=["Z:1"])])
def test_a_missing_input_is_named(options: DataOptions) -> None:
    with pytest.raises(InvalidArgument, match="no input 'Z'; it has X"):
        data.read_requests(BATCHED, options)


def test_a_data_file_is_read_as_by_perf_analyzer(tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    rows = [
        {"X": [1, 2]},
        {"X": {"content": [[3, 4]], "shape": [2]}},
        [{"X": {"b64": "BQAAAAYAAAA="}}],
    ]
    path.write_text(json.dumps({"data": rows}))
    found = [values(row)["X"] for row in data.read_requests(BATCHED, DataOptions(source=str(path)))]
    assert found == [[[1, 2]], [[3, 4]], [[5, 6]]]


@pytest.mark.parametrize(
    ("text", "expected_error"),
    [
        ("{", "is not JSON"),
        ('{"data": []}', "has no request"),
        ('{"data": 3}', "has no list of requests"),
        ('{"data": [3]}', "request 0 of .* must be a JSON object"),
        ('[{"X": [1, 2]}, {"X": [1]}]', "request 1 of .*: input 'X': 1 elements do not fit"),
        ('[{"X": ["a", 2]}]', "its elements are integers"),
        ('[{"X": {"shape": [2]}}]', "no 'content'"),
        ('[{"Z": [1, 2]}]', "no input 'Z'"),
    ],
)
def test_the_error_explains_an_invalid_file(tmp_path: Path, text: str, expected_error: str) -> None:
    path = tmp_path / "d.json"
    path.write_text(text)
    with pytest.raises(InvalidArgument, match=f"--data: .*{expected_error}"):
        data.read_requests(BATCHED, DataOptions(source=str(path)))


def test_a_program_yields_requests(tmp_path: Path) -> None:
    path = tmp_path / "d.py"
    path.write_text(
        "import itertools\n"
        "def requests(inputs):\n"
        "    assert inputs == {'X': ('INT32', (-1, 2))}\n"
        "    for n in itertools.count():\n"
        "        yield {'X': [[n, n]]}\n"
    )
    items = data.read_requests(BATCHED, DataOptions(source=str(path)))
    assert len(items) == 1000 and values(items[7])["X"] == [[7, 7]]


@pytest.mark.parametrize(
    ("text", "expected_error"),
    [
        ("", "no function `requests`"),
        ("def requests(i): yield 3", "request 0 of .* is not a mapping"),
        ("def requests(i): 1 / 0", "failed: ZeroDivisionError"),
        ("def requests(i): yield {'X': 'a'}", "request 0 of .*: input 'X' is INT32"),
        ("x = ", "failed: SyntaxError"),
    ],
)
def test_an_error_explains_failing_programs(tmp_path: Path, text: str, expected_error: str) -> None:
    path = tmp_path / "d.py"
    path.write_text(text)
    with pytest.raises(InvalidArgument, match=f"--data: .*{expected_error}"):
        data.read_requests(BATCHED, DataOptions(source=str(path)))


def test_output_sizes_are_computed_or_taken_from_the_flag() -> None:
    assert data.output_sizes(BATCHED, 4, 99) == {"Y": 48}
    model = ModelInterface({}, {"A": ("FP32", (-1,)), "B": ("BYTES", (1,)), "C": ("FP16", (2, 2))})
    assert data.output_sizes(model, 1, 99) == {"A": 99, "B": 99, "C": 8}
