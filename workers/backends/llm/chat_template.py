"""Chat templates: conversations rendered as the texts of prompts, as in transformers.

Python runs this file in a separate process for a long conversation. The file imports no other
module of its package, because the package imports torch, which takes seconds.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import mmap
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn, TypeGuard

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shmserve.errors import Internal, InvalidArgument, clip

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")  # of reasoning
_REASONING_MEMBERS = ("reasoning_content", "thinking", "reasoning")  # of a message
# The member that has the text of a part, by the type of the part. vLLM has the same types.
_TEXT_MEMBER_BY_TYPE = {
    **dict.fromkeys(("text", "input_text", "output_text"), "text"),
    "refusal": "refusal",
    "thinking": "thinking",
}
_TYPE_TESTS = ("string", "iterable", "sequence", "mapping")  # tests of Jinja
# The members of a conversation that are not variables of its template.
_NON_VARIABLE_NAMES = (
    *("tools", "tool_choice", "parallel_tool_calls", "include_reasoning"),
    "continue_final_message",
)
NICE = 10  # the nice value of threads and processes that convert long texts
_PROMPT_END_OPTIONS = ("add_generation_prompt", "continue_final_message")
_END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "  # marks the end of a message that is continued
# JSON writes a half of a surrogate pair, which no text may contain, as an escape sequence.
_SURROGATE_ESCAPE, _SURROGATE = re.compile(r"\\u[dD][89a-fA-F]"), re.compile("[\ud800-\udfff]")
_HALF_PAIR = " is a half of a surrogate pair; send both halves, or another character"
# As in vLLM's Responses API, a custom tool becomes a function with one string argument.
_CUSTOM_TOOL_SCHEMA = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


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
        special_tokens: The texts of special tokens by their names in templates ("eos_token").
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self.sources = sources  # texts of templates by name
        self.special_tokens = special_tokens
        extensions = [GenerationTag, "jinja2.ext.loopcontrols"]
        self._environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=extensions
        )
        self._environment.globals |= {"raise_exception": _reject, "strftime_now": _format_now}
        self._environment.filters["tojson"] = _to_json
        self._compiled_templates: dict[str, _CompiledTemplate] = {}  # by name

    def render(self, chat: Mapping[str, Any]) -> str:
        """Return the text of a conversation.

        `chat` has the messages, and variables of the template such as `tools` and `documents`.
        These members have other meanings:

        - `chat_template` is the name of a template.
        - `chat_template_kwargs` contains further variables.
        - `continue_final_message`: the prompt ends with the text of the last message.

        Raises:
            InvalidArgument: The template rejects the conversation.
        """
        if not self.sources:
            text = "messages: the model has no chat template; send text_input instead"
            raise InvalidArgument(text)
        variables = {"tools": None, "documents": None, **self.special_tokens, **chat}
        variables |= variables.pop("chat_template_kwargs", None) or {}
        name = self._select_name(variables.pop("chat_template", None), variables["tools"])
        continues = variables.pop("continue_final_message", None)
        if continues and variables.get("add_generation_prompt"):
            raise InvalidArgument("continue_final_message: add_generation_prompt must be false")
        variables.setdefault("add_generation_prompt", not continues)
        try:
            template = self._compile(name)
            messages = [_prepare_message(message, template) for message in chat["messages"]]
            roles = {message["role"] for message in chat["messages"]}
            if not template.has_developer_role and "developer" in roles:
                messages = _merge_system_messages(messages, template)
            if template.requires_tool_name:
                _name_tool_messages(messages)
            last_text = _mark_end(chat["messages"][-1], messages[-1], template) if continues else ""
            effort = variables.get("reasoning_effort")
            if effort and "enable_thinking" in template.variables:  # as in vLLM
                variables.setdefault("enable_thinking", effort != "none")
            _check_variables(variables, template)
            text = template.template.render(**{**variables, "messages": messages})
            text.encode()
        except InvalidArgument:
            raise
        except UnicodeEncodeError as error:
            raise InvalidArgument(f"messages: {error.object[error.start]!r}{_HALF_PAIR}") from None
        except Exception as error:  # templates may raise any error
            text = f"messages: the model's chat template rejects them: {clip(str(error), 200)}"
            raise InvalidArgument(text) from None
        return _cut_at_mark(text, last_text) if continues else text

    def _select_name(self, requested_name: Any, tools: Any) -> str:
        """Return the name of the template to use."""
        name = requested_name or ("tool_use" if tools and "tool_use" in self.sources else "default")
        if not isinstance(name, str) or name not in self.sources:
            allowed_names = ", ".join(sorted(self.sources))
            text = f"chat_template: {clip(repr(name))} is unknown (allowed: {allowed_names})"
            raise InvalidArgument(text)
        return name

    def _compile(self, name: str) -> _CompiledTemplate:
        if name not in self._compiled_templates:
            source = self.sources[name]
            parsed_template = self._environment.parse(source)
            constants = parsed_template.find_all(nodes.Const)
            tests = list(parsed_template.find_all(nodes.Test))
            self._compiled_templates[name] = _CompiledTemplate(
                self._environment.from_string(source),
                any(_reads(loop.iter, "content") for loop in parsed_template.find_all(nodes.For)),
                any(test.name in _TYPE_TESTS for test in tests),
                any(constant.value == "developer" for constant in constants),
                "content" in source,
                "think" in source.lower(),
                any(map(_checks_content, parsed_template.find_all((nodes.Test, nodes.Compare)))),
                any(test.name == "none" and _reads(test.node, "content") for test in tests),
                _takes_argument_text(parsed_template),
                any(map(_requires_name, parsed_template.find_all(nodes.If))),
                frozenset(meta.find_undeclared_variables(parsed_template)),
            )
        return self._compiled_templates[name]


class _CompiledTemplate(NamedTuple):
    """A compiled template and its properties.

    Attributes:
        iterates_parts: Whether the template iterates over the parts of a content.
        distinguishes_parts: Whether the template distinguishes a list of parts from a string.
        has_developer_role: Whether the template has the role `developer`; else that role becomes
            `system`.
        names_content: Whether the template contains the name `content`.
        names_thinking: Whether the template contains a tag or a variable of reasoning.
        checks_content: Whether the template checks that a message has a content.
        checks_null: Whether the template checks that a content is null.
        takes_argument_text: Whether the template writes the arguments of a call as a text.
        requires_tool_name: Whether the template rejects tools' messages without a tool's name.
        variables: The names of its variables.
    """

    template: Template
    iterates_parts: bool
    distinguishes_parts: bool
    has_developer_role: bool
    names_content: bool
    names_thinking: bool
    checks_content: bool
    checks_null: bool
    takes_argument_text: bool
    requires_tool_name: bool
    variables: frozenset[str]

    @property
    def takes_only_parts(self) -> bool:
        """Return whether the content of a message must be a list of parts."""
        return self.iterates_parts and not self.distinguishes_parts


def _check_variables(chat: Mapping[str, Any], template: _CompiledTemplate) -> None:
    """Raise InvalidArgument if the template ignores documents, or a request not to reason."""
    # Only the effort "none" is checked: agents send other efforts by default, and a model without
    # such a variable has a single effort.
    forbids_reasoning = chat.get("reasoning_effort") == "none" and template.names_thinking
    for name, is_set, other_name in (
        ("documents", bool(chat.get("documents")), ""),
        ("reasoning_effort", forbids_reasoning, "enable_thinking"),
    ):
        if is_set and template.variables.isdisjoint((name, other_name)):
            raise InvalidArgument(f"{name}: the model's chat template does not use it")


def _reads(node: nodes.Node, name: str) -> bool:
    """Return whether an expression is the variable `name`, or a member of that name."""
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == name
    return name in (getattr(node, "attr", ""), getattr(node, "name", ""))


def _takes_argument_text(parsed_template: nodes.Template) -> bool:
    """Return whether a template writes `arguments` as they are: without a filter or type test."""
    names = {"arguments"}
    for assign in parsed_template.find_all(nodes.Assign):
        if _reads(assign.node, "arguments") and isinstance(assign.target, nodes.Name):
            names.add(assign.target.name)
    written_nodes: list[nodes.Node] = []
    for sum_node in parsed_template.find_all(nodes.Add):
        written_nodes += sum_node.left, sum_node.right
    for output in parsed_template.find_all(nodes.Output):
        written_nodes += output.nodes
    for concatenation in parsed_template.find_all(nodes.Concat):
        written_nodes += concatenation.nodes
    tested_nodes = (test.node for test in parsed_template.find_all(nodes.Test))
    tests_type = any(_reads(node, name) for node in tested_nodes for name in names)
    return not tests_type and any(_reads(node, name) for node in written_nodes for name in names)


def _requires_name(branch: nodes.If) -> bool:
    """Return whether a branch rejects messages that have no `name`, as in templates of Hermes."""
    tests = [branch.test, *branch.test.find_all(nodes.Test)]
    calls = (call for part in branch.body for call in part.find_all(nodes.Call))
    checks_name = any(isinstance(test, nodes.Test) and _reads(test.node, "name") for test in tests)
    return checks_name and any(_reads(call.node, "raise_exception") for call in calls)


def _name_tool_messages(messages: list[dict[str, Any]]) -> None:
    """Add the tool's name to tool messages, since clients of OpenAI's API send call ids only."""
    names: dict[Any, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[call.get("id")] = call.get("function", {}).get("name", "")
        if message["role"] == "tool" and message.get("tool_call_id") in names:
            message.setdefault("name", names[message["tool_call_id"]])


def _checks_content(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Test):
        return node.name in ("defined", "undefined") and _reads(node.node, "content")
    compared_node = getattr(node, "expr", None)
    return isinstance(compared_node, nodes.Const) and compared_node.value == "content"


def parse_conversation(text: str) -> dict[str, Any]:
    """Parse a JSON list of messages, or a JSON object with `messages` and further members.

    Custom tools, and calls of them, become functions.

    Raises:
        InvalidArgument: The text is not valid.
    """
    allowed_text = "a JSON list of messages, each with a role and a content"
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidArgument(f"messages: {clip(repr(text))} is not {allowed_text}") from None
    chat: dict[str, Any] = value if isinstance(value, dict) else {"messages": value}
    check_surrogates(text, chat)
    messages = chat.get("messages")
    if not (isinstance(messages, list) and messages and all(map(_is_message, messages))):
        raise InvalidArgument(f"messages: {clip(repr(messages))} is not {allowed_text}")
    if isinstance(kwargs := chat.get("chat_template_kwargs"), dict):
        # The variables for the end of the prompt also determine how the generated text is parsed.
        chat |= {name: kwargs[name] for name in _PROMPT_END_OPTIONS if kwargs.get(name) is not None}
    for name in _VARIABLE_TYPES.keys() & chat.keys():
        check_type(f"{name}:", chat[name], *_VARIABLE_TYPES[name])
    if (effort := chat.get("reasoning_effort")) not in (None, *_EFFORTS):
        text = f"reasoning_effort: {clip(repr(effort))} is not one of {', '.join(_EFFORTS)}"
        raise InvalidArgument(text)
    chat = {name: value for name, value in chat.items() if value is not None}
    if '"custom"' in text:
        for message in messages:
            _replace_custom(message, "tool_calls")
        _replace_custom(chat, "tools")
        if "tool_choice" in chat:
            chat["tool_choice"] = _as_function(chat["tool_choice"], "tool_choice")
    return chat


def check_type(subject: str, value: Any, kind: Any, allowed_text: str) -> None:
    """Raise InvalidArgument if a value is neither of a type (or union of types) nor null."""
    if not isinstance(value, kind | None):
        raise InvalidArgument(f"{subject} {clip(repr(value))} is not {allowed_text}")


def check_surrogates(text: str, members: Mapping[str, Any]) -> None:
    """Raise InvalidArgument if a JSON object, parsed from `text`, has half of a surrogate pair."""
    if _SURROGATE_ESCAPE.search(text):
        for name, value in members.items():
            if surrogate_match := _SURROGATE.search(json.dumps({name: value}, ensure_ascii=False)):
                raise InvalidArgument(f"{clip(name)}: {surrogate_match[0]!r}{_HALF_PAIR}")


def _replace_custom(members: dict[str, Any], name: str) -> None:
    """Replace the custom tools, or the calls of custom tools, in a list by functions."""
    if isinstance(members.get(name), list):
        pairs = enumerate(members[name])
        members[name] = [_as_function(value, f"{name}[{index}]") for index, value in pairs]


def is_tool_name(name: Any) -> TypeGuard[str]:
    """Return whether a value may be the name of a tool."""
    return isinstance(name, str) and bool(re.fullmatch(r"[\w.:/-]{1,256}", name))


def _as_function(value: Any, position: str) -> Any:
    """Return a custom tool, the choice of one, or a call of one, as a function."""
    custom_tool = value.get("custom") if isinstance(value, dict) else None
    if not isinstance(custom_tool, dict) or value.get("type") != "custom":
        return value
    name = custom_tool.get("name")
    other_members = {key: value[key] for key in value if key != "custom"}
    if "input" in custom_tool:
        function = {"name": name, "arguments": _to_json({"input": custom_tool["input"]})}
        return {**other_members, "type": "function", "function": function}
    if not is_tool_name(name):
        allowed_text = "a name of letters, digits and _.:/-"
        raise InvalidArgument(f"{position}.custom.name: {clip(repr(name))} is not {allowed_text}")
    if custom_tool.get("format") not in (None, {"type": "text"}):
        raise InvalidArgument(f"{position}.custom.format: only the type 'text' is supported")
    members = {key: custom_tool[key] for key in custom_tool if key != "format"}
    function = {**members, "parameters": _CUSTOM_TOOL_SCHEMA}
    return {**other_members, "type": "function", "function": function}


# The types of a conversation's variables, and their descriptions.
_VARIABLE_TYPES: Mapping[str, tuple[type[Any], str]] = {
    "chat_template_kwargs": (dict, "an object"),
    "documents": (list, "a list"),
    **dict.fromkeys(
        ("add_generation_prompt", "continue_final_message", "include_reasoning"),
        (bool, "true or false"),
    ),
}


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and value.get("role") is not None


def _prepare_message(received: dict[str, Any], template: _CompiledTemplate) -> dict[str, Any]:
    """Return a received message in the form that a template requires.

    - Nulls and an empty list of calls are removed.
    - The reasoning is stored as `thinking` and as `reasoning_content`, since templates differ.
    - The arguments of calls are objects, or texts if the template writes them as they are. As in
      vLLM, arguments that are not a JSON object become an empty object, because clients send
      back calls that a token limit has truncated.
    - A missing content becomes empty, as in vLLM, unless the message has calls and the template
      checks for a content. The missing content becomes null if the template checks for null.
    - The parts of a content are joined, unless the template iterates over parts. The content of a
      tool's message is always joined. As in vLLM, refusals and thoughts are texts.
    - A string becomes a part if the template only accepts parts.
    """
    message = {name: value for name, value in received.items() if value is not None}
    for name in ("role", "name", "tool_call_id", *_REASONING_MEMBERS):
        check_type(f"messages: {name}", message.get(name), str, "a string")
    content_types = "a string or a list of parts"
    check_type("messages: content", message.get("content"), str | list, content_types)
    if message["role"] == "developer" and not template.has_developer_role:
        message["role"] = "system"
    reasoning = next((message[name] for name in _REASONING_MEMBERS if name in message), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    calls = message.pop("tool_calls", None)
    check_type("messages: tool_calls", calls, list, "a list")
    if calls:
        is_text = template.takes_argument_text
        message["tool_calls"] = [_prepare_call(call, is_text) for call in calls]
    takes_only_parts = template.takes_only_parts
    if calls and template.checks_null and not template.checks_content:
        message.setdefault("content", None)
    elif not (calls and template.checks_content):
        message.setdefault("content", [] if takes_only_parts else "")
    content = message.get("content")
    if not isinstance(content, list):
        if isinstance(content, str) and takes_only_parts:
            message["content"] = [{"type": "text", "text": content}]
        return message
    parts = [_text_part(part) for part in content]
    is_joined = not template.iterates_parts or message["role"] == "tool"
    return {**message, "content": "\n".join(part["text"] for part in parts) if is_joined else parts}


def _text_part(part: Any) -> dict[str, Any]:
    """Convert a part of a message's content to the form {"type": "text", "text": ...}."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, dict) else part
    name = _TEXT_MEMBER_BY_TYPE.get(kind) if isinstance(kind, str) else None
    if name is None:
        raise InvalidArgument(f"messages: content of type {clip(repr(kind))} is not 'text'")
    text = part.get(name)
    if not isinstance(text, str):
        raise InvalidArgument(f"messages: the text {clip(repr(text))} of a part is not a string")
    return part if kind == "text" else {"type": "text", "text": text}


def _merge_system_messages(
    messages: list[dict[str, Any]], template: _CompiledTemplate
) -> list[dict[str, Any]]:
    """Return messages with one system message at their beginning, as in vLLM.

    Many templates reject a system message elsewhere, such as a converted developer's message.
    """
    system_messages = [message for message in messages if message["role"] == "system"]
    if system_messages == messages[:1]:
        return messages
    contents = (message.get("content") or "" for message in system_messages)
    texts = [
        content if isinstance(content, str) else "\n".join(part["text"] for part in content)
        for content in contents
    ]
    content: Any = "\n\n".join(filter(None, texts))
    if template.takes_only_parts:
        content = [{"type": "text", "text": content}]
    other_messages = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": content}, *other_messages]


def _prepare_call(call: Any, is_text: bool) -> Any:
    """Return a tool call whose arguments are an object, or a string if `is_text`."""
    function = call.get("function", {}) if isinstance(call, dict) else None
    if not (isinstance(function, dict) and isinstance(function.get("name"), str)):
        raise InvalidArgument(
            f"messages: the tool call {clip(repr(call))} is not an object with a function and its "
            "name"
        )
    check_type("messages: the call id", call.get("id"), str, "a string")
    if call.get("type") not in (None, "function"):
        text = f"the type {clip(repr(call['type']))} of a tool call is not 'function' or 'custom'"
        raise InvalidArgument(f"messages: {text}")
    arguments = function.get("arguments")
    if not isinstance(arguments, str | dict | None):
        raise InvalidArgument(f"messages: the arguments {clip(repr(arguments))} are not a string")
    if is_text:
        if not (arguments and isinstance(arguments, str)):
            arguments = _to_json(arguments or {})
    elif not isinstance(arguments, dict):
        value = None
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(arguments or "{}")
        arguments = value if isinstance(value, dict) else {}
    return {**call, "function": {**function, "arguments": arguments}}


def _mark_end(
    received_message: Mapping[str, Any], message: dict[str, Any], template: _CompiledTemplate
) -> str:
    """Append a mark to the text to be continued, in place; return the text without the mark.

    The rendered prompt is later cut at the mark. As in transformers, the last part with a text is
    continued, and the text may be empty.

    Args:
        received_message: The message in the request.
        message: The message for the template.
        template: The template.
    """
    if received_message.get("content") is None:
        raise InvalidArgument("continue_final_message: the last message has no content")
    if not template.names_content:
        raise InvalidArgument(
            "continue_final_message: the model's chat template does not name the content of a"
            " message"
        )
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + _END_MARK
        return content
    message["content"] = parts = [*content]
    for index in reversed(range(len(parts))):
        if "text" in parts[index]:
            text = str(parts[index]["text"])
            parts[index] = {**parts[index], "text": text + _END_MARK}
            return text
    raise InvalidArgument("continue_final_message: the last message has no text")


def _cut_at_mark(prompt: str, text: str) -> str:
    """Return a rendered prompt up to the end mark, which follows `text` in the last message.

    Raises:
        InvalidArgument: The prompt lacks the mark or the text.
    """
    position = prompt.rfind(_END_MARK.strip())
    if position < 0 or text.strip() not in prompt:
        raise InvalidArgument(
            "continue_final_message: the model's chat template does not render the last message"
        )
    is_text_unchanged = prompt.startswith(_END_MARK, position)
    return prompt[:position] if is_text_unchanged else prompt[:position].rstrip()


def _reject(message: str) -> NoReturn:
    raise TemplateError(message)


def _format_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON, like the filter `tojson` of transformers."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def decode(name: str, data: bytes) -> str:
    """Return the text of an input.

    Raises:
        InvalidArgument: The text is not UTF-8.
    """
    try:
        return data.decode()
    except UnicodeDecodeError:
        data_text = clip(repr(data[: 1 << 12]))
        raise InvalidArgument(f"{name}: {data_text} is not UTF-8") from None


def render_in_process(
    template: ChatTemplate, conversation: memoryview, take_options: Callable[[dict[str, Any]], Any]
) -> tuple[Any, memoryview]:
    """Render a conversation in a separate process, since JSON and Jinja would hold the GIL.

    Args:
        template: The templates of the model.
        conversation: The conversation as JSON.
        take_options: Removes and returns the options of a conversation that are not for the
            template.

    Returns:
        The options, and the bytes of the prompt.

    Raises:
        InvalidArgument: The conversation is invalid, or the template rejects it.
        Internal: The process has exited.
    """
    with open(os.memfd_create("chat"), "w+b", 0) as file:
        file.write(conversation)
        file.seek(0)
        command = (sys.executable, "-P", __file__, str(file.fileno()))
        pipe = subprocess.PIPE
        with subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, pass_fds=[file.fileno()]
        ) as process:
            try:
                chat = _exchange(process, [template.sources, template.special_tokens])
                options = take_options(chat)
                size = _exchange(process, chat)["size"]  # of the prompt, in bytes
            finally:
                process.kill()
        mapped_file = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) if size else b""
    return options, memoryview(mapped_file)


def _exchange(process: subprocess.Popen[str], value: Any) -> Any:
    """Send a value to the process that renders, and return its response."""
    assert process.stdin is not None and process.stdout is not None
    print(json.dumps(value), file=process.stdin, flush=True)
    line = process.stdout.readline()
    if not line:
        raise Internal(
            "the process that rendered this conversation has exited; send the request again"
        )
    response = json.loads(line)
    if "error" in response:
        raise InvalidArgument(response["error"])
    return response


def main() -> None:
    """Render the conversation in a memory file, whose descriptor is the argument.

    The prompt replaces the conversation in the file. The standard input has two lines of JSON: the
    templates and special tokens, and the options for the template. The output, also JSON, is the
    options of the conversation and the size of the prompt, or an object with `error`.
    """
    os.setpriority(os.PRIO_PROCESS, 0, NICE)
    template = ChatTemplate(*json.loads(input()))
    with open(int(sys.argv[1]), "r+b", 0) as file:
        try:
            chat = parse_conversation(decode("messages", file.read()))
            options = {name: chat.pop(name) for name in _NON_VARIABLE_NAMES if name in chat}
            print(json.dumps(options), flush=True)
            prompt = template.render(chat | json.loads(input())).encode()
        except InvalidArgument as error:
            print(json.dumps({"error": error.message}))
            return
        file.seek(0)
        file.truncate()
        file.write(prompt)
    print(json.dumps({"size": len(prompt)}))


if __name__ == "__main__":
    main()
