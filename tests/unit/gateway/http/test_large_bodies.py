"""Large bodies: a separate process parses them, and returns the prompts as bytes."""

import asyncio
import importlib
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from shmserve.errors import InvalidArgument
from shmserve.gateway.http.json.large_bodies import Packed, parse_large, prompt_size_error
from shmserve.gateway.http.json.parser import LARGE_BYTES, JsonFault

MAX_PROMPT_LENGTHS = {"m": 100, "vast": 1 << 24}
LONG_PROMPT = "a" * (LARGE_BYTES + 1)


@pytest.mark.parametrize(
    ("body", "expected_error"),
    [
        ({"model": "m", "prompt": LONG_PROMPT}, "prompt: this model's maximum context"),
        ({"model": "m", "prompt": ["a", LONG_PROMPT]}, "prompt: this model's maximum context"),
        ({"model": "m", "prompt": [5] * 101}, "101 tokens exceed the limit of 100"),
        ({"model": "m", "prompt": [[5], [5] * 101]}, "101 tokens exceed the limit of 100"),
        ({"model": "m", "messages": [{"role": "user", "content": LONG_PROMPT}]},
         "messages: this model's maximum context length is 100 tokens"),
        ({"model": "m", "input": LONG_PROMPT}, "input: this model's maximum context"),
        ({"model": "m", "input": [{"role": "user", "content": LONG_PROMPT}]},
         "input: this model's maximum context"),
        ({"text_input": LONG_PROMPT}, "text_input: this model's maximum context"),
        ({"input_ids": [5] * 101}, "input_ids: this model's maximum context"),
        ({"model": "m", "tokens": [5] * 101}, "tokens: this model's maximum context"),
        ({"model": "m", "prompt": [5] * 100}, ""),
        ({"model": "m", "prompt": LONG_PROMPT, "truncate_prompt_tokens": 5}, ""),
        ({"text_input": LONG_PROMPT, "parameters": {"truncate_prompt_tokens": 5}}, ""),
        ({"model": "m", "prompt": "a", "stop": LONG_PROMPT * 2},
         "stop: 2097156 bytes exceed the limit of 2097152"),
        ({"prompt": "a", "truncate_prompt_tokens": 5, "x": [LONG_PROMPT, LONG_PROMPT]},
         "x: 2097161 bytes exceed"),
        ({"text_input": "a", "parameters": {"x": LONG_PROMPT, "y": LONG_PROMPT + "b"}},
         "y: 1048580 bytes exceed"),
        ({"model": "m", "messages": [], "documents": [LONG_PROMPT]},
         "documents: this model's maximum context"),
        ({"model": "nobody", "x": LONG_PROMPT * 2}, ""),
        ({"model": "vast", "prompt": LONG_PROMPT}, ""),
        ({"model": "nobody", "prompt": LONG_PROMPT}, ""),
        ({"model": "m", "prompt": None}, ""),
        ({"model": "m", "prompt": [True, 5]}, ""),
        ({"model": ["m"], "prompt": "a"}, ""),
        ([LONG_PROMPT], ""),
    ],
)  # fmt: skip
def test_a_prompt_that_is_too_long_is_found(body: Any, expected_error: str) -> None:
    error = prompt_size_error(body, MAX_PROMPT_LENGTHS, "m")
    assert expected_error in error if expected_error else not error


def test_a_body_without_a_model_is_for_any_of_them() -> None:
    assert "101 tokens exceed the limit of 100" in prompt_size_error(
        {"tokens": [5] * 101}, {"m": 100}, ""
    )
    assert not prompt_size_error({"tokens": [5] * 101}, MAX_PROMPT_LENGTHS, "")
    assert not prompt_size_error({"tokens": [5] * 101}, {}, "")


def parse(body: Any, *packed_fields: str, model: str = "m") -> Any:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return asyncio.run(parse_large([raw[:9], raw[9:]], MAX_PROMPT_LENGTHS, packed_fields, model))


def test_the_process_ignores_modules_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    assert parse({"n": 1}) == {"n": 1}


def test_prompts_are_returned_as_bytes_in_pieces() -> None:
    text = "é" * (LARGE_BYTES // 4)
    fields = {"truncate_prompt_tokens": 5, "stop": ["a"], "min_p": float("nan")}
    body = parse({"prompt": text, "parameters": {"prompt": text}, **fields}, "prompt")
    for prompt in (body["prompt"], body["parameters"]["prompt"]):
        assert (prompt.kind, prompt.datatype, prompt.count) == ("text", "BYTES", 1)
        assert max(map(len, prompt.pieces)) <= 1 << 16
        assert b"".join(prompt.pieces) == (LARGE_BYTES // 2).to_bytes(4, "little") + text.encode()
        assert prompt.byte_size == LARGE_BYTES // 2 + 4 and prompt.value() == text
    assert body["truncate_prompt_tokens"] == 5 and body["stop"] == ["a"]
    assert body["min_p"] != body["min_p"]  # NaN


@pytest.mark.parametrize(
    "prompt",
    [
        [5] * 50, ["a", "bé", [1, 2], [3], True, None], [[1, 2], [3]], [[1], []], [], {"a": 1},
        None, [True], "", ["a"] * 1024, [{"a": "b" * 70_000}, "c"],
    ],
)  # fmt: skip
def test_prompts_keep_their_values(prompt: Any) -> None:
    prompts = parse({"prompt": prompt, "x": "x"}, "prompt")["prompt"]
    values = prompts if isinstance(prompts, list) else [prompts]
    unpacked_values = [
        prompt_value.value() if isinstance(prompt_value, Packed) else prompt_value
        for prompt_value in values
    ]
    assert (unpacked_values if isinstance(prompts, list) else unpacked_values[0]) == prompt


def test_only_named_fields_are_packed_as_prompts() -> None:
    body = {"prompt": "a", "text_input": "b", "messages": [{"role": "c"}]}
    assert parse(body) == body
    assert isinstance(parse(body, "messages")["messages"], Packed)


@pytest.mark.parametrize(
    ("messages", "fault_index"),
    [
        ([{"role": "user", "content": "é"}], None),
        ([{"role": "user"}, {"role": 3}], 1),
        ([{"role": "user"}, {}, 5], 1),
        ([None, "a"], 0),
    ],
)
def test_messages_are_json_first_without_a_role(messages: Any, fault_index: int) -> None:
    packed_messages = parse({"messages": messages}, "messages")["messages"]
    assert (packed_messages.kind, packed_messages.fault_index) == ("messages", fault_index)
    assert json.loads(b"".join(packed_messages.pieces)) == packed_messages.value() == messages


def test_other_large_fields_stay_json() -> None:
    biases, items = {str(token): math.nan for token in range(9000)}, [{"": 0}] * 20_000
    fields = {"prompt": ["a"] * 1000, "logit_bias": biases, "x": items, "stop": ["b"] * 9, "n": 2}
    body = parse({**fields, "user": "é" * 40_000}, "prompt")
    assert (body["stop"], body["n"]) == (["b"] * 9, 2)
    assert (body["logit_bias"].is_json, body["prompt"][0].is_json) == (True, False)
    assert json.loads(b"".join(body["x"].pieces)) == items
    assert repr(body["logit_bias"]).startswith('{"0":NaN,"1":NaN')
    assert (body["user"].is_json, body["user"].value()) == (True, "é" * 40_000)
    nested = parse({"text_input": "a", "parameters": {"x": items, "n": 2}})["parameters"]
    assert (nested["x"].value(), nested["x"].count, nested["n"]) == (items, 20_000, 2)


@pytest.mark.parametrize(
    "prompts", [["a", None] * 20_000, {"a": ["b"] * 20_000}, ["a"] * 20_000, [[1], []] * 20_000]
)
def test_wrong_prompts_stay_json_if_they_are_large(prompts: Any) -> None:
    packed = parse({"text_input": prompts}, "text_input")["text_input"]
    assert packed.is_json and packed.value() == prompts


@pytest.mark.parametrize("body", [[1] * 1_000_000, "a" * 1_000_000, 5, None, True])
def test_a_body_that_is_not_an_object_keeps_only_its_type(body: Any) -> None:
    assert parse(body) == type(body)()


def test_errors_show_the_beginning_of_a_large_field() -> None:
    body = parse(
        {"model": "vast", "prompt": [5] * 300_000, "text_input": "'" * 300_000},
        *("prompt", "text_input"),
    )
    assert repr(body["prompt"]).startswith("[5, 5, ")
    assert repr(body["text_input"]).startswith("\"''")
    assert max(len(repr(field)) for field in body.values()) <= 1 << 16


def test_tokens_are_the_bytes_of_a_tensor() -> None:
    packed = parse({"prompt": [0, 2**31 - 1]}, "prompt")["prompt"]
    assert (packed.kind, packed.datatype, packed.count) == ("tokens", "INT32", 2)
    assert packed.value() == [0, 2**31 - 1]


def test_the_errors_of_the_process_are_raised() -> None:
    with pytest.raises(InvalidArgument, match="1000000 tokens exceed the limit of 100"):
        parse({"prompt": [123] * 1_000_000}, "prompt")
    with pytest.raises(InvalidArgument, match=r"^prompt: 1025 prompts exceed the limit of 1024"):
        parse({"prompt": ["a"] * 1025}, "prompt")
    with pytest.raises(InvalidArgument, match=r"^input: 2049 strings exceed the limit of 2048"):
        parse({"input": ["a"] * 2049}, "input")
    with pytest.raises(InvalidArgument, match="at most 4096 fields, got 4097"):
        parse({"parameters": {f"x{number}": 1 for number in range(4097)}})
    with pytest.raises(InvalidArgument, match=r"the fields besides .* have .* \(maximum: 2097152"):
        parse({"x" * 3_000_000: 1})
    with pytest.raises(JsonFault, match="failed to parse the request JSON buffer"):
        parse(b"{" * 9)
    with pytest.raises(InvalidArgument, match="'a'"):
        parse(b'{"a": 1, "a": 2}')
    with pytest.raises(InvalidArgument, match="nesting depth"):
        parse(b"[" * 200 + b"]" * 200)


def test_the_process_imports_modules_with_a_low_priority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "import os\nNICE = os.nice(0)\ndef convert(body): return {'nice': NICE}\n"
    (tmp_path / "priority.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    convert = importlib.import_module("priority").convert
    nice = min(19, os.nice(0) + 10)
    assert asyncio.run(parse_large([b"{}"], {}, [], convert=convert)) == {"nice": nice}
