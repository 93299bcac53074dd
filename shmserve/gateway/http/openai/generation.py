"""POST /v1/completions and /v1/chat/completions, and the text that a model generates for them.

`respond` is also used by responses.py: a request for text is an inference request for each prompt.
The model's responses are decoded to deltas, which a `Rendering` formats for the client.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import orjson

from shmserve.errors import QueueFull, ShmserveError
from shmserve.gateway.context import Gateway
from shmserve.gateway.http.messages import (
    SERVER_SENT_EVENTS,
    ChunkedResponse,
    HttpRequest,
    HttpResponse,
    json_response,
)
from shmserve.gateway.http.openai import bodies
from shmserve.gateway.http.openai.bodies import TooManyRequests
from shmserve.gateway.http.openai.choices import (
    CHAT_FORMAT,
    COMPLETION_FORMAT,
    ChoiceFormat,
    Choices,
    Delta,
)
from shmserve.gateway.http.openai.model_names import TEXT_OUTPUT
from shmserve.gateway.http.response_queue import ResponseQueue
from shmserve.gateway.inference.in_flight import find_error, log_failure, output_bytes
from shmserve.gateway.inference.prepare import build_in_pieces
from shmserve.ipc.tensors.schemas import Inferred

T = TypeVar("T")

_LARGE_BYTES = 1 << 16  # bytes of a model's outputs; their conversion to JSON takes about 2 ms
_NO_STOP_REASON = (b"", b"null")  # outputs of a model that mean no stop reason


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
    shows_running_usage = text_request.shows_running_usage
    return Choices(
        choice_format,
        text_request.name,
        text_request.sample_count,
        shows_usage=text_request.shows_usage,
        shows_running_usage=shows_running_usage,
        # Running usage is counted by token ids, also if the client has not requested these.
        shows_tokens=not shows_running_usage or bodies.returns_tokens(text_request.parameters),
        tools=tools,
    )


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
            built_request = await build_in_pieces(gateway, model, infer_request)
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
                    try:
                        inferred = queue.inference.unpack_outputs(queue.first_response)
                    except ShmserveError:
                        if results:  # the client also receives the parts before the error
                            yield results
                        raise
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
        tokens, prompt_tokens = values.get("token_ids"), values.get("prompt_token_ids")
        messages = values.get(bodies.MESSAGE_OUTPUT)
        sample_tokens = (deltas[0].usage or {}).get("samples") if len(deltas) > 1 else None
        for index, delta in enumerate(deltas):
            extra_members: dict[str, Any] = {}
            if tokens is not None:
                token_count = sample_tokens[index] if sample_tokens else len(tokens)
                extra_members["token_ids"], tokens = tokens[:token_count], tokens[token_count:]
            if prompt_tokens:
                extra_members["prompt_token_ids"] = prompt_tokens
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


def _format_prompt_logprobs(logprobs: list[dict[str, Any] | None]) -> list[dict[str, Any] | None]:
    """Return the log probabilities of a prompt in the format of vLLM."""
    formatted_logprobs: list[dict[str, Any] | None] = []
    for token in logprobs:
        if token is None:
            formatted_logprobs.append(None)
            continue
        entries = [{**entry, "rank": rank} for rank, entry in enumerate(token["top_logprobs"], 1)]
        ranked_logprobs = {
            str(candidate["token_id"]): {
                "logprob": candidate["logprob"],
                "rank": candidate["rank"],
                "decoded_token": candidate["token"],
            }
            for candidate in (token, *entries)
        }
        formatted_logprobs.append(ranked_logprobs)
    return formatted_logprobs


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
