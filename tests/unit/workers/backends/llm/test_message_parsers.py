"""Messages in the format of each family: in one piece, in random chunks, and malformed."""

import json
import random
from typing import Any

import orjson
import pytest

from shmserve.ipc import engine_settings
from shmserve.workers.backends.llm.message_parsers import MessageFormat, MessageParser
from shmserve.workers.backends.llm.tool_formats import (
    FAMILIES,
    REASONING,
    TOOL_PARSERS,
    detect_parsers,
)

TOOLS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "places": {"$ref": "#/$defs/Places"},
            "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "code": {"type": "string", "pattern": "a+"},
        },
        "$defs": {"Places": {"type": "array", "items": {"type": "string"}}},
    },
    "now": {"type": "object"},
}
PARIS: dict[str, Any] = {"city": 'Pa"r\nis é😀\\', "days": 3}
XML = (
    '<function=weather>\n<parameter=city>\nPa"r\nis é😀\\\n</parameter>\n'
    "<parameter=days>\n3\n</parameter>\n</function>"
)
JSON = json.dumps({"name": "weather", "arguments": PARIS}, ensure_ascii=False)
LLAMA = json.dumps({"type": "function", "name": "weather", "parameters": PARIS})
NOW: tuple[str, dict[str, Any]] = ("now", {})
WEATHER = ("weather", PARIS)
# Name of the case -> the family, the text of the model, the expected content and the expected
# calls.
VALID_CALLS: dict[str, tuple[str, str, str, list[tuple[str, dict[str, Any]]]]] = {
    "hermes": ("hermes", f"<tool_call>\n{JSON}\n</tool_call>", "", [WEATHER]),
    "hermes with text": ("hermes", f"Look:\n<tool_call>{JSON}</tool_call>\n<tool_call>\n"
        '{"name": "now"}\n</tool_call>\nDone. ', *("Look:\n\nDone. ", [WEATHER, NOW])),
    "hermes in another order": ("hermes",
        '<tool_call>{"id": "x", "parameters": {"a": [1, {"b": "}"}]}, "name": "f"}</tool_call>',
        *("", [("f", {"a": [1, {"b": "}"}]})])),
    "hermes with a text of arguments": ("hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        *("", [("f", {"a": 1})])),
    "hermes with half a character": ("hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>',
        *("", [("f", {"a": "\ud800"})])),
    "pythonic with half a character": ("pythonic",
        "[weather(city='\\U0000d800', places=['\\ud83d'])]",
        *("", [("weather", {"city": "\ud800", "places": ["\ud83d"]})])),
    "hermes with null": ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>',
        *("", [NOW])),
    "hermes with other members": ("hermes",
        '<tool_call>{"name": "now", "why": {}, "arguments": {}, "x": 1}</tool_call>', *("", [NOW])),
    "hermes without text": ("hermes", '<tool_call>{"name": "now", "arguments": ""}</tool_call>',
        *("", [NOW])),
    "hermes without a brace": ("hermes", f"<tool_call>{JSON[:-1]}\n</tool_call>", *("", [WEATHER])),
    "hermes without an end": ("hermes", f"<tool_call>{JSON}", "", [WEATHER]),
    "half a tag": ("hermes", "a <tool_call", "a <tool_call", []),
    "white space": ("hermes", "  a\n\n", "  a\n\n", []),
    "nothing": ("hermes", " ", " ", []),
    "qwen": ("qwen3_coder", f"<tool_call>\n{XML}\n</tool_call>", "", [WEATHER]),
    "qwen with two functions": ("qwen3_coder",
        f"Hm <tool_call>\n{XML}\n<function=now>\n</function>\n</tool_call>\n",
        *("Hm ", [WEATHER, NOW])),
    "qwen twice": ("qwen3_coder", f"Hm <tool_call>\n{XML}\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call>", *("Hm ", [WEATHER, NOW])),
    "qwen without a wrapper": ("qwen3_coder", f"{XML}\n", "", [WEATHER]),
    "qwen without a function's end": ("qwen3_coder", "<tool_call>\n<function=weather>\n"
        "<parameter=days>\n3\n</parameter>\n</tool_call>\nDone",
        *("\nDone", [("weather", {"days": 3})])),
    "qwen without a parameter's end": ("qwen3_coder", "<function=weather>\n<parameter=city>\nBonn"
        "\n<parameter=days>\n3\n<parameter=code>a\n</parameter>\n</function>",
        *("", [("weather", {"city": "Bonn", "days": 3, "code": "a"})])),
    "qwen without a tag": ("qwen3_coder", f"{XML}\n</tool_call>\n<tool_call>{XML}</tool_call>",
        *("", [WEATHER, WEATHER])),
    "qwen's types": ("qwen3_coder",
        "<tool_call>\n<function=weather>\n<parameter=places>\n['a', \"b\"]\n</parameter>\n"
        '<parameter=unit>\nnull\n</parameter>\n<parameter=code>\n"aa"\n</parameter>\n'
        "<parameter=days>\nx\n</parameter>\n<parameter=city>\n\n</parameter>\n"
        "</function>\n</tool_call>",
        *("", [("weather", {"places": ["a", "b"], "unit": None, "code": '"aa"', "days": "x",
        "city": ""})])),
    "llama": ("llama3_json", LLAMA, "", [WEATHER]),
    "llama behind a tag": ("llama3_json", f"<|python_tag|>{LLAMA}", "", [WEATHER]),
    "llama twice": ("llama3_json", f'Now: {LLAMA}; {{"name": "now", "parameters": {{}}}}',
        *("Now: ", [WEATHER, NOW])),
    "llama after a brace": ("llama3_json", f"x {{ {LLAMA}", "x { ", [WEATHER]),
    "llama says JSON": ("llama3_json", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}',
        []),
    "llama says nested JSON": ("llama3_json", f'{{"a": {LLAMA}}}', f'{{"a": {LLAMA}}}', []),
    "llama runs code": ("llama3_json", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    "pythonic": ("pythonic", "[weather(city='Pa\"r\\nis é😀\\\\', days=3), now()]",
        *("", [WEATHER, NOW])),
    "pythonic with tags": (
        "pythonic",
        '<|python_start|>[weather(city="\\u00e9\\ud83d\\ude00", places=["a)", None], days = -1)]'
        "<|python_end|>",
        *("", [("weather", {"city": "é😀", "places": ["a)", None], "days": -1})]),
    ),
    "pythonic with triple quotes": ("pythonic",
        "[weather(city='''a\n'b' \\'''c\\n''', code=\"\"\"\"\"\", unit=\"\")]",
        *("", [("weather", {"city": "a\n'b' '''c\n", "code": "", "unit": ""})])),
    "a list": ("pythonic", "[1, now] a", "[1, now] a", []),
    "mistral": ("mistral", f'[TOOL_CALLS][{JSON}, {{"name": "now"}}]', "", [WEATHER, NOW]),
    "mistral's later format": ("mistral", 'Hm[TOOL_CALLS]weather[ARGS]{"days": 3}[TOOL_CALLS]now{}',
        *("Hm", [("weather", {"days": 3}), NOW])),
    "mistral's ids": ("mistral", "[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}", "", [NOW]),
}  # fmt: skip
MALFORMED_CALLS = {
    "no JSON": ("hermes", "a<tool_call>\nno</tool_call> b"),
    "half a call": ("hermes", 'a<tool_call>{"name": "f", "arg'),
    "another object": ("hermes", '<tool_call>{"tool": "f"}</tool_call>'),
    "a list of arguments": ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    "other members": ("hermes", '<tool_call>{"name": "Bob", "age": 3}</tool_call>'),
    "no name": ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    "half an XML call": ("qwen3_coder", "<tool_call>\n<function=now"),
    "no XML call": ("qwen3_coder", "<tool_call>\n{}\n</tool_call>"),
    "no list": ("mistral", "[TOOL_CALLS][1, 2]"),
    "no tool": ("llama3_json", '{"name": "other", "parameters": {}}'),
    "no call": ("pythonic", "[other(a=1)]"),
}
# Calls that are malformed after their name: a stream has already sent a part of them.
LATE_MISTAKES = {
    "cut": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b'),
    "Python": ("hermes", '<tool_call>{"name": "f", "arguments": {\'a\': 1}}</tool_call>'),
    "a bracket": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1]}}</tool_call>'),
    "two objects": ("hermes", f'<tool_call>\n{JSON}\n{{"name": "now"}}\n</tool_call>'),
    "text after the object": ("hermes", f"<tool_call>{JSON}}}</tool_call>"),
    "cut XML": ("qwen3_coder", "<tool_call>\n<function=now>\n<parameter=a>\nb"),
    "a name alone": ("pythonic", "[weather(days=x y)]"),
    "a null byte": ("pythonic", '[weather(city="\\x\0a")]'),
    "a deep list": (
        *("hermes", f'<tool_call>{{"name": "f", "arguments": {{"a": {"[" * 1500}{"]" * 1500}}}}}'),
    ),
}


def parse_message(
    family: str, chunks: list[str], stream: bool, **options: Any
) -> tuple[str, str, list[tuple[str, str]]]:
    """Return the content, the reasoning, and the name and arguments of each call."""
    parser = MessageParser(MessageFormat(FAMILIES[family], TOOLS, **options), stream)
    message = {"content": "", "reasoning": ""}
    calls: list[list[str]] = []
    ids: set[str] = set()
    for index, chunk in enumerate([*chunks, ""]):
        parser.feed(chunk, index == len(chunks))
        delta = parser.take()
        orjson.dumps(delta)
        for part in message:
            message[part] += delta.get(part, "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(calls)
                calls.append([call["name"], ""])
                ids.add(call["id"])
            calls[call["index"]][1] += call["arguments"]
    assert len(ids) == len(calls)
    return message["content"], message["reasoning"], [(name, text) for name, text in calls]


def split(text: str, seed: int) -> list[str]:
    """Return the text in random chunks, or in single characters if the seed is 0."""
    rng = random.Random(seed)
    deltas: list[str] = []
    while text:
        size = rng.randint(1, 9) if seed else 1
        deltas, text = [*deltas, text[:size]], text[size:]
    return deltas


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", VALID_CALLS)
def test_calls_and_content(case: str, stream: bool) -> None:
    family, text, content, calls = VALID_CALLS[case]
    for chunks in ([text], *(split(text, seed) for seed in range(12))):
        parsed_content, _, parsed_calls = parse_message(family, chunks, stream)
        assert parsed_content == content
        assert [(name, json.loads(arguments)) for name, arguments in parsed_calls] == calls


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", MALFORMED_CALLS)
def test_malformed_calls_are_content(case: str, stream: bool) -> None:
    family, text = MALFORMED_CALLS[case]
    for chunks in ([text], *(split(text, seed) for seed in range(6))):
        assert parse_message(family, chunks, stream) == (text, "", [])


@pytest.mark.parametrize("case", LATE_MISTAKES)
def test_calls_that_become_malformed_late(case: str) -> None:
    family, text = LATE_MISTAKES[case]
    assert parse_message(family, [text], stream=False) == (text, "", [])
    results = {repr(parse_message(family, split(text, seed), stream=True)) for seed in range(8)}
    assert len(results) == 1
    assert len(parse_message(family, [text], stream=True)[2]) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_any_split_of_a_text_is_parsed_to_the_same(family: str) -> None:
    rng = random.Random(family)
    pieces = [
        piece
        for case in (VALID_CALLS, MALFORMED_CALLS)
        for example in case.values()
        for piece in split(str(example[1]), 7)
    ]
    for _ in range(300):
        text = "".join(rng.choices(pieces, k=rng.randint(1, 12)))
        for stream in (False, True):
            results = {repr(parse_message(family, split(text, seed), stream)) for seed in range(3)}
            assert len(results) == 1, text


@pytest.mark.parametrize(
    ("family", "call", "tag"),
    [
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "x"}}', "\n</tool_call>"),
        ("qwen3_coder", "<function=now><parameter=a>x</parameter></", "function>"),
        (
            *("qwen3_coder", "<tool_call><function=now><parameter=a>x</parameter></"),
            "function></tool_call>",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_is_complete_if_only_its_closing_tag_is_cut_off(
    family: str, call: str, tag: str, stream: bool
) -> None:
    for length in range(len(tag) + 1):
        message = parse_message(family, split(call + tag[:length], length), stream)
        assert message == ("", "", [("now", '{"a": "x"}')])


def test_parts_of_a_whole_message_are_in_order() -> None:
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    parser = MessageParser(MessageFormat(FAMILIES["hermes"], TOOLS), stream=False)
    parser.feed(f"a{call}b{call}", is_end=True)
    message = parser.take()
    assert message["content"] == "ab"
    assert [*map(list, message["parts"])] == [["content"], ["tool_calls"]] * 2
    assert message["tool_calls"] == [part["tool_calls"][0] for part in message["parts"][1::2]]


def test_arguments_are_streamed() -> None:
    parser = MessageParser(MessageFormat(FAMILIES["hermes"], TOOLS), stream=True)
    parser.feed('<tool_call>{"name": "weather", "arguments": ')
    assert parser.take() == {}
    parser.feed("{")
    (call,) = parser.take()["tool_calls"]
    assert (call["name"], call["arguments"]) == ("weather", "{")
    for char in '"city": "Paris"}':
        parser.feed(char)
        assert parser.take() == {"tool_calls": [{"index": 0, "arguments": char}]}
    parser.feed("}")
    assert parser.take() == {}


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_without_parallel_tool_calls(stream: bool) -> None:
    for case in ("hermes with text", "qwen twice", "llama twice", "pythonic", "mistral"):
        family, text, _, calls = VALID_CALLS[case]
        options = {"allows_parallel_calls": False}
        _, _, parsed_calls = parse_message(family, split(text, 3), stream, **options)
        assert [(name, json.loads(arguments)) for name, arguments in parsed_calls] == calls[:1]


def test_call_ids_fit_their_templates() -> None:
    assert len(FAMILIES["mistral"].new_id()) == 9 and FAMILIES["mistral"].new_id().isalnum()
    assert FAMILIES["hermes"].new_id().startswith("call_")


REASONING_TEXTS = {
    "<think>\nHm\n\nso\n</think>\n\nYes.\n": ("Yes.\n", "Hm\n\nso"),
    "\n<think></think>\n\nYes": ("Yes", ""),
    "<think>Hm": ("", "Hm"),
    "Yes <think>a</think>": ("Yes <think>a</think>", ""),
    "<thin": ("<thin", ""),
    " <": (" <", ""),
}


@pytest.mark.parametrize("text", REASONING_TEXTS)
@pytest.mark.parametrize("tools", [{}, TOOLS], ids=["", "tools"])
def test_reasoning_is_split(text: str, tools: dict[str, Any]) -> None:
    for seed in range(5):
        message_format = MessageFormat(FAMILIES["hermes"], tools, REASONING["qwen3"])
        parser = MessageParser(message_format, stream=True)
        content = reasoning = ""
        for chunk in [*split(text, seed), ""]:
            parser.feed(chunk, not chunk)
            delta = parser.take()
            content += delta.get("content", "")
            reasoning += delta.get("reasoning", "")
        assert (content, reasoning) == REASONING_TEXTS[text]


def test_reasoning_may_begin_in_the_prompt_before_calls() -> None:
    text = f"\nHm <tool_call>\n</think>\n\n<tool_call>{JSON}</tool_call>"
    for opening_tag in ("", "<think>"):
        for seed in range(5):
            content, reasoning, calls = parse_message(
                *("hermes", split(opening_tag + text, seed), True),
                reasoning=REASONING["qwen3"],
                starts_reasoning=True,
            )
            assert (content, reasoning) == ("", "Hm <tool_call>")
            assert [(name, json.loads(arguments)) for name, arguments in calls] == [WEATHER]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("calls_end", [False, True])
def test_only_a_valid_call_ends_the_reasoning(calls_end: bool, stream: bool) -> None:
    draft, call = '<tool_call>{"name": "', f"<tool_call>{JSON}</tool_call>"
    for text in (draft, call):
        for seed in range(5):
            chunks = split(f"<think>a {text}\n</think>b", seed)
            result = parse_message(
                *("hermes", chunks, stream),
                reasoning=REASONING["qwen3"],
                calls_end_reasoning=calls_end,
            )
            if text == draft or not calls_end:
                assert result == ("b", f"a {text}", [])
            else:
                assert (*result[:2], len(result[2])) == ("\nb", "a ", 1)


@pytest.mark.parametrize("stream", [False, True])
def test_json_within_json_is_no_call_in_the_reasoning_either(stream: bool) -> None:
    text = f'{{"a": {LLAMA}}} {{"b":\n{LLAMA}}}'
    for seed in range(5):
        chunks = split(f"<think>{text}</think>b", seed)
        result = parse_message("llama3_json", chunks, stream, reasoning=REASONING["qwen3"])
        assert result == ("b", text, [])


@pytest.mark.parametrize("stream", [False, True])
def test_a_required_call_that_is_cut_off_is_no_content(stream: bool) -> None:
    call = f"<tool_call>\n{JSON}\n</tool_call>"
    for size in range(len(call)):
        content, _, calls = parse_message("hermes", [call[:size]], stream, has_only_calls=True)
        assert content == ""
        assert stream or [(name, json.loads(text)) for name, text in calls] in ([], [WEATHER])


TEMPLATE_HINTS = {
    "{{ messages }}": ("none", "none"),
    '<tool_call>{"name": <function-name>} <think></think>': ("hermes", "qwen3"),
    "<tool_call>\n<function=x>\n<parameter=y>": ("qwen3_coder", "none"),
    '<function=x>{"y": 1}</function>': ("none", "none"),
    "[TOOL_CALLS] [THINK][/THINK]": ("mistral", "mistral"),
    "<|python_tag|>": ("llama3_json", "none"),
    '{"name": function name, "parameters": dictionary of argument name and its value}': (
        *("llama3_json", "none"),
    ),
    "[func_name1(params_name1=params_value1, params_name2=params_value2)]": ("pythonic", "none"),
}


@pytest.mark.parametrize("template", TEMPLATE_HINTS)
def test_the_parsers_are_chosen_from_the_template(template: str) -> None:
    assert detect_parsers([template]) == TEMPLATE_HINTS[template]


def test_all_formats_have_a_name_in_engine_yaml() -> None:
    assert {*engine_settings.TOOL_PARSERS} == {*TOOL_PARSERS}
    assert {*engine_settings.REASONING_PARSERS} == {*REASONING}
