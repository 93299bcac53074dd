"""POST /v1/responses: OpenAI's Responses API, over the same models as chats.

    POST /v1/responses                a response
    POST /v1/responses/input_tokens   the number of tokens of its prompt

No response is stored, so that each request contains its conversation. Items of recent responses may
be referred to by their ids, as long as this process stores them.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import logging
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import orjson

from shmserve.errors import InvalidArgument, ShmserveError, clip
from shmserve.gateway.context import Gateway
from shmserve.gateway.http.json.large_bodies import Packed
from shmserve.gateway.http.messages import (
    SERVER_SENT_EVENTS,
    HttpRequest,
    HttpResponse,
    json_response,
)
from shmserve.gateway.http.openai import bodies
from shmserve.gateway.http.openai.bodies import response_name
from shmserve.gateway.http.openai.fields import (
    CHAT_FIELDS,
    RESPONSE_FIELDS,
    select_supported_fields,
)
from shmserve.gateway.http.openai.generation import Delta, custom_input, respond
from shmserve.gateway.http.openai.models import infer_once
from shmserve.logs import warn_once

logger = logging.getLogger(__name__)

# The members of a body that a chat also has, by their names in a chat.
_CHAT_MEMBERS = {
    **{
        name: name for name in RESPONSE_FIELDS & CHAT_FIELDS if name not in ("tools", "tool_choice")
    },
    "max_output_tokens": "max_completion_tokens",
}
# Members of a response that repeat the request, with their defaults.
_REPEATED_MEMBERS: Mapping[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "prompt_cache_key": None,
    "safety_identifier": None,
    "temperature": 1.0,
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}
# The members of a chat's body, and the members of a request that they are derived from.
_REQUEST_MEMBERS = {
    "messages": "input",
    "continue_final_message": "input",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    ".function.": ".",  # tools[0].function.name
    ".custom.": ".",
    "verbosity": "text.verbosity",
}
response_error = partial(bodies.encode_openai_error, names=_REQUEST_MEMBERS)
# Some clients return only the `encrypted_content` of reasoning, unchanged. The reasoning is not
# secret here, so this field contains its plain text after a prefix.
_PLAIN_PREFIX = "plain:"
# The types of tools that OpenAI's servers execute.
_HOSTED_TOOLS = (
    *("web_search", "web_search_preview", "file_search", "code_interpreter", "image_generation"),
    *("computer_use_preview", "computer", "mcp", "tool_search"),
)
_SUMMARIES = ("auto", "concise", "detailed")
_ROLES = ("user", "assistant", "system", "developer")
# The values of `include`. All but the first two are members of items that no response here has.
_INCLUDED_MEMBERS = (
    *("message.output_text.logprobs", "reasoning.encrypted_content"),
    *("message.input_image.image_url", "code_interpreter_call.outputs"),
    *("computer_call_output.output.image_url", "file_search_call.results"),
    *("web_search_call.action.sources", "web_search_call.results"),
)


async def create_response(gateway: Gateway, request: HttpRequest) -> HttpResponse:
    """Handle POST /v1/responses: respond with messages, reasoning and function calls."""
    body, text_request = await _read_request(gateway, request)
    shown_body = {**body, "model": response_name(gateway, text_request.model.name)}
    with _client_positions(body):
        return await respond(gateway, request, text_request, ResponseObject(shown_body))


async def count_input_tokens(gateway: Gateway, request: HttpRequest) -> HttpResponse:
    """Handle POST /v1/responses/input_tokens: respond with the number of tokens of the prompt."""
    body, text_request = await _read_request(gateway, request)
    model, (prompt,) = text_request.model, text_request.prompts
    parameters = {"task": "tokenize", "add_special_tokens": False}
    with _client_positions(body):
        values = await infer_once(gateway, request, model, prompt, ("token_ids",), parameters)
    count = len(values["token_ids"])
    return json_response({"object": "response.input_tokens", "input_tokens": count})


async def _read_request(
    gateway: Gateway, request: HttpRequest
) -> tuple[dict[str, Any], bodies.TextRequest]:
    """Return the body of a request, and the request for text that is equivalent to it."""
    body = await bodies.read_body(gateway, request, ["messages"], convert_large)
    chat: Any = body.get("input")
    is_converted = type(chat) is dict and type(chat.get("messages")) is Packed
    unpack = bodies.as_fragment if is_converted else Packed.value
    body = {name: unpack(value) if type(value) is Packed else value for name, value in body.items()}
    refuses_unknown = gateway.settings.refuse_unknown_fields
    try:
        fields = select_supported_fields(body, RESPONSE_FIELDS, refuses_unknown)
    except InvalidArgument as error:
        raise bodies.RefusedFields(error.message) from None
    chat = chat if is_converted else _chat_body(fields)
    return body, await bodies.parse_chat(gateway, chat)


@contextlib.contextmanager
def _client_positions(body: dict[str, Any]) -> Iterator[None]:
    """Replace the positions of a chat's tools in an error by their positions in the request."""
    try:
        yield
    except InvalidArgument as error:
        if not _TOOL_POSITION.search(error.message):
            raise
        positions = dict(enumerate(_chat_tools({"tools": _whole(body.get("tools"))})))
        text = _TOOL_POSITION.sub(lambda m: positions.get(int(m[1]), m[0]), error.message)
        raise InvalidArgument(text) from None


# --- requests


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
    if _is_unfinished(body["input"][-1]):
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
    included = bodies.check_member(body, "include", list, [])
    for name in included:
        if name not in _INCLUDED_MEMBERS:
            allowed_names = ", ".join(_INCLUDED_MEMBERS)
            raise InvalidArgument(f"include: {clip(repr(name))} is not one of {allowed_names}")
    if _INCLUDED_MEMBERS[0] in included or body.get("top_logprobs"):
        chat["logprobs"] = True
    return chat


def _chat_tools(body: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the functions of a request as tools of a chat, by their positions in the request.

    As in vLLM, tools that OpenAI's servers execute are ignored. If the request has no function
    besides them, it cannot be carried out.
    """
    tools: dict[str, dict[str, Any]] = {}
    others: list[str] = []
    for index, tool in enumerate(bodies.check_member(body, "tools", list, [])):
        is_object, position = type(tool) is dict, f"tools[{index}]"
        kind = tool.get("type") if is_object else tool
        if is_object and kind in ("function", "custom"):
            tools[position] = _chat_tool(tool, tool.get("name"), kind)
        elif is_object and kind == "namespace":
            for inner, (name, function) in enumerate(_namespace_functions(tool, position)):
                tools[f"{position}.tools[{inner}]"] = _chat_tool(function, name)
        else:
            allowed = "'function', 'custom' or 'namespace'"
            others.append(f"{position}: {clip(repr(kind))} is not {allowed}")
            if not is_object or kind not in _HOSTED_TOOLS:
                raise InvalidArgument(others[-1])
    if others and not tools:
        raise InvalidArgument(others[0])
    for problem in others:
        warn_once(logger, "a tool of /v1/responses is ignored: %s", problem.partition(": ")[2])
    return tools


_TOOL_POSITION = re.compile(r"(?<!\S)tools\[(\d+)\]")  # in an error of a worker


def _whole(tools: Any) -> Any:
    """Return the tools of a body, which may be JSON."""
    return orjson.loads(orjson.dumps(tools)) if type(tools) is orjson.Fragment else tools


def _chat_tool(tool: dict[str, Any], name: Any, kind: str = "function") -> dict[str, Any]:
    members = {key: value for key, value in tool.items() if key != "type"}
    return {"type": kind, kind: {**members, "name": name}}


def _namespace_functions(tool: dict[str, Any], position: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the functions of a namespace, each after the name that the model calls."""
    namespace = tool.get("name")
    if type(namespace) is not str:
        raise InvalidArgument(f"{position}.name: {clip(repr(namespace))} is not a string")
    functions = bodies.check_member(tool, "tools", list, [])
    for index, function in enumerate(functions):
        is_function = type(function) is dict and function.get("type") == "function"
        if not (is_function and type(function.get("name")) is str):
            raise InvalidArgument(f"{position}.tools[{index}]: expected a 'function' with a name")
    return [(_qualified_name(namespace, each["name"]), each) for each in functions]


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
        qualified_names = [each for each in names if str(each).endswith(f"__{name}")]
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
    """Add an item to the messages of a chat. Calls are parts of the assistant's message."""
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
    last: dict[str, Any] = messages[-1] if messages else {}
    if last.get("role") != "assistant" or (kind == "message" and last.get("content")):
        last = {"role": "assistant", "content": None}
        messages.append(last)
    if kind == "message":
        last["content"] = _chat_content(item.get("content"), position)
    elif kind in ("function_call", "custom_tool_call"):
        name = _qualified_name(item.get("namespace"), item.get("name"))
        call = {"type": "function", "function": {"name": name, "arguments": item.get("arguments")}}
        if kind == "custom_tool_call":
            call = {"type": "custom", "custom": {"name": name, "input": item.get("input")}}
        last.setdefault("tool_calls", []).append({"id": item.get("call_id"), **call})
    elif kind == "reasoning":
        returned = item.get("encrypted_content")
        if not item.get("content") and type(returned) is str and returned.startswith(_PLAIN_PREFIX):
            text = returned.removeprefix(_PLAIN_PREFIX)
        else:
            text = _chat_content(item.get("content") or item.get("summary") or [], position)
        if text:  # reasoning of another server may be encrypted
            earlier = last.get("reasoning_content")
            last["reasoning_content"] = f"{earlier}\n{text}" if earlier else text
    else:
        raise InvalidArgument(f"{position}: items of type {clip(repr(kind))} are not supported")


_TEXT_PARTS = ("input_text", "output_text", "reasoning_text", "summary_text", "text")


def _chat_content(content: Any, position: str) -> Any:
    """Return the text of an item's content, joined from its parts if it is a list."""
    if type(content) is not list:
        return content
    texts: list[str] = []
    for part in content:
        part_type = part.get("type") if type(part) is dict else part
        if part_type != "refusal" and part_type not in _TEXT_PARTS:
            text = f"{position}: content of type {clip(repr(part_type))} is not a string"
            raise InvalidArgument(text)
        text = part.get("refusal" if part_type == "refusal" else "text")
        if type(text) is not str:
            raise InvalidArgument(f"{position}: the text {clip(repr(text))} is not a string")
        texts.append(text)
    return "\n".join(texts)


# --- responses

# The items of recent responses by their ids.
_recent_items: OrderedDict[str, dict[str, Any]] = OrderedDict()
_MAX_RECENT_ITEMS = 1024
_MAX_RECENT_ITEM_LENGTH = 1 << 16  # maximum characters of a stored item's text


def _store_item(item: dict[str, Any], text: str) -> None:
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


@dataclass(eq=False)
class ResponseObject:
    """A response in progress: its output items, and their events in a stream.

    `body` is the request's body, whose members the response repeats.
    """

    body: dict[str, Any]
    _items: list[dict[str, Any]] = field(default_factory=list)
    _text: str = ""  # the text, or the arguments, of the last item
    _logprobs: list[dict[str, Any]] = field(default_factory=list)
    # The log probabilities of tokens without text, which belong to the next part of the text.
    _next_logprobs: list[dict[str, Any]] = field(default_factory=list)
    _is_item_open: bool = False  # whether more text may follow for the last item
    _usage: dict[str, Any] | None = None
    _finish_reason: str = ""
    _event_count: int = 0  # number of events sent

    def __post_init__(self) -> None:
        self._id = f"resp_{secrets.token_hex(24)}"
        self._created = int(time.time())

    def add(self, prompt_index: int, delta: Delta) -> list[dict[str, Any]]:
        """Add a part of the generated text, and return the events of the stream for it."""
        message: dict[str, Any] = delta.message or {"content": delta.text}
        events = [] if self._event_count else self._start_events()
        self._next_logprobs += (delta.logprobs or {}).get("content", [])
        for part in message.get("parts", [message]):
            events += self._add_part(part)
        self._finish_reason = delta.finish_reason
        self._usage = delta.usage or self._usage
        return events

    def _add_part(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Add reasoning, content and calls in this order."""
        events: list[dict[str, Any]] = []
        calls = list(message.get("tool_calls", ()))
        while calls and "id" not in calls[0]:  # the end of a call, before other items begin
            kind = self._items[-1]["type"]
            events += self._extend_item(kind, calls.pop(0)["arguments"], {})
        if message.get("reasoning"):
            events += self._extend_item("reasoning", message["reasoning"], {})
        if message.get("content"):
            logprobs, self._next_logprobs = self._content_logprobs(message), []
            events += self._extend_item("message", message["content"], {}, logprobs)
        elif message.keys() & {"reasoning", "tool_calls"}:
            self._next_logprobs = []
        for call in calls:
            head: dict[str, Any] = {}
            if "id" in call:
                plain_call = "function_call", {"name": call["name"]}
                call_kind, named_fields = self._calls.get(call["name"], plain_call)
                head = {"call_id": call["id"], **named_fields}
            else:
                call_kind = self._items[-1]["type"]
            events += self._extend_item(call_kind, call["arguments"], head)
        return events

    def _content_logprobs(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the log probabilities of a content without those of reasoning and calls beside it.

        A token begins the content, possibly after line breaks.
        """
        tokens, reasoning = self._next_logprobs, message.get("reasoning", "").encode()
        calls = message.get("tool_calls")
        follows_reasoning = self._is_item_open and self._items[-1]["type"] == "reasoning"
        if not (tokens and (reasoning or calls or follows_reasoning)):
            return tokens
        pieces = [bytes(token.get("bytes") or ()) for token in tokens]
        raw, ends = b"".join(pieces), list(itertools.accumulate(map(len, pieces)))
        content = re.compile(b"\n*" + re.escape(message["content"].encode()))
        reasoning_end = raw.find(reasoning) + len(reasoning)
        for index, begin in enumerate([0, *ends[:-1]]):
            found = content.match(raw, begin) if begin >= reasoning_end else None
            if found is not None:
                return tokens[index : bisect.bisect_left(ends, found.end()) + 1 if calls else None]
        return tokens

    @cached_property
    def _calls(self) -> dict[str, tuple[str, dict[str, str]]]:
        """Return the types and the members of items with calls, by the name that the model calls.

        Only calls of custom tools and of functions in namespaces differ from other function calls.
        """
        calls: dict[str, tuple[str, dict[str, str]]] = {}
        for tool in _whole(self.body.get("tools")) or []:
            if tool["type"] == "custom":
                calls.setdefault(tool["name"], ("custom_tool_call", {"name": tool["name"]}))
            elif tool["type"] == "namespace":
                prefix = f"{tool['name']}__"
                for name, _ in _namespace_functions(tool, ""):
                    members = {"name": name.removeprefix(prefix), "namespace": tool["name"]}
                    calls.setdefault(name, ("function_call", members))
        return calls

    def _extend_item(
        self,
        kind: str,
        text: str,
        head: dict[str, Any],
        logprobs: list[dict[str, Any]] | None = None,
    ) -> list[dict[str, Any]]:
        """Add text to the last item if it is of this kind, or to a new item."""
        events: list[dict[str, Any]] = []
        if head or not self._is_item_open or self._items[-1]["type"] != kind:
            events += [*self._close_item(), *self._open_item(kind, head)]
        self._text += text
        extra = {} if logprobs is None else {"logprobs": logprobs}
        self._logprobs += logprobs or []
        if kind == "custom_tool_call":  # its input is sent when the arguments are complete
            return events
        return [*events, self._item_event(".delta", delta=text, **extra)]

    def _open_item(self, kind: str, head: dict[str, Any]) -> list[dict[str, Any]]:
        id_prefix, _, members = _ITEM_TYPES[kind]
        item: dict[str, Any] = {"id": f"{id_prefix}_{secrets.token_hex(24)}", "type": kind}
        item |= {"status": "in_progress", **head, **members}
        self._items.append(item)
        self._text, self._logprobs, self._is_item_open = "", [], True
        index = len(self._items) - 1
        events = [self._event("response.output_item.added", output_index=index, item={**item})]
        if "content" in item:
            part = self._item_event("response.content_part.added", part=self._content_part(kind))
            events.append(part)
        return events

    def _content_part(self, kind: str) -> dict[str, Any]:
        if kind == "reasoning":
            return {"type": "reasoning_text", "text": self._text}
        logprobs = [*self._logprobs]
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": logprobs}

    def _close_item(self) -> list[dict[str, Any]]:
        """Complete the last item, and return its events."""
        if not self._is_item_open:
            return []
        self._is_item_open = False
        item, text = self._items[-1], self._text
        kind = item["type"]
        item["status"] = "incomplete" if self._finish_reason == "length" else "completed"
        if kind == "custom_tool_call":
            item["input"] = text = custom_input(text)
            events = [self._item_event(".delta", delta=text), self._item_event(".done", input=text)]
        elif kind == "function_call":
            item["arguments"] = text
            events = [self._item_event(".done", arguments=text, name=item["name"])]
        else:
            if kind == "message":  # the last tokens may have no text, such as an end token
                self._logprobs += self._next_logprobs
            part = self._content_part(kind)
            item["content"] = [part]
            if kind == "reasoning" and _INCLUDED_MEMBERS[1] in (self.body.get("include") or ()):
                item["encrypted_content"] = _PLAIN_PREFIX + text
            extra = {"logprobs": part["logprobs"]} if kind == "message" else {}
            events = [
                self._item_event(".done", text=text, **extra),
                self._item_event("response.content_part.done", part=part),
            ]
        _store_item(item, text)
        index = len(self._items) - 1
        return [*events, self._event("response.output_item.done", output_index=index, item=item)]

    def _item_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Return an event of the last item.

        A `kind` that begins with "." is appended to the event prefix of the item's type.
        """
        item = self._items[-1]
        kind = _ITEM_TYPES[item["type"]][1] + kind if kind.startswith(".") else kind
        location: dict[str, Any] = {"item_id": item["id"], "output_index": len(self._items) - 1}
        if "content" in item:
            location["content_index"] = 0
        return self._event(kind, **location, **fields)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._event_count += 1
        return {"type": kind, "sequence_number": self._event_count - 1, **fields}

    def _start_events(self) -> list[dict[str, Any]]:
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=self._object("in_progress")) for kind in kinds]

    def whole_response(self) -> dict[str, Any]:
        """Return the response to a request that does not stream."""
        self._close_item()
        return self._object("incomplete" if self._finish_reason == "length" else "completed")

    def encode_frames(self, results: list[list[list[dict[str, Any]]]]) -> list[bytes]:
        """Return events as server-sent events."""
        return [_encode_event(event) for parts in results for events in parts for event in events]

    def encode_end(self, shows_usage: bool) -> list[bytes]:
        """Return the last events of a stream."""
        events = [] if self._event_count else self._start_events()
        events += self._close_item()
        response = self.whole_response()
        last_event = self._event(f"response.{response['status']}", response=response)
        return self.encode_frames([[[*events, last_event]]])

    def encode_failure(self, error: ShmserveError) -> list[bytes]:
        """Return the last events of a stream that fails."""
        fault = orjson.loads(response_error(error))["error"]
        code = fault["code"] or "server_error"
        details = {"code": code, "message": fault["message"], "param": fault["param"]}
        reason = {"code": code, "message": fault["message"]}
        failed_object = {**self._object("failed"), "error": reason}
        events = [
            self._event("error", **details),
            self._event("response.failed", response=failed_object),
        ]
        return self.encode_frames([[events]])

    def _object(self, status: str) -> dict[str, Any]:
        body = self.body
        repeated = {
            name: default if body.get(name) is None else body[name]
            for name, default in _REPEATED_MEMBERS.items()
        }
        usage = self._usage or {}
        prompt, completion_tokens = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
        counts = {
            "input_tokens": prompt,
            "input_tokens_details": {
                "cached_tokens": usage.get("cached_tokens", 0),
                "cache_write_tokens": 0,  # required by OpenAI's client
            },
            "output_tokens": completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.get("reasoning_tokens", 0)},
            "total_tokens": prompt + completion_tokens,
        }
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": incomplete,
            "model": body.get("model"),
            "output": [{**item} for item in self._items],
            "previous_response_id": None,
            "reasoning": _with_defaults(body.get("reasoning"), {"effort": None, "summary": None}),
            "service_tier": "default",
            "store": False,
            "text": _with_defaults(body.get("text"), {"format": {"type": "text"}}),
            "usage": counts if usage else None,
            **repeated,
        }


def _with_defaults(member: Any, defaults: dict[str, Any]) -> Any:
    """Return a member of a response with its defaults; `member` may be JSON, None or an object."""
    return member if type(member) is orjson.Fragment else {**defaults, **(member or {})}


# The prefixes of an item's id and of its events' types, and its further members, by its type.
_ITEM_TYPES: Mapping[str, tuple[str, str, dict[str, Any]]] = {
    "message": ("msg", "response.output_text", {"role": "assistant", "content": []}),
    "reasoning": ("rs", "response.reasoning_text", {"summary": [], "content": []}),
    "function_call": ("fc", "response.function_call_arguments", {"arguments": ""}),
    "custom_tool_call": ("ctc", "response.custom_tool_call_input", {"input": ""}),
}


def _encode_event(event: dict[str, Any]) -> bytes:
    return b"event: %b\n" % event["type"].encode() + SERVER_SENT_EVENTS.frame(orjson.dumps(event))
