"""Background tasks of asyncio, kept alive, their errors logged; and futures."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


def in_background(
    coroutine: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]
) -> asyncio.Task[None]:
    """Run a coroutine; its task is among `tasks` until it ends, and what it raises is logged
    then."""
    task = asyncio.get_running_loop().create_task(coroutine)
    tasks.add(task)

    def ended(task: asyncio.Task[None]) -> None:
        tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("work in the background failed", exc_info=task.exception())

    task.add_done_callback(ended)
    return task


async def end_all(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait for their ends; what those raise that were not over is logged."""
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, Exception):
            logger.error("work that was to end failed", exc_info=outcome)


def settle(future: asyncio.Future[T] | None, result: T) -> None:
    """Give a future its result, unless there is none, or it is done or cancelled."""
    if future is not None and not future.done():
        future.set_result(result)


async def either(*futures: asyncio.Future[Any], timeout_s: float | None = None) -> None:
    """Wait until one of the futures is done, or the time is over."""
    await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
