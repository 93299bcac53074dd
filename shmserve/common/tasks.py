"""Background tasks of asyncio with logged errors; helpers for futures; threads that may block."""

from __future__ import annotations

import asyncio
import logging
import threading
from asyncio import Task
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
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
            logger.error("a cancelled task has failed: %s", outcome, exc_info=outcome)


def resolve_future(future: asyncio.Future[T] | None, result: T) -> None:
    """Set the result of a future unless it is None, done or cancelled."""
    if future is not None and not future.done():
        future.set_result(result)


async def wait_any(*futures: asyncio.Future[Any], timeout_s: float | None = None) -> None:
    """Wait until one of the futures is done or the timeout has expired."""
    await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


class DaemonThreadPool(ThreadPoolExecutor):
    """Threads for calls that may block forever, as on a file system that hangs.

    Such calls do not delay the end of the process. An idle thread exits.
    """

    def __init__(self, max_workers: int) -> None:
        super().__init__(max_workers)
        self._thread_count = 0
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._lock = threading.Lock()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Call a function in one of the threads, as soon as one is idle or can be started."""
        future: Future[T] = Future()
        with self._lock:
            if self._thread_count < self._max_workers:
                threading.Thread(target=self._run, daemon=True).start()
                self._thread_count += 1
            self._calls.append((future, partial(fn, *args, **kwargs)))
        return future

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._calls:
                    self._thread_count -= 1
                    return
                future, call = self._calls.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:  # the caller receives any exception
                    future.set_exception(error)
            del future, call
