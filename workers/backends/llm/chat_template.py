"""Chat templates: conversations converted to the texts of prompts, as by transformers."""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shmserve.errors import InvalidArgument, clip

# Variables that have to be in the template if a request has them.
_NEEDED = ("documents", "reasoning_effort")
_REASONING = ("reasoning_content", "thinking", "reasoning")
# The arguments of Jinja's filter `tojson`.
_JSON = ("ensure_ascii", "indent", "separators", "sort_keys")
_TESTS = ("string", "iterable", "sequence", "mapping")
_END = "CONTINUE_FINAL_MESSAGE_TAG "  # a text that marks the end of the message to be continued


class GenerationTag(Extension):
    """The tag `generation`, which marks text for training and has no effect on prompts."""

    tags = {"generation"}  # noqa: RUF012 - as in jinja2

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the content of the tag."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class ChatTemplate:
    """The chat templates of a model.

    Attributes:
        sources: The templates by name.
        special: The texts of special tokens, which templates may name.
    """

    def __init__(self, sources: Mapping[str, str], special: Mapping[str, str]) -> None:
        self.sources = sources
        self._special = special
        self._environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationTag, "jinja2.ext.loopcontrols"],
        )
        self._environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
        self._environment.filters["tojson"] = _to_json
        self._compiled: dict[str, _Compiled] = {}

    def render(self, chat: Mapping[str, Any]) -> str:
        """Render a conversation: its `messages`, and variables of the template.

        Other members of `chat` are variables of the template, such as `tools` and `documents`. The
        members of `chat_template_kwargs` are variables, too. `chat_template` is the name of a
        template. With `continue_final_message`, the text ends with that of the last message.

        Raises:
            InvalidArgument: The template rejects the conversation.
        """
        if not self.sources:
            raise InvalidArgument(
                "messages: the model has no chat template; send text_input instead"
            )
        variables = {"tools": None, "documents": None, **self._special, **chat}
        variables |= variables.pop("chat_template_kwargs", None) or {}
        name = self._name(variables.pop("chat_template", None), variables["tools"])
        continued = variables.pop("continue_final_message", None)
        if continued and variables.get("add_generation_prompt"):
            raise InvalidArgument("continue_final_message: add_generation_prompt must be false")
        variables.setdefault("add_generation_prompt", not continued)
        try:
            template = self._template(name)
            messages = [_message(each, template) for each in chat["messages"]]
            ending = _mark_end(chat["messages"][-1], messages[-1], template) if continued else ""
            _check_used(variables, template)
            text = template.template.render(**{**variables, "messages": messages})
        except InvalidArgument:
            raise
        except Exception as error:  # templates may raise any error
            raise InvalidArgument(
                f"messages: the model's chat template rejects them: {clip(str(error), 200)}"
            ) from None
        return _before_end(text, ending) if continued else text

    def _name(self, requested: Any, tools: Any) -> str:
        """Return the name of the template to use."""
        name = requested or ("tool_use" if tools and "tool_use" in self.sources else "default")
        if name not in self.sources:
            allowed = ", ".join(sorted(self.sources))
            raise InvalidArgument(
                f"chat_template: {clip(repr(name))} is unknown (allowed: {allowed})"
            )
        return str(name)

    def _template(self, name: str) -> _Compiled:
        if name not in self._compiled:
            source = self.sources[name]
            parsed = self._environment.parse(source)
            self._compiled[name] = _Compiled(
                self._environment.from_string(source),
                any(_names_content(loop.iter) for loop in parsed.find_all(nodes.For)),
                any(test.name in _TESTS for test in parsed.find_all(nodes.Test)),
                any(each.value == "developer" for each in parsed.find_all(nodes.Const)),
                "content" in source,
                any(map(_checks_content, parsed.find_all((nodes.Test, nodes.Compare)))),
                frozenset(meta.find_undeclared_variables(parsed)),
            )
        return self._compiled[name]


class _Compiled(NamedTuple):
    """A compiled template and its properties.

    Attributes:
        iterates: Whether it iterates over the parts of a content.
        distinguishes: Whether it distinguishes a content of parts from a text.
        developer: Whether it has the role `developer`; otherwise that role becomes `system`.
        names_content: Whether it names the content of a message.
        checks: Whether it checks that a message has a content.
        variables: The names of its variables.
    """

    template: Template
    iterates: bool
    distinguishes: bool
    developer: bool
    names_content: bool
    checks: bool
    variables: frozenset[str]


def _check_used(chat: Mapping[str, Any], template: _Compiled) -> None:
    """Raise InvalidArgument if a request has members that the template would ignore."""
    for name in _NEEDED:
        if chat.get(name) and name not in template.variables:
            raise InvalidArgument(f"{name}: the model's chat template does not use it")


def _names_content(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return "content" in (getattr(node, "attr", ""), getattr(node, "name", ""))


def _checks_content(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Test):
        return node.name in ("defined", "undefined") and _names_content(node.node)
    compared = getattr(node, "expr", None)
    return isinstance(compared, nodes.Const) and compared.value == "content"


def conversation(text: str) -> dict[str, Any]:
    """Return the conversation in a JSON list of messages, or in an object with `messages` and more.

    Raises:
        InvalidArgument: The text is not valid.
    """
    allowed = "a JSON list of messages, each with a role and a content"
    try:
        value = json.loads(text)
    except ValueError:
        raise InvalidArgument(f"messages: {clip(repr(text))} is not {allowed}") from None
    chat: dict[str, Any] = value if isinstance(value, dict) else {"messages": value}
    messages = chat.get("messages")
    if not (isinstance(messages, list) and messages and all(map(_is_message, messages))):
        raise InvalidArgument(f"messages: {clip(repr(messages))} is not {allowed}")
    for name in _KINDS.keys() & chat.keys():
        kind, words = _KINDS[name]
        if not isinstance(chat[name], kind | None):
            raise InvalidArgument(f"{name}: {clip(repr(chat[name]))} is not {words}")
    return {**chat}


# The types of variables of a conversation.
_KINDS: Mapping[str, tuple[type[Any], str]] = {
    "chat_template_kwargs": (dict, "an object"),
    "documents": (list, "a list"),
    "reasoning_effort": (str, "a string"),
    **dict.fromkeys(
        ("add_generation_prompt", "continue_final_message", "include_reasoning"),
        (bool, "true or false"),
    ),
}


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and "role" in value


def _message(received: dict[str, Any], template: _Compiled) -> dict[str, Any]:
    """Return a message for a template.

    It has no nulls and no empty list of calls, its reasoning by all names, and the arguments of
    calls as objects. A missing content is empty, as in vLLM, except beside calls in a template that
    checks for it. The text parts of its content are joined, unless the template iterates over them
    and it is no result of a tool. A text is a part if the template only takes parts.
    """
    message = {name: value for name, value in received.items() if value is not None}
    for name in ("role", "name", "tool_call_id", *_REASONING):
        if not isinstance(message.get(name), str | None):
            raise InvalidArgument(f"messages: {name} {clip(repr(message[name]))} is not a string")
    if not isinstance(message.get("content"), str | list | None):
        found = clip(repr(message["content"]))
        raise InvalidArgument(f"messages: content {found} is not a string or a list of parts")
    if message["role"] == "developer" and not template.developer:
        message["role"] = "system"
    reasoning = next((message[name] for name in _REASONING if name in message), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    calls = message.pop("tool_calls", None)
    if not isinstance(calls, list | None):
        raise InvalidArgument(f"messages: tool_calls {clip(repr(calls))} is not a list")
    if calls:
        message["tool_calls"] = [_call(call) for call in calls]
    only_parts = template.iterates and not template.distinguishes
    if not (calls and template.checks):
        message.setdefault("content", [] if only_parts else "")
    content = message.get("content")
    if not isinstance(content, list):
        if isinstance(content, str) and only_parts:
            message["content"] = [{"type": "text", "text": content}]
        return message
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else part
            raise InvalidArgument(f"messages: content of type {clip(repr(kind))} is not 'text'")
        if not isinstance(part.get("text"), str):
            text = clip(repr(part.get("text")))
            raise InvalidArgument(f"messages: the text {text} of a part is not a string")
    if template.iterates and message["role"] != "tool":
        return message
    return {**message, "content": "\n".join(str(part.get("text", "")) for part in content)}


def _call(call: Any) -> Any:
    """Return a tool call with its arguments as an object, unless their text is not JSON."""
    function = call.get("function", {}) if isinstance(call, dict) else None
    if not (isinstance(function, dict) and isinstance(function.get("name", ""), str)):
        raise InvalidArgument(
            f"messages: the tool call {clip(repr(call))} is not an object with a function and its "
            "name"
        )
    arguments = function.get("arguments")
    if not isinstance(arguments, str | dict | None):
        raise InvalidArgument(f"messages: the arguments {clip(repr(arguments))} are not a string")
    if not function or not isinstance(arguments, str | None):
        return call
    with contextlib.suppress(ValueError):
        arguments = json.loads(arguments or "{}")
    return {**call, "function": {**function, "arguments": arguments}}


def _mark_end(received: Mapping[str, Any], message: dict[str, Any], template: _Compiled) -> str:
    """Mark the end of the text of a message, `received` in the request; return the text.

    As in transformers, the last part with a text is continued, and a text may be empty.
    """
    if received.get("content") is None:
        raise InvalidArgument("continue_final_message: the last message has no content")
    if not template.names_content:
        raise InvalidArgument(
            "continue_final_message: the model's chat template does not name the content of a"
            " message"
        )
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + _END
        return content
    message["content"] = parts = [*content]
    for index in reversed(range(len(parts))):
        if "text" in parts[index]:
            text = str(parts[index]["text"])
            parts[index] = {**parts[index], "text": text + _END}
            return text
    raise InvalidArgument("continue_final_message: the last message has no text")


def _before_end(prompt: str, text: str) -> str:
    """Return a rendered text up to the marked end of its last message."""
    position = prompt.rfind(_END.strip())
    if position < 0 or text.strip() not in prompt:
        raise InvalidArgument(
            "continue_final_message: the model's chat template does not render the last message"
        )
    exact = prompt.startswith(_END, position)
    return prompt[:position] if exact else prompt[:position].rstrip()


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _to_json(value: Any, *positional: Any, **named: Any) -> str:
    settings = dict(zip(_JSON, positional, strict=False)) | named
    return json.dumps(value, **{"ensure_ascii": False, **settings})
