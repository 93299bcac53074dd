"""What the key of the response cache tells apart (section 3.8), and what it does not."""

from dataclasses import replace
from typing import Any

import pytest

from shmserve.ipc.tensors.descriptors import Memory, Place, TensorRef
from shmserve.ipc.tensors.inference import Inference, RequestedOutput, RequestSchema, pack_inference
from shmserve.scheduler.response_cache import cache_head, cache_key

A = TensorRef("A", "INT32", (1, 2), b"12345678")
B = TensorRef("B", "INT8", (3,), b"abc")
REQUEST = Inference((A, B), (RequestedOutput("Y"),), {"p": 1})


NO_SEQUENCE = (0, "", 0)


def key(
    request: Inference,
    model: str = "m",
    version: str = "1",
    sequence: tuple[int, str, int] = NO_SEQUENCE,
) -> bytes:
    schema, _ = pack_inference(request)
    head = cache_head(model, version, RequestSchema(schema))
    datas = [request.inputs[index].data for index in head.order]
    read = [b"12345678" if isinstance(data, Place) else data for data in datas]
    return cache_key(head.prefix, sequence, read)


@pytest.mark.parametrize(
    "other",
    [
        replace(REQUEST, inputs=(replace(A, name="C"), B)),
        replace(REQUEST, inputs=(replace(A, shape=(2, 1)), B)),
        replace(REQUEST, inputs=(replace(A, datatype="UINT32"), B)),
        replace(REQUEST, inputs=(replace(A, data=b"12345679"), B)),
        replace(REQUEST, inputs=(replace(A, data=b"12345678a"), replace(B, data=b"bc"))),
        replace(REQUEST, inputs=(A,)),
        replace(REQUEST, outputs=()),
        replace(REQUEST, outputs=(RequestedOutput("Y"), RequestedOutput("Z"))),
        replace(REQUEST, parameters={}),
        replace(REQUEST, parameters={"p": 2}),
        replace(REQUEST, parameters={"p": 1.0}),
        replace(REQUEST, parameters={"p": True}),
        replace(REQUEST, parameters={"p": "1"}),
    ],
)
def test_requests_that_differ_have_different_keys(other: Inference) -> None:
    """Rule 3.8.2."""
    assert key(other) != key(REQUEST)


def test_another_sequence_or_place_in_it_has_another_key() -> None:
    """Rule 3.8.2."""
    places = [NO_SEQUENCE, (1, "", 0), (0, "1", 0), (0, "", 1)]
    assert len({key(REQUEST, sequence=place) for place in places}) == len(places)


def test_another_model_or_version_has_another_key() -> None:
    assert len({key(REQUEST), key(REQUEST, "n"), key(REQUEST, "m", "2")}) == 3


@pytest.mark.parametrize(
    "fields",
    [
        {"inputs": (B, A)},
        {"inputs": (replace(A, data=Place(Memory(1, 2, 3, 4, 8, True), 0, 8)), B)},
    ],
)
def test_requests_that_ask_the_same_have_the_same_key(fields: dict[str, Any]) -> None:
    assert key(replace(REQUEST, **fields)) == key(REQUEST)


def test_the_order_of_parameters_does_not_matter() -> None:
    one = replace(REQUEST, parameters={"p": 1, "q": 2})
    assert key(one) == key(replace(REQUEST, parameters={"q": 2, "p": 1}))
