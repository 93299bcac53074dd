"""Tools of requests, and the grammars that enforce calls of them."""

import json
import random
from typing import Any

import jsonschema_rs
import llguidance
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from shmserve.errors import InvalidArgument
from shmserve.workers.backends.llm import tools
from shmserve.workers.backends.llm.message_parsers import MessageParser
from shmserve.workers.backends.llm.tool_formats import FAMILIES
from tests.support.hf_folders import END, tokenizer_text

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "note": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9}, "unit": {"enum": ["C", "F"]},
        "places": {"type": "array", "items": {"$ref": "#/$defs/Place"}, "maxItems": 2},
        "wind": {"anyOf": [{"type": "boolean"}, {"type": "null"}]}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"Place": {"type": "object",
        "properties": {"x": {"type": "number", "minimum": 0, "maximum": 9}}, "required": ["x"],
        "additionalProperties": False}},
}  # fmt: skip
NOW: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
TAG_TOKENS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<think>", "</think>")


def function(name: str, schema: Any = None, **fields: Any) -> dict[str, Any]:
    """Return a tool in the format of OpenAI's API."""
    return {"type": "function", "function": {"name": name, "parameters": schema, **fields}}


GIVEN_TOOLS = [function("weather", SCHEMA), function("now", NOW)]


def tokenizer(*special_tokens: str) -> Tokenizer:
    """Return a tokenizer with added tokens, half of which are special."""
    test_tokenizer = Tokenizer.from_str(tokenizer_text())
    for index, call in enumerate(special_tokens):
        test_tokenizer.add_tokens([AddedToken(call, special=index % 2 == 0, normalized=False)])
    return test_tokenizer


def grammar(
    family: str,
    model_tokenizer: Tokenizer,
    given_tools: list[dict[str, Any]] = GIVEN_TOOLS,
    reasoning: str = "none",
    prompt: str = "",
    **choice: Any,
) -> tuple[Any, Any]:
    """Return the matcher of a request's grammar, and the format of its messages."""
    request = tools.take_tools({"tools": given_tools, **choice})
    formats = tools.MessageFormats(family, reasoning, model_tokenizer)
    formatted = formats.make_format(request, prompt)
    assert formatted is not None
    text = formats.grammar(request, formatted, has_grammar=False)
    end_tokens = [model_tokenizer.token_to_id(END)]
    wrapped: Any = llguidance.LLTokenizer
    library = wrapped(
        model_tokenizer.to_str(), n_vocab=model_tokenizer.get_vocab_size(), eos_token=end_tokens
    )
    matcher: Any = llguidance.LLMatcher(library, text)
    assert not matcher.get_error(), (matcher.get_error(), text)
    return matcher, formatted


def random_text(guide: Any, tokenizer: Tokenizer, rng: random.Random, max_tokens: int = 400) -> str:
    tokens: list[int] = []
    while not guide.is_stopped() and len(tokens) < max_tokens:
        bits = np.frombuffer(guide.compute_bitmask(), np.uint8)
        token = rng.choice(np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist())
        guide.consume_token(token)
        if token == tokenizer.token_to_id(END):
            break
        tokens.append(token)
    text: str = tokenizer.decode(tokens, skip_special_tokens=False)
    return text if guide.is_stopped() else ""


def parse_calls(text: str, message_format: Any) -> tuple[str, list[tuple[str, Any]]]:
    parser = MessageParser(message_format, stream=True)
    parser.feed(text, is_end=True)
    delta = parser.take()
    calls = [(call["name"], json.loads(call["arguments"])) for call in delta.get("tool_calls", ())]
    return delta.get("content", ""), calls


@pytest.mark.parametrize("special_tokens", [(), TAG_TOKENS], ids=["text", "tokens"])
@pytest.mark.parametrize("family", FAMILIES)
def test_required_calls_parse_and_validate(family: str, special_tokens: tuple[str, ...]) -> None:
    test_tokenizer, rng, weather_count = tokenizer(*special_tokens), random.Random(5), 0
    matcher, tools = grammar(family, test_tokenizer, tool_choice="required")
    for _ in range(60):
        text = random_text(matcher.deep_copy(), test_tokenizer, rng)
        if not text:
            continue
        content, calls = parse_calls(text, tools)
        assert calls and not content, text
        for name, arguments in calls:
            jsonschema_rs.validate({"weather": SCHEMA, "now": NOW}[name], arguments)
            weather_count += name == "weather"
    assert weather_count


FLAG: dict[str, Any] = {"type": "boolean"}
DIGIT: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 5}
WHOLE_SCHEMAS: dict[str, dict[str, Any]] = {
    "a root that is a definition with definitions": {"$ref": "#/$defs/A", "$defs": {"B": FLAG,
        "A": {"type": "object", "properties": {"b": {"$ref": "#/$defs/B"},
            "c": {"$ref": "#/$defs/A/$defs/C"}}, "required": ["b", "c"],
            "additionalProperties": False, "$defs": {"C": DIGIT}}}},
    "a reference to the root's schema": {"$defs": {"Node": {"type": "object",
        "properties": {"flag": FLAG, "next": {"$ref": "#/$defs/Node"}}, "required": ["flag"],
        "additionalProperties": False}}, "$ref": "#/$defs/Node"},
    "references to the root and to a property": {"properties": {"digit": DIGIT,
        "same": {"$ref": "#/properties/digit"},
        "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["digit", "same"],
        "additionalProperties": False},
    "a required property that is not declared": {"properties": {"flag": FLAG},
        "required": ["flag", "digit"], "additionalProperties": DIGIT},
    "an optional text": {"properties": {"short": {"anyOf": [{"type": "string", "maxLength": 3},
        {"type": "null"}]}, "letter": {"allOf": [{"type": "string"}, {"pattern": "^[abc]$"}]}},
        "required": ["short", "letter"], "additionalProperties": False},
}  # fmt: skip


@pytest.mark.parametrize("case", WHOLE_SCHEMAS)
@pytest.mark.parametrize("family", FAMILIES)
def test_calls_validate_against_the_whole_schema(family: str, case: str) -> None:
    schema, vocabulary, rng = WHOLE_SCHEMAS[case], tokenizer(), random.Random(3)
    matcher, form = grammar(family, vocabulary, [function("f", schema)], tool_choice="required")
    texts = [random_text(matcher.deep_copy(), vocabulary, rng) for _ in range(12)]
    assert any(texts)
    for text in filter(None, texts):
        content, calls = parse_calls(text, form)
        assert calls and not content, text
        for _, arguments in calls:
            jsonschema_rs.validate(schema, arguments)


def test_an_optional_text_of_xml_has_no_quotes() -> None:
    test_tokenizer = tokenizer()
    schema = {"properties": {"a": {"type": ["string", "null"]}}, "required": ["a"]}
    given_tools = [function("f", schema)]
    matcher, message_format = grammar(
        "qwen3_coder",
        test_tokenizer,
        given_tools,
        tool_choice="required",
        parallel_tool_calls=False,
    )
    for value, text in (("fox", "fox"), ('"fox"', '"fox"'), (None, "null")):
        call = f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n"
        tokens = test_tokenizer.encode(f"{call}</tool_call>").ids
        assert matcher.deep_copy().try_consume_tokens(tokens) == len(tokens), text
        assert parse_calls(f"{call}</tool_call>", message_format)[1] == [("f", {"a": value})]


@pytest.mark.parametrize("limits", [{"enum": ['"a"', "b"]}, {"const": '"a"'}, {"maxLength": 3}])
def test_a_grammar_of_xml_quotes_limited_texts_that_it_cannot_list(limits: dict[str, Any]) -> None:
    given_tools = [function("f", {"properties": {"a": {"type": "string", **limits}}})]
    matcher, message_format = grammar(
        "qwen3_coder", test_tokenizer := tokenizer(), given_tools, tool_choice="required"
    )
    written = json.dumps('"a"') if "maxLength" in limits else '"a"'
    call = f"<tool_call>\n<function=f>\n<parameter=a>\n{written}\n</parameter>\n</function>\n"
    call += "</tool_call>"
    tokens = test_tokenizer.encode(call).ids
    assert matcher.try_consume_tokens(tokens) == len(tokens)
    assert parse_calls(call, message_format)[1] == [("f", {"a": '"a"'})]


@pytest.mark.parametrize(
    ("family", "schema", "error"),
    [
        ("pythonic", {"properties": {"a b": FLAG}, "required": ["a b"]}, "'a b'"),
        ("qwen3_coder", {"properties": {"a>b": FLAG}, "required": ["a>b"]}, "'a>b'"),
        ("qwen3_coder", {"anyOf": [{"required": ["a"]}], "minProperties": 1}, "anyOf, minProp"),
    ],
)
def test_schemas_that_no_format_enforces(family: str, schema: dict[str, Any], error: str) -> None:
    given_tools = [function("f", schema)]
    with pytest.raises(InvalidArgument) as caught:
        grammar(family, tokenizer(), given_tools, tool_choice="required")
    assert f"the parameters of 'f': {error}" in caught.value.message
    optional = {**schema, "required": []}
    if "properties" in schema:  # an optional parameter is omitted instead
        grammar(family, tokenizer(), [function("f", optional)], tool_choice="required")


@pytest.mark.parametrize("family", FAMILIES)
def test_one_named_call(family: str) -> None:
    test_tokenizer, rng = tokenizer(), random.Random(1)
    choice = {"type": "function", "function": {"name": "now"}}
    matcher, tools = grammar(family, test_tokenizer, tool_choice=choice)
    assert not tools.allows_parallel_calls
    assert parse_calls(random_text(matcher, test_tokenizer, rng), tools) == ("", [("now", {})])


EXAMPLES = {
    "hermes": '<tool_call>\n{"name": "NAME", "arguments": {}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=NAME>\n</function>\n</tool_call>",
    "llama3_json": '{"name": "NAME", "parameters": {}}',
    "mistral": '[TOOL_CALLS][{"name": "NAME", "arguments": {}}]',
    "pythonic": "[NAME()]",
}


@pytest.mark.parametrize("special", [(), TAG_TOKENS], ids=["text", "tokens"])
@pytest.mark.parametrize("family", EXAMPLES)
def test_strict_calls_follow_a_grammar_from_the_tag(family: str, special: tuple[str, ...]) -> None:
    coder = tokenizer(*special)
    matcher, _ = grammar(family, coder, [function("now", NOW, strict=True)])

    def is_accepted(text: str) -> bool:
        tokens = [*coder.encode(text, add_special_tokens=False).ids, coder.token_to_id(END)]
        return bool(matcher.deep_copy().try_consume_tokens(tokens) == len(tokens))

    call = EXAMPLES[family]
    assert is_accepted("some < text { of [ any kind")
    assert is_accepted(f"Look: {call.replace('NAME', 'now')}")
    assert not is_accepted(f"Look: {call.replace('NAME', 'now')[:-2]}")
    if family != "pythonic":  # in the format "pythonic", any list may be content
        assert not is_accepted(f"Look: {call.replace('NAME', 'other')}")


@pytest.mark.parametrize("special_tokens", [(), TAG_TOKENS], ids=["text", "tokens"])
def test_calls_follow_the_reasoning(special_tokens: tuple[str, ...]) -> None:
    test_tokenizer, rng = tokenizer(*special_tokens), random.Random(2)
    settings: Any = {"reasoning": "qwen3", "tool_choice": "required", "parallel_tool_calls": False}
    for prompt, opening_tag in (("", "<think>\n"), ("<|model|><think>\n", ""), ("", "")):
        matcher, tools = grammar(
            "hermes", test_tokenizer, [function("now", NOW)], prompt=prompt, **settings
        )
        reasoning_text = f"{opening_tag}a < b\n</think>\n\n" if opening_tag or prompt else ""
        tokens = test_tokenizer.encode(reasoning_text, add_special_tokens=False).ids
        assert matcher.try_consume_tokens(tokens) == len(tokens)
        texts = (random_text(matcher.deep_copy(), test_tokenizer, rng) for _ in range(40))
        _, calls = parse_calls(reasoning_text + next(filter(None, texts)), tools)
        assert calls and {name for name, _ in calls} == {"now"}


@pytest.mark.parametrize("special_tokens", [(), TAG_TOKENS], ids=["text", "tokens"])
def test_a_strict_call_may_end_the_reasoning(special_tokens: tuple[str, ...]) -> None:
    coder, call = tokenizer(*special_tokens), EXAMPLES["hermes"].replace("NAME", "now")
    matcher, message_format = grammar(
        "hermes", coder, [function("now", NOW, strict=True)], reasoning="qwen3"
    )
    for text, valid in (
        ("<think>a</think>\n\nb", True),
        (f"<think>a</think>\n\n{call}", True),
        (f"<think>a {call}", True),
        (f"<think>a {call.replace('now', 'other')}", False),
    ):
        tokens = [*coder.encode(text, add_special_tokens=False).ids, coder.token_to_id(END)]
        assert (matcher.deep_copy().try_consume_tokens(tokens) == len(tokens)) == valid, text
        assert len(parse_calls(text, message_format)[1]) == text.count('{"name"')


WRONG_TOOLS: dict[str, tuple[dict[str, Any], str]] = {
    "a number": ({"tools": [3]}, r"tools\[0\]: 3 is not a function"),
    "another kind": ({"tools": [{"type": "web_search"}]}, r"tools\[0\]"),
    "no name": ({"tools": [{"type": "function", "function": {}}]}, r"tools\[0\].function.name"),
    "a list": ({"tools": [function("f", [1])]}, r"tools\[0\].function.parameters"),
    "an unknown choice": ({"tools": GIVEN_TOOLS, "tool_choice": "often"},
        "tool_choice: 'often' is not"),
    "an unknown tool": ({"tools": GIVEN_TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice: `tools` has no tool 'g'"),
    "a choice of nothing": ({"tool_choice": "required"}, "tool_choice: 'required' requires tools"),
    "no list": ({"tools": 3}, "tools: 3 is not a list"),
    "an object of tools": ({"tools": {"f": GIVEN_TOOLS[0]}}, "tools: .* is not a list"),
    "no flag": ({"tools": GIVEN_TOOLS, "parallel_tool_calls": "no"},
        "parallel_tool_calls: 'no' is not"),
    "a strict text": ({"tools": [function("f", NOW, strict="yes")]},
        r"tools\[0\].function.strict: 'yes' is not true or false"),
    "a description of another type": ({"tools": [function("f", NOW, description=3)]},
        r"tools\[0\].function.description: 3 is not a string"),
}  # fmt: skip


@pytest.mark.parametrize(
    "allowed_tools",
    [None, 3, "now", [3], {}, {"mode": "required"}]
    + [
        {"mode": "auto", "tools": wrong_tools}
        for wrong_tools in (None, 3, "now", [], [None], {"name": "now"})
    ]
    + [{"mode": "often", "tools": [{"type": "function", "function": {"name": "now"}}]}]
    + [{"mode": "auto", "tools": [{"type": "function", "function": {"name": 3}}]}],
)
def test_malformed_allowed_tools(allowed_tools: Any) -> None:
    choice = {"type": "allowed_tools", "allowed_tools": allowed_tools}
    with pytest.raises(InvalidArgument, match="tool_choice: "):
        tools.take_tools({"tools": GIVEN_TOOLS, "tool_choice": choice})


NO_SCHEMAS: dict[str, tuple[Any, str]] = {
    "type": ({"type": "strange"}, "type: 'strange' is not"),
    "type of a member": ({"properties": {"a": {"type": 3}}}, "properties.a.type: 3 is not"),
    "types": ({"type": []}, r"type: \[\] is not"),
    "properties": ({"properties": ["a"]}, "properties: .* is not an object of schemas"),
    "a property": ({"properties": {"a": "string"}}, "properties.a: 'string' is not a schema"),
    "required": ({"required": "city"}, "required: 'city' is not a list of strings"),
    "required names": ({"required": [1]}, "required: .* is not a list of strings"),
    "enum": ({"properties": {"a": {"enum": "x"}}}, "properties.a.enum: 'x' is not a list"),
    "minimum": ({"properties": {"a": {"minimum": "x"}}}, "a.minimum: 'x' is not a number"),
    "length": ({"properties": {"a": {"maxLength": -1}}}, "a.maxLength: -1 is not"),
    "infinite length": ({"properties": {"a": {"maxLength": float("inf")}}},
        "a.maxLength: inf is not"),
    "items": ({"properties": {"a": {"items": "string"}}}, "a.items: 'string' is not a schema"),
    "alternatives": ({"anyOf": []}, r"anyOf: \[\] is not a list of schemas"),
    "an alternative": ({"anyOf": [{}, {"type": "no"}]}, r"anyOf\[1\].type: 'no' is not"),
    "index of a reference": ({"anyOf": [{"$ref": "#/anyOf/7"}]}, r"anyOf\[0\].\$ref: .* is not"),
    "digits of a reference": ({"anyOf": [{"$ref": "#/anyOf/" + "9" * 5000}]},
        r"anyOf\[0\].\$ref: .* is not"),
    "reference": ({"properties": {"a": {"$ref": "#/$defs/B"}}}, r"a.\$ref: '#/\$defs/B' is not"),
    "pattern": ({"properties": {"a": {"pattern": 3}}}, "a.pattern: 3 is not a string"),
    "definition": ({"$defs": {"A": 3}}, r"\$defs.A: 3 is not a schema"),
}  # fmt: skip


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("case", NO_SCHEMAS)
def test_parameters_that_are_no_schema(case: str, choice: str) -> None:
    schema, message = NO_SCHEMAS[case]
    given_tools = [GIVEN_TOOLS[1], function("f", schema)]
    with pytest.raises(InvalidArgument, match=rf"tools\[1\].function.parameters: .*{message}"):
        tools.take_tools({"tools": given_tools, "tool_choice": choice})


@pytest.mark.parametrize(
    "schema",
    [
        None,
        {},
        SCHEMA,
        {"type": "object", "properties": None, "required": None},
        {"properties": {"type": {"type": ["string", "null"]}, "required": True, "enum": {}}},
        {"properties": {"a": {"type": "array", "items": [{}, True]}, "b": {"not": {}}}},
        {"properties": {"a": {"minimum": 0.5, "exclusiveMinimum": True, "contains": {}}}},
        {"properties": {"a": {"$ref": "#"}, "b": {"$ref": "#/$defs/x~1y"}}, "$defs": {"x/y": {}}},
        {"properties": {"a": {"enum": [{"type": "no"}], "default": {"type": "no"}}}},
        {"properties": {"a": {"pattern": "(?<=x)y", "format": "odd", "x-mine": 3}}},
    ],
)
def test_parameters_that_are_schemas(schema: Any) -> None:
    assert tools.take_tools({"tools": [{**function("f", schema), "type": None}]}) is not None


@pytest.mark.parametrize("case", WRONG_TOOLS)
def test_errors_name_the_field(case: str) -> None:
    body, message = WRONG_TOOLS[case]
    with pytest.raises(InvalidArgument, match=message):
        tools.take_tools(body)


def test_tool_choices() -> None:
    assert tools.take_tools({"tools": GIVEN_TOOLS, "tool_choice": "none"}) is None
    assert tools.take_tools({"tools": [], "tool_choice": "auto"}) is None
    conversation = {"tools": GIVEN_TOOLS, "parallel_tool_calls": False}
    free_tools = tools.take_tools(conversation)
    assert free_tools is not None and not free_tools.is_constrained
    assert not free_tools.allows_parallel_calls
    assert conversation == {"tools": GIVEN_TOOLS}
    some = {"mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]}
    for c in ({"type": "allowed_tools", "allowed_tools": some}, {"type": "allowed_tools", **some}):
        conversation = {"tools": GIVEN_TOOLS, "tool_choice": c}
        taken_tools = tools.take_tools(conversation)
        assert taken_tools is not None and taken_tools.required
        assert [tool.name for tool in taken_tools.tools] == ["now"]
        assert conversation == {"tools": GIVEN_TOOLS[1:]}


@pytest.mark.parametrize("reasoning", ["qwen3", "deepseek_r1"])
def test_no_reasoning_begins_after_a_prompt_that_has_closed_it(reasoning: str) -> None:
    formats = tools.MessageFormats("hermes", reasoning, tokenizer())
    request = tools.take_tools({"tools": GIVEN_TOOLS, "tool_choice": "required"})
    for prompt, is_open in (("<think>\n\n</think>\n\n", False), ("hi", True)):
        formatted = formats.make_format(request, prompt)
        assert formatted is not None
        assert ("/think>" in formats.grammar(request, formatted, has_grammar=False)) == is_open
        assert (formats.make_format(None, prompt) is not None) == is_open


@pytest.mark.parametrize("reasoning", ["qwen3", "deepseek_r1"])
def test_a_message_may_be_continued_inside_of_its_reasoning(reasoning: str) -> None:
    formats = tools.MessageFormats("none", reasoning, tokenizer())
    history = "<|user|>Explain </think> and <think>.<|assistant|>"
    opened = formats.make_format(None, f"{history}<think>\nI see", continues_message=True)
    assert opened is not None and opened.starts_reasoning
    closed = f"{history}<think>\nI see</think>\n\nThe"
    assert formats.make_format(None, closed, continues_message=True) is None
    new_message = formats.make_format(None, history)
    assert new_message is not None
    assert new_message.starts_reasoning == (reasoning == "deepseek_r1")


def test_only_special_tokens_that_the_parser_reads_are_parts_of_the_text() -> None:
    model_tokenizer = tokenizer("<tool_call>", "</tool_call>", "<think>", "</think>")
    formats = tools.MessageFormats("hermes", "qwen3", model_tokenizer)
    for choice, prompt, kept_tags in (
        ("auto", "hi", ["<tool_call>", "<think>"]),
        ("none", "hi", ["<think>"]),
        ("auto", "<think></think>", ["<tool_call>"]),
    ):
        request = tools.take_tools({"tools": GIVEN_TOOLS, "tool_choice": choice})
        formatted = formats.make_format(request, prompt)
        assert formatted is not None
        assert formatted.kept_tokens == {model_tokenizer.token_to_id(tag) for tag in kept_tags}


@pytest.mark.parametrize("is_opened", [False, True])
def test_the_closing_tag_follows_the_budget_of_reasoning(is_opened: bool) -> None:
    model_tokenizer = tokenizer("<tool_call>", "<think>", "</tool_call>", "</think>")
    formats = tools.MessageFormats("hermes", "qwen3", model_tokenizer)
    prompt = "<think>" if is_opened else "hi"
    request = tools.take_tools({"tools": GIVEN_TOOLS})
    formatted = formats.make_format(request, prompt)
    size = model_tokenizer.get_vocab_size()
    forbidden_after = formats.limit_reasoning(formatted, 2, size)
    assert forbidden_after is not None
    token: Any = model_tokenizer.token_to_id
    begin, end, call = map(token, ("<think>", "</think>", "<tool_call>"))
    opening = [] if is_opened else [begin]
    for tokens in ([], [1], [1, 2, end], [1, 2, end, 3], [call, 1, 2, 3]):
        assert not forbidden_after(opening + tokens).size
    assert set(forbidden_after([*opening, 1, 2])) == {*range(size)} - {end}
    if not is_opened:
        # A message that begins with other text has no reasoning.
        for tokens in ([1, 2, 3], [1, 2, begin, 3, 4, 5], [1, begin, 3, 4, 5]):
            assert not forbidden_after(tokens).size
        space = model_tokenizer.encode(" ").ids[-1]
        assert not forbidden_after([space, space, begin, 1]).size
        assert set(forbidden_after([space, space, begin, 1, 2])) == {*range(size)} - {end}
    # Without tools, the opening tag of a call is a part of the reasoning.
    forbidden_after = formats.limit_reasoning(formats.make_format(None, prompt), 2, size)
    assert forbidden_after is not None
    assert forbidden_after([*opening, call, 2, 3]).size == size - 1


def test_a_budget_of_reasoning_requires_tags_that_are_tokens() -> None:
    model_tokenizer = tokenizer("<tool_call>", "<think>", "</tool_call>", "</think>")
    formats = tools.MessageFormats("hermes", "qwen3", model_tokenizer)
    assert formats.limit_reasoning(None, 2, 9) is None  # the template has closed the reasoning
    for wrong in (
        tools.MessageFormats("hermes", "qwen3", tokenizer()),
        tools.MessageFormats("hermes", "none", model_tokenizer),
    ):
        with pytest.raises(InvalidArgument, match="thinking_token_budget: only supported if"):
            wrong.limit_reasoning(None, 2, 9)


def test_calls_in_no_known_format() -> None:
    formats = tools.MessageFormats("none", "none", tokenizer())
    assert formats.make_format(None, "") is None
    with pytest.raises(InvalidArgument, match=r"tools: .* set tool_parser"):
        formats.make_format(tools.take_tools({"tools": GIVEN_TOOLS}), "")
    assert (
        formats.make_format(tools.take_tools({"tools": GIVEN_TOOLS, "tool_choice": "required"}), "")
        is not None
    )
