"""Flat JSON: which members become inputs or parameters, and the response."""

import json
import math
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.errors import ShmserveError
from shmserve.gateway.http.generate import encode_response, parse_generate
from shmserve.gateway.http.json.large_bodies import Packed
from shmserve.gateway.http.messages import (
    JSON_LINES,
    SERVER_SENT_EVENTS,
    encode_error_json,
    find_accepted_framing,
)
from shmserve.gateway.inference.infer_request import InferRequest
from shmserve.ipc.tensors.descriptors import TensorRef

INPUTS = {
    "TEXT": ("BYTES", [-1]), "I": ("INT32", [-1]), "F": ("FP32", [-1, 2]), "FIX": ("INT32", [2]),
    "ROW": ("BYTES", [-1, 1]), "DEEP": ("INT32", [-1, -1, 3]), "HALF": ("FP16", [-1]),
    "ONE": ("INT32", []),
}  # fmt: skip


def parse(body: Any) -> InferRequest:
    return parse_generate(body, INPUTS)


def refusal(body: Any) -> tuple[int, str]:
    with pytest.raises(ShmserveError) as caught:
        parse(body)
    return caught.value.status, caught.value.message


def test_large_fields_are_parsed_only_if_they_fit_an_input() -> None:
    def pack(text: bytes, count: int) -> Packed:
        return Packed("json", count, len(text), pieces=[text])

    (tensor,) = parse({"parameters": {"F": pack(b"[1,2,3,4]", 4)}}).inputs
    assert (tensor.shape, tensor.count) == ((2, 2), 4)
    (text,) = parse({"TEXT": pack(b'"hi"', 1)}).inputs
    assert text.data == parse({"TEXT": "hi"}).inputs[0].data
    assert "proper shape" in refusal({"FIX": pack(b"not parsed", 3)})[1]
    assert "parameter 'x' has invalid type" in refusal({"x": pack(b"not parsed", 1)})[1]


@pytest.mark.parametrize(
    ("name", "value", "shape"),
    [
        ("TEXT", "hi", (1,)), ("TEXT", ["a", "b"], (2,)), ("TEXT", [["a"], ["b"]], (2,)),
        ("TEXT", [], (0,)), ("I", 5, (1,)), ("I", [], (0,)), ("F", [1, 2, 3, 4], (2, 2)),
        ("F", [], (0, 2)), ("FIX", [1, 2], (2,)), ("ROW", "a", (1, 1)), ("ROW", ["a", "b"], (2, 1)),
        ("DEEP", [1, 2, 3, 4, 5, 6], (1, 2, 3)), ("ONE", 1, ()),
    ],
)  # fmt: skip
def test_shapes(name: str, value: Any, shape: tuple[int, ...]) -> None:
    (tensor,) = parse({name: value}).inputs
    assert (tensor.name, tensor.shape) == (name, shape)
    assert tensor.count == math.prod(shape)
    if tensor.datatype == "INT32":
        assert len(tensor.data or b"") == 4 * tensor.count


@pytest.mark.parametrize(
    ("name", "value"), [("F", [1, 2, 3]), ("F", 1.5), ("FIX", [1, 2, 3]), ("FIX", 1), ("ONE", [])]
)
def test_values_without_a_matching_shape_are_refused(name: str, value: Any) -> None:
    text = f"The schema can not convert input '{name}' to tensor with proper shape"
    assert refusal({name: value}) == (400, text)


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ([], 500, "attempt to get members for non-object"),
        (5, 500, "attempt to get members for non-object"),
        ({"id": 7}, 500, "Unable to parse 'id': attempt to access JSON non-string as string"),
        ({"TEXT": 5}, 500,
         "Unable to parse JSON bytes array: attempt to access JSON non-string as string "
         "(input 'TEXT' has 5)"),
        ({"I": 1.5}, 500,
         "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer "
         "(input 'I' has 1.5)"),
        ({"I": None}, 500,
         "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer "
         "(input 'I' has null)"),
        ({"F": [[1, 2], [3, 4]]}, 500,
         "Unable to parse 'data': Shape does not match true shape of 'data' field (input 'F': "
         "its shape has 2 elements, more are given)"),
        ({"HALF": 1.0}, 400, "receiving FP16 data via JSON is not supported. "
         "Please use the binary data format for input HALF"),
        ({"foo": [1]}, 400,
         "parameter 'foo' has invalid type. It should be either 'int', 'bool', or 'string'."),
        ({"parameters": {"x": {"q": 1}}}, 400,
         "Converting keyword: 'parameters': parameter 'x' has invalid type. "
         "It should be either 'int', 'bool', or 'string'."),
        ({"parameters": {"I": "x"}}, 500,
         "Converting keyword: 'parameters': Unable to parse 'data': "
         "attempt to access JSON non-signed-integer as signed-integer (input 'I' has \"x\")"),
        ({"parameters": 5}, 500, "Expected JSON object for keyword: 'parameters': "
         "attempt to access JSON non-object as object"),
    ],
)  # fmt: skip
def test_refusals(body: Any, status: int, text: str) -> None:
    assert refusal(body) == (status, text)


def test_an_input_named_like_the_nested_schema() -> None:
    with pytest.raises(ShmserveError) as caught:
        parse_generate({"parameters": {}}, {"parameters": ("INT32", [1])})
    text = "Keyword 'parameters' for nested schema also given as input tensor name"
    assert caught.value.message == text


def test_other_members_are_parameters() -> None:
    request = parse(
        {
            "id": "x1",
            "TEXT": "a",
            "sequence_id": 5,
            "timeout": 100,
            "triton_x": True,
            "large": 2**64 - 1,
            "parameters": {"I": 4, "y": "z"},
        }
    )
    assert request.id == "x1"
    assert [tensor.name for tensor in request.inputs] == ["TEXT", "I"]
    assert request.parameters == {
        "id": "x1", "sequence_id": 5, "timeout": 100, "triton_x": True, "large": float(2**64 - 1),
        "y": "z",
    }  # fmt: skip
    assert (request.correlation_id, request.timeout_us) == (0, 0)


@pytest.mark.parametrize("body", [{"deadline_us": 5}, {"parameters": {"deadline_us": 5}}])
def test_a_deadline_is_not_passed_to_the_model(body: Any) -> None:
    request = parse(body)
    assert (request.deadline_us, request.parameters) == (5, {})


def test_a_response_has_its_outputs_in_the_order_of_their_names() -> None:
    def tensor(name: str, *shape: int) -> TensorRef:
        return TensorRef(name, "INT32", shape, b"")

    outputs = [
        (tensor("SAW", 1, 1), b'["a"]'),
        (tensor("IO", 2), b"[1,2]"),
        (tensor("E", 0), b"[]"),
    ]
    encoded = encode_response(InferRequest("x1", [], []), "gen", "1", outputs, {"k": 1})
    assert encoded == (
        b'{"E":[],"IO":[1,2],"SAW":"a","id":"x1","model_name":"gen","model_version":"1","k":1}'
    )
    encoded = encode_response(InferRequest("", [], []), "gen", "1", [(tensor("N"), b"[7]")], {})
    assert encoded == b'{"N":7,"model_name":"gen","model_version":"1"}'


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=8), st.booleans())
def test_integers_of_any_size(values: list[int], scalar: bool) -> None:
    given_value: Any = values[0] if scalar and values else values
    (tensor,) = parse(orjson.loads(json.dumps({"I": given_value}))).inputs
    count = 1 if scalar and values else len(values)
    assert tensor.shape == (count,) and len(tensor.data) == 4 * count


@pytest.mark.parametrize(
    ("header", "framing"),
    [
        ("text/event-stream", SERVER_SENT_EVENTS),
        ("application/json, Text/Event-Stream; charset=utf-8", SERVER_SENT_EVENTS),
        ("application/x-ndjson,text/event-stream", JSON_LINES),
        ("text/event-stream;q=0, application/x-ndjson; q=0.5", JSON_LINES),
        ("text/event-stream; q=0.0", None),
        ("*/*", None),
        ("", None),
    ],
)
def test_the_accept_header_selects_the_framing(header: str, framing: Any) -> None:
    assert find_accepted_framing(header) is framing


def test_frames() -> None:
    assert SERVER_SENT_EVENTS.frame(b"{}") == b"data: {}\n\n"
    assert JSON_LINES.frame(encode_error_json("a\nb")) == b'{"error":"a\\nb"}\n'
