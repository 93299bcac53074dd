"""The world as an event loop of asyncio: what coroutines wait for happens in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import time
from asyncio.events import _set_running_loop
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

from tests.simulation.world import SECOND, World


class SimulatedLoop(asyncio.AbstractEventLoop):
    """Each callback is an event of the world. What a callback raises goes to `complain`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.complain: Callable[[str], None]
        self._closed = False

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """While it is entered coroutines run in this loop, and the clock is the world's."""
        with patch.object(time, "monotonic", self.time):
            _set_running_loop(self)
            try:
                yield
            finally:
                self._closed = True
                for task in asyncio.all_tasks(self):
                    task.cancel()
                self._world.run(self._world.now_ns)  # they end
                _set_running_loop(None)

    # --- as asyncio has it

    def time(self) -> float:
        """Virtual seconds."""
        return self._world.now_ns / SECOND

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        """At this moment, after what is to happen then already."""
        handle = asyncio.Handle(callback, args, self, context)
        self._world.after(0, self._call, handle)
        return handle

    def call_later(
        self, delay: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        """In so many seconds."""
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        """At a time."""
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._world.after(max(0, round((when - self.time()) * SECOND)), self._call, handle)
        return handle

    def _call(self, handle: asyncio.Handle) -> None:
        if not handle.cancelled():
            handle._run()

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It is passed over when its time comes."""

    def create_future(self) -> asyncio.Future[Any]:
        """One of this loop."""
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, **how: Any) -> asyncio.Task[Any]:
        """One of this loop."""
        return asyncio.Task(coro, loop=self, **how)

    def get_debug(self) -> bool:
        """It is not watched."""
        return False

    def is_running(self) -> bool:
        """It always is."""
        return True

    def is_closed(self) -> bool:
        """It never is."""
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """A callback has raised something."""
        if not self._closed:
            self.complain(f"{context['message']}: {context.get('exception')!r}")
