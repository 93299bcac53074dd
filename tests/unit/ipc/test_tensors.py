"""Serialised BYTES, memory ranges, and the check of requests by a model's signature."""

import contextlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.errors import InvalidArgument
from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.tensors.arrays import decode_bytes, encode_bytes
from shmserve.ipc.tensors.descriptors import TensorRef, is_within, require_integer
from shmserve.ipc.tensors.schemas import RequestedOutput
from shmserve.ipc.tensors.signature import Signature

EDGES = [0, 1, -1, 4095, 4096, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 2**64]
NEAR = st.sampled_from(EDGES).flatmap(lambda edge: st.integers(edge - 2, edge + 2))


@given(NEAR, NEAR, st.integers(0, 2**63 - 1))
def test_a_range_fits_exactly_when_its_bytes_do(offset: int, size: int, limit: int) -> None:
    """One function decides whether a range fits."""
    assert is_within(offset, size, limit) == (offset >= 0 and size >= 0 and offset + size <= limit)


@pytest.mark.parametrize("value", [True, 1.0, "1", None, -1, 2**63, [1]])
def test_a_wrong_size_is_refused_by_name(value: object) -> None:
    with pytest.raises(InvalidArgument, match="'offset'"):
        require_integer(value, "offset")


@given(st.lists(st.binary(max_size=20), max_size=20))
def test_strings_round_trip(items: list[bytes]) -> None:
    array = np.array([*items, None], dtype=np.object_)[:-1]
    assert list(decode_bytes(encode_bytes(array), (len(items),), "a", "m")) == items


@given(st.binary(max_size=60), st.integers(0, 10))
def test_any_bytes_decode_or_are_refused(raw: bytes, count: int) -> None:
    with contextlib.suppress(InvalidArgument):
        assert decode_bytes(raw, (count,), "a", "m").shape == (count,)


def test_a_huge_count_is_refused_before_it_is_allocated() -> None:
    with pytest.raises(InvalidArgument):
        decode_bytes(b"\0\0\0\0", (2**40,), "a", "m")


def config(batch: int = 8, **fields: Any) -> dict[str, Any]:
    return {
        "name": "m",
        "max_batch_size": batch,
        "input": [
            {"name": "A", "data_type": "TYPE_FP32", "dims": [-1, 2]},
            {"name": "B", "data_type": "TYPE_STRING", "dims": [1], **fields},
        ],
        "output": [{"name": "Y", "data_type": "TYPE_FP32", "dims": [2]}],
    }


def tensor(name: str, datatype: str, *shape: int) -> TensorRef:
    size = 4
    for dim in shape:
        size *= dim
    return TensorRef(name, datatype, shape, bytes(size))


SPEC = ModelSpec.of(config())
A, B = tensor("A", "FP32", 2, 3, 2), tensor("B", "BYTES", 2, 1)


def test_a_valid_request_is_accepted() -> None:
    checked = Signature(SPEC, "1").check("", [A, B], [RequestedOutput("Y")])
    assert checked.batch_size == 2
    assert checked.shape_key == Signature(SPEC, "1").check("", [B, A], []).shape_key
    other_tensor = tensor("A", "FP32", 2, 4, 2)
    assert checked.shape_key != Signature(SPEC, "1").check("", [other_tensor, B], []).shape_key


@pytest.mark.parametrize(
    ("inputs", "outputs", "text"),
    [
        ([A], [],
         "expected 2 inputs but got 1 inputs for model 'm'. Got input(s) ['A'], but missing"),
        ([A, B, tensor("C", "FP32", 2)], [], "expected 2 inputs but got 3 inputs"),
        ([A, tensor("C", "FP32", 2)], [], "unexpected inference input 'C' for model 'm'"),
        ([A, A], [], "input 'A' already exists in request"),
        ([A, B], ["Z"], "unexpected inference output 'Z' for model 'm'"),
        ([A], ["Z"], "unexpected inference output 'Z' for model 'm'"),
        ([A, B], ["Y", "Y"], "Duplicate output name 'Y' is not allowed in a request"),
        ([tensor("A", "INT32", 2, 3, 2), B], [],
         "inference input 'A' data-type is 'INT32', but model"),
        ([tensor("A", "FP32", 2, 3, 3), B], [],
         "Expected [-1,-1,2], got [2,3,3]. NOTE: Setting a non-zero"),
        ([tensor("A", "FP32"), B], [], "input 'A' has no shape but model requires batch dimension"),
        ([tensor("A", "FP32", 9, 3, 2), tensor("B", "BYTES", 9, 1)], [],
         "batch-size must be <= 8 for 'm'"),
        ([tensor("A", "FP32", 9, 2), tensor("B", "BYTES", 9, 1)], [],
         "batch-size must be <= 8 for 'm' (input 'A': [9,2] has no batch dimension)"),
        ([A, tensor("B", "BYTES", 1, 1)], [], "input 'B' batch size does not match other inputs"),
        ([TensorRef("A", "FP32", (2, 3, 2), b"123"), B], [], "Expected 48, got 3"),
        ([TensorRef("A", "FP32", (2, 2**60, 2), b""), tensor("B", "BYTES", 2, 1)], [],
         "byte size overflow for input 'A': element count (4611686018427387904) *"),
        # The tensor would be empty, but no array can have this shape.
        ([TensorRef("A", "FP32", (0, 2**60, 2), b""), TensorRef("B", "BYTES", (0, 1), b"")], [],
         "input 'A' for model 'm' is too large"),
    ],
)  # fmt: skip
def test_inputs_that_do_not_match_the_signature_are_refused(
    inputs: list[TensorRef], outputs: list[str], text: str
) -> None:
    with pytest.raises(InvalidArgument) as error:
        Signature(SPEC, "1").check("r", inputs, [RequestedOutput(name) for name in outputs])
    assert text in error.value.message
    prefixed = error.value.message.startswith("[request id: r] ")
    assert prefixed != text.startswith("unexpected inference")
    assert type(error.value) is InvalidArgument


def test_optional_inputs() -> None:
    signature = Signature(ModelSpec.of(config(optional=True)), "1")
    without_b = signature.check("", [A], [])
    with_b = signature.check("", [A, B], [])
    assert without_b.shape_key != with_b.shape_key
    with pytest.raises(InvalidArgument, match="between 1 and 2 but got 1 inputs"):
        signature.check("", [B], [])
