"""Shape keys: requests with equal keys may share a batch."""

from typing import Any

import pytest

from shmserve.errors import InvalidArgument
from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.tensors.descriptors import TensorRef
from shmserve.ipc.tensors.signature import Signature


def signature(**fields: Any) -> Signature:
    fixed = {"name": "FIXED", "data_type": "TYPE_UINT8", "dims": [2]}
    free = {"name": "FREE", "data_type": "TYPE_UINT8", "dims": [-1, 2], **fields}
    last = {"name": "LAST", "data_type": "TYPE_UINT8", "dims": [-1], "optional": True}
    return signature_of([fixed, free, last])


def signature_of(inputs: list[dict[str, Any]]) -> Signature:
    config = {"name": "m", "max_batch_size": 8, "input": inputs, "output": []}
    return Signature(ModelSpec.of(config), "1")


def key(model: Signature, rows: int, free_size: int, last_size: int = 0) -> bytes:
    shapes = {"FREE": (rows, free_size, 2), "FIXED": (rows, 2), "LAST": (rows, last_size)}
    if not last_size:
        del shapes["LAST"]
    tensors = []
    for name, shape in shapes.items():
        size = shape[0] * shape[1] * (2 if len(shape) == 3 else 1)
        tensors.append(TensorRef(name, "UINT8", shape, bytes(size)))
    return model.check("", tensors, []).shape_key


def test_inputs_of_variable_size_must_have_equal_shapes() -> None:
    """3.1 rule 2: non-ragged inputs with a -1 dim, but not batch sizes or fixed dims."""
    model = signature()
    assert key(model, 1, 3) == key(model, 5, 3) and key(model, 1, 3) != key(model, 1, 4)


def test_ragged_inputs_are_not_compared() -> None:
    """3.6: `allow_ragged_batch` removes one input from the comparison, but not the other inputs."""
    model = signature(allow_ragged_batch=True)
    assert key(model, 1, 3, 4) == key(model, 2, 9, 4)
    assert key(model, 1, 3, 4) != key(model, 1, 3, 5)


def test_requests_with_other_optional_inputs_are_separated() -> None:
    """3.1 rule 2: requests that supply different optional inputs do not share a batch."""
    model = signature(allow_ragged_batch=True)
    assert key(model, 1, 3) != key(model, 1, 3, 4)
    optional = {"data_type": "TYPE_UINT8", "dims": [1], "optional": True}
    model = signature_of([{"name": name, **optional} for name in "AB"])
    keys = {
        model.check("", [TensorRef(n, "UINT8", (1, 1), b"x") for n in names], []).shape_key
        for names in ("A", "B", "AB", "BA")
    }
    assert len(keys) == 3


@pytest.mark.parametrize(
    ("names", "count"), [("LAST", "but got 1 inputs"), ("", "but got 0 inputs")]
)
def test_the_input_count_must_be_between_required_and_total(names: str, count: str) -> None:
    """3.6: the number of inputs is between required and total, with Triton's text."""
    tensors = [TensorRef(names, "UINT8", (1, 1), b"x")] if names else []
    with pytest.raises(InvalidArgument) as caught:
        signature().check("7", tensors, [])
    message = caught.value.message
    assert message.startswith("[request id: 7] expected number of inputs between 2 and 3 " + count)
    assert "missing required input(s) ['FIXED','FREE']" in message


@pytest.mark.parametrize(
    ("names", "error"),
    [
        pytest.param(("MORE", "FIXED"), "unexpected inference input 'MORE'", id="unknown, missing"),
        pytest.param(("FIXED", "FREE", "LAST", "MORE"),
                     "expected number of inputs between 2 and 3 but got 4", id="too many"),
    ],
)  # fmt: skip
def test_an_unknown_or_excessive_input_is_reported_first(
    names: tuple[str, ...], error: str
) -> None:
    """3.6: a request must not have more inputs than the model."""
    tensors = [TensorRef(name, "UINT8", (1, 1), b"x") for name in names]
    with pytest.raises(InvalidArgument, match=error):
        signature().check("", tensors, [])
