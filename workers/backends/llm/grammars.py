"""Grammars of texts: their compilation, and the tokens that they allow at each position.

Grammars are compiled by llguidance. `with_patterns` replaces keywords of JSON schemas that
llguidance lacks.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, unquote

import torch

from shmserve.errors import InvalidArgument, clip
from shmserve.workers.backends.llm.token_texts import TokenTexts, with_pauses

NO_FORCING = '%llguidance {"no_forcing": true}'  # the model selects the tokenization


class Grammars:
    """A factory of grammar matchers for one tokenizer.

    The library takes seconds to read a large vocabulary, with the GIL held. A factory is therefore
    created before there are streams.
    """

    def __init__(self, texts: TokenTexts, vocab_size: int, end_tokens: tuple[int, ...]) -> None:
        import llguidance

        # The default message is the grammar of messages for requests that have none.
        self._end_tokens, self._tokenizer, self._default_message_grammar = end_tokens, None, ""
        self._has_quotes = True  # whether the vocabulary has a token that begins with a quote
        # The library's type hints lack the list of end tokens.
        create_tokenizer: Any = llguidance.LLTokenizer
        settings = {"n_vocab": vocab_size, "eos_token": [*end_tokens]}
        if not end_tokens:
            return
        try:
            self._tokenizer = create_tokenizer(texts.tokenizer.to_str(), **settings)
        except ValueError:  # the library does not support the tokenizer's decoder
            token_bytes = _TokenBytes(texts, vocab_size, end_tokens)
            self._tokenizer = create_tokenizer(token_bytes, **settings)
            self._has_quotes = any(piece.startswith(b'"') for piece in token_bytes.tokens)
            # llguidance tokenizes text that the grammar forces, for which it needs the exact bytes
            # of tokens. Decoded bytes may differ from them, so the model samples each token.
            self._default_message_grammar = f"{NO_FORCING}\nstart: @body"

    def matcher(
        self, grammar: tuple[str, str], message_grammar: str = "", name: str = "tools"
    ) -> Any:
        """Return a new matcher, which determines the tokens that a grammar allows next.

        Args:
            grammar: The grammar of the content, see `GenerationParameters.grammar`.
            message_grammar: The grammar of the whole message, which refers to `grammar` as `@body`;
                "" if the message consists of the content.
            name: The parameter of the request, for error texts.

        Raises:
            InvalidArgument: The text is not a grammar of its kind.
        """
        import llguidance

        kind, text = grammar
        if not self._end_tokens:
            raise InvalidArgument(f"{name}: the model has no end-of-text token")
        if kind == "json_schema" and not self._has_quotes:
            raise InvalidArgument(
                f"{name}: the model's vocabulary cannot write JSON: it has no token that begins "
                "with a quote and continues a word"
            )
        matcher: Any = llguidance.LLMatcher
        compilers = {
            "json_schema": _compile_json_schema,
            "regex": _compile_regex,
            "grammar": _compile_lark,
        }
        try:
            body = compilers[kind](text) if kind else ""
            message = message_grammar or self._default_message_grammar
            if kind == "json_schema" and not message_grammar:
                # In some vocabularies, each token that begins a word has a space, which is allowed.
                message = message.replace("@body", "/ ?/ @body")
            full_grammar = _with_body(message, body)
            _check_divisors(full_grammar)
            new_matcher = matcher(self._tokenizer, full_grammar)
            if not new_matcher.get_error():
                new_matcher.compute_bitmask()  # raises for grammars that allow no text
            error = new_matcher.get_error() or _list_unsupported(new_matcher.get_grammar_warnings())
        except Exception as exception:  # llguidance raises errors of any type for some schemas
            error = str(exception) or repr(exception)
        if error:
            raise InvalidArgument(f"{name}: cannot be compiled: {_shorten(error)}")
        return new_matcher


class _TokenBytes:
    """The bytes of all tokens, in llguidance's interface for tokenizers of other libraries."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, texts: TokenTexts, vocab_size: int, end_tokens: tuple[int, ...]) -> None:
        self.eos_token_id = end_tokens[0]
        self.tokens = [texts.bytes_of(token) for token in range(vocab_size)]
        self.special_token_ids = sorted(texts.special)
        self._tokenizer = texts.tokenizer

    def __call__(self, data: bytes | str) -> list[int]:
        text = data if isinstance(data, str) else data.decode()
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def _with_body(message_grammar: str, body: str) -> str:
    """Return a grammar of messages that refers to the grammar `body` as `@body`; either may be "".

    The grammars are in Lark's language or llguidance's JSON.
    """
    if not (message_grammar and body):
        return message_grammar or body
    content = {"lark_grammar": body}
    if body.lstrip().startswith("{"):
        (content,) = json.loads(body)["grammars"]
    message = {"name": "message", "lark_grammar": message_grammar}
    return json.dumps({"grammars": [message, {**content, "name": "body"}]})


# As in vLLM's default grammar library, these classes of a regular expression contain only ASCII
# characters and the no-break space.
_REGEX_CLASSES = {
    "d": "[0-9]",
    "w": "[0-9A-Za-z_]",
    "s": r"[\t-\r \xa0]",
    "D": "[^0-9]",
    "W": "[^0-9A-Za-z_]",
    "S": r"[^\t-\r \xa0]",
}


def _compile_regex(text: str) -> Any:
    import llguidance

    if text.replace("\\\\", "").endswith("\\"):  # llguidance ignores this character
        raise ValueError("the regular expression ends inside of an escape sequence")
    pattern = re.sub(r"(?s)\\(.)", lambda escape: _REGEX_CLASSES.get(escape[1], escape[0]), text)
    return llguidance.LLMatcher.grammar_from_regex(pattern)


# White space between the tokens of a JSON text. The pattern limits white space, as in llama.cpp,
# because some models would otherwise generate white space without end.
_WHITE_SPACE_PATTERN = r"( |\n{1,2}[ \t]{0,20})?"


def _compile_json_schema(text: str) -> Any:
    """Return llguidance's grammar of a JSON schema, which may set options in `x-guidance`.

    String formats that llguidance does not implement are ignored.
    """
    import llguidance

    schema = json.loads(text)
    if not isinstance(schema, dict):
        return llguidance.LLMatcher.grammar_from_json_schema(text)
    schema = with_patterns(schema, schema)
    options = {"whitespace_pattern": _WHITE_SPACE_PATTERN, **schema.get("x-guidance", {})}
    schema["x-guidance"] = {**options, "lenient": True}
    return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))


# The divisors of `multipleOf` in a grammar, which may contain a schema as an escaped string.
_DIVISOR = re.compile(
    r'multipleOf\\*"(?:\s|\\+[nrt])*:(?:\s|\\+[nrt])*(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)'
)
_UNICODE_ESCAPE = re.compile(r"(?<!\\)\\+u([0-9a-fA-F]{4})")  # linear in a long run of backslashes
_MAX_DIVISOR = 20_000


def _check_divisors(grammar: str) -> None:
    """Raise ValueError if divisors of whole numbers would take seconds to compile.

    llguidance creates a state for each remainder of the least common multiple, but only few states
    for factors of 2 and 5.
    """
    multiple = 1
    for _ in range(2):  # a schema in a string in JSON may have escapes in escapes
        grammar = _UNICODE_ESCAPE.sub(lambda escape: chr(int(escape[1], 16)), grammar)
    for match in _DIVISOR.finditer(grammar):
        divisor = float(match[1])
        if divisor and divisor % 1 == 0:
            multiple = math.lcm(multiple, int(divisor))
            for factor in (2, 5):
                while multiple % factor == 0:
                    multiple //= factor
        if multiple > _MAX_DIVISOR:
            raise ValueError(
                f"multipleOf: the least common multiple of the divisors, without factors of 2 and "
                f"5, is {multiple}, above the limit of {_MAX_DIVISOR}"
            )


def _list_unsupported(warnings: list[str]) -> str:
    """Return the features of a schema that llguidance's warnings report as unsupported, or "".

    Warnings about unknown formats and `uniqueItems` are left out, as both have no effect. Schemas
    of Python's sets contain `uniqueItems`.
    """
    ignored_warnings = ("Unknown format: ", 'Unimplemented keys: ["uniqueItems"]')
    return "; ".join(warning for warning in warnings if not warning.startswith(ignored_warnings))


def _shorten(error: str) -> str:
    first_line, *lines = error.splitlines()
    if first_line.startswith("NoExtension"):
        return "it matches no text"
    # If a regular expression is invalid, the reason is in a line after the expression.
    reason = next((line for line in lines if line.startswith("error: ")), "")
    return clip(f"{first_line} {reason}".rstrip(), 200)


def matcher_error(matcher: Any, name: str) -> InvalidArgument | None:
    """Return the error of a matcher that has failed, or None; `name` is the request's parameter."""
    if not matcher.is_error():
        return None
    return InvalidArgument(f"{name}: the grammar has failed: {_shorten(matcher.get_error())}")


_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
# The escape sequences of GBNF: characters by their numbers, brackets, and others.
_GBNF_ESCAPE = re.compile(
    r"(?s)\\(?:x([\da-fA-F]{2})|u([\da-fA-F]{4})|U([\da-fA-F]{8})|([\[\]])|.)"
)


def _compile_lark(text: str) -> Any:
    """Compile a grammar in Lark's language or in GBNF."""
    import llguidance
    from llguidance.gbnf_to_lark import gbnf_to_lark

    # The library's own test takes Lark grammars for GBNF if they begin with `?start`.
    is_gbnf = _GBNF_RULE.search(text) is not None
    lark = gbnf_to_lark(_GBNF_ESCAPE.sub(_convert_escape, text)) if is_gbnf else text
    return llguidance.LLMatcher.grammar_from_lark(lark)


def _convert_escape(escape: re.Match[str]) -> str:
    """Return an escape sequence of GBNF in a form that llguidance converts to Lark correctly."""
    if not escape.lastindex:
        return escape[0]
    code = ord(escape[4]) if escape[4] else int(escape[escape.lastindex], 16)
    return f"\\x{code:02x}" if code < 0x80 else chr(code)


def quote_text(text: str) -> str:
    """Return a string literal of llguidance's Lark, which is JSON without the character DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\x7f")


def allowed_tokens(matcher: Any, drafts: list[int]) -> tuple[list[int], list[torch.Tensor]]:
    """Return the draft tokens that a grammar accepts, and bitmasks of the allowed tokens.

    The bitmasks, int32 [vocabulary / 32], are for the position of each accepted draft token and for
    the position after the last. The matcher's state does not change.
    """
    masks = [_bitmask(matcher)]
    accepted_tokens: list[int] = []
    for token in drafts:
        if matcher.is_stopped() or not matcher.try_consume_tokens([token]):
            break
        accepted_tokens.append(token)
        masks.append(_bitmask(matcher))
    if accepted_tokens:
        matcher.rollback(len(accepted_tokens))
    return accepted_tokens, masks


def _bitmask(matcher: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.int32)


def resolve_reference(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the schema at a JSON pointer such as "#/$defs/City"; None if it does not exist."""
    node: Any = root
    for part in reference.split("/")[1:]:
        if isinstance(node, list):
            index = int(part) if part.isdecimal() and len(part) < 10 else len(node)
            node = node[index] if index < len(node) else None
        else:
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            node = node.get(name) if isinstance(node, dict) else None
    return node


# The keywords of JSON schemas whose values are objects of schemas.
SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUE_KEYWORDS = ("enum", "const", "default", "examples")
_MINIMA, _MAXIMA = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_MAX_LIMIT = 2**63 - 1024  # the largest limit of llguidance, which reads numbers as float64
# The keywords that restrict values, and those with a dollar sign. All others allow every value.
_VALIDATING_KEYWORDS = re.compile(
    "type|enum|const|multipleOf|(exclusiveM|m)(in|ax)imum|(min|max)(Length|Items|Properties|Contains)"
    "|pattern|format|(prefixI|additionalI|unevaluatedI|uniqueI|i)tems|contains|required|x-guidance"
    "|(patternP|additionalP|unevaluatedP|p)roperties|propertyNames|(all|any|one)Of|not|if|then|else"
    "|dependencies|dependent(Required|Schemas)|definitions|[$].*"
)
_POINTER_CHARACTERS = "/~?:@!$&'()*+,;=%"  # those of a URI's fragment that are not percent-encoded
# The URLs of llguidance's versions of JSON Schema, also with the wrong scheme (http, https).
_DRAFT_URL = re.compile("https?(://json-schema.org/draft(?:-0[3467]|/2019-09|/2020-12)/schema#?)")
_ANNOTATION_KEYWORDS = {"type", "title", "description", "default", "examples", "deprecated"}
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = "(?:0[48]|[2468][048]|[13579][26])"
_DAYS = (
    "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8])"
)
_DATE = f"(?:{_YEAR}-(?:{_DAYS})|(?:[0-9]{{2}}{_LEAP_YEAR}|{_LEAP_YEAR}00)-02-29)"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-][0-9]{2}:[0-9]{2})?"
_FORMAT_PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "uuid": "^[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}$",
}
_UUID_FORMATS = {
    f"uuid{version}": (
        f"^[0-9a-f]{{8}}-[0-9a-f]{{4}}-{version}[0-9a-f]{{3}}-[89ab][0-9a-f]{{3}}-[0-9a-f]{{12}}$"
    )
    for version in range(1, 9)
}


def with_patterns(schema: Any, root: Any) -> Any:
    """Replace keywords that llguidance lacks by other keywords where possible.

    The keywords are `propertyNames`, pydantic's formats of UUIDs, patterns that begin with
    lookaheads, limits that float64 cannot represent, and references with characters that URIs do
    not allow. Dates and times receive a pattern without the leap days and seconds that Python
    rejects. Some exclusive limits are moved. Keywords whose value is null are removed, as are
    unknown values of `$schema`. Next to a reference, keywords that allow every value are removed,
    since llguidance rejects unknown keywords there if the schema is recursive.

    Args:
        schema: The schema, or a part of it.
        root: The whole schema, which contains the targets of references.

    Raises:
        ValueError: A number cannot be represented, or `x-guidance` is not an object.
    """
    if isinstance(schema, list):
        return [with_patterns(subschema, root) for subschema in with_pauses(schema)]
    if not isinstance(schema, dict):
        return schema
    result: dict[str, Any] = {}
    patterns: list[str] = []
    for key, value in schema.items():
        if value is None and key not in ("const", "default"):
            continue
        if "$ref" in schema and not _VALIDATING_KEYWORDS.fullmatch(key):
            continue
        # The pattern replaces the format: llguidance's format requires an offset and seconds, which
        # zod's patterns do not allow.
        if key == "format" and value in ("time", "date-time") and "pattern" in schema:
            continue
        if key in SCHEMA_MAPS and isinstance(value, dict):
            members = with_pauses(value.items())
            result[key] = {name: with_patterns(schema, root) for name, schema in members}
        elif key in _VALUE_KEYWORDS:
            if key in ("enum", "const"):
                _check_integers(key, value)
            result[key] = value
        elif key in _MINIMA or key in _MAXIMA:
            result[key] = _representable_limit(key, value)
        elif key == "format" and str(value) in _UUID_FORMATS and "pattern" not in schema:
            result["pattern"] = _UUID_FORMATS[value]
        elif key == "format" and value in ("date", "time", "date-time") and "pattern" not in schema:
            result |= {key: value, "pattern": _FORMAT_PATTERNS[value]}
        elif key == "x-guidance" and not isinstance(value, dict):
            raise ValueError(f"{key}: {clip(repr(value))} is not an object")
        elif key in ("$ref", "$id") and isinstance(value, str):
            reference_parts = value.split("#", 1)
            result[key] = "#".join(quote(part, _POINTER_CHARACTERS) for part in reference_parts)
        elif key == "$schema" and isinstance(value, str):
            if draft_url := _DRAFT_URL.fullmatch(value):
                scheme = "https" if "/20" in value else "http"
                result[key] = f"{scheme}{draft_url[1]}"
        elif key == "pattern" and isinstance(value, str):
            *patterns, result[key] = _split_lookaheads(value)
        else:
            result[key] = with_patterns(value, root)
    if patterns:
        result["allOf"] = [*result.get("allOf", ()), *({"pattern": text} for text in patterns)]
    _exclude_limits(result)
    pattern = _names_pattern(schema.get("propertyNames"), root)
    if pattern == "":
        del result["propertyNames"]
    elif pattern and not result.keys() & {"properties", "patternProperties"}:
        del result["propertyNames"]
        result["patternProperties"] = {pattern: result.get("additionalProperties", {})}
        result["additionalProperties"] = False
    return result


# A lookahead at the beginning of a pattern: (?=...); (?!^[...]*$) as in pydantic's pattern of
# decimals, which excludes texts that consist only of these characters; or (?!\.)(?!.*\.\.) as in
# zod's pattern of email addresses, which excludes texts that begin with the character or contain it
# twice in a row.
_CLASS = r"\[(?:[^\]\\]|\\.)+\]"  # a character class
_LOOKAHEAD = re.compile(
    rf"\^\(\?(?:=((?:[^()\\[]|\\.|{_CLASS})+)|!\^?({_CLASS}|\\[sdwSDW])\*\$|!(\\\W)|!\.\*(\\\W)\4)\)",
    re.DOTALL,
)
# A group at the end of a pattern that matches every text, since one alternative may be empty: the
# digits in pydantic 2.12's pattern of decimals with `max_digits`.
_OPTIONAL_END = re.compile(
    rf"\(\?:(?:{_CLASS}|\\[dsw])(?:[*?]|\{{0,\d*\}})\|(?:[^()\\[]|\\.|{_CLASS}|\([^()]*\))*\)\Z"
)


def _split_lookaheads(pattern: str) -> list[str]:
    """Return patterns without lookaheads; a text must match all of them instead of `pattern`."""
    patterns: list[str] = []
    pattern = _OPTIONAL_END.sub("", pattern)
    if "|" in re.sub(rf"\\.|{_CLASS}|\([^()]*\)", "", pattern):
        return [pattern]  # a lookahead may belong to one of several alternatives
    while match := _LOOKAHEAD.match(pattern):
        expected_pattern, excluded_pattern, first_character, doubled_character = match.groups()
        if first_character or doubled_character:
            undoubled = f"^(?:{doubled_character}?[^{doubled_character}])*{doubled_character}?$"
            patterns.append(f"^(?:[^{first_character}]|$)" if first_character else undoubled)
        elif expected_pattern is None and excluded_pattern[0] == "[":
            is_negated = excluded_pattern[1] == "^"
            patterns.append(
                f"[{excluded_pattern[2:]}" if is_negated else f"[^{excluded_pattern[1:]}"
            )
        else:
            patterns.append(
                f"^(?:{expected_pattern})" if expected_pattern else excluded_pattern.swapcase()
            )
        pattern = f"^{pattern[match.end() :]}"
    return [*patterns, pattern]


def _check_integers(key: str, value: Any) -> None:
    """Raise ValueError if a value has an integer that llguidance would round to another integer."""
    if isinstance(value, list | dict):
        for item in with_pauses(value if isinstance(value, list) else value.values()):
            _check_integers(key, item)
    elif type(value) is int and (value.bit_length() > 1000 or int(float(value)) != value):
        raise ValueError(f"{key}: {clip(str(value))} is an integer that float64 cannot represent")


def _representable_limit(key: str, value: Any) -> Any:
    """Return a limit of integers, rounded to a float64 that is at least as strict.

    Raises:
        ValueError: The limit excludes all integers of 64 bits.
    """
    if type(value) is not int or abs(value) <= 2**53:
        return value
    sign = 1 if key in _MINIMA else -1
    directed_value = max(sign * value, -_MAX_LIMIT)
    if directed_value > _MAX_LIMIT:
        raise ValueError(f"{key}: {clip(str(value))} is beyond the limit of {sign * _MAX_LIMIT}")
    rounded_value = float(directed_value)
    if rounded_value < directed_value:
        rounded_value = math.nextafter(rounded_value, math.inf)
    return sign * int(rounded_value)


def _exclude_limits(schema: dict[str, Any]) -> None:
    """Replace exclusive limits that llguidance would allow by inclusive limits beyond them.

    llguidance allows a limit that is a whole number if another limit is less than 1 away, as in
    0 < x <= 0.5.
    """
    keys = (*_MINIMA, *_MAXIMA)
    limits = {key: schema[key] for key in keys if type(schema.get(key)) in (int, float)}
    for key, inclusive_key, other_keys, sign in (
        ("exclusiveMinimum", "minimum", _MAXIMA, 1),
        ("exclusiveMaximum", "maximum", _MINIMA, -1),
    ):
        # In draft 4 of JSON Schema, the exclusive keyword is a bool.
        limit = limits.get(inclusive_key if schema.get(key) is True else key, math.nan)
        other_limits = (limits[other_key] for other_key in other_keys if other_key in limits)
        if limit % 1 == 0 and any(sign * (other_key - limit) < 1 for other_key in other_limits):
            exclusive_limit = limit + sign * max(1e-9, math.ulp(limit))
            inclusive_limit = limits.get(inclusive_key, exclusive_limit)
            schema[inclusive_key] = max(exclusive_limit, inclusive_limit, key=lambda x: sign * x)
            del schema[key]


def _names_pattern(names_schema: Any, root: Any) -> str | None:
    """Return the regular expression for `propertyNames`; "": any name; None: not expressible."""
    if isinstance(names_schema, dict) and "$ref" in names_schema:
        names_schema = resolve_reference(str(names_schema["$ref"]), root)
    if not isinstance(names_schema, dict) or names_schema.get("type", "string") != "string":
        return "" if names_schema is True else None
    limits = {key: value for key, value in names_schema.items() if key not in _ANNOTATION_KEYWORDS}
    if limits.keys() <= {"minLength", "maxLength"}:
        min_length, max_length = limits.get("minLength", 0), limits.get("maxLength", "")
        return f"^[\\s\\S]{{{min_length},{max_length}}}$" if limits else ""
    (key, value), *other_limits = limits.items()
    values = [text for text in (value if key == "enum" else [value]) if isinstance(text, str)]
    if other_limits or not values:
        return None
    if key in ("enum", "const"):
        return f"^(?:{'|'.join(map(re.escape, values))})$"
    if key == "format":
        return {**_FORMAT_PATTERNS, **_UUID_FORMATS}.get(value)
    return value if key == "pattern" else None
