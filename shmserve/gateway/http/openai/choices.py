"""The choices in responses to /v1/completions and /v1/chat/completions.

The response is one JSON object or, with "stream", server-sent events that "[DONE]" ends.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property, partial
from operator import itemgetter
from typing import Any, NamedTuple

import orjson

from shmserve.errors import ShmserveError
from shmserve.gateway.http.json.large_bodies import Packed
from shmserve.gateway.http.messages import SERVER_SENT_EVENTS
from shmserve.gateway.http.openai.bodies import encode_openai_error

_DONE_EVENT = SERVER_SENT_EVENTS.frame(b"[DONE]")


class Delta(NamedTuple):
    """The part of a sample's text in one response of the model.

    Attributes:
        sample: The index of the sample among its prompt's samples.
        logprobs: The probabilities of the tokens, if they were requested.
        finish_reason: The reason why the sample ended, in its last part.
        usage: The numbers of tokens of the prompt and its samples, in the prompt's last response.
        extra_members: Further members of the choice, or of the response to a chat.
        message: The content, the reasoning and the tool calls of the text, if it was split.
        stop_reason: The stop string or the token that has ended the sample, in its last part.
    """

    sample: int
    text: str
    finish_reason: str = ""
    logprobs: dict[str, Any] | None = None
    usage: dict[str, Any] | None = None
    extra_members: dict[str, Any] = {}  # noqa: RUF012 - never changed
    message: dict[str, Any] | None = None
    stop_reason: str | int | None = None


class ChoiceFormat(NamedTuple):
    """The format of completions or of chats: prefixes of ids, and names of objects."""

    prefix: str  # of the ids
    object_name: str
    chunk_name: str
    is_chat: bool

    def content(
        self,
        text: str,
        members: dict[str, Any],
        is_first: bool = False,
        is_chunk: bool = False,
        is_last: bool = False,
    ) -> dict[str, Any]:
        """Return the content of a choice: the text, and its reasoning and calls (`members`)."""
        if not self.is_chat:
            return {"text": text}
        has_content = text or is_first or not (members or is_last)
        message: dict[str, Any] = {"content": text} if has_content else {}
        if is_first or not is_chunk:
            message = {"role": "assistant", **message}
        if members:
            message |= members if text or is_chunk else {"content": None, **members}
        return {"delta" if is_chunk else "message": message}

    def logprobs(
        self, tokens: list[dict[str, Any]] | None, text_offset: int
    ) -> dict[str, Any] | None:
        """Return the log probabilities of tokens; the first begins at character `text_offset`."""
        if tokens is None:
            return None
        if self.is_chat:
            return {"content": tokens, "refusal": None}
        text_offsets = []
        for token in tokens:
            text_offsets.append(token.get("text_offset", text_offset))
            text_offset += len(token["token"])
        return {
            "tokens": [token["token"] for token in tokens],
            "token_logprobs": [token["logprob"] for token in tokens],
            "top_logprobs": list(map(_likeliest_tokens, tokens)),
            "text_offset": text_offsets,
        }


def _likeliest_tokens(token: dict[str, Any]) -> dict[str, Any] | None:
    """Return the log probability of a token and of the likeliest tokens at its position, by text.

    Returns:
        None if the token has no `top_logprobs`.
    """
    if token["top_logprobs"] is None:
        return None
    logprob_by_token: dict[str, Any] = {}
    seen_tokens = set()
    for candidate in [*token["top_logprobs"], token]:
        text, token_key = candidate["token"], candidate.get("token_id", candidate["token"])
        # Different tokens have the same text if they are parts of characters in UTF-8.
        if text in logprob_by_token and token_key not in seen_tokens:
            text = bytes(candidate.get("bytes") or ()).decode(errors="backslashreplace")
        seen_tokens.add(token_key)
        logprob_by_token.setdefault(text, candidate["logprob"])
    return logprob_by_token


COMPLETION_FORMAT = ChoiceFormat("cmpl", "text_completion", "text_completion", is_chat=False)
CHAT_FORMAT = ChoiceFormat("chatcmpl", "chat.completion", "chat.completion.chunk", is_chat=True)


@dataclass(slots=True)
class _Sample:
    """The text of one sample received so far, with the further members of its choice."""

    text: str = ""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[dict[str, Any]] | None = None
    has_begun: bool = False
    # The log probabilities of the first part, or None once there are more parts.
    first_logprobs: dict[str, Any] | None = None
    extra_members: dict[str, Any] = field(default_factory=dict)
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    tokens: int = 0  # number of tokens, counted for `Choices.shows_running_usage`
    # Number of characters of the tokens in `logprobs`. `text` may have fewer characters, because
    # the beginning of a possible stop string is withheld.
    token_characters: int = 0

    def message_members(self) -> dict[str, Any]:
        """Return the members of a message with the reasoning and the tool calls so far."""
        if not self.reasoning and not self.tool_calls:
            return {}
        calls = {"tool_calls": self.tool_calls} if self.tool_calls else {}
        return {**_reasoning_members(self.reasoning), **calls}

    def add(
        self, message: dict[str, Any], custom_names: Collection[str], has_ended: bool
    ) -> dict[str, Any]:
        """Add reasoning and tool calls, and return the members of a chunk with them.

        Args:
            message: The part of the message in one response of the model.
            custom_names: The names of custom tools.
            has_ended: Whether the sample has ended.
        """
        members = _reasoning_members(message.get("reasoning", ""))
        self.reasoning += message.get("reasoning", "")
        calls: list[dict[str, Any]] = []
        for call in message.get("tool_calls", ()):
            index, function = call["index"], {"arguments": call["arguments"]}
            head: dict[str, Any] = {}
            if "id" in call:
                head = {"id": call["id"], "type": "function"}
                function = {"name": call["name"], **function}
                self.tool_calls.append({**head, "function": {**function}})
            else:
                self.tool_calls[index]["function"]["arguments"] += call["arguments"]
            if self.tool_calls[index]["function"]["name"] not in custom_names:
                calls.append({"index": index, **head, "function": function})
        if custom_names:
            calls = sorted(
                [*calls, *self._end_custom_calls(custom_names, has_ended)], key=itemgetter("index")
            )
        return {**members, "tool_calls": calls} if calls else members

    def _end_custom_calls(self, names: Collection[str], has_ended: bool) -> list[dict[str, Any]]:
        """Convert complete function calls of custom tools (`names`) to custom calls; return these.

        The last call is complete once the sample has ended, and any other call once the next call
        has begun.
        """
        ended_calls = []
        for index, call in enumerate(self.tool_calls if has_ended else self.tool_calls[:-1]):
            function = call.get("function", {})
            if function.get("name") in names:
                custom = {"name": function["name"], "input": custom_input(function["arguments"])}
                self.tool_calls[index] = {"id": call["id"], "type": "custom", "custom": custom}
                ended_calls.append({"index": index, **self.tool_calls[index]})
        return ended_calls

    def finish_reason_of(self, reason: str) -> str | None:
        """Return the finish reason for the client: the model's, or "tool_calls" in place of "stop".

        The result is None if the sample has not ended.
        """
        return "tool_calls" if self.tool_calls and reason == "stop" else reason or None


def custom_input(arguments: str) -> str:
    """Return the `input` text in the arguments of a custom tool's call, or all arguments."""
    try:
        text = orjson.loads(arguments)["input"]
    except (ValueError, LookupError, TypeError):
        return arguments
    return text if type(text) is str else arguments


def _reasoning_members(text: str) -> dict[str, Any]:
    """Return reasoning under both member names that clients use."""
    return {"reasoning_content": text, "reasoning": text} if text else {}


@dataclass(eq=False)
class Choices:
    """The choices of one request, with `sample_count` choices for each prompt.

    Attributes:
        format: The format of completions or of chats.
        model: The name of the model in the response.
        shows_usage: Whether chunks have the member `usage`, which is null.
        shows_running_usage: Whether `usage` has the number of tokens of the sample so far instead.
        shows_tokens: Whether the client receives the ids of tokens.
        tools: The tools of the request, which may be `Packed`.
    """

    format: ChoiceFormat
    model: str
    sample_count: int
    shows_usage: bool = False
    shows_running_usage: bool = False
    shows_tokens: bool = True
    tools: Any = None
    _samples: dict[int, _Sample] = field(default_factory=dict)
    _prompt_members: dict[str, Any] = field(default_factory=dict)  # members of a chat's response
    # Tokens of each prompt, if they are counted.
    _prompt_sizes: dict[int, int] = field(default_factory=dict)
    _usage: dict[str, int] = field(default_factory=partial(dict, prompt=0, new=0, cached=0))
    _reasoning_tokens: int | None = None  # number of tokens of reasoning

    def __post_init__(self) -> None:
        self._id = f"{self.format.prefix}-{os.urandom(16).hex()}"
        self._creation_s = int(time.time())

    @cached_property
    def _custom_names(self) -> list[str]:
        tools = self.tools.value() if type(self.tools) is Packed else self.tools or []
        return [tool["custom"]["name"] for tool in tools if tool.get("type") == "custom"]

    def add(self, prompt_index: int, delta: Delta) -> dict[str, Any]:
        """Add a part of a sample's text, and return the choice for a chunk of the stream."""
        index = prompt_index * self.sample_count + delta.sample
        sample = self._samples.setdefault(index, _Sample())
        token_logprobs = None if delta.logprobs is None else delta.logprobs.get("content", [])
        extra_members: dict[str, Any] = {}
        if delta.message is not None:
            has_ended = bool(delta.finish_reason)
            extra_members = sample.add(delta.message, self._custom_names, has_ended)
        choice = {
            "index": index,
            **self.format.content(
                delta.text,
                extra_members,
                is_first=not sample.has_begun,
                is_chunk=True,
                is_last=bool(delta.finish_reason),
            ),
            "logprobs": self.format.logprobs(token_logprobs, sample.token_characters),
            "finish_reason": sample.finish_reason_of(delta.finish_reason),
        }
        if delta.finish_reason or not self.format.is_chat:
            choice["stop_reason"] = delta.stop_reason
        sample.finish_reason, sample.stop_reason = choice["finish_reason"], delta.stop_reason
        sample.first_logprobs = None if sample.has_begun else choice["logprobs"]
        if self.shows_running_usage:
            members = self._count_tokens(prompt_index, sample, delta)
            choice |= self._add_members(sample, members)
        elif delta.extra_members:
            choice |= self._add_members(sample, delta.extra_members)
        sample.has_begun = True
        sample.text += delta.text
        if token_logprobs is not None:
            sample.logprobs = (sample.logprobs or []) + token_logprobs
            sample.token_characters += sum(len(token["token"]) for token in token_logprobs)
        if delta.usage is not None:
            self._count_usage(delta.usage)
        return choice

    def _count_tokens(self, prompt_index: int, sample: _Sample, delta: Delta) -> dict[str, Any]:
        """Count the tokens of a sample, and return the further members of its choice.

        `encode_chunk` moves the member `usage` from the choice to the chunk.
        """
        members = delta.extra_members
        sample.tokens += len(members.get("token_ids", ()))
        if "prompt_token_ids" in members:
            self._prompt_sizes[prompt_index] = len(members["prompt_token_ids"])
        omitted_members = () if self.shows_tokens else ("token_ids", "prompt_token_ids")
        prompt_tokens, new_tokens = self._prompt_sizes.get(prompt_index, 0), sample.tokens
        usage: dict[str, Any] = {"prompt_tokens": prompt_tokens, "completion_tokens": new_tokens}
        usage["total_tokens"] = prompt_tokens + new_tokens
        if (count := (delta.message or {}).get("reasoning_tokens")) is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": count}
        shown_members = {name: members[name] for name in members if name not in omitted_members}
        return {**shown_members, "usage": usage}

    def _add_members(self, sample: _Sample, fields: dict[str, Any]) -> dict[str, Any]:
        """Store the `extra_members` of a delta, and return those for the choice in a chunk."""
        members = dict(fields)
        if self.format.is_chat:
            prompt_names = members.keys() & {"prompt_token_ids", "prompt_logprobs"}
            self._prompt_members |= {name: members.pop(name) for name in prompt_names}
        tokens = sample.extra_members.get("token_ids", []) + members.get("token_ids", [])
        chunk_members = {**members, "token_ids": tokens} if "token_ids" in members else members
        sample.extra_members |= chunk_members
        return members

    def _count_usage(self, usage: dict[str, Any]) -> None:
        self._usage["prompt"] += usage["prompt_tokens"]
        self._usage["new"] += usage["completion_tokens"]
        self._usage["cached"] += usage.get("cached_tokens", 0)
        if "reasoning_tokens" in usage:
            self._reasoning_tokens = (self._reasoning_tokens or 0) + usage["reasoning_tokens"]

    def whole_response(self) -> dict[str, Any]:
        """Return the response to a request that does not stream."""
        choices = [
            {
                "index": index,
                **self.format.content(sample.text, sample.message_members()),
                "logprobs": sample.first_logprobs or self.format.logprobs(sample.logprobs, 0),
                "finish_reason": sample.finish_reason,
                "stop_reason": sample.stop_reason,
                **sample.extra_members,
            }
            for index, sample in sorted(self._samples.items())
        ]
        head = {**self._head(self.format.object_name), **self._prompt_members}
        return {**head, "choices": choices, "usage": self.usage()}

    def encode_frames(self, choice_lists: list[list[dict[str, Any]]]) -> list[bytes]:
        """Return a chunk of a stream for each list of choices."""
        return [SERVER_SENT_EVENTS.frame(self.encode_chunk(choices)) for choices in choice_lists]

    def encode_chunk(self, choices: Iterable[dict[str, Any]]) -> bytes:
        """Return a chunk of a stream as JSON."""
        head = {**self._head(self.format.chunk_name), **self._prompt_members}
        entries = list(choices)
        if self.shows_usage:
            head["usage"] = entries[0].pop("usage") if self.shows_running_usage else None
        self._prompt_members = {}
        return orjson.dumps({**head, "choices": entries})

    def encode_end(self, shows_usage: bool) -> list[bytes]:
        """Return the end of a stream, with the numbers of tokens if they are requested."""
        if not shows_usage:
            return [_DONE_EVENT]
        usage_chunk = {**self._head(self.format.chunk_name), "choices": [], "usage": self.usage()}
        return [SERVER_SENT_EVENTS.frame(orjson.dumps(usage_chunk)), _DONE_EVENT]

    def encode_failure(self, error: ShmserveError) -> list[bytes]:
        """Return the end of a stream that fails."""
        return [SERVER_SENT_EVENTS.frame(encode_openai_error(error)), _DONE_EVENT]

    def usage(self) -> dict[str, Any]:
        """Return the response's member `usage`: the numbers of tokens, over all prompts."""
        prompt_tokens, completion_tokens, cached_tokens = self._usage.values()
        reasoning_tokens = self._reasoning_tokens
        details = {} if reasoning_tokens is None else {"reasoning_tokens": reasoning_tokens}
        return {
            **({"completion_tokens_details": details} if details else {}),
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }

    def _head(self, name: str) -> dict[str, Any]:
        return {"id": self._id, "object": name, "created": self._creation_s, "model": self.model}
