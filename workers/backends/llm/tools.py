"""Tools of a request: their validation, the format of their calls, and grammars that enforce it.

A grammar is written in Lark's language, as llguidance has it. Required calls follow it from the
first token, or after the reasoning. Calls of strict tools follow it from their opening tag on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from shmserve.errors import InvalidArgument, clip
from shmserve.workers.backends.llm.grammars import MAPS, resolved
from shmserve.workers.backends.llm.message_parsers import MessageFormat
from shmserve.workers.backends.llm.tool_formats import (
    ALIASES,
    FAMILIES,
    REASONING,
    TOOL_PARSERS,
    Lark,
    Tool,
)

_ANY = {"type": "object"}
_TEXT = "/(?s:.*)/"


@dataclass(frozen=True)
class ToolRequest:
    """The tools of a request; with `required`, the message consists of calls."""

    tools: tuple[Tool, ...]
    required: bool = False
    parallel: bool = True

    @property
    def constrained(self) -> bool:
        """Return whether a grammar restricts calls."""
        return self.required or any(tool.strict for tool in self.tools)


def take(conversation: dict[str, Any]) -> ToolRequest | None:
    """Remove the choice of tools from a conversation, and return the request for them.

    With the choice "none", the tools are removed, too. With allowed tools, the others are removed.
    A named function is called once.

    Raises:
        InvalidArgument: The tools or the choice are invalid.
    """
    choice = conversation.pop("tool_choice", None)
    parallel = conversation.pop("parallel_tool_calls", None)
    _check("parallel_tool_calls", parallel, bool, "true or false")
    _check("tools", conversation.get("tools"), list, "a list")
    given = conversation.get("tools") or []
    tools = [_tool(index, each) for index, each in enumerate(given)]
    if choice == "none" or not tools:
        conversation.pop("tools", None)
        if choice not in (None, "none", "auto"):
            raise InvalidArgument(f"tool_choice: {clip(repr(choice))} requires tools")
        return None
    mode, names = _choice(choice)
    unknown = sorted(names.difference(tool.name for tool in tools))
    if unknown:
        raise InvalidArgument(f"tool_choice: '{clip(unknown[0])}' is not a name of `tools`")
    if isinstance(choice, dict) and choice["type"] == "allowed_tools":
        conversation["tools"] = [each for each in given if each["function"]["name"] in names]
    chosen = tuple(tool for tool in tools if not names or tool.name in names)
    is_named = isinstance(choice, dict) and choice["type"] == "function"
    return ToolRequest(chosen, mode == "required", parallel is not False and not is_named)


def _check(field: str, value: Any, kind: type[Any], allowed: str) -> None:
    """Raise InvalidArgument if a value is neither of a kind nor null."""
    if not isinstance(value, kind | None):
        raise InvalidArgument(f"{field}: {clip(repr(value))} is not {allowed}")


def _tool(index: int, tool: Any) -> Tool:
    field = f"tools[{index}]"
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type", "function") != "function":
        raise InvalidArgument(f"{field}: {clip(repr(tool))} is not a function with a name")
    field = f"{field}.function"
    name, schema = function.get("name"), function.get("parameters")
    if not (isinstance(name, str) and re.fullmatch(r"[\w.:/-]{1,256}", name)):
        raise InvalidArgument(f"{field}.name: {clip(repr(name))} is not a name")
    _check(f"{field}.description", function.get("description"), str, "a string")
    strict = tool.get("strict") if function.get("strict") is None else function["strict"]
    _check(f"{field}.strict", strict, bool, "true or false")
    _check(f"{field}.parameters", schema, dict, "a JSON schema")
    given = {key: value for key, value in (schema or {}).items() if value is not None}
    parameters = {**_ANY, **given}
    error = _schema_error(parameters)
    if not error and "object" not in parameters["type"]:
        error = f"type: {clip(repr(parameters['type']))} is not 'object'"
    if error:
        raise InvalidArgument(f"{field}.parameters: it is not a JSON schema: {error}")
    return Tool(name, parameters, strict is True)


_TYPES = frozenset(("string", "number", "integer", "boolean", "array", "object", "null"))
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_ARRAY_KEYS = ("items", "additionalItems", "unevaluatedItems", "contains")
_OBJECT_KEYS = ("additionalProperties", "unevaluatedProperties", "propertyNames")
_SCHEMAS = {*_ARRAY_KEYS, *_OBJECT_KEYS, "not", "if", "then", "else"}


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_type(value: Any) -> bool:
    names = value if _are_texts(value) else [value] if isinstance(value, str) else []
    return bool(names) and _TYPES.issuperset(names)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_size(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value % 1 == 0  # infinity % 1 is NaN


_NUMBER = (_is_number, "a number")
_LIMIT = (lambda value: isinstance(value, int | float), "a number")  # draft 4 has booleans
_SIZE = (_is_size, "an integer from 0")
_STRING = (lambda value: isinstance(value, str), "a string")
_SIZES = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
# The schema keywords whose values contain no schema: a predicate for valid values, and a
# description of them.
_KEYS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "type": (_is_type, f"one or several of {', '.join(sorted(_TYPES))}"),
    "required": (_are_texts, "a list of strings"),
    "enum": (lambda value: isinstance(value, list), "a list"),
    **dict.fromkeys(("minimum", "maximum", "multipleOf"), _NUMBER),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _LIMIT),
    **dict.fromkeys(_SIZES, _SIZE),
    **dict.fromkeys(("pattern", "format", "$ref"), _STRING),
}


def _schema_error(root: dict[str, Any]) -> str:
    """Return the first error of a JSON schema, or "". Unknown keys and nulls are not checked."""
    pending: list[tuple[str, Any]] = [("", root)]
    for path, schema in pending:
        if not isinstance(schema, dict | bool):
            return f"{path[1:]}: {clip(repr(schema))} is not a schema (an object or a boolean)"
        for key, value in ({} if isinstance(schema, bool) else schema).items():
            position = f"{path}.{key}"
            allowed = ""
            if value is None:
                continue
            if key in MAPS:
                allowed = "" if isinstance(value, dict) else "an object of schemas"
                pending += (
                    [] if allowed else ((f"{position}.{name}", value[name]) for name in value)
                )
            elif key in _SCHEMA_LISTS or (key == "items" and isinstance(value, list)):
                allowed = "" if isinstance(value, list) and value else "a list of schemas"
                parts = enumerate([] if allowed else value)
                pending += ((f"{position}[{index}]", each) for index, each in parts)
            elif key in _SCHEMAS:
                pending.append((position, value))
            elif key in _KEYS and not _KEYS[key][0](value):
                allowed = _KEYS[key][1]
            elif key == "$ref" and value.startswith("#/") and resolved(value, root) is None:
                allowed = "a reference to a part of the schema"
            if allowed:
                return f"{position[1:]}: {clip(repr(value))} is not {allowed}"
    return ""


def _choice(choice: Any) -> tuple[str, set[str]]:
    """Return "auto" or "required", and the names of the allowed tools; no names: all tools."""
    if choice in (None, "auto", "required"):
        return choice or "auto", set()
    kind = choice.get("type") if isinstance(choice, dict) else None
    name = _function_name(choice)
    if kind == "function" and name:
        return "required", {name}
    allowed = choice.get("allowed_tools", choice) if kind == "allowed_tools" else None
    if isinstance(allowed, dict) and isinstance(allowed.get("tools"), list):
        names = {_function_name(each) for each in allowed["tools"]}
        mode = allowed.get("mode")
        if mode in ("auto", "required") and names and "" not in names:
            return mode, names
    raise InvalidArgument(
        f"tool_choice: {clip(repr(choice))} is not one of none, auto, required, the name of a "
        'function: {"type": "function", "function": {"name": ...}}, or {"type": "allowed_tools", '
        '"allowed_tools": {"mode": "auto" or "required", "tools": [...]}}'
    )


def _function_name(choice: Any) -> str:
    function = choice.get("function", choice) if isinstance(choice, dict) else {}
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else ""


class MessageFormats:
    """The formats of a model's messages, by the names of its parsers and its tokenizer."""

    def __init__(self, tool_parser: str, reasoning_parser: str, tokenizer: Tokenizer) -> None:
        self._family = FAMILIES.get(ALIASES.get(tool_parser, tool_parser))
        self._reasoning = REASONING.get(reasoning_parser, ())
        self._always = reasoning_parser == "deepseek_r1"
        added = tokenizer.get_added_tokens_decoder().items()
        self._added = {each.content: token for token, each in added}
        self._special = {each.content for _, each in added if each.special}

    def format(
        self, request: ToolRequest | None, prompt: str, hidden: bool = False
    ) -> MessageFormat | None:
        """Return the format of a message after a prompt; None if all of its text is content.

        With `hidden`, the message lacks its reasoning.

        Raises:
            InvalidArgument: The format of calls is not known.
        """
        if request is None and not self._reasoning:
            return None
        family = self._family
        if family is None and request is not None and not request.required:
            raise InvalidArgument(
                "tools: the model's chat template has no known format of tool calls; engine.yaml "
                f"may set tool_parser, one of {', '.join(TOOL_PARSERS)}"
            )
        family = family or FAMILIES["hermes"]
        ending = prompt.rstrip()
        begin, end = self._reasoning or ("", "")
        opened = bool(begin) and (
            ending.endswith(begin) or (self._always and not ending.endswith(end))
        )
        markers = {*family.markers, begin, end} & self._special
        return MessageFormat(
            family,
            {tool.name: tool.parameters for tool in request.tools} if request else {},
            self._reasoning,
            opened,
            request.parallel if request else True,
            hidden,
            frozenset(self._added[marker] for marker in markers),
        )

    def grammar(self, request: ToolRequest | None, output_format: MessageFormat, body: bool) -> str:
        """Return a grammar of the message; "" if the message is free.

        Args:
            request: The request for tools.
            output_format: The format of the message.
            body: Whether there is a grammar for the content, which is named `body`.
        """
        tools = request is not None and (request.constrained or body)
        if not tools and not (body and output_format.reasoning):
            return ""
        markers = {*output_format.family.markers, *output_format.reasoning}
        lark = Lark({name: token for name, token in self._added.items() if name in markers})
        start = "@body"
        if request is not None and tools:
            calls = output_format.family.call_grammar(lark, request.tools)
            required = request.required or body
            heads = (
                f"{lark.text(begin) if required else lark.any_text(begin)} {rest}"
                for begin, rest in calls.heads
            )
            start = lark.sequence(calls, lark.alternatives(heads), request.parallel)
            if not request.required:
                start = (
                    f"{start} | @body"
                    if body
                    else f"{start}{'*' if request.parallel else '?'} TEXT"
                )
        return "\n".join(
            [
                '%llguidance {"no_forcing": true}',  # the model chooses how texts become tokens
                f"start: {self._thought(lark, output_format)} ({start})",
                *lark.rules,
                f"TEXT: {_TEXT}",
            ]
        )

    def _thought(self, lark: Lark, output_format: MessageFormat) -> str:
        """Return an expression for the reasoning before a message."""
        if not output_format.reasoning:
            return ""
        begin, end = output_format.reasoning
        rest = f"{lark.any_text(end)} /\\n{{0,2}}/"
        return rest if output_format.starts_reasoning else f"({lark.text(begin)} {rest})?"
