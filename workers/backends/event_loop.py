"""An event loop in a thread of its own, in which a decoupled model's coroutines run on after the
batch that began them has ended."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from shmserve.workers.backends import ResponseStream

T = TypeVar("T")

_LAST_S = 5.0


class EventLoopThread:
    """Runs until `close`; all within the context that `around` makes."""

    def __init__(
        self,
        around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self._around = around
        self._loop = asyncio.new_event_loop()
        self._running: set[Future[None]] = set()
        self._thread = threading.Thread(target=self._serve, name="model event loop", daemon=True)
        self._thread.start()

    def run(
        self, coroutine: Coroutine[Any, Any, Any], streams: Sequence[ResponseStream]
    ) -> Future[None]:
        """Begin a coroutine; what it raises ends those of its requests that have no end yet."""
        future = asyncio.run_coroutine_threadsafe(_watched(coroutine, streams), self._loop)
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return future

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine there, and wait for what it returns or raises."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def close(self) -> None:
        """Cancel what runs, and end the thread, if it ends in time."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_LAST_S)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            with self._around():
                self._loop.run_forever()
                tasks = asyncio.all_tasks(self._loop)
                for task in tasks:
                    task.cancel()
                self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        finally:
            self._loop.close()


async def _watched(coroutine: Coroutine[Any, Any, Any], streams: Sequence[ResponseStream]) -> None:
    try:
        await coroutine
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # SystemExit too: a model does not end its worker so
        explained = streams[0].explain(error)
        for stream in streams:
            stream.fail(explained)
