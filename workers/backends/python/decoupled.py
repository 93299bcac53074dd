"""One execution of a decoupled Python model, which outlasts its batch: what it sends, it sends by
itself."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from shmserve.errors import Internal
from shmserve.workers.backends import ModelContext, ResponseStream
from shmserve.workers.backends.python.execution import NOT_ITERATIVE, misbehaved
from shmserve.workers.backends.python.request import DecoupledRequest
from shmserve.workers.event_loop import EventLoopThread


class DecoupledExecution:
    """Calls `execute` of one decoupled model. Where that is a coroutine function, they run side by
    side in an event loop that has a thread of its own."""

    def __init__(self, context: ModelContext, model: Any) -> None:
        self._context = context
        self._model = model
        self._loop: EventLoopThread | None = None

    def execute(self, streams: list[ResponseStream]) -> None:
        """Raises what the model raises, Internal where it returns something."""
        for stream in streams:
            # Nobody knows when the model's threads have done with them.
            for item in stream.request.inputs.values():
                self._context.copied.inputs += item.detach()
        received = [DecoupledRequest(stream) for stream in streams]
        returned = self._model.execute(list(received))
        if asyncio.iscoroutine(returned):
            self._running_loop().run(returned, streams)
        elif returned is not None:
            where = self._context.instance_name
            raise misbehaved(
                where,
                f"Python model '{where}' is using the decoupled mode and the execute function must "
                "return None.",
            )
        for request, stream in zip(received, streams, strict=True):
            if request.is_rescheduled:
                stream.fail(Internal(NOT_ITERATIVE))

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """What a coroutine of the model returns or raises."""
        return self._running_loop().wait(coroutine)

    def close(self) -> None:
        """End the event loop."""
        if self._loop is not None:
            self._loop.close()

    def _running_loop(self) -> EventLoopThread:
        if self._loop is None:
            self._loop = EventLoopThread()
        return self._loop
