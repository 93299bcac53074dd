"""The parameter `padding`: errors contain the found value and the allowed values."""

import json
from typing import Any

import pytest

from shmserve.errors import InvalidArgument
from shmserve.model_config import normalise, validate
from tests.rigs.marked_configs import parse_pbtxt

VALID_PADDING = {
    "IMAGE": {
        "value": 0,
        "buckets": [[3, 224, 224], [3, 336, 336]],
        "lengths": "IMAGE_LENGTHS",
        "mask": "IMAGE_MASK",
        "max_waste": 0.5,
    },
    "FEATURES": {"like": "IMAGE"},
}


def padding_error(padding: Any, max_batch_size: int = 8, complete: bool = True) -> str:
    text = padding if isinstance(padding, str) else json.dumps(padding)
    config = parse_pbtxt(f"""
        name: "m" backend: "python" max_batch_size: {max_batch_size}
        input {{ name: "IMAGE" data_type: TYPE_UINT8 dims: [ 3, -1, -1 ] }}
        input {{ name: "TEXT" data_type: TYPE_STRING dims: [ -1 ] }}
        input {{ name: "RATES" data_type: TYPE_FP16 dims: [ -1 ] }}
        input {{ name: "FIXED" data_type: TYPE_FP32 dims: [ 2 ] }}
        input {{ name: "FLAT" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true }}
        output {{ name: "FEATURES" data_type: TYPE_FP32 dims: [ 3, -1, -1 ] }}
        output {{ name: "ROWS" data_type: TYPE_FP32 dims: [ -1 ] }}
        parameters {{ key: "padding" value {{ string_value: {json.dumps(text)} }} }}
        """)
    try:
        validate(normalise(config, "m", 0), gpu_count=0, is_complete=complete)
    except InvalidArgument as error:
        return error.message
    return ""


def test_a_complete_padding_is_valid() -> None:
    assert padding_error(VALID_PADDING) == ""
    assert padding_error({}) == ""


@pytest.mark.parametrize(
    ("padding", "text"),
    [
        ("{", "must be a JSON object, but cannot be parsed: Expecting property name"),
        ([1], "must be a JSON object of objects"),
        ({"IMAGE": 3}, "must be a JSON object of objects"),
        ({"NONE": {}}, "names neither an input of the model"),
        ({"NONE": {"like": "IMAGE"}}, "has 'like', but the model has no output of this name"),
        ({"IMAGE": {"pad": 1}}, "has the unknown key 'pad' (allowed: 'value', 'buckets'"),
        ({"FIXED": {}}, ": entry 'FIXED' names an input without a variable dimension (-1)"),
        ({"TEXT": {}}, "names an input of strings, which cannot be padded"),
        ({"FLAT": {}}, "names an input with 'allow_ragged_batch', which cannot be combined"),
        ({"IMAGE": {"value": 256}}, "integer 'value' from 0 to 255 (TYPE_UINT8), found 256"),
        ({"IMAGE": {"value": 0.5}}, "integer 'value' from 0 to 255 (TYPE_UINT8), found 0.5"),
        ({"IMAGE": {"buckets": 7}}, "must have 'buckets' that are a list of shapes, found 7"),
        ({"IMAGE": {"buckets": [[3, 4]]}},
         "the bucket [3, 4], which is not a shape of 3 dimensions"),
        ({"IMAGE": {"buckets": [[3, 4, -1]]}},
         "bucket [3, 4, -1], which is not a shape of 3 dimensions"),
        ({"IMAGE": {"buckets": [[1, 4, 4]]}}, "does not match the input's dims [3, -1, -1]"),
        ({"IMAGE": {"buckets": [[3, 1 << 40, 1 << 40]]}},
         "which exceeds the 268435456 elements that a row may have"),
        ("[" * 100_000, "is nested too deeply"),
        ('{"IMAGE": {}, "IMAGE": {"value": 1}}', "duplicate key 'IMAGE' in an object"),
        ({"RATES": {"value": 10**400}}, "'value' from -65504 to 65504, or infinity, for "),
        ({"RATES": {"value": 1e10}}, "TYPE_FP16, found 10000000000.0"),
        ({"IMAGE": {"max_waste": 2}}, "must have a 'max_waste' from 0 to 1, found 2"),
        ({"IMAGE": {"lengths": ""}}, "must have a 'lengths' that names an input, found ''"),
        ({"IMAGE": {"mask": "TEXT"}},
         "creates the input 'TEXT' ('mask'), whose name another input has"),
        ({"IMAGE": {"mask": "A", "lengths": "A"}}, "creates the input 'A' ('mask')"),
        ({"FEATURES": {"like": "IMAGE"}}, "must have a 'like' that names a padded input"),
        (VALID_PADDING | {"ROWS": {"like": "IMAGE"}},
         "has 1 variable dimensions, but its 'like' input has 2"),
        (VALID_PADDING | {"ROWS": {"like": "IMAGE", "value": 1}}, "has keys besides 'like'"),
    ],
)  # fmt: skip
def test_a_mistake_in_padding_is_reported(padding: Any, text: str) -> None:
    message = padding_error(padding)
    assert text in message
    assert "parameters[\"padding\"]: parameter 'padding' for m" in message


def test_padding_requires_a_batch_dimension() -> None:
    assert "requires a max_batch_size of at least 1" in padding_error(
        VALID_PADDING, max_batch_size=0
    )


def test_before_completion_only_the_syntax_is_checked() -> None:
    assert padding_error({"NONE": {}}, complete=False) == ""
    assert padding_error([1], complete=False)
