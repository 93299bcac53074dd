"""Background tasks of asyncio, with references and logged errors; helpers for futures."""

from __future__ import annotations

import asyncio
import logging
from asyncio import Task
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


def in_background(coroutine: Coroutine[Any, Any, None], tasks: set[Task[None]]) -> Task[None]:
    """Run a coroutine as a task, which is in `tasks` until it ends; log its exception."""
    task = asyncio.get_running_loop().create_task(coroutine)
    tasks.add(task)

    def on_done(task: Task[None]) -> None:
        tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a background task failed: %r", task, exc_info=task.exception())

    task.add_done_callback(on_done)
    return task


async def collect(items: Iterable[T]) -> list[T]:
    """Return the items as a list, and let other tasks run after each item."""
    collected_items = []
    for item in items:
        collected_items.append(item)
        await asyncio.sleep(0)
    return collected_items


async def cancel_all(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks that have not completed, wait for them, and log the exceptions of all tasks."""
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, Exception):
            logger.error("a cancelled task failed", exc_info=outcome)


def resolve_future(future: asyncio.Future[T] | None, result: T) -> None:
    """Set the result of a future unless it is None, done or cancelled."""
    if future is not None and not future.done():
        future.set_result(result)


async def wait_any(*futures: asyncio.Future[Any], timeout_s: float | None = None) -> None:
    """Wait until one of the futures is done or the timeout has expired."""
    await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
