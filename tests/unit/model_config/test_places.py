"""The positions in errors of a configuration, and errors that unreadable fields suppress."""

import json
import re
from pathlib import Path

import pytest
from google.protobuf import json_format, text_format
from hypothesis import given
from hypothesis import strategies as st

from shmserve.errors import InvalidArgument
from shmserve.model_config import ModelConfig, Source, normalise, read_json, read_pbtxt, validate
from shmserve.model_config.source import Key, key_text
from tests.rigs.marked_configs import PYTHON, TENSORS, positions, problems
from tests.unit.model_config.test_parse import FRAGMENTS, configs

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted(path for f in ("tests", "bench", "examples") for path in (ROOT / f).rglob("*.pbtxt"))


def text_at(text: str, position: str) -> str:
    line, column = map(int, position.split(":"))
    lines = text.split("\n")
    assert 1 <= line <= len(lines)
    remaining = lines[line - 1][column - 1 :]
    assert column >= 1
    assert remaining
    return remaining


def of_map(key: Key) -> bool:
    """Return whether a key is within a map entry, which text format and JSON write differently."""
    return "key" in key or "value" in key


def check_positions(text: str, source: Source, quote: str = "") -> None:
    """Check that each position is that of the key's name, or that of an element."""
    for key, position in source.positions.items():
        remaining, name = text_at(text, position), key[-1]
        if isinstance(name, str) and name[0] != "[":
            assert remaining.startswith(f"{quote}{name}{quote}") or of_map(key)
        elif isinstance(name, int) and not quote:
            assert remaining.startswith(str(key[-2])) or remaining[0] not in " \t,:]}#"
        else:
            assert remaining[0] not in " \t,:]}#"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_every_key_of_a_real_file_is_found_in_it(path: Path, newline: str) -> None:
    text = path.read_text().replace("\n", newline)
    config, source = read_pbtxt(text)
    check_positions(text, source)
    one_line_text = " ".join(line.partition("#")[0] for line in path.read_text().splitlines())
    reparsed, in_one_line = read_pbtxt(one_line_text)
    assert reparsed == config
    assert in_one_line.positions.keys() == source.positions.keys()
    check_positions(one_line_text, in_one_line)


@given(configs, st.booleans(), st.booleans())
def test_every_key_of_a_text_is_found(config: ModelConfig, is_flat: bool, short: bool) -> None:
    text = text_format.MessageToString(
        config, as_one_line=is_flat, use_short_repeated_primitives=short
    )
    check_positions(text, read_pbtxt(text)[1])


@given(configs, st.sampled_from([None, 1, "\t"]), st.booleans())
def test_every_key_of_json_is_found_in_it(
    config: ModelConfig, indent: int | str | None, ascii_only: bool
) -> None:
    json_dict = json_format.MessageToDict(config, preserving_proto_field_name=True)
    text = json.dumps(json_dict, indent=indent, ensure_ascii=ascii_only)
    check_positions(text, read_json(text)[1], '"')


@given(
    st.lists(st.sampled_from([*FRAGMENTS, *TENSORS.split("\n"), "\n", "\r\n"]), max_size=6),
    st.integers(0, 1),
    st.booleans(),
)
def test_each_error_has_a_text_position(fragments: list[str], gpus: int, complete: bool) -> None:
    text = " ".join(fragments)
    try:
        config, source = read_pbtxt(text, "f")
        validate(normalise(config, "m", gpus), gpu_count=gpus, is_complete=complete, source=source)
    except InvalidArgument as error:
        for line in error.message.splitlines():
            match = re.match(r"f:((\d+:\d+): |(?! \d))", line)
            assert match, line
            if match[2]:
                text_at(text + ".", match[2])  # also for a position at the very end of the text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("input { name: 'a' dims: 3 @dims: 0 }", "input[0].dims[1]"),
        ("input { name: 'a' dims: [3, # 0,\n @0] }", "input[0].dims[1]"),
        ("input: { name: 'a' }\ninput: < name: 'b' @dims: 0; >", "input[1].dims[0]"),
        ("input [ { name: 'a' }, { name: 'b', dims: [@-7] } ]", "input[1].dims[0]"),
        ("input { name: 'a' }\r\n\tinput [ { name: 'b' @dims: 0 } ]", "input[1].dims[0]"),
        ("input { name: 'é\u20ac\U0001f600' @dims: 0 }", "input[0].dims[0]"),
    ],
)  # fmt: skip
def test_errors_point_at_the_element_in_any_notation(text: str, expected: str) -> None:
    (position,) = positions(PYTHON + text)
    assert problems(PYTHON + text, complete=False).startswith(f"{position}{expected}: model input ")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"input": [{"name": "a", "dims": [1, @0]}]}', "input[0].dims[1]"),
        ('{"output": null, "input": [{"name": "a", "format": null},\n @{"dims": [1]}]}',
         "input[1].name"),
        ('{"input": [{"name": "\\"[{,\\\\", "dims": ["-1", @"0"]}]}', "input[0].dims[1]"),
        ('{"dynamicBatching": {"preferredBatchSize":\n[1,@2]}, "maxBatchSize": "1"}',
         "dynamic_batching.preferred_batch_size[1]"),
    ],
)  # fmt: skip
def test_errors_point_into_json(text: str, expected: str) -> None:
    (position,) = positions(text)
    config, source = read_json(text.replace("@", ""), "f")
    config.backend = "python"
    with pytest.raises(InvalidArgument) as caught:
        validate(normalise(config, "m", 0), gpu_count=0, is_complete=False, source=source)
    (line,) = caught.value.message.splitlines()
    assert line.startswith(f"{position}{expected}: ")


def test_errors_of_a_generated_configuration_have_keys_but_no_lines() -> None:
    config = normalise(ModelConfig(backend="python", max_batch_size=-1), "m", 0)
    with pytest.raises(InvalidArgument, match=r"\Amax_batch_size: 'max_batch_size' must be non-"):
        validate(config, gpu_count=0, is_complete=True)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (("output", 0, "name"), "output[0].name"),
        (("a", 3, "b", '["x y"]', 0), 'a[3].b["x y"][0]'),
        (("no\nline",), "no\\nline"),
    ],
)
def test_a_key_is_shown_as_it_is_written(key: Key, expected: str) -> None:
    assert key_text(key) == expected


@pytest.mark.parametrize(
    ("text", "unread", "other_errors"),
    [
        # An unreadable field is not reported as missing.
        ("input { name: 'a' data_type: TYPE_Q dims: 1 }", ["input[0].data_type"], []),
        ("input { name: 'a' data_type: TYPE_FP32 dims: x }", ["input[0].dims[0]"], []),
        ("input { name: 3 data_type: TYPE_FP32 dims: 1 }", ["input[0].name"], []),
        ("input: 5", ["input[0]"], []),
        ("input { name: 'a' data_type: TYPE_FP32 dims [1] }", ["input[0].dims"], []),
        # A misspelt field is not reported as missing.
        ("input { name: 'a' data_typ: TYPE_FP32 dims: 1 }", ["input[0].data_typ"], []),
        ("input { nam: 'a' data_type: TYPE_FP32 dims: 1 }", ["input[0].nam"], []),
        ("max_batchsize: 8 dynamic_batching { preferred_batch_size: 4 }", ["max_batchsize"], []),
        # The readable fields are still checked.
        (
            "input { name: 'a' data_type: TYPE_Q dims: [x, 1, 0] format: FORMAT_NCHW }",
            ["input[0].data_type", "input[0].dims[0]"],
            ["input[0].dims[2]"],
        ),
        (
            "input [ 5, { name: 'b' } ] max_batch_size: -1",
            ["input[0]"],
            ["max_batch_size", "input[1].data_type", "input[1].dims"],
        ),
        ("max_batch_size: x dynamic_batching { preferred_batch_size: [4, 0] }", ["max_batch_size"],
         ["dynamic_batching.preferred_batch_size[1]"]),
        # A rule about two fields is checked only if both are readable.
        (
            "input { name: 'a' data_type: TYPE_FP32 dims: [0, 4] reshape { shape: 4 } }",
            [],
            ["input[0].dims[0]"],
        ),
        (
            "input { name: 'a' data_type: TYPE_FP32 dims: [x, 4] reshape { shape: 4 } }",
            ["input[0].dims[0]"],
            [],
        ),
        ("instance_group { kind: KIND_Q gpus: 0 }", ["instance_group[0].kind"], []),
        (
            "output [ { name: 3 data_type: TYPE_FP32 dims: 1 }, { name: 'a' data_type: TYPE_FP32 "
            "dims: 1 }, { name: 'a' data_type: TYPE_FP32 dims: 2 } ]",
            ["output[0].name"],
            ["output[2].name"],
        ),
        ("input { name: 3 } batch_input { data_type: TYPE_FP32 source_input: 'a' target_name: 'n'}",
         ["input[0].name"], []),
        (
            "sequence_batching { control_input { name: 'c' control { kind: Q } control { "
            "int32_false_true: [0, 1] } } }",
            ["sequence_batching.control_input[0].control[0].kind"],
            [],
        ),
        (
            "dynamic_batching { priority_levels: 1 default_priority_level: x priority_queue_policy "
            "{ key: x } priority_queue_policy { key: 2 } }",
            ["dynamic_batching.default_priority_level",
             "dynamic_batching.priority_queue_policy.key"],
            ["dynamic_batching.priority_queue_policy[2]"],
        ),
        # One of two mutually exclusive fields is unreadable.
        (
            "dynamic_batching { preferred_batch_size: 1 } sequence_batching { oldest {} }",
            ["sequence_batching"],
            ["dynamic_batching.preferred_batch_size[0]"],
        ),
    ],
)  # fmt: skip
def test_consequences_are_unreported(text: str, unread: list[str], other_errors: list[str]) -> None:
    lines = problems(PYTHON + text).splitlines()
    assert [line.split(": ")[1] for line in lines] == unread + other_errors


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("bakend: 'python'", ["bakend"]),
        ("backend: 5", ["backend"]),
        ("bakend: 'python' platform: 'x'", ["bakend"]),
        (
            "platform: ensemble ensemble_scheduling { step { model_name: 'x' "
            "input_map { key: 'a' value: 'I' } output_map { key: 'b' value: 'O' } } }" + TENSORS,
            ["platform"],
        ),
        (
            "platform: 'ensemble' ensemble_scheduling { step { model_name: 'x' input_mapp {} "
            "output_map { key: 'b' value: 3 } } }" + TENSORS,
            ["ensemble_scheduling.step[0].input_mapp",
             "ensemble_scheduling.step[0].output_map.value"],
        ),
    ],
)  # fmt: skip
def test_consequent_errors_of_a_model_kind_are_not_reported(text: str, keys: list[str]) -> None:
    lines = problems(text).splitlines()
    assert [line.split(": ")[1] for line in lines] == keys
