"""The requests of /v1/responses, converted to the bodies of chats."""

from __future__ import annotations

import contextlib
import logging
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from shmserve.errors import InvalidArgument, clip
from shmserve.gateway.context import Gateway
from shmserve.gateway.http.json.large_bodies import Packed
from shmserve.gateway.http.messages import HttpRequest
from shmserve.gateway.http.openai import bodies
from shmserve.gateway.http.openai.fields import (
    CHAT_FIELDS,
    RESPONSE_FIELDS,
    select_supported_fields,
)
from shmserve.logs import warn_once

logger = logging.getLogger(__name__)

# The members of a request that a chat also has, with their names in a chat.
_CHAT_MEMBERS = {
    **{
        name: name for name in RESPONSE_FIELDS & CHAT_FIELDS if name not in ("tools", "tool_choice")
    },
    "max_output_tokens": "max_completion_tokens",
}
# Some clients return only the `encrypted_content` of reasoning, unchanged. The reasoning is not
# secret here, so this field contains its plain text after a prefix.
PLAIN_PREFIX = "plain:"
# The types of tools that OpenAI's servers execute.
_HOSTED_TOOLS = (
    *("web_search", "web_search_preview", "file_search", "code_interpreter", "image_generation"),
    *("computer_use_preview", "computer", "mcp", "tool_search", "programmatic_tool_calling"),
    *("web_search_2025_08_26", "web_search_preview_2025_03_11"),
)
_SUMMARIES = ("auto", "concise", "detailed")  # allowed values of reasoning.summary
_ROLES = ("user", "assistant", "system", "developer")
LOGPROBS_MEMBER, ENCRYPTED_MEMBER = "message.output_text.logprobs", "reasoning.encrypted_content"
# The allowed values of `include`. Except for the first two, they name members of items that this
# server's responses never contain.
_INCLUDED_MEMBERS = (
    *(LOGPROBS_MEMBER, ENCRYPTED_MEMBER),
    *("message.input_image.image_url", "code_interpreter_call.outputs"),
    *("computer_call_output.output.image_url", "file_search_call.results"),
    *("web_search_call.action.sources", "web_search_call.results"),
)


async def read_request(
    gateway: Gateway, request: HttpRequest
) -> tuple[dict[str, Any], bodies.TextRequest]:
    """Return the body of a request, and the `TextRequest` that is made from it."""
    body = await bodies.read_body(gateway, request, ["messages"], convert_large)
    converted_input: Any = body.get("input")
    is_converted = type(converted_input) is dict and type(converted_input.get("messages")) is Packed
    unpack = bodies.as_fragment if is_converted else Packed.value
    body = {name: unpack(value) if type(value) is Packed else value for name, value in body.items()}
    refuses_unknown = gateway.settings.refuse_unknown_fields
    try:
        fields = select_supported_fields(body, RESPONSE_FIELDS, refuses_unknown)
    except InvalidArgument as error:
        raise bodies.RefusedFields(error.message) from None
    converted_input = converted_input if is_converted else _chat_body(fields)
    return body, await bodies.parse_chat(gateway, converted_input)


@contextlib.contextmanager
def with_client_positions(body: dict[str, Any]) -> Iterator[None]:
    """Convert the positions of tools in an error to the positions in the client's request.

    The worker names the position of a tool in the chat, which lacks the tools that are ignored.
    """
    try:
        yield
    except InvalidArgument as error:
        if not _TOOL_POSITION.search(error.message):
            raise
        positions = dict(enumerate(_chat_tools({"tools": unpacked_tools(body.get("tools"))})))
        text = _TOOL_POSITION.sub(lambda m: positions.get(int(m[1]), m[0]), error.message)
        raise InvalidArgument(text) from None


def convert_large(body: Any) -> Any:
    """Replace the input of a large body by the chat body that is equivalent to the request.

    An input with references is not replaced, since only the gateway has the stored items.
    """
    items = body.get("input") if type(body) is dict else None
    if not items or (type(items) is list and any(map(_is_reference, items))):
        return body
    return {**body, "input": _chat_body(body), "include": sorted({*(body.get("include") or ())})}


def _chat_body(body: dict[str, Any]) -> dict[str, Any]:
    """Return the chat body that is equivalent to a request of the Responses API.

    Raises:
        InvalidArgument: A member is wrong, or not supported.
    """
    bodies.check_member(body, "store", bool, False)
    bodies.check_member(body, "max_tool_calls", int, 0)
    reasoning = bodies.check_member(body, "reasoning", dict, {})
    for name in ("summary", "generate_summary"):
        if reasoning.get(name) not in (None, *_SUMMARIES):
            text = f"{clip(repr(reasoning[name]))} is not one of {', '.join(_SUMMARIES)}"
            raise InvalidArgument(f"reasoning.{name}: {text}")
    chat = {_CHAT_MEMBERS[name]: value for name, value in body.items() if name in _CHAT_MEMBERS}
    chat["messages"] = _chat_messages(body)
    if _is_unfinished(body["input"] and body["input"][-1]):
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    tools = list(_chat_tools(body).values())
    chat["tools"] = tools or None
    chat["tool_choice"] = _chat_tool_choice(body.get("tool_choice"), tools)
    chat["reasoning_effort"] = reasoning.get("effort")
    text = bodies.check_member(body, "text", dict, {})
    chat["response_format"] = _chat_format(text.get("format"))
    chat["verbosity"] = text.get("verbosity")
    if (truncation := bodies.check_member(body, "truncation", str, "disabled")) == "auto":
        chat["truncate_prompt_tokens"] = -1  # as in vLLM
    elif truncation != "disabled":
        raise InvalidArgument(f"truncation: {clip(repr(truncation))} is not 'auto' or 'disabled'")
    include = bodies.check_member(body, "include", list, [])
    for name in include:
        if name not in _INCLUDED_MEMBERS:
            allowed_names = ", ".join(_INCLUDED_MEMBERS)
            raise InvalidArgument(f"include: {clip(repr(name))} is not one of {allowed_names}")
    if LOGPROBS_MEMBER in include or body.get("top_logprobs"):
        chat["logprobs"] = True
    return chat


def _chat_tools(body: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the functions of a request as tools of a chat, by their positions in the request.

    As in vLLM, tools that OpenAI's servers execute are ignored. A request that has only such tools
    is rejected.
    """
    tools: dict[str, dict[str, Any]] = {}
    problems: list[str] = []
    for index, tool in enumerate(bodies.check_member(body, "tools", list, [])):
        is_object, position = type(tool) is dict, f"tools[{index}]"
        kind = tool.get("type") if is_object else tool
        if is_object and kind in ("function", "custom"):
            tools[position] = _chat_tool(tool, tool.get("name"), kind)
        elif is_object and kind == "namespace":
            for inner_index, (name, function) in enumerate(namespace_functions(tool, position)):
                tools[f"{position}.tools[{inner_index}]"] = _chat_tool(function, name)
        else:
            allowed_text = "'function', 'custom' or 'namespace'"
            problems.append(f"{position}: {clip(repr(kind))} is not {allowed_text}")
            if not is_object or kind not in _HOSTED_TOOLS:
                raise InvalidArgument(problems[-1])
    if problems and not tools:
        raise InvalidArgument(problems[0])
    for problem in problems:
        warn_once(logger, "a tool of /v1/responses is ignored: %s", problem.partition(": ")[2])
    return tools


_TOOL_POSITION = re.compile(r"(?<!\S)tools\[(\d+)\]")  # a tool's position in a worker's error


def unpacked_tools(tools: Any) -> Any:
    """Return the tools of a body as objects; in a large body, they are unparsed JSON."""
    return orjson.loads(orjson.dumps(tools)) if type(tools) is orjson.Fragment else tools


def _chat_tool(tool: dict[str, Any], name: Any, tool_type: str = "function") -> dict[str, Any]:
    members = {key: value for key, value in tool.items() if key != "type"}
    return {"type": tool_type, tool_type: {**members, "name": name}}


def namespace_functions(tool: dict[str, Any], position: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the functions of a namespace, each after the name that the model calls."""
    namespace = tool.get("name")
    if type(namespace) is not str:
        raise InvalidArgument(f"{position}.name: {clip(repr(namespace))} is not a string")
    functions = bodies.check_member(tool, "tools", list, [])
    for index, function in enumerate(functions):
        is_function = type(function) is dict and function.get("type") == "function"
        if not (is_function and type(function.get("name")) is str):
            raise InvalidArgument(f"{position}.tools[{index}]: expected a 'function' with a name")
    return [(_qualified_name(namespace, entry["name"]), entry) for entry in functions]


def _qualified_name(namespace: Any, name: Any) -> Any:
    """Return the name by which the model calls a function of a namespace, as in vLLM."""
    return f"{namespace}__{name}" if type(namespace) is str and type(name) is str else name


def _chat_tool_choice(choice: Any, tools: list[dict[str, Any]]) -> Any:
    """Return the choice of tools in the form of a chat; None for "auto", the default.

    As in vLLM, the name of a function need not contain its namespace if it is unambiguous.
    """
    if choice == "auto":
        return None
    if type(choice) is dict and choice.get("type") in ("function", "custom"):
        kind, name = choice["type"], choice.get("name")
        names = [tool[tool["type"]]["name"] for tool in tools]
        qualified_names = [tool_name for tool_name in names if str(tool_name).endswith(f"__{name}")]
        if name not in names and len(qualified_names) == 1:
            name = qualified_names[0]
        return {"type": kind, kind: {"name": name}}
    return choice


def _chat_format(text_format: Any) -> Any:
    if type(text_format) is dict and text_format.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": text_format}
    return text_format


def _chat_messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a chat for the instructions and the input of a request."""
    items: Any = body.get("input")
    if type(items) is str:
        items = [{"role": "user", "content": items}]
    if type(items) is not list or not items:
        raise InvalidArgument("input: expected a string or a list of items")
    messages: list[dict[str, Any]] = []
    instructions = bodies.check_member(body, "instructions", str, "")
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for index, item in enumerate(items):
        if type(item) is not dict:
            raise InvalidArgument(f"input[{index}]: {clip(repr(item))} is not an object")
        if _is_reference(item):
            item = _find_stored_item(index, item.get("id"))
        _add_item(messages, item, f"input[{index}]")
    return messages


def _is_unfinished(item: Any) -> bool:
    """Return whether an item is a message whose text the response continues, as in vLLM."""
    is_unfinished = type(item) is dict and item.get("status") in ("in_progress", "incomplete")
    is_message = is_unfinished and item.get("type") in (None, "message")
    return is_message and item.get("role") == "assistant"


def _is_reference(item: Any) -> bool:
    return type(item) is dict and item.get("type") == "item_reference"


def _add_item(messages: list[dict[str, Any]], item: Mapping[str, Any], position: str) -> None:
    """Add an item to the messages of a chat; calls and reasoning go to an assistant's message."""
    kind = "message" if item.get("type") is None else item["type"]
    if kind == "message" and item.get("role") not in _ROLES:
        text = f"role {clip(repr(item.get('role')))} is not one of {', '.join(_ROLES)}"
        raise InvalidArgument(f"{position}: {text}")
    if kind in ("function_call_output", "custom_tool_call_output"):
        output = _chat_content(item.get("output"), f"{position}.output")
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        return
    if kind == "message" and item.get("role") != "assistant":
        content = _chat_content(item.get("content"), position)
        messages.append({"role": item.get("role"), "content": content})
        return
    message: dict[str, Any] = messages[-1] if messages else {}
    if message.get("role") != "assistant" or (kind == "message" and message.get("content")):
        message = {"role": "assistant", "content": None}
        messages.append(message)
    if kind == "message":
        message["content"] = _chat_content(item.get("content"), position)
    elif kind in ("function_call", "custom_tool_call"):
        name = _qualified_name(item.get("namespace"), item.get("name"))
        call = {"type": "function", "function": {"name": name, "arguments": item.get("arguments")}}
        if kind == "custom_tool_call":
            call = {"type": "custom", "custom": {"name": name, "input": item.get("input")}}
        message.setdefault("tool_calls", []).append({"id": item.get("call_id"), **call})
    elif kind == "reasoning":
        encrypted_content = item.get("encrypted_content")
        if not item.get("content") and str(encrypted_content).startswith(PLAIN_PREFIX):
            text = str(encrypted_content).removeprefix(PLAIN_PREFIX)
        else:
            text = _chat_content(item.get("content") or item.get("summary") or [], position)
        if text:  # else another server has encrypted the reasoning, which is then ignored
            earlier_text = message.get("reasoning_content")
            message["reasoning_content"] = f"{earlier_text}\n{text}" if earlier_text else text
    else:
        raise InvalidArgument(f"{position}: items of type {clip(repr(kind))} are not supported")


_TEXT_PART_TYPES = ("input_text", "output_text", "reasoning_text", "summary_text", "text")


def _chat_content(content: Any, position: str) -> Any:
    """Return the text of an item's content, joined from its parts if it is a list."""
    if type(content) is not list:
        return content
    texts: list[str] = []
    for part in content:
        part_type = part.get("type") if type(part) is dict else part
        if part_type != "refusal" and part_type not in _TEXT_PART_TYPES:
            text = f"{position}: content of type {clip(repr(part_type))} is not a string"
            raise InvalidArgument(text)
        text = part.get("refusal" if part_type == "refusal" else "text")
        if type(text) is not str:
            raise InvalidArgument(f"{position}: the text {clip(repr(text))} is not a string")
        texts.append(text)
    return "\n".join(texts)


# The items of recent responses by their ids.
_recent_items: OrderedDict[str, dict[str, Any]] = OrderedDict()
_MAX_RECENT_ITEMS = 1024
_MAX_RECENT_ITEM_LENGTH = 1 << 16  # maximum characters of a stored item's text


def store_item(item: dict[str, Any], text: str) -> None:
    """Store an output item with `text`, so that later requests can refer to it by its id."""
    if len(text) <= _MAX_RECENT_ITEM_LENGTH:
        _recent_items[item["id"]] = item
    while len(_recent_items) > _MAX_RECENT_ITEMS:
        _recent_items.popitem(last=False)


def _find_stored_item(index: int, item_id: Any) -> dict[str, Any]:
    item = _recent_items.get(item_id) if type(item_id) is str else None
    if item is None:
        raise InvalidArgument(
            f"input[{index}]: item {clip(repr(item_id))} is not stored; the input must contain the "
            "item itself (clients send it with store: false)"
        )
    return item
