"""Tools of a request: their validation, the format of their calls, and grammars that enforce it.

A grammar is written in Lark's language, as llguidance has it. Required calls follow it from the
first token, or after the reasoning. Calls of strict tools follow it from their opening tag on.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from shmserve.errors import InvalidArgument, clip
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

    With the choice "none", the tools are removed, too.

    Raises:
        InvalidArgument: The tools or the choice are invalid.
    """
    choice = conversation.pop("tool_choice", None)
    parallel = conversation.pop("parallel_tool_calls", None)
    tools = [_tool(index, each) for index, each in enumerate(conversation.get("tools") or ())]
    if choice == "none" or not tools:
        conversation.pop("tools", None)
        if choice not in (None, "none", "auto"):
            raise InvalidArgument(f"tool_choice: {clip(repr(choice))} requires tools")
        return None
    mode, names = _choice(choice)
    unknown = sorted(names.difference(tool.name for tool in tools))
    if unknown:
        raise InvalidArgument(f"tool_choice: '{clip(unknown[0])}' is not a name of `tools`")
    chosen = tuple(tool for tool in tools if not names or tool.name in names)
    return ToolRequest(chosen, mode == "required", parallel is not False)


def _tool(index: int, given: Any) -> Tool:
    field = f"tools[{index}]"
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or given.get("type", "function") != "function":
        raise InvalidArgument(f"{field}: {clip(repr(given))} is not a function with a name")
    name, schema = function.get("name"), function.get("parameters")
    if not (isinstance(name, str) and re.fullmatch(r"[\w.:/-]{1,256}", name)):
        raise InvalidArgument(f"{field}.function.name: {clip(repr(name))} is not a name")
    if not isinstance(schema, dict | None):
        raise InvalidArgument(f"{field}.function.parameters: it is not a JSON schema")
    strict = given.get("strict") if function.get("strict") is None else function["strict"]
    return Tool(name, {**_ANY, **(schema or {})}, strict is True)


def _choice(given: Any) -> tuple[str, set[str]]:
    """Return "auto" or "required", and the names of the allowed tools; no names: all tools."""
    if given in (None, "auto", "required"):
        return given or "auto", set()
    kind = given.get("type") if isinstance(given, dict) else None
    name = _function_name(given)
    if kind == "function" and name:
        return "required", {name}
    allowed = given.get("allowed_tools", given) if kind == "allowed_tools" else {}
    names = {_function_name(each) for each in allowed.get("tools", ())}
    mode = allowed.get("mode")
    if mode in ("auto", "required") and names and "" not in names:
        return mode, names
    raise InvalidArgument(
        f"tool_choice: {clip(repr(given))} is not one of none, auto, required, or the name of a "
        'function: {"type": "function", "function": {"name": ...}}'
    )


def _function_name(given: Any) -> str:
    function = given.get("function", given) if isinstance(given, dict) else {}
    return str(function.get("name", "")) if isinstance(function, dict) else ""


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

    def grammar(self, request: ToolRequest | None, made: MessageFormat, body: bool) -> str:
        """Return a grammar of the message; "" if the message is free.

        Args:
            request: The request for tools.
            made: The format of the message.
            body: Whether there is a grammar for the content, which is named `body`.
        """
        tools = request is not None and (request.constrained or body)
        if not tools and not (body and made.reasoning):
            return ""
        markers = {*made.family.markers, *made.reasoning}
        lark = Lark({name: token for name, token in self._added.items() if name in markers})
        start = "@body"
        if request is not None and tools:
            calls = made.family.calls(lark, request.tools)
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
                f"start: {self._thought(lark, made)} ({start})",
                *lark.rules,
                f"TEXT: {_TEXT}",
            ]
        )

    def _thought(self, lark: Lark, made: MessageFormat) -> str:
        """Return an expression for the reasoning before a message."""
        if not made.reasoning:
            return ""
        begin, end = made.reasoning
        rest = f"{lark.any_text(end)} /\\n{{0,2}}/"
        return rest if made.thinking else f"({lark.text(begin)} {rest})?"
