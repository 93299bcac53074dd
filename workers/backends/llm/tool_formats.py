"""Formats of tool calls: a parser and a grammar (in Lark's language) for each family of models.

The functions `_read_...` are parsers, the functions `_..._grammar` return grammars.
"""

from __future__ import annotations

import ast
import json
import re
import string
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shmserve.errors import InvalidArgument, clip
from shmserve.workers.backends.llm.grammars import quote_text, resolve_reference, with_patterns
from shmserve.workers.backends.llm.message_parsers import (
    CLOSING,
    NAME,
    MalformedCall,
    MessageParser,
    Reading,
    ToolSyntax,
    ignore,
)

# Options of llguidance. The separators are as in json.dumps and in chat templates, which models
# have seen in training. `lenient` ignores string formats that llguidance does not implement.
_JSON_OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": True,
}


class Tool(NamedTuple):
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, Any]  # JSON schema
    strict: bool  # whether arguments must match the schema


class CallGrammar(NamedTuple):
    """The expressions of a grammar for tool calls.

    Attributes:
        first_calls: The alternatives for the first call: its opening text, and an expression for
            the rest. If calls are optional, other text may precede the opening text.
        separator: The expression between calls.
        call: The expression for each call after the first.
        end: The expression after the last call.
    """

    first_calls: list[tuple[str, str]]
    separator: str
    call: str
    end: str = ""


@dataclass(eq=False)
class Lark:
    """A builder of a grammar in Lark's language, with llguidance's extensions.

    Attributes:
        special_tokens: The special tokens by their texts.
        rules: The rules that were added.
    """

    special_tokens: Mapping[str, int]
    rules: list[str] = field(default_factory=list)

    def rule(self, body: str, is_lazy: bool = False) -> str:
        """Add a rule with this body to the grammar, and return its name."""
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{'[lazy]' * is_lazy}: {body}")
        return name

    def text(self, text: str) -> str:
        """Return an expression for a text; special tokens in it are matched as tokens."""
        names = "|".join(map(re.escape, self.special_tokens))
        parts = re.split(f"({names})", text) if names else [text]
        special = self.special_tokens
        tokens = (f"<[{special[p]}]>" if p in special else quote_text(p) for p in parts if p)
        return " ".join(tokens) or '""'

    def any_text(self, end: str) -> str:
        """Return a rule for any text that ends with the first occurrence of `end`."""
        if end in self.special_tokens:
            return self.rule(f"TEXT {self.text(end)}")
        return self.rule(f"TEXT {quote_text(end)}", is_lazy=True)

    def json(self, schema: Any) -> str:
        """Return an expression for the JSON values of a schema."""
        try:
            converted_schema = with_patterns(schema, schema)
        except Exception as error:  # some schemas raise errors of other types than ValueError
            raise InvalidArgument(
                f"tools: the parameters of a tool cannot be compiled to a grammar: {error}"
            ) from None
        options = {**_JSON_OPTIONS, **converted_schema.get("x-guidance", {})}
        return f"%json {json.dumps({**converted_schema, 'x-guidance': options})}"

    def alternatives(self, bodies: Iterable[str]) -> str:
        """Return a rule for one of several expressions."""
        return self.rule(" | ".join(self.rule(body) for body in bodies))

    def sequence(self, calls: CallGrammar, first_call: str, allows_parallel_calls: bool) -> str:
        """Return a rule for `first_call`, and for further calls if they may be parallel."""
        further_calls = f"({calls.separator} {calls.call})*" if allows_parallel_calls else ""
        return self.rule(f"{first_call} {further_calls} {calls.end}")


def _read_json_call(parser: MessageParser, must_exist: bool = False) -> Reading[None]:
    """Read a call of the form {"name": ..., "arguments": {...}}.

    Args:
        parser: The parser.
        must_exist: Whether a call of an unknown tool is malformed.
    """
    yield from parser.expect("{")
    is_done = has_other_keys = False
    while True:
        key = yield from parser.read_json_string()
        yield from parser.expect(":")
        if key == "name":
            name = yield from parser.read_json_string()
            if must_exist and name not in parser.format.tools:
                raise MalformedCall
            parser.set_name(name)
        elif key in ("arguments", "parameters") and not is_done:
            yield from parser.read_json_arguments()
            is_done = True
        else:
            has_other_keys = has_other_keys or key not in ("id", "type")
            yield from parser.read_json(ignore)
        character = yield from parser.skip()
        if character == ",":
            parser.pull(1)
            continue
        if not parser.current_call.name or (not is_done and (character != "}" or has_other_keys)):
            raise MalformedCall
        if not is_done:
            parser.add_arguments("{}")
        if character == "}":  # models may omit the last brace
            parser.pull(1)
        return


def _json_call_rule(lark: Lark, tool: Tool, key: str) -> str:
    """Return a grammar expression for a JSON call after `{"name": "`; arguments are at `key`."""
    begin, end = lark.text(f'{tool.name}", "{key}": '), lark.text("}")
    return f"{begin} {lark.json(tool.parameters)} {end}"


def _read_hermes(parser: MessageParser) -> Reading[None]:
    """Read calls of the form <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""
    while (yield from parser.read_content("<tool_call>")):
        yield from parser.read_call(_read_hermes_call(parser))


def _read_hermes_call(parser: MessageParser) -> Reading[None]:
    """Read a call and its closing tag, unless the text ends before or inside of the tag.

    As in vLLM, other text after the object makes the call malformed.
    """
    yield from _read_json_call(parser)
    yield from parser.expect("</tool_call>", may_be_cut=True)


def _hermes_grammar(lark: Lark, tools: tuple[Tool, ...]) -> CallGrammar:
    call_bodies = (_json_call_rule(lark, tool, "arguments") for tool in tools)
    begin, end = lark.text('\n{"name": "'), lark.text("\n</tool_call>")
    rest_rule = lark.rule(f"{begin} {lark.alternatives(call_bodies)} {end}")
    return _tagged_calls(lark, "<tool_call>", rest_rule, "\n")


def _tagged_calls(lark: Lark, tag: str, rest_rule: str, separator: str) -> CallGrammar:
    """Return the grammar of calls that begin with the same tag, followed by `rest_rule`."""
    return CallGrammar([(tag, rest_rule)], lark.text(separator), f"{lark.text(tag)} {rest_rule}")


def _read_llama_json(parser: MessageParser) -> Reading[None]:
    """Read calls of the form {"name": ..., "parameters": {...}}.

    Calls are separated by semicolons or lines.
    """
    while tag := (yield from parser.read_content("<|python_tag|>", "{")):
        if tag == "{":
            if parser.ends_with_json_key:
                parser.add_content(tag)
                continue
            parser.unread(tag)
        yield from parser.read_call(_read_json_call(parser, must_exist=True))


def _llama_grammar(lark: Lark, tools: tuple[Tool, ...]) -> CallGrammar:
    rest_rule = lark.alternatives(_json_call_rule(lark, tool, "parameters") for tool in tools)
    return _tagged_calls(lark, '{"name": "', rest_rule, "; ")


def _read_mistral(parser: MessageParser) -> Reading[None]:
    """Read [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...] or [TOOL_CALLS]name[ARGS]{...}."""
    while (yield from parser.read_content("[TOOL_CALLS]")):
        if (yield from parser.skip()) != "[":
            yield from parser.read_call(_read_mistral_call(parser))
            continue
        parser.pull(1)
        yield from _read_list(parser, _read_json_call)


def _read_list(
    parser: MessageParser, read_item: Callable[[MessageParser], Reading[None]]
) -> Reading[None]:
    """Read calls with commas between them, up to the bracket after the last one."""
    while (yield from parser.read_call(read_item(parser))):
        separator = yield from parser.skip()
        if separator in ("]", ","):
            parser.pull(1)
        if separator != ",":
            parser.discard_read()
            return


def _read_mistral_call(parser: MessageParser) -> Reading[None]:
    name, tag = yield from parser.read_text_until("[CALL_ID]", "[ARGS]", "{")
    if tag == "[CALL_ID]":
        parser.current_call.id, _ = yield from parser.read_text_until("[ARGS]")
    elif tag == "{":
        parser.unread(tag)
    parser.set_name(name.strip())
    yield from parser.read_json_arguments()


def _mistral_grammar(lark: Lark, tools: tuple[Tool, ...]) -> CallGrammar:
    tag = "[TOOL_CALLS]"
    if "[ARGS]" in lark.special_tokens:
        bodies = (f"{lark.text(t.name + '[ARGS]')} {lark.json(t.parameters)}" for t in tools)
        rest_rule = lark.alternatives(bodies)
        return CallGrammar([(tag, rest_rule)], "", f"{lark.text(tag)} {rest_rule}")
    bodies = (_json_call_rule(lark, tool, "arguments") for tool in tools)
    begin = lark.text('{"name": "')
    call = lark.rule(f"{begin} {lark.alternatives(bodies)}")
    return CallGrammar([(tag, f"{lark.text('[')} {call}")], lark.text(", "), call, lark.text("]"))


def _read_qwen_xml(parser: MessageParser) -> Reading[None]:
    """Read calls with their parameters as XML elements.

    The form is
    <tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>.
    As in vLLM, an element `tool_call` may have several functions, and its opening tag is optional.
    """
    tags = ["<tool_call>", "<function="]
    while tag := (yield from parser.read_content(*tags)):
        if tag == "</tool_call>":
            parser.discard_read()
            continue
        is_wrapped = tag == "<tool_call>"
        is_call = yield from parser.read_call(_read_xml_call(parser, is_wrapped))
        if is_call and not is_wrapped:
            tags = ["<tool_call>", "<function=", "</tool_call>"]
        while is_call and is_wrapped:
            tag = yield from parser.read_until(ignore, "<function=", "</tool_call>")
            if tag != "<function=":
                parser.discard_read()
                break
            is_call = yield from parser.read_call(_read_xml_call(parser, False))


def _read_xml_call(parser: MessageParser, is_wrapped: bool) -> Reading[None]:
    if is_wrapped:
        yield from parser.expect("<function=")
    name, _ = yield from parser.read_text_until(">")
    name = name.strip("\"' ")
    schema = parser.format.tools.get(name, {})
    parser.set_name(name)
    separator = "{"
    while True:
        yield from parser.expect("<")
        if (yield from parser.peek()) == "/":
            parser.pull(1)
            tag = "tool_call>" if (yield from parser.peek()) == "t" else "function>"
            yield from parser.expect(tag, may_be_cut=True)
            if tag == "tool_call>":  # models may omit the tag </function>
                parser.unread(f"</{tag}")
            parser.add_arguments("{}" if separator == "{" else "}")
            return
        yield from parser.expect("parameter=")
        key, _ = yield from parser.read_text_until(">")
        parser.add_arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        separator = ", "
        yield from _read_xml_value(parser, schema, key)


_NEXT_PARAMETER = "\n<parameter="


def _read_xml_value(parser: MessageParser, schema: Mapping[str, Any], name: str) -> Reading[None]:
    """Read and pass on the value of a parameter, which is text or JSON, depending on its schema."""
    ends = ["\n</parameter>", "</parameter>"]
    if not parser.format.has_call_grammar:  # models may omit the closing tag
        ends.append(_NEXT_PARAMETER)
    if (yield from parser.peek()) == "\n":
        parser.pull(1)
    is_text = is_xml_text(schema, name, parser.format.has_call_grammar)
    types = parameter_types(schema, name)
    if is_text and types == {"string"}:
        parser.add_arguments('"')
        tag = yield from parser.read_until(lambda text: parser.add_arguments(_escape(text)), *ends)
        if not tag:
            raise MalformedCall
        parser.add_arguments('"')
    else:
        text, tag = yield from parser.read_text_until(*ends)
        parser.add_arguments(_typed_json(text, types, is_text))
    if tag == _NEXT_PARAMETER:
        parser.unread(tag)


def _typed_json(text: str, types: set[str], is_text: bool) -> str:
    """Return the text of a parameter as JSON.

    A text that is not a literal becomes a string. A literal becomes a string if the schema allows
    strings but not the literal's type. With `is_text`, all literals but null become strings.
    """
    value, json_text = _parse_literal(text)
    is_of_type = type_name(value) in types and (not is_text or value is None)
    if not json_text or ("string" in types and not is_of_type):
        return json.dumps(text, ensure_ascii=False)
    return json_text


def _parse_literal(text: str) -> tuple[Any, str]:
    """Return the value of a literal in JSON or Python, and its JSON text; (None, "") if invalid."""
    text = text.strip()
    with suppress(ValueError, RecursionError):
        return json.loads(text, parse_constant=_reject), text
    with suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        value = ast.literal_eval(text)
        return value, json.dumps(value, ensure_ascii=False, allow_nan=False)
    return None, ""


def _reject(constant: str) -> None:
    raise ValueError(constant)


def _qwen_grammar(lark: Lark, tools: tuple[Tool, ...]) -> CallGrammar:
    rest_rule = lark.alternatives(_xml_call_rule(lark, tool) for tool in tools)
    return _tagged_calls(lark, "<tool_call>", rest_rule, "\n")


def _xml_call_rule(lark: Lark, tool: Tool) -> str:
    expressions = [lark.text(f"\n<function={tool.name}>\n")]
    for name, schema, is_required in _separate_parameters(tool, "[^>\n]+"):
        value = _xml_value_rule(lark, name, schema, tool.parameters)
        expressions.append(value if is_required else f"{lark.rule(value)}?")
    return " ".join([*expressions, lark.text("</function>\n</tool_call>")])


def _xml_value_rule(
    lark: Lark, name: str, schema: Mapping[str, Any], root: Mapping[str, Any]
) -> str:
    begin, end = lark.text(f"<parameter={name}>\n"), "\n</parameter>\n"
    if choices := _text_choices(_parameter_schema(root, name)):
        return f"{begin} ({' | '.join(map(lark.text, choices))}) {lark.text(end)}"
    if is_xml_text(root, name, has_grammar=True):
        return f"{begin} {lark.any_text(end)}"
    return f"{begin} {lark.json(schema)} {lark.text(end)}"


def type_name(value: Any) -> str:
    """Return the JSON schema type of a value."""
    names = {bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
    return names.get(type(value), "null" if value is None else "string")


def parameter_types(schema: Mapping[str, Any], name: str) -> set[str]:
    """Return the types of a parameter in a tool's schema; "string" if the schema has none."""
    return _schema_types(_parameter_schema(schema, name), schema, 0) or {"string"}


def is_xml_text(schema: Mapping[str, Any], name: str, has_grammar: bool) -> bool:
    """Return whether the XML value of a parameter is plain text or null, and not JSON.

    If a grammar must enforce limits of a text, its value is JSON, unless the schema lists all
    texts.
    """
    if parameter_types(schema, name) not in ({"string"}, {"string", "null"}):
        return False
    parameter = _parameter_schema(schema, name)
    return not has_grammar or bool(_text_choices(parameter)) or not _is_limited(parameter)


def _text_choices(schema: Mapping[str, Any]) -> list[str]:
    """Return the texts that a parameter's schema allows; [] if it does not list all of them."""
    limiting_keywords = _TEXT_LIMITS & schema.keys()
    if limiting_keywords not in ({"enum"}, {"const"}) or schema.get("type", "string") != "string":
        return []
    values: list[Any] = schema["enum"] if "enum" in limiting_keywords else [schema["const"]]
    return values if all(isinstance(value, str) for value in values) else []


_TEXT_LIMITS = frozenset(
    ("enum", "const", "pattern", "format", "minLength", "maxLength", "$ref", "not", "if")
)


def _is_limited(schema: Any) -> bool:
    """Return whether a schema, or a part of it, limits strings."""
    if not isinstance(schema, dict):
        return False
    parts = (part for key in ("anyOf", "oneOf", "allOf") for part in schema.get(key, ()))
    return bool(_TEXT_LIMITS & schema.keys()) or any(map(_is_limited, parts))


def _parameter_schema(schema: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    properties = schema.get("properties")
    value = properties.get(name) if isinstance(properties, dict) else None
    value = schema.get("additionalProperties") if value is None else value
    return value if isinstance(value, dict) else {}


def _schema_types(schema: Any, root: Mapping[str, Any], depth: int) -> set[str]:
    if not isinstance(schema, dict) or depth > 8:
        return set()
    value = schema.get("type")
    if value is not None:
        types = {str(name) for name in (value if isinstance(value, list) else [value])}
        return types | {"integer"} if "number" in types else types
    if "enum" in schema or "const" in schema:
        return {type_name(value) for value in schema.get("enum", [schema.get("const")])}
    if "$ref" in schema:
        return _schema_types(resolve_reference(str(schema["$ref"]), root), root, depth + 1)
    alternatives = [*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())]
    return set().union(*(_schema_types(schema, root, depth + 1) for schema in alternatives))


# Keywords that a grammar of separate parameters cannot enforce.
_UNENFORCEABLE = {
    *("anyOf", "oneOf", "allOf", "not", "if", "dependentRequired", "dependentSchemas"),
    *("minProperties", "maxProperties"),
}


def _separate_parameters(tool: Tool, name_pattern: str) -> list[tuple[str, dict[str, Any], bool]]:
    """Return the name and the schema of each parameter of a tool, and whether it is required.

    Optional parameters whose names the format cannot write are omitted.

    Raises:
        InvalidArgument: A grammar of separate parameters cannot enforce the tool's schema.
    """
    root = tool.parameters
    required_names = dict.fromkeys(root.get("required") or ())
    unwritable_names = [name for name in required_names if not re.fullmatch(name_pattern, name)]
    names = [*sorted(_UNENFORCEABLE & root.keys()), *map(repr, unwritable_names)]
    if names:
        raise InvalidArgument(
            f"tools: the parameters of '{tool.name}': {clip(', '.join(names))} cannot be "
            "enforced in the model's format of tool calls; use tool_choice: auto without strict"
        )
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    has_other_references = _OTHER_REFERENCE.search(json.dumps(root)) is not None
    if has_other_references:
        definitions = {"$defs": {_ROOT_DEFINITION: _rebase(root)}}
    properties = root.get("properties")
    parameters: list[tuple[str, dict[str, Any], bool]] = []  # (name, schema, required)
    for name in {**(properties if isinstance(properties, dict) else {}), **required_names}:
        if not re.fullmatch(name_pattern, name):
            continue
        schema = {**_parameter_schema(root, name)}
        if has_other_references:
            schema = _rebase(schema)
        if '"$ref"' in json.dumps(schema):
            schema |= definitions
        parameters.append((name, schema, name in required_names))
    return parameters


_ROOT_DEFINITION = "whole"  # the name of a definition that is the whole schema of a tool
# A reference to a part of a schema that is not a definition.
_OTHER_REFERENCE = re.compile(r'"\$ref": "#(?!/\$defs/|/definitions/)')


def _rebase(schema: Any) -> Any:
    """Return a schema whose references to its root become references to the definition `whole`."""
    if isinstance(schema, list):
        return [_rebase(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    rebased_schema = {key: _rebase(value) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and re.match("#(/|$)", reference):
        rebased_schema["$ref"] = f"#/$defs/{_ROOT_DEFINITION}{reference[1:]}"
    return rebased_schema


def _read_pythonic(parser: MessageParser) -> Reading[None]:
    """Read [name(key="text", other=3), ...], a list of calls in Python."""
    while tag := (yield from parser.read_content("<|python_start|>", "<|python_end|>", "[")):
        if tag != "[":
            parser.discard_read()
            continue
        yield from _read_list(parser, _read_python_call)


def _read_python_call(parser: MessageParser) -> Reading[None]:
    yield from parser.skip()
    name = yield from _read_identifier(parser, "(")
    if name not in parser.format.tools:
        raise MalformedCall
    parser.set_name(name)
    separator = "{"
    while (yield from parser.skip()) != ")":
        key = yield from _read_identifier(parser, "=")
        parser.add_arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        separator = ", "
        yield from _read_python_value(parser)
        if (yield from parser.skip()) == ",":
            parser.pull(1)
        elif (yield from parser.peek()) != ")":
            raise MalformedCall
    parser.pull(1)
    parser.add_arguments("{}" if separator == "{" else "}")


def _read_identifier(parser: MessageParser, end: str) -> Reading[str]:
    """Read an identifier and the character `end` after it; return the identifier."""
    name = ""
    while NAME.fullmatch((yield from parser.peek()) or " "):
        name += parser.pull(1)
    yield from parser.expect(end)
    if not name:
        raise MalformedCall
    return name


_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}  # number of hexadecimal digits of escape sequences


def _read_python_value(parser: MessageParser) -> Reading[None]:
    quote = yield from parser.skip()
    if quote in ('"', "'"):
        parser.add_arguments('"')
        yield from _read_python_string(parser, quote)
        parser.add_arguments('"')
        return
    text = yield from _read_python_literal(parser)
    _, json_text = _parse_literal(text)
    if not json_text:
        raise MalformedCall
    parser.add_arguments(json_text)


def _read_python_string(parser: MessageParser, quote: str) -> Reading[None]:
    """Read a string between single or triple quotes, and pass on its content."""
    quote_count = yield from _read_quotes(parser, quote, 3)
    if quote_count == 2:
        return
    while (inner_count := (yield from _read_quotes(parser, quote, quote_count))) < quote_count:
        character = yield from parser.peek()
        if not character:
            raise MalformedCall
        parser.pull(1)
        is_escape = character == "\\"
        part = (yield from _read_python_escape(parser)) if is_escape else _escape(character)
        parser.add_arguments(_escape(quote * inner_count) + part)


def _read_quotes(parser: MessageParser, quote: str, max_count: int) -> Reading[int]:
    """Read up to `max_count` quotes, and return their number."""
    count = 0
    while count < max_count and (yield from parser.peek()) == quote:
        parser.pull(1)
        count += 1
    return count


def _read_python_escape(parser: MessageParser) -> Reading[str]:
    """Read an escape sequence after its backslash; return it as a part of a JSON string."""
    letter = yield from parser.peek()
    sequence = parser.pull(1)
    while letter and len(sequence) <= _HEX_DIGITS.get(letter, 0) and (yield from parser.peek()):
        sequence += parser.pull(1)
    if letter == "u" and all(char in string.hexdigits for char in sequence[1:]):
        # JSON has the same escape sequence, also for halves of surrogate pairs.
        return f"\\{sequence}"
    if letter not in {*"/\\'\"\nabfnrtv", *_HEX_DIGITS}:
        return _escape(f"\\{sequence}")
    with suppress(SyntaxError, ValueError):
        return _escape("/" if letter == "/" else ast.literal_eval(f'"\\{sequence}"'))
    raise MalformedCall


def _read_python_literal(parser: MessageParser) -> Reading[str]:
    """Read a literal up to the comma or the parenthesis after it; return its text."""
    text, open_brackets, quote = "", "", ""
    while char := (yield from parser.peek()):
        if not open_brackets and not quote and char in ",)":
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
            open_brackets += CLOSING[char]
        elif open_brackets and char == open_brackets[-1]:
            open_brackets = open_brackets[:-1]
        elif char in ")]}":
            break
    raise MalformedCall


def _escape(text: str) -> str:
    """Return text as a part of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _pythonic_grammar(lark: Lark, tools: tuple[Tool, ...]) -> CallGrammar:
    rules = {t.name: lark.rule(f"{_python_arguments(lark, t)} {lark.text(')')}") for t in tools}
    first_calls = [(f"[{name}(", arguments_rule) for name, arguments_rule in rules.items()]
    call = lark.alternatives(f"{lark.text(name + '(')} {rule}" for name, rule in rules.items())
    return CallGrammar(first_calls, lark.text(", "), call, lark.text("]"))


def _python_arguments(lark: Lark, tool: Tool) -> str:
    """Return a grammar expression for keyword arguments in Python, of which some are optional.

    The loop visits the parameters from the last to the first. `first_member` matches arguments for
    the visited parameters at the beginning of the list, and `further_members` after an earlier
    argument.
    """
    first_member, further_members = '""', '""'
    for name, schema, is_required in reversed(_separate_parameters(tool, NAME.pattern)):
        value = f"{lark.text(name + '=')} {lark.json(schema)}"
        rest_rule = lark.rule(further_members)
        begin = f"{value} {rest_rule}"
        first_member = begin if is_required else f"{begin} | {lark.rule(first_member)}"
        with_comma = f"{lark.text(', ')} {value} {rest_rule}"
        further_members = with_comma if is_required else f"{with_comma} | {rest_rule}"
    return lark.rule(first_member)


FAMILIES: Mapping[str, ToolSyntax] = {
    "qwen3_coder": ToolSyntax(
        _read_qwen_xml, _qwen_grammar, ("<tool_call>", "</tool_call>"), "<parameter="
    ),
    "hermes": ToolSyntax(
        _read_hermes, _hermes_grammar, ("<tool_call>", "</tool_call>"), "<tool_call>"
    ),
    "mistral": ToolSyntax(
        _read_mistral,
        _mistral_grammar,
        ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        r"\[TOOL_CALLS\]",
        id_length=9,  # Mistral's templates require this length
    ),
    "pythonic": ToolSyntax(
        _read_pythonic, _pythonic_grammar, ("<|python_start|>", "<|python_end|>"), r"\[\w+\(\w+=\w+"
    ),
    "llama3_json": ToolSyntax(
        _read_llama_json,
        _llama_grammar,
        ("<|python_tag|>",),
        r"<\|python_tag\|>|\"parameters\": dictionary of argument name",
        separators=" \t\r\n;,[]",
    ),
}
ALIASES = {"qwen3_xml": "qwen3_coder", "llama4_json": "llama3_json", "llama4_pythonic": "pythonic"}
# The opening and closing tags by the name of the reasoning parser.
REASONING: Mapping[str, tuple[str, str]] = {
    "qwen3": ("<think>", "</think>"),
    "deepseek_r1": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
}
TOOL_PARSERS = (*FAMILIES, *ALIASES)


def detect_parsers(templates: Iterable[str]) -> tuple[str, str]:
    """Return the names of the tool and the reasoning parser for chat templates; "none": unknown."""
    text = "\n".join(templates)
    names = (name for name, family in FAMILIES.items() if re.search(family.template_pattern, text))
    reasoning_parsers = (name for name, (_, end) in REASONING.items() if end in text)
    return next(names, "none"), next(reasoning_parsers, "none")
