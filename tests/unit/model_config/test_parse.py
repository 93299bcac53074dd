"""Configurations are parsed, printed and completed as by Triton and protobuf."""

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format, message_factory, text_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shmserve.errors import InvalidArgument
from shmserve.ipc.model_spec import ModelSpec
from shmserve.model_config import (
    ModelConfig,
    ModelDefaults,
    detect_backend,
    from_json,
    ignored_fields,
    merge_autocomplete,
    normalise,
    to_dict,
    validate,
)
from shmserve.model_config.message_builder import is_map, is_repeated
from shmserve.proto import load, model_config_pb2
from shmserve.supervisor.models.model_version import describe
from tests.rigs.marked_configs import parse_pbtxt

DATA = Path(__file__).with_name("data")
RECORDED: dict[str, dict[str, Any]] = json.loads(DATA.joinpath("triton_configs.json").read_text())
COMPLETED_CONFIG = {
    "max_batch_size": 4,
    "input": [
        {"name": "IN", "data_type": "TYPE_FP32", "dims": [-1, 3]},
        {"name": "MASK", "data_type": "TYPE_STRING", "dims": [1], "optional": True},
    ],
    "output": [{"name": "OUT", "data_type": "TYPE_BF16", "dims": [-1]}],
    "dynamic_batching": {},
}


def refusal(text: str) -> list[str]:
    """Return the lines of the error that `parse_pbtxt` raises for a text."""
    with pytest.raises(InvalidArgument) as caught:
        parse_pbtxt(text, "m/config.pbtxt")
    return caught.value.message.splitlines()


# --- comparison with Triton --------------------------------------------------------------------


def convert_numbers(value: Any) -> Any:
    """Convert the int64 values that Triton prints as strings to numbers."""
    if isinstance(value, dict):
        return {
            key: [int(item) for item in member]
            if key in ("dims", "dim")
            else int(member)
            if key == "device_id"
            else convert_numbers(member)
            for key, member in value.items()
        }
    if isinstance(value, list):
        return [convert_numbers(item) for item in value]
    return value


@pytest.mark.parametrize("name", RECORDED)
def test_printed_configurations_equal_tritons(name: str) -> None:
    recorded_case = RECORDED[name]
    config = detect_backend(parse_pbtxt(recorded_case["pbtxt"]), name, ["model.py"])
    config = normalise(config, name, 0)
    validate(config, gpu_count=0, is_complete=False)
    if name in ("auto", "partial"):
        # The size that the model had set when the answer was recorded.
        max_batch_size = 8 if name == "partial" else 4
        completed = {**COMPLETED_CONFIG, "max_batch_size": max_batch_size}
        config = normalise(merge_autocomplete(config, completed), name, 0)
    validate(config, gpu_count=0, is_complete=True)
    if "config" not in recorded_case:
        return
    expected = convert_numbers(recorded_case["config"])
    # One field is newer than the recorded server, the other is not supported.
    if name == "ensemble":
        expected["ensemble_scheduling"]["max_inflight_requests"] = 0
        del expected["model_transaction_policy"]
    assert to_dict(config) == expected
    metadata = recorded_case["metadata"]
    assert {**describe(ModelSpec.of(to_dict(config))), "versions": metadata["versions"]} == metadata


def test_the_schema_equals_tritons() -> None:
    triton_module = load(
        DATA / "triton_model_config.binpb"
    )  # the descriptor in the tritonclient package

    def shape(message: Any) -> Any:
        fields = {
            f.name: (f.number, f.type, is_repeated(f), (f.message_type or f.enum_type or f).name)
            for f in message.fields
        }
        groups = {g.name: [f.name for f in g.fields] for g in message.oneofs}
        return (
            message.name,
            fields,
            {name: members for name, members in groups.items() if not name.startswith("_")},
            [shape(nested) for nested in message.nested_types],
            [(e.name, [(v.name, v.number) for v in e.values]) for e in message.enum_types],
        )

    def shapes(file: Any) -> list[Any]:
        return [shape(message) for message in file.message_types_by_name.values()]

    assert shapes(model_config_pb2.DESCRIPTOR) == shapes(triton_module["DESCRIPTOR"])
    config = parse_pbtxt(RECORDED["rich"]["pbtxt"])
    triton_config = triton_module["ModelConfig"].FromString(config.SerializeToString())
    assert ModelConfig.FromString(triton_config.SerializeToString()) == config


def test_our_protobuf_classes_coexist_with_tritons() -> None:
    pytest.importorskip("grpc")
    triton_pb2 = pytest.importorskip("tritonclient.grpc.model_config_pb2")
    config = parse_pbtxt(RECORDED["rich"]["pbtxt"])
    assert triton_pb2.ModelConfig.FromString(config.SerializeToString()).name == config.name


# --- text --------------------------------------------------------------------------------------


def messages(descriptor: Descriptor) -> st.SearchStrategy[dict[str, Any]]:
    """Draw a message of the schema as keyword arguments of its class."""

    def scalar(field: FieldDescriptor) -> st.SearchStrategy[Any]:
        kind = field.cpp_type
        if kind == FieldDescriptor.CPPTYPE_STRING:
            return st.text(st.characters(codec="utf-8"), max_size=8)
        if kind == FieldDescriptor.CPPTYPE_BOOL:
            return st.booleans()
        if kind == FieldDescriptor.CPPTYPE_ENUM:
            assert field.enum_type is not None
            return st.sampled_from([value.number for value in field.enum_type.values])
        if kind == FieldDescriptor.CPPTYPE_FLOAT:
            return st.floats(width=32, allow_nan=False)
        if kind == FieldDescriptor.CPPTYPE_DOUBLE:
            return st.floats(allow_nan=False)
        bits = 32 if "32" in str(kind_name(kind)) else 64
        lowest = 0 if kind_name(kind).startswith("U") else -(2 ** (bits - 1))
        return st.integers(lowest, lowest + 2**bits - 1)

    def value(field: FieldDescriptor) -> st.SearchStrategy[Any]:
        if is_map(field):
            assert field.message_type is not None
            e = field.message_type.fields_by_name
            return st.dictionaries(single_value(e["key"]), single_value(e["value"]), max_size=2)
        element = single_value(field)
        return st.lists(element, max_size=2) if is_repeated(field) else element

    def single_value(field: FieldDescriptor) -> st.SearchStrategy[Any]:
        if field.message_type is None:
            return scalar(field)
        cls: Any = message_factory.GetMessageClass(field.message_type)
        return messages(field.message_type).map(lambda field_values: cls(**field_values))

    fields: list[FieldDescriptor] = list(descriptor.fields)
    chosen_fields = (
        st.lists(st.sampled_from(fields), max_size=4, unique_by=lambda f: f.name)
        if fields
        else st.just([])
    )

    def build(chosen_fields: list[FieldDescriptor]) -> st.SearchStrategy[dict[str, Any]]:
        groups: dict[str, FieldDescriptor] = {}
        for field in chosen_fields:
            group = field.containing_oneof.name if field.containing_oneof else field.name
            groups.setdefault(group, field)
        return st.fixed_dictionaries({field.name: value(field) for field in groups.values()})

    return chosen_fields.flatmap(build)


def kind_name(kind: int) -> str:
    for name in ("INT32", "INT64", "UINT32", "UINT64"):
        if kind == getattr(FieldDescriptor, f"CPPTYPE_{name}"):
            return name
    raise AssertionError(kind)


configs = messages(ModelConfig.DESCRIPTOR).map(lambda members: ModelConfig(**members))  # type: ignore[arg-type]


@given(configs, st.booleans(), st.booleans(), st.booleans())
def test_all_protobuf_is_read(config: ModelConfig, one_line: bool, short: bool, utf8: bool) -> None:
    text = text_format.MessageToString(
        config, as_one_line=one_line, use_short_repeated_primitives=short, as_utf8=utf8
    )
    assert parse_pbtxt(text) == config


FRAGMENTS = [
    'name: "m"', "max_batch_size: 8", "max_batch_size: 0x1F", "max_batch_size: 017", "foo: 1",
    "input { dims: [1, -1] }", "input [ { dims: 1 dims: 2 }, <name: 'a' \"b\">, ]", "input: []",
    "input: [ { optional: t }, { optional: 2 } ]", "output < dims: 3; >", "input { dims [1] }",
    "max_batch_size: 1.0", "max_batch_size: 99999999999", "name: m",
    "dynamic_batching { max_queue_delay_microseconds: -1 }", "sequence_batching {}",
    "parameters { key: 'a' value { string_value: '\\x41\\101\\n' } }", "# comment\n", "}", "{",
    "input { data_type: TYPE_FP32 }", "input { data_type: 11 }", "input { data_type: 'TYPE_FP32' }",
    "model_metrics { metric_control { histogram_options { buckets: [1, .5, 2e1, 3.f, -inf] } } }",
    "name: 'a\\'", "name: 'é'", "name: '\\xff'", "metric_tags { key: 'a' }",
    "sequence_batching { direct { minimum_slot_utilization: 1e400 } }", "name: 'a''b'",
    ":", ",", "@",
    "model_transaction_policy { decoupled: 1 }", "model_transaction_policy: { decoupled: True }",
    "max_batch_size: 1a", "max_batch_size: 08", "ensemble_scheduling: {};", "name:", "[a.b]: 1",
]  # fmt: skip


@settings(max_examples=400)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=3))
def test_a_text_is_valid_if_protobuf_accepts_it(fragments: list[str]) -> None:
    text = " ".join(fragments)
    try:
        expected = text_format.Parse(text, ModelConfig())
    except (text_format.ParseError, UnicodeDecodeError, ValueError):
        expected = None
    try:
        parsed = parse_pbtxt(text)
    except InvalidArgument:
        parsed = None
    assert parsed == expected


@given(st.text(max_size=60) | st.text("{}[]<>:\"' \n\\#ax01.-,", max_size=60))
def test_garbage_is_refused_with_a_position(text: str) -> None:
    try:
        parse_pbtxt(text, "f")
    except InvalidArgument as error:
        for line in error.message.splitlines():
            assert line.startswith("f:"), line
            row, column, _ = line[2:].split(":", 2)
            assert int(row) >= 1
            assert int(column) >= 1


def test_every_mistake_is_named_with_its_position() -> None:
    assert refusal("""name: "m"
max_batchsize: 8
input [
  { name: "A", data_typ: TYPE_FP32 dims: [ 4.5, -1, "x" ] },
  { name: "B"  data_type: TYPE_FLOAT dims: [ 4 ] }
]
max_batch_size: 1  max_batch_size: 2
dynamic_batching { priority_levels: -1 preserve_ordering: maybe }
sequence_batching { }
instance_group: 5
""") == [
        'm/config.pbtxt:2:1: max_batchsize: no such field; did you mean "max_batch_size"?',
        'm/config.pbtxt:4:16: input[0].data_typ: no such field; did you mean "data_type"?',
        "m/config.pbtxt:4:44: input[0].dims[0]: expected an integer, found 4.5",
        'm/config.pbtxt:4:53: input[0].dims[2]: expected an integer, found "x"',
        "m/config.pbtxt:5:27: input[1].data_type: unknown value TYPE_FLOAT; "
        'did you mean "TYPE_FP32"?',
        "m/config.pbtxt:7:20: max_batch_size: is set more than once",
        "m/config.pbtxt:8:37: dynamic_batching.priority_levels: -1 is out of range "
        "[0, 18446744073709551615]",
        "m/config.pbtxt:8:59: dynamic_batching.preserve_ordering: expected true or false, "
        "found maybe",
        'm/config.pbtxt:9:1: sequence_batching: cannot be set together with "dynamic_batching"',
        "m/config.pbtxt:10:17: instance_group[0]: expected { ... }, found 5",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("input {", '1:8: expected "}" (for "{" at 1:7) or a field name, found the end of'),
        ("name: '\\q'", "1:7: invalid escape '\\q' in the string"),
        ('name: "m', "1:7: the string is not closed on its line"),
        ("name 3", '1:6: expected ":" or "{" after "name", found "3"'),
        ("name: }", '1:7: expected a value, found "}"'),
        ("max_batch_size: 1x", '1:17: "1x" is not a number'),
        ("input { dims [1] }", '1:9: input[0].dims: expected ":" between the name and its value'),
        ("max_batch_size: [1]", "1:1: max_batch_size: takes one value, found a list"),
        ("input { dims: [1 2] }", '1:18: expected "," or "]" in the list, found "2"'),
        ("\n  é: 1", "2:3: unexpected character '\\xe9'"),
        ("a{" * 100_000, "1:128: nested deeper than 64"),
        ("max_batch_size: " + "9" * 100_000, "1:17: number longer than"),
        ('input { data_type: TYPE_Q }', "1:20: input[0].data_type: unknown value TYPE_Q; expected"),
    ],
)  # fmt: skip
def test_syntax_errors_name_what_was_expected(text: str, expected: str) -> None:
    assert refusal(text)[0].startswith(f"m/config.pbtxt:{expected}")


# --- JSON --------------------------------------------------------------------------------------


@given(configs, st.booleans(), st.booleans())
def test_every_protobuf_json_is_read(config: ModelConfig, snake: bool, as_text: bool) -> None:
    json_dict = json_format.MessageToDict(config, preserving_proto_field_name=snake)
    assert from_json(json.dumps(json_dict) if as_text else json_dict) == config


@given(configs)
def test_printed_configurations_parse_to_the_same(config: ModelConfig) -> None:
    printed_config = to_dict(config)
    new = from_json(json.dumps(printed_config))
    assert to_dict(new) == printed_config
    new.ClearField("max_batch_size")
    old = ModelConfig()
    old.CopyFrom(config)
    old.ClearField("max_batch_size")
    for parsed_config in (new, old):
        if parsed_config.dynamic_batching.max_queue_delay_microseconds == 0:
            parsed_config.dynamic_batching.ClearField("max_queue_delay_microseconds")
    if not old.HasField("dynamic_batching"):
        new.ClearField("dynamic_batching")
    assert new.SerializeToString(deterministic=True) == old.SerializeToString(deterministic=True)


def parse_int_strings(value: Any) -> Any:
    """Convert the int64 strings in protobuf's JSON to numbers; no name consists of digits."""
    if isinstance(value, dict):
        return {key: parse_int_strings(member) for key, member in value.items()}
    if isinstance(value, list):
        return [parse_int_strings(item) for item in value]
    if isinstance(value, str) and value.lstrip("-").isdigit() and value.isascii():
        return int(value)
    return value


@given(configs)
def test_printed_configurations_equal_protobufs(config: ModelConfig) -> None:
    # Sets the presence bit, so that the field is printed.
    config.max_batch_size = config.max_batch_size
    if config.HasField("dynamic_batching"):
        delay = config.dynamic_batching.max_queue_delay_microseconds
        config.dynamic_batching.max_queue_delay_microseconds = delay
    protobuf_dict = json_format.MessageToDict(
        config, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    assert parse_int_strings(to_dict(config)) == parse_int_strings(protobuf_dict)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("{", "config: not valid JSON: "),
        ("[]", "config: expected a JSON object"),
        ("[" * 100_000, "config: not valid JSON: nested too deeply"),
        ('{"a":' * 900 + "1" + "}" * 900, "config:1:321: nested deeper than 64"),
        ('{"max_batch_size": ' + "1" * 5000 + "}", "config: not valid JSON: "),
        ('{"max_batch_size": 1.5}', "config:1:20: max_batch_size: expected an integer, found 1.5"),
        ('{"max_batch_size": "1_0"}', "config:1:20: max_batch_size: expected an integer, found "),
        ('{"max_batch_size":true}', "config:1:19: max_batch_size: expected an integer, found true"),
        (
            '{"maxBatchSze": 1}',
            'config:1:2: maxBatchSze: no such field; did you mean "max_batch_size"',
        ),
        ('{"max_batch_size": 02}', "config: not valid JSON: Expecting ',' delimiter: line"),
        ('{"a": 1,,}', "config: not valid JSON: Expecting property name enclosed in double quotes"),
        ('{"input": [,]}', "config: not valid JSON: Expecting value: line 1 column 12"),
        ('{backend: python}', "config: not valid JSON: Expecting property name enclosed"),
        ("{name: 'a', name: 'b'}", "config: not valid JSON: duplicate key 'name' in an object"),
        ("{name: 'a',\n 'x:y': 1,}", "config:2:2: x:y: no such field"),
        ('{"input": [[]]}', "config:1:12: unexpected value: a list in a list"),
        ('{"input": [{"data_type": "FP64"}]}', "config:1:26: input[0].data_type: unknown value"),
        ('{"name": 3}', "config:1:10: name: expected a string, found 3"),
        ('{"name": "\\ud800"}', "config:1:10: name: the string is not valid UTF-8"),
        ('{"parameters": []}', "config:1:2: parameters: expected { ... }, found a list"),
        (
            '{"max_batch_size": 1, "maxBatchSize": 2}',
            "config:1:23: max_batch_size: is set more than once",
        ),
        ('{"parameters": {"a": 1}}', "config:1:22: parameters.value: expected { ... }, found 1"),
    ],
)  # fmt: skip
def test_json_that_does_not_fit_is_refused(value: str, expected: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        from_json(value)
    assert caught.value.message.startswith(expected)


def test_json_takes_the_spellings_of_proto3() -> None:
    config = from_json(
        {
            "maxBatchSize": "8",
            "input": [{"name": "I", "dataType": 11, "dims": ["-1", 2.0], "reshape": None}],
            "parameters": {"P": {"stringValue": "v"}},
            "sequence_batching": {"direct": {"minimum_slot_utilization": "0.5"}},
            "dynamic_batching": None,
        }
    )
    assert config.max_batch_size == 8 and list(config.input[0].dims) == [-1, 2]
    assert config.input[0].data_type == model_config_pb2.TYPE_FP32
    assert config.parameters["P"].string_value == "v"
    assert config.sequence_batching.direct.minimum_slot_utilization == 0.5


@pytest.mark.parametrize(
    ("lenient", "strict"),
    [
        ("{max_batch_size: 2, $x: null}", '{"max_batch_size": 2, "$x": null}'),
        ("{'backend': 'a\\'b\"c: [d,]'}", '{"backend": "a\'b\\"c: [d,]"}'),
        ('{"input":[{"dims":[1 , ],},], }', '{"input": [{"dims": [1]}]}'),
        ('{"input": {"dims": 1}}', '{"input": [{"dims": [1]}]}'),
        ('{"input": [null, {"dims": [null, 1]}]}', '{"input": [{"dims": [1]}]}'),
        ('{"input": [{"data_type": "type_fp32"}]}', '{"input": [{"data_type": 11}]}'),
        ('{"input": [{"data_type": "11"}]}', '{"input": [{"data_type": "TYPE_FP32"}]}'),
        ('{"input": [{"optional": "true"}]}', '{"input": [{"optional": true}]}'),
        ('{parameters: {a: {stringValue: "v",}}}', '{"parameters": {"a": {"string_value": "v"}}}'),
    ],
)  # fmt: skip
def test_json_is_read_as_leniently_as_by_protobuf(lenient: str, strict: str) -> None:
    """Triton accepts each of these texts in the configuration of a load request."""
    assert from_json(lenient) == from_json(strict)


def test_special_floats_are_printed_as_proto3_json_does() -> None:
    config = parse_pbtxt(
        "model_metrics { metric_control { histogram_options { buckets: [inf, -inf, nan, 0.1] } } }"
        "sequence_batching { direct { minimum_slot_utilization: 3.4028235e38 } }"
    )
    printed_config = to_dict(config)
    control = printed_config["model_metrics"]["metric_control"][0]
    assert control["histogram_options"]["buckets"] == ["Infinity", "-Infinity", "NaN", 0.1]
    assert printed_config["sequence_batching"]["direct"]["minimum_slot_utilization"] == 3.4028235e38
    buckets = from_json(printed_config).model_metrics.metric_control[0].histogram_options.buckets
    assert math.isnan(buckets[2])


# --- robustness against any configuration ------------------------------------------------------


@given(configs, st.integers(0, 2))
def test_normalising_twice_changes_nothing(config: ModelConfig, gpus: int) -> None:
    defaults = ModelDefaults(dynamic_batching=True, max_batch_size=4, max_queue_delay_us=7)
    bytes_before = config.SerializeToString(deterministic=True)
    once = normalise(config, "m", gpus, defaults)
    assert config.SerializeToString(deterministic=True) == bytes_before
    twice = normalise(once, "m", gpus, defaults)
    assert once.SerializeToString(deterministic=True) == twice.SerializeToString(deterministic=True)
    assert once.input == config.input
    if config.HasField("max_batch_size"):
        assert once.max_batch_size == config.max_batch_size
    if config.HasField("version_policy"):
        assert once.version_policy == config.version_policy


@given(configs)
def test_a_complete_configuration_stays_unchanged(config: ModelConfig) -> None:
    assume(len({io.name for io in config.input}) == len(config.input))
    assume(len({io.name for io in config.output}) == len(config.output))
    assert to_dict(merge_autocomplete(config, to_dict(config))) == to_dict(config)


@given(configs, st.integers(0, 2), st.booleans())
def test_configurations_are_taken_or_not(config: ModelConfig, gpus: int, complete: bool) -> None:
    with contextlib.suppress(InvalidArgument):
        validate(normalise(config, "m", gpus), gpu_count=gpus, is_complete=complete)
    ignored_fields(config)
