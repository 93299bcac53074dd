"""A streaming call, whose messages and responses are handled by a task."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

from shmserve.errors import ShmserveError
from shmserve.gateway.grpc.calls.call import HEADS, Carrier, GrpcCall
from shmserve.gateway.grpc.calls.headers import DONE, INTERNAL, CallHead, Ending, StatusCode
from shmserve.gateway.grpc.calls.messages import (
    PREFIX,
    Assembly,
    BrokenMessage,
    Received,
    Sinks,
    framed,
    release,
)
from shmserve.gateway.http2.outgoing import Stream

logger = logging.getLogger(__name__)


StreamHandler = Callable[["StreamingCall"], Coroutine[Any, Any, Ending | None]]

_TOGETHER = 64 * 1024  # bytes of small messages in one frame
_AHEAD = 256  # unread messages of a stream, since a small message uses more than its bytes


class StreamingCall(GrpcCall):
    """A call with any number of messages and responses.

    A task handles the call. A disconnect cancels the task.
    """

    awaited = False
    _unasked = 1 / 2  # Earlier messages may use the other half.
    __slots__ = ("_ahead", "_closed", "_consumed", "_news", "_queue", "_task", "_written")

    def __init__(
        self, connection: Carrier, stream: Stream, head: CallHead, sinks: Sinks | None = None
    ) -> None:
        super().__init__(connection, stream, head, sinks)
        self._queue: deque[Received] = deque()
        self._ahead = False  # Received data may contain more messages.
        self._closed = False  # The client has half-closed the stream.
        self._news: asyncio.Future[None] | None = None
        self._written: asyncio.Future[None] | None = None
        self._consumed = 0  # read bytes without a window update
        self._task: asyncio.Task[None] | None = None

    def run(self, handler: StreamHandler) -> None:
        """Start the handler, whose result is the status of the call."""
        self.on_gone = self._cancel
        self._task = asyncio.ensure_future(self._run(handler))

    async def _run(self, handler: StreamHandler) -> None:
        try:
            ending = await handler(self)
        except BrokenMessage as broken:
            ending = broken.ending
        except Exception:
            logger.exception("a stream failed")
            ending = INTERNAL
        if not self.done:
            code, details, metadata = ending or DONE
            if not self._begun and code is StatusCode.OK:
                self._begin()
            self.fail(code, details, metadata)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _end(self) -> None:
        super()._end()
        self._ahead = False
        while self._queue:
            release(self._queue.popleft().data)
        self._wake(self._news)
        self._wake(self._written)

    async def requests(self) -> AsyncIterator[Any]:
        """Yield the messages. The consumer releases them.

        Raises:
            BrokenMessage: The data is not a message.
        """
        while True:
            while not self._queue:
                if self._ahead:
                    self._cut_more()
                    continue
                if self._closed or self.done:
                    return
                self._grant()
                self._news = self._connection.loop.create_future()
                await self._news
                self._news = None
            message = self._queue.popleft()
            self._consumed += len(message.data) + PREFIX.size - message.extra
            self._grant()
            yield await self._inflated(message) if message.compressed else message.data

    def _grant(self) -> None:
        if self._consumed > self._connection.front.limits.window // 4:
            consumed, self._consumed = self._consumed, 0
            self._connection.http2.send_window_update(self._stream, consumed)
        if not self._queue and self._assembly is not None:
            self._enlarge_window(self._assembly)
        self._connection.flush()

    def _enlarge_window(self, assembly: Assembly) -> None:
        if not self._queue:  # Queued messages are read first.
            extra, assembly.extra = assembly.extra, 0
            self._connection.http2.send_window_update(self._stream, extra)

    def _is_ahead(self) -> bool:
        return len(self._queue) >= _AHEAD

    def _cut(self, assembly: Assembly, size: int) -> None:
        if not self._is_ahead():
            super()._cut(assembly, size)
        self._ahead = self._is_ahead()
        if self._ahead:
            assembly.keep_piece()

    def _cut_more(self) -> None:
        self._ahead = False
        if self._assembly is not None:
            try:
                self._cut(self._assembly, 0)
            except ShmserveError as error:  # out of memory
                raise BrokenMessage(StatusCode.UNAVAILABLE, error.message) from None

    def _received(self, message: Received) -> None:
        self._queue.append(message)
        self._wake(self._news)

    def _half_closed(self) -> None:
        self._closed = True
        self._wake(self._news)

    @staticmethod
    def _wake(waiting: asyncio.Future[None] | None) -> None:
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    def _begin(self) -> None:
        self._begun = True
        sending = self._connection.http2.sending
        sending.head(self._stream, HEADS[self._compression])

    async def write_all(self, responses: Sequence[bytes], stall_s: float | None = None) -> None:
        """Write responses, and wait until the windows permit the last one, or for a disconnect.

        Raises:
            TimeoutError: The client has not read the responses within `stall_s` seconds.
        """
        if self.done or not responses:
            return
        if not self._begun:
            self._begin()
        pieces: list[bytes] = []
        for response in responses:
            if self._compression is None:
                pieces += framed(response)
            else:
                pieces += await self._framed_in_turns(response)
        if self.done:
            return
        sending = self._connection.http2.sending
        if sum(map(len, pieces)) <= _TOGETHER:
            sending.data(self._stream, b"".join(pieces))
        else:
            for piece in pieces:
                sending.data(self._stream, piece)
        self._connection.flush()
        if not self._stream.queued:
            await asyncio.sleep(0)  # The responses are sent before the next ones are produced.
            return
        self._stream.on_progress = self._progress
        self._written = self._connection.loop.create_future()
        async with asyncio.timeout(stall_s):
            await self._written

    def _progress(self) -> None:
        if not self._stream.queued:
            self._wake(self._written)
