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
from shmserve.gateway import trim
from shmserve.gateway.callers import Caller
from shmserve.gateway.grpc.infer import Inferences, Refused, Submitted
from shmserve.gateway.grpc.responses import streamed, streamed_error

# Requests of one stream that wait for their turn to be answered; more are not read yet.
_MOST_WAITING = 1024

_Item = Submitted | Refused | None  # None: the client sends no more


async def stream_infer(
    inferences: Inferences,
    caller: Caller,
    requests: AsyncIterator[bytes],
    context: Any,
    patience_s: float,
) -> None:
    """Answer until the client has sent its last request, or is gone.

    Raises the first error in strict mode, and Unavailable when a response is not taken within
    `patience_s` seconds: others need the memory of those behind it.
    """
    strict = ("triton_grpc_error", "true") in (context.invocation_metadata() or ())
    waiting: asyncio.Queue[_Item] = asyncio.Queue()
    room = asyncio.Semaphore(_MOST_WAITING)

    total = 0  # bytes

    async def read() -> None:
        nonlocal total
        try:
            async for raw in requests:
                await room.acquire()
                try:
                    item: _Item = inferences.submit(raw, caller, context.time_remaining())
                except Refused as refused:
                    item = refused.bare()
                waiting.put_nowait(item)
                total += len(raw)
                trim.soon(len(raw))
        finally:
            waiting.put_nowait(None)

    reader = asyncio.create_task(read())
    try:
        while (item := await waiting.get()) is not None:
            response = await _response(item, strict=strict)
            try:
                async with asyncio.timeout(patience_s):
                    await context.write(response)
            except cygrpc.ExecuteBatchError:
                return  # the client is gone
            room.release()
    except TimeoutError:
        raise Unavailable("the responses are not read") from None
    finally:
        # Nothing is awaited before all is given up: a call may be cancelled twice.
        reader.cancel()
        while not waiting.empty():
            left = waiting.get_nowait()
            if isinstance(left, Submitted):
                left.abandon()
        trim.soon(total)
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
