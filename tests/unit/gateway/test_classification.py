"""The largest values of an output, as texts."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from shmserve.errors import InvalidArgument
from shmserve.gateway.inference.classification import classify_outputs, largest_indices
from shmserve.gateway.inference.infer_request import InferOutput, InferRequest
from shmserve.ipc.tensors.arrays import NUMPY_DTYPES
from shmserve.ipc.tensors.descriptors import TensorRef
from shmserve.ipc.tensors.schemas import Inferred

VALUES = [1.0, 3.5, 2.0, 3.5, -1e-7, 1e20]


def decode_texts(tensor: TensorRef) -> list[str]:
    data, texts, offset = tensor.data, [], 0
    assert isinstance(data, bytes)
    while offset < len(data):
        size = int.from_bytes(data[offset : offset + 4], "little")
        texts.append(data[offset + 4 : offset + 4 + size].decode())
        offset += 4 + size
    return texts


def classify_response(
    answer: Inferred,
    count: int,
    labels: dict[str, tuple[str, ...]] | None = None,
    *,
    batched: bool = False,
) -> Inferred:
    signature = SimpleNamespace(max_batch_size=int(batched))
    model: Any = SimpleNamespace(signature=signature, labels=labels or {})
    request = InferRequest("", [], [InferOutput("OUT", binary=True, class_count=count)])
    unused: Any = None
    return classify_outputs(unused, model, request, answer)


def classify(
    values: Any, datatype: str, count: int, labels: tuple[str, ...] = (), *, batched: bool = False
) -> TensorRef:
    array = np.asarray(values, NUMPY_DTYPES[datatype])
    other_tensor = TensorRef("OTHER", "INT32", (1,), bytes(4))
    tensor = TensorRef("OUT", datatype, array.shape, array.tobytes())
    answer = Inferred((other_tensor, tensor), {"k": 1})
    outputs = classify_response(answer, count, {"OUT": labels}, batched=batched)
    assert outputs.outputs[0] is other_tensor and outputs.parameters == {"k": 1}
    return outputs.outputs[1]


@pytest.mark.parametrize("datatype", ["FP32", "FP64"])
def test_floats_have_six_decimals(datatype: str) -> None:
    output = classify(VALUES, datatype, 3)
    assert (output.datatype, output.shape) == ("BYTES", (3,))
    top = "100000002004087734272" if datatype == "FP32" else "100000000000000000000"
    assert decode_texts(output) == [f"{top}.000000:5", "3.500000:1", "3.500000:3"]
    assert decode_texts(classify(VALUES, datatype, 9))[-1] == "-0.000000:4"
    assert decode_texts(classify([float("nan"), 1.0], "FP32", 1, ("zero",))) == ["nan:0:zero"]


@pytest.mark.parametrize("datatype", ["INT8", "INT32", "INT64", "UINT8", "UINT64"])
def test_integers_have_no_decimals(datatype: str) -> None:
    assert decode_texts(classify([1, 3, 2, 3], datatype, 3)) == ["3:1", "3:3", "2:2"]


def test_the_smallest_and_largest_numbers() -> None:
    assert decode_texts(classify([-(2**63), 2**63 - 1], "INT64", 2)) == [
        "9223372036854775807:1",
        "-9223372036854775808:0",
    ]
    assert decode_texts(classify([0, 2**64 - 1], "UINT64", 1)) == ["18446744073709551615:1"]


def test_labels_are_found_by_index_and_may_be_empty() -> None:
    labels = ("zero", "one", "", "three")
    output = classify([1, 2, 3, 4, 5], "INT32", 5, labels)
    assert decode_texts(output) == ["5:4", "4:3:three", "3:2", "2:1:one", "1:0:zero"]


def test_each_row_of_a_batch_is_classified() -> None:
    values = [[3.0, 5.0, 3.0], [8.0, 8.0, 9.0]]
    best = classify(values, "FP32", 2, ("zero", "one"), batched=True)
    assert best.shape == (2, 2)
    assert decode_texts(best) == [
        "5.000000:1:one",
        "3.000000:0:zero",
        "9.000000:2",
        "8.000000:0:zero",
    ]
    assert classify([[1.0, 2.0, 3.0]], "FP32", 9, batched=True).shape == (1, 3)
    assert classify(values, "FP32", 9).shape == (6,)


def test_empty_outputs_have_no_classes() -> None:
    assert classify(np.zeros((0,)), "FP32", 2).shape == (0,)
    output = classify(np.zeros((2, 0)), "FP32", 2, batched=True)
    assert (output.shape, output.data) == ((2, 0), b"")


@pytest.mark.parametrize("datatype", ["BOOL", "FP16", "BF16", "BYTES"])
def test_unsorted_datatypes_are_refused(datatype: str) -> None:
    answer = Inferred((TensorRef("OUT", datatype, (1,), b"\0\0"),))
    with pytest.raises(InvalidArgument) as caught:
        classify_response(answer, 1)
    text = f"class result not available for output due to unsupported type '{datatype}'"
    assert caught.value.message == text


def test_too_many_values_are_refused() -> None:
    answer = Inferred((TensorRef("OUT", "UINT8", (1_000_001,), bytes(1_000_001)),))
    with pytest.raises(InvalidArgument, match="elements are too many for classification"):
        classify_response(answer, 1)
    answer = Inferred((TensorRef("OUT", "UINT8", (100_001,), bytes(100_001)),))
    assert classify_response(answer, 100_000)
    with pytest.raises(InvalidArgument, match="100001 classes are too many for a response"):
        classify_response(answer, 100_001)


@given(
    st_numpy.arrays(np.int8, st.integers(0, 40), elements=st.integers(-3, 3)), st.integers(0, 45)
)
def test_values_are_sorted_stably_in_descending_order(row: Any, count: int) -> None:
    expected = sorted(range(len(row)), key=lambda index: (-int(row[index]), index))[:count]
    assert largest_indices(row, min(count, len(row))) == expected
