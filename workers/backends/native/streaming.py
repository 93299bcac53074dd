"""Generators as `predict`: each `yield` is a response, sent at once.

A generator runs in a thread of its own. Asynchronous generators share one event loop. Up to `most`
requests run concurrently; others wait in the scheduler's queue, and here if the last batch had too
many. When its client disconnects, a generator is closed at its next `yield` (GeneratorExit), and an
asynchronous one is cancelled. `shmserve.model.Context.cancelled` reports it before.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from shmserve.errors import Cancelled
from shmserve.model import IS_CANCELLED
from shmserve.workers.backends import Request, Response, ResponseStream
from shmserve.workers.device import inference_mode
from shmserve.workers.user_code import EventLoopThread

_CANCELLED = Cancelled("request cancelled")

Respond = Callable[[Request, Any], Response]


class GeneratorStreams:
    """The iterators that `predict` returns for one request each.

    `respond(request, yielded)` returns the response for a yielded value.
    """

    def __init__(self, predict: Callable[..., Any], respond: Respond, most: int) -> None:
        self._predict = predict
        self._respond = respond
        self._free_slots = most
        self._waiting: deque[tuple[ResponseStream, Mapping[str, Any]]] = deque()
        self._lock = threading.Lock()
        self._loop: EventLoopThread | None = None
        # One thread per stream that waits for credit, so that slow clients do not delay the
        # responses of others.
        self._senders = ThreadPoolExecutor(most, "send")

    def start(self, stream: ResponseStream, inputs: Mapping[str, Any]) -> None:
        """Start a request, or queue it while `most` requests run."""
        with self._lock:
            if not self._free_slots:
                self._waiting.append((stream, inputs))
                return
            self._free_slots -= 1
        self._begin(stream, inputs)

    def _begin(self, stream: ResponseStream, inputs: Mapping[str, Any]) -> None:
        """Start a request that has a free place."""
        try:
            with inference_mode(), _responding(stream):
                iterator = self._predict(**inputs)
            if isinstance(iterator, AsyncIterator):
                future = self._event_loop().run(
                    self._relay_async(iterator, stream), stream.fail_raised
                )
                stream.on_cancel(future.cancel)
                future.add_done_callback(lambda _: self._end(stream))
            else:
                threading.Thread(
                    target=self._serve, args=(iter(iterator), stream), name="stream", daemon=True
                ).start()
        except BaseException as error:  # SystemExit too: it must not end the worker
            stream.fail_raised(error)
            self._free_place()

    def _free_place(self) -> None:
        """Pass a free place to the next request in the queue."""
        with self._lock:
            if not self._waiting:
                self._free_slots += 1
                return
            stream, inputs = self._waiting.popleft()
        if stream.is_cancelled():
            self._end(stream)
        else:
            self._begin(stream, inputs)

    def wait(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the shared event loop, and return its result."""
        return self._event_loop().wait(coroutine)

    def _event_loop(self) -> EventLoopThread:
        if self._loop is None:
            self._loop = EventLoopThread(inference_mode)
        return self._loop

    def close(self) -> None:
        """End the event loop and the sending threads."""
        if self._loop is not None:
            self._loop.close()
        self._senders.shutdown(wait=False, cancel_futures=True)

    def _end(self, stream: ResponseStream) -> None:
        if stream.is_cancelled():
            stream.fail(_CANCELLED)  # ignored if the stream has ended
        self._free_place()

    def _serve(self, iterator: Iterator[Any], stream: ResponseStream) -> None:
        try:
            with inference_mode(), _responding(stream):
                self._relay(iterator, stream)
        except BaseException as error:  # SystemExit too: it must not end the worker
            stream.fail_raised(error)
        finally:
            self._end(stream)

    def _relay(self, iterator: Iterator[Any], stream: ResponseStream) -> None:
        try:
            for yielded in iterator:
                stream.send(self._respond(stream.request, yielded))
                if stream.is_cancelled():
                    return
        finally:
            close = getattr(iterator, "close", None)
            if close is not None:
                close()
        stream.send(final=True)

    async def _relay_async(self, iterator: AsyncIterator[Any], stream: ResponseStream) -> None:
        loop = asyncio.get_running_loop()
        with _responding(stream):  # in the context of this stream's task
            try:
                async for yielded in iterator:
                    response = self._respond(stream.request, yielded)
                    if stream.may_send:
                        stream.send(response)
                    else:
                        await loop.run_in_executor(self._senders, stream.send, response)
                    if stream.is_cancelled():
                        return
            finally:
                close = getattr(iterator, "aclose", None)
                if close is not None:
                    await close()
        stream.send(final=True)


@contextlib.contextmanager
def _responding(stream: ResponseStream) -> Iterator[None]:
    token = IS_CANCELLED.set(stream.is_cancelled)
    try:
        yield
    finally:
        IS_CANCELLED.reset(token)
