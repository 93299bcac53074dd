"""Grammars: schema keywords that the library lacks, and unusual vocabularies."""

import datetime
import json
import re
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from shmserve.errors import InvalidArgument
from shmserve.workers.backends.llm.grammars import Grammars, with_patterns
from shmserve.workers.backends.llm.parameters import parse
from shmserve.workers.backends.llm.token_texts import Detokenizer, TokenTexts
from shmserve.workers.backends.llm.tool_formats import Lark
from tests.support.hf_folders import tokenizer_text

BYTES = Tokenizer.from_str(tokenizer_text())
TOOL_ERROR = "tools: the parameters of a tool cannot be compiled to a grammar"
GRAMMARS = Grammars(TokenTexts(BYTES), BYTES.get_vocab_size(), (0,))


def matches(grammar: tuple[str, str], text: str) -> bool:
    """Return whether a grammar accepts the whole text."""
    matcher, tokens = GRAMMARS.matcher(grammar), BYTES.encode(text).ids
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def accepts(schema: dict[str, Any], value: Any) -> bool:
    """Return whether the grammar of a schema accepts the JSON text of a value."""
    return matches(("json_schema", json.dumps(schema)), json.dumps(value, ensure_ascii=False))


@pytest.mark.parametrize(
    ("regex", "valid", "invalid"),
    [
        (r"\d[\d-]\\d", ["3-\\d", "12\\d"], ["٣-\\d", "3٣\\d", "1-\\3"]),
        (r"\w+[^\w]", ["a_1é"], ["é.", "ab"]),
        (r"\s\S", ["\t\u2003", "\xa0a"], ["\u2003a", " \xa0"]),
        (r"[\D]\W", ["٣é"], ["3é", "aa"]),
    ],
)
def test_classes_of_a_regular_expression_are_ascii(
    regex: str, valid: list[str], invalid: list[str]
) -> None:
    for text in valid + invalid:
        assert matches(("regex", regex), text) == (text in valid), text


@pytest.mark.parametrize(
    ("names", "valid", "invalid"),
    [
        ({"enum": ["x.y", "b c"]}, ["x.y", "b c"], ["xay", "x.yb"]),
        ({"enum": ["a", 2, None]}, ["a"], ["2", "null"]),
        ({"const": "x", "title": "The name"}, ["x"], ["y", "xx"]),
        ({"$ref": "#/$defs/Colour"}, ["red"], ["pink", ""]),
        ({"type": "string", "pattern": "^[a-z]+$"}, ["ab"], ["A", "a1"]),
        ({"minLength": 2, "maxLength": 3}, ["ab", "é😀"], ["a", "abcd"]),
        ({"maxLength": 1}, ["", "a"], ["ab"]),
        ({"minLength": 1}, ["a", "abcd"], [""]),
        ({"format": "date"}, ["2026-11-28"], ["2026-13-01", "x2026-11-28"]),
        ({"format": "time"}, ["12:30:00", "12:30:00.5Z"], ["24:00:00"]),
        ({"format": "date-time"}, ["2026-11-28T12:30:00+01:00"], ["2026-11-28"]),
        ({"format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567"]),
        ({"type": "string"}, ["a", ""], []),
        (True, ["a"], []),
    ],
)
def test_names_of_properties_follow_their_schema(
    names: Any, valid: list[str], invalid: list[str]
) -> None:
    colours = {"Colour": {"enum": ["red", "blue"], "type": "string"}}
    part = {"type": "object", "propertyNames": names, "additionalProperties": {"type": "integer"}}
    for schema, wrap_value in (
        (part, lambda inner_schema: inner_schema),
        ({"type": "object", "properties": {"propertyNames": part}, "required": ["propertyNames"]},
         lambda inner_schema: {"propertyNames": inner_schema}),
        ({"anyOf": [part, {"type": "null"}]}, lambda inner_schema: inner_schema),
    ):  # fmt: skip
        full_schema = {**schema, "$defs": colours}
        assert accepts(full_schema, wrap_value(dict.fromkeys(valid, 1)))
        assert accepts(full_schema, wrap_value({}))
        assert not accepts(full_schema, wrap_value({valid[0]: "a"}))
        for name in invalid:
            assert not accepts(full_schema, wrap_value({name: 1})), name


@pytest.mark.parametrize(
    "schema",
    [
        {"propertyNames": {"pattern": "^a"}, "properties": {"b": {}}},
        {"propertyNames": {"pattern": "^a"}, "patternProperties": {"^b": {}}},
        {"propertyNames": {"pattern": "^a", "maxLength": 3}},
        {"propertyNames": {"anyOf": [{"const": "a"}, {"const": "b"}]}},
        {"propertyNames": {"enum": [3]}},
        {"propertyNames": {"format": "email"}},
        {"propertyNames": {"$ref": "#/$defs/None"}},
        {"propertyNames": False},
    ],
)
def test_other_schemas_of_names_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="propertyNames"):
        accepts({"type": "object", **schema}, {})


@pytest.mark.parametrize(
    ("schema", "valid_values", "invalid_values"),
    [
        ({"minimum": -(2**63), "maximum": 2**63 - 1}, [-(2**60), 0, 2**60], [2**63, -(2**63) - 1]),
        ({"minimum": 0, "maximum": 2**64 - 1}, [0, 2**62], [-1, 2**64]),
        ({"minimum": 2**53 + 1, "maximum": 2**54}, [2**53 + 2, 2**54], [2**53, 2**54 + 1]),
        ({"exclusiveMaximum": 2**53 + 1, "minimum": 0}, [2**53 - 1], [2**53 + 1]),
        ({"minimum": -(2**53) - 1, "maximum": 0}, [-(2**53)], [-(2**53) - 2]),
    ],
)
def test_limits_of_large_integers_hold(
    schema: dict[str, Any], valid_values: list[int], invalid_values: list[int]
) -> None:
    assert all(accepts({"type": "integer", **schema}, value) for value in valid_values)
    assert not any(accepts({"type": "integer", **schema}, value) for value in invalid_values)


@pytest.mark.parametrize(
    ("limits", "valid_values", "invalid_values"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, [0.25, 0.5, 0.0001], [0, 0.6, -0.1]),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 0.5}, [0.25], [0, 0.5]),
        ({"exclusiveMinimum": 2.0, "minimum": 2.25, "maximum": 2.75}, [2.25, 2.5], [2, 2.125]),
        ({"exclusiveMaximum": -3, "minimum": -3.5}, [-3.25, -3.5], [-3, -2.5]),
        ({"exclusiveMaximum": 0, "minimum": -0.5}, [-0.25], [0, -0.75]),
        ({"exclusiveMinimum": -1, "exclusiveMaximum": 1}, [0, 0.5, -0.5], [-1, 1]),
        ({"minimum": 0.5, "exclusiveMinimum": True, "maximum": 1.5}, [1], [2]),
        ({"minimum": 0, "exclusiveMinimum": True, "maximum": 0.5}, [0.25, 0.5], [0, 0.75]),
        ({"minimum": -3, "exclusiveMinimum": False, "maximum": 0.5}, [-3, 0, 0.25], [0.75]),
        ({"exclusiveMinimum": 0, "maximum": 5, "exclusiveMaximum": False}, [0.5, 5], [0, 6]),
    ],
)
def test_a_number_is_not_an_exclusive_limit(
    limits: dict[str, Any], valid_values: list[float], invalid_values: list[float]
) -> None:
    schema = {"type": "number", **limits}
    assert [value for value in valid_values + invalid_values if accepts(schema, value)] == (
        valid_values
    )


@pytest.mark.parametrize(
    "limits", [{"exclusiveMinimum": "0", "maximum": 1}, {"exclusiveMinimum": 0, "maximum": "1"}]
)
def test_a_limit_that_is_not_a_number_is_named(limits: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=r"Expected f64 for '\w+', got"):
        accepts({"type": "number", **limits}, 0)
    # The values of keywords that are not JSON Schema's may be of any type.
    assert accepts({"type": "number", "x-limits": {"exclusiveMinimum": {}, "maximum": 1}}, 0)


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (r'root ::= "\u00e9\U0001F600\x41\[\]\\\n"', "é😀A[]\\\n"),
        (r"root ::= [^\u0000-\u001f] [\u00e0-\u00ff] [\[\]]", "aé]"),
        (parse({"guided_choice": ["a", '\x7f\x00"']}, {}, 9).grammar[1], '\x7f\x00"'),
    ],
)
def test_a_grammar_may_contain_all_escape_sequences(grammar: str, text: str) -> None:
    assert matches(("grammar", grammar), text)


def test_a_regular_expression_that_ends_with_a_backslash_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="ends inside of an escape sequence"):
        GRAMMARS.matcher(("regex", r"a\\" + "\\"))
    GRAMMARS.matcher(("regex", r"a\\"))


@pytest.mark.parametrize(
    "schema",
    [
        {"minimum": 10**20, "maximum": 10**20 + 5},
        {"exclusiveMaximum": -(10**20)},
        {"const": 2**53 + 1},
        {"enum": [3, {"id": [1234567890123456789]}]},
        {"const": 10**400},
    ],
)
def test_integers_that_would_be_rounded_are_refused(schema: dict[str, Any]) -> None:
    error = r"cannot be compiled: .*(beyond the limit|cannot represent)"
    with pytest.raises(InvalidArgument, match=error):
        accepts({"type": "object", "properties": {"a": schema}}, {})
    with pytest.raises(InvalidArgument, match=f"^{TOOL_ERROR}"):
        Lark({}).json(schema)


@pytest.mark.parametrize(
    ("schema", "error"),
    [
        ({"format": []}, "cannot be compiled: .*format"),
        ({"x-guidance": True}, "x-guidance: True is not an object"),
        ({"type": "object", "propertyNames": {"enum": 5}}, "cannot be compiled: .*int"),
        ({"pattern": "^(?=a)b", "allOf": 5}, "cannot be compiled: .*int"),
    ],
)
def test_keywords_have_their_types(schema: dict[str, Any], error: str) -> None:
    with pytest.raises(InvalidArgument, match=error):
        accepts({"type": "string", **schema}, "a")
    if "x-guidance" in schema:
        with pytest.raises(InvalidArgument, match=f"^{TOOL_ERROR}: {error}"):
            Lark({}).json(schema)


def test_a_long_run_of_backslashes_is_searched_in_linear_time() -> None:
    """Quadratic time would block the worker for an hour."""
    GRAMMARS.matcher(("grammar", 'start: "' + "\\" * (1 << 20) + '"'))


@pytest.mark.parametrize(
    ("divisors", "is_allowed"),
    [
        ([19_997], True),
        ([999_983], False),
        ([601, 607], False),
        ([1e6, 131_072, 3], True),
        ([0.01, 0.25, 7, 60], True),
    ],
)
@pytest.mark.parametrize("compact", [True, False])
def test_divisors_that_need_many_states_are_refused(
    divisors: list[float], is_allowed: bool, compact: bool
) -> None:
    schema = {"anyOf": [{"type": "integer", "multipleOf": divisor} for divisor in divisors]}
    text = json.dumps(schema, separators=(",", ":") if compact else None)
    texts = (text, text.replace("Of", r"\u004f\u0066"), text.replace(":", "\r\n\t:\n"))
    grammars = [("grammar", f"start: %json {json_text}") for json_text in texts]
    for grammar in (("json_schema", text), *grammars):
        for message_grammar in ("", "start: @body"):
            if is_allowed:
                GRAMMARS.matcher(grammar, message_grammar)
                continue
            with pytest.raises(InvalidArgument, match="above the limit of 20000"):
                GRAMMARS.matcher(grammar, message_grammar)


def test_a_uuid_has_its_version() -> None:
    identifier = "123e4567-e89b-42d3-a456-426614174000"
    assert accepts({"type": "string", "format": "uuid4"}, identifier)
    assert not accepts({"type": "string", "format": "uuid7"}, identifier)
    assert not accepts({"type": "string", "format": "uuid4"}, "some text")


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        (r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", ["1", "-.5", "1."], ["", "+.", "a"]),
        (r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,3}|(?=[\d.]{1,6}0*$)\d{0,3}\.\d{0,2}0*$)",
         ["1", "12345", "a"], ["", "+."]),
        (r"^(?=.*[A-Z])(?=.*\d).{3,}$", ["aB1"], ["ab1", "aBc", "B1"]),
        (r"^(?!\s*$).+", [" a"], [" ", ""]),
        (r"^(?![^ab]*$)(?=a|c)\w+$", ["ab", "ca"], ["ba", "c"]),
        (r"^(?!\.)(?!.*\.\.)([\w+.]*)\w@(\w+\.)+[a-z]{2,}$",
         ["a@b.co", "a.b.c@d.co"], [".a@b.co", "a..b@c.co", "a.@b.co", "a@b..co"]),
        (r"^(?!\-)(?!.*\-\-)", ["", "a", "a-b-"], ["-", "a--b"]),
    ],
)  # fmt: skip
def test_lookaheads_at_the_beginning_of_a_pattern(
    pattern: str, matching: list[str], others: list[str]
) -> None:
    for text in [*matching, *others]:
        assert (re.search(pattern, text) is not None) == (text in matching)
        assert accepts({"type": "string", "pattern": pattern}, text) == (text in matching)


@pytest.mark.parametrize("year", ["0000", "0400", "1900", "2000", "2023", "2024", "9999"])
def test_dates_exist_in_the_calendar(year: str) -> None:
    for month in ("00", "01", "02", "04", "12", "13"):
        for day in ("00", "01", "28", "29", "30", "31", "32"):
            text = f"{year}-{month}-{day}"
            try:
                exists = bool(datetime.date.fromisoformat(text))
            except ValueError:
                exists = False
            assert accepts({"type": "string", "format": "date"}, text) == exists, text
            time_text = f"{text}T12:30:59.5+01:00"
            assert accepts({"type": "string", "format": "date-time"}, time_text) == exists, text


def test_the_pattern_of_a_time_takes_precedence_over_its_format() -> None:
    for key, pattern, text in (("time", r"^\d\d:\d\d$", "12:30"), ("date-time", "^2T1$", "2T1")):
        assert accepts({"type": "string", "format": key, "pattern": pattern}, text)


def test_no_time_is_a_leap_second() -> None:
    assert not accepts({"type": "string", "format": "date-time"}, "2026-06-30T23:59:60Z")
    assert not accepts({"type": "string", "format": "time"}, "23:59:60Z")
    assert accepts({"type": "string", "format": "time"}, "23:59:59.5Z")


@pytest.mark.parametrize("pattern", ["^(?!http).*$", "^(?=a)b|c$", "(?<=a)b"])
def test_other_lookarounds_are_refused(pattern: str) -> None:
    with pytest.raises(InvalidArgument, match="look-around, including look-ahead"):
        accepts({"type": "string", "pattern": pattern}, "a")


def test_nulls_are_absent_except_in_values() -> None:
    schema = {"required": None, "properties": {"a": {"type": "string", "default": None}}}
    schema |= dict.fromkeys(("enum", "minimum", "format", "pattern", "x-guidance"))
    assert with_patterns(schema, schema) == {"properties": schema["properties"]}
    assert with_patterns({"const": None}, {}) == {"const": None}


def test_references_may_have_any_name_and_annotation() -> None:
    for name in ("List<A | B>", "My Model", "Größe", "a[b]", "a#b", "x^{y}`", "Foo%20-Input.1"):
        next_node = {"$ref": f"#/$defs/{name}", "deprecated": True, "x-order": 1, "nullable": False}
        node = {"type": "object", "properties": {"next": next_node}, "additionalProperties": False}
        schema = {"$ref": f"#/$defs/{name}", "$defs": {name.replace("%20", " "): node}}
        assert accepts(schema, {"next": {"next": {}}})
        assert not accepts(schema, {"next": {"other": {}}})


@pytest.mark.parametrize(
    "names",
    [
        {"$id": "Output Format"},
        {"$id": "Output Format", "$ref": "Output Format#/$defs/A"},
        {"$schema": "https://json-schema.org/draft-07/schema#"},
        {"$schema": "http://json-schema.org/draft/2020-12/schema"},
        {"$schema": "http://json-schema.org/schema#"},
        {"$schema": "my schema"},
    ],
)
def test_a_schema_may_have_any_name_and_version(names: dict[str, Any]) -> None:
    schema = {"$ref": "#/$defs/A", **names, "$defs": {"A": {"type": "integer"}}}
    assert accepts(schema, 1)
    assert not accepts(schema, "a")


def test_values_that_look_like_schemas_are_kept() -> None:
    value = {"propertyNames": {"const": "a"}}
    schema = {"const": value, "properties": {"a": {"enum": [value], "default": value}}}
    assert with_patterns(schema, schema) == schema


TEXT = 'the quick brown fox {"a": 1, "b": [true, null]} abcdefghijklmnopqrstuvwxyz 0123456789 '
TRAINERS: dict[str, Any] = {
    "BPE": trainers.BpeTrainer,
    "Unigram": trainers.UnigramTrainer,
    "WordPiece": trainers.WordPieceTrainer,
}


@pytest.mark.parametrize(
    ("model", "decoder"),
    [
        (models.BPE(unk_token="<unk>"), decoders.Metaspace()),
        (models.BPE(unk_token="<unk>"), decoders.Sequence([decoders.Metaspace()])),
        (models.BPE(unk_token="<unk>"),
         decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])),
        (models.Unigram(), decoders.Metaspace()),
        (models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"), decoders.BPEDecoder("</w>")),
        (models.WordPiece(unk_token="<unk>"), decoders.WordPiece(cleanup=False)),
        (models.WordPiece(unk_token="<unk>"), decoders.WordPiece(cleanup=True)),
    ],
)  # fmt: skip
def test_a_grammar_holds_for_vocabularies_of_every_kind(model: Any, decoder: Any) -> None:
    test_tokenizer = Tokenizer(model)
    words = isinstance(model, models.WordPiece)
    suffix = getattr(model, "end_of_word_suffix", None)
    splitters: dict[bool, Any] = {True: pre_tokenizers.BertPreTokenizer()}
    test_tokenizer.pre_tokenizer = splitters.get(words or bool(suffix), pre_tokenizers.Metaspace())
    test_tokenizer.decoder = decoder
    trainer = TRAINERS[type(model).__name__](
        vocab_size=300,
        special_tokens=["<unk>", "</s>"],
        show_progress=False,
        **({"end_of_word_suffix": suffix} if suffix else {}),
    )
    test_tokenizer.train_from_iterator([TEXT] * 5, trainer)
    if words and decoder.cleanup:  # like BERT's vocabulary
        test_tokenizer.add_tokens([f"##{character}" for character in '{}[]":,a1nul'])
    texts = TokenTexts(test_tokenizer)
    grammars = Grammars(texts, test_tokenizer.get_vocab_size() + 5, (1,))
    matcher = grammars.matcher(("regex", "(a|b| ?the)+ x"))
    bitmask = matcher.compute_bitmask()
    bits = [t for t in range(test_tokenizer.get_vocab_size()) if bitmask[t // 8] >> t % 8 & 1]
    first_letters = ("a", "b", "t", " ")
    assert bits and all(texts.bytes_of(t).decode().startswith(first_letters) for t in bits)
    if words and not decoder.cleanup:
        with pytest.raises(InvalidArgument, match="f: the model's vocabulary cannot write JSON"):
            grammars.matcher(("json_schema", "{}"), name="f")
        return
    matcher, data = grammars.matcher(("json_schema", '{"const": {"a": [1, null]}}')), b""
    tokens: list[int] = []
    while not matcher.is_stopped():
        bitmask = matcher.compute_bitmask()
        t = next(t for t in range(300) if bitmask[t // 8] >> t % 8 & 1)
        matcher.consume_token(t)
        data += texts.bytes_of(t)
        tokens.append(t)
    assert json.loads(data.removesuffix(b"</s>")) == {"a": [1, None]}
    detokenizer = Detokenizer(texts, True, test_tokenizer.encode("the fox").ids)
    pieces = [*map(detokenizer.add, tokens), detokenizer.flush()]
    assert json.loads("".join(pieces)) == {"a": [1, None]}
