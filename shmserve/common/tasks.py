"""Background tasks of asyncio: kept alive, their errors logged."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

logger = logging.getLogger(__name__)


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
