"""Ragged batches: the inputs of the model, and how outputs are split."""

from typing import Any

import numpy as np
import pytest

from shmserve.errors import Internal
from shmserve.ipc.messages.inference import Work
from shmserve.ipc.model_spec import ModelSpec
from shmserve.workers.backends.native import NativeBackend
from shmserve.workers.backends.pytorch import PytorchBackend
from shmserve.workers.batch.backend_request import Input, Request
from shmserve.workers.batch.ragged import RaggedRules
from tests.rigs.worker_rig import Rig, inference, model_config, tensor, tensor_config

F32 = np.float32
UNUSED: Any = None


def batch_input(kind: str, data_type: str = "TYPE_INT32") -> dict[str, Any]:
    return {"kind": kind, "target_name": ["T"], "data_type": data_type, "source_input": ["X"]}


def config(*kinds: str, max_batch_size: int = 8, dims: tuple[int, ...] = (-1,)) -> dict[str, Any]:
    configuration = model_config(
        [tensor_config("X", "FP32", dims, allow_ragged_batch=True)],
        [tensor_config("Y", "FP32", dims)],
        max_batch_size,
    )
    return configuration | {"batch_input": [batch_input(kind) for kind in kinds]}


def requests(*shapes: tuple[int, ...]) -> list[Request]:
    return [
        Request(
            Work(key, 0, b"", []),
            UNUSED,
            shape[0],
            {"X": Input("X", "FP32", shape, memoryview(b""))},
            {},
        )
        for key, shape in enumerate(shapes)
    ]


BATCH_INPUT_KINDS = {
    "BATCH_ELEMENT_COUNT": [2, 4, 1],
    "BATCH_ACCUMULATED_ELEMENT_COUNT": [2, 6, 7],
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": [0, 2, 6, 7],
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE": [0, 0, 0, 0],
    "BATCH_ITEM_SHAPE": [[2], [4], [1]],
    "BATCH_ITEM_SHAPE_FLATTEN": [2, 4, 1],
}


@pytest.mark.parametrize(("kind", "expected"), BATCH_INPUT_KINDS.items())
@pytest.mark.parametrize("data_type", ["TYPE_INT32", "TYPE_FP32"])
def test_batch_input_kinds(kind: str, expected: list[Any], data_type: str) -> None:
    """3.6: the six kinds, for requests of 2, 4 and 1 elements, in both datatypes."""
    ragged = RaggedRules(ModelSpec.of(config() | {"batch_input": [batch_input(kind, data_type)]}))
    (values,) = ragged.inputs(requests((1, 2), (1, 4), (1, 1))).values()
    assert values.tolist() == expected
    assert values.dtype == (np.int32 if data_type == "TYPE_INT32" else F32)


def test_item_shapes_repeat_the_row_of_a_request_of_two() -> None:
    """3.6: BATCH_ITEM_SHAPE is [total_batch, rank]; a batch-2 request repeats its row."""
    shapes = ((2, 3, 5), (1, 4, 1))
    (shape,) = (
        RaggedRules(ModelSpec.of(config("BATCH_ITEM_SHAPE"))).inputs(requests(*shapes)).values()
    )
    assert shape.tolist() == [[3, 5], [3, 5], [4, 1]]
    (flat_shapes,) = (
        RaggedRules(ModelSpec.of(config("BATCH_ITEM_SHAPE_FLATTEN")))
        .inputs(requests(*shapes))
        .values()
    )
    assert flat_shapes.tolist() == [3, 5, 3, 5, 4, 1]
    (sizes,) = (
        RaggedRules(ModelSpec.of(config("BATCH_ELEMENT_COUNT"))).inputs(requests(*shapes)).values()
    )
    assert sizes.tolist() == [30, 4]


def scatter_config(**fields: Any) -> dict[str, Any]:
    split = {"kind": "BATCH_SCATTER_WITH_INPUT_SHAPE", "target_name": ["Y"], "source_input": ["X"]}
    return config("BATCH_ACCUMULATED_ELEMENT_COUNT", **fields) | {"batch_output": [split]}


TORCH_MODEL = """
import torch
class Net(torch.nn.Module):
    def forward(self, X, T):
        assert X.dim() == 1 and T.dtype == torch.int32, (X.shape, T)
        return X * 10 + torch.repeat_interleave(
            torch.arange(len(T)), torch.diff(T, prepend=torch.zeros(1, dtype=T.dtype)))
"""
NATIVE_MODEL = """
from torch import Tensor
import torch
from shmserve.model import FP32, INT32

class Model:
    ragged = ("X",)
    batch_input = [
        {"kind": "BATCH_ACCUMULATED_ELEMENT_COUNT", "data_type": "TYPE_INT32",
         "target_name": ["T"], "source_input": ["X"]},
    ]
    batch_output = [
        {"kind": "BATCH_SCATTER_WITH_INPUT_SHAPE", "target_name": ["Y"], "source_input": ["X"]},
    ]

    def predict(self, X: FP32[Tensor, -1], T: INT32[Tensor, -1]) -> "Out":
        return Out(X * 10 + torch.repeat_interleave(
            torch.arange(len(T)), torch.diff(T, prepend=torch.zeros(1, dtype=T.dtype))))

from typing import NamedTuple
class Out(NamedTuple):
    Y: FP32[Tensor, -1]
"""


@pytest.mark.parametrize("model_kind", ["pytorch", "native"])
def test_a_ragged_batch_runs_flat_and_its_output_is_scattered(worker: Rig, model_kind: str) -> None:
    """3.6: BATCH_SCATTER_WITH_INPUT_SHAPE returns each request its part of the flat output."""
    path = worker.context.version_dir / "model.py"
    if model_kind == "pytorch":
        path.write_text(TORCH_MODEL)
        worker.serve(PytorchBackend(worker.context), scatter_config())
    else:
        path.write_text(NATIVE_MODEL)
        backend = NativeBackend(worker.context)
        completed = backend.complete_config(model_config([], []))
        (x,) = completed["input"]  # the server provides T, so it is no input of the model
        assert x == tensor_config("X", "FP32", [-1]) | {"allow_ragged_batch": True}
        worker.serve(backend, completed)
    rows = [np.arange(n, dtype=F32).reshape(rows, -1) for rows, n in ((1, 2), (2, 4), (1, 1))]
    for count in (3, 1):
        replies = worker.batch(*(inference(tensor("X", row)) for row in rows[:count]))
        for index, (row, reply) in enumerate(zip(rows, replies, strict=False)):
            assert reply.array("Y").tolist() == (row * 10 + index).tolist()


def test_a_scattered_output_of_another_size_is_an_error() -> None:
    ragged = RaggedRules(ModelSpec.of(scatter_config()))
    assert ragged.part_shapes("Y", requests((1, 2), (1, 4)), (6,)) == [(1, 2), (1, 4)]
    with pytest.raises(Internal, match="'Y' has 5 elements, expected 6"):
        ragged.part_shapes("Y", requests((1, 2), (1, 4)), (5,))
    assert ragged.part_shapes("Z", requests((1, 2)), (5,)) is None


def test_a_ragged_input_of_strings_is_flat(worker: Rig) -> None:
    """3.6: a ragged input of strings is one flat array, too."""
    (worker.context.version_dir / "model.py").write_text(
        "from numpy import ndarray, array\n"
        "from shmserve.model import BYTES, INT64\n"
        "class Model:\n"
        "    ragged = ['words']\n"
        "    def predict(self, words: BYTES[ndarray, -1], n: INT64[ndarray, 1]) "
        "-> INT64[ndarray, 1]:\n"
        "        assert words.tolist() == [b'a', b'b', b'c'], words\n"
        "        return n\n"
    )
    backend = NativeBackend(worker.context)
    worker.serve(backend, backend.complete_config(model_config([], [])))
    string_arrays = [np.array([[b"a"]], object), np.array([[b"b", b"c"]], object)]
    n = np.array([[7]])
    replies = worker.batch(*(inference(tensor("words", w), tensor("n", n)) for w in string_arrays))
    assert [reply.array("output").tolist() for reply in replies] == [[[7]], [[7]]]
