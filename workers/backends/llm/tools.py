"""Tools of a request: their validation, the format of their calls, and grammars that enforce it.

Grammars are in llguidance's variant of Lark's language. If calls are required, the grammar
restricts the message from its beginning, or from the end of the reasoning. Otherwise it restricts
calls of strict tools from their opening tag.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from shmserve.errors import InvalidArgument, clip
from shmserve.workers.backends.llm.chat_template import check_type, is_tool_name
from shmserve.workers.backends.llm.grammars import NO_FORCING, SCHEMA_MAPS, resolve_reference
from shmserve.workers.backends.llm.message_parsers import MessageFormat
from shmserve.workers.backends.llm.token_texts import with_pauses
from shmserve.workers.backends.llm.tool_formats import (
    ALIASES,
    FAMILIES,
    REASONING,
    TOOL_PARSERS,
    Lark,
    Tool,
)

_OBJECT_SCHEMA = {"type": "object"}
_ANY_TEXT = "/(?s:.*)/"
_MAX_LEADING_TOKENS = 8  # up to the opening tag of reasoning, which white space may precede


@dataclass(frozen=True)
class ToolRequest:
    """The tools of a request.

    Attributes:
        required: Whether the message must consist of calls.
        allows_parallel_calls: Whether the message may have several calls.
    """

    tools: tuple[Tool, ...]
    required: bool = False
    allows_parallel_calls: bool = True

    @property
    def is_constrained(self) -> bool:
        """Return whether a grammar restricts calls."""
        return self.required or any(tool.strict for tool in self.tools)


def take_tools(conversation: dict[str, Any]) -> ToolRequest | None:
    """Remove the choice of tools from a conversation, and return the tool request.

    With the choice "none", the tools are removed, too, and the result is None. With the choice
    "allowed_tools", all other tools are removed. A function chosen by its name is called once.

    Raises:
        InvalidArgument: The tools or the choice are invalid.
    """
    choice = conversation.pop("tool_choice", None)
    parallel = conversation.pop("parallel_tool_calls", None)
    check_type("parallel_tool_calls:", parallel, bool, "true or false")
    check_type("tools:", conversation.get("tools"), list, "a list")
    definitions = conversation.get("tools") or []
    tools = [_parse_tool(*pair) for pair in with_pauses(enumerate(definitions))]
    if choice == "none" or not tools:
        conversation.pop("tools", None)
        if choice not in (None, "none", "auto"):
            raise InvalidArgument(f"tool_choice: {clip(repr(choice))} requires tools")
        return None
    mode, names = _parse_choice(choice)
    unknown_names = sorted(names.difference(tool.name for tool in tools))
    if unknown_names:
        raise InvalidArgument(f"tool_choice: `tools` has no tool '{clip(unknown_names[0])}'")
    if isinstance(choice, dict) and choice["type"] == "allowed_tools":
        conversation["tools"] = [tool for tool in definitions if tool["function"]["name"] in names]
    selected_tools = tuple(tool for tool in tools if not names or tool.name in names)
    is_named = isinstance(choice, dict) and choice["type"] == "function"
    return ToolRequest(selected_tools, mode == "required", parallel is not False and not is_named)


def _parse_tool(index: int, tool: Any) -> Tool:
    field = f"tools[{index}]"
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type") not in (None, "function"):
        raise InvalidArgument(f"{field}: {clip(repr(tool))} is not a function with a name")
    field = f"{field}.function"
    name, schema = function.get("name"), function.get("parameters")
    if not is_tool_name(name):
        text = f"{clip(repr(name))} is not 1 to 256 letters, digits or characters of _.:/-"
        raise InvalidArgument(f"{field}.name: {text}")
    check_type(f"{field}.description:", function.get("description"), str, "a string")
    is_strict = tool.get("strict") if function.get("strict") is None else function["strict"]
    check_type(f"{field}.strict:", is_strict, bool, "true or false")
    check_type(f"{field}.parameters:", schema, dict, "a JSON schema")
    keywords = {key: value for key, value in (schema or {}).items() if value is not None}
    parameters = {**_OBJECT_SCHEMA, **keywords}
    error = _schema_error(parameters)
    if not error:
        parameters = _resolve_root(parameters)
    if not error and "object" not in parameters["type"]:
        error = f"type: {clip(repr(parameters['type']))} is not 'object'"
    if error:
        raise InvalidArgument(f"{field}.parameters: invalid JSON schema: {error}")
    return Tool(name, parameters, is_strict is True)


def _resolve_root(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return parameters in which a `$ref` at the root is replaced by the schema's members."""
    seen_references: set[str] = set()
    while (reference := parameters.get("$ref")) and reference not in seen_references:
        seen_references.add(reference)
        target = resolve_reference(reference, parameters)
        members = {key: value for key, value in parameters.items() if key != "$ref"}
        # References begin at the root, even if the target has definitions of its own.
        names = {"$defs", "definitions"} & members.keys()
        definitions = {name: members[name] for name in names}
        parameters = {**members, **target, **definitions} if isinstance(target, dict) else members
    return parameters


_TYPES = frozenset(("string", "number", "integer", "boolean", "array", "object", "null"))
_SCHEMA_LIST_KEYS = ("anyOf", "oneOf", "allOf", "prefixItems")
_ARRAY_KEYS = ("items", "additionalItems", "unevaluatedItems", "contains")
_OBJECT_KEYS = ("additionalProperties", "unevaluatedProperties", "propertyNames")
_SCHEMA_KEYS = {*_ARRAY_KEYS, *_OBJECT_KEYS, "not", "if", "then", "else"}


def _are_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_type(value: Any) -> bool:
    type_names = value if _are_strings(value) else [value] if isinstance(value, str) else []
    return bool(type_names) and _TYPES.issuperset(type_names)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_size(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value % 1 == 0  # infinity % 1 is NaN


_NUMBER_CHECK = (_is_number, "a number")
_LIMIT_CHECK = (lambda value: isinstance(value, int | float), "a number")  # or a boolean in draft 4
_SIZE_CHECK = (_is_size, "an integer >= 0")
_STRING_CHECK = (lambda value: isinstance(value, str), "a string")
_SIZE_KEYS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
# A predicate for valid values, and their description, for each keyword whose value is no schema.
_VALUE_CHECKS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "type": (_is_type, f"one or several of {', '.join(sorted(_TYPES))}"),
    "required": (_are_strings, "a list of strings"),
    "enum": (lambda value: isinstance(value, list), "a list"),
    **dict.fromkeys(("minimum", "maximum", "multipleOf"), _NUMBER_CHECK),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _LIMIT_CHECK),
    **dict.fromkeys(_SIZE_KEYS, _SIZE_CHECK),
    **dict.fromkeys(("pattern", "format", "$ref"), _STRING_CHECK),
}


def _schema_error(root: dict[str, Any]) -> str:
    """Return the first error of a JSON schema, or "". Unknown keywords and nulls are ignored."""
    schemas: list[tuple[str, Any]] = [("", root)]  # (path, schema)
    for path, schema in schemas:
        if not isinstance(schema, dict | bool):
            return f"{path[1:]}: {clip(repr(schema))} is not a schema (an object or a boolean)"
        for key, value in ({} if isinstance(schema, bool) else schema).items():
            position = f"{path}.{key}"
            allowed_text = ""
            if value is None:
                continue
            if key in SCHEMA_MAPS:
                allowed_text = "" if isinstance(value, dict) else "an object of schemas"
                schemas += (
                    [] if allowed_text else ((f"{position}.{name}", value[name]) for name in value)
                )
            elif key in _SCHEMA_LIST_KEYS or (key == "items" and isinstance(value, list)):
                allowed_text = "" if isinstance(value, list) and value else "a list of schemas"
                subschemas = enumerate([] if allowed_text else value)
                schemas += ((f"{position}[{index}]", subschema) for index, subschema in subschemas)
            elif key in _SCHEMA_KEYS:
                schemas.append((position, value))
            elif key in _VALUE_CHECKS and not _VALUE_CHECKS[key][0](value):
                allowed_text = _VALUE_CHECKS[key][1]
            elif key == "$ref" and value.startswith("#/"):
                target_exists = resolve_reference(value, root) is not None
                allowed_text = "" if target_exists else "a reference to a part of the schema"
            if allowed_text:
                return f"{position[1:]}: {clip(repr(value))} is not {allowed_text}"
    return ""


def _parse_choice(choice: Any) -> tuple[str, set[str]]:
    """Return "auto" or "required", and the names of the allowed tools; empty: all tools."""
    if choice in (None, "auto", "required"):
        return choice or "auto", set()
    kind = choice.get("type") if isinstance(choice, dict) else None
    name = _function_name(choice)
    if kind == "function" and name:
        return "required", {name}
    allowed_tools = choice.get("allowed_tools", choice) if kind == "allowed_tools" else None
    if isinstance(allowed_tools, dict) and isinstance(allowed_tools.get("tools"), list):
        names = {_function_name(allowed_tool) for allowed_tool in allowed_tools["tools"]}
        mode = allowed_tools.get("mode")
        if mode in ("auto", "required") and names and "" not in names:
            return mode, names
    raise InvalidArgument(
        f"tool_choice: {clip(repr(choice))} is not one of none, auto, required, the name of a "
        'function: {"type": "function", "function": {"name": ...}}, or {"type": "allowed_tools", '
        '"allowed_tools": {"mode": "auto" or "required", "tools": [...]}}'
    )


def _function_name(choice: Any) -> str:
    members = choice if isinstance(choice, dict) else {}
    function = members.get("function", members.get("custom", members))
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else ""


class MessageFormats:
    """A factory of the formats and grammars of a model's messages.

    Args:
        tool_parser: The name of the tool parser.
        reasoning_parser: The name of the reasoning parser.
        tokenizer: The tokenizer.
    """

    def __init__(self, tool_parser: str, reasoning_parser: str, tokenizer: Tokenizer) -> None:
        self._tool_syntax = FAMILIES.get(ALIASES.get(tool_parser, tool_parser))
        self._reasoning_tags = REASONING.get(reasoning_parser, ())  # opening and closing tags
        self._always_reasons = reasoning_parser == "deepseek_r1"
        self._decode = tokenizer.decode
        added_tokens = tokenizer.get_added_tokens_decoder().items()
        self._added_tokens = {text.content: token for token, text in added_tokens}
        self._special_tokens = {text.content for _, text in added_tokens if text.special}

    def make_format(
        self,
        request: ToolRequest | None,
        prompt: str,
        hides_reasoning: bool = False,
        has_grammar: bool = False,
        continues_message: bool = False,
    ) -> MessageFormat | None:
        """Return the format of the message after a prompt; None if all of its text is content.

        Args:
            request: The tools of the request, if any.
            prompt: The text of the prompt.
            hides_reasoning: Whether reasoning is left out of the message.
            has_grammar: Whether the content has a grammar.
            continues_message: Whether the prompt ends inside of the last message.

        Raises:
            InvalidArgument: The format of the model's calls is not known.
        """
        ending = prompt.rstrip()
        opening_tag, end = self._reasoning_tags or ("", "")
        # The message that is continued may have opened or closed the reasoning.
        reasoning_depth = ending.rfind(opening_tag) - ending.rfind(end) if continues_message else 0
        # A template may have closed the reasoning, for example if thinking is disabled.
        tags = () if end and (ending.endswith(end) or reasoning_depth < 0) else self._reasoning_tags
        if request is None and not tags:
            return None
        tool_syntax = self._tool_syntax
        if tool_syntax is None and request is not None and not request.required:
            raise InvalidArgument(
                "tools: the model's chat template has no known format of tool calls; engine.yaml "
                f"may set tool_parser, one of {', '.join(TOOL_PARSERS)}"
            )
        tool_syntax = tool_syntax or FAMILIES["hermes"]
        is_reasoning_open = bool(tags) and (
            ending.endswith(opening_tag) or reasoning_depth > 0 or self._always_reasons
        )
        markers = {*(tool_syntax.markers if request else ()), *tags} & self._special_tokens
        return MessageFormat(
            tool_syntax,
            {tool.name: tool.parameters for tool in request.tools} if request else {},
            tags,
            is_reasoning_open,
            request.allows_parallel_calls if request else True,
            hides_reasoning,
            frozenset(self._added_tokens[marker] for marker in markers),
            request is not None and (request.is_constrained or has_grammar),
            request is not None and not (request.required or has_grammar),
            request is not None and request.required,
        )

    def grammar(
        self, request: ToolRequest | None, output_format: MessageFormat, has_grammar: bool
    ) -> str:
        """Return a grammar of the message; "" if the message is not restricted.

        Args:
            request: The tools of the request, if any.
            output_format: The format of the message.
            has_grammar: Whether the content has a grammar, which the rule `body` refers to.
        """
        has_calls = output_format.has_call_grammar
        if not has_calls and not (has_grammar and output_format.reasoning):
            return ""
        markers = {*output_format.family.markers, *output_format.reasoning}
        lark = Lark({name: token for name, token in self._added_tokens.items() if name in markers})
        start = "@body"
        may_omit_end = False
        if request is not None and has_calls:
            calls = output_format.family.call_grammar(lark, request.tools)
            must_call = request.required or has_grammar
            openings = (
                f"{lark.text(begin) if must_call else lark.any_text(begin)} {call_rule}"
                for begin, call_rule in calls.first_calls
            )
            tags = {begin for begin, _ in calls.first_calls}
            may_omit_end = output_format.calls_end_reasoning and tags <= markers
            first_call = lark.alternatives(openings)
            start = lark.sequence(calls, first_call, request.allows_parallel_calls)
            if not request.required:
                if has_grammar:
                    start = f"{start} | @body"
                else:
                    start = f"{start}{'*' if request.allows_parallel_calls else '?'} TEXT"
        start_rule = f"start: {self._reasoning_rule(lark, output_format, may_omit_end)} ({start})"
        return "\n".join([NO_FORCING, start_rule, *lark.rules, f"TEXT: {_ANY_TEXT}"])

    def limit_reasoning(
        self, output_format: MessageFormat | None, budget: int, vocab_size: int
    ) -> Callable[[Sequence[int]], NDArray[np.int64]] | None:
        """Return a function that ends the reasoning of a message after `budget` tokens.

        The function returns the tokens that are forbidden after the generated tokens: none, or all
        tokens but the closing tag. The result is None if the message has no reasoning.

        Raises:
            InvalidArgument: The tags of reasoning are not known, or not tokens.
        """
        begin, end = (self._added_tokens.get(tag, -1) for tag in self._reasoning_tags or ("", ""))
        if min(begin, end) < 0:
            raise InvalidArgument(
                "thinking_token_budget: only supported if the model's messages have tags of "
                "reasoning, and each tag is a token"
            )
        if output_format is None or not output_format.reasoning:
            return None
        markers = output_format.family.markers if output_format.calls_end_reasoning else ()
        ends = {end, *(self._added_tokens.get(tag, end) for tag in markers)}
        no_tokens, other_tokens = np.empty(0, np.int64), np.delete(np.arange(vocab_size), end)

        def forbidden_after(tokens: Sequence[int]) -> NDArray[np.int64]:
            first_tokens = [*tokens[:_MAX_LEADING_TOKENS]]
            tag_end = first_tokens.index(begin) + 1 if begin in first_tokens else 0
            if tag_end > 1 and self._decode(first_tokens[: tag_end - 1], False).strip():
                tag_end = 0  # as in the parser, only white space may precede the tag
            is_begun = output_format.starts_reasoning or tag_end
            if not is_begun or not ends.isdisjoint(tokens):
                return no_tokens
            return other_tokens if len(tokens) - tag_end >= budget else no_tokens

        return forbidden_after

    def _reasoning_rule(self, lark: Lark, output_format: MessageFormat, may_omit_end: bool) -> str:
        """Return the expression for the reasoning before the content, or ""."""
        if not output_format.reasoning:
            return ""
        begin, end = output_format.reasoning
        end_rule = f"({lark.any_text(end)} /\\n{{0,2}}/){'?' * may_omit_end}"
        return end_rule if output_format.starts_reasoning else f"({lark.text(begin)} {end_rule})?"
