"""POST /v1/completions and /v1/chat/completions: text of a model that generates it, as one JSON
object, or with "stream" as server-sent events, which "[DONE]" ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

import numpy as np
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
from shmserve.gateway.http.openai.answers import (
    CHAT,
    COMPLETION,
    Choices,
    Delta,
    Form,
    TooManyRequests,
    openai_error,
)
from shmserve.gateway.http.streaming.responses import ResponseQueue
from shmserve.gateway.inference.builder import build
from shmserve.gateway.inference.submit import error_of, log_failure
from shmserve.ipc.tensors.arrays import STORED, decode_bytes
from shmserve.ipc.tensors.inference import Inferred

_DONE = SERVER_SENT_EVENTS.frame(b"[DONE]")


async def completions(gateway: Gateway, request: HttpRequest) -> HttpResponse:
    """The continuations of prompts."""
    body = await bodies.read(gateway, request)
    return await _respond(gateway, request, await bodies.completion(gateway, body), COMPLETION)


async def chats(gateway: Gateway, request: HttpRequest) -> HttpResponse:
    """The next message of a chat."""
    body = await bodies.read(gateway, request)
    return await _respond(gateway, request, await bodies.chat(gateway, body), CHAT)


async def _respond(
    gateway: Gateway, request: HttpRequest, asked: bodies.Asked, form: Form
) -> HttpResponse:
    generation = _Generation(gateway, request, asked, form)
    try:
        await generation.begun()
        if not asked.stream:
            return json_response(await generation.whole())
    except BaseException as error:
        generation.close()
        if isinstance(error, QueueFull):
            raise TooManyRequests(error.message, error.retry_after_s) from None
        raise
    headers = b"Content-Type: %b\r\n" % SERVER_SENT_EVENTS.content_type + generation.headers
    response = ChunkedResponse(200, generation.events(), headers)
    response.on_sent = generation.close
    return response


class _Generation:
    """A request under way: the responses of the model to each of its prompts."""

    def __init__(
        self, gateway: Gateway, request: HttpRequest, asked: bodies.Asked, form: Form
    ) -> None:
        self._gateway = gateway
        self._asked = asked
        self._choices = Choices(form, asked.model.name, asked.samples)
        self._queues: list[ResponseQueue] = []
        self._news = asyncio.Event()
        arrived_ns = time.monotonic_ns()
        try:
            for infer_request in asked.requests():
                built, _ = build(gateway, asked.model, infer_request, b"", 0)
                queue = ResponseQueue(gateway, request, asked.model, built, arrived_ns, self._news)
                self._queues.append(queue)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Cancel what has not ended."""
        for queue in self._queues:
            queue.close()

    @property
    def headers(self) -> bytes:
        """Of its response, by its first prompt."""
        return self._queues[0].headers

    async def begun(self) -> None:
        """Until the model has responded to the first prompt. Raises the error that it did so
        with."""
        first = self._queues[0]
        await first.wait()
        error = error_of(first.first)
        if error is not None:
            asked = first.request
            log_failure(asked.model, asked.infer_request.id, error, asked.trace)
            raise error

    async def whole(self) -> dict[str, Any]:
        """All choices, once the last has ended."""
        async for _ in self._taken():
            pass
        return self._choices.whole()

    async def events(self) -> AsyncGenerator[list[bytes], None]:
        """The choices in chunks; those that are here are written together."""
        frame = SERVER_SENT_EVENTS.frame
        try:
            async for taken in self._taken():
                yield [frame(self._choices.chunk(choices)) for choices in taken]
        except ShmserveError as error:
            yield [frame(openai_error(error)), _DONE]
            return
        last = [frame(self._choices.last())] if self._asked.usage else []
        yield [*last, _DONE]

    async def _taken(self) -> AsyncGenerator[list[list[dict[str, Any]]], None]:
        """The choices of responses to whichever prompt, as they come: a model does not wait for who
        reads those of another prompt first."""
        left = dict(enumerate(self._queues))
        while left:
            while not any(queue.here for queue in left.values()):
                self._news.clear()
                await self._news.wait()
            taken: list[list[dict[str, Any]]] = []
            for prompt, queue in list(left.items()):
                while queue.here and prompt in left:
                    choices, ended = self._take(prompt, queue)
                    if choices:
                        taken.append(choices)
                    if ended:
                        del left[prompt]
            yield taken

    def _take(self, prompt: int, queue: ResponseQueue) -> tuple[list[dict[str, Any]], bool]:
        """Take a response that is here: the choices that it has, and whether it was the last.
        Raises the error that it is."""
        inferred = queue.request.outputs(queue.first)
        deltas = [] if inferred is None else self._deltas(inferred)
        choices = [self._choices.add(prompt, delta) for delta in deltas]
        return choices, queue.pop(inferred)

    def _deltas(self, inferred: Inferred) -> list[Delta]:
        found = {tensor.name: self._values(tensor) for tensor in inferred.outputs}
        texts = found[bodies.TEXT]
        reasons = found.get("finish_reason", [b""] * len(texts))
        logprobs = found.get("logprobs", [b""] * len(texts))
        usages = [*found.get("usage", []), *[b""] * len(texts)]
        indexes = found.get("index", range(len(texts)))
        loads = partial(map, lambda text: orjson.loads(text) if text else None)
        columns = (map(bytes.decode, reasons), loads(logprobs), loads(usages[: len(texts)]))
        return [
            Delta(int(index), text.decode(), *rest)
            for index, text, *rest in zip(indexes, texts, *columns, strict=True)
        ]

    def _values(self, tensor: Any) -> list[Any]:
        raw = tensor.data
        data = raw if isinstance(raw, bytes) else self._gateway.mappings.view(raw)
        if tensor.datatype == "BYTES":
            array = decode_bytes(data, tensor.shape, tensor.name, self._asked.model.name)
            return list(array.ravel())
        values: list[Any] = np.frombuffer(data, STORED[tensor.datatype]).tolist()
        return values
