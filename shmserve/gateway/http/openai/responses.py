"""POST /v1/responses: OpenAI's Responses API, over the same models as chats.

    POST /v1/responses                a response
    POST /v1/responses/input_tokens   the number of tokens of its prompt

No response is stored, so that each request contains its conversation. Items of recent responses may
be referred to by their ids, as long as this process stores them.
"""

from __future__ import annotations

import bisect
import itertools
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import orjson

from shmserve.errors import ShmserveError
from shmserve.gateway.context import Gateway
from shmserve.gateway.http.messages import (
    SERVER_SENT_EVENTS,
    HttpRequest,
    HttpResponse,
    json_response,
)
from shmserve.gateway.http.openai import bodies
from shmserve.gateway.http.openai.choices import Delta, custom_input
from shmserve.gateway.http.openai.generation import respond
from shmserve.gateway.http.openai.models import infer_once
from shmserve.gateway.http.openai.responses_request import (
    ENCRYPTED_MEMBER,
    PLAIN_PREFIX,
    namespace_functions,
    read_request,
    store_item,
    unpacked_tools,
    with_client_positions,
)

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


async def create_response(gateway: Gateway, request: HttpRequest) -> HttpResponse:
    """Handle POST /v1/responses: respond with messages, reasoning and function calls."""
    body, text_request = await read_request(gateway, request)
    shown_body = {**body, "model": text_request.name}
    with with_client_positions(body):
        return await respond(gateway, request, text_request, ResponseObject(shown_body))


async def count_input_tokens(gateway: Gateway, request: HttpRequest) -> HttpResponse:
    """Handle POST /v1/responses/input_tokens: respond with the number of tokens of the prompt."""
    body, text_request = await read_request(gateway, request)
    model, (prompt,) = text_request.model, text_request.prompts
    parameters = {"task": "tokenize", "add_special_tokens": False}
    with with_client_positions(body):
        outputs = await infer_once(gateway, request, model, prompt, ("token_ids",), parameters)
    count = len(outputs["token_ids"])
    return json_response({"object": "response.input_tokens", "input_tokens": count})


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
        self._creation_s = int(time.time())

    def add(self, prompt_index: int, delta: Delta) -> list[dict[str, Any]]:
        """Add a part of the generated text, and return the events of the stream for it."""
        message: dict[str, Any] = delta.message or {"content": delta.text}
        new_events = [] if self._event_count else self._start_events()
        self._next_logprobs += (delta.logprobs or {}).get("content", [])
        for part in message.get("parts", [message]):
            new_events += self._add_part(part)
        self._finish_reason = delta.finish_reason
        self._usage = delta.usage or self._usage
        return new_events

    def _add_part(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Add reasoning, content and calls in this order."""
        events: list[dict[str, Any]] = []
        calls = list(message.get("tool_calls", ()))
        while calls and "id" not in calls[0]:  # the rest of the last call, before other items begin
            item_type = self._items[-1]["type"]
            events += self._extend_item(item_type, calls.pop(0)["arguments"], {})
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
                default_item = "function_call", {"name": call["name"]}
                item_type, members = self._items_by_call.get(call["name"], default_item)
                head = {"call_id": call["id"], **members}
            else:
                item_type = self._items[-1]["type"]
            events += self._extend_item(item_type, call["arguments"], head)
        return events

    def _content_logprobs(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the log probabilities of the tokens of a message's content.

        The tokens of the message's reasoning and calls are omitted. The content begins at the start
        of a token, or after line breaks at the start of a token.
        """
        tokens, reasoning = self._next_logprobs, message.get("reasoning", "").encode()
        calls = message.get("tool_calls")
        follows_reasoning = self._is_item_open and self._items[-1]["type"] == "reasoning"
        if not (tokens and (reasoning or calls or follows_reasoning)):
            return tokens
        pieces = [bytes(token.get("bytes") or ()) for token in tokens]
        text_bytes, ends = b"".join(pieces), list(itertools.accumulate(map(len, pieces)))
        content_pattern = re.compile(b"\n*" + re.escape(message["content"].encode()))
        reasoning_end = text_bytes.find(reasoning) + len(reasoning)
        for index, start in enumerate([0, *ends[:-1]]):
            match = content_pattern.match(text_bytes, start) if start >= reasoning_end else None
            if match is not None:
                return tokens[index : bisect.bisect_left(ends, match.end()) + 1 if calls else None]
        return tokens

    @cached_property
    def _items_by_call(self) -> dict[str, tuple[str, dict[str, str]]]:
        """Return the type and first members of the output item for a call of a tool, by its name.

        The dict has only custom tools and functions in namespaces; other calls are function calls.
        """
        calls: dict[str, tuple[str, dict[str, str]]] = {}
        for tool in unpacked_tools(self.body.get("tools")) or []:
            if tool["type"] == "custom":
                calls.setdefault(tool["name"], ("custom_tool_call", {"name": tool["name"]}))
            elif tool["type"] == "namespace":
                prefix = f"{tool['name']}__"
                for name, _ in namespace_functions(tool, ""):
                    members = {"name": name.removeprefix(prefix), "namespace": tool["name"]}
                    calls.setdefault(name, ("function_call", members))
        return calls

    def _extend_item(
        self,
        item_type: str,
        text: str,
        fields: dict[str, Any],
        logprobs: list[dict[str, Any]] | None = None,
    ) -> list[dict[str, Any]]:
        """Add text to the last item if it has this type, or to a new item that has `fields`."""
        events: list[dict[str, Any]] = []
        if fields or not self._is_item_open or self._items[-1]["type"] != item_type:
            events += [*self._close_item(), *self._open_item(item_type, fields)]
        self._text += text
        logprobs_member = {} if logprobs is None else {"logprobs": logprobs}
        self._logprobs += logprobs or []
        if item_type == "custom_tool_call":  # its input is sent when the arguments are complete
            return events
        return [*events, self._item_event(".delta", delta=text, **logprobs_member)]

    def _open_item(self, item_type: str, first_members: dict[str, Any]) -> list[dict[str, Any]]:
        id_prefix, _, members = _ITEM_TYPES[item_type]
        item: dict[str, Any] = {"id": f"{id_prefix}_{secrets.token_hex(24)}", "type": item_type}
        item |= {"status": "in_progress", **first_members, **members}
        self._items.append(item)
        self._text, self._logprobs, self._is_item_open = "", [], True
        index = len(self._items) - 1
        events = [self._event("response.output_item.added", output_index=index, item={**item})]
        if "content" in item:
            part = self._content_part(item_type)
            events.append(self._item_event("response.content_part.added", part=part))
        return events

    def _content_part(self, item_type: str) -> dict[str, Any]:
        if item_type == "reasoning":
            return {"type": "reasoning_text", "text": self._text}
        logprobs = [*self._logprobs]
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": logprobs}

    def _complete_item(self, status: str) -> None:
        """Add the text and the status to the last item, if it is open."""
        if not self._is_item_open:
            return
        self._is_item_open = False
        item, text = self._items[-1], self._text
        item["status"] = status
        if item["type"] == "custom_tool_call":
            item["input"] = custom_input(text)
        elif item["type"] == "function_call":
            item["arguments"] = text
        else:
            if item["type"] == "message":  # the last tokens may have no text, such as an end token
                self._logprobs += self._next_logprobs
            elif ENCRYPTED_MEMBER in (self.body.get("include") or ()):
                item["encrypted_content"] = PLAIN_PREFIX + text
            item["content"] = [self._content_part(item["type"])]

    def _close_item(self) -> list[dict[str, Any]]:
        """Complete the last item, and return its events."""
        if not self._is_item_open:
            return []
        self._complete_item("incomplete" if self._finish_reason == "length" else "completed")
        item, text = self._items[-1], self._text
        if item["type"] == "custom_tool_call":
            text = item["input"]
            events = [self._item_event(".delta", delta=text), self._item_event(".done", input=text)]
        elif item["type"] == "function_call":
            events = [self._item_event(".done", arguments=text, name=item["name"])]
        else:
            (part,) = item["content"]
            logprobs_member = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
            events = [
                self._item_event(".done", text=text, **logprobs_member),
                self._item_event("response.content_part.done", part=part),
            ]
        store_item(item, text)
        index = len(self._items) - 1
        return [*events, self._event("response.output_item.done", output_index=index, item=item)]

    def _item_event(self, event_type: str, **fields: Any) -> dict[str, Any]:
        """Return an event of the last item.

        An event type that begins with "." is appended to the prefix of the item's type.
        """
        item = self._items[-1]
        if event_type.startswith("."):
            event_type = _ITEM_TYPES[item["type"]][1] + event_type
        location: dict[str, Any] = {"item_id": item["id"], "output_index": len(self._items) - 1}
        if "content" in item:
            location["content_index"] = 0
        return self._event(event_type, **location, **fields)

    def _event(self, event_type: str, **fields: Any) -> dict[str, Any]:
        self._event_count += 1
        return {"type": event_type, "sequence_number": self._event_count - 1, **fields}

    def _start_events(self) -> list[dict[str, Any]]:
        event_types = ("response.created", "response.in_progress")
        return [self._event(kind, response=self._object("in_progress")) for kind in event_types]

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
        """Return the last events of a stream that fails.

        Clients execute a call when its item is done, so the open item has no such event.
        """
        self._complete_item("incomplete")
        error_body = orjson.loads(response_error(error))["error"]
        code = error_body["code"] or "server_error"
        details = {"code": code, "message": error_body["message"], "param": error_body["param"]}
        error_object = {"code": code, "message": error_body["message"]}
        failed_object = {**self._object("failed"), "error": error_object}
        events = [
            self._event("error", **details),
            self._event("response.failed", response=failed_object),
        ]
        return self.encode_frames([[events]])

    def _object(self, status: str) -> dict[str, Any]:  # the API's object "response"
        body = self.body
        repeated_members = {
            name: default if body.get(name) is None else body[name]
            for name, default in _REPEATED_MEMBERS.items()
        }
        usage = self._usage or {}
        prompt_tokens = usage.get("prompt_tokens", 0)
        completion_tokens = usage.get("completion_tokens", 0)
        usage_object = {
            "input_tokens": prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.get("cached_tokens", 0),
                "cache_write_tokens": 0,  # required by OpenAI's client
            },
            "output_tokens": completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.get("reasoning_tokens", 0)},
            "total_tokens": prompt_tokens + completion_tokens,
        }
        incomplete_details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._creation_s,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": incomplete_details,
            "model": body.get("model"),
            "output": [{**item} for item in self._items],
            "previous_response_id": None,
            "reasoning": _with_defaults(body.get("reasoning"), {"effort": None, "summary": None}),
            "service_tier": "default",
            "store": False,
            "text": _with_defaults(body.get("text"), {"format": {"type": "text"}}),
            "usage": usage_object if usage else None,
            **repeated_members,
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
