"""The v2 protocol's JSON and binary tensors: accepted and refused requests, and exact values."""

import asyncio
import contextlib
import gc
import gzip
import json
import random
import re
import struct
import weakref
import zlib
from time import process_time
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.errors import Internal, InvalidArgument, ShmserveError, Unsupported
from shmserve.gateway.compression import (
    Inflater,
    check_encoding,
    compress_pieces,
    preferred_encoding,
)
from shmserve.gateway.grpc.wire.request import decode_request
from shmserve.gateway.http.body import _parse_header, header_size
from shmserve.gateway.http.json import parser, tensors
from shmserve.gateway.http.json.codec import JsonResponseTemplate, parse_request
from shmserve.gateway.http.json.parser import JsonFault, loads, loads_large
from shmserve.gateway.inference.body_arrival import MallocTrim
from shmserve.gateway.inference.infer_request import InferOutput, InferRequest, RegionRange
from shmserve.gateway.inference.prepare import check_capacity, raw_request
from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.tensors.arrays import NUMPY_DTYPES, decode_bytes
from shmserve.ipc.tensors.datatypes import element_count
from shmserve.ipc.tensors.descriptors import TensorRef
from shmserve.ipc.tensors.schemas import Inferred
from shmserve.ipc.tensors.signature import Signature
from shmserve.proto.grpc_service_pb2 import ModelInferRequest
from tests.rigs.gateway_rig import identity_config
from tests.support.waiting import run_and_count_turns

NUMERIC = [name for name in NUMPY_DTYPES if name not in ("BYTES", "FP16", "BOOL")]
LIMIT = 1 << 20


def one_input_request(**members: Any) -> dict[str, Any]:
    tensor = {"name": "A", "datatype": "INT32", "shape": [2], "data": [1, 2], **members}
    return {"inputs": [{key: value for key, value in tensor.items() if value is not None}]}


def parse(header: Any, binary_size: int = 0) -> InferRequest:
    """Return the request of a JSON header that is followed by this number of bytes."""
    return parse_request(header, binary_size, "m", LIMIT)


def parse_parameters(**parameters: Any) -> InferRequest:
    return parse(one_input_request() | {"parameters": parameters})


def parse_output(**parameters: Any) -> InferRequest:
    """Return a request whose output Y has these parameters."""
    return parse(one_input_request() | {"outputs": [{"name": "Y", "parameters": parameters}]})


# --- parsing ---------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [b"NaN", b"[Infinity, -Infinity, Inf, -Inf]", b'["Inf", NaN]'])
def test_numbers_that_are_not_finite_are_accepted(text: bytes) -> None:
    standard_text = text.replace(b"Inf,", b"Infinity,").replace(b"Inf]", b"Infinity]")
    assert repr(loads(text)) == repr(json.loads(standard_text))


def test_a_large_text_is_parsed_without_garbage_collection() -> None:
    """The collector of cycles would look at its arrays again and again, for most of the time."""
    collections: list[Any] = []

    def look(phase: str, info: dict[str, int]) -> None:
        collections.append(info)

    gc.callbacks.append(look)
    try:
        assert len(loads(b"[" + b"[]," * 500_000 + b"[]]")) == 500_001
    finally:
        gc.callbacks.remove(look)
    assert len(collections) < 20  # in pieces: a thousand
    assert gc.isenabled()


def test_lenient_parsing_has_a_size_limit() -> None:
    """Parsing a request blocks all other requests for as long as it takes."""
    assert len(loads(b"[NaN," + b"1," * (1 << 20) + b"1]")) == (1 << 20) + 2
    with pytest.raises(JsonFault, match="failed to parse the request JSON"):
        loads(b"[NaN," + b"1," * (5 << 20) + b"1]")


@pytest.mark.parametrize("text", [b"[nul", b"[NaN, 1e400]"])
def test_an_error_keeps_no_reference_to_the_text(text: bytes) -> None:
    gc.disable()
    try:
        try:
            loads(text)
        except JsonFault as error:
            reference = weakref.ref(error)
        assert reference() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("noun", ["inputs", "outputs"])
def test_the_number_of_tensors_is_limited(noun: str) -> None:
    """A request of 60 MB has room for a million, and all others would wait for it."""
    tensor = {"name": "A", "datatype": "INT32", "shape": [1], "data": [1]}
    header = {"inputs": [tensor], noun: [tensor] * 20_000}
    with pytest.raises(InvalidArgument, match=f"at most 4096 {noun}, got 20000"):
        parse(header)
    message = ModelInferRequest()
    for _ in range(20_000):
        getattr(message, noun).add(name="A")
    with pytest.raises(InvalidArgument, match=f"at most 4096 {noun}, got 20000"):
        decode_request(message)


@pytest.mark.parametrize("dim", [2, 2**63 - 1, -2, -(2**63)])
def test_huge_shapes_are_refused(dim: int) -> None:
    """All others would wait: 100,000 dimensions are 2 MB of JSON, and half a minute's product."""
    shape = [dim] * 1000
    assert element_count(shape) == 2**64
    assert element_count([*shape, 0]) == 0
    assert element_count([2**31, 2**32]) == 2**63


def test_a_byte_order_mark_is_skipped() -> None:
    assert loads(b"\xef\xbb\xbf[1]") == [1]


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"{", b"[1,]", b"nul", b"{} {}", b'{"a":1}\0', b'"\xff"', b"1e400", b"[NaN, 1e400]"),
        *(b'["\\ud83d", NaN]', b"[NaN", b"]NaN["),
    ],
)
def test_malformed_json_is_refused(text: bytes) -> None:
    with pytest.raises(JsonFault, match=r"failed to parse the request JSON buffer: .* at [0-9]+"):
        loads(text)


@pytest.mark.parametrize(
    ("text", "offset"),
    [
        *(("", 0), ("\0", 0), ("{", 1), ("{'a':1}", 1), ('{"a" 1}', 5), ('{"a":1 "b":2}', 7)),
        *(("[1,2", 4), ("[1 2]", 3), ('{"a":1}}', 7), ("}", 0), ("[", 1), ('{"a":+1}', 5)),
        ("[" + "1," * 20_000, 40_001),
        # Where NaN is allowed, the later fault is reported.
        ('["\\ud83d\\ude00", NaN, 1.5E-3, true, {"": null}, false, "\\"", x]', 61),
    ],
)
def test_errors_contain_the_offset(text: str, offset: int) -> None:
    """In the parser's own words, which may change with it."""
    with pytest.raises(JsonFault) as caught:
        loads(text.encode())
    assert re.fullmatch(
        rf"failed to parse the request JSON buffer: .+\. at {offset}", caught.value.message
    )


@pytest.mark.parametrize(
    ("opening_bracket", "closing_bracket"), [("[", "]"), ('{"a":', "}"), ('[{"[":', "}]")]
)
def test_nesting_is_limited(opening_bracket: str, closing_bracket: str) -> None:
    levels = 50 if opening_bracket.startswith("[{") else 100
    assert loads(f"{opening_bracket * levels}1{closing_bracket * levels}".encode())
    for depth in (levels + 1, 1500, 100_000):
        with pytest.raises(InvalidArgument, match=r"maximum allowed limit \(100\)"):
            loads(f"{opening_bracket * depth}1{closing_bracket * depth}".encode())


@pytest.mark.parametrize("depth", [100, 500, 5000])
@pytest.mark.parametrize("end", ["", "x", "NaN"])
def test_brackets_in_strings_hide_no_nesting(depth: int, end: str) -> None:
    text = f'["{"]" * depth}", {"[" * depth}1{"]" * depth}{end}]'
    with pytest.raises(InvalidArgument, match=r"maximum allowed limit \(100\)"):
        loads(text.encode())


def test_brackets_in_strings_are_not_nesting() -> None:
    assert loads(orjson.dumps(["[" * 500, "]{" * 500])) == ["[" * 500, "]{" * 500]


@given(
    st.binary(max_size=200)
    | st.text('[]{},:"\\0123456789.eE-+ aNInfity', max_size=80).map(str.encode)
)
def test_arbitrary_bytes_are_parsed_or_refused(raw: bytes) -> None:
    with contextlib.suppress(InvalidArgument, JsonFault):
        loads(raw)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda children: st.lists(children) | st.dictionaries(st.text(), children),
        max_leaves=20,
    )
)
def test_arbitrary_requests_are_parsed_or_refused(header: Any) -> None:
    inputs = ({"inputs": header}, {"inputs": [header]}, one_input_request(parameters=header))
    for body in (header, *inputs):
        with contextlib.suppress(InvalidArgument, JsonFault, Unsupported):
            parse(body)


@pytest.mark.parametrize(
    ("members", "error", "text"),
    [
        ({"shape": [2**63]}, InvalidArgument,
         r"shape \[9223372036854775808\] contains one or more invalid"),
        ({"shape": [2**62, 2]}, InvalidArgument,
         r"causes total element count to exceed maximum size of 9"),
        ({"shape": [2**61]}, InvalidArgument, r"byte size overflow for input 'A': element count"),
        ({"shape": [2**60, 0, 2**60], "data": []}, None, ""),
        ({"shape": [300_000]}, InvalidArgument,
         r"JSON input 'A' has a byte_size \(1200000 bytes\)"),
        ({"shape": [-1]}, JsonFault,
         "Unable to parse 'shape': attempt to access JSON non-unsigned"),
        ({"datatype": None, "dtype": "FP32"}, JsonFault,
         "non-existing object member 'datatype'; did you misspell it as 'dtype'"),
    ],
)  # fmt: skip
def test_inputs_checked(members: dict[str, Any], error: type[Exception] | None, text: str) -> None:
    if error is None:
        assert parse(one_input_request(**members)).inputs[0].count == 0
        return
    with pytest.raises(error, match=text):
        parse(one_input_request(**members))


def test_a_misspelt_member_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        parse_request(one_input_request() | {"outputz": [], "mine": 1}, 0, "m", 4096)
    assert [record.getMessage() for record in caplog.records] == [
        "a request has the unknown field 'outputz' (did you mean 'outputs'?)"
    ]


def test_parameters_are_assigned_to_their_fields() -> None:
    own = {"a": 1, "b": "x", "c": False, "d": 0.5}
    sequence = {"sequence_id": "s", "sequence_start": True, "sequence_end": True}
    parameters = {**sequence, "priority": 2, "timeout": 9, "binary_data_output": True, **own}
    outputs = [{"name": "Y"}, {"name": "Z", "parameters": {"binary_data": True}}]
    members = {"id": "7", "parameters": parameters, "outputs": outputs}
    request = parse(one_input_request() | members)
    assert (request.id, request.correlation_id, request.flags) == ("7", "s", 3)
    assert (request.priority, request.timeout_us, request.binary) == (2, 9, True)
    assert request.parameters == own
    assert [(o.name, o.binary) for o in request.outputs] == [("Y", False), ("Z", True)]


def test_a_sequence_has_an_id_of_bounded_length() -> None:
    for value in (0, 2**64 - 1, "", "x" * 128):
        assert parse_parameters(sequence_id=value).correlation_id == value
    with pytest.raises(Unsupported, match="string correlation ID cannot be longer than 128 chara"):
        parse_parameters(sequence_id="x" * 129)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2**63 - 1, "9223372036854775807"), (-(2**63), "-9223372036854775808"),
        (2**63, "9.223372036854776e+18"), (True, "True"),
    ],
)  # fmt: skip
def test_integers_beyond_int64_become_doubles(value: int, text: str) -> None:
    assert repr(parse_parameters(x=value).parameters["x"]) == text


@pytest.mark.parametrize("key", ["triton_x", "triton_enable_empty_final_response"])
def test_reserved_parameters_are_refused(key: str) -> None:
    with pytest.raises(InvalidArgument, match="reserved for Triton usage"):
        parse_parameters(**{key: 1})


@pytest.mark.parametrize("field", ["shared_memory_offset", "shared_memory_byte_size"])
def test_a_range_without_a_region_is_checked(field: str) -> None:
    for value in ("8", -1, 1.5, None, True, 2**64):
        with pytest.raises(JsonFault, match=f"'{field}': attempt to access JSON non-unsigned"):
            parse_output(**{field: value})
    assert parse_output(**{field: 8}).outputs


def test_classification() -> None:
    for value, counts in ((2, {"Y": 2}), (0, {}), (2**32, {})):
        assert parse_output(classification=value).class_counts == counts
    for wrong_value in (-1, "2", 2.5, True, None, [1], 2**64):
        with pytest.raises(JsonFault) as caught:
            parse_output(classification=wrong_value)
        assert caught.value.message == (
            "Unable to set 'classification': "
            "attempt to access JSON non-unsigned-integer as unsigned-integer"
        )


@pytest.mark.parametrize(
    "size_text",
    ["", "1e3", "+1", " 1", "1 ", "1.0", "0x10", "abc", "\u0661", "1_0", "--1", "9" * 400],
)
def test_a_header_size_is_a_number(size_text: str) -> None:
    with pytest.raises(InvalidArgument, match="Unable to parse Inference-Header-Content-Length, "):
        header_size(size_text, 100)


@pytest.mark.parametrize("size_text", ["-1", "101", "2147483647"])
def test_a_header_size_lies_in_the_body(size_text: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"in range \(0, 100\), got: {size_text}"):
        header_size(size_text, 100)
    assert [header_size(text, 100) for text in ("0", "100", "007")] == [0, 100, 7]


# --- JSON tensors -----------------------------------------------------------------------------


def draw_values(datatype: str) -> st.SearchStrategy[list[Any]]:
    if datatype == "BYTES":
        return st.lists(st.text(), max_size=20)
    if datatype == "BOOL":
        return st.lists(st.booleans(), max_size=40)
    dtype = NUMPY_DTYPES[datatype]
    if datatype == "FP32":
        return st.lists(st.floats(width=32), max_size=40)
    if datatype == "FP64":
        return st.lists(st.floats(), max_size=40)
    info = np.iinfo(dtype)
    return st.lists(st.integers(int(info.min), int(info.max)), max_size=40)


@given(st.data(), st.sampled_from([*NUMERIC, "BOOL", "BYTES"]))
def test_json_data_round_trips(data: st.DataObject, datatype: str) -> None:
    values = data.draw(draw_values(datatype))
    raw = tensors.decode(values, datatype, len(values), "A")
    if datatype == "BYTES":
        assert [item.decode() for item in decode_bytes(raw, (len(values),), "A", "m")] == values
    else:
        assert np.array_equal(
            np.frombuffer(raw, NUMPY_DTYPES[datatype]),
            np.array(values, NUMPY_DTYPES[datatype]),
            equal_nan=datatype in ("FP32", "FP64"),
        )
    text = tensors.encode(raw, datatype, (len(values),), "A")
    assert repr(json.loads(text)) == repr(values)
    assert repr(loads(text)) == repr(values)


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=10),
    st.sampled_from(["INT8", "INT16", "INT32"]),
)
def test_wide_integers_wrap(values: list[int], datatype: str) -> None:
    raw = tensors.decode(values, datatype, len(values), "A")
    assert np.array_equal(
        np.frombuffer(raw, NUMPY_DTYPES[datatype]),
        np.array(values, np.int64).astype(NUMPY_DTYPES[datatype]),
    )


@pytest.mark.parametrize(
    ("values", "datatype", "text"),
    [
        ([1, True], "INT32", "non-signed-integer as signed-integer (input 'A' has true)"),
        ([2**63], "INT8", f"non-signed-integer as signed-integer (input 'A' has {2**63})"),
        ([300, 2**64], "UINT8", f"as unsigned-integer (input 'A' has {2**64})"),
        ([1, True], "FP32", "non-number as double (input 'A' has true)"),
        ([{}], "INT32", "non-signed-integer as signed-integer (input 'A' has an object)"),
        (["x" * 99], "FP32", f"(input 'A' has \"{'x' * 59}...)"),
        (["a", 1], "BYTES", "JSON bytes array: attempt to access JSON non-string as string "),
        ([["a"], 2.5], "BYTES", "non-string as string (input 'A' has 2.5)"),
    ],
)
def test_values_of_the_wrong_kind_are_refused(values: list[Any], datatype: str, text: str) -> None:
    with pytest.raises(JsonFault, match=re.escape(text)):
        tensors.decode(values, datatype, len(values), "A")


def flatten(values: list[Any]) -> list[Any]:
    return [value for part in tensors.split_values(values) for value in part]


@pytest.mark.parametrize(
    "nested", [[1, 2, 3, 4], [[1, 2], [3, 4]], [1, [2, [[3]], []], 4], [[[[1, 2, 3, 4]]]]]
)
def test_lists_may_be_nested_or_flat(nested: list[Any]) -> None:
    assert flatten(nested) == [1, 2, 3, 4]
    with pytest.raises(JsonFault, match="Unable to parse 'data': Shape does not match true shape"):
        tensors.decode(nested, "INT32", 3, "A")
    with pytest.raises(JsonFault, match="Failed to parse 'data' field: shape does not match"):
        tensors.decode(nested, "INT32", 5, "A")


@pytest.mark.parametrize("kind", ["FP16", "BF16"])
def test_fp16_and_bf16_have_no_json_representation(kind: str) -> None:
    with pytest.raises(InvalidArgument, match=f"receiving {kind} data via JSON is not supported"):
        tensors.decode([1.0], kind, 1, "A")
    with pytest.raises(InvalidArgument, match=f"sending {kind} data via JSON is not supported"):
        tensors.encode(b"\0\0", kind, (1,), "A")


def test_single_precision_is_written_as_the_double_it_equals() -> None:
    values = np.array([0.1, 123456789, np.nan, -np.inf, np.inf, 3], np.float32)
    text = tensors.encode(values.tobytes(), "FP32", (6,), "A")
    assert text == b"[0.10000000149011612,123456792.0,NaN,-Infinity,Infinity,3.0]"


def test_bytes_that_are_not_utf8_have_no_json_representation() -> None:
    with pytest.raises(InvalidArgument, match="output 'A' holds bytes that are not UTF-8"):
        tensors.encode(b"\x01\0\0\0\xff", "BYTES", (1,), "A")
    with pytest.raises(Internal, match="output 'A' ends within a string"):
        tensors.encode(b"\x05\0\0\0\xff", "BYTES", (1,), "A")


@pytest.mark.parametrize("datatype", [*NUMERIC, "BOOL"])
def test_long_tensors_are_encoded_in_parts(datatype: str) -> None:
    values = (np.arange(100_000) % 2).astype(NUMPY_DTYPES[datatype])
    raw = values.tobytes()
    parts = list(tensors.encode_parts(memoryview(raw), datatype, values.shape, "A"))
    assert len(parts) > 3
    assert b"".join(parts) == tensors.encode(raw, datatype, values.shape, "A")


# --- large JSON -------------------------------------------------------------------------------

numbers = st.recursive(
    st.integers(-9, 9) | st.floats(allow_nan=False, allow_infinity=False, width=16),
    lambda children: st.lists(children, max_size=4),
    max_leaves=30,
)


@pytest.fixture
def tiny_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parser, "_SLICE_BYTES", 3)
    monkeypatch.setattr(parser, "_MIN_CUT_BYTES", 1)


def decode_data(data: Any) -> list[Any]:
    parts = data.parts() if isinstance(data, parser.NumberArray) else [data]
    return [value for part in parts for value in flatten(part)]


@pytest.mark.usefixtures("tiny_slices")
@settings(max_examples=300)
@given(st.lists(numbers, min_size=1, max_size=8), st.sampled_from([None, 1, 3]))
def test_slices_have_the_same_values(values: list[Any], indent: int | None) -> None:
    tensor = {"name": "data", "data": values, "datatype": '"data":[', "shape": []}
    body = json.dumps({"id": "x", "inputs": [tensor, {"data": values}]}, indent=indent).encode()
    header = loads_large(body)
    assert isinstance(header["inputs"][1]["data"], parser.NumberArray)
    for sliced in header["inputs"]:
        assert decode_data(sliced["data"]) == flatten(values)
        sliced["data"] = values
    assert header == json.loads(body)


@pytest.mark.usefixtures("tiny_slices")
@settings(max_examples=500)
@given(st.lists(numbers, min_size=1, max_size=6), st.data())
def test_malformed_slices_are_refused(values: list[Any], data: st.DataObject) -> None:
    text = bytearray(json.dumps({"inputs": [{"data": values}]}).encode())
    offset = data.draw(st.integers(0, len(text) - 1))
    text[offset : offset + data.draw(st.integers(0, 2))] = data.draw(
        st.sampled_from([b"", b",", b"]", b"[", b"}", b" ", b"1", b'"'])
    )
    body = bytes(text)
    try:
        expected = decode_data(loads(body)["inputs"][0]["data"])
    except (ShmserveError, LookupError, TypeError):
        expected = None
    try:
        raw_data = decode_data(loads_large(body)["inputs"][0]["data"])
    except (ShmserveError, LookupError, TypeError):
        raw_data = None
    assert raw_data == expected


@pytest.mark.usefixtures("tiny_slices")
def test_only_data_of_inputs_is_cut() -> None:
    with pytest.raises(JsonFault, match="is only allowed in an element of 'inputs'"):
        loads_large(b'{"parameters": {"data": [1, 2, 3, 4]}, "inputs": []}')
    strings = b'{"inputs": [{"data": ["a", "b,", "c"]}], "x": "\\"data\\": [1, 2, 3, 4]"}'
    assert loads_large(strings) == json.loads(strings)


@pytest.mark.parametrize(
    "text",
    [
        b'{"inputs": [' + b'"data":[,' * 1_500_000,
        b'{"inputs": {"data"' + b" " * (40 << 20) + b": []}}",
        b'{"inputs": [' + b'"",' * 6_000_000 + b"[]," * 200 + b"[]]}",
        b'{"inputs": [' + b'"",' * 6_000_000,
        b'{"inputs": [' + b'{"data":[]},' * 2_000_000 + b"[]]}",
    ],
    ids=["short arrays", "blanks", "strings", "strings, cut off", "objects"],
)
def test_cutting_takes_linear_time(text: bytes) -> None:
    """The time is compared with that of the standard library's parser."""
    start_s = process_time()
    json.loads(b"[" + b'"",' * (len(text) // 3) + b"1]")
    parser = process_time() - start_s
    start_s = process_time()
    with contextlib.suppress(ShmserveError):
        loads_large(text)
    assert process_time() - start_s < 8 * parser


def test_the_number_of_members_is_limited() -> None:
    """Objects cost ten times what numbers do, and a body has room for 20 million."""
    brackets = json.dumps({"id": "{:" * 300_000}).encode()
    assert loads(brackets) == json.loads(brackets)
    for text in (
        b"[" + b"{}," * 300_000 + b"{}]",
        orjson.dumps(dict.fromkeys(_numbered_names(300_000))),
    ):
        with pytest.raises(InvalidArgument, match="more than 262144 objects or members"):
            loads(text)


def _numbered_names(count: int) -> list[str]:
    return [f"{number}" for number in range(count)]


def test_dimensions_and_parameters_are_limited() -> None:
    """Dimensions and parameters are sent to schedulers and workers, and quoted in errors."""
    tensor = {"name": "A", "datatype": "INT32", "shape": [1] * 1025, "data": [1]}
    with pytest.raises(InvalidArgument, match="'A' may have at most 1024 dimensions, got 1025"):
        parse({"inputs": [tensor]})
    parameters = dict.fromkeys(_numbered_names(4097), 1)
    with pytest.raises(InvalidArgument, match="at most 4096 parameters, got 4097"):
        parse({"inputs": [], "parameters": parameters})


@pytest.mark.parametrize(
    ("datatype", "values"),
    [("BYTES", ["a"] * 300_000), ("BYTES", [["b"]] * 300_000), ("BOOL", [True, False] * 150_000)],
)
def test_the_event_loop_runs_while_a_long_list_is_decoded(datatype: str, values: list[Any]) -> None:
    tensor = {"name": "A", "datatype": datatype, "shape": [300_000], "data": values}
    header = json.dumps({"inputs": [tensor]}).encode()
    parsed: Any = _parse_header(header, 0, SimpleNamespace(name="m"), 4 * LIMIT)  # type: ignore[arg-type]
    wire, turn_count = run_and_count_turns(parsed)
    assert wire.inputs[0].data == tensors.decode(values, datatype, 300_000, "A")
    assert turn_count > 5


def test_long_lists_have_the_errors_of_short_lists() -> None:
    def refusal(values: list[Any]) -> str:
        parts = tensors.split_values(values)
        with pytest.raises(ShmserveError) as by_parts:
            list(tensors.decode_parts(parts, "BYTES", 50_000, "A"))
        with pytest.raises(ShmserveError) as at_once:
            tensors.decode(values, "BYTES", 50_000, "A")
        assert by_parts.value.message == at_once.value.message
        return by_parts.value.message

    assert "shape does not match true shape" in refusal(["a"] * 49_999)
    assert "shape does not match true shape" in refusal(["a"] * 50_001)
    assert "non-string as string" in refusal([["a"] * 40_000, [1] * 10_000])


def test_long_strings_are_encoded_in_parts() -> None:
    texts = [f"{number}\N{SNOWMAN}" for number in range(50_000)]
    raw = b"".join(struct.pack("<I", len(word.encode())) + word.encode() for word in texts)
    parts = list(tensors.encode_parts(memoryview(raw), "BYTES", (50_000,), "A"))
    assert len(parts) > 3
    assert json.loads(b"".join(parts)) == texts
    for shape, broken, error in (
        ((50_001,), raw, "has 50000 strings for the shape [50001]"),
        ((50_000,), raw[:-1], "ends within a string"),
        ((50_000,), raw[:-10] + b"1", "ends within a string"),
    ):
        with pytest.raises(Internal, match=re.escape(f"output 'A' {error}")):
            list(tensors.encode_parts(broken, "BYTES", shape, "A"))


# --- binary ---------------------------------------------------------------------------------


def test_binary_sizes_must_add_up() -> None:
    def header(*sizes: Any) -> dict[str, Any]:
        tensors = [{"name": f"I{i}", "datatype": "INT8", "shape": [4]} for i in range(len(sizes))]
        parameters = [{"parameters": {"binary_data_size": size}} for size in sizes]
        return {"inputs": [a | b for a, b in zip(tensors, parameters, strict=True)]}

    assert [tensor.binary_size for tensor in parse(header(4, 0, 4), 8).inputs] == [4, 0, 4]
    for binary_size, error in (
        (5, "unexpected size for input 'I1', expecting 3 additional bytes for model 'm'"),
        (9, "unexpected additional input data for model 'm'"),
    ):
        with pytest.raises(InvalidArgument, match=error):
            parse(header(4, 4), binary_size)
    for size in (-1, 2**64, "4", 4.0, True, None):
        with pytest.raises(JsonFault, match="Unable to parse 'binary_data_size'"):
            parse(header(size), 4)


def signature(datatype: str, dims: list[int], batch: int = 0) -> Signature:
    return Signature(ModelSpec.of(identity_config("m", datatype, dims, batch)), "1")


def test_a_raw_request_takes_its_shape_from_its_size() -> None:
    request, body = raw_request(signature("FP32", [-1, 2], batch=4), b"\0" * 24)
    assert (request.inputs[0].name, request.inputs[0].shape, len(body)) == ("IN", (1, 3, 2), 24)
    assert request.binary
    request, body = raw_request(signature("BYTES", [1]), b"abc")
    assert (request.inputs[0].shape, body) == ((1,), b"\x03\0\0\0abc")


def test_the_response_has_its_keys_in_order() -> None:
    wire = InferRequest("", [], [])
    text = JsonResponseTemplate(wire, "m", "1", Inferred((), {"p": 1})).encode_json("7", ())
    assert list(json.loads(text)) == ["id", "model_name", "model_version", "parameters", "outputs"]
    empty_response = JsonResponseTemplate(wire, "m", "1", Inferred(())).encode_json("", ())
    assert list(json.loads(empty_response)) == ["model_name", "model_version", "outputs"]


def test_a_response_contains_the_requested_outputs() -> None:
    """Binary outputs have their size, others their array, those in regions neither."""
    datas = {"A": b"\1\2", "B": b"\3\4", "C": b"\5\6"}
    answer = Inferred(tuple(TensorRef(name, "INT8", (2,), data) for name, data in datas.items()))
    region = RegionRange("r", 0, 2)
    wire = InferRequest("", [], [InferOutput("A", True), InferOutput("C", False, region)])
    template = JsonResponseTemplate(wire, "m", "1", answer)
    assert [(o.name, o.binary) for o in template.outputs] == [("A", True), ("B", False)]
    filled_response = template.fill(
        "", list(datas.values())
    )  # C's bytes are in the answer, and are not sent
    assert filled_response is not None and filled_response[1] == [b"\1\2"]
    assert template.fill("", [b"\1", b"\3\4", b""]) is None  # the size contradicts the shape
    # The number of values differs from that of the outputs.
    assert template.fill("", [b"\1\2", b"\3\4"]) is None
    assert template.fill("", [b"\1\2", b"\3\4", b"", b""]) is None
    entries = json.loads(template.encode_json("", (b"[1,2]",)))["outputs"]
    assert [list(entry)[3:] for entry in entries] == [["parameters"], ["data"], []]
    assert entries[0]["parameters"] == {"binary_data_size": 2} and entries[1]["data"] == [1, 2]


def test_pieces_of_large_outputs_are_not_copied() -> None:
    """Copies of hundreds of megabytes would block the gateway's other clients."""
    outputs = tuple(TensorRef(name, "INT8", (2,), bytes(2)) for name in ("A%b", "B", "C"))
    request = InferRequest("", [], [InferOutput("B", True)])
    template = JsonResponseTemplate(request, "m", "1", Inferred(outputs))
    values = [[b"[1", b",2]"], [b"[3,4]"]]
    pieces = template.encode_pieces("7%b\0", values)
    assert all(any(piece is part for piece in pieces) for value in values for part in value)
    joined_values = [b"".join(value) for value in values]
    assert b"".join(pieces) == template.encode_json("7%b\0", joined_values)


def test_a_large_output_is_encoded_in_small_pieces() -> None:
    values = np.arange(1 << 20, dtype=np.int32)
    fields = values.tobytes(), "INT32", values.shape, "A"
    pieces = asyncio.run(tensors.encode_in_pieces(*fields, MallocTrim()))
    assert json.loads(b"".join(pieces)) == values.tolist()
    assert max(map(len, pieces)) < 1 << 20


def test_an_output_must_fit_its_region() -> None:
    fixed = signature("INT32", [16], batch=8)
    check_capacity(fixed, "OUT", 128, 2)
    with pytest.raises(Internal, match=r"output 'OUT' \(127 bytes\) should be at least 128 bytes"):
        check_capacity(fixed, "OUT", 127, 2)
    check_capacity(signature("FP32", [-1]), "OUT", 0, 0)
    check_capacity(signature("BYTES", [4]), "OUT", 0, 0)


# --- compression ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "expected_encoding"),
    [
        *(("gzip", "gzip"), ("deflate", "deflate"), ("gzip, deflate", "gzip"),
            ("deflate,gzip", "deflate"), ("gzip;q=0.5;x=1, deflate;q=0.2", "gzip")),
        *(("identity, gzip", "identity"), ("gzip;q=0.5, deflate;q=0.8", "deflate"),
            ("gzip;q=0", "identity")),
        *(("*", "identity"), ("br", "identity"), ("gzip;q=abc", "identity"), ("GZIP", "gzip"),
            ("X-Gzip", "gzip"), ("", "identity")),
        *(("identity;q=0.5, gzip;q=0.1", "identity"), ("gzip;level=9", "identity"),
            (";q=1,,", "identity")),
    ],
)  # fmt: skip
def test_the_encoding_with_the_highest_weight_is_used(header: str, expected_encoding: str) -> None:
    assert preferred_encoding(header) == expected_encoding


def inflate(raw: bytes, limit: int = LIMIT, step: int = 7) -> bytes:
    inflater = Inflater(limit)
    pieces = [p for at in range(0, len(raw), step) for p in inflater.feed(raw[at : at + step])]
    inflater.finish()
    return b"".join(pieces)


@given(st.binary(max_size=3000), st.integers(1, 4000), st.sampled_from(["gzip", "deflate"]))
def test_compressed_bodies_round_trip(raw: bytes, step: int, encoding: str) -> None:
    compressed_body = b"".join(compress_pieces([raw[:100], memoryview(raw)[100:]], encoding))
    assert inflate(compressed_body, step=step) == raw
    assert (gzip if encoding == "gzip" else zlib).decompress(compressed_body) == raw


def test_compressed_bodies_may_have_several_members() -> None:
    assert inflate(gzip.compress(b"a") + gzip.compress(b"b")) == b"ab"


@given(st.binary(max_size=100))
def test_arbitrary_bytes_are_inflated_or_refused(raw: bytes) -> None:
    for body in (raw, gzip.compress(b"x" * 50)[: len(raw)], gzip.compress(b"x") + raw):
        with contextlib.suppress(InvalidArgument):
            inflate(body)


def test_compressed_bodies_without_output_are_refused() -> None:
    """Reading stops after a limited number of empty members or blocks."""
    empty_streams = gzip.compress(b"") * 100
    with pytest.raises(InvalidArgument, match=r"it has 18 gzip members in 2000 bytes"):
        list(Inflater(LIMIT).feed(empty_streams))
    blocks = zlib.compress(b"")[:2] + b"\0\0\0\xff\xff" * (LIMIT // 2)
    with pytest.raises(InvalidArgument, match="compressed bytes, too many for the limit of"):
        list(Inflater(LIMIT).feed(blocks))
    many_members = b"".join(gzip.compress(random.Random(n).randbytes(2000)) for n in range(100))
    assert sum(map(len, Inflater(LIMIT).feed(many_members))) == 200_000


def test_a_decompression_bomb_stops_at_the_limit() -> None:
    decompression_bomb = zlib.compress(bytes(200 * 1024 * 1024), 9)
    pieces = Inflater(LIMIT).feed(decompression_bomb)
    assert sum(len(next(pieces)) for _ in range(4)) == LIMIT
    with pytest.raises(InvalidArgument, match=f"exceeds the maximum allowed value of {LIMIT} "):
        next(pieces)


@pytest.mark.parametrize(
    ("raw", "text"),
    [(gzip.compress(b"x" * 99)[:-6], "truncated"), (b"nope", "it is not gzip or zlib data")],
)
def test_uncompressed_data_is_refused(raw: bytes, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        inflate(raw)


def test_encodings_by_name() -> None:
    names = ("x-gzip", "GZip", "deflate", "identity")
    assert [check_encoding(name) for name in names] == [True, True, True, False]


def test_the_wire_form_is_little_endian() -> None:
    assert tensors.decode([1, -2], "INT16", 2, "A") == struct.pack("<hh", 1, -2)
    assert element_count((2, 3)) == 6
