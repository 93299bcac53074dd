"""POST /v1/completions and /v1/chat/completions: generated text, as choices.

The response is one JSON object or, with "stream", server-sent events that "[DONE]" ends.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from operator import itemgetter
from typing import Any, NamedTuple, Protocol, TypeVar

import orjson

from shmserve.errors import QueueFull, ShmserveError
from shmserve.gateway.context import Gateway
from shmserve.gateway.http.infer import ResponseQueue
from shmserve.gateway.http.json.large_bodies import Packed
from shmserve.gateway.http.messages import (
    SERVER_SENT_EVENTS,
    ChunkedResponse,
    HttpRequest,
    HttpResponse,
    json_response,
)
from shmserve.gateway.http.openai import bodies
from shmserve.gateway.http.openai.bodies import (
    TEXT_OUTPUT,
    TooManyRequests,
    encode_openai_error,
)
from shmserve.gateway.inference.inference import find_error, log_failure, output_bytes
from shmserve.gateway.inference.prepare import build_in_turns
from shmserve.ipc.tensors.inference import Inferred

T = TypeVar("T")

_LARGE_BYTES = 1 << 16  # bytes of a model's outputs; their conversion to JSON takes about 2 ms
_NO_STOP_REASON = (b"", b"null")  # outputs of a model that mean no stop reason
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

    sample: int  # the index of the sample among its prompt's samples
    text: str
    finish_reason: str = ""
    logprobs: dict[str, Any] | None = None
    usage: dict[str, Any] | None = None  # numbers of tokens
    extra_members: dict[str, Any] = {}  # noqa: RUF012 - never changed
    message: dict[str, Any] | None = None
    stop_reason: str | int | None = None


class ChoiceFormat(NamedTuple):
    """The format of completions or of chats: prefixes of ids, and names of objects."""

    prefix: str
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


def _format_prompt_logprobs(logprobs: list[dict[str, Any] | None]) -> list[dict[str, Any] | None]:
    """Return the log probabilities of a prompt in the format of vLLM."""
    formatted_logprobs: list[dict[str, Any] | None] = []
    for token in logprobs:
        if token is None:
            formatted_logprobs.append(None)
            continue
        ranked = [{**entry, "rank": rank} for rank, entry in enumerate(token["top_logprobs"], 1)]
        ranked_logprobs = {
            str(candidate["token_id"]): {
                "logprob": candidate["logprob"],
                "rank": candidate["rank"],
                "decoded_token": candidate["token"],
            }
            for candidate in (token, *ranked)
        }
        formatted_logprobs.append(ranked_logprobs)
    return formatted_logprobs


COMPLETION_FORMAT = ChoiceFormat("cmpl", "text_completion", "text_completion", is_chat=False)
CHAT_FORMAT = ChoiceFormat("chatcmpl", "chat.completion", "chat.completion.chunk", is_chat=True)


@dataclass(slots=True)
class _Sample:
    """The text of one sample received so far, with the further members of its choice."""

    text: str = ""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[dict[str, Any]] | None = None
    is_begun: bool = False
    # The log probabilities of the first part, or None once there are more parts.
    first_logprobs: dict[str, Any] | None = None
    extra_members: dict[str, Any] = field(default_factory=dict)
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    tokens: int = 0  # number of tokens, counted for `Choices.shows_running_usage`
    # Number of characters of the tokens in `logprobs`. `text` may have fewer characters, because
    # the beginning of a possible stop string is withheld.
    token_characters: int = 0

    def parts(self) -> dict[str, Any]:
        """Return the reasoning and the tool calls received so far."""
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
        parts = _reasoning_members(message.get("reasoning", ""))
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
        return {**parts, "tool_calls": calls} if calls else parts

    def _end_custom_calls(self, names: Collection[str], has_ended: bool) -> list[dict[str, Any]]:
        """Convert complete function calls of custom tools to custom calls, and return them.

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
        self._created = int(time.time())

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
                is_first=not sample.is_begun,
                is_chunk=True,
                is_last=bool(delta.finish_reason),
            ),
            "logprobs": self.format.logprobs(token_logprobs, sample.token_characters),
            "finish_reason": sample.finish_reason_of(delta.finish_reason),
        }
        if delta.finish_reason or not self.format.is_chat:
            choice["stop_reason"] = delta.stop_reason
        sample.finish_reason, sample.stop_reason = choice["finish_reason"], delta.stop_reason
        sample.first_logprobs = None if sample.is_begun else choice["logprobs"]
        if self.shows_running_usage:
            members = self._count_tokens(prompt_index, sample, delta)
            choice |= self._add_members(sample, members)
        elif delta.extra_members:
            choice |= self._add_members(sample, delta.extra_members)
        sample.is_begun = True
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
        omitted = () if self.shows_tokens else ("token_ids", "prompt_token_ids")
        prompt_tokens, new_tokens = self._prompt_sizes.get(prompt_index, 0), sample.tokens
        usage: dict[str, Any] = {"prompt_tokens": prompt_tokens, "completion_tokens": new_tokens}
        usage["total_tokens"] = prompt_tokens + new_tokens
        if (count := (delta.message or {}).get("reasoning_tokens")) is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": count}
        return {**{name: members[name] for name in members if name not in omitted}, "usage": usage}

    def _add_members(self, sample: _Sample, fields: dict[str, Any]) -> dict[str, Any]:
        """Store the `extra_members` of a delta, and return those for the choice in a chunk."""
        members = dict(fields)
        if self.format.is_chat:
            prompt = members.keys() & {"prompt_token_ids", "prompt_logprobs"}
            self._prompt_members |= {name: members.pop(name) for name in prompt}
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
                **self.format.content(sample.text, sample.parts()),
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
        return {"id": self._id, "object": name, "created": self._created, "model": self.model}


async def create_completion(gateway: Gateway, request: HttpRequest) -> HttpResponse:
    """Handle POST /v1/completions: respond with the continuations of prompts."""
    body = await bodies.read_body(gateway, request, ["prompt"])
    text_request = await bodies.parse_completion(gateway, body)
    choices = _create_choices(COMPLETION_FORMAT, text_request)
    return await respond(gateway, request, text_request, choices)


async def create_chat(gateway: Gateway, request: HttpRequest) -> HttpResponse:
    """Handle POST /v1/chat/completions: respond with the next message of a chat."""
    body = await bodies.read_body(gateway, request, ["messages"])
    text_request = await bodies.parse_chat(gateway, body)
    choices = _create_choices(CHAT_FORMAT, text_request, body.get("tools"))
    return await respond(gateway, request, text_request, choices)


def _create_choices(
    choice_format: ChoiceFormat, text_request: bodies.TextRequest, tools: Any = None
) -> Choices:
    shows_tokens = not text_request.shows_running_usage or bodies.returns_tokens(
        text_request.parameters
    )
    usage = text_request.shows_usage, text_request.shows_running_usage
    head = choice_format, text_request.name, text_request.sample_count
    return Choices(*head, *usage, shows_tokens, tools)


class Rendering(Protocol):
    """The format of a response to a request for text, complete or as a stream."""

    def add(self, prompt_index: int, delta: Delta) -> Any:
        """Add a part of a sample's text, and return a result for `encode_frames`."""

    def whole_response(self) -> dict[str, Any]:
        """Return the body of the response to a request that does not stream."""

    def encode_frames(self, results: list[list[Any]]) -> list[bytes]:
        """Return server-sent events, given a list of results of `add` for each response."""

    def encode_end(self, shows_usage: bool) -> list[bytes]:
        """Return the end of a stream, with the numbers of tokens if they are requested."""

    def encode_failure(self, error: ShmserveError) -> list[bytes]:
        """Return the end of a stream that fails."""


async def respond(
    gateway: Gateway, request: HttpRequest, text_request: bodies.TextRequest, rendering: Rendering
) -> HttpResponse:
    """Return the response with the text of a model, whole or as a stream."""
    generation = _Generation(gateway, request, text_request, rendering)
    try:
        await generation.start()
        if not text_request.stream:
            return await generation.whole_response()
    except BaseException as error:
        generation.close()
        if isinstance(error, QueueFull):
            raise TooManyRequests(error.message, error.retry_after_s) from None
        raise
    headers = SERVER_SENT_EVENTS.headers + generation.headers
    response = ChunkedResponse(200, generation.events(), headers)
    response.on_sent = generation.close
    return response


@dataclass(slots=True, eq=False)
class _Generation:
    """An in-flight request for text: the model's responses to each prompt."""

    _gateway: Gateway
    _request: HttpRequest
    _text_request: bodies.TextRequest
    _rendering: Rendering
    _queues: list[ResponseQueue] = field(init=False, default_factory=list)
    _response_event: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _has_logprobs: bool = field(init=False)
    # The total size of the responses with log probabilities that are not written yet.
    _byte_size: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        parameters = self._text_request.parameters
        self._has_logprobs = "logprobs" in parameters or "prompt_logprobs" in parameters

    def close(self) -> None:
        """Cancel the inference requests that have not ended."""
        for queue in self._queues:
            queue.close()

    @property
    def headers(self) -> bytes:
        """Return the headers of the response, from the first prompt's inference request."""
        return self._queues[0].headers

    async def start(self) -> None:
        """Submit the requests, and wait for the response to the first prompt.

        Raises:
            ShmserveError: The error in this response, or of a request.
        """
        gateway, model = self._gateway, self._text_request.model
        arrived_ns = time.monotonic_ns()
        for infer_request in self._text_request.infer_requests():
            built_request = await build_in_turns(gateway, model, infer_request)
            response_event = self._response_event
            queue = ResponseQueue(gateway, self._request, built_request, arrived_ns, response_event)
            self._queues.append(queue)
            if len(self._text_request.prompts) > 1:
                await asyncio.sleep(0)  # other requests are handled in between
        first_queue = self._queues[0]
        await first_queue.wait()
        # The errors of other prompts, if they have arrived, also determine the response's status.
        for queue in self._queues:
            error = find_error(queue.first_response) if queue is first_queue or queue else None
            if error is not None:
                log_failure(queue.inference.built_request, error)
                raise error

    async def whole_response(self) -> HttpResponse:
        """Return the whole response once the last text has ended."""
        async for _ in self._receive_parts():
            pass
        if not self._byte_size:
            return json_response(self._rendering.whole_response())
        render = self._rendering.whole_response
        return await _convert(self._byte_size, lambda: json_response(render()))

    async def events(self) -> AsyncGenerator[list[bytes], None]:
        """Yield server-sent events. Texts that have arrived are written together."""
        try:
            async for results in self._receive_parts():
                if self._byte_size:
                    encode = partial(self._rendering.encode_frames, results)
                    frames = await _convert(self._byte_size, encode)
                    self._byte_size = 0
                else:
                    frames = self._rendering.encode_frames(results)
                if frames:
                    yield frames
        except ShmserveError as error:
            yield self._rendering.encode_failure(error)
            return
        yield self._rendering.encode_end(self._text_request.shows_usage)

    async def _receive_parts(self) -> AsyncGenerator[list[list[Any]], None]:
        """Yield the parts of the stream for received responses to all prompts, in order of arrival.

        All queues are read, because the model stops for a prompt whose responses are not read.
        """
        unfinished_queues = dict(enumerate(self._queues))
        while unfinished_queues:
            while not any(unfinished_queues.values()):
                self._response_event.clear()
                await self._response_event.wait()
            results: list[list[Any]] = []
            for prompt_index, queue in list(unfinished_queues.items()):
                while queue and prompt_index in unfinished_queues:
                    inferred = queue.inference.unpack_outputs(queue.first_response)
                    if self._has_logprobs and inferred is not None:
                        sizes = (len(output_bytes(self._gateway, t)) for t in inferred.outputs)
                        byte_size = sum(sizes)
                        self._byte_size += byte_size
                        choices = await _convert(
                            byte_size, partial(self._add, prompt_index, inferred)
                        )
                    else:
                        choices = self._add(prompt_index, inferred)
                    if choices:
                        results.append(choices)
                    if queue.remove_first(inferred):
                        del unfinished_queues[prompt_index]
            yield results

    def _add(self, prompt_index: int, inferred: Inferred | None) -> list[Any]:
        deltas = [] if inferred is None else self._decode_deltas(inferred)
        return [self._rendering.add(prompt_index, delta) for delta in deltas]

    def _decode_deltas(self, inferred: Inferred) -> list[Delta]:
        model = self._text_request.model.name
        values = {t.name: bodies.decode_output(self._gateway, t, model) for t in inferred.outputs}
        texts = values[TEXT_OUTPUT]
        empty_column = [b""] * len(texts)
        columns = (
            values.get("index", range(len(texts))),
            texts,
            values.get("finish_reason", empty_column),
            values.get("logprobs", empty_column),
            [*values.get("usage", ()), *empty_column][: len(texts)],
            values.get("stop_reason", empty_column),
        )
        deltas = [
            Delta(
                int(index),
                text.decode(),
                reason.decode(),
                _parse_logprobs(logprobs) if logprobs else None,
                orjson.loads(usage) if usage else None,
                stop_reason=None if stop_reason in _NO_STOP_REASON else orjson.loads(stop_reason),
            )
            for index, text, reason, logprobs, usage, stop_reason in zip(*columns, strict=True)
        ]
        if self._text_request.detail_outputs:
            output_lists = {name: array.tolist() for name, array in values.items()}
            return list(self._with_members(deltas, output_lists))
        return deltas

    def _with_members(self, deltas: list[Delta], values: dict[str, list[Any]]) -> Iterator[Delta]:
        """Yield the deltas with members that few requests ask for.

        The members are tokens, the prompt's log probabilities, and messages.
        """
        tokens, prompt = values.get("token_ids"), values.get("prompt_token_ids")
        messages = values.get(bodies.MESSAGE_OUTPUT)
        sample_tokens = (deltas[0].usage or {}).get("samples") if len(deltas) > 1 else None
        for index, delta in enumerate(deltas):
            extra_members: dict[str, Any] = {}
            if tokens is not None:
                token_count = sample_tokens[index] if sample_tokens else len(tokens)
                extra_members["token_ids"], tokens = tokens[:token_count], tokens[token_count:]
            if prompt:
                extra_members["prompt_token_ids"] = prompt
            logprobs = delta.logprobs
            if logprobs is not None and "prompt" in logprobs:
                extra_members["prompt_logprobs"] = _format_prompt_logprobs(logprobs["prompt"])
            if not bodies.wants_logprobs(self._text_request.parameters):
                logprobs = None
            delta = delta._replace(logprobs=logprobs, extra_members=extra_members)
            if messages:
                message = orjson.loads(messages[index])
                delta = delta._replace(text=message.get("content", ""), message=message)
            yield delta


def _parse_logprobs(data: bytes) -> dict[str, Any]:
    """Return the member `logprobs` of a response, parsed from JSON.

    Many tokens are parsed line by line, because the parser holds the GIL.
    """
    members: dict[str, Any] = {}
    if len(data) < _LARGE_BYTES or not data.startswith(b'{"content":[\n'):
        members = orjson.loads(data)
        return members
    for line in data.split(b"\n"):
        if line.endswith(b"["):
            tokens = members[line.split(b'"')[1].decode()] = []
        elif line and not line.startswith(b"]"):
            tokens.append(orjson.loads(line.removesuffix(b",")))
    return members


async def _convert(byte_size: int, conversion: Callable[[], T]) -> T:
    """Call `conversion`, which converts `byte_size` bytes; use a thread for many bytes."""
    return await asyncio.to_thread(conversion) if byte_size > _LARGE_BYTES else conversion()
