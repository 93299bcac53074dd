"""Formats of tool calls: a parser and a grammar (in Lark's language) for each family of models."""

from __future__ import annotations

import ast
import json
import re
import string
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shmserve.workers.backends.llm.grammars import resolved, with_patterns
from shmserve.workers.backends.llm.message_parsers import (
    CLOSING,
    NAME,
    MalformedCall,
    MessageParser,
    Reading,
    ToolSyntax,
    ignore,
)

# The separators of json.dumps and of templates, which models have seen in training.
# Formats without an implementation are annotations, as in other grammars.
_OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": True,
}


class Tool(NamedTuple):
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool


class Calls(NamedTuple):
    """Parts of a grammar for tool calls.

    Attributes:
        heads: The beginning of the first call, and the rest of the call, for each way to begin.
        separator: The text between calls.
        call: A further call.
        end: The text after the last call.
    """

    heads: list[tuple[str, str]]
    separator: str
    call: str
    end: str = ""


@dataclass(eq=False)
class Lark:
    """The rules of a grammar in Lark's language; `special` has special tokens by their texts."""

    special: Mapping[str, int]
    rules: list[str] = field(default_factory=list)

    def rule(self, body: str, lazy: bool = False) -> str:
        """Add a rule, and return its name."""
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{'[lazy]' * lazy}: {body}")
        return name

    def text(self, text: str) -> str:
        """Return an expression for a text, in which special tokens are written as tokens."""
        names = "|".join(map(re.escape, self.special))
        parts = re.split(f"({names})", text) if names else [text]
        tokens = (
            f"<[{self.special[part]}]>" if part in self.special else _quoted(part)
            for part in parts
            if part
        )
        return " ".join(tokens) or '""'

    def any_text(self, end: str) -> str:
        """Return a rule for any text up to the first `end`, which is included."""
        if end in self.special:
            return self.rule(f"TEXT {self.text(end)}")
        return self.rule(f"TEXT {_quoted(end)}", lazy=True)

    def json(self, schema: Any) -> str:
        """Return an expression for the JSON values of a schema."""
        extended = with_patterns(schema, schema)
        spaced = {**extended, "x-guidance": {**_OPTIONS, **schema.get("x-guidance", {})}}
        return f"%json {json.dumps(spaced)}"

    def alternatives(self, bodies: Iterable[str]) -> str:
        """Return a rule that one of several expressions matches."""
        return self.rule(" | ".join(self.rule(body) for body in bodies))

    def sequence(self, calls: Calls, first: str, parallel: bool) -> str:
        """Return a rule for calls."""
        further = f"({calls.separator} {calls.call})*" if parallel else ""
        return self.rule(f"{first} {further} {calls.end}")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json_call(parser: MessageParser, must_exist: bool = False) -> Reading[None]:
    """Read a call of the form {"name": ..., "arguments": {...}}.

    With `must_exist`, the name has to be that of a tool.
    """
    yield from parser.expect("{")
    complete = False
    while True:
        key = yield from parser.json_string()
        yield from parser.expect(":")
        if key == "name":
            name = yield from parser.json_string()
            if must_exist and name not in parser.format.tools:
                raise MalformedCall
            parser.name(name)
        elif key in ("arguments", "parameters") and not complete:
            yield from parser.json_arguments()
            complete = True
        elif key in ("id", "type"):
            yield from parser.json(ignore)
        else:
            raise MalformedCall
        character = yield from parser.skip()
        if character == ",":
            parser.pull(1)
            continue
        if not parser.call.name or (character != "}" and not complete):
            raise MalformedCall
        if not complete:
            parser.arguments("{}")
        if character == "}":  # models may omit the last brace
            parser.pull(1)
        return


def _json_call_rule(lark: Lark, tool: Tool, key: str) -> str:
    """Return an expression for a call as a JSON object, from the tool's name on."""
    begin, end = lark.text(f'{tool.name}", "{key}": '), lark.text("}")
    return f"{begin} {lark.json(tool.parameters)} {end}"


def _hermes(parser: MessageParser) -> Reading[None]:
    """Read calls of the form <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""
    while (yield from parser.content_until("<tool_call>")):
        yield from parser.attempt(_json_call(parser), "</tool_call>")


def _hermes_calls(lark: Lark, tools: tuple[Tool, ...]) -> Calls:
    bodies = (_json_call_rule(lark, tool, "arguments") for tool in tools)
    begin, end = lark.text('\n{"name": "'), lark.text("\n</tool_call>")
    rest = lark.rule(f"{begin} {lark.alternatives(bodies)} {end}")
    return _begun_by(lark, "<tool_call>", rest, "\n")


def _begun_by(lark: Lark, tag: str, rest: str, separator: str) -> Calls:
    """Return the grammar of calls that all begin with a tag."""
    return Calls([(tag, rest)], lark.text(separator), f"{lark.text(tag)} {rest}")


def _llama_json(parser: MessageParser) -> Reading[None]:
    """Read calls of the form {"name": ..., "parameters": {...}}.

    Calls are separated by semicolons or lines.
    """
    while tag := (yield from parser.content_until("<|python_tag|>", "{")):
        if tag == "{":
            if parser.inside_json:
                parser.add_content(tag)
                continue
            parser.unread(tag)
        yield from parser.attempt(_json_call(parser, must_exist=True))


def _llama_calls(lark: Lark, tools: tuple[Tool, ...]) -> Calls:
    rest = lark.alternatives(_json_call_rule(lark, tool, "parameters") for tool in tools)
    return _begun_by(lark, '{"name": "', rest, "; ")


def _mistral(parser: MessageParser) -> Reading[None]:
    """Read [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...] or [TOOL_CALLS]name[ARGS]{...}."""
    while (yield from parser.content_until("[TOOL_CALLS]")):
        if (yield from parser.skip()) != "[":
            yield from parser.attempt(_mistral_call(parser))
            continue
        parser.pull(1)
        yield from _listed(parser, _json_call)


def _listed(parser: MessageParser, call: Callable[[MessageParser], Reading[None]]) -> Reading[None]:
    """Read calls with commas between them, up to the bracket after the last one."""
    while (yield from parser.attempt(call(parser))):
        separator = yield from parser.skip()
        if separator in ("]", ","):
            parser.pull(1)
        if separator != ",":
            parser.discard_read()
            return


def _mistral_call(parser: MessageParser) -> Reading[None]:
    name, tag = yield from parser.text_until("[CALL_ID]", "[ARGS]", "{")
    if tag == "[CALL_ID]":
        parser.call.id, _ = yield from parser.text_until("[ARGS]")
    elif tag == "{":
        parser.unread(tag)
    parser.name(name.strip())
    yield from parser.json_arguments()


def _mistral_calls(lark: Lark, tools: tuple[Tool, ...]) -> Calls:
    tag = "[TOOL_CALLS]"
    if "[ARGS]" in lark.special:
        bodies = (
            f"{lark.text(tool.name + '[ARGS]')} {lark.json(tool.parameters)}" for tool in tools
        )
        rest = lark.alternatives(bodies)
        return Calls([(tag, rest)], "", f"{lark.text(tag)} {rest}")
    bodies = (_json_call_rule(lark, tool, "arguments") for tool in tools)
    begin = lark.text('{"name": "')
    call = lark.rule(f"{begin} {lark.alternatives(bodies)}")
    return Calls([(tag, f"{lark.text('[')} {call}")], lark.text(", "), call, lark.text("]"))


def _qwen_xml(parser: MessageParser) -> Reading[None]:
    """Read calls with their parameters as XML elements.

    The form is
    <tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>.
    """
    while tag := (yield from parser.content_until("<tool_call>", "<function=")):
        wrapped = tag == "<tool_call>"
        yield from parser.attempt(_xml_call(parser, wrapped), "</tool_call>" if wrapped else "")


def _xml_call(parser: MessageParser, wrapped: bool) -> Reading[None]:
    if wrapped:
        yield from parser.expect("<function=")
    name, _ = yield from parser.text_until(">")
    name = name.strip("\"' ")
    schema = parser.format.tools.get(name, {})
    parser.name(name)
    opening = "{"
    while True:
        yield from parser.expect("<")
        if (yield from parser.peek()) == "/":
            yield from parser.expect("/function>")
            parser.arguments("{}" if opening == "{" else "}")
            return
        yield from parser.expect("parameter=")
        key, _ = yield from parser.text_until(">")
        parser.arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
        opening = ", "
        yield from _xml_value(parser, schema, key)


def _xml_value(parser: MessageParser, schema: Mapping[str, Any], name: str) -> Reading[None]:
    """Pass on the value of a parameter, which is a text or JSON by its schema."""
    ends = ("\n</parameter>", "</parameter>")
    if (yield from parser.peek()) == "\n":
        parser.pull(1)
    if is_plain_text(schema, name):
        parser.arguments('"')
        if not (yield from parser.until(lambda text: parser.arguments(_escaped(text)), *ends)):
            raise MalformedCall
        parser.arguments('"')
        return
    text, _ = yield from parser.text_until(*ends)
    types = parameter_types(schema, name)
    value, written = _literal(text)
    matches = type_name(value) in types and (types != {"string", "null"} or value is None)
    text_alone = "string" in types and not matches
    parser.arguments(json.dumps(text, ensure_ascii=False) if text_alone or not written else written)


def _literal(text: str) -> tuple[Any, str]:
    """Return the value of a literal in JSON or Python, and its JSON; (None, "") for other text."""
    text = text.strip()
    with suppress(ValueError, RecursionError):
        return json.loads(text, parse_constant=_refuse), text
    with suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        value = ast.literal_eval(text)
        return value, json.dumps(value, ensure_ascii=False, allow_nan=False)
    return None, ""


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _qwen_calls(lark: Lark, tools: tuple[Tool, ...]) -> Calls:
    rest = lark.alternatives(_xml_call_rule(lark, tool) for tool in tools)
    return _begun_by(lark, "<tool_call>", rest, "\n")


def _xml_call_rule(lark: Lark, tool: Tool) -> str:
    parts = [lark.text(f"\n<function={tool.name}>\n")]
    for name, schema, required in _properties(tool):
        value = _xml_value_rule(lark, name, schema, tool.parameters)
        parts.append(value if required else f"{lark.rule(value)}?")
    return " ".join([*parts, lark.text("</function>\n</tool_call>")])


def _xml_value_rule(
    lark: Lark, name: str, schema: Mapping[str, Any], root: Mapping[str, Any]
) -> str:
    begin, end = lark.text(f"<parameter={name}>\n"), "\n</parameter>\n"
    if is_plain_text(root, name):
        return f"{begin} {lark.any_text(end)}"
    texts = [each for each in schema.get("enum", ()) if isinstance(each, str)]
    if "string" in parameter_types(root, name) and texts == schema.get("enum"):
        return f"{begin} ({' | '.join(map(lark.text, texts))}) {lark.text(end)}"
    return f"{begin} {lark.json(schema)} {lark.text(end)}"


def type_name(value: Any) -> str:
    """Return the name that JSON schemas have for the type of a value."""
    names = {bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
    return names.get(type(value), "null" if value is None else "string")


def parameter_types(schema: Mapping[str, Any], name: str) -> set[str]:
    """Return the types that a tool's schema allows for a parameter; "string" if it has none."""
    return _types(_property(schema, name), schema, 0) or {"string"}


def is_plain_text(schema: Mapping[str, Any], name: str) -> bool:
    """Return whether a tool's parameter may be any text."""
    limits = {"enum", "const", "pattern", "format", "minLength", "maxLength", "$ref"}
    types, limited = parameter_types(schema, name), limits & _property(schema, name).keys()
    return types == {"string"} and not limited


def _property(schema: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    properties = schema.get("properties")
    value = properties.get(name) if isinstance(properties, dict) else None
    return value if isinstance(value, dict) else {}


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> set[str]:
    if not isinstance(schema, dict) or depth > 8:
        return set()
    named = schema.get("type")
    if named is not None:
        types = {str(each) for each in (named if isinstance(named, list) else [named])}
        return types | {"integer"} if "number" in types else types
    if "enum" in schema or "const" in schema:
        return {type_name(each) for each in schema.get("enum", [schema.get("const")])}
    if "$ref" in schema:
        return _types(resolved(str(schema["$ref"]), root), root, depth + 1)
    alternatives = [*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())]
    return {each for alternative in alternatives for each in _types(alternative, root, depth + 1)}


def _properties(tool: Tool) -> list[tuple[str, dict[str, Any], bool]]:
    """Return the name, the schema and the necessity of each parameter."""
    root = tool.parameters
    defined = {key: root[key] for key in ("$defs", "definitions") if key in root}
    value = root.get("properties")
    properties = value if isinstance(value, dict) else {}
    return [
        (
            name,
            {**defined, **schema} if isinstance(schema, dict) else {},
            name in root.get("required", ()),
        )
        for name, schema in properties.items()
    ]


def _pythonic(parser: MessageParser) -> Reading[None]:
    """Read [name(key="text", other=3), ...], a list of calls in Python."""
    while tag := (yield from parser.content_until("<|python_start|>", "<|python_end|>", "[")):
        if tag != "[":
            parser.discard_read()
            continue
        yield from _listed(parser, _python_call)


def _python_call(parser: MessageParser) -> Reading[None]:
    yield from parser.skip()
    name = yield from _identifier(parser, "(")
    if name not in parser.format.tools:
        raise MalformedCall
    parser.name(name)
    opening = "{"
    while (yield from parser.skip()) != ")":
        key = yield from _identifier(parser, "=")
        parser.arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
        opening = ", "
        yield from _python_value(parser)
        if (yield from parser.skip()) == ",":
            parser.pull(1)
        elif (yield from parser.peek()) != ")":
            raise MalformedCall
    parser.pull(1)
    parser.arguments("{}" if opening == "{" else "}")


def _identifier(parser: MessageParser, end: str) -> Reading[str]:
    """Read an identifier and the character after it, one of `end`; return the identifier."""
    name = ""
    while NAME.fullmatch((yield from parser.peek()) or " "):
        name += parser.pull(1)
    yield from parser.expect(end)
    if not name:
        raise MalformedCall
    return name


_HEX = {"x": 2, "u": 4, "U": 8}  # number of hexadecimal digits of escape sequences


def _python_value(parser: MessageParser) -> Reading[None]:
    quote = yield from parser.skip()
    if quote in ('"', "'"):
        parser.pull(1)
        parser.arguments('"')
        while (char := (yield from parser.peek())) != quote:
            if not char:
                raise MalformedCall
            parser.pull(1)
            is_plain = char != "\\"
            parser.arguments(_escaped(char) if is_plain else (yield from _python_escape(parser)))
        parser.pull(1)
        parser.arguments('"')
        return
    text = yield from _python_literal(parser)
    _, written = _literal(text)
    if not written:
        raise MalformedCall
    parser.arguments(written)


def _python_escape(parser: MessageParser) -> Reading[str]:
    """Return the JSON of the escape sequence whose backslash was read."""
    kind = yield from parser.peek()
    sequence = parser.pull(1)
    while kind and len(sequence) <= _HEX.get(kind, 0) and (yield from parser.peek()):
        sequence += parser.pull(1)
    if kind == "u" and all(char in string.hexdigits for char in sequence[1:]):
        # JSON has the same escape sequence, also for halves of surrogate pairs.
        return f"\\{sequence}"
    if kind not in {*"/\\'\"\nabfnrtv", *_HEX}:
        return _escaped(f"\\{sequence}")
    with suppress(SyntaxError):
        return _escaped("/" if kind == "/" else ast.literal_eval(f'"\\{sequence}"'))
    raise MalformedCall


def _python_literal(parser: MessageParser) -> Reading[str]:
    """Read a literal up to the comma or the parenthesis after it, and return its text."""
    text, stack, quote = "", "", ""
    while char := (yield from parser.peek()):
        if not stack and not quote and char in ",)":
            return text.strip()
        text += parser.pull(1)
        if quote:
            if char == "\\" and (yield from parser.peek()):
                text += parser.pull(1)
            elif char == quote:
                quote = ""
        elif char in "\"'":
            quote = char
        elif char in CLOSING:
            stack += CLOSING[char]
        elif stack and char == stack[-1]:
            stack = stack[:-1]
        elif char in ")]}":
            break
    raise MalformedCall


def _escaped(text: str) -> str:
    """Return text as a part of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _pythonic_calls(lark: Lark, tools: tuple[Tool, ...]) -> Calls:
    rests = {
        tool.name: lark.rule(f"{_python_arguments(lark, tool)} {lark.text(')')}") for tool in tools
    }
    heads = [(f"[{name}(", rest) for name, rest in rests.items()]
    call = lark.alternatives(f"{lark.text(name + '(')} {rest}" for name, rest in rests.items())
    return Calls(heads, lark.text(", "), call, lark.text("]"))


def _python_arguments(lark: Lark, tool: Tool) -> str:
    """Return an expression for keyword arguments, with commas between those that are given."""
    first, further = '""', '""'
    for name, schema, required in reversed(_properties(tool)):
        value = f"{lark.text(name + '=')} {lark.json(schema)}"
        after = lark.rule(further)
        begin = f"{value} {after}"
        first = begin if required else f"{begin} | {lark.rule(first)}"
        with_comma = f"{lark.text(', ')} {value} {after}"
        further = with_comma if required else f"{with_comma} | {after}"
    return lark.rule(first)


FAMILIES: Mapping[str, ToolSyntax] = {
    "qwen3_coder": ToolSyntax(
        _qwen_xml, _qwen_calls, ("<tool_call>", "</tool_call>"), "<function="
    ),
    "hermes": ToolSyntax(_hermes, _hermes_calls, ("<tool_call>", "</tool_call>"), "<tool_call>"),
    "mistral": ToolSyntax(
        _mistral,
        _mistral_calls,
        ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        r"\[TOOL_CALLS\]",
        id_length=9,  # Mistral's templates demand this length
    ),
    "pythonic": ToolSyntax(
        _pythonic,
        _pythonic_calls,
        ("<|python_start|>", "<|python_end|>"),
        r"\[\w+\(\w+=\w+",
    ),
    "llama3_json": ToolSyntax(
        _llama_json,
        _llama_calls,
        ("<|python_tag|>",),
        r"<\|python_tag\|>|\"parameters\": dictionary of argument name",
        between=" \t\r\n;,[]",
    ),
}
ALIASES = {"qwen3_xml": "qwen3_coder", "llama4_json": "llama3_json", "llama4_pythonic": "pythonic"}
# The tags of each parser of reasoning. The first one that a template contains is used.
REASONING: Mapping[str, tuple[str, str]] = {
    "qwen3": ("<think>", "</think>"),
    "deepseek_r1": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
}
TOOL_PARSERS = (*FAMILIES, *ALIASES)


def parsers_of(templates: Iterable[str]) -> tuple[str, str]:
    """Return the names of the parsers of calls and of reasoning for chat templates, or none."""
    text = "\n".join(templates)
    calls = (name for name, family in FAMILIES.items() if re.search(family.hint, text))
    thoughts = (name for name, (_, end) in REASONING.items() if end in text)
    return next(calls, "none"), next(thoughts, "none")
