"""Padding: which requests may share a batch, and the shape of the batch."""

import json
from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.errors import InvalidArgument
from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.tensors.descriptors import TensorRef
from shmserve.ipc.tensors.padding import PaddedBatch, Padding
from shmserve.ipc.tensors.signature import Signature

BUCKETS = [[3, 336, 336], [3, 224, 224]]


def config(entry: dict[str, Any], dims: tuple[int, ...] = (3, -1, -1)) -> dict[str, Any]:
    return {
        "name": "m",
        "max_batch_size": 8,
        "input": [
            {"name": "IMAGE", "data_type": "TYPE_UINT8", "dims": list(dims)},
            {"name": "WORDS", "data_type": "TYPE_UINT8", "dims": [-1]},
        ],
        "output": [],
        "parameters": {"padding": {"string_value": json.dumps({"IMAGE": entry})}},
    }


def padding(entry: dict[str, Any], dims: tuple[int, ...] = (3, -1, -1)) -> Padding:
    padding = ModelSpec.of(config(entry, dims)).padding
    assert padding is not None
    return padding


def shape(pad: Padding, *shapes: tuple[int, ...]) -> tuple[int, ...] | None:
    return pad.pads["IMAGE"].padded_shape(tuple(map(max, zip(*shapes, strict=True))))


def test_a_batch_is_padded_to_its_maximum_or_the_smallest_bucket() -> None:
    assert shape(padding({}), (3, 2, 9), (3, 5, 4)) == (3, 5, 9)
    bucketed = padding({"buckets": BUCKETS})
    assert shape(bucketed, (3, 2, 9), (3, 5, 4)) == (3, 224, 224)
    assert shape(bucketed, (3, 225, 9), (3, 5, 4)) == (3, 336, 336)
    assert shape(bucketed, (3, 337, 9)) is None


def compute_key(entry: dict[str, Any], image: tuple[int, ...], word_count: int = 1) -> bytes:
    tensors = [
        TensorRef("WORDS", "UINT8", (1, word_count), bytes(word_count)),
        TensorRef("IMAGE", "UINT8", (1, *image), bytes(prod(image))),
    ]
    return Signature(ModelSpec.of(config(entry)), "1").check("", tensors, []).shape_key


def test_a_request_that_fits_no_bucket_is_refused_with_the_buckets() -> None:
    with pytest.raises(InvalidArgument) as caught:
        compute_key({"buckets": BUCKETS}, (3, 400, 100))
    assert caught.value.message == (
        "[request id: <id_unknown>] unexpected shape for input 'IMAGE' for model 'm'. [3,400,100] "
        "fits no bucket (without the batch dimension: [3,224,224], [3,336,336])"
    )


def test_the_shape_key_ignores_padded_dimensions_only() -> None:
    pad = padding({})
    shape_key, shapes = pad.split_key(compute_key({}, (3, 7, 9), word_count=2))
    assert shapes == ((3, 7, 9),)
    assert pad.split_key(compute_key({}, (3, 8, 8), word_count=2))[0] == shape_key
    assert pad.split_key(compute_key({}, (3, 7, 9), word_count=1))[0] != shape_key
    batch = PaddedBatch(pad)
    assert batch.try_join(compute_key({}, (3, 7, 9), word_count=2), 1)
    assert not batch.try_join(compute_key({}, (3, 7, 9), word_count=1), 1)
    assert batch.try_join(compute_key({}, (3, 9, 7), word_count=2), 2)
    total = 3 * 3 * 9 * 9
    assert batch.element_counts() == {"IMAGE": (total, total - 3 * 3 * 7 * 9)}


def test_shapes_without_a_common_bucket_are_separated() -> None:
    pad = padding({"buckets": [[3, 10, 100], [3, 100, 10]]})
    batch = PaddedBatch(pad)
    assert batch.try_join(pad.key(b"", {"IMAGE": (3, 5, 90)}), 1)
    assert not batch.try_join(pad.key(b"", {"IMAGE": (3, 90, 5)}), 1)
    assert batch.try_join(pad.key(b"", {"IMAGE": (3, 9, 9)}), 1)


def test_two_small_requests_do_not_become_a_huge_batch() -> None:
    """One row is long in one dimension, and the other row in another dimension."""
    pad = padding({}, (-1, -1))
    batch = PaddedBatch(pad)
    assert batch.try_join(pad.key(b"", {"IMAGE": (1, 100_000)}), 1)
    assert not batch.try_join(pad.key(b"", {"IMAGE": (100_000, 1)}), 1)
    assert batch.try_join(pad.key(b"", {"IMAGE": (1, 90_000)}), 1)


SIZES = st.tuples(st.integers(0, 40), st.integers(0, 40))


@given(
    st.lists(st.tuples(SIZES, st.integers(1, 4)), min_size=1, max_size=12),
    st.floats(0, 1),
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), max_size=3),
)
def test_waste_is_bounded(
    shapes_and_units: list[tuple[tuple[int, int], int]],
    max_waste: float,
    buckets: list[tuple[int, int]],
) -> None:
    """At most `max_waste` of a batch is padding, unless its requests alone need as much."""
    listed_buckets = [list(bucket) for bucket in [*buckets, (40, 40)]] if buckets else []
    pad = padding({"max_waste": max_waste, "buckets": listed_buckets}, (-1, -1))
    batch = PaddedBatch(pad)
    admitted: list[tuple[tuple[int, int], int]] = []
    for image, units in shapes_and_units:
        if batch.try_join(pad.key(b"", {"IMAGE": image}), units):
            admitted.append((image, units))
    assert admitted[0] == shapes_and_units[0]
    padded = shape(pad, *(image for image, _ in admitted))
    assert padded is not None
    total = prod(padded) * sum(units for _, units in admitted)
    true_elements = sum(prod(image) * units for image, units in admitted)
    assert batch.element_counts() == {"IMAGE": (total, total - true_elements)}
    separate_elements = 0
    for image, units in admitted:
        own_shape = shape(pad, image)
        assert own_shape is not None and all(a <= b for a, b in zip(image, padded, strict=True))
        separate_elements += prod(own_shape) * units
    assert total - true_elements <= max_waste * total + 1e-9 or total <= separate_elements
