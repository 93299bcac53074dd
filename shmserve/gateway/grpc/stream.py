"""ModelStreamInfer: requests and responses in one call, answered in the order of the requests.

A request that fails does not end the stream: its response carries the error. With the metadata
`triton_grpc_error: true` the first error ends the stream with its status instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from grpc._cython import cygrpc

from shmserve.errors import ShmserveError, Unavailable
from shmserve.gateway.client_identity import ClientIdentity
from shmserve.gateway.grpc.infer import Inferences, Refused, Submitted
from shmserve.gateway.grpc.wire.response import streamed, streamed_error
from shmserve.gateway.inference import malloc_trim

# The requests of one stream that wait for their turn to be answered may have so many bytes; those
# that come when they have as many are not read yet. Others that ask the same model wait behind
# them, too, and their answers occupy as much memory again or more. So small ones count as `_LEAST`
# bytes: no more than 1024 wait.
_MOST_WAITING = 32 * 1024 * 1024
_LEAST = _MOST_WAITING // 1024

_Item = Submitted | Refused


class _Room:
    """How much more may wait, in bytes; the last to take some of it may take too much."""

    def __init__(self, size: int) -> None:
        self._left = size
        self._more = asyncio.Event()

    async def take(self, size: int) -> None:
        """Wait until some is left, and take this; one at a time."""
        while self._left <= 0:
            self._more.clear()
            await self._more.wait()
        self._left -= size

    def give(self, size: int) -> None:
        """Give it back."""
        self._left += size
        self._more.set()


async def stream_infer(
    inferences: Inferences,
    client: ClientIdentity,
    requests: AsyncIterator[bytes],
    context: Any,
    patience_s: float,
) -> None:
    """Answer until the client has sent its last request, or is gone.

    Raises the first error in strict mode, and Unavailable when a response is not taken within
    `patience_s` seconds: others need the memory of those behind it.
    """
    strict = ("triton_grpc_error", "true") in (context.invocation_metadata() or ())
    # In the order of the requests, each with its size; None: the client sends no more.
    waiting: asyncio.Queue[tuple[_Item, int] | None] = asyncio.Queue()
    room = _Room(_MOST_WAITING)

    total = 0  # bytes
    # Until the call is over gRPC holds the response that is not taken, and what it has received of
    # further requests.
    context.add_done_callback(lambda _: malloc_trim.soon(total))

    async def read() -> None:
        nonlocal total
        try:
            async for raw in requests:
                size = max(len(raw), _LEAST)
                await room.take(size)
                try:
                    item: _Item = inferences.submit(raw, client, context.time_remaining())
                except Refused as refused:
                    item = refused.bare()
                waiting.put_nowait((item, size))
                total += len(raw)
                malloc_trim.soon(len(raw))
        finally:
            waiting.put_nowait(None)

    reader = asyncio.create_task(read())
    try:
        while (first := await waiting.get()) is not None:
            item, size = first
            try:
                response = await _response(item, strict=strict)
                total += len(response)
                async with asyncio.timeout(patience_s):
                    await context.write(response)
            except cygrpc.ExecuteBatchError:
                return  # the client is gone
            finally:
                if isinstance(item, Submitted):
                    item.leave()
            room.give(size)
    except TimeoutError:
        raise Unavailable("the responses are not read") from None
    finally:
        # Nothing is awaited before all is given up: a call may be cancelled twice.
        reader.cancel()
        while not waiting.empty():
            left = waiting.get_nowait()
            if left is not None and isinstance(left[0], Submitted):
                left[0].abandon()
        await asyncio.wait((reader,))


async def _response(item: Submitted | Refused, *, strict: bool) -> bytes:
    if isinstance(item, Refused):
        if strict:
            raise item.error
        return streamed_error(item.error.message, item.request_id)
    try:
        return streamed(await item.answer())
    except ShmserveError as error:
        if strict:
            raise
        return streamed_error(error.message, item.request_id, item.model_name)
